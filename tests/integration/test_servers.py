"""The test servers and the proxy are what the other tests believe they are."""

import http.client
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow
import pytest
import requests
from confluent_kafka import Consumer, Producer, TopicPartition
from pyarrow.fs import FileSelector, S3FileSystem
from pyiceberg.catalog import load_catalog

from icestream.errors import TargetUnavailable
from tests import servers
from tests.proxy import Proxy, Request
from tests.servers import (
    LOOPBACK,
    PACKAGED_JAVA,
    KafkaBroker,
    OpenSearch,
    RestCatalog,
    S3Server,
    ServerFailed,
    answers,
    jars,
    wait_until,
)

SECONDS_MAX = 30.0
SCHEMA = {
    "type": "struct",
    "schema-id": 0,
    "fields": [{"id": 1, "name": "id", "required": True, "type": "long"}],
}


@pytest.fixture
def catalog(rest: RestCatalog) -> RestCatalog:
    """The catalog that all tests share; its warehouse is in the store."""
    return rest


@pytest.fixture
def proxy(catalog: RestCatalog) -> Iterator[Proxy]:
    with Proxy(catalog.uri) as proxy:
        yield proxy


@pytest.fixture
def table(catalog: RestCatalog, request: pytest.FixtureRequest) -> str:
    """The path of a table of this test's own."""
    return create_table(catalog.uri, request.node.name.partition("[")[0])


def create_table(uri: str, namespace: str) -> str:
    created = requests.post(f"{uri}/v1/namespaces", json={"namespace": [namespace]}, timeout=20)
    assert created.status_code == 200, created.text
    path = f"/v1/namespaces/{namespace}/tables"
    body: dict[str, Any] = {"name": "orders", "schema": SCHEMA}
    created = requests.post(f"{uri}{path}", json=body, timeout=20)
    assert created.status_code == 200, created.text
    return f"{path}/orders"


def commit(name: str, value: str, *, schema: int = 0) -> dict[str, Any]:
    return {
        "requirements": [{"type": "assert-current-schema-id", "current-schema-id": schema}],
        "updates": [{"action": "set-properties", "updates": {name: value}}],
    }


def set_property(url: str, name: str, value: str, *, schema: int = 0) -> requests.Response:
    return requests.post(url, json=commit(name, value, schema=schema), timeout=20)


def properties(url: str) -> dict[str, str]:
    answer = requests.get(url, timeout=20)
    assert answer.status_code == 200, answer.text
    found: dict[str, str] = answer.json()["metadata"]["properties"]
    return found


def refused(port: int) -> bool:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=5)
    try:
        connection.connect()
    except ConnectionRefusedError:
        return True
    finally:
        connection.close()
    return False


# The REST catalog


def test_a_commit_whose_requirement_does_not_hold_gets_409(
    catalog: RestCatalog, table: str
) -> None:
    assert set_property(catalog.uri + table, "color", "red").status_code == 200
    conflict = set_property(catalog.uri + table, "color", "blue", schema=99)
    assert conflict.status_code == 409
    assert conflict.json()["error"]["type"] == "CommitFailedException"
    assert properties(catalog.uri + table)["color"] == "red"


def test_commits_at_the_same_time_land_or_conflict_and_never_fail(
    catalog: RestCatalog, table: str
) -> None:
    names = [f"writer-{number}" for number in range(16)]
    with ThreadPoolExecutor(len(names)) as writers:
        answered = list(
            writers.map(lambda name: set_property(catalog.uri + table, name, "1"), names)
        )
    landed = {
        name for name, answer in zip(names, answered, strict=True) if answer.status_code == 200
    }
    assert {answer.status_code for answer in answered} <= {200, 409}
    assert landed and landed <= properties(catalog.uri + table).keys()


@pytest.mark.long(
    kept_by="tests/integration/test_kafka_client.py::"
    "test_a_broker_that_comes_back_in_time_is_not_noticed"
)
def test_a_restarted_catalog_keeps_its_port_and_its_tables(tmp_path: Path) -> None:
    with RestCatalog(tmp_path) as catalog:
        url = catalog.uri + create_table(catalog.uri, "kept")
        assert set_property(url, "color", "red").status_code == 200
        catalog.stop()
        assert refused(catalog.port)
        catalog.start()
        assert properties(url)["color"] == "red"
        catalog.stop()


