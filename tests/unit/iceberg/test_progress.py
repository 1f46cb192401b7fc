"""Progress survives its way through a table: plain, packed, in properties; old side files too."""

import hashlib
import json
import random
from dataclasses import replace

import pytest

from icestream.epoch import Epoch, Progress, name_id, resume_point, table_id
from icestream.errors import FrontierLost
from icestream.frontier import START, Frontier
from icestream.iceberg import progress as summaries
from icestream.iceberg.bounds import packed, unpacked
from icestream.iceberg.progress import (
    Entries,
    from_summary,
    outdated,
    progress_of,
    tag_name,
    to_entries,
)

PROGRESS = Progress(
    pipeline="orders",
    generation=3,
    epoch=41,
    lower=Frontier({"resolved": (1701102296662969433, 0)}),
    upper=Frontier({"resolved": (1701102297000000000, 2147483648)}),
    tables=2,
)
# Packed it fits into a summary.
MIDDLE = Frontier({f"topic-{number:04d}": (number,) for number in range(100)})


def large(seed: int, partitions: int = 1000) -> Frontier:
    """Far more partitions than a summary should carry."""
    drawn = random.Random(seed)
    return Frontier({f"topic/{number}": (drawn.randrange(10**10),) for number in range(partitions)})


def no_file(path: str) -> bytes:
    raise FileNotFoundError(path)


def read_back(entries: Entries) -> Progress:
    return from_summary(entries.summary, entries.properties, no_file, "shop.t")


def kept(properties: dict[str, str], entries: Entries, *needed: str) -> dict[str, str]:
    """The table's properties after a commit."""
    after = {**properties, **entries.properties}
    for name in outdated(properties, entries, needed):
        del after[name]
    return after


def stem(entries: Entries) -> str:
    return entries.summary[summaries.BOUNDS_PROPERTY]


def at_epoch(number: int, pipeline: str = "p", partitions: int = 1000) -> Entries:
    upper = large(number, partitions)
    return to_entries(Progress(pipeline=pipeline, epoch=number, upper=upper))


def test_the_summary_has_the_documented_entries():
    """I7: names that operators and other tools read."""
    assert to_entries(PROGRESS) == Entries(
        summary={
            "icestream.pipeline": "orders",
            "icestream.generation": "3",
            "icestream.epoch": "41",
            "icestream.epoch-tables": "2",
            "icestream.lower": '{"resolved":[1701102296662969433,0]}',
            "icestream.frontier": '{"resolved":[1701102297000000000,2147483648]}',
        }
    )


@pytest.mark.parametrize("catching_up", [False, True])
@pytest.mark.parametrize("upper", [PROGRESS.upper, MIDDLE, large(1)])
@pytest.mark.parametrize("lower", [START, PROGRESS.lower, large(2)])
def test_progress_is_read_back_as_it_was_written(lower, upper, catching_up):
    """E2: the destination remembers."""
    progress = Progress(
        pipeline="p",
        generation=1,
        epoch=2,
        lower=lower,
        upper=upper,
        tables=3,
        catching_up=catching_up,
    )
    assert read_back(to_entries(progress)) == progress


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        (START, START),
        (
            Frontier({"": (0,), "a": ()}),
            Frontier({"": (-5, 2**200), "a": (7,), "é\U0001f40d": (1,)}),
        ),
        (Frontier({"a": (5, 6, 7), "b": (9,)}), Frontier({"a": (9,), "b": (10, 11)})),
        (Frontier({"gone": (3,)}), Frontier({"came": (2**64,)})),
    ],
)
def test_packed_frontiers_come_out_as_they_went_in(lower, upper):
    """I7: any names, any numbers, any lengths."""
    assert unpacked(packed(lower, upper)) == (lower, upper)


