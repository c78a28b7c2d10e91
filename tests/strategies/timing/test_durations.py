"""Durations of kernels and collectives, waits of collectives, and the time of a step by the replay's clocks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from graph.model import Kind
from simulator.engine.replay import replay
from simulator.estimator.step_time import StepTime, step_time
from strategies.gemini.event_builder import EventBuilder
from strategies.rank_events import events_of
from strategies.timing.clock import LAUNCH_NS, Clock, timed
from strategies.timing.links import ways
from strategies.timing.roofline import Speed
from tests.support.step_graphs import Writer
from traces.errors import ConfigError
from traces.model import Device, Events, Op, RankEvents, Trace

CARD = Device("A100-80GB", 1 << 36)


def builder(stream: int, waits: bool = False) -> EventBuilder:
    """Two iterations of one kernel of 1 ms, an all-reduce on `stream`, and another kernel of 1 ms."""
    out = EventBuilder()
    out.phase("load")
    for step in range(2):
        out.phase("forward", step)
        out.kernel(1_000_000, "first")
        if waits:
            out.add(Op.WAIT_STREAM, stream=stream, on=0)
        out.collective("all_reduce", "dp", 1 << 30, stream=stream)
        out.kernel(1_000_000, "second")
        if waits:
            out.add(Op.WAIT_STREAM, stream=0, on=stream)
        out.phase("step", step)
        out.kernel(1_000_000, "third")
    return out


def job(events: Events, world: int = 4) -> Trace:
    """All ranks do the same."""
    ranks = tuple(range(world))
    return Trace((RankEvents(ranks, events),), devices=(CARD,), groups={"dp": (ranks,)}, release="2.13")


def all_reduce(world: int) -> int:
    """By hand: a ring over NVLink 3 at 80 % of 300 GB/s, 3.4 us a hop, 8.4 us to start."""
    steps = world - 1
    seconds = 8.4e-6 + 2 * (steps * 3.4e-6 + steps / world * (1 << 30) / (300e9 * 0.8))
    return round(seconds * 1e9)


def test_a_collective_nobody_waits_for_is_waited_for_at_once_or_at_the_next_phase() -> None:
    clock = Clock.connected("A100-80GB")
    lasts = all_reduce(4)
    assert lasts > 4_000_000  # longer than the kernel beside it
    near = timed(job(builder(1).events()), clock)
    assert step_time(near) == pytest.approx(3_000_000 + lasts, abs=5 * LAUNCH_NS)
    late = timed(job(builder(900).events()), clock)
    assert step_time(late) == pytest.approx(2_000_000 + lasts, abs=5 * LAUNCH_NS)


def test_waits_that_the_trace_has_are_kept() -> None:
    made = timed(job(builder(7, waits=True).events()), Clock.connected("A100-80GB"))
    assert int((made.ranks[0].events.op == Op.WAIT_STREAM).sum()) == 4
    assert step_time(made) == pytest.approx(2_000_000 + all_reduce(4), abs=5 * LAUNCH_NS)


def test_a_collective_of_the_current_stream_needs_no_wait() -> None:
    made = timed(job(builder(0).events()), Clock.connected("A100-80GB"))
    assert not (made.ranks[0].events.op == Op.WAIT_STREAM).any()
    assert step_time(made) == pytest.approx(3_000_000 + all_reduce(4), abs=5 * LAUNCH_NS)


def test_collectives_without_durations_make_no_time() -> None:
    out = EventBuilder()
    for step in range(2):
        out.phase("forward", step)
        out.collective("all_reduce", "dp", 1 << 20, stream=0)
    plain = job(out.events())
    assert replay(plain).ranks[0].duration_ns is None
    assert step_time(plain) is None
    assert replay(timed(plain, Clock.connected("A100-80GB"))).ranks[0].duration_ns is not None


def test_replays_of_timed_traces_are_alike() -> None:
    made = timed(job(builder(900).events()), Clock.connected("A100-80GB"))
    first, second = (replay(made, analyse=False).ranks[0].duration_ns for _ in range(2))
    assert first == second is not None


def test_a_trace_without_steps_or_memory_has_no_step_time() -> None:
    out = EventBuilder()
    out.kernel(1000, "one")
    assert step_time(job(out.events())) is None
    out = EventBuilder()
    out.phase("forward", 0)
    out.kernel(1000, "one")
    out.alloc(1 << 40, "temporary", "much")
    assert step_time(job(out.events())) is None


def test_products_last_as_their_type_says() -> None:
    writer = Writer()
    writer.operator("aten.mm.default", module="fc", flops=234_000_000_000, moved=8)
    speed = Clock.connected("A100-80GB").speed()
    graph = writer.graph()
    plain = int(events_of(graph, speed).ints("duration_ns")[0])
    assert plain == pytest.approx(234e9 / (19.5e12 * 0.9) * 1e9 + 3000, rel=1e-6)  # reads nothing: no type is known
    assert speed.by_dtype["bfloat16"] == pytest.approx(312e12 * 0.75)
    assert Clock.connected("V100-16GB").speed().by_dtype["bfloat16"] == pytest.approx(15.7e12 * 0.9)
    only = Speed(1e12, 1e12, 0, {"bfloat16": 2e12})
    assert only.kernels_ns(graph).tolist() == [234_000_000_000 / 1e12 * 1e9]


def test_collectives_in_time_run_on_the_stream_that_was_current() -> None:
    writer = Writer()
    writer.event(Kind.COLLECTIVE, writer.code("all_gather fsdp 0 5"), 400)
    graph = writer.graph()
    assert events_of(graph).ints("stream").tolist() == [0]
    assert events_of(graph, Speed(1e12, 1e12)).ints("stream").tolist() == [5]


@pytest.mark.parametrize(
    ("gpu", "word", "inside", "between"),
    [
        ("A100-80GB", "", "nvlink3", "infiniband-hdr"),
        ("A100-80GB", "PCIe", "pcie4", "infiniband-hdr"),
        ("H100-80GB", "NVLink", "nvlink4", "infiniband-ndr"),
        ("T4-16GB", "", "pcie3", "infiniband-edr"),
        ("V100-16GB", "infiniband", "infiniband-edr", "infiniband-edr"),
        ("L4-24GB", "ethernet", "ethernet-10", "ethernet-10"),
    ],
)
def test_ways_between_gpus(gpu: str, word: str, inside: str, between: str) -> None:
    assert ways(gpu, word) == (inside, between)


@pytest.mark.parametrize(("gpu", "word"), [("T4-16GB", "nvlink"), ("A100-80GB", "nvlnk9")])
def test_ways_that_are_not_there(gpu: str, word: str) -> None:
    with pytest.raises(ConfigError, match=r"interconnect"):
        ways(gpu, word)


def test_slower_ways_take_longer() -> None:
    times = []
    for word in ("nvlink", "pcie", "infiniband", "ethernet"):
        found = step_time(timed(job(builder(0).events()), Clock.connected("A100-80GB", word)))
        assert found is not None
        times.append(found)
    assert times == sorted(times)
    assert len(set(times)) == 4


def test_tokens_per_second() -> None:
    found = StepTime(step_ns=2_000_000_000, tokens=8192, ranks=4)
    assert found.tokens_per_second == 4096
    assert found.document()["tokens_per_second_per_gpu"] == 1024
    assert dataclasses.asdict(found)["step_ns"] == found.document()["step_time_ns"]


def test_time_changes_no_memory_where_no_stream_is_recorded() -> None:
    out = EventBuilder()
    for step in range(2):
        out.phase("forward", step)
        one = out.alloc(5 << 20, "activation", "x")
        out.kernel(1_000_000, "k")
        two = out.alloc(9 << 20, "activation", "y", stream=3)
        out.free(one)
        out.collective("all_reduce", "dp", 100, stream=0)
        out.free(two)
    plain = job(out.events())
    before, after = (replay(trace).ranks[0] for trace in (plain, timed(plain, Clock.connected("A100-80GB"))))
    assert before.memory_stats == after.memory_stats
    assert np.array_equal(before.timeline.reserved, after.timeline.reserved)
