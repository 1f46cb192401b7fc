"""Which type holds every value of another one, unchanged.

An example: a column of type `decimal(10,2)` has eight digits before the point. A source that comes
to send `int`, whose numbers have up to ten digits, needs `decimal(12,2)`; one that comes to send
`double` needs a type that Iceberg lets no decimal become, and is refused.
"""

from pyiceberg.types import (
    BinaryType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IcebergType,
    IntegerType,
    LongType,
    StringType,
    TimestampNanoType,
    TimestampType,
    TimestamptzNanoType,
    TimestamptzType,
)

# The digits that any whole number of the type has at most.
_WHOLE_DIGITS: dict[type, int] = {IntegerType: 10, LongType: 19}
_DECIMAL_DIGITS_MAX = 38
# Types of a table's column that hold every value of another type, beside the type itself.
_HELD_BY: dict[type, tuple[type, ...]] = {
    IntegerType: (LongType, DoubleType),
    FloatType: (DoubleType,),
    FixedType: (BinaryType,),
    TimestampType: (TimestampNanoType,),
    TimestamptzType: (TimestamptzNanoType,),
}


def widened(have: IcebergType, want: IcebergType) -> IcebergType | None:
    """The narrowest type that Iceberg lets a column become and that holds the source's values."""
    promotions: list[IcebergType] = [have]
    if isinstance(have, IntegerType):
        promotions.append(LongType())
    if isinstance(have, FloatType):
        promotions.append(DoubleType())
    whole = _whole_digits(want)
    if isinstance(have, DecimalType) and whole is not None:
        digits = have.scale + max(have.precision - have.scale, whole)
        if digits <= _DECIMAL_DIGITS_MAX:
            promotions.append(DecimalType(digits, have.scale))
    return next((kind for kind in promotions if _holds(kind, want)), None)


def _holds(kind: IcebergType, want: IcebergType) -> bool:
    """Whether every value of a source's type has its place in a type, unchanged."""
    if kind == want or isinstance(kind, StringType):
        return True
    if isinstance(kind, DecimalType):
        scale = want.scale if isinstance(want, DecimalType) else 0
        whole = _whole_digits(want)
        return whole is not None and whole <= kind.precision - kind.scale and scale <= kind.scale
    return isinstance(kind, _HELD_BY.get(type(want), ()))


def _whole_digits(kind: IcebergType) -> int | None:
    """How many digits before the point a number may need; None for what is not exact."""
    if isinstance(kind, DecimalType):
        return int(kind.precision - kind.scale)
    return _WHOLE_DIGITS.get(type(kind))
