"""Normalisation layers: contiguous copies, partial sums of tall inputs, group norm's coefficients.

Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu and group_norm_kernel.cu.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Final

from graph.workspaces.metadata import elements, is_contiguous, is_half, size, tensors, up, width
from graph.workspaces.reduction import merged, scratch
from graph.workspaces.rules import REST, Call, Plan, Rule, Step, within

if TYPE_CHECKING:
    import torch

_WARP: Final = 32
_TALL: Final = 64 * 1024
_MOST_BLOCKS: Final = 32 * 1024


def _copied(steps: list[Step], sources: list[tuple[str, torch.Tensor | None]]) -> Plan | None:
    made = [(name, size(tensor)) for name, tensor in sources if tensor is not None and not is_contiguous(tensor)]
    if not made and steps == [("rest",)]:
        return None
    return within(made, *steps)


def forward(call: Call) -> Plan | None:
    """`native_layer_norm`, `_fused_rms_norm`: what is strided of input and parameters is copied before the outputs."""
    return _copied([("rest",)], [("input", call.args[0]), *_parameters(call, 2)])


def _parameters(call: Call, first: int) -> list[tuple[str, torch.Tensor | None]]:
    """Tensors from this argument on; statistics among them are never strided."""
    return [(f"parameter {place}", given) for place, given in enumerate(tensors(call.args[first:]))]


def backward(call: Call) -> Plan | None:
    """`native_layer_norm_backward`, `_fused_rms_norm_backward`: what is strided of the input and the
    parameters is copied before the outputs.

    A strided gradient is copied after them. With more than 65536 rows that are narrow for the card, the parameters'
    gradients are summed by blocks of rows first, and those sums are then the outputs.
    """
    gradient, source = call.args[0], call.args[1]
    steps: list[Step] = [("rest",)]
    if not is_contiguous(gradient):
        steps += [("alloc", "gradient", size(gradient))]
    if _tall(call):
        steps = [*_by_blocks(call), *steps[1:]]
    if not is_contiguous(gradient):
        steps += [("free", "gradient")]
    return _copied(steps, [("input", source), *_parameters(call, 3)])


def _extent(call: Call) -> tuple[int, int]:
    """Rows and columns."""
    columns = prod([int(extent) for extent in call.args[2]])
    return elements(call.args[1]) // max(columns, 1), columns


def _tall(call: Call) -> bool:
    rows, columns = _extent(call)
    return rows > _TALL and columns // _WARP < call.profile.sm_count // 2 and len(_wanted(call)) > 0


def _wanted(call: Call) -> list[int]:
    """Numbers of the outputs that are gradients of parameters."""
    mask = [bool(flag) for flag in call.args[-1]]
    return [sum(mask[:position]) for position in range(1, len(mask)) if mask[position]] if mask[1] else []


def _by_blocks(call: Call) -> list[Step]:
    """The rows' partial sums and their reduction (`LaunchGammaBetaBackwardCUDAKernel`)."""
    rows, columns = _extent(call)
    parameter = next(tensor for tensor in reversed(call.args[:-1]) if hasattr(tensor, "numel"))
    item = width(parameter)
    blocks = min(up(rows, _WARP), _MOST_BLOCKS // up(columns, _WARP))
    wanted = _wanted(call)
    steps: list[Step] = [("out", 0)] if 0 not in wanted else []
    steps += [("alloc", f"gradient {i}", columns * item) for i in wanted]
    steps += [("alloc", f"blocks {i}", blocks * columns * item) for i in wanted]
    stage = scratch(call.profile, merged(Rows(blocks, columns), [0], item, item), item, max(item, 4), item, item == 2)
    for i in wanted:
        steps += [("out", i), *stage, ("free", f"gradient {i}")]
    return [*steps, *(("free", f"blocks {i}") for i in reversed(wanted))]


class Rows:
    """A contiguous matrix."""

    def __init__(self, rows: int, columns: int) -> None:
        self.shape = (rows, columns)

    def stride(self) -> tuple[int, ...]:
        """Strides in elements."""
        return (self.shape[1], 1)


def group_norm(call: Call) -> Plan | None:
    """`native_group_norm`: two fp32 coefficients a channel; from 2.12 fp32 statistics for 16-bit inputs.

    Without weight and bias, and for one value a channel (`GroupNorm1dForward`), there are no coefficients.
    Arguments: input, weight, bias, N, C, HxW, groups, eps.
    """
    batch, channels, groups = int(call.args[3]), int(call.args[4]), int(call.args[6])
    made: list[tuple[str, int]] = []
    if is_half(call.args[0]) and call.profile.release >= (2, 12):
        made += [(name, batch * groups * 4) for name in ("mean", "rstd")]
    if int(call.args[5]) > 1 and (call.args[1] is not None or call.args[2] is not None):
        made += [(name, batch * channels * 4) for name in ("scale", "shift")]
    return (REST, *within(made))


def group_norm_backward(call: Call) -> Plan | None:
    """`native_group_norm_backward`: sums a channel and coefficients, fp32.

    The coefficient a channel is made where there is a weight and more than one value a channel.
    Arguments: gradient, input, mean, rstd, weight, N, C, HxW, groups, mask.
    """
    batch, channels, groups = int(call.args[5]), int(call.args[6]), int(call.args[8])
    if elements(call.args[1]) == 0:
        return None
    by_channel, by_group = batch * channels * 4, batch * groups * 4
    coefficients: tuple[Step, ...] = ()
    if call.args[9][0]:
        coefficients = (("alloc", "c2", by_group), ("alloc", "c3", by_group))
        by_weight = call.args[4] is not None and int(call.args[7]) > 1
        coefficients += (("alloc", "c1", by_channel),) if by_weight else ()
        coefficients += (("free", "c3"), ("free", "c2"), *((("free", "c1"),) if by_weight else ()))
    return (REST, *within([("ds", by_channel), ("db", by_channel)], *coefficients))


RULES: Mapping[str, Rule] = {
    "aten.native_layer_norm.default": forward,
    "aten._fused_rms_norm.default": forward,
    "aten.native_layer_norm_backward.default": backward,
    "aten._fused_rms_norm_backward.default": backward,
    "aten.native_group_norm.default": group_norm,
    "aten.native_group_norm_backward.default": group_norm_backward,
}
