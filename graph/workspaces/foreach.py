"""Operators over lists of tensors: buffers for partial results.

Source: aten/src/ATen/native/cuda/ForeachReduceOp.cu.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Final

from graph.workspaces.metadata import (
    argument,
    dtype,
    elements,
    is_complex,
    is_dense,
    shape,
    strides,
    tensors,
    up,
    width,
)
from graph.workspaces.reduction import extreme_of_all, norm_of
from graph.workspaces.rules import REST, Call, Plan, Rule, after, within

if TYPE_CHECKING:
    import torch

_CHUNK: Final = 65536
#: Norms that one kernel computes of a list.
_ORDERS: Final = (0, 1, 2, inf)
#: Since when those of order 0 are among them, and the largest value only where no tensor is empty (2.10: no record).
_OF_ZERO: Final = (2, 12)
_LARGEST_OF_SOME: Final = (2, 11)


def _fast(sources: Sequence[torch.Tensor]) -> bool:
    """Whether one kernel takes the whole list (`can_use_fast_route`)."""
    first = sources[0]
    return all(dtype(t) == dtype(first) and elements(t) and is_dense(t) and 0 not in strides(t) for t in sources)


def _partials(sources: Sequence[torch.Tensor], item: int) -> int:
    return len(sources) * max(up(elements(source), _CHUNK) for source in sources) * item


def _ragged(sources: Sequence[torch.Tensor], item: int) -> list[tuple[str, int]]:
    """Where the chunks of each tensor begin, and a value for each chunk (from 2.15 on)."""
    chunks = sum(up(elements(source), _CHUNK) for source in sources)
    return [("offsets", (len(sources) + 1) * 8), ("partials", chunks * item)]


def _one_by_one(plans: Iterable[Plan | None]) -> Plan:
    """Each result of the list is born and made before the next."""
    steps = ((("out", place), *(plan or ())) for place, plan in enumerate(plans))
    return tuple(step for step in chain.from_iterable(steps) if step != REST)


def foreach_norm(call: Call) -> Plan | None:
    """`_foreach_norm`: a partial norm in the accumulation type for each chunk of 65536 values, before the outputs.

    Up to 2.14 every tensor has room for as many chunks as the largest; then its own, and offsets say where they begin.
    """
    sources = call.args[0]
    order = float(argument(call, 1, "ord", 2))
    empty = [place for place, source in enumerate(sources) if not elements(source)]
    given = [source for source in sources if elements(source)]
    release = call.profile.release
    known = order in _ORDERS and (order or release >= _OF_ZERO)
    if order == inf and empty and release >= _LARGEST_OF_SOME:
        return None
    if is_complex(sources[0]) or not known or (given and not _fast(given)):
        made = zip(sources, tensors(call.out), strict=True)
        return _one_by_one(norm_of(call, source, range(len(shape(source))), out) for source, out in made)
    item = max(4, width(sources[0]))
    scratch = [("partials", _partials(sources, item))] if release < (2, 15) else _ragged(given, item)
    scratch = [one for one in scratch if one[1]]
    return _with_zeros(sources, empty, scratch) if empty else within(scratch, REST)


def _with_zeros(sources: Sequence[torch.Tensor], empty: Sequence[int], partials: Sequence[tuple[str, int]]) -> Plan:
    """The norms of the others, then a zero for each empty tensor, which is copied."""
    others = [("out", place) for place in range(len(sources)) if place not in empty]
    zeros = [(f"zero {place}", width(sources[place])) for place in empty]
    births, deaths = [("alloc", *zero) for zero in zeros], [("free", key) for key, _ in zeros]
    return within(partials, *others, *births, *(("out", place) for place in empty), *deaths)


def foreach_max(call: Call) -> Plan | None:
    """`_foreach_max`: as the norm, in the type of the values; after the outputs from 2.11. Tensors that one kernel does
    not take are contiguous copies for a moment, each in turn."""
    sources = call.args[0]
    if not _fast(sources):
        return _one_by_one(extreme_of_all(replace(call, args=(source,))) for source in sources)
    item = width(sources[0])
    if call.profile.release >= (2, 15):
        offsets, chunks = _ragged(sources, item)
        return within([offsets], REST, *within([chunks]))
    partials = [("partials", _partials(sources, item))]
    return after(partials) if call.profile.release >= (2, 11) else within(partials, REST)


RULES: Mapping[str, Rule] = {
    "aten._foreach_norm.Scalar": foreach_norm,
    "aten._foreach_max.default": foreach_max,
}
