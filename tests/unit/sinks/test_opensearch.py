"""Bulk requests are built by columns, cut, and sent until each line is acknowledged."""

import json
import pickle
import shutil
import ssl
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.types import (
    BinaryType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestamptzType,
)

from icestream import patience
from icestream.change import AT, OP, Op
from icestream.errors import (
    Broken,
    ConfigInvalid,
    DataRejected,
    SchemaRejected,
    TargetUnavailable,
)
from icestream.schema import Column, TableShape
from icestream.sinks.opensearch import client
from icestream.sinks.opensearch.bulk import bulk_lines, cut, escaped, offsets
from icestream.sinks.opensearch.mapping import field_mapping, missing, narrower, properties
from icestream.sinks.opensearch.owners import Owner, owner_of, refuse_other
from icestream.sinks.opensearch.signing import (
    Credentials,
    Request,
    Scope,
    from_environment,
    signature,
)
from icestream.sinks.opensearch.sink import OpenSearchOptions, OpenSearchWriter
from tests.servers import LOOPBACK, free_port
from tests.stand_in import Said, StandIn, items, status, too_large

ODD_IDS = [
    'say "hi"',
    "back\\slash",
    "two\nlines",
    "tab\tnull\0bell\7",
    "größe 🐘 \u2028",
    "a/b?c#d",
]


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    """Pauses that nobody notices."""
    # Nobody needs to wait as long as a busy cluster does.
    monkeypatch.setattr(patience, "PAUSES_SECONDS", (0.001,) * 5)


def changes(ids, version=7, deletes=(), documents=None):
    """Changes of these ids; each document names its place."""
    ops = [Op.DELETE if id_ in deletes else Op.UPSERT for id_ in ids]
    made = documents or [json.dumps({"n": place}) for place in range(len(ids))]
    rows = [None if op == Op.DELETE else document for op, document in zip(ops, made, strict=True)]
    return pa.table(
        {
            OP: pa.array(ops, pa.int8()),
            AT: pa.array([version] * len(ids), pa.int64()),
            "id": pa.array(ids, pa.string()),
            "document": pa.array(rows, pa.string()),
        }
    )


def lines_of(table):
    (batch,) = table.cast(
        pa.schema(
            [(f.name, pa.large_string() if f.type == pa.string() else f.type) for f in table.schema]
        )
    ).to_batches()
    return bulk_lines(batch)


def writer(*hosts, **options):
    return OpenSearchWriter(
        options=OpenSearchOptions(hosts=hosts, **options), indices={"shop.orders": "orders"}
    )


def write(stand_in, table, **options):
    """Write to a stand-in; the one report."""
    (report,) = writer(stand_in.url, **options).write("shop.orders", "0", table)
    return {"table": report.table, "record_count": report.rows, **asdict(report.payload)}


# Lines


def test_each_change_is_an_action_with_its_version_and_its_document():
    """O12: the version is the sequence number, and equal ones are accepted again."""
    lines = lines_of(changes(["a", "b", None], version=42, deletes=["b"])).to_pylist()
    version = {"version": 42, "version_type": "external_gte"}
    assert [[json.loads(part) for part in line.splitlines()] for line in lines] == [
        [{"index": {"_id": "a", **version}}, {"n": 0}],
        [{"delete": {"_id": "b", **version}}],
        [{"index": {}}, {"n": 2}],
    ]
    assert all(line.endswith("\n") for line in lines)


@pytest.mark.parametrize("id_", ODD_IDS)
def test_ids_are_escaped_as_json_wants_them(id_):
    """O11: any text is an id, and no id ends a line."""
    (line,) = lines_of(changes([id_])).to_pylist()
    action, document = line.splitlines() if "\u2028" not in id_ else line.split("\n")[:2]
    assert json.loads(action)["index"]["_id"] == id_
    assert json.loads(document) == {"n": 0}


def test_ids_without_anything_to_escape_are_not_copied():
    """O11: the common case costs one look."""
    ids = pa.array(["a", "größe", None], pa.large_string())
    assert escaped(ids) is ids


