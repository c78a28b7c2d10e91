"""The native trace format: JSON rows and columns, `.npz`, what is kept and which errors name what."""

from __future__ import annotations

import copy
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

import traces
from tests.support.strategies import as_trace, documents, same_events, same_trace
from traces.errors import EventError, LLMemError, OutputError, TraceError
from traces.forms.columnar import read_npz, write_npz
from traces.forms.json_events import encode_json, read_json
from traces.model import DEFAULT_DEVICE, Op, Trace

BASE: dict[str, Any] = {
    "format": "memory-trace",
    "version": 1,
    "devices": [{"name": "small", "total_bytes": 1 << 30, "colour": "green"}],
    "groups": {"dp": [0, 1]},
    "ranks": [
        {
            "rank": 0,
            "events": [
                {"op": "phase", "name": "forward", "step": 0},
                {"op": "alloc", "id": 1, "bytes": 1000, "stream": 3, "category": "activation", "name": "a"},
                {"op": "alloc", "id": 2, "bytes": 0},
                {"op": "record_stream", "id": 1, "stream": 1},
                {"op": "free", "id": 1},
                {"op": "complete_free", "id": 1},
                {"op": "synchronize"},
                {"op": "synchronize", "stream": 0},
                {"op": "collective", "group": "dp", "stream": 1},
                {"op": "set_memory_fraction", "fraction": 1},
                {"op": "pool_begin", "pool": 1},
                {"op": "pool_end", "pool": 1},
                {"op": "wait_stream", "stream": 0, "on": 1},
            ],
        }
    ],
}


def read(document: Any) -> Trace:
    return read_json(json.dumps(document).encode())


def as_columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def in_columns(document: dict[str, Any]) -> dict[str, Any]:
    """The same trace with the events of every rank as columns."""
    other = copy.deepcopy(document)
    for entry in other["ranks"]:
        entry["events"] = as_columns(entry["events"])
    return other


def npz_bytes(trace: Trace) -> bytes:
    file = io.BytesIO()
    write_npz(trace, file)
    return file.getvalue()


def message(act: Callable[[], object]) -> str:
    """The one line that a bad input gives."""
    with pytest.raises(LLMemError) as caught:
        act()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 400
    return text


# What is read


def test_rows_become_columns() -> None:
    events = read(BASE).ranks[0].events
    assert events.op[:3].tolist() == [Op.PHASE, Op.ALLOC, Op.ALLOC]
    assert events.ints("id").tolist() == [-1, 1, 2, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1]
    assert events.ints("bytes")[:3].tolist() == [0, 1000, 0]
    assert events.strings("name").get(1) == "a"
    assert events.strings("name").get(2) is None
    assert events.floats("fraction")[9] == 1.0
    assert np.isnan(events.floats("fraction")[0])


def test_synchronize_without_a_stream_means_all() -> None:
    stream = read(BASE).ranks[0].events.ints("stream")
    assert stream[[6, 7, 12]].tolist() == [-1, 0, 0]
    bare = {"format": "memory-trace", "version": 1, "ranks": [{"events": [{"op": "synchronize"}, {"op": "kernel"}]}]}
    assert read(bare).ranks[0].events.ints("stream").tolist() == [-1, 0]


def test_everything_but_format_version_and_ranks_has_a_default() -> None:
    trace = read({"format": "memory-trace", "version": 1, "ranks": [{}, {"rank": None, "events": {}}]})
    assert [entry.ranks for entry in trace.ranks] == [(0,), (1,)]
    assert [len(entry.events) for entry in trace.ranks] == [0, 0]
    assert (trace.devices, trace.groups, trace.conf, trace.release) == ((), {}, "", None)
    assert read(BASE | {"devices": [{}]}).devices == (DEFAULT_DEVICE,)


