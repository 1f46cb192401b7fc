"""Options of the OpenSearch sink, with Data Prepper's names where it has them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from icestream.destination import Destination
from icestream.errors import ConfigInvalid, keep_secret
from icestream.sinks import Sink
from icestream.sinks.options import SinkOptions

STOP = "stop"
DEAD_LETTER = "dead_letter"

DOCUMENT_ID = '${getMetadata("document_id")}'
BULK_ACTION = '${getMetadata("bulk_action")}'
TABLE_NAME = '${getMetadata("iceberg_table_name")}'
# What OpenSearch takes as the name of an index.
_INDEX_NAME = re.compile(r'[^-_+A-Z\\/*?"<>| ,#:\0-\x20][^A-Z\\/*?"<>| ,#:\0-\x20]*')
_INDEX_BYTES_MAX = 255
_ID_HINT = "The id of a document is made of the row's `identifier_columns`; leave this out."


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSearchOptions(SinkOptions):
    """Options of the OpenSearch sink."""

    documents = True

    hosts: Sequence[str] = field(
        default=(),
        metadata={"doc": "Addresses such as `https://search-1:9200`; each is tried in turn."},
    )
    index: str = field(
        default="",
        metadata={
            "doc": "Name of the index; the table's name in lower case by default. "
            f"`{TABLE_NAME}` in it stands for that."
        },
    )
    identifier_columns: Mapping[str, Sequence[str]] = field(
        default_factory=dict,
        metadata={
            "doc": "Columns that identify a row, and make the id of its document, by source table, "
            "or under `*`; the source's key by default."
        },
    )
    document_id_field: str = field(
        default="document_id",
        metadata={"doc": "Only `document_id`: the id is made of the identifier columns."},
    )
    document_id: str = field(
        default="", metadata={"doc": f"Only `{DOCUMENT_ID}`, which means the same."}
    )
    action: str = field(
        default=BULK_ACTION,
        metadata={"doc": "Only the default: rows are indexed and deleted as the table's were."},
    )
    username: str = field(default="", metadata={"doc": "User for basic authentication."})
    password: str = field(
        default="", repr=False, metadata={"doc": "Password for basic authentication."}
    )
    api_key: str = field(
        default="", repr=False, metadata={"doc": "Key that is sent as `Authorization: ApiKey`."}
    )
    aws_sigv4: bool = field(
        default=False,
        metadata={
            "doc": "Sign requests for a domain of Amazon's service, with the credentials in "
            "`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and `AWS_SESSION_TOKEN`."
        },
    )
    aws_region: str = field(default="", metadata={"doc": "Region of that domain."})
    insecure: bool = field(
        default=False, metadata={"doc": "Do not check the certificate of a host."}
    )
    cert: str = field(
        default="", metadata={"doc": "File with the certificates of authorities to trust."}
    )
    bulk_bytes_max: int = field(
        default=5 * 1024**2, metadata={"doc": "Bytes of one bulk request.", "unit": "bytes"}
    )
    bulk_documents_max: int = field(
        default=5000, metadata={"doc": "Documents in one bulk request."}
    )
    progress_index: str = field(
        default="icestream-progress",
        metadata={"doc": "Index that remembers how far each pipeline is."},
    )
    on_error: str = field(
        default=STOP,
        metadata={
            "doc": "What becomes of a document that OpenSearch refuses: `stop`, or `dead_letter`, "
            "which keeps it in the index `<index>__dead_letters`."
        },
    )

    def __post_init__(self) -> None:
        self.guard_secrets()
        self._check_choices()
        if not self.hosts or isinstance(self.hosts, str):
            raise ConfigInvalid(
                "the OpenSearch sink needs a list of hosts",
                hint="Write `hosts: [https://localhost:9200]`.",
            )
        if sum(map(bool, (self.api_key, self.username, self.aws_sigv4))) > 1:
            raise ConfigInvalid(
                "requests can be signed in one way only",
                hint="Leave all but one of `username`, `api_key` and `aws_sigv4` out.",
            )
        if self.aws_sigv4 and not self.aws_region:
            raise ConfigInvalid(
                "aws_sigv4 needs the domain's region", hint="Write `aws_region: eu-central-1`."
            )
        if self.bulk_bytes_max < 1 or self.bulk_documents_max < 1:
            raise ConfigInvalid("bulk_bytes_max and bulk_documents_max must be at least 1")
        _legal(self.progress_index, "progress_index")

    def _check_choices(self) -> None:
        if self.document_id_field != "document_id":
            raise ConfigInvalid(
                f"document_id_field cannot be {self.document_id_field!r}", hint=_ID_HINT
            )
        if self.document_id not in ("", DOCUMENT_ID):
            raise ConfigInvalid(f"document_id cannot be {self.document_id!r}", hint=_ID_HINT)
        if self.action != BULK_ACTION:
            raise ConfigInvalid(
                f"action cannot be {self.action!r}",
                hint=f"Leave it out, or write `action: '{BULK_ACTION}'`.",
            )
        if self.on_error not in (STOP, DEAD_LETTER):
            raise ConfigInvalid(
                f"on_error cannot be {self.on_error!r}",
                hint=f"Write `on_error: {STOP}` or `on_error: {DEAD_LETTER}`.",
            )

    def open(self, pipeline: str, spark: Any) -> Sink:
        """The sink; see `SinkOptions.open`."""
        from icestream.sinks.opensearch.sink import OpenSearchSink

        return OpenSearchSink(self, pipeline)

    def status(self, sink: Any, tables: Sequence[str], pipeline: str) -> list[dict[str, Any]]:
        """What the pipeline's document says of its indices, which have no snapshots."""
        return [{**row, "snapshot_id": None} for row in sink.status(tables)]

    def destination(self) -> Destination:
        """The columns that identify rows, where the file names them."""
        return Destination(keys=self.identifier_columns, seen_early=True)

    def cadence(self) -> Mapping[str, Any]:
        """One epoch after the other: what a later one has sent would make an earlier one stale."""
        return {"epochs_in_flight": 1}

    def refuse_rollback(self, pipeline: str) -> None:
        """An index is never rolled back by itself."""
        raise ConfigInvalid(
            f"pipeline {pipeline} does not write to Iceberg tables",
            hint="To follow a rolled-back table, remove the pipeline's progress document and "
            "its index; the table is then loaded anew.",
        )

    def guard_secrets(self) -> None:
        """Keep what signs requests out of errors and logs, in whatever process this is."""
        keep_secret(self.password)
        keep_secret(self.api_key)

    def index_name(self, table: str) -> str:
        """The index that a table's rows go to."""
        if "%{" in self.index:
            raise ConfigInvalid(
                f"index cannot be {self.index!r}",
                detail="A row keeps one document, in one index; dates in its name would make many.",
                hint="Leave the date out.",
            )
        name = table.lower()
        return _legal(self.index.replace(TABLE_NAME, name) if self.index else name, "index")


def dead_letters(index: str) -> str:
    """The index that keeps what another one refused."""
    return f"{index}__dead_letters"


def _legal(name: str, option: str) -> str:
    if not _INDEX_NAME.fullmatch(name) or len(name.encode()) > _INDEX_BYTES_MAX:
        raise ConfigInvalid(
            f"OpenSearch takes no index of the name {name!r}",
            detail="Names are in lower case, without blanks and signs such as / * ? : #, and do "
            "not begin with - _ +.",
            hint=f"Name another one with `{option}`.",
        )
    return name


OPTIONS = OpenSearchOptions
