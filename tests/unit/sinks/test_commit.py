"""Publishing an epoch lands exactly once, or not at all and says so."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest
from pyiceberg.types import LongType

from icestream import patience
from icestream.commit_protocol import CONFLICTS_MAX
from icestream.epoch import Progress, batch_id
from icestream.errors import (
    CommitConflict,
    CommitUnknown,
    Fenced,
    IcestreamError,
    ProgressLost,
    RolledBack,
    TargetUnavailable,
)
from icestream.frontier import Frontier
from icestream.iceberg import progress as summaries
from icestream.iceberg.closed import DATA, EQUALITY_DELETES, FileClosed
from icestream.iceberg.handle import TableName
from icestream.iceberg.new_table import NewTable
from icestream.schema import Column, TableShape, new_schema
from icestream.sinks import StaleWrite
from icestream.sinks.iceberg.commit import TableEpoch, publish_claim, publish_epoch
from tests.property.memory import Lake, MemoryCatalog, MemoryTable, Snapshot, Wire

T = TypeVar("T")

NAME = TableName(namespace=("shop",), name="orders")
SCHEMA = new_schema(TableShape(columns=[Column(name="id", type=LongType())], key=["id"]))
CLAIMED = Progress(pipeline="p", generation=2, epoch=4, upper=Frontier({"log": (10,)}), tables=1)
NEXT = replace(CLAIMED, epoch=5, lower=CLAIMED.upper, upper=Frontier({"log": (20,)}), tables=1)

# A first attempt, and one after each pause.
TRIES = len(patience.PAUSES_SECONDS) + 1

# What may become of a request; the default is that it lands and is answered.
Fate = Callable[[Callable[[], object], type[IcestreamError]], object]


def lands_unanswered(request: Callable[[], object], lost: type[IcestreamError]) -> object:
    request()
    raise lost("no answer")


def is_lost(request: Callable[[], object], lost: type[IcestreamError]) -> object:
    raise lost("no answer")


def is_sent_twice(request: Callable[[], object], lost: type[IcestreamError]) -> object:
    request()
    return request()


class ScriptedWire(Wire):
    """Gives each change its fate in turn, and calls a hook before the next ones."""

    def __init__(self) -> None:
        self.fates: list[Fate] = []
        self.before: list[Callable[[], None]] = []
        self.questions_unanswered = 0
        self.sent = 0

    def ask(self, request: Callable[[], T]) -> T:
        if self.questions_unanswered:
            self.questions_unanswered -= 1
            raise TargetUnavailable("no answer")
        return request()

    def send(self, request: Callable[[], T], lost: type[IcestreamError], what: str) -> T:
        self.sent += 1
        if self.before:
            self.before.pop(0)()
        return self.fates.pop(0)(request, lost) if self.fates else request()


class Scene:
    """A table that a run of generation 2 has claimed at epoch 4, and wants to bring epoch 5 to."""

    def __init__(self) -> None:
        self.lake, self.wire = Lake(), ScriptedWire()
        plain = MemoryCatalog(self.lake)
        plain.create(NAME, NewTable(schema_json=SCHEMA.model_dump_json()))
        self.publish_foreign(CLAIMED)
        found = MemoryCatalog(self.lake, self.wire).load(NAME)
        assert found is not None
        self.table: MemoryTable = found

    def publish_foreign(self, progress: Progress, batch: str | None = None) -> None:
        """Somebody commits a snapshot with icestream's keys."""
        summary = summaries.to_entries(progress).summary
        extra = {summaries.BATCH_ID: batch} if batch else {}
        self.lake.foreign_commit(NAME, "append", {**summary, **extra})

    def rival(self) -> None:
        """Somebody else appends to the table."""
        self.lake.foreign_commit(NAME, "append")

    def compaction(self) -> None:
        """Somebody compacts the table."""
        self.lake.foreign_commit(NAME, "replace")

    def epochs(self) -> list[Snapshot]:
        """The snapshots that publish an epoch, from the first to the last."""
        history = list(self.lake.tables[NAME].ancestry())[::-1]
        return [snapshot for snapshot in history if summaries.BATCH_ID in snapshot.summary]

    def commit(self, **changes: object) -> TableEpoch:
        metadata = self.lake.tables[NAME]
        given = {
            "table": "orders",
            "branch": "main",
            "expected": CLAIMED,
            "new": NEXT,
            "files": [closed("a.parquet")],
            "written_for": (metadata.uuid, metadata.schema_id, 0),
            "labels": {},
        }
        return TableEpoch(**{**given, **changes})


