"""How far a source has been read: per source partition, the first position not yet included.

Positions are tuples of integers compared from left to right: `(lsn,)`, `(offset,)`,
`(wall, logical)`, `(sequence number,)`. A partition that is not named stands at its minimum.
Frontiers form a lattice: `join` is the least upper bound and `covers` its order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from icestream.errors import check

Position = tuple[int, ...]
MINIMUM: Position = ()


@dataclass(frozen=True, slots=True)
class Frontier:
    """Everything before these positions is included, nothing from them on."""

    positions: Mapping[str, Position] = field(default_factory=dict)

    def __getitem__(self, partition: str) -> Position:
        return self.positions.get(partition, MINIMUM)

    def covers(self, other: "Frontier") -> bool:
        """True when nothing that `other` includes is missing here."""
        return all(self[partition] >= at for partition, at in other.positions.items())

    def join(self, other: "Frontier") -> "Frontier":
        """The smallest frontier that covers both."""
        partitions = self.positions.keys() | other.positions.keys()
        return Frontier({name: max(self[name], other[name]) for name in partitions})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frontier) and self.covers(other) and other.covers(self)

    def __hash__(self) -> int:
        return hash(frozenset((name, at) for name, at in self.positions.items() if at))

    def to_json(self) -> dict[str, list[int]]:
        """The frontier as plain data; a partition at its minimum is left out."""
        return {name: list(at) for name, at in sorted(self.positions.items()) if at}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Frontier":
        """The inverse of `to_json`."""
        for name, at in data.items():
            check(
                isinstance(at, list) and all(isinstance(part, int) for part in at),
                f"the position of partition {name} is a list of integers",
            )
        return Frontier({name: tuple(at) for name, at in data.items()})


START = Frontier()
