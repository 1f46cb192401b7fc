"""Frontiers of many tables or partitions: whatever tidies the lake, progress stays, and small."""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from pyiceberg.types import LongType, StringType
from pyspark.sql import SparkSession

from icestream.epoch import Progress
from icestream.errors import FrontierLost, HistoryLost, ProgressLost, RolledBack
from icestream.frontier import Frontier
from icestream.iceberg import progress as summaries
from icestream.iceberg.catalog import Catalog
from icestream.iceberg.handle import TableName
from icestream.iceberg.table import Table
from icestream.sinks.iceberg.options import IcebergSinkOptions
from icestream.sinks.iceberg.sink import IcebergSink
from tests.integration.hand_fed import HandFed, put, shape
from tests.lake import Lake
from tests.servers import RestCatalog

SHAPES = {"a": shape(["id"], id=LongType(), v=StringType())}
METADATA_BYTES_PER_COMMIT_MAX = 2048
AHEAD_MS = 86_400_000


def partitions(number: int) -> Frontier:
    """1,000 partitions of a topic, all of which move."""
    drawn = random.Random(number)
    return Frontier(
        {f"orders/{p}": (number * 10**7 + drawn.randrange(10**6),) for p in range(1000)}
    )


def tables(number: int) -> Frontier:
    """300 tables of a PostgreSQL database, copied at different times, and its stream."""
    copies = {f"copy shop.table_{t} {16384 + 7 * t}": (1, 2, t, 31 * t) for t in range(300)}
    return Frontier({**copies, "wal 7316214023146": (10**12 + number,)})


FRONTIERS: dict[str, Callable[[int], Frontier]] = {"partitions": partitions, "tables": tables}


class Kept:
    """A table whose pipeline has large frontiers."""

    def __init__(self, spark: SparkSession, rest: RestCatalog, lake: Lake, namespace: str):
        self.spark, self.lake, self.namespace = spark, lake, namespace
        self.catalog = rest.catalog_properties()
        self.name = f"{namespace}.a"

    def start(self, frontier: Callable[[int], Frontier] = partitions, **options: Any) -> HandFed:
        given = {"namespace": self.namespace, "frontier": frontier, **options}
        return HandFed(self.spark, self.catalog, SHAPES, **given)

    def opened(self) -> Catalog:
        hadoop = self.spark._jsparkSession.sessionState().newHadoopConf()
        return Catalog(self.spark._jvm, hadoop, self.catalog)

    def sink(self) -> IcebergSink:
        """A sink that has claimed nothing, as a command has it."""
        options = IcebergSinkOptions(catalog=self.catalog, namespace=self.namespace)
        return IcebergSink(self.opened(), options, "hand")

    def table(self) -> Table:
        found = self.opened().load(TableName(namespace=(self.namespace,), name="a"))
        assert found is not None
        return found

    def tidy(self) -> None:
        """All that tools do to keep a lake small, with the harshest settings."""
        self.expire()
        actions = self.spark._jvm.org.apache.iceberg.spark.actions.SparkActions
        now = self.spark._jvm.java.lang.System.currentTimeMillis()
        action = actions.get(self.spark._jsparkSession).deleteOrphanFiles(self.table().java)
        action.usePrefixListing(True).olderThan(now + AHEAD_MS).execute()

    def expire(self) -> None:
        self.lake.sql(
            f"CALL {self.lake.name}.system.expire_snapshots(table => '{self.name}', "
            "older_than => TIMESTAMP '2100-01-01 00:00:00', retain_last => 1)"
        )

    def metadata_bytes(self) -> int:
        table = self.table()
        parser = table.jvm.org.apache.iceberg.TableMetadataParser
        return len(parser.toJson(table.java.operations().current()))

    def frontier_properties(self, pipeline: str = "hand") -> dict[str, str]:
        prefix = f"icestream.{pipeline}.frontier."
        found = self.table().properties().items()
        return {name: value for name, value in found if name.startswith(prefix)}

    def sql(self, text: str) -> None:
        self.lake.sql(text.format(self.lake.table(self.name)))

    def roll_back(self, epoch: int) -> None:
        wanted = next(
            one
            for one in self.lake.epochs(self.name)
            if one["summary"]["icestream.epoch"] == str(epoch)
        )
        self.lake.sql(
            f"CALL {self.lake.name}.system.rollback_to_snapshot('{self.name}', "
            f"{wanted['snapshot_id']})"
        )

    def rows(self) -> list[int]:
        return sorted(row["id"] for row in self.lake.rows(self.name))


