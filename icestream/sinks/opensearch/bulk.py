"""Bulk requests on workers: changes in, acknowledged documents out, whatever happens between.

    changes ──columns──► lines ──cut──► requests ──► answers ─┬─ done, or superseded
                                            ▲                 ├─ not yet: wait, send these again
                                            └─────────────────┘  refused: dead letter, or stop

The lines of all changes are built as one Arrow column, and a request's body is a piece of that
column's memory. Every operation carries a version that orders the changes of one row (`AT`: the
sequence number of an Iceberg snapshot, or the run and the epoch) as an external version: the same
change again is accepted and changes nothing, an older one is answered with a conflict and counted
in the `Tally` as superseded. So a task may run twice, or after a newer run has taken over. It has a
limit: OpenSearch remembers the version of a deleted document for `index.gc_deletes`, an hour if
nobody has set another time. An older version that comes later brings the document back.

The newest run meets a version conflict only if someone else writes to the index, or its progress
was put back. Its commit then fails.

The dead letter of an update takes its document out of the index: what stood there before is no
longer true. The letter is kept first, and the delete has the version of the change; so a second
time does the same. The dead letter of an insert leaves the index alone: a document that is there
is of another row with the same identifier, and that row lives.

The obvious wrong way is to send documents without versions and let the last one win: a task that
was given up and wakes up later would bring old documents back.
"""

import hashlib
import json
import logging
import re
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from icestream.change import AT, OP, Op
from icestream.documents import DOCUMENT, ID
from icestream.errors import (
    CommitUnknown,
    ConfigInvalid,
    DataRejected,
    ProgressLost,
    TargetUnavailable,
    check,
)
from icestream.patience import Bridge
from icestream.report import Report
from icestream.schema import TableShape, new_schema
from icestream.sinks.opensearch.client import (
    BAD_REQUEST,
    CONFLICT,
    FORBIDDEN,
    LINES,
    NOT_FOUND,
    OK,
    TOO_LARGE,
    TOO_MANY_REQUESTS,
    UNAUTHORIZED,
    Answer,
    Client,
    foreign,
    passing,
    refused,
    unavailable,
)
from icestream.sinks.opensearch.options import DEAD_LETTER, OpenSearchOptions, dead_letters
from icestream.sinks.opensearch.signing import Credentials

log = logging.getLogger(__name__)

DOCUMENTS = "documents"

# OpenSearch refuses a whole request because of one id beyond this.
ID_BYTES_MAX = 512
# A document that is too large for its index would be too large as a dead letter.
DEAD_LETTER_CHARACTERS_MAX = 256 * 1024
_ID_CHARACTERS_SHOWN = 100
_FILTER = "filter_path=errors,items.*.status,items.*.error.type,items.*.error.reason"
_NO_ERRORS = b'{"errors":false'
_STATUS = b'"status":'
_MUST_BE_ESCAPED = '["\\\\\\x00-\\x1f]'
_CONTROLS = [chr(code) for code in range(0x20)]
# OpenSearch quotes the value that it does not take; errors and logs show no values.
_QUOTED_VALUE = re.compile(
    r"\.? ?(?:Preview of field's value|The prefix of the first immense term is): '.*'", re.DOTALL
)
# A node takes operations up to a tenth of its memory, and says both sizes when it refuses one.
_OPERATION_BYTES = re.compile(r"operation_bytes=(\d+), max_\w+_bytes=(\d+)")
_INDEX_GONE = "index_not_found_exception"
_TEXT = pa.large_string()


@dataclass(frozen=True, slots=True)
class Failure:
    """A change that OpenSearch will never take."""

    row: int
    kind: str
    reason: str


@dataclass(slots=True)
class Tally:
    """What became of the changes; a report carries it to the commit."""

    indexed: int = 0
    deleted: int = 0
    superseded: int = 0
    superseded_id: str = ""
    dead_letters: int = 0
    retries: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Items:
    """What an answer says of its lines: the places of those to be sent again and why the first of
    them was not taken, the rows that were superseded, and the failures."""

    again: np.ndarray
    why: str
    superseded: np.ndarray
    failures: Sequence[Failure]


