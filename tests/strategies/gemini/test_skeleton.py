"""The skeleton: who owns what in a step, and the walk that copies it where a strategy does nothing."""

from __future__ import annotations

import numpy as np

from graph.model import Role
from strategies.gemini.skeleton import Owner, Skeleton, Walker
from tests.support.sketch import Sketch
from tests.support.worked_examples import mlp, told
from traces.model import Op


def small() -> Skeleton:
    """One layer, one step: an activation from forward to backward, a gradient, a state and a temporary."""
    sketch = Sketch()
    weight = sketch.parameter("layer.weight", (4, 8))
    frozen = sketch.parameter("layer.frozen", (2,), "float16", trainable=False)
    sketch.step(0)
    sketch.phase("forward")
    sketch.enter("layer")
    sketch.operator("mm", "layer", (frozen, weight, weight))
    activation = sketch.alloc(100, name="out")
    sketch.leave("layer")
    sketch.phase("backward")
    sketch.operator("mm", "layer", (weight,), Role.BACKWARD)
    gradient = sketch.gradient(weight)
    sketch.free(activation)
    sketch.ready(weight, gradient)
    sketch.synchronize()
    sketch.phase("optimizer")
    sketch.operator("step", role=Role.OPTIMIZER)
    temporary = sketch.alloc(7, "temporary", "root")
    sketch.alloc(128, "optimizer_state", "state")
    sketch.free(temporary)
    sketch.phase("end")
    sketch.free(gradient)
    return sketch.skeleton({"": "Model", "layer": "Layer"})


def test_owners_and_uses() -> None:
    skeleton = small()
    owners = [Owner(owner).name for owner in skeleton.owner]
    assert owners == ["PARAMETER", "PARAMETER", "OTHER", "GRADIENT", "OPTIMIZER", "OPTIMIZER"]
    assert skeleton.parameter.tolist() == [0, 1, -1, 0, -1, -1]
    assert [skeleton.uses(operator) for operator in range(3)] == [(1, 0), (0,), ()]
    weight, frozen = skeleton.parameters
    assert (weight.elements, weight.bytes, weight.module, frozen.bytes) == (32, 128, "layer", 4)


def test_a_walk_copies_the_run() -> None:
    run = told(Walker(small()).run().events())
    assert run.parts == {
        "init": [("+", "layer.weight", 128), ("+", "layer.frozen", 4)],
        "step 1 forward": [("+", "out", 100)],
        "step 1 backward": [("+", "g.layer.weight", 128), ("-", "out", 100)],
        "step 1 optimizer": [("+", "root", 7), ("+", "state", 128), ("-", "root", 7)],
        "step 1 end": [("-", "g.layer.weight", 128)],
    }
    assert run.live == 128 + 4 + 128


class Seen(Walker):
    """Notes every call, and writes the optimizer's phase itself."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__(skeleton)
        self.seen: list[str] = []

    def loaded(self) -> None:
        self.seen.append("loaded")

    def enter(self, module: str) -> None:
        self.seen.append(f"enter {module}")

    def before(self, operator: int, uses: tuple[int, ...]) -> None:
        self.seen.append(f"before {operator} {uses} {self.phase_name}")

    def after(self, operator: int, uses: tuple[int, ...]) -> None:
        self.seen.append(f"after {operator} with {len(self.numbers)} alive")

    def gradient_ready(self, parameter: int, storage: int) -> None:
        self.seen.append(f"ready {parameter} {storage}")
        self.drop(storage)

    def optimizer(self, step: int) -> bool:
        self.seen.append(f"optimizer {step}")
        return True


def test_a_strategy_is_told_everything_in_order() -> None:
    walker = Seen(small())
    run = told(walker.run().events())
    assert walker.seen == [
        "loaded",
        "enter layer",
        "before 0 (1, 0) forward",
        "after 0 with 3 alive",
        "before 1 (0,) backward",
        "after 1 with 3 alive",
        "ready 0 3",
        "optimizer 0",
    ]
    assert run.live == 132  # the gradient died early, the optimizer's storages never lived


def test_durations_make_kernels() -> None:
    walker = Walker(small())
    walker.durations = np.array([5, 0, 9], dtype=np.int64)
    events = walker.run().events()
    assert events.ints("duration_ns")[events.op == Op.KERNEL].tolist() == [5, 9]


def test_a_recorded_run_without_optimizer_states_keeps_its_order() -> None:
    run = told(Walker(mlp()).run().events(), {"parameter": "p."})
    assert run.lines("step 2 backward") == [
        ("+", "g.b2", 1020),
        ("+", "g.w2", 522_240),
        ("+", "g.b1", 2048),
        ("+", "g.w1", 524_288),
    ]
