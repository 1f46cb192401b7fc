"""Timestamps and file names of changefeeds come back as they went out."""

from hypothesis import given
from hypothesis import strategies as st

from icestream.sources.cockroachdb.feed_file import FeedFile
from icestream.sources.cockroachdb.hlc import (
    after,
    file_time,
    format_hlc,
    parse_file_time,
    parse_hlc,
    resolved_of,
)

walls = st.integers(0, 2**63 - 1)
logicals = st.integers(0, 2**31 - 1)
positions = st.tuples(walls, logicals)
# The years that a file name has room for.
datable = st.tuples(st.integers(0, 9_000_000_000 * 10**9), logicals)
topics = st.text(
    st.characters(blacklist_characters="/\n\r", blacklist_categories=("Cs", "Zl", "Zp", "Cc")),
    min_size=1,
    max_size=20,
)


@given(positions)
def test_a_timestamp_survives_its_text(position):
    """C3: every digit of both parts."""
    assert parse_hlc(format_hlc(position)) == position
    assert parse_hlc(format_hlc(position) + "?") == position


@given(positions, positions)
def test_timestamps_are_ordered_as_pairs(one, other):
    """C3: never as floats, and as text only where both have as many digits."""
    texts = format_hlc(one), format_hlc(other)
    if len(texts[0]) == len(texts[1]):
        assert (one < other) == (texts[0] < texts[1])
    assert after(one).covers(after(other)) == (one >= other)


@given(positions)
def test_a_frontier_gives_its_resolved_timestamp_back(position):
    """C2: exactly the changes up to and with R."""
    assert resolved_of(after(position)) == position
    assert after(position)["resolved"] == (position[0], position[1] + 1)


@given(datable)
def test_a_timestamp_survives_a_file_name(position):
    """C1: 33 digits hold date, nanoseconds and the logical part."""
    digits = file_time(position)
    assert len(digits) == 33
    assert parse_file_time(digits) == position


@given(
    datable,
    topics,
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**31),
    st.sampled_from([("ndjson", ""), ("ndjson", ".gz"), ("ndjson", ".zst"), ("parquet", "")]),
)
def test_a_file_name_tells_its_table_whatever_the_name_holds(at, topic, number, schema, kind):
    """C1: topics may hold dots, dashes, digits and anything else."""
    format, compression = kind
    stem = f"{file_time(at)}-56087568dba1e6b8-1-72-{number:08x}-{topic}-{schema:x}"
    file = FeedFile.parse(f"bucket/{stem}.{format}{compression}", 1)
    assert file is not None
    assert (file.topic, file.at, file.format, file.compression) == (topic, at, format, compression)


@given(st.text(max_size=60))
def test_no_name_breaks_the_parser(name):
    """C1: foreign files may lie in the folder."""
    assert FeedFile.parse(name, 1) is None or "-" in name
