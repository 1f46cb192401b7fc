"""Changes of a table that lack values, held back until all of a split is read.

Debezium says of a large value that did not change only that it is what it was. An earlier change
of the same key may have it, in any batch that was read before; else the destination has it
(`icestream.sources.completion`). Changes that have all their values go their way at once. They are
looked at again if others lack something, and of these only what has one of the lacking keys.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from icestream.change import AT, OP, SEQ
from icestream.formats.rows import Indices, Mask, Records
from icestream.sources.completion import Completion, places_among
from icestream.sources.kafka.consumer import Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Changes that lack values, one for each of some records of a range.

    `withheld` tells for each column which changes lack it; the table may have no such column.
    """

    changes: pa.Table
    withheld: Mapping[str, Mask]
    where: Range
    records: Records


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """Held changes with their values, and for each column where its value is found nowhere."""

    held: Held
    changes: pa.Table
    lost: Mapping[str, Mask]


class HeldBack:
    """What a split has read of one table, in which all changes of a key are."""

    def __init__(self, key: Sequence[str]):
        self._key = list(key)
        # Whoever reads a split keeps its changes until it ends: these are no copies.
        self._seen: list[pa.Table] = []
        self._held: list[Held] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    def see(self, changes: pa.Table) -> None:
        """Remember changes that have all their values."""
        self._seen.append(changes)

    def hold(self, held: Held) -> None:
        """Keep changes that lack values."""
        self._held.append(held)

    def opened(self) -> "Opened":
        """All that is held, with the other changes of their keys."""
        held = pa.concat_tables([each.changes for each in self._held], promote_options="permissive")
        names = {name for each in self._held for name in each.withheld} & {*held.column_names}
        wanted = [OP, AT, SEQ, *self._key, *sorted(names - {*self._key})]
        keys = held.select(self._key)
        others = [
            each.take(pa.array(places_among(each, keys, self._key))).select(
                [name for name in wanted if name in each.column_names]
            )
            for each in self._seen
        ]
        together = pa.concat_tables([*others, held.select(wanted)], promote_options="permissive")
        at, sequence = (together.column(c).combine_chunks().to_numpy() for c in (AT, SEQ))
        order = np.lexsort((sequence, at))
        first = together.num_rows - held.num_rows
        unsent = {name: np.zeros(together.num_rows, dtype=np.bool_) for name in names}
        for name, mask in unsent.items():
            mask[first:] = np.concatenate([_mask(each, name) for each in self._held])
        return Opened(
            completion=Completion(
                together.take(pa.array(order)),
                self._key,
                {name: mask[order] for name, mask in unsent.items()},
            ),
            held=self._held,
            places=np.argsort(order)[first:],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Changes that lack values, among all changes of their keys; `places` are theirs in these."""

    completion: Completion
    held: Sequence[Held]
    places: Indices

    def filled(self, stored: pa.Table | None) -> Iterator[Filled]:
        """The changes with values out of the rows that were asked for, if these are known."""
        nothing = self.completion.keys().slice(0, 0)
        found = self.completion.completed(nothing if stored is None else stored)
        first = 0
        for each in self.held:
            places = self.places[first : first + each.changes.num_rows]
            first += each.changes.num_rows
            changes = each.changes
            # A column that the table lacks has no value anywhere.
            lost = dict(each.withheld)
            for name in found.lost.keys() & each.withheld.keys():
                lost[name] = found.lost[name][places]
                values = found.table.column(name).take(pa.array(places))
                number = changes.column_names.index(name)
                changes = changes.set_column(number, changes.field(number), values)
            yield Filled(held=each, changes=changes, lost=lost)


def _mask(held: Held, name: str) -> Mask:
    nothing = np.zeros(held.changes.num_rows, dtype=np.bool_)
    return held.withheld.get(name, nothing)
