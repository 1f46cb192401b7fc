"""An Iceberg catalog in memory: what `IcebergSink` needs of a catalog and its tables, and no more.

Metadata is immutable and swapped as a whole, by the rule that REST catalogs follow: a commit lands
only if the branch and the pipeline's tag still are where the committer saw them, and the schema is
the one that the committer checked. Every call goes through a `Wire`, which a simulation replaces by
one that loses, delays and duplicates. Somebody else may drop tables and expire snapshots.
"""

import itertools
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from icestream.commit_protocol import swap_rule
from icestream.epoch import Progress, batch_id
from icestream.errors import (
    CommitConflict,
    CommitUnknown,
    FrontierLost,
    HistoryLost,
    IcestreamError,
    ProgressLost,
    TargetUnavailable,
)
from icestream.iceberg import progress as summaries
from icestream.iceberg.closed import FileClosed
from icestream.iceberg.gateway import replaced
from icestream.iceberg.handle import TableName
from icestream.iceberg.head import Past, TableHead
from icestream.iceberg.new_table import NewTable
from icestream.iceberg.table import OWNER_PROPERTY
from icestream.iceberg.target import WriteTarget
from icestream.schema import Column

T = TypeVar("T")

UNPARTITIONED = '{"spec-id":0,"fields":[]}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One commit; `paths` are the files it added, `truncated` says that no older one stays.

    `schema_id` is the schema that they were written with, `sequence` the commit's place in time.
    """

    id: int
    parent: int | None
    operation: str
    summary: Mapping[str, str]
    paths: Sequence[str]
    truncated: bool = False
    schema_id: int | None = None
    sequence: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A commit that is ready to be swapped in, and what it was checked against."""

    table: TableName
    base: "Metadata"
    branch: str
    tag: str
    snapshot: Snapshot
    properties: Mapping[str, str] = field(default_factory=dict)
    outdated: Sequence[str] = ()

    @property
    def snapshot_id(self) -> int:
        return self.snapshot.id


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """One state of a table."""

    uuid: str
    schema_id: int
    schema_json: str
    properties: Mapping[str, str]
    older_schemas: Mapping[int, str] = field(default_factory=dict)
    snapshots: Mapping[int, Snapshot] = field(default_factory=dict)
    refs: Mapping[str, int] = field(default_factory=dict)

    def head(self, branch: str) -> Snapshot | None:
        """The newest snapshot of a branch; one that does not exist yet starts where main is."""
        found = self.refs.get(branch, self.refs.get("main"))
        return self.snapshots[found] if found is not None else None

    def ancestry(self, branch: str = "main") -> Iterator[Snapshot]:
        """The snapshots of a branch from its head back to the first that is kept."""
        snapshot = self.head(branch)
        while snapshot is not None:
            yield snapshot
            snapshot = self.parent(snapshot)

    def parent(self, snapshot: Snapshot) -> Snapshot | None:
        """The one before; None also when it was expired."""
        return self.snapshots.get(snapshot.parent) if snapshot.parent is not None else None

    def with_snapshot(self, snapshot: Snapshot, branch: str, tag: str | None) -> "Metadata":
        """The state after a commit to the branch; the tag follows it."""
        refs = {**self.refs, branch: snapshot.id, **({tag: snapshot.id} if tag else {})}
        return replace(self, snapshots={**self.snapshots, snapshot.id: snapshot}, refs=refs)


class Wire:
    """How requests reach the catalog; this one delivers every request and every answer."""

    def ask(self, request: Callable[[], T]) -> T:
        """A question, which changes nothing."""
        return request()

    def send(self, request: Callable[[], T], lost: type[IcestreamError], what: str) -> T:
        """A change; `lost` is what the client raises when no answer comes."""
        return request()


