"""A slow, plain model of PyTorch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp), release by release.

It stands beside the fast kernels as a second, independent reading of the same rules: objects with links, sorted
lists, one function a step, no care for speed. Sections named in docstrings are those of the rules as written down
for this project: 1 sizes, 2 malloc, 3 free, 4 expandable segments, 5 private pools, 6 statistics, 8 releases.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import floor
from typing import Any

from tests.oracles.naive_device import GRANULE, NaiveDevice
from tests.oracles.naive_settings import MIB, UNLIMITED, NaiveSettings, release_number

MIN_BLOCK_SIZE = 512
SMALL_SIZE = 1 * MIB
SMALL_BUFFER = 2 * MIB
MIN_LARGE_ALLOC = 10 * MIB
ROUND_LARGE = 2 * MIB
ONE_EIB = 1 << 60

PER_POOL_STATS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
SINGLE_STATS = ("oversize_allocations", "oversize_segments")
COUNTERS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")


class UndefinedInPyTorchError(Exception):
    """The events lead where PyTorch fails an internal assertion or hands CUDA a wrong pointer."""


class OutOfMemoryError(Exception):
    """No memory for a request."""


class RejectedError(OutOfMemoryError):
    """Refused by throw_on_cudamalloc_oom."""


@dataclass
class Stat:
    """current, peak, allocated, freed."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0

    def change(self, amount: int) -> None:
        self.current += amount
        if amount > 0:
            self.peak = max(self.peak, self.current)
            self.allocated += amount
        else:
            self.freed -= amount

    def row(self) -> list[int]:
        return [self.current, self.peak, self.allocated, self.freed]


