"""One table of a catalog, and all that can be asked of it: the table of contents of this package.

| module | promise |
|---|---|
| `head` | what the table says of a pipeline, from fresh metadata |
| `swap` | one snapshot made visible against exactly these metadata |
| `target` | what workers need to write files of the table |
| `evolution` | the schema changed by steps that keep every row |
| `staged` | rows read by Spark through Iceberg's own reader |

What is none of these is here: properties, tags and identity, as the table was seen last.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from icestream.iceberg import progress as summaries
from icestream.iceberg.closed import FileClosed
from icestream.iceberg.evolution import evolve, never_held_rows, shape_anew
from icestream.iceberg.gateway import as_unavailable, dictionary
from icestream.iceberg.handle import TableHandle, TableName
from icestream.iceberg.head import Past, TableHead, fed, last_epoch_snapshot, read_head
from icestream.iceberg.rows import Bound
from icestream.iceberg.staged import StagedReads
from icestream.iceberg.swap import Prepared, prepare, swap
from icestream.iceberg.target import WriteTarget, write_target
from icestream.schema import Column

# Who feeds a table, as JSON; see `icestream.sinks.iceberg.owners`.
OWNER_PROPERTY = "icestream.owner"


class Table:
    """One table of the catalog; each method's module says how it is done."""

    def __init__(self, jvm: Any, name: TableName, java: Any):
        self._handle = TableHandle(jvm, name, java)
        self._staging = StagedReads(self._handle)
        self.name = name

    @property
    def jvm(self) -> Any:
        """The gateway, for the modules of this package."""
        return self._handle.jvm

    @property
    def java(self) -> Any:
        """Iceberg's own object, for the modules of this package."""
        return self._handle.java

    def head(self, pipeline: str, branch: str) -> TableHead:
        """Fresh metadata, and what the pipeline's newest snapshot in the branch's history says.

        Snapshots of others, compactions among them, are stepped over.
        """
        return read_head(self._handle, pipeline, branch)

    def fed(self, pipeline: str, branch: str, table: str) -> bool | None:
        """Whether the pipeline's last epoch was of this source table; None when that is gone."""
        return fed(self._handle, pipeline, branch, table)

    def last_epoch_snapshot(self, pipeline: str, branch: str) -> int | None:
        """The snapshot of the pipeline's last epoch: claims and foreign snapshots come after it."""
        return last_epoch_snapshot(self._handle, pipeline, branch)

    def publish(
        self,
        head: TableHead,
        branch: str,
        files: Sequence[FileClosed],
        entries: summaries.Entries,
        truncated: bool = False,
    ) -> int:
        """Make one snapshot of these files visible, if the table still is as `head` saw it.

        The pipeline's tag moves in the same swap. Raises `CommitConflict` when the catalog refused
        it and `CommitUnknown` when the answer was lost. Nothing is deleted in either case.
        """
        return self.swap(self.prepare(head, branch, files, entries, truncated))

    def prepare(
        self,
        head: TableHead,
        branch: str,
        files: Sequence[FileClosed],
        entries: summaries.Entries,
        truncated: bool = False,
    ) -> Prepared:
        """Write the manifests of one snapshot and build the metadata that shows it.

        With `truncated` all that the branch holds is gone in that snapshot but these files.
        """
        return prepare(self._handle, head, branch, files, entries, truncated)

    def swap(self, prepared: Prepared) -> int:
        """Replace the metadata that was checked by the prepared one; returns the snapshot's id."""
        return swap(self._handle, prepared)

    def target(
        self, branch: str, equality_columns: Sequence[str], schema_id: int | None = None
    ) -> WriteTarget:
        """What workers need to write files that this table can take as it is now.

        With the number of an older schema it is for reading alone: as changes were read then.
        """
        return write_target(self._handle, branch, equality_columns, schema_id)

    def evolve(
        self, columns: Sequence[Column], key: Sequence[str], noted: str | None = None
    ) -> bool:
        """Let the table take these columns of the source, in one commit; False if it does already.

        `key` names columns of the table that stay required, and `noted` the property that says the
        number of the new schema, if any. A schema that somebody else changes meanwhile is looked at
        again. Raises `SchemaRejected` when no safe change leads there.
        """
        return evolve(self._handle, columns, key, noted)

    def shape_anew(self, columns: Sequence[Column], noted: str) -> list[str]:
        """Give columns that have other types the ones given; for a table that never held rows.

        Returns their names. A column is dropped and added again under its name, which is no safe
        change where there are rows. One that is part of the identifier leaves it for a moment. All
        is one commit, as is the property `noted`, which gets the number of the new schema.
        """
        return shape_anew(self._handle, columns, noted)

    def never_held_rows(self) -> bool:
        """Whether no snapshot that the table knows has a file."""
        return never_held_rows(self._handle)

    def staged(
        self, branch: str, bounds: Mapping[int, Bound], at: Past | int | None = None
    ) -> AbstractContextManager[str | None]:
        """Let Spark read the branch's rows within these bounds, by field id, as long as it lasts.

        Yields the name to read from, or None when no file has such rows. Columns are called by
        `staged_name`, so that no name can clash or need quotes; those that Spark knows no type for
        are not there. `at` is a moment of the past, or the id of a snapshot, if not the newest one.
        """
        return self._staging.staged(branch, bounds, at)

    def holding(self, snapshot_id: int, bounds: Mapping[int, Bound]) -> Any:
        """Scan tasks of the files of a snapshot that may have rows within these bounds."""
        return self._staging.holding(snapshot_id, bounds)

    def viewed(self, schema_id: int, without_lineage: bool = False) -> Any:
        """A table for reading alone, with this one's columns called by their ids.

        `without_lineage` makes one of a format version that knows no row ids; None when that
        version does not know all the columns' types either.
        """
        return self._staging.viewed(schema_id, without_lineage)

    def table_cache(self) -> Any:
        """Where Spark finds a staged table; the gateway cannot tell the two `get`s apart."""
        return self._staging.table_cache()

    def fresh_metadata(self) -> Any:
        """The metadata as they are now; raises `ProgressLost` when this table is no more."""
        return self._handle.fresh_metadata()

    def schema_json(self) -> str:
        """The current schema as Iceberg prints it."""
        return self._handle.schema_json()

    def has_tag(self, pipeline: str) -> bool:
        """Whether the pipeline has ever committed to the table."""
        with self._handle.readable():
            metadata = self.java.operations().current()
            return metadata.ref(summaries.tag_name(pipeline)) is not None

    def uuid(self) -> str:
        """What tells the table from every other one, whatever its name is."""
        with self._handle.readable():
            return str(self.java.operations().current().uuid())

    def owner(self) -> str | None:
        """Who feeds the table, as its property said when it was seen last."""
        with self._handle.readable():
            found = self.java.operations().current().property(OWNER_PROPERTY, None)
            return None if found is None else str(found)

    def pipelines(self) -> list[str]:
        """The pipelines that have ever committed to the table, by their tags."""
        prefix = summaries.tag_name("")
        with self._handle.readable():
            refs = self.java.operations().current().refs()
            return sorted(
                str(name).removeprefix(prefix)
                for name in refs.keySet()
                if str(name).startswith(prefix) and refs.get(name).isTag()
            )

    def io_properties(self) -> dict[str, str]:
        """How the table's files are reached."""
        with self._handle.readable():
            return dictionary(self.java.io().properties())

    def partitioned_by(self) -> frozenset[int]:
        """The ids of the columns that the table is or was partitioned by."""
        with self._handle.readable():
            specs = self.java.specs().values()
            return frozenset(int(field.sourceId()) for spec in specs for field in spec.fields())

    def properties(self) -> dict[str, str]:
        """The table's properties."""
        with self._handle.readable():
            return self._handle.properties_of(self.java)

    def schema_id(self) -> int:
        """The number of the schema, which rises with every change; 0 as the table was made."""
        with self._handle.readable():
            return int(self.java.schema().schemaId())

    def identifier_columns(self) -> list[str]:
        """The names of the identifier fields."""
        with self._handle.readable():
            return sorted(self.java.schema().identifierFieldNames())

    def remember(self, name: str, value: str) -> None:
        """Set a property of the table, unless it has the value already."""
        with as_unavailable(f"could not set a property of table {self.name}"):
            self.java.refresh()
            if self.properties().get(name) != value:
                self.java.updateProperties().set(name, value).commit()

    def snapshot_time_ms(self, snapshot_id: int) -> int:
        """When a snapshot was committed, in milliseconds since 1970."""
        with self._handle.readable():
            metadata = self.java.operations().current()
            return int(metadata.snapshot(snapshot_id).timestampMillis())
