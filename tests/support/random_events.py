"""Random but legal event sequences for the allocator, dense in ties, boundaries and pressure.

Nothing here depends on how an allocator serves the events: a sequence is legal whatever fails in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tests.oracles.naive_settings import NaiveSettings, release_number
from tests.support.observed import Row, Setup

KIB = 1 << 10
MIB = 1 << 20

RELEASES = tuple(f"2.{minor}" for minor in range(16))
#: Sizes at which some rule changes its mind, and plain ones that recur and so make ties.
BOUNDARIES = (
    *(1, 511, 512, 513, 1024, 2049, 4097),
    *(size + change for size in (MIB, 2 * MIB, 10 * MIB, 20 * MIB) for change in (-512, -1, 0, 1, 512)),
    *(size * MIB for size in (3, 4, 5, 9, 12, 16, 18, 19, 21, 24, 30, 32, 40, 41, 60, 64, 100, 128)),
    *((1 << power) + change for power in (12, 16, 19, 21, 22, 25, 26) for change in (-1, 1, 1 << (power - 3))),
)
TIES = (512, 512 * KIB, 256 * KIB, MIB, 2 * MIB, 5 * MIB, 10 * MIB, 20 * MIB)
DEVICES = (24 * MIB, 44 * MIB, 64 * MIB, 100 * MIB, 160 * MIB, 300 * MIB, 1000 * MIB, 123456789, 4 << 30)
FRACTIONS = (0.0, 0.2, 0.333, 0.5, 0.55, 0.8, 0.9999999, 1.0)
STREAMS = (0, 1, 2, 3, 4)


def random_conf(random: Random, release: str, settings: NaiveSettings | None = None) -> str:
    """A legal settings string of `release`, to follow `settings` (None: at process start)."""
    number = release_number(release)
    large = settings.large_segment_size // MIB if settings else 20
    options: dict[str, str] = {}
    if number >= (2, 11) and random.random() < 0.25:
        large = random.choice((11, 12, 20, 22, 32, 64, 25))
        options["large_segment_size_mb"] = str(large)
    least = 21 if number <= (2, 9) else large
    if random.random() < 0.4:
        options["max_split_size_mb"] = str(random.choice([m for m in (20, 21, 24, 32, 40, 64, 100) if m >= least]))
    if number >= (2, 6) and random.random() < 0.2:
        options["max_non_split_rounding_mb"] = str(random.choice([m for m in (21, 30, 64, 100) if m >= least]))
    if random.random() < 0.3:
        options["garbage_collection_threshold"] = random.choice(("0.2", "0.5", "0.7", "0.99"))
    if random.random() < 0.3:
        options["roundup_power2_divisions"] = random.choice(("1", "2", "4", "8", "[1:4,4:2,16:8,>:1]", "[2:8,8:2]"))
    if number >= (2, 1) and random.random() < 0.5:
        options["expandable_segments"] = random.choice(("True", "True", "False"))
    if number >= (2, 10) and random.random() < 0.15:
        options["per_process_memory_fraction"] = random.choice(("0.4", "0.75", "1.0"))
    if number >= (2, 12) and random.random() < 0.15:
        options["throw_on_cudamalloc_oom"] = random.choice(("True", "True", "False"))
    items = list(options.items())
    random.shuffle(items)
    return ",".join(f"{name}:{value}" for name, value in items)


def random_setup(random: Random, release: str | None = None) -> Setup:
    """A release, settings and a device."""
    release = release or random.choice(RELEASES)
    return Setup(
        release,
        random_conf(random, release),
        random.choice(DEVICES),
        placement=random.choice(("first-fit", "first-fit", "bump")),
    )


def random_fraction(random: Random, total: int) -> float:
    """A memory fraction: a plain one, or one that makes a limit just below, at or above whole segments."""
    if random.random() < 0.5:
        return random.choice(FRACTIONS)
    limit = random.choice((20, 22, 40, 42, 60, 80)) * MIB + random.choice((-0.6, -0.3, 0.0, 0.3))
    return min(limit / total, 1.0)


@dataclass
class Pools:
    """Which calls on private pools are legal."""

    uses: dict[int, int] = field(default_factory=dict)
    scopes: list[int] = field(default_factory=list)

    def usable(self) -> list[int]:
        return [pool for pool, uses in self.uses.items() if uses > 0]

    def fresh(self) -> int:
        """A number that no pool had yet; numbers are not dense."""
        return 3 * len(self.uses) + 2


class Script:
    """Grows a legal sequence of events, row by row."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.rows: list[Row] = []
        self.settings = NaiveSettings(release_number(setup.release))
        self.settings.parse(setup.conf)
        self.ids = 0
        self.alive: list[int] = []
        self.freed: list[int] = []
        self.pools = Pools()

    def add(self, *row: object) -> None:
        self.rows.append(list(row))

    def malloc(self, bytes_: int, stream: int) -> None:
        self.add("m", self.ids, bytes_, stream)
        self.alive.append(self.ids)
        self.ids += 1

    def free(self, position: int) -> None:
        """Free the allocation at a position (any number) of those alive."""
        if self.alive:
            id_ = self.alive.pop(position % len(self.alive))
            self.add("f", id_)
            self.freed.append(id_)

    def record_stream(self, position: int, stream: int) -> None:
        if self.alive:
            self.add("r", self.alive[position % len(self.alive)], stream)

    def complete_free(self, position: int) -> None:
        """Complete a free that may be pending."""
        if self.freed:
            self.add("cf", self.freed.pop(position % len(self.freed)))

    def set_allocator(self, conf: str) -> None:
        self.settings.parse(conf)
        self.add("o", conf)

    def empty_cache(self) -> None:
        self.add("c")

    def pool_create(self, no_split: bool, use_on_oom: bool) -> None:
        pool = self.pools.fresh()
        self.pools.uses[pool] = 1
        self.add("pc", pool, no_split, use_on_oom)

    def pool_begin(self, position: int) -> None:
        """Open the scope of a pool that is in use and not open."""
        closed = [pool for pool in self.pools.usable() if pool not in self.pools.scopes]
        if closed:
            pool = closed[position % len(closed)]
            self.pools.uses[pool] += 1
            self.pools.scopes.append(pool)
            self.add("pb", pool)

    def pool_end(self, position: int) -> None:
        """Close a scope and give its use back."""
        if self.pools.scopes:
            pool = self.pools.scopes.pop(position % len(self.pools.scopes))
            self.pools.uses[pool] -= 1
            self.add("pe", pool)
            self.add("pr", pool)

    def pool_release(self, position: int) -> None:
        """Give a use of a closed pool back."""
        closed = [pool for pool in self.pools.usable() if pool not in self.pools.scopes]
        if closed:
            pool = closed[position % len(closed)]
            self.pools.uses[pool] -= 1
            self.add("pr", pool)