class Lake:
    """The state that all clients share: tables by name.

    `expired`, `dropped` and `written` (properties) have what no table keeps any more, for whoever
    wants to tell what happened; `strayed` are files that came into a table whose schema was not
    theirs.
    """

    def __init__(self) -> None:
        self.tables: dict[TableName, Metadata] = {}
        self.expired: dict[int, Snapshot] = {}
        self.dropped: list[Metadata] = []
        self.written: dict[str, str] = {}
        self.strayed: list[str] = []
        self.asserts_schema = True
        self._ids = itertools.count(1)

    def next_id(self) -> int:
        """A snapshot id that was never used."""
        return next(self._ids)

    def swap(self, prepared: Sequence[Prepared]) -> None:
        """Swap all of these in, or none when the branch, tag or schema of one has moved."""
        after = {}
        for one in prepared:
            current = self.current(one.table)
            seen = one.base if swap_rule() else current
            if current.uuid != one.base.uuid:
                raise CommitConflict(f"table {one.table} is another one")
            if any(current.refs.get(r) != seen.refs.get(r) for r in (one.branch, one.tag)):
                raise CommitConflict(f"the head of table {one.table} has changed")
            if self.asserts_schema and current.schema_id != seen.schema_id:
                raise CommitConflict(f"the schema of table {one.table} has changed")
            parent = seen.head(one.branch)
            # Without the rule a request that is sent twice lands twice.
            again = one.snapshot.id in current.snapshots
            snapshot = replace(
                one.snapshot,
                id=self.next_id() if again else one.snapshot.id,
                parent=parent.id if parent else None,
                sequence=self.next_id(),
            )
            if one.snapshot.schema_id not in (None, current.schema_id):
                self.strayed += one.snapshot.paths
            swapped = current.with_snapshot(snapshot, one.branch, one.tag)
            properties = {**current.properties, **one.properties}
            self.written.update(properties)
            for name in one.outdated:
                properties.pop(name, None)
            after[one.table] = replace(swapped, properties=properties)
        self.tables.update(after)

    def current(self, name: TableName) -> Metadata:
        """The table as it is now; raises `ProgressLost` when it was dropped."""
        if name not in self.tables:
            raise ProgressLost(f"table {name} is gone")
        return self.tables[name]

    def create(self, name: TableName, schema_json: str, properties: Mapping[str, str]) -> None:
        """A new table, unless there is one."""
        if name not in self.tables:
            self.tables[name] = Metadata(
                # Names are drawn once per lake, so that a seed gives the same uuids again.
                uuid=str(uuid.uuid5(uuid.NAMESPACE_URL, f"{name}/{self.next_id()}")),
                schema_id=0,
                schema_json=schema_json,
                properties=dict(properties),
            )

    def drop(self, name: TableName) -> Metadata:
        """Somebody drops a table; returns what it was."""
        self.dropped.append(self.tables.pop(name))
        return self.dropped[-1]

    def expire(self, name: TableName, kept: int) -> None:
        """Somebody expires snapshots: so many of each reference are kept, its own among them."""
        metadata = self.tables[name]
        keep: set[int] = set()
        for ref in metadata.refs:
            keep |= {s.id for s in itertools.islice(metadata.ancestry(ref), max(1, kept))}
        self.expired.update({i: s for i, s in metadata.snapshots.items() if i not in keep})
        self.tables[name] = replace(
            metadata, snapshots={i: s for i, s in metadata.snapshots.items() if i in keep}
        )

    def foreign_commit(
        self, name: TableName, operation: str, summary: Mapping[str, str] = {}
    ) -> None:
        """A snapshot by somebody else on the table's main branch."""
        metadata = self.tables[name]
        head = metadata.head("main")
        snapshot = Snapshot(
            id=self.next_id(),
            parent=head.id if head else None,
            operation=operation,
            summary=dict(summary),
            paths=(),
            sequence=self.next_id(),
        )
        pipeline = summary.get(summaries.PIPELINE)
        tag = summaries.tag_name(pipeline) if pipeline else None
        self.tables[name] = metadata.with_snapshot(snapshot, "main", tag)

    def roll_back(self, name: TableName, snapshot_id: int | None) -> None:
        """Somebody sets the main branch back to an older snapshot, or to nothing."""
        metadata = self.tables[name]
        refs = {ref: at for ref, at in metadata.refs.items() if ref != "main"}
        if snapshot_id is not None:
            refs["main"] = snapshot_id
        self.tables[name] = replace(metadata, refs=refs)

    def evolve(self, name: TableName, columns: Sequence[Column] = ()) -> None:
        """The table gets a new schema, with further columns or just a new id."""
        metadata = self.current(name)
        schema = json.loads(metadata.schema_json)
        known = {column["name"] for column in schema["fields"]}
        for column in columns:
            if column.name not in known:
                schema["fields"].append(
                    {
                        "id": 1 + max(known_field["id"] for known_field in schema["fields"]),
                        "name": column.name,
                        "required": False,
                        "type": json.loads(column.type.model_dump_json()),
                    }
                )
        schema["schema-id"] = metadata.schema_id + 1
        older = {**metadata.older_schemas, metadata.schema_id: metadata.schema_json}
        self.tables[name] = replace(
            metadata,
            schema_id=metadata.schema_id + 1,
            schema_json=json.dumps(schema),
            older_schemas=older,
        )


