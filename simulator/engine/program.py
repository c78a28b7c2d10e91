"""A rank's events made ready for the kernels: dense ids and streams, one number an event.

A `Program` depends on the trace alone, so that many replays under other settings share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.engine import kernels as engine
from traces.check import MAX_DEVICE_BYTES
from traces.errors import TraceError
from traces.model import Events, Initial, Int64Array, Op, RankEvents

POOL_OPS = (
    *(Op.POOL_CREATE, Op.POOL_BEGIN, Op.POOL_END, Op.POOL_RELEASE),
    *(Op.POOL_SWITCH, Op.POOL_CHECKPOINT, Op.POOL_RESTORE),
)
STREAM_OPS = (Op.ALLOC, Op.RECORD_STREAM, Op.COMPLETE_EVENTS, Op.SYNCHRONIZE, Op.KERNEL, Op.COLLECTIVE, Op.WAIT_STREAM)
MAX_SETS = 1 << 16  # streams x pools


@dataclass(frozen=True)
class Program:
    """A rank's events for the kernels.

    What the trace numbers at will is dense here: `ids` are the trace's ids by dense id, `stream_values` its streams by
    theirs, `pools` its private pools by theirs less one (0 is the default pool); all ascending.
    """

    events: Events
    initial: Initial
    ops: npt.NDArray[np.uint8]
    idents: npt.NDArray[np.int32]
    args: Int64Array
    streams: npt.NDArray[np.int32]
    host_ns: Int64Array
    ids: Int64Array
    stream_values: Int64Array
    pools: Int64Array
    timed: bool
    num_collectives: int

    def __len__(self) -> int:
        return len(self.ops)

    def survived(self, index: int) -> bool:
        """Whether the allocation at `index` failed in a recording too, whose program went on: it has no address."""
        return "address" in self.events.columns and bool(self.events.ints("address")[index] < 0)

    @property
    def num_pools(self) -> int:
        """How many pools there are, the default one included."""
        return 1 + len(self.pools)


def _dense_ids(events: Events, initial: Initial) -> tuple[npt.NDArray[np.int32], Int64Array]:
    """Dense id of every event (0 where an event has none), and the trace's ids by dense id."""
    ids = events.ints("id")
    early = [block.id for segment in initial.segments for block in segment.blocks if block.id is not None]
    highest = max(int(ids.max(initial=-1)), max(early, default=-1))
    if highest < 4 * len(ids) + 4 * len(early) + 1024:
        return np.maximum(ids, 0).astype(np.int32), np.arange(highest + 1, dtype=np.int64)
    known, dense = np.unique(np.concatenate([ids, np.asarray(early, dtype=np.int64)]), return_inverse=True)
    return dense[: len(ids)].astype(np.int32), known


def _dense_streams(events: Events, initial: Initial) -> tuple[npt.NDArray[np.int32], Int64Array, Int64Array]:
    """Dense stream of every event (-1: all), dense stream that a wait_stream waits for, and the streams' numbers."""
    values = events.ints("stream")
    on = events.ints("on")
    early = np.asarray([0] + [segment.stream for segment in initial.segments], dtype=np.int64)
    if not values.any() and "on" not in events.columns and not early.any():
        return np.zeros(len(events), dtype=np.int32), on, np.zeros(1, dtype=np.int64)
    used = values[np.isin(events.op, STREAM_OPS)]
    known = np.unique(np.concatenate([used, on, early]))
    known = known[known >= 0]
    dense = np.where(values >= 0, np.searchsorted(known, values), -1)
    return np.minimum(dense, len(known) - 1).astype(np.int32), np.searchsorted(known, on), known


def _arguments(events: Events, on: Int64Array, pools: Int64Array) -> Int64Array:
    """The one number that an op takes beside id and stream."""
    ops = events.op
    args = events.ints("bytes").copy()
    if (ops == Op.OTHER_PROCESS).any():
        args = np.where(ops == Op.OTHER_PROCESS, np.minimum(args, MAX_DEVICE_BYTES), args)  # more is as much as all
    for op, column in ((Op.KERNEL, "duration_ns"), (Op.COLLECTIVE, "duration_ns")):
        chosen = ops == op
        if chosen.any():
            args[chosen] = events.ints(column)[chosen]
    if (ops == Op.HOLD_EVENTS).any():
        chosen = ops == Op.HOLD_EVENTS
        args[chosen] = events.bools("hold")[chosen]
    if (ops == Op.WAIT_STREAM).any():
        chosen = ops == Op.WAIT_STREAM
        args[chosen] = on[chosen]
    chosen = np.isin(ops, (*POOL_OPS, Op.EMPTY_CACHE)) if len(pools) else np.zeros(len(ops), dtype=np.bool_)
    if chosen.any():
        number = events.ints("pool")
        packed = np.where(number > 0, np.searchsorted(pools, number) + 1, 0)
        packed += events.bools("no_split") * engine.POOL_NO_SPLIT + events.bools("use_on_oom") * engine.POOL_ON_OOM
        packed += events.bools("capture") * engine.POOL_CAPTURE
        args[chosen] = packed[chosen]
    return args


def _pool_numbers(events: Events, initial: Initial) -> Int64Array:
    """The private pools that a rank's events and initial state name, ascending."""
    early = np.asarray([segment.pool_id for segment in initial.segments if segment.pool_id], dtype=np.int64)
    named = events.ints("pool")[np.isin(events.op, POOL_OPS)]
    return np.unique(np.concatenate([named[named > 0], early]))


def plain(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A column as kernels read it, by bare pointers: one value after the other, in memory of one type."""
    return np.require(column, requirements=["C", "A", "W"])


def compile_rank(rank: RankEvents, *, timed: bool, solo: npt.NDArray[np.bool_] | None = None) -> Program:
    """Make a rank's (checked) events ready. `timed`: some rank of the trace has kernel or collective events.

    `solo` marks the collectives that every present rank of their group reaches at the same time by symmetry: they are
    served like kernels. Raises TraceError for more streams and pools than can be simulated.
    """
    events = rank.events
    initial = rank.initial or Initial()
    idents, ids = _dense_ids(events, initial)
    streams, on, stream_values = _dense_streams(events, initial)
    ops = events.op
    if solo is not None and solo.any():
        ops = np.where(solo, np.uint8(Op.KERNEL), ops)
    if "was" in events.columns:
        ops = np.where((ops == Op.ALLOC) & (events.ints("was") >= 0), np.uint8(engine.TAKE_OVER), ops)
    pools = _pool_numbers(events, initial)
    if len(stream_values) * (1 + len(pools)) > MAX_SETS:
        raise TraceError(
            f"rank {rank.ranks[0]}: {len(stream_values)} streams in {1 + len(pools)} memory pools are more than can be"
            f" simulated: their product may be {MAX_SETS}"
        )
    return Program(
        events=events,
        initial=initial,
        ops=plain(ops),
        idents=plain(idents),
        args=plain(_arguments(events, on, pools)),
        streams=plain(streams),
        host_ns=plain(events.ints("host_ns")) if "host_ns" in events.columns else np.empty(0, dtype=np.int64),
        ids=ids,
        stream_values=stream_values,
        pools=pools,
        timed=timed,
        num_collectives=int((ops == Op.COLLECTIVE).sum()),
    )
