"""Which sinks can stand behind selects, and what the others are told."""

from types import SimpleNamespace

import pytest

from icestream.errors import ConfigInvalid
from icestream.sinks.shaped import shaped
from icestream.transform import WHOLE_ROWS


class Remembers:
    """A sink that keeps texts with its tables and cannot change what these take."""

    def recalled(self, table: str, name: str) -> str | None:
        """Nothing."""

    def remember(self, table: str, name: str, value: str) -> None:
        """Forget it."""

    def decided(self, epoch: object, tables: object) -> list[str]:
        """None."""
        return []


@pytest.mark.parametrize(
    ("sink", "lacks"), [(object(), "RemembersSources and Evolves"), (Remembers(), "lacks Evolves")]
)
@pytest.mark.parametrize("documents", [False, True])
def test_a_sink_that_cannot_stand_behind_selects_is_told_what_it_lacks(sink, lacks, documents):
    """E1, E11: a file without a `transform` is not told to leave it out."""
    selects = SimpleNamespace(of_all=WHOLE_ROWS if documents else "")
    with pytest.raises(ConfigInvalid) as caught:
        shaped(sink, selects)
    assert lacks in str(caught.value.detail)
    assert ("documents" in caught.value.message) == documents
    assert ("`transform`" in str(caught.value.hint)) == (not documents)
