"""What every source answers, and the abilities that some have beyond that."""

from collections.abc import Sequence
from typing import Any

import pytest

from icestream.abilities import members, refuse_halves
from icestream.frontier import Frontier
from icestream.sources import EpochPlan, Source, Split
from icestream.sources.abilities import (
    SOURCE_ABILITIES,
    DeclaresColumns,
    FindsTables,
    HasBacklog,
    IdentifiesTables,
    Interruptible,
    KnowsTables,
    RegroupsSplits,
    TakesLetters,
    Verifies,
    VerifiesTables,
)
from icestream.sources.cockroachdb.files import CockroachdbFiles
from icestream.sources.cockroachdb.topics import CockroachdbTopics
from icestream.sources.iceberg.source import IcebergSource
from icestream.sources.kafka.source import KafkaSource
from icestream.sources.postgres.source import PostgresSource

ALL: Sequence[type[Source]] = (
    PostgresSource,
    KafkaSource,
    CockroachdbFiles,
    CockroachdbTopics,
    IcebergSource,
)
CAN = {
    PostgresSource: {
        *(KnowsTables, Verifies, DeclaresColumns),
        *(HasBacklog, RegroupsSplits, Interruptible),
    },
    KafkaSource: {
        *(KnowsTables, Verifies, DeclaresColumns, HasBacklog),
        *(FindsTables, RegroupsSplits, TakesLetters),
    },
    CockroachdbFiles: {KnowsTables, Verifies, DeclaresColumns},
    CockroachdbTopics: {KnowsTables, Verifies, DeclaresColumns, HasBacklog, RegroupsSplits},
    IcebergSource: {KnowsTables, Verifies, VerifiesTables, IdentifiesTables},
}


def test_a_source_is_asked_nine_questions_and_each_has_two_that_answer():
    """U9: what only one source knows is an ability, and no question of all."""
    questions = members(Source) - {"key_in_one_split"}
    assert len(questions) == 9
    for question in questions:
        own = [kind for kind in ALL if getattr(kind, question) is not getattr(Source, question)]
        assert len(own) >= 2, question


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_each_source_has_the_abilities_that_it_is_known_for_and_no_half_of_one(kind):
    """U9: a method that is misspelt or left out would switch an ability off without a word."""
    found = {ability for ability in SOURCE_ABILITIES if members(ability) <= {*dir(kind)}}
    assert found == CAN[kind]
    refuse_halves(kind.__new__(kind), SOURCE_ABILITIES)
    # What is no question, no ability and not private is no part of the contract.
    known = members(Source).union(*map(members, SOURCE_ABILITIES))
    strange = {name for name in vars(kind) if not name.startswith("_")} - known
    assert strange == set()


class HalfLetters:
    """Finds letters, and does not say what became of them."""

    def letters(self, durable: Frontier, table: str | None, as_is: bool) -> Sequence[Any]:
        return ()


def test_half_of_an_ability_is_refused_and_not_taken_for_none():
    """U9: `isinstance` alone would say that it has none."""
    assert not isinstance(HalfLetters(), TakesLetters)
    with pytest.raises(TypeError, match="HalfLetters is half of TakesLetters: it lacks tried"):
        refuse_halves(HalfLetters(), SOURCE_ABILITIES)
    refuse_halves(object(), SOURCE_ABILITIES)


class NearlySplit:
    """All of a split but one method."""

    tables = ("t",)
    size_bytes = 1
    each_key_once = True

    def changes(self, targets: Any) -> Any:
        return iter(())

    def learned(self) -> None:
        return None


class NearlyFrame:
    """A part that Spark reads, without what orders its changes."""

    tables = ("t",)
    size_bytes = 1
    table = "t"
    identified = True
    columns = ()

    def frame(self) -> None:
        return None

    def close(self) -> None:
        return None


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (NearlySplit(), "NearlySplit is no Split: it lacks with_stored"),
        (NearlyFrame(), "NearlyFrame is no FramePart: it lacks version"),
    ],
)
def test_a_part_that_lacks_one_method_is_refused_when_its_epoch_is_planned(part, told):
    """E4, P7: as no split its stored values would never be looked up."""
    assert not isinstance(part, Split)
    with pytest.raises(TypeError, match=told):
        EpochPlan(parts=[part])
