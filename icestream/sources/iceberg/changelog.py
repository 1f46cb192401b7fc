"""Every change between two snapshots of an Iceberg table, exactly, whatever engine wrote it.

    files gone, files with new deletes   ──►  rows before  (-)  ┐
                                                                ├─►  by identity  ─►  what is left
    files that came                      ──►  rows after   (+)  ┘

Copy-on-write, position deletes, deletion vectors and equality deletes all become the same two sets
of rows. What was merely carried over into another file is in both and cancels out. The identity of
a row is its identifier columns, else its row id where the table has them (format version 3), else
the whole row; equal rows are counted, not collapsed.

`changelog` is the public call; the source and `icestream changes` use the same `Changelog`.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from icestream.documents import document_id
from icestream.errors import ConfigInvalid
from icestream.iceberg.snapshots import DELETED, FILE, PLACE, ROW_ID, History, Snapshot, Stage, Step
from icestream.iceberg.staged import staged_name
from icestream.iceberg.table import Table
from icestream.sources.iceberg import identifiers
from icestream.sources.iceberg.compared import (
    FLOATS,
    HASHES,
    comparable_form,
    is_negative_zero,
    row_hashes,
)
from icestream.sources.iceberg.rewritten import SIGN, Columns, Side, what_differs

log = logging.getLogger(__name__)

OPERATION = "iceberg_operation"
TABLE = "iceberg_table_name"
SNAPSHOT = "iceberg_snapshot_id"
DOCUMENT_ID = "document_id"
ACTION = "bulk_action"
ROW = "row"

INSERT, DELETE = "INSERT", "DELETE"
UPDATE_BEFORE, UPDATE_AFTER = "UPDATE_BEFORE", "UPDATE_AFTER"
INDEX = "INDEX"

# What documents are called by where there are no identifier columns.
BY_ROW_ID = "rows"
BY_PLACE = "places"

_KEY, _SIGN, _HASH, _NAMED = "key", SIGN, "hash", "named"
# Less than this is compared at once; more by hashes first, which takes a second look at the files.
_LARGE_BYTES = 64 * 1024**2
# Less than this is compared by one task: bringing rows together would take longer than they do.
_SMALL_BYTES = 4 * 1024**2
# The hashes of changed identities are sent to every task while they are no more than this.
_BROADCAST_MAX = 20_000_000


def changelog(
    spark: SparkSession,
    table: Table,
    start: int | None,
    end: int,
    identifier_columns: Sequence[str] = (),
    net: bool = False,
) -> DataFrame:
    """The changes of a table after snapshot `start` up to snapshot `end`, one row each.

    `start` may be None for the table's beginning. Snapshot by snapshot, each identity has at most
    one change in each; with `net` only the difference between the two states. The columns are
    `iceberg_operation` (INSERT, DELETE, UPDATE_BEFORE, UPDATE_AFTER), `iceberg_table_name`,
    `iceberg_snapshot_id`, `document_id`, `bulk_action` and `row`. An update is two rows: the row
    as it was, of which there is nothing to do (`bulk_action` is null), and as it is. Of all others
    `bulk_action` is INDEX or DELETE. All rows have the columns of snapshot `end`, by field id; what
    was changed in a column dropped since is not told.

    Rows that were deleted by equality are looked up in the files that may hold them: an identifier
    that no row had is no change.

    The table's history must not be expired before the result has been used.
    """
    log = Changelog(spark, table, identifier_columns)
    steps = log.history.between(start, end)
    older = log.history.snapshot(start) if start is not None else None
    last = log.history.snapshot(end)
    assert last is not None
    stage = Stage(table, last.schema_id)
    frames = []
    for path in [steps] if net and steps else [[step] for step in steps]:
        if not all(each.keeps_rows for each in path):
            frames.append(log.changes(older, path, stage, whole=True))
        older = path[-1]
    found = _union(frames)
    return found if found is not None else log.nothing(stage, last)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """The columns of staged rows that count, and those that identify a row, by staged names."""

    columns: Sequence[tuple[str, str]]
    key: Sequence[str]
    by_row_id: bool = False
    by_place: bool = False

    @property
    def identified(self) -> bool:
        """Whether something less than the whole row tells which row it is."""
        return bool(self.key) or self.by_row_id


class Changelog:
    """The changes of one table; `history` tells its snapshots."""

    def __init__(
        self,
        spark: SparkSession,
        table: Table,
        identifier_columns: Sequence[str],
        places: bool = False,
    ):
        """`places` lets rows that nothing else identifies be called by where they lie."""
        self._spark = spark
        self._table = table
        self.history = History(table)
        self._key_ids = _field_ids(table, identifier_columns)
        self.identified = bool(self._key_ids) or self.history.has_row_ids
        self._by_place = places and not self.identified
        self.identifiers = self.identifiers_now()

    def identifiers_now(self) -> str:
        """What documents are called by, as one word: a renamed column stays the same.

        Of a table that is upgraded meanwhile it is not what it was, `identifiers`.
        """
        if self._key_ids:
            return "-".join(map(str, self._key_ids))
        return BY_ROW_ID if self.history.has_row_ids else BY_PLACE

    def changes(
        self,
        older: Snapshot | None,
        path: Sequence[Snapshot],
        stage: Stage,
        whole: bool = False,
    ) -> DataFrame | None:
        """What changed after `older` along a path of snapshots; None when no file did.

        `whole` tells also what was before, and looks it up where deletes name identifiers alone.
        Without it nobody looks whether a row with identifier 7 was there: a delete of 7 is told
        although there may have been no row, and an update of 7 may be told as an insert. An index
        ends up the same. The result can be used until the stage is closed.
        """
        newer = path[-1]
        step = self.history.step(older, path, frozenset(() if whole else self._key_ids))
        shape = self._shape(stage, newer, older)
        if shape.by_row_id or not stage.has_marks:
            step = step.rewritten()
        large = step.bytes_read >= _LARGE_BYTES
        plain = not shape.by_row_id and not shape.by_place
        apart = self._apart(stage, step) if large and plain else None
        before = self._read(stage, step.gone) if apart is None else None
        after = self._live(stage, step.came, shape) if apart is None else None
        dead, revived = self._touched(stage, step, shape)
        named = [self._named(stage, each.tasks, shape) for each in step.equality]
        minus, plus = _union([before, dead, *named]), _union([after, revived])
        rows = _union([_signed(minus, -1), _signed(plus, 1), apart])
        if rows is None:
            return None
        if step.bytes_read < _SMALL_BYTES:
            rows = rows.coalesce(1)
        looked_up = before is not None or dead is not None or apart is not None
        only_added = minus is None and apart is None
        if only_added and (not shape.key or (large and not _has_twins(rows, shape))):
            inserts = self._prepared(rows, shape).withColumn(OPERATION, F.lit(INSERT))
            return self._as_events(inserts, newer)
        if before is not None and large:
            rows = _without_carried(rows, shape)
        prepared = self._prepared(rows, shape)
        if not shape.identified:
            return self._as_events(_by_row(prepared), newer)
        found = _by_identity(prepared)
        if shape.key and looked_up:
            # Deletes by value take every row of their identifiers: after them nobody survives.
            known = found.localCheckpoint() if large else found
            found = self._with_survivors(known, newer, stage, shape)
        return self._as_events(_as_operations(found, whole), newer)

    def load(self, tasks: Any, snapshot: Snapshot, stage: Stage) -> DataFrame | None:
        """The rows of some files of a snapshot, as inserts."""
        shape = self._shape(stage, snapshot)
        rows = _signed(self._live(stage, tasks, shape), 1)
        if rows is None:
            return None
        inserts = self._prepared(rows, shape)
        return self._as_events(inserts.withColumn(OPERATION, F.lit(INSERT)), snapshot)

    def tell_shared(self, tasks: Any, snapshot: Snapshot, stage: Stage) -> None:
        """Warn if rows of these files share an identifier; only hashes are brought together."""
        shape = self._shape(stage, snapshot)
        rows = self._read(stage, tasks) if shape.key else None
        if rows is None:
            return
        keys = rows.select(*shape.key, _key_hash(rows, shape).alias(_HASH))
        twice = keys.groupBy(_HASH).count().filter("count > 1").select(_HASH).localCheckpoint()
        if twice.isEmpty():
            return
        found = keys.join(twice, _HASH, "left_semi").groupBy(*shape.key).count()
        count = found.filter("count > 1").count()
        if count:
            log.warning(
                "%d identifiers of table %s are on several rows: each has one document, of one of "
                "its rows",
                *(count, self.history.name),
            )

    def nothing(self, stage: Stage, snapshot: Snapshot) -> DataFrame:
        """No change at all, in the right columns."""
        schema = T.StructType.fromJson(stage.spark_schema())
        if snapshot.has_row_ids:
            schema = schema.add(ROW_ID, T.LongType())
        rows = _signed(self._spark.createDataFrame([], schema), 1)
        assert rows is not None
        inserts = self._prepared(rows, self._shape(stage, snapshot))
        return self._as_events(inserts.withColumn(OPERATION, F.lit(INSERT)), snapshot)

    def _shape(self, stage: Stage, snapshot: Snapshot, older: Snapshot | None = None) -> _Shape:
        """The columns of the stage's schema, and what identifies the rows of these snapshots."""
        names = _names(stage.schema_json)
        staged = {field["name"] for field in stage.spark_schema()["fields"]}
        missing = [number for number in self._key_ids if staged_name(number) not in staged]
        if missing:
            raise ConfigInvalid(
                f"the rows of table {self.history.name} as of snapshot {snapshot.id} cannot be "
                "told apart by the identifier columns",
                detail=f"Column {names[missing[0]]} has a type that Spark does not know."
                if missing[0] in names
                else "One of them was not yet, or no longer, a column of the table.",
                hint="Choose other identifier columns, or later snapshots.",
            )
        return _Shape(
            columns=[(staged_name(number), name) for number, name in names.items()],
            key=[staged_name(number) for number in self._key_ids],
            # Rows get their ids by the first snapshot after the table's upgrade.
            by_row_id=not self._key_ids
            and not self._by_place
            and snapshot.has_row_ids
            and (older is None or older.has_row_ids),
            by_place=self._by_place,
        )

    def _read(self, stage: Stage, tasks: Any, marked: bool = False) -> DataFrame | None:
        if tasks.isEmpty():
            return None
        name = stage.add(tasks, marked)
        return self._spark.read.format("iceberg").option("scan-task-set-id", name).load(name)

    def _live(self, stage: Stage, tasks: Any, shape: _Shape) -> DataFrame | None:
        """The rows that are there, with their places if those are their names."""
        rows = self._read(stage, tasks, marked=shape.by_place)
        if rows is None or not shape.by_place:
            return rows
        # Spark shows a row's place only when it is asked for.
        return rows.filter(~F.col(DELETED)).select(*rows.columns, FILE, PLACE)

    def _apart(self, stage: Stage, step: Step) -> DataFrame | None:
        """What gone files and those that came do not have in common; None when not told cheaply."""
        gone, came = self.history.plain(step.gone), self.history.plain(step.came)
        if not gone or not came:
            return None
        rows = what_differs(
            self._spark,
            [Side(files=gone, sign=-1), Side(files=came, sign=1)],
            Columns(
                schema_json=stage.schema_json,
                staged=T.StructType.fromJson(stage.spark_schema()),
                partitioned_by=self._table.partitioned_by(),
            ),
            self._table.io_properties(),
        )
        return rows.withColumn(_NAMED, F.lit(False)) if rows is not None else None

    def _named(self, stage: Stage, tasks: Any, shape: _Shape) -> DataFrame | None:
        """What deletes by value name: identifiers, and nothing else of the rows that had them."""
        found = self._read(stage, tasks)
        if found is None:
            return None
        alone = [
            (
                F.col(field.name) if field.name in shape.key else F.lit(None).cast(field.dataType)
            ).alias(field.name)
            for field in found.schema.fields
        ]
        return found.select(*alone).withColumn(_NAMED, F.lit(True))

    def _with_survivors(
        self, found: DataFrame, newer: Snapshot, stage: Stage, shape: _Shape
    ) -> DataFrame:
        """The same changes, but no delete where another row of the identifier lives on.

        Iceberg lets rows share an identifier: the document is one of them, and when that one goes,
        another. They are looked for by the identifier's columns alone, in files whose bounds admit
        one that was deleted; only if there are any, their rows are read.
        """
        gone = found.filter(F.col("after").isNull() & ~F.col(_NAMED)).select(
            *(F.col(_KEY).getField(place).alias(place) for place in shape.key)
        )
        some = identifiers.sample(gone)
        if not some.num_rows:
            return found
        few = identifiers.few(some)
        gone = self._spark.createDataFrame(some, gone.schema) if few else gone.localCheckpoint()
        bounds = identifiers.bounds(gone, some, stage.schema_json)
        gone = F.broadcast(gone) if few or gone.count() <= _BROADCAST_MAX else gone
        files = self._table.holding(newer.id, bounds)
        rows = self._read(stage, files)
        if rows is None:
            return found
        shared = identifiers.among(rows.select(*shape.key), gone).distinct().localCheckpoint()
        count = shared.count()
        if not count:
            return found
        log.warning(
            "%d deleted rows of table %s shared their identifiers with others: one of those "
            "becomes the document",
            *(count, self.history.name),
        )
        alive = _signed(identifiers.among(rows, shared), 1)
        assert alive is not None
        survivors = self._prepared(alive, shape).groupBy(_KEY).agg(_one_of(1).alias("survivor"))
        both = found.join(survivors, _KEY, "left")
        return both.withColumn("after", F.coalesce("after", "survivor")).drop("survivor")

    def _touched(
        self, stage: Stage, step: Step, shape: _Shape
    ) -> tuple[DataFrame | None, DataFrame | None]:
        """Rows that deletes have taken from files which stay, and rows that came back there."""
        after = self._read(stage, step.touched_after, marked=True)
        before = self._read(stage, step.touched_before, marked=True)
        if after is None or before is None:
            return None, None
        columns = [*(place for place, _ in shape.columns if place in after.columns), FILE, PLACE]
        dead_after = after.filter(DELETED).select(*columns)
        dead_before = before.filter(DELETED).select(*columns)
        died = dead_after.join(dead_before.select(FILE, PLACE), [FILE, PLACE], "left_anti")
        came_back = dead_before.join(dead_after.select(FILE, PLACE), [FILE, PLACE], "left_anti")
        return died.drop(FILE, PLACE), came_back if shape.by_place else came_back.drop(FILE, PLACE)

    def _prepared(self, staged: DataFrame, shape: _Shape) -> DataFrame:
        """The row under the table's names, what identifies it, its id as text, and its hash."""
        kinds = {field.name: field.dataType for field in staged.schema.fields}
        there = [(place, name) for place, name in shape.columns if place in kinds]
        comparable = F.struct(
            *(comparable_form(F.col(place), kinds[place]).alias(place) for place, _ in there)
        )
        row = F.struct(*(F.col(place).alias(name) for place, name in there))
        if shape.key:
            # To Spark both zeros are one; as identifiers they are two.
            zeros = [place for place in shape.key if isinstance(kinds[place], FLOATS)]
            key = F.struct(
                *(F.col(place).alias(place) for place in shape.key),
                *(is_negative_zero(F.col(place)).alias(f"-0 {place}") for place in zeros),
            )
            name = document_id([(F.col(place), kinds[place]) for place in shape.key])
        elif shape.by_row_id:
            key = F.struct(F.col(ROW_ID).alias(ROW_ID))
            name = F.col(ROW_ID).cast("string")
        elif shape.by_place and FILE in kinds:
            key = comparable
            # A file's name may be longer than an id.
            name = F.concat(F.sha1(F.col(FILE).cast("binary")), F.lit("-"), F.col(PLACE))
        else:
            key, name = comparable, F.lit(None).cast("string")
        return staged.select(
            *(key.alias(_KEY), row.alias(ROW), name.alias(DOCUMENT_ID), _SIGN, _NAMED),
            *_hashes_of(staged, shape),
        )

    def _as_events(self, found: DataFrame, snapshot: Snapshot) -> DataFrame:
        action = F.when(F.col(OPERATION) == DELETE, DELETE).when(
            F.col(OPERATION) != UPDATE_BEFORE, INDEX
        )
        return found.select(
            F.col(OPERATION),
            F.lit(self.history.name).alias(TABLE),
            F.lit(snapshot.id).alias(SNAPSHOT),
            F.col(DOCUMENT_ID),
            action.alias(ACTION),
            F.col(ROW),
        )


