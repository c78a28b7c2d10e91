"""The event builder that all strategies share: grows one rank's events as columns and yields the trace's arrays."""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np

from traces.model import Column, Events, Op, Strings

#: The streams of a rank, as handles order them: compute first, then those that a strategy names.
COMPUTE: Final = 0


class EventBuilder:
    """Appends events in program order; `events()` turns them into columns.

    Storages get the numbers 0, 1, 2, ... in the order of their births. Only fields that some event sets become columns.
    `live` and `peak` are requested bytes alive now and at most, by the order of events alone.
    """

    def __init__(self) -> None:
        self._op = array("B")
        self._ints: dict[str, tuple[array[int], array[int]]] = {}  # field: positions, values
        self._texts: dict[str, tuple[array[int], array[int]]] = {}  # field: positions, codes
        self._codes: dict[str, dict[str, int]] = {}
        self._bytes = array("q")  # of every storage
        self._dead = bytearray()
        self._held: list[tuple[int, bool]] = []
        self.live = 0
        self.peak = 0

    def __len__(self) -> int:
        return len(self._op)

    def alloc(self, size: int, category: str, name: str, stream: int = COMPUTE) -> int:
        """A storage of `size` bytes is born on `stream`; answers its number."""
        number = len(self._bytes)
        self._add(Op.ALLOC)
        self._int("id", number)
        self._int("bytes", size)
        if stream:
            self._int("stream", stream)
        self._text("category", category)
        self._text("name", name)
        self._bytes.append(size)
        self._dead.append(0)
        self.live += size
        self.peak = max(self.peak, self.live)
        return number

    def free(self, number: int) -> None:
        """Storage `number` dies. Raises ValueError if it is dead already."""
        if self._dead[number]:
            raise ValueError(f"storage {number} is freed twice")
        self._dead[number] = 1
        self.live -= self._bytes[number]
        self._add(Op.FREE)
        self._int("id", number)

    def size(self, number: int) -> int:
        """Requested bytes of a storage."""
        return self._bytes[number]

    def alive(self, number: int) -> bool:
        """Whether a storage has not been freed."""
        return not self._dead[number]

    def record_stream(self, number: int, stream: int) -> None:
        """Storage `number` is in use on `stream` as well."""
        self._add(Op.RECORD_STREAM)
        self._int("id", number)
        self._int("stream", stream)

    def hold_events(self, hold: bool) -> None:
        """From now on recorded events stay incomplete until the host waits (True), or are complete at once."""
        self._add(Op.HOLD_EVENTS)
        self._held.append((len(self._op) - 1, hold))

    def wait_stream(self, stream: int, on: int) -> None:
        """What comes on `stream` starts after what is on stream `on` now."""
        self._add(Op.WAIT_STREAM)
        self._int("stream", stream)
        self._int("on", on)

    def synchronize(self, stream: int | None = None) -> None:
        """The host waits for `stream`, or for all."""
        self._add(Op.SYNCHRONIZE)
        if stream is not None:
            self._int("stream", stream)

    def empty_cache(self) -> None:
        """As torch.cuda.empty_cache()."""
        self._add(Op.EMPTY_CACHE)

    def reset_peak(self) -> None:
        """As torch.cuda.reset_peak_memory_stats()."""
        self._add(Op.RESET_PEAK)

    def statistics(self) -> None:
        """The allocator's counters are reported at this point."""
        self._add(Op.STATISTICS)

    def phase(self, name: str, step: int = -1) -> None:
        """A phase starts."""
        self._add(Op.PHASE)
        self._text("name", name)
        if step >= 0:
            self._int("step", step)

    def kernel(self, duration_ns: int, name: str, *, stream: int = COMPUTE, flops: int = 0, moved: int = 0) -> None:
        """Work on `stream`; nothing is written where it takes no time."""
        if duration_ns <= 0:
            return
        self._add(Op.KERNEL)
        self._int("duration_ns", duration_ns)
        self._text("name", name)
        if stream:
            self._int("stream", stream)
        if flops:
            self._int("flops", flops)
        if moved:
            self._int("bytes", moved)

    def collective(
        self, kind: str, group: str, size: int, duration_ns: int = 0, *, stream: int, name: str = ""
    ) -> None:
        """A collective of `size` bytes among this rank's part of `group` (a name of the trace's groups)."""
        self._add(Op.COLLECTIVE)
        self._text("kind", kind)
        self._text("group", group)
        self._int("bytes", size)
        if duration_ns:
            self._int("duration_ns", duration_ns)
        if stream:
            self._int("stream", stream)
        if name:
            self._text("name", name)

    def events(self) -> Events:
        """The events so far, as columns."""
        count = len(self._op)
        columns: dict[str, Column] = {}
        plain = Events(np.frombuffer(self._op, dtype=np.uint8).copy())
        for field, (positions, values) in self._ints.items():
            column = plain.ints(field).copy()
            column[np.frombuffer(positions, dtype=np.int64)] = np.frombuffer(values, dtype=np.int64)
            columns[field] = column
        for field, (positions, codes) in self._texts.items():
            filled = np.full(count, -1, dtype=np.int32)
            filled[np.frombuffer(positions, dtype=np.int64)] = np.frombuffer(codes, dtype=np.int64)
            columns[field] = Strings(filled, tuple(self._codes[field]))
        if self._held:
            hold = plain.bools("hold").copy()
            hold[[place for place, _ in self._held]] = [value for _, value in self._held]
            columns["hold"] = hold
        return Events(plain.op, columns)

    def _add(self, op: Op) -> None:
        self._op.append(op)

    def _int(self, field: str, value: int) -> None:
        column = self._ints.get(field)
        if column is None:
            column = self._ints[field] = (array("q"), array("q"))
        column[0].append(len(self._op) - 1)
        column[1].append(value)

    def _text(self, field: str, value: str) -> None:
        column = self._texts.get(field)
        if column is None:
            column = self._texts[field] = (array("q"), array("q"))
            self._codes[field] = {}
        codes = self._codes[field]
        code = codes.setdefault(value, len(codes))
        column[0].append(len(self._op) - 1)
        column[1].append(code)
