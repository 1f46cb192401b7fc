"""How often a property is tried: with all its examples in `make test-long`, elsewhere with fewer.

The examples of each run are new ones, so that many runs of a few see as much as one of many.
"""

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

# Set to 1, it asks for all examples.
THOROUGH = os.environ.get("ICESTREAM_THOROUGH", "") == "1"
FEWER = 4


def examples(number: int) -> settings:
    """Settings for so many examples; outside of `make test-long` for a part of them."""
    return settings(max_examples=tries(number))


def with_more(quick: Iterable[Any], more: Iterable[Any]) -> list[Any]:
    """Parameters of a test: `quick` ones for `make test`, and `more` of them in `make test-long`.

    The quick ones take each way once; the others are the same ways in other company.
    """
    long = pytest.mark.long(kept_by="itself, with other parameters")
    sets = [each if isinstance(each, tuple) else (each,) for each in more]
    return [*quick, *(pytest.param(*each, marks=long) for each in sets)]


def tries(number: int) -> int:
    """So many, or a part of them."""
    return number if THOROUGH else -(-number // FEWER)
