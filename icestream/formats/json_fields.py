"""Columns of JSON values, with Kafka Connect's schemas where records bring them.

Without a schema a column's type is told by its values (`json_columns`) and values are cast from
their text. With one, the schema says both (`connect`). Records of one topic may come under several
schemas: each value knows its own, and a column is converted schema by schema.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import InvalidOperation

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.types import IcebergType, ListType, MapType, StructType

from icestream.errors import Broken, SchemaRejected
from icestream.formats.connect import ConnectSchema, convert, iceberg_type, parse_schema
from icestream.formats.json_cells import (
    WIDTH_MAX,
    Cells,
    Kind,
    TooWide,
    crowded,
    distinct,
    elements,
    entries,
    items,
    members,
)
from icestream.formats.json_columns import infer_nested_type, kinds_in
from icestream.formats.rows import Field, Indices, Mask
from icestream.schema import cast_text, united

Schemas = tuple[ConnectSchema | None, ...]
Numbers = npt.NDArray[np.int32]
# What a record says that Connect's converter wrote with its schema.
SCHEMA, PAYLOAD = "schema", "payload"
TOO_MANY_NAMES = "the record has more names than a table may have columns"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JsonField:
    """JSON values as a `Field`; `numbers` says which of `schemas` each value comes under.

    `parts` are the members of its objects where somebody has looked for them already.
    """

    cells: Cells
    schemas: Schemas
    numbers: Numbers
    parts: Mapping[str, Cells] | None = None

    @staticmethod
    def untyped(cells: Cells, parts: Mapping[str, Cells] | None = None) -> "JsonField":
        """Values that come without a schema."""
        numbers = np.zeros(len(cells), dtype=np.int32)
        return JsonField(cells=cells, schemas=(None,), numbers=numbers, parts=parts)

    def __len__(self) -> int:
        return len(self.cells)

    def missing(self) -> Mask:
        """Where a record does not have this field at all."""
        return np.asarray(self.cells.kinds == Kind.MISSING)

    def null(self) -> Mask:
        """Where the field is missing or null."""
        return np.asarray(self.cells.kinds <= Kind.NULL)

    def take(self, indices: Indices) -> "JsonField":
        """The values at these places, in this order."""
        parts = self.parts and {name: part.take(indices) for name, part in self.parts.items()}
        return JsonField(
            cells=self.cells.take(indices),
            schemas=self.schemas,
            numbers=self.numbers[indices],
            parts=parts,
        )

    def where(self, chosen: Mask, other: Field) -> "JsonField":
        """Its own values where `chosen`, those of another field of the same records elsewhere."""
        if not isinstance(other, JsonField):
            raise Broken("fields of one format are mixed with each other alone")
        schemas = list(dict.fromkeys([*self.schemas, *other.schemas]))
        mine, others = (
            np.array([schemas.index(schema) for schema in each], dtype=np.int32)
            for each in (self.schemas, other.schemas)
        )
        return JsonField(
            cells=self.cells.where(chosen, other.cells),
            schemas=tuple(schemas),
            numbers=np.where(chosen, mine[self.numbers], others[other.numbers]),
        )

    def without(self, chosen: Mask) -> "JsonField":
        """Its values, missing where `chosen`."""
        cells = self.cells.where(~chosen, self.cells.only())
        return JsonField(cells=cells, schemas=self.schemas, numbers=self.numbers)

    def members(self) -> Mapping[str, "JsonField"]:
        """The parts of objects by name; missing where a value is no object or lacks the part."""
        found = self.parts or members(self.cells.only(Kind.OBJECT))
        return {name: self._member(name, cells) for name, cells in found.items()}

    def slim(self, names_max: int) -> tuple["JsonField", Mask]:
        """The field without the objects that have too many names, and which these are."""
        nothing = np.zeros(len(self), dtype=np.bool_)
        if self.parts is not None:
            return self, nothing
        objects = self.cells.only(Kind.OBJECT)
        try:
            return replace(self, parts=members(objects, names_max)), nothing
        except TooWide:
            left_out = crowded(objects, names_max)
            return self.without(left_out), left_out

    def _member(self, name: str, cells: Cells) -> "JsonField":
        schemas = tuple(schema.field(name) if schema else None for schema in self.schemas)
        return JsonField(cells=cells, schemas=schemas, numbers=self.numbers)

    def type(self) -> IcebergType | None:
        """What a new column for these values should be; None when all are null and untyped."""
        found: IcebergType | None = None
        for schema, part in self._by_schema():
            kind = iceberg_type(schema, itertools.count(1)) if schema else None
            kind = kind or infer_nested_type(part)
            if kind is not None:
                found = kind if found is None else united(found, kind)
        return found

    def text(self) -> pa.Array:
        """The values as text, null where the field is null."""
        return self.cells.text()

    def is_any(self, spellings: Sequence[str]) -> Mask:
        """Where a value's text is one of these; see `Field.is_any`.

        Reads no more than it must: a string that spells ASCII with escapes is not recognized.
        """
        found = np.zeros(len(self), dtype=np.bool_)
        places = _beginning_like(self.cells, spellings)
        if len(places):
            few = self.cells.take(places)
            text = few.text()
            compact = pc.replace_substring_regex(text, r"[ \t\r\n]", "")
            shown = pc.if_else(pa.array(few.kinds == Kind.STRING), text, compact)
            same = pc.is_in(shown, value_set=pa.array(spellings, pa.string()))
            found[places] = same.to_numpy(zero_copy_only=False)
        return found

    def cast(self, name: str, kind: IcebergType, arrow_type: pa.DataType) -> pa.Array:
        """The values in the type of a table's column; `SchemaRejected` when one does not fit."""
        try:
            return self._cast(name, kind, arrow_type)
        except (pa.ArrowInvalid, ValueError, InvalidOperation) as error:
            raise SchemaRejected(
                f"a value of column {name} does not fit its type {kind}",
                hint=f"Declare the column's type with `columns: {{{name}: ...}}` before the table "
                "is created, or change the table's column to a type that holds the values.",
            ) from error

    def _cast(self, name: str, kind: IcebergType, arrow_type: pa.DataType) -> pa.Array:
        if len(self.schemas) == 1:
            return _cast(self.cells, self.schemas[0], name, kind, arrow_type)
        columns = [
            _cast(part, schema, name, kind, arrow_type) for schema, part in self._by_schema()
        ]
        if len(columns) < 2:
            return columns[0] if columns else pa.nulls(0, arrow_type)
        # Schema by schema they lie in the order of a stable sort by schema.
        back = np.argsort(np.argsort(self.numbers, kind="stable"), kind="stable")
        return pa.concat_arrays(columns).take(pa.array(back))

    def _by_schema(self) -> list[tuple[ConnectSchema | None, Cells]]:
        """The values under each schema that any comes under, in the order of the schemas."""
        if len(self.schemas) == 1:
            return [(self.schemas[0], self.cells)]
        return [
            (self.schemas[number], self.cells.take(np.flatnonzero(self.numbers == number)))
            for number in np.unique(self.numbers).tolist()
        ]


