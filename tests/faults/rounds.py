"""Random faults, round after round, each ended by the oracle: `python -m tests.faults.rounds`.

A round makes a pipeline at random (tables, partitions, format version), kills its process at
random places, loses answers of its catalog, lets rivals commit in between, starts it again until it
is done, and then compares every snapshot with the oracle. Everything that is chosen comes from the
round's seed; round n of seed s is the first round of seed s + n. What the machine decides (which
of two threads is first) does not repeat.
"""

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from icestream.errors import IcestreamError
from icestream.failpoints import PLACES
from icestream.spark import session
from tests.faults.shop import KILLED, Shop
from tests.lake import Lake
from tests.proxy import Proxy, Rule
from tests.servers import RestCatalog, S3Server, running

TABLES = ("customers", "items", "orders", "stock")
PARTITIONS = ([], ["region"], ["bucket(4, id)"], ["truncate(2, region)"], ["ok", "bucket(2, id)"])
# A run that was killed or could not go on is started again; the last runs are not killed.
RUNS_MAX = 12
FAULTY_RUNS_MAX = 4
OUTAGES_SECONDS = (2.0, 15.0, 60.0)
DONE = 0
COULD_NOT = 1
FENCED = 4

Fault = Callable[[Rule, str], Rule]
FAULTS: dict[str, Fault] = {
    "500-after": lambda rule, _: rule.answer_500_after(500),
    "503-after": lambda rule, _: rule.answer_500_after(503),
    "409-after": lambda rule, _: rule.answer_500_after(409),
    "cut-after": lambda rule, _: rule.lose_answer(),
    "cut-before": lambda rule, _: rule.cut_before(),
    "refused": lambda rule, _: rule.refuse(500),
}


class Stuck(AssertionError):
    """A run ended in a way that no fault explains."""


@dataclass(kw_only=True)
class Round:
    """One pipeline and all that happens to it."""

    shop: Shop
    random: random.Random
    faulty_runs: int = FAULTY_RUNS_MAX
    story: list[str] = field(default_factory=list)
    outages: list[threading.Timer] = field(default_factory=list)

    def play(self) -> str:
        """Play the round to its end; returns what happened, raises when the end is not exact."""
        self.shop.epochs(self.random.randrange(1, 4), self._changes())
        for number in range(RUNS_MAX):
            faulty = number < self.faulty_runs
            done = self._run(faulty)
            if done and not faulty:
                self.shop.assert_exact()
                return " ".join(self.story)
            more = done or self.random.random() < 0.3
            if more and number + 1 < self.faulty_runs:
                # The feed goes on, so that a later run has something to do.
                self.shop.epochs(self.random.randrange(1, 3), self._changes())
        raise Stuck(f"not done after {RUNS_MAX} runs: {' '.join(self.story)}")

    def _changes(self) -> int:
        return self.random.choice([2, 10, 10, 30])

    def _run(self, faulty: bool) -> bool:
        """Run the pipeline, now and then twice at once; True when a run did all there was to do.

        A run that nothing happens to needs no process of its own.
        """
        if not faulty:
            return self._run_here()
        failpoint = self._faults()
        processes = [self.shop.start("run", "--once", failpoints=failpoint)]
        allowed = {DONE, KILLED, COULD_NOT} if failpoint else {DONE, COULD_NOT}
        if self.random.random() < 0.15:
            self.story.append("twice")
            processes.append(self.shop.start("run", "--once"))
            allowed.add(FENCED)
        ends = [process.wait() for process in processes]
        for outage in self.outages:
            outage.join()
        codes = [ended.exit_code for ended in ends]
        if failpoint and codes[0] == KILLED:
            ends[0].assert_killed_at(failpoint)
        self.story.append("/".join("killed" if code == KILLED else str(code) for code in codes))
        for ended in ends:
            if ended.exit_code not in allowed:
                raise Stuck(f"{' '.join(self.story)}: {ended.stderr}")
        return DONE in codes

    def _run_here(self) -> bool:
        try:
            self.shop.run()
        except IcestreamError as error:
            if error.exit_code != COULD_NOT:
                raise
            self.story.append(type(error).__name__)
            return False
        self.story.append("done")
        return True

    def _faults(self) -> str:
        """Arm what happens to the next run; returns its failpoints."""
        for _ in range(self.random.randrange(3)):
            name = self.random.choice(sorted(FAULTS))
            self._arm(name, FAULTS[name])
        if self.random.random() < 0.5:
            rivals = {"append": self.shop.append_foreign_row, "compact": self.shop.compact}
            name = self.random.choice(sorted(rivals))
            self._arm(name, lambda rule, table: rule.call_before(partial(rivals[name], table)))
        if self.random.random() < 0.1:
            seconds = self.random.choice(OUTAGES_SECONDS)
            self._arm(f"outage-{seconds}", lambda rule, _: rule.call_before(self._outage(seconds)))
        if self.random.random() < 0.2:
            return ""
        failpoint = f"{self.random.choice(PLACES)}=kill@{self.random.randrange(1, 6)}"
        self.story.append(failpoint)
        return failpoint

    def _arm(self, name: str, fault: Fault) -> None:
        """Let the fault meet one of the next commits to a table; it waits if there are fewer."""
        table, number = self.random.choice(self.shop.tables), self.random.randrange(1, 6)
        self.story.append(f"{name}:{table}@{number}")
        path = self.shop.commit_path(table)
        self.shop.on_commit(table, number, lambda: fault(self.shop.proxy.on("POST", path), table))

    def _outage(self, seconds: float) -> Callable[[], None]:
        def begin() -> None:
            self.shop.proxy.down()
            end = threading.Timer(seconds, self.shop.proxy.up)
            self.outages.append(end)
            end.start()

        return begin


