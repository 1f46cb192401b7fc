"""Records of any format as changes.

JSON and plain text explain themselves. Avro and Protobuf records name their schemas, which a
registry has; a batch then comes out in portions, one for each pair of schemas of value and key.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pyarrow as pa

from icestream.errors import ConfigInvalid
from icestream.formats import registered
from icestream.formats.arrow_fields import ArrowField, arrow_field
from icestream.formats.envelope import decode, take_off_envelope
from icestream.formats.json_cells import invalid_utf8
from icestream.formats.options import REGISTERED, RegistryOptions, ValueOptions
from icestream.formats.registered import Portion
from icestream.formats.registry import Registry
from icestream.formats.rows import Decoded, Records, Rows


def decoded(
    records: Records, options: ValueOptions, registry: RegistryOptions | None
) -> Iterator[Decoded]:
    """What the records say; each is in one of the parts, as a change or rejected."""
    if options.format not in REGISTERED:
        yield decode(records, options)
        return
    if registry is None:
        raise ConfigInvalid(f"records in {options.format} need a schema registry")
    known = _registry(registry)
    values, broken = registered.decode(records.values, known)
    keys, odd = _keys(records, options, known)
    nothing = Rows(records=np.zeros(0, np.int64), ops=np.zeros(0, np.int8), columns={})
    yield Decoded(rows=nothing, rejected={**broken, **odd})
    for value in values:
        for key in keys:
            yield from _both(value, key, options)


@lru_cache(maxsize=8)
def _registry(options: RegistryOptions) -> Registry:
    """One for a process: what it has learned never changes."""
    return Registry(options)


def _keys(
    records: Records, options: ValueOptions, registry: Registry
) -> tuple[list[Portion], Mapping[int, str]]:
    if options.envelope == "none":
        nothing = ArrowField(array=pa.nulls(len(records)), kind=None)
        return [Portion(places=np.arange(len(records)), field=nothing, schema_id=None)], {}
    if options.keys_format() in REGISTERED:
        found, rejected = registered.decode(records.keys, registry)
        return found, {place: f"in the key: {reason}" for place, reason in rejected.items()}
    unfit = invalid_utf8(records.keys)
    places = np.flatnonzero(~unfit)
    texts = arrow_field(records.keys.take(pa.array(places)).cast(pa.string()))
    rejected = dict.fromkeys(np.flatnonzero(unfit).tolist(), "the record's key is not UTF-8")
    return [Portion(places=places, field=texts, schema_id=None)], rejected


def _both(value: Portion, key: Portion, options: ValueOptions) -> Iterator[Decoded]:
    """What records say that are in both portions."""
    places, in_value, in_key = np.intersect1d(
        value.places, key.places, assume_unique=True, return_indices=True
    )
    if not len(places):
        return
    found = take_off_envelope(value.field.take(in_value), key.field.take(in_key), options)
    yield Decoded(
        rows=replace(found.rows, records=places[found.rows.records]),
        rejected={int(places[place]): reason for place, reason in found.rejected.items()},
    )