class MemoryCatalog:
    """What `IcebergSink` needs of `icestream.iceberg.catalog.Catalog`."""

    def __init__(self, lake: Lake, wire: Wire | None = None):
        self._lake = lake
        self._wire = wire or Wire()

    def load(self, name: TableName) -> "MemoryTable | None":
        return self._wire.ask(
            lambda: MemoryTable(self._lake, name, self._wire) if name in self._lake.tables else None
        )

    def load_listed(self, name: TableName) -> "MemoryTable | None":
        return self.load(name)

    def create(self, name: TableName, new: NewTable) -> "MemoryTable":
        def make() -> MemoryTable:
            self._lake.create(name, new.schema_json, new.properties)
            return MemoryTable(self._lake, name, self._wire)

        return self._wire.send(make, TargetUnavailable, f"creating {name}")

    def names(self, namespace: tuple[str, ...]) -> list[TableName]:
        return self._wire.ask(
            lambda: [name for name in self._lake.tables if name.namespace == namespace]
        )

    def require_transactions(self) -> None:
        """It commits to many tables at once."""

    def publish_together(self, prepared: Sequence[Prepared]) -> None:
        what = f"{_told(prepared[0].snapshot.summary)} in {len(prepared)} tables at once"
        self._wire.send(lambda: self._lake.swap(prepared), CommitUnknown, what)

    def close(self) -> None:
        """There is nothing to close."""


