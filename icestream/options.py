"""Options: dataclasses that connectors declare, checked by pydantic when a file gives them.

An option is a field of a frozen dataclass with its type, its default and its metadata: `doc` is the
sentence for the reference page, `choices` are all values that there are. `unit` is `duration`,
which takes texts such as `PT10S`, or `bytes`, which only names the unit: `1048576` is taken, `1MB`
is refused. `parse_options` makes such a dataclass from a map of the file; `schemas` tells editors
the same. An error has the path of what is wrong and, for a key, the nearest known one; it never
shows a value, which may be a secret.
"""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from icestream.errors import ConfigInvalid

_DURATION = re.compile(
    r"P(?:(?P<days>\d+)D)?(?:T(?:(?P<hours>\d+)H)?(?:(?P<minutes>\d+)M)?"
    r"(?:(?P<seconds>\d+(?:\.\d+)?)S)?)?",
    re.IGNORECASE,
)
_SHORT_DURATION = re.compile(r"(?P<number>\d+)(?P<unit>ms|s|m|h|d)")
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION_HINT = "Write it as ISO 8601 does: PT10S, PT5M, P1D."
# Kinds of pydantic's errors; the first is our own, whose text is ours.
_OURS = "option"
_UNKNOWN_KEY = "extra_forbidden"
# What a file may say where a text is wanted, and how an editor is told of each type.
_JSON_TYPES: Mapping[type, Sequence[str]] = {
    str: ("string", "number", "boolean"),
    int: ("integer",),
    float: ("number",),
    bool: ("boolean",),
}


def parse_options(kind: type, given: object, place: str) -> Any:
    """An options dataclass from a map, each value as its declaration wants it.

    Raises `ConfigInvalid`, with the path of what is wrong below `place`.
    """
    return checked(_of_dataclass(kind), given, place)


def checked(hint: Any, given: object, place: str) -> Any:
    """A value of a file as a type wants it; raises as `parse_options` does."""
    try:
        return _adapter(hint).validate_python(given)
    except ValidationError as error:
        found = error.errors(include_url=False)
    # The error of the library holds the values: it must not be its cause.
    raise _told(hint, found, place)


def checked_map(given: object, place: str) -> dict[str, str]:
    """A map of texts; raises as `parse_options` does."""
    found: dict[str, str] = checked(_texts_by_key(), given, place)
    return found


def unknown(what: str, key: str, known: Sequence[str], place: str) -> ConfigInvalid:
    """The error about a name that is none of the known ones."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"Did you mean `{near[0]}`? " if near else ""
    return ConfigInvalid(
        f"unknown {what} `{key}` in {place}", hint=f"{hint}Known: {', '.join(sorted(known))}."
    )


def parse_duration(value: object, place: str) -> float:
    """Seconds from an ISO 8601 duration (`PT10S`, `PT1M30S`, `P1D`), `30s` or a number."""
    seconds = _seconds(value)
    if seconds is None:
        raise ConfigInvalid(f"{place} is not a duration", hint=_DURATION_HINT)
    return seconds


def schemas(kinds: Sequence[type]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The JSON Schema of each options dataclass, and the definitions that they refer to."""
    inputs: Any = [(kind, "validation", _adapter(_of_dataclass(kind))) for kind in kinds]
    made: Any
    made, shared = TypeAdapter.json_schemas(inputs)
    return [made[kind, "validation"] for kind in kinds], shared.get("$defs", {})


def parts(kind: type) -> Iterator[tuple[str, type]]:
    """The options dataclasses inside of one, each with the path that leads to it."""
    for name, hint in typing.get_type_hints(kind).items():
        path, pending = name, hint
        while typing.get_args(pending):
            origin, arguments = typing.get_origin(pending), typing.get_args(pending)
            if _is_map(origin):
                path, pending = f"{path}.<table>", arguments[1]
            else:
                pending = arguments[0]
        if dataclasses.is_dataclass(pending) and isinstance(pending, type):
            yield path, pending
            yield from ((f"{path}.{inner}", each) for inner, each in parts(pending))


@cache
def _texts_by_key() -> Any:
    return _wanted(Mapping[str, str])


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


@cache
def _of_dataclass(kind: type) -> Any:
    """What pydantic checks a map of options by: a map of known keys that becomes the dataclass."""
    hints = typing.get_type_hints(kind)
    fields = {
        option.name: Annotated[_wanted(hints[option.name], option.metadata), _said_of(option)]
        for option in dataclasses.fields(kind)
    }
    make: Any = TypedDict
    keys = make(kind.__name__, fields, total=False)
    keys.__doc__ = kind.__doc__
    keys.__pydantic_config__ = ConfigDict(extra="forbid", hide_input_in_errors=True)
    return Annotated[
        keys,
        AfterValidator(lambda values: kind(**values)),
        BeforeValidator(
            lambda given: _keyed_by_text({} if given is None else given, "map of options"),
            json_schema_input_type=keys | None,
        ),
    ]


