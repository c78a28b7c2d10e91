"""Categories and phases of recordings: against the estimate of the same case, and rule by rule on small recordings."""

from __future__ import annotations

import gzip
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest

from simulator.engine.replay import replay
from simulator.snapshots.reader import read
from simulator.snapshots.roles import Roles, find_roles
from tests.places import DATA as _DATA
from traces.model import Op
from traces.snapshot.layout import ALLOC, FREE_COMPLETED, FREE_REQUESTED, Annotation, Entries

DATA = _DATA / "snapshots"
MIB = 1 << 20


class Recording:
    """Entries as a program makes them: `alloc` and `free`, each a microsecond later, within ranges and stacks."""

    def __init__(self) -> None:
        self.entries = Entries()
        self.annotations: list[Annotation] = []
        self.stack: list[str] = []
        self.time = self.address = 0

    def _entry(self, kind: int, address: int, size: int) -> None:
        self.time += 10
        frames = "\n".join(reversed(self.stack)) or None
        row = {"kind": kind, "address": address, "size": size, "stream": 0, "pool": None, "name": None}
        for name, value in {**row, "frames": frames, "entry": len(self.entries), "time_us": self.time}.items():
            getattr(self.entries, name).append(value)

    def alloc(self, size: int) -> int:
        self.address += 1 << 30
        self._entry(ALLOC, self.address, size)
        return len(self.entries) - 1

    def free(self, *allocations: int) -> None:
        for i in allocations:
            for kind in (FREE_REQUESTED, FREE_COMPLETED):
                self._entry(kind, self.entries.address[i], self.entries.size[i])

    def mark(self, name: str, starts: bool) -> None:
        self.time += 10
        self.annotations.append(Annotation(name, 0, starts, self.time))
        self.time += 10

    def roles(self) -> Roles:
        return find_roles(self.entries, tuple(self.annotations))


SIZES = (4096, 8192, 16384)


def train(found: Recording, *, micro_batches: int = 1, steps: int = 3, told: bool = True) -> dict[str, list[int]]:
    """A made training run, and what each allocation is for."""
    what: dict[str, list[int]] = {}

    def alloc(name: str, size: int) -> int:
        what.setdefault(name, []).append(found.alloc(size))
        return what[name][-1]

    for size in SIZES:
        alloc("parameter", size)
    for step in range(steps):
        gradients: list[int] = []
        for micro in range(micro_batches):
            kept = []
            for layer in range(6):
                kept.append(alloc("activation", 1000 + layer))
                found.free(alloc("temporary", 3000 + layer))
            loss = alloc("activation", 4)
            if step == micro == 0:
                alloc("unknown", 8519680)  # a workspace
            seed = alloc("temporary", 4)
            for layer, (one, size) in enumerate(zip(reversed(kept), SIZES * 2, strict=True)):
                scratch = alloc("temporary", 5000 + layer)
                if micro == 0 and layer < len(SIZES):
                    gradients.append(alloc("gradient", size))
                found.free(scratch, one)
            found.free(seed, loss)
        if told:
            found.mark("Optimizer.step#AdamW.step", True)
        for size in SIZES:
            if step == 0:
                alloc("optimizer_state", size)
            found.free(alloc("temporary", size))
        if told:
            found.mark("Optimizer.step#AdamW.step", False)
            found.mark("Optimizer.zero_grad#AdamW.zero_grad", True)
        found.free(*gradients)
        if told:
            found.mark("Optimizer.zero_grad#AdamW.zero_grad", False)
    return what


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_ranges_of_the_optimizer_tell_everything(micro_batches: int) -> None:
    found = Recording()
    what = train(found, micro_batches=micro_batches)
    roles = found.roles()
    for name, allocations in what.items():
        assert {roles.categories[i] for i in allocations} == {None if name == "unknown" else name}, name
    once = ["forward", "backward"] * micro_batches + ["optimizer"]
    wanted = [("load", 0), *((name, step) for step in range(3) for name in once)]
    assert [(name, step) for _, name, step in roles.phases] == wanted


def test_nothing_is_told_without_ranges_or_stacks() -> None:
    found = Recording()
    train(found, told=False)
    roles = found.roles()
    assert set(roles.categories) == {None}
    assert roles.phases == ()


def test_nothing_is_told_of_a_pipeline_by_sizes() -> None:
    """Its forwards and backwards take turns."""
    found = Recording()
    what = train(found)
    found.annotations[:0] = [Annotation("nccl:send", 0, starts, 1) for starts in (True, False)]
    roles = found.roles()
    assert {roles.categories[i] for i in what["activation"]} == {None}
    assert {name for _, name, _ in roles.phases} == {"optimizer"}


def test_ranges_count_for_nothing_where_times_go_backwards() -> None:
    found = Recording()
    train(found)
    found.entries.time_us[5] += 1_000_000
    assert set(found.roles().categories) == {None}


