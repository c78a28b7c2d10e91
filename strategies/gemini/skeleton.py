"""The skeleton of a step: what every strategy rewrites, made from a captured step graph.

A skeleton is a step graph seen by who owns each storage. Storages of parameters, of their gradients and of the
optimizer are what a strategy replaces; all others (activations, inputs, buffers, workspaces) stay. `Walker` goes
through the events once and calls a method for each; its own methods copy the run as captured (one GPU), and a strategy
overrides those where it differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import prod
from typing import Final

import numpy as np

from graph.dtypes import SIZES
from graph.model import Int32Array, Int64Array, Kind, Role, StepGraph, UInt8Array
from strategies.gemini.event_builder import EventBuilder
from traces.model import Op

#: Phases of a captured run.
OPTIMIZER: Final = "optimizer"
LOAD: Final = "load"
FORWARD: Final = "forward"
BACKWARD: Final = "backward"
#: What an embedding's forward is among captured operators.
EMBEDDINGS: Final = ("aten.embedding.default", "aten.index_select.default")


class Owner(IntEnum):
    """Whose storage it is: what a strategy may do with it."""

    OTHER = 0  # keeps its place
    PARAMETER = 1
    GRADIENT = 2  # of a parameter, the storage that ends in .grad
    OPTIMIZER = 3  # a state, or anything else that is born in the optimizer's phase


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter: `size` bytes an element, `storage` its number in the graph, `module` the path of its owner."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    storage: int

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes an element."""
        return SIZES.get(self.dtype, 1)

    @property
    def bytes(self) -> int:
        """Bytes of the whole parameter."""
        return self.elements * self.size

    @property
    def module(self) -> str:
        """The path of the module that holds it ("" for the root)."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Skeleton:
    """A step graph and who owns what in it.

    `parameters` are in the order of `module.parameters()`, tied ones once. `owner` has an `Owner` a storage;
    `parameter` the index into `parameters` of the one that a storage belongs to (-1: none). Operator `i` reads the
    parameters `used[use_start[i]:use_start[i + 1]]`. `modules`: path -> class name, in the order of `named_modules()`.
    """

    graph: StepGraph
    parameters: tuple[Parameter, ...]
    owner: UInt8Array
    parameter: Int32Array
    use_start: Int64Array
    used: Int32Array
    modules: Mapping[str, str] = field(default_factory=dict)

    def uses(self, operator: int) -> tuple[int, ...]:
        """The parameters that an operator reads, each once, in the order of its arguments."""
        return tuple(int(p) for p in self.used[self.use_start[operator] : self.use_start[operator + 1]])

    def text(self, code: int) -> str:
        """The text of a code, or nothing for -1."""
        return self.graph.names[code] if code >= 0 else ""

    @classmethod
    def captured(cls, graph: StepGraph) -> Skeleton:
        """The skeleton of a captured graph: its own parameters and modules."""
        parameters = [
            Parameter(one.name, one.shape, one.dtype, one.requires_grad, one.storage)
            for one in graph.tensors
            if one.kind == "parameter"
        ]
        return cls.of(graph, parameters, dict(graph.modules))

    @classmethod
    def of(
        cls,
        graph: StepGraph,
        parameters: Sequence[Parameter],
        modules: Mapping[str, str] | None = None,
    ) -> Skeleton:
        """Find who owns each storage of a graph.

        A gradient is a storage of category `gradient` whose `source` is a parameter's storage; what is born in the
        phase `optimizer` is the optimizer's, and so is every `optimizer_state`.
        """
        count = len(graph.storages)
        owner = np.zeros(count, dtype=np.uint8)
        index = np.full(count, -1, dtype=np.int32)
        by_storage = {parameter.storage: number for number, parameter in enumerate(parameters)}
        for storage, number in by_storage.items():
            owner[storage], index[storage] = Owner.PARAMETER, number
        categories = _codes(graph, "gradient", "optimizer_state")
        born = _birth_phases(graph)
        sources = graph.storages.source
        for storage in range(count):
            if owner[storage]:
                continue
            category = int(graph.storages.category[storage])
            source = by_storage.get(int(sources[storage]), -1)
            if category == categories[0] and source >= 0:
                owner[storage], index[storage] = Owner.GRADIENT, source
            elif category == categories[1] or born[storage] == OPTIMIZER:
                owner[storage], index[storage] = Owner.OPTIMIZER, source
        start, used = _uses(graph, by_storage)
        return cls(graph, tuple(parameters), owner, index, start, used, dict(modules or {}))


def _codes(graph: StepGraph, *texts: str) -> list[int]:
    """The codes of texts in a graph's names; -2, which no entry has, where one is missing."""
    known = {text: code for code, text in enumerate(graph.names)}
    return [known.get(text, -2) for text in texts]


