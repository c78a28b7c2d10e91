"""Random traces, valid or nearly so, of the largest, smallest and oddest numbers that the format allows."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.support.random_events import RELEASES, random_conf

Event = dict[str, Any]

MIB = 1 << 20
MOST = (1 << 63) - 1
IDS = (0, 1, 2, 5, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 62, MOST - 1, MOST)
STREAMS = (0, 0, 0, 1, 2, 7, 1 << 31, 1 << 62, MOST)
POOLS = (1, 2, 3, 1 << 31, 1 << 32, MOST)
SIZES = (0, 1, 511, 512, 513, MIB, MIB + 1, 2 * MIB, 3 * MIB, 10 * MIB - 1, 10 * MIB, 20 * MIB, 100 * MIB, 1 << 30)
LARGE = (1 << 36, 1 << 43, (1 << 60) - 1, 1 << 60, 1 << 62, MOST)
TIMES = (0, 1, 1000, 10**9, 1 << 40, 1 << 55)
#: Options at the ends of what the parsers take, by the oldest minor release that knows them.
CONFS = (
    (0, "max_split_size_mb:2147483647"),
    (0, "garbage_collection_threshold:1e-300"),
    (0, "roundup_power2_divisions:1073741824"),
    (1, "expandable_segments:True"),
    (1, "expandable_segments:True,garbage_collection_threshold:0.0000001"),
    (10, "max_split_size_mb:18446744073709551615,max_non_split_rounding_mb:18446744073709551615"),
    (10, "roundup_power2_divisions:9223372036854775808"),
    (10, "roundup_power2_divisions:[1:18014398509481984,2:36028797018963968,>:9223372036854775808]"),
    (10, "per_process_memory_fraction:1e-300"),
    (10, "per_process_memory_fraction:0,expandable_segments:True"),
    (11, "large_segment_size_mb:18446744073709551615"),
    (11, "large_segment_size_mb:18446744073709551615,expandable_segments:True"),
    (11, "large_segment_size_mb:11,expandable_segments:True,max_split_size_mb:11"),
    (12, "throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.0000001"),
    (15, "expandable_segments_reserve:1e-300,expandable_segments:True"),
    (15, "expandable_segments_reserve:1e300G,expandable_segments:True"),
)


def extreme_document(random: Random, events: int = 40) -> dict[str, Any]:
    """A trace as a JSON document whose events are rows."""
    release = random.choice(RELEASES)
    numbers = random.sample((0, 1, 2, 3, (1 << 31) - 1), random.choice((1, 1, 2, 3)))
    groups: dict[str, Any] = {"g": numbers, "alone": [[number] for number in numbers]} if random.random() < 0.5 else {}
    ranks = []
    same = Script(random, groups, release).events(events)
    for number in numbers:
        own = Script(random, groups, release)
        entry: dict[str, Any] = {"rank": number}
        if random.random() < 0.4:
            entry["initial"] = {"segments": own.initial()}
            entry["events"] = own.events(events)
        else:
            entry["events"] = same if random.random() < 0.5 else own.events(events)
        ranks.append(entry)
    document: dict[str, Any] = {"format": "memory-trace", "version": 1, "groups": groups, "ranks": ranks}
    document["allocator"] = {"release": release, "conf": extreme_conf(random, release)}
    if random.random() < 0.9:
        document["devices"] = [extreme_device(random)]
    return document


def extreme_conf(random: Random, release: str) -> str:
    """A settings string that the release takes."""
    draw = random.random()
    if draw < 0.2:
        return ""
    if draw < 0.5:
        return random_conf(random, release)
    minor = int(release.split(".")[1])
    return random.choice([conf for since, conf in CONFS if since <= minor])


def extreme_device(random: Random) -> Event:
    """A device of 1 byte to 8 TiB, anywhere in the address space."""
    total = random.choice((1, 64 * MIB, 1 << 30, 1 << 36, 1 << 43, 1 << 43))
    device: Event = {"name": "toy", "total_bytes": total, "context_bytes": random.choice((0, 0, 1, total // 2, total))}
    device["va_base"] = random.choice((512, 2 * MIB, 1 << 40, 0x7F0000000000, (1 << 62) - 512))
    device["placement"] = random.choice(("first-fit", "first-fit", "bump", "recorded"))
    device["launch_ns"] = random.choice((0, 0, 1, 10**12))
    if random.random() < 0.4:
        near = random.choice((512, 1 << 40, (1 << 62) - 512))
        device["segment_addresses"] = [near - 512 * random.choice((0, 0, 0, 1)) for _ in range(random.randrange(9))]
        device["segment_addresses"] = [address for address in device["segment_addresses"] if address > 0]
    return device


class Script:
    """The events of one rank, and what must be kept in mind for them to be valid."""

    def __init__(self, random: Random, groups: dict[str, Any], release: str) -> None:
        self.random = random
        self.groups = groups
        self.release = release
        self.timed = random.random() < 0.5
        self.fresh = [*random.sample(IDS, len(IDS)), *range(10**6, 10**6 + 200)]
        self.alive: list[int] = []
        self.freed: list[int] = []
        self.uses: dict[int, int] = {}
        self.open: list[int] = []

    def initial(self) -> list[Event]:
        """Segments that the rank begins with: tiny, huge, odd, next to each other, with or without known spaces."""
        random = self.random
        segments: list[Event] = []
        address = random.choice((512, 2 * MIB, 1 << 40, 1 << 61))
        for _ in range(random.randrange(1, 5)):
            blocks = [self.block() for _ in range(random.choice((1, 1, 2, 5)))]
            size = sum(block[1] for block in blocks)
            if address + size >= 1 << 62:
                continue
            segment: Event = {"address": address, "bytes": size, "blocks": blocks}
            segment["stream"] = random.choice(STREAMS)
            segment["pool"] = random.choice(("small", "large"))
            if random.random() < 0.3:
                segment["pool_id"] = random.choice((0, *POOLS))
            if random.random() < 0.5:
                segment["expandable"] = True
                if random.random() < 0.7:
                    low = max(512, address - 512 * random.choice((0, 0, 1, 4096)))
                    high = address + size + random.choice((0, 1, 512, 20 * MIB, 1 << 45))
                    segment |= {"va_address": low, "va_bytes": min(high, 1 << 62) - low}
            segments.append(segment)
            address += -(-size // 512) * 512 + random.choice((0, 0, 512, 2 * MIB, 1 << 45))
        random.shuffle(segments)
        return segments

    def block(self) -> list[Any]:
        """A block of the initial state."""
        random = self.random
        size = random.choice((1, 511, 512, 512, 1000, 4096, MIB, 2 * MIB, 20 * MIB, 1 << 40, 1 << 60))
        state = random.choice(("inactive", "active_allocated", "active_pending_free"))
        if state == "inactive":
            return [None, size, random.choice((0, 1, MOST)), state]
        number = self.fresh.pop(0)
        (self.alive if state == "active_allocated" else self.freed).append(number)
        return [number, size, random.choice((0, 1, size)), state]

    def events(self, count: int) -> list[Event]:
        """About so many events."""
        found: list[Event] = []
        while len(found) < count:
            event = self.event()
            if event is not None:
                if self.random.random() < 0.1:
                    event["host_ns"] = self.random.choice(TIMES)
                found.append(event)
        return found

    def event(self) -> Event | None:
        """The next event, or None where the one that was drawn is not valid now."""
        random = self.random
        draw = random.random()
        if draw < 0.35 and self.fresh:
            number = self.fresh.pop(0)
            self.alive.append(number)
            size = random.choice(LARGE if random.random() < 0.03 else SIZES)
            return {"op": "alloc", "id": number, "bytes": size, "stream": random.choice(STREAMS)}
        if draw < 0.55:
            if not self.alive:
                return None
            number = self.alive.pop(random.randrange(len(self.alive)))
            self.freed.append(number)
            return {"op": "free", "id": number}
        if draw < 0.65:
            used = {"id": random.choice(self.alive), "stream": random.choice(STREAMS)} if self.alive else None
            return used and {"op": "record_stream", **used}
        if draw < 0.7:
            return {"op": "complete_free", "id": self.freed.pop()} if self.freed else None
        return self.pool() if draw < 0.77 else self.rare()

    def pool(self) -> Event | None:
        """A step in the life of a private pool."""
        random, pool = self.random, self.random.choice(POOLS)
        op = random.choice(("pool_create", "pool_begin", "pool_begin", "pool_end", "pool_release"))
        if op == "pool_end":
            return {"op": op, "pool": self.open.pop(random.randrange(len(self.open)))} if self.open else None
        if op == "pool_release":
            if not self.uses.get(pool):
                return None
            self.uses[pool] -= 1
            return {"op": op, "pool": pool}
        if op == "pool_begin":
            if pool in self.open:
                return None
            self.open.append(pool)
        self.uses[pool] = self.uses.get(pool, 0) + 1
        flags = {"no_split": random.random() < 0.3, "use_on_oom": random.random() < 0.3} if op == "pool_create" else {}
        return {"op": op, "pool": pool, **flags}

    def rare(self) -> Event | None:
        """Any other event."""
        random = self.random
        stream = {"stream": random.choice(STREAMS)}
        kinds: list[Event] = [
            {"op": "hold_events", "hold": random.random() < 0.6},
            {"op": "complete_events", **stream},
            {"op": "synchronize", **(stream if random.random() < 0.5 else {})},
            {"op": "empty_cache"},
            {"op": "empty_cache"},
            {"op": "reset_peak"},
            {"op": "reset_accumulated"},
            {"op": "set_memory_fraction", "fraction": random.choice((0, 1e-300, 0.5, 0.999999999999, 1))},
            {"op": "set_allocator", "conf": extreme_conf(random, self.release)},
            {"op": "other_process", "bytes": random.choice((0, 0, 0, MIB, 1 << 36, 1 << 62, MOST))},
            {"op": "snapshot"},
            {"op": "statistics"},
            {"op": "phase", "name": random.choice(("forward", "\x1b[31m<b>&")), "step": random.choice((0, MOST))},
            {"op": "wait_stream", **stream, "on": random.choice(STREAMS)},
        ]
        if self.timed:
            kinds += [{"op": "kernel", **stream, "duration_ns": random.choice(TIMES)}] * 4
        if self.groups:
            kinds += [{"op": "collective", **stream, "group": random.choice(("g", "alone")), "duration_ns": 5}] * 2
        return random.choice(kinds)
