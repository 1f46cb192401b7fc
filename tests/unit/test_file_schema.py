"""Editors are told of pipeline files what icestream itself takes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from icestream import cli
from icestream.config import parse
from icestream.connectors import SINKS, SOURCES
from icestream.errors import ConfigInvalid
from icestream.file_schema import file_schema

ROOT = Path(__file__).parent.parent.parent
SCHEMA = file_schema()
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}
CHECKED = {"$ref", "anyOf", "type", "enum", "properties", "additionalProperties", "required"} | {
    *("items", "minItems", "maxItems", "minProperties", "maxProperties"),
}
SAID = {"$schema", "$defs", "title", "description", "default", "examples"}


def refused(value: Any, schema: Any, place: str = "file") -> list[str]:
    """The places of a value that a schema does not take, by the keywords that ours has."""
    if schema is True or schema is False:
        return [] if schema else [place]
    assert set(schema) <= CHECKED | SAID, schema
    if "$ref" in schema:
        return refused(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], place)
    if "anyOf" in schema:
        found = [refused(value, each, place) for each in schema["anyOf"]]
        return min(found, key=len)
    if "enum" in schema and value not in schema["enum"]:
        return [place]
    wanted = schema.get("type", [])
    names = [wanted] if isinstance(wanted, str) else wanted
    if names and not any(_is(value, name) for name in names):
        return [place]
    return list(_within(value, schema, place))


def _is(value: Any, name: str) -> bool:
    return isinstance(value, TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _within(value: Any, schema: dict[str, Any], place: str) -> Iterator[str]:
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield place
        for item in value:
            yield from refused(item, schema.get("items", True), place)
    if isinstance(value, dict):
        least, most = schema.get("minProperties", 0), schema.get("maxProperties", len(value))
        if not least <= len(value) <= most or set(schema.get("required", ())) - set(value):
            yield place
        for key, each in value.items():
            known = schema.get("properties", {})
            inner = known.get(key, schema.get("additionalProperties", True))
            yield from refused(each, inner, f"{place}.{key}")


def documented() -> list[Any]:
    """Each pipeline file that the documents show, as YAML reads it."""
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs/guides").glob("*.md"))]:
        for text in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.M | re.S):
            body = yaml.safe_load(text)
            pipelines = [each for each in body.values() if isinstance(each, dict)]
            if any("source" in each and "sink" in each for each in pipelines):
                found.append(pytest.param(body, id=f"{page.stem}-{len(found)}"))
    return found


@pytest.mark.parametrize("body", documented())
def test_the_files_that_documents_show_are_taken(body, monkeypatch):
    """U3, U8: by the schema, and by icestream itself."""
    # Secrets come from the environment.
    for name in re.findall(r"\$\{env:(\w+)\}", json.dumps(body)):
        monkeypatch.setenv(name, "secret")  # each file names its own
    assert refused(body, SCHEMA) == []
    assert parse(body).pipelines


def test_documents_show_files():
    """U8: the test above has something to look at."""
    assert len(documented()) > 5


PIPELINE: dict[str, Any] = {"source": {"cockroachdb": {"files": "x"}}, "sink": {"iceberg": {}}}


@pytest.mark.parametrize(
    "change",
    [
        {"sorce": {}},
        {"commit_interval": []},
        {"epochs_in_flight": "many"},
        {"epochs_in_flight": True},
        {"source": {}},
        {"source": {"cockroach": {}}},
        {"source": {"cockroachdb": {"files": "x"}, "kafka": {}}},
        {"source": {"cockroachdb": {"files": ["x"]}}},
        {"source": {"cockroachdb": {"files": "x", "tabels": []}}},
        {"source": {"cockroachdb": {"kafka": {"topcs": []}}}},
        {"sink": {"iceberg": {"tables": {"t": {"partiton_by": []}}}}},
        {"sink": {"iceberg": {"tables": []}}},
        {"sink": {"iceberg": {"format_version": 1}}},
        {"sink": {"iceberg": {"atomic": "yes"}}},
        {"sink": []},
        {"on_error": "continue"},
        {"transform": "select 1"},
    ],
)
def test_what_icestream_refuses_an_editor_marks(change):
    """U3: keys that are not known, and values of the wrong type."""
    body = {"orders": {**PIPELINE, **change}}
    assert refused(body, SCHEMA)
    with pytest.raises(ConfigInvalid):
        parse(body)


@pytest.mark.parametrize(
    "change",
    [
        {"commit_interval": "PT5S", "heartbeat_interval": None},
        {"commit_interval": 5},
        {"source": {"cockroachdb": {"files": "x", "tables": "orders"}}},
        {"sink": [{"iceberg": None}]},
        {"sink": "iceberg://localhost:8181/shop/orders"},
        {"sink": {"iceberg": {"catalog": {"retries": 3, "ssl": True}, "route": None}}},
        {"sink": {"iceberg": {"tables": {"t": None}}}},
        {"transform": None},
    ],
)
def test_every_form_that_icestream_takes_is_right_in_an_editor(change):
    """U3: short forms, numbers in place of texts, and options that are left empty."""
    body = {"version": "2", "orders": {**PIPELINE, **change}}
    assert refused(body, SCHEMA) == []
    assert parse(body).pipelines


def test_the_schema_is_printed_as_json_and_tells_of_every_option(capsys):
    """U2, U8: `icestream schema`."""
    assert cli.main(["schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == SCHEMA
    pipeline = printed["$defs"]["pipeline"]["properties"]
    assert sorted(pipeline["source"]["properties"]) == SOURCES.kinds()
    for definition in printed["$defs"].values():
        for option in definition.get("properties", {}).values():
            assert option.get("description") or "anyOf" in option or "properties" in option
    assert SINKS.kinds() == ["iceberg", "opensearch"]