def _signed(rows: DataFrame | None, sign: int) -> DataFrame | None:
    """Staged rows that count as before (-1) or after (1) the change."""
    if rows is None:
        return None
    named = rows if _NAMED in rows.columns else rows.withColumn(_NAMED, F.lit(False))
    return named.withColumn(_NAMED, F.coalesce(_NAMED, F.lit(False))).withColumn(_SIGN, F.lit(sign))


def _without_carried(rows: DataFrame, shape: _Shape) -> DataFrame:
    """Rows of those identities that have changed; far fewer than the rewritten files hold.

    Only hashes are brought together, 64 bits for a row: two rows of one identity that differ agree
    in them once in 10^19.
    """
    keyed = rows.withColumn(_HASH, _key_hash(rows, shape))
    # Each further sum costs as much as reading a column.
    hashes = keyed.select(_HASH, _SIGN, *_hashes_of(keyed, shape)[:2])
    changed = _changed(hashes, _HASH).select(_HASH).localCheckpoint()
    few = changed.count() <= _BROADCAST_MAX
    return keyed.join(F.broadcast(changed) if few else changed, _HASH, "left_semi").drop(_HASH)


def _has_twins(rows: DataFrame, shape: _Shape) -> bool:
    """Whether two of these rows may have one identity; only hashes are brought together."""
    counted = rows.groupBy(_key_hash(rows, shape)).count()
    return not counted.filter("count > 1").limit(1).isEmpty()