def test_null_is_absent() -> None:
    rows = [{"op": "alloc", "id": 0, "bytes": 5, "stream": None, "name": None, "step": None, "mine": None}]
    document = BASE | {"ranks": [{"events": rows, "initial": None, "device": None}], "metadata": None}
    events = read(document).ranks[0].events
    assert events.ints("step").tolist() == [-1]
    assert events.extra == {}
    columns = in_columns(document)
    columns["ranks"][0]["events"]["flops"] = None
    assert same_events(events, read(columns).ranks[0].events)


def test_rank_lists_and_mesh_groups() -> None:
    document = BASE | {"groups": {"tp": [[0, 1], [2, 3]], "dp": [[4, 5]]}, "ranks": [{"rank": [3, 1], "events": []}]}
    trace = read(document)
    assert trace.ranks[0].ranks == (3, 1)
    assert trace.groups == {"tp": ((0, 1), (2, 3)), "dp": ((4, 5),)}
    assert trace.world == 2


def test_bytes_from_2_to_the_60_are_a_trace_and_from_2_to_the_63_are_not() -> None:
    rows = [{"op": "alloc", "id": 1, "bytes": (1 << 63) - 1}]
    assert read(BASE | {"ranks": [{"events": rows}]}).ranks[0].events.ints("bytes")[0] == (1 << 63) - 1
    rows[0]["bytes"] = 1 << 63
    assert "below 2^63" in message(lambda: read(BASE | {"ranks": [{"events": rows}]}))


def test_a_byte_order_mark_is_no_fault() -> None:
    assert read_json(b"\xef\xbb\xbf" + json.dumps(BASE).encode()).world == 1


# Unknown fields, and going round


@given(documents())
def test_rows_columns_and_npz_are_the_same_trace(document: dict[str, Any]) -> None:
    trace = as_trace(document)
    for entry, raw in zip(trace.ranks, document["ranks"], strict=True):
        assert [op.name.lower() for op in map(Op, entry.events.op)] == [row["op"] for row in raw["events"]]
    assert same_trace(trace, as_trace(in_columns(document)))
    assert same_trace(trace, read_json(b"".join(encode_json(trace, "rows"))))
    assert same_trace(trace, read_json(b"".join(encode_json(trace, "columns"))))
    assert same_trace(trace, read_npz(io.BytesIO(npz_bytes(trace))))


@given(documents())
def test_what_is_written_as_rows_says_what_was_read(document: dict[str, Any]) -> None:
    """Row by row, but for defaults and nulls, which need not be said."""
    written = json.loads(b"".join(encode_json(as_trace(document), "rows")))
    defaults = ("stream", "bytes", "flops", "duration_ns", "host_ns", "hold", "no_split", "use_on_oom")
    for entry, before in zip(written["ranks"], document["ranks"], strict=True):
        for row, old in zip(entry["events"], before["events"], strict=True):
            assert row.items() <= old.items()
            left_out = {name: old[name] for name in old.keys() - row.keys()}
            assert all(not value and name in defaults for name, value in left_out.items())


def test_unknown_fields_survive_everywhere() -> None:
    document = copy.deepcopy(BASE) | {"comment": ["x"], "metadata": {"m": {"n": 1}}, "allocator": {"seed": 4}}
    document["ranks"][0] |= {"host": "node7"}
    document["ranks"][0]["events"][1]["stack"] = ["f", "g"]
    document["ranks"][0]["events"][4]["note"] = 1 << 70
    trace = read(document)
    for layout in ("rows", "columns"):
        again = json.loads(b"".join(encode_json(trace, layout)))
        assert again["comment"] == ["x"]
        assert again["metadata"] == {"m": {"n": 1}}
        assert again["allocator"] == {"seed": 4}
        assert again["devices"][0]["colour"] == "green"
        assert again["ranks"][0]["host"] == "node7"
        events = again["ranks"][0]["events"]
        rows = events if layout == "rows" else None
        assert (rows[1]["stack"] if rows else events["stack"][1]) == ["f", "g"]
        assert (rows[4]["note"] if rows else events["note"][4]) == 1 << 70


