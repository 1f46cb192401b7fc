"""Whose an index is: it says so itself, in its mapping's `_meta`.

`icestream` there names the pipeline and the source table that fill the index, and the identity of
that table, because another table may come to bear its name. An index is the pipeline's own when
its progress document names it; that is written before the first document is sent. Any other index
must be empty and nobody's, or be given by a person, who writes `adopt` into `_meta`.

A mapping has no compare-and-swap. An index that is created says its owner from the start, so of
two pipelines one is refused. Into an empty index that somebody else made both may come at once: the
one whose name is overwritten stops at its first commit.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from icestream.errors import ConfigInvalid, IcestreamError, ProgressLost

KEY = "icestream"
ADOPT = "adopt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who fills an index; `adopt` says that a person has given it with all that it holds."""

    pipeline: str
    table: str
    table_id: str = ""
    adopt: bool = False

    def to_json(self) -> dict[str, Any]:
        """The owner as `_meta` has it."""
        found = {"pipeline": self.pipeline, "table": self.table, "table_id": self.table_id}
        return {**found, ADOPT: True} if self.adopt else found

    def same(self, other: "Owner") -> bool:
        """Whether both name one pipeline and one table, as far as they know it."""
        ids = {self.table_id, other.table_id} - {""}
        return (self.pipeline, self.table) == (other.pipeline, other.table) and len(ids) < 2

    def __str__(self) -> str:
        which = f" ({self.table_id})" if self.table_id else ""
        return f"pipeline {self.pipeline}, table {self.table}{which}"


def owner_of(meta: Mapping[str, Any]) -> Owner | None:
    """Who fills the index with this `_meta`; None when it does not say."""
    found = meta.get(KEY)
    if not found:
        return None
    if not isinstance(found, dict):
        # Whatever it means, it is not ours.
        return Owner(pipeline="", table="")
    return Owner(
        pipeline=str(found.get("pipeline", "")),
        table=str(found.get("table", "")),
        table_id=str(found.get("table_id", "")),
        adopt=found.get(ADOPT) is True,
    )


def refuse_other(index: str, found: Owner | None, mine: Owner) -> None:
    """Raise when an index names another owner; one that names none may have lost the name."""
    if found is not None and not found.same(mine):
        raise ConfigInvalid(
            f"index {index} belongs to someone else",
            detail=f"Its `_meta` names {found}. Pipeline {mine.pipeline} has table {mine.table}"
            f"{' of another identity' if found.same(replace(mine, table_id='')) else ''} for it.",
            hint=_ways_out(index, mine),
        )


def stranger(index: str, count: int, found: Owner | None, mine: Owner) -> IcestreamError:
    """The error for documents that the pipeline's progress does not know of."""
    if found is None:
        return ConfigInvalid(
            f"index {index} holds documents that pipeline {mine.pipeline} has not brought",
            detail=f"There are {count}, and nothing says whose they are. Those that no row of "
            f"table {mine.table} has would stay for ever.",
            hint=_ways_out(index, mine),
        )
    return ProgressLost(
        f"index {index} holds documents, and the progress of pipeline {mine.pipeline} knows "
        "nothing of them",
        detail=f"There are {count}, and its `_meta` names {found}. The progress document was "
        "deleted, or is looked for in another index than before.",
        hint=f"Restore the progress document. Or load table {mine.table} anew: delete the index, "
        "or name another one with `index`.",
    )


def _ways_out(index: str, mine: Owner) -> str:
    given = Owner(pipeline=mine.pipeline, table=mine.table, adopt=True).to_json()
    given.pop("table_id")
    body = json.dumps({"_meta": {KEY: given}})
    return (
        f"Name another index with `index`, or delete this one. To give it to the pipeline with all "
        f"that it holds: `PUT /{index}/_mapping` with the body {body}"
    )