@pytest.mark.parametrize(
    ("ids", "deletes", "documents"),
    [([None], [None], None), (["a"], [], [None])],
    ids=["a delete without an id", "an upsert without a document"],
)
def test_a_change_that_makes_no_operation_is_a_defect(ids, deletes, documents):
    """O12: nothing half-made is sent."""
    with pytest.raises(Broken):
        lines_of(changes(ids, deletes=deletes, documents=documents))


# Cutting


@pytest.mark.parametrize(
    ("bytes_max", "count_max", "expected"),
    [
        (100, 10, [(0, 5)]),
        (20, 10, [(0, 2), (2, 4), (4, 5)]),
        (29, 10, [(0, 2), (2, 4), (4, 5)]),
        (100, 2, [(0, 2), (2, 4), (4, 5)]),
        (3, 10, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]),
    ],
)
def test_requests_are_cut_between_lines_by_bytes_and_by_count(bytes_max, count_max, expected):
    """O11: bounded by bytes and count; a line beyond the bound goes alone."""
    ends = np.array([7, 17, 27, 37, 47, 57])
    assert list(cut(ends, bytes_max, count_max)) == expected


def test_nothing_is_cut_out_of_nothing():
    """O11: no lines, no requests."""
    assert list(cut(np.array([0]), 10, 10)) == []
    assert offsets(pa.array([], pa.large_string())).tolist() == [0]


def test_every_request_stays_within_its_bounds_and_all_lines_come_once_and_in_order():
    """O11: bulk_bytes_max and bulk_documents_max."""
    ids = [f"k{number}" for number in range(1000)]
    with StandIn() as stand_in:
        report = write(stand_in, changes(ids), bulk_bytes_max=9000, bulk_documents_max=90)
    assert [id_ for asked in stand_in.asked for id_ in asked.ids()] == ids
    assert all(len(asked.body) <= 9000 and len(asked.ids()) <= 90 for asked in stand_in.asked)
    assert stand_in.asked[0].path.startswith("/orders/_bulk?")
    assert report["indexed"] == report["record_count"] == 1000
    assert report["size_bytes"] == sum(len(asked.body) for asked in stand_in.asked)


def test_a_writer_travels_to_a_worker_and_says_what_it_needs():
    """E9: plain data."""
    shape = TableShape(columns=[Column(name="n", type=LongType())], key=["n"])
    told = replace(writer("http://one:9200", password="opensesame"), shapes={"shop.told": shape})
    copy = pickle.loads(pickle.dumps(told))
    assert (copy.schema_json("shop.orders"), copy.key("shop.orders")) == ("", ())
    assert '"n"' in copy.schema_json("shop.told")
    assert copy.key("shop.told") == ["n"]
    assert "opensesame" not in repr(copy)


def test_changes_in_many_pieces_and_in_none_are_one_report():
    """O12: one report for each call."""
    pieces = pa.concat_tables([changes(["a", "b"]), changes(["c"], deletes=["c"])])
    with StandIn() as stand_in:
        report = write(stand_in, pieces)
        assert (report["indexed"], report["deleted"]) == (2, 1)
        assert write(stand_in, pieces.slice(0, 0))["record_count"] == 0
        assert len(stand_in.asked) == 1


# Answers


def test_only_what_was_not_taken_is_sent_again():
    """O11: 429 for single items inside an answer that is otherwise good."""
    busy = items({"b": (429, "rejected"), "d": (503, "shard_down")})
    with StandIn([busy, items({"d": (429, "rejected")})]) as stand_in:
        report = write(stand_in, changes(list("abcd"), deletes="d"))
    assert [asked.ids() for asked in stand_in.asked] == [list("abcd"), ["b", "d"], ["d"]]
    assert (report["indexed"], report["deleted"], report["retries"]) == (3, 1, 2)


@pytest.mark.parametrize("trouble", [429, 502, 503, 504, None])
def test_a_request_that_is_not_taken_is_sent_again(trouble):
    """O11: 429 for the whole request, trouble on the way, an answer that is lost."""
    with StandIn([status(trouble), status(trouble)]) as stand_in:
        report = write(stand_in, changes(["a", "b"]))
    assert [asked.ids() for asked in stand_in.asked] == [["a", "b"]] * 3
    assert (report["indexed"], report["retries"]) == (2, 2)


