"""Quantized types, and quantization that training pretends (aten/src/ATen/native/quantized).

Learned scales (LSQ) have a gradient of the input's size each before it is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from graph.fake_cuda.operators.refused import scale_of_channels
from graph.user_code import reader

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime

_aten: Final = torch.ops.aten


def _quantized(runtime: Runtime, source: torch.Tensor, *args: object) -> torch.Tensor:
    """TensorFactories.cpp: as many bytes as integers; it is one of those, and not of a quantized type."""
    return torch.empty_like(source, dtype=_INTEGERS.get(cast(torch.dtype, args[-1]), torch.uint8))


def _fake_quantized_by_channel(
    runtime: Runtime, source: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, *rest: object
) -> Any:
    """FakeQuantPerChannelAffine.cpp: the host reads whether zero points are in range."""
    scale_of_channels(scale)
    limits = [_aten.min.default(zero_point), _aten.max.default(zero_point)]
    runtime.synchronized()
    del limits
    return torch.empty_like(source), torch.empty_like(source, dtype=torch.bool)


def _learnt_of_all(
    runtime: Runtime, source: torch.Tensor, scale: object, zero_point: object, least: int, most: int, *rest: object
) -> torch.Tensor:
    """FakeQuantPerTensorAffine.cpp: the host reads both, and the mask is not kept."""
    runtime.synchronized()
    made = _aten.fake_quantize_per_tensor_affine_cachemask.default(source, 1.0, 0, least, most)
    return cast(torch.Tensor, made[0])


def _learnt_of_all_backward(
    runtime: Runtime,
    gradient: torch.Tensor,
    source: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    *rest: object,
) -> tuple[torch.Tensor, ...]:
    """FakeQuantPerTensorAffine.cpp."""
    gradient, source, scale, zero_point = _single(gradient, source, scale, zero_point)
    runtime.synchronized()
    _all_single(gradient, source, scale, zero_point)
    made = [torch.empty_like(source) for _ in range(3)]
    return made[0], *(one.sum().unsqueeze(0) for one in made[1:])


def _single(*given: torch.Tensor) -> list[torch.Tensor]:
    """Gradient, input, scale and zero point; where the input is of bfloat16, copies of float32."""
    return [one.float() if given[1].dtype is torch.bfloat16 else one for one in given]


def _all_single(*given: torch.Tensor) -> None:
    """The same four are of float32, or are refused in PyTorch's words."""
    for name, one in zip(("dY_", "X_", "scale_", "zero_point_"), given, strict=True):
        if one.dtype is not torch.float32:
            raise RuntimeError(_NO_FLOAT.format(name))


def _learnt_by_channel(
    runtime: Runtime, source: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, axis: int, *rest: Any
) -> torch.Tensor:
    """FakeQuantPerChannelAffine.cpp: by zero points that are rounded for it. `rest`: from least to most."""
    rounded = _rounded(zero_point, *rest).to(torch.int32)
    made = _aten.fake_quantize_per_channel_affine_cachemask.default(source, scale, rounded, axis, *rest[:2])
    return cast(torch.Tensor, made[0])


def _rounded(zero_point: torch.Tensor, least: int, most: int, factor: float = 1.0) -> torch.Tensor:
    """`_get_rounded_zero_point`."""
    return zero_point.round().clamp_(least, most)


def _learnt_by_channel_backward(
    runtime: Runtime,
    gradient: torch.Tensor,
    source: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    axis: int,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    """FakeQuantPerChannelAffine.cpp."""
    gradient, source, scale, zero_point = _single(gradient, source, scale, zero_point)
    rounded = _rounded(zero_point, *rest)
    _all_single(gradient, source, scale, zero_point)
    limits = _aten.aminmax.default(rounded)
    runtime.synchronized()
    del limits
    made = [torch.empty_like(source) for _ in range(3)]
    others = [dimension for dimension in range(source.ndim) if dimension != axis]
    return made[0], *(one.sum(others) for one in made[1:])


def _observed_and_fake_quantized(
    runtime: Runtime,
    source: torch.Tensor,
    observed: object,
    quantized: object,
    lowest: torch.Tensor,
    highest: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    constant: float,
    least: int,
    most: int,
    axis: int,
    by_row: bool = False,
    symmetric: bool = False,
) -> Any:
    """cuda/FusedObsFakeQuant.cu: limits of all or of each channel, for which there is room from then on."""
    whole = source.contiguous()
    if not by_row:
        _aten.aminmax.default(whole)
        made = torch.empty_like(source), torch.empty_like(source, dtype=torch.bool)
    else:
        rows = source if source.ndim == 2 else source.transpose(0, axis).flatten(1)
        if not lowest.numel():
            for state in (lowest, highest, scale, zero_point):
                state.resize_(source.shape[axis])
        limits = _aten.aminmax.default(rows, dim=1)
        del limits, rows
        mask = torch.empty_like(source, dtype=torch.bool)
        made = torch.empty_like(source), mask
    del whole
    runtime.values.forget((lowest, highest, scale, zero_point))
    return made


def _compressed(runtime: Runtime, source: torch.Tensor) -> torch.Tensor:
    """cuSPARSELtOps.cpp: half of the values, and 2 bits for each that is left, or 4 of 32 bits."""
    runtime.note(f"{reader()} compresses a matrix: what cuSPARSELt itself takes is not counted")
    rows, kept = source.shape[0], source.numel() * (10 if source.itemsize == 1 else 9)
    return source.new_empty([rows, -(-kept // (16 * rows))] if runtime.profile.release >= _BY_ROW else kept // 16)


_NO_FLOAT: Final = (
    "Expected {}.scalar_type() == ScalarType::Float to be true, but got false.  (Could this error message be improved?"
    "  If so, please report an enhancement request to PyTorch.)"
)
#: Since this release what is compressed is a matrix of as many rows.
_BY_ROW: Final = (2, 9)
#: What quantized types keep.
_INTEGERS: Final = {torch.quint8: torch.uint8, torch.qint8: torch.int8, torch.qint32: torch.int32}
#: By operator.
QUANTIZED: Final[Mapping[str, Callable[..., Any]]] = {
    **dict.fromkeys((f"quantize_per_{kind}" for kind in ("tensor", "tensor.tensor_qparams", "channel")), _quantized),
    "fake_quantize_per_channel_affine_cachemask": _fake_quantized_by_channel,
    "_fake_quantize_learnable_per_tensor_affine": _learnt_of_all,
    "_fake_quantize_learnable_per_tensor_affine_backward": _learnt_of_all_backward,
    "_fake_quantize_learnable_per_channel_affine": _learnt_by_channel,
    "_fake_quantize_learnable_per_channel_affine_backward": _learnt_by_channel_backward,
    "_cslt_compress": _compressed,
    "_fused_moving_avg_obs_fq_helper": _observed_and_fake_quantized,
}
