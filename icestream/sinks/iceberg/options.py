"""Options of the Iceberg sink, and how it is opened."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from icestream import spark as sessions
from icestream.dead_letters import LetterBox
from icestream.destination import Destination
from icestream.errors import ConfigInvalid
from icestream.iceberg.session import open_catalog
from icestream.names import ANY_TABLE, TableNames
from icestream.sinks import Sink
from icestream.sinks.options import SinkOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions:
    """What can be said of one table; it applies when the table is created, but for the name, the
    key and the delete columns."""

    table: str = field(
        default="",
        metadata={
            "doc": "Name in the catalog; the last part of the source's by default. A table that is "
            "there already is used only if it is named here."
        },
    )
    partition_by: Sequence[str] = field(
        default=(), metadata={"doc": "Partition terms such as `day(created_at)`, `bucket(16, id)`."}
    )
    sort_by: Sequence[str] = field(
        default=(), metadata={"doc": "Sort columns, each with an optional `desc`."}
    )
    properties: Mapping[str, str] = field(
        default_factory=dict, metadata={"doc": "Iceberg table properties."}
    )
    location: str = field(default="", metadata={"doc": "Where the table's files lie."})
    equality_delete_by: Sequence[str] = field(
        default=(), metadata={"doc": "Columns that identify a row; the source's key by default."}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOptions:
    """Which table a record of a topic belongs to; its topic's by default."""

    field: str = dataclasses.field(
        default="", metadata={"doc": "Field, or dotted path, whose value tells the table."}
    )
    tables: Mapping[str, str] = dataclasses.field(
        default_factory=dict,
        metadata={
            "doc": "A regular expression for the field's value by table. Without it the value is "
            "the table's name; without a field every record goes to every table named here."
        },
    )
    unmatched: str = dataclasses.field(
        default="reject",
        metadata={"doc": "A record that belongs to no table: `reject` (see `on_error`), `drop`."},
    )


def filled_from_itself(table: str) -> ConfigInvalid:
    """The error about a table that would grow for ever."""
    return ConfigInvalid(
        f"table {table} would be filled from itself",
        hint="Name another table, namespace or catalog at the sink.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class IcebergSinkOptions(SinkOptions):
    """Options of the Iceberg sink."""

    keeps_letters = True
    url_form = "iceberg://<rest-endpoint>/<namespace>/<table>?warehouse=s3://..."

    catalog: Mapping[str, str] = field(
        default_factory=dict,
        metadata={"doc": "Handed to Iceberg as it is; an embedded SQLite catalog by default."},
    )
    namespace: str = field(default="default", metadata={"doc": "Namespace of the tables."})
    tables: Mapping[str, TableOptions] = field(
        default_factory=dict,
        metadata={"doc": "Options by source table; those of `*` are for all that have none."},
    )
    branch: str = field(default="main", metadata={"doc": "Branch that commits go to."})
    format_version: int = field(
        default=2,
        metadata={"doc": "Iceberg format version of new tables, 2 or 3.", "choices": (2, 3)},
    )
    equality_delete_by: Sequence[str] = field(
        default=(), metadata={"doc": "Columns that identify a row, for every table."}
    )
    properties: Mapping[str, str] = field(
        default_factory=dict, metadata={"doc": "Iceberg table properties of new tables."}
    )
    route: RouteOptions | None = field(
        default=None, metadata={"doc": "Which table a record of a Kafka topic belongs to."}
    )
    lookup_bytes_max: int = field(
        default=256 * 1024 * 1024,
        metadata={
            "doc": "Bytes of a table's rows that are looked up for one epoch at most, for values "
            "that its changes leave out; they pass through the coordinator's memory.",
            "unit": "bytes",
        },
    )
    atomic: bool = field(
        default=False,
        metadata={"doc": "All tables of an epoch in one commit; needs a REST catalog."},
    )

    def open(self, pipeline: str, spark: Any) -> Sink:
        """The sink; see `SinkOptions.open`."""
        from icestream.sinks.iceberg.sink import IcebergSink

        read_rows = partial(sessions.stored_rows, spark, bytes_max=self.lookup_bytes_max)
        return IcebergSink(open_catalog(self.catalog, spark), self, pipeline, read_rows)

    def status(self, sink: Any, tables: Sequence[str], pipeline: str) -> list[dict[str, Any]]:
        """What the tables remember; see `SinkOptions.status`."""
        from icestream.sinks.iceberg.status import status

        return status(sink, tables, pipeline)

    @classmethod
    def from_url(cls, url: str) -> Self:
        """`iceberg://<rest-endpoint>/<namespace>/<table>?warehouse=...&equality_delete_by=...`.

        Other parameters are handed to the catalog as they are; `tls=true` speaks HTTPS to it. All
        other options of the sink have no form as a parameter, and are refused.
        """
        parts = urlsplit(url)
        path = [part for part in parts.path.split("/") if part]
        if not parts.netloc or len(path) < 2:
            raise ConfigInvalid("the sink's URL is not understood", hint=f"Write {cls.url_form}")
        parameters = dict(parse_qsl(parts.query))
        key = [name for name in parameters.pop("equality_delete_by", "").split(",") if name]
        scheme = "https" if parameters.pop("tls", "false") == "true" else "http"
        branch = parameters.pop("branch", "main")
        own = {option.name for kind in (cls, TableOptions) for option in dataclasses.fields(kind)}
        for name in sorted(own & parameters.keys()):
            raise ConfigInvalid(
                f"the sink's URL cannot have the parameter `{name}`",
                detail="It would be handed to the catalog, which does not know it.",
                hint="Write the sink as `iceberg: {catalog: ..., namespace: ...}`, which has it.",
            )
        prefix = "".join(f"/{part}" for part in path[:-2])
        return cls(
            catalog={"type": "rest", "uri": f"{scheme}://{parts.netloc}{prefix}", **parameters},
            namespace=path[-2],
            branch=branch,
            tables={ANY_TABLE: TableOptions(table=path[-1], equality_delete_by=key)},
        )

    def table_names(self) -> TableNames:
        """The Iceberg tables of source tables, as the options name them."""
        given = {table: each.table for table, each in self.tables.items() if table != ANY_TABLE}
        anyhow = self.tables.get(ANY_TABLE)
        return TableNames(given=given, otherwise=anyhow.table if anyhow else "")

    def destination(self) -> Destination:
        """Names, keys and the route."""
        return Destination(
            names=self.table_names(),
            keys={table: each.equality_delete_by for table, each in self.tables.items()},
            key_of_all=self.equality_delete_by,
            route=dataclasses.asdict(self.route) if self.route else None,
        )

    def catalogs(self) -> Sequence[Mapping[str, str]]:
        """The one that has all tables."""
        return [self.catalog]

    def catalog_of(self, table: str) -> Mapping[str, str] | None:
        """The one that has all tables."""
        return self.catalog

    def refuse_itself(self, table: str, catalog: Mapping[str, str]) -> None:
        """By catalog and name, before anything is asked."""
        if dict(catalog) == dict(self.catalog):
            if table == f"{self.namespace}.{self.table_names().of(table)}":
                raise filled_from_itself(table)

    def letter_box(self, sink: Any, pipeline: str, spark: Any) -> LetterBox | None:
        """The tables of dead letters; see `SinkOptions.letter_box`."""
        from icestream.sinks.iceberg.letters import IcebergLetterBox

        return IcebergLetterBox(sink, pipeline, partial(sessions.staged_rows, spark))

    def refuse_rollback(self, pipeline: str) -> None:
        """Tables can be rolled back."""
        return None


OPTIONS = IcebergSinkOptions
