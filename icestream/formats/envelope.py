"""What records do to rows: their envelopes taken apart, in whatever format they are written.

`take_off_envelope` works on fields and knows no format. `decode` is its front for the formats that
need nothing but the record itself: JSON and plain text.

Nothing is lost in silence: a record becomes a change, is one of those that say nothing about rows
by their kind (Debezium's messages), or is rejected with a reason. Reasons never quote a record.
"""

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.schema import Schema
from pyiceberg.types import ListType, MapType, NestedField

from icestream.change import Op
from icestream.errors import SchemaRejected
from icestream.formats.json_cells import Cells, Kind, invalid_utf8, values
from icestream.formats.json_fields import TOO_MANY_NAMES, JsonField, with_schemas
from icestream.formats.options import OPERATIONS, ValueOptions
from icestream.formats.rows import Decoded, Field, Indices, Mask, Records, Rows
from icestream.formats.text_fields import TextField, json_strings
from icestream.schema import arrow_schema

Ops = npt.NDArray[np.int8]

# How operations are spelled where nobody says otherwise, in any case of letters.
USUAL_OPERATIONS = {
    **dict.fromkeys(("i", "c", "r", "insert", "create", "read"), "insert"),
    **dict.fromkeys(("u", "update"), "update"),
    **dict.fromkeys(("d", "delete"), "delete"),
}
_NUMBER = r"^-?[0-9]{1,38}(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,2})?$"
_WIDE = pa.decimal256(76, 30)
SEND_WHOLE_ROWS = "set the table's REPLICA IDENTITY to FULL so that PostgreSQL sends whole rows"


class _Verdicts:
    """Which records are left, and why others are not; the first reason of a record counts."""

    def __init__(self, records: int):
        self._codes = np.zeros(records, dtype=np.int32)
        # The first two stand for a record that is left and for one that is passed over.
        self._reasons = ["", ""]

    def reject(self, chosen: Mask, reason: str) -> None:
        """Take these records out and remember why."""
        if chosen.any():
            self._reasons.append(reason)
            self._codes[chosen & (self._codes == 0)] = len(self._reasons) - 1

    def skip(self, chosen: Mask) -> None:
        """Take these records out: by their kind they say nothing about a row."""
        self._codes[chosen & (self._codes == 0)] = 1

    def kept(self) -> Indices:
        """The records that are left."""
        return np.flatnonzero(self._codes == 0)

    def left(self, records: Indices) -> Mask:
        """Which of these records are left."""
        return np.asarray(self._codes[records] == 0)

    def rejected(self) -> dict[int, str]:
        """The reason of each rejected record."""
        places = np.flatnonzero(self._codes > 1)
        reasons = [self._reasons[code] for code in self._codes[places].tolist()]
        return dict(zip(places.tolist(), reasons, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Events:
    """What an envelope held: the row of each record, null where only the key is known.

    `created` tells where Debezium says that the row was not there before.
    """

    row: Field
    ops: Ops
    created: Mask = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))


def take_off_envelope(values: Field, keys: Field, options: ValueOptions) -> Decoded:
    """The changes that records are, given their values and keys, in any format.

    Keys that are missing or null are none. Places are those in the fields.
    """
    verdicts = _Verdicts(len(values))
    values, crowded = values.slim(options.names_max())
    keys, of_keys = keys.slim(options.names_max())
    verdicts.reject(crowded | of_keys, TOO_MANY_NAMES)
    events = _ENVELOPES[options.envelope](values, options, verdicts)
    rows = _rows(events, keys, options, verdicts)
    if options.envelope == "debezium":
        rows = _without_stand_ins(rows, events, options.unavailable_value)
    left = np.flatnonzero(verdicts.left(rows.records))
    if len(left) < len(rows):
        rows = rows.take(left)
    return Decoded(rows=rows, rejected=verdicts.rejected())


