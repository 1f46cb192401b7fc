"""Whether a sink takes documents is said twice: by its options, and by its writer."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from icestream.errors import ConfigInvalid
from icestream.sinks.shaped import ShapedWriter
from icestream.transform import WHOLE_ROWS
from icestream.worker import write_epoch
from tests.toys.counter import CounterSplit
from tests.toys.folder import FolderWriter

ROWS = FolderWriter(folder="", epoch=1, schemas={}, keys={})
SPLIT = CounterSplit(table="ones", every=1, first=0, end=1, notes=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents(FolderWriter):
    """A writer that looks like one of documents."""

    version: int = 1


def write(writer: Any, selects: Any = None) -> None:
    """Begin to write an epoch; there is no Spark."""
    spark: Any = SimpleNamespace()
    write_epoch(spark, [SPLIT], writer, True, "", selects)


def test_a_sink_whose_options_and_writer_contradict_each_other_is_refused():
    """U3: rows would come to a writer of documents, or documents to one of rows."""
    documents = Documents(folder="", epoch=1, schemas={}, keys={})
    with pytest.raises(ConfigInvalid, match="contradict each other") as caught:
        write(documents)
    assert "Documents has a `version`" in str(caught.value.detail)
    shaped = ShapedWriter(inner=documents, selects=[], keys={}, used={})
    with pytest.raises(ConfigInvalid, match="contradict each other"):
        write(shaped)
    whole = SimpleNamespace(of_all=WHOLE_ROWS)
    with pytest.raises(ConfigInvalid, match="contradict each other") as caught:
        write(replace(shaped, inner=ROWS), whole)
    assert "FolderWriter has no `version`" in str(caught.value.detail)
    for agreed, selects in ((ROWS, None), (shaped, whole)):
        # It goes on to Spark, which is not there.
        with pytest.raises(AttributeError, match="sparkContext"):
            write(agreed, selects)
