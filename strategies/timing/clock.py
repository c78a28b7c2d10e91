"""How long kernels and collectives take: the `duration_ns` of a trace's events.

Kernels follow a roofline (`strategies.timing.roofline`). Collectives follow the alpha-beta model of a ring or a double
binary tree, whichever is faster, as NCCL chooses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log2
from typing import TYPE_CHECKING, Final

import numpy as np

from graph.hardware.gpus import Gpu, gpu
from strategies.timing.links import LINKS, Link, link, ways
from strategies.timing.roofline import Speed
from traces.errors import ConfigError
from traces.model import Events, Op, RankEvents, Trace

if TYPE_CHECKING:
    from strategies.timing.roofline import Speed
    from traces.model import Int64Array

NANO: Final = 1e9
#: What NCCL takes to start a ring or a tree (baseLat of src/graph/tuning.cc, Simple protocol).
RING_START: Final = 8.4e-6
TREE_START: Final = 14.0e-6

#: Nanoseconds of the host for one launch: eager PyTorch's dispatch, autograd's node and the launch take 5 to 15 us.
LAUNCH_NS: Final = 8_000

KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send", "receive")


@dataclass(frozen=True, slots=True)
class Topology:
    """How ranks are wired: `inside` a machine of `machine` GPUs, and `between` machines (for each GPU)."""

    inside: Link
    between: Link
    machine: int = 8

    @classmethod
    def of(cls, name: str, *, between: str = "infiniband-hdr", machine: int = 8) -> Topology:
        """The usual machine of a GPU: its own link inside. Raises ConfigError for unknown names or sizes below 1."""
        if machine < 1:
            raise ConfigError(f"a machine of {machine} GPUs: there must be at least 1")
        return cls(link(gpu(name).link), link(between), machine)

    def crossing(self, ranks: tuple[int, ...]) -> bool:
        """Whether a group of ranks spans machines (ranks fill machines in order)."""
        return len({rank // self.machine for rank in ranks}) > 1


def collective_ns(kind: str, size: int, ranks: int, way: Link) -> int:
    """Nanoseconds of a collective among `ranks` over `way`; `size` is the bytes of the whole, gathered or unreduced.

    A ring moves (n - 1) / n of the bytes through every GPU for each pass (all-reduce: two), in n - 1 steps; a tree
    moves all of them up and down in log2(n) levels each. One rank takes no time.

    Raises ConfigError for an unknown kind.
    """
    if kind not in KINDS:
        raise ConfigError(f"no collective {kind!r} is known; these are: {', '.join(KINDS)}")
    if ranks <= 1 or size <= 0:
        return 0
    steps = ranks - 1
    part = steps / ranks * size * way.beta
    if kind == "all_reduce":
        ring = RING_START + 2 * (steps * way.alpha + part)
        tree = TREE_START + 2 * (ceil(log2(ranks)) * way.alpha + size * way.beta)
        return round(min(ring, tree) * NANO)
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return round((RING_START + steps * way.alpha + part) * NANO)
    if kind in ("broadcast", "reduce"):
        return round((RING_START + steps * way.alpha + size * way.beta) * NANO)
    return round((RING_START + way.alpha + size * way.beta) * NANO)


@dataclass(frozen=True, slots=True)
class Clock:
    """The speeds of one run: a card, how its ranks are wired, and its way to the host. Strategies ask it for every
    duration.
    """

    card: Gpu
    topology: Topology
    host: Link = LINKS["pcie4"]

    @classmethod
    def of(cls, name: str, *, between: str = "infiniband-hdr", machine: int = 8) -> Clock:
        """The clock of a GPU by its name in traces, in machines as `Topology.of` has them."""
        return cls(gpu(name), Topology.of(name, between=between, machine=machine), link(ways(name, "pcie")[0]))

    @classmethod
    def connected(cls, name: str, interconnect: str = "") -> Clock:
        """The clock of a GPU whose ranks meet over `interconnect`.

        That is nvlink, pcie, infiniband, ethernet, or a link's name, in upper or lower case. nvlink and pcie are of the
        GPU's generation, inside machines of 8, which InfiniBand joins; infiniband and ethernet join all GPUs. Without
        it GPUs have the link of their usual machine. Raises ConfigError for an unknown way, and for nvlink where the
        GPU has none.
        """
        inside, between = ways(name, interconnect)
        alone = interconnect.lower().partition("-")[0] in ("infiniband", "ethernet")
        topology = Topology(link(inside), link(between), 1 if alone else 8)
        return cls(gpu(name), topology, link(ways(name, "pcie")[0]))

    def speed(self) -> Speed:
        """The kernels' speed, by type of number."""
        return Speed.of(self.card, 1 / self.host.beta)

    def collective(self, kind: str, size: int, ranks: tuple[int, ...]) -> int:
        """Nanoseconds of a collective among these ranks: over the slowest way that its ring takes."""
        way = self.topology.between if self.topology.crossing(ranks) else self.topology.inside
        return collective_ns(kind, size, len(ranks), way)


