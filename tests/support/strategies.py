"""Hypothesis strategies for traces: valid ones by construction, as documents of rows and as `Trace` objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
from hypothesis import strategies as st

from traces.forms.json_events import read_json
from traces.model import CATEGORIES, FIELDS, FLOAT_FIELDS, INT_FIELDS, STRING_FIELDS, Events, Trace

#: What an event generator draws: which kind of event, and numbers that it may use.
_Draw = tuple[str, int, int, str]

KINDS: Final = (
    "alloc",
    "alloc",
    "alloc",
    "free",
    "free",
    "record_stream",
    "complete_free",
    "hold_events",
    "complete_events",
    "synchronize",
    "synchronize all",
    "empty_cache",
    "reset_peak",
    "reset_accumulated",
    "set_memory_fraction",
    "set_allocator",
    "other_process",
    "snapshot",
    "statistics",
    "phase",
    "kernel",
    "collective",
    "pool",
    "wait_stream",
)

sizes = st.one_of(st.integers(0, 1 << 22), st.sampled_from([0, 1, 512, 1 << 20, (1 << 20) + 1, 1 << 60, (1 << 63) - 1]))
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


def _besides(*known: str) -> st.SearchStrategy[str]:
    """Names of unknown fields."""
    return names.filter(lambda name: name not in known)


unknown_names = _besides("op", *FIELDS)


def _interpret(draws: list[_Draw], sparse: bool, groups: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Turn draws into rows that keep the rules: ids live once, pools open and close in turn."""
    rows: list[dict[str, Any]] = []
    live: list[int] = []
    freed: list[int] = []
    pools: dict[int, bool] = {}
    count = 0
    for kind, a, b, text in draws:
        row: dict[str, Any] | None = None
        if kind == "alloc":
            number = (count * 0x9E3779B97F4A7C15) % (1 << 63) if sparse else count
            count += 1
            live.append(number)
            row = {"op": "alloc", "id": number, "bytes": a, "category": CATEGORIES[b % 10], "name": text}
            row |= {"stream": b} if b % 3 == 0 else {}
            row |= {"address": 512 * (1 + b)} if b % 5 == 0 else {}
        elif kind == "free" and live:
            number = live.pop(b % len(live))
            freed.append(number)
            row = {"op": "free", "id": number}
        elif kind == "record_stream" and live:
            row = {"op": kind, "id": live[b % len(live)], "stream": b}
        elif kind == "complete_free" and freed:
            row = {"op": kind, "id": freed.pop(b % len(freed))}
        elif kind == "collective" and groups:
            row = {"op": kind, "group": sorted(groups)[b % len(groups)], "kind": text, "duration_ns": a % (1 << 40)}
        elif kind == "pool":
            row = _pool_row(pools, 1 + b % 3, a)
        elif kind not in ("free", "record_stream", "complete_free", "collective"):
            row = _plain_row(kind, a, b, text)
        if row is not None:
            rows.append(row | ({"host_ns": b} if b % 7 == 0 else {}))
    return rows


def _pool_row(pools: dict[int, bool], pool: int, a: int) -> dict[str, Any]:
    """The next step in a pool's life; `pools` says of each whether it is begun."""
    if pool not in pools and a % 2:
        pools[pool] = False
        return {"op": "pool_create", "pool": pool, "no_split": bool(a & 2), "use_on_oom": bool(a & 4)}
    pools[pool] = not pools.get(pool, False)
    return {"op": "pool_begin" if pools[pool] else "pool_end", "pool": pool}


def _plain_row(kind: str, a: int, b: int, text: str) -> dict[str, Any]:
    more: dict[str, dict[str, Any]] = {
        "hold_events": {"hold": bool(b & 1)},
        "complete_events": {"stream": b},
        "synchronize": {"stream": b},
        "synchronize all": {"op": "synchronize"},
        "set_memory_fraction": {"fraction": (b % 101) / 100},
        "set_allocator": {"conf": text},
        "other_process": {"bytes": a},
        "phase": {"name": text, "step": b},
        "kernel": {"stream": b, "duration_ns": a % (1 << 40), "flops": a, "bytes": a, "name": text},
        "wait_stream": {"stream": b, "on": b + 1},
    }
    return {"op": kind} | more.get(kind, {})


