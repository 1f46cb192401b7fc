"""A replay of dead letters dies anywhere; whatever is started next, the log says what must be."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyspark.sql import SparkSession

from icestream.failpoints import PLACES, FailpointError
from icestream.pipeline import Pipeline
from icestream.sinks.iceberg.publishing import EpochPublisher
from tests.faults.killing import catalog_in
from tests.faults.shop import SPARK, Process
from tests.integration.topics import Topics
from tests.servers import KafkaBroker

SetFailpoints = Callable[[str], None]
PARTITIONS = 2
KEYS = 12
LETTERS = "orders__dead_letters"
# Both tables are claimed at every start, and each claim is a swap; then come two of the epoch.
CRASHES = {
    "before-write": 1,
    "after-write": 1,
    "before-swap": 3,
    "after-swap": 3,
    "before-publish": 1,
    "after-publish": 1,
    "after-commit": 1,
    "after-ack": 1,
    "after-claim": 1,
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A real broker."""
    with KafkaBroker(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


class Letters:
    """A topic with letters among its records, and the pipeline that reads it.

    With `by_key` records replace the rows of their keys; else each is a row of its own.
    """

    def __init__(self, topics: Topics, by_key: bool):
        self.topics = topics
        self._by_key = by_key
        topics.create("orders", PARTITIONS)

    def document(self, *, mended: bool) -> dict[str, Any]:
        """The pipeline; `mended` takes what was a letter."""
        known = {"u": "update", "put": "update"} if mended else {"u": "update"}
        told = {"envelope": "cdc_field", "cdc_field": "op", "operations": known}
        added = {"format": "string"} if mended else {"format": "json"}
        source = {"topics": ["orders"], "value": told if self._by_key else added}
        return self.topics.document(source, on_error="dead_letter")

    def fill(self) -> None:
        """Records and letters, some of them overtaken; then the pipeline reads them all."""
        for turn in range(3):
            records = [
                ({"id": key}, {"id": key, "op": "put" if turn == key % 3 else "u", "v": turn})
                for key in range(KEYS)
            ]
            if not self._by_key:
                broken = [(key, b"no json") for key, value in records if value["op"] == "put"]
                records = [*records, *broken]
            self.topics.send("orders", records)
        self.pipeline(mended=False).run(once=True)
        assert self.topics.rows(LETTERS)

    def pipeline(self, *, mended: bool = True) -> Pipeline:
        """A new run, not started yet."""
        return self.topics.pipeline(self.document(mended=mended))

    def assert_exact(self) -> None:
        """The table is as if there had never been a letter, and there are none."""
        if self._by_key:
            log = self.topics.log("orders", PARTITIONS)
            wanted = sorted({key["id"]: value["v"] for key, value in log}.items())
            found = sorted((row["id"], row["v"]) for row in self.topics.rows("orders"))
        else:
            # What was read as JSON has an id, what came of letters is text.
            rows = self.topics.rows("orders")
            found = sorted(str(row.get("value") or row["id"]) for row in rows)
            wanted = sorted(map(str, [*range(KEYS)] * 3)) + ["no json"] * KEYS
        assert found == wanted
        assert self.topics.rows(LETTERS) == []


@pytest.fixture(params=[True, False], ids=["by key", "only added"])
def letters(
    broker: KafkaBroker, spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest
) -> Letters:
    """Letters that can be taken now."""
    catalog = {**catalog_in(tmp_path), "name": f"replay{tmp_path.name}"}
    letters = Letters(Topics(broker, tmp_path.name, spark, catalog), request.param)
    letters.fill()
    return letters


def test_a_replay_that_dies_at_every_place_takes_each_letter_once(
    letters: Letters, set_failpoints: SetFailpoints
):
    """E3, E10: again and again, until it comes through."""
    assert set(CRASHES) == set(PLACES)
    for place, number in CRASHES.items():
        set_failpoints(f"{place}=error@{number}")
        # Once all letters are taken, a replay does not come to the later places.
        try:
            letters.pipeline().replay()
        except FailpointError:
            continue
    set_failpoints("")
    letters.pipeline().replay()
    letters.assert_exact()


@pytest.mark.parametrize("then", ["run", "replay"])
@pytest.mark.parametrize("lacking", ["orders", LETTERS])
def test_a_crash_between_the_tables_is_finished_by_whatever_starts_next(
    letters: Letters, monkeypatch: pytest.MonkeyPatch, lacking: str, then: str
):
    """E3, E10, I14: rows without their letters gone, and neither of the two."""
    publish = EpochPublisher._publish

    def dies(sink: EpochPublisher, table: str, commit: Any) -> Any:
        if table.rpartition(".")[2] == lacking:
            raise FailpointError(table)
        return publish(sink, table, commit)

    # Which of two tables a crash hits is chance; here it is chosen.
    with monkeypatch.context() as patched, pytest.raises(FailpointError):
        patched.setattr(EpochPublisher, "_publish", dies)
        letters.pipeline().replay()
    started = letters.pipeline()
    started.run(once=True) if then == "run" else started.replay()
    if lacking == "orders" and then == "run":
        # A table comes before its letters, so nothing was published, and a run tries no letters.
        letters.pipeline().replay()
    letters.assert_exact()


@pytest.mark.long(kept_by="test_a_replay_that_dies_at_every_place_takes_each_letter_once")
def test_kill_9_of_the_command(letters: Letters, tmp_path: Path):
    """E3, E10: a real process and its JVM die with one table committed or none."""
    file = tmp_path / "pipelines.yaml"
    file.write_text(yaml.safe_dump({**letters.document(mended=True), "spark": SPARK}))
    for kill in ("before-swap=kill@4", "after-commit=kill"):
        ended = Process(["replay", str(file)], kill).wait()
        # A start that finishes what was left may have no letters to try after it.
        assert ended.killed_at(kill) or ended.exit_code == 0, ended.stderr[-3000:]
    last = Process(["replay", "--json", str(file)], "").wait()
    assert last.exit_code == 0, last.stderr[-3000:]
    assert all(json.loads(line)["rejected"] == 0 for line in last.stdout.splitlines())
    letters.assert_exact()
