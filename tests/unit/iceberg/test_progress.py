"""Progress survives its way through a snapshot's summary, large frontiers in a side file."""

import json

import pytest

from icestream.epoch import Epoch, Progress
from icestream.errors import Broken
from icestream.frontier import START, Frontier
from icestream.iceberg import progress as summaries
from icestream.iceberg.progress import from_summary, progress_of, tag_name, to_summary

PROGRESS = Progress(
    pipeline="orders",
    generation=3,
    epoch=41,
    lower=Frontier({"resolved": (1701102296662969433, 0)}),
    upper=Frontier({"resolved": (1701102297000000000, 2147483648)}),
    tables=2,
)
# Far more partitions than a summary should carry.
LARGE = Frontier({f"topic-{number:04d}": (number,) for number in range(400)})


class SideFiles:
    """A place beside the metadata, in memory."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}

    def write(self, name: str, content: bytes) -> str:
        self.content[f"metadata/{name}"] = content
        return f"metadata/{name}"

    def read(self, path: str) -> bytes:
        return self.content[path]


def test_the_summary_has_the_documented_entries():
    """I7: names that operators and other tools read."""
    files = SideFiles()
    assert to_summary(PROGRESS, files.write) == {
        "icestream.pipeline": "orders",
        "icestream.generation": "3",
        "icestream.epoch": "41",
        "icestream.epoch-tables": "2",
        "icestream.lower": '{"resolved":[1701102296662969433,0]}',
        "icestream.frontier": '{"resolved":[1701102297000000000,2147483648]}',
    }
    assert files.content == {}


@pytest.mark.parametrize("replaying", [False, True])
@pytest.mark.parametrize("upper", [PROGRESS.upper, LARGE])
@pytest.mark.parametrize("lower", [START, PROGRESS.lower])
def test_progress_is_read_back_as_it_was_written(lower, upper, replaying):
    """E2: the destination remembers."""
    progress = Progress(
        pipeline="p", generation=1, epoch=2, lower=lower, upper=upper, tables=3, replaying=replaying
    )
    files = SideFiles()
    assert from_summary(to_summary(progress, files.write), files.read) == progress


def test_a_large_frontier_goes_into_a_side_file_with_its_hash():
    """I7: past 4 KiB in a side file whose path and hash are stored."""
    files = SideFiles()
    summary = to_summary(Progress(pipeline="p", epoch=1, upper=LARGE), files.write)
    assert "icestream.frontier" not in summary
    path = summary["icestream.frontier-file"]
    assert json.loads(files.content[path]) == LARGE.to_json()
    assert summary["icestream.frontier-sha256"] in path
    assert max(map(len, summary.values())) <= summaries.FRONTIER_BYTES_MAX
    assert set(summaries.side_file_keys()) >= {
        "icestream.frontier-file",
        "icestream.frontier-sha256",
    }


def test_a_frontier_of_exactly_the_limit_stays_in_the_summary():
    """I7: the limit itself still fits."""

    def sized(size: int) -> Frontier:
        text = '{"":[1]}'
        return Frontier({"x" * (size - len(text)): (1,)})

    files = SideFiles()
    limit = summaries.FRONTIER_BYTES_MAX
    to_summary(Progress(pipeline="p", epoch=1, upper=sized(limit)), files.write)
    assert files.content == {}
    to_summary(Progress(pipeline="p", epoch=1, upper=sized(limit + 1)), files.write)
    assert len(files.content) == 1


def test_a_side_file_that_was_altered_is_refused():
    """E2, I7: progress that somebody changed is not believed."""
    files = SideFiles()
    summary = to_summary(Progress(pipeline="p", epoch=1, upper=LARGE), files.write)
    path = summary["icestream.frontier-file"]
    files.content[path] = files.content[path].replace(b"[399]", b"[398]")
    with pytest.raises(Broken, match=r"side file of icestream\.frontier is unchanged"):
        from_summary(summary, files.read)


def test_all_entries_are_among_the_known_keys():
    """E4: what is written is also read; an entry left out of `KEYS` would be lost on the way."""
    files = SideFiles()
    progress = Progress(pipeline="p", epoch=1, lower=LARGE, upper=LARGE, replaying=True)
    known = {*summaries.KEYS, *summaries.side_file_keys()}
    assert set(to_summary(progress, files.write)) <= known
    assert set(to_summary(PROGRESS, files.write)) <= known


def test_each_pipeline_has_its_own_tag():
    """I7: a tag follows the last commit, so that expiry never removes the progress."""
    assert tag_name("orders") == "icestream-orders"


def test_the_progress_of_an_epoch_has_its_bounds():
    """E1: committing an epoch makes its frontier durable."""
    epoch = Epoch(number=41, lower=PROGRESS.lower, upper=PROGRESS.upper)
    assert progress_of(epoch, "orders", 3, 2) == PROGRESS
