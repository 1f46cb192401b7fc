"""Where the rows of given identifiers may lie, and which of them are there.

Iceberg lets rows share an identifier, and deletes by value name identifiers that no row may have.
Both are found out in the table itself: of the files whose bounds admit one of the identifiers.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import and_

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from icestream.iceberg.rows import VALUES_MAX, Bound, bound
from icestream.iceberg.staged import staged_name

# Types whose values Spark and Iceberg order alike, and that Iceberg takes as they are printed.
_ORDERED = re.compile(r"int|long|string|date|timestamp|timestamptz|decimal\(.*\)")


def sample(identifiers: DataFrame) -> pa.Table:
    """All of the identifiers if they are few, else one more than are called few."""
    return identifiers.limit(VALUES_MAX + 1).toArrow()


def few(some: pa.Table) -> bool:
    """Whether a sample holds all."""
    return bool(some.num_rows <= VALUES_MAX)


def bounds(identifiers: DataFrame, some: pa.Table, schema_json: str) -> dict[int, Bound]:
    """What can be said of identifiers in few words, by the ids of their columns."""
    kinds = {
        staged_name(int(field["id"])): (int(field["id"]), field["type"])
        for field in json.loads(schema_json)["fields"]
    }
    chosen = {
        name: kinds[name][0]
        for name in identifiers.columns
        if isinstance(kinds[name][1], str) and _ORDERED.fullmatch(kinds[name][1])
    }
    known: Mapping[str, Bound | None] = (
        {name: bound(some.column(name)) for name in chosen}
        if few(some)
        else _ends(identifiers, list(chosen))
    )
    return {chosen[name]: each for name, each in known.items() if each is not None}


def _ends(identifiers: DataFrame, names: Sequence[str]) -> Mapping[str, Bound | None]:
    """The least and the greatest of each column; nothing of a column that holds a null."""
    if not names:
        return {}
    sides = (F.min, F.max)
    asked = [side(name).alias(f"{side.__name__} {name}") for name in names for side in sides]
    nulls = [F.count_if(F.col(name).isNull()).alias(f"null {name}") for name in names]
    ends = identifiers.agg(*asked, *nulls).toArrow()
    found: dict[str, Bound | None] = {}
    for name in names:
        if ends.column(f"null {name}")[0].as_py():
            continue
        each = [bound(ends.column(f"{side.__name__} {name}")) for side in sides]
        if all(each):
            found[name] = Bound(values=[one.values[0] for one in each if one], ranged=True)
    return found


def among(rows: DataFrame, identifiers: DataFrame) -> DataFrame:
    """Those of the rows that have one of the identifiers."""
    names = identifiers.columns
    wanted = identifiers.toDF(*(f"wanted {name}" for name in names))
    same = (F.col(name).eqNullSafe(F.col(f"wanted {name}")) for name in names)
    return rows.join(wanted, reduce(and_, same), "left_semi")
