"""What the rules read of tensors: sizes, strides and types, and which outputs of a call are new.

Rules see tensors without values and never run an operator on them; PyTorch is not imported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Protocol

from graph.dtypes import SIZES
from graph.workspaces.rules import Call

if TYPE_CHECKING:
    import torch


class Strided(Protocol):
    """Whatever lies in memory as a tensor does."""

    @property
    def shape(self) -> Sequence[int]:
        """Sizes."""

    def stride(self) -> Sequence[int]:
        """Strides in elements."""


#: Names of the floating-point types that CUDA computes in.
FLOATING: Final = frozenset({"float64", "float32", "float16", "bfloat16"})
_HALF = frozenset({"torch.float16", "torch.bfloat16"})


def is_tensor(value: object) -> bool:
    """Whether an argument is a tensor."""
    return hasattr(value, "untyped_storage")


def tensors(value: object) -> Iterator[Any]:
    """The tensors in an argument or output, lists flattened."""
    if is_tensor(value):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors(part)


def shape(tensor: Strided) -> tuple[int, ...]:
    """Sizes."""
    return tuple(int(size) for size in tensor.shape)


def strides(tensor: Strided) -> tuple[int, ...]:
    """Strides in elements."""
    return tuple(int(stride) for stride in tensor.stride())


def elements(tensor: torch.Tensor) -> int:
    """Number of elements."""
    return int(tensor.numel())


def width(tensor: torch.Tensor) -> int:
    """Bytes of an element."""
    return int(tensor.element_size())


def size(tensor: torch.Tensor) -> int:
    """Bytes of the elements, as a contiguous copy has them."""
    return elements(tensor) * width(tensor)


def dtype(tensor: torch.Tensor) -> str:
    """The type's name without `torch.`: "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def promoted(operands: Sequence[tuple[str, bool]]) -> str:
    """The type that operands are cast to, of each one's type and whether it has dimensions (c10/core/ScalarType.h)."""
    with_dimensions = [kind for kind, has in operands if has] or [kind for kind, _ in operands]
    floating = [kind for kind, _ in operands if kind in FLOATING]
    if floating and not FLOATING & {*with_dimensions}:
        return "float32" if len(with_dimensions) < len(operands) else max(floating, key=SIZES.__getitem__)
    chosen = [kind for kind in with_dimensions if kind in FLOATING] or with_dimensions
    if {"float16", "bfloat16"} <= {*chosen}:
        chosen.append("float32")
    return max(chosen, key=SIZES.__getitem__)


def is_half(tensor: torch.Tensor) -> bool:
    """Whether the type is one of the two 16-bit floating point types."""
    return str(tensor.dtype) in _HALF


def is_complex(tensor: torch.Tensor) -> bool:
    """Whether the type is one of complex numbers."""
    return dtype(tensor).startswith("complex")


def on_device(tensor: torch.Tensor) -> bool:
    """Whether the tensor is not on the host."""
    return str(tensor.device.type) != "cpu"


def is_contiguous(tensor: Strided) -> bool:
    """Whether elements lie in order without gaps; strides of dimensions of size 1 do not matter."""
    return in_order(shape(tensor), strides(tensor))


def in_order(sizes: Sequence[int], steps: Sequence[int]) -> bool:
    """As `is_contiguous`, of sizes and strides."""
    expected = 1
    for extent, stride in zip(reversed(sizes), reversed(steps), strict=True):
        if extent == 0:
            return True
        if extent != 1:
            if stride != expected:
                return False
            expected *= extent
    return True


def is_line(sizes: Sequence[int], steps: Sequence[int]) -> bool:
    """Whether all elements are one row with one stride, in order: `reshape(-1)` is a view."""
    wide = [(extent, step) for extent, step in zip(sizes, steps, strict=True) if extent != 1]
    return 0 in sizes or all(step == after * extent for (_, step), (extent, after) in pairwise(wide))


#: Dimensions of a tensor whose channels come last, by how many there are: the fastest first.
CHANNELS_LAST: Final = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}


def is_channels_last(sizes: Sequence[int], steps: Sequence[int]) -> bool:
    """Whether elements lie in order without gaps where channels come last."""
    order = CHANNELS_LAST[len(sizes)][::-1]
    return in_order([sizes[place] for place in order], [steps[place] for place in order])


def in_format(sizes: Sequence[int], steps: Sequence[int], channels_last: bool) -> bool:
    """Whether elements lie in order without gaps in a memory format (`Tensor.is_contiguous`)."""
    return (is_channels_last if channels_last else in_order)(sizes, steps)


def packed(sizes: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps of dimensions in this order, the fastest first."""
    steps, step = [0] * len(sizes), 1
    for place in order:
        steps[place] = step
        step *= sizes[place]
    return tuple(steps)


def suggests_channels_last(sizes: Sequence[int], steps: Sequence[int]) -> bool:
    """Whether channels come last in memory, as strides suggest it (`is_channels_last_strides_2d_s4`, `3d_s5`)."""
    least = 0
    if len(sizes) not in (4, 5) or steps[1] == 0:
        return False
    for place in (1, *range(len(sizes) - 1, 1, -1), 0):
        if sizes[place] == 0 or steps[place] < least or (place == 0 and least == steps[1]):
            return False
        least = steps[place] * max(sizes[place], 1)
    return True


def is_conjugated(tensor: torch.Tensor) -> bool:
    """Whether it is the conjugate of what is in its memory (`Tensor.is_conj`)."""
    return dtype(tensor).startswith("complex") and tensor.is_conj()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether some order of dimensions makes it contiguous (`is_non_overlapping_and_dense`)."""
    if any(extent == 0 for extent in shape(tensor)):
        return True
    expected = 1
    for stride, extent in sorted((s, e) for e, s in zip(shape(tensor), strides(tensor), strict=True) if e != 1):
        if stride != expected:
            return False
        expected *= extent
    return True


def argument(call: Call, position: int, name: str, default: object = None) -> Any:
    """An argument given by position or by name."""
    if position < len(call.args):
        return call.args[position]
    return call.kwargs.get(name, default)


def dimension(index: int, rank: int) -> int:
    """A dimension counted from the front."""
    return index + max(rank, 1) if index < 0 else index


def up(value: int, unit: int) -> int:
    """`value` over `unit`, rounded up."""
    return -(-value // unit)


def upper(value: int, unit: int) -> int:
    """The least multiple of `unit` that is not less than `value`."""
    return up(value, unit) * unit
