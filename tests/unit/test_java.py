"""Java and jars are found on any machine; what was found is remembered."""

import os
import struct
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import pytest

from icestream import java
from icestream.java import (
    cache_folder,
    jars,
    java_home,
    pyspark_jars,
    quiet_java,
    write_atomically,
)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A cache of the test's own."""
    # What the developer's own cache holds must neither help nor be changed.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder()


def fake_java(home: Path, version: str) -> Path:
    """A Java that says its version."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    program.chmod(0o755)
    return home


def test_the_machines_own_java_is_taken_when_it_is_new_enough(tmp_path, monkeypatch):
    """U1: JAVA_HOME first."""
    home = fake_java(tmp_path / "jdk", "21.0.3")
    # This machine's Java is not for a test to choose; so in the tests that follow.
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert java_home() == home


def test_a_java_on_the_path_is_found_behind_its_link(tmp_path, monkeypatch):
    """U1: what is installed."""
    home = fake_java(tmp_path / "jdk", "17.0.1")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(home / "bin" / "java")
    # The path is looked at only when nothing is said.
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert java_home() == home


@pytest.mark.parametrize("version", ["11.0.2", "1.8.0_292"])
def test_a_java_that_is_too_old_is_passed_over(tmp_path, monkeypatch, cache, version):
    """U1: the packaged runtime serves, without the option that it does not know."""
    old = fake_java(tmp_path / "old", version)
    # Wherever a Java is looked for, there is the old one.
    monkeypatch.setenv("JAVA_HOME", str(old))
    monkeypatch.setenv("PATH", f"{old / 'bin'}:/usr/bin:/bin")
    home = java_home()
    assert home == cache / "java"
    script = (home / "bin" / "java").read_text()
    assert "--add-modules=jdk.incubator.vector" in script
    assert os.access(home / "bin" / "java", os.X_OK)


def test_a_module_that_java_warns_of_is_not_asked_for(tmp_path, cache):
    """U1, Mend f4: all else reaches Java as it was; several of them may be wrapped at once."""
    for name in ("one", "two words"):
        home = fake_java(tmp_path / name, "21")
        (home / "bin" / "java").write_text('#!/bin/sh\nfor each do echo "$each"; done\n')
        arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "-Dx=a b", "", "Main"]
        for _ in range(2):
            java_program = quiet_java(home) / "bin" / "java"
            said = subprocess.run([java_program, *arguments], capture_output=True, text=True)
            assert said.stdout.splitlines() == ["-Xmx1g", "-Dx=a b", "", "Main"]


def test_the_cache_lies_where_the_user_says(tmp_path, monkeypatch):
    """U1: XDG_CACHE_HOME, else ~/.cache."""
    # The variables are what is under test.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "icestream"
    # Without it, the home folder decides.
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "icestream"
    assert cache_folder().is_dir()


def test_a_file_is_replaced_as_a_whole(tmp_path):
    """U1: another process sees all of it or none."""
    path = tmp_path / "file"
    write_atomically(path, "one")
    write_atomically(path, "two")
    assert path.read_text() == "two"
    assert list(tmp_path.iterdir()) == [path]


class Registry:
    """Finds jars by making them, and counts how often it is asked."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.asked = 0

    def __call__(self, coordinates: Sequence[str], ivy_folder: Path) -> list[Path]:
        self.asked += 1
        paths = [self.folder / f"{coordinate.replace(':', '-')}.jar" for coordinate in coordinates]
        for path in paths:
            path.write_bytes(b"")
        return paths


@pytest.fixture
def registry(tmp_path, monkeypatch, cache) -> Registry:
    """What stands behind Ivy; the real one needs a network."""
    made = Registry(tmp_path)
    # Only the first start asks a registry, and this is to count how often.
    monkeypatch.setattr(java, "_resolve", made)
    return made


def test_jars_that_were_found_once_are_not_asked_for_again(registry, tmp_path):
    """U1: only the first start asks a registry, for each list of coordinates."""
    found = [tmp_path / "g-a-1.jar", tmp_path / "g-b-2.jar"]
    assert jars(["g:a:1", "g:b:2"]) == jars(["g:a:1", "g:b:2"]) == found
    assert registry.asked == 1
    assert jars(["g:a:1"]) == found[:1]
    assert registry.asked == 2


def test_jars_that_are_gone_are_found_again(registry):
    """U1: a cleaned cache heals itself."""
    (path,) = jars(["g:a:1"])
    path.unlink()
    assert jars(["g:a:1"]) == [path]
    assert path.exists()
    assert registry.asked == 2


def test_coordinates_become_one_entry_per_module():
    """U1: a module asked for only by classifier comes without its dependencies."""
    text = java._ivy_module(["g:a:1", "g:b:2:tests", "g:b:2:sources", "g:c:3", "g:c:3:tests"])
    root = ElementTree.fromstring(text)
    maven = "{http://ant.apache.org/ivy/maven}classifier"
    found = {
        (entry.get("name"), entry.get("rev"), entry.get("transitive")): [
            artifact.get(maven) for artifact in entry
        ]
        for entry in root.iter("dependency")
    }
    assert found == {
        ("a", "1", "true"): [None],
        ("b", "2", "false"): ["tests", "sources"],
        ("c", "3", "true"): [None, "tests"],
    }


def test_a_file_that_is_no_jar_is_asked_for_by_its_kind():
    """U1: such a module comes without dependencies."""
    root = ElementTree.fromstring(java._ivy_module(["g:node:2.1@zip"]))
    (entry,) = root.iter("dependency")
    (artifact,) = entry
    assert (entry.get("name"), entry.get("rev"), entry.get("transitive")) == (
        "node",
        "2.1",
        "false",
    )
    assert (artifact.get("type"), artifact.get("ext")) == ("zip", "zip")


def test_certificates_go_into_javas_key_store_format():
    """U1: Java from PyPI knows only public certificates; Python's own are brought along."""
    store = java._key_store([b"first", b"second!"])
    magic, version, count = struct.unpack_from(">III", store)
    assert (magic, version, count) == (0xFEEDFEED, 2, 2)
    assert store.endswith(struct.pack(">I", 7) + b"second!")
    assert b"X.509" in store


def test_pyspark_brings_jars_of_its_own():
    """U1: Ivy comes with pyspark."""
    (ivy,) = pyspark_jars("ivy-*.jar")
    assert ivy.exists()
    assert pyspark_jars("no-such-*.jar") == []
