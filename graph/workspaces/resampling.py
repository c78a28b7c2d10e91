"""Pooling, padding and interpolation: operands copied into the memory format that their kernels compute in.

Structured kernels make their outputs first, then copy; the two adaptive averages copy before. Where a kernel writes
contiguously, an output in another format is computed in a contiguous one.
Source, by operator: aten/src/ATen/native/cuda/AveragePool2d.cu, AveragePool3d.cu, DilatedMaxPool2d.cu,
DilatedMaxPool3d.cu, AdaptiveAveragePooling.cu, AdaptiveAveragePooling3d.cu, AdaptiveMaxPooling2d.cu,
AdaptiveMaxPooling3d.cu, FractionalMaxPool2d.cu, ReflectionPad.cu and UpSample*.cu. Checked operator by operator with
operands that are contiguous, permuted, expanded, sliced and channels last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from graph.workspaces.metadata import in_order, shape, size, strides, suggests_channels_last, tensors
from graph.workspaces.rules import REST, Call, Plan, Rule, after, within

#: In the order of copies: every output.
_OUTPUTS: Final = "outputs"
#: Channels from which bilinear interpolation has a kernel for channels that lie last.
_MANY: Final = 16


def _lies(tensor: Any, last: bool) -> bool:
    """Whether a tensor is contiguous, with channels last or not."""
    order = [0, *range(2, len(shape(tensor))), 1] if last else range(len(shape(tensor)))
    return in_order([shape(tensor)[place] for place in order], [strides(tensor)[place] for place in order])


def _copies(call: Call, order: tuple[int | str, ...], last: bool) -> list[tuple[str, int]]:
    made: list[tuple[str, int]] = []
    for place in order:
        named = call.args[place] if isinstance(place, int) else call.out
        for number, tensor in enumerate(tensors(named)):
            if not _lies(tensor, last):
                made.append((f"contiguous {place} {number}", size(tensor)))
    return made


def copied(*order: int | str, like: int | None = None, rank: int = 0, channels: int = 0) -> Rule:
    """The rule of an operator that copies these arguments, in this order, after its outputs are made.

    They are copied into the memory format that argument `like` suggests; contiguously where that is None, where `like`
    has not `rank` dimensions, or less than so many `channels`.
    """

    def rule(call: Call) -> Plan | None:
        if like is None:
            return after(_copies(call, order, False))
        sizes, steps = shape(call.args[like]), strides(call.args[like])
        last = rank in (0, len(sizes)) and suggests_channels_last(sizes, steps) and sizes[1] >= channels
        return after(_copies(call, order, last))

    return rule


def adaptive_average(call: Call) -> Plan | None:
    """`_adaptive_avg_pool2d`, `3d`: a batch is copied before the output is made; images with channels last are read as
    they lie."""
    source = call.args[0]
    spatial = 2 if "2d" in call.name else 3
    last = spatial == 2 and suggests_channels_last(shape(source), strides(source))
    if last or len(shape(source)) != spatial + 2:
        return None
    return within(copies, REST) if (copies := _copies(call, (0,), False)) else None


def unpooled(call: Call) -> Plan | None:
    """`max_unpool2d`, `3d`: strided values and places are copied before the output is made (MaxUnpooling.cu)."""
    return within(copies, REST) if (copies := _copies(call, (0, 1), False)) else None


def fractional_maximum_backward(call: Call) -> Plan | None:
    """`fractional_max_pool2d_backward`: a strided gradient is copied before the result is made."""
    return within(copies, REST) if (copies := _copies(call, (0,), False)) else None


def adaptive_average_backward(call: Call) -> Plan | None:
    """`_adaptive_avg_pool2d_backward`: with channels last the gradient is read as it lies."""
    source = call.args[1]
    return None if suggests_channels_last(shape(source), strides(source)) else after(_copies(call, (0,), False))


def adaptive_maximum(call: Call) -> Plan | None:
    """`adaptive_max_pool2d`, `3d`: a batch is copied; values and places in another format are computed aside."""
    source = call.args[0]
    images = "2d" in call.name
    return after(_copies(call, (_OUTPUTS, 0) if images else (0,), False)) if len(shape(source)) == 5 - images else None


def bilinear(call: Call) -> Plan | None:
    """`upsample_bilinear2d`: copied where its channels lie last, if they are many and the size changes."""
    source = call.args[0]
    sizes = shape(source)
    last = suggests_channels_last(sizes, strides(source)) and sizes[1] >= _MANY
    return after(_copies(call, (0,), True)) if last and sizes[2:] != shape(next(tensors(call.out)))[2:] else None


_images: Final = copied(_OUTPUTS, 0, like=0, channels=4)


def nearest(call: Call) -> Plan | None:
    """`upsample_nearest2d`: nothing is copied aside where the size stays (the image itself is)."""
    return None if shape(call.args[0]) == shape(next(tensors(call.out))) else _images(call)


def images_backward(call: Call) -> Plan | None:
    """`upsample_nearest2d_backward`, `upsample_bilinear2d_backward`: the same of the gradient."""
    return None if tuple(call.args[1]) == tuple(call.args[2][2:]) else _images(call)


_CONTIGUOUS: Final = (
    "avg_pool3d avg_pool3d_backward _adaptive_avg_pool3d_backward adaptive_max_pool3d_backward "
    "reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward reflection_pad3d "
    "upsample_nearest1d upsample_nearest1d_backward _upsample_nearest_exact1d _upsample_nearest_exact1d_backward "
    "upsample_linear1d_backward upsample_bicubic2d_backward upsample_nearest3d_backward "
    "_upsample_nearest_exact3d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward"
)

_BACKWARD: Final = "upsample_nearest2d_backward _upsample_nearest_exact2d_backward upsample_bilinear2d_backward"

RULES: Mapping[str, Rule] = {
    f"aten.{name}.default": rule
    for name, rule in {
        **dict.fromkeys(_CONTIGUOUS.split(), copied(0)),
        "avg_pool2d": copied(0, like=0),
        "avg_pool2d_backward": copied(1, 0, like=1),
        "max_pool2d_with_indices": copied(0, like=0),
        "max_pool2d_with_indices_backward": copied(1, 0, 7, like=1),
        "max_pool3d_with_indices": copied(0, like=0, rank=5),
        "max_pool3d_with_indices_backward": copied(0, 7, like=1, rank=5),
        "_adaptive_avg_pool2d": adaptive_average,
        "_adaptive_avg_pool3d": adaptive_average,
        "_adaptive_avg_pool2d_backward": adaptive_average_backward,
        **dict.fromkeys(("max_unpool2d", "max_unpool3d"), unpooled),
        "adaptive_max_pool2d": adaptive_maximum,
        "adaptive_max_pool3d": adaptive_maximum,
        "adaptive_max_pool2d_backward": copied(0, 2, _OUTPUTS),
        "fractional_max_pool2d_backward": fractional_maximum_backward,
        **dict.fromkeys(("upsample_nearest2d", "_upsample_nearest_exact2d"), nearest),
        **dict.fromkeys(_BACKWARD.split(), images_backward),
        **dict.fromkeys(("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"), copied(_OUTPUTS, 0)),
        **dict.fromkeys(("upsample_nearest3d", "_upsample_nearest_exact3d"), copied(_OUTPUTS, 0)),
        "upsample_bilinear2d": bilinear,
        "upsample_trilinear3d_backward": copied(0, _OUTPUTS),
    }.items()
}
