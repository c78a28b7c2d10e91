"""The trace in memory: frozen dataclasses over columns of numpy arrays.

A trace holds, for every rank, a sequence of events. Events are stored as columns, one array a field, so that a
trace of ten million events is a handful of arrays. Text columns (`name`, `conf`, `group`, `kind`, `category`) are
`Strings`: an int32 code per event into a table, -1 where absent.

The meaning of every op and field stands in `schema.json` beside this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
OpArray = npt.NDArray[np.uint8]

FORMAT: Final = "memory-trace"
VERSION: Final = 1


class Op(IntEnum):
    """What an event does. Values are those of the `op` column; names, in lower case, those of the file format."""

    ALLOC = 0
    FREE = 1
    RECORD_STREAM = 2
    HOLD_EVENTS = 3
    COMPLETE_EVENTS = 4
    COMPLETE_FREE = 5
    SYNCHRONIZE = 6
    EMPTY_CACHE = 7
    RESET_PEAK = 8
    RESET_ACCUMULATED = 9
    SET_MEMORY_FRACTION = 10
    SET_ALLOCATOR = 11
    OTHER_PROCESS = 12
    SNAPSHOT = 13
    STATISTICS = 14
    PHASE = 15
    KERNEL = 16
    COLLECTIVE = 17
    POOL_CREATE = 18
    POOL_BEGIN = 19
    POOL_END = 20
    POOL_RELEASE = 21
    WAIT_STREAM = 22
    REGION_BEGIN = 23
    REGION_END = 24
    POOL_SWITCH = 25
    POOL_CHECKPOINT = 26
    POOL_RESTORE = 27


CATEGORIES: Final[tuple[str, ...]] = (
    "parameter",
    "gradient",
    "optimizer_state",
    "activation",
    "temporary",
    "communication",
    "workspace",
    "buffer",
    "input",
    "unknown",
)

#: Integer columns and the value that stands for "absent".
INT_FIELDS: Final[Mapping[str, int]] = {
    "id": -1,
    "bytes": 0,
    "stream": 0,  # absent on `synchronize` means all streams: -1
    "address": -1,
    "duration_ns": 0,
    "host_ns": 0,
    "flops": 0,
    "step": -1,
    "pool": -1,
    "on": -1,
    "checkpoint": -1,
    "was": -1,
    "gpu_bytes": -1,
}
BOOL_FIELDS: Final[tuple[str, ...]] = ("hold", "no_split", "use_on_oom", "capture")
FLOAT_FIELDS: Final[tuple[str, ...]] = ("fraction",)
STRING_FIELDS: Final[tuple[str, ...]] = ("category", "name", "frames", "conf", "group", "kind")
#: The name (after a module's and `: `) of scratch that a library takes where there is room: else it computes otherwise.
BY_CHOICE: Final = "algorithm"
FIELDS: Final[tuple[str, ...]] = (*INT_FIELDS, *BOOL_FIELDS, *FLOAT_FIELDS, *STRING_FIELDS)
#: numpy's type of each column; of text, that of its codes.
DTYPES: Final[Mapping[str, Any]] = {
    **dict.fromkeys(INT_FIELDS, np.int64),
    **dict.fromkeys(BOOL_FIELDS, np.bool_),
    **dict.fromkeys(FLOAT_FIELDS, np.float64),
    **dict.fromkeys(STRING_FIELDS, np.int32),
}

BlockState = Literal["active_allocated", "active_pending_free", "inactive"]
Placement = Literal["first-fit", "bump", "recorded", "driver"]


@dataclass(frozen=True, slots=True)
class Strings:
    """A text column: `table[codes[i]]`, or nothing where `codes[i]` is -1."""

    codes: npt.NDArray[np.int32]
    table: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.codes)

    def get(self, index: int) -> str | None:
        """The text of event `index`, or None."""
        code = int(self.codes[index])
        return None if code < 0 else self.table[code]

    @classmethod
    def encode(cls, values: Sequence[str | None]) -> Strings:
        """Intern `values`; the table keeps the order of first appearance."""
        table = tuple(value for value in dict.fromkeys(values) if value is not None)
        known: dict[str | None, int] = {None: -1, **{text: code for code, text in enumerate(table)}}
        return cls(np.fromiter(map(known.__getitem__, values), dtype=np.int32, count=len(values)), table)

    def only(self, where: BoolArray) -> Strings:
        """The texts of some events, and a table of those that are left."""
        codes = np.where(where, self.codes, -1)
        used = np.unique(codes[codes >= 0])
        short = np.full(len(self.table) + 1, -1, dtype=np.int32)
        short[used] = np.arange(len(used))
        return Strings(short[codes], tuple(self.table[code] for code in used.tolist()))

    @classmethod
    def joined(cls, parts: Sequence[Strings]) -> Strings:
        """Text columns one after the other, over one table."""
        known: dict[str, int] = {}
        codes = []
        for part in parts:
            renamed = [known.setdefault(text, len(known)) for text in part.table]
            codes.append(np.asarray([*renamed, -1], dtype=np.int32)[part.codes])
        return cls(np.concatenate(codes), tuple(known))


Column = Int64Array | FloatArray | BoolArray | Strings


@dataclass(frozen=True)
class Events:
    """The events of one rank, as columns of equal length.

    `op` has one `Op` value an event. `columns` holds only the fields that some event sets, each with the dtype of
    its kind: int64 (`INT_FIELDS`), bool, float64 or `Strings`. `extra` keeps fields that the format does not know:
    field name -> {event index -> value}.
    """

    op: OpArray
    columns: Mapping[str, Column] = field(default_factory=dict)
    extra: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.op)

    def ints(self, name: str) -> Int64Array:
        """Integer column `name`, filled with its default where the trace leaves it out."""
        column = self.columns.get(name)
        if column is None:
            filled = np.full(len(self), INT_FIELDS[name], dtype=np.int64)
            if name == "stream":
                filled[self.op == Op.SYNCHRONIZE] = -1
            return filled
        assert isinstance(column, np.ndarray)
        return column  # type: ignore[return-value]

    def bools(self, name: str) -> BoolArray:
        """Boolean column `name`, False where the trace leaves it out."""
        column = self.columns.get(name)
        if column is None:
            return np.zeros(len(self), dtype=np.bool_)
        return column  # type: ignore[return-value]

    def floats(self, name: str) -> FloatArray:
        """Float column `name`, NaN where the trace leaves it out."""
        column = self.columns.get(name)
        if column is None:
            return np.full(len(self), np.nan)
        return column  # type: ignore[return-value]

    def strings(self, name: str) -> Strings:
        """Text column `name`, all absent where the trace leaves it out."""
        column = self.columns.get(name)
        if column is None:
            return Strings(np.full(len(self), -1, dtype=np.int32), ())
        assert isinstance(column, Strings)
        return column

    def column(self, name: str) -> Column:
        """Column `name` of any kind, filled as the trace leaves it out."""
        read = self.strings if name in STRING_FIELDS else self.ints if name in INT_FIELDS else None
        return read(name) if read else self.bools(name) if name in BOOL_FIELDS else self.floats(name)

    def with_columns(self, **columns: Column) -> Events:
        """A copy with some columns added or replaced."""
        return replace(self, columns={**self.columns, **columns})

    def take(self, places: Int64Array | slice) -> Events:
        """The events at `places`, in their order."""
        columns: dict[str, Column] = {
            name: Strings(column.codes[places], column.table) if isinstance(column, Strings) else column[places]
            for name, column in self.columns.items()
        }
        if not self.extra:
            return Events(self.op[places], columns)
        new = {old: place for place, old in enumerate(np.arange(len(self))[places].tolist())}
        extra = {name: {new[i]: one for i, one in values.items() if i in new} for name, values in self.extra.items()}
        return Events(self.op[places], columns, {name: values for name, values in extra.items() if values})

    @classmethod
    def joined(cls, parts: Sequence[Events]) -> Events:
        """Events one after the other; fields that the format does not know are left behind."""
        columns: dict[str, Column] = {}
        for name in dict.fromkeys(name for part in parts for name in part.columns):
            if name in STRING_FIELDS:
                columns[name] = Strings.joined([part.strings(name) for part in parts])
            else:
                filled: list[Any] = [part.column(name) for part in parts]
                columns[name] = np.concatenate(filled)
        return cls(np.concatenate([part.op for part in parts]), columns)

    def insert(self, where: Int64Array, added: Events) -> Events:
        """The events with those of `added` each before the place `where` says, as `numpy.insert` counts places."""
        order = np.insert(np.arange(len(self)), where, len(self) + np.arange(len(added)))
        return Events.joined([self, added]).take(order)


@dataclass(frozen=True, slots=True)
class InitialBlock:
    """A block that the allocator held when the recording began, in address order inside its segment.

    `id` is None for a free block; `bytes` its size in the allocator, `requested` what was asked for (0 if free).
    """

    id: int | None
    bytes: int
    requested: int
    state: BlockState


@dataclass(frozen=True, slots=True)
class InitialSegment:
    """A cudaMalloc segment, or a mapped range of an expandable segment, held when the recording began.

    `va_address`/`va_bytes` bound the address range reserved around a mapped range (expandable only; None: unknown).
    `pool_id` is 0 for the default pool, else the private pool's number.
    """

    address: int
    bytes: int
    stream: int
    pool: Literal["small", "large"]
    expandable: bool
    blocks: tuple[InitialBlock, ...]
    va_address: int | None = None
    va_bytes: int | None = None
    pool_id: int = 0


@dataclass(frozen=True, slots=True)
class Initial:
    """What a rank's allocator held when its recording began; segments in order of creation where that is known."""

    segments: tuple[InitialSegment, ...] = ()


