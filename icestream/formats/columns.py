"""Columns that are filled by a kernel: words first, Arrow arrays at the end.

A format compiles a schema into a program for its kernel and into a tree of `Node`s. The kernel
writes 64-bit words into slots; `assemble` makes the arrays of them.

    domain 0: one entry per record          slot 0   op          . . . . .
                                            slot 1,2 name        . . . . .   (start and length)
                                            slot 3   how many    2 0 1 . .
    domain 1: one entry per item of a list  slot 4   amount      . . .

Values of one domain lie at the same index in each of its slots, so what a null record or a branch
of a union leaves out costs nothing: nobody writes it, and its parent says that it is null.
A kernel that needs more room for a domain says so before it writes; `Store.grow` makes it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.types import IcebergType, ListType, MapType, NestedField, StringType, StructType

from icestream.formats.payloads import Payloads
from icestream.formats.rows import Indices, Mask
from icestream.kernels import WORD_BYTES, Bytes, kernel, pointer
from icestream.kernels.arrays import validity
from icestream.kernels.decimals import DECIMAL_DIGITS_MAX
from icestream.kernels.texts import copy_span

Words = npt.NDArray[np.int64]
# What kernels see of a store: words, where each slot begins, room and number of entries by domain.
Slots = tuple[Words, Words, Words, Words]
# Content, starts and ends of records, slots, and faults to be written.
Walk = Callable[[Bytes, tuple[Words, Words], Slots, Bytes], int]
# Fewer lists than records is usual; where it is not, the room doubles a few times.
ROOM_MIN = 64
# Records are read so many words at a time, which the processor's caches hold.
WORDS_MAX = 2**20
RECORDS_MIN = 256
# What is written for records without a value in place of a fault.
ABSENT = 255
# The ids of fields inside a column are given anew when a table takes it.
_ANY_ID = 1


class Assembly(Enum):
    """How the words of a node become an array."""

    NOTHING = auto()
    WORD = auto()
    BYTES = auto()
    DECIMAL = auto()
    SYMBOL = auto()
    STRUCT = auto()
    LIST = auto()
    MAP = auto()
    SCALED_NUMBER = auto()
    MOMENT = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """A node is there where the word of a slot is one of these."""

    slot: int
    words: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A value of the schema: its types, its first slot, and the nodes inside it.

    `kind` is the column that it should become, None when it is always null. `BYTES` and `DECIMAL`
    have two slots: start and length, low and high word; `MOMENT` has seconds and nanoseconds.
    `LIST` and `MAP` have the number of items, and the next slot has their first one's place in
    `items`, their domain, if items are `scattered`: some may belong to nobody.
    """

    assembly: Assembly
    arrow: pa.DataType
    kind: IcebergType | None
    slot: int = -1
    presence: Presence | None = None
    symbols: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    inner: tuple["Node", ...] = ()
    items: int = -1
    scattered: bool = False


@dataclass(slots=True)
class Layout:
    """Slots and domains as a compiler hands them out: the domain of each slot."""

    domain_of: list[int] = field(default_factory=list)
    domains: int = 1

    def slot(self, domain: int, count: int = 1) -> int:
        """The first of so many new slots side by side."""
        self.domain_of += [domain] * count
        return len(self.domain_of) - count

    def domain(self) -> int:
        """A new domain: the items of one list."""
        self.domains += 1
        return self.domains - 1


class Store:
    """The words of all slots; domain 0 has room for every record."""

    def __init__(self, layout: Layout, records: int):
        self._domain_of = np.array(layout.domain_of, dtype=np.int64)
        self.room = np.full(layout.domains, ROOM_MIN, dtype=np.int64)
        self.room[0] = max(records, 1)
        self.entries = np.zeros(layout.domains, dtype=np.int64)
        self._place()

    def _place(self) -> None:
        sizes = self.room[self._domain_of]
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.words = np.zeros(int(self.starts[-1]), dtype=np.int64)

    def grow(self, domain: int) -> None:
        """Double the room of a domain and keep what is written."""
        words, starts = self.words, self.starts
        self.room[domain] *= 2
        self._place()
        for slot in range(len(self._domain_of)):
            old = words[starts[slot] : starts[slot + 1]]
            self.words[self.starts[slot] : self.starts[slot] + len(old)] = old

    def slots(self) -> Slots:
        """What kernels see."""
        return self.words, self.starts, self.room, self.entries

    def column(self, slot: int) -> Words:
        """The words of all entries of a slot."""
        start = self.starts[slot]
        return self.words[start : start + self.entries[self._domain_of[slot]]]


def struct_node(
    names: Sequence[str], inner: Sequence[Node], presence: Presence | None = None
) -> Node:
    """A struct; members that are always null have no column in it."""
    fields = [pa.field(name, node.arrow) for name, node in zip(names, inner, strict=True)]
    kinds = [
        NestedField(field_id=place, name=name, field_type=node.kind, required=False)
        for place, (name, node) in enumerate(zip(names, inner, strict=True), start=1)
        if node.kind is not None
    ]
    return Node(
        assembly=Assembly.STRUCT,
        arrow=pa.struct(fields),
        kind=StructType(*kinds),
        presence=presence,
        inner=tuple(inner),
    )


