"""The four rules over a destination in memory: each of them is needed."""

from dataclasses import replace

import pytest

from icestream.commit_protocol import Move, Subject, publish, swap_rule
from icestream.epoch import Progress
from icestream.errors import CommitConflict, CommitUnknown, Fenced, ProgressLost
from icestream.frontier import Frontier

SUBJECT = Subject(name="place p", over=" place p", meddling="writes there")
CLAIMED = Progress(pipeline="p", generation=2, epoch=4, upper=Frontier({"log": (10,)}))
NEXT = replace(CLAIMED, epoch=5, lower=CLAIMED.upper, upper=Frontier({"log": (20,)}))
MOVE = Move(expected=CLAIMED, new=NEXT, subject=SUBJECT)


class Place:
    """One head with a version; `before` happens between check and swap, `lose` loses answers."""

    def __init__(self, progress=CLAIMED):
        self.version, self.found = 1, progress
        self.epochs = []
        self.before = []
        self.lose = 0

    def set(self, progress):
        self.version, self.found = self.version + 1, progress

    def heads(self, keys):
        return dict.fromkeys(keys, (self.version, self.found))

    def progress(self, head):
        return head[1]

    def refuse_broken_history(self, key, head, broken):
        pass

    def fits(self, key, head):
        pass

    def swap(self, heads):
        if self.before:
            self.before.pop(0)()
        (version, _) = heads["k"]
        if swap_rule() and version != self.version:
            raise CommitConflict("moved")
        self.set(NEXT)
        self.epochs.append(NEXT.epoch)
        if self.lose:
            self.lose -= 1
            raise CommitUnknown("no answer")
        return {"k": self.version}


def attempts(tries_max=5):
    left = [tries_max]

    def failed(error):
        left[0] -= 1
        if not left[0]:
            raise error

    return failed


def bring(place, move=MOVE):
    return publish(place, {"k": move}, attempts())["k"].result


def off(monkeypatch, *rules):
    text = ",".join(f"rule-{rule}=off" for rule in rules)
    monkeypatch.setenv("ICESTREAM_FAILPOINTS", text)  # the rules that are taken out


def test_an_epoch_lands_once_whatever_becomes_of_answers():
    """E3: a lost answer is read back, and the epoch is there once."""
    place = Place()
    place.lose = 1
    assert bring(place) is None
    assert place.epochs == [5]
    assert bring(place) is None
    assert place.epochs == [5]


def test_a_rival_between_check_and_swap_is_noticed():
    """E3, E6: a conflict is checked anew; a claim made meanwhile fences, another write does not."""
    place = Place()
    place.before = [lambda: place.set(CLAIMED)]
    assert bring(place) == place.version
    place = Place()
    place.before = [lambda: place.set(replace(CLAIMED, generation=3))]
    with pytest.raises(Fenced, match="has taken over place p"):
        bring(place)
    assert place.epochs == []


def test_without_the_swap_a_claim_is_overwritten(monkeypatch):
    """E6: the swap is what holds against a rival between check and commit."""
    off(monkeypatch, "swap")
    place = Place()
    place.before = [lambda: place.set(replace(CLAIMED, generation=3))]
    bring(place)
    assert place.found.generation == 2


def test_without_fence_and_continuity_a_zombie_commits(monkeypatch):
    """E6: each of the two covers for the other."""
    ahead = replace(NEXT, generation=3, epoch=6)
    for rules in [(), ("fence",), ("continuity",)]:
        off(monkeypatch, *rules)
        place = Place(ahead)
        with pytest.raises(Fenced):
            bring(place)
        assert place.epochs == []
    off(monkeypatch, "fence", "continuity")
    place = Place(ahead)
    bring(place)
    assert place.epochs == [5]


def test_a_claim_without_an_epoch_is_fenced_by_the_fence_alone(monkeypatch):
    """E6: a successor that has done nothing yet owns the place."""
    place = Place(replace(CLAIMED, generation=3))
    with pytest.raises(Fenced, match="a newer run"):
        bring(place)
    off(monkeypatch, "fence")
    with pytest.raises(ProgressLost):
        bring(place)


def test_without_continuity_an_epoch_is_left_out(monkeypatch):
    """E3: the epoch would not join on to what is durable."""
    place = Place(replace(CLAIMED, epoch=3))
    with pytest.raises(ProgressLost, match="not the one this run left there"):
        bring(place)
    off(monkeypatch, "continuity")
    bring(place)
    assert place.epochs == [5]


def test_without_read_back_an_epoch_that_landed_is_not_known(monkeypatch):
    """E3: it is taken for a rival's, and with continuity off as well it is there twice."""
    off(monkeypatch, "read-back")
    place = Place()
    place.lose = 1
    with pytest.raises(Fenced, match="is ahead of this run"):
        bring(place)
    off(monkeypatch, "read-back", "continuity")
    place = Place()
    place.lose = 1
    bring(place)
    assert place.epochs == [5, 5]


def test_an_epoch_that_is_there_is_recounted_without_its_rows():
    """E3: what is said of an epoch's tables is corrected in place."""
    place = Place(replace(NEXT, tables=1))
    recount = replace(MOVE, expected=place.found, new=replace(NEXT, tables=2), recount=True)
    assert bring(place, recount) is not None
    with pytest.raises(Fenced):
        bring(Place(replace(NEXT, epoch=7)), recount)