def _without_stand_ins(rows: Rows, events: _Events, placeholder: str) -> Rows:
    """The rows without what stands for values that were not sent.

    In an update such a value is `withheld`: the row has it already. A delete needs no value. In a
    row that is created it is `lost`. The row was there before, under another key: Debezium tells a
    change of the key as a delete and a creation, and nothing leads from one to the other.
    """
    columns = dict(rows.columns)
    of_updates: dict[str, Mask] = {}
    of_created: dict[str, Mask] = {}
    for name, chosen in withheld(rows, placeholder).items():
        columns[name] = columns[name].without(chosen)
        created = chosen & events.created[rows.records]
        updated = chosen & ~created & (rows.ops != Op.DELETE)
        of_updates |= {name: updated} if updated.any() else {}
        of_created |= {name: created} if created.any() else {}
    return replace(rows, columns=columns, withheld=of_updates, lost=of_created)


def _everywhere(chosen: Mask, places: Indices, size: int) -> Mask:
    """A mask over all records from one over those at some places."""
    whole = np.zeros(size, dtype=np.bool_)
    whole[places] = chosen
    return whole


def withheld(rows: Rows, placeholder: str) -> Mapping[str, Mask]:
    """The columns, and which changes in them, whose value is only a stand-in for one not sent.

    Debezium spells it as a string, as its bytes or the base64 of them, as an array of it, as an
    array of its bytes, or as a map from it to itself, as the column's type demands.
    """
    if not placeholder:
        return {}
    encoded = placeholder.encode()
    spellings = [
        placeholder,
        base64.b64encode(encoded).decode(),
        f'["{placeholder}"]',
        f"[{','.join(map(str, encoded))}]",
        f"\\x{encoded.hex()}",
        f'{{"{placeholder}":"{placeholder}"}}',
    ]
    masks = {name: column.is_any(spellings) for name, column in rows.columns.items()}
    return {name: chosen for name, chosen in masks.items() if chosen.any()}


def _appended(values: Field, options: ValueOptions, verdicts: _Verdicts) -> _Events:
    verdicts.reject(
        values.null(), "the record has no value; `envelope: upsert` makes it a delete by its key"
    )
    return _Events(row=values, ops=np.full(len(values), Op.INSERT, dtype=np.int8))


def _upserted(values: Field, options: ValueOptions, verdicts: _Verdicts) -> _Events:
    ops = np.where(values.null(), np.int8(Op.DELETE), np.int8(Op.UPSERT))
    return _Events(row=values, ops=ops)


def _told_by_field(values: Field, options: ValueOptions, verdicts: _Verdicts) -> _Events:
    meanings = options.operations or USUAL_OPERATIONS
    tombstone = values.null()
    teller: Field | None = values
    for name in options.cdc_field.split("."):
        teller = teller.members().get(name) if teller else None
    if teller is None:
        verdicts.reject(~tombstone, f"the record lacks the member {options.cdc_field}")
        return _Events(row=values, ops=np.full(len(values), Op.DELETE, dtype=np.int8))
    text = teller.text()
    ops = _operations(text if options.operations else pc.utf8_lower(text), meanings)
    verdicts.reject(teller.null() & ~tombstone, f"the record lacks the member {options.cdc_field}")
    verdicts.reject(
        (ops < 0) & ~tombstone,
        f"the member {options.cdc_field} tells no operation that `operations` knows",
    )
    return _Events(row=values, ops=np.where(tombstone, np.int8(Op.DELETE), ops))


def _operations(text: pa.Array, meanings: Mapping[str, str]) -> Ops:
    """What each text means by a mapping, -1 for what is not in it."""
    known = pa.array(list(meanings), text.type)
    found = pc.fill_null(pc.index_in(text, value_set=known), len(meanings))
    ops = [*(OPERATIONS[meaning] for meaning in meanings.values()), -1]
    return np.asarray(np.array(ops, dtype=np.int8)[found.to_numpy(zero_copy_only=False)])


