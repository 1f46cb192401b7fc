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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from icestream.failpoints import PLACES
from icestream.spark import session
from tests.faults.checking import NotExact, exists
from tests.faults.shop import KILLED, Ended, Shop
from tests.lake import Lake
from tests.proxy import Proxy, Rule
from tests.servers import RestCatalog, S3Server, running

TABLES = ("customers", "items", "orders", "stock")
PARTITIONS = ([], ["region"], ["bucket(4, id)"], ["truncate(2, region)"], ["ok", "bucket(2, id)"])
# A run that was killed or could not go on is started again; the last runs meet no fault.
RUNS_MAX = 12
FAULTY_RUNS_MAX = 4
DONE = 0
COULD_NOT = 1

Fault = Callable[[Rule], Rule]
FAULTS: dict[str, Fault] = {
    "500-after": lambda rule: rule.answer_500_after(500),
    "503-after": lambda rule: rule.answer_500_after(503),
    "409-after": lambda rule: rule.answer_500_after(409),
    "cut-after": lambda rule: rule.lose_answer(),
    "cut-before": lambda rule: rule.cut_before(),
    "refused": lambda rule: rule.refuse(500),
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

    def play(self) -> str:
        """Play the round to its end; returns what happened, raises when the end is not exact."""
        self.shop.epochs(self.random.randrange(1, 4), self._changes())
        for number in range(RUNS_MAX):
            faulty = number < self.faulty_runs
            ended = self._run(faulty)
            if ended.exit_code not in (DONE, KILLED, COULD_NOT):
                raise Stuck(f"exit code {ended.exit_code}: {ended.stderr}")
            if ended.exit_code == DONE and not faulty:
                self.shop.assert_exact()
                return " ".join(self.story)
            if ended.exit_code == DONE or self.random.random() < 0.3:
                # The feed goes on, so that a later run has something to do.
                if number + 1 < self.faulty_runs:
                    self.shop.epochs(self.random.randrange(1, 3), self._changes())
        raise Stuck(f"not done after {RUNS_MAX} runs")

    def _changes(self) -> int:
        return self.random.choice([2, 10, 10, 30])

    def _run(self, faulty: bool) -> Ended:
        failpoints = ""
        if faulty and self.random.random() < 0.8:
            place = self.random.choice(PLACES)
            failpoints = f"{place}=kill@{self.random.randrange(1, 6)}"
            self.story.append(failpoints)
        if faulty:
            for _ in range(self.random.randrange(3)):
                self._arm_a_lost_answer()
            if self.random.random() < 0.5:
                self._arm_a_rival()
        ended = self.shop.command("run", "--once", failpoints=failpoints)
        self.story.append("killed" if ended.exit_code == KILLED else str(ended.exit_code))
        return ended

    def _arm_a_lost_answer(self) -> None:
        table, number = self.random.choice(self.shop.tables), self.random.randrange(1, 6)
        name = self.random.choice(sorted(FAULTS))
        self.story.append(f"{name}:{table}@{number}")

        def arm() -> None:
            FAULTS[name](self.shop.proxy.on("POST", self.shop.commit_path(table)))

        self.shop.on_commit(table, number, arm)

    def _arm_a_rival(self) -> None:
        table, number = self.random.choice(self.shop.tables), self.random.randrange(1, 6)
        rivals = {"append": self.shop.append_foreign_row, "compact": self.shop.compact}
        name = self.random.choice(sorted(rivals))
        self.story.append(f"{name}:{table}@{number}")

        def act() -> None:
            if exists(self.shop.lake, self.shop.name(table)):
                rivals[name](table)

        def arm() -> None:
            self.shop.proxy.on("POST", self.shop.commit_path(table)).call_before(act)

        self.shop.on_commit(table, number, arm)


def play(seed: int, lake: Lake, rest: RestCatalog, folder: Path, prefix: str = "r") -> str:
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
            namespace=f"{prefix}{seed}",
            folder=folder / f"round{seed}",
            seed=generator.randrange(10**6),
            tables=tables,
            sink=sink,
            with_before=generator.random() < 0.5,
        )
        story = Round(shop=shop, random=generator).play()
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
                except (NotExact, Stuck) as error:
                    say(f"round {played + 1}, seed {seed + played}: {error}")
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
