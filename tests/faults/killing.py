"""Killing a pipeline at random again and again, whatever it reads, then comparing.

A victim is a pipeline over a source that a writer changes all the time. It is killed at failpoints:
as a process of its own by kill -9, or `here`, in this process, by a crash (`crashing`). At the end
a last run takes what is left, and the source itself is the oracle.
"""

import argparse
import itertools
import random
import sys
import tempfile
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import yaml
from pyspark.sql import SparkSession

from icestream import failpoints
from icestream.config import open_pipeline, parse
from icestream.errors import IcestreamError
from icestream.spark import session
from tests.faults.crashing import crashes
from tests.faults.shop import SPARK, Process, random_seed
from tests.lake import Lake
from tests.running import for_pipelines
from tests.servers import wait_until

KILLS_EACH = 10
# Runs for each kill, at most: a place that is drawn may lie beyond the work that there is.
RUNS_EACH = 3
WORK_SECONDS_MAX = 120.0


class Writer(Protocol):
    """Changes a source until it is stopped, and rests when it has done so many transactions."""

    transactions: int
    transactions_max: int

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
    """A pipeline, named like the namespace that it fills.

    With `here` it runs in this process, and dies by a crash instead of kill -9.
    """

    place: Place
    here: bool = False
    story: list[str] = field(default_factory=list)
    places: ClassVar[Sequence[str]] = failpoints.PLACES
    # For each run in this process: so many transactions before it, and so many while it goes on.
    transactions_each: ClassVar[int] = 15
    _writer: Writer | None = field(default=None, init=False)

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

    def bury(self) -> None:
        """Take from a run that crashed here what the system takes from a killed process."""
        return None

    @contextmanager
    def changing(self, seed: int) -> Iterator[Writer]:
        """Have the source changed all the time."""
        self._writer = self.writer(seed)
        self._writer.start()
        try:
            yield self._writer
        finally:
            self._writer.stop()
            self._writer = None

    def run_until_killed(self, place: str, number: int) -> None:
        """Run and be killed at this pass of a place; a run that never comes there is an error."""
        assert self.run(place, number), f"never came to {place} {number}: {self.story}"

    def run(self, place: str, number: int) -> bool:
        """Run; True when it was killed at the place, False when it ended by itself before."""
        failpoint = f"{place}={'crash' if self.here else 'kill'}@{number}"
        killed = self._run_here(failpoint) if self.here else self._run_as_process(failpoint)
        self.story.append(f"{failpoint} {'killed' if killed else ''}".strip())
        return killed

    def finish(self) -> None:
        """Let a last run take what is left."""
        self.settle()
        self._folder()
        assert not self._crashes("")

    def _run_here(self, failpoint: str) -> bool:
        self._folder()
        if writer := self._writer:
            enough = writer.transactions + self.transactions_each
            writer.transactions_max = enough + self.transactions_each
            wait_until(lambda: writer.transactions >= enough, WORK_SECONDS_MAX, "work to do")
        killed = self._crashes(failpoint)
        if killed:
            self.bury()
        return killed

    def _crashes(self, failpoint: str) -> bool:
        config = parse({self.place.name: dict(self.pipeline())}).pipelines[0]
        return crashes(open_pipeline(config, for_pipelines(self.place.lake.spark)), failpoint)

    def _run_as_process(self, failpoint: str) -> bool:
        file = self._folder() / "pipelines.yaml"
        document = {self.place.name: dict(self.pipeline()), "spark": SPARK}
        file.write_text(yaml.safe_dump(document))
        ended = Process(["run", "--once", str(file)], failpoint).wait()
        killed = ended.killed_at(failpoint)
        assert killed or ended.exit_code == 0, f"{self.story}: {ended.stderr[-3000:]}"
        return killed

    def _folder(self) -> Path:
        self.place.folder.mkdir(parents=True, exist_ok=True)
        return self.place.folder


def play(victim: Victim, seed: int, kills: int) -> str:
    """Kill so many times at random places, then compare; returns what happened."""
    generator = random.Random(seed)
    killed = 0
    with victim.changing(seed) as writer:
        for _ in range(RUNS_EACH * kills):
            place = generator.choice(victim.places)
            killed += victim.run(place, generator.choice([1, 1, 2, 3, 5, 8]))
            if killed == kills:
                break
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
