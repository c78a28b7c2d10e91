"""Sorting, selection and scans: arrays of places, and CUB's temporary storage.

Source: aten/src/ATen/native/cuda/Sort.cpp, Sort.cu, TensorTopK.cu, ScanKernels.cpp and ScanUtils.cuh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil, log, log2
from typing import TYPE_CHECKING, Any, Final

from graph.dtypes import SIZES
from graph.hardware.profile import Profile
from graph.workspaces.cub.indexing import filled
from graph.workspaces.cub.temporary import (
    merge_sort_pairs,
    ordered_scan,
    reduce_by_key_of_thrust,
    reduce_of_thrust,
    scan,
    segmented_sort,
    sort_pairs,
    sort_pairs_of_thrust,
    sort_rows,
    storage,
)
from graph.workspaces.metadata import (
    FLOATING,
    argument,
    dimension,
    dtype,
    elements,
    in_order,
    is_complex,
    is_contiguous,
    is_dense,
    is_tensor,
    packed,
    promoted,
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

#: Longest rows that are sorted in shared memory.
SMALL_SORT: Final = 4096
#: Longest rows of which a block of threads finds the mode.
_SMALL_MODE: Final = 2048
_LARGE_ROW: Final = 1_000_000
_SEGMENTS: Final = 128
_TOPK_THREADS: Final = 256
_TOPK_REGISTERS: Final = 65536 // (40 * _TOPK_THREADS)


def sort(call: Call) -> Plan | None:
    """`sort`: up to 4096 values a row an array of places; above, radix sorts.

    A single row, or rows of a million, are sorted one by one; less than 128 rows all together, then by row; more as
    segments (`sort_cuda_kernel`, `segmented_sort_pairs_by_full_sort`).
    """
    source = call.args[0]
    sizes = shape(source)
    if elements(source) == 0 or not sizes:
        return None
    position = 2 if call.name.endswith("stable") else 1
    place = dimension(int(argument(call, position, "dim", -1)), len(sizes))
    along = sizes[place]
    if along <= SMALL_SORT:
        return (REST, *within([("places", along * 8)], *filled(call)))
    return (REST, *within(_in_rows(call, place), *radix(call.profile, elements(source), along, width(source))))


def radix(profile: Profile, count: int, along: int, item: int) -> Plan:
    """Radix sorts of `count` values in rows of `along`."""
    rows = count // along
    if rows == 1 or along >= _LARGE_ROW:
        return within([("places", along * 8)], *(within([("sort", sort_pairs(profile, along, item, 8))]) * rows))
    if rows >= _SEGMENTS:
        return within([("places", count * 8), ("sort", segmented_sort(count, item, 8))])
    together = within([("sorted values", count * item), ("sort", sort_pairs(profile, count, item, 8))])
    apart = within([("sort", sort_rows(profile, count))])
    return within([("places", count * 8), ("sorted places", count * 8)], *together, *apart)


def _in_rows(call: Call, place: int) -> list[tuple[str, int]]:
    """Copies of the input where its rows are not dense, and of outputs that lie otherwise (cuda/Sort.cpp)."""
    source, out = call.args[0], _output(call)
    sizes, steps = shape(source), strides(source)
    made: list[tuple[str, int]] = []
    if not is_dense(source) or steps[place] != 1:
        slowest = sorted((n for n in range(len(sizes)) if n != place), key=lambda n: -steps[n])
        steps = packed(sizes, [place, *reversed(slowest)])  # infer_dense_strides_dim_last
        made.append(("input", size(source)))
    if strides(out) != steps:
        made += [("values", size(source)), ("indices", elements(source) * 8)]
    return made


def _many_blocks(slices: int, extent: int) -> bool:
    """Whether a row is shared by several blocks (`should_use_multiblock`, TensorTopK.cu)."""
    limits = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
    return extent >= next((least for most, least in limits if slices <= most), 400)


def _topk_blocks(profile: Profile, slices: int, extent: int) -> int:
    """Blocks a row (`get_items_per_thread`, TensorTopK.cu)."""
    blocks = profile.sm_count * min(_TOPK_REGISTERS, profile.max_blocks_per_sm)
    items = min(max(up(slices * extent, blocks * _TOPK_THREADS), 4), 64)
    return up(extent, items * _TOPK_THREADS)


def topk(call: Call) -> Plan | None:
    """`topk`: counts of digits by block where several blocks share a row; a strided input is copied."""
    source = call.args[0]
    sizes = shape(source)
    if elements(source) == 0 or not sizes:
        return None
    extent = sizes[dimension(int(argument(call, 2, "dim", -1)), len(sizes))]
    slices = elements(source) // extent
    copied = [] if is_contiguous(source) else [("input", size(source))]
    steps: Plan = ()
    if _many_blocks(slices, extent):
        blocks = slices * _topk_blocks(call.profile, slices, extent)
        wide = 8 if width(source) == 8 else 4
        parts = (slices * width(source), slices * 8, slices * 2 * wide, blocks * 512, slices * 1024)
        if call.profile.release < (2, 10):
            counted = 1 if call.profile.release < (2, 7) else 2
            parts = (slices * width(source), slices * 4, slices * 4 * counted, slices * counted * wide, blocks * 512)
        states = [(f"state {i}", nbytes) for i, nbytes in enumerate((*parts, blocks * 4, blocks * 4))]
        scans = within([("scan", storage((up(blocks, 1920) + 32) * 16, 4 * up(blocks, 1920)))]) * 2
        steps = within(states, *scans)
    made = (*within(copied, *steps), *_ordered(call))
    return (REST, *made) if made else None


def _ordered(call: Call) -> Plan:
    """What was chosen is sorted, if that is wanted, and more of it than is sorted in place."""
    values, indices = tensors(call.out)
    dim = dimension(int(argument(call, 2, "dim", -1)), len(shape(values)))
    if not argument(call, 4, "sorted", True) or shape(values)[dim] <= SMALL_SORT:
        return ()
    _, *steps = sort(replace(call, name="aten.sort.default", args=(values, dim), kwargs={})) or (REST,)
    copies = [("indices in order", size(indices)), ("values in order", size(values))]
    return within(copies, *steps, *within([("gathered", size(indices))]))


def _output(call: Call) -> Any:
    return next(tensors(call.out))


def cumsum(call: Call) -> Plan | None:
    """`cumsum`, `cumprod`, `_logcumsumexp`: the input is cast to the output's type, made contiguous; one single row is
    CUB's scan. An output that is not contiguous is written from a tensor that is."""
    source, out = call.args[0], _output(call)
    sizes = shape(source)
    if elements(source) == 0 or not sizes:
        return within([("value", width(source))]) if "_." in call.name and elements(source) else None
    made: list[tuple[str, int]] = []
    cast = dtype(source) != dtype(out)
    if cast:
        made.append(("cast", elements(source) * width(out)))
    if not is_contiguous(source) and (is_dense(source) or not cast):  # else the cast is contiguous
        made.append(("input", elements(source) * width(out)))
    if not is_contiguous(out):
        made.append(("output", size(out)))
    along = sizes[dimension(int(argument(call, 1, "dim", 0)), len(sizes))]
    if along == elements(source):
        rounded = call.name.startswith("aten.cumsum") and (dtype(out) in FLOATING or is_complex(out))
        if call.deterministic and rounded:
            made.append(("scan", ordered_scan(call.profile, along, width(out))))
        else:
            apart = is_complex(out) or (dtype(out) in FLOATING and width(out) < SIZES["float32"])
            made.append(("scan", scan(call.profile, along, width(out), apart=apart)))
    return after(made)


