"""Captured graphs: which of their operators draw random numbers, and so need the generator's seed and offset.

Expectations: what PyTorch 2.14.1 and 2.15.0 (CUDA wheels on stub libraries, as an A100) allocated in a capture.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from graph.fake_cuda.graphs import seeding
from graph.hardware.profile import profile

X = torch.ones(4, 8)
HEADS = torch.ones(1, 2, 4, 8)
aten = torch.ops.aten
CALLS: list[tuple[str, Any, tuple[Any, ...], dict[str, Any], bool]] = [
    ("dropout", aten.native_dropout.default, (X, 0.5, True), {}, True),
    ("dropout of an evaluated module", aten.native_dropout.default, (X, 0.5, False), {}, False),
    ("nothing is drawn", aten.uniform_.default, (torch.empty(0),), {}, False),
    ("uniform", aten.uniform_.default, (X.clone(),), {}, True),
    ("normal", aten.normal_.default, (X.clone(),), {}, True),
    ("bernoulli", aten.bernoulli.default, (X,), {}, True),
    ("exponential", aten.exponential_.default, (X.clone(),), {}, True),
    ("rrelu", aten.rrelu_with_noise.default, (X, X.clone(), 0.1, 0.3, True), {}, True),
    ("rrelu of an evaluated module", aten.rrelu_with_noise.default, (X, X.clone()), {}, False),
    ("attention", aten._scaled_dot_product_flash_attention.default, (HEADS,) * 3, {}, False),
    ("attention with dropout", aten._scaled_dot_product_flash_attention.default, (*(HEADS,) * 3, 0.1), {}, True),
    (
        "by name",
        aten._scaled_dot_product_efficient_attention.default,
        (*(HEADS,) * 3, None, True),
        {"dropout_p": 0.1},
        True,
    ),
    ("a product", aten.mul.Tensor, (X, X), {}, False),
]


def seeds(release: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How often an operator in a capture asks for seeds."""
    asked: list[int] = []
    runtime: Any = SimpleNamespace(profile=profile("A100", release), drawn=lambda: asked.append(1))
    seeding(runtime, func, lambda *args, **kwargs: args[0])(*args, **kwargs)
    return len(asked)


@pytest.mark.parametrize(("func", "args", "kwargs", "draws"), [one[1:] for one in CALLS], ids=[one[0] for one in CALLS])
def test_what_draws_random_numbers_needs_seeds(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], draws: bool
) -> None:
    assert seeds("2.15", func, args, kwargs) == seeds("2.14", func, args, kwargs) == draws


def test_before_every_graph_has_them_from_the_start() -> None:
    assert seeds("2.13", aten.normal_.default, (X.clone(),), {}) == 0


def test_outside_a_capture_nothing_is_asked() -> None:
    runtime: Any = SimpleNamespace(profile=profile("A100", "2.15"), drawn=None)
    assert seeding(runtime, aten.normal_.default, lambda *args: args[0])(X) is X