def _from_debezium(values: Field, options: ValueOptions, verdicts: _Verdicts) -> _Events:
    tombstone = values.null()
    parts = values.members()
    if "op" not in parts:
        _reject_others(parts, ~tombstone, verdicts)
        ops = np.full(len(values), Op.DELETE, dtype=np.int8)
        return _Events(row=values, ops=ops, created=np.zeros(len(values), dtype=np.bool_))
    text = parts["op"].text()
    is_op = {op: _equal(text, op) for op in "crudtm"}
    _reject_others(parts, ~tombstone & parts["op"].null(), verdicts)
    verdicts.skip(is_op["m"])
    verdicts.reject(
        is_op["t"], "the table was truncated at the source; truncate the target's table by hand"
    )
    created = is_op["c"] | is_op["r"]
    written = created | is_op["u"]
    deleted = is_op["d"] | tombstone
    verdicts.reject(~written & ~deleted, "the event's `op` is none of Debezium's")
    nothing = np.ones(len(values), dtype=np.bool_)
    after, before = parts.get("after"), parts.get("before")
    verdicts.reject(
        written & (nothing if after is None else after.null()),
        "the event has no row after the change",
    )
    if after is not None:
        verdicts.reject(is_op["d"] & ~after.null(), "the event has a row after its delete")
    # Debezium delivers at least once, so that an insert may come twice.
    ops = np.where(deleted, np.int8(Op.DELETE), np.int8(Op.UPSERT))
    if after is None or before is None:
        # No row is given at all. Any field without parts, such as the text `op`, is an empty row.
        row = next((part for part in (after, before) if part is not None), parts["op"])
        return _Events(row=row, ops=ops, created=created)
    row = after.where(written, before) if deleted.any() else after
    return _Events(row=row, ops=ops, created=created)


def _equal(text: pa.Array, value: str) -> Mask:
    same = pc.fill_null(pc.equal(text, value), False)
    return np.asarray(same.to_numpy(zero_copy_only=False))


def _reject_others(parts: Mapping[str, Field], chosen: Mask, verdicts: _Verdicts) -> None:
    """Reject what Debezium writes beside change events, each with its name."""
    if not chosen.any():
        return
    for member, what in (
        ("ddl", "the record is a schema change of Debezium's, which belongs to no table"),
        ("status", "the record is a transaction's boundary of Debezium's, not a change of a row"),
    ):
        if member in parts:
            verdicts.reject(chosen & ~parts[member].missing(), what)
    if "ts_ms" in parts:
        alone = chosen & ~parts["ts_ms"].missing()
        for name, part in parts.items():
            alone = alone & (part.missing() | (name == "ts_ms"))
        verdicts.reject(alone, "the record is a heartbeat of Debezium's, not a change of a row")
    verdicts.reject(chosen, "the record is no change event of Debezium's: it has no `op`")


# What each envelope's records are.
_ENVELOPES: dict[str, Callable[[Field, ValueOptions, _Verdicts], _Events]] = {
    "none": _appended,
    "upsert": _upserted,
    "cdc_field": _told_by_field,
    "debezium": _from_debezium,
}


def _rows(events: _Events, keys: Field, options: ValueOptions, verdicts: _Verdicts) -> Rows:
    """The changes of the records that are left, with the columns of their keys."""
    kept = verdicts.kept()
    size = len(events.ops)
    row, ops = events.row, events.ops
    if len(kept) < size:
        row, keys, ops = row.take(kept), keys.take(kept), ops[kept]
    row, crowded = row.slim(options.names_max())
    verdicts.reject(_everywhere(crowded, kept, size), TOO_MANY_NAMES)
    columns, present = _there(row)
    verdicts.reject(
        _everywhere(~present & (ops != Op.DELETE), kept, size), "the row is no object with columns"
    )
    if options.envelope == "none":
        return Rows(records=kept, ops=ops, columns=columns)
    told = _told(keys, options)
    for name, each in told.items():
        if name in columns:
            verdicts.reject(
                _everywhere(_contradicts(columns[name], each, name), kept, size),
                f"the record's key and its value do not agree about column {name}",
            )
        columns[name] = _filled(columns[name], each) if name in columns else each.column
    verdicts.reject(
        _everywhere(_lacks_key(columns, told, options) & (ops != Op.INSERT), kept, size),
        "the change has no key; name the columns that identify a row with `key`",
    )
    whole = np.ones(len(kept), dtype=np.bool_)
    given = dict.fromkeys(options.key, whole)
    return Rows(
        records=kept,
        ops=ops,
        columns=columns,
        keys=given or {name: each.here for name, each in told.items()},
    )


