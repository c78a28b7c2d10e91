"""A trace as on a GPU, and what a verdict makes of it."""

from __future__ import annotations

import numpy as np

from simulator.engine.min_memory import smallest_memory
from simulator.engine.on_gpu import on_gpu
from simulator.engine.replay import replay
from simulator.engine.result import OnGpu, OutsideTerm
from simulator.estimator.judging import judged, sides
from traces.model import Device, Events, Op, RankEvents, Strings, Trace

MIB = 1 << 20
CONTEXT = (OutsideTerm("context", 10 * MIB, "as given"),)


def trace_of(sizes: list[tuple[int, int]], total: int = 1 << 30) -> Trace:
    """Allocations of (bytes, bytes on a GPU or -1) that all stay."""
    size, there = (np.array(column, dtype=np.int64) for column in zip(*sizes, strict=True))
    op = np.full(len(sizes), Op.ALLOC, dtype=np.uint8)
    events = Events(op, {"id": np.arange(len(sizes)), "bytes": size, "gpu_bytes": there})
    return Trace((RankEvents((0,), events),), devices=(Device("A100-80GB", total),))


def test_bytes_on_a_gpu_stand_in_for_those_without_one() -> None:
    trace = trace_of([(30 * MIB, -1), (0, 40 * MIB), (20 * MIB, 50 * MIB)])
    bare, there = replay(trace).ranks[0], replay(on_gpu(trace)).ranks[0]
    assert (bare.peak_allocated, there.peak_allocated) == (50 * MIB, 120 * MIB)
    assert bare.memory_stats["allocation.all.allocated"] == 2  # one of 0 bytes is none
    assert on_gpu(trace).devices[0].placement == "driver"


def test_addresses_of_a_recording_stay() -> None:
    trace = trace_of([(2 * MIB, -1)])
    recorded = Device("A100-80GB", 1 << 30, placement="recorded", segment_addresses=(1 << 40,))
    trace = Trace(trace.ranks, devices=(recorded,))
    assert on_gpu(trace).devices == (recorded,)


def test_a_verdict_has_both_pairs_of_peaks() -> None:
    trace = trace_of([(30 * MIB, -1), (0, 40 * MIB)])
    rank = judged(trace, CONTEXT).ranks[0]
    assert rank.on_gpu is not None
    assert (rank.peak_allocated, rank.on_gpu.peak_allocated) == (30 * MIB, 70 * MIB)
    assert rank.device_total == rank.on_gpu.peak_reserved + 10 * MIB
    assert judged(trace, ()).ranks[0].on_gpu is None  # nothing but PyTorch


def test_the_worse_of_the_two_decides() -> None:
    trace = trace_of([(30 * MIB, -1), (0, 40 * MIB)], total=60 * MIB)
    assert judged(trace, ()).verdict == "fits"
    assert judged(trace, CONTEXT).verdict == "oom"


def test_what_is_needed_has_the_libraries_too() -> None:
    """Also where it does not fit without them; and a GPU that is just large enough is so on both sides."""
    trace = trace_of([(30 * MIB, -1), (0, 40 * MIB)], total=20 * MIB)
    assert judged(trace, CONTEXT, needs=True).needed == 80 * MIB
    assert max(map(smallest_memory, sides(trace, CONTEXT))) == 70 * MIB
    assert list(sides(trace, ())) == [trace]


def test_the_driver_goes_down_in_whole_reservations_and_fills_the_newest_first() -> None:
    """As cudaMalloc did on the H100: 130 MiB take 160 of the address space, of which what comes next has the rest."""
    sizes = [128, 130, 20, 16]
    events = Events(
        np.full(len(sizes), Op.ALLOC, dtype=np.uint8),
        {"id": np.arange(len(sizes)), "bytes": np.array(sizes, dtype=np.int64) * MIB},
    )
    device = Device("H100-80GB", 1 << 33, va_base=1 << 40, placement="driver")
    found = replay(Trace((RankEvents((0,), events),), devices=(device,)), snapshot=True).ranks[0].snapshot
    assert found is not None
    places = {segment["total_size"] // MIB: (segment["address"] - (1 << 40)) // MIB for segment in found["segments"]}
    assert places == {128: -128, 130: -128 - 160, 20: -288 + 130, 16: -288 - 32}


def test_cudnn_does_without_where_there_is_no_room() -> None:
    """PyTorch tries the next algorithm then: the run is tight, and a GPU without that room is enough."""
    trace = trace_of([(30 * MIB, -1), (0, 40 * MIB)], total=60 * MIB)
    (entry,) = trace.ranks
    named = entry.events.with_columns(name=Strings.encode([None, "algorithm"]))
    trace = Trace((RankEvents((0,), named),), devices=trace.devices)
    found = judged(trace, CONTEXT)
    assert found.verdict == "tight"
    assert found.ranks[0].on_gpu == OnGpu(30 * MIB, 30 * MIB, 1)
    assert max(map(smallest_memory, sides(trace, CONTEXT))) == 30 * MIB