def closed(path: str, kind: str = DATA) -> FileClosed:
    return FileClosed(
        table="orders",
        epoch=5,
        worker="w",
        schema_id=0,
        spec_id=0,
        path=path,
        kind=kind,
        record_count=1,
        size_bytes=1,
        partition={},
    )


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """Trouble passes here by what a test says, not by waiting."""
    monkeypatch.setattr(patience, "PAUSES_SECONDS", (0.0,) * (TRIES - 1))  # same number of tries


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_an_epoch_lands_as_one_snapshot_with_its_progress(scene):
    """E2, I7: data and frontier in the same atomic commit, under the documented names."""
    files = [closed("a.parquet"), closed("b.parquet"), closed("d.parquet", EQUALITY_DELETES)]
    labels = {"crdb.batch_id": "{batch}", "crdb.data_file_count": "{data}", "plain": "x"}
    result = publish_epoch(scene.table, scene.commit(files=files, labels=labels))
    (snapshot,) = scene.epochs()
    own = batch_id("p", "orders", NEXT.upper)
    assert (result.snapshot_id, result.duplicate) == (snapshot.id, False)
    assert snapshot.paths == ["a.parquet", "b.parquet", "d.parquet"]
    assert snapshot.summary == {
        "icestream.pipeline": "p",
        "icestream.generation": "2",
        "icestream.epoch": "5",
        "icestream.epoch-tables": "1",
        "icestream.lower": '{"log":[10]}',
        "icestream.frontier": '{"log":[20]}',
        "icestream.batch-id": own,
        "icestream.data-files": "2",
        "icestream.delete-files": "1",
        "crdb.batch_id": own,
        "crdb.data_file_count": "2",
        "plain": "x",
    }
    assert scene.lake.tables[NAME].refs["icestream-p"] == snapshot.id


@pytest.mark.parametrize("rival", ["rival", "compaction"])
def test_a_commit_that_met_a_rival_is_made_again_on_the_new_head(scene, rival):
    """E4, I6: on a conflict reload, check, try again; foreign snapshots are stepped over."""
    scene.wire.before = [getattr(scene, rival), getattr(scene, rival)]
    assert not publish_epoch(scene.table, scene.commit()).duplicate
    assert scene.wire.sent == 3
    assert len(scene.epochs()) == 1
    head = scene.lake.tables[NAME].head("main")
    assert head is not None and head.id == scene.epochs()[0].id


@pytest.mark.parametrize("fate", [lands_unanswered, is_sent_twice])
def test_a_commit_that_landed_but_was_reported_failed_is_not_made_twice(scene, fate):
    """I5, I6: read-back first; a refusal does not prove that the commit was not ours."""
    scene.wire.fates = [fate]
    result = publish_epoch(scene.table, scene.commit())
    assert result.duplicate
    assert [snapshot.id for snapshot in scene.epochs()] == [result.snapshot_id]
    assert scene.wire.sent == 1


def test_a_commit_that_was_lost_is_made_again(scene):
    """I6: an unknown outcome is probed, and tried again when it is not there."""
    scene.wire.fates = [is_lost, is_lost]
    assert not publish_epoch(scene.table, scene.commit()).duplicate
    assert len(scene.epochs()) == 1


def test_a_lost_answer_is_recognised_behind_a_compaction(scene):
    """E4, I5: the probe goes through the history, not only to the head."""

    def then_compacted(request, lost):
        request()
        scene.compaction()
        raise lost("no answer")

    scene.wire.fates = [then_compacted]
    assert publish_epoch(scene.table, scene.commit()).duplicate
    assert len(scene.epochs()) == 1


def test_an_epoch_that_is_there_already_is_counted_as_published(scene):
    """I5: before each attempt the history is probed."""
    publish_epoch(scene.table, scene.commit())
    assert publish_epoch(scene.table, scene.commit()).duplicate
    assert len(scene.epochs()) == 1


def test_a_higher_generation_stops_the_run(scene):
    """E6: a writer that meets a higher generation stops with its own error."""
    scene.publish_foreign(replace(CLAIMED, generation=3))
    with pytest.raises(Fenced, match="newer run of pipeline p has taken over table orders"):
        publish_epoch(scene.table, scene.commit())
    assert scene.epochs() == []