def test_servers_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    program = (
        "import sys, threading; from pathlib import Path; from tests.servers import RestCatalog\n"
        "catalog = RestCatalog(Path(sys.argv[1])); catalog.start()\n"
        "print(catalog.port, flush=True); threading.Event().wait()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        port = int(owner.stdout.readline())
        assert answers(port, "/v1/config")
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: refused(port), SECONDS_MAX, "end of the orphaned server")


@pytest.mark.long(
    kept_by="tests/integration/test_search.py::test_a_node_that_is_away_for_a_while_gets_everything"
)
def test_an_opensearch_node_keeps_its_documents_and_dies_with_its_owner(tmp_path: Path) -> None:
    program = (
        "import sys, threading; from pathlib import Path; from tests.servers import OpenSearch\n"
        "node = OpenSearch(Path(sys.argv[1])); node.start(); print(node.port, flush=True)\n"
        "sys.stdin.readline(); node.stop(); node.start(); print(flush=True)\n"
        "threading.Event().wait()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    root = Path(__file__).parents[2]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=root, text=True, **pipes) as owner:
        assert owner.stdout is not None and owner.stdin is not None
        port = int(owner.stdout.readline())
        url = f"http://{LOOPBACK}:{port}/orders/_doc/1"
        assert requests.put(url, json={"id": 1}, timeout=60).status_code == 201
        owner.stdin.write("restart\n")
        owner.stdin.flush()
        owner.stdout.readline()
        assert requests.get(url, timeout=60).json()["_source"] == {"id": 1}
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: refused(port), SECONDS_MAX, "end of the orphaned node")


@pytest.mark.long(
    kept_by="tests/integration/test_kafka_client.py::"
    "test_a_broker_that_goes_away_stalls_the_partition_and_a_restart_mends_it"
)
@pytest.mark.parametrize("ending", [KafkaBroker.stop, KafkaBroker.kill])
def test_a_broker_keeps_its_port_and_its_records_however_it_ended(
    tmp_path: Path, ending: Callable[[KafkaBroker], None]
) -> None:
    with KafkaBroker(tmp_path) as broker:
        broker.create_topic("orders", partitions=2)
        produce(broker, "orders", [b"first", b"second"])
        ending(broker)
        assert refused(broker.port)
        broker.start()
        produce(broker, "orders", [b"third"])
        assert consumed(broker, "orders", 3) == [b"first", b"second", b"third"]


def test_a_broker_runs_on_the_packaged_java(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine without a Java of its own.
    monkeypatch.setenv("JAVA_HOME", str(PACKAGED_JAVA))
    with KafkaBroker(tmp_path) as broker:
        broker.create_topic("orders")
        produce(broker, "orders", [b"first"])
        assert consumed(broker, "orders", 1) == [b"first"]


@pytest.mark.long(
    kept_by="tests/integration/test_kafka_client.py::test_a_topic_created_anew_has_another_id"
)
def test_a_topic_is_widened_deleted_and_created_anew(broker: KafkaBroker) -> None:
    broker.create_topic("widened", config={"cleanup.policy": "compact"})
    broker.add_partitions("widened", 3)
    produce(broker, "widened", [b"old"])
    broker.delete_topic("widened")
    broker.create_topic("widened", partitions=2)
    produce(broker, "widened", [b"new"])
    assert consumed(broker, "widened", 1) == [b"new"]


@pytest.mark.long(kept_by="test_servers_die_with_the_process_that_started_them")
def test_a_broker_dies_with_its_owner(tmp_path: Path) -> None:
    program = (
        "import sys, threading; from pathlib import Path; from tests.servers import KafkaBroker\n"
        "broker = KafkaBroker(Path(sys.argv[1])); broker.start()\n"
        "print(broker.port, flush=True); threading.Event().wait()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        port = int(owner.stdout.readline())
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: refused(port), SECONDS_MAX, "end of the orphaned broker")


def produce(broker: KafkaBroker, topic: str, values: list[bytes]) -> None:
    """Write records to the topic's first partition, and wait until they are there."""
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    for value in values:
        producer.produce(topic, key=b"key", value=value, partition=0)
    assert producer.flush(SECONDS_MAX) == 0


def consumed(broker: KafkaBroker, topic: str, count: int) -> list[bytes | None]:
    """The first records of the topic's first partition."""
    settings = {"bootstrap.servers": broker.bootstrap_servers, "group.id": "reader"}
    consumer = Consumer(settings)
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        return [message.value() for message in consumer.consume(count, timeout=SECONDS_MAX)]
    finally:
        consumer.close()


def test_an_opensearch_node_that_cannot_start_shows_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A heap that no node can start with.
    monkeypatch.setattr(servers, "OPENSEARCH_OPTIONS", ("-Xmx1k",))
    with pytest.raises(ServerFailed, match="Too small maximum heap"):
        OpenSearch(tmp_path).start()


def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path, catalog: RestCatalog) -> None:
    rival = RestCatalog(tmp_path)
    rival.port = catalog.port
    with pytest.raises(ServerFailed, match="Address already in use"):
        rival.start()


