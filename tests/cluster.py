"""A Spark standalone cluster on this machine, whose workers share no folder with anybody.

Each worker lives in a mount namespace of its own. There its own folder is what it is, and the
folders of the coordinator and of the other workers are empty: what they write, it cannot read.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import pyspark

from icestream.java import java_home, quiet_java
from icestream.samples.postgres import LOOPBACK, free_port
from tests.servers import wait_until

START_SECONDS_MAX = 120.0
CORES_EACH = 1
_SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
_DEPLOY = "org.apache.spark.deploy"
# An unprivileged user has mounts of its own only as the root of a namespace of users.
_OWN_MOUNTS = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--mount"]


class SparkCluster:
    """A master and its workers; `hidden` are folders that no worker sees."""

    def __init__(self, folder: Path, hidden: Sequence[Path] = ()):
        self._folder = folder
        self._hidden = list(hidden)
        self._port = free_port()
        self.master = f"spark://{LOOPBACK}:{self._port}"
        self._master: subprocess.Popen[bytes] | None = None
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._count = 0

    def __enter__(self) -> Self:
        arguments = ["master.Master", "--host", LOOPBACK, "--port", str(self._port)]
        self._master = self._start("master", [*arguments, "--webui-port", "0"])
        self._await("master", "I have been elected leader", 1)
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self._workers):
            self.kill_worker(number)
        if self._master is not None:
            _kill(self._master)

    def add_workers(self, count: int) -> list[int]:
        """Start workers, each with a core; returns their numbers once the master knows them."""
        names = [f"worker-{self._count + n}" for n in range(count)]
        for name in names:
            (self._folder / name).mkdir(parents=True)
        for name in names:
            # A folder that comes later cannot be hidden: all that begin together see none of these.
            others = [self._folder / other for other in names if other != name]
            hidden = [*self._hidden, *others, *self._folders_of_workers()]
            # Spark tries a slow task again on another host only: each worker has an address.
            arguments = ["worker.Worker", "--host", f"127.0.0.{2 + self._count}"]
            arguments += ["--webui-port", "0", "--cores", str(CORES_EACH), "--memory", "1g"]
            arguments += ["--work-dir", str(self._folder / name / "work"), self.master]
            self._workers[self._count] = self._start(name, arguments, hidden)
            self._count += 1
        self._await("master", "Registering worker", self._count)
        return list(range(self._count - count, self._count))

    def kill_worker(self, number: int) -> None:
        """Kill -9 of a worker, its executors and their Python processes."""
        _kill(self._workers.pop(number))

    @contextmanager
    def held_up(self, number: int) -> Iterator[int]:
        """The tasks of a worker stand still in the block; tells how many processes have them."""
        found = _python_of(self._workers[number].pid)
        for process in found:
            os.kill(process, signal.SIGSTOP)
        try:
            yield len(found)
        finally:
            for process in found:
                _send(process, signal.SIGCONT)

    def _folders_of_workers(self) -> list[Path]:
        return [self._folder / f"worker-{number}" for number in range(self._count)]

    def _start(
        self, name: str, arguments: Sequence[str], hidden: Sequence[Path] | None = None
    ) -> "subprocess.Popen[bytes]":
        command = [str(_SPARK_CLASS), f"{_DEPLOY}.{arguments[0]}", *arguments[1:]]
        folder = self._folder / name
        if hidden is not None:
            mounts = [f"mount -t tmpfs none '{each}'" for each in hidden]
            command = [*_OWN_MOUNTS, "sh", "-c", " && ".join([*mounts, 'exec "$0" "$@"']), *command]
        folder.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "JAVA_HOME": str(quiet_java(java_home())),
            "TMPDIR": str(folder),
            "SPARK_LOCAL_DIRS": str(folder),
            "SPARK_DAEMON_MEMORY": "256m",
            # The master's log tells which workers it knows.
            "SPARK_CONF_DIR": str(self._folder),
        }
        (self._folder / "log4j2.properties").write_text(_LOGGED)
        with open(self._folder / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, cwd=folder, env=environment, start_new_session=True
            )

    def _await(self, name: str, said: str, count: int) -> None:
        log = self._folder / f"{name}.log"
        wait_until(
            lambda: log.read_text(errors="replace").count(said) >= count,
            START_SECONDS_MAX,
            f"{said} {count}",
        )


_LOGGED = """\
rootLogger.level = info
rootLogger.appenderRef.out.ref = out
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d %p %c{1}: %m%n
"""


def _kill(process: "subprocess.Popen[bytes]") -> None:
    # Executors are in the session of their worker, Python's daemons lead groups of their own.
    for each in [*_descendants(process.pid), process.pid]:
        _send(each, signal.SIGKILL)
    process.wait()


def _send(pid: int, number: signal.Signals) -> None:
    """To a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _descendants(pid: int) -> list[int]:
    """All processes below one, the nearest first."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        children.setdefault(parent, []).append(int(status.parent.name))
    found, pending = [], [pid]
    while pending:
        below = children.get(pending.pop(0), [])
        found += below
        pending += below
    return found


def _python_of(pid: int) -> list[int]:
    found = []
    for each in _descendants(pid):
        command = Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")
        if any(b"preloaded" in part for part in command):
            found.append(each)
    return found