def test_a_claim_between_the_check_and_the_swap_stops_the_run(scene):
    """E6: a zombie that wakes up after its successor started can never commit."""
    scene.wire.before = [lambda: scene.publish_foreign(replace(CLAIMED, generation=3))]
    with pytest.raises(Fenced):
        publish_epoch(scene.table, scene.commit())
    assert scene.epochs() == []


def test_progress_beyond_the_own_epoch_stops_the_run(scene):
    """E6: a durable frontier beyond the own epoch means that someone else is active."""
    scene.publish_foreign(replace(NEXT, epoch=6), batch="other")
    with pytest.raises(Fenced, match="ahead of this run"):
        publish_epoch(scene.table, scene.commit())
    assert len(scene.epochs()) == 1


@pytest.mark.parametrize(
    "found",
    [
        replace(CLAIMED, epoch=3),
        replace(CLAIMED, upper=Frontier({"log": (11,)})),
        replace(CLAIMED, tables=2),
        replace(CLAIMED, generation=1),
    ],
)
def test_progress_that_this_run_did_not_leave_there_stops_it(scene, found):
    """E3: continuity: the durable progress is exactly the one this run last saw there."""
    scene.publish_foreign(found)
    with pytest.raises(ProgressLost, match="not the one this run left there"):
        publish_epoch(scene.table, scene.commit())
    assert scene.epochs() == []


def test_a_table_without_progress_takes_a_first_epoch(scene):
    """E4: nothing found is the same as nothing expected."""
    plain = MemoryCatalog(scene.lake)
    name = TableName(namespace=("shop",), name="new")
    table = plain.create(name, NewTable(schema_json=SCHEMA.model_dump_json()))
    expected = Progress(pipeline="p")
    commit = scene.commit(expected=expected, new=replace(NEXT, generation=0), written_for=None)
    assert not publish_epoch(table, commit).duplicate


def test_a_table_of_the_same_name_that_is_another_table_is_refused(scene):
    """I6: the table's uuid is a precondition."""
    commit = scene.commit(written_for=("another", 0, 0))
    with pytest.raises(ProgressLost, match="dropped and created anew"):
        publish_epoch(scene.table, commit)
    assert scene.epochs() == []


def test_files_written_for_an_older_schema_are_written_again(scene):
    """I6: the schema still is the one the files were written for."""
    commit = scene.commit()
    scene.lake.evolve(NAME)
    with pytest.raises(StaleWrite):
        publish_epoch(scene.table, commit)
    # A heartbeat has no files that could be stale.
    assert not publish_epoch(scene.table, replace(commit, files=[])).duplicate


def test_an_epoch_is_not_stale_once_it_is_published(scene):
    """I5: a schema that changed after the commit landed is no reason to write again."""
    commit = scene.commit()

    def evolve_then_land(request, lost):
        request()
        scene.lake.evolve(NAME)
        raise lost("no answer")

    scene.wire.fates = [evolve_then_land]
    assert publish_epoch(scene.table, commit).duplicate


def test_a_rolled_back_table_is_not_written_to(scene):
    """E8: the last committed snapshot is no longer in the branch's ancestry."""
    publish_epoch(scene.table, scene.commit())
    first = list(scene.lake.tables[NAME].ancestry())[-1]
    scene.lake.roll_back(NAME, first.id)
    later = scene.commit(
        expected=NEXT, new=replace(NEXT, epoch=6, lower=NEXT.upper, upper=Frontier({"log": (30,)}))
    )
    with pytest.raises(RolledBack, match="table orders was rolled back") as caught:
        publish_epoch(scene.table, later)
    assert "--replay" in caught.value.hint
    assert "--accept" in caught.value.hint
    assert "epoch 5" in caught.value.detail


def test_attempts_without_an_answer_are_bounded(scene):
    """I6, E13: the answer is looked up for a moment; then it is the pipeline's to wait."""
    scene.wire.fates = [is_lost] * (2 * TRIES)
    with pytest.raises(CommitUnknown):
        publish_epoch(scene.table, scene.commit())
    assert scene.wire.sent == TRIES


def test_attempts_that_are_refused_are_bounded(scene):
    """I6: a rival that is always faster does not keep the run for ever."""
    scene.wire.before = [scene.rival] * (2 * CONFLICTS_MAX)
    with pytest.raises(CommitConflict):
        publish_epoch(scene.table, scene.commit())
    assert scene.wire.sent == CONFLICTS_MAX
    assert scene.epochs() == []


def test_a_catalog_that_does_not_answer_for_a_moment_is_asked_again(scene):
    """I6: passing trouble is bridged."""
    scene.wire.questions_unanswered = TRIES - 1
    assert not publish_epoch(scene.table, scene.commit()).duplicate


