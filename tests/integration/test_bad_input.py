"""Bad input: a clear error with a hint and the right exit code, nothing committed, nothing lost."""

import gzip
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.integration.changelog import Changelog, by_key
from tests.integration.pipelines import Shell, assert_refused, document
from tests.integration.test_formats import order, parquet, upload
from tests.lake import Lake
from tests.oracle import RandomFeed
from tests.proxy import Proxy
from tests.servers import RestCatalog, S3Server, free_port

CONFIG, OPERATOR, LATER = 2, 3, 1


def assert_equal(lake: Lake, name: str, feed: RandomFeed) -> None:
    """The table holds what the feed's log leaves at its last resolved timestamp."""
    found = {row["id"]: row for row in lake.rows(name)}
    expected = feed.expected("orders", feed.resolved[-1])
    assert found.keys() == expected.keys()
    assert {k: {n: found[k][n] for n in row} for k, row in expected.items()} == expected


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"souce": {}}, ["unknown key `souce`", "Did you mean `source`?"]),
        ({"commit_interval": "ten"}, ["feed.commit_interval is not a duration", "PT10S"]),
        ({"source": {"cockroachdb": {}}}, ["lacks `files`"]),
        ({"source": {"cockroach": {}}}, ["unknown kind `cockroach`", "`cockroachdb`"]),
        ({"sink": {"iceberg": {"namspace": "x"}}}, ["unknown key `namspace`", "`namespace`"]),
        ({"sink": "iceberg://nowhere"}, ["the sink's URL is not understood"]),
    ],
)
def test_a_wrong_pipeline_file_is_refused_by_place_and_name(
    shell: Shell, embedded: dict[str, str], change: dict[str, Any], texts: list[str]
) -> None:
    """U3: what is wrong, where, and the nearest thing that is right."""
    pipelines = document("feed", embedded)
    pipelines["feed"].update(change)
    assert_refused(shell.run(pipelines), CONFIG, *texts)


def test_a_secret_that_is_not_set_is_named(shell: Shell, embedded: dict[str, str]) -> None:
    """U3: `${env:NAME}` without the variable."""
    pipelines = document("feed", {**embedded, "token": "${env:NOBODY_SET_THIS}"})
    assert_refused(shell.run(pipelines), CONFIG, "NOBODY_SET_THIS", "export")


def test_an_unreachable_catalog_is_an_error_that_may_pass(
    shell: Shell, tmp_path: Path, namespace: str
) -> None:
    """I6: nobody listens at the catalog's address."""
    feed = RandomFeed.create(tmp_path / "feed", 20)
    feed.epoch(5)
    catalog = {"type": "rest", "uri": f"http://127.0.0.1:{free_port()}"}
    answer = shell.run(document(feed.folder.path, catalog, namespace))
    assert_refused(answer, LATER, "could not open the catalog", "can be reached")


def test_a_catalog_that_refuses_the_token_is_a_wrong_configuration(
    shell: Shell, rest: RestCatalog, lake: Lake, tmp_path: Path, namespace: str
) -> None:
    """I1: credentials are handed to the catalog; with the right ones the run is exact."""
    feed = RandomFeed.create(tmp_path / "feed", 21)
    feed.epoch(5)
    with Proxy(rest.uri) as proxy:
        proxy.require_token("right")
        catalog = rest.catalog_properties(uri=proxy.url)
        wrong = document(feed.folder.path, {**catalog, "token": "wrong"}, namespace)
        assert_refused(shell.run(wrong), CONFIG, "credentials")
        right = document(feed.folder.path, {**catalog, "token": "right"}, namespace)
        assert shell.run(right).code == 0
    assert_equal(lake, f"{namespace}.orders", feed)


def test_a_store_that_refuses_the_secret_commits_nothing(
    shell: Shell, rest: RestCatalog, store: S3Server, lake: Lake, tmp_path: Path, namespace: str
) -> None:
    """I6: the files could not be written, so the epoch is not there; mended, it is, once."""
    feed = RandomFeed.create(tmp_path / "feed", 22)
    feed.epoch(5)
    catalog = rest.catalog_properties()
    assert shell.run(document(feed.folder.path, catalog, namespace)).code == 0
    feed.epoch(5)
    before = lake.snapshots(f"{namespace}.orders")
    wrong = {**catalog, "s3.secret-access-key": "wrong"}
    answer = shell.run(document(feed.folder.path, wrong, namespace))
    assert answer.code in (LATER, CONFIG)
    assert "hint: " in answer.err
    assert "Traceback" not in answer.err
    assert [s for s in lake.epochs(f"{namespace}.orders") if s not in before] == []
    assert shell.run(document(feed.folder.path, catalog, namespace)).code == 0
    assert_equal(lake, f"{namespace}.orders", feed)