MAIN = "/home/me/train.py:1:<module>"
STACKS = {
    "load": (MAIN, "/lib/python3/site-packages/torch/nn/modules/module.py:900:_apply"),
    "forward": (MAIN, "/lib/site-packages/torch/nn/modules/module.py:1500:_call_impl", "/me/model.py:9:forward"),
    "backward": (MAIN, "/lib/python3/site-packages/torch/autograd/graph.py:800:_engine_run_backward"),
    "hook": ("/home/me/hooks.py:3:reduce",),
    "optimizer": (MAIN, "/lib/python3/site-packages/torch/optim/adamw.py:200:step"),
    "own optimizer": (MAIN, "/home/me/my_optim.py:20:step"),
    "communication": (MAIN, "/lib/site-packages/torch/distributed/distributed_c10d.py:77:all_reduce"),
}  # fmt: skip


def test_stacks_tell_stages() -> None:
    found = Recording()

    def alloc(stage: str, size: int) -> int:
        found.stack = list(STACKS.get(stage, ()))
        return found.alloc(size)

    parameter = alloc("load", 4096)
    lost = alloc("load", 77)
    found.free(lost)
    kept, short = alloc("forward", 100), alloc("forward", 200)
    found.free(short)
    gradient, scratch, reduced = alloc("backward", 4096), alloc("hook", 300), alloc("communication", 50)
    found.free(scratch, reduced)
    bare = alloc("none", 60)  # autograd's own thread
    found.free(kept, bare)
    state, step = alloc("optimizer", 4096), alloc("own optimizer", 4096)
    found.free(step, gradient)
    alloc("forward", 100)
    roles = found.roles()
    told = {
        parameter: "parameter", lost: "temporary", kept: "activation", short: "temporary", gradient: "gradient",
        scratch: "temporary", reduced: "communication", bare: "temporary", state: "optimizer_state", step: "temporary",
    }  # fmt: skip
    assert {i: roles.categories[i] for i in told} == told
    names = [(name, step) for _, name, step in roles.phases]
    assert names == [("load", 0), ("forward", 0), ("backward", 0), ("optimizer", 0), ("forward", 1)]


def test_recomputation_in_a_backward_makes_activations_again() -> None:
    found = Recording()
    found.stack = list(STACKS["forward"])
    first = found.alloc(10)
    found.stack = [*STACKS["backward"], *STACKS["forward"][1:]]
    again = found.alloc(100)
    found.stack = list(STACKS["backward"])
    scratch = found.alloc(200)
    found.free(scratch, again, first)
    roles = found.roles()
    assert [roles.categories[i] for i in (first, again, scratch)] == ["activation", "activation", "temporary"]
    assert [name for _, name, _ in roles.phases] == ["forward", "backward"]


# Real recordings ------------------------------------------------------------------------------------------------------


def test_a_real_run_is_what_its_estimate_says(estimated_sgd: Any) -> None:
    """The estimate knows what every tensor is for; the recording has the optimizer's ranges alone."""
    recorded = replay(read(DATA / "opt-125m_fp32_sdpa_b2_s512_sgd_A100.pickle.gz"), analyse=False).ranks[0].peak
    known = estimated_sgd.result.ranks[0].peak
    assert recorded.allocated == pytest.approx(known.allocated, rel=0.001)
    for name in ("parameter", "activation", "temporary"):
        assert recorded.by_category[name] == pytest.approx(known.by_category[name], abs=MIB), name
    rest = sum(known.by_category.get(name, 0) for name in ("workspace", "buffer", "input"))
    assert recorded.by_category["unknown"] == pytest.approx(rest, abs=2 * MIB)  # what no rule tells


@pytest.fixture(scope="module")
def estimated_sgd() -> Any:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from simulator.estimator.estimate import estimate

    return estimate({"model": "opt-125m", "batch": 2, "optimizer": "sgd"}, context=0, analyse=False)


def test_phases_and_steps_of_a_real_run() -> None:
    line = replay(read(DATA / "opt-125m_fp32_sdpa_b2_s512_sgd_A100.pickle.gz"), analyse=False).ranks[0].timeline
    assert [(span.name, span.step) for span in line.phases] == [
        ("load", None),
        *((name, step) for step in range(3) for name in ("forward", "backward", "optimizer")),
    ]


def test_the_whole_stack_of_a_real_run_is_kept() -> None:
    path = DATA / "opt-2l_w1.pickle.gz"
    with gzip.open(path) as file:
        entries = pickle.load(file)["device_traces"][0]
    wanted = [
        "\n".join(f"{frame['filename']}:{frame['line']}:{frame['name']}" for frame in entry["frames"]) or None
        for entry in entries
        if entry["action"] == "alloc"
    ]
    trace = read(path)
    assert trace.metadata["name"] == path.name
    events = trace.ranks[0].events
    frames = events.strings("frames")
    found = [frames.get(i) for i in np.flatnonzero(events.op == Op.ALLOC).tolist()]
    assert found == wanted
    assert len(frames.table) < len(found) / 4  # each stack once


def test_a_real_run_with_stacks_is_in_colour() -> None:
    events = read(DATA / "opt-2l_w1.pickle.gz").ranks[0].events
    categories, frames, size = events.strings("category"), events.strings("frames"), events.ints("bytes")
    told: Counter[str] = Counter()
    for i in np.flatnonzero(events.op == Op.ALLOC).tolist():
        told[categories.get(i) or "unknown"] += int(size[i])
        if "hybrid_adam.py:109:step" in (frames.get(i) or ""):
            assert categories.get(i) == "optimizer_state"
    assert told["unknown"] < 0.1 * told.total()
