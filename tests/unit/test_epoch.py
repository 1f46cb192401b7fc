"""Where a pipeline goes on follows from what its tables remember, and from nothing else."""

from dataclasses import replace

import pytest

from icestream.epoch import Epoch, Progress, Resume, batch_id, resume_point
from icestream.errors import Broken, HistoryLost, ProgressLost
from icestream.frontier import START, Frontier

NOTHING = Progress(pipeline="p", generation=3)


def at(position: int) -> Frontier:
    return Frontier({"log": (position,)}) if position else START


def carries(
    number: int, lower: int, upper: int, tables: int, catching_up: bool = False
) -> Progress:
    return Progress(
        pipeline="p",
        generation=3,
        epoch=number,
        lower=at(lower),
        upper=at(upper),
        tables=tables,
        catching_up=catching_up,
    )


def goes_on(resume: Resume) -> tuple[int, Frontier, Epoch | None, set[str], set[str]]:
    return resume.number, resume.at, resume.unfinished, set(resume.carriers), set(resume.behind)


def test_the_batch_id_of_an_epoch_never_changes():
    """I5: a restart, and any later version, recognises what was published."""
    upper = Frontier({"resolved": (1701102296662969433, 1)})
    assert batch_id("orders", "public.orders", upper) == "99866e40-8c4e-595a-9a80-d6d445997e01"


def test_the_batch_id_depends_on_pipeline_table_and_upper_bound():
    """I5: batch_id = uuid5(pipeline : table : upper)."""
    ids = {
        batch_id(pipeline, table, upper)
        for pipeline in ("a", "b")
        for table in ("t", "u")
        for upper in (at(1), at(2))
    }
    assert len(ids) == 8


def test_the_batch_id_does_not_depend_on_how_the_frontier_was_built():
    """I5: order of partitions and partitions at their minimum make no difference."""
    one = Frontier({"a": (1,), "b": (2,)})
    other = Frontier({"b": (2,), "c": (), "a": (1,)})
    assert batch_id("p", "t", one) == batch_id("p", "t", other)


@pytest.mark.parametrize(("number", "lower", "upper"), [(0, 1, 2), (-1, 1, 2), (1, 2, 1)])
def test_an_epoch_has_a_number_and_does_not_run_backwards(number, lower, upper):
    """E1: epochs are half-open spans, numbered from one."""
    with pytest.raises(Broken):
        Epoch(number=number, lower=at(lower), upper=at(upper))


def test_an_epoch_may_be_empty():
    """E9: a heartbeat may publish a frontier that did not move."""
    assert Epoch(number=1, lower=at(2), upper=at(2)).number == 1


@pytest.mark.parametrize("progress", [{}, {"a": NOTHING}, {"a": NOTHING, "b": NOTHING}])
def test_without_progress_a_pipeline_starts_at_the_beginning(progress):
    """E4: nothing durable means that nothing was read."""
    assert goes_on(resume_point(progress)) == (0, START, None, set(), set())


def test_after_a_complete_epoch_the_next_one_follows():
    """E4: as many tables carry the epoch as took part in it."""
    resume = resume_point({"a": carries(7, 10, 20, 2), "b": carries(7, 10, 20, 2)})
    assert goes_on(resume) == (7, at(20), None, {"a", "b"}, set())


def test_idle_tables_do_not_hold_the_pipeline_back():
    """E4: the smallest frontier over the tables would ask for history that is rightly gone."""
    resume = resume_point({"a": carries(7, 10, 20, 1), "b": carries(2, 0, 4, 2), "c": NOTHING})
    assert goes_on(resume) == (7, at(20), None, {"a"}, set())


def test_an_epoch_that_only_some_tables_carry_is_minted_again_with_the_same_bounds():
    """I14: a partial commit recovers by itself."""
    resume = resume_point({"a": carries(7, 10, 20, 3), "b": carries(6, 4, 10, 1), "c": NOTHING})
    again = Epoch(number=7, lower=at(10), upper=at(20))
    assert goes_on(resume) == (7, at(10), again, {"a"}, set())
    assert resume.tables == 3


def test_a_table_that_does_not_exist_yet_counts_as_missing():
    """I14: an epoch whose new table was never made is unfinished."""
    resume = resume_point({"a": carries(1, 0, 5, 2)})
    assert goes_on(resume) == (1, START, Epoch(number=1, lower=START, upper=at(5)), {"a"}, set())


