"""How the result of an elementwise operator, or of indexing by tensors, lies in memory: PyTorch's iterator over
operands of any strides.

PyTorch's rules for shapes (FakeTensorMode, `meta`) have their own way, which differs where operands step oddly over
extents of one element; a later convolution or interpolation then takes another memory format. Source:
aten/src/ATen/TensorIterator.cpp, `compute_fast_setup_type`, `reorder_dimensions` and `allocate_or_resize_outputs`; of
indexing aten/src/ATen/native/TensorAdvancedIndexing.cpp, `make_info` and `AdvancedIndex`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import torch
from numpy import broadcast_shapes

from graph.fake_cuda.memory import contiguous
from graph.workspaces.metadata import CHANNELS_LAST, is_channels_last, is_contiguous, is_dense, packed, shape, strides

if TYPE_CHECKING:
    from graph.fake_cuda.torch_private import Operator

_aten: Final = torch.ops.aten
#: Elementwise operators that PyTorch does not tag so, and ones tagged so that make their result otherwise.
_UNTAGGED: Final = frozenset(
    getattr(_aten, name).default
    for name in (
        *("hardswish", "hardswish_backward", "leaky_relu_backward", "elu_backward", "softplus_backward"),
        *("mish_backward", "hardtanh_backward", "logit_backward", "hardsigmoid_backward"),
        "floor_divide",
    )
) | {_aten.complex.out, _aten.polar.out}
_OTHERWISE: Final = frozenset({"clone", "hardtanh", "masked_fill", "native_dropout_backward", "_conj_physical"})
#: Derivatives whose iterator has what was kept before the gradient (Activation.cpp).
_KEPT_FIRST: Final = frozenset({"threshold_backward", "leaky_relu_backward"})
#: Operators that take elements by tensors of places.
_INDEXED: Final = frozenset({"index", "_unsafe_index"})
#: Overloads where a number stands for a tensor without dimensions, but for those of `lerp`.
_OF_NUMBERS: Final = frozenset(
    {"Tensor", "Tensor_mode", "Scalar", "Scalar_mode", "ScalarOther", "ScalarSelf", "Scalar_Other", "Scalar_Self"}
)


def is_iterated(func: Operator) -> bool:
    """Whether an operator makes its result as the iterator does."""
    pointwise = torch.Tag.pointwise in func.tags and func._opname not in _OTHERWISE
    return pointwise or func in _UNTAGGED or func._opname in _INDEXED


def steps(func: Operator, args: Sequence[Any]) -> tuple[int, ...]:
    """Strides in elements of what such an operator makes of these arguments."""
    if func._opname in _INDEXED:
        return _indexed(*args[:2])
    operands = [value for value in args if isinstance(value, torch.Tensor)]
    if func._opname in _KEPT_FIRST:
        operands.reverse()
    if func is _aten.pow.Scalar:  # its meta function says nothing of strides (Pow.cpp)
        return contiguous(shape(operands[0]))
    alike = all(one.shape == operands[0].shape for one in operands)
    if func._overloadname in _OF_NUMBERS and func._opname != "lerp":
        alike = alike and all(value.__class__ not in (int, float, bool) for value in args)
    return (_fast(operands) if alike else None) or _ordered(operands)


def _fast(operands: Sequence[torch.Tensor]) -> tuple[int, ...] | None:
    """The strides that operands of one shape have in common."""
    if all(not one.numel() or is_contiguous(one) for one in operands):
        return contiguous(shape(operands[0]))
    if operands[0].dim() == 4 and all(is_channels_last(shape(one), strides(one)) for one in operands):
        return packed(shape(operands[0]), CHANNELS_LAST[4])
    if all(map(is_dense, operands)) and all(one.stride() == other.stride() for one, other in pairwise(operands)):
        return strides(operands[0])
    return None


def _indexed(source: torch.Tensor, given: Sequence[torch.Tensor | None]) -> tuple[int, ...]:
    """Strides of `source` indexed by these: places that are not side by side come first."""
    places = [place for place, index in enumerate(given) if index is not None]
    tensors = [index for index in given if index is not None]
    together = broadcast_shapes(*map(shape, tensors))
    unread = [torch.empty_strided(index.size(), index.stride(), device="meta") for index in tensors]
    indices = [index.expand(together) for index in unread]
    apart = places[-1] - places[0] >= len(places)
    order = sorted(range(source.dim()), key=lambda place: place not in places) if apart else range(source.dim())
    before = 0 if apart else places[0]
    behind = before + len(places)
    extents, own = [source.shape[place] for place in order], [source.stride(place) for place in order]
    sizes = (*extents[:before], *indices[0].shape, *extents[behind:])
    restrided = [*own[:before], *[0] * indices[0].dim(), *own[behind:]]
    beside = [1] * (len(order) - behind)
    operands = [index.reshape([1] * before + list(index.shape) + beside) for index in indices]
    if any(one.stride() != operands[0].stride() for one in operands):  # on CUDA they are made to step alike
        operands = [one.contiguous() for one in operands]
    return _dense(sizes, [restrided, *(_expanded(one, sizes) for one in operands)])


def _ordered(operands: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Strides of a dense result whose dimensions lie as the operands' do, the first of which counts most."""
    sizes = broadcast_shapes(*map(shape, operands))
    return _dense(sizes, [_expanded(one, sizes) for one in operands])


def _dense(sizes: Sequence[int], every: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The same, of the operands' strides over these sizes."""
    inward = list(range(len(sizes)))[::-1]
    order = inward.copy()
    for place in range(1, len(order)):
        later = place
        for earlier in range(place - 1, -1, -1):
            found = _compared(order[earlier], order[later], every, sizes)
            if found < 0:
                break
            if found > 0:
                order[earlier], order[later] = order[later], order[earlier]
                later = earlier
    return contiguous(sizes) if order == inward else packed(sizes, order)


def _expanded(tensor: torch.Tensor, sizes: Sequence[int]) -> list[int]:
    """Strides over `sizes`, 0 where the tensor is broadcast."""
    missing = len(sizes) - tensor.dim()
    own = zip(tensor.shape, sizes[missing:], tensor.stride(), strict=True)
    return [0] * missing + [0 if extent == 1 != full else step for extent, full, step in own]


def _compared(one: int, other: int, every: Sequence[Sequence[int]], sizes: Sequence[int]) -> int:
    """Above 0 where dimension `other` lies inside `one`, below where not, 0 where nothing says it (`should_swap`)."""
    for steps_of in every:
        first, second = steps_of[one], steps_of[other]
        if not first or not second:
            continue
        if first != second:
            return first - second
        if sizes[one] > sizes[other]:
            return 1
    return 0
