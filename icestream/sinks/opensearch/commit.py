"""A pipeline's progress, one document that is only ever replaced by compare-and-swap.

Documents are visible as soon as a worker's request is acknowledged, and sending them again changes
nothing. So the document with the frontier is what makes an epoch durable, for all tables at once.
The four rules of every commit (`icestream.commit_protocol`) guard each attempt to replace it. Here
is what they go by: OpenSearch replaces the document only if its sequence number and primary term
still are those of the document that was checked. Continuity also requires that the epoch's indices
are still the ones named in the progress, and that they hold no newer documents than were sent.

The document names an index before the first document goes there. So a restart knows its own index
from one that holds somebody else's documents, or those of a progress that was lost.
"""

import json
import logging
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from icestream import commit_protocol, failpoints
from icestream.commit_protocol import (
    Move,
    Subject,
    bounded,
    insist,
    refuse_newer,
    refuse_others,
    swap_rule,
)
from icestream.epoch import Progress, batch_id
from icestream.errors import (
    CommitConflict,
    CommitUnknown,
    ConfigInvalid,
    Fenced,
    IcestreamError,
    ProgressLost,
    check,
)
from icestream.frontier import Frontier
from icestream.sinks.opensearch.client import (
    CONFLICT,
    CREATED,
    NOT_FOUND,
    OK,
    Answer,
    Client,
    passing,
)
from icestream.sinks.opensearch.owners import Owner, owner_of, refuse_other

log = logging.getLogger(__name__)