@dataclass(frozen=True, slots=True)
class Batch:
    """Some lines, and the rows of the changes that they came from."""

    lines: pa.Array
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def body(self) -> memoryview:
        """The lines as one piece of memory, without copying."""
        ends = offsets(self.lines)
        return memoryview(self.lines.buffers()[2])[ends[0] : ends[-1]]

    def part(self, places: np.ndarray) -> "Batch":
        """Only these of the lines."""
        return Batch(self.lines.take(pa.array(places)), self.rows[places])

    def halves(self) -> tuple["Batch", "Batch"]:
        """Both halves; a batch of one line has none."""
        half = len(self) // 2
        return self.span(0, half), self.span(half, len(self))

    def span(self, start: int, end: int) -> "Batch":
        """The lines from the one to before the other."""
        return Batch(self.lines.slice(start, end - start), self.rows[start:end])


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSearchWriter:
    """Sends changes from workers; plain data.

    `version` is that of documents which are made of rows, `shapes` are the tables that these rows
    have, as far as they are known.
    """

    options: OpenSearchOptions
    indices: Mapping[str, str]
    version: int = 0
    shapes: Mapping[str, TableShape] = field(default_factory=dict)
    credentials: Credentials | None = None

    def tables(self) -> Collection[str]:
        """The tables whose indices it writes to."""
        return self.indices.keys()

    def schema_json(self, table: str) -> str:
        """The columns of a table's documents; empty while nobody has told them."""
        shape = self.shapes.get(table)
        return new_schema(shape, table).model_dump_json() if shape else ""

    def reads(self, table: str) -> None:
        """Nothing is selected."""
        return None

    def refused(self, table: str) -> str | None:
        """Why no index can have the table's name; None when one can."""
        try:
            self.options.index_name(table)
        except ConfigInvalid as error:
            return error.message
        return None

    def key(self, table: str) -> Sequence[str]:
        """The columns that a document's id is made of; empty when the source names its rows."""
        shape = self.shapes.get(table)
        return shape.key if shape else ()

    def write(
        self, table: str, shard: str, changes: pa.Table, each_key_once: bool = False
    ) -> Iterator[Report]:
        """Send all changes and report once, when every one of them is acknowledged.

        Changes have `OP`, `AT`, `id` and `document`. At one version an id has one change. A change
        without an id is given one by OpenSearch; nothing recognises it when it is sent again.
        Raises `DataRejected`, or keeps dead letters, for what OpenSearch will never take.
        """
        client = Client(self.options, self.credentials)
        try:
            sending = Sending(client, self.options, self.indices[table], _in_one_piece(changes))
            tally = sending.run()
        finally:
            client.close()
        yield Report(
            table=table,
            kind=DOCUMENTS,
            rows=changes.num_rows,
            size_bytes=tally.size_bytes,
            payload=tally,
        )