def test_what_fits_stays_in_the_summary_and_what_does_not_goes_into_properties():
    """I7, Mend c1: a commit adds at most 2 KiB to the metadata for good, and no file beside it."""
    middle = to_entries(Progress(pipeline="p", epoch=1, upper=MIDDLE))
    assert "icestream.bounds" in middle.summary
    assert not middle.properties
    entries = to_entries(Progress(pipeline="p", epoch=7, lower=large(1), upper=large(2)))
    assert len(json.dumps(entries.summary)) < 512
    assert {name.rpartition(".")[0] for name in entries.properties} == {
        f"icestream.p.frontier.{stem(entries)}"
    }
    sizes = [len(value) for value in entries.properties.values()]
    assert len(sizes) > 1
    assert max(sizes) <= 3500
    for number in range(1, 200):
        upper = Frontier({f"copy public.t{n} {n}": (1, 2, n, 4) for n in range(number)})
        given = to_entries(Progress(pipeline="p", epoch=1, lower=MIDDLE, upper=upper)).summary
        assert len(json.dumps(given)) < 1300
        ids = {f"{n:08x}": 123_456 for n in range(number)}
        both = Progress(
            pipeline="p",
            epoch=1,
            upper=Frontier(
                {name: at for name, at in upper.positions.items() if name < "copy public.t2"}
            ),
            tables=number,
            members=frozenset(ids),
            before=ids,
        )
        entries = to_entries(both)
        assert len(json.dumps(entries.summary)) < 1300
        assert from_summary(entries.summary, entries.properties, no_file, "t") == both


def test_a_frontier_of_exactly_the_limit_stays_readable():
    """I7: the limit itself still fits; behind it frontiers are packed."""

    def sized(size: int) -> Frontier:
        text = json.dumps('{"":[1]}') + json.dumps("{}")
        return Frontier({"x" * (size - len(text)): (1,)})

    limit = summaries.SUMMARY_BYTES_MAX
    assert "icestream.frontier" in to_entries(Progress(pipeline="p", upper=sized(limit))).summary
    behind = to_entries(Progress(pipeline="p", upper=sized(limit + 1))).summary
    assert "icestream.bounds" in behind
    assert "icestream.frontier" not in behind


@pytest.mark.parametrize("change", ["removed", "changed"])
def test_a_frontier_that_somebody_removed_is_said_to_be_lost(change):
    """I7, Mend c1: the error names the table, the properties and the way out."""
    entries = at_epoch(1)
    properties = dict(entries.properties)
    last = max(properties)
    if change == "removed":
        del properties[last]
    else:
        properties[last] = properties[last][:-4] + "AAAA"
    with pytest.raises(FrontierLost, match=r"properties of table shop\.t") as caught:
        from_summary(entries.summary, properties, no_file, "shop.t")
    assert "icestream.p.frontier." in str(caught.value.detail)


def test_only_the_newest_frontiers_are_kept():
    """I7, Mend c1: 64 KiB of properties for each pipeline, however many commits there are."""
    properties: dict[str, str] = {"owner": "me"}
    stems = []
    for number in range(1, 60):
        entries = at_epoch(number)
        properties = kept(properties, entries, *stems[-1:])
        stems.append(stem(entries))
        assert sum(len(n) + len(v) for n, v in properties.items()) <= summaries.KEPT_BYTES_MAX + 7
        assert read_back(replace(entries, properties=properties)).epoch == number
    there = {name.split(".")[3] for name in properties if name != "owner"}
    assert there == set(stems[-len(there) :])
    assert len(there) > 2
    assert properties["owner"] == "me"


def test_the_last_two_are_kept_whatever_their_size():
    """I7, Mend c1: the tagged one stays until the next commit has landed."""
    properties: dict[str, str] = {}
    stems = []
    for number in range(1, 5):
        entries = at_epoch(number, partitions=20_000)
        properties = kept(properties, entries, *stems[-1:])
        stems.append(stem(entries))
        assert {name.split(".")[3] for name in properties} == set(stems[-2:])
    # A claim repeats the newest one.
    claim = at_epoch(4, partitions=20_000)
    assert kept(properties, claim, stems[-1]) == properties
    # Whatever is needed stays, as old as it may be.
    newest = at_epoch(9, partitions=20_000)
    after = kept(properties, newest, stems[-2])
    assert {name.split(".")[3] for name in after} == {stems[-2], stem(newest)}


def test_pipelines_never_remove_each_others_frontiers():
    """I7, Mend c1: two pipelines in one table, even when one name begins with the other's."""
    names = ("a", "a.frontier.1-00", "b", "a.frontier")
    properties: dict[str, str] = {}
    for number in range(1, 9):
        for pipeline in names:
            properties = kept(properties, at_epoch(number, pipeline, 5_000))
    for pipeline in names:
        newest = at_epoch(8, pipeline, 5_000)
        assert read_back(replace(newest, properties=properties)).epoch == 8
        assert kept(properties, newest).keys() == properties.keys()


