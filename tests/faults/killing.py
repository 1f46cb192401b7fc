"""Killing a pipeline at random again and again, whatever it reads, then comparing.

A victim is a pipeline that runs as a process of its own, over a source that a writer changes all
the time. It is killed at failpoints; at the end a last run takes what is left, and the source
itself is the oracle.
"""

import argparse
import itertools
import random
import sys
import tempfile
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import yaml
from pyspark.sql import SparkSession

from icestream import failpoints
from icestream.errors import IcestreamError
from icestream.spark import session
from tests.faults.shop import SPARK, Process, random_seed
from tests.lake import Lake

KILLS_EACH = 10
# Runs for each kill, at most: a place that is drawn may lie beyond the work that there is.
RUNS_EACH = 3


class Writer(Protocol):
    """Changes a source until it is stopped."""

    transactions: int

    def start(self) -> None: ...

    def stop(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a victim writes to, and under which name."""

    folder: Path
    lake: Lake
    catalog: Mapping[str, str]
    name: str


@dataclass(kw_only=True)
class Victim:
    """A pipeline, named like the namespace that it fills."""

    place: Place
    story: list[str] = field(default_factory=list)
    places: ClassVar[Sequence[str]] = failpoints.PLACES

    @abstractmethod
    def pipeline(self) -> Mapping[str, Any]:
        """The pipeline as the file has it."""
        ...

    @abstractmethod
    def writer(self, seed: int) -> Writer:
        """What changes the source."""
        ...

    @abstractmethod
    def assert_equal(self) -> None:
        """The lake has what the source has: no row more, none less, none other."""
        ...

    def settle(self) -> None:
        """Await that all that was written can be read."""
        return None

    def run_until_killed(self, failpoint: str) -> None:
        """Run and be killed at this failpoint; a run that never comes there is an error."""
        assert self.run(failpoint), f"never came to {failpoint}: {self.story}"

    def run(self, failpoint: str) -> bool:
        """Run; True when it was killed at the failpoint, False when it ended by itself before."""
        ended = self._start(failpoint).wait()
        killed = ended.killed_at(failpoint)
        self.story.append(f"{failpoint} {'killed' if killed else ''}".strip())
        assert killed or ended.exit_code == 0, f"{self.story}: {ended.stderr[-3000:]}"
        return killed

    def finish(self) -> None:
        """Let a last run take what is left."""
        self.settle()
        ended = self._start("").wait()
        assert ended.exit_code == 0, ended.stderr[-3000:]

    def _start(self, failpoint: str) -> Process:
        self.place.folder.mkdir(parents=True, exist_ok=True)
        file = self.place.folder / "pipelines.yaml"
        document = {self.place.name: dict(self.pipeline()), "spark": SPARK}
        file.write_text(yaml.safe_dump(document))
        return Process(["run", "--once", str(file)], failpoint)


def play(victim: Victim, seed: int, kills: int) -> str:
    """Kill so many times at random places, then compare; returns what happened."""
    generator = random.Random(seed)
    writer = victim.writer(seed)
    writer.start()
    try:
        killed = 0
        for _ in range(RUNS_EACH * kills):
            place = generator.choice(victim.places)
            killed += victim.run(f"{place}=kill@{generator.choice([1, 1, 2, 3, 5, 8])}")
            if killed == kills:
                break
    finally:
        writer.stop()
    assert killed == kills, f"{killed} of {kills} kills: {victim.story}"
    victim.finish()
    victim.assert_equal()
    return f"{writer.transactions} transactions; {', '.join(victim.story)}"


_numbers = itertools.count()


def catalog_in(folder: Path) -> dict[str, str]:
    """A SQLite catalog and a warehouse in a folder; a session keeps catalogs apart by name."""
    return {
        "type": "jdbc",
        "name": f"kills{next(_numbers)}",
        "uri": f"jdbc:sqlite:{folder / 'catalog.db'}",
        "warehouse": str(folder / "warehouse"),
        "jdbc.schema-version": "V1",
    }


MakePlace = Callable[[], Place]


def places_in(folder: Path, spark: SparkSession) -> MakePlace:
    """Makes places of their own, one after the other, that share a catalog."""
    catalog = catalog_in(folder)
    lake = Lake(spark, catalog)
    numbers = itertools.count()

    def make() -> Place:
        name = f"kills{next(numbers)}"
        return Place(folder=folder / name, lake=lake, catalog=catalog, name=name)

    return make


Serve = Callable[[Path], AbstractContextManager[Callable[[Place, int], Victim]]]
"""Starts the source's server in a folder; what it gives makes a victim of a seed."""


def kill_and_compare(module: str, serve: Serve, arguments: Sequence[str] | None = None) -> int:
    """Kill so many times in a row, ten for each victim; 1 when lake and source differ."""
    parser = argparse.ArgumentParser(description="Kill at random, then compare with the source.")
    parser.add_argument("--kills", type=int, default=50, help="how often")
    parser.add_argument("--seed", type=int, default=None, help="seed of the first ten")
    options = parser.parse_args(arguments)
    first = random_seed() if options.seed is None else options.seed
    say(f"seed {first}")
    with tempfile.TemporaryDirectory(prefix="icestream-kills-") as name:
        folder = Path(name)
        catalog = catalog_in(folder)
        spark = session([catalog], "local[2]")
        seed = first
        try:
            lake = Lake(spark, catalog)
            with serve(folder / "server") as make:
                for done in range(0, options.kills, KILLS_EACH):
                    begun, seed = time.monotonic(), first + done // KILLS_EACH
                    where = folder / str(seed)
                    place = Place(folder=where, lake=lake, catalog=catalog, name=f"kills{seed}")
                    kills = min(KILLS_EACH, options.kills - done)
                    line = play(make(place, seed), seed, kills)
                    seconds = time.monotonic() - begun
                    say(f"{done + kills} kills, seed {seed}: {seconds:.0f} s, {line}")
        except (AssertionError, IcestreamError) as error:
            say(f"{error}\nagain: python -m {module} --kills {KILLS_EACH} --seed {seed}")
            return 1
        finally:
            spark.stop()
    say(f"{options.kills} kills, lake and source equal")
    return 0


def say(line: str) -> None:
    """One line for whoever watches."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
