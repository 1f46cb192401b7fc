"""What is reported of a file that a worker closed: enough to commit the file without opening it.

The coordinator imports this module, and not the one that writes files: that takes seconds.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from icestream.errors import check
from icestream.report import Report

DATA = "data"
EQUALITY_DELETES = "equality-deletes"
POSITION_DELETES = "position-deletes"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileClosed:
    """One file that a worker closed: all that its commit needs, and a hash over it."""

    table: str
    epoch: int
    worker: str
    schema_id: int
    spec_id: int
    path: str
    kind: str
    record_count: int
    size_bytes: int
    partition: Mapping[str, Any]
    equality_ids: Sequence[int] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    split_offsets: Sequence[int] = ()
    sort_order_id: int = 0
    attempt: str = ""
    sha256: str = ""

    def digest(self) -> str:
        """A hash over everything that is reported but itself."""
        data = {name: getattr(self, name) for name in self.__slots__ if name != "sha256"}
        text = json.dumps(data, sort_keys=True, separators=(",", ":"), default=list)
        return hashlib.sha256(text.encode()).hexdigest()

    def report(self) -> Report:
        """The report that a worker sends of it, under a hash over everything."""
        sealed = replace(self, sha256=self.digest())
        return Report(
            table=self.table,
            kind=self.kind,
            rows=self.record_count,
            size_bytes=self.size_bytes,
            payload=sealed,
        )

    @staticmethod
    def of(report: Report) -> "FileClosed":
        """The file of a report; refuses one that was altered on the way."""
        file = report.payload
        check(isinstance(file, FileClosed), "an Iceberg table is sent reports of its files")
        assert isinstance(file, FileClosed)
        check(file.report() == report, f"the report of {file.path} arrives as it was sent")
        return file

    def content_json(self) -> str:
        """The file in the JSON form that Iceberg's library reads."""
        content = {
            "spec-id": self.spec_id,
            "content": self.kind,
            "file-path": self.path,
            "file-format": "parquet",
            "partition": self.partition,
            "file-size-in-bytes": self.size_bytes,
            "record-count": self.record_count,
            "split-offsets": list(self.split_offsets),
            **self.metrics,
        }
        if self.kind == EQUALITY_DELETES:
            content["equality-ids"] = list(self.equality_ids)
        if self.sort_order_id and self.kind == DATA:
            content["sort-order-id"] = self.sort_order_id
        return json.dumps(content)