@pytest.fixture
def kept(spark: SparkSession, rest: RestCatalog, lake: Lake, namespace: str) -> Iterator[Kept]:
    yield Kept(spark, rest, lake, namespace)


def commit(fed: HandFed, *numbers: int) -> None:
    for number in numbers:
        fed.commit({"a": [put(id=number, v="x")]})


@pytest.mark.parametrize("kind", FRONTIERS)
def test_nothing_that_tidies_a_lake_takes_a_large_frontier(kept: Kept, kind: str) -> None:
    """I7, Mend c1: orphan removal and expiry between any two steps of runs that go on and start."""
    fed = kept.start(FRONTIERS[kind])
    for number in (1, 2, 3):
        commit(fed, number)
        kept.tidy()
    for number in (4, 5):
        again = kept.start(FRONTIERS[kind])
        assert again.number == number - 1
        kept.tidy()
        commit(again, number)
        kept.tidy()
    assert kept.rows() == [1, 2, 3, 4, 5]
    found = kept.table().head("hand", "main").progress
    assert found is not None
    assert (found.lower, found.upper) == (FRONTIERS[kind](4), FRONTIERS[kind](5))


def test_a_commit_adds_at_most_two_kilobytes_to_the_metadata_for_good(kept: Kept) -> None:
    """I7, Mend c1: 1,000 partitions that all move; what is old is removed in the same swap."""
    fed = kept.start()
    commit(fed, *range(1, 11))
    before, properties = kept.metadata_bytes(), kept.frontier_properties()
    commit(fed, *range(11, 15))
    grown = kept.metadata_bytes() - before
    assert grown / 4 <= METADATA_BYTES_PER_COMMIT_MAX
    assert len(kept.frontier_properties()) == len(properties)
    sizes = [len(value) for value in kept.frontier_properties().values()]
    assert max(sizes) <= summaries.CHUNK_CHARACTERS
    assert sum(sizes) <= summaries.KEPT_BYTES_MAX


def test_a_frontier_that_somebody_removed_stops_the_pipeline_at_once(kept: Kept) -> None:
    """I7, Mend c1: a running one and a starting one; setting the properties again is a way out."""
    fed = kept.start()
    commit(fed, 1)
    properties = kept.frontier_properties()
    names = ", ".join(f"'{name}'" for name in properties)
    kept.sql("ALTER TABLE {} UNSET TBLPROPERTIES (" + names + ")")
    written = fed.write({"a": [put(id=2, v="x")]})
    with pytest.raises(FrontierLost, match="no longer in the properties") as caught:
        fed.sink.commit(written)
    assert "older metadata file" in str(caught.value.hint)
    with pytest.raises(FrontierLost):
        kept.start()
    pairs = ", ".join(f"'{name}' = '{value}'" for name, value in properties.items())
    kept.sql("ALTER TABLE {} SET TBLPROPERTIES (" + pairs + ")")
    fed.sink.commit(written)
    commit(kept.start(), 3)
    assert kept.rows() == [1, 2, 3]