draws = st.lists(st.tuples(st.sampled_from(KINDS), sizes, st.integers(0, 40), names), max_size=40)


@st.composite
def segments(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Initial segments whose blocks fill them; ids from 10^12 on."""
    found: list[dict[str, Any]] = []
    address, number = 0x7F0000000000, 10**12
    for blocks in draw(st.lists(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), min_size=1), max_size=3)):
        rows: list[list[Any]] = []
        for units, state in blocks:
            held = state > 0
            name = ("inactive", "active_allocated", "active_pending_free")[state]
            rows.append([number if held else None, 512 * units, 500 if held else 0, name])
            number += held
        size = sum(row[1] for row in rows)
        segment = {"address": address, "bytes": size, "pool": "small", "stream": len(found), "blocks": rows}
        if draw(st.booleans()):
            segment |= {"expandable": True, "va_address": address, "va_bytes": size + 512, "pool_id": 1}
        found.append(segment)
        address += size + 1024
    return found


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """A valid trace as a JSON document whose events are rows, with unknown fields at every level."""
    numbers = draw(st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True))
    groups: dict[str, Any] = draw(
        st.sampled_from([{}, {"dp": numbers}, {"dp": numbers, "mesh": [[n] for n in numbers]}])
    )
    ranks = []
    while numbers:
        many = draw(st.integers(1, len(numbers)))
        taken, numbers = numbers[:many], numbers[many:]
        rows = _interpret(draw(draws), draw(st.booleans()), groups)
        for row in rows[:: draw(st.integers(1, 50))]:
            row |= draw(st.dictionaries(unknown_names, json_values.filter(lambda v: v is not None), max_size=2))
        entry: dict[str, Any] = {"rank": taken if len(taken) > 1 else taken[0], "events": rows}
        if draw(st.booleans()):
            entry["initial"] = {"segments": draw(segments())}
        entry |= draw(st.dictionaries(_besides("rank", "events", "initial", "device"), json_values, max_size=1))
        ranks.append(entry)
    document: dict[str, Any] = {"format": "memory-trace", "version": 1, "groups": groups, "ranks": ranks}
    if draw(st.booleans()):
        document["metadata"] = draw(st.dictionaries(names, json_values, max_size=3))
        document["allocator"] = {"conf": draw(names), "release": "2.11", "unknown": draw(json_values)}
        document["devices"] = [
            {"name": draw(names) or "GPU", "total_bytes": 1 << 34, "context_bytes": 1 << 20, "launch_ns": 7}
            | {"placement": "recorded", "segment_addresses": [1 << 30, 1 << 31], "va_base": 1 << 40, "colour": "green"}
        ]
    other = _besides("format", "version", "metadata", "allocator", "devices", "groups", "ranks")
    return draw(st.dictionaries(other, json_values, max_size=2)) | document


def as_trace(document: Mapping[str, Any]) -> Trace:
    """The trace of a document."""
    return read_json(msgspec.json.encode(document))


traces = documents().map(as_trace)


def same_events(left: Events, right: Events) -> bool:
    """Whether two sequences of events mean the same, whatever columns stand for defaults."""
    if not np.array_equal(left.op, right.op) or left.extra != right.extra:
        return False
    return all(_same_field(left, right, field) for field in FIELDS)


def _same_field(left: Events, right: Events, field: str) -> bool:
    if field in STRING_FIELDS:
        a, b = left.strings(field), right.strings(field)
        return [a.get(i) for i in range(len(a))] == [b.get(i) for i in range(len(b))]
    if field in INT_FIELDS:
        return np.array_equal(left.ints(field), right.ints(field))
    if field in FLOAT_FIELDS:
        return np.array_equal(left.floats(field), right.floats(field), equal_nan=True)
    return np.array_equal(left.bools(field), right.bools(field))


def same_trace(left: Trace, right: Trace) -> bool:
    """Whether two traces mean the same, unknown fields included."""
    heads = [(t.metadata, t.conf, t.release, t.devices, t.groups, t.extra) for t in (left, right)]
    if heads[0] != heads[1] or len(left.ranks) != len(right.ranks):
        return False
    return all(
        (a.ranks, a.device, a.initial, a.extra) == (b.ranks, b.device, b.initial, b.extra)
        and same_events(a.events, b.events)
        for a, b in zip(left.ranks, right.ranks, strict=True)
    )
