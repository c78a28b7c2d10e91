"""PyTorch's caching allocator while a program runs: each event is served at once, and kept for the trace.

The allocator is made at its first use: a program may set PYTORCH_ALLOC_CONF until CUDA is initialized.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from graph.hardware.profile import STREAMS
from simulator.allocator import layout as at
from simulator.allocator import sizes
from simulator.allocator.conf import conf_from_environment, parse_conf
from simulator.allocator.releases import Release, parse_release
from simulator.engine import kernels as engine
from simulator.engine.machine import Machine
from simulator.engine.program import Program
from simulator.engine.replay import ENDLESS
from simulator.engine.result import EventLog
from simulator.engine.torch_snapshot import torch_snapshot
from simulator.recording import kernels
from simulator.recording.history import History
from simulator.recording.message import out_of_memory
from traces.errors import ReplayError
from traces.forks import locking
from traces.model import Device, Events, Initial, Int64Array, Op

#: From this number on streams stand for collectives and events: they have a clock, and no memory.
FIRST_CLOCK: Final = 900
_ALLOC, _FREE, _RECORD_STREAM = int(Op.ALLOC), int(Op.FREE), int(Op.RECORD_STREAM)  # as plain numbers: numba asks what
_COMPLETE_FREE, _KERNEL, _SYNCHRONIZE = int(Op.COMPLETE_FREE), int(Op.KERNEL), int(Op.SYNCHRONIZE)
_EMPTY_CACHE, _RESET_PEAK, _RESET_ACCUMULATED = int(Op.EMPTY_CACHE), int(Op.RESET_PEAK), int(Op.RESET_ACCUMULATED)
_POOL_CREATE, _POOL_BEGIN, _POOL_END = int(Op.POOL_CREATE), int(Op.POOL_BEGIN), int(Op.POOL_END)
_POOL_RELEASE, _POOL_SWITCH = int(Op.POOL_RELEASE), int(Op.POOL_SWITCH)
#: Private pools that there may be at a time.
POOLS: Final = 64
_ROWS: Final = 1 << 16
#: Nanoseconds of a collective: of its kind, bytes and ranks.
Times = Callable[[str, int, tuple[int, ...]], int]
_IDS: Final = 1 << 15


def _no_events(timed: bool) -> Program:
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
        pools=np.arange(1, POOLS + 1, dtype=np.int64),
        timed=timed,
        num_collectives=0,
    )


def _dense(stream: int) -> int:
    """The number under which the machine knows a stream: those from beyond PyTorch's own share them."""
    return stream if stream <= STREAMS or stream >= FIRST_CLOCK else 1 + (stream - 1) % STREAMS


def _members(group: str) -> tuple[int, ...]:
    """The ranks of a group: `0,1,2`, or of the two that `0,1,2:1>2` has by their places."""
    names, _, pair = group.partition(":")
    ranks = tuple(map(int, names.split(",")))
    return tuple(ranks[int(place)] for place in pair.split(">")) if pair else ranks


def warm_up() -> None:
    """Have the kernels loaded (or compiled) while the names of our modules are ours."""
    live = LiveAllocator(Device("none", 1 << 30), parse_release("2.13"), "", MemoryError)
    live.free(live.malloc(1))


class Mark(NamedTuple):
    """Where a phase begins: when all before it is done (ns), with so many retries and calls of the driver."""

    phase: int
    step: int
    done: int
    retries: int
    calls: int


class _Scope(NamedTuple):
    """A pool that is begun: by a capture of these streams, or (None) by a thread."""

    pool: int
    streams: set[int] | None
    thread: int

    def catches(self, stream: int) -> bool:
        """Whether it serves an allocation of this thread on a stream."""
        return threading.get_ident() == self.thread if self.streams is None else stream in self.streams