def test_unknown_fields_of_initial_segments_are_said_not_to_be_kept() -> None:
    segment = {"address": 512, "bytes": 512, "pool": "small", "blocks": [[None, 512, 0, "inactive"]], "device": 0}
    trace = read(BASE | {"ranks": [{"events": [], "initial": {"segments": [segment]}}]})
    assert trace.notes == ("the unknown field 'initial.segments.device' is not kept",)


# What is refused: each error names the place and the mend


def _set(field: str, value: Any, index: int = 1) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        document["ranks"][0]["events"][index][field] = value

    return change


def _drop(field: str, index: int) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        del document["ranks"][0]["events"][index][field]

    return change


EVENT_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], None], int, str, str]] = {
    "unknown op": (_set("op", "aloc"), 1, "op", "did you mean 'alloc'?"),
    "op of two lines": (_set("op", "a\nb" * 500), 1, "op", "is not an op"),
    "op not text": (_set("op", 3), 1, "op", "3 is not an op"),
    "op missing": (_drop("op", 1), 1, "op", "every event needs an op"),
    "negative bytes": (_set("bytes", -1), 1, "bytes", "must be 0 or more, is -1"),
    "huge bytes": (_set("bytes", 1 << 63), 1, "bytes", "must be below 2^63"),
    "enormous bytes": (_set("bytes", 1 << 4000), 1, "bytes", "must be below 2^63, is an integer of 4001 bits"),
    "true for a number": (_set("bytes", True), 1, "bytes", "must be an integer, not true"),
    "float": (_set("bytes", 1.5), 1, "bytes", "not 1.5; write it without point"),
    "whole float": (_set("id", 1.0), 1, "id", "not 1.0; write it without point"),
    "text for a number": (_set("id", "1"), 1, "id", "leave out the quotes"),
    "list for a number": (_set("id", [1]), 1, "id", "must be an integer, not a list"),
    "id beyond 63 bits": (_set("id", 1 << 63), 1, "id", "must be below 2^63"),
    "negative id": (_set("id", -1), 1, "id", "must be 0 or more"),
    "negative stream": (_set("stream", -1), 1, "stream", "must be 0 or more"),
    "negative stream of synchronize": (_set("stream", -1, 7), 7, "stream", "must be 0 or more"),
    "negative duration": (_set("duration_ns", -5, 8), 8, "duration_ns", "must be 0 or more"),
    "number for text": (_set("name", 5), 1, "name", "must be text in quotes, not 5"),
    "number for a truth": (_set("hold", 1), 1, "hold", "must be true or false, not 1"),
    "text for a fraction": (_set("fraction", "1", 9), 9, "fraction", "must be a number"),
    "fraction above 1": (_set("fraction", 1.01, 9), 9, "fraction", "must be between 0 and 1"),
    "negative fraction": (_set("fraction", -0.5, 9), 9, "fraction", "must be between 0 and 1"),
    "unknown category": (_set("category", "weights"), 1, "category", "'weights' is not a category; one of parameter"),
    "pool 0": (_set("pool", 0, 10), 10, "pool", "must be 1 or more"),
    "alloc without bytes": (_drop("bytes", 2), 2, "bytes", "missing; 'alloc' needs it"),
    "alloc without id": (_drop("id", 2), 2, "id", "missing; 'alloc' needs it"),
    "record_stream without stream": (_drop("stream", 3), 3, "stream", "missing; 'record_stream' needs it"),
    "phase without name": (_drop("name", 0), 0, "name", "missing; 'phase' needs it"),
    "collective without group": (_drop("group", 8), 8, "group", "missing; 'collective' needs it"),
    "fraction missing": (_drop("fraction", 9), 9, "fraction", "missing; 'set_memory_fraction' needs it"),
    "wait for nothing": (_drop("on", 12), 12, "on", "missing; 'wait_stream' needs it"),
    "pool missing": (_drop("pool", 10), 10, "pool", "missing; 'pool_begin' needs it"),
    "same id twice": (_set("id", 1, 2), 2, "id", "id 1 was allocated before (event 1)"),
    "free of unknown id": (_set("id", 9, 4), 4, "id", "free of an unknown id: id 9 was never allocated before"),
    "record_stream of unknown id": (_set("id", 9, 3), 3, "id", "record_stream of an unknown id"),
    "complete_free of a live id": (_set("id", 2, 5), 5, "id", "id 2 has not been freed"),
    "complete_free of unknown id": (_set("id", 9, 5), 5, "id", "complete_free of an unknown id"),
    "double free": (_set("op", "free", 5), 5, "id", "id 1 was freed before (event 4)"),
    "use after free": (lambda d: _set("op", "record_stream", 5)(d) or _set("stream", 1, 5)(d), 5, "id", "freed before"),
    "unknown group": (_set("group", "tp", 8), 8, "group", "there is no group 'tp'"),
    "address of 100": (_set("address", 100), 1, "address", "must be a multiple of 512"),
    "address 0": (_set("address", 0), 1, "address", "must be a multiple of 512 above 0"),
    "address of 2^62": (_set("address", 1 << 62), 1, "address", "below 2^62"),
    "pool begun twice": (_set("op", "pool_begin", 11), 11, "pool", "pool 1 is begun already"),
    "pool that never began": (_set("pool", 2, 11), 11, "pool", "pool 2 ends without having begun"),
    "pool never made": (lambda d: _set("op", "pool_release", 10)(d), 10, "pool", "never created or begun"),
}


