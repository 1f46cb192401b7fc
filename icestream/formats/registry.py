"""Schemas of records by the ids in front of them, from a registry that speaks Confluent's API.

    value of a record:   0 | id, 4 bytes, highest first | payload

`framed` cuts a batch by id without looking at each record in turn; `Registry` knows the schema of
an id. What an id means never changes, so an answer is kept for the life of the process.

Whatever is wrong with one record rejects that record: no magic byte, an id that the registry does
not have. What is wrong with the registry stops the read: `SourceUnavailable` when it may pass,
`ConfigInvalid` when somebody must act. No message has credentials in it.
"""

import json
import ssl
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import numpy as np
import urllib3
from urllib3.exceptions import HTTPError, SSLError

from icestream.errors import ConfigInvalid, SourceUnavailable, keep_secret
from icestream.formats.options import RegistryOptions
from icestream.formats.payloads import Payloads
from icestream.formats.rows import Indices
from icestream.kernels import Bytes

HEADER_BYTES = 5
MAGIC = 0
CONNECT_SECONDS_MAX = 10.0
READ_SECONDS_MAX = 30.0
# An import of an import of an import; nobody writes as many, but a circle would never end.
REFERENCES_MAX = 1000
REASON_CHARACTERS_MAX = 200
_ACCEPT = "application/vnd.schemaregistry.v1+json, application/json"
_OK, _UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND = 200, 401, 403, 404
_TOO_MANY, _SERVER_ERROR = 429, 500


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredSchema:
    """A schema as the registry keeps it.

    `kind` is AVRO, PROTOBUF or JSON. `references` are the texts of the schemas that this one
    imports, by the names under which it does so, those that others build on first.
    """

    id: int
    kind: str
    text: str
    references: Mapping[str, str]


class UnknownSchema(Exception):
    """The registry does not have an id; it says so in words for people."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Framed:
    """Records cut by the schema that they name.

    `by_id` has the places of the records of each id, ascending, and their payloads. Records that
    have no value are in `absent`, those without a header in `rejected` with the reason.
    """

    by_id: Mapping[int, tuple[Indices, Payloads]]
    absent: Indices
    rejected: Mapping[int, str]


def framed(payloads: Payloads) -> Framed:
    """Records in the wire format of Confluent's serializers, cut by schema."""
    sizes = payloads.ends - payloads.starts
    long_enough = ~payloads.absent & (sizes >= HEADER_BYTES)
    marked = long_enough.copy()
    marked[long_enough] = payloads.content[payloads.starts[long_enough]] == MAGIC
    places = np.flatnonzero(marked)
    ids = _ids(payloads.content, payloads.starts[places] + 1)
    bodies = payloads.beyond(payloads.starts + HEADER_BYTES)
    by_id = {}
    for number in np.unique(ids):
        chosen = places[ids == number]
        by_id[int(number)] = (chosen, bodies.take(chosen))
    lost = np.flatnonzero(~payloads.absent & ~marked)
    return Framed(
        by_id=by_id,
        absent=np.flatnonzero(payloads.absent),
        rejected={int(place): _headless(int(sizes[place])) for place in lost},
    )


def _ids(content: Bytes, at: Indices) -> Indices:
    four = [content[at + place].astype(np.int64) << (24 - 8 * place) for place in range(4)]
    found: Indices = four[0] | four[1] | four[2] | four[3]
    return found


def _headless(size: int) -> str:
    if size < HEADER_BYTES:
        return f"the record has {size} bytes, fewer than the header that names its schema"
    return "the record does not begin with the zero byte that precedes a schema's id"


