"""How long a training step takes, by a simulation of host, streams and links over the events of each rank.

Kernels last as `strategies.timing` says (a roofline over their operations and bytes moved), collectives as a ring or a
tree does. The host issues operators one by one, so that many small ones are bound by it. What overlaps is what the
method lets overlap: its streams and their waits decide, as they do on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from traces.errors import ConfigError
from traces.model import Op

if TYPE_CHECKING:
    from graph.case import Case
    from strategies.single import Speed
    from strategies.timing import Clock
    from traces.model import Events, RankEvents, Trace

#: Nanoseconds that the host takes to issue an operator: dispatch, autograd's node, the launch (Python and C++ of eager
#: PyTorch on a server's core; 5 to 15 us are usual).
HOST_NS: Final = 8_000
#: Methods whose collectives nobody waits for until the backward ends: gradients meet in buckets on NCCL's stream.
LATE: Final = frozenset({"ddp", "ddp-view", "zero1"})
#: Methods that wait for every collective where they call it.
WAITING: Final = frozenset({"gemini", "tp", "tp-sp"})
#: What the kinds of the traces are among those of `strategies.timing`.
KINDS: Final[Mapping[str, str]] = {"send_recv": "send", "all_to_all_single": "all_to_all", "scatter": "broadcast"}
#: The stream of NCCL in this simulation.
_NCCL: Final = -2


def speed_of(case: Case, clock: Clock) -> Speed:
    """The speed of the kernels of a case: products in its 16-bit type where it has one, everything else by bytes."""
    from strategies.single import Speed
    from strategies.timing import MEMORY_SHARE, NANO, PLAIN_SHARE, START, TENSOR_SHARE

    short = case.autocast or (case.compute if case.quant else "") or case.dtype
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(short, "float32")
    peak = clock.card.flops(dtype)
    share = TENSOR_SHARE if peak > clock.card.single else PLAIN_SHARE
    return Speed(peak * share, clock.card.memory * MEMORY_SHARE, round(START * NANO))


def step_seconds(trace: Trace, case: Case, clocks: Sequence[Clock], host_ns: int = HOST_NS) -> float:
    """Seconds of the last training step of a trace whose kernels have durations; the slowest rank decides.

    `clocks`: one a rank, or one for all. A pipeline's idle time at the start and the end of a step is added by its
    schedule: each of p stages waits for p - 1 of m micro-batches. Raises ConfigError for a trace without steps.
    """
    longest = max(
        _Rank(entry, trace, case, clocks[min(entry.ranks[0], len(clocks) - 1)], host_ns).seconds()
        for entry in trace.ranks
    )
    if case.strategy == "pp":
        stages = case.mesh.get("pp", case.world)
        longest *= (case.microbatches + stages - 1) / case.microbatches
    return longest


class _Rank:
    """One rank's clocks while its events pass: of the host, of every stream, of the link."""

    def __init__(self, entry: RankEvents, trace: Trace, case: Case, clock: Clock, host_ns: int) -> None:
        self._events: Events = entry.events
        self._case = case
        self._clock = clock
        self._host_ns = host_ns
        self._groups = {
            name: next((part for part in parts if entry.ranks[0] in part), ()) for name, parts in trace.groups.items()
        }
        self._host = 0
        self._streams: dict[int, int] = {}
        self._current = 0

    def seconds(self) -> float:
        """Simulate all events; answers the time between the last two starts of a step, or to the end."""
        events = self._events
        kinds, groups = events.strings("kind"), events.strings("group")
        duration, stream = events.ints("duration_ns"), events.ints("stream")
        size, step, on = events.ints("bytes"), events.ints("step"), events.ints("on")
        begun: dict[int, int] = {}
        wanted = (Op.KERNEL, Op.COLLECTIVE, Op.WAIT_STREAM, Op.SYNCHRONIZE, Op.PHASE)
        for place in [place for place, op in enumerate(events.op.tolist()) if op in wanted]:
            op = events.op[place]
            if op == Op.KERNEL:
                self._kernel(int(duration[place]), int(stream[place]))
            elif op == Op.COLLECTIVE:
                self._collective(kinds.get(place) or "", groups.get(place) or "", int(size[place]))
            elif op == Op.WAIT_STREAM:
                waits, other = int(stream[place]), int(on[place])
                self._streams[waits] = max(self._at(waits), self._at(other))
            elif op == Op.SYNCHRONIZE:
                self._wait()
            elif int(step[place]) >= 0:
                self._wait()
                begun.setdefault(int(step[place]), self._host)
        self._wait()
        if not begun:
            raise ConfigError("the trace has no training steps to be timed")
        return (self._host - begun[max(begun)]) / 1e9

    def _at(self, stream: int) -> int:
        return self._streams.get(stream, 0)

    def _kernel(self, duration: int, stream: int) -> None:
        self._host += self._host_ns
        self._current = stream
        self._streams[stream] = max(self._at(stream), self._host) + duration

    def _collective(self, kind: str, group: str, size: int) -> None:
        """A collective starts when its link is free and what the calling stream had to do is done."""
        members = self._groups.get(group) or (0, 1)
        length = self._clock.collective(KINDS.get(kind, kind), size, members)
        self._host += self._host_ns
        caller = 0 if self._case.strategy in WAITING else self._current
        ends = max(self._at(caller), self._at(_NCCL), self._host) + length
        self._streams[_NCCL] = ends
        if self._case.strategy not in LATE:
            self._streams[caller] = ends

    def _wait(self) -> None:
        self._host = max([self._host, *self._streams.values()])
