"""How a table is made: its schema and properties, its partition terms and sort order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from icestream.errors import ConfigInvalid


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTable:
    """How a table is made when it does not exist yet."""

    schema_json: str
    partition_by: Sequence[str] = ()
    sort_by: Sequence[str] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    location: str | None = None


def partition_spec(jvm: Any, schema: Any, terms: Sequence[str]) -> Any:
    """The partition spec of Iceberg's library for terms such as `day(at)` and `bucket(16, id)`."""
    builder = jvm.org.apache.iceberg.PartitionSpec.builderFor(schema)
    for term in terms:
        transform, arguments = _call(term)
        method = getattr(builder, transform)
        builder = method(*arguments)
    return builder.build()


def sort_order(jvm: Any, schema: Any, terms: Sequence[str]) -> Any:
    """The sort order of Iceberg's library for columns, each with an optional `desc`."""
    builder = jvm.org.apache.iceberg.SortOrder.builderFor(schema)
    for term in terms:
        column, _, direction = term.strip().partition(" ")
        builder = builder.desc(column) if direction.lower() == "desc" else builder.asc(column)
    return builder.build()


_TRANSFORMS = {
    "identity": "identity",
    "bucket": "bucket",
    "truncate": "truncate",
    "year": "year",
    "month": "month",
    "day": "day",
    "hour": "hour",
    "void": "alwaysNull",
}


def _call(term: str) -> tuple[str, list[Any]]:
    """`day(created_at)`, `bucket(16, id)` or a bare column as a call of Iceberg's spec builder."""
    name, opening, rest = term.strip().partition("(")
    if not opening:
        return "identity", [term.strip()]
    parts = [part.strip() for part in rest.removesuffix(")").split(",")]
    transform = _TRANSFORMS.get(name.strip().lower().removesuffix("s"))
    if transform is None or not rest.endswith(")"):
        raise ConfigInvalid(
            f"cannot partition by {term!r}",
            hint="Use a column, or identity, bucket(n, column), truncate(n, column), year, month, "
            "day, hour or void of a column.",
        )
    if transform in ("bucket", "truncate"):
        if len(parts) != 2 or not parts[0].isdigit():
            raise ConfigInvalid(
                f"cannot partition by {term!r}", hint=f"Write {name}(16, column): a number first."
            )
        return transform, [parts[1], int(parts[0])]
    return transform, parts
