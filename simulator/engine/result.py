"""The plain result of a replay: what every reporter (table, JSON, HTML) is a pure function of.

Bytes are integers throughout. Names are those of `torch.cuda.memory_stats` where PyTorch has one.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

import numpy as np

from traces.model import Device, Int64Array
from traces.timelines.timeline import Timeline

SCHEMA_VERSION: Final = 1

#: `tight` fits, but not with all that may lie outside the allocator, or by its giving memory back and trying again.
Verdict = Literal["fits", "tight", "oom"]
#: From the best to the worst.
VERDICTS: Final[tuple[Verdict, ...]] = ("fits", "tight", "oom")


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of a whole by those of its parts; `fits` where there are none."""
    return max(verdicts, key=VERDICTS.index, default="fits")


@dataclass(frozen=True)
class PhasePeak:
    """Peaks between two `phase` events; `left` is allocated at the phase's end. `key` is the JSON key."""

    key: str
    name: str
    step: int | None
    peak: int
    left: int
    peak_reserved: int


@dataclass(frozen=True)
class LiveTensor:
    """An allocation that was alive at the peak: `bytes` as requested, `block_bytes` as the allocator gave."""

    id: int
    bytes: int
    block_bytes: int
    category: str
    name: str | None
    event: int
    phase: str | None


@dataclass(frozen=True)
class Peak:
    """What was alive at a moment (after event `event` of the rank): when allocated bytes first reached their peak, or
    when an allocation failed."""

    event: int
    phase: str | None
    allocated: int
    reserved: int
    by_category: Mapping[str, int]  # block bytes by category; sums to `allocated`
    largest: tuple[LiveTensor, ...]


@dataclass(frozen=True)
class Fragmentation:
    """Where reserved bytes were when they first reached their peak; the causes sum to `reserved`.

    `requested`: bytes asked for by tensors alive. `rounding`: added by size rounding. `unsplit_remainder`: kept in
    blocks that were not split. `pending`: freed, but waiting for another stream. `stranded`: free blocks in segments
    that hold something. `cached_segments`: wholly free segments.
    """

    event: int
    reserved: int
    requested: int
    rounding: int
    unsplit_remainder: int
    pending: int
    stranded: int
    cached_segments: int


@dataclass(frozen=True)
class FreePiece:
    """Free pieces of one size class at an out-of-memory: `count` blocks of together `bytes` in segments of `pool`."""

    pool: str
    stream: int
    count: int
    bytes: int
    largest: int


@dataclass(frozen=True)
class OutOfMemory:
    """The first allocation that failed, and what was free then.

    `line` is the line of the model's code that asks for it, or whose derivative does, where that is known.
    `device_free` is what the driver had left; `remedies` are allocator settings under which the same trace runs
    without any out-of-memory event, with their peak reserved bytes. `tried` are the settings that were tried, each
    added to the replay's own; where there are none, `untried` says why. `needed` is what the rank reserves where the
    device has no end (None where that is not known, or still fails), `demand` its memory over time there. `alive` is
    what was alive when it failed.
    """

    event: int
    id: int
    name: str | None
    phase: str | None
    requested: int
    rounded: int
    stream: int
    device_free: int
    reserved: int
    allocated: int
    free_in_segments: int
    largest_free: int
    pieces: tuple[FreePiece, ...]
    peak_allocated_before: int
    peak_reserved_before: int
    remedies: tuple[tuple[str, int], ...] = ()
    tried: tuple[str, ...] = ()
    untried: str = "nobody asked for it"
    needed: int | None = None
    demand: Timeline | None = None
    alive: Peak | None = None
    line: str = ""


@dataclass(frozen=True)
class OutsideTerm:
    """A part of the device total that is not the allocator's, with its source; its range where it is uncertain."""

    name: str
    bytes: int
    source: str
    low: int | None = None
    high: int | None = None


@dataclass(frozen=True)
class OnGpu:
    """Peaks with what libraries take on a GPU, and with addresses as its driver gives them (`engine.on_gpu`)."""

    peak_allocated: int
    peak_reserved: int
    retries: int

    def document(self) -> dict[str, int]:
        """The figures by name."""
        return asdict(self)


@dataclass(frozen=True)
class Report:
    """State asked for by a `snapshot` or `statistics` event: `kind` says which, `data` is the plain document."""

    event: int
    kind: Literal["snapshot", "statistics"]
    data: Mapping[str, Any]


