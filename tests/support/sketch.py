"""Skeletons of a step written down by hand, for worked examples and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from graph.dtypes import SIZES
from graph.model import Accesses, Kind, Operators, Role, StepGraph, Storages
from strategies.gemini.skeleton import LOAD, Parameter, Skeleton


class Sketch:
    """Writes a skeleton down by hand, event by event.

    Loading comes first (`parameter`), then `step`, `phase`, `operator` and what happens in it.
    """

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._phases: list[str] = [LOAD]
        self._storages: list[tuple[int, int, int, int, int]] = []  # bytes, dtype, category, name, source
        self._operators: list[tuple[int, int, int, int, int]] = []
        self._reads: list[list[int]] = []
        self._writes: list[list[int]] = []
        self._events: list[tuple[int, int, int]] = []
        self._parameters: list[Parameter] = []
        self._step = -1
        self._phase = 0

    def parameter(self, name: str, shape: Sequence[int], dtype: str = "float32", *, trainable: bool = True) -> int:
        """A parameter is loaded; answers its index."""
        size = prod(shape) * SIZES[dtype]
        storage = self._alloc(size, "parameter", name, dtype=dtype)
        self._parameters.append(Parameter(name, tuple(shape), dtype, trainable, storage))
        return len(self._parameters) - 1

    def step(self, number: int) -> None:
        """Iteration `number` starts."""
        self._step = number
        self._events.append((Kind.STEP, number, number))

    def phase(self, name: str) -> None:
        """A phase of the iteration starts."""
        if name not in self._phases:
            self._phases.append(name)
        self._phase = self._phases.index(name)
        self._events.append((Kind.PHASE, self._phase, self._step))

    def operator(
        self,
        name: str,
        module: str = "",
        uses: Sequence[int] = (),
        role: Role = Role.FORWARD,
        *,
        reads: Sequence[int] = (),
    ) -> int:
        """An operator runs that reads these parameters and storages and writes what is born next; its number."""
        self._operators.append((self._code(name), self._code(module), int(role), self._phase, self._step))
        self._reads.append([*(self._parameters[use].storage for use in uses), *reads])
        self._writes.append([])
        self._events.append((Kind.OPERATOR, len(self._operators) - 1, 0))
        return len(self._operators) - 1

    def enter(self, module: str) -> None:
        """A module's forward starts."""
        self._events.append((Kind.ENTER, self._code(module), 0))

    def leave(self, module: str) -> None:
        """A module's forward has ended."""
        self._events.append((Kind.EXIT, self._code(module), 0))

    def alloc(self, size: int, category: str = "activation", name: str = "") -> int:
        """A storage that no strategy replaces is born; answers its number."""
        return self._alloc(size, category, name)

    def free(self, storage: int) -> None:
        """A storage dies."""
        self._events.append((Kind.FREE, storage, 0))

    def gradient(self, parameter: int) -> int:
        """A parameter's gradient is born, in the parameter's dtype; answers its storage."""
        owner = self._parameters[parameter]
        return self._alloc(owner.bytes, "gradient", owner.name, source=owner.storage, dtype=owner.dtype)

    def ready(self, parameter: int, storage: int) -> None:
        """The parameter's gradient is complete, in `storage`."""
        self._events.append((Kind.GRADIENT, self._parameters[parameter].storage, storage))

    def synchronize(self) -> None:
        """The host waits."""
        self._events.append((Kind.SYNCHRONIZE, 0, 0))

    def skeleton(self, modules: Mapping[str, str] | None = None) -> Skeleton:
        """What has been written, as a skeleton."""
        storages = np.array(self._storages, dtype=np.int64).reshape(-1, 5)
        count = len(storages)
        minus = np.full(count, -1, dtype=np.int32)
        operators = np.array(self._operators, dtype=np.int64).reshape(-1, 5)
        events = np.array(self._events, dtype=np.int64).reshape(-1, 3)
        number = len(operators)
        graph = StepGraph(
            case={},
            environment={},
            names=tuple(self._names),
            phases=tuple(self._phases),
            storages=Storages(
                storages[:, 0],
                storages[:, 1].astype(np.int32),
                storages[:, 2].astype(np.int32),
                storages[:, 3].astype(np.int32),
                minus,
                np.zeros(count, dtype=np.int32),
                storages[:, 4].astype(np.int32),
            ),
            operators=Operators(
                operators[:, 0].astype(np.int32),
                operators[:, 1].astype(np.int32),
                operators[:, 2].astype(np.uint8),
                operators[:, 3].astype(np.int32),
                operators[:, 4].astype(np.int32),
                np.zeros(number, dtype=np.int32),
                np.zeros(number, dtype=np.uint8),
                np.zeros(number, dtype=np.int64),
                np.zeros(number, dtype=np.int64),
                np.full(number, -1, dtype=np.int32),
            ),
            reads=_accesses(self._reads),
            writes=_accesses(self._writes),
            kind=events[:, 0].astype(np.uint8),
            index=events[:, 1].astype(np.int32),
            value=events[:, 2],
            parameters={one.name: one.storage for one in self._parameters},
        )
        return Skeleton.of(graph, self._parameters, modules)

    def _code(self, text: str) -> int:
        return self._names.setdefault(text, len(self._names))

    def _alloc(self, size: int, category: str, name: str, *, source: int = -1, dtype: str = "") -> int:
        row = (size, self._code(dtype) if dtype else -1, self._code(category), self._code(name), source)
        self._storages.append(row)
        self._events.append((Kind.ALLOC, len(self._storages) - 1, 0))
        if self._writes:
            self._writes[-1].append(len(self._storages) - 1)
        return len(self._storages) - 1


def _accesses(rows: Sequence[Sequence[int]]) -> Accesses:
    """What operators read or write, of version 0 each."""
    start = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    flat = np.array([storage for row in rows for storage in row], dtype=np.int32)
    return Accesses(start, flat, np.zeros(len(flat), dtype=np.int32))
