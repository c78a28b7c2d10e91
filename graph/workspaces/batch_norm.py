"""Batch normalisation by PyTorch's own kernels, which serve what cuDNN does not: bfloat16, rows without images, frozen
statistics.

Channels that lie last have kernels that sum rows by blocks; what lies otherwise is merged to (N, C, rest), copied where
it must be. Source: aten/src/ATen/native/cuda/Normalization.cu and Normalization.cuh.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from graph.workspaces.metadata import (
    argument,
    dtype,
    elements,
    in_order,
    is_contiguous,
    shape,
    size,
    strides,
    up,
    width,
)
from graph.workspaces.reduction import last_power, reduce
from graph.workspaces.rules import REST, Call, Plan, Rule, Step, after, within

if TYPE_CHECKING:
    import torch

#: Threads of a block, and what `flexible_launch_configs` gives them.
_THREADS: Final = 512
_WARP: Final = 32
_EACH: Final = 16
_MOST_BLOCKS: Final = 128
_FEWEST_BLOCKS: Final = 8
#: Elements that 32-bit indices reach.
_INDEXED: Final = 2**31 - 1


def channels_last(tensor: torch.Tensor) -> bool:
    """Whether the kernels for channels that lie last serve it (`batch_norm_use_channels_last_kernels`)."""
    sizes, steps = shape(tensor), strides(tensor)
    if is_contiguous(tensor) and steps[1] == 1:
        return True
    order = (0, *range(2, len(sizes)), 1)
    return len(sizes) in (4, 5) and in_order([sizes[i] for i in order], [steps[i] for i in order])


def fused(source: torch.Tensor, train: bool, mask: list[bool]) -> bool:
    """Whether one kernel makes all gradients; that of the input is contiguous then."""
    reduces = train or mask[1] or mask[2]
    return reduces and mask[0] and not channels_last(source) and elements(source) <= _INDEXED


def _volume(source: torch.Tensor) -> bool:
    """Whether it is a batch of volumes: only some kernels know that their channels lie last."""
    return len(shape(source)) == 5 and not is_contiguous(source)


def _statistic(source: torch.Tensor) -> int:
    """Bytes of a number for a channel, as exact as sums are."""
    return max(width(source), 4)


def _staged(source: torch.Tensor, numbers: int) -> list[tuple[str, int]]:
    """Partial sums, so many `numbers` a channel and block, of channels that lie last (`flexible_launch_configs`)."""
    channels = shape(source)[1]
    rows = elements(source) // max(channels, 1)
    if not rows:
        return []
    across = min(last_power(channels), _WARP)
    down = min(last_power(up(rows, _EACH)), _THREADS // across)
    if across * down != _THREADS:
        across = min(last_power(channels), _THREADS // down)
    blocks = min(up(rows, down * _EACH), _MOST_BLOCKS)
    if blocks < _FEWEST_BLOCKS:
        return []
    return [("staging", numbers * channels * blocks * _statistic(source)), ("semaphores", up(channels, across) * 4)]


def _merged(name: str, tensor: torch.Tensor) -> list[tuple[str, int]]:
    """The copy that is made where the dimensions behind the channels cannot be seen as one."""
    inner = [(n, s) for n, s in zip(shape(tensor)[2:], strides(tensor)[2:], strict=True) if n != 1]
    fits = all(step == n * s for (_, step), (n, s) in pairwise(inner))
    return [] if fits else [(name, size(tensor))]


def _moments(call: Call, source: torch.Tensor) -> Plan:
    """Mean and variance where neither kernel serves: a reduction, of bfloat16 through a copy in fp32."""
    dims = [place for place in range(len(shape(source))) if place != 1]
    mean, wide = call.out[1], _statistic(source)
    cast = "float32" if dtype(source) == "bfloat16" else None
    return reduce(call.profile, source, dims, mean, 4 * wide, cast=cast, cast_width=wide, unroll=2, lossy=True)


def forward(call: Call) -> Plan | None:
    """`native_batch_norm`: input, weight, bias, running mean and variance, training, momentum, eps."""
    source, train = call.args[0], bool(argument(call, 5, "training"))
    if channels_last(source) and not _volume(source):
        return after(_staged(source, 4)) if train else None
    if is_contiguous(source) and elements(source) <= _INDEXED:
        return None
    steps = _moments(call, source) if train else ()
    steps += within([(f"value {i}", 4) for i in (1, 2) if call.args[i] is None])
    return (REST, *steps) if steps else None


def backward(call: Call) -> Plan | None:
    """`native_batch_norm_backward`: gradient, input, weight, running mean and variance, saved mean and inverse standard
    deviation, train, eps, mask."""
    gradient, source, weight = call.args[:3]
    train, mask = bool(call.args[7]), [bool(flag) for flag in call.args[9]]
    if fused(source, train, mask):
        copies = [*_merged("input", source), *_merged("gradient", gradient)]
        return within(copies, REST) if copies else None
    last = channels_last(source) and channels_last(gradient)
    reduces = train or any(mask[1:])
    copies = [*_merged("input", source), *_merged("gradient", gradient)] if reduces and not last else []
    number = shape(source)[1] * _statistic(source)
    sums = [(name, number) for name in ("dy", "dy xmu")] if reduces and (last or mask[0]) else []
    births: list[Step] = [("alloc", *one) for one in sums]
    # Sums of channels that lie last become gradients of weight and bias, asked for or not.
    made = [one is not None and elements(one) > 0 for one in call.out]
    unasked = [place for place in (1, 2) if not made[place]] if reduces and last and weight is not None else []
    for place in (1, 2):
        if made[place]:
            births.append(("out", sum(made[:place])))
        elif place in unasked:
            births.append(("alloc", f"unasked {place}", shape(source)[1] * width(weight)))
    reduction = within(copies, *births, *within(_staged(source, 2) if reduces and last else []))
    missing = [("weight", 4)] if weight is None and train and not (last and not _volume(source)) else []
    gradients = within(missing, ("out", 0)) if mask[0] else ()
    deaths = [("free", name) for name, _ in reversed(sums)] + [("free", f"unasked {place}") for place in unasked]
    unkept = [] if elements(call.args[6]) else [("invstd", number)]  # cuDNN keeps none where statistics are frozen
    return within(unkept, *reduction, *gradients, *deaths)


def statistics(call: Call) -> Plan | None:
    """`batch_norm_stats` of SyncBatchNorm."""
    source = call.args[0]
    return after(_staged(source, 4) if channels_last(source) else _merged("input", source))


def reduced(call: Call) -> Plan | None:
    """`batch_norm_backward_reduce` of SyncBatchNorm: gradient, input."""
    gradient, source = call.args[:2]
    if channels_last(source) and channels_last(gradient):
        return after(_staged(source, 2))
    copies = [*_merged("input", source), *_merged("gradient", gradient)]
    return within(copies, REST) if copies else None


RULES: Mapping[str, Rule] = {
    "aten.native_batch_norm.default": forward,
    "aten.native_batch_norm_backward.default": backward,
    "aten.batch_norm_stats.default": statistics,
    "aten.batch_norm_backward_reduce.default": reduced,
}
