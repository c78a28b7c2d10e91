"""Integers and booleans that compiled code makes have the values that it makes where the device is the CPU."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import fx

from graph.fake_cuda.device import fake_cuda
from graph.fake_cuda.values import COUNTED
from graph.hardware.profile import profile
from graph.host import compiled_values
from tests.simulator.recording.test_record import folder_of, record

Function = Callable[..., object]


def lengths_to_mask(lengths: torch.Tensor) -> torch.Tensor:
    at = torch.arange(10, device=lengths.device)
    part = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths, output_size=10)
    return (part[:, None] == part[None, :]) & (at[:, None] >= at[None, :])


def one_of_each(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    chosen = weights.softmax(0).argmax()
    return ids + 1, chosen, ids * 2 + chosen, ids.float() * 2, (ids > 1).sum(), weights * 2


def in_place(ids: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    at += 1
    made = ids.clone()
    made.view(2, -1)[0] = 7
    made[-1] = at[0]
    ids.clamp_(max=3)
    return made, made.view(2, -1).sum(1)


def by_chance(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(0, 9, (4,), device=ids.device)
    return drawn + ids[:4], ids + 1


def written_by_unknown(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    made = ids.clone()
    made[0] = weights.argmax()
    return made + 1


def by_shape(weights: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
    width = weights.size(1)
    here = torch.arange(width, device=at.device)
    mask = here.new_ones((), dtype=torch.bool) & (here[None, :] <= at[:, None])
    return mask | ~mask.any(-1, keepdim=True), weights * mask


def cached(cache: torch.Tensor, at: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
    cache.index_copy_(1, at, keys)
    cache[0, at] = 3.0
    return at + 1, cache.sum()


#: A function, what it is given, and its outputs that come of numbers that nobody knows.
CASES: dict[str, tuple[Function, list[torch.Tensor], tuple[int, ...]]] = {
    "mask": (lengths_to_mask, [torch.tensor([3, 5, 2])], ()),
    "mixed": (one_of_each, [torch.tensor([3, 1, 2]), torch.ones(3)], (1, 2, 3, 5)),
    "in place": (in_place, [torch.tensor([9, 1, 2, 5]), torch.tensor([3])], ()),
    "shape": (by_shape, [torch.ones(4, 7), torch.tensor([3, -1, 0, 6])], (1,)),
    "cache": (cached, [torch.zeros(2, 5), torch.tensor([1, 3]), torch.ones(2, 2)], (1,)),
    "chance": (by_chance, [torch.tensor([9, 1, 2, 5])], (0,)),
    "written": (written_by_unknown, [torch.tensor([9, 1]), torch.ones(3)], (0,)),
}


def graph_of(function: Function, given: Sequence[torch.Tensor], dynamic: bool) -> tuple[fx.GraphModule, list[Any]]:
    """Dynamo's graph of a function, and what goes into it."""
    found: list[Any] = []

    def backend(model: fx.GraphModule, inputs: Sequence[object]) -> Function:
        def run(*args: Any) -> Any:
            found.extend([model, [one.clone() if isinstance(one, torch.Tensor) else one for one in args]])
            return model(*args)

        return run

    torch.compiler.reset()
    torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*[one.clone() for one in given])
    return found[0], found[1]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_cpu(name: str, dynamic: bool) -> None:
    function, given, unknown = CASES[name]
    graph, inputs = graph_of(function, given, dynamic)
    expected = graph(*(here := [one.clone() if isinstance(one, torch.Tensor) else one for one in inputs]))
    with fake_cuda(profile("A100-80GB", "2.13")) as runtime:
        there = [one.cuda() if isinstance(one, torch.Tensor) else one for one in inputs]
        runtime.values.forget([one for one in there if isinstance(one, torch.Tensor) and one.is_floating_point()])

        def compile_fx(model: object, inputs: object) -> Function:
            """Its kernels do nothing."""

            def run(*args: object) -> list[torch.Tensor]:
                return [torch.empty_like(one, device="cuda") for one in expected]

            return run

        backend = SimpleNamespace(compile_fx=compile_fx)
        with compiled_values.following(runtime.values, backend):
            made = backend.compile_fx(graph, inputs)(*there)
        for at, (one, other) in enumerate(zip(made, expected, strict=True)):
            known = runtime.values.of(one)
            assert (known is None) == (at in unknown)
            assert known is None or torch.equal(known, other)
        for one, other in zip(there, here, strict=True):
            if isinstance(one, torch.Tensor) and one.dtype in COUNTED:
                known = runtime.values.of(one)
                assert known is not None
                assert torch.equal(known, other)


#: What a compiled function makes decides how much the program allocates. The number makes the code another one.
PROGRAM = """
import sys
import torch

number = int(sys.argv[1])


@torch.compile
def mask(lengths, at):
    part = torch.bucketize(at, lengths.cumsum(0), right=True)
    return (part[:, None] == part[None, :]) & (at[:, None] >= at[None, :]) & (at[:, None] < number), part.float()


at = torch.arange(300, device="cuda")
for step in range(2):
    made, _ = mask(torch.tensor([100 + step, 200 - step]).cuda(), at)
    print(int(made.sum()), len(made.nonzero()), bool(made[0, 1]))
"""


def test_a_compiled_function_decides_what_it_does_on_a_gpu(tmp_path: Path) -> None:
    """In a first run, and in a second that takes what was compiled from the first. No value is assumed."""
    folder_of(tmp_path, {"train.py": PROGRAM})
    number = str(random.SystemRandom().randrange(300, 1 << 40))
    true = [sum(size * (size + 1) // 2 for size in (100 + step, 200 - step)) for step in (0, 1)]
    for _ in range(2):
        done = record(tmp_path, "--json", "found.json", "--steps", "all", "train.py", number)
        assert (done.returncode, done.stdout) == (0, "".join(f"{one} {one} False\n" for one in true)), done.stderr
        assert not json.loads((tmp_path / "found.json").read_text())["assumptions"]
