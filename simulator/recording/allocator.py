"""PyTorch's caching allocator while a program runs: each event is served at once, and kept for the trace.

The allocator is made at its first use, as PyTorch's is: a program may set PYTORCH_ALLOC_CONF before that.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from simulator.allocator import layout as at
from simulator.allocator import sizes
from simulator.allocator.conf import conf_from_environment, parse_conf
from simulator.allocator.releases import Release, parse_release
from simulator.engine.machine import Machine, Program
from simulator.engine.result import EventLog
from simulator.engine.torch_snapshot import torch_snapshot
from simulator.recording import kernels
from simulator.recording.message import out_of_memory
from traces.errors import ReplayError
from traces.model import Device, Events, Initial, Int64Array, Op

#: Streams beside the default one: so many PyTorch makes of each priority, and then gives them out again.
STREAMS: Final = 32
_ALLOC, _FREE, _RECORD_STREAM = int(Op.ALLOC), int(Op.FREE), int(Op.RECORD_STREAM)  # as plain numbers: numba asks what
_EMPTY_CACHE, _RESET_PEAK, _RESET_ACCUMULATED = int(Op.EMPTY_CACHE), int(Op.RESET_PEAK), int(Op.RESET_ACCUMULATED)
_ROWS: Final = 1 << 16
_IDS: Final = 1 << 15


def _no_events() -> Program:
    """A rank without events, on all streams that a program may use."""
    empty = np.empty(0, np.int64)
    return Program(
        events=Events(np.empty(0, np.uint8)),
        initial=Initial(),
        ops=np.empty(0, np.uint8),
        idents=np.empty(0, np.int32),
        args=empty,
        streams=np.empty(0, np.int32),
        host_ns=empty,
        ids=empty,
        stream_values=np.arange(STREAMS + 1, dtype=np.int64),
        pools=empty,
        timed=False,
        num_collectives=0,
    )


def warm_up() -> None:
    """Have the kernels loaded (or compiled) while the names of our modules are ours."""
    live = LiveAllocator(Device("none", 1 << 30), parse_release("2.13"), "", MemoryError)
    live.free(live.malloc(1))


class LiveAllocator:
    """What `graph.fake_cuda.served.Allocator` asks for, by the compiled allocator of this project.

    `conf` are its settings (None: the environment's, when it is first used); `error` makes the exception that is raised
    where memory runs out. Safe on several threads. Frees may come in the middle of another event, from Python's
    collector; they are served after it.
    """

    def __init__(self, device: Device, release: Release, conf: str | None, error: Callable[[str], Exception]) -> None:
        self.device = device
        self.release = release
        self.conf = conf
        self.fractions: dict[int, float] = {}  # row of the history -> what set_memory_fraction set
        self.confs: dict[int, str] = {}  # row of the history -> what set_allocator set
        self._error = error
        self._machine: Machine | None = None
        self._lock = threading.RLock()
        self._busy = False
        self._late: list[int] = []
        self._history = np.zeros(_ROWS * kernels.COLUMNS, np.int64)
        self._ids = np.zeros(2 * _IDS, np.int64)
        self._rows = 0
        self._born = 0

    @property
    def machine(self) -> Machine:
        """The allocator's state; made when it is first asked for."""
        if self._machine is None:
            if self.conf is None:
                self.conf = conf_from_environment(os.environ, self.release) or ""
            self._machine = Machine(
                _no_events(),
                device=self.device,
                settings=parse_conf(self.conf, self.release),
                release=self.release,
                capacity=self.device.total_bytes - self.device.context_bytes,
            )
            self._machine.ids = self._ids.reshape(-1, 2)
        return self._machine

    @property
    def history(self) -> Int64Array:
        """All events so far: (events, kernels.COLUMNS)."""
        return self._history[: self._rows * kernels.COLUMNS].reshape(-1, kernels.COLUMNS)

    @property
    def born(self) -> int:
        """How many allocations there were so far."""
        return self._born

    # --- events ---------------------------------------------------------------------------------------------------

    def malloc(self, size: int, stream: int = 0) -> int:
        """Allocate `size` bytes (above 0) on a stream; the number of the allocation, counted from 0.

        Raises the error of memory that ran out. The allocation has a number all the same.
        """
        with self._lock:
            ident = self._born
            self._born += 1
            if 2 * self._born > len(self._ids):
                self._more_ids()
            status = self._serve(_ALLOC, ident, size, stream)
        if status == at.OUT_OF_MEMORY:
            raise self._error(self._failure())
        return ident

    def free(self, ident: int) -> None:
        """The allocation of this number is given back."""
        with self._lock:
            if self._busy:
                self._late.append(ident)
            else:
                self._serve(_FREE, ident, 0, 0)

    def record_stream(self, ident: int, stream: int) -> None:
        """The allocation is in use on another stream."""
        with self._lock:
            self._serve(_RECORD_STREAM, ident, 0, stream)

    def empty_cache(self) -> None:
        """torch.cuda.empty_cache."""
        with self._lock:
            self._serve(_EMPTY_CACHE, -1, 0, 0)

    def mark(self, phase: int, step: int) -> None:
        """A phase begins here; its code and the step's number are the caller's."""
        with self._lock:
            self._enter(Op.PHASE, phase, step)

    def region(self, name: int, begins: bool) -> None:
        """A named part of the program begins or ends here; the name's code is the caller's."""
        with self._lock:
            self._enter(Op.REGION_BEGIN if begins else Op.REGION_END, name, 0)

    def set_fraction(self, fraction: float) -> None:
        """torch.cuda.set_per_process_memory_fraction."""
        with self._lock:
            self.fractions[self._rows] = fraction
            self._enter(Op.SET_MEMORY_FRACTION, -1, 0)
            self.machine.set_fraction(fraction)

    def set_conf(self, conf: str) -> None:
        """`_set_allocator_settings` of torch.cuda.memory; ConfigError where PyTorch refuses them."""
        with self._lock:
            settings = parse_conf(conf, self.release, self.machine.settings)
            self.confs[self._rows] = conf
            self._enter(Op.SET_ALLOCATOR, -1, 0)
            self.machine.apply(settings)

    def reset_peak(self) -> None:
        """torch.cuda.reset_peak_memory_stats; not in the history, whose peaks are those of the whole run."""
        with self._lock:
            self._serve(_RESET_PEAK, -1, 0, 0)
            self._rows -= 1

    def reset_accumulated(self) -> None:
        """torch.cuda.reset_accumulated_memory_stats; not in the history either."""
        with self._lock:
            self._serve(_RESET_ACCUMULATED, -1, 0, 0)
            self._rows -= 1

    # --- answers --------------------------------------------------------------------------------------------------

    @property
    def fraction(self) -> float:
        """What set_per_process_memory_fraction set."""
        return self.machine.fraction

    def statistics(self) -> dict[str, Any]:
        """What torch.cuda.memory_stats_as_nested_dict gives."""
        nested: dict[str, Any] = {}
        for name, value in self.machine.memory_stats().items():
            *parts, last = name.split(".")
            place = nested
            for part in parts:
                place = place.setdefault(part, {})
            place[last] = value
        return nested

    def snapshot(self) -> dict[str, Any]:
        """What `_snapshot` of torch.cuda.memory gives, without a history."""
        none = np.empty(0, np.int64)
        return torch_snapshot(self.machine, EventLog(np.empty(0, np.uint8), none, none, none, none))

    def memory_info(self) -> tuple[int, int]:
        """What cudaMemGetInfo gives: free bytes of the device, and all."""
        memory = self.machine.memory
        free = memory[at.CAPACITY] - memory[at.OTHER_BYTES] - memory[at.DEVICE_USED]
        return max(int(free), 0), self.device.total_bytes

    # ----------------------------------------------------------------------------------------------------------------

    def _serve(self, op: int, ident: int, arg: int, stream: int) -> int:
        """Serve an event, with room for it; the lock is held."""
        self._busy = True
        try:
            machine = self._machine or self.machine
            if (self._rows + 1) * kernels.COLUMNS > len(self._history):
                self._history = np.concatenate([self._history, np.zeros_like(self._history)])
            dense = stream if stream <= STREAMS else 1 + (stream - 1) % STREAMS
            while True:
                status = kernels.serve_event(
                    machine.memory, self._ids, self._history, self._rows, op, ident, arg, dense
                )
                if status != at.GROW:
                    break
                machine.grow()
            self._rows += 1
        finally:
            self._busy = False
        if status == at.FAILED:
            machine.index = self._rows - 1
            raise ReplayError(str(machine.undefined(0)))
        while self._late:
            self._serve(_FREE, self._late.pop(), 0, 0)
        return int(status)

    def _enter(self, op: int, ident: int, arg: int) -> None:
        """Put an event into the history that changes nothing here."""
        if (self._rows + 1) * kernels.COLUMNS > len(self._history):
            self._history = np.concatenate([self._history, np.zeros_like(self._history)])
        self._history[self._rows * kernels.COLUMNS : (self._rows + 1) * kernels.COLUMNS] = op, ident, arg, 0
        self._rows += 1

    def _more_ids(self) -> None:
        """Room for twice as many allocations."""
        self._busy = True
        self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
        self.machine.ids = self._ids.reshape(-1, 2)
        self._busy = False

    def _failure(self) -> str:
        """The message of the allocation that has just failed."""
        machine = self.machine
        limit = int(machine.memory[at.LIMIT])
        return out_of_memory(
            sizes.segment_size(machine.memory, int(machine.memory[at.FAILED_BYTES])),
            total=self.device.total_bytes,
            free=int(machine.memory[at.OOM_FREE]),
            allowed=None if limit < 0 else limit,
            allocated=machine.stat(at.ALLOCATED_BYTES)["all"][0],
            reserved=machine.stat(at.RESERVED_BYTES)["all"][0],
            minor=self.release.minor,
        )
