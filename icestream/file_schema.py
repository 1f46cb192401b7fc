"""The JSON Schema of the pipeline file, for editors: keys, types and what each option means.

It is made of the same declarations that `icestream.config` checks a file by. What only the whole of
a pipeline tells (a source lacks its server, two options exclude each other) is not in it.
"""

import dataclasses
from typing import Any

from icestream.config import DEAD_LETTER, STOP, PipelineConfig, SparkOptions
from icestream.connectors import SINKS, SOURCES
from icestream.options import schemas
from icestream.pipeline import Cadence

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def file_schema() -> dict[str, Any]:
    """The schema, as a document of its own."""
    sources, sinks = SOURCES.kinds(), SINKS.kinds()
    ends = [*map(SOURCES.options, sources), *map(SINKS.options, sinks)]
    (spark, cadence, *options), shared = schemas([SparkOptions, Cadence, *ends])
    found = _resolved(cadence, shared)
    source = _one_of(dict(zip(sources, options, strict=False)))
    sink = _one_of(dict(zip(sinks, options[len(sources) :], strict=True)))
    pipeline = {
        "type": "object",
        "description": "One pipeline: a source, a sink, and how often.",
        "properties": {
            "source": source,
            "sink": {
                "anyOf": [
                    sink,
                    {"type": "array", "items": sink, "minItems": 1, "maxItems": 1},
                    {"type": "string", "description": f"As a URL: {_url_forms()}"},
                ]
            },
            "on_error": {"enum": [STOP, DEAD_LETTER], "description": _doc("on_error")},
            "transform": {
                "type": ["object", "null"],
                "additionalProperties": {"type": "string"},
                "description": _doc("transform"),
            },
            **found["properties"],
        },
        "required": ["source", "sink"],
        "additionalProperties": False,
    }
    return {
        "$schema": DIALECT,
        "title": "Pipelines of icestream",
        "type": "object",
        "properties": {"version": {"type": ["string", "integer"]}, "spark": spark},
        "additionalProperties": {"$ref": "#/$defs/pipeline"},
        "$defs": {"pipeline": pipeline, **shared},
    }


def _one_of(kinds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A map that names one kind."""
    return {
        "type": "object",
        "properties": kinds,
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": False,
    }


def _resolved(schema: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """The map of options itself, where a schema refers to it or to nothing."""
    inner = schema["anyOf"][0] if "anyOf" in schema else schema
    name = inner.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = shared[name] if name else inner
    return found


def _url_forms() -> str:
    forms = [SINKS.options(kind).url_form for kind in SINKS.kinds()]
    return ", ".join(form for form in forms if form)


def _doc(option: str) -> str:
    found = {each.name: each for each in dataclasses.fields(PipelineConfig)}
    text: str = found[option].metadata["doc"]
    return text