#: Kinds of an `EventLog` entry: calls of the device (as in the recordings) and entries of a torch memory trace.
LOG_KINDS: Final[tuple[str, ...]] = (
    "A",  # cudaMalloc (trace: segment_alloc)
    "X",  # cudaMalloc refused
    "F",  # cudaFree (segment_free)
    "R",  # address space reserved
    "V",  # address space given back
    "M",  # mapped (segment_map)
    "U",  # unmapped (segment_unmap)
    "Y",  # cuMemCreate refused
    "alloc",
    "free_requested",
    "free_completed",
    "oom",
)
#: Log kinds that are entries of a torch memory trace, and their names there.
RECORDED: Final[Mapping[str, str]] = {
    "A": "segment_alloc",
    "F": "segment_free",
    "M": "segment_map",
    "U": "segment_unmap",
    "alloc": "alloc",
    "free_requested": "free_requested",
    "free_completed": "free_completed",
    "oom": "oom",
}


@dataclass(frozen=True)
class EventLog:
    """What the allocator did, in order: one entry a device call or trace entry (columns of equal length).

    `kind` indexes `LOG_KINDS`; `event` is the index of the trace's event that caused it; `stream` the stream's value.
    """

    kind: np.ndarray[Any, np.dtype[np.uint8]]
    event: Int64Array
    address: Int64Array
    bytes: Int64Array
    stream: Int64Array


@dataclass(frozen=True)
class EventColumns:
    """What stood after every event, for `run --events` (columns of equal length, one value an event)."""

    address: Int64Array  # 0 none, -1 out of memory
    reserved: Int64Array
    allocated: Int64Array
    active: Int64Array
    segments: Int64Array
    num_alloc_retries: Int64Array
    num_ooms: Int64Array


@dataclass(frozen=True)
class Segments:
    """Memory that the allocator held of the device, by address and birth (columns of equal length).

    Mapped memory of expandable segments stands page by page. After event `e` those are held with `born <= e < died`;
    born at -1: held before the first event; died at the number of events: held at the end.
    """

    address: Int64Array
    bytes: Int64Array
    stream: Int64Array
    expandable: np.ndarray[Any, np.dtype[np.bool_]]
    born: Int64Array
    died: Int64Array


@dataclass(frozen=True)
class Blocks:
    """Every block that was ever in use, by address and birth (columns of equal length).

    `category`, `name` and `frames` index the tables of the `Picture` (-1: none); `requested` is what was asked for.
    Born and died as `Segments`; from `freed` until `died` a block is freed, but waits for another stream.
    """

    address: Int64Array
    bytes: Int64Array
    requested: Int64Array
    category: Int64Array
    name: Int64Array
    frames: Int64Array
    born: Int64Array
    freed: Int64Array
    died: Int64Array


@dataclass(frozen=True, slots=True)
class Moment:
    """An event (-1: before the first) after which the state is of interest; `labels` say why."""

    labels: tuple[str, ...]
    event: int


@dataclass(frozen=True)
class Picture:
    """What a page draws beside the timeline: categories over time, and what was held and in use after any event.

    `changed` has for every event the category (an index into `categories`) of the allocation that it makes or frees,
    -1 for other events; `before` the allocated bytes of each category before the first event. `moments` are in order
    of events.
    """

    categories: tuple[str, ...]
    names: tuple[str, ...]
    frames: tuple[str, ...]
    changed: np.ndarray[Any, np.dtype[np.int16]]
    before: tuple[int, ...]
    blocks: Blocks
    segments: Segments
    moments: tuple[Moment, ...]


