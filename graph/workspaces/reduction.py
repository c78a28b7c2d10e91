"""Reductions (`sum`, `mean`, norms, `any`, `argmax`, `var`, ...): the staging buffer of those that span several blocks.

A reduction whose input is large for its number of outputs is shared by several thread blocks, which meet in a buffer
and count themselves in semaphores, both from the allocator. This module computes, from shapes and the card alone, what
`setReduceConfig` (aten/src/ATen/native/cuda/Reduce.cuh) decides, after the dimensions are sorted and merged as
`TensorIteratorBase::reorder_dimensions` and `coalesce_dimensions` do (aten/src/ATen/TensorIterator.cpp).
Checked against recordings of 2.9, 2.11 and 2.13 on several cards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, Final

from graph.hardware.profile import Profile
from graph.workspaces.metadata import (
    Strided,
    argument,
    dimension,
    dtype,
    elements,
    is_complex,
    is_contiguous,
    is_dense,
    is_half,
    is_line,
    shape,
    size,
    strides,
    tensors,
    up,
    width,
)
from graph.workspaces.rules import REST, Call, Plan, Rule, after, within

if TYPE_CHECKING:
    import torch

_INT_MAX: Final = (1 << 31) - 1
_THREADS: Final = 512
_WARP: Final = 32
_VECTOR: Final = 4
_LEAST_VALUES: Final = 16
_MOST_VALUES: Final = 256


@dataclass
class Loop:
    """The merged loop of a reduction: sizes and byte strides of output and input, fastest dimension first."""

    sizes: list[int]
    out: list[int]
    source: list[int]

    def copy(self) -> Loop:
        """An independent copy."""
        return Loop(list(self.sizes), list(self.out), list(self.source))

    def reduced(self) -> int:
        """How many dimensions are reduced."""
        return sum(step == 0 and extent > 1 for step, extent in zip(self.out, self.sizes, strict=True))

    def outputs(self) -> int:
        """Number of outputs."""
        return prod([e for step, e in zip(self.out, self.sizes, strict=True) if not (step == 0 and e > 1)])

    def fits_32_bits(self) -> bool:
        """Whether indices and byte offsets fit 32 bits."""
        if prod(self.sizes) > _INT_MAX:
            return False
        return all(
            1 + sum((extent - 1) * step for extent, step in zip(self.sizes, steps, strict=True)) <= _INT_MAX
            for steps in (self.out, self.source)
        )

    def parts(self) -> Iterator[Loop]:
        """Halves of the widest dimension until each fits 32 bits, in the order PyTorch runs them."""
        stack = [self.copy()]
        while stack:
            loop = stack.pop()
            if loop.fits_32_bits():
                yield loop
                continue
            at, widest = 0, -1
            for position in range(len(loop.sizes) - 1, -1, -1):
                for steps in (loop.out, loop.source):
                    extent = (loop.sizes[position] - 1) * abs(steps[position])
                    if extent > widest:
                        at, widest = position, extent
            first, second = loop.copy(), loop.copy()
            first.sizes[at] = loop.sizes[at] // 2
            second.sizes[at] = loop.sizes[at] - first.sizes[at]
            stack += [second, first]


def merged(source: Strided, dims: Sequence[int], out_width: int, source_width: int) -> Loop:
    """The loop of reducing `source` over `dims` into a new contiguous output."""
    sizes = shape(source)
    rank = len(sizes)
    steps = [step * source_width for step in strides(source)]
    out_steps = [0] * rank
    step = out_width
    for position in range(rank - 1, -1, -1):
        if position not in dims:
            out_steps[position] = step
            step *= sizes[position]
    loop = Loop(list(sizes), out_steps, steps)
    return _coalesced(_sorted(loop))


def flat(count: int, item: int) -> Loop:
    """The loop of reducing `count` contiguous values of `item` bytes to one."""
    return Loop([count], [0], [item])


def _order(loop: Loop, first: int, second: int) -> int:
    """Whether `first` should come after (1) or before (-1) `second`; 0: either."""
    for position, steps in enumerate((loop.out, loop.source)):
        one, other = steps[first], steps[second]
        if position == 0 and (one == 0) != (other == 0):
            return 1 if other == 0 else -1
        if one == 0 or other == 0:
            continue
        if one != other:
            return -1 if one < other else 1
        if loop.sizes[first] > loop.sizes[second]:
            return 1
    return 0


def _sorted(loop: Loop) -> Loop:
    rank = len(loop.sizes)
    order = list(range(rank - 1, -1, -1))
    for position in range(1, rank):
        second = position
        for first in range(position - 1, -1, -1):
            found = _order(loop, order[first], order[second])
            if found > 0:
                order[first], order[second] = order[second], order[first]
                second = first
            elif found < 0:
                break
    return Loop([loop.sizes[i] for i in order], [loop.out[i] for i in order], [loop.source[i] for i in order])


def _coalesced(loop: Loop) -> Loop:
    if len(loop.sizes) <= 1:
        return loop
    sizes, out, source = loop.sizes[:1], loop.out[:1], loop.source[:1]
    for extent, one, other in list(zip(loop.sizes, loop.out, loop.source, strict=True))[1:]:
        last = sizes[-1]
        if last == 1 or extent == 1 or (last * out[-1] == one and last * source[-1] == other):
            if last == 1:
                out[-1], source[-1] = one, other
            sizes[-1] = last * extent
        else:
            sizes.append(extent)
            out.append(one)
            source.append(other)
    return Loop(sizes, out, source)


def last_power(value: int) -> int:
    """The largest power of two that is no larger; 1 for 0."""
    return max(1, 1 << (value.bit_length() - 1)) if value > 0 else 1


def _block(first: int, second: int, threads: int) -> tuple[int, int]:
    """Width and height of a thread block (`ReduceConfig::set_block_dimension`)."""
    one = last_power(first) if first < threads else threads
    other = last_power(second) if second < threads else threads
    block_width = min(one, _WARP)
    block_height = min(other, threads // block_width)
    return min(one, threads // block_height), block_height


def staging(loop: Loop, profile: Profile, accumulator: int, item: int, unroll: int = 4) -> tuple[int, int]:
    """Bytes of the staging buffer and of the semaphores; (0, 0) where one block suffices (`setReduceConfig`).

    `accumulator` and `item` are the bytes of an accumulated and of an input value; `unroll` is the kernel's vt0.
    """
    outputs = loop.outputs()
    inputs = prod(loop.sizes) // outputs
    reduced = loop.reduced()
    rank = len(loop.sizes)
    vector = 1
    if rank:
        along = reduced == rank or loop.source[0] < loop.source[reduced]
        first, second = (inputs, outputs) if along else (outputs, inputs)
        fastest = loop.source[0] if along else loop.source[reduced]
    else:
        along, first, second, fastest = True, 1, 1, item
    if fastest == item:
        if along and first > 128 and rank == 1 and unroll >= _VECTOR:
            first //= _VECTOR
        elif not along:
            vector = _output_vector(loop, reduced, item)
            first //= vector
    most = _THREADS // 2 if item == _ACCUMULATOR["complex128"] else _THREADS  # `mnt_wrapper`
    block_width, block_height = _block(first, second, most // vector)
    step_in = step_out = 1
    if rank == 0 or along:
        step_in = block_width
    else:
        step_out = block_width
    values = up(inputs, step_in)
    if not (values >= block_height * _LEAST_VALUES or values >= _MOST_VALUES):
        return 0, 0
    step_in *= block_height
    values = up(inputs, step_in)
    target = profile.sm_count * (profile.max_threads_per_sm // (block_width * block_height))
    grid = up(outputs // vector, step_out)
    if values < _MOST_VALUES or grid > target:
        return 0, 0
    blocks = max(min(up(target, grid), up(values, _LEAST_VALUES)), up(values, _MOST_VALUES))
    if blocks <= 1:
        return 0, 0
    buffer = accumulator * outputs * blocks
    if not (rank == 0 or along):
        buffer *= block_width * vector
    return buffer, 4 * grid


def _output_vector(loop: Loop, reduced: int, item: int) -> int:
    """How many outputs a thread makes at once (`get_output_vec_size`); addresses are aligned here."""
    vector = 4
    values = [loop.sizes[reduced], *(s // item for i, s in enumerate(loop.source) if i != reduced)]
    for value in values:
        while value % vector:
            vector //= 2
    return vector


def scratch(
    profile: Profile, loop: Loop, out_width: int, accumulator: int, item: int, lossy: bool, unroll: int = 4
) -> Plan:
    """The steps inside a reduction. `lossy`: partial results can't be kept in the output (16-bit floating point)."""
    buffer = 0
    if not loop.fits_32_bits() and lossy:
        memory = max([out_width, *(e * s for e, s in zip(loop.sizes, loop.out, strict=True))]) // out_width
        buffer = memory * accumulator if accumulator > out_width else 0
    stages = (staging(part, profile, accumulator, item, unroll) for part in loop.parts())
    steps = [within([("staging", stage), ("semaphores", counters)]) for stage, counters in stages if stage]
    return within([("accumulator", buffer)] if buffer else [], *chain.from_iterable(steps))


