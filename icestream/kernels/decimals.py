"""Compiled parts for decimals of 128 bits, each a low and a high word in two's complement."""

from typing import Any

import numpy as np

from icestream.kernels.compiling import part
from icestream.kernels.memory import Bytes

DECIMAL_DIGITS_MAX = 38
# For each precision the least number that has too many digits, high and low word.
DECIMAL_LIMITS = np.array(
    [divmod(10**digits, 2**64) for digits in range(DECIMAL_DIGITS_MAX + 1)], dtype=np.uint64
)

# Arithmetic on unsigned words: numba makes a float of an unsigned and a signed number.
_NONE, _ONE, _EIGHT = np.uint64(0), np.uint64(1), np.uint64(8)
_TOP, _LAST_SHIFT = np.uint64(56), np.uint64(63)


@part
def big_endian(data: Bytes, at: int, end: int) -> tuple[Any, Any, Any]:
    """A big-endian number in two's complement as low and high word, and whether these hold it."""
    sign = _NONE - _ONE if end > at and data[at] & 0x80 else _NONE
    low = high = sign
    fits = True
    while at < end:
        # What is shifted out at the top must say no more than the sign.
        fits = fits and (high >> _TOP) == (sign >> _TOP)
        high = (high << _EIGHT) | (low >> _TOP)
        low = (low << _EIGHT) | np.uint64(data[at])
        at += 1
    return low, high, fits and (high >> _LAST_SHIFT) == (sign & _ONE)


@part
def negated(low: Any, high: Any) -> tuple[Any, Any]:
    """The number with the other sign."""
    low = ~low + _ONE
    return low, ~high + (_ONE if low == _NONE else _NONE)


@part
def below(low: Any, high: Any, precision: int) -> Any:
    """Whether a number that is not negative has at most so many digits."""
    limit = DECIMAL_LIMITS[precision, 0]
    return high < limit or (high == limit and low < DECIMAL_LIMITS[precision, 1])


@part
def within(low: Any, high: Any, precision: int) -> Any:
    """Whether a number of either sign has at most so many digits."""
    if high >> _LAST_SHIFT:
        low, high = negated(low, high)
    return below(low, high, precision)
