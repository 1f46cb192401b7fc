"""One table as Iceberg's library gives it: the object of Java, and what every room reads of it.

`fresh_metadata` asks the catalog. Everything else is as the table was seen last.
"""

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from icestream.iceberg.gateway import (
    NO_FILE,
    JavaError,
    as_py4j,
    as_unavailable,
    class_names,
    gone,
    reason,
    replaced,
)

# How Iceberg's library refuses metadata of another table under the same name.
_UUID_DIFFERS = "UUID does not match"
ANCESTORS_MAX = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TableName:
    """A table's name in its catalog, part by part: any part may hold dots, blanks or quotes."""

    namespace: tuple[str, ...]
    name: str

    def __str__(self) -> str:
        return ".".join((*self.namespace, self.name))


class TableHandle:
    """A table's object of Java, with the gateway to it, for the modules of this package."""

    def __init__(self, jvm: Any, name: TableName, java: Any):
        self.jvm = jvm
        self.name = name
        self.java = java

    def fresh_metadata(self) -> Any:
        """The metadata as they are now; raises `ProgressLost` when this table is no more."""
        try:
            metadata = self.java.operations().refresh()
        except JavaError as error:
            if "NoSuchTableException" in class_names(error):
                raise gone(f"table {self.name}") from error
            if _UUID_DIFFERS in reason(error):
                raise replaced(self.name) from error
            raise
        if metadata is None:
            raise gone(f"table {self.name}")
        return metadata

    def readable(self) -> AbstractContextManager[None]:
        """What the library knows already, it may ask the catalog again after a failed commit."""
        return as_unavailable(f"could not read the metadata of table {self.name}")

    def properties_of(self, owner: Any) -> dict[str, str]:
        """The properties of a table or its metadata in one call: there may be many."""
        jackson = self.jvm.org.apache.iceberg.shaded.com.fasterxml.jackson
        text = jackson.databind.ObjectMapper().writeValueAsString(owner.properties())
        return dict(json.loads(text))

    def schema_json(self) -> str:
        """The current schema as Iceberg prints it."""
        with self.readable():
            return str(self.jvm.org.apache.iceberg.SchemaParser.toJson(self.java.schema()))

    def read_side_file(self, path: str) -> bytes:
        """The content of a file beside the metadata; raises `FileNotFoundError` if it is gone."""
        try:
            with as_py4j():
                stream = self.java.io().newInputFile(path).newStream()
                try:
                    return bytes(stream.readAllBytes())
                finally:
                    stream.close()
        except JavaError as error:
            if class_names(error) & set(NO_FILE):
                raise FileNotFoundError(path) from error
            raise


def latest(metadata: Any, branch: str) -> Any:
    """The branch's head; a branch that does not exist yet starts at the table's current state."""
    reference = metadata.ref(branch)
    return metadata.snapshot(reference.snapshotId()) if reference else metadata.currentSnapshot()
