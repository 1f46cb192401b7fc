"""Compiling loops over bytes: what every module with kernels shares.

Kernels are compiled by numba at their first call and cached on disk, so only the first process
that ever calls them waits. A change of this module does not reach caches of kernels that use it:
remove them (`make clean`) after one.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])
Array = TypeVar("Array", bound=npt.NDArray[Any])
Bytes = npt.NDArray[np.uint8]
# Long runs of bytes are scanned and copied this many at a time.
WORD_BYTES = 8


def kernel(function: Function) -> Function:
    """Compile a function that Python calls, once per machine, to run without Python's lock."""
    return cast(Function, numba.njit(cache=True, nogil=True)(function))


def part(function: Function) -> Function:
    """Compile a function that only kernels call, into each of them."""
    return cast(Function, numba.njit(forceinline=True)(function))


def _typed_pointer(_: Any, array: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.make_array(signature.args[0])(context, builder, arguments[0]).data

    # Numba annotates most of what it exports, but not this.
    pointer = numba.types.CPointer(array.dtype)  # type: ignore[no-untyped-call]
    return pointer(array), generate


def _typed_load(number: Any, swapped: bool) -> Any:
    """A load of this type from any position, in the order of the network if `swapped`."""
    whole = numba.types.int64 if swapped else number

    def typed(_: Any, data: Any, position: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = builder.gep(arguments[0], [arguments[1]])
            narrow = context.get_value_type(number)
            value = builder.load(builder.bitcast(place, narrow.as_pointer()), align=1)
            if swapped:
                value = builder.sext(builder.bswap(value), context.get_value_type(whole))
            return value

        return whole(data, position), generate

    return typed


def _typed_store(_: Any, data: Any, position: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.gep(arguments[0], [arguments[1]])
        builder.store(arguments[2], builder.bitcast(place, arguments[2].type.as_pointer()), align=1)
        return context.get_dummy_value()

    return numba.types.void(data, position, word), generate


def _typed_address(_: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    bytes_there = numba.types.CPointer(numba.types.uint8)  # type: ignore[no-untyped-call]
    return bytes_there(address), generate


def _typed_copy(_: Any, target: Any, position: Any, origin: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.gep(arguments[0], [arguments[1]])
        source, size = arguments[2:]
        cgutils.raw_memcpy(builder, place, source, size, 1)  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    return numba.types.void(target, position, origin, count), generate


def _typed_call(_: Any, function: Any, first: Any, second: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(word, [word, word])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    word = numba.types.int64
    return word(word, word, word), generate


# Kernels hand the bare pointer of an array to their parts. Arrays would be reference counted at
# every call and searched for negative positions at every byte.
pointer = cast(Callable[[Array], Array], intrinsic(_typed_pointer))
# Signed numbers from any position on, which indexing cannot express: in the order of the network,
# or in the machine's own.
int16 = cast(Callable[[Bytes, int], int], intrinsic(_typed_load(numba.types.int16, True)))
int32 = cast(Callable[[Bytes, int], int], intrinsic(_typed_load(numba.types.int32, True)))
int64 = cast(Callable[[Bytes, int], int], intrinsic(_typed_load(numba.types.int64, True)))
load_word = cast(Callable[[Bytes, int], Any], intrinsic(_typed_load(numba.types.uint64, False)))
own_int32 = cast(Callable[[Bytes, int], int], intrinsic(_typed_load(numba.types.int32, False)))
own_int64 = cast(Callable[[Bytes, int], int], intrinsic(_typed_load(numba.types.int64, False)))
store_word = cast(Callable[[Bytes, int, Any], None], intrinsic(_typed_store))
# What lies at an address, for memory that is not an array's. Nothing checks the address.
at_address = cast(Callable[[int], Bytes], intrinsic(_typed_address))
# Copies bytes into a target, from a position of it on.
copy_bytes = cast(Callable[[Bytes, int, Bytes, int], None], intrinsic(_typed_copy))
# Calls the C function at an address with two addresses or numbers of 64 bits. The address comes as
# an argument because a kernel that knew it by itself could not be cached on disk.
call = cast(Callable[[int, int, int], int], intrinsic(_typed_call))
