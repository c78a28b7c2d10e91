"""Serves rows of events (`tests/support/observed.py`) with `simulator.replay`, and shows the result in the recordings'
terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from simulator.engine.result import LOG_KINDS, RankResult
from tests.support.observed import DEVICE_CALLS, Entry, Observed, Row, Setup, calls_of, merge_pages
from traces.errors import ReplayError
from traces.model import (
    BOOL_FIELDS,
    FLOAT_FIELDS,
    INT_FIELDS,
    Column,
    Device,
    Events,
    Op,
    Placement,
    RankEvents,
    Strings,
    Trace,
)

PLACEMENTS: dict[str, Placement] = {name: name for name in get_args(Placement)}

#: Row code -> op and the fields of the row's other items.
OPS: dict[str, tuple[Op, tuple[str, ...]]] = {
    "m": (Op.ALLOC, ("id", "bytes", "stream")),
    "f": (Op.FREE, ("id",)),
    "r": (Op.RECORD_STREAM, ("id", "stream")),
    "e": (Op.HOLD_EVENTS, ("hold",)),
    "d": (Op.COMPLETE_EVENTS, ("stream",)),
    "y": (Op.SYNCHRONIZE, ("stream",)),
    "cf": (Op.COMPLETE_FREE, ("id",)),
    "c": (Op.EMPTY_CACHE, ()),
    "g": (Op.SET_MEMORY_FRACTION, ("fraction",)),
    "o": (Op.SET_ALLOCATOR, ("conf",)),
    "u": (Op.OTHER_PROCESS, ("bytes",)),
    "a": (Op.RESET_ACCUMULATED, ()),
    "p": (Op.RESET_PEAK, ()),
    "s": (Op.SNAPSHOT, ()),
    "x": (Op.STATISTICS, ()),
    "pc": (Op.POOL_CREATE, ("pool", "no_split", "use_on_oom")),
    "pb": (Op.POOL_BEGIN, ("pool",)),
    "pe": (Op.POOL_END, ("pool",)),
    "pr": (Op.POOL_RELEASE, ("pool",)),
    "cb": (Op.POOL_BEGIN, ("pool", "capture")),
    "ps": (Op.POOL_SWITCH, ("pool",)),
    "ce": (Op.EMPTY_CACHE, ("pool",)),
    "pk": (Op.POOL_CHECKPOINT, ("pool", "checkpoint")),
    "px": (Op.POOL_RESTORE, ("pool", "checkpoint")),
    "t": (Op.ALLOC, ("id", "bytes", "stream", "was")),
}
REPORTS = ("s", "x")


def to_events(rows: Sequence[Row]) -> Events:
    """The rows as columns."""
    codes = np.array([OPS[row[0]][0] for row in rows], dtype=np.uint8)
    values: dict[str, list[Any]] = {}
    for index, row in enumerate(rows):
        op, fields = OPS[row[0]]
        for name, value in zip(fields, row[1:], strict=True):
            if name not in values:
                values[name] = [None] * len(rows)
            values[name][index] = -1 if value is None and op is Op.SYNCHRONIZE else value
    return Events(codes, {name: to_column(name, column) for name, column in values.items()})


def to_column(name: str, values: list[Any]) -> Column:
    """A column of the dtype of its field, with that field's value for "absent"."""
    if name in INT_FIELDS:
        return np.array([INT_FIELDS[name] if value is None else value for value in values], dtype=np.int64)
    if name in BOOL_FIELDS:
        return np.array([bool(value) for value in values])
    if name in FLOAT_FIELDS:
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    return Strings.encode(values)


def to_trace(rows: Sequence[Row], setup: Setup) -> Trace:
    """A trace of one rank that serves `rows`."""
    device = Device(
        name="stand-in",
        total_bytes=setup.total_bytes,
        va_base=setup.va_base,
        placement=PLACEMENTS[setup.placement],
        segment_addresses=setup.segment_addresses,
    )
    rank = RankEvents(ranks=(0,), events=to_events(rows))
    return Trace(ranks=(rank,), conf=setup.conf, release=setup.release, devices=(device,))


def fast_replay(rows: Sequence[Row], setup: Setup) -> Observed:
    """Serve `rows` with the allocator's kernels, up to the first event that PyTorch leaves undefined."""
    from simulator.engine.replay import replay

    try:
        result = replay(to_trace(rows, setup), events=True, log=True, analyse=False, after_oom="continue")
    except ReplayError as error:
        return Observed(undefined=event_of(error))
    return observe(result.ranks[0], rows)


def event_of(error: ReplayError) -> int:
    """The event index that the message of an error names; it must say that PyTorch leaves undefined what follows."""
    assert "undefined in PyTorch" in str(error), str(error)
    words = str(error).replace(":", " ").replace(",", " ").split()
    return int(words[words.index("event") + 1])


def observe(rank: RankResult, rows: Sequence[Row]) -> Observed:
    """The result of a rank in the recordings' terms."""
    columns = rank.columns
    assert columns is not None
    arrays = (
        columns.address,
        columns.reserved,
        columns.allocated,
        columns.active,
        columns.segments,
        columns.num_alloc_retries,
        columns.num_ooms,
    )
    for array in arrays:
        assert array.dtype == np.int64
        assert len(array) == len(rows)
    states: list[tuple[int, ...] | None] = list(zip(*(array.tolist() for array in arrays), strict=True))
    reports = {report.event: dict(report.data) for report in rank.reports}
    logs = full_log(rank, len(rows))
    return Observed(states, [calls_of(log) for log in logs], logs, reports, dict(rank.memory_stats))


def full_log(rank: RankResult, events: int) -> list[list[Entry]]:
    """The log by event: calls of the device, and the allocator's own trace among them."""
    log = rank.log
    assert log is not None
    entries: list[list[Entry]] = [[] for _ in range(events)]
    columns = (log.kind, log.event, log.address, log.bytes, log.stream)
    for code, event, address, size, stream in zip(*(column.tolist() for column in columns), strict=True):
        kind = LOG_KINDS[code]
        entries[event].append((kind, address, size) if kind in DEVICE_CALLS else (kind, address, size, stream))
    return [merge_pages(of_event) if len(of_event) > 1 else of_event for of_event in entries]