@pytest.mark.parametrize(
    "other", [carries(7, 10, 21, 2), carries(7, 9, 20, 2), carries(7, 10, 20, 3)]
)
def test_tables_that_disagree_about_an_epoch_stop_the_pipeline(other):
    """E3: two pipelines of one name must not be mixed up."""
    with pytest.raises(ProgressLost, match="do not agree about epoch 7") as caught:
        resume_point({"a": carries(7, 10, 20, 2), "b": other})
    assert "a, b" in caught.value.detail


def among(progress: Progress, me: str, *members: str) -> Progress:
    """The progress of the table with this id, which names the epoch's tables."""
    ids = frozenset(members)
    return replace(progress, tables=len(ids) or progress.tables, members=ids, table_id=me)


def test_a_table_that_was_dropped_since_does_not_lack_the_last_epoch():
    """E4, Mend c2: it is built anew, and the source may have forgotten the epoch."""
    whole = carries(7, 10, 20, 2)
    knowing = replace(among(whole, "A", "A", "B"), before={"A": 5, "B": 5, "C": 6})
    dropped = {"a": knowing, "c": among(carries(6, 4, 10, 1), "C", "C")}
    assert goes_on(resume_point(dropped)) == (7, at(20), None, {"a"}, set())
    made_anew = {"a": among(whole, "A", "A", "B"), "b": replace(NOTHING, table_id="B2")}
    assert goes_on(resume_point(made_anew)) == (7, at(20), None, {"a"}, set())


@pytest.mark.parametrize(("number", "upper"), [(6, 10), (9, 10)])
def test_a_table_that_the_last_epoch_does_not_know_was_away(number, upper):
    """E4, Mend, leftover: also when all were away, and epochs were counted from one again."""
    last = replace(among(carries(7, 10, 20, 1), "A", "A"), before={"A": 5})
    away = among(carries(number, 4, upper, 1), "C", "C")
    with pytest.raises(HistoryLost, match="table c was away"):
        resume_point({"a": last, "c": away})
    # Each of these says why it may lie behind.
    for other, why in [
        (last, replace(away, catching_up=True)),
        (replace(last, before={"A": 5, "C": number}), away),
        (replace(last, members=frozenset(), before={}), away),
    ]:
        assert resume_point({"a": other, "c": why}).at == at(20)


def test_a_table_that_took_part_and_is_there_lacks_the_last_epoch():
    """Mend c2, I14: what is really missing is still found, also beside a dropped table."""
    progress = {
        "a": among(carries(7, 10, 20, 3), "A", "A", "B", "C"),
        "b": replace(NOTHING, table_id="B"),
        "d": replace(NOTHING, table_id="D"),
    }
    resume = resume_point(progress)
    again = Epoch(number=7, lower=at(10), upper=at(20))
    assert goes_on(resume) == (7, at(10), again, {"a"}, set())
    assert resume.lacking == {"b"}


def test_an_epoch_whose_tables_were_being_recounted_is_unfinished():
    """E3, Mend c3: it was cut short in its second writing; the source was not told of it yet."""
    whole = carries(7, 10, 20, 2)
    progress = {"a": among(whole, "A", "A", "B", "C"), "b": among(whole, "B", "A", "B")}
    progress["c"] = replace(NOTHING, table_id="C")
    resume = resume_point(progress)
    again = Epoch(number=7, lower=at(10), upper=at(20))
    assert goes_on(resume) == (7, at(10), again, {"a", "b"}, set())
    assert resume.lacking == set()


def test_tables_that_do_not_count_each_other_stop_the_pipeline():
    """E3: two pipelines of one name must not be mixed up."""
    whole = carries(7, 10, 20, 2)
    progress = {"a": among(whole, "A", "A"), "b": among(whole, "B", "B", "C")}
    with pytest.raises(ProgressLost, match="do not agree about epoch 7"):
        resume_point(progress)


def test_a_table_that_was_rolled_back_is_replayed_up_to_the_others():
    """E8: the pipeline goes on where it was, and the table catches up first."""
    progress = {"a": carries(7, 10, 20, 1), "b": carries(4, 5, 8, 1, catching_up=True)}
    resume = resume_point(progress)
    assert goes_on(resume) == (7, at(20), None, {"a"}, {"b"})
    assert resume.behind["b"].upper == at(8)


def test_a_table_rolled_back_to_before_its_first_epoch_is_replayed_from_the_start():
    """E8: nothing of the table is left, everything is replayed."""
    progress = {"a": carries(7, 10, 20, 1), "b": Progress(pipeline="p", catching_up=True)}
    assert goes_on(resume_point(progress)) == (7, at(20), None, {"a"}, {"b"})


