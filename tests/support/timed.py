"""Traces in simulated time, written as rows, and what a replay shows of them: one form for the engine and its model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simulator.engine.replay import replay
from simulator.engine.result import RankResult
from tests.support.strategies import as_trace
from traces.model import Trace

Row = dict[str, Any]
Groups = Mapping[str, Sequence[int] | Sequence[Sequence[int]]]

MIB = 1 << 20
VA_BASE = 0x7F0000000000
SHOWN_OPS = ("alloc", "free", "record_stream")  # the ops whose rows show an address


@dataclass(frozen=True)
class Case:
    """A trace: the rows of each rank (a number, or a tuple of several that share them), and where they run."""

    ranks: Mapping[Any, Sequence[Row]]
    groups: Groups | None = None
    launch_ns: int = 0
    total_bytes: int = 80 << 30
    conf: str = ""
    release: str = "2.11"

    def by_rank(self) -> Iterator[tuple[int, Sequence[Row]]]:
        """Every rank on its own, with its rows."""
        for key, rows in self.ranks.items():
            for rank in (key,) if isinstance(key, int) else key:
                yield rank, rows

    def trace(self) -> Trace:
        """The case in the format of the project."""
        entries = [
            {"rank": key if isinstance(key, int) else list(key), "events": list(rows)}
            for key, rows in self.ranks.items()
        ]
        return as_trace(
            {
                "format": "memory-trace",
                "version": 1,
                "allocator": {"conf": self.conf, "release": self.release},
                "devices": [{"name": "small", "total_bytes": self.total_bytes, "launch_ns": self.launch_ns}],
                "groups": dict(self.groups or {}),
                "ranks": entries,
            }
        )


@dataclass(frozen=True)
class Shown:
    """What a rank shows: after every event its host clock and bytes, and the addresses of the ops that have one.

    Addresses are relative to the first segment; -1 is out of memory.
    """

    times: list[int]
    addresses: list[int | None]
    reserved: list[int]
    allocated: list[int]
    active: list[int]
    retries: list[int]
    duration: int

    def address_of(self, rows: Sequence[Row], id_: int) -> int:
        """Where the allocation `id_` is."""
        place = next(i for i, row in enumerate(rows) if row["op"] == "alloc" and row["id"] == id_)
        address = self.addresses[place]
        assert address is not None
        return address


def relative(row: Row, address: int) -> int | None:
    """The address to show for a row."""
    if row["op"] not in SHOWN_OPS:
        return None
    return address if address <= 0 else address - VA_BASE


def show(result: RankResult, rows: Sequence[Row]) -> Shown:
    """The engine's result of a rank."""
    columns, times = result.columns, result.timeline.time_ns
    assert columns is not None
    assert times is not None, "the case has no simulated time"
    return Shown(
        times=times.tolist(),
        addresses=[relative(row, address) for row, address in zip(rows, columns.address.tolist(), strict=True)],
        reserved=columns.reserved.tolist(),
        allocated=columns.allocated.tolist(),
        active=columns.active.tolist(),
        retries=columns.num_alloc_retries.tolist(),
        duration=result.duration_ns or 0,  # none: nothing takes time
    )


def fast(case: Case) -> dict[int, Shown]:
    """The case served by the engine."""
    result = replay(case.trace(), events=True, analyse=False, after_oom="continue")
    return {rank: show(result.for_rank(rank), rows) for rank, rows in case.by_rank()}


# --- rows ---------------------------------------------------------------------------------------------------------


def alloc(id_: int, size: int = 512, stream: int = 0, **more: Any) -> Row:
    return {"op": "alloc", "id": id_, "bytes": size, "stream": stream} | more


def free(id_: int, **more: Any) -> Row:
    return {"op": "free", "id": id_} | more


def record(id_: int, stream: int) -> Row:
    return {"op": "record_stream", "id": id_, "stream": stream}


def kernel(duration: int, stream: int = 0, **more: Any) -> Row:
    return {"op": "kernel", "stream": stream, "duration_ns": duration} | more


def collective(group: str, duration: int, stream: int = 0, **more: Any) -> Row:
    return {"op": "collective", "group": group, "stream": stream, "duration_ns": duration} | more


def wait_stream(stream: int, on: int) -> Row:
    return {"op": "wait_stream", "stream": stream, "on": on}


def synchronize(stream: int | None = None, **more: Any) -> Row:
    return {"op": "synchronize"} | ({} if stream is None else {"stream": stream}) | more


def hold(on: bool) -> Row:
    return {"op": "hold_events", "hold": on}


def busy(duration: int) -> Row:
    """The host works for so long."""
    return {"op": "phase", "name": "busy", "host_ns": duration}


def plain(op: str, **more: Any) -> Row:
    """Any other op."""
    return {"op": op} | more