def _birth_phases(graph: StepGraph) -> list[str]:
    """The phase in which each storage is born."""
    found = [LOAD] * len(graph.storages)
    phase = LOAD
    for kind, index in zip(graph.kind.tolist(), graph.index.tolist(), strict=True):
        if kind == Kind.PHASE:
            phase = graph.phases[index]
        elif kind == Kind.ALLOC:
            found[index] = phase
    return found


def _uses(graph: StepGraph, by_storage: Mapping[int, int]) -> tuple[Int64Array, Int32Array]:
    """Which parameters each operator reads, as starts and flat indices."""
    start = [0]
    flat: list[int] = []
    begins = graph.reads.start.tolist()
    storages = graph.reads.storage.tolist()
    for operator in range(len(graph.operators)):
        read = (by_storage.get(storage, -1) for storage in storages[begins[operator] : begins[operator + 1]])
        flat.extend(dict.fromkeys(number for number in read if number >= 0))
        start.append(len(flat))
    return np.array(start, dtype=np.int64), np.array(flat, dtype=np.int32)


class Walker:
    """Goes through a skeleton's events in order; its methods copy the run to `out`.

    A strategy overrides what it does differently. `numbers` maps storages of the graph to those of `out`; one that is
    missing there has no storage in this run. `durations`, nanoseconds of each operator, make kernels of them; none are
    written without. `phase_name` and `step_number` say where the walk is.
    """

    def __init__(self, skeleton: Skeleton, out: EventBuilder | None = None) -> None:
        self.skeleton = skeleton
        self.out = out if out is not None else EventBuilder()
        self.numbers: dict[int, int] = {}
        self.phase_name = LOAD
        self.step_number = -1
        self.current = -1  # the operator that runs, or has run last
        self.durations: Int64Array | None = None
        self._skipping = False

    # What a strategy overrides -----------------------------------------------------------------------------------

    def loaded(self) -> None:
        """All that is loaded is on the GPU; the first step has not begun: build chunks, buckets, shards."""

    def phase(self, name: str, step: int) -> None:
        """A phase starts."""
        self.out.phase(name, step)

    def enter(self, module: str) -> None:
        """A module's forward starts (again, inside backward, for a checkpoint)."""

    def before(self, operator: int, uses: tuple[int, ...]) -> None:
        """An operator is about to run; nothing of it is allocated yet. `uses`: parameters that it reads."""

    def after(self, operator: int, uses: tuple[int, ...]) -> None:
        """An operator has run: all it allocates is allocated; what dies after it may have died already."""

    def allocate(self, storage: int) -> None:
        """A storage of the run itself is born: an activation, an input, a buffer, a workspace."""
        self.place(storage)

    def release(self, storage: int) -> None:
        """A storage of the run itself dies."""
        self.drop(storage)

    def parameter_allocated(self, parameter: int) -> None:
        """A parameter is loaded to the GPU."""
        self.place(self.skeleton.parameters[parameter].storage)

    def gradient_allocated(self, parameter: int, storage: int) -> None:
        """A gradient of a parameter is born: an operator writes it; it is not complete yet."""
        self.place(storage)

    def gradient_released(self, parameter: int, storage: int) -> None:
        """The captured run drops a gradient: in zero_grad, or because a sum has replaced it."""
        self.drop(storage)

    def gradient_ready(self, parameter: int, storage: int) -> None:
        """The gradient of a parameter is complete for this backward, in `storage` (-1: not known)."""

    def optimizer(self, step: int) -> bool:
        """The optimizer's phase starts. True: its events are written here, the captured ones are left out."""
        return False

    # What it offers ----------------------------------------------------------------------------------------------

    @property
    def role(self) -> int:
        """The role of the current operator."""
        return int(self.skeleton.graph.operators.role[self.current]) if self.current >= 0 else int(Role.LOAD)

    def place(self, storage: int, size: int | None = None) -> int:
        """Write the birth of a storage as captured (or of another `size`); answers its number in `out`."""
        storages = self.skeleton.graph.storages
        number = self.out.alloc(
            int(storages.bytes[storage]) if size is None else size,
            self.skeleton.text(int(storages.category[storage])) or "unknown",
            self.skeleton.text(int(storages.name[storage])),
            int(storages.stream[storage]),
        )
        self.numbers[storage] = number
        return number

    def drop(self, storage: int) -> None:
        """Write the death of a storage, if it is alive in this run."""
        number = self.numbers.pop(storage, None)
        if number is not None:
            self.out.free(number)

    def run(self) -> EventBuilder:
        """Walk all events; answers `out`."""
        graph = self.skeleton.graph
        loading = True
        for kind, index, value in zip(graph.kind.tolist(), graph.index.tolist(), graph.value.tolist(), strict=True):
            if loading and (kind == Kind.STEP or (kind == Kind.PHASE and graph.phases[index] != LOAD)):
                loading = False
                self.loaded()
            if kind == Kind.OPERATOR:
                self._operator(index)
            elif kind in (Kind.ALLOC, Kind.FREE):
                self._storage(index, kind == Kind.ALLOC)
            else:
                self._finish()
                self._mark(kind, index, value)
        self._finish()
        if loading:
            self.loaded()
        return self.out

    # Inside ------------------------------------------------------------------------------------------------------

    _open = -1  # the operator whose end has not been told

    def _operator(self, index: int) -> None:
        self._finish()
        if self._skipping:
            return
        self.current = self._open = index
        self.before(index, self.skeleton.uses(index))
        if self.durations is not None:
            operators = self.skeleton.graph.operators
            self.out.kernel(
                int(self.durations[index]),
                self.skeleton.text(int(operators.name[index])),
                flops=int(operators.flops[index]),
                moved=int(operators.moved[index]),
            )

    def _finish(self) -> None:
        if self._open >= 0:
            done, self._open = self._open, -1
            self.after(done, self.skeleton.uses(done))

    def _storage(self, storage: int, born: bool) -> None:
        owner = self.skeleton.owner[storage]
        if owner == Owner.OTHER:
            (self.allocate if born else self.release)(storage)
        elif owner == Owner.OPTIMIZER:
            if born and not self._skipping:
                self.place(storage)
            elif not born:
                self.drop(storage)
        else:
            parameter = int(self.skeleton.parameter[storage])
            if owner == Owner.PARAMETER:
                if born:
                    self.parameter_allocated(parameter)
                else:
                    self.drop(self.skeleton.parameters[parameter].storage)
            else:
                (self.gradient_allocated if born else self.gradient_released)(parameter, storage)

    def _mark(self, kind: int, index: int, value: int) -> None:
        if kind == Kind.PHASE:
            self.phase_name = self.skeleton.graph.phases[index]
            self._skipping = False
            self.phase(self.phase_name, value)
            if self.phase_name == OPTIMIZER:
                self._skipping = self.optimizer(value)
        elif kind == Kind.STEP:
            self.step_number = value
        elif kind == Kind.ENTER:
            self.enter(self.skeleton.text(index))
        elif kind == Kind.GRADIENT:
            storage = value if value >= 0 and self.skeleton.owner[value] == Owner.GRADIENT else -1
            self.gradient_ready(int(self.skeleton.parameter[index]), storage)
        elif kind == Kind.SYNCHRONIZE:
            self.out.add(Op.SYNCHRONIZE)