def _lacks_key(
    columns: Mapping[str, Field], told: Mapping[str, "_Told"], options: ValueOptions
) -> Mask | np.bool_:
    """Which changes have no key, or null in it; one answer when it is the same for all.

    Without the option it is the record's own key that identifies the row.
    """
    if options.key:
        nulls = [columns[name].null() if name in columns else np.True_ for name in options.key]
        return np.asarray(np.logical_or.reduce(nulls))
    keyed = [each.here for each in told.values()]
    nulls = [each.here & columns[name].null() for name, each in told.items()]
    if not told:
        return np.True_
    return np.asarray(~np.logical_or.reduce(keyed) | np.logical_or.reduce(nulls))


def _there(objects: Field) -> tuple[dict[str, Field], Mask]:
    """The parts that any of the objects has, and which objects have any."""
    parts: dict[str, Field] = {}
    present = np.zeros(len(objects), dtype=np.bool_)
    for name, part in objects.members().items():
        here = ~part.missing()
        if here.any():
            parts[name] = part
            present |= here
    return parts, present


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What records' keys tell of a column, and which of them do."""

    column: Field
    here: Mask


def _filled(column: Field, told: _Told) -> Field:
    """The column, with what keys tell where it has nothing itself."""
    wanted = column.missing() & told.here
    return column.where(~wanted, told.column) if wanted.any() else column


def _contradicts(column: Field, told: _Told, name: str) -> Mask:
    """Where a key and its value both tell a column, and not the same.

    Two spellings of one number are the same, and so is what the value's own type takes for it.
    """
    both = told.here & ~column.missing()
    if not both.any():
        return both
    known, nulls = column.null(), told.column.null()
    unlike = both & (known != nulls)
    filled = both & ~known & ~nulls
    same = pc.equal(*(each.text().cast(pa.large_string()) for each in (column, told.column)))
    places = np.flatnonzero(filled & ~pc.fill_null(same, False).to_numpy(zero_copy_only=False))
    if len(places):
        mine, theirs = column.take(places), told.column.take(places)
        unlike[places[~(_same_numbers(mine, theirs) | _same_values(mine, theirs, name))]] = True
    return np.asarray(unlike)


def _same_numbers(one: Field, other: Field) -> Mask:
    """Where two texts are the same number."""
    texts = [field.text().cast(pa.large_string()) for field in (one, other)]
    numbers = [pc.fill_null(pc.match_substring_regex(text, _NUMBER), False) for text in texts]
    found = pc.and_(*numbers).to_numpy(zero_copy_only=False).copy()
    places = pa.array(np.flatnonzero(found))
    try:
        first, second = (pc.cast(text.take(places).cast(pa.string()), _WIDE) for text in texts)
    except pa.ArrowInvalid:
        return np.zeros(len(one), dtype=np.bool_)
    found[found] = pc.equal(first, second).to_numpy(zero_copy_only=False)
    return np.asarray(found)


def _same_values(one: Field, other: Field, name: str) -> Mask:
    """Where two values are the same in the type of the first ones."""
    unlike = np.zeros(len(one), dtype=np.bool_)
    kind = one.type()
    if kind is None or kind.is_struct or isinstance(kind, ListType | MapType):
        return unlike
    schema = Schema(NestedField(field_id=1, name=name, field_type=kind, required=False))
    arrow = arrow_schema(schema).field(0).type
    try:
        first, second = (field.cast(name, kind, arrow) for field in (one, other))
    except SchemaRejected:
        return unlike
    if isinstance(arrow, pa.BaseExtensionType):
        first, second = first.cast(arrow.storage_type), second.cast(arrow.storage_type)
    return np.asarray(pc.fill_null(pc.equal(first, second), False).to_numpy(zero_copy_only=False))


def _told(keys: Field, options: ValueOptions) -> dict[str, _Told]:
    """What records' keys tell of columns; a plain value is that of the one column named."""
    parts, objects = _there(keys)
    told = {name: _Told(column=part, here=~part.missing()) for name, part in parts.items()}
    plain = ~objects & ~keys.null()
    if len(options.key) == 1 and plain.any():
        name = options.key[0]
        column = keys.where(plain, told[name].column) if name in told else keys
        here = plain | told[name].here if name in told else plain
        told[name] = _Told(column=column, here=here)
    return {name: told[name] for name in options.key if name in told} if options.key else told


