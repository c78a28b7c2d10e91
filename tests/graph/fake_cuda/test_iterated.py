"""Strides of elementwise results against PyTorch's own iterator, as its CPU kernels use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from graph.fake_cuda.device import fake_cuda
from graph.fake_cuda.operators.iterated import steps
from graph.hardware.profile import profile

_aten = torch.ops.aten


@st.composite
def strided(draw: st.DrawFn, sizes: tuple[int, ...]) -> torch.Tensor:
    """A tensor of these sizes whose dimensions lie in any order, some with gaps, broadcast or of any stride where one
    element does not show it."""
    made, step = [0] * len(sizes), 1
    for dimension in draw(st.permutations(range(len(sizes)))):
        made[dimension] = step
        step *= sizes[dimension] * draw(st.sampled_from((1, 1, 1, 2)))
    odd = [draw(st.sampled_from((1, 3, 64, own))) if one == 1 else own for one, own in zip(sizes, made, strict=True)]
    kept = [0 if draw(st.integers(0, 9)) == 0 else own for own in odd]
    return torch.empty_strided(sizes, kept)


@st.composite
def operands(draw: st.DrawFn) -> tuple[torch.Tensor, ...]:
    """Three tensors of one shape, and one that is broadcast to it."""
    sizes = tuple(draw(st.lists(st.sampled_from((0, 1, 1, 2, 3, 4)), min_size=1, max_size=5)))
    part = tuple(draw(st.sampled_from((1, size))) for size in sizes)[draw(st.integers(0, len(sizes) - 1)) :]
    first = draw(strided(sizes))
    second = first if draw(st.booleans()) else draw(strided(sizes))
    return first, second, draw(strided(sizes)), draw(strided(part))


CALLS: list[tuple[Any, Callable[..., tuple[Any, ...]]]] = [
    (_aten.neg.default, lambda a, b, c, part: (a,)),
    (_aten.abs.default, lambda a, b, c, part: (a,)),
    (_aten.clamp.default, lambda a, b, c, part: (a, 0, 1)),
    (_aten.pow.Tensor_Scalar, lambda a, b, c, part: (a, 3)),
    (_aten.mul.Tensor, lambda a, b, c, part: (a, 2)),
    (_aten.gt.Scalar, lambda a, b, c, part: (a, 1)),
    (_aten.xlogy.Scalar_Other, lambda a, b, c, part: (a, 2)),
    (_aten.mul.Tensor, lambda a, b, c, part: (a, torch.zeros(()))),
    (_aten.mul.Tensor, lambda a, b, c, part: (a, part)),
    (_aten.hypot.default, lambda a, b, c, part: (part, b)),
    (_aten.hypot.default, lambda a, b, c, part: (a, b)),
    (_aten.lerp.Scalar, lambda a, b, c, part: (a, b, 0.5)),
    (_aten.where.ScalarOther, lambda a, b, c, part: (a > 0, b, 1.0)),
    (_aten.addcmul.default, lambda a, b, c, part: (a, b, c)),
    (_aten.addcmul.default, lambda a, b, c, part: (a, part, c)),
    (_aten.threshold_backward.default, lambda a, b, c, part: (a, b, 0)),
    (_aten.leaky_relu_backward.default, lambda a, b, c, part: (a, b, 0.1, False)),
]


@given(operands())
def test_results_lie_as_pytorch_has_them(tensors: tuple[torch.Tensor, ...]) -> None:
    for func, given_to in CALLS:
        args = given_to(*tensors)
        assert steps(func, args) == func(*args).stride(), func


NCHW, LAST, BY_CHANNEL = (1920, 30, 5, 1), (1920, 1, 320, 64), (64, 1, 0, 0)


@pytest.mark.parametrize(
    ("operator", "of_grad", "of_kept", "found"),
    [
        (lambda grad, kept: _aten.threshold_backward(grad, kept, 0), NCHW, LAST, LAST),
        (lambda grad, kept: _aten.threshold_backward(grad, kept, 0), LAST, NCHW, NCHW),
        (lambda grad, kept: _aten.threshold_backward(grad, kept, 0), BY_CHANNEL, LAST, LAST),
        (lambda grad, kept: _aten.leaky_relu_backward(grad, kept, 0.1, False), NCHW, LAST, LAST),
        (lambda grad, kept: _aten.glu_backward(grad[:, :32], kept, 1), LAST, LAST, NCHW),
        (lambda grad, kept: _aten.log_sigmoid_backward(grad, kept, kept.new_empty(0)), BY_CHANNEL, LAST, NCHW),
        (lambda grad, kept: _aten.log_sigmoid_backward(grad, kept, kept.new_empty(0)), LAST, NCHW, LAST),
    ],
)
def test_gradients_lie_as_the_cuda_build_has_them(
    operator: Callable[..., torch.Tensor], of_grad: tuple[int, ...], of_kept: tuple[int, ...], found: tuple[int, ...]
) -> None:
    """The CUDA build of PyTorch 2.13.0, on libraries that do nothing: (8, 64, 6, 5)."""
    with fake_cuda(profile("A100", "2.13")):
        grad, kept = (torch.empty_strided((8, 64, 6, 5), form, device="cuda") for form in (of_grad, of_kept))
        assert operator(grad, kept).stride() == found


@given(st.data())
def test_indexed_results_lie_as_on_the_cpu(data: st.DataObject) -> None:
    """Indices that step alike: on CUDA others are copied first."""
    sizes = tuple(data.draw(st.lists(st.sampled_from((1, 1, 2, 3)), min_size=1, max_size=4)))
    source = data.draw(strided(sizes))
    shape = tuple(data.draw(st.lists(st.sampled_from((1, 2, 3)), max_size=3)))
    places = torch.zeros_like(data.draw(strided(shape)), dtype=torch.int64)
    chosen = data.draw(st.lists(st.booleans(), min_size=1, max_size=len(sizes)).filter(any))
    indices = [places if taken else None for taken in chosen]
    assert steps(_aten.index.Tensor, (source, indices)) == _aten.index.Tensor(source, indices).stride()


def test_indices_that_step_apart_are_copied_first() -> None:
    """Strides as PyTorch 2.13.0+cu130 has them."""
    source, places = torch.empty(9, 4, 6, device="meta"), torch.empty(3, 5, dtype=torch.int64, device="meta").t()
    recorded = {(places, places): (6, 30, 1), (places, places.contiguous()): (18, 6, 1), (None, places): (90, 6, 30, 1)}
    assert {given: steps(_aten.index.Tensor, (source, list(given))) for given in recorded} == recorded
