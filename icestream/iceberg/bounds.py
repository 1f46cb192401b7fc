"""The two frontiers of an epoch as one short text.

Both name the same partitions, and most positions differ little: names are stored once and without
the start that they share with the name before, numbers as differences. Names, lengths and numbers
lie in columns of their own, which compress better than rows. The text begins with the number of its
format, so that a later version can read what an earlier one has written.
"""

import base64
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain, zip_longest

from icestream.errors import check
from icestream.frontier import Frontier

FORMAT = "1."


def packed(lower: Frontier, upper: Frontier) -> str:
    """Both frontiers as text of letters, digits and `-_=.`; partitions at their minimum are not
    in it."""
    pairs = {
        name: (lower[name], upper[name])
        for name in sorted({*lower.positions, *upper.positions})
        if lower[name] or upper[name]
    }
    encoded = [name.encode() for name in pairs]
    shared = [_shared(*both) for both in zip([b"", *encoded], encoded, strict=False)]
    rests = [name[start:] for name, start in zip(encoded, shared, strict=True)]
    lengths = chain.from_iterable((len(low), len(high)) for low, high in pairs.values())
    columns = (
        _varints([len(pairs)]),
        _varints(shared),
        _varints(map(len, rests)),
        b"".join(rests),
        _varints(lengths),
        _varints(map(_zigzag, _differences(pairs.values()))),
    )
    return FORMAT + base64.urlsafe_b64encode(zlib.compress(b"".join(columns), 9)).decode()


# A table's progress is read at every attempt to commit, and is mostly the one that was read before.
@lru_cache(maxsize=64)
def unpacked(text: str) -> tuple[Frontier, Frontier]:
    """The inverse of `packed`."""
    check(text.startswith(FORMAT), "frontiers are packed in a format that this version knows")
    content = zlib.decompress(base64.urlsafe_b64decode(text.removeprefix(FORMAT)))
    reader = _Reader(content)
    count = reader.number()
    shared = [reader.number() for _ in range(count)]
    sizes = [reader.number() for _ in range(count)]
    names, before = [], b""
    for start, size in zip(shared, sizes, strict=True):
        before = before[:start] + reader.take(size)
        names.append(before.decode())
    lengths = [(reader.number(), reader.number()) for _ in range(count)]
    lowers, uppers = {}, {}
    previous: tuple[int, ...] = ()
    for name, (low_length, high_length) in zip(names, lengths, strict=True):
        low = _summed(previous, low_length, reader)
        high = _summed(low or previous, high_length, reader)
        lowers[name], uppers[name] = low, high
        previous = high or low
    check(reader.at_end, "packed frontiers have nothing after their last number")
    return (
        Frontier({name: at for name, at in lowers.items() if at}),
        Frontier({name: at for name, at in uppers.items() if at}),
    )


def _shared(one: bytes, other: bytes) -> int:
    """How many bytes two names have in common at their start."""
    differing = (n for n, both in enumerate(zip(one, other, strict=False)) if both[0] != both[1])
    return next(differing, min(len(one), len(other)))


def _differences(pairs: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> Iterator[int]:
    """Each lower position less the upper one before it, each upper one less its own lower one."""
    previous: tuple[int, ...] = ()
    for low, high in pairs:
        yield from _less(low, previous)
        yield from _less(high, low or previous)
        previous = high or low


def _less(at: tuple[int, ...], base: tuple[int, ...]) -> Iterator[int]:
    for part, other in zip_longest(at, base[: len(at)], fillvalue=0):
        yield part - other


def _summed(base: tuple[int, ...], length: int, reader: "_Reader") -> tuple[int, ...]:
    return tuple(
        reader.signed() + (base[number] if number < len(base) else 0) for number in range(length)
    )


def _zigzag(number: int) -> int:
    """Whole numbers as natural ones, small ones small."""
    return number << 1 if number >= 0 else (-number << 1) - 1


def _varints(numbers: Iterable[int]) -> bytes:
    """Natural numbers of any size, seven bits to a byte, the lowest first."""
    content = bytearray()
    for number in numbers:
        while number > 0x7F:
            content.append(number & 0x7F | 0x80)
            number >>= 7
        content.append(number)
    return bytes(content)


class _Reader:
    """Reads numbers and bytes one after the other."""

    def __init__(self, content: bytes):
        self._content = content
        self._place = 0

    @property
    def at_end(self) -> bool:
        return self._place == len(self._content)

    def number(self) -> int:
        result = shift = 0
        while True:
            byte = self._content[self._place]
            self._place += 1
            result |= (byte & 0x7F) << shift
            shift += 7
            if byte <= 0x7F:
                return result

    def signed(self) -> int:
        number = self.number()
        return -((number + 1) >> 1) if number & 1 else number >> 1

    def take(self, size: int) -> bytes:
        start, self._place = self._place, self._place + size
        return self._content[start : self._place]
