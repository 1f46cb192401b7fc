"""The archive of Java's classes: for one Java and one list of jars, and never in the way."""

import subprocess
from pathlib import Path

import pytest

from icestream.class_archive import KEPT_MAX, ClassArchive
from icestream.errors import SparkFailed
from icestream.java import java_home, pyspark_jars


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for what is kept."""
    # The machine's own archive is not to be replaced.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache with blank"))
    return tmp_path


def java(options: list[str]) -> subprocess.CompletedProcess[str]:
    """A real Java that loads some classes of a jar."""
    command = [str(java_home() / "bin" / "java"), *options]
    command += ["-cp", str(pyspark_jars("ivy-*.jar")[0]), "org.apache.ivy.Main", "-version"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_java_starts_with_the_archive_that_it_made_and_with_a_broken_one(cache: Path):
    """U1, P3: an archive that does not fit is passed over without a word."""
    archive = ClassArchive(java_home(), [])
    assert archive.options() == []
    plain = java([])
    archive.make(java)
    # With `on` a Java that cannot use the archive would not start.
    used = [each.replace("-Xshare:auto", "-Xshare:on") for each in archive.options()]
    assert java(used).returncode == 0
    archive.file.chmod(0o600)
    archive.file.write_bytes(b"no archive")
    assert java(used).returncode != 0
    started = java(archive.options())
    assert (started.returncode, started.stdout) == (0, plain.stdout)
    assert started.stderr == plain.stderr


def test_other_jars_have_another_archive(cache: Path):
    """U1: a class is never taken from an archive of other jars."""
    jar = cache / "a.jar"
    jar.write_bytes(b"1")
    first = ClassArchive(java_home(), [jar]).file
    jar.write_bytes(b"22")
    others = {first, ClassArchive(java_home(), [jar]).file, ClassArchive(java_home(), []).file}
    assert len(others) == 3


def test_a_java_that_makes_no_archive_is_told(cache: Path):
    """U2: with what it means for pipelines."""
    archive = ClassArchive(java_home(), [])
    with pytest.raises(SparkFailed, match="made no archive"):
        archive.make(lambda options: None)
    assert list(archive.file.parent.glob("*.jsa")) == []


def test_archives_that_nobody_uses_do_not_pile_up(cache: Path):
    """U1: each is some hundred megabytes."""

    def train(options: list[str]) -> None:
        named = next(each for each in options if "ArchiveClassesAtExit" in each)
        Path(named.partition("=")[2]).write_bytes(b"classes")

    for number in range(KEPT_MAX + 2):
        jar = cache / f"{number}.jar"
        jar.write_bytes(b"1")
        newest = ClassArchive(java_home(), [jar])
        newest.make(train)
    kept = list(newest.file.parent.glob("classes-*.jsa"))
    assert len(kept) == KEPT_MAX
    assert newest.file in kept