@dataclass(frozen=True)
class RankResult:
    """The replay of one event sequence, on behalf of all `ranks` that share it.

    `oom_with` are bytes outside the allocator, within their range, with which it runs out of memory (None: it does
    not within the range, or the replay itself does). `on_gpu`: peaks as on a GPU, where those were replayed.
    """

    ranks: tuple[int, ...]
    device: Device
    events: int
    memory_stats: Mapping[str, int]
    oom: OutOfMemory | None
    phases: tuple[PhasePeak, ...]
    peak: Peak
    fragmentation: Fragmentation
    outside: tuple[OutsideTerm, ...]
    timeline: Timeline
    reports: tuple[Report, ...] = ()
    duration_ns: int | None = None
    columns: EventColumns | None = None
    log: EventLog | None = None
    snapshot: Mapping[str, Any] | None = None  # torch's own layout, when asked for
    picture: Picture | None = None  # for a page, when asked for
    oom_with: int | None = None
    on_gpu: OnGpu | None = None

    @property
    def verdict(self) -> Verdict:
        """`oom` where an allocation failed, `tight` after retries or within the range of what lies outside."""
        if self.oom is not None:
            return "oom"
        return "tight" if self.retries_there or self.oom_with is not None else "fits"

    @property
    def shown(self) -> Peak:
        """The moment that explains the verdict: the peak, or the failure."""
        return self.peak if self.oom is None or self.oom.alive is None else self.oom.alive

    @property
    def needed(self) -> int | None:
        """What it takes of a device: the device total, or out of memory what one without end would give (None: not
        known)."""
        if self.oom is None:
            return self.device_total
        return None if self.oom.needed is None else self.oom.needed + sum(term.bytes for term in self.outside)

    @property
    def retries(self) -> int:
        """How often the allocator gave free memory back to the device and tried again."""
        return self.memory_stats.get("num_alloc_retries", 0)

    @property
    def retries_there(self) -> int:
        """The same on a GPU, as far as it is known."""
        return self.retries if self.on_gpu is None else max(self.retries, self.on_gpu.retries)

    @property
    def step_peaks(self) -> dict[int, int]:
        """The peak of each training step in allocated bytes."""
        found: dict[int, int] = {}
        for phase in self.phases:
            if phase.step is not None and phase.step >= 0:
                found[phase.step] = max(phase.peak, found.get(phase.step, 0))
        return found

    @property
    def peak_allocated(self) -> int:
        """`torch.cuda.max_memory_allocated()`."""
        return self.memory_stats["allocated_bytes.all.peak"]

    @property
    def peak_reserved(self) -> int:
        """`torch.cuda.max_memory_reserved()`."""
        return self.memory_stats["reserved_bytes.all.peak"]

    @property
    def reserved_there(self) -> int:
        """The peak of reserved bytes on a GPU, as far as it is known."""
        return self.peak_reserved if self.on_gpu is None else self.on_gpu.peak_reserved

    @property
    def device_total(self) -> int:
        """What nvidia-smi would show at most: reserved bytes at their peak, on a GPU where that was replayed, and every
        term outside the allocator."""
        return self.reserved_there + sum(term.bytes for term in self.outside)


def _notebook() -> Any:
    """The reports above this room, when a result is asked to show itself."""
    return importlib.import_module("simulator.reports.html.notebook")


class Shown:
    """How a result shows itself in Python and in a notebook (`simulator.reports.html.notebook`)."""

    def _replayed(self) -> Result:
        raise NotImplementedError

    def _title(self) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._title()}: {_notebook().headline(self._replayed())}>"

    def _repr_html_(self) -> str:
        text: str = _notebook().html_of(self._replayed(), self._title())
        return text

    def to_pandas(self, rank: int | None = None) -> Any:
        """Memory after every event as a pandas DataFrame: of one rank, or of that which decides."""
        return _notebook().frame_of(self._replayed(), rank)

    def plot(self, rank: int | None = None) -> Any:
        """Memory over the events in matplotlib: the Axes, of one rank, or of that which decides."""
        return _notebook().plot_of(self._replayed(), self._title(), rank)


@dataclass(frozen=True, repr=False)
class Result(Shown):
    """The result of a replay: one `RankResult` a distinct event sequence, worst (largest device total) first."""

    ranks: tuple[RankResult, ...]
    conf: str
    release: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def _replayed(self) -> Result:
        return self

    def _title(self) -> str:
        return str(self.metadata.get("name") or f"of {len(self.ranks)} kinds of rank")

    @property
    def verdict(self) -> Verdict:
        """That of the rank that is worst off."""
        return worst_verdict(rank.verdict for rank in self.ranks)

    @property
    def decisive(self) -> RankResult:
        """The rank on which the verdict rests: of those that have it, the one with the least left on its device."""
        having = (rank for rank in self.ranks if rank.verdict == self.verdict)
        return max(having, key=lambda rank: (rank.needed or rank.device_total) - rank.device.total_bytes)

    @property
    def needed(self) -> int | None:
        """What the rank that needs most takes of its device, or would take (None: not known)."""
        return None if self.decisive.needed is None else max(rank.needed or 0 for rank in self.ranks)

    def for_rank(self, rank: int) -> RankResult:
        """The result of one rank; KeyError if the trace has none of that number."""
        for result in self.ranks:
            if rank in result.ranks:
                return result
        raise KeyError(rank)
