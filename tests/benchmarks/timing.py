"""CPU time of the kernels and of whole replays, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numba
import numpy as np

from simulator.allocator import layout as at
from simulator.allocator.conf import parse_conf
from simulator.allocator.releases import parse_release
from simulator.engine.machine import Machine
from simulator.engine.program import Program, compile_rank
from simulator.engine.replay import replay
from tests.benchmarks.workloads import Workload
from traces.model import RankEvents, Strings, Trace

STEPS: Final = 2_000_000
WORDS: Final = 1 << 15  # 256 KiB: beyond the first cache, as the records of a replay are


@cache
def _walk() -> Any:
    """A fixed piece of work of the kernels' kind: each step reads where the one before points, and branches on it."""

    @numba.njit
    def walk(table: Any, steps: int) -> int:
        place = 0
        total = 0
        for step in range(steps):
            place = table[place]
            if place & 1:
                total += step
        return total

    return walk


@cache
def _table() -> Any:
    """A random cycle through a table."""
    order = np.random.default_rng(0).permutation(WORDS)
    table = np.empty(WORDS, dtype=np.int64)
    table[order] = np.roll(order, -1)
    return table


def fastest(work: Callable[[], float], rounds: int) -> float:
    """The smallest of several results."""
    return min(work() for _ in range(rounds))


def calibrate() -> float:
    """ns of CPU for a step of a fixed loop; figures of two runs compare as ratios to it."""
    _walk()(_table(), 1)

    def once() -> float:
        start = time.process_time()
        _walk()(_table(), STEPS)
        return time.process_time() - start

    return fastest(once, 3) / STEPS * 1e9


def build(workload: Workload, program: Program, conf: str, release: str) -> Machine:
    """A machine at the workload's first event."""
    chosen = parse_release(release)
    return Machine(
        program,
        device=workload.device,
        settings=parse_conf(conf, chosen),
        release=chosen,
        capacity=workload.device.total_bytes,
    )


def compiled(workload: Workload) -> Program:
    """The workload's events, ready for the kernels."""
    return compile_rank(RankEvents((0,), workload.events), timed=False)


def _serve(machine: Machine, stop: int) -> None:
    status = machine.step(stop)
    if status != at.PAUSED:
        raise RuntimeError(f"the workload stopped with status {status} at event {machine.index}")


def kernel_seconds(workload: Workload, conf: str, release: str, rounds: int) -> float:
    """CPU seconds that the kernels need for the timed part of a workload."""
    program = compiled(workload)

    def once() -> float:
        machine = build(workload, program, conf, release)
        _serve(machine, workload.untimed)
        start = time.process_time()
        _serve(machine, len(program))
        return time.process_time() - start

    return fastest(once, rounds)


def replay_seconds(trace: Trace, rounds: int) -> float:
    """CPU seconds of a whole `replay`, analyses included."""

    def once() -> float:
        start = time.process_time()
        result = replay(trace)
        if result.verdict == "oom":
            raise RuntimeError("the workload ran out of memory")
        return time.process_time() - start

    return fastest(once, rounds)


def column_bytes(workload: Workload) -> int:
    """Bytes of a trace's columns."""
    events = workload.events
    columns = [column.codes if isinstance(column, Strings) else column for column in events.columns.values()]
    return sum(array.nbytes for array in (events.op, *columns))


def replay_bytes(workload: Workload, conf: str, release: str) -> int:
    """Bytes of the arrays that a replay adds to the trace's columns."""
    program = compiled(workload)
    machine = build(workload, program, conf, release)
    _serve(machine, len(program))
    mine = (program.ops, program.idents, program.args, program.streams, program.host_ns, program.ids)
    arrays = (*mine, machine.out, machine.ids, machine.memory)
    known = {id(workload.events.op)}
    known |= {id(column) for column in workload.events.columns.values()}
    return sum(array.nbytes for array in arrays if id(array) not in known)