def test_side_files_of_earlier_versions_are_still_read():
    """I7, Mend c1: one that orphan removal has taken, or that was altered, is said to be gone."""
    text = json.dumps(large(1).to_json(), separators=(",", ":")).encode()
    summary = {
        **to_entries(PROGRESS).summary,
        "icestream.frontier-file": "metadata/icestream/frontier-1.json",
        "icestream.frontier-sha256": hashlib.sha256(text).hexdigest(),
    }
    del summary["icestream.frontier"]
    found = from_summary(summary, {}, lambda path: text, "shop.t")
    assert found == replace(PROGRESS, upper=large(1))
    with pytest.raises(FrontierLost, match="lies in a file that is gone") as caught:
        from_summary(summary, {}, no_file, "shop.t")
    assert "metadata/icestream/frontier-1.json" in str(caught.value.detail)
    with pytest.raises(FrontierLost):
        from_summary(summary, {}, lambda path: text + b" ", "shop.t")


def test_all_entries_are_among_the_known_keys():
    """E4: what is written is also read; an entry left out of `KEYS` would be lost on the way."""
    for upper in (PROGRESS.upper, MIDDLE, large(1)):
        written = to_entries(Progress(pipeline="p", epoch=1, upper=upper, catching_up=True))
        assert set(written.summary) <= {*summaries.KEYS}


def test_each_pipeline_has_its_own_tag():
    """I7: a tag follows the last commit, so that expiry never removes the progress."""
    assert tag_name("orders") == "icestream-orders"


def test_the_progress_of_an_epoch_has_its_bounds():
    """E1: committing an epoch makes its frontier durable."""
    epoch = Epoch(number=41, lower=PROGRESS.lower, upper=PROGRESS.upper)
    assert progress_of(epoch, "orders", 3, 2) == PROGRESS


MANY = frozenset(table_id(f"table {number}") for number in range(300))


@pytest.mark.parametrize("upper", [PROGRESS.upper, MIDDLE, large(1)])
def test_hundreds_of_tables_lie_in_properties_with_whatever_frontier(upper: Frontier):
    """E4, Mend c2: the summary stays small, and nothing of the epoch's tables is forgotten."""
    before = dict.fromkeys(MANY, 40)
    progress = replace(PROGRESS, lower=START, upper=upper, tables=300, members=MANY, schema_id=7)
    progress = replace(progress, before=before, names=frozenset(map(name_id, MANY)))
    entries = to_entries(progress)
    assert read_back(entries) == progress
    assert read_back(entries).before == before
    assert summaries.EPOCH_IDS not in entries.summary
    assert summaries.TABLE_NAMES not in entries.summary
    assert sum(map(len, entries.summary.values())) < 2 * summaries.SUMMARY_BYTES_MAX
    assert all(len(v) <= summaries.CHUNK_CHARACTERS for v in entries.properties.values())


def test_a_few_tables_are_named_in_the_summary():
    """I16, Mend, leftover: by ids of their names, which are the same in a catalog that folds."""
    progress = replace(PROGRESS, names=frozenset({name_id("Orders"), name_id("items")}))
    entries = to_entries(progress)
    assert read_back(entries) == progress
    assert not entries.properties
    assert name_id("orders") in entries.summary[summaries.TABLE_NAMES].split()


def test_tables_whose_properties_are_gone_are_only_counted():
    """E4, Mend c2: frontiers that are in the summary do not need them."""
    progress = replace(PROGRESS, tables=300, members=MANY)
    entries = to_entries(progress)
    found = from_summary(entries.summary, {}, no_file, "shop.t")
    assert found == replace(progress, members=frozenset())


def test_an_epoch_that_an_older_version_left_unfinished_is_finished():
    """E4, Mend, read F4: that version named tables otherwise; such names tell nothing now."""
    half = replace(PROGRESS, tables=2, generation=1)
    summary = {**to_entries(half).summary, "icestream.epoch-members": "0a1b2c3d 4e5f6071"}
    found = replace(from_summary(summary, {}, no_file, "shop.a"), table_id=table_id("a"))
    lagging = replace(
        half, epoch=half.epoch - 1, lower=START, upper=half.lower, table_id=table_id("b")
    )
    assert resume_point({"a": found, "b": lagging}).unfinished is not None


def test_tables_that_were_made_at_once_have_different_ids():
    """E4, Mend c2: uuids of version 7 begin with the time, alike for a minute."""
    uuids = [f"019388f2-77{number:02x}-7cc3-98c4-dc0c0c07398f" for number in range(50)]
    assert len({table_id(each) for each in uuids}) == 50