def test_a_rolled_back_table_does_not_get_the_last_epoch_out_of_turn():
    """E8: what lies between its frontier and the last epoch would be applied after it, or never."""
    progress = {"a": carries(7, 10, 20, 2), "b": carries(4, 5, 8, 1, catching_up=True)}
    resume = resume_point(progress)
    again = Epoch(number=7, lower=at(10), upper=at(20))
    assert goes_on(resume) == (7, at(10), again, {"a"}, {"b"})


def test_a_rolled_back_table_at_the_end_of_an_unfinished_epochs_lower_bound_is_behind():
    """E8: the replay goes to the end of the epoch that the others finish first."""
    progress = {
        "a": carries(7, 10, 20, 3),
        "b": carries(6, 4, 10, 1, catching_up=True),
        "c": carries(5, 3, 4, 1),
    }
    assert goes_on(resume_point(progress))[3:] == ({"a"}, {"b"})


def test_a_table_in_the_middle_of_its_replay_does_not_move_the_pipeline_back():
    """E8: epochs of a replay have high numbers and old bounds."""
    progress = {"a": carries(7, 10, 20, 1), "b": carries(9, 5, 8, 1, catching_up=True)}
    assert goes_on(resume_point(progress)) == (9, at(20), None, {"a"}, {"b"})


def test_a_replay_that_has_ended_is_settled():
    """E8: the last epoch of a replay brings the table level with the others."""
    progress = {"a": carries(7, 10, 20, 1), "b": carries(9, 8, 20, 1)}
    assert goes_on(resume_point(progress)) == (9, at(20), None, {"b"}, set())


def test_a_table_that_lost_only_claims_to_a_rollback_has_nothing_to_replay():
    """E8: it still carries the epoch, and must not get it a second time."""
    progress = {"a": carries(7, 10, 20, 2, catching_up=True), "b": carries(6, 4, 10, 1)}
    again = Epoch(number=7, lower=at(10), upper=at(20))
    assert goes_on(resume_point(progress)) == (7, at(10), again, {"a"}, set())


def test_when_all_tables_were_rolled_back_the_furthest_is_the_frontier():
    """E8: nobody remembers what came after it."""
    progress = {
        "a": carries(5, 8, 12, 1, catching_up=True),
        "b": carries(3, 2, 6, 1, catching_up=True),
    }
    assert goes_on(resume_point(progress)) == (5, at(12), None, {"a"}, {"b"})


def test_a_rolled_back_table_that_is_ahead_of_idle_ones_tells_the_frontier():
    """E8: a table that was idle for long says nothing of how far the pipeline was."""
    progress = {"a": carries(5, 8, 12, 1, catching_up=True), "b": carries(2, 2, 4, 1)}
    assert goes_on(resume_point(progress)) == (5, at(12), None, {"a"}, set())


def example(table: str, number: int, catching_up: bool = False) -> Progress:
    """The progress of a table in the example of the module `epoch`."""
    members, before = {
        5: ("abc", {}),
        7: ("ac", {"a": 5, "b": 5, "c": 5}),
        8: ("ab", {"a": 7, "b": 5, "c": 7}),
    }[number]
    known = carries(number, 10 * number - 10, 10 * number, len(members), catching_up)
    return replace(known, members=frozenset(members), before=before, table_id=table)


@pytest.mark.parametrize(
    ("epochs", "unfinished", "position", "behind"),
    [
        ({"a": 8, "b": 8, "c": 7}, None, 80, set()),
        ({"a": 8, "b": 5, "c": 7}, 8, 70, set()),
        ({"a": 7, "b": 5, "c": 7}, None, 70, set()),
        ({"a": 8, "c": 7}, None, 80, set()),
        ({"a": 8, "b": 8, "c": -5}, None, 80, {"c"}),
    ],
    ids=["idle", "cut short", "never seen", "dropped", "replayed"],
)
def test_the_example_of_the_module_is_true(epochs, unfinished, position, behind):
    """E3: row by row; a number below zero is a table that is to be replayed."""
    found = resume_point({t: example(t, abs(n), catching_up=n < 0) for t, n in epochs.items()})
    assert found.at == at(position)
    assert (found.unfinished.number if found.unfinished else None) == unfinished
    assert set(found.behind) == behind
    assert found.lacking == ({"b"} if unfinished else set())


def test_a_table_of_the_example_that_was_set_back_is_noticed():
    """E3: epoch 8 remembers that c had taken epoch 7."""
    with pytest.raises(HistoryLost, match="table c was set back"):
        resume_point({"a": example("a", 8), "b": example("b", 8), "c": example("c", 5)})
