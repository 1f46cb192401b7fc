"""What the Iceberg tables of a pipeline remember, for people who ask."""

from collections.abc import Sequence
from typing import Any

from icestream.errors import IcestreamError
from icestream.sinks.iceberg.commit import refuse_rollback
from icestream.sinks.iceberg.sink import IcebergSink


def status(sink: IcebergSink, tables: Sequence[str], pipeline: str) -> list[dict[str, Any]]:
    """A row for each table that exists; see `icestream.sinks.options.SinkOptions.status`."""
    rows: list[dict[str, Any]] = []
    for table, (handle, head) in sorted(sink.heads(tables, refuse=False).items()):
        progress, snapshot_id = head.progress, head.progress_snapshot_id
        trouble = None
        try:
            refuse_rollback(head, str(handle.name), pipeline)
        except IcestreamError as error:
            trouble = error
        committed = handle.last_epoch_snapshot(pipeline, sink.branch) or snapshot_id
        at = handle.snapshot_time_ms(committed) if snapshot_id and committed else None
        rows.append(
            {
                "pipeline": pipeline,
                "table": str(handle.name),
                "source_table": table,
                "state": _state(head),
                "trouble": trouble,
                "generation": progress.generation if progress else 0,
                "epoch": progress.epoch if progress else 0,
                "upper": progress.upper if progress else None,
                "snapshot_id": committed,
                "committed_at": at / 1000 if at is not None else None,
            }
        )
    return rows


def _state(head: Any) -> str:
    if head.progress is None:
        return "new"
    return "replaying" if head.progress.catching_up else "durable"
