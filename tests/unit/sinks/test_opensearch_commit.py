"""The progress document goes by the four rules; here over a client in memory."""

import json
from dataclasses import replace

import pytest

from icestream.epoch import Epoch, Progress
from icestream.errors import CommitUnknown, Fenced, ProgressLost
from icestream.frontier import Frontier
from icestream.sinks import BESIDE
from icestream.sinks.opensearch.client import Answer
from icestream.sinks.opensearch.commit import Commit, Index, ProgressDocument
from icestream.sinks.opensearch.options import OpenSearchOptions
from icestream.sinks.opensearch.sink import OpenSearchSink

INDEX = Index(name="orders", uuid="u1")


class MemoryClient:
    """As much of OpenSearch as a progress document needs; answers can be lost."""

    def __init__(self):
        self.document, self.sequence, self.lose = None, 0, 0
        self.before = []
        self.uuid = INDEX.uuid

    def call(self, method, path, body=None):
        if "/_doc/" in path:
            if self.document is None:
                return Answer(404, b'{"found": false}')
            told = {"_source": self.document, "_seq_no": self.sequence, "_primary_term": 1}
            return Answer(200, json.dumps(told).encode())
        owner = {"settings": {"index": {"uuid": self.uuid}}, "mappings": {}}
        return Answer(200, json.dumps({INDEX.name: owner}).encode())

    def ask(self, method, path, body):
        if self.before:
            self.before.pop(0)()
        if "_create" in path and self.document is not None:
            return Answer(409, b"{}")
        if "if_seq_no" in path and f"if_seq_no={self.sequence}&" not in path:
            return Answer(409, b"{}")
        self.document, self.sequence = json.loads(body), self.sequence + 1
        if self.lose:
            self.lose -= 1
            raise CommitUnknown("no answer")
        return Answer(200, b"{}")


def claimed(client):
    """A run that has claimed the pipeline, and its progress."""
    document = ProgressDocument(client, "progress", "pipe")
    return document, document.claim([]).progress


def epoch(expected, number):
    upper = Frontier({"log": (number,)})
    new = replace(expected, epoch=number, lower=expected.upper, upper=upper, tables=1)
    return Commit(expected=expected, new=new, indices={"t": INDEX}, labels={})


def test_an_epoch_is_published_once_when_its_answer_is_lost():
    """O12, E3: the epoch is found published, and the document is not replaced again."""
    client = MemoryClient()
    document, mine = claimed(client)
    client.lose = 1
    commit = epoch(mine, 1)
    assert document.publish(commit)
    assert (client.sequence, document.read().progress) == (2, commit.new)
    assert not document.publish(epoch(commit.new, 2))
    assert (client.sequence, client.document["epoch"], client.document["tables"]) == (3, 2, 1)


def test_a_claim_whose_answer_is_lost_is_made_once():
    """O12, E6: it is known by its id."""
    client = MemoryClient()
    client.lose = 1
    _, mine = claimed(client)
    assert (mine.generation, client.sequence) == (1, 1)


def test_the_older_of_two_runs_is_fenced_even_between_check_and_swap():
    """O12, E6: the swap refuses, and the next look shows the newer run."""
    client = MemoryClient()
    document, mine = claimed(client)
    client.before = [lambda: claimed(client) and None]
    with pytest.raises(Fenced, match="a newer run of pipeline pipe has taken over"):
        document.publish(epoch(mine, 1))
    with pytest.raises(Fenced, match="a newer run"):
        document.name(mine, {"t": INDEX})
    assert client.document["epoch"] == 0


def test_progress_that_this_run_did_not_leave_stops_it():
    """O12, E8: nothing is published over a document that was put back, or for a lost index."""
    client = MemoryClient()
    document, mine = claimed(client)
    first = epoch(mine, 1)
    document.publish(first)
    other = Progress(pipeline="pipe", generation=1, epoch=0)
    with pytest.raises(ProgressLost, match="the progress of pipeline pipe is not the one"):
        document.name(other, {"t": INDEX})
    with pytest.raises(Fenced, match="pipeline pipe is ahead of this run"):
        document.publish(replace(first, new=replace(first.new, upper=Frontier({"log": (9,)}))))
    client.uuid = "another"
    with pytest.raises(ProgressLost, match="has been made anew"):
        document.publish(epoch(first.new, 2))
    assert client.document["epoch"] == 1


def test_a_heartbeat_in_the_name_of_a_table_without_an_index_publishes_nothing():
    """E9, O6: else the progress would name an index that nobody made."""
    sink = OpenSearchSink(OpenSearchOptions(hosts=["http://localhost:9200"], index="t"), "pipe")
    client = MemoryClient()
    sink._document = ProgressDocument(client, "progress", "pipe")
    sink.claim([])
    upper = Frontier({"log": (1,)})
    first = Epoch(number=1, lower=Frontier(), upper=upper)
    assert not sink.heartbeat(first, {}, "t")
    assert (client.sequence, client.document["epoch"]) == (1, 0)
    assert sink.heartbeat(first, {})
    assert sink.durable([])[BESIDE].upper == upper
    sink.close()