class Sending:
    """The way of one call's changes into one index."""

    def __init__(
        self, client: Client, options: OpenSearchOptions, index: str, changes: pa.RecordBatch
    ):
        self._client = client
        self._options = options
        self._index = index
        self._changes = changes
        deletes = pc.equal(changes.column(OP), int(Op.DELETE))
        self._deletes = deletes.to_numpy(zero_copy_only=False)
        self._bridge = Bridge()
        self._tally = Tally()

    def run(self) -> Tally:
        """Send everything; returns when all is acknowledged."""
        legal = _legal_ids(self._changes.column(ID))
        rows = np.arange(self._changes.num_rows)
        # No document ever had such an id: there is nothing to delete.
        self._acknowledge(rows[~legal & self._deletes])
        failures = [
            Failure(int(row), "illegal_id", f"the id is empty or longer than {ID_BYTES_MAX} bytes")
            for row in rows[~legal & ~self._deletes]
        ]
        if failures:
            self._refuse(failures)
        rows = rows[legal]
        sent = self._changes if legal.all() else self._changes.take(pa.array(rows))
        lines = bulk_lines(sent)
        self._tally.size_bytes = int(offsets(lines)[-1])
        whole = Batch(lines, rows)
        cuts = cut(offsets(lines), self._options.bulk_bytes_max, self._options.bulk_documents_max)
        for start, end in cuts:
            self._send(whole.span(start, end))
        self._tally.retries = self._bridge.tries
        return self._tally

    def _send(self, batch: Batch) -> None:
        """Send until each line is acknowledged, superseded or refused for good."""
        pending = deque([batch])
        failures: list[Failure] = []
        while pending:
            batch = pending.popleft()
            try:
                answer = self._client.ask(
                    "POST", f"/{quote(self._index, safe='')}/_bulk?{_FILTER}", batch.body(), LINES
                )
            except (CommitUnknown, TargetUnavailable) as error:
                # Whatever was taken is recognised by its version when it comes again.
                self._bridge.wait(TargetUnavailable(error.message, detail=error.detail))
                pending.appendleft(batch)
                continue
            if answer.status == OK:
                again = self._settle(batch, answer, failures)
                if len(again):
                    pending.appendleft(again)
            elif answer.status == BAD_REQUEST or beyond_limit(answer):
                # One line is to blame, or their sum; halving finds out.
                if len(batch) > 1:
                    pending.extendleft(reversed(batch.halves()))
                else:
                    failures.append(_whole_failure(int(batch.rows[0]), answer))
            elif passing(answer.status):
                self._bridge.wait(unavailable(answer))
                pending.appendleft(batch)
            else:
                raise foreign(answer.reason)
        if failures:
            self._refuse(failures)

    def _settle(self, batch: Batch, answer: Answer, failures: list[Failure]) -> Batch:
        """Count what the answer acknowledges; returns the lines to be sent again, after a pause."""
        if answer.body.startswith(_NO_ERRORS):
            check(answer.body.count(_STATUS) == len(batch), "every line of a request is answered")
            self._acknowledge(batch.rows)
            return batch.span(0, 0)
        items = read_items(answer, batch.rows)
        busy = batch.part(items.again)
        refused_rows = np.array([one.row for one in items.failures], np.int64)
        open_rows = np.concatenate([busy.rows, items.superseded, refused_rows])
        self._supersede(items.superseded)
        self._acknowledge(np.setdiff1d(batch.rows, open_rows))
        failures.extend(items.failures)
        if len(busy):
            if len(busy) < len(batch):
                self._bridge.refresh()
            self._bridge.wait(
                TargetUnavailable(
                    f"OpenSearch could not take {len(busy)} documents of index {self._index}",
                    detail=items.why,
                    hint="The cluster is too busy or not whole; look at its health.",
                )
            )
        return busy

    def _acknowledge(self, rows: np.ndarray) -> None:
        deleted = int(np.count_nonzero(self._deletes[rows]))
        self._tally.deleted += deleted
        self._tally.indexed += len(rows) - deleted
        if len(rows):
            self._bridge.refresh()

    def _refuse(self, failures: Sequence[Failure]) -> None:
        """Deal with what will never be taken, as the options say."""
        gone = [one for one in failures if one.kind == _INDEX_GONE]
        if gone:
            raise ProgressLost(
                f"index {self._index} is gone",
                detail=gone[0].reason,
                hint="Restore it, or start again to see what can be done.",
            )
        refused_deletes = [one for one in failures if self._deletes[one.row]]
        if self._options.on_error == DEAD_LETTER and not refused_deletes:
            self._keep(failures)
            self._take_out(failures)
            self._tally.dead_letters += len(failures)
            return
        first = failures[0]
        id_ = self._changes.column(ID)[first.row].as_py()
        shown = _QUOTED_VALUE.sub("", first.reason)
        others = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
        raise DataRejected(
            f"index {self._index} refuses document "
            f"{id_ if id_ is None else id_[:_ID_CHARACTERS_SHOWN]}{others}",
            detail=f"{first.kind}: {shown}",
            hint="A field that the mapping lacks can be added to it. The type of a field cannot be "
            "changed: delete the index and the pipeline's progress, so that all is loaded anew "
            "with a mapping that takes it. Or set `on_error: dead_letter` to keep such documents "
            f"in index {dead_letters(self._index)} instead.",
        )

    def _keep(self, failures: Sequence[Failure]) -> None:
        """Index refused changes as dead letters, each once however often it is refused."""
        # All in the text: on a worker nobody has set up how fields are shown.
        log.warning(
            "index %s refuses %d documents, the first for %s: %s; they are kept in index %s: look "
            "there, and correct the mapping or the rows",
            self._index,
            len(failures),
            failures[0].kind,
            _QUOTED_VALUE.sub("", failures[0].reason),
            dead_letters(self._index),
        )
        rows = pa.array([one.row for one in failures])
        changes = self._changes.take(rows).to_pylist()
        letters = [self._letter(one, change) for one, change in zip(failures, changes, strict=True)]
        # A letter that is there already stays.
        self._insist(dead_letters(self._index), pa.array(letters, _TEXT), "keep dead letters in")

    def _take_out(self, failures: Sequence[Failure]) -> None:
        """Delete the documents whose updates became dead letters: they show what was before."""
        rows = np.array([one.row for one in failures], np.int64)
        ids, added = self._changes.column(ID), pc.equal(self._changes.column(OP), int(Op.INSERT))
        rows = rows[~added.to_numpy(zero_copy_only=False)[rows]]
        named = _legal_ids(ids) & pc.is_valid(ids).to_numpy(zero_copy_only=False)
        rows = rows[named[rows]]
        changes = self._changes.take(pa.array(rows))
        deletes = {
            OP: pa.array(np.full(len(rows), int(Op.DELETE)), pa.int8()),
            AT: changes.column(AT),
            ID: changes.column(ID),
            DOCUMENT: pa.nulls(len(rows), _TEXT),
        }
        lines = bulk_lines(pa.record_batch(deletes))
        newer = self._insist(self._index, lines, "delete what was refused from")
        self._supersede(rows[newer])

    def _supersede(self, rows: np.ndarray) -> None:
        """Count changes whose documents are newer already; one of them is named."""
        self._tally.superseded += len(rows)
        if len(rows) and not self._tally.superseded_id:
            id_ = self._changes.column(ID)[int(rows[0])].as_py()
            self._tally.superseded_id = id_[:_ID_CHARACTERS_SHOWN]

    def _insist(self, index: str, lines: pa.Array, what: str) -> np.ndarray:
        """Send lines until each is taken; the places of those that met a newer version."""
        sending = _Insisting(self._client, index, self._bridge, what)
        whole = Batch(lines, np.arange(len(lines)))
        limits = self._options.bulk_bytes_max, self._options.bulk_documents_max
        spans = cut(offsets(lines), *limits)
        newer = [sending.send(whole.span(start, end)) for start, end in spans]
        return np.concatenate([np.array([], np.int64), *newer])

    def _letter(self, failure: Failure, change: Mapping[str, object]) -> str:
        """The lines that index a dead letter, under an id that the same failure has again."""
        id_, document = change[ID], str(change[DOCUMENT] or "")
        name = json.dumps([self._index, id_ if id_ is not None else [document], change[AT]])
        letter = {
            "index": self._index,
            "document_id": id_,
            "version": change[AT],
            "operation": "DELETE" if change[OP] == Op.DELETE else "INDEX",
            "error_type": failure.kind,
            "reason": failure.reason,
            "document": document[:DEAD_LETTER_CHARACTERS_MAX],
            "document_cut": len(document) > DEAD_LETTER_CHARACTERS_MAX,
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        action = {"create": {"_id": hashlib.sha256(name.encode()).hexdigest()}}
        return f"{json.dumps(action)}\n{json.dumps(letter)}\n"


@dataclass(frozen=True, slots=True)
class _Insisting:
    """The way of lines that no node has a reason to refuse."""

    client: Client
    index: str
    bridge: Bridge
    what: str

    def send(self, batch: Batch) -> np.ndarray:
        """Send until every line is taken; the rows of those that met a conflict."""
        conflicts = np.array([], np.int64)
        while len(batch):
            try:
                answer = self.client.ask(
                    "POST", f"/{quote(self.index, safe='')}/_bulk?{_FILTER}", batch.body(), LINES
                )
            except (CommitUnknown, TargetUnavailable) as lost:
                self.bridge.wait(TargetUnavailable(lost.message, detail=lost.detail))
                continue
            if passing(answer.status):
                self.bridge.wait(unavailable(answer))
                continue
            if answer.status != OK:
                raise self._failed(answer.reason)
            items = read_items(answer, batch.rows)
            conflicts = np.concatenate([conflicts, items.superseded])
            if items.failures:
                wrong = items.failures[0]
                raise self._failed(f"{wrong.kind}: {_QUOTED_VALUE.sub('', wrong.reason)}")
            batch = batch.part(items.again)
            if len(batch):
                self.bridge.wait(
                    TargetUnavailable(f"could not {self.what} index {self.index}", detail=items.why)
                )
        return conflicts

    def _failed(self, reason: str) -> DataRejected:
        return DataRejected(
            f"cannot {self.what} index {self.index}",
            detail=reason,
            hint="Correct its mapping and settings, or delete that index.",
        )


def read_items(answer: Answer, rows: np.ndarray) -> Items:
    """Sort the items of an answer to a request with lines of these rows."""
    found = answer.json().get("items")
    if not isinstance(found, list):
        raise foreign(answer.reason)
    results = [next(iter(item.values())) for item in found]
    check(len(results) == len(rows), "a bulk answer has one item for each line")
    again, superseded, failures, why = [], [], [], ""
    for place, result in enumerate(results):
        status, error = result["status"], result.get("error") or {}
        if status == CONFLICT:
            superseded.append(int(rows[place]))
        elif passing(status):
            again.append(place)
            why = why or f"{status} {error.get('type')}: {error.get('reason')}"
        elif status in (UNAUTHORIZED, FORBIDDEN):
            raise refused(f"{error.get('type')}: {error.get('reason')}")
        elif status >= BAD_REQUEST and (error or status != NOT_FOUND):
            # A delete of a document that is not there is answered with 404, and no error.
            kind, reason = str(error.get("type", status)), str(error.get("reason", ""))
            failures.append(Failure(int(rows[place]), kind, reason))
    return Items(
        again=np.array(again, np.int64),
        why=why,
        superseded=np.array(superseded, np.int64),
        failures=failures,
    )


def beyond_limit(answer: Answer) -> bool:
    """Whether a request is larger than the host ever takes: 413, or 429 with a limit below it."""
    found = _OPERATION_BYTES.search(answer.reason) if answer.status == TOO_MANY_REQUESTS else None
    return answer.status == TOO_LARGE or (found is not None and int(found[1]) > int(found[2]))


def _whole_failure(row: int, answer: Answer) -> Failure:
    if beyond_limit(answer):
        return Failure(row, "too_large", "the document is larger than a request may be")
    return Failure(row, answer.error_kind or "refused", answer.reason)


def bulk_lines(changes: pa.RecordBatch) -> pa.Array:
    """The action line of each change, with the document's line where there is one."""
    ids, documents = changes.column(ID), changes.column(DOCUMENT)
    deletes = pc.equal(changes.column(OP), int(Op.DELETE))
    unnamed = pc.is_null(ids)
    fitting = pc.xor(deletes, pc.is_valid(documents))
    check(pc.all(fitting, min_count=0).as_py(), "a change has a document unless it is a delete")
    check(not pc.any(pc.and_(deletes, unnamed)).as_py(), "a delete has an id")
    versions = pc.cast(changes.column(AT), _TEXT)
    head, middle = _texts('{"index":{"_id":"'), _texts('","version":')
    tail = _texts(',"version_type":"external_gte"}}\n')
    if pc.any(deletes).as_py():
        head = pc.if_else(deletes, _texts('{"delete":{"_id":"'), head)
    if pc.any(unnamed).as_py():
        # What OpenSearch names itself has no earlier version.
        nothing = pa.scalar(None, _TEXT)
        head = pc.if_else(unnamed, _texts('{"index":{'), head)
        middle = pc.if_else(unnamed, nothing, middle)
        versions = pc.if_else(unnamed, nothing, versions)
        tail = pc.if_else(unnamed, _texts("}}\n"), tail)
    end = pc.if_else(deletes, _texts(""), _texts("\n"))
    return pc.binary_join_element_wise(
        *(head, escaped(ids), middle, versions, tail, documents, end),
        _texts(""),
        null_handling="replace",
        null_replacement="",
    )


def _texts(text: str) -> pa.Scalar:
    return pa.scalar(text, _TEXT)


def escaped(texts: pa.Array) -> pa.Array:
    """The texts as they stand between the quotes of a JSON string."""
    if not pc.any(pc.match_substring_regex(texts, _MUST_BE_ESCAPED)).as_py():
        return texts
    texts = pc.replace_substring(texts, "\\", "\\\\")
    texts = pc.replace_substring(texts, '"', '\\"')
    for control in _CONTROLS:
        texts = pc.replace_substring(texts, control, f"\\u{ord(control):04x}")
    return texts


def offsets(lines: pa.Array) -> np.ndarray:
    """Where in memory each line begins, and the last one ends."""
    ends = np.frombuffer(lines.buffers()[1], np.int64)
    return ends[lines.offset : lines.offset + len(lines) + 1]


def cut(ends: np.ndarray, bytes_max: int, count_max: int) -> Iterator[tuple[int, int]]:
    """Spans of lines that stay within both bounds; a line beyond them is a span of its own."""
    start, last = 0, len(ends) - 1
    while start < last:
        within = int(np.searchsorted(ends, ends[start] + bytes_max, side="right")) - 1
        end = min(max(within, start + 1), start + count_max, last)
        yield start, end
        start = end


def _legal_ids(ids: pa.Array) -> np.ndarray:
    lengths = pc.fill_null(pc.binary_length(ids), 1).to_numpy(zero_copy_only=False)
    legal: np.ndarray = (lengths > 0) & (lengths <= ID_BYTES_MAX)
    return legal


def _in_one_piece(changes: pa.Table) -> pa.RecordBatch:
    """The columns that matter, each one array; texts with offsets that any amount of them fits."""
    columns = {
        OP: changes.column(OP),
        AT: changes.column(AT),
        ID: changes.column(ID).cast(_TEXT),
        DOCUMENT: changes.column(DOCUMENT).cast(_TEXT),
    }
    return pa.record_batch({name: _one(column) for name, column in columns.items()})


def _one(column: pa.ChunkedArray) -> pa.Array:
    found = column.combine_chunks()
    return pa.concat_arrays(found.chunks) if isinstance(found, pa.ChunkedArray) else found
