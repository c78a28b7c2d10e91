"""What a recorded program allocated has the line that asked for it, the module that ran, and the tensor's own name."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import traces
from tests.simulator.recording.test_record import answer, folder_of, record
from tests.support.viewer import check_viewer
from traces.model import Events, Op

PROGRAM = """
import torch
from torch.utils.checkpoint import checkpoint

class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(300, 700)
        self.register_buffer("scale", torch.ones(1500))

    def forward(self, x):
        x = self.up(x)
        return x.exp() * 2

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part()
        self.again = Part()

    def forward(self, x):
        first = self.part(x)
        second = checkpoint(self.again, x, use_reentrant=False)
        return (first + second).sum()

def batch():
    return torch.ones(11, 300, device="cuda")

net = Net().cuda()
optimizer = torch.optim.Adam(net.parameters())
for step in range(2):
    loss = net(batch())
    loss.backward()
    optimizer.step()
"""
EXP = 11 * 700 * 4
NAMED = """
import gc
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.part = torch.nn.Linear(256, 256)

    def forward(self, x):
        with torch.profiler.record_function("mixing"):
            return self.part(x)

    @torch.no_grad()
    def generate(self, x):
        for _ in range(3):
            x = torch.cat([x, self(x)[-1:]])
        return x

class Node:
    pass

net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters())
for step in range(6):
    torch.cuda.nvtx.range_push(f"step {step}")
    number = torch.cuda.nvtx.range_start("passes")
    net(torch.ones(8, 256, device="cuda")).sum().backward()
    torch.cuda.nvtx.mark("half")
    torch.cuda.nvtx.range_end(number)
    optimizer.step()
    torch.cuda.nvtx.range_pop()
    if step == 0:
        node = Node()
        node.me, node.held = node, torch.ones(3 << 18, device="cuda")
        del node
        gc.collect()
        net.generate(torch.ones(1, 256, device="cuda"))
        with torch.no_grad():
            net(torch.ones(1, 256, device="cuda"))
"""

BY_NAME = """
import torch

class ByName(torch.optim.Optimizer):
    def step(self):
        if not self.state:
            self.state["up.weight"] = {"moment": torch.zeros(700, device="cuda")}

optimizer = ByName([torch.ones(9, device="cuda", requires_grad=True)], {})
for step in range(2):
    optimizer.step()
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Events]:
    folder = folder_of(tmp_path_factory.mktemp("places"), {"train.py": PROGRAM})
    done = record(folder, "-o", "trace.npz", "--snapshot", "snapshot.pickle.gz", "train.py")
    assert done.returncode == 0, done.stderr
    return folder, traces.read(folder / "trace.npz").ranks[0].events


def stacks(events: Events, **wanted: Any) -> list[list[str]]:
    """The source lines of the program in the stack of each allocation that is as wanted, the innermost first."""
    source = PROGRAM.splitlines()
    found = []
    for place in (events.op == Op.ALLOC).nonzero()[0].tolist():
        columns = {"bytes": int(events.ints("bytes")[place]), "name": events.strings("name").get(place)}
        if all(columns[key] == value for key, value in wanted.items()):
            frames = [line.rsplit(":", 2) for line in (events.strings("frames").get(place) or "").split("\n")]
            assert not [file for file, _, _ in frames if "/graph/" in file or "runpy" in file]
            own = [(int(line), name) for file, line, name in frames if file.endswith("train.py")]
            found.append([f"{name}: {source[line - 1].strip()}" for line, name in own])
    return found


def test_lines_of_the_program(recorded: tuple[Path, Events]) -> None:
    _, events = recorded
    batches = stacks(events, bytes=11 * 300 * 4, name="aten.empty.memory_format")
    assert batches == [['batch: return torch.ones(11, 300, device="cuda")', "<module>: loss = net(batch())"]] * 2


def test_forward_backward_and_what_is_computed_again(recorded: tuple[Path, Events]) -> None:
    _, events = recorded
    step = ["forward: return x.exp() * 2", "forward: first = self.part(x)", "<module>: loss = net(batch())"]
    again = ["forward: return x.exp() * 2", "forward: second = checkpoint(self.again, x, use_reentrant=False)"]
    part = stacks(events, bytes=EXP, name="part: aten.exp.default")
    inner = stacks(events, bytes=EXP, name="again: aten.exp.default")
    assert part == [step] * 2
    assert inner == [[*again, "<module>: loss = net(batch())"], [again[0], "<module>: loss.backward()"]] * 2
    derived = stacks(events, name="part: aten.mul.Tensor", bytes=EXP)
    assert derived.count(["forward [backward]: return x.exp() * 2", "<module>: loss.backward()"]) == 4  # of *, and exp