def decode(records: Records, options: ValueOptions) -> Decoded:
    """The changes that records of JSON or plain text are."""
    if options.format == "string":
        return _plain_rows(records)
    said, keys, rejected = _json_fields(records, options)
    fine = np.ones(len(records), dtype=np.bool_)
    fine[list(rejected)] = False
    if fine.all():
        return take_off_envelope(said, keys, options)
    left = np.flatnonzero(fine)
    decoded = take_off_envelope(said.take(left), keys.take(left), options)
    rows = replace(decoded.rows, records=left[decoded.rows.records])
    later = {int(left[place]): reason for place, reason in decoded.rejected.items()}
    return Decoded(rows=rows, rejected={**rejected, **later})


def _json_fields(
    records: Records, options: ValueOptions
) -> tuple[JsonField, JsonField, dict[int, str]]:
    """Values and keys, taken out of Connect's pairs, and the records where one is broken."""
    if options.envelope == "none":
        cells, broken = values(records.values)
        said, rejected = _understood(cells, broken, "value", options.names_max())
        return said, JsonField.untyped(cells.only()), rejected
    keys = _quoted(records.keys) if options.keys_format() == "string" else records.keys
    # Columns mix what keys and values say, so both must lie in one buffer.
    both = pa.concat_arrays([keys.cast(pa.binary()), records.values.cast(pa.binary())])
    cells, broken = values(both)
    size = len(records)
    first, second = (cells.take(np.arange(start, start + size)) for start in (0, size))
    of_keys = {row: reason for row, reason in broken.items() if row < size}
    of_values = {row - size: reason for row, reason in broken.items() if row >= size}
    key, rejected = _understood(first, of_keys, "key", options.names_max())
    said, others = _understood(second, of_values, "value", options.names_max())
    return said, _plain_or_named(key), {**rejected, **others}


def _understood(
    cells: Cells, broken: Mapping[int, str], what: str, names_max: int
) -> tuple[JsonField, dict[int, str]]:
    said, unknown = with_schemas(cells, names_max)
    rejected = {row: f"the record's {what} is not JSON: {why}" for row, why in broken.items()}
    return said, {**rejected, **{row: f"in the {what}: {why}" for row, why in unknown.items()}}


def _plain_or_named(keys: JsonField) -> JsonField:
    """Keys, without those that name no column and are no plain value: arrays and empty objects."""
    _, named = _there(keys)
    kinds = keys.cells.kinds
    useless = (kinds == Kind.ARRAY) | ((kinds == Kind.OBJECT) & ~named)
    if not useless.any():
        return keys
    return replace(keys, cells=keys.cells.where(~useless, keys.cells.only()), parts=None)


def _quoted(texts: pa.Array) -> pa.Array:
    """Plain texts as JSON strings; what is not UTF-8 is left as it is, and is no JSON either."""
    broken = pa.array(invalid_utf8(texts))
    text = pc.if_else(broken, pa.scalar(b"", pa.binary()), texts.cast(pa.binary()))
    whole = json_strings(text.cast(pa.string()))
    return pc.if_else(broken, texts.cast(pa.binary()), whole.cast(pa.binary()))


def _plain_rows(records: Records) -> Decoded:
    """Each record as a row of its value and its key, both as they are."""
    verdicts = _Verdicts(len(records))
    absent = np.asarray(records.values.is_null().to_numpy(zero_copy_only=False))
    verdicts.reject(absent, "the record has no value")
    verdicts.reject(invalid_utf8(records.values), "the record's value is not UTF-8")
    verdicts.reject(invalid_utf8(records.keys), "the record's key is not UTF-8")
    kept = verdicts.kept()
    columns = {
        name: TextField(array=array.take(pa.array(kept)).cast(pa.string()))
        for name, array in (("key", records.keys), ("value", records.values))
    }
    ops = np.full(len(kept), Op.INSERT, dtype=np.int8)
    rows = Rows(records=kept, ops=ops, columns=columns)
    return Decoded(rows=rows, rejected=verdicts.rejected())
