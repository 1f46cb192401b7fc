"""Abilities: what some sources or sinks can do beyond what each of them must.

An ability is a runtime-checkable protocol, which the loop asks for by name with `isinstance`.
`isinstance` says no for a class that has one of two methods, as for one that has none. So a class
that has a part of an ability is refused when its pipeline is opened (`refuse_halves`).
"""

from collections.abc import Sequence


def members(protocol: type) -> frozenset[str]:
    """The names that a protocol asks for, also those of its bases."""
    own = (base for base in protocol.__mro__ if getattr(base, "_is_protocol", False))
    found = {name for base in own for name in (*vars(base), *vars(base).get("__annotations__", ()))}
    return frozenset(name for name in found if not name.startswith("_"))


def lacking(thing: object, protocol: type) -> list[str]:
    """What a thing lacks of what a protocol asks for."""
    return sorted(name for name in members(protocol) if not hasattr(type(thing), name))


def refuse_halves(thing: object, abilities: Sequence[type]) -> None:
    """Raise `TypeError` for an ability of which the thing has some methods and lacks others."""
    for ability in abilities:
        missing = lacking(thing, ability)
        if missing and len(missing) < len(members(ability)):
            name = type(thing).__name__
            raise TypeError(f"{name} is half of {ability.__name__}: it lacks {', '.join(missing)}")
