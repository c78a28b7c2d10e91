"""One rank's allocator between events: its arrays, their growth, settings, and reports of its state."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from simulator.allocator import checkpoints, driver, sizes
from simulator.allocator import layout as at
from simulator.allocator.conf import AllocatorSettings, parse_conf
from simulator.allocator.releases import Release
from simulator.engine import kernels as engine
from simulator.engine.program import Program, plain
from traces.errors import EventError, ReplayError
from traces.model import Device, Initial, InitialSegment, Int64Array, Op

LOG_ENTRIES = 4096  # room of the log at first
FIRST_WORDS = 1 << 16  # room for records at first
PATIENCE = 0.05  # seconds after which the kernels are left, so that Python can see a Ctrl-C
BLOCK_FLAGS = {"active_allocated": at.ALLOCATED, "active_pending_free": at.PENDING, "inactive": 0}


def limit_of(fraction: float, total: int, release: Release) -> int:
    """Bytes that set_per_process_memory_fraction allows, or -1 for no limit (section 1.6 of each release)."""
    if fraction >= 1.0 and not release.limit_even_at_one:
        return -1
    product = fraction * float(total)
    return int(product + 0.5) if release.limit_rounded else int(product)


def round_up(size: int, unit: int) -> int:
    """`size` rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


class Machine:
    """One rank's allocator and clocks. `step` serves events until something needs the outside."""

    def __init__(
        self,
        program: Program,
        *,
        device: Device,
        settings: AllocatorSettings,
        release: Release,
        capacity: int,
        full: bool = False,
        log: bool = False,
        recorded: bool = True,
    ) -> None:
        self.program = program
        self.device = device
        self.settings = settings
        self.first_settings = settings
        self.release = release
        self.index = 0
        self.ended = False  # before its last event
        self.stretch = 4096  # how many events the kernels are given at once
        self.fraction = 1.0
        columns = engine.OUT_FULL if full else engine.OUT_TIMED if program.timed else engine.OUT_PLAIN
        self.out = np.zeros((len(program), columns), dtype=np.int64)
        self.ids = np.zeros((max(len(program.ids), 1), 2), dtype=np.int64)
        self.log_parts: list[Int64Array] = []
        self.checkpoints: dict[tuple[int, int], list[Int64Array]] = {}  # pool and number -> blocks of each segment
        self.restored: dict[int, int] = {}  # dense id at a checkpoint -> the block to be taken over
        self.memory = self._allocate(log)
        self._place(recorded)
        memory = self.memory
        memory[at.CAPACITY] = capacity
        memory[at.DEVICE_TOTAL] = device.total_bytes
        memory[at.TIMED] = program.timed
        memory[at.LAUNCH_NS] = device.launch_ns
        self._apply_release()
        self.fraction = settings.per_process_memory_fraction if release.fraction_applied_at_construction else 1.0
        if self.fraction < 1.0:
            memory[at.LIMIT] = limit_of(self.fraction, device.total_bytes, release)
        self.apply(settings)
        self._load_initial()
        currents = [self.stat(stat)["all"][0] for stat in (at.ALLOCATED_BYTES, at.ACTIVE_BYTES, at.RESERVED_BYTES)]
        self.initial_bytes = (currents[0], currents[1], currents[2])  # allocated, active, reserved

    # --- set-up ---------------------------------------------------------------------------------------------------

    def _allocate(self, log: bool) -> Int64Array:
        """The memory with its header, streams, pools, sets, and room for the log."""
        program = self.program
        streams = len(program.stream_values)
        per_pool = 2 * streams * at.SET_COLUMNS
        sizes = {
            at.STREAMS: streams * at.S_COLUMNS,
            at.POOLS: program.num_pools * at.P_COLUMNS,
            at.SETS: program.num_pools * per_pool,
            at.GAPS: program.num_pools * per_pool + at.SET_COLUMNS,  # and behind it the sets of unmapped blocks
            at.COLLECTIVES: program.num_collectives * at.C_COLUMNS,
            at.RECORDED: len(self.device.segment_addresses),
            at.LOG: LOG_ENTRIES * at.L_COLUMNS if log else 0,
        }
        top = at.SCALARS
        # Set aside: in one event, each set (for free and for unmapped blocks) may get its first leaf and directory.
        first_leaves = (4 * program.num_pools * streams + 1) * (at.LEAF_COLUMNS + 4)
        memory = np.zeros(top + sum(sizes.values()) + FIRST_WORDS + first_leaves, dtype=np.int64)
        for cell, size in sizes.items():
            memory[cell] = top
            top += size
        memory[at.SERVING] = memory[at.POOLS]
        memory[at.TOP] = top
        memory[at.ROOM] = len(memory) - first_leaves
        memory[at.LOG_ROOM] = LOG_ENTRIES if log else 0
        memory[at.LOGGING] = log
        memory[[at.LIMIT, at.REJECT_CAP, at.PEAK_EVENT]] = -1
        memory[at.NUM_STREAMS] = streams
        memory[at.NUM_POOLS] = program.num_pools
        for number, value in enumerate(program.stream_values):
            memory[memory[at.STREAMS] + number * at.S_COLUMNS + at.S_VALUE] = value
        for number in range(program.num_pools):
            pool = memory[at.POOLS] + number * at.P_COLUMNS
            memory[pool + at.P_PRIVATE] = number > 0
            memory[pool + at.P_SETS] = memory[at.SETS] + number * per_pool
            for i in range(2 * streams):
                which = memory[pool + at.P_SETS] + i * at.SET_COLUMNS
                memory[which + at.SET_POOL] = pool
                memory[which + at.SET_LARGE] = i // streams
                memory[which + at.SET_STREAM] = memory[at.STREAMS] + i % streams * at.S_COLUMNS
                memory[which + at.SET_UNMAPPED] = memory[at.GAPS] + at.SET_COLUMNS + which - memory[at.SETS]
        return memory

    def _place(self, recorded: bool) -> None:
        """Choose the rule for addresses. Addresses of a recording hold only for its own settings and device."""
        device = self.device
        placement = device.placement if recorded or device.placement != "recorded" else "first-fit"
        self.memory[at.PLACEMENT] = {
            "first-fit": at.PLACE_FIRST_FIT,
            "bump": at.PLACE_BUMP,
            "recorded": at.PLACE_RECORDED,
            "driver": at.PLACE_DRIVER,
        }[placement]
        self.memory[at.VA_TOP] = self._bottom() if placement == "driver" else self._top(placement)

    def _top(self, placement: str) -> int:
        """The first address above all that is known to be in use."""
        device = self.device
        top = device.va_base
        if placement == "recorded" and device.segment_addresses:
            addresses = np.asarray(device.segment_addresses, dtype=np.int64)
            self.memory[self.memory[at.RECORDED] :][: len(addresses)] = addresses
            self.memory[at.NUM_RECORDED] = len(addresses)
            top = int(addresses.max()) + device.total_bytes + device.total_bytes // 8 + (1 << 30)
        for segment in self.program.initial.segments:
            top = max(top, segment.address + segment.bytes, (segment.va_address or 0) + (segment.va_bytes or 0))
        return round_up(top, driver.GRANULE)

    def _bottom(self) -> int:
        """The address below which nothing is in use."""
        known = (segment.va_address or segment.address for segment in self.program.initial.segments)
        return min((self.device.va_base, *known)) // driver.GRANULE * driver.GRANULE

    def _apply_release(self) -> None:
        release = self.release
        switches = {
            at.TIE_BREAK: {"address": at.TIE_ADDRESS, "birth": at.TIE_BIRTH, "segment": at.TIE_SEGMENT}[
                {"A": "address", "B": "birth", "C": "segment"}[release.profile]
            ],
            at.EXPANDABLE_IN_POOLS: release.expandable_in_private_pools,
            at.EXPANDABLE_ASSERTS: not release.gc_skips_expandable,
            at.ON_OOM_EARLY: release.use_on_oom == "before_release",
            at.ON_OOM_LATE: release.use_on_oom == "last",
            at.NEWEST_SCOPE: release.newest_scope_first,
            at.SCOPE_CAPTURES: release.scope_means_capturing,
            at.EMPTY_IN_CAPTURE: release.empty_cache_in_capture,
            at.NO_SPLIT_POOLS: release.no_split_pools,
            at.VA_CHECKED: release.fresh_va_checked,
            at.ODD_PAGE_ERROR: release.odd_page_error,
            at.SEARCH_AGAIN: release.searches_again_after_retry,
            at.EXEMPT: release.expandable_exempt_from_max_split,
        }
        for cell, value in switches.items():
            self.memory[cell] = value

    def apply(self, settings: AllocatorSettings) -> None:
        """Put allocator settings into force, as `_set_allocator_settings` while running does."""
        self.settings = settings
        scalars = self.memory
        scalars[at.MAX_SPLIT] = min(settings.max_split_size, at.UNLIMITED)
        scalars[at.NON_SPLIT_ROUNDING] = settings.max_non_split_rounding_size
        scalars[at.EXPANDABLE_ON] = settings.expandable_segments
        for cell, value in sizes.words(settings, self.release).items():
            scalars[cell] = value
        scalars[at.REJECT_CAP] = -1
        if settings.throw_on_cudamalloc_oom:
            scalars[at.REJECT_CAP] = int(settings.per_process_memory_fraction * self.device.total_bytes)
        scalars[at.VA_RESERVE] = -1
        if settings.expandable_segments_reserve is not None:
            scalars[at.VA_RESERVE] = settings.expandable_segments_reserve.resolve(self.device.total_bytes)
        self._apply_gc()

    def _apply_gc(self) -> None:
        scalars = self.memory
        threshold = self.settings.garbage_collection_threshold
        scalars[at.GC_ON] = threshold > 0 and scalars[at.LIMIT] >= 0
        scalars[at.GC_THRESHOLD] = int(threshold * float(max(scalars[at.LIMIT], 0)))

    def set_fraction(self, fraction: float) -> None:
        """set_per_process_memory_fraction."""
        self.fraction = fraction
        self.memory[at.LIMIT] = limit_of(fraction, self.device.total_bytes, self.release)
        self._apply_gc()

    def _load_initial(self) -> None:
        """Build the state that the recording began with."""
        initial = self.program.initial
        if not initial.segments:
            return
        dense = {int(ident): i for i, ident in enumerate(self.program.ids)}
        position = {int(value): i for i, value in enumerate(self.program.stream_values)}
        for members in _address_ranges(initial):
            head = members[0]
            pool = int(self.memory[at.POOLS]) + self._pool_index(head.pool_id) * at.P_COLUMNS
            self._enter_pool(pool)
            which = int(self.memory[pool + at.P_SETS])
            which += ((head.pool == "large") * len(position) + position[head.stream]) * at.SET_COLUMNS
            rows, segment = self._initial_rows(members, which, dense)
            self._reserve(len(rows))
            engine.load_segment(self.memory, self.ids.reshape(-1), rows, which, segment)
            used = sum(part.bytes for part in members)
            self.memory[at.DEVICE_USED] += round_up(used, driver.GRANULE)
        self.memory[at.EVENT] = -1
        engine.finish_event(self.memory, np.zeros(engine.OUT_FULL, dtype=np.int64), engine.OUT_FULL, 0)

    def _initial_rows(self, members: list[InitialSegment], which: int, dense: dict[int, int]) -> tuple[Int64Array, int]:
        """Blocks of one segment in address order, unmapped ranges included, and its ExpandableSegment."""
        head = members[0]
        flags = (at.LARGE if head.pool == "large" else 0) | (at.IS_EXPANDABLE if head.expandable else 0)
        base, end, segment = head.address, head.address + head.bytes, 0
        if head.expandable:
            base, end, segment = self._initial_expandable(members, which)
        rows: list[tuple[int, int, int, int, int]] = []
        cursor = base
        for part in members:
            if part.address > cursor:
                rows.append((cursor, part.address - cursor, 0, flags | at.UNMAPPED, -1))
            cursor = part.address
            for block in part.blocks:
                ident = -1 if block.id is None else dense[block.id]
                rows.append((cursor, block.bytes, block.requested, flags | BLOCK_FLAGS[block.state], ident))
                cursor += block.bytes
        if end > cursor:
            rows.append((cursor, end - cursor, 0, flags | at.UNMAPPED, -1))
        return np.asarray(rows, dtype=np.int64), segment

    def _initial_expandable(self, members: list[InitialSegment], which: int) -> tuple[int, int, int]:
        """Base, end and record of the ExpandableSegment around mapped ranges; unknown bounds begin at the lowest."""
        first, last = members[0], members[-1]
        page = sizes.SMALL_BUFFER if first.pool == "small" else self.settings.large_segment_size
        total = self.device.total_bytes
        base = first.va_address if first.va_address is not None else first.address
        size = first.va_bytes if first.va_bytes is not None else round_up(total + total // 8, page)
        size = max(size, round_up(last.address + last.bytes - base, page))
        if self.memory[at.PLACEMENT] != at.PLACE_DRIVER:
            self.memory[at.VA_TOP] = max(int(self.memory[at.VA_TOP]), round_up(base + size, driver.GRANULE))
        return base, base + size, int(engine.load_expandable(self.memory, base, size, page, which))

    def _pool_index(self, number: int) -> int:
        """The dense number of a pool that the trace calls `number`."""
        return 0 if number == 0 else 1 + int(np.searchsorted(self.program.pools, number))

    def _enter_pool(self, pool: int) -> None:
        """A private pool that the initial state mentions exists and is in use."""
        if self.memory[pool + at.P_PRIVATE] and not self.memory[pool + at.P_ALIVE]:
            self.memory[pool + at.P_ALIVE] = 1
            self.memory[pool + at.P_USE_COUNT] = 1
            self.memory[pool + at.P_CREATED] = self.memory[at.CREATED]
            self.memory[at.CREATED] += 1
        self.memory[pool + at.P_MALLOC_COUNT] += 1

    # --- running --------------------------------------------------------------------------------------------------

    def _words_needed(self) -> int:
        """`engine.words_needed`, as plain Python."""
        m = self.memory
        blocks = (int(m[at.LIVE_BLOCKS]) + 32) * (2 * at.BLOCK_COLUMNS + 16)
        return blocks + (int(m[at.LIVE_LEAVES]) + 8) * (at.LEAF_COLUMNS + 8)

    def _reserve(self, blocks: int, words: int = 0) -> None:
        """Make room for so many new blocks, for `words` more, and for what any one event may add after them."""
        top = int(self.memory[at.TOP])
        need = 2 * self._words_needed() + 200 * blocks + words
        missing = top + need - int(self.memory[at.ROOM])
        if missing > 0:
            grown = np.zeros(len(self.memory) + max(missing, len(self.memory)), dtype=np.int64)
            grown[:top] = self.memory[:top]
            grown[at.ROOM] += len(grown) - len(self.memory)  # what is set aside stays so
            self.memory = grown

    def _flush_log(self) -> None:
        """Take the log's entries out of the memory; give the log more room if one event could overrun it."""
        start, count = int(self.memory[at.LOG]), int(self.memory[at.LOGGED])
        entries = self.memory[start : start + count * at.L_COLUMNS].reshape(count, at.L_COLUMNS)
        self.log_parts.append(entries.copy())
        self.memory[at.LOGGED] = 0
        wanted = 8 * int(self.memory[at.LIVE_BLOCKS]) + 256
        if wanted > self.memory[at.LOG_ROOM]:
            self._reserve(0, wanted * at.L_COLUMNS)
            self.memory[at.LOG] = self.memory[at.TOP]
            self.memory[at.TOP] += wanted * at.L_COLUMNS
            self.memory[at.LOG_ROOM] = wanted

    def end_here(self) -> None:
        """The events from `index` on are never served: the program ends before them."""
        served = max(1, self.index)
        columns = ("ops", "idents", "args", "streams", "host_ns")
        cut: dict[str, Any] = {name: plain(getattr(self.program, name)[:served]) for name in columns}
        self.program = replace(self.program, events=self.program.events.take(slice(served)), **cut)
        self.out = self.out[:served]
        self.ended = True

    def log(self) -> Int64Array:
        """All entries logged so far, (entries, 5)."""
        self._flush_log()
        return np.concatenate(self.log_parts)

    def grow(self) -> None:
        """Give the memory and the log room for what any one event may add."""
        if self.memory[at.LOGGING]:
            self._flush_log()
        self._reserve(0)

    def step(self, stop: int, patient: int = -1) -> int:
        """Serve events up to `stop`, growing arrays as needed; the status of `engine.run` at `self.index`."""
        program = self.program
        before = time.monotonic()
        while True:
            status, self.index = engine.run(
                self.memory,
                self.ids.reshape(-1),
                program.ops,
                program.idents,
                program.args,
                program.streams,
                program.host_ns,
                self.out.reshape(-1),
                self.out.shape[1],
                self.index,
                min(stop, self.index + self.stretch),
                patient,
            )
            if status == at.GROW:
                self.grow()
            elif status != at.PAUSED or self.index == stop:
                return int(status)
            else:
                before = self._pace(before)

    def _pace(self, before: float) -> float:
        """Choose how many events the kernels get at once: so many that Python sees a Ctrl-C soon. The time now."""
        now = time.monotonic()
        if now - before < PATIENCE:
            self.stretch = min(2 * self.stretch, 1 << 20)
        elif now - before > 2 * PATIENCE:
            self.stretch = max(self.stretch // 4, 16)
        return now

    def serve_control(self, rank: int) -> tuple[str, Mapping[str, Any]] | None:
        """Serve the event at `index` that the kernel leaves to Python; a report, if it asked for one."""
        events = self.program.events
        op = Op(int(events.op[self.index]))
        report: tuple[str, Mapping[str, Any]] | None = None
        if op == Op.SET_MEMORY_FRACTION:
            self.set_fraction(float(events.floats("fraction")[self.index]))
        elif op == Op.SET_ALLOCATOR:
            conf = events.strings("conf").get(self.index) or ""
            self.apply(parse_conf(conf, self.release, self.settings))
        elif op == Op.ALLOC:
            self._take_over(int(self.program.idents[self.index]), int(events.ints("was")[self.index]))
        elif op in (Op.POOL_CHECKPOINT, Op.POOL_RESTORE):
            serve = self.checkpoint if op == Op.POOL_CHECKPOINT else self.restore
            serve(int(self.program.args[self.index]), int(events.ints("checkpoint")[self.index]))
        elif op == Op.SNAPSHOT:
            report = ("snapshot", self.snapshot_report())
        else:
            report = ("statistics", self.statistics_report())
        if self.memory[at.STOPPED]:
            raise self.undefined(rank)
        if len(self.program.host_ns):
            self.memory[at.HOST] += self.program.host_ns[self.index]
        engine.finish_event(self.memory, self.out.reshape(-1), self.out.shape[1], self.index)
        self.index += 1
        return report

    # --- checkpoints of private pools ---------------------------------------------------------------------------------

    def checkpoint(self, pool: int, number: int) -> None:
        """getCheckpointState of the private pool of dense number `pool`."""
        memory = self.memory
        engine.process_deferred(memory)
        owners = {int(block): ident for ident, block in enumerate(self.ids[:, 0].tolist()) if block > 0}
        segments: list[Int64Array] = []
        for head in self._segments_of(pool):
            rows = []
            block = head
            while block != 0:
                flags = memory[block + at.FLAGS]
                owner = owners[block] if flags & at.ALLOCATED else checkpoints.FREE
                owner = checkpoints.UNMAPPED if flags & at.UNMAPPED else owner
                rows.append((memory[block + at.PTR], memory[block + at.SIZE], owner, 0))
                block = int(memory[block + at.NEXT])
            segments.append(np.array(rows, dtype=np.int64))
        self.checkpoints[pool, number] = segments

    def _segments_of(self, pool: int) -> list[int]:
        """The first blocks of a pool's segments: of those that begin with a block in use, then of the others."""
        memory = self.memory
        record = memory[at.POOLS] + pool * at.P_COLUMNS
        used = [int(block) for block in self.ids[:, 0] if block > 0]
        used += [int(memory[node + at.N_BLOCK]) for node in self._pending_nodes()]
        mine = [
            block for block in (*used, *self.free_blocks()) if memory[memory[block + at.SET] + at.SET_POOL] == record
        ]
        heads = dict.fromkeys(block for block in mine if memory[block + at.PREV] == 0)
        return sorted(heads, key=lambda block: not memory[block + at.FLAGS] & at.BUSY)

    def restore(self, pool: int, number: int) -> None:
        """setCheckpointPoolState, after everything in the pool was freed; `restored` has what lives again."""
        segments = self.checkpoints[pool, number]
        self._reserve(sum(map(len, segments)))
        heads = {int(self.memory[block + at.PTR]): block for block in self._segments_of(pool)}
        self.restored = {}
        for rows in segments:
            if not self.memory[at.STOPPED]:
                checkpoints.restore_segment(self.memory, rows, heads.get(int(rows[0, checkpoints.C_ADDRESS]), 0))
            lives = rows[:, checkpoints.C_OWNER] >= 0
            self.restored.update(rows[lives][:, [checkpoints.C_OWNER, checkpoints.C_BLOCK]].tolist())

    def _take_over(self, ident: int, was: int) -> None:
        """An allocation gets the block that the trace's id `was` had at the checkpoint."""
        block = self.restored.pop(int(np.searchsorted(self.program.ids, was)), 0)
        if block:
            self.ids[ident] = block, self.memory[block + at.SIZE]
        else:
            self.memory[at.STOPPED] = at.STOP_RESTORE

    def undefined(self, rank: int) -> ReplayError:
        """The error for what PyTorch leaves undefined, met at `index`."""
        reasons = {
            at.STOP_SPLIT_RELEASED: "a split block would be released after max_split_size_mb was lowered at run time;"
            " this is undefined in PyTorch (it frees memory that is in use): keep the setting constant",
            at.STOP_EXPANDABLE_ASSERT: "releasing an expandable block is undefined in PyTorch"
            f" {self.release.text} (an internal assertion fails): leave out garbage_collection_threshold and"
            " max_split_size_mb",
            at.STOP_ODD_PAGE: "the driver refuses pages of this large_segment_size_mb, undefined in PyTorch"
            f" {self.release.text}: give a multiple of 2",
            at.STOP_CAPTURE: "empty_cache while a pool is open is undefined in PyTorch"
            f" {self.release.text} (an internal assertion fails): close the pool first",
            at.STOP_RESTORE: "the pool cannot get the blocks of the checkpoint, or an allocation takes over a block"
            " that none had then; this is undefined in PyTorch (it fails a check): free what lives in the pool first",
            at.STOP_ADDRESSES: "no address space is left: the device's va_base, addresses of the initial state or"
            " large_segment_size_mb are too large, or placement 'bump' went too far",
        }
        reason = reasons[int(self.memory[at.STOPPED])]
        return ReplayError(str(EventError(reason, rank=rank, index=self.index)))

    # --- reports --------------------------------------------------------------------------------------------------

    def stat(self, stat: int) -> dict[str, list[int]]:
        """[current, peak, allocated, freed] of a statistic for all, small_pool and large_pool."""
        return self._stat_row(at.STATS + stat * at.STAT_ROW)

    def _stat_row(self, start: int) -> dict[str, list[int]]:
        """The statistic whose row begins at `start`."""
        row = self.memory[start : start + at.STAT_ROW].tolist()
        pools = []
        for pool in range(2):
            current, allocated, peak, base = row[pool * at.ST_POOL : (pool + 1) * at.ST_POOL]
            pools.append([current, peak, allocated, base + allocated - current])
        both = [small + large for small, large in zip(*pools, strict=True)]
        both[1] = row[at.ST_PEAK_ALL]
        return {"all": both, "small_pool": pools[0], "large_pool": pools[1]}

    def statistics_report(self) -> dict[str, Any]:
        """Every statistic, nested as PyTorch's, each [current, peak, allocated, freed]."""
        report: dict[str, Any] = {}
        for stat, name in enumerate(at.STAT_NAMES):
            values = self.stat(stat)
            report[name] = values["all"] if name.startswith("oversize") else values
        scalars = self.memory
        report["num_alloc_retries"] = int(scalars[at.RETRIES])
        report["num_ooms"] = int(scalars[at.OOMS])
        report["num_sync_all_streams"] = int(scalars[at.SYNCS])
        report["num_device_alloc"] = int(scalars[at.DEVICE_ALLOCS])
        report["num_device_free"] = int(scalars[at.DEVICE_FREES])
        split = self.first_settings.max_split_size
        report["max_split_size"] = -1 if split >= at.UNLIMITED else split
        return report

    def memory_stats(self) -> dict[str, int]:
        """The flat dictionary of `torch.cuda.memory_stats`, with the counters that the release has."""
        report = self.statistics_report()
        if not self.release.has_device_counters:
            for name in ("num_sync_all_streams", "num_device_alloc", "num_device_free"):
                del report[name]
        if self.release.throw_on_cudamalloc_oom_option:
            report["num_oom_rejections"] = int(self.memory[at.REJECTIONS])
        flat: dict[str, int] = {}
        for name, value in report.items():
            if isinstance(value, dict):
                for pool, numbers in value.items():
                    _flatten(flat, f"{name}.{pool}", numbers)
            elif isinstance(value, list):
                _flatten(flat, name, value)
            else:
                flat[name] = value
        if self.release.has_private_pool_stats:
            for pool in range(1, self.program.num_pools):
                record = int(self.memory[at.POOLS]) + pool * at.P_COLUMNS
                if self.memory[record + at.P_EVER]:
                    name = f"reserved_bytes_by_private_pools.0_{self.program.pools[pool - 1]}"
                    for part, numbers in self._stat_row(record + at.P_RESERVED).items():
                        _flatten(flat, f"{name}.{part}", numbers)
        return dict(sorted(flat.items()))

    def segments(self) -> list[dict[str, Any]]:
        """Every mapped range in address order, with its blocks: section 7.2 with `large` and `expandable` as flags."""
        m = self.memory
        pools = [0, *self.program.pools.tolist()]
        segments: list[dict[str, Any]] = []
        for head in self._heads():
            which = m[head + at.SET]
            run: list[list[Any]] = []
            block = head
            while block != 0 and not m[block + at.FLAGS] & at.UNMAPPED:
                flags = int(m[block + at.FLAGS])
                state = "allocated" if flags & at.ALLOCATED else "pending_free" if flags & at.PENDING else "inactive"
                run.append([int(m[block + at.SIZE]), int(m[block + at.REQUESTED]), state, 0])
                block = int(m[block + at.NEXT])
            active = [piece for piece in run if piece[2] != "inactive"]
            segments.append(
                {
                    "address": int(m[head + at.PTR]),
                    "total_size": sum(piece[0] for piece in run),
                    "allocated_size": sum(piece[0] for piece in run if piece[2] == "allocated"),
                    "active_size": sum(piece[0] for piece in active),
                    "requested_size": sum(piece[1] for piece in active),
                    "stream": int(m[m[which + at.SET_STREAM] + at.S_VALUE]),
                    "large": bool(m[head + at.FLAGS] & at.LARGE),
                    "expandable": bool(m[head + at.FLAGS] & at.IS_EXPANDABLE),
                    "blocks": run,
                    "pool_id": pools[(int(m[which + at.SET_POOL]) - int(m[at.POOLS])) // at.P_COLUMNS],
                }
            )
        return sorted(segments, key=lambda segment: int(segment["address"]))

    def _heads(self) -> list[int]:
        """First blocks of all mapped ranges: found from every allocation and every free block."""
        m = self.memory
        pending = [int(m[node + at.N_BLOCK]) for node in self._pending_nodes()]
        seen = {int(block) for block in self.ids[self.ids[:, 0] > 0, 0]}
        starts = (
            {block for block in seen if m[block + at.FLAGS] & at.ALLOCATED} | set(pending) | set(self.free_blocks())
        )
        starts |= {block for block in seen if m[block + at.FLAGS] & at.PENDING}
        heads = set()
        for start in starts:
            block = start
            while m[block + at.PREV] != 0 and not m[m[block + at.PREV] + at.FLAGS] & at.UNMAPPED:
                block = int(m[block + at.PREV])
                if block in starts and block != start:
                    break
            else:
                heads.add(block)
        return sorted(heads)

    def _pending_nodes(self) -> list[int]:
        """The nodes of all recorded events and of frees deferred by a capture."""
        m = self.memory
        heads = [int(m[m[at.STREAMS] + i * at.S_COLUMNS + at.S_HEAD]) for i in range(int(m[at.NUM_STREAMS]))]
        nodes = []
        for node in [*heads, int(m[at.DEFERRED])]:
            while node != 0:
                nodes.append(node)
                node = int(m[node + at.N_NEXT])
        return nodes

    def free_blocks(self) -> list[int]:
        """The blocks of all free sets."""
        m = self.memory
        blocks: list[int] = []
        for i in range(int(m[at.NUM_POOLS]) * 2 * int(m[at.NUM_STREAMS])):
            which = m[at.SETS] + i * at.SET_COLUMNS
            for place in range(int(m[which + at.SET_COUNT])):
                leaf = m[m[which + at.SET_DIRECTORY] + place]
                blocks += m[leaf + at.LEAF_BLOCKS :][: m[leaf + at.LEAF_COUNT]].tolist()
        return blocks

    def snapshot_report(self) -> dict[str, Any]:
        """What a `snapshot` event reports: settings in force, and the segments."""
        settings = self.settings
        unlimited = settings.max_split_size >= at.UNLIMITED
        return {
            "settings": {
                "conf": settings.conf,
                "max_split_size": 2**64 - 1 if unlimited else settings.max_split_size,
                "garbage_collection_threshold": settings.garbage_collection_threshold,
                "expandable_segments": settings.expandable_segments,
                "roundup_power2_divisions": list(settings.roundup_power2_divisions),
            },
            "segments": [
                {name: value for name, value in segment.items() if name != "pool_id"} for segment in self.segments()
            ],
        }


def _flatten(flat: dict[str, int], name: str, numbers: list[int]) -> None:
    """Enter a Stat under PyTorch's flat names."""
    for kind, number in zip(("current", "peak", "allocated", "freed"), numbers, strict=True):
        flat[f"{name}.{kind}"] = number


def _address_ranges(initial: Initial) -> list[list[InitialSegment]]:
    """The initial segments, with mapped ranges of one ExpandableSegment together, in order of creation."""
    groups: list[list[InitialSegment]] = []
    known: dict[tuple[Any, ...], list[InitialSegment]] = {}
    for segment in initial.segments:
        if not segment.expandable:
            groups.append([segment])
            continue
        key = (segment.stream, segment.pool, segment.pool_id, segment.va_address)
        if key not in known:
            known[key] = []
            groups.append(known[key])
        known[key].append(segment)
    for group in groups:
        group.sort(key=lambda segment: segment.address)
    return groups