# Collectives and waits of a trace ------------------------------------------------------------------------------------

#: What kinds of trace events are among `KINDS`; a barrier and the like are all-reduces of next to nothing.
SAME: Final = {
    "send_recv": "send", "recv": "receive", "gather": "all_gather", "scatter": "broadcast", "barrier": "all_reduce",
}  # fmt: skip
#: From this stream on nobody waits for a collective before the phase ends, where the trace does not say who waits.
_LATE: Final = 900


def timed(trace: Trace, clock: Clock) -> Trace:
    """A trace with durations of its collectives, launches of the host, and the waits that collectives imply.

    A collective on a stream of its own starts after what is on stream 0. Where the trace has no `wait_stream` of that
    stream, stream 0 waits for the collective at once (Gemini), or at the next phase (DDP, whose hooks do not wait).
    """
    entries = tuple(replace(entry, events=_with_collectives(entry, trace, clock)) for entry in trace.ranks)
    devices = tuple(replace(device, launch_ns=LAUNCH_NS) for device in trace.devices)
    return replace(trace, ranks=entries, devices=devices)


def _with_collectives(entry: RankEvents, trace: Trace, clock: Clock) -> Events:
    events = entry.events
    places = np.flatnonzero(events.op == Op.COLLECTIVE)
    if not len(places):
        return events
    kinds, groups, size = events.strings("kind"), events.strings("group"), events.ints("bytes")
    duration = events.ints("duration_ns").copy()
    first = entry.ranks[0]
    members = {name: next((part for part in parts if first in part), ()) for name, parts in trace.groups.items()}
    known: dict[tuple[str, str, int], int] = {}
    for place in places.tolist():
        kind, group, count = kinds.get(place) or "", groups.get(place) or "", int(size[place])
        key = (kind, group, count)
        if key not in known:
            ranks = members.get(group, ())
            known[key] = clock.collective(SAME.get(kind, kind), count, ranks)
        duration[place] = known[key]
    return _with_waits(Events(events.op, {**events.columns, "duration_ns": duration}), places)


def _with_waits(events: Events, places: Int64Array) -> Events:
    """The events with waits around those collectives whose streams the trace never waits for."""
    stream, on = events.ints("stream"), events.ints("on")
    waits = events.op == Op.WAIT_STREAM
    told = {0, *stream[waits].tolist(), *on[waits].tolist()}
    phases = np.flatnonzero(events.op == Op.PHASE)
    added: dict[tuple[int, int, int], None] = {}  # place before which, stream, on: once each, in order
    for place in places.tolist():
        number = int(stream[place])
        if number not in told:
            added[place, number, 0] = None
            after = place + 1
            if number >= _LATE:
                following = np.searchsorted(phases, place)
                after = int(phases[following]) if following < len(phases) else len(events)
            added[after, 0, number] = None
    return _inserted(events, sorted(added)) if added else events


def _inserted(events: Events, waits: list[tuple[int, int, int]]) -> Events:
    """The events with `wait_stream`s: (place before which, stream, stream waited for) each."""
    where, stream, on = np.asarray(waits, dtype=np.int64).T
    added = np.full(len(waits), Op.WAIT_STREAM, dtype=np.uint8)
    return events.insert(where, Events(added, {"stream": stream, "on": on}))
