"""Every metric icestream exposes, in Prometheus' form; seconds and bytes throughout."""

from prometheus_client import Counter, Gauge, Histogram

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
