"""Which tables a frontier speaks of, so that one that was left out for a while is noticed.

A resolved timestamp R is one for all tables of a folder. Whoever takes a table out of `tables` and
puts it back later finds R moved on, and nothing else tells that the table was not read meanwhile:
it looks like one that had no changes. So the frontier remembers, beside R, what `tables` said:
`tables: (wall, logical, name, name ...)`, each name as a number. Without names all were taken.
"""

import hashlib
from collections.abc import Sequence

from icestream.frontier import MINIMUM, Frontier, Position

TAKEN = "tables"


def names_of(topic: str) -> tuple[str, str]:
    """The names that `tables` may call a table by: in full, and by the last part."""
    return topic, topic.rsplit(".", 1)[-1]


def taken(at: Position, tables: Sequence[str], lower: Frontier) -> Frontier:
    """What a frontier at a position has to say of the tables; nothing while all were taken."""
    if not tables and lower[TAKEN] == MINIMUM:
        return Frontier()
    return Frontier({TAKEN: (*at, *sorted({_number_of(name) for name in tables}))})


def takes(frontier: Frontier, topic: str) -> bool:
    """Whether a table was read up to a frontier; of those of earlier versions it is believed."""
    numbers = frontier[TAKEN][2:]
    return not numbers or any(_number_of(name) in numbers for name in names_of(topic))


def _number_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
