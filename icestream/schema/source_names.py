"""The table's columns under the names that they have at the source.

A source's columns find the table's by Iceberg's name mapping first, then by name.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.types import IcebergType, ListType, MapType, NestedField, StringType, StructType

from icestream.errors import SchemaRejected
from icestream.schema.columns import Column

# The table property that holds Iceberg's name mapping.
NAME_MAPPING = "schema.name-mapping.default"


def source_schema(
    schema: Schema, mapping: str | None, known: Mapping[str, IcebergType] = {}
) -> Schema:
    """The table's schema under the names that its columns have at the source.

    A field is called what Iceberg's name mapping calls it; of several names the last one in `known`
    is taken. A field is left out if its name now belongs to another field.
    """
    names = _mapped_names(json.loads(mapping)) if mapping else {}
    if not names:
        return schema
    fields = _source_fields(schema.fields, names, known)
    kept = {field.field_id for field in fields}
    identifiers = [number for number in schema.identifier_field_ids if number in kept]
    return Schema(*fields, schema_id=schema.schema_id, identifier_field_ids=identifiers)


def table_names(schema: Schema, mapping: str | None, names: Sequence[str]) -> dict[str, str]:
    """Maps the source's names to the table's; a name that the table lacks is left out."""
    own = {field.field_id: field.name for field in schema.fields}
    seen = source_schema(schema, mapping, dict.fromkeys(names, StringType()))
    return {field.name: own[field.field_id] for field in seen.fields if field.name in names}


def refuse_doubles(
    schema: Schema, mapping: str | None, columns: Sequence[Column], table: str
) -> None:
    """Raise `SchemaRejected` when two columns of the source go into one column of the table."""
    names = _mapped_names(json.loads(mapping)) if mapping else {}
    there = {column.name for column in columns if not column.absent}
    for field in schema.fields:
        both = sorted(there.intersection([*names.get(field.field_id, ()), field.name]))
        if len(both) > 1 and names:
            raise doubled(table, field.name, both)


def doubled(table: str, column: str, names: Sequence[str]) -> SchemaRejected:
    """The error for columns of the source that Iceberg's name mapping leads to the same place."""
    return SchemaRejected(
        f"columns {' and '.join(names)} of the source both go into column {column} of {table}",
        detail=f"The table's property {NAME_MAPPING} gives it both names.",
        hint="Take one of the names out of the mapping.",
    )


def _mapped_names(mapping: Sequence[Mapping[str, Any]]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for entry in mapping:
        if "field-id" in entry:
            found[entry["field-id"]] = list(entry.get("names", ()))
        found.update(_mapped_names(entry.get("fields", ())))
    return found


def _source_fields(
    fields: Sequence[NestedField], names: dict[int, list[str]], known: Mapping[str, IcebergType]
) -> list[NestedField]:
    taken = {name for field in fields for name in names.get(field.field_id, ())}
    order = {name: place for place, name in enumerate(known)}
    found = []
    for field in fields:
        aliases = list(names.get(field.field_id, ()))
        if field.name not in taken:
            aliases.append(field.name)
        if aliases:
            # A name other than the table's own is there for a source that still uses it.
            usual = next((name for name in aliases if name != field.name), aliases[0])
            name = max(aliases, key=lambda alias: order.get(alias, -1))
            name = name if name in known else usual
            found.append(_named(field, name, names, known.get(name)))
    return found


def _named(
    field: NestedField, name: str, names: dict[int, list[str]], known: IcebergType | None
) -> NestedField:
    kind = _source_type(field.field_type, names, known)
    return NestedField(
        field_id=field.field_id, name=name, field_type=kind, required=field.required, doc=field.doc
    )


def _source_type(
    kind: IcebergType, names: dict[int, list[str]], known: IcebergType | None
) -> IcebergType:
    if isinstance(kind, StructType):
        inner = known.fields if isinstance(known, StructType) else ()
        fields = {field.name: field.field_type for field in inner}
        return StructType(*_source_fields(kind.fields, names, fields))
    if isinstance(kind, ListType):
        element = known.element_type if isinstance(known, ListType) else None
        return ListType(
            element_id=kind.element_id,
            element_type=_source_type(kind.element_type, names, element),
            element_required=kind.element_required,
        )
    if isinstance(kind, MapType):
        key, value = _key_and_value(known)
        return MapType(
            key_id=kind.key_id,
            key_type=_source_type(kind.key_type, names, key),
            value_id=kind.value_id,
            value_type=_source_type(kind.value_type, names, value),
            value_required=kind.value_required,
        )
    return kind


def _key_and_value(kind: IcebergType | None) -> tuple[IcebergType | None, IcebergType | None]:
    return (kind.key_type, kind.value_type) if isinstance(kind, MapType) else (None, None)


def renamed_type(arrow: pa.DataType, have: IcebergType, want: IcebergType) -> pa.DataType:
    """An Arrow type whose fields, known by their names in `have`, are called as in `want`.

    The two types are the same fields under other names; what `have` does not know stays.
    """
    if pa.types.is_struct(arrow) and isinstance(have, StructType) and isinstance(want, StructType):
        return pa.struct([_renamed_field(field, have, want) for field in arrow])
    if isinstance(have, ListType) and isinstance(want, ListType):
        inner = renamed_type(arrow.value_type, have.element_type, want.element_type)
        element = arrow.value_field.with_type(inner)
        return pa.large_list(element) if pa.types.is_large_list(arrow) else pa.list_(element)
    if pa.types.is_map(arrow) and isinstance(have, MapType) and isinstance(want, MapType):
        key = renamed_type(arrow.key_type, have.key_type, want.key_type)
        item = renamed_type(arrow.item_type, have.value_type, want.value_type)
        return pa.map_(arrow.key_field.with_type(key), arrow.item_field.with_type(item))
    return arrow


def _renamed_field(field: pa.Field, have: StructType, want: StructType) -> pa.Field:
    ids = {each.name: each for each in have.fields}
    targets = {each.field_id: each for each in want.fields}
    known = ids.get(field.name)
    if known is None or known.field_id not in targets:
        return field
    target = targets[known.field_id]
    inner = renamed_type(field.type, known.field_type, target.field_type)
    return field.with_name(target.name).with_type(inner)