def _key_hash(rows: DataFrame, shape: _Shape) -> Column:
    """A hash of what identifies a row; two identities may share one."""
    if shape.key:
        return F.xxhash64(*shape.key)
    if shape.by_row_id:
        return F.xxhash64(ROW_ID)
    kinds = {field.name: field.dataType for field in rows.schema.fields}
    there = [place for place, _ in shape.columns if place in kinds]
    return F.xxhash64(*(comparable_form(F.col(place), kinds[place]) for place in there))


def _hashes_of(rows: DataFrame, shape: _Shape) -> list[Column]:
    return row_hashes(rows, [place for place, _ in shape.columns], F.col(_NAMED))


def _by_identity(rows: DataFrame) -> DataFrame:
    """What each identity was and is, where its rows differ before and after.

    `_NAMED` are identities of which a delete by value has taken every row.
    """
    named = F.bool_or(F.col(_NAMED))
    both = _one_of(1).alias("after"), _one_of(-1).alias("before")
    return _changed(rows, _KEY, *both, named.alias(_NAMED))


def _one_of(sign: int) -> Column:
    """One row of an identity before (-1) or after (1): of several the same, whoever asks."""
    return F.max_by(F.struct(ROW, DOCUMENT_ID), F.when(F.col(_SIGN) == sign, F.col("h1")))


