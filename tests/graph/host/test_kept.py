"""What was compiled in an earlier run: the same events in less time."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch.fx

import traces
from graph.fake_cuda.device import fake_cuda
from graph.hardware.profile import profile
from graph.host import compiled, kept
from tests.simulator.recording.test_record import folder_of, record

#: `width` of the vocabulary: products of odd ones are measured for padding. The number makes the code another one.
PROGRAM = """
import sys
import torch
from torch._dynamo.utils import counters

number, width, mode = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


class Out:
    def __init__(self, loss, logits):
        self.loss, self.logits = loss, logits


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.again = False  # when it changes, the same graph is compiled once more
        self.up, self.head = torch.nn.Linear(256, 512), torch.nn.Linear(512, width, bias=False)

    def forward(self, x, at):
        seen = self.up(x).relu() * number + torch.ones(512, device="cuda", dtype=x.dtype).cumsum(0)
        logits = self.head(seen if self.again else seen)
        return Out(torch.nn.functional.cross_entropy(logits.float(), at), logits)


net = Net().cuda().bfloat16()
run = torch.compile(net, mode=mode)
optimizer = torch.optim.AdamW(net.parameters())
for step in range(3):
    x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    out = run(x, torch.zeros(256, dtype=torch.long, device="cuda"))
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    net.again = True
print(counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.parametrize(
    ("width", "mode", "hits"),
    [
        (4096, "default", 2),
        (4096, "reduce-overhead", 2),
        (4097, "default", 1),
        (4096, "max-autotune-no-cudagraphs", 1),
    ],
)
def test_a_second_run_shows_what_the_first_did(tmp_path: Path, width: int, mode: str, hits: int) -> None:
    """All events, where what was compiled is taken from the first run, and where it is not: kernels are measured."""
    folder_of(tmp_path, {"train.py": PROGRAM})
    program = ("train.py", str(random.SystemRandom().random()), str(width), mode)
    for name, found in (("first.npz", 1), ("second.npz", hits)):
        done = record(tmp_path, "-o", name, "--steps", "all", *program)
        assert (done.returncode, done.stdout) == (0, f"{found}\n"), done.stderr
    first, second = (traces.read(tmp_path / name).ranks[0].events for name in ("first.npz", "second.npz"))
    assert np.array_equal(first.op, second.op)
    assert np.array_equal(first.ints("bytes"), second.ints("bytes"))
    assert np.array_equal(first.ints("id"), second.ints("id"))


def test_patterns_are_made_on_the_device_of_what_a_graph_makes_where_nothing_goes_in() -> None:
    """As PyTorch makes them: with that of the first input, else of the first tensor made, once for each device."""
    graph = torch.fx.Graph()
    for device in ("meta", "cpu", "meta"):
        graph.call_function(torch.ones, (2,)).meta["example_value"] = torch.empty(2, device=device)
    model = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert kept._devices(model, [8])[:1] == [torch.device("cpu")]
    with fake_cuda(profile("A100", "2.13")):
        inputs = [8, torch.empty(2, device="cuda")]
        assert kept._devices(model, inputs) == [torch.device("cuda", 0), torch.device("cpu")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Inductor, as it is imported
def test_a_list_of_tensors_counts_by_what_they_are_like(monkeypatch: pytest.MonkeyPatch) -> None:
    """As compiled autograd has its inputs: what they hold, which takes operators to tell, makes no other code."""
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda one: pytest.fail("is asked for its elements"))
    with fake_cuda(profile("A100-80GB", "2.13")):
        keys = [kept._key(None, [[torch.ones(size, device="cuda")], [3]]) for size in (2, 2, 3)]
    assert keys[0] == keys[1] != keys[2]


#: The first layer's input needs no gradient, so that the two are different graphs with kernels in common.
LAYERS = """
import sys
import torch

number = float(sys.argv[1])


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down((self.up(x) * number).sin())


layers = [Layer().cuda().bfloat16() for _ in range(2)]
for layer in layers:
    layer.compile(dynamic={dynamic})
x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
for layer in layers:
    x = layer(x)
x.float().sum().backward()
print(torch.cuda.memory_stats()["allocation.all.allocated"])
"""


@pytest.mark.parametrize(("dynamic", "expected"), [(False, "227"), (True, "291")])
def test_a_second_run_tunes_what_the_first_did(tmp_path: Path, dynamic: bool, expected: str) -> None:
    """Where shapes vary, backwards are compiled with their forwards, and both graphs tune what they share; else the
    second one finds it tuned. Allocations as recorded (PyTorch 2.13.0+cu130, Triton 3.7)."""
    folder_of(tmp_path, {"train.py": LAYERS.replace("{dynamic}", str(dynamic))})
    number = str(random.SystemRandom().random())
    for _ in range(2):
        done = record(tmp_path, "--steps", "all", "train.py", number)
        assert (done.returncode, done.stdout) == (0, f"{expected}\n"), done.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Inductor, as it is imported
def test_nothing_is_kept_where_pytorch_does_not_say_what_was_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before 2.8."""
    monkeypatch.setattr(kept, "CACHE_ROOT", str(tmp_path / "cache"))
    for told, folders in ((False, []), (True, ["aotautograd", "fxgraph"])):
        monkeypatch.setattr(compiled, "tells_of_backwards", partial(bool, told))
        with fake_cuda(profile("A100-80GB", "2.13")) as runtime, kept.keeping(runtime, tmp_path / str(told)):
            pass
        assert sorted(path.name for path in tmp_path.glob("cache/*/*")) == folders


#: As Unsloth does: it takes away where Inductor keeps its files, after its first function is compiled.
ELSEWHERE = """
import os
import tempfile
import torch

os.mkdir("temporary")
tempfile.tempdir = os.path.abspath("temporary")
for number, place in enumerate((None, "", "own")):
    if place is not None:
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    if place:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = place
    torch.compile(lambda x: x.sin() * number)(torch.ones(100, device="cuda"))
print(os.listdir("temporary"), os.path.exists("own"))
"""


def test_the_users_own_cache_is_left_alone(tmp_path: Path) -> None:
    """Kernels are none here, which a run on a GPU must not find; and what it left there would not be compiled here."""
    done = record(folder_of(tmp_path, {"train.py": ELSEWHERE}), "--steps", "all", "train.py")
    assert (done.returncode, done.stdout) == (0, "[] False\n"), done.stderr
