"""When a program has shown all that its steps do: two of them were the same to the allocator, event for event.

Steps are compared from the end of one optimizer step to the end of the next: forward and backward passes (several where
gradients are accumulated), collectives, the optimizer. Allocations of a step go by their place in it, those that came
before it by their size.
"""

from __future__ import annotations

import sys
import time
from typing import Final

import numpy as np

from simulator.allocator import layout as at
from simulator.recording import kernels
from simulator.recording.allocator import LiveAllocator
from traces.model import Int64Array, Op
from traces.units import format_bytes

#: Seconds between two lines of progress.
_PACE: Final = 10.0
_UNCOMPARED: Final = (Op.REGION_BEGIN, Op.REGION_END, Op.WAIT_STREAM)


class Repeats:
    """Asked after each step whether it did what the step before did, and left as much as that in use and reserved."""

    def __init__(self, allocator: LiveAllocator) -> None:
        self._allocator = allocator
        self._rows = self._born = 0  # events and allocations before the step that goes on
        self._log = np.empty((0, kernels.COLUMNS), np.int64)
        self._left = np.empty(0, np.int64)

    def __call__(self) -> bool:
        """A step has ended."""
        log, left = self._events(), self._blocks()
        same = np.array_equal(log, self._log) and np.array_equal(left, self._left)
        self._log, self._left = log, left
        self._rows, self._born = len(self._allocator.history), self._allocator.born
        return same and len(log) > 0

    def _events(self) -> Int64Array:
        """The step's events, as steps are compared; without the names of regions, which may count steps, and waits for
        CUDA events, which have numbers as these come and go."""
        log = self._allocator.history[self._rows :]
        log = log[~np.isin(log[:, kernels.H_OP], _UNCOMPARED)]
        op, ident, arg = log[:, kernels.H_OP], log[:, kernels.H_IDENT], log[:, kernels.H_ARG]
        phase = op == Op.PHASE
        arg[phase] = 0  # the number of the step
        log[op == Op.SYNCHRONIZE, kernels.H_STREAM] = 0
        own = (ident >= 0) & ~phase & (op != Op.KERNEL)
        before = own & (ident < self._born)
        arg[before] = self._allocator.machine.ids[ident[before], 1]
        ident[before] = -1
        ident[own & ~before] -= self._born
        return log

    def _blocks(self) -> Int64Array:
        """The sizes of blocks in use, what is reserved, and in how many segments. Addresses may wander for ever."""
        machine = self._allocator.machine
        ids = machine.ids[: self._allocator.born]
        held = [machine.stat(stat)["all"][0] for stat in (at.RESERVED_BYTES, at.SEGMENT)]
        return np.concatenate([np.sort(ids[ids[:, 0] > 0, 1]), held])


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
