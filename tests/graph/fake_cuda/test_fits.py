"""Operands whose shapes do not fit: what the CPU's kernels say of them, which share TensorIterator with CUDA's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from graph.fake_cuda import device as fake_cuda
from graph.fake_cuda.device import Runtime
from graph.hardware.profile import profile

Written = Callable[[torch.Tensor, torch.Tensor], object]
ELEMENTWISE: dict[str, Written] = {
    "add_": lambda x, y: x.add_(y),
    "mul_": lambda x, y: x.mul_(y),
    "copy_": lambda x, y: x.copy_(y),
    "lerp_": lambda x, y: x.lerp_(y, 0.5),
    "addcmul_": lambda x, y: x.addcmul_(y, y),
    "eq_": lambda x, y: x.eq_(y),
    "clamp_": lambda x, y: x.clamp_(y),
    "a list": lambda x, y: torch._foreach_add_([x], [y]),
    "new": lambda x, y: x + y,
    "chosen": lambda x, y: torch.where(x > 0, x, y),
    "put": lambda x, y: torch.ops.aten.index_put_(x, [torch.zeros(3, dtype=torch.int64, device=x.device)], y),
}
OTHERS: dict[str, Callable[[Callable[..., torch.Tensor]], object]] = {
    "addmm_": lambda f: f(4, 5).addmm_(f(4, 3), f(4, 5)),
    "baddbmm_": lambda f: f(2, 4, 5).baddbmm_(f(2, 4, 3), f(3, 3, 5)),
    "addmv_": lambda f: f(4).addmv_(f(4, 3), f(4)),
    "index_add_": lambda f: f(4, 5).index_add_(0, f(3).long(), f(2, 5)),
    "masked_fill_": lambda f: f(4, 5).masked_fill_(f(3, 5) > 0, 0.0),  # by expand, in other words than the host's
    "scatter_": lambda f: f(4, 5).scatter_(0, f(5, 6).long(), f(5, 6)),
}
DEVICES = ("cpu", "cuda")
shapes = st.lists(st.sampled_from([1, 2, 3]), max_size=3)


@pytest.fixture(scope="module", autouse=True)
def card() -> Iterator[Runtime]:
    with fake_cuda.fake_cuda(profile("A100-80GB", "2.13")) as runtime:
        runtime.observer = Watching()
        yield runtime


class Watching:
    """An observer that looks away."""

    def operator(self, *args: Any) -> None:
        """Nothing."""

    def freed(self, storage: int) -> None:
        """Nothing."""


def said(call: Callable[[], object]) -> str | None:
    """What an error says; None where there is none."""
    try:
        call()
    except (RuntimeError, IndexError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", ELEMENTWISE)
@settings(max_examples=60, deadline=None)
@given(one=shapes, other=shapes)
def test_what_does_not_fit_is_refused_as_on_the_host(name: str, one: list[int], other: list[int]) -> None:
    if name == "put" and not one:
        return
    call = ELEMENTWISE[name]
    here, there = (said(partial(call, torch.ones(one, device=d), torch.ones(other, device=d))) for d in DEVICES)
    assert there == here


@pytest.mark.parametrize("name", OTHERS)
def test_products_and_places_that_do_not_fit_are_refused(name: str) -> None:
    here, there = (said(partial(OTHERS[name], partial(torch.ones, device=d))) for d in DEVICES)
    assert (here is None, there is None) == (False, False)
