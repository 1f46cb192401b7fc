"""What a table says of a pipeline: its newest snapshot, its progress, whether it was rolled back.

A table's head is read from fresh metadata, and a swap (`icestream.iceberg.swap`) is made against
exactly these. An example: a pipeline `shop` has committed epochs 7 and 8 as snapshots 70 and 80; a
compaction has added snapshot 90 on top of them.

| branch at | tag `icestream-shop` at | head |
|---|---|---|
| 90 | 80 | epoch 8: foreign snapshots are stepped over |
| 70 | 80 | epoch 7, rolled back from epoch 8 |
| 100, made when 90 was expired | 80 | epoch 8, if an older metadata file still has 90 |
"""

from dataclasses import dataclass, field
from typing import Any

from icestream.epoch import Progress, batch_id
from icestream.errors import FrontierLost, HistoryLost, NeedsOperator, ProgressLost
from icestream.frontier import Frontier
from icestream.iceberg import progress as summaries
from icestream.iceberg.gateway import NO_FILE, JavaError, as_py4j, as_unavailable, class_names
from icestream.iceberg.handle import ANCESTORS_MAX, TableHandle, TableName, latest


@dataclass(frozen=True, slots=True, kw_only=True)
class TableHead:
    """One state of a table as a pipeline sees it; `metadata` is what a swap is made against.

    `forgotten` says that the frontiers of the snapshot that the table was rolled back to are no
    longer kept, or that its history is not: there may be a progress then, but nobody knows it.
    `bounds` names the frontiers that are kept.
    """

    uuid: str
    snapshot_id: int | None
    schema_id: int
    spec_id: int
    progress: Progress | None
    claim_id: str | None
    progress_snapshot_id: int | None
    rolled_back_from: Progress | None
    forgotten: bool = False
    bounds: frozenset[str | None] = frozenset()
    metadata: Any = field(repr=False, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A moment of a table's history: before a pipeline took what lies past a frontier."""

    pipeline: str
    before: Frontier


def read_head(handle: TableHandle, pipeline: str, branch: str) -> TableHead:
    """Fresh metadata, and what the pipeline's newest snapshot in the branch's history says.

    Snapshots of others, compactions among them, are stepped over.
    """
    with as_unavailable(f"could not read the metadata of table {handle.name}"):
        metadata = handle.fresh_metadata()
        snapshot = latest(metadata, branch)
        tagged = _tagged(handle, metadata, pipeline)
        older = _OlderMetadata(handle, metadata) if tagged else None
        newest, complete = _newest_own(handle, metadata, snapshot, pipeline, older)
        # What lies between the tag and the head may be expired, and rolled back beneath others.
        # Where no older metadata file tells it either, nobody but a person can.
        rolled_back = tagged is not None and (
            newest is None or newest.snapshotId() != tagged.snapshotId()
        )
        if newest is None and tagged is None:
            _refuse_untagged(handle, metadata, pipeline)
        progress, forgotten = _progress_unless(handle, rolled_back, metadata, newest)
        bounds = summaries.BOUNDS_PROPERTY
        return TableHead(
            uuid=metadata.uuid(),
            snapshot_id=snapshot.snapshotId() if snapshot else None,
            schema_id=metadata.currentSchemaId(),
            spec_id=metadata.defaultSpecId(),
            progress=progress,
            claim_id=newest.summary().get(summaries.CLAIM) if newest else None,
            progress_snapshot_id=newest.snapshotId() if newest else None,
            rolled_back_from=_progress_at(handle, metadata, tagged) if rolled_back else None,
            forgotten=forgotten or (rolled_back and not complete),
            bounds=frozenset(one.summary().get(bounds) for one in (newest, tagged) if one),
            metadata=metadata,
        )


def fed(handle: TableHandle, pipeline: str, branch: str, table: str) -> bool | None:
    """Whether the pipeline's last epoch was of this source table; None when that is gone."""
    snapshot_id = last_epoch_snapshot(handle, pipeline, branch)
    if snapshot_id is None:
        return None
    try:
        with as_unavailable(f"could not read the progress of table {handle.name}"):
            metadata = handle.java.operations().current()
            snapshot = metadata.snapshot(snapshot_id)
            upper = _progress_at(handle, metadata, snapshot).upper
            known = snapshot.summary().get(summaries.BATCH_ID)
    except FrontierLost:
        return None
    return bool(batch_id(pipeline, table, upper) == known)


def last_epoch_snapshot(handle: TableHandle, pipeline: str, branch: str) -> int | None:
    """The snapshot of the pipeline's last epoch: claims and foreign snapshots come after it."""
    with handle.readable():
        metadata = handle.java.operations().current()
        snapshot = latest(metadata, branch)
        for _ in range(ANCESTORS_MAX):
            if snapshot is None:
                return None
            summary = snapshot.summary()
            if summary.get(summaries.PIPELINE) == pipeline and summary.get(summaries.BATCH_ID):
                return int(snapshot.snapshotId())
            parent = snapshot.parentId()
            snapshot = metadata.snapshot(parent) if parent is not None else None
    return None


def snapshot_before(handle: TableHandle, metadata: Any, snapshot: Any, past: Past) -> Any:
    """The newest state, on the way back from a snapshot, without an epoch past `past.before`.

    An example with the snapshots 70 (epoch 7), 80 (epoch 8) and 90 (compaction): for the start of
    epoch 8 it is 70, because 90 lies on top of 80. For the start of epoch 9 it is 90. None: there
    was no snapshot before.
    """
    found = snapshot
    for _ in range(ANCESTORS_MAX):
        if snapshot is None:
            return found
        parent = snapshot.parentId()
        if snapshot.summary().get(summaries.PIPELINE) == past.pipeline:
            if past.before.covers(_past_progress(handle, metadata, snapshot).upper):
                return found
            found = metadata.snapshot(parent) if parent is not None else None
            if found is None and parent is not None:
                raise snapshot_forgotten(handle.name)
        snapshot = metadata.snapshot(parent) if parent is not None else None
    raise snapshot_forgotten(handle.name)


def _newest_own(
    handle: TableHandle, metadata: Any, snapshot: Any, pipeline: str, older: "_OlderMetadata | None"
) -> tuple[Any, bool]:
    """The pipeline's newest snapshot on the way back from `snapshot`, and whether that way is
    whole: ancestors that were expired and that no older metadata have cut it short."""
    for _ in range(ANCESTORS_MAX):
        if snapshot is None:
            return None, True
        if snapshot.summary().get(summaries.PIPELINE) == pipeline:
            return snapshot, True
        parent = snapshot.parentId()
        if parent is None:
            return None, True
        snapshot = metadata.snapshot(parent)
        if snapshot is None and older is not None:
            snapshot = older.snapshot(parent)
        if snapshot is None:
            return None, False
    raise NeedsOperator(
        f"the last {ANCESTORS_MAX} snapshots of table {handle.name} are all foreign",
        hint="Expire old snapshots of the table.",
    )


def _tagged(handle: TableHandle, metadata: Any, pipeline: str) -> Any:
    reference = metadata.ref(summaries.tag_name(pipeline))
    return metadata.snapshot(reference.snapshotId()) if reference else None


def _refuse_untagged(handle: TableHandle, metadata: Any, pipeline: str) -> None:
    """Raise `ProgressLost` when the pipeline has committed here and nothing of it is left."""
    if metadata.properties().containsKey(summaries.tagged_property(pipeline)):
        raise ProgressLost(
            f"the last commit of pipeline {pipeline} is no longer in table {handle.name}",
            detail=f"Neither the tag {summaries.tag_name(pipeline)} is there, nor a snapshot "
            "of the pipeline in the branch's history.",
            hint="Make the tag again at the pipeline's last snapshot, or drop the table and "
            "start anew: it is then built from the source.",
        )


def _progress_unless(
    handle: TableHandle, rolled_back: bool, metadata: Any, newest: Any
) -> tuple[Progress | None, bool]:
    """The progress of a snapshot, and whether it is forgotten: it may be after a rollback."""
    try:
        return _progress_at(handle, metadata, newest) if newest else None, False
    except FrontierLost:
        if not rolled_back:
            raise
        return None, True


def _past_progress(handle: TableHandle, metadata: Any, snapshot: Any) -> Progress:
    try:
        return _progress_at(handle, metadata, snapshot)
    except FrontierLost as error:
        raise snapshot_forgotten(handle.name) from error


def _progress_at(handle: TableHandle, metadata: Any, snapshot: Any) -> Progress:
    summary = snapshot.summary()
    entries = {name: summary.get(name) for name in summaries.KEYS}
    found = {name: value for name, value in entries.items() if value is not None}
    properties = handle.properties_of(metadata) if summaries.BOUNDS_PROPERTY in found else {}
    return summaries.from_summary(found, properties, handle.read_side_file, str(handle.name))


class _OlderMetadata:
    """Snapshots that were expired, as the metadata files before the current one have them.

    They are asked for from the newest to the oldest, and so are the files read, each once.
    """

    def __init__(self, handle: TableHandle, metadata: Any):
        self._handle = handle
        self._metadata = metadata
        self._paths: list[str] | None = None

    def snapshot(self, snapshot_id: int) -> Any:
        """The snapshot of this id, or None when no file that is left has it."""
        if self._paths is None:
            self._paths = [str(entry.file()) for entry in self._metadata.previousFiles()]
        found = self._metadata.snapshot(snapshot_id)
        while found is None and self._paths:
            self._metadata = self._read(self._paths.pop()) or self._metadata
            found = self._metadata.snapshot(snapshot_id)
        return found

    def _read(self, path: str) -> Any:
        parser = self._handle.jvm.org.apache.iceberg.TableMetadataParser
        try:
            with as_py4j():
                return parser.read(self._handle.java.io(), path)
        except JavaError as error:
            if class_names(error) & set(NO_FILE):
                return None
            raise


def snapshot_forgotten(name: TableName) -> HistoryLost:
    """The error for a snapshot that an epoch has to be read at again, and that is gone."""
    return HistoryLost(
        f"table {name} no longer has the snapshot that an epoch began with",
        detail="The epoch was committed in part, and has to be written again for other tables.",
        hint="Keep snapshots for longer than a pipeline may stand still.",
    )
