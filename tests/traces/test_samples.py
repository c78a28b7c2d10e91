"""The samples that ship with the package, and the JSON Schema of the format."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from jsonschema import Draft202012Validator

import traces
from tests.support import make_samples
from tests.support.strategies import as_trace, documents
from tests.traces.forms.test_native import BASE, EVENT_FAULTS, in_columns
from traces.check import REQUIRED
from traces.forms.json_events import encode_json
from traces.model import CATEGORIES, FIELDS, Device, InitialSegment, Op

FOLDER = Path(traces.__file__).parent
SCHEMA: dict[str, Any] = json.loads((FOLDER / "schema.json").read_bytes())
VALIDATOR = Draft202012Validator(SCHEMA)
SAMPLES = sorted(path.name for path in (FOLDER / "samples").glob("*.json"))


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA)


def test_the_schema_names_what_the_code_names() -> None:
    kinds = SCHEMA["$defs"]
    assert [each["const"] for each in kinds["op"]["oneOf"]] == [op.name.lower() for op in Op]
    assert list(kinds["fields"]) == list(FIELDS)
    assert kinds["fields"]["category"]["enum"] == list(CATEGORIES)
    assert set(kinds["device"]["properties"]) == set(Device.__dataclass_fields__) - {"extra"}
    assert set(kinds["segment"]["properties"]) == set(InitialSegment.__dataclass_fields__)
    needed = {name: rule["then"]["required"] for rule in kinds["event"]["allOf"] for name in _ops(rule)}
    assert needed == {op.name.lower(): list(fields) for op, fields in REQUIRED.items()}


def _ops(rule: dict[str, Any]) -> list[str]:
    return list(rule["if"]["properties"]["op"]["enum"])


def test_everything_in_the_schema_is_described() -> None:
    for kind in ("op", "fields", "device"):
        node = SCHEMA["$defs"][kind]
        parts = node["oneOf"] if kind == "op" else list((node.get("properties") or node).values())
        for part in parts:
            assert part.get("description") or part.get("default") == "A100-80GB", part


@given(documents())
def test_what_is_read_and_written_fits_the_schema(document: dict[str, Any]) -> None:
    VALIDATOR.validate(document)
    for layout in ("rows", "columns"):
        VALIDATOR.validate(json.loads(b"".join(encode_json(as_trace(document), layout))))


#: Faults that only a reader sees: they concern several events, or other parts of the trace.
BEYOND = ("twice", "unknown id", "live id", "double free", "after free", "unknown group", "never", "address")


@pytest.mark.parametrize("name", [name for name in EVENT_FAULTS if not any(part in name for part in BEYOND)])
def test_what_is_refused_does_not_fit_the_schema(name: str) -> None:
    VALIDATOR.validate(BASE)
    VALIDATOR.validate(in_columns(BASE))
    document = copy.deepcopy(BASE)
    EVENT_FAULTS[name][0](document)
    if name == "whole float":  # 1.0 is an integer to JSON Schema
        return
    assert not VALIDATOR.is_valid(document)


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_fit_the_schema_and_are_valid_traces(name: str) -> None:
    path = FOLDER / "samples" / name
    VALIDATOR.validate(json.loads(path.read_bytes()))
    assert traces.read(path).world > 0


def test_every_sample_has_a_line_on_where_it_comes_from() -> None:
    text = (FOLDER / "samples" / "README.md").read_text()
    shipped = [path.name for path in (FOLDER / "samples").iterdir() if path.name != "README.md"]
    assert shipped
    assert [name for name in shipped if f"| `{name}` |" not in text] == []


def test_the_generated_sample_is_what_its_script_writes() -> None:
    assert make_samples.SAMPLE.read_bytes() == make_samples.text()


def test_the_tiny_sample_teaches_the_format() -> None:
    trace = traces.read(FOLDER / "samples" / "tiny.json")
    events = trace.ranks[0].events
    assert len(events) == 20
    assert {Op(op) for op in events.op} == {Op.PHASE, Op.ALLOC, Op.FREE}
    assert list(events.extra) == ["note"]
    # parameters and optimizer state stay, all else is freed
    ids, ops = events.ints("id"), events.op
    left = set(ids[ops == Op.ALLOC]) - set(ids[ops == Op.FREE])
    categories = {events.strings("category").get(int((ids == i).argmax())) for i in left}
    assert categories == {"parameter", "optimizer_state"}


def test_the_ranks_sample_has_several_streams_and_collectives() -> None:
    trace = traces.read(FOLDER / "samples" / "ranks.json")
    assert [entry.ranks for entry in trace.ranks] == [(0, 1, 2), (3,)]
    counts = []
    for entry in trace.ranks:
        ops = {Op(op) for op in entry.events.op}
        assert {Op.KERNEL, Op.COLLECTIVE, Op.RECORD_STREAM, Op.WAIT_STREAM, Op.SYNCHRONIZE} <= ops
        assert set(entry.events.ints("stream")) == {-1, 0, 1, 2}
        counts.append([op for op in entry.events.op.tolist() if op == Op.COLLECTIVE])
    assert len(counts[0]) == len(counts[1]) > 0  # else ranks would wait for ever