@pytest.mark.parametrize("always", [status(429), items({"b": (429, "rejected")}), status(None)])
def test_a_cluster_that_stays_busy_is_unavailable(always):
    """O11: within a bound; the pipeline tries again later."""
    with StandIn(always=always) as stand_in, pytest.raises(TargetUnavailable):
        write(stand_in, changes(["a", "b"]))
    assert len(stand_in.asked) > 3


def test_a_body_that_is_too_large_is_split_until_it_fits():
    """O11: 413 never succeeds as it is."""
    with StandIn(always=too_large(400)) as stand_in:
        report = write(stand_in, changes([f"k{number}" for number in range(20)]))
    taken = [asked for asked in stand_in.asked if len(asked.body) <= 400]
    assert [id_ for asked in taken for id_ in asked.ids()] == [f"k{n}" for n in range(20)]
    assert (report["indexed"], report["retries"]) == (20, 0)


def test_an_operation_beyond_a_nodes_share_of_memory_is_split_too():
    """O11: a 429 that never succeeds says so by its sizes; any other is a matter of time."""
    text = "rejected execution of coordinating operation [all_bytes=0, "
    text += "coordinating_operation_bytes={}, max_coordinating_and_primary_bytes=100]"
    large, busy = (
        Said(429, json.dumps({"error": {"type": "rejected", "reason": text.format(n)}}).encode())
        for n in (101, 99)
    )
    with StandIn([lambda _: large, lambda _: busy, items({}), lambda _: large]) as stand_in:
        report = write(stand_in, changes(["a", "b"]), on_error="dead_letter")
    asked = [asked.ids() for asked in stand_in.asked]
    assert asked[:4] == [["a", "b"], ["a"], ["a"], ["b"]]
    assert (report["indexed"], report["dead_letters"], report["retries"]) == (1, 1, 1)


def test_a_document_that_is_too_large_by_itself_is_refused_alone():
    """E10: one document does not hold up the others."""
    big = json.dumps({"text": "x" * 3000})
    table = changes(["a", "big", "c"], documents=['{"n":1}', big, '{"n":2}'])
    with StandIn(always=too_large(2000)) as stand_in:
        with pytest.raises(DataRejected, match="index orders refuses document big"):
            write(stand_in, table)


@pytest.mark.parametrize("id_", ["x" * 513, "ü" * 257, ""], ids=["long", "wide", "empty"])
def test_an_id_that_would_spoil_its_request_is_not_sent(id_, caplog):
    """E10, Mend f4: a whole request would be refused for it; the log says what became of it."""
    with StandIn() as stand_in:
        with pytest.raises(DataRejected, match="illegal_id"):
            write(stand_in, changes(["a", id_, "c"]))
        report = write(stand_in, changes(["a", id_, "c"]), on_error="dead_letter")
    letters, documents = stand_in.asked
    assert caplog.messages == [
        "index orders refuses 1 documents, the first for illegal_id: the id is empty or longer than"
        " 512 bytes; they are kept in index orders__dead_letters: look there, and correct the "
        "mapping or the rows"
    ]
    assert documents.ids() == ["a", "c"]
    assert letters.path.startswith("/orders__dead_letters/_bulk")
    letter = letters.lines()[1]
    assert (letter["document_id"], letter["version"], letter["operation"]) == (id_, 7, "INDEX")
    assert (report["indexed"], report["dead_letters"]) == (2, 1)


def test_conflicts_are_counted_and_a_missing_document_is_as_good_as_deleted():
    """O12: an older version is superseded; 404 for a delete is no error."""
    answer = items({"a": (409, "version_conflict_engine_exception"), "b": (404, "")})
    with StandIn([answer]) as stand_in:
        report = write(stand_in, changes(["a", "b", "c"], deletes=["b"]))
    assert (report["indexed"], report["deleted"], report["superseded"]) == (1, 1, 1)
    assert len(stand_in.asked) == 1