@pytest.mark.parametrize("form", ["rows", "columns"])
@pytest.mark.parametrize("name", EVENT_FAULTS)
def test_a_fault_in_an_event(tmp_path: Path, form: str, name: str) -> None:
    change, index, field, words = EVENT_FAULTS[name]
    document = copy.deepcopy(BASE)
    change(document)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document if form == "rows" else in_columns(document)))
    text = message(lambda: traces.read(path))
    assert text.startswith(f"{path}: rank 0, event {index}, field '{field}': ")
    assert words in text
    with pytest.raises(EventError) as caught:
        traces.read(path)
    assert (caught.value.rank, caught.value.index, caught.value.field) == (0, index, field)


@pytest.mark.parametrize("form", ["rows", "columns"])
def test_the_earliest_fault_is_the_one_reported(form: str) -> None:
    """Whether an event is of the wrong kind, lacks something or breaks a rule."""
    document = copy.deepcopy(BASE)
    events = document["ranks"][0]["events"]
    expected = []
    for change, index in (
        (_set("bytes", True, 11), 11),
        (_set("id", 7, 5), 5),
        (_drop("stream", 3), 3),
        (_set("name", 3, 1), 1),
        (_drop("name", 0), 0),
    ):
        change(document)
        expected.append(index)
        with pytest.raises(EventError) as caught:
            read(document if form == "rows" else in_columns(document))
        assert caught.value.index == index
    assert len(events) == 13


def test_faults_of_an_earlier_rank_come_first() -> None:
    document = copy.deepcopy(BASE)
    document["ranks"].append({"rank": 1, "events": [{"op": "free", "id": True}]})
    document["ranks"][0]["events"][4]["id"] = 77
    with pytest.raises(EventError) as caught:
        read(document)
    assert (caught.value.rank, caught.value.index) == (0, 4)


@pytest.mark.parametrize(("row", "words"), [(5, "not 5"), (None, "not null"), ([], "not a list"), ("x", "not 'x'")])
def test_an_event_that_is_no_object(row: Any, words: str) -> None:
    document = copy.deepcopy(BASE)
    document["ranks"][0]["events"].insert(2, row)
    text = message(lambda: read(document))
    assert text.startswith("rank 0, event 2")
    assert words in text


