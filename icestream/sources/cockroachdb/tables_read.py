"""Which tables a frontier speaks of, so that one that was left out for a while is noticed.

A resolved timestamp R is one for all tables of a folder. Whoever takes a table out of `tables` and
puts it back later finds R moved on, and nothing else tells that the table was not read meanwhile:
it looks like one that had no changes. So the frontier remembers, beside R, what `tables` said:
`tables: (wall, logical, name, name ...)`, each name as a number. Without names all were read.

A table that had nothing but deletes is made nowhere, and looks like one that was dropped and must
be read from the beginning. So the frontier also remembers up to when that was seen, for each such
table: `only deletes: (wall, logical, name, wall, logical, name ...)`.
"""

import itertools
from collections.abc import Mapping, Sequence

from icestream.frontier import MINIMUM, START, Frontier, Position
from icestream.sources.cockroachdb.hlc import RESOLVED
from icestream.sources.cockroachdb.numbered import number_of, triples

TABLES_READ = "tables"
ONLY_DELETES = "only deletes"


def names_of(topic: str) -> tuple[str, str]:
    """The names that `tables` may call a table by: in full, and by the last part."""
    return topic, topic.rsplit(".", 1)[-1]


def tables_read(at: Position, tables: Sequence[str], lower: Frontier) -> Frontier:
    """What a frontier at a position has to say of the tables; nothing while all were read."""
    if not tables and lower[TABLES_READ] == MINIMUM:
        return Frontier()
    return Frontier({TABLES_READ: (*at, *sorted({number_of(name) for name in tables}))})


def takes(frontier: Frontier, topic: str) -> bool:
    """Whether a table was read up to a frontier; of those of earlier versions it is believed."""
    numbers = frontier[TABLES_READ][2:]
    return not numbers or any(number_of(name) in numbers for name in names_of(topic))


def only_deletes(at: Position, seen: Mapping[str, Position], lower: Frontier) -> Frontier:
    """What a frontier at a position has to say of tables that only had deletes, up to when."""
    if not seen and lower[ONLY_DELETES] == MINIMUM:
        return Frontier()
    numbers = {number_of(table): until for table, until in seen.items()}
    parts = itertools.chain.from_iterable((n, *until) for n, until in sorted(numbers.items()))
    return Frontier({ONLY_DELETES: (*at, *parts)})


def without_rows(frontier: Frontier, topic: str) -> Frontier:
    """How far a table is known to have had nothing but deletes; the start if that is not known."""
    at = triples(frontier[ONLY_DELETES][2:]).get(number_of(topic))
    return Frontier({RESOLVED: at}) if at else START
