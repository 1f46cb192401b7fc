"""What tests ask sources with."""

from icestream.epoch import Epoch, Progress
from icestream.frontier import START, Frontier
from icestream.sources import Remembered

EPOCH = Epoch(number=1, lower=START, upper=START)
"""Some epoch, where it does not matter which one."""


def remembered(*tables: str, durable: Frontier = START) -> Remembered:
    """That the destination has these tables, and that they took no epoch yet."""
    progress = {table: Progress(pipeline="p") for table in tables}
    return Remembered(progress=progress, durable=durable)
