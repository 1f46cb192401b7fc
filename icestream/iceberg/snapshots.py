"""What a table was and became: its snapshots in order, and the files that one of them changed.

A `Step` between two snapshots names the files whose rows differ: gone, came, and touched by
deletes. `Stage` lets Spark read any of them through Iceberg's own reader, which applies deletes and
schema changes. It also tells rows' ids where the table has them, or, if asked, their places and
which of them are deleted (`FILE` and the names below it).
"""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from icestream.errors import ConfigInvalid, HistoryLost, RolledBack
from icestream.iceberg.gateway import as_unavailable
from icestream.iceberg.handle import ANCESTORS_MAX
from icestream.iceberg.picks import JavaFileLists
from icestream.iceberg.table import Table

# Where a row lies and whether it is deleted: columns of rows that are staged with their marks.
FILE = "_file"
PLACE = "_pos"
DELETED = "_deleted"
# What identifies a row for life: a column of rows that are staged of a table with row lineage.
ROW_ID = "_row_id"
MAIN = "main"
# Compactions and the like: files change, rows do not.
_REPLACE = "replace"
_LINEAGE_FROM_VERSION = 3
_SEQUENCES_FROM_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One snapshot of a table; sequence numbers only rise, also after a rollback.

    `changed_bytes` is the size of the files that it added and removed, None when it does not say.
    """

    id: int
    parent_id: int | None
    sequence_number: int
    operation: str
    time_ms: int
    schema_id: int
    has_row_ids: bool
    changed_bytes: int | None = None

    @property
    def keeps_rows(self) -> bool:
        """Whether only files changed, and no row."""
        return self.operation == _REPLACE


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainFile:
    """A Parquet file to which no deletes apply, and how many rows it has."""

    location: str
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualityDeletes:
    """Added delete files that name the deleted rows by the values of these columns."""

    field_ids: frozenset[int]
    tasks: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The files that differ between two snapshots, as scan tasks of Iceberg's library.

    `gone` are read as they were, `came` as they are; `touched_before` and `touched_after` are the
    same files, before and after deletes were added to them. `equality` are delete files
    whose values are used as they are: no data file is scanned for them. `bytes_read` is the size of
    all these files.
    """

    gone: Any
    came: Any
    touched_before: Any
    touched_after: Any
    equality: Sequence[EqualityDeletes]
    bytes_read: int

    def rewritten(self) -> "Step":
        """The same step as if each touched file were gone and had come again."""
        self.gone.addAll(self.touched_before)
        self.came.addAll(self.touched_after)
        none = self.touched_before.subList(0, 0)
        return replace(self, touched_before=none, touched_after=none)


