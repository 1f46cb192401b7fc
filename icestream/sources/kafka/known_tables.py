"""The tables that records are known to be for: named by topics and routes, or met by reading."""

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from icestream import dead_letters
from icestream.schema import TableShape, distinct_columns, joined_shapes
from icestream.sources.kafka.changes import no_key
from icestream.sources.kafka.run import KafkaRun
from icestream.sources.kafka.topics import TopicsNow


class KnownTables:
    """Thread: those of epochs meet tables, side by side; the loop's asks."""

    def __init__(self, run: KafkaRun, topics: TopicsNow):
        self._run = run
        self._topics = topics
        self._lock = threading.Lock()
        self._shapes: Mapping[str, TableShape] = {}
        # Those that the destination has, or will have made for records that were read.
        self._at_destination: frozenset[str] = frozenset()

    def names(self) -> Sequence[str]:
        """The tables that the route names, or one for each topic, and those met on the way."""
        self._topics.find()
        topics, reading = self._topics.by_name, self._run.reading
        named = topics if reading.route.by_topic() else reading.route.tables
        letters = map(dead_letters.table_of, {*named, *topics})
        return sorted({*named, *self._shapes, *(letters if reading.dead_letters else ())})

    def shape(self, table: str) -> TableShape | None:
        """What the table's records have shown so far."""
        return self._shapes.get(table)

    def at_destination(self, tables: Collection[str]) -> None:
        """Told which tables the destination has."""
        self._at_destination |= frozenset(tables)

    def met(self, shapes: Mapping[str, TableShape]) -> None:
        """Remember tables that records were found for; rows that change need a key."""
        with self._lock:
            joined = joined_shapes(self._shapes, shapes)
            limit = self._run.reading.value.columns_max
            # Workers do not know of each other's columns: what clashes is refused later.
            self._shapes = {
                table: replace(shape, columns=distinct_columns(shape.columns, limit))
                for table, shape in joined.items()
            }
            self._at_destination |= shapes.keys()
        for table in shapes:
            letters = table.endswith(dead_letters.SUFFIX)
            if not letters and not self._run.reading.only_added and not self._shapes[table].key:
                raise no_key(table)

    def of_topics(self, topics: Collection[str]) -> set[str]:
        """The tables among those known that records of topics may be for."""
        if not self._run.reading.route.by_topic():
            return set(self._at_destination)
        known = {t for t in self._at_destination if t.removesuffix(dead_letters.SUFFIX) in topics}
        # A table that was dropped is not known, though its letters may be, or tables beside it.
        return {*known, *topics} if known else set()

    def of_letters(self) -> list[str]:
        """The tables of dead letters that the destination has."""
        return sorted(t for t in self._at_destination if t.endswith(dead_letters.SUFFIX))