def median(call: Call) -> Plan | None:
    """`median(dim)`, `nanmedian(dim)`, `kthvalue`: a strided input is copied before the outputs (cuda/Sorting.cpp)."""
    source = call.args[0]
    return None if is_contiguous(source) else within([("input", size(source))], REST)


def cummax(call: Call) -> Plan | None:
    """`_cummax_helper`, `_cummin_helper`: a strided input is copied (cuda/ScanKernels.cpp)."""
    source = call.args[0]
    return None if is_contiguous(source) else within([("input", size(source))])


def bucketize(call: Call) -> Plan | None:
    """`bucketize`, `searchsorted`: strided operands are copied, then cast to one type (BucketizationUtils.h)."""
    sides = (1, 0) if "searchsorted" in call.name else (0, 1)
    values, bounds = (call.args[side] for side in sides)
    if not is_tensor(values):
        kind = "int64" if isinstance(values, int) else "float64"
        number = ("alloc", "number", 8)
        return (number, REST, *_alike((kind, (), 1, True), _operand(bounds)), ("free", "number"))
    sorter = call.kwargs.get("sorter")
    checks = _limits(call, elements(sorter)) if sorter is not None and elements(sorter) else ()
    return (*checks, REST, *_alike(_operand(values), _operand(bounds))) if elements(values) else None


def _limits(call: Call, count: int) -> Plan:
    """The least and the largest of so many places of a `sorter`, which the host reads."""
    stage = scratch(call.profile, flat(count, 8), 8, 16, 8, False)
    return (("alloc", "least", 8), ("alloc", "most", 8), *stage, ("free", "least"), ("free", "most"))


#: dtype, sizes, number of elements, whether contiguous.
_Operand = tuple[str, tuple[int, ...], int, bool]


def _operand(given: torch.Tensor) -> _Operand:
    return dtype(given), shape(given), elements(given), is_contiguous(given)


def _alike(*operands: _Operand) -> Plan:
    """Contiguous copies of strided operands, then those that are cast."""
    kinds = [kind for kind, *_ in operands]
    common = promoted([(kind, bool(sizes)) for kind, sizes, *_ in operands])
    made = {place: f"copy {place}" for place, (*_, contiguous) in enumerate(operands) if not contiguous}
    births: list[Step] = [("alloc", made[place], operands[place][2] * SIZES[kinds[place]]) for place in made]
    for place, (kind, _, count, _) in enumerate(operands):
        if kind != common:
            births.append(("alloc", f"cast {place}", count * SIZES[common]))
            births += [("free", made[place])] if place in made else []
            made[place] = f"cast {place}"
    return (*births, *(("free", made[place]) for place in sorted(made, reverse=True)))


