"""Where tables stand that one document speaks for, while some lie behind the others."""

from hypothesis import given
from hypothesis import strategies as st

from icestream.epoch import Progress, resume_point
from icestream.frontier import START, Frontier
from icestream.pipeline import missing_tables
from icestream.sinks import BESIDE
from icestream.sinks.opensearch.commit import Head, Index, Standings
from icestream.sinks.opensearch.sink import _progress, document_version


def at(position: int) -> Frontier:
    return Frontier({"count": (position,)}) if position else START


def progress(epoch: int, lower: int, upper: int) -> Progress:
    return Progress(
        pipeline="p", generation=3, epoch=epoch, lower=at(lower), upper=at(upper), tables=1
    )


def head(last: Progress, standings: Standings, *tables: str) -> Head:
    indices = {table: Index(name=table, uuid=table) for table in tables}
    return Head(progress=last, standings=standings, indices=indices)


def test_a_table_is_brought_forward_as_the_example_tells():
    """E4: what a restart finds at each step of the example in `Standings`."""
    level = progress(7, 60, 70)
    standings = Standings().naming(["c"])
    found = _progress(head(level, standings, "a", "b", "c"))
    resume = resume_point(found)
    assert (resume.at, resume.number, resume.behind) == (at(70), 7, {})
    assert missing_tables(["a", "b", "c"], found, resume) == ["c"]

    standings = standings.after(level, at(30), ["c"], catching_up=True)
    last = progress(8, 0, 30)
    found = _progress(head(last, standings, "a", "b", "c"))
    resume = resume_point(found)
    assert (resume.at, resume.number, resume.unfinished) == (at(70), 8, None)
    assert {table: mine.upper for table, mine in resume.behind.items()} == {"c": at(30)}
    assert missing_tables(["a", "b", "c"], found, resume) == []

    standings = standings.after(last, at(70), ["c"], catching_up=False)
    last = progress(9, 30, 70)
    resume = resume_point(_progress(head(last, standings, "a", "b", "c")))
    assert (resume.at, resume.number, resume.behind) == (at(70), 9, {})

    standings = standings.after(last, at(80), ["a"], catching_up=False)
    assert standings == Standings()
    resume = resume_point(_progress(head(progress(10, 70, 80), standings, "a", "b", "c")))
    assert (resume.at, resume.number) == (at(80), 10)


def test_a_frontier_is_known_before_there_is_any_table():
    """E4, O6: what an Iceberg table chose to load is durable before its index is made."""
    found = _progress(head(progress(1, 0, 5), Standings()))
    assert found.keys() == {BESIDE}
    resume = resume_point(found)
    assert (resume.at, resume.number) == (at(5), 1)
    assert missing_tables(["a"], found, resume) == ["a"]


def test_a_table_that_lies_behind_stays_there_while_the_others_go_on():
    """E4: it left the configuration; what it lacks comes when it is back."""
    level = progress(7, 60, 70)
    standings = Standings().after(level, at(30), ["c"], catching_up=True)
    standings = standings.after(progress(8, 0, 30), at(80), ["a"], catching_up=False)
    found = _progress(head(progress(9, 70, 80), standings, "a", "c"))
    resume = resume_point(found)
    assert resume.at == at(80)
    assert {table: mine.upper for table, mine in resume.behind.items()} == {"c": at(30)}


@given(
    st.tuples(st.integers(1, 1 << 21), st.integers(1, (1 << 40) - 1)),
    st.tuples(st.integers(1, 1 << 21), st.integers(1, (1 << 40) - 1)),
)
def test_versions_are_ordered_by_run_and_then_by_epoch(one, other):
    """O12, E6: a newer run wins whatever its epochs are called; nothing is beyond 63 bits."""
    assert (document_version(*one) < document_version(*other)) == (one < other)
    assert 0 < document_version(*one) - 1 < 1 << 63
    if one < other:
        # Emptying a table takes what is older, and nothing of its own epoch or later ones.
        assert document_version(*one) < document_version(*other) - 1 < document_version(*other)


def test_a_table_that_is_left_out_keeps_the_frontier_that_it_had():
    """E4: only its source knows what it lacks, by where it stood."""
    level = progress(7, 60, 70)
    standings = Standings(unfilled=frozenset(["n"])).leaving(level, ["b", "n"])
    standings = standings.after(level, at(80), ["a"], catching_up=False)
    standings = standings.leaving(progress(8, 70, 80), ["b"])
    last = progress(9, 80, 90)
    found = _progress(head(last, standings, "a", "b", "n"))
    assert {table: mine.upper for table, mine in found.items()} == {
        "a": at(90),
        "b": at(70),
        "n": START,
        BESIDE: at(90),
    }
    resume = resume_point(found)
    assert (resume.at, resume.number, resume.behind) == (at(90), 9, {})
    back = standings.after(last, at(100), ["b"], catching_up=False)
    assert not back.away