def _as_operations(found: DataFrame, with_before: bool) -> DataFrame:
    """One change for each identity, by what it was and is; `with_before` two of an update."""
    operation = (
        F.when(F.col("after").isNull(), DELETE)
        .when(F.col("before").isNull(), INSERT)
        .otherwise(UPDATE_AFTER)
    )
    told = F.struct(operation.alias(OPERATION), F.coalesce("after", "before").alias("told"))
    if with_before:
        earlier = F.struct(F.lit(UPDATE_BEFORE).alias(OPERATION), F.col("before").alias("told"))
        updated = operation == UPDATE_AFTER
        told = F.explode(F.when(updated, F.array(earlier, told)).otherwise(F.array(told)))
    return found.select(told.alias("event")).select(
        *(f"event.{OPERATION}", f"event.told.{ROW}", f"event.told.{DOCUMENT_ID}")
    )


def _by_row(rows: DataFrame) -> DataFrame:
    """As many changes for each row as it is there more or less often than before."""
    named = F.array_sort(F.collect_list(F.when(F.col(_SIGN) > 0, F.col(DOCUMENT_ID))))
    counted = rows.groupBy(_KEY).agg(
        F.sum(_SIGN).cast("int").alias("more"), F.first(ROW).alias(ROW), named.alias("ids")
    )
    operation = F.when(F.col("more") > 0, INSERT).otherwise(DELETE)
    nameless = F.array_repeat(F.lit(None).cast("string"), F.abs("more"))
    # Of equal rows any are the new ones, but always the same.
    called = F.size("ids") >= F.col("more")
    ids = F.when((F.col("more") > 0) & called, F.expr("slice(ids, 1, more)")).otherwise(nameless)
    return counted.filter(F.col("more") != 0).select(
        operation.alias(OPERATION), ROW, F.explode(ids).alias(DOCUMENT_ID)
    )