def test_jars_that_do_not_exist_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A cache of the test's own: what others have found is not in it.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(TargetUnavailable) as refused:
        jars(["nobody:nothing:1.0"])
    assert "nobody:nothing:1.0" in str(refused.value)


# The S3 store


@pytest.mark.parametrize("through_proxy", [False, True], ids=["direct", "proxy"])
def test_objects_written_are_listed_and_read_back(store: S3Server, through_proxy: bool) -> None:
    with Proxy(store.endpoint) as proxy:
        files = S3FileSystem(**store.arrow_options(endpoint=proxy.url if through_proxy else None))
        folder = "lake/objects-proxied" if through_proxy else "lake/objects-direct"
        # The larger one goes up in parts.
        contents = {"small": b"few bytes", "a name/with + and =": b"", "large": bytes(12_000_000)}
        for name, content in contents.items():
            with files.open_output_stream(f"{folder}/{name}") as stream:
                stream.write(content)
        listed = files.get_file_info(FileSelector(folder, recursive=True))
        assert {info.path for info in listed if info.is_file} == {
            f"{folder}/{name}" for name in contents
        }
        for name, content in contents.items():
            with files.open_input_stream(f"{folder}/{name}") as stream:
                assert stream.read() == content
        assert bool(proxy.requests) == through_proxy
        if through_proxy:
            assert sum(seen.request_bytes for seen in proxy.requests) > 12_000_000


@pytest.mark.parametrize("through_proxy", [False, True], ids=["direct", "proxy"])
def test_a_wrong_secret_is_refused(store: S3Server, through_proxy: bool) -> None:
    with Proxy(store.endpoint) as proxy:
        options = store.arrow_options(endpoint=proxy.url if through_proxy else None)
        files = S3FileSystem(**{**options, "secret_key": "wrong"})
        with pytest.raises(OSError, match="SIGNATURE_DOES_NOT_MATCH"):
            files.get_file_info(FileSelector("lake"))


def test_a_refused_object_is_asked_for_again_by_the_client(store: S3Server) -> None:
    with Proxy(store.endpoint) as proxy:
        files = S3FileSystem(**store.arrow_options(endpoint=proxy.url))
        proxy.on("PUT", "/lake/retried", times=1).refuse(503)
        with files.open_output_stream("lake/retried") as stream:
            stream.write(b"content")
        assert [seen.status for seen in proxy.requests if seen.method == "PUT"] == [503, 200]


# Catalog and store together


@pytest.mark.long(
    kept_by="tests/faults/test_lost_answers.py::"
    "test_a_commit_whose_answer_is_wrong_or_lost_lands_exactly_once"
)
def test_rows_written_through_both_proxies_are_read_back(store: S3Server, tmp_path: Path) -> None:
    with Proxy(store.endpoint) as store_proxy:
        storage = store.iceberg_properties(endpoint=store_proxy.url)
        with (
            RestCatalog(tmp_path, warehouse="s3://lake/proxied", storage=storage) as catalog,
            Proxy(catalog.uri) as proxy,
        ):
            proxy.require_token("secret")
            client = load_catalog(
                "lake", **catalog.catalog_properties(uri=proxy.url), token="secret"
            )
            client.create_namespace("shop")
            rows = pyarrow.table({"id": pyarrow.array([1, 2, 3], pyarrow.int64())})
            table = client.create_table("shop.orders", rows.schema)
            table.append(rows)
            assert client.load_table("shop.orders").scan().to_arrow()["id"].to_pylist() == [1, 2, 3]
            assert proxy.count("POST", r"/tables/orders$") == 1
            # The catalog's own requests, signed by the AWS library for Java, took this way too.
            assert store_proxy.count("PUT", r"metadata\.json") == 2


