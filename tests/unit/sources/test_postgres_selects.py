"""Changes of PostgreSQL that lack what the select of their table reads, or what it does not."""

import struct
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.types import LongType, StringType

from icestream.errors import SchemaRejected
from icestream.schema import Column, Reads, TableShape, new_schema
from icestream.sources import ValuesNeeded
from icestream.sources.postgres.changes import Relation, RelationColumn, SpoolPart, WalSplit
from icestream.sources.postgres.values.kinds import Codec, PgType

SCHEMA = new_schema(
    TableShape(
        columns=[
            Column(name="id", type=LongType(), required=True),
            Column(name="region", type=StringType()),
            Column(name="doc", type=StringType()),
        ],
        key=["id"],
    )
).model_dump_json()
KINDS = {"id": (20, Codec.INT8), "region": (25, Codec.TEXT), "doc": (25, Codec.TEXT)}


def split_of(
    folder: Path, *values: str | None, columns: str = "id region doc", to_come: str = ""
) -> WalSplit:
    """A spooled update of one row; what is None was not sent."""
    cells = [
        b"u" if value is None else b"t" + struct.pack(">i", len(value)) + value.encode()
        for value in values
    ]
    message = b"U" + struct.pack(">I", 1) + b"N" + struct.pack(">h", len(cells)) + b"".join(cells)
    batch = pa.record_batch(
        [
            pa.array([0], pa.int32()),
            pa.array([ord("U")], pa.uint8()),
            pa.array([5]),
            pa.array([0]),
            pa.array([message], pa.large_binary()),
        ],
        names=["slot", "kind", "at", "seq", "message"],
    )
    path = folder / "spool"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    described = [
        RelationColumn(
            name=name,
            type=PgType(oid=KINDS[name][0], name=name, codec=KINDS[name][1]),
            typmod=-1,
        )
        for name in columns.split()
    ]
    return WalSplit(
        table="public.t",
        parts=[SpoolPart(path=str(path), batches=[0])],
        relations={
            0: Relation(
                table="public.t",
                oid=1,
                columns=described,
                key=[0],
                to_come=frozenset(to_come.split()),
            )
        },
        lower=0,
        upper=10,
        size_bytes=1,
    )


def reads(*names: str) -> Reads:
    """A select that names these columns."""
    return Reads(columns=frozenset(names), named=frozenset(names))


def test_a_value_that_no_select_reads_is_not_looked_up(tmp_path: Path):
    """E11, P8, Mend h3: the destination is not asked for it, and the change goes on without it."""
    split = split_of(tmp_path, "1", "eu", None)
    with pytest.raises(ValuesNeeded):
        list(split.read(SCHEMA, ["id"]))
    with pytest.raises(ValuesNeeded):
        list(split.read(SCHEMA, ["id"], reads("id", "doc")))
    [changes] = split.read(SCHEMA, ["id"], reads("id", "region"))
    assert changes.column("region").to_pylist() == ["eu"]
    assert "doc" not in changes.column_names


def test_a_version_of_a_table_without_a_named_column_is_refused_unless_it_is_older(tmp_path: Path):
    """E11, Mend h2: columns that were added later are null in changes from before them."""
    split = split_of(tmp_path, "1", "x", columns="id doc")
    assert list(split.read(SCHEMA, ["id"], reads("id", "doc")))
    with pytest.raises(SchemaRejected, match="reads column region, which"):
        list(split.read(SCHEMA, ["id"], reads("id", "region")))
    older = split_of(tmp_path, "1", "x", columns="id doc", to_come="region")
    assert list(older.read(SCHEMA, ["id"], reads("id", "region")))
