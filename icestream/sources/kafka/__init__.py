"""Kafka topics become Iceberg tables."""
