"""Types and schemas as others write them: a configuration, Iceberg's library, Arrow."""

import json

import numpy as np
import pyarrow as pa
from pyiceberg.exceptions import ValidationError
from pyiceberg.schema import Schema
from pyiceberg.types import IcebergType, NestedField

from icestream.errors import ConfigInvalid

# Days before 1970-01-01 of the first day of the year 0.
_FIRST_OF_YEAR_0 = -719_528


def calendar_day(number: int) -> tuple[int, int, int]:
    """Year, month and day of a day counted from 1970-01-01; the year before 1 is 0.

    Tables hold days of many more years than Python's own dates do.
    """
    year, month, day = str(np.datetime64(number, "D")).removeprefix("-").split("-")
    return int(year) if number >= _FIRST_OF_YEAR_0 else -int(year), int(month), int(day)


def parse_type(text: str) -> IcebergType:
    """The Iceberg type that a configuration names, such as `decimal(20,4)` or `timestamptz`."""
    try:
        field = {"id": 1, "name": "x", "type": text.strip().lower(), "required": False}
        return NestedField.model_validate(field).field_type
    except (ValueError, ValidationError) as error:
        raise ConfigInvalid(
            f"there is no type {text!r}",
            hint="Use Iceberg's names: boolean, int, long, float, double, decimal(p,s), date, "
            "time, timestamp, timestamptz, string, uuid, binary.",
        ) from error


def arrow_schema(schema: Schema) -> pa.Schema:
    """The Arrow schema that the table's columns are written with, field ids included."""
    # Imports pandas, which takes seconds: a command that touches no rows does without.
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    return schema_to_pyarrow(schema)


def schema_from_json(text: str) -> Schema:
    """The schema as Iceberg's library prints it."""
    return Schema.model_validate(json.loads(text))