def test_a_refusal_names_the_first_document_and_how_many_without_its_value(caplog):
    """E10, Mend f4: in the error and in the log, with what a person needs and no row value."""
    refusal = items({"b": (400, "mapper_parsing_exception"), "c": (400, "other")})

    def with_value(asked):
        said = refusal(asked)
        text = said.body.replace(
            b"mapper_parsing_exception by", b"field [n]. Preview of field's value: 'top secret' by"
        )
        return said._replace(body=text.replace(b"' by the stand-in", b"'"))

    with StandIn([with_value]) as stand_in, pytest.raises(DataRejected) as refused:
        write(stand_in, changes(["a", "b", "c"]))
    assert "document b, and 1 more" in refused.value.message
    assert "field [n]" in str(refused.value)
    assert "top secret" not in str(refused.value)
    assert "dead_letter" in str(refused.value.hint)
    with StandIn([with_value]) as stand_in:
        write(stand_in, changes(["a", "b", "c"]), on_error="dead_letter")
    (said,) = caplog.messages
    assert "refuses 2 documents" in said and "field [n]" in said
    assert "top secret" not in said


def test_dead_letters_are_sent_again_under_the_same_id():
    """E10: a replay finds its dead letter there."""
    refusal = items({"b": (400, "mapper_parsing_exception")})
    with StandIn([refusal, status(429), items({}), items({}), refusal]) as stand_in:
        for _ in range(2):
            report = write(stand_in, changes(["a", "b"]), on_error="dead_letter")
            assert (report["indexed"], report["dead_letters"]) == (1, 1)
    letters = [asked for asked in stand_in.asked if "dead_letters" in asked.path]
    assert len({tuple(asked.ids()) for asked in letters}) == 1
    assert all("create" in asked.lines()[0] for asked in letters)


def test_a_letter_is_kept_before_its_document_is_deleted_with_the_same_version():
    """E10, O12, Mend g2: nothing is in neither place; a newer document stays and is counted."""
    refusal = items({"b": (400, "mapper_parsing_exception"), "c": (400, "other")})
    newer = items({"c": (409, "version_conflict_engine_exception")})
    answers = [refusal, items({}), status(429), newer]
    with StandIn(answers) as stand_in:
        report = write(stand_in, changes(["a", "b", "c"]), on_error="dead_letter")
    paths = [asked.path.split("/")[1] for asked in stand_in.asked]
    assert paths == ["orders", "orders__dead_letters", "orders", "orders"]
    external = {"version": 7, "version_type": "external_gte"}
    assert stand_in.asked[-1].lines() == [
        {"delete": {"_id": "b", **external}},
        {"delete": {"_id": "c", **external}},
    ]
    counts = {"indexed": 1, "deleted": 0, "superseded": 1, "dead_letters": 2}
    assert {name: report[name] for name in counts} == counts


def test_a_delete_that_is_refused_never_becomes_a_letter():
    """E10, Mend g2: its document would stay as if it were true."""
    refusal = items({"b": (400, "other")})
    with StandIn([refusal]) as stand_in, pytest.raises(DataRejected, match="document b"):
        write(stand_in, changes(["a", "b"], deletes=["b"]), on_error="dead_letter")
    assert len(stand_in.asked) == 1


@pytest.mark.parametrize("code", [401, 403])
@pytest.mark.parametrize("by_item", [False, True])
def test_credentials_that_do_not_suffice_are_told_without_showing_them(code, by_item):
    """U5: nothing is tried again, and no secret is shown."""
    answer = items({"a": (code, "security_exception")}) if by_item else status(code)
    with StandIn(always=answer) as stand_in, pytest.raises(ConfigInvalid) as refused:
        write(stand_in, changes(["a"]), username="me", password="opensesame")
    assert "username" in str(refused.value)
    assert "opensesame" not in str(refused.value)
    assert len(stand_in.asked) == 1
    assert stand_in.asked[0].headers["Authorization"] == "Basic bWU6b3BlbnNlc2FtZQ=="


