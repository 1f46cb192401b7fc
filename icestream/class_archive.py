"""Java's classes as one file that a JVM maps into its memory, instead of reading them from jars.

Spark and Iceberg are some fifteen thousand classes. To find, check and link them took half of all
processor time until the first query (13 seconds without an archive, 6 with one, on two slow cores).
A JVM can write down what it has loaded when it ends, and the next one takes it from there. The
archive is for one Java and one list of jars: with others, or when it is broken, a JVM starts
without it. It can be thrown away at any time.
"""

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from icestream.errors import SparkFailed
from icestream.java import cache_folder, pyspark_jars

# Archives of former lists of jars stay for those who still use them: so many in all.
KEPT_MAX = 3
DUMP_SECONDS_MAX = 300.0
# What does not fit is no trouble: classes are then read from their jars.
_QUIET = ("-Xlog:disable", "-Xlog:all=off", "-Xlog:startuptime*=off")


class ClassArchive:
    """The archive of one Java and one list of jars; `jars` are those beside Spark's own."""

    def __init__(self, home: Path, jars: Sequence[Path]):
        self._home = home
        files = [*pyspark_jars("*.jar"), *jars]
        sizes = [f"{file} {file.stat().st_size}" for file in files]
        release = home / "release"
        java = release.read_text() if release.exists() else ""
        text = "\n".join([str(home), java, *sizes])
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.file = cache_folder() / f"classes-{key}.jsa"

    def options(self) -> list[str]:
        """What a JVM is started with to use the archive; nothing where there is none."""
        if not self.file.exists():
            return []
        return [f"-XX:SharedArchiveFile={self.file}", "-Xshare:auto", *_QUIET]

    def make(self, train: Callable[[list[str]], None]) -> None:
        """Make the archive of what a JVM loads that `train` starts with the options given.

        `train` returns when that JVM has ended. Raises `SparkFailed` when no archive came of it.
        """
        folder = self.file.parent
        with tempfile.TemporaryDirectory(dir=folder) as work:
            new = Path(work) / "classes.jsa"
            train([*self._javas_own(), f"-XX:ArchiveClassesAtExit={new}", *_QUIET])
            if not new.exists():
                raise SparkFailed(
                    "Java made no archive of its classes",
                    hint="Pipelines run without it; they start some seconds later.",
                )
            os.replace(new, self.file)
        for old in sorted(folder.glob("classes-*.jsa"), key=_age)[KEPT_MAX:]:
            old.unlink(missing_ok=True)

    def _javas_own(self) -> list[str]:
        """Java's own classes: most Javas bring their archive, a packaged one may not."""
        if list(self._home.glob("lib/**/classes.jsa")):
            return []
        key = hashlib.sha256(str(self._home).encode()).hexdigest()[:16]
        base = self.file.parent / f"java-{key}.jsa"
        if not base.exists():
            command = [str(self._home / "bin" / "java"), "-Xshare:dump", *_QUIET]
            subprocess.run(
                [*command, f"-XX:SharedArchiveFile={base}"],
                capture_output=True,
                timeout=DUMP_SECONDS_MAX,
                check=False,
            )
        return [f"-XX:SharedArchiveFile={base}"] if base.exists() else []


def _age(file: Path) -> float:
    return -file.stat().st_mtime
