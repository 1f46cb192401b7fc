"""Rows that a table holds, looked up by their keys, under the source's names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from icestream.iceberg.head import Past
from icestream.iceberg.rows import bound, for_spark, from_spark
from icestream.iceberg.staged import staged_name
from icestream.schema import (
    arrow_schema,
)
from icestream.sinks.iceberg.state import TableState

ReadRows = Callable[[str, pa.Table, Sequence[str]], pa.Table]
"""Reads staged rows by their keys; `icestream.spark.stored_rows` on a Spark session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which rows are looked up: those under `keys`, at a moment of the past if not now."""

    keys: pa.Table
    columns: Sequence[str]
    past: Past | None = None


def look_up(state: TableState, branch: str, wanted: Wanted, read_rows: ReadRows) -> pa.Table:
    """The branch's rows under these keys: the key's columns, then the other ones."""
    keys, columns, past = wanted.keys, wanted.columns, wanted.past
    names = list(dict.fromkeys([*keys.column_names, *columns]))
    seen = state.source_schema(names)
    places = {field.name: staged_name(field.field_id) for field in seen.fields}
    fields = arrow_schema(seen)
    result = pa.schema([fields.field(name) for name in names])
    if keys.num_rows == 0:
        return result.empty_table()
    bounds = {
        seen.find_field(name).field_id: limit
        for name in keys.column_names
        if (limit := bound(keys.column(name))) is not None
    }
    places_of_keys = pa.table(
        {places[name]: for_spark(keys.column(name)) for name in keys.column_names}
    )
    with state.handle.staged(branch, bounds, past) as staged:
        if staged is None:
            return result.empty_table()
        found = read_rows(staged, places_of_keys, [places[name] for name in names])
    arrays = [from_spark(found.column(places[field.name]), field.type) for field in result]
    return pa.table(arrays, schema=result)
