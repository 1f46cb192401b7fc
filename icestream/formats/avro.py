"""Avro records as columns, by the schema that they were written with.

The schema is compiled once into a program that a kernel runs over all records, see `columns`. A
record that does not follow its schema to its last byte is rejected with a reason and hides no
other; nothing that a record claims makes it read outside of itself, loop without end, or take more
memory than a multiple of its bytes.

`TYPE_RULES` says what becomes of each type. Properties that Kafka Connect and Debezium leave on a
type (`connect.name`) count before Avro's logical types.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
from pyiceberg.types import (
    DecimalType,
    FixedType,
    IcebergType,
    StringType,
    TimestamptzType,
    UUIDType,
)

from icestream.errors import SchemaRejected
from icestream.formats.arrow_fields import ArrowField, iceberg_type
from icestream.formats.avro_kernels import STEP_SIZE, Code, Program, walk
from icestream.formats.columns import (
    Assembly,
    Layout,
    Node,
    Presence,
    list_node,
    map_node,
    read_records,
    struct_node,
    symbols_node,
)
from icestream.formats.payloads import Payloads, payloads_of
from icestream.formats.wire import rejections
from icestream.kernels.decimals import DECIMAL_DIGITS_MAX

# A schema of a few named types can describe more columns than memory holds.
STEPS_MAX = 20_000
DEPTH_MAX = 64
SCHEMAS_KEPT = 256

_INT = (-(2**31), 2**31 - 1)
_LONG = (-(2**63), 2**63 - 1)
_UTC = "UTC"
_UUID_BYTES = 16
_VARIABLE_SCALE = "io.debezium.data.VariableScaleDecimal"

TYPE_RULES: Sequence[tuple[str, str, str]] = (
    ("boolean, int, long, float, double", "the same", ""),
    ("string", "string", ""),
    ("bytes", "binary", ""),
    ("fixed", "fixed", ""),
    ("enum", "string", "The symbol."),
    ("record", "struct", "A type that contains itself is refused."),
    ("array", "list", ""),
    ("map", "map", "Of equal keys in one record the last counts."),
    ("union of null and one type", "that type, optional", "In either order."),
    (
        "any other union",
        "struct",
        "One optional field for each type, under the type's name; one of them is set.",
    ),
    ("null", "no column", "A list or map of nulls has elements of type string."),
    (
        "decimal",
        f"decimal; of {DECIMAL_DIGITS_MAX} digits if the schema says more",
        "A record with a number of more digits is rejected.",
    ),
    ("uuid", "uuid", ""),
    ("date", "date", ""),
    ("time-millis, time-micros", "time", ""),
    ("timestamp-millis, timestamp-micros", "timestamptz", "timestamp if adjust-to-utc is false."),
    ("local-timestamp-millis, local-timestamp-micros", "timestamp", ""),
    (
        "timestamp-nanos, local-timestamp-nanos",
        "timestamptz_ns, timestamp_ns",
        "A column of microseconds takes them if no digit is lost.",
    ),
    ("duration and every other logical type", "that of the type underneath", ""),
    ("io.debezium.time.Date", "date", ""),
    ("io.debezium.time.Time, MicroTime, NanoTime", "time", "Nanoseconds only if none is lost."),
    ("io.debezium.time.Timestamp, MicroTimestamp", "timestamp", ""),
    ("io.debezium.time.NanoTimestamp", "timestamp_ns", ""),
    ("io.debezium.time.ZonedTimestamp", "timestamptz", ""),
    ("io.debezium.data.Uuid", "uuid", ""),
    (_VARIABLE_SCALE, "string", f"All digits, {DECIMAL_DIGITS_MAX} at most."),
    ("every other io.debezium and Connect type", "that of the type underneath", ""),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meaning:
    """What a number stands for: its Arrow type, the range it must have, and a factor."""

    arrow: pa.DataType
    range: tuple[int, int]
    factor: int = 1


def _scaled(arrow: pa.DataType, factor: int) -> _Meaning:
    return _Meaning(arrow=arrow, range=(-((2**63) // factor), (2**63 - 1) // factor), factor=factor)


def _of_day(ticks: int, factor: int = 1, unit: str = "us") -> _Meaning:
    return _Meaning(arrow=pa.time64(unit), range=(0, 86_400 * ticks - 1), factor=factor)


_DATE = _Meaning(arrow=pa.date32(), range=_INT)
# By Avro's type and the name of what it means; Connect's names are added to Avro's.
_MEANINGS: Mapping[tuple[str, str], _Meaning] = {
    ("int", "date"): _DATE,
    ("int", "time-millis"): _of_day(1000, 1000),
    ("long", "time-micros"): _of_day(10**6),
    ("long", "timestamp-millis"): _scaled(pa.timestamp("us", _UTC), 1000),
    ("long", "timestamp-micros"): _Meaning(arrow=pa.timestamp("us", _UTC), range=_LONG),
    ("long", "timestamp-nanos"): _Meaning(arrow=pa.timestamp("ns", _UTC), range=_LONG),
    ("long", "local-timestamp-millis"): _scaled(pa.timestamp("us"), 1000),
    ("long", "local-timestamp-micros"): _Meaning(arrow=pa.timestamp("us"), range=_LONG),
    ("long", "local-timestamp-nanos"): _Meaning(arrow=pa.timestamp("ns"), range=_LONG),
    ("int", "org.apache.kafka.connect.data.Date"): _DATE,
    ("int", "org.apache.kafka.connect.data.Time"): _of_day(1000, 1000),
    ("long", "org.apache.kafka.connect.data.Timestamp"): _scaled(pa.timestamp("us", _UTC), 1000),
    ("int", "io.debezium.time.Date"): _DATE,
    ("int", "io.debezium.time.Time"): _of_day(1000, 1000),
    ("long", "io.debezium.time.MicroTime"): _of_day(10**6),
    ("long", "io.debezium.time.NanoTime"): _of_day(10**9, 1, "ns"),
    ("long", "io.debezium.time.Timestamp"): _scaled(pa.timestamp("us"), 1000),
    ("long", "io.debezium.time.MicroTimestamp"): _Meaning(arrow=pa.timestamp("us"), range=_LONG),
    ("long", "io.debezium.time.NanoTimestamp"): _Meaning(arrow=pa.timestamp("ns"), range=_LONG),
}
_NUMBERS: Mapping[str, _Meaning] = {
    "int": _Meaning(arrow=pa.int32(), range=_INT),
    "long": _Meaning(arrow=pa.int64(), range=_LONG),
}
_FIXED_SIZES: Mapping[str, tuple[Code, pa.DataType, int]] = {
    "boolean": (Code.BOOLEAN, pa.bool_(), 1),
    "float": (Code.FLOAT, pa.float32(), 4),
    "double": (Code.DOUBLE, pa.float64(), 8),
}
_TEXT_KINDS: Mapping[str, IcebergType] = {
    "uuid": UUIDType(),
    "io.debezium.data.Uuid": UUIDType(),
    "io.debezium.time.ZonedTimestamp": TimestamptzType(),
}
_PRIMITIVE = {"null", "boolean", "int", "long", "float", "double", "bytes", "string"}
_NAMED = {"record", "error", "enum", "fixed"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AvroPlan:
    """A schema ready to be read by: the program, the columns it fills, and their tree."""

    program: Program
    layout: Layout
    root: Node


def decode(
    values: pa.Array | Payloads, schema: str, references: Sequence[str] = ()
) -> tuple[ArrowField, Mapping[int, str]]:
    """What records say that were written with a schema, and why others cannot be read.

    `references` are schemas that define types which this one names. A record without a value, and
    one that is rejected, is null. Raises `SchemaRejected` for a schema that has no columns.
    """
    payloads = values if isinstance(values, Payloads) else payloads_of(values)
    plan = compile_schema(schema, tuple(references))
    array, faults = read_records(plan.layout, plan.root, payloads, partial(walk, plan.program))
    return ArrowField(array=array, kind=plan.root.kind), rejections(faults, "an Avro record")


@lru_cache(maxsize=SCHEMAS_KEPT)
def compile_schema(schema: str, references: tuple[str, ...] = ()) -> AvroPlan:
    """The plan to read records of a schema by."""
    parsed = [_parse(each) for each in (*references, schema)]
    compiler = _Compiler()
    for each in parsed:
        compiler.define(each, "")
    root, _ = compiler.compile(parsed[-1], "", 0)
    compiler.emit(Code.END)
    steps = np.array(compiler.steps, dtype=np.int64).reshape(-1)
    jumps = np.array(compiler.jumps or [0], dtype=np.int64)
    return AvroPlan(program=(steps, jumps), layout=compiler.layout, root=root)


def _parse(schema: str) -> Any:
    try:
        return json.loads(schema)
    except ValueError as error:
        # The registry may give the bare name of a primitive type.
        if schema.strip() in _PRIMITIVE:
            return schema.strip()
        raise _rejected("it is not JSON") from error


def _rejected(why: str) -> SchemaRejected:
    return SchemaRejected(
        f"an Avro schema cannot be read: {why}",
        hint="Look at the schema in the registry; records that were written with it cannot be "
        "brought into columns.",
    )


def _full_name(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _names_of(schema: Mapping[str, Any], namespace: str) -> tuple[str, str]:
    """The full name of a named type, and the namespace inside of it."""
    name = schema.get("name")
    if not isinstance(name, str):
        raise _rejected("a type has no name")
    full = _full_name(name, str(schema.get("namespace", namespace) or ""))
    return full, full.rpartition(".")[0]


@dataclass(slots=True)
class _Compiler:
    """A program and a layout in the making.

    Compiling a type answers its node and the least bytes that a value of it has.
    """

    layout: Layout = field(default_factory=Layout)
    steps: list[list[int]] = field(default_factory=list)
    jumps: list[int] = field(default_factory=list)
    named: dict[str, tuple[Mapping[str, Any], str]] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)

    def define(self, schema: Any, namespace: str) -> None:
        """Note the named types of a schema, wherever in it they are defined."""
        if isinstance(schema, list):
            for branch in schema:
                self.define(branch, namespace)
        elif isinstance(schema, dict):
            kind = schema.get("type")
            if isinstance(kind, str) and kind in _NAMED:
                full, inside = _names_of(schema, namespace)
                self.named[full] = (schema, inside)
                for member in schema.get("fields", ()):
                    self.define(member.get("type"), inside)
                return
            for part in ("type", "items", "values"):
                self.define(schema.get(part), namespace)

    def emit(self, code: Code, slot: int = 0, domain: int = 0, *arguments: int) -> int:
        """Add a step; its number."""
        if len(self.steps) >= STEPS_MAX:
            raise _rejected(f"it has more than {STEPS_MAX} values")
        step = [int(code), slot, domain, *arguments]
        self.steps.append(step + [0] * (STEP_SIZE - len(step)))
        return len(self.steps) - 1

    def compile(self, schema: Any, namespace: str, domain: int) -> tuple[Node, int]:
        """The code and the node of any type."""
        if isinstance(schema, list):
            return self._union(schema, namespace, domain)
        if isinstance(schema, str):
            if schema in _PRIMITIVE:
                return self._primitive(schema, {}, domain)
            full = _full_name(schema, namespace)
            known = self.named.get(full) or self.named.get(schema)
            if known is None:
                raise _rejected(f"type {schema} is not defined")
            return self._definition(*known, domain)
        if not isinstance(schema, dict):
            raise _rejected("a type is neither a name, a list nor an object")
        kind = schema.get("type")
        if isinstance(kind, str) and kind in _NAMED:
            return self._definition(*self.named[_names_of(schema, namespace)[0]], domain)
        if kind in ("array", "map"):
            return self._repeated(schema, namespace, domain)
        if isinstance(kind, str) and kind in _PRIMITIVE:
            return self._primitive(kind, schema, domain)
        return self.compile(kind, namespace, domain)

    def _primitive(self, kind: str, schema: Mapping[str, Any], domain: int) -> tuple[Node, int]:
        if kind == "null":
            return Node(assembly=Assembly.NOTHING, arrow=pa.null(), kind=None), 0
        if kind in _FIXED_SIZES:
            code, arrow, size = _FIXED_SIZES[kind]
            slot = self.layout.slot(domain)
            self.emit(code, slot, domain)
            return Node(
                assembly=Assembly.WORD, arrow=arrow, kind=iceberg_type(arrow), slot=slot
            ), size
        if kind in _NUMBERS:
            return self._number(kind, schema, domain), 1
        if kind == "bytes" and schema.get("logicalType") == "decimal":
            return self._decimal(schema, domain, -1), 1
        slot = self.layout.slot(domain, 2)
        text = kind == "string"
        self.emit(Code.TEXT if text else Code.BYTES, slot, domain, -1)
        arrow = pa.large_string() if text else pa.large_binary()
        kinds = [_TEXT_KINDS[name] for name in _meant(schema) if text and name in _TEXT_KINDS]
        column = kinds[0] if kinds else iceberg_type(arrow)
        return Node(assembly=Assembly.BYTES, arrow=arrow, kind=column, slot=slot), 1

    def _number(self, kind: str, schema: Mapping[str, Any], domain: int) -> Node:
        found = [_MEANINGS[kind, name] for name in _meant(schema) if (kind, name) in _MEANINGS]
        meaning = found[0] if found else _NUMBERS[kind]
        arrow = meaning.arrow
        if pa.types.is_timestamp(arrow) and schema.get("adjust-to-utc") is False:
            arrow = pa.timestamp(arrow.unit)
        slot = self.layout.slot(domain)
        self.emit(Code.NUMBER, slot, domain, *meaning.range, meaning.factor)
        return Node(assembly=Assembly.WORD, arrow=arrow, kind=iceberg_type(arrow), slot=slot)

    def _decimal(self, schema: Mapping[str, Any], domain: int, width: int) -> Node:
        precision, scale = schema.get("precision"), schema.get("scale", 0)
        if not isinstance(precision, int) or not isinstance(scale, int) or precision < 1:
            raise _rejected("a decimal has no precision")
        precision = min(precision, DECIMAL_DIGITS_MAX)
        if not 0 <= scale <= precision:
            raise _rejected(f"a decimal has a scale of {scale} and {precision} digits")
        slot = self.layout.slot(domain, 2)
        self.emit(Code.DECIMAL, slot, domain, width, precision)
        arrow = pa.decimal128(precision, scale)
        return Node(
            assembly=Assembly.DECIMAL, arrow=arrow, kind=DecimalType(precision, scale), slot=slot
        )

    def _definition(
        self, schema: Mapping[str, Any], namespace: str, domain: int
    ) -> tuple[Node, int]:
        kind = schema["type"]
        if kind == "enum":
            return self._enum(schema, domain), 1
        if kind == "fixed":
            return self._fixed(schema, domain)
        full = _names_of(schema, namespace)[0]
        if full in self.open:
            raise _rejected(f"type {full} contains itself")
        if len(self.open) >= DEPTH_MAX:
            raise _rejected(f"it is nested more than {DEPTH_MAX} deep")
        self.open.append(full)
        node, size = self._record(schema, namespace, domain)
        self.open.pop()
        return node, size

    def _record(self, schema: Mapping[str, Any], namespace: str, domain: int) -> tuple[Node, int]:
        members = schema.get("fields")
        if not isinstance(members, list):
            raise _rejected("a record has no list of fields")
        names = [str(member.get("name")) for member in members]
        if len(set(names)) < len(names):
            raise _rejected("a record has two fields of one name")
        variable = schema.get("connect.name") == _VARIABLE_SCALE and names == ["scale", "value"]
        whole = {"type": "bytes", "logicalType": "decimal", "precision": DECIMAL_DIGITS_MAX}
        types = ["int", whole] if variable else [member.get("type") for member in members]
        compiled = [self.compile(each, namespace, domain) for each in types]
        inner, size = [node for node, _ in compiled], sum(size for _, size in compiled)
        if variable:
            text = Node(assembly=Assembly.SCALED_NUMBER, arrow=pa.large_string(), kind=StringType())
            return replace(text, inner=tuple(inner)), size
        return struct_node(names, inner), size

    def _enum(self, schema: Mapping[str, Any], domain: int) -> Node:
        symbols = [str(symbol) for symbol in schema.get("symbols", ())]
        if not symbols:
            raise _rejected("an enum has no symbols")
        slot = self.layout.slot(domain)
        self.emit(Code.NUMBER, slot, domain, 0, len(symbols) - 1, 1)
        return symbols_node(slot, dict(enumerate(symbols)))

    def _fixed(self, schema: Mapping[str, Any], domain: int) -> tuple[Node, int]:
        size = schema.get("size")
        if not isinstance(size, int) or not 0 <= size < 2**31:
            raise _rejected("a fixed type has no size")
        if schema.get("logicalType") == "decimal":
            return self._decimal(schema, domain, size), size
        slot = self.layout.slot(domain, 2)
        self.emit(Code.FIXED, slot, domain, size)
        uuid = schema.get("logicalType") == "uuid" and size == _UUID_BYTES
        # Iceberg has no fixed values without bytes.
        arrow = pa.binary(size) if size else pa.large_binary()
        kind = UUIDType() if uuid else FixedType(size) if size else iceberg_type(arrow)
        return Node(assembly=Assembly.BYTES, arrow=arrow, kind=kind, slot=slot), size

    def _repeated(self, schema: Mapping[str, Any], namespace: str, domain: int) -> tuple[Node, int]:
        slot, items = self.layout.slot(domain), self.layout.domain()
        self.emit(Code.LIST, slot, domain, items)
        block = self.emit(Code.BLOCK, slot, domain, items)
        if schema["type"] == "array":
            element, size = self.compile(schema.get("items"), namespace, items)
            node = list_node(element, slot, items)
        else:
            key, key_size = self.compile("string", namespace, items)
            value, value_size = self.compile(schema.get("values"), namespace, items)
            node, size = map_node(key, value, slot, items), key_size + value_size
        after = self.emit(Code.NEXT, slot, domain, items, block) + 1
        self.steps[block][4:] = [after, size]
        return node, 1

    def _union(self, branches: Sequence[Any], namespace: str, domain: int) -> tuple[Node, int]:
        if not branches:
            raise _rejected("a union has no types")
        slot, first = self.layout.slot(domain), len(self.jumps)
        self.emit(Code.CHOICE, slot, domain, first, len(branches))
        self.jumps += [0] * len(branches)
        exits, found, sizes = [], [], []
        for place, branch in enumerate(branches):
            self.jumps[first + place] = len(self.steps)
            node, size = self.compile(branch, namespace, domain)
            exits.append(self.emit(Code.JUMP))
            found.append((place + 1, _branch_name(branch), node))
            sizes.append(size)
        for leave in exits:
            self.steps[leave][3] = len(self.steps)
        return _union_node(slot, found), 1 + min(sizes)


def _union_node(slot: int, branches: Sequence[tuple[int, str, Node]]) -> Node:
    """A type that may be null, or a struct of which one member is set."""
    real = [branch for branch in branches if branch[2].assembly is not Assembly.NOTHING]
    if not real:
        return branches[0][2]
    if len(real) == 1:
        word, _, node = real[0]
        return replace(node, presence=Presence(slot=slot, words=(word,)))
    short = [name.rpartition(".")[2] for _, name, _ in real]
    clear = len(set(short)) == len(short)
    names = short if clear else [name for _, name, _ in real]
    members = [replace(node, presence=Presence(slot=slot, words=(word,))) for word, _, node in real]
    there = Presence(slot=slot, words=tuple(word for word, _, _ in real))
    return struct_node(names, members, there)


def _branch_name(branch: Any) -> str:
    """What a branch of a union is called: its type, or the name of it."""
    if isinstance(branch, str):
        return branch
    if isinstance(branch, dict):
        name = branch.get("name") if branch.get("type") in _NAMED else branch.get("type")
        return str(name)
    raise _rejected("a union is directly inside another")


def _meant(schema: Mapping[str, Any]) -> Sequence[str]:
    """The names of what a type stands for, the most telling one first."""
    return [str(schema[key]) for key in ("connect.name", "logicalType") if key in schema]