# The proxy


def test_a_lost_answer_lands_the_commit(catalog: RestCatalog, proxy: Proxy, table: str) -> None:
    proxy.on("POST", r"/tables/orders$").lose_answer()
    with pytest.raises(requests.ConnectionError):
        set_property(proxy.url + table, "color", "red")
    assert properties(catalog.uri + table)["color"] == "red"
    assert [seen[:3] for seen in proxy.requests] == [("POST", table, None)]


def test_an_answer_turned_into_an_error_lands_the_commit(
    catalog: RestCatalog, proxy: Proxy, table: str
) -> None:
    proxy.on("POST", r"/tables/orders$").answer_500_after()
    proxy.on("POST", r"/tables/orders$").answer_500_after(504)
    answered = [set_property(proxy.url + table, "color", value) for value in ("red", "blue", "sky")]
    assert [answer.status_code for answer in answered] == [500, 504, 200]
    assert properties(catalog.uri + table)["color"] == "sky"


@pytest.mark.parametrize("status", [None, 403, 503])
def test_a_request_that_is_cut_or_refused_never_reaches_the_server(
    catalog: RestCatalog, proxy: Proxy, status: int | None
) -> None:
    table = create_table(catalog.uri, f"refused_{status}")
    rule = proxy.on("POST", r"/tables/orders$", times=2)
    if status is None:
        rule.cut_before()
        for _ in range(2):
            with pytest.raises(requests.ConnectionError):
                set_property(proxy.url + table, "color", "red")
    else:
        rule.refuse(status)
        for _ in range(2):
            assert set_property(proxy.url + table, "color", "red").status_code == status
    assert properties(proxy.url + table).get("color") is None
    assert set_property(proxy.url + table, "color", "blue").status_code == 200
    assert [seen.status for seen in proxy.requests] == [status, status, 200, 200]


def test_a_rival_commits_before_the_request_goes_on(
    catalog: RestCatalog, proxy: Proxy, table: str
) -> None:
    seen_by_rival: list[dict[str, str]] = []

    def rival() -> None:
        seen_by_rival.append(properties(proxy.url + table))
        assert set_property(proxy.url + table, "color", "rival").status_code == 200

    proxy.on("POST", r"/tables/orders$").call_before(rival)
    assert set_property(proxy.url + table, "color", "ours").status_code == 200
    assert "color" not in seen_by_rival[0]
    assert properties(catalog.uri + table)["color"] == "ours"
    assert proxy.count("POST", "orders") == 2


def test_an_error_of_a_callback_is_raised_when_the_proxy_closes(catalog: RestCatalog) -> None:
    def fail() -> None:
        raise OSError("rival failed")

    with pytest.raises(OSError, match="rival failed"), Proxy(catalog.uri) as proxy:
        proxy.on("GET").call_before(fail)
        with pytest.raises(requests.ConnectionError):
            requests.get(f"{proxy.url}/v1/config", timeout=20)


def test_a_stalled_request_reaches_the_server_after_its_client_has_gone(
    catalog: RestCatalog, proxy: Proxy, table: str
) -> None:
    release = threading.Event()
    rule = proxy.on("POST", r"/tables/orders$").stall(release)
    address = urlsplit(proxy.url).netloc
    body = json.dumps(commit("late", "1"))
    client = http.client.HTTPConnection(address, timeout=20)
    client.request("POST", table, body, {"Content-Type": "application/json"})
    assert rule.reached.wait(SECONDS_MAX)
    client.close()
    assert "late" not in properties(catalog.uri + table)
    release.set()
    wait_until(lambda: "late" in properties(catalog.uri + table), SECONDS_MAX, "late commit")


def test_a_stalled_answer_has_landed_already(
    catalog: RestCatalog, proxy: Proxy, table: str
) -> None:
    release = threading.Event()
    rule = proxy.on("POST", r"/tables/orders$").stall_after(release)
    with ThreadPoolExecutor(1) as writer:
        answer = writer.submit(set_property, proxy.url + table, "color", "red")
        assert rule.reached.wait(SECONDS_MAX)
        assert properties(catalog.uri + table)["color"] == "red"
        assert not answer.done()
        release.set()
        assert answer.result(SECONDS_MAX).status_code == 200


