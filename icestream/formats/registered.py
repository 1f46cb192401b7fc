"""Records whose schemas are in a registry, as fields: one for each schema that a batch has."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from icestream.errors import SchemaRejected
from icestream.formats import avro, protobuf
from icestream.formats.arrow_fields import ArrowField
from icestream.formats.payloads import Payloads, payloads_of
from icestream.formats.registry import RegisteredSchema, Registry, framed
from icestream.formats.rows import Indices


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Portion:
    """The records of a batch that were written with one schema, and what they say.

    `places` are ascending. `schema_id` is None for records that have no value.
    """

    places: Indices
    field: ArrowField
    schema_id: int | None


def decode(values: pa.Array, registry: Registry) -> tuple[list[Portion], Mapping[int, str]]:
    """What the records of a batch say, cut by schema, and why others cannot be read.

    Every record is in one portion or rejected. Reasons never quote a record. A schema that has no
    columns rejects its records; a registry that does not answer raises `SourceUnavailable`.
    """
    cut = framed(payloads_of(values))
    schemas, lacking = registry.schemas(list(cut.by_id))
    rejected = dict(cut.rejected)
    portions = []
    for number, (places, payloads) in cut.by_id.items():
        if number in lacking:
            rejected.update(dict.fromkeys(places.tolist(), lacking[number]))
            continue
        for inside, field, reasons in _decoded(schemas[number], payloads):
            rejected.update({int(places[inside[at]]): why for at, why in reasons.items()})
            good = np.setdiff1d(np.arange(len(inside)), np.fromiter(reasons, np.int64))
            kept = field.take(good) if reasons else field
            if len(good):
                portion = Portion(places=places[inside[good]], field=kept, schema_id=number)
                portions.append(portion)
    if len(cut.absent):
        nothing = _nothing(len(cut.absent))
        portions.append(Portion(places=cut.absent, field=nothing, schema_id=None))
    return portions, rejected


def _decoded(
    schema: RegisteredSchema, payloads: Payloads
) -> Iterator[tuple[Indices, ArrowField, Mapping[int, str]]]:
    """Places in the payloads, what is there, and why there is nothing, by place in the places."""
    every = np.arange(len(payloads))
    if schema.kind == "AVRO":
        references = tuple(schema.references.values())
        read = partial(avro.decode, payloads, schema.text, references)
        yield every, *_unless_rejected(schema, len(every), read)
    elif schema.kind == "PROTOBUF":
        by_message, unnamed = protobuf.cut_by_message(payloads)
        for message, (inside, bodies) in by_message.items():
            read = partial(protobuf.decode, bodies, schema.text, schema.references, message)
            yield inside, *_unless_rejected(schema, len(inside), read)
        lost = np.fromiter(unnamed, np.int64)
        yield lost, _nothing(len(lost)), dict(enumerate(unnamed.values()))
    else:
        reason = f"schema {schema.id} is of the kind {schema.kind}, which is not read by columns"
        yield every, _nothing(len(every)), dict.fromkeys(every.tolist(), reason)


def _unless_rejected(
    schema: RegisteredSchema,
    count: int,
    read: Callable[[], tuple[ArrowField, Mapping[int, str]]],
) -> tuple[ArrowField, Mapping[int, str]]:
    """What records say, or that none of them says anything because of their schema."""
    try:
        return read()
    except SchemaRejected as error:
        return _nothing(count), dict.fromkeys(range(count), f"schema {schema.id}: {error.message}")


def _nothing(count: int) -> ArrowField:
    return ArrowField(array=pa.nulls(count), kind=None)
