"""What a replay of events shows, in the recordings' terms, and the comparison of two of them.

An event is a row as in the recordings (`data/golden/README.md`), with a few more for what they lack:

    ["y", stream or None]                      synchronize
    ["cf", id]                                 complete_free
    ["pc", pool, no_split, use_on_oom]         pool_create
    ["pb", pool], ["pe", pool], ["pr", pool]   pool_begin, pool_end, pool_release
    ["cb", pool, true]                         pool_begin of a capture
    ["ps", pool or None]                       pool_switch
    ["ce", pool]                               empty_cache of a pool
    ["pk", pool, number], ["px", pool, number] pool_checkpoint, pool_restore
    ["t", id, bytes, stream, was]              alloc that takes over a block of a checkpoint
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Row = list[Any]
State = tuple[int, ...]
Call = tuple[str, int, int]
Entry = tuple[str | int, ...]  # a call, or an entry of the allocator's own trace: kind, address, bytes, stream
Report = dict[str, Any]

COLUMNS = ("address", "reserved", "allocated", "active", "segments", "num_alloc_retries", "num_ooms")
OUT_OF_MEMORY = -1
DEVICE_CALLS = frozenset("AXFRVMUY")
VA_BASE = 0x7F0000000000


@dataclass(frozen=True)
class Setup:
    """Where events are served: the release, its settings, and the device."""

    release: str
    conf: str
    total_bytes: int
    va_base: int = VA_BASE
    placement: str = "first-fit"
    segment_addresses: tuple[int, ...] = ()


@dataclass
class Observed:
    """What stood after every event, the device's calls of every event, and the reports by event.

    `logs` has the device's calls with the entries of the allocator's own trace among them (`alloc`, `free_requested`,
    `free_completed`: address and requested bytes; `oom`: bytes free on the device, and the rounded request; then the
    stream).
    A state is None where nothing was recorded (the events that ask for a report). `undefined` says at which event
    the replay stopped because PyTorch leaves undefined what follows.
    """

    states: list[State | None] = field(default_factory=list)
    calls: list[list[Call]] = field(default_factory=list)
    logs: list[list[Entry]] = field(default_factory=list)
    reports: dict[int, Report] = field(default_factory=dict)
    memory_stats: dict[str, int] = field(default_factory=dict)  # at the end, by PyTorch's flat names
    undefined: int | None = None

    def column(self, name: str) -> list[int]:
        """One column of the states; every event must have one."""
        index = COLUMNS.index(name)
        return [state[index] for state in self.states if state is not None]


def calls_of(log: Sequence[Entry]) -> list[Call]:
    """The device's calls of a log."""
    return [(str(kind), int(address), int(size)) for kind, address, size, *_ in log if kind in DEVICE_CALLS]


def merge_pages(log: Sequence[Entry]) -> list[Entry]:
    """Join `M` and `U` calls of neighbouring ranges that follow each other."""
    merged: list[Entry] = []
    for kind, *rest in log:
        before = merged[-1] if merged else ("",)
        if kind in ("M", "U") and before[0] == kind and int(before[1]) + int(before[2]) == rest[0]:
            merged.pop()
            rest = [before[1], int(before[2]) + int(rest[1])]
        merged.append((kind, *rest))
    return merged


def assert_same(name: str, rows: Sequence[Row], expected: Observed, got: Observed) -> None:
    """Fail at the first event at which `got` differs from `expected`, naming event and column."""
    assert len(got.states) == len(expected.states), f"{name}: {len(got.states)} events of {len(expected.states)}"
    for index, row in enumerate(rows[: len(expected.states)]):
        if _alike(expected, got, index):
            continue
        place = f"{name}: event {index} {row}"
        assert_same_state(place, expected.states[index], got.states[index])
        wanted, made = expected.calls[index], got.calls[index]
        assert made == wanted, f"{place}: device calls are {made}, not {wanted}"
        if expected.logs:
            assert got.logs[index] == expected.logs[index], (
                f"{place}: the log is {got.logs[index]}, not {expected.logs[index]}"
            )
        if index in expected.reports:
            assert_same_report(place, expected.reports[index], got.reports[index])
    if expected.memory_stats:
        assert_same_report(f"{name}: memory_stats", dict(sorted(expected.memory_stats.items())), got.memory_stats)
        assert set(got.memory_stats) == set(expected.memory_stats), f"{name}: memory_stats has other names"


def _alike(expected: Observed, got: Observed, index: int) -> bool:
    """Whether an event without a report is the same in all that was recorded of it: most are, and need no words."""
    return (
        index not in expected.reports
        and got.states[index] == expected.states[index]
        and got.calls[index] == expected.calls[index]
        and (not expected.logs or got.logs[index] == expected.logs[index])
    )


def assert_same_state(place: str, expected: State | None, got: State | None) -> None:
    if expected is None:
        return
    assert got is not None, f"{place}: nothing was recorded"
    for column, wanted, found in zip(COLUMNS, expected, got, strict=True):
        assert found == wanted, f"{place}: {column} is {found}, not {wanted}"


def assert_same_report(place: str, expected: Any, got: Any) -> None:
    """Compare two reports; the failure names the path to the first difference."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for key, wanted in expected.items():
            assert key in got, f"{place}: {key} is missing"
            assert_same_report(f"{place}.{key}", wanted, got[key])
    elif isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        for index, (wanted, found) in enumerate(zip(expected, got, strict=False)):
            assert_same_report(f"{place}[{index}]", wanted, found)
        assert len(got) == len(expected), f"{place}: {len(got)} items, not {len(expected)}"
    else:
        assert got == expected, f"{place}: is {got}, not {expected}"