def test_an_api_key_signs_requests():
    """O11: API key."""
    with StandIn() as stand_in:
        write(stand_in, changes(["a"]), api_key="bXlrZXk=")
    assert stand_in.asked[0].headers["Authorization"] == "ApiKey bXlrZXk="


def test_connections_are_kept_and_hosts_that_are_down_are_passed_over():
    """O11: several hosts."""
    nobody = f"http://{LOOPBACK}:{free_port()}"
    with StandIn() as stand_in:
        hosts = [nobody, stand_in.url, nobody]
        for _ in range(3):
            (report,) = writer(*hosts, bulk_documents_max=1).write(
                "shop.orders", "0", changes(["a", "b", "c"])
            )
            assert report.payload.retries == 0


def test_hosts_that_do_not_answer_are_named():
    """O11: unreachable hosts are the cluster's trouble, told with a hint."""
    nobody = f"http://{LOOPBACK}:{free_port()}"
    with pytest.raises(TargetUnavailable) as refused:
        list(writer(nobody).write("shop.orders", "0", changes(["a"])))
    assert nobody in str(refused.value)


def test_an_answer_that_opensearch_never_gives_is_told():
    """O12: what acknowledges nothing is not taken for success."""
    for answer in (b"<html>welcome</html>", b'{"status":"ok"}'):
        with StandIn(always=lambda _, body=answer: Said(200, body)) as stand_in:
            with pytest.raises(ConfigInvalid, match="does not answer as OpenSearch"):
                write(stand_in, changes(["a"]))
    short = items({})
    with StandIn(always=lambda asked: short(asked._replace(body=asked.body[:0]))) as stand_in:
        with pytest.raises(Broken, match="every line"):
            write(stand_in, changes(["a"]))


# Signatures


def test_a_signature_is_the_one_of_amazons_own_test_suite():
    """O11: SigV4, by the published vectors `get-vanilla` and `get-vanilla-query-order-key-case`."""
    keys = Credentials(key_id="AKIDEXAMPLE", secret="wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")
    scope = Scope(region="us-east-1", service="service")
    expected = {
        "/": "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31",
        "/?Param2=value2&Param1=value1": (
            "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500"
        ),
    }
    for path, wanted in expected.items():
        request = Request(method="GET", host="example.amazonaws.com", path=path, body=b"")
        headers = signature(request, scope, keys, 1440938160)
        assert headers["x-amz-date"] == "20150830T123600Z"
        assert headers["Authorization"].endswith(
            f"SignedHeaders=host;x-amz-date, Signature={wanted}"
        )