def reduction_dims(dims: int | Sequence[int] | None, rank: int) -> list[int]:
    """The dimensions of an argument `dim`: none or an empty list is all of them."""
    if isinstance(dims, int):
        return [dimension(dims, rank)]
    return [dimension(d, rank) for d in dims] if dims else list(range(max(rank, 1)))


def reduce(
    profile: Profile,
    source: torch.Tensor,
    dims: Sequence[int],
    out: torch.Tensor,
    accumulator: int,
    *,
    cast: str | None = None,
    cast_width: int = 0,
    unroll: int = 4,
    lossy: bool = False,
) -> Plan:
    """Steps of reducing `source` over `dims` into `out`, after a cast of the input where `cast` names a type."""
    if elements(source) == 0 or elements(out) == 0:
        return ()
    copied = cast is not None and cast != dtype(source)
    item = cast_width if copied else width(source)
    loop = merged(_Cast(source) if copied else source, dims, width(out), item)
    steps = scratch(profile, loop, width(out), accumulator, item, lossy, unroll)
    return within([("cast", elements(source) * item)] if copied else [], *steps)


class _Cast:
    """A tensor's dense copy: its own strides if it is dense, else contiguous ones (`Tensor::to`)."""

    def __init__(self, source: torch.Tensor) -> None:
        self.shape = shape(source)
        self._strides = _preserved(source)

    def stride(self) -> tuple[int, ...]:
        """Strides in elements."""
        return self._strides