def _said_of(option: "dataclasses.Field[Any]") -> Any:
    known = option.default is not dataclasses.MISSING
    default = option.default if known else None
    shown = known and isinstance(default, str | int | float) and default != ""
    told: Any = {"default": default} if shown else {}
    return Field(description=option.metadata["doc"], json_schema_extra=told)


def _wanted(hint: Any, metadata: Mapping[str, Any] = types.MappingProxyType({})) -> Any:
    """The type that pydantic checks a value by."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return _wanted(inner, metadata) | None
    if metadata.get("unit") == "duration":
        schema = {"type": ["string", "number"], "examples": ["PT10S", "PT5M"]}
        return Annotated[float, BeforeValidator(_duration), WithJsonSchema(schema)]
    if choices := metadata.get("choices"):
        chosen = BeforeValidator(lambda value: _one_of(choices, value))
        return Annotated[Any, chosen, WithJsonSchema({"enum": list(choices)})]
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _of_dataclass(hint)
    if _is_map(origin):
        as_text = BeforeValidator(lambda given: _keyed_by_text(given, "map"))
        return Annotated[dict[str, _wanted(arguments[1])], as_text]  # type: ignore[misc]
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return _list(_wanted(arguments[0]), arguments[0] is str)
    schema = {"type": list(_JSON_TYPES[hint])}
    return Annotated[
        Any, BeforeValidator(lambda value: _scalar(hint, value)), WithJsonSchema(schema)
    ]


def _is_map(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _list(item: Any, of_texts: bool) -> Any:
    """A list; a single text may stand for a list of one."""

    def whole(given: object) -> object:
        if isinstance(given, str) and of_texts:
            return [given]
        return given if isinstance(given, list) else _refuse("must be a list")

    items = Annotated[list[item], BeforeValidator(whole)]
    if not of_texts:
        return items
    texts = {"type": "array", "items": {"type": list(_JSON_TYPES[str])}}
    return Annotated[items, WithJsonSchema({"anyOf": [{"type": "string"}, texts]})]


def _keyed_by_text(given: object, wanted: str) -> dict[str, Any]:
    """The map with keys as texts: YAML takes `on` for a truth value, and `1` for a number."""
    found = given if isinstance(given, Mapping) else _refuse(f"must be a {wanted}")
    return {str(key): value for key, value in found.items()}


def _one_of(choices: Sequence[Any], value: object) -> object:
    known = any(value == each and type(value) is type(each) for each in choices)
    return value if known else _refuse(f"must be {' or '.join(map(str, choices))}")


def _scalar(hint: type, value: object) -> object:
    if hint is str and isinstance(value, str | int | float | bool):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is bool and isinstance(value, bool):
        return value
    return _refuse(f"must be a {hint.__name__}, not a {type(value).__name__}")


def _duration(value: object) -> float:
    seconds = _seconds(value)
    return _refuse("is not a duration", _DURATION_HINT) if seconds is None else seconds


def _seconds(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return float(value)
    short = _SHORT_DURATION.fullmatch(value) if isinstance(value, str) else None
    if short:
        return float(short["number"]) * _UNIT_SECONDS[short["unit"]]
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if not found or not any(found.groups()):
        return None
    parts = {unit: float(number or 0) for unit, number in found.groupdict().items()}
    return parts["days"] * 86400 + parts["hours"] * 3600 + parts["minutes"] * 60 + parts["seconds"]


def _refuse(text: str, hint: str | None = None) -> Any:
    # The text goes as a value of the template, so that no brace in it is taken for another.
    raise PydanticCustomError(_OURS, "{text}", {"text": text, "hint": hint})


def _told(hint: Any, found: Sequence[Any], place: str) -> ConfigInvalid:
    """The first of the library's errors in our words; a key that is not known comes first."""
    first = next((each for each in found if each["type"] == _UNKNOWN_KEY), found[0])
    steps = [step for step in first["loc"] if isinstance(step, str)]
    if first["type"] == _UNKNOWN_KEY:
        *path, key = steps
        return unknown("key", key, _keys_at(hint, path), ".".join([place, *path]))
    where = ".".join([place, *steps])
    if first["type"] != _OURS:
        return ConfigInvalid(f"{where} is not what it must be")
    return ConfigInvalid(f"{where} {first['ctx']['text']}", hint=first["ctx"]["hint"])


def _keys_at(hint: Any, path: Sequence[str]) -> list[str]:
    """The keys that are known at a place below a map of options."""
    while True:
        arguments = typing.get_args(hint)
        fields = getattr(hint, "__annotations__", None) if not arguments else None
        if fields is not None and not path:
            return list(fields)
        if fields is not None:
            hint, path = fields[path[0]], path[1:]
        elif _is_map(typing.get_origin(hint)):
            hint, path = arguments[1], path[1:]
        else:
            hint = arguments[0]
