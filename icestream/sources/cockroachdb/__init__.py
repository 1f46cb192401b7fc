"""CockroachDB changefeeds: every resolved timestamp becomes a snapshot of each table it changes.

`files` reads what a changefeed writes to cloud storage, `topics` what it writes to Kafka; `feed`
has what both have in common, `rows` what their messages mean, `options` what the pipeline file
says.
"""

from icestream.sources.cockroachdb.options import CockroachdbOptions, TopicsOptions

__all__ = ["CockroachdbOptions", "TopicsOptions"]