def test_a_table_rolled_back_to_a_forgotten_frontier_can_only_go_on_from_there(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E8, I7, Mend c1: `--replay` is refused with a way out, and that way works."""
    # A table of any size forgets; with space for none but the last two it does so at once.
    monkeypatch.setattr(summaries, "KEPT_BYTES_MAX", 0)
    commit(kept.start(), *range(1, 6))
    kept.roll_back(2)
    with pytest.raises(RolledBack, match="was rolled back"):
        kept.start()
    with pytest.raises(HistoryLost, match="cannot be applied again") as caught:
        kept.sink().settle_rollback("a", replay=True)
    assert "rollback --accept" in str(caught.value.hint)
    kept.sink().settle_rollback("a", replay=False)
    again = kept.start()
    assert again.number == 5
    commit(again, 6)
    assert kept.rows() == [1, 2, 6]


def test_a_table_rolled_back_to_a_kept_frontier_can_be_replayed(kept: Kept) -> None:
    """E8, I7, Mend c1: the frontiers of the newest snapshots are there for that."""
    commit(kept.start(), *range(1, 6))
    kept.roll_back(3)
    progress = kept.sink().settle_rollback("a", replay=True)
    assert (progress.epoch, progress.upper) == (3, partitions(3))
    assert kept.start().number == 3


def side_file(kept: Kept) -> str:
    """What an earlier version left: a claim whose frontier lies in a file beside the metadata."""
    table = kept.table()
    text = json.dumps(partitions(7).to_json()).encode()
    path = str(table.java.operations().metadataFileLocation("icestream/frontier-7.json"))
    stream = table.java.io().newOutputFile(path).createOrOverwrite()
    stream.write(text)
    stream.close()
    entries = dict(summaries.to_entries(Progress(pipeline="hand", generation=1, epoch=7)).summary)
    del entries[summaries.FRONTIER]
    entries[f"{summaries.FRONTIER}-file"] = path
    entries[f"{summaries.FRONTIER}-sha256"] = hashlib.sha256(text).hexdigest()
    head = table.head("hand", "main")
    table.publish(head, "main", [], summaries.Entries(summary=entries))
    return path


def test_a_side_file_of_an_earlier_version_is_read_and_moves_into_the_table(kept: Kept) -> None:
    """I7, Mend c1: the first claim of this version needs the file for the last time."""
    kept.start().sink.prepare("a", lambda: SHAPES["a"])
    side_file(kept)
    fed = kept.start()
    assert fed.number == 7
    kept.tidy()
    commit(fed, 8)
    assert kept.start().number == 8


def test_a_side_file_that_was_removed_is_said_to_be_gone(kept: Kept) -> None:
    """I7, Mend c1: not that the catalog cannot be reached."""
    kept.start().sink.prepare("a", lambda: SHAPES["a"])
    path = side_file(kept)
    kept.tidy()
    with pytest.raises(FrontierLost, match="in a file that is gone") as caught:
        kept.start()
    assert path in str(caught.value.detail)
    # The way out: without the table the pipeline starts anew.
    kept.sql("DROP TABLE {}")
    commit(kept.start(), 1)
    assert kept.rows() == [1]


def tagged(kept: Kept) -> Mapping[str, Any] | None:
    found = kept.lake.sql(
        f"SELECT * FROM {kept.lake.table(kept.name)}.refs WHERE name = 'icestream-hand'"
    )
    return found[0] if found else None


def test_a_reference_age_of_the_table_does_not_expire_the_tag(kept: Kept) -> None:
    """I7, Mend c8: `history.expire.max-ref-age-ms` holds for references without an own age."""
    fed = kept.start()
    commit(fed, 1)
    kept.sql("ALTER TABLE {} SET TBLPROPERTIES ('history.expire.max-ref-age-ms' = '1')")
    kept.sql("INSERT INTO {} VALUES (77, 'rival')")
    kept.expire()
    assert tagged(kept) is not None
    commit(fed, 2)
    assert kept.start().number == 2
    assert kept.rows() == [1, 2, 77]


def test_a_pipeline_whose_last_commit_was_expired_does_not_begin_anew(kept: Kept) -> None:
    """E4, I7, Mend c8: with its tag dropped by hand nothing is left; rows would be doubled."""
    fed = kept.start()
    commit(fed, 1)
    last = kept.lake.epochs(kept.name)[-1]["snapshot_id"]
    kept.sql("ALTER TABLE {} DROP TAG `icestream-hand`")
    # As long as the snapshot itself is there the pipeline goes on, and tags again.
    assert kept.start().number == 1
    assert tagged(kept) is not None
    kept.sql("ALTER TABLE {} DROP TAG `icestream-hand`")
    kept.sql("INSERT INTO {} VALUES (77, 'rival')")
    kept.expire()
    assert last not in {one["snapshot_id"] for one in kept.lake.snapshots(kept.name)}
    with pytest.raises(ProgressLost, match="last commit of pipeline hand is no longer in table"):
        kept.start()
