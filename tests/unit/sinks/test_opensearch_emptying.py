"""The documents of a truncated table go, all of them or with an error that is waited for."""

import json
from typing import Any

import pytest

from icestream.errors import TargetUnavailable
from icestream.sinks.opensearch.client import Answer
from icestream.sinks.opensearch.emptying import empty
from icestream.sinks.opensearch.options import OpenSearchOptions

OPTIONS = OpenSearchOptions(hosts=["http://localhost:9200"], index="orders")
HALF = {"_shards": {"failed": 1}}


class PagedNode:
    """A node with two pages of one document each; `told` is what an answer says beside that."""

    def __init__(self, told: dict[str, dict[str, Any]]):
        self.told = told
        self.pages = [["a"], ["b"], []]
        self.deleted: list[str] = []

    def call(self, method: str, path: str, body: Any = None) -> Answer:
        step = path.rsplit("/", 1)[-1].partition("?")[0]
        said = {} if method == "DELETE" else dict(self.told.get(step, {}))
        if method == "POST" and step in ("_search", "scroll"):
            hits = [{"_id": id_} for id_ in self.pages.pop(0)]
            said |= {"_scroll_id": "s", "hits": {"hits": hits}}
        return Answer(200, json.dumps(said).encode())

    def ask(self, method: str, path: str, body: Any, kind: str = "") -> Answer:
        lines = [json.loads(line) for line in bytes(body).splitlines()]
        self.deleted += [line["delete"]["_id"] for line in lines]
        items = [{"delete": {"status": 200}} for _ in lines]
        return Answer(200, json.dumps({"errors": False, "items": items}).encode())


def test_all_pages_are_deleted():
    """P6, O12: those that are answered by every shard."""
    node = PagedNode({"_refresh": {"_shards": {"failed": 0}}, "scroll": {"timed_out": False}})
    empty(node, OPTIONS, "orders", 4)
    assert node.deleted == ["a", "b"]


@pytest.mark.parametrize(
    ("step", "told", "deleted"),
    [
        ("_refresh", HALF, []),
        ("_search", HALF, []),
        ("_search", {"timed_out": True}, []),
        ("scroll", HALF, ["a"]),
        ("scroll", {"timed_out": True}, ["a"]),
    ],
)
def test_what_a_shard_does_not_answer_is_not_taken_for_gone(step, told, deleted):
    """P6, O12: its documents would stay for ever, and the table would count as truncated."""
    node = PagedNode({step: told})
    with pytest.raises(TargetUnavailable, match="could not all be read"):
        empty(node, OPTIONS, "orders", 4)
    assert node.deleted == deleted