@pytest.mark.parametrize(
    ("value", "words"), [("1e400", "out of range"), ('"\xff"', "not UTF-8"), ("9" * 6000, "out of range")]
)
@pytest.mark.parametrize("form", ["rows", "columns"])
@pytest.mark.parametrize("field", ["name", "unknown", "bytes"])
def test_a_value_that_python_cannot_hold_is_located(form: str, value: str, words: str, field: str) -> None:
    document = copy.deepcopy(BASE)
    document["ranks"][0]["events"][2][field] = "HERE"
    text = json.dumps(document if form == "rows" else in_columns(document)).replace('"HERE"', value)
    found = message(lambda: read_json(text.encode("latin-1")))
    assert found.startswith(f"rank 0, event 2, field '{field}'")
    assert words in found


def test_a_group_without_this_rank() -> None:
    document = copy.deepcopy(BASE) | {"groups": {"dp": [1, 2]}}
    assert "rank 0 is not in group 'dp'" in message(lambda: read(document))
    document["ranks"][0]["rank"] = [1, 2, 3]
    assert message(lambda: read(document)).startswith("rank 1, event 8, field 'group': rank 3 is not in group")


def test_columns_of_unequal_length() -> None:
    document = in_columns(BASE)
    document["ranks"][0]["events"]["id"].pop()
    assert "rank 0: column 'id' has 12 values, 'op' has 13" in message(lambda: read(document))
    document = in_columns(BASE)
    document["ranks"][0]["events"]["mine"] = [1]
    assert "column 'mine' has 1 values" in message(lambda: read(document))
    document["ranks"][0]["events"] = {"id": [1]}
    assert "lack 'op'" in message(lambda: read(document))
    document["ranks"][0]["events"] = {"op": ["free"], "id": 1}
    assert "column 'id' must be a list, not 1" in message(lambda: read(document))


SEGMENT = {"address": 1 << 30, "bytes": 1024, "pool": "small", "blocks": [[7, 512, 9, "active_allocated"]]}

HEAD_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"format": "trace"}, "field 'format': must be \"memory-trace\", not 'trace'"),
    "version": ({"version": 2}, "field 'version': must be 1, not 2"),
    "version true": ({"version": True}, "field 'version': must be 1, not true"),
    "ranks empty": ({"ranks": []}, "a trace needs at least one rank"),
    "ranks not a list": ({"ranks": {}}, "field 'ranks'"),
    "rank entry": ({"ranks": [3]}, "field 'ranks', entry 0"),
    "rank list empty": ({"ranks": [{"rank": []}]}, "name at least one rank"),
    "rank list empty, and an event wrong": ({"ranks": [{"rank": [], "events": [0]}]}, "name at least one rank"),
    "rank twice": ({"ranks": [{"rank": 0}, {"rank": [1, 0]}]}, "rank 0 appears twice"),
    "rank twice in a list": ({"ranks": [{"rank": [2, 2]}]}, "rank 2 appears twice"),
    "rank negative": ({"ranks": [{"rank": -1}]}, "ranks are between 0 and"),
    "rank text": ({"ranks": [{"rank": "0"}]}, "field 'rank': must be an integer or a list of integers, not '0'"),
    "rank true": ({"ranks": [{"rank": [True]}]}, "field 'rank': must be an integer, not true"),
    "device index": ({"ranks": [{"device": 1}]}, "there is no device 1 (indices 0 to 0)"),
    "device index text": ({"ranks": [{"device": "a"}]}, "rank 0: field 'device': must be an integer"),
    "events": ({"ranks": [{"events": 5}]}, "field 'events' must be a list of events or an object of columns"),
    "devices": ({"devices": {}}, "field 'devices': must be a list, not an object"),
    "device": ({"devices": [4]}, "device 0: field 'devices': must be an object, not 4"),
    "device without size": ({"devices": [{"name": "X"}]}, "device 0: field 'total_bytes' is missing"),
    "device of size 0": ({"devices": [{"total_bytes": 0}]}, "device 0: field 'total_bytes': must be between 1"),
    "device too large": ({"devices": [{"total_bytes": 2**43 + 1}]}, "must be between 1 and 8796093022208"),
    "context": ({"devices": [{"total_bytes": 9, "context_bytes": 10}]}, "'context_bytes': must be between 0 and 9"),
    "va_base": ({"devices": [{"va_base": 5}]}, "field 'va_base': an address must be a multiple of 512"),
    "placement": ({"devices": [{"placement": "best"}]}, "'first-fit', 'bump', 'recorded' or 'driver', not 'best'"),
    "addresses": ({"devices": [{"segment_addresses": [512, 0]}]}, "segment_addresses[1]"),
    "addresses text": ({"devices": [{"segment_addresses": "a"}]}, "must be a list of integers"),
    "launch_ns": ({"devices": [{"launch_ns": -1}]}, "field 'launch_ns': must be between 0"),
    "groups": ({"groups": []}, "field 'groups': must be an object"),
    "group empty": ({"groups": {"dp": []}}, "group 'dp': has no ranks"),
    "group of text": ({"groups": {"dp": ["a"]}}, "group 'dp': field 'groups': must be an integer"),
    "group mixed": ({"groups": {"dp": [[0], 1]}}, "must be a list of ranks, or a list of lists of ranks, not 1"),
    "group twice": ({"groups": {"dp": [[0, 1], [1, 2]]}}, "group 'dp': rank 1 is listed twice"),
    "metadata": ({"metadata": []}, "field 'metadata': must be an object"),
    "allocator": ({"allocator": 5}, "field 'allocator': must be an object"),
    "conf": ({"allocator": {"conf": 5}}, "allocator: field 'conf': must be text"),
    "release": ({"allocator": {"release": "two"}}, "write a release such as '2.13', not 'two'"),
    "release number": ({"allocator": {"release": 2.11}}, "field 'release': must be text in quotes, not 2.11"),
    "initial": ({"ranks": [{"initial": []}]}, "rank 0: field 'initial': must be an object"),
    "segments": ({"ranks": [{"initial": {"segments": {}}}]}, "rank 0: field 'segments': must be a list"),
    "no address": ({"ranks": [{"initial": {"segments": [{}]}}]}, "initial segment 0: field 'address' is missing"),
}