# A starting run that loses this often against another one leaves the pipeline to it.
CLAIMS_MAX = 5
# What is asked of an index, to tell whether and whose it is.
SEEN = "filter_path=error,*.data_stream,*.settings.index.uuid,*.mappings._meta"
# OpenSearch takes a first line of 4096 bytes; one name has 255 bytes at the most, quoted 765.
LIST_CHARACTERS_MAX = 3000
_PROGRESS_INDEX = {
    "settings": {"number_of_shards": 1, "auto_expand_replicas": "0-1"},
    # Partitions of a frontier have any names, and nobody searches for them.
    "mappings": {"dynamic": False, "enabled": False},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """An index by its name and its identity."""

    name: str
    uuid: str

    def to_json(self) -> dict[str, str]:
        """The index as the progress document has it."""
        return {"index": self.name, "uuid": self.uuid}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An index as it was found: its identity, the `_meta` of its mapping, its data stream."""

    uuid: str
    meta: Mapping[str, Any]
    data_stream: str = ""

    @property
    def owner(self) -> Owner | None:
        """Who fills it, as it says itself."""
        return owner_of(self.meta)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflicts:
    """Documents of a table that are newer in their index than what was sent."""

    table: str
    count: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Standings:
    """Where the tables stand, while some do not stand where the others do.

    `level` is the last epoch of the tables that are level; None when it is the last epoch of all.
    `behind` has the frontier of each table that is brought forward to the others. `unfilled` are
    tables whose index is named, and that have taken no epoch yet. `away` has the last epoch of
    tables that a run left out of its configuration: what came since is not in them, and only the
    source can tell whether something did.

    An example: tables a and b are level at epoch 7, `[60, 70)`. Table c was added: it is unfilled
    when its index is named. Epoch 8, `[0, 30)`, is of c alone. Then the document's own epoch is 8,
    `level` is epoch 7, and `behind` has c at 30. Epoch 9, `[30, 70)`, brings c to the others:
    `behind` is empty, and `level` still is epoch 7. Epoch 10, `[70, 80)`, is of all tables: there
    is no `level` any more.
    """

    level: Progress | None = None
    behind: Mapping[str, Frontier] = field(default_factory=dict)
    unfilled: frozenset[str] = frozenset()
    away: Mapping[str, Progress] = field(default_factory=dict)

    def of(self, last: Progress) -> Progress:
        """The last epoch of the tables that are level, given the document's own."""
        return replace(self.level, generation=last.generation) if self.level else last

    def after(
        self, last: Progress, upper: Frontier, tables: Collection[str], catching_up: bool
    ) -> "Standings":
        """What becomes of it by an epoch of these tables up to `upper`; `last` was before it."""
        behind, unfilled = self.behind, self.unfilled.difference(tables)
        away = {table: mine for table, mine in self.away.items() if table not in tables}
        if not tables or not self.of(last).upper.covers(upper):
            return Standings(behind=behind, unfilled=unfilled, away=away)
        # The others have been there: the epoch brings a table forward.
        behind = {table: at for table, at in behind.items() if table not in tables}
        behind |= dict.fromkeys(tables, upper) if catching_up else {}
        return Standings(level=self.level or last, behind=behind, unfilled=unfilled, away=away)

    def leaving(self, last: Progress, tables: Collection[str]) -> "Standings":
        """The same when a run begins that does not have these tables."""
        level = {*tables} - {*self.behind, *self.unfilled, *self.away}
        return replace(self, away={**self.away, **dict.fromkeys(level, self.of(last))})

    def naming(self, tables: Collection[str]) -> "Standings":
        """The same with new tables."""
        return replace(self, unfilled=self.unfilled.union(tables))


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The progress document as it was found; the swap is based on exactly this one."""

    progress: Progress
    standings: Standings = field(default_factory=Standings)
    batch_id: str = ""
    claim_id: str = ""
    indices: Mapping[str, Index]
    committed_at: float = 0.0
    sequence: int | None = None
    term: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """An epoch of all its tables, ready to be published."""

    expected: Progress
    new: Progress
    indices: Mapping[str, Index]
    labels: Mapping[str, str]
    standings: Standings = field(default_factory=Standings)
    conflicts: Conflicts | None = None

    @property
    def batch_id(self) -> str:
        """What the epoch is found by."""
        return batch_id(self.new.pipeline, "", self.new.upper)


class ProgressDocument:
    """Reads and replaces the document of one pipeline."""

    def __init__(self, client: Client, index: str, pipeline: str):
        self._client = client
        self._index = index
        self._pipeline = pipeline

    def read(self) -> Head:
        """The document as it is; without one, no progress and nothing to base a swap on."""
        answer = self._client.call("GET", f"{self._path('_doc')}?preference=_primary")
        body = answer.json()
        if answer.status == NOT_FOUND and (
            body.get("found") is False or answer.error_kind == "index_not_found_exception"
        ):
            return Head(progress=Progress(pipeline=self._pipeline), indices={})
        if answer.status != OK or "_source" not in body:
            # Taken for nothing it would make the pipeline begin anew.
            raise ConfigInvalid(
                f"the progress of pipeline {self._pipeline} cannot be read from index "
                f"{self._index}",
                detail=answer.reason,
                hint="Check `hosts` and `progress_index`.",
            )
        return _head(body, self._pipeline)

    def claim(self, tables: Sequence[str]) -> Head:
        """Publish the next generation, with the progress found carried forward.

        Raises `Fenced` when other runs are faster again and again, and `ProgressLost` when the
        index of one of these tables is not the one that the progress speaks of.
        """
        claim_id = str(uuid.uuid4())

        def attempt(attempted: bool) -> Head:
            head = self.read()
            if head.claim_id == claim_id:
                return head
            self.refuse_lost({t: i for t, i in head.indices.items() if t in tables})
            mine = replace(head.progress, generation=head.progress.generation + 1)
            left = head.indices.keys() - {*tables}
            head = replace(head, standings=head.standings.leaving(head.progress, left))
            self._swap(head, self._source(mine, head, claim_id=claim_id))
            return replace(head, progress=mine, claim_id=claim_id)

        try:
            return insist(attempt, bounded(self._note, CLAIMS_MAX))
        except CommitConflict as error:
            raise Fenced(
                f"other runs of pipeline {self._pipeline} take it over at the same time",
                hint="Nothing is lost; start again when only one run is active.",
            ) from error

    def publish(self, commit: Commit) -> bool:
        """Publish the epoch; when this returns it is durable exactly once.

        True when an earlier attempt, whose answer was lost, turns out to have done it. Raises
        `Fenced` or `ProgressLost` with nothing published, and `CommitUnknown` or
        `TargetUnavailable` when OpenSearch did not come back in time: a restart finds out.
        """
        move = Move(expected=commit.expected, new=commit.new, subject=self._subject)
        failed = bounded(self._note)
        landed = commit_protocol.publish(_Publishing(self, commit), {self._pipeline: move}, failed)
        return landed[self._pipeline].result is None

    def name(self, mine: Progress, indices: Mapping[str, Index]) -> None:
        """Remember indices before the first document goes there; the progress stays as it is.

        Raises as `publish` does.
        """

        def attempt(attempted: bool) -> None:
            head = self.read()
            refuse_newer(head.progress, mine.generation, self._subject)
            refuse_others(head.progress, mine, self._subject)
            new = [table for table in indices if table not in head.indices]
            more = replace(
                head,
                indices={**head.indices, **indices},
                standings=head.standings.naming(new),
            )
            self._swap(head, self._source(mine, more))

        insist(attempt, bounded(self._note))

    def replace(self, head: Head, commit: Commit) -> None:
        """Replace the document that was read by that of an epoch."""
        failpoints.reach(failpoints.BEFORE_PUBLISH)
        self._swap(head, self._source(commit.new, head, commit=commit))
        failpoints.reach(failpoints.AFTER_PUBLISH)

    def refuse_broken(self, commit: Commit) -> None:
        """Raise unless the epoch's indices are as this run left them."""
        self.refuse_lost(commit.indices)
        if commit.conflicts:
            # A newer run sends newer versions; without one, no run of this pipeline does.
            raise self._overtaken(commit.conflicts, commit)

    @property
    def _subject(self) -> Subject:
        return Subject(
            name=f"pipeline {self._pipeline}",
            over="",
            meddling=f"writes to index {self._index}",
        )

    def refuse_lost(self, indices: Mapping[str, Index]) -> None:
        """Raise `ProgressLost` unless each index is still the one that was written to.

        Raises `ConfigInvalid` when somebody else has become its owner.
        """
        found = self.look([index.name for index in indices.values()])
        for table, index in indices.items():
            self.refuse_other_than(table, index, found.get(index.name))

    def refuse_other_than(self, table: str, index: Index, there: Seen | None) -> None:
        """As `refuse_lost`, of a single index and what was seen in its place."""
        if there is not None and there.uuid == index.uuid:
            refuse_other(index.name, there.owner, Owner(pipeline=self._pipeline, table=table))
            return
        state = "has been made anew" if there is not None else "is gone"
        raise ProgressLost(
            f"index {index.name} {state}, and with it what pipeline {self._pipeline} brought",
            detail=f"It holds the documents of table {table}.",
            hint=f"Restore the index, or delete document {self._pipeline} of index "
            f"{self._index} and the pipeline's other indices to load all its tables anew.",
        )

    def look(self, names: Sequence[str]) -> dict[str, Seen]:
        """Those of the indices that exist."""
        found: dict[str, Seen] = {}
        quoted = [quote(name, safe="") for name in sorted(set(names))]
        for listed in _lists(quoted, LIST_CHARACTERS_MAX):
            answer = self._client.call("GET", f"/{listed}?ignore_unavailable=true&{SEEN}")
            if answer.status != NOT_FOUND:
                check(answer.status == OK, f"OpenSearch tells the settings of {listed}")
                found |= seen(answer)
        return found

    def _path(self, kind: str) -> str:
        return f"/{quote(self._index, safe='')}/{kind}/{quote(self._pipeline, safe='')}"

    def _source(
        self, progress: Progress, head: Head, commit: Commit | None = None, claim_id: str = ""
    ) -> dict[str, Any]:
        """The document of a progress; a claim publishes no epoch and so has no batch id."""
        indices = {**head.indices, **(commit.indices if commit else {})}
        standings = commit.standings if commit else head.standings
        level = standings.level
        return {
            "pipeline": progress.pipeline,
            "generation": progress.generation,
            **_bounds(progress),
            "batch_id": commit.batch_id if commit else "",
            "claim_id": claim_id,
            "indices": {table: index.to_json() for table, index in sorted(indices.items())},
            "labels": dict(commit.labels) if commit else {},
            "committed_at": time.time() if commit else head.committed_at,
            "level": _bounds(level) if level else None,
            "behind": {table: at.to_json() for table, at in sorted(standings.behind.items())},
            "unfilled": sorted(standings.unfilled),
            "away": {table: _bounds(mine) for table, mine in sorted(standings.away.items())},
        }

    def _swap(self, head: Head, source: Mapping[str, Any]) -> None:
        """Replace the document that was read; raises `CommitConflict` when it is another one."""
        if not swap_rule():
            path = self._path("_doc")
        elif head.sequence is None:
            self._create_index()
            path = self._path("_create")
        else:
            condition = f"if_seq_no={head.sequence}&if_primary_term={head.term}"
            path = f"{self._path('_doc')}?{condition}"
        failpoints.reach(failpoints.BEFORE_SWAP)
        answer = self._client.ask("PUT", path, json.dumps(source).encode())
        if answer.status == CONFLICT:
            raise CommitConflict(
                f"the progress of pipeline {self._pipeline} was replaced meanwhile",
                detail=answer.reason,
            )
        if passing(answer.status):
            raise CommitUnknown(
                f"the progress of pipeline {self._pipeline} may or may not have been replaced",
                detail=answer.reason,
            )
        if answer.status not in (OK, CREATED):
            raise ConfigInvalid(
                f"index {self._index} does not take the progress of pipeline {self._pipeline}",
                detail=answer.reason,
                hint="Name another index with `progress_index`; icestream creates it as it needs "
                "it.",
            )
        failpoints.reach(failpoints.AFTER_SWAP)

    def _create_index(self) -> None:
        create_index(self._client, self._index, _PROGRESS_INDEX)

    def _overtaken(self, conflicts: Conflicts, commit: Commit) -> ProgressLost:
        index = commit.indices[conflicts.table].name
        return ProgressLost(
            f"index {index} holds newer documents than table {conflicts.table} gives",
            detail=f"There are {conflicts.count}, such as {conflicts.example}. Somebody else "
            "writes to the index, or the pipeline's progress was put back.",
            hint="Find out who writes to it and stop that. Then delete document "
            f"{self._pipeline} of index {self._index} and the pipeline's indices to load all its "
            "tables anew.",
        )

    def _note(self, error: IcestreamError) -> None:
        log.warning(
            "attempt failed: %s (%s)",
            error.message,
            error.detail,
            extra={"pipeline": self._pipeline},
        )


class _Publishing:
    """What the rules ask of the document."""

    def __init__(self, document: ProgressDocument, commit: Commit):
        self._document = document
        self._commit = commit

    def heads(self, keys: Collection[str]) -> dict[str, Head]:
        """The document, read afresh."""
        head = self._document.read()
        return dict.fromkeys(keys, head)

    def progress(self, head: Head) -> Progress:
        """The progress in the document."""
        return head.progress

    def refuse_broken_history(self, key: str, head: Head, broken: IcestreamError | None) -> None:
        """The indices are a part of what must be as it was left."""
        if broken is None:
            self._document.refuse_broken(self._commit)

    def fits(self, key: str, head: Head) -> None:
        """Documents that were sent are there already."""

    def swap(self, heads: Mapping[str, Head]) -> dict[str, bool]:
        """Replace the document."""
        for head in heads.values():
            self._document.replace(head, self._commit)
        return dict.fromkeys(heads, True)


def create_index(client: Client, name: str, body: object = None) -> None:
    """Create an index unless it exists."""
    answer = client.call("PUT", f"/{quote(name, safe='')}", body)
    if answer.status == OK or answer.error_kind == "resource_already_exists_exception":
        return
    raise ConfigInvalid(
        f"index {name} cannot be created",
        detail=answer.reason,
        hint="Correct the template that applies to it, or name another index.",
    )


def seen(answer: Answer) -> dict[str, Seen]:
    """The indices of an answer that was asked for with `SEEN`."""
    found = {}
    for name, index in answer.json().items():
        meta = index.get("mappings", {}).get("_meta", {})
        found[name] = Seen(
            uuid=index["settings"]["index"]["uuid"],
            meta=meta,
            data_stream=index.get("data_stream", ""),
        )
    return found


def _bounds(progress: Progress) -> dict[str, Any]:
    return {
        "epoch": progress.epoch,
        "lower": progress.lower.to_json(),
        "upper": progress.upper.to_json(),
        "tables": progress.tables,
    }


def _head(body: Mapping[str, Any], pipeline: str) -> Head:
    source = body["_source"]
    check(source.get("pipeline") == pipeline, "a progress document names its own pipeline")

    def progress(bounds: Mapping[str, Any]) -> Progress:
        return Progress(
            pipeline=pipeline,
            generation=int(source["generation"]),
            epoch=int(bounds["epoch"]),
            lower=Frontier.from_json(bounds["lower"]),
            upper=Frontier.from_json(bounds["upper"]),
            tables=int(bounds["tables"]),
        )

    level, behind = source.get("level"), source.get("behind") or {}
    return Head(
        progress=progress(source),
        standings=Standings(
            level=progress(level) if level else None,
            behind={table: Frontier.from_json(at) for table, at in behind.items()},
            unfilled=frozenset(source.get("unfilled") or ()),
            away={table: progress(each) for table, each in (source.get("away") or {}).items()},
        ),
        batch_id=source["batch_id"],
        claim_id=source["claim_id"],
        indices={
            table: Index(name=index["index"], uuid=index["uuid"])
            for table, index in source["indices"].items()
        },
        committed_at=float(source["committed_at"]),
        sequence=int(body["_seq_no"]),
        term=int(body["_primary_term"]),
    )


def _lists(names: Sequence[str], characters_max: int) -> Iterator[str]:
    """The names separated by commas, in as many texts as this length takes."""
    listed = ""
    for name in names:
        if listed and len(listed) + 1 + len(name) > characters_max:
            yield listed
            listed = ""
        listed = f"{listed},{name}" if listed else name
    if listed:
        yield listed