def mode(call: Call) -> Plan | None:
    """`mode`: rows are copied together, after the outputs; longer ones than a block sorts always are, and then sorted
    one by one (cuda/TensorModeKernel.cpp)."""
    source = call.args[0]
    sizes, steps = list(shape(source)), list(strides(source))
    if not sizes or not elements(source):
        return None
    along = dimension(int(argument(call, 1, "dim", -1)), len(sizes))
    extent = sizes[along]
    for values in (sizes, steps):
        values[along], values[-1] = values[-1], values[along]
    if extent == 1 or (extent <= _SMALL_MODE and in_order(sizes, steps)):
        return None
    each = _mode_of_row(call.profile, extent, source) if extent > _SMALL_MODE else ()
    return (REST, *within([("rows", size(source))], *each * (elements(source) // extent)))


def _mode_of_row(profile: Profile, count: int, source: torch.Tensor) -> Plan:
    """Thrust sorts a row with its places, counts what differs, counts each, takes the most frequent and looks for it;
    booleans are only counted (cuda/TensorModeKernel.cu). How many differ the host reads: here, as from an empty GPU,
    that all are one, since the sort, in which the most is there, is done by then."""
    item = width(source)
    found = within([("found", reduce_of_thrust(profile, count, 16))])
    if dtype(source) == "bool":
        return (*within([("true", reduce_of_thrust(profile, count, 8))]), *found)
    ordered = merge_sort_pairs if item == SIZES["float16"] and dtype(source) in FLOATING else sort_pairs_of_thrust
    return within(
        [("places", count * 8)],
        *within([("sort", ordered(profile, count, item, 8))]),
        *within([("different", reduce_of_thrust(profile, count - 1, 4))]),
        *within(
            [("values", item), ("counts", 8)],
            *within([("counted", reduce_by_key_of_thrust(count))]),
            *within([("most", storage(8, 1))]),
            *found,
        ),
    )


def isin(call: Call) -> Plan | None:
    """`isin` with few test elements (fewer than 10 n^0.145): all are compared, and the comparisons reduced by `any`.

    ATen/native/TensorCompare.cpp, isin_Tensor_Tensor_out and isin_default_kernel_gpu (native/cuda/TensorCompare.cpp);
    with more of them both sides are sorted, which is not told here. Checked against recordings of both shapes.
    """
    count, tested = elements(call.args[0]), elements(call.args[1])
    if count == 0 or tested == 0 or tested >= int(10 * count**0.145):
        return None
    return (("out", 0), *within([("equal", count * tested), ("any", count)]))


def randperm(call: Call) -> Plan | None:
    """`randperm`: random keys, sorted with the numbers; of as many bits as make two alike unlikely
    (`randperm_out_cuda`, aten/src/ATen/native/cuda/Randperm.cu)."""
    count, item = elements(call.out), width(call.out)
    if not count:
        return after([("largest", item)])
    bits = min(64, ceil(log2(count - (6 * count * count + 1) / (12 * log(0.9)))))
    key = 4 if bits <= 32 else 8
    kept = [("numbers", count * item)]
    keys = [
        ("keys", count * key),
        ("sorted keys", count * key),
        ("sort", sort_pairs(call.profile, count, key, item, bits)),
    ]
    return (REST, *within([("largest", item)]), *within(kept, *filled(call, item), *within(keys)))


RULES: Mapping[str, Rule] = {
    **dict.fromkeys([f"aten.randperm.{name}" for name in ("default", "generator", "out", "generator_out")], randperm),
    "aten.isin.Tensor_Tensor": isin,
    **dict.fromkeys((f"aten.{name}.dim{out}" for name in ("median", "nanmedian") for out in ("", "_values")), median),
    **dict.fromkeys(("aten.kthvalue.default", "aten.kthvalue.values"), median),
    **dict.fromkeys(("aten._cummax_helper.default", "aten._cummin_helper.default"), cummax),
    **dict.fromkeys(("aten.bucketize.Tensor", "aten.bucketize.Scalar", "aten.searchsorted.Tensor"), bucketize),
    "aten.mode.default": mode,
    "aten.sort.stable": sort,
    "aten.sort.default": sort,
    "aten.topk.default": topk,
    "aten.topk.values": topk,
    **dict.fromkeys((f"aten.{name}" for name in ("cumsum.default", "cumsum.out", "cumsum_.default")), cumsum),
    **dict.fromkeys((f"aten.{name}" for name in ("cumprod.default", "cumprod.out", "cumprod_.default")), cumsum),
    "aten._logcumsumexp.default": cumsum,
    "aten._logcumsumexp.out": cumsum,
}
