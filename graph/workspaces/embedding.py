"""Embedding tables: the backward sorts its indices when there are many, and sums by segments.

Source: aten/src/ATen/native/cuda/Embedding.cu (`embedding_dense_backward_cuda`) and EmbeddingBackwardKernel.cu
(`embedding_backward_cuda_kernel`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from graph.workspaces.cub import scan, sort_pairs, unique_by_key
from graph.workspaces.metadata import elements, is_contiguous, shape, size, up, upper, width
from graph.workspaces.rules import Call, Plan, Rule, Step

_UNSORTED: Final = 3072
_ROWS_PER_THREAD: Final = 10
_BLOCK: Final = 1024
_WARP: Final = 32


def embedding_dense_backward(call: Call) -> Plan | None:
    """Copies of strided arguments; above 3072 indices also sorted indices, segments and fp32 partial sums.

    From 2.10 few, long segments are summed without a matrix of partial sums, in an fp32 copy of the gradient for
    16-bit types. From 2.12 only the bits that the number of rows needs are sorted.
    """
    gradient, indices = call.args[0], call.args[1]
    rows = int(call.args[2])
    count = elements(indices)
    if count == 0:
        return None
    steps: list[Step] = []
    copies: list[str] = []
    if not is_contiguous(gradient):
        steps.append(("alloc", "gradient", size(gradient)))
        copies.append("gradient")
    if not is_contiguous(indices):
        steps.append(("alloc", "indices", size(indices)))
        copies.append("indices")
    if count <= _UNSORTED and not (len(call.args) > 4 and call.args[4]):
        steps.append(("rest",))
    else:
        steps += _sorted(call, count, rows, width(indices), bool(len(call.args) > 4 and call.args[4]))
    steps += [("free", name) for name in reversed(copies)]
    return None if steps == [("rest",)] else tuple(steps)


def _sorted(call: Call, count: int, rows: int, item: int, scaled: bool) -> list[Step]:
    profile = call.profile
    gradient = call.args[0]
    bits = (rows - 1).bit_length() if profile.release >= (2, 12) else None
    steps: list[Step] = [
        ("alloc", "sorted indices", count * item),
        ("alloc", "original places", count * item),
        ("alloc", "places", count * item),
        ("alloc", "sort", sort_pairs(profile, count, item, item, bits)),
        ("free", "sort"),
        ("free", "places"),
    ]
    if scaled:
        steps.append(("alloc", "count", count * item))
    steps.append(("rest",))
    segments = min(count, rows)
    partials = count // _ROWS_PER_THREAD + segments
    steps += [
        ("alloc", "segment offsets", count * item),
        ("alloc", "segments", 8),
        ("alloc", "unique indices", count * item),
        ("alloc", "unique", unique_by_key(profile, count, item)),
        ("free", "unique"),
        ("free", "unique indices"),
        ("alloc", "partials by segment", segments * item),
        ("alloc", "partial offsets", segments * item),
        ("alloc", "scan", scan(profile, segments, item)),
        ("free", "scan"),
        ("alloc", "partials", 8),
        ("alloc", "partial places", partials * item),
    ]
    columns = shape(gradient)[-1]
    sums = 4 if width(gradient) == 2 else width(gradient)
    if _few_segments(call, segments, partials, columns):
        made = ["partial segments"]
        steps.append(("alloc", "partial segments", partials * item))
        if width(gradient) == 2:
            made.append("sums")
            steps.append(("alloc", "sums", rows * columns * sums))
    else:
        made = ["partial sums"]
        steps.append(("alloc", "partial sums", partials * columns * sums))
    steps += [("free", name) for name in reversed(made)]
    steps += [("free", name) for name in ("partial places", "partials", "partial offsets", "partials by segment")]
    steps += [("free", "segments"), ("free", "segment offsets")]
    if scaled:
        steps.append(("free", "count"))
    return [*steps, ("free", "original places"), ("free", "sorted indices")]


def _few_segments(call: Call, segments: int, partials: int, columns: int) -> bool:
    """Whether summing segments would leave the card idle: under 4 blocks a multiprocessor, over 4 partials a block."""
    if call.profile.release < (2, 10):
        return False
    padded = upper(columns, _WARP)
    blocks = up(segments * padded, min(padded, _BLOCK))
    return blocks < 4 * call.profile.sm_count and partials >= 4 * blocks


def embedding(call: Call) -> Plan | None:
    """`embedding`: indices that are not contiguous are copied before the output (Embedding.cpp)."""
    indices = call.args[1]
    if len(shape(indices)) <= 1 or is_contiguous(indices):
        return None
    return (("alloc", "indices", size(indices)), ("rest",), ("free", "indices"))


RULES: Mapping[str, Rule] = {
    "aten.embedding_dense_backward.default": embedding_dense_backward,
    "aten.embedding.default": embedding,
}