def test_a_folder_that_is_not_there_or_has_no_marker_is_said_so(
    shell: Shell, embedded: dict[str, str], tmp_path: Path
) -> None:
    """C1: nothing to read yet."""
    missing = shell.run(document(tmp_path / "nowhere", embedded))
    assert_refused(missing, LATER, "could not list", "nowhere")
    feed = RandomFeed.create(tmp_path / "feed", 23)
    feed.folder.data("orders", [_row(1, feed.now)], (feed.now, 0))
    unmarked = shell.run(document(feed.folder.path, embedded))
    assert_refused(unmarked, LATER, "no resolved timestamp", "WITH updated, resolved")


def _row(key: int, wall: int) -> str:
    return f'{{"after": {{"id": {key}}}, "key": [{key}], "updated": "{wall}.0000000000"}}'


@pytest.mark.parametrize(
    "damage",
    [
        ('{"after": {"id": 1}, "key": [1], "upd', "", ["is damaged", "Row 1"]),
        ("not json at all", "", ["is damaged"]),
        ('{"after": {"id": 1}, "updated": "%d.0000000000"}', "", ["has no key", "key_in_value"]),
        ('{"after": {"id": 1}, "key": [1]}', "", ["no `updated` timestamp", "WITH updated"]),
        ('{"something": 1}', "", ["none of the envelopes wrapped, enriched and bare"]),
        ("cut", ".gz", ["is damaged"]),
        ("cut", ".zst", ["is damaged"]),
    ],
)
def test_a_damaged_file_stops_the_pipeline_before_anything_of_its_epoch_is_committed(
    shell: Shell,
    local: Lake,
    embedded: dict[str, str],
    tmp_path: Path,
    damage: tuple[str, str, list[str]],
) -> None:
    """C1, E3: what was there stays, and once the file is mended the run goes on exactly."""
    content, suffix, texts = damage
    feed = RandomFeed.create(tmp_path / "feed", 24)
    feed.epoch(5)
    pipelines = document(feed.folder.path, embedded)
    assert shell.run(pipelines).code == 0
    before = local.epochs("shop.orders")
    feed.epoch(5)
    name = feed.folder.data_name("orders", (feed.now, 0), 1, f".ndjson{suffix}")
    damaged = next(feed.folder.path.iterdir()) / name
    raw = (content % (feed.now - 1) if "%d" in content else content).encode()
    damaged.write_bytes(gzip.compress(raw * 100)[:30] if suffix else raw)
    assert_refused(shell.run(pipelines), OPERATOR, *texts, damaged.name)
    assert local.epochs("shop.orders") == before
    damaged.unlink()
    assert shell.run(pipelines).code == 0
    assert_equal(local, "shop.orders", feed)


def test_a_file_that_is_damaged_after_its_rows_were_committed_is_told_truly(
    shell: Shell, local: Lake, embedded: dict[str, str], tmp_path: Path
) -> None:
    """C1, E7, Mend f3: its rows are in the table, and nobody says that they are not."""
    feed = RandomFeed.create(tmp_path / "feed", 25)
    feed.epoch(5)
    pipelines = document(feed.folder.path, embedded)
    assert shell.run(pipelines).code == 0
    damaged = max(feed.folder.path.rglob("*.ndjson"))
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-10])
    feed.epoch(5)
    answer = shell.run(pipelines)
    assert_refused(answer, OPERATOR, "is damaged", damaged.name, "What is committed stays")
    assert "othing of its epoch" not in answer.err
    damaged.write_bytes(whole)
    assert shell.run(pipelines).code == 0
    assert_equal(local, "shop.orders", feed)


