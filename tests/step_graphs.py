"""Step graphs written by hand, for tests: one call an event, and the tables made from them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from graph.case import Case
from graph.model import Accesses, Kind, Operators, Role, StepGraph, Storages

PHASES = ("load", "forward", "backward", "optimizer", "end")


class Writer:
    """Collects events, storages and operators; `graph` makes the step graph of them."""

    def __init__(self, case: Mapping[str, Any] | None = None) -> None:
        self.case = dict(case or {"model": "written"})
        self.names: dict[str, int] = {}
        self.storages: list[tuple[int, int, int, int, int, int, int]] = []
        self.operators: list[tuple[int, int, int, int]] = []
        self.events: list[tuple[int, int, int]] = []

    def code(self, text: str | None) -> int:
        """The code of a text in the graph's names; -1 for none."""
        return -1 if text is None else self.names.setdefault(text, len(self.names))

    def alloc(
        self,
        size: int,
        category: str = "activation",
        name: str | None = None,
        module: str | None = None,
        stream: int = 0,
    ) -> int:
        """A storage is born; its number."""
        codes = (self.code("float32"), self.code(category), self.code(name), self.code(module))
        self.storages.append((size, *codes, stream, -1))
        self.events.append((Kind.ALLOC, len(self.storages) - 1, 0))
        return len(self.storages) - 1

    def free(self, *storages: int) -> None:
        self.events += [(Kind.FREE, storage, 0) for storage in storages]

    def resize(self, storage: int, size: int) -> None:
        self.events.append((Kind.RESIZE, storage, size))

    def phase(self, name: str, step: int = -1) -> None:
        self.events.append((Kind.PHASE, PHASES.index(name), step))

    def operator(self, name: str, module: str | None = None, flops: int = 0, moved: int = 0) -> None:
        self.operators.append((self.code(name), self.code(module), flops, moved))
        self.events.append((Kind.OPERATOR, len(self.operators) - 1, 0))

    def event(self, kind: Kind, index: int = 0, value: int = 0) -> None:
        self.events.append((kind, index, value))

    def graph(self) -> StepGraph:
        storages = np.asarray(self.storages, dtype=np.int64).reshape(-1, 7)
        calls = np.asarray(self.operators, dtype=np.int64).reshape(-1, 4)
        events = np.asarray(self.events, dtype=np.int64).reshape(-1, 3)
        none = Accesses(np.zeros(len(calls) + 1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int32))
        zeros = np.zeros(len(calls), np.int32)
        return StepGraph(
            case=self.case,
            environment={"gpu": "written"},
            names=tuple(self.names),
            phases=PHASES,
            storages=Storages(storages[:, 0].copy(), *(storages[:, i].astype(np.int32) for i in range(1, 7))),
            operators=Operators(
                name=calls[:, 0].astype(np.int32),
                module=calls[:, 1].astype(np.int32),
                role=np.full(len(calls), Role.FORWARD, np.uint8),
                phase=zeros,
                step=zeros,
                stream=zeros,
                thread=np.zeros(len(calls), np.uint8),
                flops=calls[:, 2].copy(),
                moved=calls[:, 3].copy(),
                origin=zeros - 1,
            ),
            reads=none,
            writes=none,
            kind=events[:, 0].astype(np.uint8),
            index=events[:, 1].astype(np.int32),
            value=events[:, 2].copy(),
            assumptions=("routers spread tokens evenly",),
        )


def training(
    case: Mapping[str, Any] | None = None, *, steps: int = 2, micro: int = 1, unit: int = 3 << 20
) -> StepGraph:
    """A run of one parameter of `unit` bytes: activations, its gradient, and a state of the optimizer.

    Peaks in units: load 1; the n-th micro-batch's forward holds n activations at once, and backward one gradient more.
    """
    writer = Writer(case)
    writer.phase("load")
    writer.alloc(unit, "parameter", "layer.weight", "layer")
    gradient, state = -1, -1
    for step in range(steps):
        for batch in range(micro):
            writer.phase("forward", step)
            if batch == 0 and gradient >= 0:
                writer.free(gradient)
                gradient = -1
            writer.operator("aten.mm.default", "layer", flops=10**9, moved=3 * unit)
            acts = [writer.alloc(unit, "activation", "aten.mm.default", "layer") for _ in range(batch + 1)]
            writer.phase("backward", step)
            if gradient < 0:
                gradient = writer.alloc(unit, "gradient", "layer.weight", "layer")
            writer.free(*acts)
        writer.phase("optimizer", step)
        if state < 0:
            state = writer.alloc(unit, "optimizer_state", "layer.weight", "layer")
    writer.phase("end")
    return writer.graph()


def stub(case: Case) -> StepGraph:
    """In the place of a capture: the written run, or the misfortune that the model's name says."""
    what, _, seconds = case.model.partition(":")
    if what == "sleeps":
        time.sleep(float(seconds))
    elif what == "dies":
        os._exit(9)
    elif what == "fails":
        raise RuntimeError("first line\nsecond line")
    elif what == "exits":
        raise SystemExit(3)
    return training(case.document(), steps=case.steps, micro=case.accum)
