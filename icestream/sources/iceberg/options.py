"""Options of Iceberg tables as a source, and how it is opened."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from icestream.errors import ConfigInvalid
from icestream.iceberg.session import open_table
from icestream.iceberg.table import Table
from icestream.sources import Source
from icestream.sources.options import Opening, SourceOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class IcebergTableOptions:
    """What can be said of one table."""

    table_name: str = field(
        default="", metadata={"doc": "Name in the catalog, with its namespace."}
    )
    catalog: Mapping[str, str] = field(
        default_factory=dict, metadata={"doc": "Catalog of this table, if it has its own."}
    )
    identifier_columns: Sequence[str] = field(
        default=(),
        metadata={
            "doc": "Columns that identify a row; by default its row id (format version 3 only)."
        },
    )
    disable_export: bool = field(
        default=False, metadata={"doc": "Only changes from now on, without what is there already."}
    )
    polling_interval: float | None = field(
        default=None,
        metadata={"doc": "As `polling_interval` of the source.", "unit": "duration"},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class IcebergSourceOptions(SourceOptions):
    """Options of Iceberg tables as a source."""

    frames = True

    tables: Sequence[IcebergTableOptions] = field(
        default=(), metadata={"doc": "The tables to read."}
    )
    catalog: Mapping[str, str] = field(
        default_factory=dict,
        metadata={"doc": "Handed to Iceberg as it is; an embedded SQLite catalog by default."},
    )
    polling_interval: float = field(
        default=30.0,
        metadata={"doc": "Time between two looks for new snapshots.", "unit": "duration"},
    )
    branch: str = field(default="main", metadata={"doc": "Branch whose snapshots are followed."})
    net_changes: bool = field(
        default=False,
        metadata={"doc": "All new snapshots at once, as the difference that they make together."},
    )
    group_bytes: int = field(
        default=16 * 1024**2,
        metadata={
            "doc": "Small snapshots that wait are taken together, as the difference that they "
            "make, while they have added and removed files of no more than this. 0 takes each "
            "snapshot alone.",
            "unit": "bytes",
        },
    )
    load_bytes: int = field(
        default=512 * 1024**2,
        metadata={"doc": "Bytes of files in one step of the first load.", "unit": "bytes"},
    )
    acknowledgments: bool = field(
        default=True, metadata={"doc": "Always on: progress follows what the sink has taken."}
    )

    def __post_init__(self) -> None:
        if not self.acknowledgments:
            raise ConfigInvalid(
                "acknowledgments cannot be switched off",
                hint="Leave it out: progress always follows what the sink has taken.",
            )
        names = [table.table_name for table in self.tables]
        if not names or not all(names) or len(set(names)) < len(names):
            twice = names and all(names)
            raise ConfigInvalid(
                "a table is named twice" if twice else "the iceberg source lacks a table's name",
                hint="Write `tables: [{table_name: shop.orders, identifier_columns: [id]}]`.",
            )

    @property
    def interval(self) -> float:
        """The shortest of the polling intervals."""
        own = [table.polling_interval for table in self.tables]
        return min([each for each in own if each is not None], default=self.polling_interval)

    def open(self, opening: Opening) -> Source:
        """The source; see `SourceOptions.open`."""
        from icestream.sources.iceberg.source import IcebergSource

        def table(named: IcebergTableOptions) -> Table:
            return open_table(named.catalog or self.catalog, named.table_name, opening.spark)

        return IcebergSource(self, opening.spark, table, opening.destination)

    def named(self) -> Sequence[str]:
        """Its tables."""
        return [table.table_name for table in self.tables]

    def cadence(self) -> Mapping[str, Any]:
        """One epoch at a time: which of two ends first must not decide what a document becomes.

        The tables are looked at once per `polling_interval`, and not per `commit_interval`.
        """
        return {"commit_interval": self.interval, "epochs_in_flight": 1}

    def catalogs(self) -> Sequence[Mapping[str, str]]:
        """That of each table."""
        return [table.catalog or self.catalog for table in self.tables]

    def catalog_of(self, table: str) -> Mapping[str, str] | None:
        """The table's own, or the one for all."""
        own = {each.table_name: each.catalog for each in self.tables}
        return own.get(table) or self.catalog


OPTIONS = IcebergSourceOptions