def test_a_cut_parquet_file_stops_the_pipeline_until_it_is_whole(
    shell: Shell, local: Lake, embedded: dict[str, str], tmp_path: Path
) -> None:
    """C1, E3: a file without its footer is damaged, not empty."""
    log = Changelog.at(tmp_path / "feed")
    source = {"keys": {"orders": ["id"]}}
    pipelines = document(tmp_path / "feed", embedded, source=source)
    log.put("orders", order(1, "one"), order(2, "two"))
    parquet(log.folder, "orders", log.take())
    log.mark()
    assert shell.run(pipelines).code == 0
    before = local.epochs("shop.orders")
    known = set(log.folder.path.rglob("*.parquet"))
    log.remove("orders", 1)
    log.put("orders", order(3, "three"))
    parquet(log.folder, "orders", log.take())
    log.mark()
    cut = (set(log.folder.path.rglob("*.parquet")) - known).pop()
    whole = cut.read_bytes()
    cut.write_bytes(whole[: len(whole) // 2])
    assert_refused(shell.run(pipelines), OPERATOR, "is damaged", cut.name)
    assert local.epochs("shop.orders") == before
    cut.write_bytes(whole)
    assert shell.run(pipelines).code == 0
    assert by_key(local.rows("shop.orders"), ["id"]) == log.expected("orders")


def test_a_feed_on_s3_that_refuses_the_secret_is_said_so_without_showing_it(
    shell: Shell,
    store: S3Server,
    local: Lake,
    embedded: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """U3, C1: access to the files is the source's own; mended, the run is exact."""
    log = Changelog.at(tmp_path / "feed")
    log.put("orders", order(1, "one"))
    log.resolve()
    prefix = f"lake/feeds/{tmp_path.name}"
    upload(log.folder.path, store, prefix)
    storage = {**store.iceberg_properties(), "s3.secret-access-key": "${env:FEED_SECRET}"}
    pipelines = document(f"s3://{prefix}", embedded, source={"storage": storage})
    # A secret comes from the environment, and this one is wrong.
    monkeypatch.setenv("FEED_SECRET", "nobody-may-see-this")
    answer = shell.run(pipelines)
    assert_refused(answer, LATER, "could not list", "credentials")
    assert "nobody-may-see-this" not in answer.err
    # The right one.
    monkeypatch.setenv("FEED_SECRET", store.secret_key)
    assert shell.run(pipelines).code == 0
    assert {row["name"] for row in local.rows("shop.orders")} == {"one"}


def test_a_secret_in_an_address_is_not_shown_when_the_address_does_not_answer(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U3: whatever came from the environment stays out of errors and logs."""
    # A secret comes from the environment.
    monkeypatch.setenv("CATALOG_PASSWORD", "nobody-may-see-this")
    feed = RandomFeed.create(tmp_path / "feed", 26)
    feed.epoch(5)
    uri = "http://me:${env:CATALOG_PASSWORD}@127.0.0.1:" + str(free_port())
    pipelines = document(feed.folder.path, {"type": "rest", "uri": uri})
    for options in ([], ["--json"]):
        answer = shell.run(pipelines, *options)
        assert answer.code in (LATER, CONFIG)
        assert "nobody-may-see-this" not in answer.err


def test_a_type_that_does_not_fit_the_table_stops_and_a_mended_table_goes_on(
    spark: SparkSession, shell: Shell, local: Lake, embedded: dict[str, str], tmp_path: Path
) -> None:
    """I10: an existing table is used as it is; what does not fit it is refused, not rounded."""
    feed = RandomFeed.create(tmp_path / "feed", 25)
    feed.epoch(20)
    local.sql(f"CREATE NAMESPACE IF NOT EXISTS {local.name}.shop")
    local.sql(
        f"CREATE TABLE {local.table('shop.orders')} (id BIGINT NOT NULL, region STRING, "
        "note STRING, amount DATE, ok BOOLEAN) USING iceberg"
    )
    local.sql(f"ALTER TABLE {local.table('shop.orders')} SET IDENTIFIER FIELDS id")
    named = {"tables": {"orders": {"table": "orders"}}}
    pipelines = document(feed.folder.path, embedded, sink=named)
    answer = shell.run(pipelines)
    assert_refused(answer, OPERATOR, "column amount", "date")
    assert local.epochs("shop.orders") == []
    local.sql(f"ALTER TABLE {local.table('shop.orders')} DROP COLUMN amount")
    assert shell.run(pipelines).code == 0
    assert_equal(local, "shop.orders", feed)


def test_a_table_without_an_epoch_takes_the_types_that_are_declared_later(
    shell: Shell, local: Lake, embedded: dict[str, str], tmp_path: Path
) -> None:
    """Mend c7, I10: what was refused left an empty table behind; its key changes as well."""
    feed = RandomFeed.create(tmp_path / "feed", 26)
    feed.epoch(20)
    declared = {"columns": {"orders": {"id": "string", "amount": "date"}}}
    answer = shell.run(document(feed.folder.path, embedded, source=declared))
    assert_refused(answer, OPERATOR, "column amount", "date")
    assert local.epochs("shop.orders") == []
    pipelines = document(feed.folder.path, embedded)
    assert shell.run(pipelines).code == 0
    assert_equal(local, "shop.orders", feed)
    # From its first epoch on a table stays as it is.
    feed.epoch(20)
    declared = {"columns": {"orders": {"amount": "string"}}}
    assert shell.run(document(feed.folder.path, embedded, source=declared)).code == 0
    assert_equal(local, "shop.orders", feed)


def test_a_table_that_its_owner_changed_is_not_shaped_anew(
    shell: Shell, local: Lake, embedded: dict[str, str], tmp_path: Path
) -> None:
    """Mend c7, I10: the other way out, changing the column, is not undone by the next run."""
    feed = RandomFeed.create(tmp_path / "feed", 27)
    feed.epoch(20)
    declared = {"columns": {"orders": {"amount": "date"}}}
    pipelines = document(feed.folder.path, embedded, source=declared)
    assert_refused(shell.run(pipelines), OPERATOR, "column amount", "date")
    table = local.table("shop.orders")
    local.sql(f"ALTER TABLE {table} DROP COLUMN amount")
    local.sql(f"ALTER TABLE {table} ADD COLUMN amount BIGINT")
    assert shell.run(pipelines).code == 0
    assert_equal(local, "shop.orders", feed)
