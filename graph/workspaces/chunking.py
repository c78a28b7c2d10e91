"""Copies into and out of flat buffers of sharded parameters: what a block of threads does is told in an array.

Source: `split_with_sizes_copy_out_cuda` and `_chunk_cat_cuda`, aten/src/ATen/native/cuda/TensorShape.cu. Checked with
recordings of 2.9, 2.11, 2.13 and 2.15 on A100, H100 and T4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt, prod
from typing import TYPE_CHECKING, Any, Final

from graph.workspaces.metadata import (
    argument,
    dimension,
    dtype,
    is_contiguous,
    is_dense,
    is_line,
    shape,
    strides,
    up,
    upper,
    width,
)
from graph.workspaces.rules import REST, Call, Plan, Rule, within

if TYPE_CHECKING:
    import torch

_THREADS: Final = 128
#: Since when what is chunked lies by rows; before, anything dense was taken for that.
_BY_ROWS: Final = (2, 8)
_BLOCK_BYTES: Final = 16 * _THREADS


def _root(value: int) -> int:
    """The square root, rounded up."""
    root = isqrt(value)
    return root if root * root == value else root + 1


def _described(numbers: int) -> Plan:
    return within([("description", 8 * numbers)])


def split_with_sizes_copy(call: Call) -> Plan | None:
    """`split_with_sizes_copy(out=...)`: addresses and sizes by split, the split of each block of threads.

    A block takes 2048 bytes of a split, or more where the card could not hold twice all blocks at once.
    """
    source = call.args[0]
    splits = [int(size) for size in argument(call, 1, "split_sizes")]
    outputs: Any = call.kwargs.get("out", argument(call, 3, "out"))
    if not outputs or not is_contiguous(source):
        return None
    if not all(is_contiguous(out) and dtype(out) == dtype(source) for out in outputs):
        return None
    sizes = shape(source)
    along = dimension(int(argument(call, 2, "dim", 0)), len(sizes))
    rows = prod(sizes[:along])
    chunks = [split * prod(sizes[along + 1 :]) * width(source) for split in splits]
    profile = call.profile
    most = profile.sm_count * profile.max_threads_per_sm // _THREADS * 2
    factor = up(sum(up(chunk, _BLOCK_BYTES) for chunk in chunks) * rows, most)
    together = min(_root(factor), rows)
    if not together:
        return None
    block = _BLOCK_BYTES * up(factor, together)
    blocks = sum(up(chunk, block) for chunk in chunks)
    return _described(3 * len(splits) + blocks + len(splits) + 1)


def chunk_cat(call: Call) -> Plan | None:
    """`_chunk_cat`: addresses and sizes by tensor, the tensor of each block of 2048 bytes of the output."""
    sources = list(call.args[0])
    out = call.kwargs.get("out", call.out)
    along = dimension(int(argument(call, 1, "dim")), len(shape(sources[0])))
    count = int(argument(call, 2, "num_chunks"))
    kinds = dtype(sources[0]), dtype(out)
    lying = is_contiguous if call.profile.release >= _BY_ROWS else is_dense
    if not all(map(lying, sources)) or (kinds[0] != kinds[1] and kinds != ("bfloat16", "float32")):
        return _one_by_one(sources, along, count)
    blocks = 0
    for source in sources:
        sizes = shape(source)
        blocks += up(up(sizes[along], count) * prod(sizes[along + 1 :]) * width(out), _BLOCK_BYTES)
    return _described(6 * len(sources) + blocks + 2)


def _one_by_one(sources: Sequence[torch.Tensor], along: int, count: int) -> Plan | None:
    """Each tensor is padded, or copied where its chunks cannot be seen as rows (`_pad_chunk`, TensorShape.cpp)."""
    made: list[tuple[str, int]] = []
    for number, source in enumerate(sources):
        sizes, steps = list(shape(source)), strides(source)
        padded = upper(sizes[along], count)
        nbytes = prod([*sizes[:along], padded, *sizes[along + 1 :]]) * width(source)
        rows = [padded // count, *sizes[along + 1 :]]
        if padded != sizes[along] or not is_line(rows, steps[along:]):
            made.append((f"chunks {number}", nbytes))
    return (*(("alloc", *one) for one in made), REST, *(("free", key) for key, _ in made)) if made else None


RULES: Mapping[str, Rule] = {
    "aten.split_with_sizes_copy.out": split_with_sizes_copy,
    "aten._chunk_cat.default": chunk_cat,
    "aten._chunk_cat.out": chunk_cat,
}
