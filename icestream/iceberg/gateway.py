"""Calls into Iceberg's Java library: its exceptions as errors that say who may help.

A swap has three outcomes (`commit_outcomes`): landed, refused, unknown. All other calls either give
an answer or raise an error that says what to do (`as_unavailable`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError

from icestream.errors import (
    CommitConflict,
    CommitUnknown,
    ConfigInvalid,
    IcestreamError,
    NeedsOperator,
    ProgressLost,
    SchemaRejected,
    TableReplaced,
    TargetUnavailable,
)

JavaError: TypeAlias = Py4JJavaError
"""What Java raised; the same class for whatever raised it, see `as_py4j`."""
REFUSED = ("CommitFailedException",)
_CERTAIN = (
    "NotAuthorizedException",
    "ForbiddenException",
    "BadRequestException",
    "ValidationException",
    "UnprocessableEntityException",
    "NoSuchTableException",
    "NoSuchNamespaceException",
)
# How the libraries of the storages say that a file is not there.
NO_FILE = ("NotFoundException", "NoSuchKeyException", "FileNotFoundException")


@contextmanager
def as_py4j() -> Iterator[None]:
    """Let all of Java's exceptions look alike: Spark's library raises some of them as its own."""
    try:
        yield
    except Exception as error:
        origin = getattr(error, "_origin", None)
        if origin is None:
            raise
        raise JavaError("the library raised an exception", origin) from error


@contextmanager
def as_unavailable(message: str) -> Iterator[None]:
    """Turn the library's exceptions into errors that say who may help."""
    try:
        with as_py4j():
            yield
    except JavaError as error:
        raise _translated(error, message) from error
    except Py4JNetworkError as error:
        raise TargetUnavailable(message, detail="the JVM is gone") from error


@contextmanager
def commit_outcomes(where: str) -> Iterator[None]:
    """Sort what a swap may raise: refused, certain to have failed, or unknown."""
    try:
        with as_py4j():
            yield
    except JavaError as error:
        names = class_names(error)
        if names & set(REFUSED) and "CommitStateUnknownException" not in names:
            raise CommitConflict(
                f"the catalog refused a commit to {where}", detail=reason(error)
            ) from error
        if "NoSuchTableException" in names:
            raise gone(where) from error
        if names & set(_CERTAIN):
            raise NeedsOperator(
                f"the catalog does not take commits to {where}",
                detail=reason(error),
                hint="Check the catalog's privileges and the table's properties.",
            ) from error
        raise CommitUnknown(
            f"the answer to a commit to {where} was lost", detail=reason(error)
        ) from error
    except Py4JNetworkError as error:
        raise CommitUnknown(
            f"the answer to a commit to {where} was lost", detail="the JVM is gone"
        ) from error


@contextmanager
def as_config(message: str) -> Iterator[None]:
    """Raise `SchemaRejected` where the library refuses what a configuration names."""
    try:
        with as_py4j():
            yield
    except JavaError as error:
        raise SchemaRejected(
            message, detail=reason(error), hint="Name columns that the table has."
        ) from error


def _translated(error: JavaError, message: str) -> IcestreamError:
    names, said = class_names(error), reason(error)
    if "NoSuchTableException" in names:
        return ProgressLost(message, detail=said, hint="Restore the table, or start anew.")
    if names & {"NotAuthorizedException", "ForbiddenException", "OAuthException"}:
        return ConfigInvalid(
            message, detail=said, hint="Check the catalog's credentials (token, credential)."
        )
    if names & {"IllegalArgumentException", "ClassNotFoundException", "NoSuchMethodException"}:
        return ConfigInvalid(
            message, detail=said, hint="Check the catalog's type and its properties."
        )
    if "BadRequestException" in names:
        return ConfigInvalid(message, detail=said, hint="The catalog refuses the request.")
    if "ValidationException" in names:
        return NeedsOperator(message, detail=said, hint="Check the table's properties.")
    return TargetUnavailable(
        message, detail=said, hint="Check that the catalog and its storage can be reached."
    )


def gone(where: str) -> ProgressLost:
    """The error for a table that was dropped or renamed under a running pipeline."""
    return ProgressLost(
        f"{where} is gone",
        detail="It was dropped or renamed while the pipeline was running.",
        hint="Restore the table, or start the pipeline anew to build it from the source.",
    )


def replaced(name: object) -> TableReplaced:
    """The error for a table that is another one than the pipeline has written to."""
    return TableReplaced(
        f"table {name} was dropped and created anew",
        detail="The table of this name is another one than the pipeline has written to.",
        hint="Start the pipeline anew to continue with the new table from its own progress, "
        "or restore the old one.",
    )


def class_names(error: JavaError) -> set[str]:
    """The classes of an exception of Java and of its causes."""
    names: set[str] = set()
    cause = error.java_exception
    while cause is not None and len(names) < 16:
        names.add(cause.getClass().getSimpleName())
        cause = cause.getCause()
    return names


def reason(error: Py4JError) -> str:
    """The first line of what Java said."""
    if isinstance(error, Py4JJavaError):
        text = str(error.java_exception.getMessage() or error.java_exception.toString())
        return text.splitlines()[0] if text else type(error).__name__
    return str(error).splitlines()[0]


def java_list(jvm: Any, texts: Sequence[str]) -> Any:
    """Texts as a list of Java."""
    found = jvm.java.util.ArrayList()
    for text in texts:
        found.add(text)
    return found


def strings(jvm: Any, parts: Sequence[str]) -> Any:
    """Texts as an array of Java."""
    array = jvm.java.lang.reflect.Array.newInstance(
        jvm.java.lang.Class.forName("java.lang.String"), len(parts)
    )
    for number, part in enumerate(parts):
        array[number] = part
    return array


def dictionary(java_map: Any) -> dict[str, str]:
    """A map of Java as a dictionary of texts."""
    return {str(entry.getKey()): str(entry.getValue()) for entry in java_map.entrySet()}