class LiveAllocator:
    """What `graph.fake_cuda.served.Allocator` asks for, by the compiled allocator of this project.

    `conf` are its settings (None: the environment's, when it is first used); `error` makes the exception that is raised
    where memory runs out on the GPU of number `gpu`, which it never does with `endless`. Memory in use on another
    stream comes back at once; with `late` when the host waits; with `times` when that stream has passed the point in
    simulated time. Collectives take `times(kind, bytes, ranks)` ns, as if the others came when this rank does.

    Safe on several threads. Frees may come in the middle of another event, from Python's collector; they are served
    after it.
    """

    def __init__(
        self,
        device: Device,
        release: Release,
        conf: str | None,
        error: Callable[[str], Exception],
        *,
        late: bool = False,
        times: Times | None = None,
        endless: bool = False,
        gpu: int = 0,
    ) -> None:
        self.device = device
        self._served = replace(device, total_bytes=ENDLESS) if endless else device
        self.late = late
        self._times = times
        self._clocks: dict[int, int] = {}  # of streams from FIRST_CLOCK on
        self._points: dict[int, int] = {}  # with `late`, CUDA event -> the row at which it was recorded
        self._shared: set[int] = set()  # with `late`, allocations in use on another stream
        self._pending: deque[tuple[int, int]] = deque()  # row and number of their frees, until the host waits
        self.release = release
        self.conf = conf
        self.fractions: dict[int, float] = {}  # row of the history -> what set_memory_fraction set
        self.confs: dict[int, str] = {}  # row of the history -> what set_allocator set
        self.checkpoints: dict[int, int] = {}  # row of the history -> number of the checkpoint of a pool
        self.taken: dict[int, int] = {}  # row of the history -> the allocation whose block it takes over
        self._pools: dict[tuple[int, int], int] = {}  # PyTorch's id of a pool -> the machine's number
        self._scopes: list[_Scope] = []  # oldest first
        self._serving = 0  # the pool that the machine's allocations come from
        self.asked = False  # whether anybody asked for figures
        self.marks: list[Mark] = []  # where phases began, in simulated time
        self.told: History | None = None  # what snapshots have of the history
        self._observers: list[Callable[[int, int, int], object]] = []
        self._error = error
        self._gpu = gpu
        self._machine: Machine | None = None
        self.lock: AbstractContextManager[Any]
        locking(self)
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
            self._machine = Machine(
                _no_events(self._times is not None),
                device=self._served,
                settings=parse_conf(self.begin(), self.release),
                release=self.release,
                capacity=self._served.total_bytes - self.device.context_bytes,
            )
            self._machine.ids = self._ids.reshape(-1, 2)
            self._machine.memory[at.HOLD] = self.late
            self._machine.memory[at.NUM_POOLS] = 1
        return self._machine

    def begin(self) -> str:
        """The settings: the environment's are read when CUDA is initialized, or memory is first asked for, and then
        stay (CUDACachingAllocator's `init`)."""
        if self.conf is None:
            self.conf = conf_from_environment(os.environ, self.release) or ""
        return self.conf

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
        with self.lock:
            ident = self._born
            self._born += 1
            if 2 * self._born > len(self._ids):
                self._more_ids()
            if self._scopes:
                self._switch(stream)
            status = self._serve(_ALLOC, ident, size, stream)
        if status == at.OUT_OF_MEMORY:
            failure, lacking = self._failure(), self._lacking()  # before an observer allocates
            for observer in self._observers:
                observer(*lacking)
            raise self._error(failure)
        return ident

    def free(self, ident: int) -> None:
        """The allocation of this number is given back."""
        with self.lock:
            if ident in self._shared:
                self._shared.discard(ident)
                self._pending.append((self._rows, ident))
            if self._busy:
                self._late.append(ident)
            else:
                self._serve(_FREE, ident, 0, 0)

    def record_stream(self, ident: int, stream: int) -> None:
        """The allocation is in use on another stream."""
        with self.lock:
            if self.late:
                self._shared.add(ident)
            self._serve(_RECORD_STREAM, ident, 0, stream)

    def empty_cache(self) -> None:
        """torch.cuda.empty_cache."""
        with self.lock:
            self._serve(_EMPTY_CACHE, -1, 0, 0)

    # --- private pools --------------------------------------------------------------------------------------------

    def pool_create(self, pool: tuple[int, int], no_split: bool, use_on_oom: bool) -> None:
        """`torch.cuda.MemPool`."""
        with self.lock:
            flags = no_split * engine.POOL_NO_SPLIT + use_on_oom * engine.POOL_ON_OOM
            self._serve(_POOL_CREATE, -1, self._pool(pool) + flags, 0)

    def pool_begin(self, pool: tuple[int, int], streams: set[int] | None) -> None:
        """What comes on `streams`, which a graph is captured of, or (None) from this thread is served by a pool."""
        with self.lock:
            number = self._pool(pool)
            self._serve(_POOL_BEGIN, -1, number + (streams is not None) * engine.POOL_CAPTURE, 0)
            self._scopes.append(_Scope(number, streams, threading.get_ident()))
            self._serving = self._newest()

    def pool_end(self, pool: tuple[int, int]) -> None:
        """It is served by the pool no more."""
        with self.lock:
            number = self._pool(pool)
            self._serve(_POOL_END, -1, number, 0)
            self._scopes = [scope for scope in self._scopes if scope.pool != number]
            self._serving = self._newest()

    def pool_release(self, pool: tuple[int, int]) -> None:
        """A use of the pool ends."""
        with self.lock:
            self._serve(_POOL_RELEASE, -1, self._pool(pool), 0)

    def pool_empty(self, pool: tuple[int, int]) -> None:
        """What is cached in the pool, which has no uses, goes back to the driver."""
        with self.lock:
            self._serve(_EMPTY_CACHE, -1, self._pool(pool), 0)

    def pool_uses(self, pool: tuple[int, int]) -> int:
        """How many uses the pool has."""
        return int(self.machine.memory[self._record(self._pool(pool)) + at.P_USE_COUNT])

    def pool_living(self, pool: tuple[int, int]) -> set[int]:
        """The allocations that live in the pool."""
        memory, record = self.machine.memory, self._record(self._pool(pool))
        blocks = self.machine.ids[: self._born, 0]
        idents = np.flatnonzero(blocks)
        blocks = blocks[idents]
        mine = (memory[memory[blocks + at.SET] + at.SET_POOL] == record) & (
            memory[blocks + at.FLAGS] & at.ALLOCATED != 0
        )
        return set(idents[mine].tolist())

    def pool_checkpoint(self, pool: tuple[int, int]) -> int:
        """Remember the pool's blocks; the number of the checkpoint."""
        with self.lock:
            number = len(self.checkpoints)
            self.machine.checkpoint(self._pool(pool), number)
            self.checkpoints[self._rows] = number
            self._enter(Op.POOL_CHECKPOINT, -1, self._pool(pool))
            return number

    def pool_restore(self, pool: tuple[int, int], number: int) -> tuple[set[int], dict[int, int]]:
        """The pool gets its blocks back: allocations that are freed by it, and new numbers of those that lived then."""
        with self.lock:
            freed = self.pool_living(pool)
            for ident in sorted(freed):
                self._serve(_FREE, ident, 0, 0)
            machine = self.machine
            machine.restore(self._pool(pool), number)
            self.checkpoints[self._rows] = number
            self._enter(Op.POOL_RESTORE, -1, self._pool(pool))
            if machine.memory[at.STOPPED]:
                machine.index = self._rows - 1
                raise ReplayError(str(machine.undefined(0)))
            again = {}
            for old, block in machine.restored.items():
                again[old] = self._born
                self._born += 1
                if 2 * self._born > len(self._ids):
                    self._more_ids()
                size = machine.memory[block + at.SIZE]
                machine.ids[again[old]] = block, size
                stream = machine.memory[machine.memory[block + at.SET] + at.SET_STREAM] + at.S_VALUE
                self.taken[self._rows] = old
                self._enter(Op.ALLOC, again[old], int(size), int(machine.memory[stream]))
            return freed, again

    def _pool(self, pool: tuple[int, int]) -> int:
        """The machine's number of a pool; a place that is free now for a pool that has none."""
        if pool not in self._pools:
            memory = self.machine.memory
            used = int(memory[at.NUM_POOLS])
            gone = [number for number in range(1, used) if not memory[self._record(number) + at.P_ALIVE]]
            if not gone and used > POOLS:
                raise ReplayError(f"the program has more than {POOLS} memory pools at a time (CUDA graphs, MemPool)")
            number = gone[0] if gone else used
            memory[at.NUM_POOLS] = max(used, number + 1)
            self._pools = {known: place for known, place in self._pools.items() if place != number}
            self._pools[pool] = number
        return self._pools[pool]

    def _record(self, number: int) -> int:
        """Where the machine keeps a pool."""
        return int(self.machine.memory[at.POOLS]) + number * at.P_COLUMNS

    def _newest(self) -> int:
        """The pool that serves after a pool was begun or ended."""
        return self._scopes[-1 if self.release.newest_scope_first else 0].pool if self._scopes else 0

    def _switch(self, stream: int) -> None:
        """What comes now is of this thread and on this stream; the lock is held."""
        scopes = reversed(self._scopes) if self.release.newest_scope_first else self._scopes
        wanted = next((scope.pool for scope in scopes if scope.catches(stream)), 0)
        if wanted != self._serving:
            self._serving = wanted
            self._serve(_POOL_SWITCH, -1, wanted, 0)

    # ----------------------------------------------------------------------------------------------------------------

    def launch(self, name: int, duration: int, stream: int) -> None:
        """Work of `duration` ns begins on a stream; the name's code is the caller's."""
        with self.lock:
            self._serve(_KERNEL, name, duration, stream)

    def collective(self, name: int, kind: str, group: str, size: int, stream: int) -> None:
        """A collective of `size` bytes among the ranks of `group` (`0,1,2`, or `0,1,2:1>2`) begins on a stream."""
        if self._times is None:
            return
        duration = self._times(kind, size, _members(group))
        with self.lock:
            if stream < FIRST_CLOCK:
                self._serve(_KERNEL, name, duration, stream)
                return
            self._enter(Op.KERNEL, name, duration, stream)
            memory = self.machine.memory
            memory[at.HOST] += memory[at.LAUNCH_NS]
            self._clocks[stream] = max(self._clock(stream), int(memory[at.HOST])) + duration

    def wait_stream(self, stream: int, on: int) -> None:
        """What comes on a stream waits for what another one has now."""
        if self.late and stream >= FIRST_CLOCK:
            self._points[stream] = self._rows
        if self._times is None or stream == on:
            return
        with self.lock:
            self._enter(Op.WAIT_STREAM, -1, _dense(on), _dense(stream))
            time = max(self._clock(stream), self._clock(on))
            if stream < FIRST_CLOCK:
                self.machine.memory[self._cell(stream)] = time
            else:
                self._clocks[stream] = time

    def synchronize(self, stream: int) -> None:
        """The host waits for a stream (-1: for all)."""
        if self._times is None and not self.late:
            return
        with self.lock:
            before = self._rows if stream < 0 else self._points.get(stream, 0)
            while self._pending and self._pending[0][0] < before:
                self._serve(_COMPLETE_FREE, self._pending.popleft()[1], 0, 0)
            if self._times is None:
                return
            memory = self.machine.memory
            reached = [int(memory[at.HOST]), *self._clocks.values()] if stream < 0 else [self._clock(stream)]
            memory[at.HOST] = max(int(memory[at.HOST]), *reached)
            if stream < FIRST_CLOCK:
                self._serve(_SYNCHRONIZE, -1, 0, stream)
            else:
                self._enter(Op.SYNCHRONIZE, -1, 0, stream)

    def mark(self, phase: int, step: int) -> None:
        """A phase begins here; its code and the step's number are the caller's."""
        with self.lock:
            self._enter(Op.PHASE, phase, step)
            if self._times is not None:
                self.marks.append(Mark(phase, step, *self._stand()))

    def region(self, name: int, begins: bool) -> None:
        """A named part of the program begins or ends here; the name's code is the caller's."""
        with self.lock:
            self._enter(Op.REGION_BEGIN if begins else Op.REGION_END, name, 0)

    def set_fraction(self, fraction: float) -> None:
        """torch.cuda.set_per_process_memory_fraction."""
        with self.lock:
            self.fractions[self._rows] = fraction
            self._enter(Op.SET_MEMORY_FRACTION, -1, 0)
            self.machine.set_fraction(fraction)

    def set_conf(self, conf: str) -> None:
        """`_set_allocator_settings` of torch.cuda.memory; ConfigError where PyTorch refuses them."""
        with self.lock:
            settings = parse_conf(conf, self.release, self.machine.settings)
            self.confs[self._rows] = conf
            self._enter(Op.SET_ALLOCATOR, -1, 0)
            self.machine.apply(settings)

    def reset_peak(self) -> None:
        """torch.cuda.reset_peak_memory_stats; not in the history, whose peaks are those of the whole run."""
        with self.lock:
            self._serve(_RESET_PEAK, -1, 0, 0)
            self._rows -= 1

    def reset_accumulated(self) -> None:
        """torch.cuda.reset_accumulated_memory_stats; not in the history either."""
        with self.lock:
            self._serve(_RESET_ACCUMULATED, -1, 0, 0)
            self._rows -= 1

    def ended(self) -> list[Mark]:
        """`marks`, and where the run stands now; nothing without time."""
        return [*self.marks, Mark(-1, -1, *self._stand())] if self.marks else []

    # --- answers --------------------------------------------------------------------------------------------------

    @property
    def fraction(self) -> float:
        """What set_per_process_memory_fraction set."""
        return self.machine.fraction

    def statistics(self) -> dict[str, Any]:
        """What torch.cuda.memory_stats_as_nested_dict gives."""
        self.asked = True
        nested: dict[str, Any] = {}
        for name, value in self.machine.memory_stats().items():
            *parts, last = name.split(".")
            place = nested
            for part in parts:
                place = place.setdefault(part, {})
            place[last] = value
        return nested

    def record_history(self, most: int, *, clear: bool) -> None:
        """`_record_memory_history` of torch.cuda.memory: snapshots have the last `most` entries from here on."""
        if self.told is not None:
            self.told.record(self._rows, most, clear=clear)

    def snapshot(self) -> dict[str, Any]:
        """What `_snapshot` of torch.cuda.memory gives."""
        none = np.empty(0, np.int64)
        found = torch_snapshot(self.machine, EventLog(np.empty(0, np.uint8), none, none, none, none))
        allocated = self.machine.stat(at.ALLOCATED_BYTES)["all"][0]
        return self.told.into(found, self._served.total_bytes, self._rows, allocated) if self.told else found

    def observe(self, observer: Callable[[int, int, int], object]) -> None:
        """Call `observer` where memory runs out: with bytes asked of the driver, all there may be, and free ones."""
        self._observers.append(observer)

    def memory_info(self) -> tuple[int, int]:
        """What cudaMemGetInfo gives: free bytes of the device, and all."""
        self.asked = True
        memory = self.machine.memory
        free = self.device.total_bytes - self.device.context_bytes - memory[at.DEVICE_USED]
        return max(int(free), 0), self.device.total_bytes

    # ----------------------------------------------------------------------------------------------------------------

    def _serve(self, op: int, ident: int, arg: int, stream: int) -> int:
        """Serve an event, with room for it; the lock is held."""
        self._busy = True
        try:
            machine = self._machine or self.machine
            if (self._rows + 1) * kernels.COLUMNS > len(self._history):
                self._history = np.concatenate([self._history, np.zeros_like(self._history)])
            dense = _dense(stream)
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

    def _stand(self) -> tuple[int, int, int]:
        """When all is done, retries, and the driver's calls so far."""
        if self._machine is None:  # a program may still set its settings
            return 0, 0, 0
        memory = self.machine.memory
        first = int(memory[at.STREAMS]) + at.S_CLOCK
        clocks = memory[first : first + memory[at.NUM_STREAMS] * at.S_COLUMNS : at.S_COLUMNS]
        done = max(int(memory[at.HOST]), int(clocks.max()), *self._clocks.values())
        return done, int(memory[at.RETRIES]), int(memory[at.DEVICE_ALLOCS] + memory[at.DEVICE_FREES])

    def _cell(self, stream: int) -> int:
        """Where the machine keeps the clock of a stream below FIRST_CLOCK."""
        return int(self.machine.memory[at.STREAMS]) + _dense(stream) * at.S_COLUMNS + at.S_CLOCK

    def _clock(self, stream: int) -> int:
        """When the known work of a stream ends."""
        if stream >= FIRST_CLOCK:
            return self._clocks.get(stream, 0)
        return int(self.machine.memory[self._cell(stream)])

    def _enter(self, op: int, ident: int, arg: int, stream: int = 0) -> None:
        """Put an event into the history that changes nothing here."""
        if (self._rows + 1) * kernels.COLUMNS > len(self._history):
            self._history = np.concatenate([self._history, np.zeros_like(self._history)])
        self._history[self._rows * kernels.COLUMNS : (self._rows + 1) * kernels.COLUMNS] = op, ident, arg, stream
        self._rows += 1

    def _more_ids(self) -> None:
        """Room for twice as many allocations."""
        self._busy = True
        self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
        self.machine.ids = self._ids.reshape(-1, 2)
        self._busy = False

    def _lacking(self) -> tuple[int, int, int]:
        """What the allocation that has just failed asked of the driver, all there may be, and what is free."""
        memory = self.machine.memory
        limit = int(memory[at.LIMIT])
        asked = sizes.segment_size(memory, int(memory[at.FAILED_BYTES]))
        return asked, self.device.total_bytes if limit < 0 else limit, int(memory[at.OOM_FREE])

    def _failure(self) -> str:
        """The message of the allocation that has just failed."""
        machine = self.machine
        asked, allowed, free = self._lacking()
        return out_of_memory(
            asked,
            gpu=self._gpu,
            total=self.device.total_bytes,
            free=free,
            allowed=None if int(machine.memory[at.LIMIT]) < 0 else allowed,
            allocated=machine.stat(at.ALLOCATED_BYTES)["all"][0],
            reserved=machine.stat(at.RESERVED_BYTES)["all"][0],
            minor=self.release.minor,
        )
