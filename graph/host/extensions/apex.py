"""NVIDIA Apex's compiled extensions, which need CUDA to be built: they allocate what they would, and compute nothing.

Apex's own Python code runs (its folder `apex` is enough). What that calls are `amp_C` (the fused optimizers and norms
of gradients), `fused_layer_norm_cuda` and `fused_rotary_positional_embedding`. Their allocations, in order, are those
of csrc/multi_tensor_l2norm_kernel.cu, csrc/layer_norm_cuda.cpp and _kernel.cu, and
csrc/megatron/fused_rotary_positional_embedding_cuda.cu of Apex (commit 6424da3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

Lists = Sequence[Sequence[torch.Tensor]]
#: What `amp_C` launches that changes its operands and makes nothing.
_IN_PLACE: Final = (
    *("multi_tensor_scale", "multi_tensor_sgd", "multi_tensor_axpby", "multi_tensor_adam", "multi_tensor_adagrad"),
    *("multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master", "multi_tensor_novograd"),
)
#: Sums of a norm: one for each of this many blocks.
_BLOCKS: Final = 320
#: Rows of the partial gradients of a weight in layer norm's backward.
_PARTS: Final = 16


def functions() -> Mapping[str, Mapping[str, Callable[..., object]]]:
    """The functions of each extension, by its name and theirs."""
    return {
        "amp_C": {
            **dict.fromkeys(_IN_PLACE, _nothing),
            "multi_tensor_l2norm": _l2norm,
            "multi_tensor_l2norm_mp": _l2norm,
            "multi_tensor_lamb": _lamb,
        },
        "fused_layer_norm_cuda": {
            "forward": _norm,
            "forward_affine": _norm,
            "forward_affine_mixed_dtypes": _norm_mixed,
            "backward": _norm_backward,
            "backward_affine": _norm_backward_affine,
            "rms_forward": _rms,
            "rms_forward_affine": _rms,
            "rms_forward_affine_mixed_dtypes": _rms_mixed,
            "rms_backward": _rms_backward,
            "rms_backward_affine": _rms_backward_affine,
        },
        "fused_rotary_positional_embedding": {
            "forward": _rotated,
            "backward": _rotated,
            "forward_cached": _rotated_cached,
            "backward_cached": _rotated_cached,
            "forward_thd": _rotated_rows,
            "backward_thd": _rotated_rows,
        },
    }


def _nothing(*operands: object) -> None:
    """A kernel that writes to its operands."""


def _l2norm(
    chunk: int, _skipped: torch.Tensor, lists: Lists, per_tensor: bool | None = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of all tensors, (1,), and of each, (tensors,) or empty."""
    tensors, first = lists[0], lists[0][0]
    sums = [first.new_zeros(_BLOCKS, dtype=torch.float32)]
    if per_tensor:
        chunks = max(math.ceil(one.numel() / chunk) for one in tensors)
        sums.append(first.new_zeros(len(tensors) * chunks, dtype=torch.float32))
    each = first.new_empty(len(tensors) if per_tensor else 0, dtype=torch.float32)
    return first.new_empty(1, dtype=torch.float32), each


def _lamb(chunk: int, skipped: torch.Tensor, lists: Lists, *rest: object) -> None:
    """Norms of the parameters and of their updates, which are gone when the step has been launched."""
    norms = _l2norm(chunk, skipped, lists[1:2], True), _l2norm(chunk, skipped, lists[:1], True)
    del norms


def _rows(tensor: torch.Tensor, shape: Sequence[int]) -> int:
    return tensor.numel() // math.prod(shape)


def _statistics(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A number for each row: in fp32 of 16 bits, else in the operand's dtype."""
    return torch.empty(_rows(tensor, shape), dtype=_summed(tensor), device=tensor.device)


def _summed(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


def _norm(tensor: torch.Tensor, shape: Sequence[int], *rest: object) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(tensor), _statistics(tensor, shape), _statistics(tensor, shape)


def _norm_mixed(
    tensor: torch.Tensor, shape: Sequence[int], gamma: torch.Tensor, *rest: object
) -> tuple[torch.Tensor, ...]:
    out = torch.empty_like(tensor, dtype=gamma.dtype)
    return out, _statistics(tensor, shape), _statistics(tensor, shape)


def _rms(tensor: torch.Tensor, shape: Sequence[int], *rest: object) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(tensor), _statistics(tensor, shape)


def _rms_mixed(
    tensor: torch.Tensor, shape: Sequence[int], gamma: torch.Tensor, *rest: object
) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(tensor, dtype=gamma.dtype), _statistics(tensor, shape)


def _norm_backward(
    _dout: torch.Tensor, _mean: torch.Tensor | None, _inverse: torch.Tensor, saved: torch.Tensor, *rest: object
) -> torch.Tensor:
    return torch.empty_like(saved)


def _rms_backward(_dout: torch.Tensor, _inverse: torch.Tensor, saved: torch.Tensor, *rest: object) -> torch.Tensor:
    return torch.empty_like(saved)


def _affine(saved: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradients of the operand and of its weights, whose sums by parts of the rows are gone again."""
    gradients = tuple(torch.empty_like(one) for one in (saved, *weights))
    shape = (_PARTS, weights[0].numel())
    parts = [torch.empty(shape, dtype=_summed(saved), device=saved.device) for _ in weights]
    del parts
    return gradients


def _norm_backward_affine(
    _dout: torch.Tensor,
    _mean: torch.Tensor | None,
    _inverse: torch.Tensor,
    saved: torch.Tensor,
    _shape: Sequence[int],
    gamma: torch.Tensor,
    beta: torch.Tensor,
    *rest: object,
) -> tuple[torch.Tensor, ...]:
    return _affine(saved, gamma, beta)


def _rms_backward_affine(
    _dout: torch.Tensor,
    _inverse: torch.Tensor,
    saved: torch.Tensor,
    _shape: Sequence[int],
    gamma: torch.Tensor,
    *rest: object,
) -> tuple[torch.Tensor, ...]:
    return _affine(saved, gamma)


def _rotated(tensor: torch.Tensor, _angles: torch.Tensor, transposed: bool) -> torch.Tensor:
    """(rows, batch, heads, head), laid out by batch where `transposed`."""
    if not transposed:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    rows, batch, *rest = tensor.shape
    return torch.empty((batch, rows, *rest), dtype=tensor.dtype, device=tensor.device).transpose(0, 1)


def _rotated_cached(tensor: torch.Tensor, cos: torch.Tensor, _sin: torch.Tensor, transposed: bool) -> torch.Tensor:
    return _rotated(tensor, cos, transposed)


def _rotated_rows(tensor: torch.Tensor, _starts: torch.Tensor, _angles: torch.Tensor) -> torch.Tensor:
    """(rows of all, heads, head), where lengths vary."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