def test_names_of_parameters_gradients_states_and_buffers(recorded: tuple[Path, Events]) -> None:
    _, events = recorded
    names, categories = events.strings("name"), events.strings("category")
    said = {names.get(i): categories.get(i) for i in (events.op == Op.ALLOC).nonzero()[0].tolist()}
    wanted = {
        "part.up.weight": "parameter",
        "again.up.bias": "parameter",
        "part.scale": "buffer",
        "part.up.weight.grad": "gradient",
        "again.up.bias.exp_avg": "optimizer_state",
        "part.up.weight.exp_avg_sq": "optimizer_state",
    }
    assert {name: said.get(name) for name in wanted} == wanted
    weights = stacks(events, name="part.up.weight", bytes=300 * 700 * 4)
    assert weights == [["<module>: net = Net().cuda()"]]


def test_states_that_an_optimizer_keeps_by_name(tmp_path: Path) -> None:
    done = record(folder_of(tmp_path, {"train.py": BY_NAME}), "-o", "trace.npz", "train.py")
    assert done.returncode == 0, done.stderr
    events = traces.read(tmp_path / "trace.npz").ranks[0].events
    (place,) = ((events.op == Op.ALLOC) & (events.ints("bytes") == 2800)).nonzero()[0].tolist()
    found = events.strings("name").get(place), events.strings("category").get(place)
    assert found == ("up.weight.moment", "optimizer_state")


def test_the_snapshot_has_the_stacks(recorded: tuple[Path, Events]) -> None:
    folder, events = recorded
    snapshot = pickle.loads(gzip.decompress((folder / "snapshot.pickle.gz").read_bytes()))
    assert check_viewer(snapshot) == []
    entries = [entry for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"]
    places = ((events.op == Op.ALLOC) & (events.ints("bytes") > 0)).nonzero()[0].tolist()
    said = [[f"{one['filename']}:{one['line']}:{one['name']}" for one in entry["frames"]] for entry in entries]
    assert said == [(events.strings("frames").get(place) or "").split("\n") for place in places]
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    kept = {block["frames"][-1]["line"] for block in blocks if block["state"] == "active_allocated"}
    lines = PROGRAM.splitlines()
    wanted = ("net = Net()", "loss = ", "loss.backward()", "optimizer.step()")
    assert kept <= {number for number, line in enumerate(lines, 1) if line.strip().startswith(wanted)}
    assert lines.index("net = Net().cuda()") + 1 in kept


def test_regions_generation_and_what_the_collector_freed(tmp_path: Path) -> None:
    words = ("-o", "trace.npz", "--snapshot", "snapshot.pickle.gz", "train.py")
    done = record(folder_of(tmp_path, {"train.py": NAMED}), *words)
    assert done.returncode == 0, done.stderr
    found = answer(tmp_path)
    line = next(number for number, text in enumerate(NAMED.splitlines(), 1) if "node.held" in text)
    freed, end = sorted(found["notices"])
    wanted = f"freed 3.00 MiB kept alive by cycles of references, 3.00 MiB of it from train.py:{line} (<module>)"
    assert wanted in freed
    assert end.startswith("steps 3 and 4 did the same")  # names of regions are no part of it
    phases = [phase["name"] for phase in found["ranks"][0]["phases"] if phase["step"] == 1]
    assert phases == ["forward", "generation", "evaluation", "backward", "optimizer"]
    events = traces.read(tmp_path / "trace.npz").ranks[0].events
    names = events.strings("name")
    told = [(Op(op).name, names.get(i)) for i, op in enumerate(events.op) if op in (Op.REGION_BEGIN, Op.REGION_END)]
    begin, stop = Op.REGION_BEGIN.name, Op.REGION_END.name
    passes = [(begin, "passes"), (begin, "mixing"), (stop, "mixing"), (begin, "half"), (stop, "half"), (stop, "passes")]
    own = [one for one in told if "#" not in (one[1] or "")]
    assert own[:8] == [(begin, "step 0"), *passes, (stop, "step 0")]
    assert (begin, "Optimizer.step#SGD.step") in told
    snapshot = pickle.loads(gzip.decompress((tmp_path / "snapshot.pickle.gz").read_bytes()))
    annotations = [(one["stage"], one["name"]) for one in snapshot["external_annotations"]]
    assert annotations == [("START" if op == begin else "END", name) for op, name in told]
