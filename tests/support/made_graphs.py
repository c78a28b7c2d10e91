"""Step graphs for tests of the graph itself: made call by call, at random, or large; and their equality."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graph.model import Accesses, Kind, Operators, Role, StepGraph, Storages


@dataclass
class Maker:
    """Builds a step graph call by call, in the order of events."""

    case: dict[str, Any] = field(default_factory=lambda: {"model": "opt-125m"})
    names: dict[str, int] = field(default_factory=dict)
    phases: list[str] = field(default_factory=list)
    storages: list[tuple[int, ...]] = field(default_factory=list)
    operators: list[tuple[int, ...]] = field(default_factory=list)
    reads: list[list[tuple[int, int]]] = field(default_factory=list)
    writes: list[list[tuple[int, int]]] = field(default_factory=list)
    events: list[tuple[int, int, int]] = field(default_factory=list)
    versions: dict[int, int] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    at_phase: int = -1
    at_step: int = -1

    def code(self, text: str | None) -> int:
        return -1 if text is None else self.names.setdefault(text, len(self.names))

    def event(self, kind: Kind, index: int = 0, value: int = 0) -> None:
        self.events.append((int(kind), index, value))

    def phase(self, name: str, step: int = -1) -> None:
        if name not in self.phases:
            self.phases.append(name)
        self.at_phase, self.at_step = self.phases.index(name), step
        self.event(Kind.PHASE, self.at_phase, step)

    def operator(
        self,
        name: str,
        reads: Sequence[int] = (),
        writes: Sequence[int] = (),
        *,
        role: Role = Role.OTHER,
        module: str | None = None,
        flops: int = 0,
        moved: int = 0,
        stream: int = 0,
        thread: int = 0,
        origin: int = -1,
    ) -> int:
        """An operator; `writes` are storages that it changes. What it makes is told by `alloc` after it."""
        number = len(self.operators)
        self.event(Kind.OPERATOR, number)
        self.reads.append([(storage, self.versions[storage]) for storage in reads])
        for storage in writes:
            self.versions[storage] += 1
        self.writes.append([(storage, self.versions[storage]) for storage in writes])
        row = (int(role), self.at_phase, self.at_step, stream, thread, flops, moved, origin)
        self.operators.append((self.code(name), self.code(module), *row))
        return number

    def alloc(
        self,
        size: int,
        category: str = "activation",
        name: str | None = None,
        module: str | None = None,
        *,
        dtype: str | None = "float32",
        made: bool = True,
        source: int = -1,
        stream: int = 0,
    ) -> int:
        """A storage; `made`: it is a result of the last operator, if there is one."""
        number = len(self.storages)
        codes = (self.code(dtype), self.code(category), self.code(name), self.code(module))
        self.storages.append((size, *codes, stream, source))
        self.versions[number] = 0
        self.event(Kind.ALLOC, number)
        if made and self.writes:
            self.writes[-1].append((number, 0))
        return number

    def free(self, *storages: int) -> None:
        for storage in storages:
            self.event(Kind.FREE, storage)

    def graph(self, **fields: Any) -> StepGraph:
        storages = np.array(self.storages, dtype=np.int64).reshape(-1, 7).T
        operators = np.array(self.operators, dtype=np.int64).reshape(-1, 10).T
        events = np.array(self.events, dtype=np.int64).reshape(-1, 3).T
        values: dict[str, Any] = {
            "case": self.case,
            "environment": {"gpu": "A100-80GB"},
            "names": tuple(self.names),
            "phases": tuple(self.phases),
            "storages": Storages(*_typed(Storages, storages)),
            "operators": Operators(*_typed(Operators, operators)),
            "reads": _accesses(self.reads),
            "writes": _accesses(self.writes),
            "kind": events[0].astype(np.uint8),
            "index": events[1].astype(np.int32),
            "value": events[2].copy(),
            "parameters": dict(self.parameters),
        }
        return StepGraph(**{**values, **fields})


def _typed(table: Any, columns: Any) -> list[Any]:
    dtypes = {"bytes": np.int64, "flops": np.int64, "moved": np.int64, "role": np.uint8, "thread": np.uint8}
    names = [entry.name for entry in dataclasses.fields(table) if entry.name != "gpu_bytes"]
    return [column.astype(dtypes.get(name, np.int32)) for name, column in zip(names, columns, strict=True)]


def _accesses(rows: Sequence[Sequence[tuple[int, int]]]) -> Accesses:
    start = np.cumsum([0, *(len(row) for row in rows)]).astype(np.int64)
    flat = np.array([pair for row in rows for pair in row], dtype=np.int32).reshape(-1, 2)
    return Accesses(start, flat[:, 0].copy(), flat[:, 1].copy())


def example() -> StepGraph:
    """Two layers, forward, backward and one optimizer step; sizes in bytes that are easy to add up."""
    make = Maker()
    make.event(Kind.STEP, 0, 0)
    make.phase("load")
    make.operator("aten.empty.memory_format", role=Role.LOAD)
    weight = make.alloc(1000, "parameter", name="layers.0.weight", module="layers.0")
    make.parameters["layers.0.weight"] = weight
    other = make.alloc(2000, "parameter", name="layers.1.weight", module="layers.1", made=False)
    make.parameters["layers.1.weight"] = other
    make.operator("aten.copy_.default", writes=[weight], role=Role.LOAD, moved=1000)
    make.phase("forward", 0)
    x = make.alloc(100, "input", name="input_ids", made=False)
    first = make.operator("aten.mm.default", [x, weight], role=Role.FORWARD, module="layers.0", flops=500, moved=1400)
    hidden = make.alloc(300, name="aten.mm.default", module="layers.0")
    make.operator("aten.gelu.default", [hidden], role=Role.FORWARD, module="layers.0.act", moved=600)
    active = make.alloc(400, name="aten.gelu.default", module="layers.0.act")
    second = make.operator("aten.mm.default", [active, other], role=Role.FORWARD, module="layers.1", flops=700)
    loss = make.alloc(4, name="aten.mm.default", module="layers.1")
    logits = make.alloc(40, name="aten.mm.default", module="layers.1")
    spare = make.alloc(50, "temporary", name="workspace", made=False)
    make.free(spare)
    make.phase("backward", 0)
    make.operator(
        "aten.mm.default", [loss, active], role=Role.BACKWARD, module="layers.1", flops=700, thread=1, origin=second
    )
    gradient = make.alloc(2000, "gradient", name="layers.1.weight", module="layers.1", source=other)
    make.event(Kind.GRADIENT, other, gradient)
    make.free(active)
    make.operator("aten.gelu_backward.default", [hidden, loss], role=Role.BACKWARD, module="layers.0.act", thread=1)
    passed = make.alloc(300, "temporary", name="aten.gelu_backward.default", module="layers.0.act")
    make.free(hidden)
    make.operator(
        "aten.mm.default", [passed, x], role=Role.BACKWARD, module="layers.0", flops=500, thread=1, origin=first
    )
    gradient_0 = make.alloc(1000, "gradient", name="layers.0.weight", module="layers.0", source=weight)
    make.free(passed)
    make.phase("optimizer", 0)
    step = [weight, other, gradient, gradient_0]
    make.operator("aten._foreach_add_.List", step, [weight, other], role=Role.OPTIMIZER, moved=9000)
    make.free(logits)
    make.free(loss)
    make.free(gradient)
    make.free(gradient_0)
    return make.graph(assumptions=("every token is real",))


def random_graph(numbers: Sequence[int]) -> StepGraph:
    """A step graph whose every choice is taken from `numbers` (each any non-negative integer)."""
    make = Maker()
    alive: list[int] = []
    roles = list(Role)
    for number in numbers:
        what, rest = number % 8, number // 8
        if what == 0:
            make.phase(f"phase {rest % 3}", rest % 5 - 1)
        elif what == 1 and alive:
            make.free(alive.pop(rest % len(alive)))
        elif what == 2 and alive:
            make.event(Kind.RECORD_STREAM, alive[rest % len(alive)], rest % 3)
        elif what == 3:
            alive.append(make.alloc(rest % 4096, "input", made=False))
        else:
            reads = [alive[(rest // 7 + 3 * place) % len(alive)] for place in range(rest % 3)] if alive else []
            writes = [alive[(rest // 11) % len(alive)]] if alive and rest % 4 == 1 else []
            module = f"layers.{rest % 3}.mlp" if rest % 5 else None
            make.operator(
                f"aten.op{rest % 5}.default",
                reads,
                writes,
                role=roles[rest % len(roles)],
                module=module,
                flops=rest % 1000,
                moved=rest % 777,
                origin=len(make.operators) - 1 if rest % 2 else -1,
            )
            alive.extend(make.alloc(rest % 5000 + place, name="x", module=module) for place in range(rest % 3))
    return make.graph()


def large_graph(operators: int) -> StepGraph:
    """A chain of layers, forward and back, with as many operators as asked; each reads up to two and makes one."""
    make = Maker()
    make.phase("forward", 0)
    make.operator("aten.empty.memory_format")
    made = [make.alloc(4096)]
    for number in range(operators // 2):
        reads = [made[-1], made[-5]] if number % 2 and len(made) > 5 else [made[-1]]
        make.operator("aten.add.Tensor", reads, role=Role.FORWARD, module=f"layers.{number // 20}.mlp", flops=number)
        made.append(make.alloc(4096 + number % 100, module=f"layers.{number // 20}.mlp"))
    make.phase("backward", 0)
    while len(made) > 1 and len(make.operators) < operators:
        last = made.pop()
        make.operator("aten.mul.Tensor", [last, made[-1]], role=Role.BACKWARD, thread=1, moved=5)
        make.free(make.alloc(10, "temporary"))
        make.free(last)
    return make.graph()


def assert_equal(first: StepGraph, second: StepGraph) -> None:
    """Every field and every array, their dtypes included."""
    for entry in dataclasses.fields(StepGraph):
        _compare(getattr(first, entry.name), getattr(second, entry.name), entry.name)


def _compare(one: Any, two: Any, name: str) -> None:
    if dataclasses.is_dataclass(one):
        for entry in dataclasses.fields(one):
            _compare(getattr(one, entry.name), getattr(two, entry.name), f"{name}.{entry.name}")
    elif isinstance(one, np.ndarray):
        assert one.dtype == two.dtype, name
        np.testing.assert_array_equal(one, two, name)
    else:
        assert type(one) is type(two) or isinstance(one, Mapping), name
        assert one == two, name