def test_a_stall_by_seconds_ends_by_itself(proxy: Proxy) -> None:
    proxy.on("GET").stall(0.3)
    answer = requests.get(f"{proxy.url}/v1/config", timeout=20)
    assert answer.status_code == 200 and answer.elapsed.total_seconds() >= 0.3


def test_a_proxy_that_is_down_refuses_cuts_and_comes_back(
    catalog: RestCatalog, proxy: Proxy, table: str
) -> None:
    stalled = proxy.on("POST", r"/tables/orders$").stall(threading.Event())
    with requests.Session() as kept, ThreadPoolExecutor(1) as writer:
        assert kept.get(f"{proxy.url}/v1/config", timeout=20).status_code == 200
        held = writer.submit(set_property, proxy.url + table, "color", "red")
        assert stalled.reached.wait(SECONDS_MAX)
        proxy.down()
        assert isinstance(held.exception(SECONDS_MAX), requests.ConnectionError)
        assert refused(proxy.port)
        with pytest.raises(requests.ConnectionError):
            kept.get(f"{proxy.url}/v1/config", timeout=20)
        proxy.up()
        assert kept.get(f"{proxy.url}/v1/config", timeout=20).status_code == 200
    assert "color" not in properties(catalog.uri + table)


def test_requests_without_the_token_get_401(proxy: Proxy) -> None:
    rule = proxy.require_token("secret")
    url = f"{proxy.url}/v1/config"

    def status(authorization: str | None) -> int:
        headers = {"Authorization": authorization} if authorization else {}
        return requests.get(url, headers=headers, timeout=20).status_code

    assert [status(None), status("Bearer wrong"), status("Bearer secret")] == [401, 401, 200]
    rule.remove()
    assert status(None) == 200


def test_rules_of_one_request_apply_in_order_up_to_the_deciding_one(proxy: Proxy) -> None:
    called: list[str] = []
    proxy.on("GET").call_before(lambda: called.append("first"))
    proxy.on("GET").refuse(418)
    proxy.on("GET", "elsewhere", times=None).refuse(404)
    proxy.on("GET").call_before(lambda: called.append("second"))
    url = f"{proxy.url}/v1/config"
    assert requests.get(url, timeout=20).status_code == 418
    assert called == ["first"]
    assert requests.get(url, timeout=20).status_code == 200
    assert called == ["first", "second"]


def test_requests_are_recorded_with_query_status_and_size(proxy: Proxy, table: str) -> None:
    with requests.Session() as session:
        session.get(f"{proxy.url}/v1/config?warehouse=x", timeout=20)
        session.head(f"{proxy.url}{table}", timeout=20)
        session.get(f"{proxy.url}{table}s", timeout=20)
        session.post(f"{proxy.url}{table}", data=b'{"requirements": [], "updates": []}', timeout=20)
    assert proxy.requests == [
        Request("GET", "/v1/config?warehouse=x", 200, 0),
        Request("HEAD", table, 204, 0),
        Request("GET", f"{table}s", 404, 0),
        Request("POST", table, 200, 35),
    ]
    proxy.clear()
    assert proxy.requests == []


def chunked_by_requests(url: str, body: bytes) -> int:
    pieces = (body[start : start + 1000] for start in range(0, len(body), 1000))
    return requests.post(url, data=pieces, timeout=20).status_code


def expecting_continue(url: str, body: bytes) -> int:
    """Send the head, wait for the interim answer as curl does, then send the body."""
    address = urlsplit(url)
    connection: Any = http.client.HTTPConnection(address.netloc, timeout=20)
    connection.putrequest("POST", address.path)
    connection.putheader("Content-Length", str(len(body)))
    connection.putheader("Expect", "100-continue")
    connection.endheaders()
    interim = connection.sock.recv(1000)
    assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.send(body)
    status: int = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize("send", [chunked_by_requests, expecting_continue])
def test_bodies_arrive_whole_however_they_are_sent(
    catalog: RestCatalog, proxy: Proxy, send: Callable[[str, bytes], int]
) -> None:
    table = create_table(catalog.uri, f"sent_by_{send.__name__}")
    # Past the size that the proxy keeps in memory.
    value = "v" * 1_500_000
    body = json.dumps(commit("large", value)).encode()
    assert send(proxy.url + table, body) == 200
    assert proxy.requests == [Request("POST", table, 200, len(body))]
    assert properties(proxy.url + table)["large"] == value
