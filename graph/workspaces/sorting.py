"""Sorting, selection and scans: arrays of places, and CUB's temporary storage.

Source: aten/src/ATen/native/cuda/Sort.cpp, Sort.cu, TensorTopK.cu, ScanKernels.cpp and ScanUtils.cuh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from graph.hardware.profile import Profile
from graph.workspaces.cub import scan, segmented_sort, sort_pairs, sort_rows, storage
from graph.workspaces.metadata import (
    argument,
    dimension,
    dtype,
    elements,
    is_contiguous,
    shape,
    size,
    tensors,
    up,
    width,
)
from graph.workspaces.rules import Call, Plan, Rule, Step

_SMALL_SORT: Final = 4096
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
    along = sizes[dimension(int(argument(call, position, "dim", -1)), len(sizes))]
    steps: list[Step] = [("rest",)]
    if along <= _SMALL_SORT:
        return (*steps, ("alloc", "places", along * 8), ("free", "places"))
    rows = elements(source) // along
    item = width(source)
    if rows == 1 or along >= _LARGE_ROW:
        one: list[Step] = [("alloc", "sort", sort_pairs(call.profile, along, item, 8)), ("free", "sort")]
        return (*steps, ("alloc", "places", along * 8), *(one * rows), ("free", "places"))
    count = elements(source)
    steps.append(("alloc", "places", count * 8))
    if rows >= _SEGMENTS:
        steps += [("alloc", "sort", segmented_sort(count, item, 8)), ("free", "sort")]
    else:
        steps += [
            ("alloc", "sorted places", count * 8),
            ("alloc", "sorted values", count * item),
            ("alloc", "sort", sort_pairs(call.profile, count, item, 8)),
            ("free", "sort"),
            ("free", "sorted values"),
            ("alloc", "sort", sort_rows(call.profile, count)),
            ("free", "sort"),
            ("free", "sorted places"),
        ]
    return (*steps, ("free", "places"))


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
    strided = not is_contiguous(source)
    steps: list[Step] = [("rest",)]
    if strided:
        steps.append(("alloc", "input", size(source)))
    if _many_blocks(slices, extent):
        blocks = slices * _topk_blocks(call.profile, slices, extent)
        wide = 8 if width(source) == 8 else 4
        parts = (slices * width(source), slices * 8, slices * 2 * wide, blocks * 512, slices * 1024)
        if call.profile.release < (2, 10):
            parts = (slices * width(source), slices * 4, slices * 8, slices * 2 * wide, blocks * 512)
        names = [f"state {i}" for i in range(7)]
        steps += [("alloc", name, n) for name, n in zip(names, (*parts, blocks * 4, blocks * 4), strict=True)]
        temporary = storage((up(blocks, 1920) + 32) * 16, 4 * up(blocks, 1920))
        for _ in range(2):
            steps += [("alloc", "scan", temporary), ("free", "scan")]
        steps += [("free", name) for name in reversed(names)]
    if strided:
        steps.append(("free", "input"))
    return None if steps == [("rest",)] else tuple(steps)


def _output(call: Call) -> Any:
    return next(tensors(call.out))


def cumsum(call: Call) -> Plan | None:
    """`cumsum`: the input is cast to the output's type, made contiguous; one single row is CUB's scan."""
    source, out = call.args[0], _output(call)
    sizes = shape(source)
    if elements(source) == 0 or not sizes:
        return None
    steps: list[Step] = [("rest",)]
    made: list[str] = []
    if dtype(source) != dtype(out):
        steps.append(("alloc", "cast", elements(source) * width(out)))
        made.append("cast")
    if not is_contiguous(source):
        steps.append(("alloc", "input", elements(source) * width(out)))
        made.append("input")
    along = sizes[dimension(int(argument(call, 1, "dim", 0)), len(sizes))]
    if along == elements(source) and "cumsum" in call.name:
        steps += [("alloc", "scan", scan(call.profile, along, width(out))), ("free", "scan")]
    steps += [("free", name) for name in reversed(made)]
    return None if steps == [("rest",)] else tuple(steps)


def isin(call: Call) -> Plan | None:
    """`isin` with few test elements (fewer than 10 n^0.145): all are compared, and the comparisons reduced by `any`.

    ATen/native/TensorCompare.cpp, isin_Tensor_Tensor_out and isin_default_kernel_gpu (native/cuda/TensorCompare.cpp);
    with more of them both sides are sorted, which is not told here. Checked against recordings of both shapes.
    """
    count, tested = elements(call.args[0]), elements(call.args[1])
    if count == 0 or tested == 0 or tested >= int(10 * count**0.145):
        return None
    return (
        ("out", 0),
        ("alloc", "equal", count * tested),
        ("alloc", "any", count),
        ("free", "any"),
        ("free", "equal"),
    )


RULES: Mapping[str, Rule] = {
    "aten.isin.Tensor_Tensor": isin,
    "aten.sort.stable": sort,
    "aten.sort.default": sort,
    "aten.topk.default": topk,
    "aten.cumsum.default": cumsum,
    "aten.cumprod.default": cumsum,
}
