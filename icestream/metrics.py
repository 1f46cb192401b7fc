"""Every metric icestream exposes, in Prometheus' form; seconds and bytes throughout.

Metrics are shown by the coordinator. A worker is another process, perhaps on another machine: what
it counts is kept, is handed over with its next report (`drained_counts`, `icestream.report`) and is
added up by the coordinator (`add`). Only counters can be added up. A gauge or histogram that a
worker touches is refused: its value would be lost.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import prometheus_client

from icestream.errors import check

log = logging.getLogger(__name__)

Counts = Mapping[tuple[str, tuple[str, ...]], float]
"""How much was counted, by the name of a counter and its labels."""

_counters: "dict[str, Counter]" = {}
# What this process has counted and not told yet; None on the coordinator, where nothing is kept.
_untold: dict[tuple[str, tuple[str, ...]], float] | None = None


def become_worker() -> None:
    """Keep what is counted from here on, in this process, for the coordinator."""
    global _untold
    _untold = {}


def drained_counts() -> Counts:
    """What this worker has counted since this was last asked; nothing on the coordinator."""
    global _untold
    counts = _untold or {}
    if counts:
        _untold = {}
    return counts


def add(counts: Counts) -> None:
    """Add what workers have counted to this process's counters."""
    for (name, labels), amount in counts.items():
        counter = _counters.get(name)
        if counter is None:
            log.warning("workers count %s, which the coordinator does not have", name)
            continue
        (counter.labels(*labels) if labels else counter).inc(amount)


class Counter(prometheus_client.Counter):
    """A counter that workers may use as well."""

    def __init__(self, name: str, *args: Any, **options: Any):
        super().__init__(name, *args, **options)
        self._called = name
        # One with labels makes others of its kind, one for each set of values.
        _counters.setdefault(name, self)

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        """Add to it, here or by way of a report."""
        if _untold is None:
            super().inc(amount, exemplar)
            return
        key = (self._called, self._labelvalues)
        _untold[key] = _untold.get(key, 0) + amount


class Gauge(prometheus_client.Gauge):
    """A gauge, which only the coordinator may use."""

    def set(self, value: float) -> None:
        """Show this value."""
        _refuse_on_worker(self)
        super().set(value)

    def inc(self, amount: float = 1) -> None:
        """Show a higher value."""
        _refuse_on_worker(self)
        super().inc(amount)

    def dec(self, amount: float = 1) -> None:
        """Show a lower value."""
        _refuse_on_worker(self)
        super().dec(amount)

    def set_function(self, f: Callable[[], float]) -> None:
        """Show what a function says, whenever somebody looks."""
        _refuse_on_worker(self)
        super().set_function(f)


class Histogram(prometheus_client.Histogram):
    """A histogram, which only the coordinator may use."""

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """Count the value among its like."""
        _refuse_on_worker(self)
        super().observe(amount, exemplar)


def _refuse_on_worker(metric: Gauge | Histogram) -> None:
    check(_untold is None, f"metric {metric._name} is not used on a worker: only counters are")


FILES_CLOSED = Counter(
    "iceberg_files_closed_total", "Files that workers closed.", ["table", "kind"]
)
EPOCH_FILES = Counter(
    "iceberg_epoch_files_total", "Files that epochs committed to a table.", ["table"]
)
COMMIT_LATENCY = Histogram(
    "iceberg_commit_latency_seconds", "Time from the first attempt to a durable commit.", ["table"]
)
COMMIT_CONFLICTS = Counter(
    "iceberg_commit_conflicts_total", "Commits that the catalog refused.", ["table"]
)
DUPLICATE_EPOCHS = Counter(
    "iceberg_duplicate_epochs_skipped_total",
    "Epochs that were found published before an attempt.",
    ["table"],
)
MANIFEST_BYTES = Counter(
    "iceberg_manifest_entries_bytes", "Bytes of file descriptions handed to Iceberg.", ["table"]
)
ROWS_READ = Counter("icestream_rows_read_total", "Changes read from the source.", ["pipeline"])
BYTES_READ = Counter("icestream_bytes_read_total", "Bytes read from the source.", ["pipeline"])
ROWS_WRITTEN = Counter(
    "icestream_rows_written_total", "Rows in the files that were committed.", ["table", "kind"]
)
BYTES_WRITTEN = Counter(
    "icestream_bytes_written_total", "Bytes of the files that were committed.", ["table", "kind"]
)
DOCUMENTS = Counter(
    "icestream_documents_total",
    "Operations on documents that were committed: indexed, deleted, superseded, dead_letter.",
    ["index", "operation"],
)
BULK_RETRIES = Counter(
    "icestream_bulk_retries_total", "Bulk requests that were sent again.", ["index"]
)
LAG_SECONDS = Gauge(
    "icestream_lag_seconds", "Age of the durable frontier against the source's.", ["pipeline"]
)
LAG_EPOCHS = Gauge(
    "icestream_lag_epochs",
    "Epochs that the source has named and that are not committed yet.",
    ["pipeline"],
)
SLOT_LAG_BYTES = Gauge(
    "icestream_slot_lag_bytes", "Log that a PostgreSQL server keeps for a slot.", ["slot"]
)
FRESHNESS_SECONDS = Histogram(
    "icestream_freshness_seconds",
    "Time from the commit of an epoch's oldest change at the source until the epoch is durable.",
    ["pipeline"],
    # Fine where commit intervals of some seconds lie.
    buckets=(0.5, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 11, 12, 15, 20, 30, 60, 120, 300, 900, 3600),
)
EPOCH_AGE_SECONDS = Gauge(
    "icestream_epoch_age_seconds", "Time since the last durable epoch.", ["pipeline"]
)
HEALTH = Gauge("icestream_health", "1 for the state a pipeline is in.", ["pipeline", "state"])
