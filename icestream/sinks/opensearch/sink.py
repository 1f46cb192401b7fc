"""The OpenSearch sink: an index per table, and one document that remembers the pipeline's progress.

    Writer.write ──► bulk requests, each operation with its row's version    (workers)
    Sink.commit  ──► the progress document, by compare-and-swap              (coordinator)

The frontier moves only when every operation of the epoch is acknowledged. Between the two steps
documents are visible that no frontier speaks of yet; writing them again changes nothing. Before the
first document of a table is sent the progress names its index, and the index its owner (`owners`).
"""

import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import quote

from icestream import failpoints, metrics
from icestream.epoch import Epoch, Progress
from icestream.errors import (
    Broken,
    ConfigInvalid,
    NeedsOperator,
    ProgressLost,
    SchemaRejected,
    check,
)
from icestream.report import Report
from icestream.schema import Column, TableShape, grown
from icestream.sinks import BESIDE, Committed, Written
from icestream.sinks.opensearch.bulk import OpenSearchWriter, Tally
from icestream.sinks.opensearch.client import BAD_REQUEST, NOT_FOUND, OK, Answer, Client
from icestream.sinks.opensearch.commit import (
    SEEN,
    Commit,
    Conflicts,
    Head,
    Index,
    ProgressDocument,
    Standings,
    create_index,
    seen,
)
from icestream.sinks.opensearch.emptying import empty
from icestream.sinks.opensearch.mapping import missing, narrower, properties
from icestream.sinks.opensearch.options import DEAD_LETTER, OpenSearchOptions, dead_letters
from icestream.sinks.opensearch.owners import KEY, Owner, refuse_other, stranger
from icestream.sinks.opensearch.signing import from_environment

__all__ = ["OpenSearchOptions", "OpenSearchSink", "OpenSearchWriter"]

log = logging.getLogger(__name__)

# Below every priority that users give: theirs win where both apply.
TEMPLATE_PRIORITY = 0
# OpenSearch forgets after this time which version a deleted document had. A task that was given up
# and sends an older version later than that would bring the document back; a minute, the default,
# is less than a task may wait for a busy cluster.
DELETES_REMEMBERED = "1h"
_DEAD_LETTERS = {
    "dynamic": False,
    "properties": {
        "index": {"type": "keyword"},
        "document_id": {"type": "keyword"},
        "version": {"type": "long"},
        "operation": {"type": "keyword"},
        "error_type": {"type": "keyword"},
        "reason": {"type": "text"},
        # Kept, not searched: it may be longer than what can be indexed.
        "document": {"type": "keyword", "index": False, "doc_values": False},
        "document_cut": {"type": "boolean"},
        "when": {"type": "date"},
    },
}
# What the mapping of an index keeps: the columns that ids are made of, in their order.
KEY_COLUMNS = "icestream.key"
# 2^22 runs fit beside this many epochs into a version.
_EPOCH_BITS = 40
_TEMPLATE_NAME = re.compile(r"[^a-z0-9._-]")
_OPERATIONS = {
    "indexed": "indexed",
    "deleted": "deleted",
    "superseded": "superseded",
    "dead_letters": "dead_letter",
}


@dataclass(slots=True)
class _State:
    """What this run knows of the pipeline: what it last saw or made.

    `named` are the tables whose indices the progress document names, `metas` what the mappings of
    prepared indices say of themselves, `shapes` the columns and keys of prepared tables.
    """

    progress: Progress
    standings: Standings = field(default_factory=Standings)
    indices: dict[str, Index] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)
    metas: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    table_ids: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, TableShape] = field(default_factory=dict)