def test_a_catalog_that_never_answers_is_given_up(scene):
    """I6: nothing was sent, and the pipeline is told."""
    scene.wire.questions_unanswered = 10 * TRIES
    with pytest.raises(TargetUnavailable):
        publish_epoch(scene.table, scene.commit())
    assert scene.wire.sent == 0


def test_commits_go_to_the_branch_that_is_named(scene):
    """I13: main stays as it is."""
    main = scene.lake.tables[NAME].refs["main"]
    publish_epoch(scene.table, scene.commit(branch="audit"))
    refs = scene.lake.tables[NAME].refs
    assert refs["main"] == main
    assert refs["audit"] == refs["icestream-p"] != main


@pytest.mark.parametrize("batch", [None, "another"])
def test_an_epoch_that_the_table_carries_is_never_published_again(scene, batch):
    """E3, Mend c3: whatever is said of its tables, and whatever this run believes to be there."""
    carried = replace(NEXT, tables=3)
    scene.publish_foreign(carried, batch)
    before = scene.lake.tables[NAME]
    for expected in (CLAIMED, carried):
        assert publish_epoch(scene.table, scene.commit(expected=expected)).duplicate
    assert scene.lake.tables[NAME] is before


@pytest.mark.parametrize("epoch", [3, 4, 5])
def test_an_epoch_that_is_not_newer_than_the_tables_is_refused(scene, epoch):
    """E3, Mend c3: the same number with other bounds, or an older number, joins on to nothing."""
    carried = replace(NEXT, upper=Frontier({"log": (15,)}))
    scene.publish_foreign(carried)
    new = replace(NEXT, epoch=epoch)
    with pytest.raises(Fenced, match="is ahead of this run"):
        publish_epoch(scene.table, scene.commit(expected=carried, new=new))
    assert scene.epochs() == []


def test_what_a_table_says_of_its_epochs_tables_is_corrected_without_files(scene):
    """E3, Mend c3: a correction is like a claim, and is made once."""
    carried = replace(NEXT, tables=3)
    scene.publish_foreign(carried)
    again = scene.commit(expected=carried, files=[], written_for=None, recount=True)
    scene.wire.fates = [lands_unanswered]
    assert publish_epoch(scene.table, again).duplicate
    assert scene.table.head("p", "main").progress == NEXT
    assert (scene.wire.sent, scene.epochs()) == (1, [])


def test_a_claim_carries_the_progress_forward_under_the_next_generation(scene):
    """E6: each start publishes its generation by a commit of its own."""
    claim = Progress(pipeline="p", generation=3)
    assert publish_claim(scene.table, "main", claim, "me") == replace(CLAIMED, generation=3)
    head = scene.table.head("p", "main")
    assert head.progress == replace(CLAIMED, generation=3)
    assert scene.epochs() == []


@pytest.mark.parametrize("fate", [lands_unanswered, is_sent_twice])
def test_a_claim_whose_answer_was_lost_is_recognised(scene, fate):
    """E6, I6: the own claim is not taken for a rival's."""
    scene.wire.fates = [fate]
    claimed = publish_claim(scene.table, "main", Progress(pipeline="p", generation=3), "me")
    assert claimed.generation == 3
    assert scene.wire.sent == 1


@pytest.mark.parametrize("generation", [3, 4])
def test_of_two_runs_that_claim_the_same_generation_one_is_fenced(scene, generation):
    """E6: a table is claimed once per generation."""
    rival = Progress(pipeline="p", generation=generation)
    scene.wire.before = [lambda: publish_claim(_plain(scene), "main", rival, "rival") and None]
    with pytest.raises(Fenced):
        publish_claim(scene.table, "main", Progress(pipeline="p", generation=3), "me")
    assert scene.table.head("p", "main").claim_id == "rival"


def test_a_rolled_back_table_is_not_claimed(scene):
    """E8: a start says so and offers both ways."""
    publish_epoch(scene.table, scene.commit())
    scene.lake.roll_back(NAME, None)
    with pytest.raises(RolledBack, match="rolled back") as caught:
        publish_claim(scene.table, "main", Progress(pipeline="p", generation=3), "me")
    assert "before the pipeline's first epoch" in caught.value.detail


def _plain(scene: Scene) -> MemoryTable:
    table = MemoryCatalog(scene.lake).load(NAME)
    assert table is not None
    return table