def _beginning_like(cells: Cells, spellings: Sequence[str]) -> Indices:
    """The strings, arrays and objects that may have one of these texts.

    Told by the length of strings, and by the three bytes that all of them begin with; what has a
    blank after its bracket may be any.
    """
    sizes = cells.ends - cells.starts
    fitting = (cells.kinds >= Kind.OBJECT) & (sizes >= len(b"[1]"))
    if (cells.kinds == Kind.STRING).any():
        quoted = np.zeros(len(cells), dtype=np.bool_)
        for length in {len(text.encode()) + 2 for text in spellings}:
            quoted |= sizes == length
        fitting |= quoted & (cells.kinds == Kind.STRING)
    places = np.flatnonzero(fitting)
    if not len(places):
        return places
    first, second, third = (cells.data[cells.starts[places] + number] for number in range(3))
    may = (first != ord('"')) & np.isin(second, np.frombuffer(b" \t\r\n", np.uint8))
    nested = [text for text in spellings if text[0] in "[{"]
    for text in (*nested, *(f'"{text}"' for text in spellings)):
        one, two, three = text.encode()[:3]
        may |= (first == one) & (second == two) & (third == three)
    return np.asarray(places[may])


def _cast(
    cells: Cells,
    schema: ConnectSchema | None,
    name: str,
    kind: IcebergType,
    arrow_type: pa.DataType,
) -> pa.Array:
    """Values that come under one schema, or under none."""
    if isinstance(kind, StructType):
        return _cast_structs(cells, schema, name, kind, arrow_type)
    if isinstance(kind, ListType):
        return _cast_lists(cells, schema, name, kind, arrow_type)
    if isinstance(kind, MapType):
        return _cast_maps(cells, schema, name, kind, arrow_type)
    if schema is None or schema.nested:
        # Where a column is text, objects and arrays are their JSON.
        return cast_text(cells.text(), name, kind, arrow_type)
    return convert(cells, schema, name, kind, arrow_type)


