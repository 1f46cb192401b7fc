"""CockroachDB changefeeds as a source; `files` has those that write to cloud storage."""

from icestream.sources.cockroachdb.files import CockroachdbFiles, IndexTask
from icestream.sources.cockroachdb.options import CockroachdbOptions

__all__ = ["CockroachdbFiles", "CockroachdbOptions", "IndexTask"]