def _changed(rows: DataFrame, by: str, *others: Column) -> DataFrame:
    """The groups whose rows before and after are not the same set, counted with their numbers."""
    there = [name for name in HASHES if name in rows.columns]
    sums = {name: F.sum(F.col(name) * F.col(_SIGN)) for name in there}
    sums["more"] = F.sum(_SIGN)
    found = rows.groupBy(by).agg(*(each.alias(name) for name, each in sums.items()), *others)
    differs = reduce(lambda one, other: one | other, (F.col(name) != 0 for name in sums))
    return found.filter(differs)


def _union(frames: Sequence[DataFrame | None]) -> DataFrame | None:
    there = [frame for frame in frames if frame is not None]
    # Only rows that deletes name say so, and only rows of files tell their ids.
    return reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), there) if there else None


def _field_ids(table: Table, identifier_columns: Sequence[str]) -> list[int]:
    """The ids of the identifier columns; names may change later, ids never do."""
    by_name = {name: number for number, name in _names(table.schema_json()).items()}
    unknown = [name for name in identifier_columns if name not in by_name]
    if unknown:
        raise ConfigInvalid(
            f"table {table.name} has no column {unknown[0]}",
            detail="It is named among the identifier columns.",
            hint=f"Columns: {', '.join(by_name)}.",
        )
    return [by_name[name] for name in identifier_columns]


def _names(schema_json: str) -> dict[int, str]:
    """The names of a schema's columns by their ids, whatever their types."""
    return {int(field["id"]): str(field["name"]) for field in json.loads(schema_json)["fields"]}