class MemoryTable:
    """What `IcebergSink` needs of `icestream.iceberg.table.Table`.

    Like the real one a handle keeps the metadata it saw last; only `head` looks afresh.
    """

    def __init__(self, lake: Lake, name: TableName, wire: Wire):
        self.name = name
        self._lake = lake
        self._wire = wire
        self._current = lake.tables[name]

    def head(self, pipeline: str, branch: str) -> TableHead:
        self._current = metadata = self._fresh()
        snapshot = metadata.head(branch)
        # Older metadata files have what was expired.
        whole = replace(metadata, snapshots={**self._lake.expired, **metadata.snapshots})
        way = whole.ancestry(branch)
        newest = next((s for s in way if s.summary.get(summaries.PIPELINE) == pipeline), None)
        tagged = metadata.refs.get(summaries.tag_name(pipeline))
        rolled_back = tagged is not None and (newest is None or newest.id != tagged)
        progress, forgotten = None, False
        try:
            progress = self._progress(newest) if newest else None
        except FrontierLost:
            if not rolled_back:
                raise
            forgotten = True
        own = [newest, metadata.snapshots[tagged] if tagged is not None else None]
        return TableHead(
            uuid=metadata.uuid,
            snapshot_id=snapshot.id if snapshot else None,
            schema_id=metadata.schema_id,
            spec_id=0,
            progress=progress,
            claim_id=newest.summary.get(summaries.CLAIM) if newest else None,
            progress_snapshot_id=newest.id if newest else None,
            rolled_back_from=self._progress(metadata.snapshots[tagged])
            if rolled_back and tagged is not None
            else None,
            forgotten=forgotten,
            bounds=frozenset(s.summary.get(summaries.BOUNDS_PROPERTY) for s in own if s),
            metadata=metadata,
        )

    def publish(
        self,
        head: TableHead,
        branch: str,
        files: Sequence[FileClosed],
        entries: summaries.Entries,
        truncated: bool = False,
    ) -> int:
        prepared = self.prepare(head, branch, files, entries, truncated)
        what = f"{_told(entries.summary)} in {self.name}"
        self._wire.send(lambda: self._lake.swap([prepared]), CommitUnknown, what)
        return prepared.snapshot_id

    def prepare(
        self,
        head: TableHead,
        branch: str,
        files: Sequence[FileClosed],
        entries: summaries.Entries,
        truncated: bool = False,
    ) -> Prepared:
        snapshot = Snapshot(
            id=self._lake.next_id(),
            parent=None,
            operation="overwrite" if any(f.kind != "data" for f in files) else "append",
            summary=dict(entries.summary),
            paths=[file.path for file in files],
            truncated=truncated,
            schema_id=next((file.schema_id for file in files), None),
        )
        return Prepared(
            table=self.name,
            base=head.metadata,
            branch=branch,
            tag=summaries.tag_name(entries.summary[summaries.PIPELINE]),
            snapshot=snapshot,
            properties=entries.properties,
            outdated=summaries.outdated(head.metadata.properties, entries, head.bounds),
        )

    def target(
        self, branch: str, equality_columns: Sequence[str], schema_id: int | None = None
    ) -> WriteTarget:
        current = self._current
        schemas = {**current.older_schemas, current.schema_id: current.schema_json}
        number = current.schema_id if schema_id is None else schema_id
        return WriteTarget(
            table=str(self.name),
            uuid=self._current.uuid,
            location=f"memory/{self.name}",
            schema_id=number,
            schema_json=schemas[number],
            spec_id=0,
            spec_json=UNPARTITIONED,
            global_spec_id=0,
            one_spec=True,
            sort_columns=(),
            sort_order_id=0,
            properties=self._current.properties,
            io_properties={},
            equality_columns=list(equality_columns),
        )

    def has_tag(self, pipeline: str) -> bool:
        return summaries.tag_name(pipeline) in self._current.refs

    def uuid(self) -> str:
        return self._current.uuid

    def owner(self) -> str | None:
        return self._current.properties.get(OWNER_PROPERTY)

    def pipelines(self) -> list[str]:
        prefix = summaries.tag_name("")
        return sorted(
            ref.removeprefix(prefix) for ref in self._current.refs if ref.startswith(prefix)
        )

    def fed(self, pipeline: str, branch: str, table: str) -> bool | None:
        for snapshot in self._current.ancestry(branch):
            found = snapshot.summary.get(summaries.BATCH_ID)
            if snapshot.summary.get(summaries.PIPELINE) == pipeline and found:
                return batch_id(pipeline, table, self._progress(snapshot).upper) == found
        return None

    def remember(self, name: str, value: str) -> None:
        def change() -> None:
            metadata = self._lake.current(self.name)
            properties = {**metadata.properties, name: value}
            self._lake.tables[self.name] = replace(metadata, properties=properties)

        self._wire.send(change, TargetUnavailable, f"setting a property of {self.name}")
        self._current = self._lake.current(self.name)

    def properties(self) -> dict[str, str]:
        return dict(self._current.properties)

    def schema_json(self) -> str:
        return self._current.schema_json

    def schema_id(self) -> int:
        return 0

    def never_held_rows(self) -> bool:
        return not any(snapshot.paths for snapshot in self._current.snapshots.values())

    def shape_anew(self, columns: Sequence[Column], noted: str) -> list[str]:
        return []

    def identifier_columns(self) -> list[str]:
        schema: dict[str, Any] = json.loads(self._current.schema_json)
        ids = schema.get("identifier-field-ids", [])
        return sorted(column["name"] for column in schema["fields"] if column["id"] in ids)

    def evolve(
        self, columns: Sequence[Column], key: Sequence[str], noted: str | None = None
    ) -> bool:
        self._wire.send(
            lambda: self._lake.evolve(self.name, columns),
            TargetUnavailable,
            f"adding columns to {self.name}",
        )
        self._current = self._lake.current(self.name)
        return True

    @contextmanager
    def staged(
        self, branch: str, bounds: Mapping[int, Any], at: Past | int | None = None
    ) -> Iterator[str | None]:
        """The snapshot to read from, by its id: the newest, or one of the past."""
        metadata = self._fresh()
        snapshot = metadata.head(branch)
        if isinstance(at, Past):
            snapshot = self._before(metadata, snapshot, at)
        yield str(snapshot.id) if snapshot else None

    def _before(self, metadata: Metadata, snapshot: Snapshot | None, past: Past) -> Snapshot | None:
        found = snapshot
        while snapshot is not None:
            if snapshot.summary.get(summaries.PIPELINE) == past.pipeline:
                if past.before.covers(self._past_progress(metadata, snapshot).upper):
                    return found
                found = metadata.parent(snapshot)
                if found is None and snapshot.parent is not None:
                    raise HistoryLost(f"table {self.name} no longer has a snapshot")
            snapshot = metadata.parent(snapshot)
        return found

    def _fresh(self) -> Metadata:
        metadata = self._wire.ask(lambda: self._lake.current(self.name))
        if metadata.uuid != self._current.uuid:
            raise replaced(self.name)
        return metadata

    def _past_progress(self, metadata: Metadata, snapshot: Snapshot) -> Progress:
        try:
            return progress_in(metadata.properties, snapshot)
        except FrontierLost as error:
            raise HistoryLost(f"table {self.name} no longer has a frontier") from error

    def _progress(self, snapshot: Snapshot) -> Progress:
        return progress_in(self._current.properties, snapshot)


def progress_in(properties: Mapping[str, str], snapshot: Snapshot) -> Progress:
    """What a snapshot says is durable."""

    def no_file(path: str) -> bytes:
        raise FileNotFoundError(path)

    return summaries.from_summary(snapshot.summary, properties, no_file, "memory")


def _told(summary: Mapping[str, str]) -> str:
    """A commit in few words, for traces."""
    generation, epoch = summary[summaries.GENERATION], summary[summaries.EPOCH]
    if summaries.BATCH_ID not in summary:
        return f"claim {generation} at epoch {epoch}"
    span = f"{summary.get(summaries.LOWER)} to {summary.get(summaries.FRONTIER)}"
    return f"epoch {epoch} by {generation}, {span}, of {summary[summaries.EPOCH_TABLES]} tables"