class _Part:
    """The real or the imaginary part of a complex tensor, a view."""

    def __init__(self, source: torch.Tensor) -> None:
        self.shape = shape(source)
        self._strides = tuple(2 * step for step in strides(source))

    def stride(self) -> tuple[int, ...]:
        """Strides in elements."""
        return self._strides


def _preserved(source: torch.Tensor) -> tuple[int, ...]:
    """Strides of a copy that preserves the format of its source."""
    if is_dense(source):
        return strides(source)
    sizes, steps = shape(source), strides(source)
    order = sorted(range(len(sizes)), key=lambda i: (-steps[i], i))
    result = [0] * len(sizes)
    step = 1
    for i in reversed(order):
        result[i] = step
        step *= sizes[i]
    return tuple(result)


_ACCUMULATOR: Final[Mapping[str, int]] = {
    "float16": 4,
    "bfloat16": 4,
    "float32": 4,
    "float64": 8,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}


def _out(call: Call) -> Any:
    return call.kwargs.get("out", next(tensors(call.out)))


def _dims(call: Call, place: int = 1) -> list[int]:
    """The dimensions of a call, whose argument `dim` stands at `place`."""
    return reduction_dims(argument(call, place, "dim"), len(shape(call.args[0])))


def _summed(call: Call, dims: Sequence[int]) -> Plan | None:
    """`sum`, `mean`, `nansum`, `prod`: the accumulator is fp32 for 16-bit types, else the output's type.

    The input is cast first if the output has another type, but not 16-bit floating point to fp32
    (`make_reduction_from_out_ty`, aten/src/ATen/native/ReduceOpsUtils.h).
    """
    source, out = call.args[0], _out(call)
    wide = is_half(source) and dtype(out) == "float32"
    steps = reduce(
        call.profile,
        source,
        dims,
        out,
        _ACCUMULATOR[dtype(out)],
        cast=None if wide else dtype(out),
        cast_width=width(out),
        lossy=is_half(out) and "prod" not in call.name,
    )
    return steps or None


