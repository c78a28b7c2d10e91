"""Normalisation layers: contiguous copies, partial sums of tall inputs, group norm's coefficients.

Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu and group_norm_kernel.cu.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final

from graph.workspaces.metadata import (
    elements,
    in_format,
    is_contiguous,
    is_half,
    shape,
    size,
    strides,
    suggests_channels_last,
    tensors,
    up,
    width,
)
from graph.workspaces.reduction import merged, scratch
from graph.workspaces.rules import REST, Call, Plan, Rule, Step, within

if TYPE_CHECKING:
    import torch

_WARP: Final = 32
_TALL: Final = 64 * 1024
_MOST_BLOCKS: Final = 32 * 1024


def _strided(sources: Sequence[tuple[str, torch.Tensor]], channels_last: bool = False) -> list[tuple[str, int]]:
    """Copies of what is not contiguous in a memory format."""
    lies = ((name, one, in_format(shape(one), strides(one), channels_last)) for name, one in sources)
    return [(name, size(one)) for name, one, as_it_is in lies if not as_it_is]


def _copied(steps: list[Step], sources: list[tuple[str, torch.Tensor]]) -> Plan | None:
    made = _strided(sources)
    if not made and steps == [("rest",)]:
        return None
    return within(made, *steps)


def forward(call: Call) -> Plan | None:
    """`native_layer_norm`, `_fused_rms_norm`: what is strided of input and parameters is copied before the outputs."""
    return _copied([("rest",)], [("input", call.args[0]), *_parameters(call, 2)])


def _parameters(call: Call, first: int) -> list[tuple[str, torch.Tensor]]:
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
    many = call.profile.release >= (2, 8) and rows > _TALL
    return many and columns // _WARP < call.profile.sm_count // 2 and len(_wanted(call)) > 0


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
    """`native_group_norm`: two fp32 coefficients a channel; from 2.13 fp32 statistics for 16-bit inputs.

    Without weight and bias, and for one value a channel (`GroupNorm1dForward`), there are no coefficients; from 2.15
    on there always are where channels lie last. From 2.14 on an input that does not lie as it takes it is copied here,
    and strided weights and biases.
    Arguments: input, weight, bias, N, C, HxW, groups, eps.
    """
    batch, channels, groups = int(call.args[3]), int(call.args[4]), int(call.args[6])
    made = _formatted(call, call.args[0])
    if is_half(call.args[0]) and call.profile.release >= (2, 13):
        made += [(name, batch * groups * 4) for name in ("mean", "rstd")]
    scaled = int(call.args[5]) > 1 and (call.args[1] is not None or call.args[2] is not None)
    if scaled or by_format(call.profile.release, call.args[0]):
        made += [(name, batch * channels * 4) for name in ("scale", "shift")]
    return (REST, *within(made))


def by_format(release: tuple[int, ...], source: torch.Tensor) -> bool:
    """Whether group norm goes by its input's channels, which lie last, be it that there is one, or one value of each;
    before, inputs are made contiguous."""
    if release < (2, 15):
        return False
    sizes, steps = shape(source), strides(source)
    return suggests_channels_last(sizes, steps) or (
        len(sizes) in (4, 5) and in_format(sizes, steps, channels_last=True)
    )


def keeps_format(release: tuple[int, ...], schema: str, args: Sequence[Any]) -> bool:
    """Whether the results of an operator of this schema lie as its input does, since it is such a group norm."""
    place = {"aten::native_group_norm": 0, "aten::native_group_norm_backward": 1}.get(schema)
    return place is not None and by_format(release, args[place])


def _formatted(call: Call, *operands: torch.Tensor) -> list[tuple[str, int]]:
    """Copies of what does not lie as the last one's memory format says (up to 2.14: contiguous), and of strided
    parameters."""
    if call.profile.release < (2, 14):
        return []
    named = [(f"operand {place}", one) for place, one in enumerate(operands)]
    last = by_format(call.profile.release, operands[-1])
    return _strided(named, last) + _strided(_parameters(call, len(operands)))


def group_norm_backward(call: Call) -> Plan | None:
    """`native_group_norm_backward`: sums a channel and coefficients, fp32.

    The coefficient a channel is made where there is a weight and more than one value a channel. From 2.14 on gradient
    and input are copied here where they do not lie as it takes them, and strided weights; one value a channel needs no
    sums. From 2.15 on channels that lie last need no coefficient a channel.
    Arguments: gradient, input, mean, rstd, weight, N, C, HxW, groups, mask.
    """
    gradient, source, mask = call.args[0], call.args[1], call.args[9]
    batch, channels, pixels, groups = (int(call.args[place]) for place in (5, 6, 7, 8))
    if elements(source) == 0:
        return None
    by_channel, by_group = batch * channels * 4, batch * groups * 4
    summed = pixels > 1 or call.profile.release < (2, 14) or by_format(call.profile.release, source)
    sums = [("ds", by_channel), ("db", by_channel)] if summed else []
    coefficients: list[tuple[str, int]] = []
    if mask[0]:
        coefficients = [("c2", by_group), ("c3", by_group)]
        if call.args[4] is not None and pixels > 1 and not by_format(call.profile.release, source):
            coefficients.append(("c1", by_channel))
    births = [("alloc", *one) for one in coefficients]
    deaths = [("free", name) for name in ("c3", "c2", "c1")[: len(coefficients)]]
    return within(_formatted(call, gradient, source), REST, *within(sums, *births, *deaths))


RULES: Mapping[str, Rule] = {
    "aten.native_layer_norm.default": forward,
    "aten._fused_rms_norm.default": forward,
    "aten.native_layer_norm_backward.default": backward,
    "aten._fused_rms_norm_backward.default": backward,
    "aten.native_group_norm.default": group_norm,
    "aten.native_group_norm_backward.default": group_norm_backward,
}
