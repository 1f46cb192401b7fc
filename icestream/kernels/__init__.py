"""Compiled loops over bytes: the ground rules, and what all modules with kernels share.

A `kernel` is a function that Python calls, a `part` one that only kernels call. Both are compiled
by numba. Compiled code is kept on disk: only the first process that ever calls a kernel waits.

Rules for whoever writes one:

- A kernel answers with codes and counts: exceptions of compiled code carry no facts.
- It takes pointers of its arguments alone (`pointer`). An array that it makes itself is freed after
  the last line that names the array, whatever pointers to it there are.
- A constant that it uses is written in its own module or in one that its module imports directly:
  the compiled code on disk is found by the text of these (`compiling`).
- It reads and writes only inside what it was given. With `ICESTREAM_CHECKED_KERNELS=1` every load
  and store is held against the bounds of its array, and `Broken` names the kernel that left them.
  `make test` runs the property tests of all kernels in that mode; see decision 034.

| module | what it has |
|---|---|
| `compiling` | how functions are compiled and kept |
| `memory` | how they read and write |
| `texts` | bytes copied, UTF-8 checked, hexadecimal digits |
| `decimals` | numbers of 128 bits |
| `arrays` | Arrow's arrays as memory, and back |
"""

from icestream.kernels.compiling import CHECKED, kernel, part
from icestream.kernels.memory import (
    WORD_BYTES,
    Bytes,
    at_address,
    call,
    copy_bytes,
    int16,
    int32,
    int64,
    load_word,
    own_int32,
    own_int64,
    pointer,
    store_word,
)

__all__ = [
    "CHECKED",
    "WORD_BYTES",
    "Bytes",
    "at_address",
    "call",
    "copy_bytes",
    "int16",
    "int32",
    "int64",
    "kernel",
    "load_word",
    "own_int32",
    "own_int64",
    "part",
    "pointer",
    "store_word",
]