def symbols_node(slot: int, names: Mapping[int, str]) -> Node:
    """An enum: the names of its numbers, of which it has at least one."""
    numbers = tuple(sorted(names))
    return Node(
        assembly=Assembly.SYMBOL,
        arrow=pa.large_string(),
        kind=StringType(),
        slot=slot,
        symbols=tuple(names[number] for number in numbers),
        numbers=numbers,
    )


def list_node(element: Node, slot: int, items: int) -> Node:
    """A list; one of things that are always null becomes a list of text."""
    kind = ListType(_ANY_ID, element.kind or StringType(), element_required=False)
    arrow = pa.large_list(pa.field("element", element.arrow))
    return Node(
        assembly=Assembly.LIST, arrow=arrow, kind=kind, slot=slot, inner=(element,), items=items
    )


def map_node(key: Node, value: Node, slot: int, items: int) -> Node:
    """A map; of equal keys in one value the last counts."""
    kind = MapType(
        _ANY_ID, key.kind or StringType(), _ANY_ID + 1, value.kind or StringType(), False
    )
    arrow = pa.map_(key.arrow, value.arrow)
    return Node(
        assembly=Assembly.MAP, arrow=arrow, kind=kind, slot=slot, inner=(key, value), items=items
    )


def read_records(
    layout: Layout, root: Node, payloads: Payloads, walk: Walk
) -> tuple[pa.Array, Bytes]:
    """The array of all records, and the fault of each; null where it has one or has no value.

    `walk` is a format's kernel with its program: it reads the records at these places from the
    first unread one on, and answers the domain that needs room, or -1 at the end.
    """
    faults = np.where(payloads.absent, ABSENT, 0).astype(np.uint8)
    size = max(RECORDS_MIN, WORDS_MAX // max(len(layout.domain_of), 1))
    arrays = []
    for start in range(0, max(len(payloads), 1), size):
        here = slice(start, start + size)
        store = Store(layout, len(faults[here]))
        places = (payloads.starts[here], payloads.ends[here])
        while (domain := walk(payloads.content, places, store.slots(), faults[here])) >= 0:
            store.grow(domain)
        arrays.append(assemble(root, store, payloads.content, faults[here] == 0))
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays), faults


def assemble(node: Node, store: Store, content: Bytes, there: Mask) -> pa.Array:
    """The array of a node, null where it, or what it is part of, is not `there`."""
    if node.presence is not None:
        words = store.column(node.presence.slot)
        wanted = node.presence.words
        present = words == wanted[0] if len(wanted) == 1 else np.isin(words, wanted)
        there = there & present
    make: dict[Assembly, Callable[..., pa.Array]] = {
        Assembly.NOTHING: lambda *_: pa.nulls(len(there)),
        Assembly.WORD: _numbers,
        Assembly.BYTES: _runs,
        Assembly.DECIMAL: _decimals,
        Assembly.SYMBOL: _symbols,
        Assembly.STRUCT: _structs,
        Assembly.LIST: _lists,
        Assembly.MAP: _maps,
        Assembly.SCALED_NUMBER: _scaled_numbers,
        Assembly.MOMENT: _moments,
    }
    return make[node.assembly](node, store, content, there)


def _array(kind: pa.DataType, there: Mask, *buffers: npt.NDArray[np.generic]) -> pa.Array:
    contents = [pa.py_buffer(np.ascontiguousarray(each)) for each in buffers]
    return pa.Array.from_buffers(kind, len(there), [validity(there), *contents])


def _numbers(node: Node, store: Store, content: Bytes, there: Mask) -> pa.Array:
    words = store.column(node.slot)
    if pa.types.is_boolean(node.arrow):
        return _array(node.arrow, there, np.packbits(words != 0, bitorder="little"))
    narrow = words.astype(np.int32) if node.arrow.bit_width == 32 else words
    return _array(node.arrow, there, narrow)


def _decimals(node: Node, store: Store, content: Bytes, there: Mask) -> pa.Array:
    both = np.stack([store.column(node.slot), store.column(node.slot + 1)], axis=1)
    both[~there] = 0
    return _array(node.arrow, there, both)