def _refuse_other_kinds(cells: Cells, *kinds: Kind) -> None:
    if not kinds_in(cells) <= set(kinds):
        raise ValueError("a value has another shape than its type")


def _cast_structs(
    cells: Cells,
    schema: ConnectSchema | None,
    name: str,
    kind: StructType,
    arrow_type: pa.DataType,
) -> pa.Array:
    _refuse_other_kinds(cells, Kind.OBJECT)
    parts = members(cells)
    columns = []
    for field in kind.fields:
        to = arrow_type.field(field.name).type
        part = parts.pop(field.name, None)
        if part is None:
            columns.append(pa.nulls(len(cells), to))
            continue
        inner = schema.field(field.name) if schema else None
        columns.append(_cast(part, inner, f"{name}.{field.name}", field.field_type, to))
    if any(kinds_in(part) for part in parts.values()):
        raise ValueError("an object has a member that its type lacks")
    absent = pa.array(cells.kinds != Kind.OBJECT)
    return pa.StructArray.from_arrays(columns, fields=list(arrow_type), mask=absent)


def _cast_lists(
    cells: Cells,
    schema: ConnectSchema | None,
    name: str,
    kind: ListType,
    arrow_type: pa.DataType,
) -> pa.Array:
    _refuse_other_kinds(cells, Kind.ARRAY)
    offsets, flat = items(cells)
    inner = _cast(
        flat,
        schema.items if schema else None,
        f"{name}.element",
        kind.element_type,
        arrow_type.value_type,
    )
    absent = pa.array(cells.kinds != Kind.ARRAY)
    large = pa.types.is_large_list(arrow_type)
    array, width = (pa.LargeListArray, pa.int64()) if large else (pa.ListArray, pa.int32())
    places = pa.array(offsets).cast(width)
    return array.from_arrays(places, inner, type=arrow_type, mask=absent)


def _cast_maps(
    cells: Cells,
    schema: ConnectSchema | None,
    name: str,
    kind: MapType,
    arrow_type: pa.DataType,
) -> pa.Array:
    """Maps are objects; those whose keys are no strings are arrays of pairs in Connect's JSON."""
    _refuse_other_kinds(cells, Kind.OBJECT, Kind.ARRAY)
    if kinds_in(cells) == {Kind.ARRAY} and schema is not None:
        offsets, pairs = items(cells)
        _refuse_other_kinds(pairs, Kind.ARRAY)
        columns = elements(pairs)
        if len(pairs) and (len(columns) != 2 or (columns[0].kinds <= Kind.NULL).any()):
            raise ValueError("a map's entry is no pair of a key and a value")
        names, values = columns if columns else (pairs, pairs)
    else:
        _refuse_other_kinds(cells, Kind.OBJECT)
        offsets, names, values = entries(cells)
    key_schema = schema.keys if schema and schema.keys and schema.keys.kind != "string" else None
    keys = _cast(names, key_schema, f"{name}.key", kind.key_type, arrow_type.key_type)
    value_schema = schema.items if schema else None
    inner = _cast(values, value_schema, f"{name}.value", kind.value_type, arrow_type.item_type)
    absent = pa.array(~np.isin(cells.kinds, (Kind.OBJECT, Kind.ARRAY)))
    return pa.MapArray.from_arrays(pa.array(offsets), keys, inner, type=arrow_type, mask=absent)