def play(
    seed: int, lake: Lake, rest: RestCatalog, folder: Path, faulty_runs: int = FAULTY_RUNS_MAX
) -> str:
    """Play the round of a seed; returns one line about it."""
    generator = random.Random(seed)
    tables = TABLES[: generator.randrange(1, len(TABLES) + 1)]
    partitions = {table: generator.choice(PARTITIONS) for table in tables}
    sink: dict[str, Any] = {
        "format_version": generator.choice([2, 3]),
        "tables": {table: {"partition_by": terms} for table, terms in partitions.items()},
    }
    with Proxy(rest.uri) as proxy:
        shop = Shop(
            lake=lake,
            rest=rest,
            proxy=proxy,
            namespace=f"round{seed}",
            folder=folder / f"round{seed}",
            seed=generator.randrange(10**6),
            tables=tables,
            sink=sink,
            with_before=generator.random() < 0.5,
        )
        story = Round(shop=shop, random=generator, faulty_runs=faulty_runs).play()
    return f"{len(tables)} tables v{sink['format_version']}: {story}"


@contextmanager
def servers(folder: Path) -> Iterator[tuple[Lake, RestCatalog]]:
    """A catalog, its storage and a Spark session to read them with."""
    store = S3Server(folder / "s3")
    rest = RestCatalog(
        folder / "rest", warehouse="s3://lake/warehouse", storage=store.iceberg_properties()
    )
    with running(store, rest):
        store.create_bucket("lake")
        spark = session([rest.catalog_properties()], "local[2]")
        try:
            yield Lake(spark, rest.catalog_properties()), rest
        finally:
            spark.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Play rounds until the time or their number is used up; 1 when one of them is not exact."""
    parser = argparse.ArgumentParser(description="Kill at random, then compare with the oracle.")
    parser.add_argument("--minutes", type=float, default=5.0, help="start no round after this time")
    parser.add_argument("--rounds", type=int, default=10**9, help="play no more rounds than this")
    parser.add_argument("--seed", type=int, default=None, help="seed of the first round")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    say(f"seed {seed}")
    deadline = time.monotonic() + options.minutes * 60
    played = 0
    with tempfile.TemporaryDirectory(prefix="icestream-rounds-") as name:
        folder = Path(name)
        with servers(folder) as (lake, rest):
            while played < options.rounds and time.monotonic() < deadline:
                started = time.monotonic()
                try:
                    line = play(seed + played, lake, rest, folder)
                except Exception as error:
                    name = type(error).__name__
                    say(f"round {played + 1}, seed {seed + played}: {name}: {error}")
                    say(f"again: python -m tests.faults.rounds --rounds 1 --seed {seed + played}")
                    return 1
                played += 1
                seconds = time.monotonic() - started
                say(f"round {played}, seed {seed + played - 1}: exact, {seconds:.0f} s, {line}")
    say(f"{played} rounds, all exact")
    return 0


def say(line: str) -> None:
    """One line for whoever watches."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
