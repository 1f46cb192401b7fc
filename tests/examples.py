"""How often a property is tried: with all its examples in `make test-long`, elsewhere with fewer.

The examples of each run are new ones, so that many runs of a few see as much as one of many.
"""

import os

from hypothesis import settings

# Set to 1, it asks for all examples.
THOROUGH = os.environ.get("ICESTREAM_THOROUGH", "") == "1"
FEWER = 4


def examples(number: int) -> settings:
    """Settings for so many examples; outside of `make test-long` for a part of them."""
    return settings(max_examples=tries(number))


def tries(number: int) -> int:
    """So many, or a part of them."""
    return number if THOROUGH else -(-number // FEWER)