def with_schemas(cells: Cells, names_max: int = WIDTH_MAX) -> tuple[JsonField, Mapping[int, str]]:
    """Values, out of the `schema` and `payload` that some or all of them come in.

    A value is taken for such a pair when it has these two members and no other, the schema an
    object or null. Each distinct text of a schema is parsed once. Values whose schema is not one of
    Kafka Connect are rejected, with a reason, and so are values with too many names.
    """
    crowd: dict[int, str] = {}
    try:
        top = members(cells.only(Kind.OBJECT), names_max)
    except TooWide:
        left_out = crowded(cells.only(Kind.OBJECT), names_max)
        crowd = dict.fromkeys(np.flatnonzero(left_out).tolist(), TOO_MANY_NAMES)
        cells = cells.where(~left_out, cells.only())
        top = members(cells.only(Kind.OBJECT), names_max)
    if not {SCHEMA, PAYLOAD} <= top.keys():
        return JsonField.untyped(cells, top), crowd
    pairs = _wrapped(top)
    if not pairs.any():
        return JsonField.untyped(cells, top), crowd
    payload = top[PAYLOAD].where(pairs, cells)
    texts, firsts = distinct(top[SCHEMA].only(Kind.OBJECT))
    parsed = _parsed(top[SCHEMA].take(firsts))
    # Number 0 is for values without a schema, also where they lie in a pair.
    schemas: Schemas = (None, *parsed)
    numbers = np.where(pairs, texts + np.int32(1), np.int32(0))
    unknown = np.array([False, *(schema is None for schema in parsed)])
    uncounted = pairs & (texts < 0) & (top[SCHEMA].kinds == Kind.OBJECT)
    rejected = dict.fromkeys(
        np.flatnonzero(unknown[numbers]).tolist(),
        "the record's schema is none of Kafka Connect's JSON converter",
    )
    rejected.update(
        dict.fromkeys(
            np.flatnonzero(uncounted).tolist(), "the batch has too many different schemas"
        )
    )
    found = _pruned(JsonField(cells=payload, schemas=schemas, numbers=numbers))
    return found, {**rejected, **crowd}


def _pruned(field: JsonField) -> JsonField:
    """The same values with those schemas alone that any value comes under.

    What is null means the same under any of them. One schema for all is the quick way later on.
    """
    used = np.unique(field.numbers[~field.null()])
    places = np.searchsorted(used, field.numbers).astype(np.int32)
    schemas = tuple(field.schemas[number] for number in used.tolist()) or (None,)
    numbers = np.where(field.null(), np.int32(0), np.minimum(places, np.int32(len(schemas) - 1)))
    return JsonField(cells=field.cells, schemas=schemas, numbers=numbers)


def _wrapped(top: Mapping[str, Cells]) -> Mask:
    """Which records are pairs of a schema and a payload."""
    kinds = top[SCHEMA].kinds
    pairs = ((kinds == Kind.OBJECT) | (kinds == Kind.NULL)) & (top[PAYLOAD].kinds != Kind.MISSING)
    for name, cells in top.items():
        if name not in (SCHEMA, PAYLOAD):
            pairs = pairs & (cells.kinds == Kind.MISSING)
    return np.asarray(pairs)


def _parsed(texts: Cells) -> Sequence[ConnectSchema | None]:
    """One schema for each text, None for what is no schema."""
    found: list[ConnectSchema | None] = []
    for text in texts.json().to_pylist():
        try:
            found.append(parse_schema(json.loads(text)))
        except (ValueError, TypeError, RecursionError):
            found.append(None)
    return found
