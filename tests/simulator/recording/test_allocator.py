"""The allocator that serves while a program runs: equal to recordings of PyTorch's, event by event, and to a replay."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from simulator.allocator.releases import parse_release
from simulator.engine.replay import replay
from simulator.recording.allocator import LiveAllocator
from simulator.recording.message import format_size
from simulator.recording.trace import trace_of
from tests.support import golden
from tests.support.observed import COLUMNS, OUT_OF_MEMORY, Row, Setup
from traces.model import Device

MIB = 1 << 20
#: What a program can do: allocate, free, use on a stream, empty the cache, reset counts, set fraction and settings.
SERVED = frozenset("mfrcgoapxs")
WORKLOADS = ("boundaries", "log-uniform", "statistics", "toggles", "transformer", "uniform")
CHOSEN = [
    name
    for name in golden.names("2.12.1/")
    if name.removeprefix("2.12.1/").startswith(WORKLOADS) and name.endswith((".default", ".expandable", ".gc-split64"))
]


class OutOfMemoryError(RuntimeError):
    """Stands for torch's."""


def made(total: int, conf: str | None = "", release: str = "2.13") -> LiveAllocator:
    return LiveAllocator(Device("stand-in", total), parse_release(release), conf, OutOfMemoryError)


class Program:
    """Serves rows of a recording as a program's events."""

    def __init__(self, setup: Setup) -> None:
        device = Device("stand-in", setup.total_bytes, va_base=setup.va_base, placement=setup.placement)  # type: ignore[arg-type]
        self.allocator = LiveAllocator(device, parse_release(setup.release), setup.conf, OutOfMemoryError)
        self.idents: dict[int, int | None] = {}

    def serve(self, row: Row) -> bool:
        """Serve one row; whether it ran out of memory."""
        kind, *rest = row
        live = self.allocator
        calls: dict[str, Any] = {
            "c": live.empty_cache,
            "g": live.set_fraction,
            "o": live.set_conf,
            "a": live.reset_accumulated,
            "p": live.reset_peak,
        }
        if kind == "m" and not rest[1]:
            self.idents[rest[0]] = None
        elif kind == "m":
            try:
                self.idents[rest[0]] = live.malloc(*rest[1:])
            except OutOfMemoryError:
                self.idents[rest[0]] = None
                return True
        elif kind in "fr":
            ident = self.idents[rest[0]]
            if ident is not None:
                live.free(ident) if kind == "f" else live.record_stream(ident, rest[1])
        elif kind in calls:
            calls[kind](*rest)
        return False

    def state(self) -> dict[str, int]:
        """The columns of the recordings that statistics have."""
        stats = self.allocator.machine.memory_stats()
        bytes_of = {name: stats[f"{name}_bytes.all.current"] for name in ("reserved", "allocated", "active")}
        counts = {"num_alloc_retries": stats["num_alloc_retries"], "num_ooms": stats["num_ooms"]}
        return {**bytes_of, "segments": stats["segment.all.current"], **counts}


def test_recordings_are_chosen() -> None:
    assert len(CHOSEN) >= 8


@pytest.mark.parametrize("name", CHOSEN)
def test_equals_recordings_of_pytorch(name: str) -> None:
    recording = golden.load(name)
    program = Program(recording.setup)
    compared = 0
    for row, wanted in zip(recording.rows, recording.observed.states, strict=True):
        if row[0] not in SERVED:
            break
        failed = program.serve(row)
        if wanted is not None:
            assert failed == (row[0] == "m" and wanted[0] == OUT_OF_MEMORY)
            state = program.state()
            assert {column: state[column] for column in state} == {c: wanted[COLUMNS.index(c)] for c in state}
            compared += 1
    assert compared > 20


def test_the_history_replays_to_the_same_statistics() -> None:
    pytest.importorskip("torch")
    from graph.recorder.lines import Lines
    from graph.recorder.program import Labels

    live = made(200 * MIB)
    labels = Labels(Lines())
    alive = []
    for number in range(300):
        labels.operator.append(labels.code("aten.empty"))
        labels.module.append(-1)
        labels.stack.append(labels.lines.here())
        try:
            alive.append(live.malloc((number * 7919 % 97 + 1) * 100_000, number % 3))
        except OutOfMemoryError:
            live.empty_cache()
        if number % 3 == 2 and alive:
            live.free(alive.pop(number % len(alive)))
        if number == 150:
            live.set_fraction(0.7)
        if number == 200:
            live.set_conf("max_split_size_mb:40")
    assert live.machine.memory_stats()["num_ooms"] > 0
    result = replay(trace_of(live, labels, {}), analyse=False, after_oom="continue")
    assert result.ranks[0].memory_stats == live.machine.memory_stats()


def test_room_for_many_allocations_and_events() -> None:
    live = made(8 << 30)
    idents = [live.malloc(1024) for _ in range(40_000)]
    for ident in idents:
        live.free(ident)
    stats = live.machine.memory_stats()
    assert stats["allocation.all.allocated"] == stats["allocation.all.freed"] == 40_000
    assert len(live.history) == 80_000


def test_frees_by_the_collector_inside_an_event_come_after_it() -> None:
    class Cycle:
        def __init__(self, live: LiveAllocator) -> None:
            self.live, self.ident, self.me = live, live.malloc(MIB), self

        def __del__(self) -> None:
            self.live.free(self.ident)

    live = made(8 << 30)
    before = gc.get_threshold()
    gc.set_threshold(1)  # the collector runs at nearly every call
    try:
        for _ in range(2000):
            Cycle(live)
    finally:
        gc.set_threshold(*before)
        gc.collect()
    stats = live.machine.memory_stats()
    assert stats["allocation.all.freed"] == 2000
    assert stats["allocated_bytes.all.current"] == 0


def test_settings_are_those_of_the_environment_at_the_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    live = made(8 << 30, None)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    live.malloc(3 * MIB)
    assert live.machine.settings.expandable_segments
    assert live.conf == "expandable_segments:True"


def test_settings_are_those_of_the_environment_when_the_device_was_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    live = made(8 << 30, None)
    live.begin()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    live.malloc(3 * MIB)
    assert not live.machine.settings.expandable_segments
    assert live.conf == ""


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1024, "1024 bytes"), (1025, "1.00 KiB"), (36_720_640, "35.02 MiB"), (3_000_000_000, "2.79 GiB")],
)
def test_sizes_as_pytorch_writes_them(size: int, text: str) -> None:
    assert format_size(size) == text
