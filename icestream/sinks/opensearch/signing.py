"""Signature version 4 of Amazon Web Services, for managed OpenSearch domains.

Credentials come from the environment variables that all of Amazon's tools know.
"""

import hashlib
import hmac
import os
import time
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote

from icestream.errors import ConfigInvalid, keep_secret

_ALGORITHM = "AWS4-HMAC-SHA256"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Who signs; they travel to workers with the writer."""

    key_id: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)

    def guard(self) -> None:
        """Keep them out of errors and logs, in whatever process this is."""
        keep_secret(self.secret)
        keep_secret(self.token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is signed of a request; the path comes with its query, as it is sent."""

    method: str
    host: str
    path: str
    body: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Where a signature holds."""

    region: str
    service: str


def from_environment() -> Credentials:
    """The credentials of this process."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    key_id, secret, token = (os.environ.get(name, "") for name in names)
    if not key_id or not secret:
        raise ConfigInvalid(
            "there are no credentials to sign requests with",
            hint=f"Set {names[0]} and {names[1]}, and {names[2]} for those that expire.",
        )
    return Credentials(key_id=key_id, secret=secret, token=token)


def signature(
    request: Request, scope: Scope, credentials: Credentials, now: float
) -> dict[str, str]:
    """The headers that sign a request at this time, in seconds since 1970."""
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    signed = {"host": request.host, "x-amz-date": moment}
    if credentials.token:
        signed["x-amz-security-token"] = credentials.token
    path, _, query = request.path.partition("?")
    pairs = sorted((_encoded(k), _encoded(v)) for k, v in parse_qsl(query, keep_blank_values=True))
    names = ";".join(signed)
    canonical = [
        request.method,
        # The path is encoded as it is sent, and once more.
        quote(path, safe="/-_.~"),
        "&".join(f"{name}={value}" for name, value in pairs),
        *(f"{name}:{value}" for name, value in signed.items()),
        "",
        names,
        hashlib.sha256(request.body).hexdigest(),
    ]
    steps = [moment[:8], scope.region, scope.service, "aws4_request"]
    digest = hashlib.sha256("\n".join(canonical).encode()).hexdigest()
    text = "\n".join([_ALGORITHM, moment, "/".join(steps), digest])
    key = b"AWS4" + credentials.secret.encode()
    for step in [*steps, text]:
        key = hmac.digest(key, step.encode(), "sha256")
    authorization = (
        f"{_ALGORITHM} Credential={credentials.key_id}/{'/'.join(steps)}, "
        f"SignedHeaders={names}, Signature={key.hex()}"
    )
    # The library sends the host by itself.
    sent = {name: value for name, value in signed.items() if name != "host"}
    return {**sent, "Authorization": authorization}


def _encoded(text: str) -> str:
    return quote(text, safe="-_.~")
