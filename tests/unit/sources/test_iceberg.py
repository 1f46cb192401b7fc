"""Iceberg tables as a source: what can be told without a table."""

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest

from icestream.destination import Destination
from icestream.epoch import Epoch
from icestream.errors import ConfigInvalid
from icestream.frontier import START, Frontier
from icestream.iceberg.snapshots import Snapshot
from icestream.sinks.opensearch.mapping import properties
from icestream.sources import Remembered
from icestream.sources.iceberg.positions import aimed, grouped
from icestream.sources.iceberg.source import (
    IcebergSource,
    IcebergSourceOptions,
    IcebergTableOptions,
    _columns,
    _Followed,
    _table_of,
)


def test_columns_of_unknown_types_may_hold_anything():
    """O10, Mend g6: an index keeps them and guesses nothing, beside fields that are known."""
    parts = [
        {"id": 4, "name": "v", "required": False, "type": "variant"},
        {"id": 5, "name": "note", "required": False, "type": "string"},
    ]
    many = {"type": "list", "element-id": 7, "element": "variant", "element-required": False}
    fields = [
        {"id": 1, "name": "id", "required": True, "type": "long"},
        {"id": 2, "name": "anything", "required": False, "type": "variant"},
        {"id": 3, "name": "inner", "required": False, "type": {"type": "struct", "fields": parts}},
        {"id": 6, "name": "many", "required": False, "type": many},
    ]
    found = _columns(json.dumps({"type": "struct", "schema-id": 0, "fields": fields}))
    assert [each.name for each in found] == ["id", "anything", "inner", "many"]
    mapping, kept = properties(found), {"type": "object", "enabled": False}
    assert mapping["id"] == {"type": "long"}
    assert mapping["anything"] == mapping["many"] == kept
    assert mapping["inner"]["properties"]["v"] == kept
    assert mapping["inner"]["properties"]["note"]["type"] == "text"


def test_a_partition_names_a_table_that_may_have_blanks():
    """O6: the name carries the table's identity."""
    assert _table_of("table shop.my orders 5f0c 1-2") == "shop.my orders"


@pytest.mark.parametrize(
    ("aim", "ahead", "net", "one_by_one"),
    [
        ([], [], [], []),
        ([], [7, 9], [(5, 1, 9), (9, 1)], [(5, 1, 7), (7, 1), (7, 1, 9), (9, 1)]),
        ([7], [7], [(7, 1)], [(7, 1)]),
        ([7], [6, 7, 9], [(7, 1), (7, 1, 9), (9, 1)], [(7, 1), (7, 1, 9), (9, 1)]),
        # The snapshot of number 8 only replaces files.
        ([], [7, 8], [(5, 1, 8), (8, 1)], [(5, 1, 7), (7, 1), (8, 1)]),
    ],
)
def test_the_aim_of_a_step_is_chosen_before_it_is_taken(aim, ahead, net, one_by_one):
    """O2, O12, Mend i2: a run that takes over sends the same difference again."""
    newer = [snapshot(number) for number in ahead]
    assert aimed((5, 1), aim, newer, lambda all_: [all_] if all_ else []) == net
    assert aimed((5, 1), aim, newer, lambda all_: [[each] for each in all_]) == one_by_one


def following(head, seen_early=False, **options):
    """A source of table s.a, whose snapshots 1 to `head` have two files each."""
    table = IcebergTableOptions(table_name="s.a", **options)
    branch = [snapshot(number) for number in range(1, head + 1)]
    history = SimpleNamespace(
        uuid="u",
        head=lambda _: branch[-1] if branch else None,
        at=lambda _, number: branch[number - 1],
        since=lambda _, number: branch[number or 0 :],
        files=lambda _: SimpleNamespace(sizes=[1, 1]),
    )
    changelog = SimpleNamespace(
        history=history, identified=True, identifiers="1", identifiers_now=lambda: "1"
    )
    columns = [{"id": 1, "name": "id", "required": False, "type": "long"}]
    schema_json = json.dumps({"type": "struct", "schema-id": 0, "fields": columns})
    made = IcebergSourceOptions(tables=[table], load_bytes=1, net_changes=True)
    source = IcebergSource(made, None, None, Destination(seen_early=seen_early))
    source._followed["s.a"] = _Followed(
        name="s.a",
        options=table,
        table=SimpleNamespace(schema_json=lambda: schema_json),
        changelog=changelog,
    )
    return source


def at(*position):
    """A frontier of table s.a."""
    return Frontier({"table s.a u 1": position})


