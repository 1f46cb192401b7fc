"""Collections of files and scan tasks of Iceberg's library, and how some of them are picked.

All of it happens inside the JVM: a call through the gateway for each of many thousands of files
would take longer than reading their metadata. What is asked of each of them is put together from
handles of the library's own methods, since there is no Java code of ours.
"""

from collections.abc import Sequence
from typing import Any

_NOTHING = "null"
_GUAVA = "org.apache.iceberg.relocated.com.google.common"


class JavaFileLists:
    """Collections of files and scan tasks, and how some of them are picked."""

    def __init__(self, jvm: Any):
        self._jvm = jvm
        self._handles = jvm.java.lang.invoke.MethodHandles
        self._lookup = self._handles.publicLookup()
        self._guava = jvm.org.apache.iceberg.relocated.com.google.common
        file = self._class("org.apache.iceberg.ContentFile")
        file_of = self._method("org.apache.iceberg.ContentScanTask", "file", file)
        location = self._method(file, "location", self._class("java.lang.String"))
        size = self._method(file, "fileSizeInBytes", self._primitive("Long"))
        self._task_place = self._handles.filterReturnValue(file_of, location)
        self._location = self._function(location)
        self._spec = self._function(self._method(file, "specId", self._primitive("Integer")))
        self._task_location = self._function(self._task_place)
        self._task_size = self._function(self._handles.filterReturnValue(file_of, size))

    def nothing(self) -> Any:
        """An empty set of places of files."""
        return self._jvm.java.util.HashSet()

    def copy(self, places: Any) -> Any:
        """The same set once more."""
        return self._jvm.java.util.HashSet(places)

    def no_tasks(self) -> Any:
        """An empty list of tasks."""
        return self._jvm.java.util.ArrayList()

    def add_all(self, target: Any, source: Any) -> None:
        """Add all of an iterable to a collection."""
        self._guava.collect.Iterables.addAll(target, source)

    def locations(self, files: Any) -> Any:
        """The places of files."""
        found = self.nothing()
        self.add_all(found, self._guava.collect.Iterables.transform(files, self._location))
        return found

    def task_locations(self, tasks: Any) -> Any:
        """The places of the files that tasks read."""
        found = self.nothing()
        self.add_all(found, self._guava.collect.Iterables.transform(tasks, self._task_location))
        return found

    def of(self, tasks: Any, places: Any) -> Any:
        """The tasks that read files at these places; none of no tasks (None)."""
        if tasks is None:
            return self.no_tasks()
        return self._filtered(tasks, self._among(places, self._task_location))

    def files_at(self, files: Any, places: Any) -> Any:
        """The files at these places."""
        return self._filtered(files, self._among(places, self._location))

    def with_deletes(self, tasks: Any, places: Any) -> Any:
        """The tasks whose file has a delete file at one of these places."""
        java_list = self._class("java.util.List")
        collection = self._class("java.util.Collection")
        function = self._class(f"{_GUAVA}.base.Function")
        boolean = self._primitive("Boolean")
        deletes = self._method("org.apache.iceberg.FileScanTask", "deletes", java_list)
        transform = self._static(
            f"{_GUAVA}.collect.Lists", "transform", java_list, java_list, function
        )
        to_places = self._handles.insertArguments(
            transform, 1, self._array("java.lang.Object", [self._location])
        )
        disjoint = self._static(
            "java.util.Collections", "disjoint", boolean, collection, collection
        ).bindTo(places)
        disjoint = disjoint.asType(self._type(boolean, java_list))
        both = self._handles.filterReturnValue(deletes, to_places)
        untouched = self._proxy(
            f"{_GUAVA}.base.Predicate", self._handles.filterReturnValue(both, disjoint)
        )
        return self._filtered(tasks, getattr(self._guava.base.Predicates, "not")(untouched))

    def sorted(self, tasks: Any) -> Any:
        """The tasks in the order of their files' places."""
        order = self._jvm.java.util.Comparator.comparing(
            self._proxy("java.util.function.Function", self._task_place)
        )
        self._jvm.java.util.Collections.sort(tasks, order)
        return tasks

    def sizes(self, tasks: Any) -> list[int]:
        """The sizes of the tasks' files in bytes."""
        sizes = self._guava.collect.Iterables.transform(tasks, self._task_size)
        text = str(self._guava.base.Joiner.on(",").join(sizes))
        return [int(size) for size in text.split(",")] if text else []

    def plain(self, tasks: Any) -> list[tuple[str, int]] | None:
        """Places and row counts of the tasks' files; None when one is not Parquet or has deletes.

        Nor is an encrypted file plain, or one at a place that holds a line's end.
        """
        file = self._class("org.apache.iceberg.ContentFile")
        file_of = self._method("org.apache.iceberg.ContentScanTask", "file", file)
        deletes = self._method(
            "org.apache.iceberg.FileScanTask", "deletes", self._class("java.util.List")
        )
        told = [
            self._told(tasks, self._handles.filterReturnValue(file_of, method))
            for method in (
                self._method(file, "format", self._class("org.apache.iceberg.FileFormat")),
                self._method(file, "keyMetadata", self._class("java.nio.ByteBuffer")),
                self._method(file, "location", self._class("java.lang.String")),
                self._method(file, "recordCount", self._primitive("Long")),
            )
        ]
        formats, secrets, places, counts = told
        if {*formats} - {"PARQUET"} or {*secrets} - {_NOTHING} or len(places) != len(counts):
            return None
        if {*self._told(tasks, deletes)} - {"[]"}:
            return None
        return list(zip(places, map(int, counts), strict=True))

    def snapshots(self, snapshots: Any) -> list[tuple[str | None, ...]]:
        """What each snapshot tells of itself; each thing is asked of all of them at once.

        In this order: id, parent's id, sequence number, operation, time in milliseconds, schema's
        id, first row id, and the bytes of the files that it added and removed.
        """
        kind = self._class("org.apache.iceberg.Snapshot")
        long, boxed = self._primitive("Long"), self._class("java.lang.Long")
        asked = {
            "snapshotId": long,
            "parentId": boxed,
            "sequenceNumber": long,
            "operation": self._class("java.lang.String"),
            "timestampMillis": long,
            "schemaId": self._class("java.lang.Integer"),
            "firstRowId": boxed,
        }
        handles = [self._method(kind, name, result) for name, result in asked.items()]
        handles += [self._of_summary("added-files-size"), self._of_summary("removed-files-size")]
        told = [self._told(snapshots, handle) for handle in handles]
        rows = zip(*told, strict=True)
        return [tuple(None if text == _NOTHING else text for text in row) for row in rows]

    def _of_summary(self, name: str) -> Any:
        """A handle of what a snapshot's summary, if it has one, says under a name."""
        java_map, anything = self._class("java.util.Map"), self._class("java.lang.Object")
        summary = self._method("org.apache.iceberg.Snapshot", "summary", java_map)
        default = self._static(
            "java.util.Objects", "requireNonNullElse", anything, anything, anything
        )
        empty = self._array("java.lang.Object", [self._jvm.java.util.Map.of()])
        there = self._handles.insertArguments(default, 1, empty)
        there = there.asType(self._type(java_map, java_map))
        get = self._lookup.findVirtual(java_map, "get", self._type(anything, anything))
        named = self._handles.insertArguments(get, 1, self._array("java.lang.Object", [name]))
        return self._handles.filterReturnValue(
            self._handles.filterReturnValue(summary, there), named
        )

    def _told(self, items: Any, handle: Any) -> list[str]:
        """What a method says of each item, as text."""
        answers = self._guava.collect.Iterables.transform(items, self._function(handle))
        text = str(self._guava.base.Joiner.on("\n").useForNull(_NOTHING).join(answers))
        return text.split("\n") if text else []

    def task(self, schema: Any, spec: Any, file: Any) -> Any:
        """A task that reads one file, to which no deletes apply."""
        return self._jvm.org.apache.iceberg.BaseFileScanTask(file, *self._rest(schema, spec))

    def tasks(self, schema: Any, spec: Any, files: Any) -> Any:
        """Tasks for those of the files that have this partition spec, without deletes."""
        kinds = [
            *("org.apache.iceberg.DataFile", "[Lorg.apache.iceberg.DeleteFile;"),
            *("java.lang.String", "java.lang.String"),
            "org.apache.iceberg.expressions.ResidualEvaluator",
        ]
        void = self._primitive("Void")
        made = self._lookup.findConstructor(
            self._class("org.apache.iceberg.BaseFileScanTask"),
            self._type(void, *(self._class(kind) for kind in kinds)),
        )
        rest = self._array("java.lang.Object", self._rest(schema, spec))
        make = self._function(self._handles.insertArguments(made, 1, rest))
        same = self._guava.base.Predicates.compose(
            self._guava.base.Predicates.equalTo(spec.specId()), self._spec
        )
        return self._list(
            self._guava.collect.Iterables.transform(self._filtered(files, same), make)
        )

    def _rest(self, schema: Any, spec: Any) -> list[Any]:
        iceberg = self._jvm.org.apache.iceberg
        everything = iceberg.expressions.Expressions.alwaysTrue()
        return [
            self._array("org.apache.iceberg.DeleteFile", []),
            iceberg.SchemaParser.toJson(schema),
            iceberg.PartitionSpecParser.toJson(spec),
            iceberg.expressions.ResidualEvaluator.unpartitioned(everything),
        ]

    def _among(self, places: Any, place_of: Any) -> Any:
        predicates = self._guava.base.Predicates
        return predicates.compose(getattr(predicates, "in")(places), place_of)

    def _filtered(self, items: Any, predicate: Any) -> Any:
        return self._list(self._guava.collect.Iterables.filter(items, predicate))

    def _list(self, items: Any) -> Any:
        found = self._jvm.java.util.ArrayList()
        self.add_all(found, items)
        return found

    def _class(self, name: str) -> Any:
        loader = self._jvm.java.lang.Thread.currentThread().getContextClassLoader()
        return self._jvm.java.lang.Class.forName(name, True, loader)

    def _primitive(self, name: str) -> Any:
        return getattr(self._jvm.java.lang, name).TYPE

    def _type(self, result: Any, *arguments: Any) -> Any:
        listed = self._jvm.java.util.ArrayList()
        for argument in arguments:
            listed.add(argument)
        return self._jvm.java.lang.invoke.MethodType.methodType(result, listed)

    def _method(self, owner: Any, name: str, result: Any) -> Any:
        kind = self._class(owner) if isinstance(owner, str) else owner
        return self._lookup.findVirtual(kind, name, self._type(result))

    def _static(self, owner: str, name: str, result: Any, *arguments: Any) -> Any:
        return self._lookup.findStatic(self._class(owner), name, self._type(result, *arguments))

    def _function(self, handle: Any) -> Any:
        return self._proxy(f"{_GUAVA}.base.Function", handle)

    def _proxy(self, interface: str, handle: Any) -> Any:
        proxies = self._jvm.java.lang.invoke.MethodHandleProxies
        return proxies.asInterfaceInstance(self._class(interface), handle)

    def _array(self, kind: str, items: Sequence[Any]) -> Any:
        array = self._jvm.java.lang.reflect.Array.newInstance(self._class(kind), len(items))
        for number, item in enumerate(items):
            array[number] = item
        return array