def test_requests_are_signed_with_what_the_environment_has(monkeypatch):
    """O11: SigV4; the token goes along, and without credentials nothing is sent."""
    # Credentials of the machine must not take part.
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    with StandIn() as stand_in:
        with pytest.raises(ConfigInvalid, match="no credentials"):
            write(stand_in, changes(["a"]), aws_sigv4=True, aws_region="eu-west-1")
        # Credentials come from the environment.
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
        monkeypatch.setenv("AWS_SESSION_TOKEN", "for-a-while")
        write(stand_in, changes(["a"]), aws_sigv4=True, aws_region="eu-west-1")
    headers = stand_in.asked[0].headers
    assert headers["x-amz-security-token"] == "for-a-while"
    assert "/eu-west-1/es/aws4_request" in headers["Authorization"]
    assert "SignedHeaders=host;x-amz-date;x-amz-security-token" in headers["Authorization"]
    assert "hush-hush" not in repr(from_environment())


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> Path:
    """A certificate that nobody vouches for, with its key."""
    if shutil.which("openssl") is None:
        # The certificate is made by a program that the machine may lack.
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", f"subjectAltName=IP:{LOOPBACK}"]
    command += ["-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "cert.pem"


@pytest.fixture
def tls(certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    return context


def test_a_certificate_is_checked_unless_the_options_say_otherwise(certificate, tls):
    """O11: TLS."""
    with StandIn(tls=tls) as stand_in:
        with pytest.raises(ConfigInvalid) as refused:
            write(stand_in, changes(["a"]))
        assert "insecure" in str(refused.value.hint)
        assert write(stand_in, changes(["a"]), cert=str(certificate))["indexed"] == 1
        assert write(stand_in, changes(["a"]), insecure=True)["indexed"] == 1


def test_a_host_without_tls_is_told_from_one_that_is_down():
    """O11: the hint says how to write such a host."""
    with StandIn() as stand_in, pytest.raises(ConfigInvalid) as refused:
        list(
            writer(stand_in.url.replace("http:", "https:")).write(
                "shop.orders", "0", changes(["a"])
            )
        )
    assert "http://" in str(refused.value.hint)


# Options


def test_data_preppers_own_expressions_are_taken():
    """O13: a pipeline file loads unchanged."""
    options = OpenSearchOptions(
        hosts=["https://one:9200"],
        index='shop-${getMetadata("iceberg_table_name")}',
        document_id='${getMetadata("document_id")}',
        document_id_field="document_id",
        action='${getMetadata("bulk_action")}',
        username="admin",
        password="opensesame",
        insecure=True,
    )
    assert options.index_name("Shop.Orders") == "shop-shop.orders"
    assert OpenSearchOptions(hosts=["https://one:9200"]).index_name("Shop.Orders") == "shop.orders"


def test_an_index_name_with_a_date_is_refused():
    """O11, O13, Mend i1: the documents of a table lie in one index."""
    options = OpenSearchOptions(hosts=["https://one:9200"], index="orders-%{yyyy}")
    with pytest.raises(ConfigInvalid, match="orders-%"):
        options.index_name("shop.orders")


@pytest.mark.parametrize(
    "said",
    [
        "someone",
        ["pipe"],
        {"pipeline": "other", "table": "orders"},
        {"pipeline": "pipe", "table": "customers"},
        {"pipeline": "pipe", "table": "orders", "table_id": "another"},
        {"adopt": True},
    ],
    ids=str,
)
def test_an_index_that_names_another_owner_is_refused(said):
    """O15, Mend i1: whatever its `_meta` means, it is not this pipeline."""
    mine = Owner(pipeline="pipe", table="orders", table_id="one")
    with pytest.raises(ConfigInvalid, match="belongs to someone else"):
        refuse_other("index", owner_of({"icestream": said}), mine)


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"icestream": {}},
        {"icestream": {"pipeline": "pipe", "table": "orders"}},
        {"icestream": {"pipeline": "pipe", "table": "orders", "adopt": True}},
        {"icestream": {"pipeline": "pipe", "table": "orders", "table_id": "one"}},
    ],
    ids=str,
)
def test_an_index_that_names_this_owner_or_none_is_not_refused(meta):
    """O15, Mend i1: an owner that does not know the table's identity is the same."""
    found = owner_of(meta)
    refuse_other("index", found, Owner(pipeline="pipe", table="orders", table_id="one"))
    assert found is None or owner_of({"icestream": found.to_json()}) == found


