"""Indexing by tensors: index copies, and the sort behind an accumulating `index_put`.

Source: aten/src/ATen/native/cuda/Indexing.cu, aten/src/ATen/native/TensorAdvancedIndexing.cpp.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final

from numpy import broadcast_shapes

from graph.workspaces.cub.temporary import scan, selected, sort_pairs, total
from graph.workspaces.metadata import (
    argument,
    dtype,
    elements,
    in_order,
    is_contiguous,
    is_dense,
    on_device,
    shape,
    size,
    strides,
    tensors,
    up,
    width,
)
from graph.workspaces.reduction import flat, scratch
from graph.workspaces.rules import REST, Call, Plan, Rule, Step, after, within

if TYPE_CHECKING:
    import torch


def _expanded(index: torch.Tensor, target: tuple[int, ...]) -> tuple[int, ...]:
    sizes, steps = shape(index), strides(index)
    lead = len(target) - len(sizes)
    kept = [0 if e == 1 and t != 1 else s for e, s, t in zip(sizes, steps, target[lead:], strict=True)]
    return (*[0] * lead, *kept)


#: Elements that a block of threads looks at in a round (512 threads, 16 each).
_PART: Final = 8192
#: Indices of these types become ones of 64 bits.
_NARROW: Final = ("int32", "uint8", "int16", "int8")


def _with_copies(call: Call, *inside: Step) -> Plan:
    """Indices go from the host to the device (before 2.9 once they are broadcast), 32-bit ones are widened
    (`make_info`), and broadcast ones whose strides differ made contiguous (`AdvancedIndex`); the last copy of each
    lasts as long as what is `inside`."""
    indices: Sequence[Any] = call.args[1]
    given = [index for index in indices if index is not None]
    target = broadcast_shapes(*map(shape, given))
    flat = tuple(prod(target[place + 1 :]) for place in range(len(target)))
    steps = [_expanded(index, target) for index in given]
    births: list[Step] = []
    copies: dict[int, str] = {}  # what stands for an index, by its position
    for position, index in enumerate(given):
        if not on_device(index) and elements(index):
            copies[position] = f"moved index {position}"
            spread_first = call.profile.release < (2, 9) and shape(index) != target
            count = prod(target) if spread_first else elements(index)
            births.append(("alloc", copies[position], count * width(index)))
            steps[position] = steps[position] if is_dense(index) and not spread_first else flat
    for position, index in enumerate(given):
        if dtype(index) in _NARROW and elements(index):
            births.append(("alloc", f"wide index {position}", prod(target) * 8))
            births += [("free", copies[position])] if position in copies else []
            copies[position] = f"wide index {position}"
            steps[position] = steps[position] if shape(index) == target else flat
    if len(given) > 1 and any(step != steps[0] for step in steps):
        spread = {place: f"index {place}" for place, step in enumerate(steps) if not in_order(target, step)}
        births += [("alloc", key, prod(target) * 8) for key in spread.values()]
        births += [("free", copies[place]) for place in spread if place in copies]
        copies |= spread
    return (*births, *inside, *(("free", copies[place]) for place in sorted(copies, reverse=bool(inside))))


def _bool(indices: Sequence[Any]) -> bool:
    return any(index is not None and dtype(index) == "bool" for index in indices)


def index(call: Call) -> Plan | None:
    """`index`: copies of the indices, then the output; masks have become indices before."""
    indices = call.args[1]
    if _bool(indices) or not any(given is not None for given in indices):
        return None
    steps = _with_copies(call, REST)
    return None if steps == (REST,) else steps


def _bounds(call: Call, number: int, count: int, strided: bool) -> list[Step]:
    """The smallest and largest index are read to check them: one reduction from 2.13, two before; of a contiguous copy
    where an index is broadcast to others."""
    low, high, flag = f"least {number}", f"most {number}", f"flag {number}"
    flagged = within([(flag, 1)])
    recent = call.profile.release >= (2, 13)
    copies = [(f"all of {number}", count * 8)] if strided else []
    stage = within(copies, *scratch(call.profile, flat(count, 8), 8, 16 if recent else 8, 8, False))
    if recent:
        return [("alloc", low, 8), ("alloc", high, 8), *stage, *flagged, *flagged, ("free", low), ("free", high)]
    first = [("alloc", low, 8), *stage, *flagged, ("free", low)]
    return [*first, ("alloc", high, 8), *stage, *flagged, ("free", high)]


def index_put(call: Call) -> Plan | None:
    """`index_put`: a number on the host goes to the device first, for as long as the kernel runs."""
    value = call.args[2]
    steps = _put(call) or ()
    if on_device(value) or shape(value) or _bool(call.args[1]):
        return steps or None
    return (REST, *within([("value", width(value))], *(step for step in steps if step != REST)))


def _put(call: Call) -> Plan | None:
    """Where it accumulates or has to put several values in one order, the linear indices are sorted with their places.

    Only the bits that places of slices need are sorted, those before the indexed dimensions among them
    (`index_put_with_sort_kernel`); what is not contiguous with them in front is copied. The derivative of `index` is
    unsafe: its indices have been checked.
    """
    target, indices, values = call.args[0], list(call.args[1]), call.args[2]
    accumulate = argument(call, 3, "accumulate", False)
    if _bool(indices) or not any(given is not None for given in indices):
        return None
    if not (accumulate or (call.deterministic and elements(values) > 1)):
        copies = _with_copies(call)
        return (REST, *copies) if copies else None
    unsafe = "_impl_" in call.name and bool(argument(call, 4, "unsafe", False))
    given = [(place, index) for place, index in enumerate(indices) if index is not None]
    target_shape = broadcast_shapes(*(shape(index) for _, index in given))
    count = prod(target_shape)
    if not count:
        return None
    narrow = [(place, index) for place, index in given if on_device(index) and dtype(index) in _NARROW]
    steps: list[Step] = [("rest",), *(("alloc", f"wide {place}", 8 * elements(index)) for place, index in narrow)]
    for number, (_, index) in enumerate(given):
        nbytes = count * 8
        if not on_device(index):  # wrapped and multiplied there
            steps.append(("alloc", f"linear {number}", nbytes))
            steps += [("free", f"linear {number}")] if number else []
            continue
        if not unsafe:
            strided = shape(index) != target_shape or not is_contiguous(index)
            steps += _bounds(call, number, count, strided)
        steps += [("alloc", f"wrapped {number}", nbytes), ("alloc", f"linear {number}", nbytes)]
        steps.append(("free", f"wrapped {number}"))
        if number:
            steps.append(("free", f"linear {number}"))
    steps += [("free", f"wide {place}") for place, _ in narrow]
    places = [place for place, _ in given]
    chosen = count * _slice(target, places)
    broadcast = elements(values) < chosen or not is_contiguous(values)
    if broadcast:
        steps.append(("alloc", "values", chosen * width(values)))
    bits = max(_largest(target) // _behind(target, places), 1).bit_length()
    pairs = [(name, count * 8) for name in ("sorted indices", "original places", "places")]
    behind = [] if _in_front(target, places) else [("target", size(target))]
    steps += within([*behind, *pairs], *filled(call), *within([("sort", sort_pairs(call.profile, count, 8, 8, bits))]))
    if broadcast:
        steps.append(("free", "values"))
    steps.append(("free", "linear 0"))
    return tuple(steps)


def filled(call: Call, item: int = 8) -> Plan:
    """An element of that what has been resized is filled with, where it has to be deterministic."""
    return within([("fill", item)]) if call.filling else ()


def grown(call: Call, plan: Plan | None, births: int) -> Plan | None:
    """The sequence of a call whose output has so many new storages, each resized, and then filled."""
    if not (call.filling and births):
        return plan
    filling = [filled(call, width(one)) for one in tensors(call.out)]
    if plan is not None and any(step[0] == "out" for step in plan):
        return (*plan, *(step for fill in filling[:births] for step in fill))
    return (*(step for birth in range(births) for step in (("out", birth), *filling[birth])), *(plan or ()))


def nonzero(call: Call) -> Plan | None:
    """`nonzero`: flags are counted, then their places selected into the output (`nonzero_cuda_out_impl`, Nonzero.cu).

    Checked on 2.9, 2.11 and 2.13, with compute capabilities 7.0, 7.5, 8.0, 8.6, 8.9, 9.0 and 10.0.
    """
    source = call.args[0]
    steps: list[Step] = [("alloc", "count", 4), ("alloc", "sum", total(call.profile, elements(source)))]
    steps += [("free", "sum"), ("rest",)]
    if shape(source):
        steps += [("alloc", "select", selected(call.profile, elements(source))), ("free", "select")]
    steps.append(("free", "count"))
    if is_contiguous(source):
        return tuple(steps)
    return (("alloc", "input", size(source)), *steps, ("free", "input"))


def nonzero_static(call: Call) -> Plan | None:
    """`nonzero_static`: how many each block of threads finds, and their running sums (`nonzero_static_cuda_out_impl`,
    Nonzero.cu).

    Checked on 2.7 to 2.15, with compute capabilities 7.5, 8.0 and 9.0.
    """
    source = call.args[0]
    if not elements(source) or not any(map(elements, tensors(call.out))):
        return None
    parts = up(elements(source), _PART)
    rounds = up(parts, call.profile.sm_count * (2 if width(source) == 1 else 1))
    blocks = up(parts, rounds)
    copied = [] if is_contiguous(source) else [("input", size(source))]
    return (REST, *within([*copied, ("found", 4 * blocks), ("sums", 8 * blocks)]))


def masked_scatter(call: Call) -> Plan | None:
    """`masked_scatter_`: the place in the source for each element (`masked_scatter__cuda`, IndexKernel.cpp)."""
    target, mask, source = call.args[:3]
    count = elements(target)
    if not count:
        return None
    strided = shape(mask) != shape(target) or not is_contiguous(mask)
    copies = [("mask", count * width(mask))] if strided else []
    behind = [] if is_contiguous(source) else [("source", size(source))]
    steps = within(copies, *within([("scan", scan(call.profile, count, 8))]), *within(behind))
    return within([("places", count * 8)], *steps)


def scattered_mean(call: Call) -> Plan | None:
    """`scatter_reduce` with `mean`: how many come to each element (TensorAdvancedIndexing.cpp, `scatter_reduce_two`).

    Arguments: self, dim, index, source, reduce.
    """
    target = call.args[0]
    if argument(call, 4, "reduce") != "mean" or not elements(target):
        return None
    counts = [("ones", size(call.args[3])), ("counts", size(target)), ("none", elements(target))]
    return after(counts)


def index_mean(call: Call) -> Plan | None:
    """`index_reduce` with `mean`: how many come to each element (cuda/Indexing.cu, `index_reduce_func_cuda_impl`)."""
    target, source = call.args[0], call.args[3]
    if argument(call, 4, "reduce") != "mean" or not elements(target):
        return None
    ones, none = within([("ones", size(source))]), within([("none", elements(target))])
    return (REST, *within([("counts", size(target))], *ones, *none))


def _slice(target: torch.Tensor, places: Collection[int]) -> int:
    """How many values an index selects."""
    return prod([extent for place, extent in enumerate(shape(target)) if place not in places])


def _largest(target: torch.Tensor) -> int:
    """The last element's place in memory (`largestIndex`)."""
    return sum((extent - 1) * step for extent, step in zip(shape(target), strides(target), strict=True))