@pytest.mark.parametrize("name", HEAD_FAULTS)
def test_a_fault_in_the_head(name: str) -> None:
    change, words = HEAD_FAULTS[name]
    assert words in message(lambda: read(BASE | {"ranks": [{}]} | change))


SEGMENT_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "sum": ({}, "its blocks sum to 512 bytes, the segment has 1024"),
    "bytes": ({"bytes": 0}, "field 'bytes': must be between 1"),
    "address": ({"address": 77}, "field 'address': an address must be a multiple of 512"),
    "pool": ({"pool": "huge"}, "must be 'small' or 'large', not 'huge'"),
    "stream": ({"stream": -1}, "field 'stream': must be between 0"),
    "expandable": ({"expandable": 1}, "field 'expandable': must be true or false"),
    "block": ({"blocks": [[1, 2]]}, "block 0: write [id or null, bytes, requested bytes, state]"),
    "state": ({"blocks": [[1, 1024, 5, "free"]]}, "block 0: the state must be"),
    "free with id": ({"blocks": [[1, 1024, 5, "inactive"]]}, "a free block has no id"),
    "used without id": ({"blocks": [[None, 1024, 5, "active_pending_free"]]}, "a block in use needs an id"),
    "same id": ({"blocks": [[1, 512, 5, "active_allocated"]] * 2}, "block 1: id 1 appears twice"),
    "requested": ({"blocks": [[1, 1024, 1025, "active_allocated"]]}, "field 'requested bytes': must be between 0"),
    "block id": ({"blocks": [["a", 1024, 5, "active_allocated"]]}, "field 'id': must be an integer, not 'a'"),
    "va alone": ({"bytes": 512, "va_address": 512}, "'va_address' and 'va_bytes' go together"),
    "va outside": ({"bytes": 512, "expandable": True, "va_address": 512, "va_bytes": 5}, "outside 'va_address'"),
    "pool_id": ({"pool_id": -2}, "field 'pool_id': must be between 0"),
}