def sum_all(call: Call) -> Plan | None:
    """`sum()`, `prod()`: over everything."""
    return _summed(call, list(range(max(len(shape(call.args[0])), 1))))


def sum_dims(call: Call) -> Plan | None:
    """`sum(dim)`, `mean(dim)`, `nansum(dim)`."""
    return _summed(call, _dims(call))


def vector_norm(call: Call) -> Plan | None:
    """`linalg_vector_norm`, `norm(dim)`: as sum, 16-bit and complex input is read as it is (ReduceNormKernel.cu)."""
    source, out = call.args[0], _out(call)
    return norm_of(call, source, _dims(call, 2), out)


def norm_of(call: Call, source: torch.Tensor, dims: Sequence[int], out: torch.Tensor) -> Plan | None:
    """The norm of `source` over these dimensions: the absolute values, where each has one element (LinearAlgebra.cpp);
    those of complex numbers are complex at first, but for the order 0."""
    kind = f"complex{16 * width(out)}" if is_complex(source) else dtype(out)
    item = 2 * width(out) if is_complex(source) else width(out)
    if elements(source) and elements(source) == elements(out):
        made = [("cast", elements(source) * item)] if kind != dtype(source) else []
        if is_complex(source) and argument(call, 1, "ord", 2) != 0:
            made.append(("absolute", elements(source) * item))
        return after(made)
    cast = None if is_half(source) and dtype(out) == "float32" else kind
    accumulator = _ACCUMULATOR[dtype(out)]
    steps = reduce(call.profile, source, dims, out, accumulator, cast=cast, cast_width=item, lossy=is_half(out))
    return steps or None


def _extreme(call: Call, dims: Sequence[int], accumulator: int, unroll: int = 4, lossy: bool = False) -> Plan | None:
    steps = reduce(call.profile, call.args[0], dims, _out(call), accumulator, unroll=unroll, lossy=lossy)
    return steps or None


def extreme(call: Call) -> Plan | None:
    """`amax`, `amin`: the accumulator is the value itself (ReduceMaxValuesKernel.cu)."""
    source = call.args[0]
    dims = _dims(call)
    return _extreme(call, dims, width(source))


def equal(call: Call) -> Plan | None:
    """`equal`: the comparison of every value, reduced by `all` (cuda/Equal.cpp)."""
    source, other = call.args[0], call.args[1]
    count = elements(source)
    if shape(source) != shape(other) or not count or source is other:
        return None
    staged = within([("all", 1)], *scratch(call.profile, flat(count, 1), 1, 1, 1, False))
    return within([("equal", count)], *staged)


def renormed(call: Call) -> Plan | None:
    """`renorm`: a norm for each slice, in fp32 where values have 16 bits, and then a factor (Normalization.cpp)."""
    source = call.args[0]
    kept = dimension(int(call.args[2]), len(shape(source)))
    dims = [place for place in range(len(shape(source))) if place != kept]
    wide = width(source) // 2 if is_complex(source) else max(width(source), 4)
    count = shape(source)[kept]
    stage = scratch(call.profile, merged(source, dims, wide, width(source)), wide, wide, width(source), False)
    if is_half(source) and count == elements(source):
        stage = within([("values", count * wide)])  # the norm of one number is its absolute value
    factor = [("factor", count * width(source))] if is_half(source) or is_complex(source) else []
    return (REST, *within([("norm", count * wide)], *stage, *within(factor)))


def dirichlet(call: Call) -> Plan | None:
    """`_sample_dirichlet`: the sum of each row's samples (cuda/Distributions.cpp)."""
    source = call.args[0]
    sizes = shape(source)
    return after([("sums", prod(sizes[:-1]) * width(source))]) if elements(source) else None


