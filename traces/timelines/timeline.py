"""Memory over time of one rank, as arrays: what the replay measures after each event."""

from __future__ import annotations

from dataclasses import dataclass

from traces.model import Int64Array


@dataclass(frozen=True)
class PhaseSpan:
    """A phase of the run: events `start` (the `phase` event itself) to `stop` (exclusive) of its rank."""

    name: str
    step: int | None
    start: int
    stop: int


@dataclass(frozen=True)
class Region:
    """A part of the program that it has named itself: events `start` to `stop` (exclusive), within `depth` others."""

    name: str
    start: int
    stop: int
    depth: int


@dataclass(frozen=True)
class Timeline:
    """Bytes after every event of a rank: arrays of equal length, one value an event of the trace.

    `time_ns` is the host's simulated clock; None where the trace has order only (no kernel or collective events).
    `limit_bytes` is what the allocator could take of the device (total less context).
    """

    ranks: tuple[int, ...]
    allocated: Int64Array
    active: Int64Array
    reserved: Int64Array
    phases: tuple[PhaseSpan, ...]
    limit_bytes: int
    time_ns: Int64Array | None = None
    ooms: tuple[int, ...] = ()
    regions: tuple[Region, ...] = ()

    def __len__(self) -> int:
        return len(self.allocated)