@pytest.mark.parametrize("name", SEGMENT_FAULTS)
def test_a_fault_in_an_initial_segment(name: str) -> None:
    change, words = SEGMENT_FAULTS[name]
    text = message(lambda: read(BASE | {"ranks": [{"initial": {"segments": [SEGMENT | change]}}]}))
    assert text.startswith("rank 0, initial segment 0")
    assert words in text


def test_initial_segments_that_overlap() -> None:
    segment = SEGMENT | {"blocks": [[None, 1024, 0, "inactive"]]}
    pair = [segment, segment | {"address": (1 << 30) - 512}]
    text = message(lambda: read(BASE | {"ranks": [{"initial": {"segments": pair}}]}))
    assert text == "rank 0: initial segments 0 and 1 overlap"


def test_ids_of_the_initial_state_are_known() -> None:
    blocks = [[7, 512, 9, "active_allocated"], [8, 512, 9, "active_pending_free"]]
    initial = {"segments": [SEGMENT | {"blocks": blocks}]}

    def with_rows(*rows: dict[str, Any]) -> Callable[[], Trace]:
        return lambda: read(BASE | {"ranks": [{"initial": initial, "events": list(rows)}]})

    with_rows({"op": "free", "id": 7}, {"op": "complete_free", "id": 8}, {"op": "complete_free", "id": 7})()
    assert "id 8 was freed before (before the first event)" in message(with_rows({"op": "free", "id": 8}))
    assert "id 7 was allocated before" in message(with_rows({"op": "alloc", "id": 7, "bytes": 1}))
    twice = with_rows({"op": "complete_free", "id": 8}, {"op": "complete_free", "id": 8})
    assert "the free of id 8 was completed before (event 0)" in message(twice)


BAD_TEXTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "blank": (b" \n\t ", "the file is empty"),
    "null": (b"null", "a trace is a JSON object, this file holds null"),
    "list": (b"[]", "a trace is a JSON object, this file holds a list"),
    "number": (b"7", "a trace is a JSON object, this file holds 7"),
    "text": (b'"trace"', "a trace is a JSON object, this file holds 'trace'"),
    "another object": (b'{"traceEvents": []}', "not a memory trace: field 'format' is missing"),
    "no version": (b'{"format": "memory-trace"}', "field 'version' is missing"),
    "no ranks": (b'{"format": "memory-trace", "version": 1}', "field 'ranks' is missing"),
    "cut off": (b'{"format": "memory-trace", "ver', "the JSON ends early"),
    "NaN": (b'{"format": NaN}', "not valid JSON"),
    "two documents": (b"{}{}", "not valid JSON"),
    "a comma too many": (b'{"format": "memory-trace",}', "trailing comma"),
    "deep lists": (b"[" * 1_000_000, "nested too deeply"),
    "deep objects": (b'{"a":' * 1_000_000, "nested too deeply"),
    "broken text": (b'{"\xff": 1}', "not UTF-8 text"),
    "UTF-16": ('{"format": "memory-trace"}'.encode("utf-16"), "neither a trace"),
    "a picture": (b"\x89PNG\r\n\x1a\n", "neither a trace"),
    "words": (b"hello", "neither a trace"),
    "zeros": (bytes(100), "neither a trace"),
    "blanks": (b" " * 10_000, "the file is empty"),
    "a million blanks, then a list": (b" " * 1_000_000 + b"[]", "this file holds a list"),
}


@pytest.mark.parametrize("name", BAD_TEXTS)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_file_that_is_no_trace(tmp_path: Path, name: str, zipped: bool) -> None:
    data, words = BAD_TEXTS[name]
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(data) if zipped else data)
    text = message(lambda: traces.read(path))
    assert text.startswith(f"{path}: ")
    assert words in text


def test_deep_nesting_anywhere() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    whole = json.dumps(BASE | {"metadata": {"a": "HERE"}}).encode()
    assert "nested too deeply" in message(lambda: read_json(whole.replace(b'"HERE"', deep)))
    document = copy.deepcopy(BASE)
    document["ranks"][0]["events"][2]["mine"] = "HERE"
    whole = json.dumps(document).encode()
    assert "nested too deeply" in message(lambda: read_json(whole.replace(b'"HERE"', deep)))


