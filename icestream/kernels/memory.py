"""How kernels read and write memory: bare pointers, or in checked mode pointers with bounds.

Kernels hand the pointer of an array to their parts. Arrays would be reference counted at every call
and searched for negative positions at every byte. In checked mode a pointer knows how much memory
it leads to, and each access is held against that; the kernels' own code is the same.
"""

import operator
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic, models, overload, register_model

from icestream.kernels.compiling import CHECKED

Array = TypeVar("Array", bound=npt.NDArray[Any])
Bytes = npt.NDArray[np.uint8]
# Long runs of bytes are scanned and copied this many at a time.
WORD_BYTES = 8


class _Bounded(numba.types.Type):
    """A pointer that knows how many values it leads to; the pointers of checked mode."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        super().__init__(name=f"Bounded({dtype})")


class _BoundedModel(models.StructModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        members = [("data", _bare(kind.dtype)), ("size", numba.types.int64)]
        super().__init__(manager, kind, members)  # type: ignore[no-untyped-call]


def _bare(dtype: Any) -> Any:
    # Numba annotates most of what it exports, but not this.
    return numba.types.CPointer(dtype)  # type: ignore[no-untyped-call]


def _struct(kind: Any) -> Any:
    return cgutils.create_struct_proxy(kind)  # type: ignore[no-untyped-call]


def _pointer_type(dtype: Any) -> Any:
    return _Bounded(dtype) if CHECKED else _bare(dtype)


def _made(context: Any, builder: Any, kind: Any, data: Any, size: Any) -> Any:
    """A pointer of this type to so many values."""
    if not CHECKED:
        return data
    pair = _struct(kind)(context, builder)
    pair.data, pair.size = data, size
    return pair._getvalue()


def _refuse(context: Any, builder: Any, condition: Any, message: str) -> None:
    with builder.if_then(condition, likely=False):
        context.call_conv.return_user_exc(builder, IndexError, (message,))


def _place(context: Any, builder: Any, kind: Any, value: Any, span: tuple[Any, Any]) -> Any:
    """Where a position of a pointer lies, from which on so many values are read or written."""
    position, count = span
    if not isinstance(kind, _Bounded):
        return builder.gep(value, [position])
    pair = _struct(kind)(context, builder, value=value)
    none, long = ir.Constant(ir.IntType(64), 0), ir.IntType(64)
    position = position if position.type == long else builder.sext(position, long)
    count = count if isinstance(count, ir.Value) else ir.Constant(long, count)
    before = builder.icmp_signed("<", position, none)
    _refuse(context, builder, before, "a position before the first byte")
    _refuse(context, builder, builder.icmp_signed("<", count, none), "a negative size")
    left = builder.sub(pair.size, position)
    _refuse(context, builder, builder.icmp_signed(">", count, left), "a position beyond the end")
    return builder.gep(pair.data, [position])


def _typed_pointer(_: Any, array: Any) -> Any:
    if array.layout != "C":
        raise TypingError("a pointer leads through memory without gaps")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found = context.make_array(signature.args[0])(context, builder, arguments[0])
        if CHECKED:
            # What Python handed over outlives the call. What the kernel made does not.
            made = builder.and_(
                cgutils.is_not_null(builder, found.meminfo),  # type: ignore[no-untyped-call]
                cgutils.is_null(builder, found.parent),  # type: ignore[no-untyped-call]
            )
            _refuse(context, builder, made, "a pointer to an array that the kernel made itself")
        return _made(context, builder, signature.return_type, found.data, found.nitems)

    return _pointer_type(array.dtype)(array), generate


def _typed_load(number: Any, swapped: bool) -> Any:
    """A load of this type from any position, in the order of the network if `swapped`."""
    whole = numba.types.int64 if swapped else number

    def typed(_: Any, data: Any, position: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            narrow = context.get_value_type(number)
            span = arguments[1], number.bitwidth // 8
            place = _place(context, builder, signature.args[0], arguments[0], span)
            value = builder.load(builder.bitcast(place, narrow.as_pointer()), align=1)
            if swapped:
                value = builder.sext(builder.bswap(value), context.get_value_type(whole))
            return value

        return whole(data, position), generate

    return typed


def _typed_store(_: Any, data: Any, position: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        span = arguments[1], signature.args[2].bitwidth // 8
        place = _place(context, builder, signature.args[0], arguments[0], span)
        builder.store(arguments[2], builder.bitcast(place, arguments[2].type.as_pointer()), align=1)
        return context.get_dummy_value()

    return numba.types.void(data, position, word), generate


def _typed_address(_: Any, address: Any, size: Any) -> Any:
    kind = _pointer_type(numba.types.uint8)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bare = context.get_value_type(_bare(numba.types.uint8))
        data = builder.inttoptr(arguments[0], bare)
        count = context.cast(builder, arguments[1], signature.args[1], numba.types.int64)
        return _made(context, builder, kind, data, count)

    return kind(address, size), generate


def _typed_copy(_: Any, target: Any, position: Any, origin: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place, size = arguments[1], arguments[3]
        whole, begin = signature.args[0], ir.Constant(ir.IntType(64), 0)
        to = _place(context, builder, whole, arguments[0], (place, size))
        source = _place(context, builder, signature.args[2], arguments[2], (begin, size))
        cgutils.raw_memcpy(builder, to, source, size, 1)  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    return numba.types.void(target, position, origin, count), generate


def _typed_call(_: Any, function: Any, first: Any, second: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(word, [word, word])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    word = numba.types.int64
    return word(word, word, word), generate


def _typed_get(_: Any, data: Any, position: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        number = context.cast(builder, arguments[1], signature.args[1], numba.types.int64)
        place = _place(context, builder, kind, arguments[0], (number, 1))
        return context.unpack_value(builder, kind.dtype, place)

    return data.dtype(data, position), generate


def _typed_set(_: Any, data: Any, position: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        number = context.cast(builder, arguments[1], signature.args[1], numba.types.int64)
        place = _place(context, builder, kind, arguments[0], (number, 1))
        stored = context.cast(builder, arguments[2], signature.args[2], kind.dtype)
        context.pack_value(builder, kind.dtype, stored, place)
        return context.get_dummy_value()

    return numba.types.void(data, position, value), generate


def _index_bounded_pointers() -> None:
    """Let `data[position]` mean for pointers with bounds what it means for bare ones."""
    register_model(_Bounded)(_BoundedModel)
    get: Any = intrinsic(_typed_get)
    put: Any = intrinsic(_typed_set)

    @overload(operator.getitem, strict=False)
    def _(data: Any, position: Any) -> Any:
        if isinstance(data, _Bounded):
            return lambda data, position: get(data, position)
        return None

    @overload(operator.setitem, strict=False)
    def _(data: Any, position: Any, value: Any) -> Any:
        if isinstance(data, _Bounded):
            return lambda data, position, value: put(data, position, value)
        return None


if CHECKED:
    _index_bounded_pointers()

# The pointer of an array that was given to the kernel.
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
# So many bytes at an address, for memory that is not an array's. Nothing checks the address.
at_address = cast(Callable[[int, int], Bytes], intrinsic(_typed_address))
# Copies bytes into a target, from a position of it on.
copy_bytes = cast(Callable[[Bytes, int, Bytes, int], None], intrinsic(_typed_copy))
# Calls the C function at an address with two addresses or numbers of 64 bits. The address comes as
# an argument because a kernel that knew it by itself could not be cached on disk.
call = cast(Callable[[int, int, int], int], intrinsic(_typed_call))
