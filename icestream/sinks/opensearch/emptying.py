"""A table that is truncated at its source: the documents of its index go, page by page.

OpenSearch can delete by a query, but no query asks for versions. So the ids are read in pages, and
each is deleted with a version that is below those of the epoch: a document that came after the
truncation is newer, and stays.
"""

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from icestream.change import AT, OP, Op
from icestream.documents import DOCUMENT, ID
from icestream.errors import ConfigInvalid, TargetUnavailable
from icestream.sinks.opensearch.bulk import Sending
from icestream.sinks.opensearch.client import BAD_REQUEST, OK, Answer, Client
from icestream.sinks.opensearch.options import OpenSearchOptions

_KEPT_OPEN = "2m"
_PAGE = {"size": 5000, "_source": False, "sort": ["_doc"], "query": {"match_all": {}}}
_FILTER = "filter_path=_scroll_id,hits.hits._id,error,timed_out,_shards.failed"


def empty(client: Client, options: OpenSearchOptions, index: str, version: int) -> None:
    """Delete all documents of an index that are older than a version; a second time does nothing.

    Raises `TargetUnavailable` when OpenSearch does not answer in time.
    """
    for ids in _pages(client, index):
        deletes = {
            OP: pa.array(np.full(len(ids), int(Op.DELETE)), pa.int8()),
            AT: pa.array(np.full(len(ids), version), pa.int64()),
            ID: ids,
            DOCUMENT: pa.nulls(len(ids), pa.large_string()),
        }
        Sending(client, options, index, pa.record_batch(deletes)).run()


def _pages(client: Client, index: str) -> Iterator[pa.Array]:
    """The ids of all documents, also of those that searches do not find yet."""
    path = f"/{quote(index, safe='')}"
    _expect(client.call("POST", f"{path}/_refresh"), index)
    search = f"{path}/_search?scroll={_KEPT_OPEN}&allow_partial_search_results=false&{_FILTER}"
    page = _expect(client.call("POST", search, _PAGE), index)
    scroll = page.get("_scroll_id")
    try:
        while hits := page.get("hits", {}).get("hits"):
            yield pa.array([hit["_id"] for hit in hits], pa.large_string())
            more = {"scroll": _KEPT_OPEN, "scroll_id": scroll}
            page = _expect(client.call("POST", f"/_search/scroll?{_FILTER}", more), index)
            scroll = page.get("_scroll_id", scroll)
    finally:
        if scroll:
            client.call("DELETE", "/_search/scroll", {"scroll_id": scroll})


def _expect(answer: Answer, index: str) -> dict[str, Any]:
    """What was answered; raises unless all shards did, for what one of them holds would stay."""
    if answer.status == BAD_REQUEST:
        raise ConfigInvalid(
            f"the documents of index {index} cannot be read in pages",
            detail=answer.reason,
            hint=f"Let `max_result_window` of the index be {_PAGE['size']} at least.",
        )
    found: dict[str, Any] = answer.json() if answer.status == OK else {}
    whole = not found.get("timed_out") and not found.get("_shards", {}).get("failed")
    if answer.status != OK or not whole:
        raise TargetUnavailable(
            f"the documents of index {index} could not all be read",
            detail=answer.reason if answer.status != OK else "A shard did not answer.",
            hint="It is tried again; look at the health of the cluster.",
        )
    return found
