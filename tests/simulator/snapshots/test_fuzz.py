"""Whatever a snapshot file holds, the reader gives a trace or one clear line."""

from __future__ import annotations

import copy
import gzip
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from simulator.snapshots.reader import read_recording, snapshot_to_recording
from tests.support.snapshots import data_of, snapshot_of, tiny
from traces.check import check
from traces.errors import LLMemError, TraceError
from traces.snapshot.unpickle import load_builtins

SMALL = ("2.11-lag", "2.1-lag", "2.13-late", "2.11-ring-expandable", "2.11-stacks")

odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.sampled_from([0, -1, 1, 511, 512, 1 << 20, 1 << 31, 1 << 53, (1 << 61) - 1, 1 << 62, (1 << 63) - 1, 1 << 64]),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["alloc", "oom", "free_completed", "segment_map", "inactive", "active_allocated", "segments"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.tuples(st.integers(0, 5), st.integers(0, 5)),
)


def attempt(function: Callable[[], Any], name: str) -> Any:
    """What the function returns, or None where it raises a TraceError of one printable line that names the file."""
    try:
        return function()
    except LLMemError as error:
        kind, text = type(error), str(error)
    assert issubclass(kind, TraceError)
    assert f"{name}: " in text
    assert text.isprintable()
    assert len(text) < 500
    return None


def read(snapshot: Any) -> None:
    """Read it: a valid trace comes out, or an error of one printable line."""
    recording = attempt(lambda: snapshot_to_recording(snapshot, where="fuzz"), "fuzz")
    if recording is None:
        return
    check(recording.trace)
    for rank, shown in zip(recording.trace.ranks, recording.ranks, strict=True):
        assert shown.log.event.max(initial=-1) < len(rank.events)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to every item of a snapshot."""
    found = [path] if path else []
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def holds(item: Any, key: Any) -> bool:
    """Whether `item[key]` is there."""
    if isinstance(item, dict):
        return key in item
    return isinstance(item, list) and isinstance(key, int) and 0 <= key < len(item)


def change(snapshot: Any, path: tuple[Any, ...], kind: str, value: Any) -> None:
    """Change the item at `path`, where it is still there."""
    item = snapshot
    for key in path[:-1]:
        if not holds(item, key):
            return
        item = item[key]
    last = path[-1]
    if not holds(item, last):
        return
    if kind == "delete":
        del item[last]
    elif kind == "repeat" and isinstance(item, list):
        item.insert(last, item[last])
    elif kind == "swap" and isinstance(item, list):
        item[last], item[0] = item[0], item[last]
    elif kind == "nudge" and type(item[last]) is int:
        item[last] += value if type(value) is int else 512
    else:
        item[last] = value


changes = st.tuples(
    st.integers(0, 10**9), st.sampled_from(["set", "set", "delete", "repeat", "swap", "nudge"]), odd_values
)


@given(st.lists(changes, min_size=1, max_size=4))
def test_a_small_snapshot_with_anything_changed(wanted: list[tuple[int, str, Any]]) -> None:
    snapshot = tiny(
        allocator_settings={"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "expandable_segments": False},
        external_annotations=[{"name": "forward", "device": 0, "stage": "START", "time_us": 2}],
    )
    everywhere = places(snapshot)
    for number, kind, value in wanted:
        change(snapshot, everywhere[number % len(everywhere)], kind, value)
    read(snapshot)


@pytest.mark.parametrize("name", SMALL)
@given(wanted=st.lists(changes, min_size=1, max_size=4))
@example(wanted=[(5, "set", 1 << 63)])  # a time that is none
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_a_real_snapshot_with_entries_changed(name: str, wanted: list[tuple[int, str, Any]]) -> None:
    snapshot = snapshot_of(name)
    for number, kind, value in wanted:
        device = snapshot["device_traces"][0] if number % 2 else snapshot["segments"]
        at = number // 2 % len(device)
        inner = places(device[at], (at,)) or [(at,)]
        change(device, inner[number % len(inner)] if number % 3 else (at,), kind, copy.deepcopy(value))
    read(snapshot)


@given(
    name=st.sampled_from(SMALL),
    flips=st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 255)), min_size=1, max_size=5),
    cut=st.none() | st.integers(0, 10**9),
)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_bytes_flipped_and_files_cut(name: str, flips: list[tuple[int, int]], cut: int | None) -> None:
    data = bytearray(data_of(name))
    for place, value in flips:
        data[place % len(data)] = value
    if cut is not None:
        del data[cut % len(data) :]
    snapshot = attempt(lambda: load_builtins(bytes(data), "fuzz"), "fuzz")
    if snapshot is not None:
        read(snapshot)


@given(place=st.integers(0, 10**9), value=st.integers(0, 255), cut=st.booleans())
def test_gzip_flipped_and_cut(tmp_path_factory: pytest.TempPathFactory, place: int, value: int, cut: bool) -> None:
    data = bytearray(gzip.compress(pickle.dumps(tiny()), mtime=0))
    data[place % len(data)] = value
    path = tmp_path_factory.mktemp("fuzz") / "fuzz.pickle.gz"
    path.write_bytes(data[: place % len(data)] if cut else data)
    attempt(lambda: read_recording(path), "fuzz.pickle.gz")


@pytest.mark.parametrize(
    "make",
    [
        lambda: [[[[[[]]]]]],
        lambda: {"segments": [[]], "device_traces": []},
        lambda: {"segments": [], "device_traces": [[{}]]},
        lambda: {"segments": [], "device_traces": [[]] * 100_000},
        lambda: tiny(device_traces=[[{"action": "alloc", "addr": 512, "size": 1, "stream": 0}] * 5]),
        lambda: tiny(external_annotations=5, allocator_settings=None),
        lambda: tiny(external_annotations=[[], {}, {"name": []}]),
        lambda: tiny(segments=[]),
        lambda: {1: 2, "segments": []},
    ],
)
def test_odd_shapes(make: Any) -> None:
    read(make())


def test_deep_nesting_where_nothing_is_looked_for(tmp_path: Path) -> None:
    deep: Any = []
    for _ in range(1_000_000):
        deep = [deep]
    snapshot = tiny(other=deep)
    snapshot["device_traces"][0][1]["frames"] = deep
    snapshot["device_traces"][0][2]["stream"] = deep
    read(snapshot)
    path = tmp_path / "deep.pickle"
    path.write_bytes(b"\x80\x04}X\x08\x00\x00\x00segments" + b"]" * 1_000_000 + b"a" * 999_999 + b"s.")
    with pytest.raises(TraceError, match="segment 0: must be a dict"):
        read_recording(path)
    while deep:
        deep = deep[0]
