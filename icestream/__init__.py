"""icestream: change data capture into and out of Apache Iceberg, exactly once."""
