"""Errors are sorted by what the one who catches them does, and survive the way from a worker."""

import inspect
import pickle

import pytest

from icestream import errors
from icestream.errors import Broken, IcestreamError, check

# What a handler catches decides what it does; moving a class here moves people's alarms.
TREE = {
    "IcestreamError": ("Exception", 1),
    "Retryable": ("IcestreamError", 1),
    "SourceUnavailable": ("Retryable", 1),
    "TargetUnavailable": ("Retryable", 1),
    "CommitConflict": ("Retryable", 1),
    "SparkFailed": ("Retryable", 1),
    "CommitUnknown": ("IcestreamError", 1),
    "Fenced": ("IcestreamError", 4),
    "NeedsOperator": ("IcestreamError", 3),
    "ConfigInvalid": ("NeedsOperator", 2),
    "HistoryLost": ("NeedsOperator", 3),
    "ProgressLost": ("NeedsOperator", 3),
    "TableReplaced": ("ProgressLost", 3),
    "RolledBack": ("ProgressLost", 3),
    "FrontierLost": ("ProgressLost", 3),
    "SchemaRejected": ("NeedsOperator", 3),
    "DataRejected": ("NeedsOperator", 3),
    "Broken": ("IcestreamError", 5),
}


def kinds() -> dict[str, type[IcestreamError]]:
    members = inspect.getmembers(errors, inspect.isclass)
    return {name: kind for name, kind in members if issubclass(kind, IcestreamError)}


def test_the_tree_and_its_exit_codes_are_pinned():
    """E6, U2: what a fenced run or a wrong configuration ends with does not change."""
    found = {name: (kind.__base__.__name__, kind.exit_code) for name, kind in kinds().items()}
    assert found == TREE


def test_every_kind_is_drawn_in_the_module():
    """E12: the picture at the top of the module names every error."""
    assert [name for name in kinds() if name not in errors.__doc__] == []


@pytest.mark.parametrize("name", sorted(TREE))
def test_an_error_keeps_message_detail_and_hint_through_pickling(name):
    """E12: an error that a worker met reaches the operator as it was raised."""
    error = kinds()[name]("it broke", detail="Here.", hint="Mend it.")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (copy.message, copy.detail, copy.hint) == ("it broke", "Here.", "Mend it.")
    assert copy.exit_code == error.exit_code


def test_an_error_prints_its_message_then_detail_then_hint():
    """U2: text for people."""
    assert str(IcestreamError("it broke")) == "it broke"
    assert str(IcestreamError("it broke", detail="Here.")) == "it broke\ndetail: Here."
    both = IcestreamError("it broke", detail="Here.", hint="Mend it.")
    assert str(both) == "it broke\ndetail: Here.\nhint: Mend it."


def test_an_error_as_json_tells_its_kind():
    """U2: `--json` for programs."""
    assert Broken("it broke", hint="Mend it.").to_json() == {
        "error": "Broken",
        "message": "it broke",
        "detail": None,
        "hint": "Mend it.",
    }


def test_an_invariant_that_does_not_hold_stops_at_once():
    """E3: checks are always on, unlike `assert`."""
    check(1 == 1, "one is one")
    with pytest.raises(Broken, match="invariant does not hold: one is two"):
        check(1 == 2, "one is two")