def _behind(target: torch.Tensor, places: Sequence[int]) -> int:
    """Elements of a slice behind the indexed dimensions, which go to the front where they are not side by side."""
    return max(_slice(target, places if _apart(places) else range(places[-1] + 1)), 1)


def _apart(places: Sequence[int]) -> bool:
    """Whether the indexed dimensions are not side by side (`hasContiguousSubspace`)."""
    return places[-1] - places[0] >= len(places)


def _in_front(target: torch.Tensor, places: Sequence[int]) -> bool:
    """Whether it is contiguous with the indexed dimensions in front, where they have to go there."""
    behind = [place for place in range(len(shape(target))) if place not in places]
    order = [*places, *behind] if _apart(places) else range(len(shape(target)))
    return in_order([shape(target)[place] for place in order], [strides(target)[place] for place in order])


#: Operators that make a result of no size and resize it, as those with `out=` and `resize_` do with what they are given
#: (aten/src/ATen/native/Resize.h).
RESIZING: Final = frozenset(
    {
        *("aten.index_select.default", "aten.where.self", "aten.searchsorted.Tensor", "aten.bucketize.Tensor"),
        *(f"aten.{name}.correction" for name in ("var", "std", "var_mean", "std_mean")),
        *("aten.mode.default", "aten.im2col.default", "aten._adaptive_avg_pool2d.default"),
        *("aten.multi_margin_loss.default", "aten.multilabel_margin_loss_forward.default"),
    }
)
RULES: Mapping[str, Rule] = {
    "aten.index.Tensor": index,
    "aten._unsafe_index.Tensor": index,
    **dict.fromkeys(("aten.nonzero.default", "aten.nonzero.out"), nonzero),
    **dict.fromkeys(("aten.nonzero_static.default", "aten.nonzero_static.out"), nonzero_static),
    "aten.masked_scatter_.default": masked_scatter,
    **dict.fromkeys(("aten.scatter_reduce.two", "aten.scatter_reduce_.two"), scattered_mean),
    **dict.fromkeys(("aten.index_reduce.default", "aten.index_reduce_.default"), index_mean),
    **dict.fromkeys(
        ("aten.index_put.default", "aten.index_put_.default", "aten._index_put_impl_.default"),
        index_put,
    ),
}
