"""Whether operands fit together in shape and lie apart in memory, in TensorIterator's words (ATen/ExpandUtils.cpp,
TensorIterator.cpp, MemoryOverlap.cpp).

An operator that only writes its arguments makes nothing whose shape would have to be found, so PyTorch's rules for
shapes are not asked for it; and where they are, their words are those of Python's references.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.parameter import is_lazy

from graph.fake_cuda.operators import places
from graph.workspaces.metadata import is_dense, tensors

if TYPE_CHECKING:
    from graph.fake_cuda.shapes import Shapes
    from graph.fake_cuda.torch_private import Operator

_aten: Final = torch.ops.aten
#: Operators whose shapes are those of the ones that write nothing, which PyTorch's rules check.
_BY_RULE: Final = frozenset(
    {
        *("addmm_", "addbmm_", "baddbmm_", "addmv_", "addr_", "scatter_", "scatter_add_", "scatter_reduce_"),
        *("index_add_", "index_copy_", "index_fill_", "index_reduce_"),
    }
)
#: Operators that write one place several times over: most write the same number.
_OVER_ITSELF: Final = frozenset(
    {
        *(_aten.fill_.Scalar, _aten.zero_.default, _aten._foreach_zero_.default, _aten.threshold_.default),
        *(_aten.masked_fill_.Scalar, _aten.masked_fill_.Tensor, _aten.tril_.default, _aten.triu_.default),
        *(_aten.index_fill_.int_Scalar, _aten.index_fill_.int_Tensor, _aten.baddbmm_.default),
    }
)
#: Which argument says that an operator that writes at indices adds to what is there.
_ACCUMULATE: Final = 3


def written(shapes: Shapes, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises what PyTorch raises where an operator that writes its first argument cannot write these into it."""
    name = func._opname
    by_element = name == "copy_" or elementwise(func)
    _apart(func, args, by_element)
    places.together(func, args, kwargs)
    if name.startswith("_foreach_"):
        lists = [value for value in args if isinstance(value, list | tuple) and len(value) == len(args[0])]
        for operands in zip(*lists, strict=True):
            places.written(func, operands)
            _written(operands)
    elif name in ("masked_fill_", "masked_scatter_"):
        args[1].expand(args[0].shape)
    elif name == "_index_put_impl_":
        _put(shapes, *args[:3])
    elif name in _BY_RULE:
        plain = getattr(getattr(_aten, name[:-1]), func._overloadname)
        shapes.infer(plain, args, kwargs)
    elif by_element:
        operands = (*args, *kwargs.values())
        places.written(func, operands)
        _written(operands)


def _apart(func: Operator, args: Sequence[Any], by_element: bool) -> None:
    target, *others = args
    adds = len(args) > _ACCUMULATE and args[_ACCUMULATE]
    if func in _OVER_ITSELF or (func._opname == "_index_put_impl_" and not adds):
        return
    for one in tensors(target):
        disjoint(one, others if by_element and one is target else ())


def disjoint(target: torch.Tensor, sources: Sequence[object]) -> None:
    """RuntimeError where an operator would write a tensor whose elements share memory, or a part of its operands."""
    if is_dense(target):
        for source in sources:
            if isinstance(source, torch.Tensor) and source is not target and _partly_shared(target, source):
                raise _overlapping("some elements of the input tensor and the written-to tensor refer")
    elif any(size > 1 and step == 0 for size, step in zip(target.shape, target.stride(), strict=True)):
        raise _overlapping("more than one element of the written-to tensor refers")


def _overlapping(what: str) -> RuntimeError:
    return RuntimeError(
        f"unsupported operation: {what} to a single memory location. Please clone() the tensor before performing the "
        "operation."
    )


def _partly_shared(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share some memory but are not the same, as far as PyTorch looks (get_overlap_status)."""
    if not one.numel() or one.device != other.device or not is_dense(other):
        return False
    begin, start = one.data_ptr(), other.data_ptr()
    if begin == start and one.nbytes == other.nbytes:
        return one.stride() != other.stride()
    return begin < start + other.nbytes and start < begin + one.nbytes


def elementwise(func: Operator) -> bool:
    """Whether an operator computes element by element."""
    if torch.Tag.pointwise in func.tags:
        return True
    plain = getattr(_aten, func._opname.removesuffix("_"), None)
    return torch.Tag.pointwise in getattr(plain, func._overloadname, func).tags


def together(operands: Sequence[Any]) -> tuple[int, ...]:
    """The shape to which tensors among `operands` are broadcast; RuntimeError where there is none."""
    shape: tuple[int, ...] = ()
    for operand in operands:
        if isinstance(operand, torch.Tensor) and operand.shape != shape:
            shape = _both(shape, tuple(operand.shape))
    return shape


def _written(operands: Sequence[Any]) -> None:
    if any(map(is_lazy, operands)):
        return  # a parameter of a lazy module tells no shape
    target = operands[0]
    shape = together(operands)
    if shape != target.shape:
        raise RuntimeError(f"output with shape {list(target.shape)} doesn't match the broadcast shape {list(shape)}")


def _both(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    count = max(len(one), len(other))
    wide, broad = ((1,) * (count - len(shape)) + shape for shape in (one, other))
    for place in reversed(range(count)):
        a, b = wide[place], broad[place]
        if a != b and 1 not in (a, b):
            raise RuntimeError(
                f"The size of tensor a ({a}) must match the size of tensor b ({b}) at non-singleton dimension {place}"
            )
    return tuple(b if a == 1 else a for a, b in zip(wide, broad, strict=True))


def _put(shapes: Shapes, target: torch.Tensor, indices: Sequence[Any], values: torch.Tensor) -> None:
    """checkIndexTensorTypes comes before it; at::native::makeInfo and expand of the values (IndexingUtils.h)."""
    found, _ = shapes.infer(_aten.index.Tensor, (target, indices), {})
    shape = tuple(found.shape)
    try:
        fits = _both(shape, tuple(values.shape)) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result of "
            f"shape {list(shape)}"
        )
