"""A reader of Iceberg tables that shares no code with Spark or icestream: ClickHouse, embedded."""

import contextlib
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import chdb


def rows(location: Path | str, snapshot_id: int | None = None) -> list[dict[str, Any]]:
    """The rows of a table on local disk, now or as of a snapshot; numbers come as decimals."""
    at = f" settings iceberg_snapshot_id = {snapshot_id}" if snapshot_id is not None else ""
    # ClickHouse reads files below its working directory only.
    with contextlib.chdir("/"):
        answer = str(chdb.query(f"select * from icebergLocal('{location}'){at}", "JSONEachRow"))
    return [json.loads(line, parse_float=Decimal) for line in answer.splitlines()]