@dataclass(frozen=True)
class Device:
    """A kind of GPU. `total_bytes` is what cudaMemGetInfo shows as total; `context_bytes` of it is not PyTorch's.

    `placement` is the rule by which cudaMalloc picks addresses: `first-fit` (lowest gap), `bump` (never reuse), or
    `recorded` (`segment_addresses` in the order of cudaMallocs and address-space reservations, then bump); `driver` is
    what CUDA's driver was seen to do on an H100: address space is taken downwards, in multiples of 32 MiB, and what is
    left of these is used first, the newest first.
    `launch_ns` is the host's cost of one kernel or collective launch.
    """

    name: str
    total_bytes: int
    context_bytes: int = 0
    va_base: int = 0x7F0000000000
    placement: Placement = "first-fit"
    segment_addresses: tuple[int, ...] = ()
    launch_ns: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)


DEFAULT_DEVICE: Final = Device("A100-80GB", 85_097_971_712)


@dataclass(frozen=True)
class RankEvents:
    """One event sequence and the ranks that run it (a single rank, or several that share the same events)."""

    ranks: tuple[int, ...]
    events: Events
    device: int = 0
    initial: Initial | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """A memory trace: devices, groups and the events of every rank.

    `release` is None where the trace does not say it (the replay then assumes `DEFAULT_RELEASE` and says so);
    `devices` is empty where it names none (`DEFAULT_DEVICE` is assumed). A group is a tuple of disjoint rank tuples:
    one tuple for a plain list, several for a mesh axis (each rank meets those of its own tuple).
    """

    ranks: tuple[RankEvents, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    conf: str = ""
    release: str | None = None
    devices: tuple[Device, ...] = ()
    groups: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what the reader assumed or skipped; shown to the user, not stored

    @property
    def world(self) -> int:
        """How many ranks the trace has."""
        return sum(len(group.ranks) for group in self.ranks)

    def device_of(self, group: RankEvents) -> Device:
        """The device of a rank, or the announced default."""
        return self.devices[group.device] if self.devices else DEFAULT_DEVICE