def _runs(node: Node, store: Store, content: Bytes, there: Mask) -> pa.Array:
    starts = store.column(node.slot)
    lengths = np.where(there, store.column(node.slot + 1), 0)
    if pa.types.is_fixed_size_binary(node.arrow):
        lengths = np.full(len(there), node.arrow.byte_width, dtype=np.int64)
        # What is not there still takes its place; any bytes do.
        starts = np.where(there, starts, 0)
        if len(content) < node.arrow.byte_width:
            return pa.nulls(len(there), node.arrow)
    offsets = np.zeros(len(there) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    run = np.empty(int(offsets[-1]) + WORD_BYTES, dtype=np.uint8)
    gather(content, starts, offsets, run)
    run = run[: offsets[-1]]
    if pa.types.is_fixed_size_binary(node.arrow):
        return _array(node.arrow, there, run)
    return _array(node.arrow, there, offsets, run)


def _symbols(node: Node, store: Store, content: Bytes, there: Mask) -> pa.Array:
    """Names of an enum's values; a number that has no name is its own."""
    words = np.where(there, store.column(node.slot), node.numbers[0])
    places = np.minimum(np.searchsorted(node.numbers, words), len(node.numbers) - 1)
    named = np.asarray(node.numbers)[places] == words
    names = pa.array(node.symbols, node.arrow).take(pa.array(places, mask=~there))
    if named.all():
        return names
    return pc.if_else(pa.array(named), names, pc.cast(pa.array(words), node.arrow))


def _moments(node: Node, store: Store, content: Bytes, there: Mask) -> pa.Array:
    seconds, nanos = store.column(node.slot), store.column(node.slot + 1)
    micros = np.where(there, seconds, 0) * 1_000_000 + np.where(there, nanos, 0) // 1000
    return _array(node.arrow, there, micros)


def _structs(node: Node, store: Store, content: Bytes, there: Mask) -> pa.Array:
    inner = [assemble(each, store, content, there) for each in node.inner]
    return pa.Array.from_buffers(node.arrow, len(there), [validity(there)], children=inner)


def _items(node: Node, store: Store, content: Bytes, there: Mask) -> tuple[Indices, list[pa.Array]]:
    """Where the items of each list or map begin and end, and the arrays of the items."""
    counts = np.where(there, store.column(node.slot), 0)
    offsets = np.zeros(len(there) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    total = int(store.entries[node.items])
    every = np.ones(total, dtype=np.bool_)
    arrays = [assemble(each, store, content, every) for each in node.inner]
    if node.scattered and offsets[-1] < total:
        shifts = np.repeat(store.column(node.slot + 1) - offsets[:-1], counts)
        places = pa.array(np.arange(offsets[-1]) + shifts)
        arrays = [array.take(places) for array in arrays]
    return offsets, arrays


def _lists(node: Node, store: Store, content: Bytes, there: Mask) -> pa.Array:
    offsets, items = _items(node, store, content, there)
    buffers = [validity(there), pa.py_buffer(offsets)]
    return pa.Array.from_buffers(node.arrow, len(there), buffers, children=items)


def _maps(node: Node, store: Store, content: Bytes, there: Mask) -> pa.Array:
    offsets, (keys, values) = _items(node, store, content, there)
    counts, chosen = _last_of_equal_keys(keys, offsets)
    if len(chosen) < len(keys):
        keys, values = keys.take(pa.array(chosen)), values.take(pa.array(chosen))
        np.cumsum(counts, out=offsets[1:])
    return pa.MapArray.from_arrays(
        pa.array(offsets.astype(np.int32)), keys, values, type=node.arrow, mask=pa.array(~there)
    )


def _last_of_equal_keys(keys: pa.Array, offsets: Indices) -> tuple[Indices, Indices]:
    """How many entries each map keeps, and which: Iceberg's maps have distinct keys."""
    owners = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    codes = keys.dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.int64)
    pairs = owners * (int(codes.max(initial=0)) + 1) + codes
    _, last = np.unique(pairs[::-1], return_index=True)
    chosen = np.sort(len(owners) - 1 - last).astype(np.int64)
    counts = np.bincount(owners[chosen], minlength=len(offsets) - 1).astype(np.int64)
    return counts, chosen


def _scaled_numbers(node: Node, store: Store, content: Bytes, there: Mask) -> pa.Array:
    """Whole numbers that each have a scale of their own, as text."""
    scales, wholes = (assemble(each, store, content, there) for each in node.inner)
    digits = pc.cast(wholes, pa.large_string())
    # A scale that no decimal has is an exponent, whose sign is the other one.
    exponents = pc.cast(pc.negate(pc.cast(scales, pa.int64())), pa.large_string())
    text = pc.binary_join_element_wise(digits, exponents, pa.scalar("E", pa.large_string()))
    for scale in range(DECIMAL_DIGITS_MAX + 1):
        chosen = pc.equal(scales, scale)
        if pc.any(chosen, min_count=0).as_py():
            points = pa.decimal128(DECIMAL_DIGITS_MAX, scale)
            shown = pa.Array.from_buffers(points, len(wholes), wholes.buffers())
            text = pc.if_else(chosen, pc.cast(shown, pa.large_string()), text)
    return text


@kernel
def gather(content: Bytes, starts: Words, offsets: Words, run: Bytes) -> None:
    """Copy what begins at `starts` side by side; `run` has room for a word more than it holds."""
    source, target = pointer(content), pointer(run)
    words_end = content.size - WORD_BYTES
    for row in range(starts.size):
        end = starts[row] + offsets[row + 1] - offsets[row]
        copy_span(source, (starts[row], end, words_end), target, offsets[row])
