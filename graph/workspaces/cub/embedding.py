"""Embedding tables: the backward sorts its indices when there are many, and sums by segments; bags of embeddings.

Source: aten/src/ATen/native/cuda/Embedding.cu (`embedding_dense_backward_cuda`), EmbeddingBackwardKernel.cu
(`embedding_backward_cuda_kernel`) and EmbeddingBag.cu (`_embedding_bag_cuda`, `_embedding_bag_dense_backward_cuda`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from graph.workspaces.cub.indexing import filled
from graph.workspaces.cub.sorting import SMALL_SORT, radix
from graph.workspaces.cub.temporary import scan, scan_by_key, selected, sort_pairs, unique_by_key
from graph.workspaces.metadata import elements, is_contiguous, is_line, shape, size, strides, up, upper, width
from graph.workspaces.rules import REST, Call, Plan, Rule, within

_UNSORTED: Final = 3072
_ROWS_PER_THREAD: Final = 10
_BLOCK: Final = 1024
_WARP: Final = 32
#: `EmbeddingBagMode::MAX` of EmbeddingBag.h.
_MAX: Final = 2


def embedding_dense_backward(call: Call) -> Plan | None:
    """Copies of strided arguments; above 3072 indices also sorted indices, segments and fp32 partial sums.

    From 2.10 few, long segments are summed without a matrix of partial sums, in an fp32 copy of the gradient for
    16-bit types. From 2.12 only the bits that the number of rows needs are sorted.
    """
    indices, rows = call.args[1], int(call.args[2])
    count = elements(indices)
    if count == 0:
        return None
    scaled = bool(len(call.args) > 4 and call.args[4])
    sorts = count > _UNSORTED or scaled
    steps = within(_copies(call), *(_sorted(call, count, rows, width(indices), scaled) if sorts else (REST,)))
    return None if steps == (REST,) else steps


def embedding_bag(_: Call) -> Plan:
    """`embedding_bag`: sizes of bags, the bag of each index, then values and where the largest came from."""
    return tuple(("out", place) for place in (2, 1, 0, 3))


def embedding_bag_dense_backward(call: Call) -> Plan | None:
    """The same, always sorted, where values of a bag are added; their maximum is written where it came from."""
    indices = call.args[1]
    rows, scaled, mode = int(call.args[5]), bool(call.args[6]), call.args[7]
    count = elements(indices)
    if mode == _MAX or not count:
        gradient = call.args[0]
        return within([("gradient", size(gradient))], REST) if not is_contiguous(gradient) else None
    return within(_copies(call), *_sorted(call, count, rows, width(indices), scaled))


def _copies(call: Call) -> list[tuple[str, int]]:
    """Indices and gradient, where they are not contiguous."""
    given = (("indices", call.args[1]), ("gradient", call.args[0]))
    return [(key, size(one)) for key, one in given if not is_contiguous(one)]


def _sorted(call: Call, count: int, rows: int, item: int, scaled: bool) -> Plan:
    profile = call.profile
    gradient = call.args[0]
    bits = (rows - 1).bit_length() if profile.release >= (2, 13) else None
    segments = min(count, rows)
    partials = count // _ROWS_PER_THREAD + segments
    columns = shape(gradient)[-1]
    sums = 4 if width(gradient) == 2 else width(gradient)
    if _few_segments(call, segments, partials, columns):
        summed = [("partial segments", partials * item)]
        summed += [("sums", rows * columns * sums)] if width(gradient) == 2 else []
    else:
        summed = [("partial sums", partials * columns * sums)]
    sort = within([("sort", sort_pairs(profile, count, item, item, bits))])
    sort = within([("places", count * item)], *filled(call, item), *sort)
    unique = within([("unique indices", count * item), ("unique", unique_by_key(profile, count, item))])
    scanned = within([("scan", scan(profile, segments, item))])
    parts = within([("partials", 8), ("partial places", partials * item), *summed])
    by_segment = [("partials by segment", segments * item), ("partial offsets", segments * item)]
    found = within([("segment offsets", count * item), ("segments", 8)], *unique, *within(by_segment, *scanned, *parts))
    counted = (REST, *found)
    if scaled:
        scans = (within([(f"scan {way}", scan_by_key(profile, count, item))]) for way in ("onwards", "back"))
        counted = within([("count", count * item)], *(step for each in scans for step in each), *counted)
    return within([("sorted indices", count * item), ("original places", count * item)], *sort, *counted)


def _few_segments(call: Call, segments: int, partials: int, columns: int) -> bool:
    """Whether summing segments would leave the card idle: under 4 blocks a multiprocessor, over 4 partials a block."""
    if call.profile.release < (2, 11):
        return False
    padded = upper(columns, _WARP)
    blocks = up(segments * padded, min(padded, _BLOCK))
    return blocks < 4 * call.profile.sm_count and partials >= 4 * blocks


def embedding(call: Call) -> Plan | None:
    """`embedding`: indices that are not one row in memory are copied before the output (Embedding.cpp)."""
    indices = call.args[1]
    found = (REST, *filled(call, width(call.args[0])))
    if is_line(shape(indices), strides(indices)):
        return found if call.filling else None
    return within([("indices", size(indices))], *found)


def embedding_renorm(call: Call) -> Plan | None:
    """`embedding_renorm_` (`max_norm`): indices are sorted, and the different ones taken (`embedding_renorm_cuda_`).

    Before 2.13 each row of them was sorted by itself. Of 70,000 indices of 64 bits the last step was recorded with 256
    bytes more.
    """
    indices, whole = call.args[1], call.profile.release >= (2, 13)
    count, nbytes = elements(indices), size(indices)
    if not count:
        return None
    along = count if whole else (shape(indices) or (1,))[-1]
    short = within([("range", 8 * along)])
    sort = short if along <= SMALL_SORT else radix(call.profile, count, along, width(indices))
    copied = [] if is_contiguous(indices) or not (whole or along > SMALL_SORT) else [("indices", nbytes)]
    order = within([("order", 8 * count), *([] if whole else copied)], *sort)
    kept = [*copied, ("kept", nbytes)] if whole else []
    unique = within([("different", nbytes), ("count", 8), ("select", selected(call.profile, count))])
    return within([*kept, ("sorted", nbytes)], *order, *unique)


RULES: Mapping[str, Rule] = {
    "aten.embedding_dense_backward.default": embedding_dense_backward,
    "aten._embedding_bag.default": embedding_bag,
    "aten._embedding_bag_forward_only.default": embedding_bag,
    "aten._embedding_bag_dense_backward.default": embedding_bag_dense_backward,
    "aten.embedding.default": embedding,
    "aten.embedding_renorm_.default": embedding_renorm,
}
