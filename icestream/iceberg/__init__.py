"""Everything that knows Iceberg: its catalogs, files and snapshots, by Iceberg's own libraries."""
