"""Event sequences served by the naive model (`tests/oracles/naive_allocator.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from tests.oracles.naive_allocator import Block, NaiveAllocator, OutOfMemoryError, UndefinedInPyTorchError
from tests.oracles.naive_device import NaiveDevice
from tests.support.observed import OUT_OF_MEMORY, Entry, Observed, Report, Row, Setup, State, calls_of


class NaiveReplay:
    """A device, its allocator, and the blocks by the ids of the events."""

    def __init__(self, setup: Setup) -> None:
        self.device = NaiveDevice(setup.total_bytes, setup.va_base, setup.placement, setup.segment_addresses)
        self.allocator = NaiveAllocator(setup.release, setup.conf, self.device)
        self.blocks: dict[int, Block | None] = {}
        self.freed: dict[int, Block | None] = {}
        self.addresses: dict[int, int] = {}

    def step(self, row: Row) -> tuple[State, list[Entry], Report | None]:
        """Serve an event: the state after it, the log of what was done for it, and a report if it asked for one."""
        self.device.log = []
        report = None
        address = 0
        if row[0] == "s":
            report = self.allocator.snapshot()
        elif row[0] == "x":
            report = self.allocator.statistics()
        else:
            address = self.serve(row)
        return self.state(address), self.device.log, report

    def state(self, address: int) -> State:
        stats, counters = self.allocator.stats, self.allocator.counters
        return (
            address,
            stats["reserved_bytes"]["all"].current,
            stats["allocated_bytes"]["all"].current,
            stats["active_bytes"]["all"].current,
            stats["segment"]["all"].current,
            counters["num_alloc_retries"],
            counters["num_ooms"],
        )

    def serve(self, row: Row) -> int:
        """Serve an event that asks for no report; the address to show for it."""
        match row:
            case ["m", id_, bytes_, stream]:
                return self.malloc(id_, bytes_, stream)
            case ["f", id_]:
                return self.free(id_)
            case ["r", id_, stream]:
                block = self.blocks[id_]
                if block is not None:
                    self.allocator.record_stream(block, stream)
                return self.addresses[id_]
            case ["cf", id_]:
                block = self.freed[id_]
                if block is not None and block.tenant == id_:
                    self.allocator.complete_free(block)
                return 0
            case _:
                self.command(row)
                return 0

    def command(self, row: Row) -> None:
        """Serve an event that concerns no allocation."""
        allocator = self.allocator
        match row:
            case ["e", hold]:
                allocator.hold_events(bool(hold))
            case ["d", stream] | ["y", stream]:
                allocator.complete_events(stream)
            case ["c"]:
                allocator.empty_cache()
            case ["g", fraction]:
                allocator.set_memory_fraction(fraction)
            case ["o", conf]:
                allocator.set_allocator(conf)
            case ["u", bytes_]:
                self.device.other = bytes_
            case ["a"]:
                allocator.reset_accumulated()
            case ["p"]:
                allocator.reset_peak()
            case ["pc", pool, no_split, use_on_oom]:
                allocator.pool_create(pool, no_split, use_on_oom)
            case ["pb", pool]:
                allocator.pool_begin(pool)
            case ["pe", pool]:
                allocator.pool_end(pool)
            case ["pr", pool]:
                allocator.pool_release(pool)
            case _:
                raise ValueError(row)

    def malloc(self, id_: int, bytes_: int, stream: int) -> int:
        self.blocks[id_] = None
        self.addresses[id_] = 0
        if bytes_ == 0:
            return 0
        try:
            block = self.allocator.malloc(bytes_, stream)
        except OutOfMemoryError:
            return OUT_OF_MEMORY
        block.tenant = id_
        self.blocks[id_] = block
        self.addresses[id_] = block.ptr
        return block.ptr

    def free(self, id_: int) -> int:
        block = self.freed[id_] = self.blocks.pop(id_)
        if block is not None:
            self.allocator.free(block)
        return self.addresses[id_]


def naive_replay(rows: Sequence[Row], setup: Setup) -> Observed:
    """Serve `rows` with a new allocator, up to the first event that PyTorch leaves undefined."""
    replay = NaiveReplay(setup)
    observed = Observed()
    for index, row in enumerate(rows):
        try:
            state, log, report = replay.step(row)
        except UndefinedInPyTorchError:
            observed.undefined = index
            break
        observed.states.append(state)
        observed.calls.append(calls_of(log))
        observed.logs.append(log)
        if report is not None:
            observed.reports[index] = report
    observed.memory_stats = replay.allocator.memory_stats()
    return observed