def random_rows(random: Random, setup: Setup, events: int) -> list[Row]:
    """About `events` rows: a workload drawn at random, with the rarer events now and then."""
    script = Script(setup)
    draw = SequenceDraw(random, script)
    while len(script.rows) < events:
        draw.step()
    return script.rows


class SequenceDraw:
    """The habits of one random sequence: its sizes, streams, and how often rare things happen."""

    def __init__(self, random: Random, script: Script) -> None:
        self.random = random
        self.script = script
        self.streams = random.choice(((0,), (0,), (0, 1), STREAMS))
        self.sizes = random.sample(BOUNDARIES, 5) + random.sample(TIES, 2)
        self.high = random.choice((4, 10, 30, 80))
        self.largest = random.choice((64 * KIB, 2 * MIB, 30 * MIB, 200 * MIB))
        self.rare: list[tuple[float, Callable[[], None]]] = [
            (self.often(0.2, of=len(self.streams) > 1), self.record),
            (self.often(0.1, of=len(self.streams) > 1), self.events),
            (self.often(0.02), script.empty_cache),
            (self.often(0.02), self.device),
            (self.often(0.02), self.set_allocator),
            (self.often(random.choice((0.05, 0.2)), chance=0.35), self.pool),
            (self.often(0.02), self.report),
        ]

    def often(self, rate: float, *, of: bool = True, chance: float = 0.6) -> float:
        return rate if of and self.random.random() < chance else 0.0

    def step(self) -> None:
        random, script = self.random, self.script
        for rate, action in self.rare:
            if random.random() < rate:
                action()
        if len(script.alive) < self.high and (not script.alive or random.random() < 0.55):
            script.malloc(self.size(), random.choice(self.streams))
        elif random.random() < 0.2:
            script.free(-1)
        else:
            script.free(random.randrange(1 << 16))

    def size(self) -> int:
        """A request: mostly a recurring size, else any up to the largest, rarely an absurd one."""
        random = self.random
        draw = random.random()
        if draw < 0.7:
            return random.choice(self.sizes)
        if draw < 0.72:
            return random.choice((0, 1 << 60, (1 << 60) - 1, 1 << 45, self.script.setup.total_bytes, 3 << 30))
        return int(self.largest ** random.random()) + random.randrange(3)

    def record(self) -> None:
        self.script.record_stream(self.random.randrange(1 << 16), self.random.choice(self.streams))

    def events(self) -> None:
        random, script = self.random, self.script
        draw = random.random()
        if draw < 0.4:
            script.add("e", int(random.random() < 0.7))
        elif draw < 0.7:
            script.add("d", random.choice(self.streams))
        elif draw < 0.8:
            script.add("y", random.choice((None, *self.streams)))
        else:
            script.complete_free(random.choice((-1, random.randrange(1 << 16))))

    def device(self) -> None:
        random, total = self.random, self.script.setup.total_bytes
        if random.random() < 0.5:
            self.script.add("g", random_fraction(random, total))
        else:
            self.script.add("u", random.choice((0, total // 4, total // 2, total, total // 3 + 1)))

    def set_allocator(self) -> None:
        self.script.set_allocator(random_conf(self.random, self.script.setup.release, self.script.settings))

    def pool(self) -> None:
        random, script = self.random, self.script
        draw = random.random()
        if draw < 0.2 or not script.pools.usable():
            script.pool_create(random.random() < 0.3, random.random() < 0.4)
        elif draw < 0.5:
            script.pool_begin(random.randrange(8))
        elif draw < 0.85:
            script.pool_end(random.randrange(8))
        else:
            script.pool_release(random.randrange(8))

    def report(self) -> None:
        self.script.add(self.random.choice(("s", "x", "a", "p")))