# Files


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.npz"])
def test_written_files_are_read_by_content(tmp_path: Path, name: str) -> None:
    trace = read(BASE)
    traces.write(trace, tmp_path / name)
    assert (tmp_path / name).read_bytes()[:2] == {"a.json": b'{"', "a.json.gz": b"\x1f\x8b", "a.npz": b"PK"}[name]
    (tmp_path / name).rename(tmp_path / "no ending")
    assert same_trace(traces.read(tmp_path / "no ending"), trace)


def test_gzipped_npz_is_read_too(tmp_path: Path) -> None:
    trace = read(BASE)
    path = tmp_path / "a"
    path.write_bytes(gzip.compress(npz_bytes(trace)))
    assert same_trace(traces.read(path), trace)


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.npz"])
def test_the_same_trace_gives_the_same_bytes(tmp_path: Path, name: str) -> None:
    traces.write(read(BASE), tmp_path / name)
    first = (tmp_path / name).read_bytes()
    traces.write(traces.read(tmp_path / name), tmp_path / name, force=True)
    assert (tmp_path / name).read_bytes() == first


def test_rows_for_short_traces_and_columns_for_long_ones(tmp_path: Path) -> None:
    def events(count: int, to: str | None = None) -> Any:
        rows = [{"op": "alloc", "id": i, "bytes": i} for i in range(count)]
        traces.write(read(BASE | {"ranks": [{"events": rows}]}), tmp_path / "t.json", to=to, force=True)
        return json.loads((tmp_path / "t.json").read_bytes())["ranks"][0]["events"]

    assert isinstance(events(999), list)
    assert isinstance(events(1000), dict)
    assert isinstance(events(3, "columns"), dict)
    assert isinstance(events(3, "json-columns"), dict)
    assert isinstance(events(1000, "rows"), list)
    assert isinstance(events(1000, "json-rows"), list)
    assert isinstance(events(3, "json"), list)


def test_an_unknown_form_or_ending(tmp_path: Path) -> None:
    assert "end it in .json, .json.gz or .npz" in message(lambda: traces.write(read(BASE), tmp_path / "a.txt"))
    assert "there is no form 'xml'" in message(lambda: traces.write(read(BASE), tmp_path / "a.json", to="xml"))
    assert list(tmp_path.iterdir()) == []


def test_release_overrides_the_file(tmp_path: Path) -> None:
    traces.write(read(BASE | {"allocator": {"release": "2.5"}}), tmp_path / "a.json")
    assert traces.read(tmp_path / "a.json").release == "2.5"
    assert traces.read(tmp_path / "a.json", release="2.11").release == "2.11"


def test_what_json_cannot_say_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in ("\ud800", object(), {1: {None: 2}}, deep):
        trace = Trace(read(BASE).ranks, {"mine": value}, groups={"dp": ((0,),)})
        for name in ("a.json", "a.npz"):
            with pytest.raises(TraceError, match="cannot be written as JSON"):
                traces.write(trace, tmp_path / name)
    while deep:  # taken apart by hand: Python's own way recurses
        deep = deep[0]
    assert list(tmp_path.iterdir()) == []


def test_numpy_numbers_in_metadata_are_written(tmp_path: Path) -> None:
    trace = Trace(read(BASE).ranks, {"a": np.int64(3), "b": np.arange(2)}, groups={"dp": ((0,),)})
    traces.write(trace, tmp_path / "a.json")
    assert traces.read(tmp_path / "a.json").metadata == {"a": 3, "b": [0, 1]}


def test_an_existing_file_is_kept_without_force(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("precious")
    with pytest.raises(OutputError, match="exists already; give --force"):
        traces.write(read(BASE), path)
    assert path.read_text() == "precious"
    traces.write(read(BASE), path, force=True)
    assert traces.read(path).world == 1
