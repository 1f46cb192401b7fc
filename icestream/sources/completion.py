"""Values that changes leave out because they did not change, put in again.

    change of key 1: n = 1, big = (left out) ──► what the destination has
    change of key 1: n = 2, big = "text"
    change of key 1: n = 3, big = (left out) ──► "text"

A value is that of the row's change before in the same epoch. For a row's first change it is what
the destination has once all earlier epochs are committed (`icestream.sources.ValuesNeeded`). A
source leaves out large values only, and always sends null. So a value that is missing was not null.
If the stored row has null there, it is another row, and its value is not used. What is found
nowhere is said, never guessed.

All changes of a key must be given together, in the order in which they happened.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from icestream.change import OP, Op

Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]
Fetch = Callable[[pa.Table], pa.Table]
"""Rows by the keys that they have now, for changes whose values are not stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The changes with their values, and for each column where its value is found nowhere."""

    table: pa.Table
    lost: Mapping[str, Mask]


class Completion:
    """Changes of a table, in order; `unsent` tells which values of a column were left out.

    `moved_in` are changes that bring a row from another key, whose delete is directly in front:
    before the change the row had that key.
    """

    def __init__(
        self,
        table: pa.Table,
        key: Sequence[str],
        unsent: Mapping[str, Mask],
        moved_in: Mask | None = None,
    ):
        self._table = table
        self._key = list(key)
        self._unsent = unsent
        self._moved_in = np.zeros(table.num_rows, np.bool_) if moved_in is None else moved_in
        self._previous = _previous(plain(table.select(self._key)), self._moved_in)
        self._roots = {name: _roots(absent, self._previous) for name, absent in unsent.items()}
        self._ask = np.zeros(table.num_rows, np.bool_)
        for name, absent in unsent.items():
            roots = self._roots[name]
            self._ask[roots[absent & (self._previous[roots] < 0)]] = True

    def keys(self) -> pa.Table:
        """The keys of the rows that the destination has to be asked for."""
        places = np.arange(self._table.num_rows)
        places = np.where(self._moved_in, places - 1, places)
        return self._table.select(self._key).take(pa.array(places[self._ask]))

    def columns(self) -> list[str]:
        """The columns whose values are wanted."""
        return sorted(self._unsent)

    def completed(self, stored: pa.Table, fetch: Fetch | None = None) -> Completed:
        """The changes with values out of the rows that were asked for.

        A value that `stored` lacks is fetched, where that can be done. `stored` may lack columns.
        """
        place = np.full(self._table.num_rows, -1, dtype=np.int64)
        place[self._ask] = places_of(self.keys(), stored, self._key)
        indices = {name: self._indices(name, stored, place) for name in self._unsent}
        lost = {name: found < 0 for name, found in indices.items()}
        fetched, elsewhere = self._fetched(lost, fetch)
        columns = dict(zip(self._table.column_names, self._table.columns, strict=True))
        for name, found in indices.items():
            own = _array(self._table, name)
            rows = [part for part in (stored, fetched) if part is not None and part.num_rows]
            told = [_array(part, name) for part in rows if name in part.column_names]
            parts = [own, *(values.cast(own.type) for values in told)]
            if fetched is not None:
                there = lost[name] & (elsewhere >= 0)
                first = sum(map(len, parts)) - len(fetched)
                found = np.where(there, first + elsewhere, found)
                lost[name] &= ~there
            columns[name] = pa.concat_arrays(parts).take(pa.array(found, mask=found < 0))
        return Completed(table=pa.table(columns), lost=lost)

    def _indices(self, name: str, stored: pa.Table, place: Places) -> Places:
        """For each change where its value is, in its own column with the stored one behind it.

        -1 where that is nowhere.
        """
        absent, root = self._unsent[name], self._roots[name]
        own = np.arange(len(absent))
        before = self._previous[root]
        kept = _array(self._table, OP).to_numpy(zero_copy_only=False) != Op.DELETE
        known = _valid(self._table, name) & kept
        found = np.where((before >= 0) & known[before], before, -1)
        at = place[root]
        if stored.num_rows and name in stored.column_names:
            there = (before < 0) & (at >= 0) & _valid(stored, name)[at]
            found = np.where(there, len(own) + at, found)
        return np.where(absent, found, own)

    def _fetched(
        self, lost: Mapping[str, Mask], fetch: Fetch | None
    ) -> tuple[pa.Table | None, Places]:
        """Rows for changes that lack a value, and for each change the place of its row, or -1."""
        place = np.full(self._table.num_rows, -1, dtype=np.int64)
        wanted = np.logical_or.reduce([*lost.values(), np.zeros(len(place), dtype=np.bool_)])
        if fetch is None or not wanted.any():
            return None, place
        keys = self._table.select(self._key).filter(pa.array(wanted))
        rows = fetch(keys)
        place[wanted] = places_of(keys, rows, self._key)
        return rows, place


def _previous(keys: pa.Table, moved_in: Mask) -> Places:
    """For each change the change of the same row before it, or -1.

    The predecessor of a row that comes from another key is that of the old key's delete.
    """
    codes = np.zeros(keys.num_rows, dtype=np.int64)
    for column in keys.columns:
        values = pc.dictionary_encode(column.combine_chunks())
        # Numbers that stay small, however many columns the key has.
        _, codes = np.unique(codes, return_inverse=True)
        part = values.indices.to_numpy(zero_copy_only=False)
        codes = codes * (len(values.dictionary) + 1) + part
    order = np.argsort(codes, kind="stable")
    previous = np.full(len(codes), -1, dtype=np.int64)
    same = codes[order][1:] == codes[order][:-1]
    previous[order[1:][same]] = order[:-1][same]
    arrived = np.flatnonzero(moved_in)
    previous[arrived] = previous[arrived - 1]
    return previous


def _roots(absent: Mask, previous: Places) -> Places:
    """Follow predecessors through changes that left the value out, to the first of them.

    Each round doubles the way: a key that changes often costs no more than the logarithm of it.
    """
    onward = absent & (previous >= 0) & absent[previous]
    root = np.where(onward, previous, np.arange(len(absent)))
    while True:
        further = root[root]
        if np.array_equal(further, root):
            return root
        root = further


def places_of(keys: pa.Table, rows: pa.Table, key: Sequence[str]) -> Places:
    """For each key the place of its row, or -1."""
    wanted, there = _joinable(keys, key), _joinable(rows, key)
    names = wanted.column_names
    there = there.cast(wanted.schema).append_column("place", pa.array(np.arange(rows.num_rows)))
    wanted = wanted.append_column("row", pa.array(np.arange(keys.num_rows)))
    joined = wanted.join(there, keys=names, join_type="left outer").sort_by("row")
    places: Places = pc.fill_null(joined.column("place"), -1).combine_chunks().to_numpy()
    return places


def places_among(rows: pa.Table, keys: pa.Table, key: Sequence[str]) -> Places:
    """The places of the rows that have one of the keys, ascending."""
    there, wanted = _joinable(rows, key), _joinable(keys, key)
    names = there.column_names
    there = there.append_column("row", pa.array(np.arange(rows.num_rows)))
    joined = there.join(wanted, keys=names, join_type="left semi")
    places: Places = joined.column("row").combine_chunks().to_numpy()
    return np.sort(places)


def _joinable(table: pa.Table, key: Sequence[str]) -> pa.Table:
    """The key's columns as Arrow joins by them."""
    # Numbers for names: Arrow would take a name such as `.id` for a path.
    return plain(table.select(list(key))).rename_columns([str(n) for n in range(len(key))])


def plain(table: pa.Table) -> pa.Table:
    """Without extension types, which Arrow cannot join by."""
    for number, column in enumerate(table.columns):
        if isinstance(column.type, pa.BaseExtensionType):
            table = table.set_column(
                number, table.column_names[number], column.cast(column.type.storage_type)
            )
    return table


def _array(table: pa.Table, name: str) -> pa.Array:
    return table.column(name).combine_chunks()


def _valid(table: pa.Table, name: str) -> Mask:
    found: Mask = _array(table, name).is_valid().to_numpy(zero_copy_only=False)
    return found
