"""LSTM, GRU and plain recurrent networks by cuDNN, as PyTorch calls it (aten/src/ATen/native/cudnn/RNN.cpp).

Weights lie in one buffer (`RNNBase.flatten_parameters`), gradients of weights too. What cuDNN asks for itself it alone
knows (cudnnGetRNNTempSpaceSizes): its reserve space, which lives from forward to backward, is that of every one of 72
calls on an H100 (tests/data/gpu); its workspace, which recordings do not have, is about that of those calls on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch

from graph.fake_cuda.torch_private import BY_CPU_KERNEL, cudnn_rnn
from traces.units import format_bytes

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime

#: Numbers of the kinds (`cudnnRNNMode_t`), and for each how many values a unit keeps for its derivative, and for how
#: many the workspace has room.
_MODES: Final[Mapping[str, int]] = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_NAMES: Final = ("RNN", "RNN", "LSTM", "GRU")
_KEPT: Final = (1, 1, 5, 6)
_WORKED: Final = (4, 4, 5, 4)
#: Of the reserve space: its header, and where its parts begin; and what the workspace has for each layer and direction.
_HEADER: Final = 256
_ALIGNED: Final = 32
_EACH: Final = 8 << 20


def install(runtime: Runtime) -> None:
    """Have `lstm`, `gru`, `rnn_tanh` and `rnn_relu` go to cuDNN where PyTorch would, under autocast in float16."""
    runtime.override("aten::_cudnn_rnn", _in_half, ("AutocastCUDA",))
    for name in _MODES:
        for overload in ("input", "data"):
            kernel = functools.partial(_recurrent, getattr(getattr(torch.ops.aten, name), overload), name)
            runtime.override(f"aten::{name}.{overload}", kernel, ("AutogradCUDA", "CUDA"))


def acceptable(tensor: torch.Tensor) -> bool:
    """`torch.backends.cudnn.is_acceptable`."""
    return bool(torch.cudnn_is_acceptable(tensor))


def mode_number(name: str) -> int:
    """`torch.backends.cudnn.rnn.get_cudnn_mode`, of `RNNBase.mode`."""
    return _MODES[name.lower()]


def _recurrent(func: Any, name: str, data: torch.Tensor, *args: Any) -> Any:
    """`_cudnn_impl`: without padding (`.data`) sizes of batches come before the state, and no batch comes first."""
    if not torch.cudnn_is_acceptable(data):
        return func.redispatch(BY_CPU_KERNEL, data, *args)
    packed = func._overloadname == "data"
    sizes = args[0].tolist() if packed else []
    state, weights, biases, layers, dropout, train, both, *first = args[packed:]
    hidden, cell = state if name == "lstm" else (state, None)
    size = (hidden if cell is None else cell).shape[2]
    projected = 0 if cell is None or hidden.shape[2] == size else hidden.shape[2]
    each = (4 if biases else 2) + (projected > 0)
    options = (size, projected, layers, bool(first and first[0]), dropout, train, both, sizes, None)
    made = cudnn_rnn(data, weights, each, _flat(weights), hidden, cell, _MODES[name], *options)
    return made[:2] if cell is None else made[:3]


def _in_half(
    data: torch.Tensor,
    weights: Sequence[torch.Tensor],
    stride: int,
    buffer: torch.Tensor | None,
    hidden: torch.Tensor,
    cell: torch.Tensor | None,
    *options: object,
) -> Any:
    """Autocast's `_cudnn_rnn_cast_reflatten` (aten/src/ATen/cudnn/AutocastRNN.cpp): whatever its dtype, float16.

    Weights are copied at each call, into one new buffer.
    """
    with torch.autocast("cuda", enabled=False):
        if _to_cast(weights[0] if buffer is None else buffer):
            buffer, weights = _halves(weights)
        return cudnn_rnn(_half(data), weights, stride, buffer, _half(hidden), _half(cell), *options)


def _half(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.half() if tensor is not None and _to_cast(tensor) else tensor


def _to_cast(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float64)


def _halves(weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Weights in a buffer of float16, for autograd their copies (`copy_weights_to_flat_buf_views`)."""
    buffer = _buffer(weights, torch.float16)
    parts = [torch.ops.aten.set_.source_Tensor(buffer.new_empty(0), part) for part in _parts(buffer, weights)]
    return buffer, [part.copy_(weight, non_blocking=True) for part, weight in zip(parts, weights, strict=True)]