@pytest.mark.parametrize(
    "wrong",
    [
        {"document_id_field": "id"},
        {"document_id": "${id}"},
        {"action": "index"},
        {"on_error": "ignore"},
        {"hosts": []},
        {"hosts": "https://one:9200"},
        {"api_key": "k", "username": "me"},
        {"aws_sigv4": True},
        {"aws_sigv4": True, "aws_region": "eu-west-1", "username": "me"},
        {"bulk_bytes_max": 0},
        {"progress_index": "Upper"},
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(wrong):
    """U5: at once, and with what to write instead."""
    with pytest.raises(ConfigInvalid):
        OpenSearchOptions(**{"hosts": ["https://one:9200"], **wrong})


@pytest.mark.parametrize("name", ["_orders", "a b", 'shop."My Table"', "x" * 256, "a,b", "A"])
def test_names_that_opensearch_does_not_take_are_refused(name):
    """O11: index name by table or expression."""
    with pytest.raises(ConfigInvalid):
        OpenSearchOptions(hosts=["https://one"], index=name).index_name("t")


@pytest.mark.parametrize("host", ["ftp://one", "http://", "http://one:port", "http://one:0"])
def test_hosts_that_are_none_are_refused(host):
    """U5: an address is looked at before it is used."""
    with pytest.raises(ConfigInvalid):
        client.Client(OpenSearchOptions(hosts=[host]))


# Mapping


def test_columns_become_fields_of_the_type_that_holds_their_values():
    """O10: decimals exact, doubles double, timestamps dates, structs objects."""
    struct = StructType(NestedField(1, "city", StringType()), NestedField(2, "zip", IntegerType()))
    columns = [
        Column(name="price", type=DecimalType(10, 2)),
        Column(name="ratio", type=DoubleType()),
        Column(name="at", type=TimestamptzType()),
        Column(name="raw", type=BinaryType()),
        Column(name="tags", type=ListType(1, LongType())),
        Column(name="home", type=struct),
        Column(name="extra", type=MapType(1, StringType(), 2, StringType())),
        Column(name="a.b", type=LongType()),
        Column(name="gone", type=LongType(), absent=True),
    ]
    text = {"type": "text", "fields": {"keyword": {"type": "keyword", "ignore_above": 256}}}
    assert properties(columns) == {
        "price": {"type": "keyword"},
        "ratio": {"type": "double", "ignore_malformed": True},
        "at": {"type": "date", "format": "strict_date_optional_time"},
        "raw": {"type": "binary"},
        "tags": {"type": "long"},
        "home": {"properties": {"city": text, "zip": {"type": "long"}}},
        "extra": {"type": "object"},
        "a": {"properties": {"b": {"type": "long"}}},
    }


def test_only_what_an_index_lacks_is_added():
    """O10: what its owner chose stays, at any depth."""
    wanted = {
        "price": field_mapping(DecimalType(10, 2)),
        "home": {"properties": {"city": {"type": "text"}, "zip": {"type": "long"}}},
        "new": {"type": "long"},
    }
    present = {
        "price": {"type": "scaled_float"},
        "home": {"properties": {"city": {"type": "keyword"}, "zip": {"type": "integer"}}},
    }
    assert missing(wanted, present) == {"new": {"type": "long"}}
    deeper = {"home": {"properties": {"street": {"type": "text"}}}}
    assert missing(deeper, present) == deeper


@pytest.mark.parametrize(
    ("kind", "holds", "too_small"),
    [
        (IntegerType(), ("integer", "long", "keyword"), ("short", "byte")),
        (LongType(), ("long", "keyword"), ("integer", "short")),
        (FloatType(), ("float", "double"), ("half_float",)),
        (DoubleType(), ("double",), ("float",)),
        (StringType(), ("text",), ()),
    ],
    ids=str,
)
def test_fields_that_hold_less_than_their_columns_are_known(kind, holds, too_small):
    """O10, Mend g2: at any depth; an index that an earlier version made holds what it held."""
    nested = StructType(NestedField(1, "list", ListType(2, kind)))
    columns = [
        Column(name="plain", type=kind),
        Column(name="a.b", type=kind),
        Column(name="home", type=nested),
        Column(name="gone", type=kind, absent=True),
        Column(name="elsewhere", type=kind),
    ]
    for held in (*holds, *too_small):
        field = {"type": held}
        present = {
            "plain": field,
            "gone": field,
            "a": {"properties": {"b": field}},
            "home": {"properties": {"list": field}},
        }
        expected = ["plain", "a.b", "home.list"] if held in too_small else []
        assert narrower(columns, present) == expected, held


@pytest.mark.parametrize(
    ("wanted", "present"),
    [
        ({"home": {"properties": {"zip": {"type": "long"}}}}, {"home": {"type": "text"}}),
        ({"home": {"type": "long"}}, {"home": {"properties": {"zip": {"type": "long"}}}}),
    ],
)
def test_an_object_does_not_take_the_place_of_a_value(wanted, present):
    """O10: a conflicting mapping is refused before documents are."""
    with pytest.raises(SchemaRejected, match="field home"):
        missing(wanted, present)
