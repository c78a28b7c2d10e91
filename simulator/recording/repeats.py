"""When a program has shown all that its steps do: two of them were the same to the allocator, event for event.

Steps are compared from the end of one optimizer step to the end of the next: forward and backward passes (several where
gradients are accumulated), collectives, the optimizer. Allocations of a step go by their place in it, those that came
before it by their size. Programs may take turns (a GAN's two optimizers, a policy that is updated every other step), so
that steps are like those some steps before. And blocks that are not split may trade places for ever: steps that ask for
the same are enough once the peak has not moved for many of them.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import deque
from typing import Final, NamedTuple

import numpy as np

from simulator.allocator import layout as at
from simulator.recording import kernels
from simulator.recording.allocator import LiveAllocator
from traces.model import Int64Array, Op
from traces.units import format_bytes

#: Seconds between two lines of progress.
_PACE: Final = 10.0
_UNCOMPARED: Final = (Op.REGION_BEGIN, Op.REGION_END, Op.WAIT_STREAM)
#: So many steps may come before the turn of the first again; so many must be like those a turn before, where a turn is
#: of several, or where they are alike by what they ask for alone.
_LONGEST: Final = 16
_TURNS: Final = 12
_PATIENCE: Final = 20


class Found(NamedTuple):
    """How steps repeat: the last `steps` of them are each like the one `turn` before; `exactly`: event for event."""

    turn: int
    steps: int
    exactly: bool


class _Likeness:
    """For each length of a turn, how many steps in a row were each like the one a turn before."""

    def __init__(self) -> None:
        self._last: deque[bytes] = deque(maxlen=_LONGEST)
        self.runs = [0] * _LONGEST  # by turns of 1, 2, ...

    def add(self, step: bytes) -> None:
        """A step has ended."""
        for place, before in enumerate(reversed(self._last)):
            self.runs[place] = self.runs[place] + 1 if before == step else 0
        self._last.append(step)

    def turn(self, least: int, several: int) -> int:
        """The shortest turn that `least` steps kept to, or `several` and twice as many as it has; 0: none."""
        for turn, run in enumerate(self.runs, 1):
            if run >= (least if turn == 1 else max(several, 2 * turn)):
                return turn
        return 0


class Repeats:
    """Asked after each step whether it did what the step before did, on each GPU, and left as much as that in use and
    reserved, or what else there is of it in turns."""

    def __init__(self, *allocators: LiveAllocator) -> None:
        self._gpus = [OneGpu(allocator) for allocator in allocators]
        self._exact, self._loose = _Likeness(), _Likeness()
        self._peaks = [(0, 0)] * len(allocators)
        self._since = 0  # steps with these peaks

    def __call__(self) -> Found | None:
        """A step has ended."""
        steps = [gpu.step() for gpu in self._gpus]
        self._exact.add(_digest(*(part for step in steps for part in step.exact)))
        self._loose.add(_digest(*(part for step in steps for part in step.loose)))
        peaks = [gpu.peak() for gpu in self._gpus]
        self._since = self._since + 1 if peaks == self._peaks else 0
        self._peaks = peaks
        return self._found() if any(step.events for step in steps) else None

    def _found(self) -> Found | None:
        if turn := self._exact.turn(1, _TURNS):
            return Found(turn, self._exact.runs[turn - 1], True)
        if self._since > _PATIENCE and (turn := self._loose.turn(_PATIENCE, _PATIENCE)):
            return Found(turn, self._loose.runs[turn - 1], False)
        return None


class _Step(NamedTuple):
    """A step on one GPU: how many events it had, and what it is known again by, exactly or by what it asked for."""

    events: int
    exact: tuple[Int64Array, ...]
    loose: tuple[Int64Array, ...]


class OneGpu:
    """What steps did on one GPU."""

    def __init__(self, allocator: LiveAllocator) -> None:
        self._allocator = allocator
        self._rows = self._born = 0  # events and allocations before the step that goes on
        self._asked = np.empty(0, np.int64)  # bytes, by allocation

    def step(self) -> _Step:
        """A step has ended."""
        log = self._allocator.history[self._rows :]
        self._asked = np.concatenate([self._asked, np.zeros(self._allocator.born - self._born, np.int64)])
        births = log[log[:, kernels.H_OP] == Op.ALLOC]
        self._asked[births[:, kernels.H_IDENT]] = births[:, kernels.H_ARG]
        blocks = self._allocator.machine.ids[: self._allocator.born, 1]
        log = log[~np.isin(log[:, kernels.H_OP], _UNCOMPARED)]
        exact = self._events(log, blocks), self._left(blocks), self._held()
        loose = self._events(log, self._asked), self._left(self._asked)
        self._rows, self._born = len(self._allocator.history), self._allocator.born
        return _Step(len(log), exact, loose)

    def peak(self) -> tuple[int, int]:
        """The most that was allocated, and reserved, so far."""
        stats = (self._allocator.machine.stat(stat)["all"] for stat in (at.ALLOCATED_BYTES, at.RESERVED_BYTES))
        allocated, reserved = (int(stat[1]) for stat in stats)
        return allocated, reserved

    def _events(self, log: Int64Array, sizes: Int64Array) -> Int64Array:
        """The step's events, as steps are compared; without the names of regions, which may count steps, and waits for
        CUDA events, which have numbers as these come and go. Earlier allocations go by their `sizes`."""
        log = log.copy()
        op, ident, arg = log[:, kernels.H_OP], log[:, kernels.H_IDENT], log[:, kernels.H_ARG]
        phase = op == Op.PHASE
        arg[phase] = 0  # the number of the step
        log[op == Op.SYNCHRONIZE, kernels.H_STREAM] = 0
        own = (ident >= 0) & ~phase & (op != Op.KERNEL)
        before = own & (ident < self._born)
        arg[before] = sizes[ident[before]]
        ident[before] = -1
        ident[own & ~before] -= self._born
        return log

    def _left(self, sizes: Int64Array) -> Int64Array:
        """The sizes of what is in use. Addresses may wander for ever."""
        return np.sort(sizes[self._allocator.machine.ids[: self._allocator.born, 0] > 0])

    def _held(self) -> Int64Array:
        """What is reserved, and in how many segments."""
        stats = (self._allocator.machine.stat(stat)["all"][0] for stat in (at.RESERVED_BYTES, at.SEGMENT))
        return np.fromiter(stats, np.int64)


def _digest(*parts: Int64Array) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part.tobytes())
    return found.digest()


class Progress:
    """Tells on stderr, now and then, how far a program is; `of` says what its steps have been like."""

    def __init__(self, allocator: LiveAllocator, of: str = "") -> None:
        self._allocator = allocator
        self._of = of
        self._told = time.monotonic()

    def __call__(self, steps: int) -> None:
        """So many steps have ended."""
        now = time.monotonic()
        if now - self._told > _PACE:
            self._told = now
            peak = format_bytes(self._allocator.machine.stat(at.ALLOCATED_BYTES)["all"][1])
            print(f"recording: {steps} steps{self._of}, at most {peak} allocated", file=sys.stderr)
