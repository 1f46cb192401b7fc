"""Catalogs that Iceberg's own Java library opens, and the tables in them.

`publish_together` makes the snapshots of several tables visible in one request, each against the
metadata that was checked (`icestream.iceberg.swap`).
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from py4j.protocol import Py4JError

from icestream import failpoints
from icestream.errors import CommitConflict, ConfigInvalid
from icestream.iceberg.gateway import (
    JavaError,
    as_config,
    as_py4j,
    as_unavailable,
    class_names,
    commit_outcomes,
    reason,
    strings,
)
from icestream.iceberg.handle import TableName
from icestream.iceberg.new_table import NewTable, partition_spec, sort_order
from icestream.iceberg.swap import Prepared
from icestream.iceberg.table import Table

# Without an own limit a request to a silent catalog would wait for ever.
_REST_DEFAULTS = {
    "rest.client.connection-timeout-ms": "20000",
    "rest.client.socket-timeout-ms": "60000",
}
_MANY_TABLES = "commitTransaction"


class Catalog:
    """A catalog opened by Iceberg's library from the map of properties in the configuration."""

    def __init__(self, jvm: Any, hadoop_configuration: Any, properties: Mapping[str, str]):
        self._jvm = jvm
        given = {str(name): str(value) for name, value in properties.items()}
        settings = {**_REST_DEFAULTS, **given} if given.get("type") == "rest" else given
        self.label = given.get("uri") or given.get("warehouse") or given.get("type", "catalog")
        arguments = jvm.java.util.HashMap()
        for name, value in settings.items():
            arguments.put(name, value)
        with as_unavailable(f"could not open the catalog at {self.label}"):
            self._catalog = jvm.org.apache.iceberg.CatalogUtil.buildIcebergCatalog(
                given.get("name", "icestream"), arguments, hadoop_configuration
            )

    def load(self, name: TableName) -> "Table | None":
        """The table, or None when there is none of that name."""
        with as_unavailable(f"could not load table {name}"):
            identifier = self._identifier(name)
            if not self._catalog.tableExists(identifier):
                return None
            return Table(self._jvm, name, self._catalog.loadTable(identifier))

    def load_listed(self, name: TableName) -> "Table | None":
        """A table that `names` has listed, by one request; None when it is gone again."""
        with as_unavailable(f"could not load table {name}"):
            try:
                return Table(self._jvm, name, self._catalog.loadTable(self._identifier(name)))
            except JavaError as error:
                if "NoSuchTableException" in class_names(error):
                    return None
                raise

    def create(self, name: TableName, new: NewTable) -> "Table":
        """Create the table, and its namespace when needed; one made meanwhile is taken as it is."""
        jvm = self._jvm
        with as_unavailable(f"could not create table {name}"):
            self._create_namespace(name.namespace)
            schema = jvm.org.apache.iceberg.SchemaParser.fromJson(new.schema_json)
            builder = self._catalog.buildTable(self._identifier(name), schema)
            with as_config(f"cannot partition or sort table {name}"):
                builder = builder.withPartitionSpec(partition_spec(jvm, schema, new.partition_by))
                if new.sort_by:
                    builder = builder.withSortOrder(sort_order(jvm, schema, new.sort_by))
            for key, value in new.properties.items():
                builder = builder.withProperty(key, value)
            if new.location:
                builder = builder.withLocation(new.location)
            try:
                return Table(jvm, name, builder.create())
            except JavaError as error:
                if "AlreadyExistsException" not in class_names(error):
                    raise
                return Table(jvm, name, self._catalog.loadTable(self._identifier(name)))

    def names(self, namespace: tuple[str, ...]) -> list[TableName]:
        """The tables of a namespace; none when the namespace does not exist."""
        with as_unavailable(f"could not list the tables of {'.'.join(namespace)}"):
            try:
                found = self._catalog.listTables(self._namespace(namespace))
            except JavaError as error:
                if "NoSuchNamespaceException" in class_names(error):
                    return []
                raise
            return [TableName(namespace=namespace, name=str(table.name())) for table in found]

    def require_transactions(self) -> None:
        """Raise `ConfigInvalid` unless the catalog commits to many tables at once."""
        methods = {method.getName() for method in self._catalog.getClass().getMethods()}
        supported = _MANY_TABLES in methods
        if supported:
            try:
                # An empty list is refused by the client itself, once it has found the endpoint.
                with as_py4j():
                    self._catalog.commitTransaction(self._jvm.java.util.ArrayList())
            except JavaError as error:
                supported = "UnsupportedOperationException" not in class_names(error)
        if not supported:
            raise ConfigInvalid(
                f"the catalog at {self.label} cannot commit to many tables at once",
                hint="Use a REST catalog that supports transactions, or leave out `atomic`: each "
                "table then gets a commit of its own.",
            )

    def publish_together(self, prepared: Sequence[Prepared]) -> None:
        """Make the snapshots of all these tables visible, or none of them.

        Raises `CommitConflict` when one of the tables is no longer as it was, and `CommitUnknown`
        when the answer was lost. Nothing is deleted in either case.
        """
        iceberg = self._jvm.org.apache.iceberg
        commits = self._jvm.java.util.ArrayList()
        for one in prepared:
            identifier = self._identifier(one.table)
            commits.add(iceberg.catalog.TableCommit.create(identifier, one.base, one.new))
        names = ", ".join(sorted(str(one.table) for one in prepared))
        with commit_outcomes(f"tables {names}"):
            failpoints.reach(failpoints.BEFORE_SWAP)
            try:
                self._catalog.commitTransaction(commits)
            except JavaError as error:
                if "NoSuchTableException" not in class_names(error):
                    raise
                # Which one is gone, a fresh look at each of them tells.
                raise CommitConflict(
                    f"the catalog refused a commit to tables {names}", detail=reason(error)
                ) from error
            failpoints.reach(failpoints.AFTER_SWAP)

    def close(self) -> None:
        """Give back what the catalog's client holds."""
        if hasattr(self._catalog, "close"):
            try:
                self._catalog.close()
            except Py4JError:
                return

    def _create_namespace(self, namespace: tuple[str, ...]) -> None:
        if not self._catalog.namespaceExists(self._namespace(namespace)):
            try:
                self._catalog.createNamespace(self._namespace(namespace))
            except JavaError as error:
                if "AlreadyExistsException" not in class_names(error):
                    raise

    def _identifier(self, name: TableName) -> Any:
        namespace = self._namespace(name.namespace)
        return self._jvm.org.apache.iceberg.catalog.TableIdentifier.of(namespace, name.name)

    def _namespace(self, parts: tuple[str, ...]) -> Any:
        return self._jvm.org.apache.iceberg.catalog.Namespace.of(strings(self._jvm, parts))


DEFAULT_CATALOG = {
    "type": "jdbc",
    "name": "icestream",
    "uri": "jdbc:sqlite:icestream-data/catalog.db",
    "warehouse": "icestream-data/warehouse",
    "jdbc.schema-version": "V1",
}


def catalog_properties(catalog: Mapping[str, str]) -> dict[str, str]:
    """The catalog's properties, with the embedded default and local paths made absolute."""
    given = {str(name): str(value) for name, value in catalog.items()}
    properties = given or dict(DEFAULT_CATALOG)
    if properties.get("type") == "jdbc":
        properties.setdefault("jdbc.schema-version", "V1")
        prefix = "jdbc:sqlite:"
        uri = properties.get("uri", "")
        if uri.startswith(prefix) and not uri.startswith(f"{prefix}file:"):
            properties["uri"] = prefix + local_path(uri.removeprefix(prefix))
    if "warehouse" in properties and "/" in properties["warehouse"]:
        properties["warehouse"] = local_path(properties["warehouse"])
    return properties


def local_path(location: str) -> str:
    """A location without a scheme as an absolute path, so that every process means the same."""
    return location if ":" in location else os.path.abspath(location)