class History:
    """The snapshots of one table, and what lies between them."""

    def __init__(self, table: Table):
        self._table = table.java
        self._jvm = table.jvm
        self._fresh_metadata = table.fresh_metadata
        self._lists = JavaFileLists(table.jvm)
        self._unavailable = f"could not read the history of table {table.name}"
        self._listed: Mapping[int, Snapshot] = {}
        self._listed_from: str | None = None
        self.name = str(table.name)
        with as_unavailable(self._unavailable):
            metadata = self._table.operations().current()
            self.uuid = str(metadata.uuid())
        if self.format_version < _SEQUENCES_FROM_VERSION:
            raise ConfigInvalid(
                f"table {self.name} has format version {self.format_version}",
                detail="Its snapshots bear no sequence numbers, so their order cannot be trusted.",
                hint="Upgrade it: ALTER TABLE ... SET TBLPROPERTIES ('format-version' = '2').",
            )

    @property
    def format_version(self) -> int:
        """The format version by the metadata that was read last."""
        return int(self._table.operations().current().formatVersion())

    @property
    def has_row_ids(self) -> bool:
        """Whether every row keeps an id of its own for life."""
        return self.format_version >= _LINEAGE_FROM_VERSION

    def head(self, branch: str) -> Snapshot | None:
        """The branch's newest snapshot, by fresh metadata; None when there is none.

        Raises `ConfigInvalid` when there is no such branch.
        """
        with as_unavailable(self._unavailable):
            reference = self._reference(branch)
            return self._known().get(reference.snapshotId()) if reference else None

    def snapshot(self, snapshot_id: int) -> Snapshot | None:
        """The snapshot of this id; None when the table has none."""
        with as_unavailable(self._unavailable):
            return self._known().get(snapshot_id)

    def at(self, branch: str, sequence_number: int) -> Snapshot:
        """The snapshot of the branch that bears a sequence number; raises as `since` does."""
        newer = self._back_to(branch, sequence_number)
        return newer[0]

    def since(self, branch: str, sequence_number: int | None) -> list[Snapshot]:
        """The snapshots of the branch after the one with this sequence number, oldest first.

        None stands before the first. Raises `HistoryLost` when that one was expired and
        `RolledBack` when the branch went back to before it.
        """
        if sequence_number is None:
            return self._from_first(branch)
        return self._back_to(branch, sequence_number)[1:]

    def path(
        self, branch: str, start: int | None, end: int
    ) -> tuple[Snapshot | None, list[Snapshot]]:
        """The snapshot with sequence number `start`, and those after it up to number `end`.

        They are of the branch, oldest first. None for `start` stands before the first. Raises as
        `since` does.
        """
        if start is None:
            older, newer = None, self._from_first(branch)
        else:
            older, *newer = self._back_to(branch, start)
        found = [each for each in newer if each.sequence_number <= end]
        if not found or found[-1].sequence_number != end:
            # The branch went elsewhere, which this raises, unless it has just come back.
            self.at(branch, end)
            return self.path(branch, start, end)
        return older, found

    def between(self, start: int | None, end: int) -> list[Snapshot]:
        """The snapshots after `start` up to `end`, oldest first; None begins with the first.

        Raises `ConfigInvalid` when `start` is not among the ancestors of `end`, or there is no
        `end`.
        """
        found: list[Snapshot] = []
        with as_unavailable(self._unavailable):
            self._metadata()
            for each in self._ancestors(end):
                if each.id == start:
                    return found[::-1]
                found.append(each)
        if not found:
            raise ConfigInvalid(
                f"table {self.name} has no snapshot {end}",
                hint="Choose snapshots from the table's history: SELECT * FROM <table>.history.",
            )
        if start is not None or found[-1].parent_id is not None:
            raise ConfigInvalid(
                f"the history of table {self.name} before snapshot {end} "
                + (f"does not hold snapshot {start}" if start else "has been expired in part"),
                hint="Choose snapshots from the table's history: SELECT * FROM <table>.history.",
            )
        return found[::-1]

    def schema_json(self, snapshot: Snapshot) -> str:
        """The schema that a snapshot was written with, as Iceberg prints it."""
        with as_unavailable(self._unavailable):
            return str(self._jvm.org.apache.iceberg.SchemaParser.toJson(self._schema(snapshot)))

    def files(self, snapshot: Snapshot) -> "Files":
        """All files of a snapshot, in an order that is the same whenever it is asked."""
        with as_unavailable(self._unavailable):
            tasks = self._lists.sorted(self._planned(snapshot.id))
            return Files(tasks=tasks, sizes=self._lists.sizes(tasks))

    def plain(self, tasks: Any) -> list[PlainFile] | None:
        """The files that tasks read; None when one of them is not plain."""
        with as_unavailable(self._unavailable):
            found = self._lists.plain(tasks)
        if found is None:
            return None
        return [PlainFile(location=place, rows=rows) for place, rows in found]

    def step(
        self, older: Snapshot | None, path: Sequence[Snapshot], by_value: frozenset[int]
    ) -> Step:
        """What changed after `older` along a path of snapshots, whose last one is the newer state.

        Of equality deletes by exactly the columns `by_value` the values are used as they are, and
        no data file is scanned for them, if they reach all rows that have these values.
        """
        with as_unavailable(self._unavailable):
            picks, newer = self._lists, path[-1]
            came, gone = picks.nothing(), picks.nothing()
            changes = [self._changes(each.id) for each in path]
            for each in changes:
                came.addAll(picks.locations(each.addedDataFiles()))
                gone.addAll(picks.locations(each.removedDataFiles()))
            both = picks.copy(came)
            both.retainAll(gone)
            came.removeAll(both)
            gone.removeAll(both)
            equality, added, removed = self._deletes(older, changes, by_value)
            return self._step(older, newer, (gone, came), (added, removed), equality)

    def _step(
        self,
        older: Snapshot | None,
        newer: Snapshot,
        files: tuple[Any, Any],
        deletes: tuple[Any, Any],
        equality: Sequence[EqualityDeletes],
    ) -> Step:
        picks, (gone, came), (added, removed) = self._lists, files, deletes
        # Without position deletes no file that came can have lost a row already.
        other_deletes = added.size() or removed.size()
        one_step = newer.parent_id == (older.id if older else None)
        after = self._planned(newer.id) if other_deletes or not one_step else None
        before = self._planned(older.id) if older and (gone.size() or other_deletes) else None
        touched = picks.nothing()
        if after is not None:
            touched.addAll(picks.task_locations(picks.with_deletes(after, added)))
        if before is not None and removed.size():
            touched.addAll(picks.task_locations(picks.with_deletes(before, removed)))
        touched.removeAll(came)
        touched.removeAll(gone)
        came_tasks = picks.of(after, came) if after is not None else self._plain_tasks(newer, came)
        parts = {
            "gone": picks.of(before, gone),
            "came": came_tasks,
            "touched_before": picks.of(before, touched),
            "touched_after": picks.of(after, touched),
        }
        bytes_read = sum(sum(picks.sizes(tasks)) for tasks in parts.values())
        return Step(**parts, equality=equality, bytes_read=bytes_read)

    def _deletes(
        self, older: Snapshot | None, changes: Sequence[Any], by_value: frozenset[int]
    ) -> tuple[list[EqualityDeletes], Any, Any]:
        """Equality deletes that say it all, and the places of other added and removed deletes."""
        picks = self._lists
        added, removed, found = picks.nothing(), picks.nothing(), picks.no_tasks()
        reaching = self._reaching_specs(older, by_value) if len(changes) == 1 else frozenset()
        for each in changes:
            removed.addAll(picks.locations(each.removedDeleteFiles()))
            for file in each.addedDeleteFiles():
                ids = file.equalityFieldIds()
                if ids is not None and file.specId() in reaching and frozenset(ids) == by_value:
                    found.add(self._rows_of_deletes(file))
                else:
                    added.add(file.location())
        equality = [EqualityDeletes(field_ids=by_value, tasks=found)] if found.size() else []
        return equality, added, removed

    def _reaching_specs(self, older: Snapshot | None, by_value: frozenset[int]) -> frozenset[int]:
        """The partition specs whose deletes by these columns reach all rows with their values.

        A partition's deletes reach the files of that partition alone: that is enough if the values
        tell the partition and no file was written by another spec.
        """
        java = self._metadata_snapshot(older.id) if older else None
        manifests = java.dataManifests(self._table.io()) if java is not None else ()
        written_by = {int(manifest.partitionSpecId()) for manifest in manifests}
        found = set()
        for number, spec in self._table.specs().items():
            sources = {int(field.sourceId()) for field in spec.fields()}
            told = sources <= by_value and written_by <= {int(number)}
            if spec.isUnpartitioned() or told:
                found.add(int(number))
        return frozenset(found)

    def _rows_of_deletes(self, file: Any) -> Any:
        """A task that reads a delete file's rows as if they were a table's."""
        iceberg = self._jvm.org.apache.iceberg
        spec = iceberg.PartitionSpec.unpartitioned()
        builder = (
            iceberg.DataFiles.builder(spec)
            .withPath(file.location())
            .withFormat(file.format())
            .withRecordCount(file.recordCount())
            .withFileSizeInBytes(file.fileSizeInBytes())
        )
        if file.keyMetadata() is not None:
            builder = builder.withEncryptionKeyMetadata(file.keyMetadata())
        return self._lists.task(self._table.schema(), spec, builder.build())

    def _plain_tasks(self, snapshot: Snapshot, locations: Any) -> Any:
        """Tasks for files that came with a snapshot and that no delete reaches."""
        picks = self._lists
        tasks = picks.no_tasks()
        files = picks.files_at(self._changes(snapshot.id).addedDataFiles(), locations)
        for spec in self._table.specs().values():
            tasks.addAll(picks.tasks(self._schema(snapshot), spec, files))
        return tasks

    def _planned(self, snapshot_id: int) -> Any:
        found = self._lists.no_tasks()
        tasks = self._table.newScan().useSnapshot(snapshot_id).planFiles()
        try:
            self._lists.add_all(found, tasks)
        finally:
            tasks.close()
        return found

    def _changes(self, snapshot_id: int) -> Any:
        """A snapshot's files by the table's specs: a manifest's own may lack a dropped column."""
        builder = self._jvm.org.apache.iceberg.SnapshotChanges.builderFor(self._table)
        return builder.snapshot(self._metadata_snapshot(snapshot_id)).build()

    def _metadata(self) -> Any:
        return self._fresh_metadata()

    def _reference(self, branch: str) -> Any:
        """The branch by fresh metadata; only the main one may not be there yet."""
        metadata = self._metadata()
        found = metadata.ref(branch)
        if found is not None and found.isBranch():
            return found
        if found is None and branch == MAIN:
            return None
        branches = [str(name) for name, each in metadata.refs().items() if each.isBranch()]
        raise ConfigInvalid(
            f"table {self.name} has no branch {branch}",
            detail="That is a tag." if found is not None else "It was never made, or dropped.",
            hint=f"Choose another `branch`, or make it. There are: {', '.join(sorted(branches))}.",
        )

    def _metadata_snapshot(self, snapshot_id: int) -> Any:
        return self._table.operations().current().snapshot(snapshot_id)

    def _known(self) -> Mapping[int, Snapshot]:
        """All snapshots of the metadata that was read last, by id; each metadata is listed once."""
        metadata = self._table.operations().current()
        read_from = metadata.metadataFileLocation()
        if read_from is None or read_from != self._listed_from:
            # A snapshot of the format version 1 may not tell its schema.
            untold = int(self._table.schema().schemaId())
            told = self._lists.snapshots(metadata.snapshots())
            self._listed = {each.id: each for each in (_snapshot(row, untold) for row in told)}
            self._listed_from = read_from
        return self._listed

    def _schema(self, snapshot: Snapshot) -> Any:
        return self._table.schemas().get(snapshot.schema_id)

    def _ancestors(self, snapshot_id: int) -> Iterator[Snapshot]:
        """The snapshot and those before it, as far as they are kept."""
        known = self._known()
        found = known.get(snapshot_id)
        for _ in range(ANCESTORS_MAX):
            if found is None:
                return
            yield found
            if found.parent_id is None:
                return
            found = known.get(found.parent_id)

    def _from_first(self, branch: str) -> list[Snapshot]:
        with as_unavailable(self._unavailable):
            reference = self._reference(branch)
            found = list(self._ancestors(reference.snapshotId())) if reference else []
        if found and found[-1].parent_id is not None:
            raise self._expired("Its first snapshots are gone.")
        return found[::-1]

    def _back_to(self, branch: str, sequence_number: int) -> list[Snapshot]:
        """The branch's snapshots from the one with this sequence number on, oldest first."""
        with as_unavailable(self._unavailable):
            reference = self._reference(branch)
            found: list[Snapshot] = []
            for each in self._ancestors(reference.snapshotId()) if reference else ():
                found.append(each)
                if each.sequence_number <= sequence_number:
                    break
            if found and found[-1].sequence_number == sequence_number:
                return found[::-1]
            kept = {each.sequence_number for each in self._known().values()}
        passed = bool(found) and found[-1].sequence_number < sequence_number
        # Where the way back breaks off before that number, it may have been on the rest of it.
        broken = bool(found) and found[-1].parent_id is not None
        if passed or (sequence_number in kept and not broken):
            raise RolledBack(
                f"branch {branch} of table {self.name} was rolled back",
                detail=f"What was read last, sequence number {sequence_number}, is no longer part "
                "of its history.",
                hint="Roll the branch forward again, or remove the pipeline's progress and what it "
                "has written, so that the table is loaded anew.",
            )
        raise self._expired(
            f"Changes after sequence number {sequence_number} can no longer be told."
        )

    def _expired(self, detail: str) -> HistoryLost:
        return HistoryLost(
            f"the history of table {self.name} has been expired",
            detail=detail,
            hint="Remove the pipeline's progress and what it has written, so that the table is "
            "loaded anew, and keep snapshots longer than the pipeline may stand still.",
        )


