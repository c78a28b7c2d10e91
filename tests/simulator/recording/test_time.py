"""Simulated time while a program runs: streams by hand, a replay that agrees, and the roofline's own step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import traces
from graph.recorder.lines import Lines
from graph.recorder.program import Labels
from simulator.allocator import layout as at
from simulator.allocator.releases import parse_release
from simulator.engine.replay import replay
from simulator.recording.allocator import LiveAllocator
from simulator.recording.durations import of_phases, of_step
from simulator.recording.trace import trace_of
from tests.simulator.recording.test_record import answer, folder_of, record
from traces.model import Device, Op

MIB = 1 << 20
POINT = 5000
NCCL = 900
LOAD, FORWARD, BACKWARD, OPTIMIZER = range(4)
KINDS = ("malloc", "free", "record_stream", "launch", "collective", "wait", "point", "reached", "synchronize")


def made(*, late: bool = False, timed: bool = True) -> LiveAllocator:
    """An allocator whose collectives take 1 us a byte, and launches 10 ns."""
    device = Device("stand-in", 1 << 30, launch_ns=10)
    times = (lambda kind, size, ranks: 1000 * size) if timed else None
    return LiveAllocator(device, parse_release("2.13"), "", MemoryError, late=late, times=times)


def done(live: LiveAllocator) -> int:
    """When the host and all streams are done."""
    live.mark(FORWARD, 0)
    return live.marks[-1].done


def test_memory_comes_back_when_its_stream_has_passed_the_point() -> None:
    live = made()
    first = live.malloc(20 * MIB)
    live.record_stream(first, 1)
    live.launch(0, 5000, 1)
    live.free(first)
    reserved = []
    for _ in range(2):
        live.malloc(20 * MIB)
        reserved.append(live.machine.stat(at.RESERVED_BYTES)["all"][0])
        live.synchronize(-1)  # meanwhile stream 1 is busy for 5 us
    assert reserved == [40 * MIB, 40 * MIB]
    assert done(live) == 5010


def test_late_memory_comes_back_when_the_host_has_waited_for_a_later_event() -> None:
    live = made(late=True, timed=False)
    early, later = live.malloc(2 * MIB), live.malloc(2 * MIB)
    for ident in (early, later):
        live.record_stream(ident, 1)
    live.free(early)
    live.wait_stream(POINT, 1)
    live.free(later)
    active = [live.machine.stat(at.ACTIVE_BYTES)["all"][0]]
    for point in (POINT, -1):
        live.synchronize(point)
        active.append(live.machine.stat(at.ACTIVE_BYTES)["all"][0])
        live.free(live.malloc(512))
    assert active == [4 * MIB, 2 * MIB, 0]


def test_streams_wait_for_collectives_and_for_each_other() -> None:
    live = made()
    live.launch(0, 1000, 0)
    live.wait_stream(NCCL, 0)
    live.collective(0, "all_reduce", "0,1,2,3", 7, NCCL)  # from 1010 to 8010
    live.launch(0, 500, 0)  # beside it, from 1010
    assert live.machine.memory[at.HOST] == 30
    live.wait_stream(POINT, NCCL)
    live.wait_stream(2, POINT)
    live.launch(0, 100, 2)
    assert done(live) == 8110
    live.synchronize(POINT)
    assert live.machine.memory[at.HOST] == 8010


@settings(deadline=None, max_examples=60)
@given(
    late=st.booleans(),
    timed=st.booleans(),
    calls=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5), st.integers(0, 3)), max_size=80),
)
def test_the_replay_agrees_whatever_a_program_does(late: bool, timed: bool, calls: list[tuple[str, int, int]]) -> None:
    live = made(late=late, timed=timed)
    labels = Labels(Lines())
    labels.code("kernel")
    alive: list[int] = []
    for kind, number, stream in calls:
        if kind == "malloc":
            for codes in (labels.operator, labels.module, labels.stack):
                codes.append(0)
            alive.append(live.malloc((number + 1) * 700_000, stream))
        elif kind == "free" and alive:
            live.free(alive.pop(number % len(alive)))
        elif kind == "record_stream" and alive:
            live.record_stream(alive[number % len(alive)], stream)
        elif kind == "launch" and timed:
            live.launch(0, 1 + 40 * number, stream)
        elif kind == "collective":
            live.collective(0, "all_gather", "0,1", number, NCCL if number % 2 else stream)
        elif kind == "wait":
            live.wait_stream(stream, (stream + 1) % 4)
        elif kind == "point":
            live.wait_stream(POINT + number, stream)
        elif kind == "reached":
            live.synchronize(POINT + number)
        elif kind == "synchronize":
            live.synchronize(-1)
    labels.stack[:] = labels.stack[:0]
    labels.stack.extend([labels.lines.here()] * len(labels.operator))
    (rank,) = replay(trace_of(live, labels, {}), analyse=False).ranks
    assert rank.memory_stats == live.machine.memory_stats()
    if timed:
        assert (rank.duration_ns or 0) == done(live)


def test_phases_take_from_when_all_before_is_done() -> None:
    live = made()
    for phase, step, work in (
        (LOAD, -1, 0),
        (FORWARD, 0, 300),
        (BACKWARD, 0, 700),
        (FORWARD, 0, 20),
        (OPTIMIZER, 0, 5),
    ):
        live.mark(phase, step)
        if work:
            live.launch(0, work, 0)
    live.mark(FORWARD, 1)
    live.launch(0, 1000, 0)
    durations = of_phases(live.ended())
    assert durations == (
        ("load", -1, 0), ("forward", 0, 330), ("backward", 0, 700), ("optimizer", 0, 5), ("forward", 1, 1000)
    )  # fmt: skip
    assert of_step(durations) == {"forward": 330, "backward": 700, "optimizer": 5}


PROGRAM = """
import torch
net = torch.nn.Linear(8192, 8192, bias=False, dtype=torch.bfloat16, device="cuda")
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    net(torch.ones(8192, 8192, dtype=torch.bfloat16, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FLOPS = 2 * 8192**3


def test_a_step_takes_what_the_roofline_says(tmp_path: Path) -> None:
    done = record(folder_of(tmp_path, {"train.py": PROGRAM}), "--gpu", "A100-80GB", "--time", "train.py")
    found = answer(tmp_path)
    (rank,) = found["ranks"]
    (phases,) = ([one for one in rank["phases"] if one["step"] == step] for step in [1])
    times = {one["name"]: one["duration_ns"] for one in phases}
    assert found["step_time_ns"] == sum(times.values())
    assert "a step takes " in done.stderr
    for phase in (
        "forward",
        "backward",
    ):  # one product each at 60 to 90 % of 312 TFLOP/s; the rest moves 128 MiB a time
        assert FLOPS / 0.9 / 312e12 < times[phase] / 1e9 < FLOPS / 0.6 / 312e12 + 10 * 2**27 / 1.5e12
    assert times["optimizer"] / 1e9 == pytest.approx(3 * 2**27 / (0.85 * 2039e9), rel=0.1)


GRAPH = """
import sys
import torch
side = torch.cuda.Stream()
given = torch.ones(4096, 4096, device="cuda")
def work():
    return given @ given @ given
if "captured" in sys.argv:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
for _ in range(3):
    graph.replay() if "captured" in sys.argv else work()
"""


def test_a_graph_takes_what_its_kernels_take_each_time_it_is_replayed(tmp_path: Path) -> None:
    folder_of(tmp_path, {"train.py": GRAPH})
    kernels = {}
    for word in ("captured", "eager"):
        done = record(tmp_path, "--time", "-o", f"{word}.npz", "train.py", word)
        assert done.returncode == 0, done.stderr
        events = traces.read(tmp_path / f"{word}.npz").ranks[0].events
        rows = np.flatnonzero(events.op == Op.KERNEL).tolist()
        names, times = events.strings("name"), events.ints("duration_ns")
        kernels[word] = [int(times[row]) for row in rows if names.get(row) in ("CUDA graph", "aten.mm.default")]
    assert len(kernels["eager"]) == 6
    assert kernels["captured"] == [sum(kernels["eager"][:2])] * 3


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--interconnect", "pcie", "train.py"), 2, "--interconnect needs --time"),
        (("--time", "--interconnect", "string", "train.py"), 1, "interconnect 'string' is not known"),
        (("--deferred", "soon", "train.py"), 2, "'soon' is not one of"),
    ],
)
def test_bad_options(words: tuple[str, ...], code: int, said: str, tmp_path: Path) -> None:
    done = record(folder_of(tmp_path, {"train.py": PROGRAM}), *words)
    assert done.returncode == code
    assert said in done.stderr
