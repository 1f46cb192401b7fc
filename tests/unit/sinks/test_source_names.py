"""The writer under Iceberg's name mapping: it is read by the source's names, writes the table's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType, StructType

from icestream.change import AT, BEFORE, OP, SEQ, Op
from icestream.iceberg.closed import EQUALITY_DELETES, FileClosed
from icestream.schema import arrow_schema, schema_from_json, source_schema
from icestream.sinks.iceberg.writer import IcebergWriter
from tests.property.tables import GLOBAL_SPEC_ID, LocalTable, partitions

SCHEMA = Schema(
    NestedField(field_id=1, name="customer_id", field_type=LongType(), required=True),
    NestedField(field_id=2, name="region", field_type=StringType(), required=False),
    NestedField(
        field_id=3,
        name="home",
        field_type=StructType(
            NestedField(field_id=4, name="town", field_type=StringType(), required=False)
        ),
        required=False,
    ),
    identifier_field_ids=[1],
)
MAPPING = (
    '[{"field-id": 1, "names": ["cust_id"]}, {"field-id": 2, "names": ["area"]}, '
    '{"field-id": 3, "names": ["address"], "fields": [{"field-id": 4, "names": ["city"]}]}]'
)


def mapped_writer(table: LocalTable) -> IcebergWriter:
    writer = table.writer()
    seen = source_schema(SCHEMA, MAPPING).model_dump_json()
    return replace(writer, targets={"t": replace(writer.targets["t"], source_schema_json=seen)})


def changes(writer: IcebergWriter, *rows: dict[str, Any]) -> pa.Table:
    fields = arrow_schema(schema_from_json(writer.schema_json("t")))
    before = [{"area": row.pop("was")} if "was" in row else None for row in rows]
    return pa.table(
        {
            OP: pa.array([int(Op.UPSERT)] * len(rows), pa.int8()),
            AT: pa.array(range(len(rows)), pa.int64()),
            SEQ: pa.array([0] * len(rows), pa.int64()),
            BEFORE: pa.array(before, pa.struct([("area", pa.string())])),
            **{f.name: pa.array([row.get(f.name) for row in rows], f.type) for f in fields},
        }
    )


def test_rows_keys_and_before_images_get_the_tables_names(tmp_path: Path) -> None:
    """I11, I9: a delete is still bound to the partition that the before-image tells."""
    terms = [("region", IdentityTransform())]
    table = LocalTable(folder=tmp_path, schema=SCHEMA, key=["customer_id"], terms=terms)
    writer = mapped_writer(table)
    names = [field.name for field in schema_from_json(writer.schema_json("t")).fields]
    assert names == ["cust_id", "area", "address"]
    assert list(writer.key("t")) == ["cust_id"]
    rows = changes(
        writer,
        {"cust_id": 1, "area": "eu", "address": {"city": "rome"}, "was": "us"},
        {"cust_id": 2, "area": "us", "address": None},
    )
    files = [FileClosed.of(report) for report in writer.write("t", "00000", rows)]
    table.commits.append(files)
    found = sorted(table.rows(), key=lambda row: row["customer_id"])
    assert found == [
        {"customer_id": 1, "region": "eu", "home": {"town": "rome"}},
        {"customer_id": 2, "region": "us", "home": None},
    ]
    deletes = [file for file in files if file.kind == EQUALITY_DELETES]
    assert [list(file.equality_ids) for file in deletes] == [[1], [1]]
    assert {file.spec_id for file in deletes} == {1, GLOBAL_SPEC_ID}
    assert "us" in partitions(files, EQUALITY_DELETES)


def test_without_a_mapping_changes_are_taken_as_they_are(tmp_path: Path) -> None:
    """I11: nothing changes and nothing is copied."""
    table = LocalTable(folder=tmp_path, schema=SCHEMA, key=["customer_id"])
    writer = table.writer()
    assert writer.schema_json("t") == SCHEMA.model_dump_json()
    assert list(writer.key("t")) == ["customer_id"]
