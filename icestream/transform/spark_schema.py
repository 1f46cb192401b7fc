"""Types of columns: as Iceberg has them, as Spark's SQL sees them, as Arrow brings them there."""

import pyarrow as pa
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampNanoType,
    TimestampType,
    TimestamptzNanoType,
    TimestamptzType,
    TimeType,
    UnknownType,
    UUIDType,
)
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from icestream.errors import ConfigInvalid

_SPARK_TYPES: dict[type, T.DataType] = {
    BooleanType: T.BooleanType(),
    IntegerType: T.IntegerType(),
    LongType: T.LongType(),
    FloatType: T.FloatType(),
    DoubleType: T.DoubleType(),
    DateType: T.DateType(),
    TimestampType: T.TimestampNTZType(),
    TimestamptzType: T.TimestampType(),
    StringType: T.StringType(),
    BinaryType: T.BinaryType(),
    FixedType: T.BinaryType(),
    # Spark has none of these; as text they can be compared, and go back unchanged.
    UUIDType: T.StringType(),
    TimeType: T.StringType(),
    TimestampNanoType: T.StringType(),
    TimestamptzNanoType: T.StringType(),
}
_ICEBERG_TYPES: dict[type, IcebergType] = {
    T.BooleanType: BooleanType(),
    T.ByteType: IntegerType(),
    T.ShortType: IntegerType(),
    T.IntegerType: IntegerType(),
    T.LongType: LongType(),
    T.FloatType: FloatType(),
    T.DoubleType: DoubleType(),
    T.DateType: DateType(),
    T.TimestampNTZType: TimestampType(),
    T.TimestampType: TimestamptzType(),
    T.StringType: StringType(),
    T.BinaryType: BinaryType(),
}


def in_arrow(schema: T.StructType) -> pa.Schema:
    """The Arrow types in which Spark takes rows."""
    return pa.schema([(field.name, to_arrow_type(field.dataType)) for field in schema.fields])


def spark_type(kind: IcebergType) -> T.DataType:
    """The type that a column has in Spark."""
    if isinstance(kind, DecimalType):
        return T.DecimalType(kind.precision, kind.scale)
    if isinstance(kind, StructType):
        return T.StructType([T.StructField(f.name, spark_type(f.field_type)) for f in kind.fields])
    if isinstance(kind, ListType):
        return T.ArrayType(spark_type(kind.element_type))
    if isinstance(kind, MapType):
        return T.MapType(spark_type(kind.key_type), spark_type(kind.value_type))
    if isinstance(kind, UnknownType):
        # No select may read it, see `Selects.derived`; it only has to be there.
        return T.VariantType()
    if type(kind) not in _SPARK_TYPES:
        raise ConfigInvalid(
            f"columns of type {kind} cannot be transformed",
            hint="Declare another type for the column with `columns`, or leave out the transform.",
        )
    return _SPARK_TYPES[type(kind)]


def iceberg_type(field: T.StructField, table: str) -> IcebergType:
    """The type of a column in a table that is made for the result of an expression."""
    found = _iceberg(field.dataType)
    if found is None:
        raise ConfigInvalid(
            f"column {field.name} of the transform of table {table} has a type no table takes",
            detail=f"It is {field.dataType.simpleString()}.",
            hint=f"Cast it, as in `cast(... as string) as {field.name}`.",
        )
    return found


def _iceberg(kind: T.DataType) -> IcebergType | None:
    # Fields are numbered when the table is made.
    if isinstance(kind, T.DecimalType):
        return DecimalType(kind.precision, kind.scale)
    if isinstance(kind, T.StructType):
        inner = [(field.name, _iceberg(field.dataType)) for field in kind.fields]
        fields = [
            NestedField(field_id=number, name=name, field_type=each, required=False)
            for number, (name, each) in enumerate(inner, start=1)
            if each is not None
        ]
        return StructType(*fields) if len(fields) == len(inner) else None
    if isinstance(kind, T.ArrayType):
        element = _iceberg(kind.elementType)
        return element and ListType(element_id=1, element_type=element, element_required=False)
    if isinstance(kind, T.MapType):
        key, value = _iceberg(kind.keyType), _iceberg(kind.valueType)
        if key is None or value is None:
            return None
        return MapType(key_id=1, key_type=key, value_id=2, value_type=value, value_required=False)
    if isinstance(kind, T.StringType):
        return StringType()
    return _ICEBERG_TYPES.get(type(kind))