def extreme_of_all(call: Call) -> Plan | None:
    """`max()`, `min()`, `aminmax()`: of a contiguous copy if the input is not contiguous (ReduceAllOps.cpp).

    `aminmax(dim)` accumulates both values together (TensorCompare.cu, ReduceMinValuesKernel.cu).
    """
    source = call.args[0]
    pair = "aminmax" in call.name
    item = width(source)
    if pair and call.kwargs.get("dim") is not None:
        return _extreme(call, reduction_dims(call.kwargs["dim"], len(shape(source))), 2 * item, lossy=True)
    steps = scratch(call.profile, flat(elements(source), item), item, 2 * item if pair else item, item, False)
    if is_contiguous(source):
        return steps or None
    return (REST, *within([("flat", size(source))], *steps))


def truth(call: Call) -> Plan | None:
    """`any`, `all`: the accumulator has the input's type, from 2.12 bool; one value is cast (ReduceLogicKernel.cu)."""
    source = call.args[0]
    if elements(source) == 1:
        return None if dtype(source) == "bool" else after([("cast", 1)])
    dims = _dims(call)
    return _extreme(call, dims, 1 if call.profile.release >= (2, 12) else width(source))


def extreme_at(call: Call) -> Plan | None:
    """`max(dim)`, `min(dim)`: value and index are accumulated together (ReduceMaxValuesKernel.cu)."""
    source = call.args[0]
    dims = _dims(call)
    if not shape(source) or shape(source)[dims[0]] == 1:
        return None
    return _extreme(call, dims, 16, lossy=True)


def index_of(call: Call) -> Plan | None:
    """`argmax`, `argmin`: value and index; without a dimension the input is flattened, copied if it must be."""
    source = call.args[0]
    if argument(call, 1, "dim") is not None:
        return extreme_at(call)
    item = width(source)
    steps = scratch(call.profile, flat(elements(source), item), 8, 16, item, True)
    return within([] if is_line(shape(source), strides(source)) else [("flat", size(source))], *steps) or None


def variance(call: Call) -> Plan | None:
    """`var`, `std`, `var_mean`, `std_mean`: Welford's four numbers, two values at a time (ReduceMomentKernel.cu)."""
    source, dims = call.args[0], _dims(call)
    if is_complex(source):
        return _variance_of_parts(call, dims)
    return _extreme(call, dims, 32 if dtype(source) == "float64" else 16, unroll=2, lossy=True)


def _variance_of_parts(call: Call, dims: Sequence[int]) -> Plan:
    """Of complex numbers both parts', one after the other, and added up (ReduceOps.cpp)."""
    source, out = call.args[0], _out(call)
    item = width(source) // 2
    stage: Plan = ()
    if elements(source) and elements(out):
        loop = merged(_Part(source), dims, item, item)
        stage = scratch(call.profile, loop, item, 4 * max(item, 4), item, True, unroll=2)
    results = ("variance", "mean") if "mean" in call.name else ("variance",)
    real, imaginary = ([(f"{part} {result}", size(out)) for result in results] for part in ("real", "imaginary"))
    return within(real, *stage, *within(imaginary, *stage, REST))


def _names(operators: str, overloads: str) -> list[str]:
    return [f"aten.{name}.{overload}" for name in operators.split() for overload in overloads.split()]


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_names("sum mean prod", "default"), sum_all),
    **dict.fromkeys(["aten.sum.dim_IntList", "aten.sum.IntList_out", "aten.nansum.default"], sum_dims),
    **dict.fromkeys(["aten.mean.dim", "aten.mean.out", "aten.prod.dim_int"], sum_dims),
    **dict.fromkeys(_names("linalg_vector_norm", "default out"), vector_norm),
    **dict.fromkeys(_names("norm", "ScalarOpt_dim ScalarOpt_dim_dtype out dtype_out"), vector_norm),
    **dict.fromkeys(_names("amax amin", "default"), extreme),
    **dict.fromkeys(_names("max min aminmax", "default"), extreme_of_all),
    "aten.equal.default": equal,
    **dict.fromkeys(["aten.renorm.default", "aten.renorm_.default"], renormed),
    "aten._sample_dirichlet.default": dirichlet,
    **dict.fromkeys(_names("any all", "default dim dims out all_out"), truth),
    **dict.fromkeys(_names("max min", "dim"), extreme_at),
    **dict.fromkeys(_names("argmax argmin", "default out"), index_of),
    **dict.fromkeys(_names("var std var_mean std_mean", "correction"), variance),
}
