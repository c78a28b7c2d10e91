"""TorchScript's masked softmax in fp32 of GPT-BigCode (transformers 4.29), call by call, as PyTorch 2.0 runs it.

The function is compiled while it is used: its first call runs operator by operator. Without gradients all later calls
are one fused kernel. With gradients the second call has TorchScript's own derivative, which keeps the masked scores
beside the softmax (symbolic_script.cpp: `softmax` saves its input), and from the third one that derivative is fused.
Seen in the allocator's events of torch 2.0.1 with transformers 4.29.2, upcast_masked_softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import softmax

from graph.fake_cuda.torch_private import softmax_backward


class ScriptedSoftmax:
    """One compiled function, shared by all layers: it counts its calls without and with gradients."""

    def __init__(self) -> None:
        self.plain = 0
        self.differentiated = 0

    def __call__(self, scores: torch.Tensor, mask: torch.Tensor, least: torch.Tensor, scale: float) -> Any:
        """Probabilities in the dtype of `scores`; `mask` is true where they count, `least` stands elsewhere."""
        if torch.is_grad_enabled() and scores.requires_grad:
            self.differentiated += 1
            if self.differentiated > 1:
                return _compiled(scores, mask, least, scale, self.differentiated > 2)
        else:
            self.plain += 1
            if self.plain > 1:
                return softmax(scores, dim=-1)  # one kernel with one output
        return _interpreted(scores, mask, least, scale)


def _interpreted(scores: torch.Tensor, mask: torch.Tensor, least: torch.Tensor, scale: float) -> Any:
    values = scores.to(torch.float32)
    values = values * scale
    values = torch.where(mask, values, least)
    values = softmax(values, dim=-1)
    return values.to(scores.dtype)


def _compiled(scores: torch.Tensor, mask: torch.Tensor, least: torch.Tensor, scale: float, fused: bool) -> Any:
    upcast = scores.to(torch.float32)
    values = _MaskedSoftmax.apply(upcast, mask, least, scale, fused)  # type: ignore[no-untyped-call]
    del upcast
    return values.to(scores.dtype)


class _MaskedSoftmax(torch.autograd.Function):
    """Scale, mask and softmax; `fused`: no temporaries, neither here nor in backward."""

    @staticmethod
    def forward(
        ctx: Any, upcast: torch.Tensor, mask: torch.Tensor, least: torch.Tensor, scale: float, fused: bool
    ) -> Any:
        scaled = upcast if fused else upcast * scale
        masked = torch.where(mask, scaled, least)
        del scaled
        result = softmax(masked, dim=-1)
        ctx.save_for_backward(masked, mask, result)
        ctx.scale, ctx.fused = scale, fused
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _, mask, result = ctx.saved_tensors
        if ctx.fused:
            return gradients[0] * result, None, None, None, None
        gradient = softmax_backward(gradients[0], result, -1, result.dtype)
        gradient = gradient * mask.to(gradient.dtype)
        return gradient * ctx.scale, None, None, None, None
