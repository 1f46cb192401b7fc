"""The OpenSearch sink: an index per table, and one document that remembers the pipeline's progress.

    Writer.write ──► bulk requests, each operation with its row's version    (workers)
    Sink.commit  ──► the progress document, by compare-and-swap              (coordinator)

The frontier moves only when every operation of the epoch is acknowledged. Between the two steps
documents are visible that no frontier speaks of yet; writing them again changes nothing.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from icestream import failpoints, metrics
from icestream.epoch import Epoch, Progress
from icestream.errors import Broken, ConfigInvalid, ProgressLost, SchemaRejected, check
from icestream.frontier import Frontier
from icestream.schema import Column, TableShape
from icestream.sinks import Committed, Written
from icestream.sinks.opensearch.bulk import OpenSearchWriter
from icestream.sinks.opensearch.client import BAD_REQUEST, NOT_FOUND, OK, Answer, Client
from icestream.sinks.opensearch.commit import Commit, Index, ProgressDocument, create_index
from icestream.sinks.opensearch.mapping import missing, narrower, properties
from icestream.sinks.opensearch.options import DEAD_LETTER, OpenSearchOptions, dead_letters
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
_TEMPLATE_NAME = re.compile(r"[^a-z0-9._-]")
_OPERATIONS = {
    "indexed": "indexed",
    "deleted": "deleted",
    "superseded": "superseded",
    "dead_letters": "dead_letter",
}


@dataclass(slots=True)
class _State:
    """What this run knows of the pipeline: what it last saw or made."""

    progress: Progress
    indices: dict[str, Index] = field(default_factory=dict)
    mapped: dict[str, Sequence[Column]] = field(default_factory=dict)


class OpenSearchSink:
    """See the module and `icestream.sinks.Sink`."""

    def __init__(self, options: OpenSearchOptions, pipeline: str):
        self._options = options
        self._pipeline = pipeline
        self._client = Client(options)
        self._document = ProgressDocument(self._client, options.progress_index, pipeline)
        self._state: _State | None = None

    def durable(self, tables: Sequence[str]) -> Mapping[str, Progress]:
        """What the document remembers, the same for each table; see `Sink.durable`."""
        head = self._document.read()
        return dict.fromkeys(tables, head.progress) if head.sequence is not None else {}

    def claim(self, tables: Sequence[str]) -> Mapping[str, Progress]:
        """Publish the next generation; see `Sink.claim`.

        Raises `ProgressLost` when an index that holds the pipeline's documents is another one.
        """
        self._refuse_shared(tables)
        head = self._document.claim(tables)
        self._state = _State(head.progress, dict(head.indices))
        failpoints.reach(failpoints.AFTER_CLAIM)
        return dict.fromkeys(tables, head.progress)

    def prepare(self, table: str, shape: Callable[[], TableShape | None]) -> bool:
        """Make sure that the index is there and knows the table's columns; see `Sink.prepare`.

        The shape is asked every time, for this is how the index learns of new columns.
        """
        state, known = self._claimed(), shape()
        index = self._options.index_name(table)
        if known is None:
            found = self._found(table, index)
            if found is not None:
                state.indices[table] = found
            return found is not None
        columns = list(known.columns)
        if state.mapped.get(table) == columns and table in state.indices:
            return True
        own = self._offer_mapping(index, properties(columns))
        found = self._found(table, index)
        if found is None:
            create_index(self._client, index)
            found = self._found(table, index)
            log.info("index created", extra={"table": table, "index": index, "template": own})
        if found is None:
            raise _deleted(index)
        if self._options.on_error == DEAD_LETTER:
            self._install_template(dead_letters(found.name), _DEAD_LETTERS, {})
        self._remember_deletes(found.name)
        self._complete(found.name, columns)
        state.indices[table], state.mapped[table] = found, columns
        return True

    def evolve(self, table: str, columns: Sequence[Column]) -> None:
        """Nothing: documents carry their own fields, and `prepare` adds what an index lacks."""

    def stored(
        self, table: str, keys: pa.Table, columns: Sequence[str], before: Frontier | None = None
    ) -> pa.Table:
        """Never asked: documents come whole."""
        raise Broken(f"documents of table {table} come whole, and none is looked up")

    def writer(self, epoch: Epoch, tables: Sequence[str]) -> OpenSearchWriter:
        """A writer for the epoch; what it sends is recognised when it is sent again."""
        indices = self._claimed().indices
        return OpenSearchWriter(
            options=self._options,
            indices={table: indices[table].name for table in tables},
            # Those of the coordinator: a worker's environment may have none.
            credentials=from_environment() if self._options.aws_sigv4 else None,
        )

    def commit(self, written: Written) -> Sequence[Committed]:
        """Move the frontier past an epoch whose every operation is acknowledged."""
        check(not written.emptied, "no table of this sink is emptied")
        started = time.monotonic()
        reports = [json.loads(report) for report in written.reports]
        tables = sorted({str(report["table"]) for report in reports})
        duplicate = self._publish(written.epoch, written.labels, tables)
        seconds = time.monotonic() - started
        for table in tables:
            metrics.COMMIT_LATENCY.labels(table).observe(seconds)
            if duplicate:
                metrics.DUPLICATE_EPOCHS.labels(table).inc()
        self._count(reports)
        return [
            Committed(table=table, snapshot_id=None, duplicate=duplicate, seconds=seconds)
            for table in tables
        ]

    def heartbeat(self, epoch: Epoch, labels: Mapping[str, str], table: str | None = None) -> bool:
        """Publish the frontier of an epoch without changes."""
        self._publish(epoch, labels, ())
        return True

    def status(self, tables: Sequence[str]) -> list[dict[str, object]]:
        """What is durable, a row for each table; nothing is claimed."""
        head = self._document.read()
        if head.sequence is None:
            return []
        progress = head.progress
        found = self._document.uuids([index.name for index in head.indices.values()])
        rows: list[dict[str, object]] = []
        for table in sorted({*tables, *head.indices}):
            index = head.indices.get(table)
            lost = index is not None and found.get(index.name) != index.uuid
            rows.append(
                {
                    "pipeline": self._pipeline,
                    "table": index.name if index else self._options.index_name(table),
                    "source_table": table,
                    "state": "lost" if lost else "ok" if index else "empty",
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

    def _publish(self, epoch: Epoch, labels: Mapping[str, str], tables: Sequence[str]) -> bool:
        state = self._claimed()
        new = Progress(
            pipeline=self._pipeline,
            generation=state.progress.generation,
            epoch=epoch.number,
            lower=epoch.lower,
            upper=epoch.upper,
            # One document speaks for all tables: whoever finds it finds the epoch complete.
            tables=1,
        )
        commit = Commit(
            expected=state.progress,
            new=new,
            indices={table: state.indices[table] for table in tables},
            labels=labels,
        )
        duplicate = self._document.publish(commit)
        state.progress = new
        return duplicate

    def _count(self, reports: Sequence[Mapping[str, Any]]) -> None:
        indices = self._claimed().indices
        for report in reports:
            index = indices[report["table"]].name
            for name, operation in _OPERATIONS.items():
                metrics.DOCUMENTS.labels(index, operation).inc(report[name])
            metrics.BULK_RETRIES.labels(index).inc(report["retries"])

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

    def _found(self, table: str, name: str) -> Index | None:
        """The index behind the name, which may be an alias; raises when it is another than ever."""
        answer = self._client.call(
            "GET", f"/{quote(name, safe='')}/_settings/index.uuid?flat_settings=true"
        )
        state = self._claimed()
        before = state.indices.get(table)
        if answer.status == NOT_FOUND:
            if before is not None:
                raise self._other_index(table, before)
            return None
        found = answer.json()
        if answer.status != OK or len(found) != 1:
            raise ConfigInvalid(
                f"{name} does not stand for one index",
                detail=answer.reason if answer.status != OK else f"Found: {', '.join(found)}.",
                hint="Let the alias stand for a single index, or name another one with `index`.",
            )
        ((concrete, settings),) = found.items()
        index = Index(name=concrete, uuid=settings["settings"]["index.uuid"])
        if before is not None and before != index:
            raise self._other_index(table, before)
        return index

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


def _deleted(index: str) -> ProgressLost:
    return ProgressLost(
        f"index {index} was deleted while it was prepared",
        hint="Look for who else works on it, then start again.",
    )