def _snapshot(told: Sequence[str | None], untold_schema_id: int) -> Snapshot:
    """A snapshot by what `JavaFileLists.snapshots` tells of it."""
    id_, parent, number, operation, time_ms, schema, first_row_id, added, removed = told
    return Snapshot(
        id=int(id_ or 0),
        parent_id=int(parent) if parent else None,
        sequence_number=int(number or 0),
        operation=operation or "",
        time_ms=int(time_ms or 0),
        schema_id=int(schema) if schema else untold_schema_id,
        has_row_ids=first_row_id is not None,
        # Who adds nothing but removes files says only the latter.
        changed_bytes=int(added or 0) + int(removed or 0) if added or removed else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The files of a snapshot in a fixed order, and their sizes in bytes."""

    tasks: Any
    sizes: Sequence[int]

    def part(self, start: int, end: int) -> Any:
        """The tasks of some of them."""
        return self.tasks.subList(start, end)


class Stage:
    """Lets Spark read scan tasks, under one schema, until it is closed.

    Columns are called by `staged_name`, so that no name can clash or need quotes; all may be null,
    and those that Spark knows no type for are not there.
    """

    def __init__(self, table: Table, schema_id: int):
        self._jvm = table.jvm
        to_json = self._jvm.org.apache.iceberg.SchemaParser.toJson
        self.schema_json = str(to_json(table.java.schemas().get(schema_id)))
        self._view = table.viewed(schema_id)
        # Spark offers a row's place or its id, never both: places only of tables without lineage.
        self._marked = table.viewed(schema_id, without_lineage=True)
        self._manager = self._jvm.org.apache.iceberg.spark.ScanTaskSetManager.get()
        self._cache = table.table_cache()
        self._added: list[tuple[Any, str]] = []

    @property
    def has_marks(self) -> bool:
        """Whether rows can be staged with their marks; a newer type of a column prevents it."""
        return self._marked is not None

    def add(self, tasks: Any, marked: bool = False) -> str:
        """The name under which Spark finds the live rows of these tasks.

        If `marked` it finds the deleted rows as well, and `FILE`, `PLACE` and `DELETED` of each.
        """
        name, view = str(uuid.uuid4()), self._marked if marked else self._view
        self._cache.add(name, view)
        self._manager.stageTasks(view, name, tasks)
        self._added.append((view, name))
        return name

    def spark_schema(self) -> dict[str, Any]:
        """The columns of staged rows as Spark knows them, as plain data."""
        convert = self._jvm.org.apache.iceberg.spark.SparkSchemaUtil.convert
        found: dict[str, Any] = json.loads(convert(self._view.schema()).json())
        return found

    def close(self) -> None:
        """Nothing that was added can be read any more."""
        for view, name in self._added:
            self._manager.removeTasks(view, name)
            self._cache.remove(name)
        self._added = []