class OpenSearchSink:
    """See the module and `icestream.sinks.Sink`."""

    def __init__(self, options: OpenSearchOptions, pipeline: str):
        self._options = options
        self._pipeline = pipeline
        self._client = Client(options)
        self._document = ProgressDocument(self._client, options.progress_index, pipeline)
        self._state: _State | None = None

    def durable(self, tables: Sequence[str]) -> Mapping[str, Progress]:
        """What the document remembers of each table that it names; see `Sink.durable`.

        Raises what would keep a run from writing to one of the indices.
        """
        self._refuse_shared(tables)
        head = self._document.read()
        self._document.refuse_lost({t: i for t, i in head.indices.items() if t in tables})
        for table in tables:
            if table not in head.indices:
                self._found(table, self._owner(table), None)
        return _progress(head) if head.sequence is not None else {}

    def claim(self, tables: Sequence[str]) -> Mapping[str, Progress]:
        """Publish the next generation; see `Sink.claim`.

        Raises `ProgressLost` when an index that holds the pipeline's documents is another one.
        """
        self._refuse_shared(tables)
        head = self._document.claim(tables)
        self._state = _State(head.progress, head.standings, dict(head.indices), set(head.indices))
        failpoints.reach(failpoints.AFTER_CLAIM)
        return _progress(head)

    def prepare(self, table: str, shape: Callable[[], TableShape | None]) -> bool:
        """Make sure that the index is there and knows the table's columns; see `Sink.prepare`.

        The shape is asked every time, for this is how the index learns of new columns.
        """
        state, told = self._claimed(), shape()
        if told is None:
            return self._entered(table)
        known = replace(told, key=self._options.destination().key(table) or told.key)
        columns = list(known.columns)
        before = state.shapes.get(table)
        if before and list(before.columns) == columns and table in state.indices:
            return True
        index = self._options.index_name(table)
        state.table_ids[table] = known.table_id
        there = self._entered(table)
        own = self._offer_mapping(index, properties(columns))
        if not there:
            mine = {KEY: self._owner(table).to_json()}
            create_index(self._client, index, {"mappings": {"_meta": mine}})
            log.info("index created", extra={"table": table, "index": index, "template": own})
        if not there and not self._entered(table):
            raise _deleted(index)
        name = state.indices[table].name
        if self._options.on_error == DEAD_LETTER:
            self._install_template(dead_letters(name), _DEAD_LETTERS, {})
        self._remember_deletes(name)
        self._complete(name, columns)
        state.shapes[table] = known
        return True

    def evolve(self, table: str, columns: Sequence[Column]) -> None:
        """Let the index take columns that it lacks; see `Evolves.evolve`."""
        state = self._claimed()
        shape = grown(state.shapes[table], columns, table)
        self._complete(state.indices[table].name, list(shape.columns))
        state.shapes[table] = shape

    def recalled(self, table: str, name: str) -> str | None:
        """What the mapping of the table's index keeps under a name."""
        meta = self._claimed().metas.get(table)
        if meta is None:
            # One index, of any name: the table's may be that of an alias.
            found = self._document.look([self._options.index_name(table)])
            meta = next(iter(found.values())).meta if found else {}
        kept = meta.get(name)
        return str(kept) if kept is not None else None

    def remember(self, table: str, name: str, value: str) -> None:
        """Keep a text in the mapping of the table's index."""
        self._describe(table, {name: value})

    def decided(self, epoch: Epoch, tables: Sequence[str]) -> Collection[str]:
        """None: one document speaks for all tables, so an epoch is never half there."""
        return ()

    def writer(
        self, epoch: Epoch, tables: Sequence[str], read_otherwise: Collection[str] = ()
    ) -> OpenSearchWriter:
        """A writer for the epoch; what it sends is recognised when it is sent again."""
        self._refuse_other_keys(read_otherwise)
        self._take(tables)
        state = self._claimed()
        return OpenSearchWriter(
            options=self._options,
            indices={table: state.indices[table].name for table in tables},
            version=document_version(state.progress.generation, epoch.number),
            shapes={table: state.shapes[table] for table in read_otherwise},
            # Those of the coordinator: a worker's environment may have none.
            credentials=from_environment() if self._options.aws_sigv4 else None,
        )

    def commit(self, written: Written) -> Sequence[Committed]:
        """Move the frontier past an epoch whose every operation is acknowledged."""
        started = time.monotonic()
        tallies = [(report.table, _tally(report)) for report in written.reports]
        tables = sorted({*(table for table, _ in tallies), *written.truncated})
        state = self._claimed()
        emptied = document_version(state.progress.generation, written.epoch.number) - 1
        for table in sorted(written.truncated):
            empty(self._client, self._options, state.indices[table].name, emptied)
        duplicate = self._publish(written, tables, _conflicts(tallies))
        seconds = time.monotonic() - started
        for table in tables:
            metrics.COMMIT_LATENCY.labels(table).observe(seconds)
            if duplicate:
                metrics.DUPLICATE_EPOCHS.labels(table).inc()
        self._count(tallies)
        return [
            Committed(table=table, snapshot_id=None, duplicate=duplicate, seconds=seconds)
            for table in tables
        ]

    def heartbeat(self, epoch: Epoch, labels: Mapping[str, str], table: str | None = None) -> bool:
        """Publish the frontier of an epoch without changes, in the name of a table if one is given.

        A table that is named here is known from then on, though it holds no document. False for
        one that has no index.
        """
        if table is not None and table not in self._claimed().indices:
            return False
        if table is not None:
            self._take([table])
        written = Written(epoch=epoch, reports=(), writer=None, labels=labels)
        self._publish(written, [table] if table is not None else [])
        return True

    def status(self, tables: Sequence[str]) -> list[dict[str, object]]:
        """What is durable, a row for each table, and the error that its index stops a run with.

        Nothing is claimed. Of a pipeline without progress only the tables that would stop it.
        """
        head = self._document.read()
        told = _progress(head)
        found = self._document.look([index.name for index in head.indices.values()])
        rows: list[dict[str, object]] = []
        for table in sorted({*tables, *head.indices}):
            index, trouble = head.indices.get(table), None
            try:
                if index:
                    self._document.refuse_other_than(table, index, found.get(index.name))
                else:
                    self._found(table, self._owner(table), None)
            except NeedsOperator as error:
                trouble = error
            if head.sequence is None and trouble is None:
                continue
            progress = told.get(table, told[BESIDE])
            rows.append(
                {
                    "pipeline": self._pipeline,
                    "table": index.name if index else self._options.index_name(table),
                    "source_table": table,
                    "state": _state(table, head),
                    "trouble": trouble,
                    "generation": progress.generation,
                    "epoch": progress.epoch,
                    "upper": progress.upper,
                    "committed_at": head.committed_at,
                }
            )
        return rows

    def close(self) -> None:
        """Let go of connections."""
        self._client.close()

    def _claimed(self) -> _State:
        if self._state is None:
            raise Broken("a pipeline is written to before it is claimed")
        return self._state

    def _publish(
        self, written: Written, tables: Sequence[str], conflicts: Conflicts | None = None
    ) -> bool:
        state, epoch = self._claimed(), written.epoch
        new = Progress(
            pipeline=self._pipeline,
            generation=state.progress.generation,
            epoch=epoch.number,
            lower=epoch.lower,
            upper=epoch.upper,
            # One document speaks for all tables: whoever finds it finds the epoch complete.
            tables=1,
        )
        standings = state.standings.after(state.progress, epoch.upper, tables, written.catching_up)
        commit = Commit(
            expected=state.progress,
            new=new,
            indices={table: state.indices[table] for table in tables},
            labels=written.labels,
            standings=standings,
            conflicts=conflicts,
        )
        duplicate = self._document.publish(commit)
        state.progress, state.standings = new, standings
        return duplicate

    def _count(self, tallies: Sequence[tuple[str, Tally]]) -> None:
        indices = self._claimed().indices
        for table, tally in tallies:
            index = indices[table].name
            for name, operation in _OPERATIONS.items():
                metrics.DOCUMENTS.labels(index, operation).inc(getattr(tally, name))
            metrics.BULK_RETRIES.labels(index).inc(tally.retries)

    def _refuse_shared(self, tables: Sequence[str]) -> None:
        """Two tables number their rows' versions apart: in one index the lower would lose."""
        owners: dict[str, str] = {}
        for table in tables:
            other = owners.setdefault(self._options.index_name(table), table)
            if other != table:
                raise ConfigInvalid(
                    f"tables {other} and {table} go into one index",
                    detail="Documents of the same id would replace each other.",
                    hint='Write `${getMetadata("iceberg_table_name")}` into the name of `index`.',
                )

    def _owner(self, table: str) -> Owner:
        table_id = self._state.table_ids.get(table, "") if self._state else ""
        return Owner(pipeline=self._pipeline, table=table, table_id=table_id)

    def _entered(self, table: str) -> bool:
        """Find the table's index and remember what it says of itself; False when there is none."""
        state = self._claimed()
        before = state.indices.get(table)
        found = self._found(table, self._owner(table), before, named=table in state.named)
        if found is None:
            return False
        state.indices[table], state.metas[table] = found
        return True

    def _take(self, tables: Sequence[str]) -> None:
        """Let the progress name the indices, and these their owner, before documents come."""
        state = self._claimed()
        new = {table: state.indices[table] for table in tables if table not in state.named}
        if new:
            self._document.name(state.progress, new)
            state.named |= new.keys()
            state.standings = state.standings.naming(new)
        for table in tables:
            mine, meta = self._owner(table).to_json(), state.metas.get(table)
            if meta is not None and meta.get(KEY) != mine:
                self._describe(table, {KEY: mine})

    def _refuse_other_keys(self, tables: Collection[str]) -> None:
        """Ids that are made of other columns would leave the old documents there for ever."""
        state = self._claimed()
        for table in tables:
            key, meta = list(state.shapes[table].key), state.metas.get(table, {})
            before = meta.get(KEY_COLUMNS)
            filled = table in state.named and table not in state.standings.unfilled
            if before is None or (not filled and list(before) != key):
                self._describe(table, {KEY_COLUMNS: key})
            elif list(before) != key:
                raise ConfigInvalid(
                    f"documents of table {table} are called by other columns so far",
                    detail=f"So far: {', '.join(before)}; now: {', '.join(key)}.",
                    hint="Put the key or `identifier_columns` back as they were; or delete "
                    f"document {self._pipeline} of index {self._options.progress_index} and the "
                    "pipeline's indices to load all its tables anew.",
                )

    def _describe(self, table: str, told: Mapping[str, Any]) -> None:
        """Let the table's index say more of itself."""
        state = self._claimed()
        index, meta = state.indices[table].name, {**state.metas.get(table, {}), **told}
        answer = self._client.call("PUT", f"/{quote(index, safe='')}/_mapping", {"_meta": meta})
        if answer.status != OK:
            raise ConfigInvalid(
                f"index {index} does not take what it is to say of itself", detail=answer.reason
            )
        state.metas[table] = meta

    def _found(
        self, table: str, mine: Owner, before: Index | None, named: bool = False
    ) -> tuple[Index, Mapping[str, Any]] | None:
        """The index behind the table's name, which may be an alias, and its `_meta`.

        Raises when it is another than before, or is not the pipeline's to write to.
        """
        name = self._options.index_name(table)
        answer = self._client.call("GET", f"/{quote(name, safe='')}?{SEEN}")
        if answer.status == NOT_FOUND:
            if before is not None:
                raise self._other_index(table, before)
            return None
        found = seen(answer) if answer.status == OK else {}
        if len(found) != 1:
            raise ConfigInvalid(
                f"{name} does not stand for one index",
                detail=answer.reason if answer.status != OK else f"Found: {', '.join(found)}.",
                hint="Let the alias stand for a single index, or name another one with `index`.",
            )
        ((concrete, there),) = found.items()
        if there.data_stream:
            raise ConfigInvalid(
                f"{name} is a data stream",
                detail="Documents are only ever added there; those of a table change and go.",
                hint="Name another index with `index`.",
            )
        index = Index(name=concrete, uuid=there.uuid)
        if before is not None and before != index:
            raise self._other_index(table, before)
        owner = there.owner
        refuse_other(concrete, owner, mine)
        if not named and not (owner and owner.adopt):
            count = self._count_of(concrete)
            if count:
                raise stranger(concrete, count, owner, mine)
        return index, there.meta

    def _count_of(self, index: str) -> int:
        """The number of documents, also of those that searches do not find yet."""
        path = f"/{quote(index, safe='')}"
        for method, what in (("POST", "_refresh"), ("GET", "_count")):
            answer = self._client.call(method, f"{path}/{what}")
            if answer.status != OK:
                raise ConfigInvalid(
                    f"the documents of index {index} cannot be counted",
                    detail=answer.reason,
                    hint="Open the index if it is closed, or name another one with `index`.",
                )
        return int(answer.json()["count"])

    def _other_index(self, table: str, before: Index) -> ProgressLost:
        return ProgressLost(
            f"table {table} went to another index than the one that it would go to",
            detail=f"So far it went to {before.name} ({before.uuid}).",
            hint=f"Restore that index, or delete document {self._pipeline} of index "
            f"{self._options.progress_index} and the pipeline's indices to load all its tables "
            "anew.",
        )

    def _offer_mapping(self, index: str, wanted: Mapping[str, Any]) -> bool:
        """Let the index be created with the table's mapping, unless its owner has another."""
        # Templates of the old kind are not looked at where one of the new kind applies.
        if self._old_template(index):
            return False
        settings = {"index.gc_deletes": DELETES_REMEMBERED}
        self._install_template(index, {"properties": wanted}, settings)
        return True

    def _install_template(
        self, index: str, mappings: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> None:
        name = _TEMPLATE_NAME.sub("-", f"icestream-{self._pipeline}-{index}".lower())
        body = {
            "index_patterns": [index],
            "priority": TEMPLATE_PRIORITY,
            "template": {"settings": settings, "mappings": mappings},
            "_meta": {"made_by": f"icestream pipeline {self._pipeline}"},
        }
        answer = self._client.call("PUT", f"/_index_template/{name}", body)
        if answer.status == BAD_REQUEST and "same priority" in answer.reason:
            raise ConfigInvalid(
                f"another index template of the same priority applies to index {index}",
                detail=answer.reason,
                hint=f"Give that template a priority above {TEMPLATE_PRIORITY}: then it counts.",
            )
        if answer.status != OK:
            raise ConfigInvalid(
                f"no index template can be installed for index {index}", detail=answer.reason
            )

    def _old_template(self, index: str) -> bool:
        answer = self._client.call("GET", "/_template?filter_path=*.index_patterns")
        if answer.status != OK:
            return False
        patterns = [p for found in answer.json().values() for p in found["index_patterns"]]
        return any(fnmatchcase(index, pattern) for pattern in patterns)

    def _remember_deletes(self, index: str) -> None:
        """Let an index that was not made by this sink's template remember deletes too."""
        path = f"/{quote(index, safe='')}/_settings"
        answer = self._client.call("GET", f"{path}/index.gc_deletes?flat_settings=true")
        if answer.status != OK or answer.json().get(index, {}).get("settings"):
            # Whoever set it wants it so.
            return
        answer = self._client.call("PUT", path, {"index.gc_deletes": DELETES_REMEMBERED})
        if answer.status != OK:
            log.warning("could not set index.gc_deletes: %s", answer.reason)

    def _complete(self, index: str, columns: Sequence[Column]) -> None:
        """Add the fields that the index lacks, where its owner leaves that to others."""
        path = f"/{quote(index, safe='')}/_mapping"
        mapping = self._mapping(self._client.call("GET", path), index)
        present = mapping.get("properties", {})
        small = narrower(columns, present)
        if small:
            log.warning(
                "fields %s hold less than the table's columns: a value that does not fit is "
                "refused, or not found by searches",
                small,
                extra={"index": index},
            )
        lacking = missing(properties(columns), present)
        free = str(mapping.get("dynamic", "true")).lower() == "true"
        if not lacking or not free or mapping.get("dynamic_templates"):
            return
        answer = self._client.call("PUT", path, {"properties": lacking})
        if answer.status != OK:
            raise SchemaRejected(
                f"index {index} does not take the table's new columns",
                detail=answer.reason,
                hint="Correct the index's mapping, or let the table go to a new index.",
            )

    def _mapping(self, answer: Answer, index: str) -> Mapping[str, Any]:
        if answer.status != OK:
            raise _deleted(index)
        found: Mapping[str, Any] = answer.json()[index]["mappings"]
        return found


def document_version(generation: int, epoch: int) -> int:
    """The version of documents that are made of rows: the run comes first, then its epoch.

    A run that was given up may have sent epochs that nobody will ever commit. The next run sends
    their changes again, in epochs of the same numbers or lower ones. They must win. Every second
    number is free: an epoch that empties a table does so just before its own documents.
    """
    check(epoch < 1 << _EPOCH_BITS, "epochs are fewer than 2^40")
    return ((generation << _EPOCH_BITS) + epoch) * 2 + 1


def _progress(head: Head) -> dict[str, Progress]:
    """What the document says of each table, and of itself; see `Standings`."""
    standings, last = head.standings, head.progress
    at = standings.of(last)
    nothing = Progress(pipeline=last.pipeline, generation=last.generation)
    found = {table: nothing if table in standings.unfilled else at for table in head.indices}
    found |= {
        table: replace(mine, generation=at.generation) for table, mine in standings.away.items()
    }
    for table, upper in standings.behind.items():
        found[table] = replace(nothing, upper=upper, catching_up=True)
    return {**found, BESIDE: replace(at, epoch=last.epoch)}


def _state(table: str, head: Head) -> str:
    if table not in head.indices or table in head.standings.unfilled:
        return "empty"
    return "behind" if table in head.standings.behind else "ok"


def _tally(report: Report) -> Tally:
    check(isinstance(report.payload, Tally), "an index is sent reports of its documents")
    assert isinstance(report.payload, Tally)
    return report.payload


def _conflicts(tallies: Sequence[tuple[str, Tally]]) -> Conflicts | None:
    """Documents of the first table that has some which are newer than what was sent."""
    met = [(table, tally) for table, tally in tallies if tally.superseded]
    if not met:
        return None
    first, example = met[0]
    count = sum(tally.superseded for table, tally in met if table == first)
    return Conflicts(table=first, count=count, example=example.superseded_id)


def _deleted(index: str) -> ProgressLost:
    return ProgressLost(
        f"index {index} was deleted while it was prepared",
        hint="Look for who else works on it, then start again.",
    )
