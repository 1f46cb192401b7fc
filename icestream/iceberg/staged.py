"""Rows of a table that Spark reads through Iceberg's own reader, without a name in any catalog.

Columns are called by their ids (`staged_name`), so that no name can clash or need quotes.
"""

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from icestream.iceberg.gateway import JavaError, as_py4j, as_unavailable, class_names
from icestream.iceberg.handle import TableHandle, latest
from icestream.iceberg.head import Past, snapshot_before, snapshot_forgotten
from icestream.iceberg.rows import Bound

# In metadata that are only read; it stands at the snapshot whose rows are wanted.
_STAGED_BRANCH = "icestream-staged"
VERSION_WITHOUT_LINEAGE = 2


class StagedReads:
    """What of one table is staged for Spark, and tables for reading alone that were made of it."""

    def __init__(self, handle: TableHandle):
        self._handle = handle
        self._views: dict[tuple[int, int, str], Any] = {}

    @contextmanager
    def staged(
        self, branch: str, bounds: Mapping[int, Bound], at: Past | int | None = None
    ) -> Iterator[str | None]:
        """Let Spark read the branch's rows within these bounds, by field id, as long as it lasts.

        Yields the name to read from, or None when no file has such rows. Columns are called by
        `staged_name`, so that no name can clash or need quotes; those that Spark knows no type for
        are not there. `at` is a moment of the past, or the id of a snapshot, if not the newest one.
        """
        with as_unavailable(f"could not plan a scan of table {self._handle.name}"):
            metadata = self._handle.fresh_metadata()
            snapshot = self._snapshot_at(metadata, branch, at)
            table = self._renamed(metadata, snapshot)
            tasks = self._planned(table, bounds) if snapshot else None
            staged_id = str(uuid.uuid4())
            cache = self.table_cache()
            manager = self._handle.jvm.org.apache.iceberg.spark.ScanTaskSetManager.get()
        if tasks is None or tasks.isEmpty():
            yield None
            return
        cache.add(staged_id, table)
        manager.stageTasks(table, staged_id, tasks)
        try:
            yield staged_id
        finally:
            manager.removeTasks(table, staged_id)
            cache.remove(staged_id)

    def holding(self, snapshot_id: int, bounds: Mapping[int, Bound]) -> Any:
        """Scan tasks of the files of a snapshot that may have rows within these bounds."""
        with as_unavailable(f"could not plan a scan of table {self._handle.name}"):
            metadata = self._handle.java.operations().current()
            table = self._renamed(metadata, metadata.snapshot(snapshot_id))
            schema = metadata.schema()
            # Nothing can be said of a column that was dropped since.
            known = {at: each for at, each in bounds.items() if schema.findField(at) is not None}
            return self._planned(table, known)

    def viewed(self, schema_id: int, without_lineage: bool = False) -> Any:
        """A table for reading alone, with this one's columns called by their ids.

        `without_lineage` makes one of a format version that knows no row ids; None when that
        version does not know all the columns' types either.
        """
        metadata = self._handle.java.operations().current()
        version = VERSION_WITHOUT_LINEAGE if without_lineage else metadata.formatVersion()
        made_of = (schema_id, version, metadata.location())
        if made_of not in self._views:
            self._views[made_of] = self._view(metadata, *made_of)
        return self._views[made_of]

    def table_cache(self) -> Any:
        """Where Spark finds a staged table; the gateway cannot tell the two `get`s apart."""
        loader = self._handle.jvm.java.lang.Thread.currentThread().getContextClassLoader()
        kind = loader.loadClass("org.apache.iceberg.spark.SparkTableCache")
        return kind.getMethod("get", None).invoke(None, None)

    def _snapshot_at(self, metadata: Any, branch: str, at: Past | int | None) -> Any:
        """The branch's head, its state at a moment of the past, or the snapshot of an id."""
        if isinstance(at, Past):
            return snapshot_before(self._handle, metadata, latest(metadata, branch), at)
        if at is None:
            return latest(metadata, branch)
        if metadata.snapshot(at) is None:
            raise snapshot_forgotten(self._handle.name)
        return metadata.snapshot(at)

    def _planned(self, table: Any, bounds: Mapping[int, Bound]) -> Any:
        """The files that may hold rows within the bounds, as the staged branch has them."""
        scan = table.newScan().useRef(_STAGED_BRANCH)
        for number, bound in bounds.items():
            scan = scan.filter(self._expression(staged_name(number), bound))
        found = self._handle.jvm.java.util.ArrayList()
        guava = self._handle.jvm.org.apache.iceberg.relocated.com.google.common
        tasks = scan.planFiles()
        try:
            guava.collect.Iterables.addAll(found, tasks)
        finally:
            tasks.close()
        return found

    def _view(self, metadata: Any, schema_id: int, version: int, location: str) -> Any:
        """See `viewed`; None when the format version does not know the type of a column."""
        iceberg = self._handle.jvm.org.apache.iceberg
        fields = self._renamed_fields(self._handle.java.schemas().get(schema_id), optional=True)
        try:
            with as_py4j():
                new = (
                    iceberg.TableMetadata.buildFromEmpty(version)
                    .assignUUID()
                    .setLocation(location)
                    .setCurrentSchema(iceberg.Schema(fields), metadata.lastColumnId())
                    .setDefaultPartitionSpec(iceberg.PartitionSpec.unpartitioned())
                    .setDefaultSortOrder(iceberg.SortOrder.unsorted())
                    .build()
                )
        except JavaError:
            if version < metadata.formatVersion():
                return None
            raise
        return iceberg.BaseTable(
            iceberg.StaticTableOperations(new, self._handle.java.io()), str(self._handle.name)
        )

    def _renamed(self, metadata: Any, snapshot: Any) -> Any:
        """The table with its columns called by their ids; never committed, only read.

        It has a branch at the snapshot: a branch is read with the table's schema, and a snapshot
        with the one of its time, in which columns have their own names.
        """
        iceberg = self._handle.jvm.org.apache.iceberg
        schema = iceberg.Schema(self._renamed_fields(metadata.schema()))
        new = iceberg.TableMetadata.buildFrom(metadata).setCurrentSchema(
            schema, metadata.lastColumnId()
        )
        if snapshot is not None:
            branch = iceberg.SnapshotRef.branchBuilder(snapshot.snapshotId()).build()
            new = new.setRef(_STAGED_BRANCH, branch)
        operations = iceberg.StaticTableOperations(new.build(), self._handle.java.io())
        return iceberg.BaseTable(operations, str(self._handle.name))

    def _renamed_fields(self, schema: Any, optional: bool = False) -> Any:
        fields = self._handle.jvm.java.util.ArrayList()
        for column in schema.columns():
            if self._known_to_spark(column):
                nested = self._handle.jvm.org.apache.iceberg.types.Types.NestedField
                copy = getattr(nested, "from")(column).withName(staged_name(column.fieldId()))
                fields.add((copy.asOptional() if optional else copy).build())
        return fields

    def _known_to_spark(self, column: Any) -> bool:
        try:
            with as_py4j():
                self._handle.jvm.org.apache.iceberg.spark.SparkSchemaUtil.convert(column.type())
            return True
        except JavaError as error:
            if "UnsupportedOperationException" not in class_names(error):
                raise
            return False

    def _expression(self, name: str, bound: Bound) -> Any:
        expressions = self._handle.jvm.org.apache.iceberg.expressions.Expressions
        if bound.ranged:
            low, high = bound.values
            return getattr(expressions, "and")(
                expressions.greaterThanOrEqual(name, low), expressions.lessThanOrEqual(name, high)
            )
        values = self._handle.jvm.java.util.ArrayList()
        for value in bound.values:
            values.add(value)
        return getattr(expressions, "in")(name, values)


def staged_name(field_id: int) -> str:
    """What a column is called where its rows are staged for Spark."""
    return f"c{field_id}"
