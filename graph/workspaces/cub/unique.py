"""`unique`: sorted copies, places, and CUB's temporary storage. What is found is held in room for every value.

Source: aten/src/ATen/native/cuda/Unique.cu (along a dimension, by Thrust) and UniqueCub.cu. Tiles were read off
recordings of 2.13 (CUDA 13.0) on T4, L4, A100, H100 and B200.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from graph.hardware.profile import Profile
from graph.workspaces.cub.temporary import (
    extra,
    merge_sort_pairs,
    scan_of_thrust,
    sort_pairs,
    storage,
    total,
    unique_by_key_of_thrust,
    unique_of_thrust,
)
from graph.workspaces.metadata import (
    argument,
    dimension,
    dtype,
    elements,
    in_order,
    is_contiguous,
    is_half,
    shape,
    size,
    strides,
    tensors,
    up,
    width,
)
from graph.workspaces.rules import Call, Plan, Rule, Step, within

if TYPE_CHECKING:
    import torch

#: Items a tile of `cub::DeviceSelect::Unique` by bytes of a value: compute capability 8.0, 9.0, from 10.0, others.
_TILES: Final[Mapping[int, tuple[int, int, int, int]]] = {
    8: (1920, 4224, 4224, 640),
    4: (4608, 6528, 5760, 1280),
    2: (8064, 5632, 5632, 1280),
    1: (19840, 5632, 8448, 1280),
}
#: The same of a sum of flags, by compute capability.
_SUMS: Final = (3840, 3072, 3072, 1920)
_LENGTHS: Final = 384
#: What `thrust::adjacent_difference` takes.
_DIFFERENCE: Final = 255


def _class(profile: Profile) -> int:
    arch = profile.arch
    return 2 if arch >= (10, 0) else 1 if arch >= (9, 0) else 0 if arch == (8, 0) else 3


def _lookback(profile: Profile, count: int, tile: int) -> int:
    """Bytes for an algorithm that leaves 8 bytes for each tile."""
    return storage((up(count, tile) + 32) * 8, *extra(profile))


def _found(call: Call, source: torch.Tensor, counted: int) -> list[Step]:
    """Values that differ from the one before them; `counted`: the number of the output with their counts, or 0."""
    count, card = elements(source), call.profile
    tile = 1280 if is_half(source) else _TILES[min(width(source), 8)][_class(card)]
    temporary = within([("found", _lookback(card, count, _LENGTHS if counted else tile))])
    births: list[Step] = [("out", counted)] if counted else []
    return [("out", 0), *within([("number", 8)], *births, *temporary)]


def _places(call: Call, count: int, item: int) -> Plan:
    """For each value the place among those that differ: a sum over flags of `item` bytes, after the output."""
    temporary = within([("sum", _lookback(call.profile, count, _SUMS[_class(call.profile)]))])
    return (("out", 1), *within([("flags", count * item)], *temporary))


def _input(source: torch.Tensor) -> list[tuple[str, int]]:
    return [] if is_contiguous(source) else [("input", size(source))]


def unique(call: Call) -> Plan | None:
    """`_unique`, `_unique2`: values are sorted, with their places if those are asked for."""
    source, inverse = call.args[0], bool(argument(call, 2, "return_inverse", False))
    counted = (1 + inverse) if argument(call, 3, "return_counts", False) else 0
    count, item, card = elements(source), width(source), call.profile
    if not count:
        return None
    if dtype(source) == "bool":
        return _flags(call, source)
    found = _found(call, source, counted)
    if not inverse:
        keys = within([("sort", sort_pairs(card, count, item, 0))])
        return within([*_input(source), ("sorted", size(source))], *keys, *found)
    births: Plan = (("alloc", "range", count * 8), ("alloc", "sorted places", count * 8))
    pairs = (*births, *within([("sort", sort_pairs(card, count, item, 8))]), ("free", "range"))
    steps = (*pairs, *_places(call, count, 8), *found, ("free", "sorted places"))
    return within([*_input(source), ("sorted", size(source))], *steps)


def _flags(call: Call, source: torch.Tensor) -> Plan:
    """Booleans are counted; `_unique2` gives the counts back, whether they were asked for or not."""
    sums = within([("sum", total(call.profile, elements(source)))])
    inverse: list[Step] = [("out", 1)] if argument(call, 2, "return_inverse", False) else []
    made = [*_input(source), ("number", 4)]
    if "_unique2" in call.name:
        return within(made, *sums, ("out", 0), ("out", 1 + len(inverse)), *inverse)
    first, last = within(made)[: len(made)], within(made)[len(made) :]
    return (*first, *sums, ("out", 0), ("alloc", "counts", 16), *inverse, *last, ("free", "counts"))


def consecutive(call: Call) -> Plan | None:
    """`unique_consecutive` of all values, as they come."""
    source, inverse = call.args[0], bool(argument(call, 1, "return_inverse", False))
    if not elements(source):
        return None
    if (dim := argument(call, 3, "dim")) is not None:
        counts = bool(argument(call, 2, "return_counts", False))
        return _along(call, dim, sort=False, inverse=inverse, counts=counts)
    counted = (1 + inverse) if argument(call, 2, "return_counts", False) else 0
    places = _places(call, elements(source), 4) if inverse else ()
    return within(_input(source), *places, *_found(call, source, counted))


def along(call: Call) -> Plan | None:
    """`unique_dim`, and `unique_dim_consecutive`, whose arguments lack `sorted`."""
    sort = "consecutive" not in call.name
    inverse, counts = (
        bool(argument(call, place + sort, f"return_{name}", False)) for place, name in ((2, "inverse"), (3, "counts"))
    )
    return _along(call, call.args[1], sort=sort, inverse=inverse, counts=counts)


def _along(call: Call, dim: int, *, sort: bool, inverse: bool, counts: bool) -> Plan | None:
    """Rows are put in order by their numbers (`unique_dim_cuda_template`)."""
    source, card = call.args[0], call.profile
    if not elements(source):
        return None
    dim = dimension(dim, len(shape(source)))
    rows = shape(source)[dim]
    made = [output for output in tensors(call.out) if elements(output)]
    births = [("out", number) for number in range(len(made))]
    kept = bool(elements(next(tensors(call.out))))  # what is found is born last
    first, rest = births[:kept], births[kept:]
    steps: list[Step] = [*within([("sort", merge_sort_pairs(card, rows, 8, 0))])] if sort else []
    if inverse:
        places = within([("difference", _DIFFERENCE)]) + within([("sum", scan_of_thrust(card, rows))])
        steps += within([("flags", 8 * rows)], *rest[:1], *places)
        rest = rest[1:]
    if counts:
        lengths = (*rest, *within([("lengths", _DIFFERENCE)])) if rest else ()
        found = within([("found", unique_by_key_of_thrust(card, rows))])
        steps += within([("range", 8 * (rows + 1))], *found, *lengths)
    else:
        steps += within([("found", unique_of_thrust(card, rows))])
    order = [dim, *(other for other in range(len(shape(source))) if other != dim)]
    follow = in_order([shape(source)[one] for one in order], [strides(source)[one] for one in order])
    copied = [] if follow else [("input", size(source))]
    return within([*copied, ("rows", 8 * rows)], *steps, *first)


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("aten.unique_dim.default", "aten.unique_dim_consecutive.default"), along),
    "aten._unique.default": unique,
    "aten._unique2.default": unique,
    "aten.unique_consecutive.default": consecutive,
}
