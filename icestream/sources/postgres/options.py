"""Options of the PostgreSQL source, and how it is opened."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from icestream.destination import Destination
from icestream.errors import ConfigInvalid
from icestream.sources import Source
from icestream.sources.options import Opening, SourceOptions

# How often a slot moves on while the pipeline's own tables are idle and others are not.
SLOT_HEARTBEAT_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresOptions(SourceOptions):
    """Options of the PostgreSQL source."""

    dsn: str = field(default="", metadata={"doc": "Where the server is, as libpq takes it."})
    tables: Sequence[str] = field(
        default=(), metadata={"doc": "Tables as `schema.table`, or patterns such as `public.*`."}
    )
    chunk_pages: int = field(
        default=2048, metadata={"doc": "Pages of 8 KiB that a copy reads in one piece."}
    )
    tables_in_parallel: int = field(
        default=2, metadata={"doc": "Tables that are copied at the same time."}
    )
    slot: str = field(
        default="", metadata={"doc": "Name of the replication slot; `icestream_<pipeline>`."}
    )
    publication: str = field(
        default="",
        metadata={"doc": "A publication of your own; without it icestream makes and keeps one."},
    )
    identifier_columns: Mapping[str, Sequence[str]] = field(
        default_factory=dict,
        metadata={"doc": "Columns that identify a row, for tables without a primary key."},
    )
    parents_alone: Sequence[str] = field(
        default=(),
        metadata={"doc": "Tables with inheritance children of which only their own rows come."},
    )
    columns: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict, metadata={"doc": "Iceberg types by table and column, over the rule."}
    )
    spool: str = field(
        default="",
        metadata={
            "doc": "Where changes lie on their way: a folder that coordinator and workers reach as "
            "one user, or a place in an object store, such as `s3://bucket/folder`. The system's "
            "folder for temporary files when empty."
        },
    )
    spool_storage: Mapping[str, str] = field(
        default_factory=dict,
        metadata={
            "doc": "Properties of the spool's object store, as a catalog takes them: "
            "`s3.endpoint`, `s3.access-key-id` and so on."
        },
    )

    def __post_init__(self) -> None:
        if not self.dsn or not self.tables:
            raise ConfigInvalid(
                f"the PostgreSQL source lacks `{'tables' if self.dsn else 'dsn'}`",
                hint="Write `postgres: {dsn: postgresql://..., tables: [public.orders]}`.",
            )
        if self.spool_storage and "://" not in self.spool:
            raise ConfigInvalid(
                "`spool_storage` is given, and `spool` is not in an object store",
                hint="Set `spool`, such as s3://bucket/folder, or leave `spool_storage` out.",
            )
        if self.chunk_pages < 1 or self.tables_in_parallel < 1:
            raise ConfigInvalid("chunk_pages and tables_in_parallel must be at least 1")

    def open(self, opening: Opening) -> Source:
        """The source; see `SourceOptions.open`."""
        from icestream.sources.postgres.source import PostgresSource

        def delete_columns(table: str) -> Sequence[str]:
            """Empty when a select may have given them other names."""
            return () if table in opening.transformed else opening.destination.key(table)

        pipeline, budget, parallelism = opening.pipeline, opening.budget, opening.parallelism
        run_tasks = opening.run_tasks if opening.workers_elsewhere else None
        return PostgresSource(self, pipeline, budget, parallelism, delete_columns, run_tasks)

    def named(self) -> Sequence[str]:
        """Its tables and patterns."""
        return self.tables

    def possible(self, destination: Destination) -> Sequence[str] | None:
        """No other tables than those."""
        return self.tables

    def heartbeat_seconds(self) -> float | None:
        """The slot could not move on otherwise."""
        return SLOT_HEARTBEAT_SECONDS


OPTIONS = PostgresOptions
