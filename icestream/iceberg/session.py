"""Catalogs and tables of Iceberg, opened through the JVM of a Spark session."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from icestream.errors import ConfigInvalid
from icestream.iceberg.catalog import Catalog, catalog_properties
from icestream.iceberg.handle import TableName
from icestream.iceberg.table import Table


def open_catalog(catalog: Mapping[str, str], spark: Any) -> Catalog:
    """The catalog that a map describes; `spark` is the session."""
    properties = catalog_properties(catalog)
    _make_folders(properties)
    return Catalog(spark._jvm, spark._jsparkSession.sessionState().newHadoopConf(), properties)


def open_table(catalog: Mapping[str, str], name: str, spark: Any) -> Table:
    """A table of a catalog, by its name with its namespace; it must exist."""
    *namespace, last = name.split(".")
    table = open_catalog(catalog, spark).load(TableName(namespace=tuple(namespace), name=last))
    if table is None:
        raise ConfigInvalid(
            f"there is no table {name}", hint="Name it with its namespace, as in `shop.orders`."
        )
    return table


def _make_folders(properties: Mapping[str, str]) -> None:
    """SQLite makes its file, but not the folder that it lies in."""
    uri = properties.get("uri", "")
    if uri.startswith("jdbc:sqlite:/"):
        Path(uri.removeprefix("jdbc:sqlite:")).parent.mkdir(parents=True, exist_ok=True)