def _flat(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The buffer of the weights, None where they lie apart (`try_get_weight_buf`)."""
    first = weights[0].detach()
    count = sum(weight.numel() for weight in weights)
    if first.untyped_storage().nbytes() == count * first.itemsize:
        return torch.as_strided(first, (count,), (1,), 0)
    return None


def _buffer(weights: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Room for all weights."""
    return torch.zeros(sum(weight.numel() for weight in weights), dtype=dtype, device=weights[0].device)


def flatten_weight(runtime: Runtime, weights: Sequence[torch.Tensor], *args: object) -> torch.Tensor:
    """`_cudnn_rnn_flatten_weight`: the weights become parts of one new buffer."""
    buffer = _buffer(weights, weights[0].dtype)
    for weight, part in zip(weights, _parts(buffer, weights), strict=True):
        torch.ops.aten.set_.source_Tensor(weight, part)
    return buffer


def _parts(buffer: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The buffer as tensors like the weights, one after the other."""
    parts, place = [], 0
    for weight in weights:
        strides = [prod(weight.shape[dim + 1 :]) for dim in range(weight.ndim)]
        parts.append(torch.ops.aten.as_strided.default(buffer, weight.shape, strides, place))
        place += weight.numel()
    return parts


def forward(
    runtime: Runtime,
    source: torch.Tensor,
    weights: Sequence[torch.Tensor],
    stride: int,
    buffer: torch.Tensor | None,
    hidden: torch.Tensor,
    cell: torch.Tensor | None,
    mode: int,
    size: int,
    projected: int,
    layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    both: bool,
    sizes: Sequence[int],
    dropout_state: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """`_cudnn_rnn`: output, last hidden state, last cell, reserve space, and the weights' buffer."""
    steps = source.transpose(0, 1).contiguous() if batch_first and not sizes else source.contiguous()
    width = (projected or size) * (1 + both)
    out = torch.empty((*steps.shape[:-1], width), dtype=source.dtype, device=source.device)
    last = torch.empty_like(hidden)
    end = torch.empty(0, device=out.device) if cell is None else torch.empty_like(cell)
    buffer = _buffer(weights, source.dtype) if buffer is None else buffer
    units, ways = prod(steps.shape[:-1]) * size, 1 + both
    working = workspace(mode, units, source.itemsize, layers * ways)
    runtime.tell("scratch", "cuDNN", working)
    kept = reserved(mode, units, source.itemsize, layers, ways, dropout) if train else 0
    reserve = torch.empty(kept, dtype=torch.uint8, device=source.device)
    runtime.note(
        f"cuDNN's workspace of a call of {_NAMES[mode]} is taken as {format_bytes(working)} on a GPU; cuDNN alone "
        f"knows it (cudnnGetRNNTempSpaceSizes), {format_bytes(working // 2)} to {format_bytes(2 * working)} are likely"
    )
    return out.transpose(0, 1) if batch_first and not sizes else out, last, end, reserve, buffer


def reserved(mode: int, units: int, item: int, layers: int, ways: int, dropout: float) -> int:
    """What cuDNN keeps for the derivative: values of each unit, what goes from layer to layer, and which of it was
    dropped. `units`: hidden ones of all rows, in one layer and direction; `ways`: directions."""
    between = (layers - 1) * ways
    dropped = between * _up(-(-units * ways // 8)) if dropout else 0
    return _up(units * ways * layers * item * _KEPT[mode]) + between * units * item + dropped + _HEADER


def workspace(mode: int, units: int, item: int, times: int) -> int:
    """About what cuDNN takes for the time of a call; `times`: layers by directions."""
    return times * (_EACH + units * item * _WORKED[mode])


def _up(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def backward(
    runtime: Runtime,
    source: torch.Tensor,
    weights: Sequence[torch.Tensor],
    stride: int,
    buffer: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor | None,
    out: torch.Tensor,
    gradient: torch.Tensor | None,
    last: torch.Tensor | None,
    end: torch.Tensor | None,
    *rest: Any,
) -> tuple[Any, ...]:
    """`_cudnn_rnn_backward`: gradients that are not there count as zeros; those of weights are parts of one buffer."""
    mode, size, _, layers, _, _, _, both, *_, mask = rest
    working = workspace(mode, prod(out.shape[:-1]) * size, source.itemsize, layers * (1 + both))
    pairs = ((out, gradient), (hidden, last), (cell, end))
    zeros = [torch.zeros_like(like) for like, given in pairs if given is None and like is not None]
    made = zip((source, hidden, cell), mask, strict=False)
    found = [torch.empty_like(like) if wanted and like is not None else None for like, wanted in made]
    runtime.tell("scratch", "cuDNN", working)
    weight_gradients = _parts(torch.zeros_like(buffer), weights) if mask[3] else [None] * len(weights)
    if mask[3]:
        runtime.tell("scratch", "cuDNN", working)
    del zeros
    return (*found, weight_gradients)


#: Kernels by operator, called as those of `graph.fake_cuda.operators.composed`.
RECURRENT: Final[Mapping[str, Callable[..., Any]]] = {
    "_cudnn_rnn": forward,
    "_cudnn_rnn_backward": backward,
    "_cudnn_rnn_flatten_weight": flatten_weight,
}
