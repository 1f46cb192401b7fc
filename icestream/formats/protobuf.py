"""Protobuf messages as columns, by the .proto files that a registry keeps.

The files are compiled by protoc itself, from the package `grpcio-tools`, so that whatever producers
could register is understood as they meant it. A message's description becomes tables that a kernel
reads all records by, see `columns`. A record that is no such message is rejected with a reason and
hides no other; nothing that a record claims makes it read outside of itself, loop without end, or
take more memory than a multiple of its bytes.

As in every reader of Protobuf, fields that the schema does not have are skipped, the last value of
a field that occurs twice counts, and messages that occur twice are merged. `TYPE_RULES` says what
becomes of each type.
"""

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool

from icestream.errors import SchemaRejected, SourceUnavailable
from icestream.formats.arrow_fields import ArrowField, iceberg_type
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
from icestream.formats.protobuf_kernels import (
    DEPTH_MAX,
    Code,
    Tables,
    read_indexes,
    walk,
)
from icestream.formats.rows import Indices
from icestream.formats.wire import rejections

# A few messages can describe more columns than memory holds.
FIELDS_MAX = 20_000
SCHEMAS_KEPT = 256
COMPILE_SECONDS_MAX = 120.0
REASON_CHARACTERS_MAX = 1000
# Messages are seldom defined inside messages, and never this deep.
INDEXES_MAX = 16
_FILE = "icestream_schema.proto"

# What Confluent's serializers import without registering it.
_KNOWN_FILES: Mapping[str, str] = {
    "confluent/meta.proto": """syntax = "proto3";
package confluent;
import "google/protobuf/descriptor.proto";
message Meta { string doc = 1; map<string, string> params = 2; repeated string tags = 3; }
extend google.protobuf.FileOptions { Meta file_meta = 1088; }
extend google.protobuf.MessageOptions { Meta message_meta = 1088; }
extend google.protobuf.FieldOptions { Meta field_meta = 1088; }
extend google.protobuf.EnumOptions { Meta enum_meta = 1088; }
extend google.protobuf.EnumValueOptions { Meta enum_value_meta = 1088; }
""",
    "confluent/type/decimal.proto": """syntax = "proto3";
package confluent.type;
message Decimal { bytes value = 1; uint32 precision = 2; int32 scale = 3; }
""",
}

TYPE_RULES: Sequence[tuple[str, str, str]] = (
    ("bool, float, double, string", "boolean, float, double, string", ""),
    ("int32, sint32, sfixed32", "int", ""),
    ("int64, sint64, sfixed64, uint32, fixed32", "long", ""),
    ("uint64, fixed64", "decimal(20,0)", ""),
    ("bytes", "binary", ""),
    ("enum", "string", "The value's name; of an open enum a number without one as digits."),
    ("message", "struct", ""),
    ("repeated", "list", ""),
    (
        "map",
        "map",
        "Of equal keys in one record the last counts. A record whose map has a value that its "
        "closed enum lacks is rejected.",
    ),
    (
        "a field without presence (proto3)",
        "never null",
        "What was not written has its default: zero, false, or empty.",
    ),
    (
        "optional, oneof, any field of proto2, any message",
        "null where it was not written",
        "Also when proto2 declares a default, or that it is required.",
    ),
    (
        "google.protobuf.Timestamp",
        "timestamptz",
        "A record with digits beyond microseconds is rejected.",
    ),
    ("google.protobuf.Int64Value and the other wrappers", "that of what they wrap", ""),
    (
        "google.protobuf.Struct, Value, ListValue, and a message inside itself",
        "binary",
        "The message as it was written: no struct has as many levels.",
    ),
    ("google.protobuf.Duration, Any, and every other message", "struct", "Of their fields."),
    ("group", "refused", ""),
)

