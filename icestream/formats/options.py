"""What a pipeline file may say about records, and about the registry that has their schemas.

A pipeline file is read without any decoder: to import those takes seconds.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from icestream.change import Op
from icestream.errors import ConfigInvalid

# Formats whose schemas a registry has.
REGISTERED = ("avro", "protobuf")
FORMATS = ("json", "string", *REGISTERED)
ENVELOPES = ("none", "upsert", "cdc_field", "debezium")
OPERATIONS = {"insert": Op.INSERT, "update": Op.UPSERT, "delete": Op.DELETE}
# Wider tables are slow for every reader; who has them knows it.
COLUMNS_MAX = 1_000
# What Debezium sends in place of a value that the database did not tell.
UNAVAILABLE_VALUE = "__debezium_unavailable_value"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryOptions:
    """Where the registry is and how to sign on to it."""

    url: str = field(
        default="", metadata={"doc": "Address such as `https://registry.example.com:8081`."}
    )
    username: str = field(
        default="", metadata={"doc": "User, or API key, for basic authentication."}
    )
    password: str = field(
        default="", repr=False, metadata={"doc": "Password, or API secret, of that user."}
    )
    cert: str = field(
        default="", metadata={"doc": "File with the certificates of authorities to trust."}
    )
    insecure: bool = field(
        default=False, metadata={"doc": "Do not check the certificate of the registry."}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOptions:
    """How the records of a topic are written and what they mean."""

    format: str = field(
        default="json",
        metadata={
            "doc": "How values are written: `json`, `string`, or `avro` and `protobuf` with a "
            "schema registry."
        },
    )
    envelope: str = field(
        default="none",
        metadata={
            "doc": "What records are: `none` (rows to append), `upsert` (rows by key, null deletes "
            "them), `cdc_field` (rows with their operation in a field), `debezium`, or "
            "`cockroachdb` (as `source.cockroachdb.kafka`)."
        },
    )
    cdc_field: str = field(
        default="",
        metadata={"doc": "The value's member that tells the operation; a path with dots is fine."},
    )
    operations: Mapping[str, str] = field(
        default_factory=dict,
        metadata={
            "doc": "What that member's texts mean: `insert`, `update` or `delete`. An insert "
            "promises that the row is new. By default I, U, D, c, r, u, d and the words themselves "
            "are known, and all but deletes replace the row if it is there."
        },
    )
    key: Sequence[str] = field(
        default=(),
        metadata={
            "doc": "The columns that identify a row; those of the record's key by default. A key "
            "that is no object is the value of the one column named here."
        },
    )
    key_format: str = field(
        default="", metadata={"doc": "How keys are written; as the values are by default."}
    )
    columns_max: int = field(
        default=COLUMNS_MAX,
        metadata={
            "doc": "Columns of a table at most, fields inside of columns included; a record that "
            "would add more cannot be taken."
        },
    )
    unavailable_value: str = field(
        default=UNAVAILABLE_VALUE,
        metadata={"doc": "Debezium's `unavailable.value.placeholder`."},
    )

    def __post_init__(self) -> None:
        _refuse_unknown("format", self.format, FORMATS)
        _refuse_unknown("key_format", self.keys_format(), FORMATS)
        fitting = {"json": ("json", "string"), "string": ("string",)}
        if self.keys_format() not in fitting.get(self.format, (*REGISTERED, "string")):
            raise ConfigInvalid(
                f"values in {self.format} cannot have keys in {self.keys_format()}",
                hint="JSON goes with JSON or plain text, Avro and Protobuf with each other and "
                "plain text.",
            )
        _refuse_unknown("envelope", self.envelope, ENVELOPES)
        if self.columns_max < 1:
            raise ConfigInvalid("`columns_max` of a topic's values must be at least 1")
        for meaning in self.operations.values():
            _refuse_unknown("operation", meaning, list(OPERATIONS))
        if (self.envelope == "cdc_field") != bool(self.cdc_field):
            raise ConfigInvalid(
                "`envelope: cdc_field` and the option `cdc_field` need each other",
                hint="Name the member that tells the operation, such as `cdc_field: op`.",
            )
        if self.format == "string" and self.envelope != "none":
            raise ConfigInvalid(
                f"plain text cannot be in the envelope {self.envelope}",
                hint="Use `envelope: none`: each record is a row with the columns key and value.",
            )

    def names_max(self) -> int:
        """Different names in the objects of a batch at most; envelopes have names as well."""
        return max(self.columns_max, COLUMNS_MAX)

    def keys_format(self) -> str:
        """How keys are written."""
        return self.key_format or self.format


def _refuse_unknown(what: str, name: str, known: Sequence[str]) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"Did you mean `{near[0]}`? " if near else ""
    raise ConfigInvalid(
        f"unknown {what} `{name}` of a topic's values", hint=f"{hint}Known: {', '.join(known)}."
    )
