"""One snapshot swapped in against exactly the metadata that was checked.

The obvious way, `commit()` of an append or a transaction, rebases silently onto newer metadata, so
a check made before it says nothing about what is swapped. Here the snapshot is only applied (its
manifests are written), the new metadata is built from the checked one, and the catalog's
compare-and-swap decides.

Data and delete files are described by what workers reported; they are never listed nor opened here.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from icestream import failpoints
from icestream.commit_protocol import swap_rule
from icestream.errors import CommitConflict
from icestream.iceberg import progress as summaries
from icestream.iceberg.closed import DATA, FileClosed
from icestream.iceberg.gateway import as_unavailable, commit_outcomes
from icestream.iceberg.handle import TableHandle, TableName, latest
from icestream.iceberg.head import TableHead

_FOR_EVER_MS = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A snapshot whose manifests are written and that nobody sees until its metadata is swapped."""

    table: TableName
    snapshot_id: int
    base: Any = field(repr=False)
    new: Any = field(repr=False)


def prepare(
    handle: TableHandle,
    head: TableHead,
    branch: str,
    files: Sequence[FileClosed],
    entries: summaries.Entries,
    truncated: bool = False,
) -> Prepared:
    """Write the manifests of one snapshot and build the metadata that shows it.

    With `truncated` all that the branch holds is gone in that snapshot but these files.
    """
    base = head.metadata
    if not swap_rule():
        base = handle.java.operations().refresh()
    # Nothing is committed yet when the manifests cannot be written: that outcome is known.
    with as_unavailable(f"could not write the manifests of table {handle.name}"):
        snapshot = _apply(handle, branch, files, entries.summary, truncated)
        parent = latest(base, branch)
        if snapshot.parentId() != (parent.snapshotId() if parent else None):
            raise CommitConflict(f"the head of table {handle.name} moved before the swap")
        new = _with_snapshot(handle, base, branch, snapshot, entries, head.bounds)
        return Prepared(
            table=handle.name, snapshot_id=int(snapshot.snapshotId()), base=base, new=new
        )


def swap(handle: TableHandle, prepared: Prepared) -> int:
    """Replace the metadata that was checked by the prepared one; returns the snapshot's id."""
    with commit_outcomes(f"table {handle.name}"):
        failpoints.reach(failpoints.BEFORE_SWAP)
        handle.java.operations().commit(prepared.base, prepared.new)
        failpoints.reach(failpoints.AFTER_SWAP)
        return prepared.snapshot_id


def _with_snapshot(
    handle: TableHandle,
    base: Any,
    branch: str,
    snapshot: Any,
    entries: summaries.Entries,
    needed: Collection[str | None],
) -> Any:
    """The metadata that show a snapshot, with the pipeline's tag, and its frontiers where they
    are too large for a summary."""
    iceberg = handle.jvm.org.apache.iceberg
    pipeline = entries.summary[summaries.PIPELINE]
    # Without an age of its own it would get the table's, and expiry would remove it.
    tag = iceberg.SnapshotRef.tagBuilder(snapshot.snapshotId()).maxRefAgeMs(_FOR_EVER_MS)
    known = handle.properties_of(base)
    changed = {
        name: value
        for name, value in {
            **entries.properties,
            summaries.tagged_property(pipeline): "true",
        }.items()
        if known.get(name) != value
    }
    given = handle.jvm.java.util.HashMap()
    for name, value in changed.items():
        given.put(name, value)
    outdated = handle.jvm.java.util.HashSet()
    for name in summaries.outdated(known, entries, needed):
        outdated.add(name)
    new = (
        iceberg.TableMetadata.buildFrom(base)
        .setBranchSnapshot(snapshot, branch)
        .setRef(summaries.tag_name(pipeline), tag.build())
        .setProperties(given)
        .removeProperties(outdated)
        .build()
    )
    _assert_schema_and_spec(handle, base, new)
    return new


def _assert_schema_and_spec(handle: TableHandle, base: Any, new: Any) -> None:
    """Have a REST catalog refuse the new metadata when the table got another schema or spec.

    It is sent the changes, and asserts only what the library derives from them: the
    references that move. Two changes that change nothing bring the other assertions. The
    library's builder leaves such changes out, so they are put in behind its back.
    """
    update = handle.jvm.org.apache.iceberg.MetadataUpdate
    changes = handle.jvm.java.util.ArrayList()
    changes.add(update.SetCurrentSchema(base.currentSchemaId()))
    changes.add(update.SetDefaultPartitionSpec(base.defaultSpecId()))
    changes.addAll(new.changes())
    held = new.getClass().getDeclaredField("changes")
    held.setAccessible(True)
    held.set(new, changes)


def _apply(
    handle: TableHandle,
    branch: str,
    files: Sequence[FileClosed],
    summary: Mapping[str, str],
    truncated: bool,
) -> Any:
    """Write the manifests of one snapshot; rows that are all removed need no delete file."""
    added = [file for file in files if file.kind == DATA] if truncated else files
    update, add_data = _update(handle, added, truncated)
    jackson = handle.jvm.org.apache.iceberg.shaded.com.fasterxml.jackson
    mapper = jackson.databind.ObjectMapper()
    # A table may be partitioned by a number that is none, or infinite.
    special = jackson.core.json.JsonReadFeature.ALLOW_NON_NUMERIC_NUMBERS
    mapper.configure(special.mappedFeature(), True)
    parser = handle.jvm.org.apache.iceberg.ContentFileParser
    specs = handle.java.specs()
    for file in added:
        content = parser.fromJson(mapper.readTree(file.content_json()), specs)
        update = getattr(update, add_data if file.kind == DATA else "addDeletes")(content)
    for key, value in summary.items():
        update = update.set(key, value)
    return update.toBranch(branch).apply()


def _update(handle: TableHandle, files: Sequence[FileClosed], truncated: bool) -> tuple[Any, str]:
    """The kind of update that these files need, and its method that takes a data file."""
    if truncated:
        everything = handle.jvm.org.apache.iceberg.expressions.Expressions.alwaysTrue()
        return handle.java.newOverwrite().overwriteByRowFilter(everything), "addFile"
    if any(file.kind != DATA for file in files):
        return handle.java.newRowDelta(), "addRows"
    return handle.java.newAppend(), "appendFile"