_Type = FieldDescriptor
_VARINT, _EIGHT_BYTES, _RUN, _FOUR_BYTES = 0, 1, 2, 5
_LONG_UNSIGNED = pa.decimal128(20, 0)
# How each scalar type is written, and what it becomes.
_SCALARS: Mapping[int, tuple[Code, int, pa.DataType]] = {
    _Type.TYPE_BOOL: (Code.BOOLEAN, _VARINT, pa.bool_()),
    _Type.TYPE_INT32: (Code.INT32, _VARINT, pa.int32()),
    _Type.TYPE_SINT32: (Code.SINT32, _VARINT, pa.int32()),
    _Type.TYPE_SFIXED32: (Code.SFIXED32, _FOUR_BYTES, pa.int32()),
    _Type.TYPE_INT64: (Code.WORD, _VARINT, pa.int64()),
    _Type.TYPE_SINT64: (Code.SINT64, _VARINT, pa.int64()),
    _Type.TYPE_SFIXED64: (Code.FIXED_WORD, _EIGHT_BYTES, pa.int64()),
    _Type.TYPE_UINT32: (Code.UINT32, _VARINT, pa.int64()),
    _Type.TYPE_FIXED32: (Code.FIXED32, _FOUR_BYTES, pa.int64()),
    _Type.TYPE_UINT64: (Code.WORD, _VARINT, _LONG_UNSIGNED),
    _Type.TYPE_FIXED64: (Code.FIXED_WORD, _EIGHT_BYTES, _LONG_UNSIGNED),
    _Type.TYPE_FLOAT: (Code.FIXED32, _FOUR_BYTES, pa.float32()),
    _Type.TYPE_DOUBLE: (Code.FIXED_WORD, _EIGHT_BYTES, pa.float64()),
    _Type.TYPE_STRING: (Code.TEXT, _RUN, pa.large_string()),
    _Type.TYPE_BYTES: (Code.BYTES, _RUN, pa.large_binary()),
}
_TIMESTAMP = "google.protobuf.Timestamp"
_WRAPPERS = {
    f"google.protobuf.{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
}
_SEALED = {"google.protobuf.Struct", "google.protobuf.Value", "google.protobuf.ListValue"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProtobufPlan:
    """A message ready to be read by: the tables, the columns they fill, and their tree."""

    tables: Tables
    layout: Layout
    root: Node


def decode(
    values: pa.Array | Payloads,
    schema: str,
    references: Mapping[str, str] = {},
    message: Sequence[int] = (0,),
) -> tuple[ArrowField, Mapping[int, str]]:
    """What records say that are messages of a .proto file, and why others cannot be read.

    `references` are the files that this one imports, by name. `message` leads to the message: its
    place in the file, then its place in the message around it. A record without a value, and one
    that is rejected, is null. Raises `SchemaRejected` for a file that protoc does not take.
    """
    payloads = values if isinstance(values, Payloads) else payloads_of(values)
    plan = compile_schema(schema, tuple(references.items()), tuple(message))
    array, faults = read_records(plan.layout, plan.root, payloads, partial(walk, plan.tables))
    return ArrowField(array=array, kind=plan.root.kind), rejections(faults, "a Protobuf message")


def cut_by_message(
    payloads: Payloads,
) -> tuple[Mapping[tuple[int, ...], tuple[Indices, Payloads]], Mapping[int, str]]:
    """Payloads of Confluent's serializers by the message that they are, and those that name none.

    In front of each message is a list of indexes, see `decode`. Answers the places of the records
    of each message, ascending, and what follows the list.
    """
    read = np.zeros((len(payloads), 2 + INDEXES_MAX), dtype=np.int64)
    read_indexes(payloads.content, (payloads.starts, payloads.ends), read)
    whole = read[:, 0] >= 0
    bodies = payloads.beyond(np.maximum(read[:, 0], payloads.starts))
    lists, which = np.unique(read[:, 1:], axis=0, return_inverse=True)
    found = {}
    for number, each in enumerate(lists):
        places = np.flatnonzero((which.reshape(-1) == number) & whole)
        if len(places):
            found[tuple(each[1 : 1 + each[0]].tolist())] = (places, bodies.take(places))
    reason = "the record does not say which message of its schema it is"
    return found, {int(place): reason for place in np.flatnonzero(~whole & ~payloads.absent)}


@lru_cache(maxsize=SCHEMAS_KEPT)
def compile_schema(
    schema: str, references: tuple[tuple[str, str], ...] = (), message: tuple[int, ...] = (0,)
) -> ProtobufPlan:
    """The plan to read messages of a .proto file by."""
    compiler = _Compiler()
    descriptor = _message_at(_files(schema, references), message)
    _, root = compiler.message(descriptor, 0)
    return ProtobufPlan(tables=compiler.tables(), layout=compiler.layout, root=root)


def _rejected(why: str, detail: str | None = None) -> SchemaRejected:
    return SchemaRejected(
        f"a Protobuf schema cannot be read: {why}",
        detail=detail,
        hint="Look at the schema in the registry; records that were written with it cannot be "
        "brought into columns.",
    )


@lru_cache(maxsize=SCHEMAS_KEPT)
def _files(schema: str, references: tuple[tuple[str, str], ...]) -> DescriptorPool:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, text in {**_KNOWN_FILES, **dict(references), _FILE: schema}.items():
            _write(folder, path, text)
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", "--include_imports"]
        try:
            done = subprocess.run(
                [*command, f"--descriptor_set_out={folder / 'out'}", _FILE],
                capture_output=True,
                text=True,
                cwd=folder,
                timeout=COMPILE_SECONDS_MAX,
            )
        except subprocess.TimeoutExpired as error:
            raise SourceUnavailable("protoc could not finish in time") from error
        if done.returncode != 0:
            raise _rejected("protoc does not take it", done.stderr[:REASON_CHARACTERS_MAX])
        files = FileDescriptorSet.FromString((folder / "out").read_bytes())
    pool = DescriptorPool()
    for file in files.file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


def _write(folder: Path, name: str, text: str) -> None:
    """Write an import under its name, which must not lead out of the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.name:
        raise _rejected("it imports a file from outside")
    # Protoc brings its own copies of what the package of Protobuf defines.
    if path.parts[:2] != ("google", "protobuf"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def _message_at(pool: DescriptorPool, indexes: Sequence[int]) -> Descriptor:
    """The message that indexes lead to, counted as the serializers for Java do: without maps."""
    file = FileDescriptorProto()
    pool.FindFileByName(_FILE).CopyToProto(file)
    inside, name = list(file.message_type), file.package
    for index in indexes:
        if index >= len(inside):
            raise _rejected("it does not have the message that records name")
        name = f"{name}.{inside[index].name}".lstrip(".")
        inside = [each for each in inside[index].nested_type if not each.options.map_entry]
    return pool.FindMessageTypeByName(name)


@dataclass(slots=True)
class _Compiler:
    """Tables and a layout in the making; messages are known by their numbers."""

    layout: Layout = field(default_factory=Layout)
    fields: list[list[list[int]]] = field(default_factory=list)
    seconds: dict[int, int] = field(default_factory=dict)
    enums: list[int] = field(default_factory=lambda: [0])
    open: list[str] = field(default_factory=list)

    def tables(self) -> Tables:
        """What the kernel reads by."""
        ends = np.cumsum([len(rows) for rows in self.fields])
        messages = [
            [int(end) - len(rows), int(end), self.seconds.get(number, -1)]
            for number, (rows, end) in enumerate(zip(self.fields, ends, strict=True))
        ]
        flat = [row for rows in self.fields for row in sorted(rows)]
        tables = (flat, messages, self.enums, self.layout.domain_of)
        fields, inside, enums, domains = (
            np.array(table, dtype=np.int64).reshape(-1) for table in tables
        )
        return fields, inside, enums, domains

    def message(self, descriptor: Descriptor, domain: int) -> tuple[int, Node]:
        """The number of a message and the struct of its fields."""
        if len(self.open) >= DEPTH_MAX:
            raise _rejected(f"it is nested more than {DEPTH_MAX} deep")
        self.open.append(descriptor.full_name)
        number = len(self.fields)
        rows: list[list[int]] = []
        self.fields.append(rows)
        choices = {oneof.name: self.layout.slot(domain) for oneof in descriptor.oneofs}
        nodes = []
        for member in descriptor.fields:
            row, node = self._field(member, domain, choices)
            rows.append(row)
            nodes.append(node)
        if sum(map(len, self.fields)) > FIELDS_MAX:
            raise _rejected(f"it has more than {FIELDS_MAX} values")
        self.open.pop()
        return number, struct_node([member.name for member in descriptor.fields], nodes)

    def _field(
        self, member: FieldDescriptor, domain: int, choices: Mapping[str, int]
    ) -> tuple[list[int], Node]:
        """The row of a field and the node of its values."""
        if member.is_repeated:
            count, items = self.layout.slot(domain, 2), self.layout.domain()
            row, node = self._value(member, items, [domain, count, -1, 0])
            if node.assembly is Assembly.STRUCT and _is_map(member):
                together = map_node(node.inner[0], node.inner[1], count, items)
            else:
                together = list_node(node, count, items)
            return row, replace(together, scattered=True)
        presence = self._presence(member, domain, choices)
        slot, word = (presence.slot, presence.words[0]) if presence else (-1, 0)
        row, node = self._value(member, domain, [domain, -1, slot, word])
        return row, replace(node, presence=presence)

    def _presence(
        self, member: FieldDescriptor, domain: int, choices: Mapping[str, int]
    ) -> Presence | None:
        if _in_map(member) or not member.has_presence:
            return None
        oneof = member.containing_oneof
        if oneof is None:
            return Presence(slot=self.layout.slot(domain), words=(1,))
        return Presence(slot=choices[oneof.name], words=(member.index + 1,))

    def _value(
        self, member: FieldDescriptor, domain: int, place: Sequence[int]
    ) -> tuple[list[int], Node]:
        """The row and the node of one value; `place` says what holds it."""
        start = len(self.layout.domain_of)
        if member.type == _Type.TYPE_GROUP:
            raise _rejected(f"field {member.full_name} is a group")
        if member.type == _Type.TYPE_MESSAGE:
            code, inside, node = self._message_value(member.message_type, domain)
            wire = _RUN
        elif member.type == _Type.TYPE_ENUM:
            code, inside, node = self._enum_value(member, domain)
            wire = _VARINT
        else:
            code, wire, arrow = _SCALARS[member.type]
            inside, node = 0, self._scalar_node(arrow, domain)
        row = [member.number, int(code), wire, node.slot, domain, *place, inside]
        return [*row, start, len(self.layout.domain_of)], node

    def _scalar_node(self, arrow: pa.DataType, domain: int) -> Node:
        assembly = Assembly.WORD
        if arrow in (pa.large_string(), pa.large_binary()):
            assembly = Assembly.BYTES
        elif pa.types.is_decimal(arrow):
            assembly = Assembly.DECIMAL
        slot = self.layout.slot(domain, 1 if assembly is Assembly.WORD else 2)
        return Node(assembly=assembly, arrow=arrow, kind=iceberg_type(arrow), slot=slot)

    def _enum_value(self, member: FieldDescriptor, domain: int) -> tuple[Code, int, Node]:
        names: dict[int, str] = {}
        for value in member.enum_type.values:
            names.setdefault(value.number, value.name)
        node = symbols_node(self.layout.slot(domain), names)
        if not member.enum_type.is_closed:
            return Code.INT32, 0, node
        start = len(self.enums)
        self.enums += [len(names), *sorted(names)]
        return Code.CLOSED_ENUM, start, node

    def _message_value(self, descriptor: Descriptor, domain: int) -> tuple[Code, int, Node]:
        name = descriptor.full_name
        if name in _SEALED or name in self.open:
            return Code.SEALED, 0, self._scalar_node(pa.large_binary(), domain)
        number, node = self.message(descriptor, domain)
        if name in _WRAPPERS:
            node = node.inner[0]
        elif name == _TIMESTAMP:
            seconds, nanos = node.inner
            # The two slots lie side by side: neither has a presence of its own.
            slot = self.seconds[number] = seconds.slot
            arrow = pa.timestamp("us", "UTC")
            assert nanos.slot == slot + 1
            node = Node(assembly=Assembly.MOMENT, arrow=arrow, kind=iceberg_type(arrow), slot=slot)
        return Code.MESSAGE, number, node


def _is_map(member: FieldDescriptor) -> bool:
    return member.type == _Type.TYPE_MESSAGE and bool(member.message_type.GetOptions().map_entry)


def _in_map(member: FieldDescriptor) -> bool:
    """Whether it is the key or value of a map, which are never absent."""
    return bool(member.containing_type.GetOptions().map_entry)
