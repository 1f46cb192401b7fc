"""How a row becomes a document: an id that is made of the key, and the row as JSON.

Spark makes both, so that they come to a writer as columns of ready text. Numbers that a reader of
JSON may round are texts: who reads 12.50 as a double has lost what the column promised.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

ID = "id"
DOCUMENT = "document"

# A part of an id that is null; no text becomes this, as its backslash would be doubled.
_NULL = r"\N"
# ISO 8601, to the microsecond; a timestamp with a zone is shown in UTC.
_JSON_FORMATS = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


def document_id(parts: Sequence[tuple[Column, T.DataType]]) -> Column:
    """A key as text: one column as it is; several are joined so that no two keys become one text.

    The key (`a|b`, null) becomes `a\\|b|\\N`. A key of one column that is null has no id.
    """
    texts = [
        F.base64(value) if isinstance(kind, T.BinaryType) else value.cast("string")
        for value, kind in parts
    ]
    if len(texts) == 1:
        return texts[0]
    escaped = [
        F.coalesce(F.regexp_replace(text, r"([\\|])", r"\\$1"), F.lit(_NULL)) for text in texts
    ]
    separated = [part for each in escaped for part in (F.lit("|"), each)][1:]
    return F.concat(*separated)


def document(row: Column, kind: T.DataType) -> Column:
    """A row, which is a struct of this type, as JSON; what is null is left out."""
    return F.to_json(row.cast(_exact(kind)), _JSON_FORMATS)


def numbered_document(struct: Column, kind: T.StructType, names: Sequence[str]) -> Column:
    """The JSON of a struct whose fields are numbered, `f0` and so on, under these names."""
    values = [struct.getField(f"f{number}").alias(name) for number, name in enumerate(names)]
    fields = zip(names, kind.fields, strict=True)
    named = T.StructType([T.StructField(name, field.dataType) for name, field in fields])
    return document(F.struct(*values), named)


def rows_as_json(frame: DataFrame) -> Iterator[dict[str, Any]]:
    """The rows of a frame as plain data, one after the other; only some are held at a time."""
    whole = F.struct(*(F.col(f"`{name}`").alias(name) for name in frame.columns))
    exact = whole.cast(_exact(frame.schema))
    texts = frame.select(F.to_json(exact, {**_JSON_FORMATS, "ignoreNullFields": "false"}))
    for line in texts.toLocalIterator():
        yield json.loads(line[0])


def _exact(kind: T.DataType) -> T.DataType:
    """The same type with decimals as text: who reads a JSON number may round it."""
    if isinstance(kind, T.DecimalType):
        return T.StringType()
    if isinstance(kind, T.ArrayType):
        return T.ArrayType(_exact(kind.elementType), kind.containsNull)
    if isinstance(kind, T.MapType):
        return T.MapType(_exact(kind.keyType), _exact(kind.valueType), kind.valueContainsNull)
    if isinstance(kind, T.StructType):
        fields = [T.StructField(f.name, _exact(f.dataType), f.nullable) for f in kind.fields]
        return T.StructType(fields)
    return kind