@dataclass(eq=False)
class Segment:
    """An ExpandableSegment: a reserved range of addresses and which of its pages have memory."""

    address: int
    size: int
    page: int
    device: NaiveDevice
    mapped: set[int] = field(default_factory=set)  # page numbers

    def map(self, address: int, size: int) -> int:
        """Section 4.2: bytes mapped (whole pages), 0 when the device has not enough."""
        first = (address - self.address) // self.page
        stop = -(-(address + size - self.address) // self.page)
        for created in range(stop - first):
            if not self.device.create(self.page):
                for _ in range(created):
                    self.device.release(self.page)
                return 0
        for number in range(first, stop):
            assert number not in self.mapped
            self.mapped.add(number)
            self.device.map(self.address + number * self.page, self.page)
        return (stop - first) * self.page

    def unmap(self, address: int, size: int) -> tuple[int, int]:
        """Section 4.2: the range (address, bytes) of whole pages that lost their memory."""
        first = -(-(address - self.address) // self.page)
        stop = (address + size - self.address) // self.page
        if stop <= first:
            return address, 0
        for number in range(first, stop):
            self.mapped.remove(number)
            self.device.unmap(self.address + number * self.page, self.page)
        return self.address + first * self.page, (stop - first) * self.page


@dataclass(eq=False)
class Block:
    """A piece of a segment; `prev` and `next` are its neighbours there."""

    stream: int
    size: int
    pool: BlockPool
    ptr: int
    registration_counter: int
    segment: Segment | None = None
    allocated: bool = False
    mapped: bool = True
    prev: Block | None = None
    next: Block | None = None
    requested_size: int = 0
    event_count: int = 0
    stream_uses: set[int] = field(default_factory=set)
    capture_uses: set[int] = field(default_factory=set)
    gc_count_base: int = 0
    tenant: int = -1  # the id of the allocation that it serves or last served

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None

    @property
    def free(self) -> bool:
        """Neither allocated nor waiting for another stream ("allocatable", mapped or not)."""
        return not self.allocated and self.event_count == 0 and not self.stream_uses

    def link(self, prev: Block | None, next_: Block | None) -> None:
        """Put this block between two neighbours."""
        self.prev, self.next = prev, next_
        if prev is not None:
            prev.next = self
        if next_ is not None:
            next_.prev = self


@dataclass(eq=False)
class BlockPool:
    """The small or the large half of the default pool or of a private one."""

    small: bool
    order: Callable[[Block], tuple[int, ...]]
    owner: PrivatePool | None = None
    blocks: list[Block] = field(default_factory=list)  # free and mapped, in `order`
    unmapped: list[Block] = field(default_factory=list)  # by (stream, address)
    clock: int = 0

    def insert(self, block: Block) -> None:
        block.gc_count_base = self.clock
        insort(self.blocks, block, key=self.order)

    def remove(self, block: Block) -> None:
        index = bisect_left(self.blocks, self.order(block), key=self.order)
        assert self.blocks[index] is block
        del self.blocks[index]

    def insert_unmapped(self, block: Block) -> None:
        insort(self.unmapped, block, key=by_address)

    def remove_unmapped(self, block: Block) -> None:
        self.unmapped.remove(block)

    def lower_bound(self, stream: int, size: int) -> int:
        """Index of the first block not before (stream, size)."""
        return bisect_left(self.blocks, (stream, size), key=lambda block: (block.stream, block.size))


@dataclass(eq=False)
class PrivatePool:
    """A pool of a CUDA graph or a MemPool (section 5)."""

    number: int
    small: BlockPool
    large: BlockPool
    use_count: int = 1
    malloc_count: int = 0
    no_split: bool = False
    use_on_oom: bool = False


def by_address(block: Block) -> tuple[int, int]:
    return block.stream, block.ptr


def order_by_address(block: Block) -> tuple[int, ...]:
    """Profile A, up to 2.11."""
    return block.stream, block.size, block.ptr


def order_by_birth(block: Block) -> tuple[int, ...]:
    """Profile B, 2.12."""
    return block.stream, block.size, block.registration_counter


def order_by_segment(block: Block) -> tuple[int, ...]:
    """Profile C, from 2.13."""
    return block.stream, block.size, block.registration_counter, block.ptr


class NaiveAllocator:
    """One device's caching allocator."""

    def __init__(self, release: str, conf: str, device: NaiveDevice) -> None:
        self.release = release_number(release)
        self.settings = NaiveSettings(self.release)
        self.settings.parse(conf)
        self.device = device
        self.order = self.order_of_release()
        self.births = 0
        self.small_blocks = BlockPool(True, self.order)
        self.large_blocks = BlockPool(False, self.order)
        self.private_pools: dict[int, PrivatePool] = {}
        self.scopes: list[int] = []
        self.heads: list[Block] = []  # one block of each segment, to find the others
        self.events: dict[int, list[tuple[bool, Block]]] = {}  # stream -> FIFO of [complete, block]
        self.hold = False
        self.deferred: list[Block] = []
        self.total_allocated_memory = 0
        self.allowed_max: int | None = None
        self.stats = {name: {pool: Stat() for pool in ("all", "small_pool", "large_pool")} for name in PER_POOL_STATS}
        self.private_reserved: dict[int, dict[str, Stat]] = {}
        self.single_stats = {name: Stat() for name in SINGLE_STATS}
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.num_oom_rejections = 0
        self.initial_max_split_size = self.settings.max_split_size
        if self.release >= (2, 10):
            self.set_memory_fraction(self.settings.per_process_memory_fraction)

    # ------------------------------------------------------------------------------------------ settings (1)

    def order_of_release(self) -> Callable[[Block], tuple[int, ...]]:
        """The tie-break of section 2.2."""
        if self.release <= (2, 11):
            return order_by_address
        return order_by_birth if self.release == (2, 12) else order_by_segment

    def set_memory_fraction(self, fraction: float) -> None:
        """Section 1.6."""
        product = fraction * self.device.total
        if self.release >= (2, 10) and fraction >= 1.0:
            self.allowed_max = None
        elif self.release >= (2, 13):
            self.allowed_max = floor(product + 0.5)
        else:
            self.allowed_max = int(product)

    def set_allocator(self, conf: str) -> None:
        """Settings changed while running; blocks and the memory limit stay as they are."""
        self.settings.parse(conf)

    def round_size(self, n: int) -> int:
        """Section 1.3."""
        if n < MIN_BLOCK_SIZE:
            return MIN_BLOCK_SIZE
        interval = min(max(n.bit_length() - 1 - 20, 0), 15)
        divisions = self.settings.roundup_power2_divisions[interval]
        least = 0 if self.release <= (2, 3) else 1
        if divisions > least and n > MIN_BLOCK_SIZE * divisions:
            power = 1 << (n.bit_length() - 1)
            if power == n:
                return n
            step = power >> (divisions.bit_length() - 1)
            return n if divisions == 1 else -(-n // step) * step
        return -(-n // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE

    def alloc_size(self, size: int) -> int:
        """Section 1.5: what is asked of the driver for a block of `size`."""
        if size <= SMALL_SIZE:
            return SMALL_BUFFER
        if size < MIN_LARGE_ALLOC:
            return self.settings.large_segment_size
        return -(-size // ROUND_LARGE) * ROUND_LARGE

    @property
    def collecting(self) -> bool:
        """Whether garbage collection is on: it needs a limit and a threshold."""
        return self.allowed_max is not None and self.settings.garbage_collection_threshold > 0

    @property
    def capturing(self) -> bool:
        """Section 5.4: up to 2.12 any open pool scope counts; a real capture is never simulated."""
        return self.release <= (2, 12) and bool(self.scopes)

    # -------------------------------------------------------------------------------------------- pools (5)

    def pool_for(self, size: int) -> BlockPool:
        """Sections 1.4 and 5.3."""
        private = None
        if self.scopes:
            private = self.private_pools[self.scopes[-1 if self.release >= (2, 11) else 0]]
        return self.half(private, size)

    def half(self, private: PrivatePool | None, size: int) -> BlockPool:
        owner: NaiveAllocator | PrivatePool = self if private is None else private
        if isinstance(owner, PrivatePool):
            return owner.small if size <= SMALL_SIZE else owner.large
        return self.small_blocks if size <= SMALL_SIZE else self.large_blocks

    def pool_create(self, number: int, no_split: bool = False, use_on_oom: bool = False) -> None:
        """createOrIncref, with the options of a MemPool."""
        if number in self.private_pools:
            if self.private_pools[number].use_count == 0:
                raise UndefinedInPyTorchError("a released pool is used again")
            self.private_pools[number].use_count += 1
        else:
            pool = PrivatePool(number, BlockPool(True, self.order), BlockPool(False, self.order))
            pool.small.owner = pool.large.owner = pool
            self.private_pools[number] = pool
        if no_split and self.release >= (2, 10):
            self.private_pools[number].no_split = True
        if use_on_oom and self.release >= (2, 8):
            self.private_pools[number].use_on_oom = True

    def pool_begin(self, number: int) -> None:
        """beginAllocateToPool."""
        self.pool_create(number)
        if number in self.scopes:
            raise UndefinedInPyTorchError("a pool's scope is opened twice")
        self.scopes.append(number)

    def pool_end(self, number: int) -> None:
        """endAllocateToPool."""
        self.scopes.remove(number)

    def pool_release(self, number: int) -> None:
        """releasePool: at 0 uses the pool becomes freeable, and serves no other pool."""
        pool = self.private_pools[number]
        pool.use_count -= 1
        if pool.use_count == 0:
            pool.no_split = pool.use_on_oom = False

    def count_malloc(self, pool: BlockPool, change: int) -> None:
        """cudaMalloc_count of a private pool."""
        if pool.owner is not None:
            if change < 0 and pool.owner.malloc_count <= 0:
                raise UndefinedInPyTorchError("cudaMalloc_count of a private pool falls below 0")
            pool.owner.malloc_count += change

    # --------------------------------------------------------------------------------------- statistics (6)

    def count(self, name: str, pool: BlockPool, amount: int) -> None:
        """Change a statistic by `amount` in "all" and in the half of `pool`."""
        if amount == 0:
            return
        for key in ("all", "small_pool" if pool.small else "large_pool"):
            self.stats[name][key].change(amount)
        if name == "reserved_bytes" and pool.owner is not None:
            stats = self.private_reserved.setdefault(
                pool.owner.number, {key: Stat() for key in ("all", "small_pool", "large_pool")}
            )
            for key in ("all", "small_pool" if pool.small else "large_pool"):
                stats[key].change(amount)

    def count_oversize(self, name: str, size: int, amount: int) -> None:
        if size >= self.settings.max_split_size:
            self.single_stats[name].change(amount)

    def all_stats(self) -> list[Stat]:
        grouped = [*self.stats.values(), *self.private_reserved.values()]
        return [stat for group in grouped for stat in group.values()] + list(self.single_stats.values())

    def reset_peak(self) -> None:
        for stat in self.all_stats():
            stat.peak = stat.current

    def reset_accumulated(self) -> None:
        for stat in self.all_stats():
            stat.allocated = stat.freed = 0
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.num_oom_rejections = 0

    def statistics(self) -> dict[str, Any]:
        """The statistics in the recordings' layout."""
        report: dict[str, Any] = {
            name: {key: stat.row() for key, stat in group.items()} for name, group in self.stats.items()
        }
        report |= {name: stat.row() for name, stat in self.single_stats.items()}
        report |= self.counters
        unlimited = self.initial_max_split_size == UNLIMITED
        report["max_split_size"] = -1 if unlimited else self.initial_max_split_size
        return report

    def memory_stats(self) -> dict[str, int]:
        """`torch.cuda.memory_stats`: flat names, without the counters that the release does not have."""
        report = self.statistics()
        if self.release < (2, 2):
            for name in COUNTERS[2:]:
                del report[name]
        if self.release >= (2, 12):
            report["num_oom_rejections"] = self.num_oom_rejections
        if self.release >= (2, 13):
            report["reserved_bytes_by_private_pools"] = {
                f"0_{number}": {key: stat.row() for key, stat in group.items()}
                for number, group in self.private_reserved.items()
            }
        flat: dict[str, int] = {}
        flatten(flat, "", report)
        return flat

    # ------------------------------------------------------------------------------------------- malloc (2)

    def malloc(self, n: int, stream: int) -> Block:
        """Section 2.3; raises `OutOfMemoryError`."""
        if n >= ONE_EIB:
            raise OutOfMemoryError
        if not self.capturing:
            self.process_events()
        size = self.round_size(n)
        pool = self.pool_for(size)
        expandable = self.settings.expandable_segments
        block = self.get_free_block(pool, size, stream, expandable)
        if block is None:
            try:
                block = self.obtain(pool, size, stream, expandable)
            except RejectedError:
                self.num_oom_rejections += 1
                raise
            if block is None:
                self.device.note("oom", max(self.device.left, 0), size, stream)
                self.counters["num_ooms"] += 1
                raise OutOfMemoryError
            expandable = expandable and (block.pool is pool)
        return self.hand_out(block, n, size, self.should_split(block, size, expandable))

    def obtain(self, pool: BlockPool, size: int, stream: int, expandable: bool) -> Block | None:
        """Section 2.3, step 4: the chain that begins with a driver call and ends with releasing all caches."""
        if self.collecting:
            self.garbage_collect()
        block = self.alloc_block(pool, size, stream, False)
        if block is None and self.release >= (2, 11):
            block = self.use_on_oom_fallback(pool, size, stream)
        if block is None and self.release_available_cached_blocks(pool, size, stream):
            block = self.alloc_block(pool, size, stream, False)
        if block is None and not self.capturing:
            self.release_cached_blocks()
            block = self.alloc_block(pool, size, stream, True)
        if block is None and (2, 8) <= self.release <= (2, 10):
            block = self.use_on_oom_fallback(pool, size, stream)
        return block

    def use_on_oom_fallback(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """Section 5.6: pools opted in serve requests of the default pool, in order of creation."""
        if pool.owner is not None:
            return None
        for private in list(self.private_pools.values()):
            if private.use_on_oom:
                block = self.get_free_block(self.half(private, size), size, stream, False)
                if block is not None:
                    return block
        return None

    def get_free_block(self, pool: BlockPool, size: int, stream: int, expandable: bool) -> Block | None:
        """Section 2.4: best fit."""
        if self.collecting:
            pool.clock += 1
        index = pool.lower_bound(stream, size)
        block = self.candidate(pool, index, stream)
        if block is None:
            return None
        if block.segment is not None:
            if expandable:
                block = self.walk_to_hole(pool, index, stream)
            else:
                while block is not None and block.segment is not None:
                    index += 1
                    block = self.candidate(pool, index, stream)
                if block is None:
                    return None
        limit = self.settings.max_split_size
        if size < limit and block.size >= limit:
            return None
        if size >= limit and block.size >= size + self.settings.max_non_split_rounding:
            return None
        pool.remove(block)
        return block

    def candidate(self, pool: BlockPool, index: int, stream: int) -> Block | None:
        """The block at `index` of the free set, if it is of this stream."""
        if index < len(pool.blocks) and pool.blocks[index].stream == stream:
            return pool.blocks[index]
        return None

    def walk_to_hole(self, pool: BlockPool, index: int, stream: int) -> Block:
        """Section 2.4, step 3: prefer a hole to the growing tail of an expandable segment."""
        block = pool.blocks[index]
        while block.segment is not None:
            index += 1
            following = self.candidate(pool, index, stream)
            if following is None or not self.extent(following) < self.extent(block):
                break
            block = following
        return block

    def extent(self, block: Block) -> int:
        """What the block could grow to."""
        if block.segment is not None and block.next is not None and not block.next.mapped:
            return block.size + block.next.size
        return block.size

    def should_split(self, block: Block, size: int, expandable: bool) -> bool:
        """Section 2.5."""
        remaining = block.size - size
        if block.pool.owner is not None and block.pool.owner.no_split:
            return False
        if block.pool.small or expandable:
            return remaining >= MIN_BLOCK_SIZE
        return size < self.settings.max_split_size and remaining > SMALL_SIZE

    def garbage_collect(self) -> None:
        """Section 2.6."""
        assert self.allowed_max is not None
        threshold = int(self.settings.garbage_collection_threshold * self.allowed_max)
        if self.total_allocated_memory <= threshold:
            return
        target = self.total_allocated_memory - threshold
        pool = self.large_blocks
        idle = [block for block in pool.blocks if not block.is_split]
        count = len(idle)
        total_age = sum(pool.clock - block.gc_count_base for block in idle)
        reclaimed = 0
        freed = True
        while reclaimed < target and freed and count > 0:
            freed = False
            limit = total_age / count
            for block in list(pool.blocks):
                age = pool.clock - block.gc_count_base
                if block.is_split or age < limit:
                    continue
                if block.segment is not None:
                    if self.release < (2, 5):
                        raise UndefinedInPyTorchError("garbage collection of an expandable block")
                    continue
                freed = True
                reclaimed += block.size
                total_age -= age
                count -= 1
                self.release_block(block)

    def alloc_block(self, pool: BlockPool, size: int, stream: int, is_retry: bool) -> Block | None:
        """Section 2.7: memory from the driver."""
        alloc_size = self.alloc_size(size)
        settings = self.settings
        if is_retry:
            self.counters["num_alloc_retries"] += 1
        if self.allowed_max is not None and self.total_allocated_memory + alloc_size > self.allowed_max:
            return None
        if settings.throw_on_cudamalloc_oom:
            cap = int(settings.per_process_memory_fraction * self.device.total)
            if self.total_allocated_memory + alloc_size > cap:
                raise RejectedError
        if settings.expandable_segments and (pool.owner is None or self.release >= (2, 5)):
            block = self.try_allocate_expandable_block(pool, size, stream)
            if block is not None:
                self.count_malloc(pool, 1)
            return block
        ptr = self.device.malloc(alloc_size)
        if ptr is None:
            return None
        self.count_malloc(pool, 1)
        self.total_allocated_memory += alloc_size
        block = Block(stream, alloc_size, pool, ptr, self.new_backing())
        self.heads.append(block)
        self.count("segment", pool, 1)
        self.count("reserved_bytes", pool, alloc_size)
        self.count_oversize("oversize_segments", alloc_size, 1)
        self.counters["num_device_alloc"] += 1
        return block

    def new_backing(self) -> int:
        """The registration counter of a block with new memory or addresses of its own."""
        self.births += 1
        return self.births

    def new_piece(self, block: Block) -> int:
        """The registration counter of a piece of `block`: its own in 2.12, the segment's from 2.13."""
        return self.new_backing() if self.release == (2, 12) else block.registration_counter

    def release_available_cached_blocks(self, pool: BlockPool, size: int, stream: int) -> bool:
        """Section 2.8: with max_split_size, release a large enough oversize block, or several."""
        if self.settings.max_split_size == UNLIMITED:
            return False
        key = max(size, self.settings.max_split_size)
        index = pool.lower_bound(stream, key)
        block = self.candidate(pool, index, stream)
        if block is not None and (block.segment is None or self.release < (2, 5)):
            self.release_oversize(block)
            return True
        released = 0
        index -= 1
        while index >= 0 and released < key:
            block = pool.blocks[index]
            if block.size < self.settings.max_split_size or block.stream != stream:
                break
            if block.segment is None or self.release < (2, 5):
                released += block.size
                self.release_oversize(block)
            index -= 1
        return released >= key

    def release_oversize(self, block: Block) -> None:
        """Release a block for max_split_size; PyTorch does not look whether it is a whole segment (case 9.35)."""
        if block.segment is not None:
            raise UndefinedInPyTorchError("an expandable block is released for max_split_size")
        if block.is_split:
            raise UndefinedInPyTorchError("a split block is released for max_split_size")
        self.release_block(block)

    def hand_out(self, block: Block, n: int, size: int, split: bool) -> Block:
        """Section 2.9: the low part of the block becomes the allocation."""
        was_split = block.is_split
        change_count = change_bytes = 0
        if split:
            rest = block
            block = Block(rest.stream, size, rest.pool, rest.ptr, self.new_piece(rest), rest.segment)
            block.link(rest.prev, rest)
            rest.ptr += size
            rest.size -= size
            if self.heads and rest in self.heads:
                self.heads[self.heads.index(rest)] = block
            rest.pool.insert(rest)
            change_count = 0 if was_split else 1
            change_bytes = -size if was_split else rest.size
        elif was_split:
            change_count, change_bytes = -1, -block.size
        pool = block.pool
        if block.segment is None:
            self.count("inactive_split", pool, change_count)
            self.count("inactive_split_bytes", pool, change_bytes)
        block.allocated = True
        block.requested_size = n
        self.device.note("alloc", block.ptr, n, block.stream)
        self.count("allocation", pool, 1)
        self.count("allocated_bytes", pool, block.size)
        self.count("active", pool, 1)
        self.count("active_bytes", pool, block.size)
        self.count("requested_bytes", pool, n)
        self.count_oversize("oversize_allocations", block.size, 1)
        return block

    def release_block(self, block: Block) -> None:
        """Section 2.10: cudaFree of a whole segment."""
        self.counters["num_device_free"] += 1
        self.device.free(block.ptr, block.size)
        self.total_allocated_memory -= block.size
        self.count_malloc(block.pool, -1)
        self.count("segment", block.pool, -1)
        self.count("reserved_bytes", block.pool, -block.size)
        self.count_oversize("oversize_segments", block.size, -1)
        block.pool.remove(block)
        self.heads.remove(block)

    # --------------------------------------------------------------------------------------------- free (3)

    def record_stream(self, block: Block, stream: int) -> None:
        """Section 3.1."""
        if stream == block.stream:
            return
        block.stream_uses.add(stream)
        if self.capturing:
            block.capture_uses.add(stream)

    def free(self, block: Block) -> None:
        """Section 3.2."""
        block.allocated = False
        self.count("allocation", block.pool, -1)
        self.count("allocated_bytes", block.pool, -block.size)
        self.device.note("free_requested", block.ptr, block.requested_size, block.stream)
        self.count_oversize("oversize_allocations", block.size, -1)
        if not block.stream_uses:
            self.free_block(block)
        elif self.capturing:
            self.deferred.append(block)
        else:
            self.insert_events(block)

    def free_block(self, block: Block) -> None:
        """Section 3.3."""
        pool, size, requested = block.pool, block.size, block.requested_size
        self.device.note("free_completed", block.ptr, requested, block.stream)
        count = absorbed = 0
        for neighbour in (block.prev, block.next):
            gained = self.merge(block, neighbour)
            absorbed += gained
            count += gained > 0
        pool.insert(block)
        if block.segment is None:
            self.count("inactive_split", pool, -count + block.is_split)
            self.count("inactive_split_bytes", pool, -absorbed + (block.size if block.is_split else 0))
        self.count("active", pool, -1)
        self.count("active_bytes", pool, -size)
        self.count("requested_bytes", pool, -requested)

    def merge(self, block: Block, neighbour: Block | None) -> int:
        """`block` absorbs its neighbour if that is as free and as mapped as it is; the bytes gained."""
        if neighbour is None or not neighbour.free or neighbour.mapped != block.mapped:
            return 0
        if neighbour.mapped:
            neighbour.pool.remove(neighbour)
        else:
            neighbour.pool.remove_unmapped(neighbour)
        if neighbour is block.prev:
            block.ptr = neighbour.ptr
            block.link(neighbour.prev, block.next)
        else:
            block.link(block.prev, neighbour.next)
        block.size += neighbour.size
        if neighbour in self.heads:
            self.heads[self.heads.index(neighbour)] = block
        return neighbour.size

    def insert_events(self, block: Block) -> None:
        """Section 3.4: an event on every stream that used the block."""
        for stream in sorted(block.stream_uses):
            block.event_count += 1
            self.events.setdefault(stream, []).append((not self.hold, block))
        block.stream_uses = set()

    def insert_deferred_events(self) -> None:
        """Section 5.4: frees put off by a capture; streams used in the capture do not count."""
        blocks, self.deferred = self.deferred, []
        for block in blocks:
            block.stream_uses -= block.capture_uses
            block.capture_uses = set()
            self.insert_events(block)
            if block.event_count == 0:
                self.free_block(block)

    def process_events(self) -> None:
        """Section 3.4: free what the other streams have finished with, up to the first that is not done."""
        self.insert_deferred_events()
        for stream in visiting_order(self.events):
            fifo = self.events[stream]
            while fifo and fifo[0][0]:
                self.finish_event(fifo.pop(0)[1])
        self.forget_empty()

    def finish_event(self, block: Block) -> None:
        block.event_count -= 1
        if block.event_count == 0:
            self.free_block(block)

    def synchronize_and_free_events(self) -> None:
        """Section 3.4: wait for every event."""
        self.counters["num_sync_all_streams"] += 1
        self.insert_deferred_events()
        for stream in visiting_order(self.events):
            for _, block in self.events.pop(stream):
                self.finish_event(block)

    def forget_empty(self) -> None:
        self.events = {stream: fifo for stream, fifo in self.events.items() if fifo}

    def hold_events(self, hold: bool) -> None:
        """Whether events recorded from now on stay incomplete; letting go completes those held so far."""
        self.hold = hold
        if not hold:
            self.complete_events(None)

    def complete_events(self, stream: int | None) -> None:
        """Every event recorded so far on `stream` (None: on any) is complete."""
        for key, fifo in self.events.items():
            if stream is None or key == stream:
                fifo[:] = [(True, block) for _, block in fifo]

    def complete_free(self, block: Block) -> None:
        """The pending free of `block` completes now, whatever it waits for."""
        if block.allocated or block.free:
            return
        for fifo in self.events.values():
            fifo[:] = [item for item in fifo if item[1] is not block]
        self.forget_empty()
        self.deferred = [other for other in self.deferred if other is not block]
        block.event_count = 0
        block.stream_uses = set()
        block.capture_uses = set()
        self.free_block(block)

    def empty_cache(self) -> None:
        """Section 3.5."""
        if self.capturing and self.release < (2, 8):
            raise UndefinedInPyTorchError("empty_cache during a capture")
        self.release_cached_blocks()

    def release_cached_blocks(self) -> None:
        """Section 3.6, for pool id (0, 0)."""
        if not self.capturing:
            self.synchronize_and_free_events()
            self.release_blocks(self.large_blocks)
            self.release_blocks(self.small_blocks)
        for private in list(self.private_pools.values()):
            if private.use_count == 0:
                self.release_blocks(private.small)
                self.release_blocks(private.large)
                if private.malloc_count == 0:
                    del self.private_pools[private.number]

    def release_blocks(self, pool: BlockPool) -> None:
        """Section 3.6: everything of a pool that can go back to the driver."""
        expandable = []
        for block in list(pool.blocks):
            if block.segment is not None:
                expandable.append(block)
            elif not block.is_split:
                self.release_block(block)
        for block in expandable:
            self.unmap_block(block)
            if not block.is_split:
                self.destroy_segment(block)

    # ------------------------------------------------------------------------------ expandable segments (4)

    def try_allocate_expandable_block(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """Section 4.3."""
        block = self.find_expandable_block(pool, size, stream)
        if block is None:
            return None
        if not block.mapped and not self.map_block(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            if following is None:
                raise UndefinedInPyTorchError("an expandable segment ends before the block is large enough")
            if not self.map_block(following, min(size - block.size, following.size)):
                return None
            block = following
        pool.remove(block)
        return block

    def find_expandable_block(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """The lowest range that could hold `size`, or the unmapped block of a new ExpandableSegment."""
        for unmapped in pool.unmapped:
            if unmapped.stream != stream:
                continue
            start = unmapped
            if start.prev is not None and start.prev.free:
                start = start.prev
            if self.room_from(start, size) >= size:
                return start
        page = SMALL_BUFFER if pool.small else self.settings.large_segment_size
        total = self.device.total + self.device.total // 8
        bytes_ = -(-total // page) * page
        address = self.device.reserve(bytes_)
        if self.release >= (2, 15) and bytes_ < size:
            self.device.free_range(address, bytes_)
            return None
        segment = Segment(address, bytes_, page, self.device)
        block = Block(stream, bytes_, pool, address, self.new_backing(), segment, mapped=False)
        self.heads.append(block)
        pool.insert_unmapped(block)
        return block

    def room_from(self, start: Block, size: int) -> int:
        """Bytes of blocks in a row, from `start`, that are free, mapped or not."""
        room = 0
        block: Block | None = start
        while block is not None and block.free and room < size:
            room += block.size
            block = block.next
        return room

    def map_block(self, block: Block, size: int) -> bool:
        """Section 4.3: give memory to the start of an unmapped block."""
        assert block.segment is not None
        assert not block.mapped
        if block.segment.page % GRANULE and self.release >= (2, 15):
            raise UndefinedInPyTorchError("the driver refuses pages of this size")
        mapped = block.segment.map(block.ptr, size)
        if mapped == 0:
            return False
        pool = block.pool
        pool.remove_unmapped(block)
        block.mapped = True
        if mapped < block.size:
            rest = Block(
                block.stream,
                block.size - mapped,
                pool,
                block.ptr + mapped,
                self.new_piece(block),
                block.segment,
                mapped=False,
            )
            rest.link(block, block.next)
            block.size = mapped
            pool.insert_unmapped(rest)
        self.merge(block, block.prev)
        self.merge(block, block.next)
        pool.insert(block)
        self.total_allocated_memory += mapped
        self.count("reserved_bytes", pool, mapped)
        self.counters["num_device_alloc"] += 1
        return True

    def unmap_block(self, block: Block) -> None:
        """Section 4.4: take the memory of the whole pages inside a free block."""
        assert block.segment is not None
        address, size = block.segment.unmap(block.ptr, block.size)
        if size == 0:
            return
        pool = block.pool
        pool.remove(block)
        before = address - block.ptr
        after = block.size - before - size
        if before:
            piece = Block(block.stream, before, pool, block.ptr, self.new_piece(block), block.segment)
            piece.link(block.prev, block)
            if block in self.heads:
                self.heads[self.heads.index(block)] = piece
            pool.insert(piece)
        if after:
            piece = Block(block.stream, after, pool, address + size, self.new_piece(block), block.segment)
            piece.link(block, block.next)
            pool.insert(piece)
        block.ptr, block.size, block.mapped = address, size, False
        self.merge(block, block.prev)
        self.merge(block, block.next)
        pool.insert_unmapped(block)
        self.total_allocated_memory -= size
        self.count("reserved_bytes", pool, -size)
        self.count_malloc(pool, -1)
        self.counters["num_device_free"] += 1

    def destroy_segment(self, block: Block) -> None:
        """Give back the addresses of an ExpandableSegment that is one unmapped block."""
        assert block.segment is not None
        assert not block.mapped
        block.pool.remove_unmapped(block)
        self.heads.remove(block)
        self.device.free_range(block.segment.address, block.segment.size)

    # ---------------------------------------------------------------------------------------- snapshots (7)

    def snapshot(self) -> dict[str, Any]:
        """The state in the recordings' layout."""
        settings = self.settings
        return {
            "settings": {
                "conf": settings.conf,
                "max_split_size": settings.max_split_size,
                "garbage_collection_threshold": settings.garbage_collection_threshold,
                "expandable_segments": settings.expandable_segments,
                "roundup_power2_divisions": list(settings.roundup_power2_divisions),
            },
            "segments": sorted(self.segments(), key=lambda segment: segment["address"]),
        }

    def segments(self) -> list[dict[str, Any]]:
        """Every run of mapped neighbours."""
        found = []
        for head in self.heads:
            assert head.prev is None
            run: list[Block] = []
            block: Block | None = head
            while block is not None:
                if block.mapped:
                    run.append(block)
                elif run:
                    found.append(describe(run))
                    run = []
                block = block.next
            if run:
                found.append(describe(run))
        return found


def flatten(flat: dict[str, int], name: str, value: Any) -> None:
    """Enter a nested report under PyTorch's names, joined by dots."""
    if isinstance(value, list):
        value = dict(zip(("current", "peak", "allocated", "freed"), value, strict=True))
    if isinstance(value, dict):
        for key, inner in value.items():
            flatten(flat, f"{name}.{key}" if name else key, inner)
    else:
        flat[name] = value


def visiting_order(streams: Iterable[int]) -> list[int]:
    """The order in which streams are polled: the default stream, then the others from the last to the first.

    PyTorch walks a hash map of streams. The recordings, with streams 0 to 4, all agree with this order alone: it is
    that of the Fibonacci hashes of the ids that torch gives to the first streams of its pool (3, 35, 67, 99).
    """
    return sorted(streams, key=lambda stream: (stream != 0, -stream))


def describe(run: list[Block]) -> dict[str, Any]:
    """A segment of a snapshot."""
    active = [block for block in run if not block.free]
    return {
        "address": run[0].ptr,
        "total_size": sum(block.size for block in run),
        "allocated_size": sum(block.size for block in run if block.allocated),
        "active_size": sum(block.size for block in active),
        "requested_size": sum(block.requested_size for block in active),
        "stream": run[0].stream,
        "large": not run[0].pool.small,
        "expandable": run[0].segment is not None,
        "blocks": [[block.size, block.requested_size, state(block), 0] for block in run],
    }


def state(block: Block) -> str:
    if block.allocated:
        return "allocated"
    return "inactive" if block.free else "pending_free"
