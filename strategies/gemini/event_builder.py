"""The event builder: grows one rank's events in program order and yields the trace's arrays."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

import numpy as np

from traces.model import STRING_FIELDS, Column, Events, Op, Strings

#: The streams of a rank, as handles order them: compute first, then those that a strategy names.
COMPUTE: Final = 0


class EventBuilder:
    """Appends events; `events()` turns them into columns.

    Storages get the numbers 0, 1, 2, ... in the order of their births. Only fields that some event sets become columns.
    """

    def __init__(self) -> None:
        self._op: list[Op] = []
        self._fields: dict[str, dict[int, Any]] = defaultdict(dict)  # field: value by position
        self._bytes: list[int] = []  # of every storage
        self._dead: set[int] = set()

    def add(self, op: Op, **fields: object) -> None:
        """An event with those of the fields that say something."""
        for name, value in fields.items():
            self._fields[name][len(self._op)] = value
        self._op.append(op)

    def alloc(self, size: int, category: str, name: str, stream: int = COMPUTE) -> int:
        """A storage of `size` bytes is born on `stream`; answers its number."""
        number = len(self._bytes)
        self._bytes.append(size)
        self.add(Op.ALLOC, id=number, bytes=size, category=category, name=name, **_said(stream=stream))
        return number

    def free(self, number: int) -> None:
        """Storage `number` dies. Raises ValueError if it is dead already."""
        if number in self._dead:
            raise ValueError(f"storage {number} is freed twice")
        self._dead.add(number)
        self.add(Op.FREE, id=number)

    def size(self, number: int) -> int:
        """Requested bytes of a storage."""
        return self._bytes[number]

    def record_stream(self, number: int, stream: int) -> None:
        """Storage `number` is in use on `stream` as well."""
        self.add(Op.RECORD_STREAM, id=number, stream=stream)

    def phase(self, name: str, step: int = -1) -> None:
        """A phase starts."""
        self.add(Op.PHASE, name=name, **({"step": step} if step >= 0 else {}))

    def kernel(self, duration_ns: int, name: str, *, stream: int = COMPUTE, flops: int = 0, moved: int = 0) -> None:
        """Work on `stream`; nothing is written where it takes no time."""
        if duration_ns > 0:
            said = _said(stream=stream, flops=flops, bytes=moved)
            self.add(Op.KERNEL, duration_ns=duration_ns, name=name, **said)

    def collective(
        self, kind: str, group: str, size: int, duration_ns: int = 0, *, stream: int, name: str = ""
    ) -> None:
        """A collective of `size` bytes among this rank's part of `group` (a name of the trace's groups)."""
        said = _said(duration_ns=duration_ns, stream=stream, name=name)
        self.add(Op.COLLECTIVE, kind=kind, group=group, bytes=size, **said)

    def events(self) -> Events:
        """The events so far, as columns."""
        plain = Events(np.asarray(self._op, dtype=np.uint8))
        columns: dict[str, Column] = {}
        for field, values in self._fields.items():
            if field in STRING_FIELDS:
                columns[field] = Strings.encode([values.get(place) for place in range(len(plain))])
            else:
                column = plain.bools(field) if field == "hold" else plain.ints(field)
                column[list(values)] = list(values.values())
                columns[field] = column
        return plain.with_columns(**columns)


def _said(**fields: object) -> dict[str, Any]:
    """The fields that are not 0 or empty."""
    return {name: value for name, value in fields.items() if value}
