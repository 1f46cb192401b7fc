"""The errors that end a run or make it wait, sorted by what the one who catches them does.

    IcestreamError(message, *, detail, hint)
    ├── Retryable        SourceUnavailable, TargetUnavailable, CommitConflict, SparkFailed
    │                    -> waited out by the pipeline (`icestream.patience`)
    ├── CommitUnknown    the answer was lost        -> read back, then decide; delete nothing
    ├── Fenced           someone newer owns the target -> stop quietly, an exit code of its own
    ├── NeedsOperator    ConfigInvalid, HistoryLost, ProgressLost, TableReplaced, RolledBack,
    │                    FrontierLost, SchemaRejected, DataRejected -> stop, say what to do
    └── Broken           an invariant does not hold -> crash at once

Messages read like PostgreSQL's: the primary line in lowercase without a period, then detail and
hint as sentences. "could not" is for what may succeed later, "cannot" for what never will.
No error carries a secret that the configuration took from the environment.

An error that is a part of a contract lives with the contract: `SplitsLost` in `icestream.sources`,
`SchemaGap` in `icestream.schema`, `StaleWrite` in `icestream.sinks`.
"""

from typing import Any

# A shorter one would blot out words that have nothing to do with it.
SECRET_CHARACTERS_MIN = 4
_secrets: set[str] = set()


def keep_secret(value: str) -> None:
    """Never show this value: errors and logs have stars in its place."""
    if len(value) >= SECRET_CHARACTERS_MIN:
        _secrets.add(value)


def shown(text: str) -> str:
    """The text without the values that are kept secret."""
    for value in sorted(_secrets, key=len, reverse=True):
        text = text.replace(value, "***")
    return text


class IcestreamError(Exception):
    """What went wrong, where, and what to do about it."""

    exit_code = 1

    def __init__(self, message: str, *, detail: str | None = None, hint: str | None = None):
        super().__init__(shown(message))
        self.message = shown(message)
        self.detail = shown(detail) if detail else detail
        self.hint = shown(hint) if hint else hint

    def __str__(self) -> str:
        lines = [self.message]
        if self.detail:
            lines.append(f"detail: {self.detail}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel from workers to the coordinator; keyword arguments do not pickle by default.
        return _rebuild, (type(self), self.message, self.detail, self.hint)

    def to_json(self) -> dict[str, str | None]:
        """The error as `--json` prints it."""
        kind = type(self).__name__
        return {"error": kind, "message": self.message, "detail": self.detail, "hint": self.hint}


def _rebuild(
    kind: type[IcestreamError], message: str, detail: str | None, hint: str | None
) -> IcestreamError:
    return kind(message, detail=detail, hint=hint)


class Retryable(IcestreamError):
    """May succeed when tried again."""

    exit_code = 1


class SourceUnavailable(Retryable):
    """The source does not answer."""


class TargetUnavailable(Retryable):
    """The catalog or its storage does not answer, and nothing was committed."""


class CommitConflict(Retryable):
    """The catalog refused the swap: someone else committed first."""


class SparkFailed(Retryable):
    """Spark did not start, or a job of it failed: a task was killed, or could not read."""


class CommitUnknown(IcestreamError):
    """The answer to a commit was lost: it may or may not have landed."""

    exit_code = 1


class Fenced(IcestreamError):
    """A newer run of the same pipeline owns the target."""

    exit_code = 4


class NeedsOperator(IcestreamError):
    """Nothing goes on before a person has decided."""

    exit_code = 3


class ConfigInvalid(NeedsOperator):
    """The configuration is wrong."""

    exit_code = 2


class HistoryLost(NeedsOperator):
    """The source no longer has what comes after the durable frontier."""


class ProgressLost(NeedsOperator):
    """The table's progress is not the one this pipeline left there."""


class TableReplaced(ProgressLost):
    """The table of this name is another one than it was."""


class RolledBack(ProgressLost):
    """The last committed snapshot is no longer part of the branch's history."""


class FrontierLost(ProgressLost):
    """What a snapshot's summary refers to as its frontiers is gone."""


class SchemaRejected(NeedsOperator):
    """The data's schema cannot be brought into the table safely."""


class DataRejected(NeedsOperator):
    """A row or file of the source cannot be read as what it claims to be."""


class Broken(IcestreamError):
    """An invariant does not hold: a defect of icestream or tampering, never an everyday event."""

    exit_code = 5


def check(condition: object, what_must_hold: str) -> None:
    """Stop at once unless the invariant holds; unlike `assert` it is always on."""
    if not condition:
        raise Broken(f"invariant does not hold: {what_must_hold}")
