"""Columns of source tables, what a table must become to take them, and exact casts from text.

| module | promise |
|---|---|
| `columns` | columns of a source, names that readers tell apart, the schema of a new table |
| `source_names` | the table's columns under the source's names, by Iceberg's name mapping |
| `steps` | what a table lacks, and the safe steps by which it gets there |
| `widening` | which type holds every value of another one |
| `joining` | one type for values that were seen in several places |
| `text` | exact casts from text, and the type that numbers in text have |
| `notation` | types and schemas as a configuration, Iceberg's library and Arrow write them |
"""

from icestream.schema.columns import (
    Column,
    Names,
    Reads,
    SchemaGap,
    TableShape,
    column_schema,
    distinct_columns,
    new_schema,
    refuse_unknown,
    reserved,
)
from icestream.schema.joining import joined_columns, joined_shapes, united
from icestream.schema.notation import arrow_schema, calendar_day, parse_type, schema_from_json
from icestream.schema.source_names import (
    NAME_MAPPING,
    doubled,
    refuse_doubles,
    renamed_type,
    source_schema,
    table_names,
)
from icestream.schema.steps import Change, SchemaStep, declared_shape, evolution, gaps, grown
from icestream.schema.text import cast_text, infer_number

__all__ = [
    "NAME_MAPPING",
    "Change",
    "Column",
    "Names",
    "Reads",
    "SchemaGap",
    "SchemaStep",
    "TableShape",
    "arrow_schema",
    "calendar_day",
    "cast_text",
    "column_schema",
    "declared_shape",
    "distinct_columns",
    "doubled",
    "evolution",
    "gaps",
    "grown",
    "infer_number",
    "joined_columns",
    "joined_shapes",
    "new_schema",
    "parse_type",
    "refuse_doubles",
    "refuse_unknown",
    "renamed_type",
    "reserved",
    "schema_from_json",
    "source_schema",
    "table_names",
    "united",
]