@pytest.mark.parametrize(
    ("head", "durable", "ahead"),
    [
        # A newer snapshot, the same one, and the same one for the second time.
        (7, (5, 1), [(7, 0, 0), (7, 0, 1), (7, 1)]),
        (5, (5, 1), [(5, 2, 0), (5, 2, 1), (5, 3)]),
        (5, (5, 3), [(5, 4, 0), (5, 4, 1), (5, 5)]),
        # Dropped within a load, and before its first row.
        (5, (5, 0, 1), [(5, 2, 0), (5, 2, 1), (5, 3)]),
        (7, (5, 0, 0), [(5, 0, 1), (5, 1), (5, 1, 7), (7, 1)]),
        # What was chosen may be there in part: it is sent again, and nothing newer before it.
        (9, (5, 1, 7), [(7, 0, 0), (7, 0, 1), (7, 1), (7, 1, 9), (9, 1)]),
        # All that the table ever had are changes that lie ahead.
        (3, (-1, 1), [(-1, 1, 3), (3, 1)]),
    ],
)
def test_a_table_whose_copy_was_dropped_is_loaded_anew(head, durable, ahead):
    """O1, E4: other tables remember where it was, and that is not where it is."""
    source = following(head)
    source.resume(Remembered(progress={}, durable=at(*durable), missing=["s.a"]))
    found = source.available(at(*durable))
    assert [each["table s.a u 1"] for each in found] == ahead
    assert source.standing(found[-1]).caught_up
    bounds = [at(*durable), *found]
    assert all(upper.covers(lower) and upper != lower for lower, upper in pairwise(bounds))
    # The load goes on, and a copy that is there is left alone.
    assert source.available(found[0]) == found[1:]
    for kept in (following(head), following(head, disable_export=True)):
        missing = ["s.a"] if kept._options.tables[0].disable_export else []
        kept.resume(Remembered(progress={}, durable=at(5, 1), missing=missing))
        assert kept.available(at(5, 1)) == ([at(5, 1, head), at(head, 1)] if head > 5 else [])


@pytest.mark.parametrize(("head", "began"), [(5, 5), (0, -1)], ids=["snapshots", "none yet"])
def test_where_a_copy_begins_without_a_load_is_remembered_by_the_copy_itself(head, began):
    """O1, E4: else the next start begins later, and what lies between is skipped in silence."""
    source = following(head, disable_export=True, identifier_columns=["id"])
    (upper,) = source.available(START)
    assert upper == at(began, 1)
    plan = source.plan(Epoch(number=1, lower=START, upper=upper))
    (part,) = plan.parts
    assert plan.milestone(START) and part.tables == ("s.a",) and part.frame() is None
    part.close()
    shape = source.shape("s.a")
    assert ([column.name for column in shape.columns], shape.key) == (["id"], ["id"])
    # An index is made with its first document: the frontier itself lies elsewhere.
    early = following(head, seen_early=True, disable_export=True)
    assert not early.plan(Epoch(number=1, lower=START, upper=upper)).parts


def test_a_load_of_a_newer_snapshot_is_not_the_end_that_was_seen_at_the_start():
    """O1, O2: a single run would end before it has brought a row."""
    source = following(5)
    assert source.available(START)[-1] == at(5, 1)
    for loaded in ((7, 0, 0), (7, 0, 1)):
        assert not source.standing(at(*loaded)).caught_up
    assert source.standing(at(7, 1)).caught_up


def test_no_rows_lie_between_two_loads_of_one_snapshot():
    """O1: epochs of other tables that are replayed may go past both."""
    source = following(5)
    for lower, upper in [((5, 1), (5, 3)), ((5, 1), (5, 2, 0)), ((5, 0, 1), (7, 0, 0))]:
        assert not source.plan(Epoch(number=1, lower=at(*lower), upper=at(*upper))).parts


def snapshot(number, kilobytes=1, schema_id=0, has_row_ids=False):
    """The snapshot of number 8 only replaces files."""
    return Snapshot(
        id=number,
        parent_id=None,
        sequence_number=number,
        operation="replace" if number == 8 else "append",
        time_ms=0,
        schema_id=schema_id,
        has_row_ids=has_row_ids,
        changed_bytes=kilobytes and kilobytes * 1024,
    )


@pytest.mark.parametrize(
    ("ahead", "groups"),
    [
        ([], []),
        # 200 kB take three snapshots, as none counts for less than 64 kB.
        ([snapshot(n) for n in range(1, 8)], [[1, 2, 3], [4, 5, 6], [7]]),
        ([snapshot(1), snapshot(2, 137), snapshot(3)], [[1], [2], [3]]),
        ([snapshot(1), snapshot(2, 136), snapshot(3)], [[1, 2], [3]]),
        ([snapshot(1), snapshot(2, 9_999), snapshot(3)], [[1], [2], [3]]),
        ([snapshot(1), snapshot(2, None), snapshot(3)], [[1], [2], [3]]),
        (
            [snapshot(6), snapshot(7), snapshot(8), snapshot(9), snapshot(10)],
            [[6, 7], [8], [9, 10]],
        ),
        ([snapshot(1), snapshot(2, schema_id=1), snapshot(3, schema_id=1)], [[1], [2, 3]]),
        ([snapshot(1), snapshot(2, has_row_ids=True)], [[1], [2]]),
    ],
)
def test_small_snapshots_that_wait_are_taken_together(ahead, groups):
    """O2, Mend g5: large ones, and those that nobody knows the size of, are taken alone."""
    found = grouped(ahead, 200 * 1024)
    assert [[each.sequence_number for each in group] for group in found] == groups
    assert [len(group) for group in grouped(ahead, 0)] == [1] * len(ahead)


def test_the_shortest_polling_interval_counts():
    """O2: tables of one pipeline are looked at together."""
    tables = [
        IcebergTableOptions(table_name="a.b", polling_interval=5.0),
        IcebergTableOptions(table_name="a.c"),
    ]
    assert IcebergSourceOptions(tables=tables).interval == 5.0
    assert IcebergSourceOptions(tables=tables[1:]).interval == 30.0


def test_acknowledgments_cannot_be_switched_off():
    """O12: progress always follows what the sink has taken."""
    tables = [IcebergTableOptions(table_name="a.b")]
    with pytest.raises(ConfigInvalid, match="cannot be switched off"):
        IcebergSourceOptions(tables=tables, acknowledgments=False)
