"""The state at the start of a recording, found by walking its entries backwards from the final segments.

A recording's ring buffer may have been full, so that its first entries are gone; and it may have been switched on
late. What was in memory before the first entry that is left follows from the final segments and the entries after
it: see `rewind`. The sizes of blocks that die inside the recording follow from their neighbours, since the large pool
never leaves a free block of 1 MiB or less beside a block of a cudaMalloc segment (`should_split`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from simulator.allocator import sizes
from simulator.snapshots.address_map import AddressMap, MapError, Range
from simulator.snapshots.rules import Rules
from traces.errors import TraceError
from traces.model import BlockState
from traces.snapshot.layout import (
    ALLOC,
    DEFAULT_POOL,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    DeviceRecord,
    Entries,
    PoolId,
)


@dataclass(slots=True)
class Held:
    """A block in use: what was asked for, its state, its size where the file says it, and the room up to the next."""

    requested: int
    state: BlockState
    size: int | None
    room: int


@dataclass(frozen=True)
class Start:
    """The state before the first entry.

    `blocks` are those in use, by address, with `sizes`; `pools` has the pool of the memory that an entry obtains, by
    the entry's position. `most` has the largest size of each block whose size is not certain (up to 1 MiB more).
    """

    ranges: tuple[Range, ...]
    blocks: dict[int, Held]
    sizes: dict[int, int]
    pools: dict[int, PoolId]
    most: dict[int, int]


def rewind(record: DeviceRecord, rules: Rules, where: str) -> Start:
    """Walk a device's entries backwards from its final segments to the state at the start.

    Raises TraceError where an entry contradicts what came after it.
    """
    walk = _Walk(record, rules)
    for i in range(len(record.entries) - 1, -1, -1):
        try:
            walk.undo(i)
        except MapError as error:
            raise TraceError(
                f"{where}: device {record.device}, entry {record.entries.entry[i]}: {error} when rewound from the "
                "final segments (was recording stopped before the snapshot was taken?)"
            ) from None
    return walk.finish()


class _Walk:
    """The map while it is walked backwards."""

    def __init__(self, record: DeviceRecord, rules: Rules) -> None:
        self.rules = rules
        self.entries: Entries = record.entries
        self.map = AddressMap()
        self.held: dict[int, Held] = {}
        self.pools: dict[int, PoolId] = {}
        for segment in record.segments:
            active = [b.address for b in segment.blocks if b.state != "inactive"]
            self.map.add(
                Range(
                    segment.address,
                    segment.end,
                    segment.stream,
                    segment.expandable,
                    segment.large,
                    segment.pool,
                    active,
                )
            )
            for block in segment.blocks:
                if block.state != "inactive":
                    self.held[block.address] = Held(block.requested, block.state, block.size, block.size)

    def undo(self, i: int) -> None:
        """Go back over entry `i`."""
        kind = self.entries.kind[i]
        if kind == ALLOC:
            self._undo_alloc(i)
        elif kind == FREE_COMPLETED:
            self._undo_completion(i)
        elif kind == FREE_REQUESTED:
            self._undo_request(i)
        elif kind in (SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP):
            self._undo_memory(i, kind)

    def _undo_alloc(self, i: int) -> None:
        address = self.entries.address[i]
        found = self.map.drop(address)
        del self.held[address]
        self._learn_pool(found, i)

    def _learn_pool(self, found: Range, i: int) -> None:
        """A request tells the pool of memory about which nothing was known."""
        if found.large is None:
            found.large = self.rules.round_size(self.entries.size[i]) > sizes.SMALL_SIZE
        pool = self.entries.pool[i]
        if pool is not None and pool != found.pool:
            found.pool = pool

    def _undo_completion(self, i: int) -> None:
        address, n = self.entries.address[i], self.entries.size[i]
        found, k = self.map.use(address, n)
        self._learn_pool(found, i)
        self.held[address] = Held(n, "active_pending_free", None, found.gap_after(k))
        if k:
            below = self.held[found.active[k - 1]]
            below.room = min(below.room, address - found.active[k - 1])
            if below.room < (below.size or below.requested):
                raise MapError(f"the block at {address:#x} lies inside the block before it")

    def _undo_request(self, i: int) -> None:
        address = self.entries.address[i]
        held = self.held.get(address)
        if held is None or held.state != "active_pending_free":
            state = "not in use" if held is None else "not waiting to be freed"
            raise MapError(f"the block at {address:#x} is {state}")
        held.state = "active_allocated"

    def _undo_memory(self, i: int, kind: int) -> None:
        address, size, pool = self.entries.address[i], self.entries.size[i], self.entries.pool[i]
        new = Range(
            address, address + size, self.entries.stream[i], False, size != sizes.SMALL_BUFFER, pool or DEFAULT_POOL
        )
        if kind == SEGMENT_ALLOC:
            found = self.map.take_segment(address, size)
            self.pools[i] = pool or found.pool
        elif kind == SEGMENT_MAP:
            found = self.map.cut(address, size)
            self.pools[i] = pool or found.pool
        elif kind == SEGMENT_FREE:
            self.map.add(new)
        else:
            self.map.map(replace(new, expandable=True, large=None))

    def finish(self) -> Start:
        """What is left is the state at the start."""
        known: dict[int, int] = {}
        most: dict[int, int] = {}
        for found in self.map:
            if found.large is None:
                found.large = found.size % self.rules.page_size(True) == 0
            for k, address in enumerate(found.active):
                known[address], largest = self._size(found, self.held[address], found.gap_after(k))
                if largest > known[address]:
                    most[address] = largest
        return Start(tuple(self.map), self.held, known, self.pools, most)

    def _size(self, found: Range, held: Held, gap: int) -> tuple[int, int]:
        """The size of a block, and the largest that it could have (`should_split`)."""
        if held.size is not None:
            return held.size, held.size
        room = min(held.room, gap)
        size = self.rules.round_size(held.requested)
        if size >= room:
            return room, room
        if found.expandable or not found.large or self.rules.settings.expandable_segments:
            return size, size
        if size >= self.rules.settings.max_split_size or room - size <= sizes.SMALL_SIZE:
            return room, room
        # The free range after it is larger than 1 MiB, or it would not have been split off.
        return size, max(size, size + min(sizes.SMALL_SIZE, room - size - sizes.SMALL_SIZE - sizes.MIN_BLOCK))