class Registry:
    """Asks for schemas; safe between threads."""

    def __init__(self, options: RegistryOptions):
        keep_secret(options.password)
        self._options = options
        self._address = _address(options.url)
        self._pool = urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=CONNECT_SECONDS_MAX, read=READ_SECONDS_MAX),
            **_tls(options, self._address),
        )
        self._known: dict[int, RegisteredSchema] = {}
        self._lock = Lock()

    def schema(self, number: int) -> RegisteredSchema:
        """The schema of an id; raises `UnknownSchema` when the registry has none."""
        with self._lock:
            if number not in self._known:
                self._known[number] = self._load(number)
            return self._known[number]

    def schemas(
        self, numbers: Sequence[int]
    ) -> tuple[Mapping[int, RegisteredSchema], Mapping[int, str]]:
        """The schemas of ids, and of the others why there is none."""
        found, lacking = {}, {}
        for number in numbers:
            try:
                found[number] = self.schema(number)
            except UnknownSchema as error:
                lacking[number] = str(error)
        return found, lacking

    def close(self) -> None:
        """Close all connections."""
        self._pool.clear()

    def _load(self, number: int) -> RegisteredSchema:
        body = self._get(f"/schemas/ids/{number}")
        if body is None:
            raise UnknownSchema(
                f"the schema registry has no schema with id {number}; check that `url` names the "
                "registry of the records' producers, and that the schema was not deleted for good"
            )
        references: dict[str, str] = {}
        self._resolve(body, references, [])
        return RegisteredSchema(
            id=number,
            kind=str(body.get("schemaType") or "AVRO").upper(),
            text=_text(body),
            references=references,
        )

    def _resolve(
        self, body: Mapping[str, Any], found: dict[str, str], above: Sequence[str]
    ) -> None:
        """Add the schemas that one imports, each after those that it imports itself."""
        for reference in body.get("references") or ():
            name = str(reference.get("name"))
            if name in found or name in above:
                continue
            if len(found) >= REFERENCES_MAX or len(above) >= REFERENCES_MAX:
                raise ConfigInvalid(f"a schema imports more than {REFERENCES_MAX} others")
            subject, version = str(reference.get("subject")), reference.get("version")
            inner = self._get(f"/subjects/{quote(subject, safe='')}/versions/{version}")
            if inner is None:
                raise ConfigInvalid(
                    f"the schema registry has no version {version} of subject {subject}",
                    detail=f"A schema imports it as {name}.",
                    hint="Register it again, or undo its deletion.",
                )
            self._resolve(inner, found, [*above, name])
            found[name] = _text(inner)

    def _get(self, path: str) -> Mapping[str, Any] | None:
        """The answer to a request, None when the registry does not have what is asked for."""
        headers = {"Accept": _ACCEPT, **_authorization(self._options)}
        try:
            answer = self._pool.request(
                "GET", self._address + path, headers=headers, retries=False, redirect=False
            )
        except SSLError as error:
            raise ConfigInvalid(
                f"no secure connection to the schema registry at {self._address} can be made",
                detail=str(error),
                hint="Name the authority's certificate with `cert`. A registry without TLS is "
                "written `http://...`.",
            ) from error
        except (HTTPError, OSError) as error:
            raise SourceUnavailable(
                f"could not reach the schema registry at {self._address}",
                detail=str(error),
                hint="Check its `url`, and that it is up.",
            ) from error
        return self._understood(answer.status, answer.data)

    def _understood(self, status: int, content: bytes) -> Mapping[str, Any] | None:
        body = _json(content)
        if status == _OK and isinstance(body.get("schema"), str):
            return body
        # A page that is not there says nothing about a schema; the registry has codes of its own.
        if status == _NOT_FOUND and "error_code" in body:
            return None
        reason = f"{status} {str(body.get('message', ''))[:REASON_CHARACTERS_MAX]}".strip()
        if status in (_UNAUTHORIZED, _FORBIDDEN):
            raise ConfigInvalid(
                f"the schema registry at {self._address} refuses access",
                detail=reason,
                hint="Check `username` and `password`, and that the user may read schemas.",
            )
        if status == _TOO_MANY or status >= _SERVER_ERROR:
            raise SourceUnavailable(
                f"the schema registry at {self._address} could not answer", detail=reason
            )
        raise ConfigInvalid(
            f"what answers at {self._address} is no schema registry",
            detail=reason,
            hint="Check `url`; some registries have Confluent's API under a path of its own, such "
            "as /apis/ccompat/v7.",
        )


def _json(content: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(content)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _text(body: Mapping[str, Any]) -> str:
    return str(body["schema"])


def _address(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigInvalid(
            "the schema registry's url is not an address",
            hint="Write it like `https://registry.example.com:8081`.",
        )
    if parts.username or parts.password:
        raise ConfigInvalid(
            "the schema registry's url has credentials in it",
            hint="Write them as `username` and `password`.",
        )
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))


def _authorization(options: RegistryOptions) -> dict[str, str]:
    if not options.username:
        return {}
    pair = f"{options.username}:{options.password}".encode()
    return {"Authorization": f"Basic {b64encode(pair).decode()}"}


def _tls(options: RegistryOptions, address: str) -> dict[str, Any]:
    if not address.startswith("https"):
        return {}
    try:
        context = ssl.create_default_context(cafile=options.cert or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigInvalid(
            f"the certificates in {options.cert} cannot be read",
            detail=str(error),
            hint="`cert` names a file in PEM form.",
        ) from error
    if options.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return {"ssl_context": context, "cert_reqs": "CERT_NONE", "assert_hostname": False}
    return {"ssl_context": context}
