"""What the pipeline file says of a CockroachDB changefeed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class CockroachdbOptions:
    """Options of the CockroachDB source over cloud-storage files."""

    files: str = field(
        default="", metadata={"doc": "Folder or bucket that the changefeed writes to."}
    )
    tables: Sequence[str] = field(
        default=(), metadata={"doc": "Tables to take; all that the folder has by default."}
    )
    keys: Mapping[str, Sequence[str]] = field(
        default_factory=dict,
        metadata={"doc": "Primary-key columns by table, in order; found from the rows by default."},
    )
    columns: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict,
        metadata={"doc": "Iceberg types by table and column, where JSON does not tell them."},
    )
    resolved_every: float = field(
        default=0.0,
        metadata={
            "doc": "Least time between the resolved timestamps that become snapshots.",
            "unit": "duration",
        },
    )
    storage: Mapping[str, str] = field(
        default_factory=dict,
        metadata={"doc": "Access to the files, named as Iceberg does: `s3.endpoint` ..."},
    )
    split_bytes: int = field(
        default=64 * 1024 * 1024,
        metadata={"doc": "Bytes of rows that one worker reads at a time.", "unit": "bytes"},
    )
