"""What `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` run in evaluation without gradients, as one operator.

Each is run as the operators that its CUDA kernel calls, in the same order. Source:
aten/src/ATen/native/transformers/cuda/attention.cu, native/transformers/attention.cpp and transformer.cpp,
native/cuda/SoftMax.cu.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from graph.fake_cuda import sdpa

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime

_aten: Final = torch.ops.aten
#: Before this release only heads of a multiple of so many values were attended to by a fused kernel.
_ANY_HEAD: Final = (2, 12)
_ALIGNED: Final = 8
#: What masks say (`mask_type`): one of pairs of tokens, one of padded tokens.
_OF_PAIRS: Final = 0
_OF_PADDING: Final = 1
#: Longest rows, in values and bytes, that the kernel of masked softmax takes.
_MOST_VALUES: Final = 1024
_MOST_BYTES: Final = 4096


def attention(
    runtime: Runtime,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    size: int,
    heads: int,
    weight: torch.Tensor,
    bias: torch.Tensor,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`_native_multi_head_attention` of tensors (batch, tokens, size): the result, and weights if they are needed."""
    of_itself = query is key and key is value
    head, card = size // heads, runtime.profile
    aligned = card.release >= _ANY_HEAD or not head % _ALIGNED
    if of_itself and mask is None and aligned and not need_weights:
        seen = query.view(query.shape[0], -1, heads, head).transpose(1, 2)
        if sdpa.choice(card, seen, seen, seen) in (sdpa.Backend.FLASH, sdpa.Backend.EFFICIENT):
            projected = _aten.linear(query, weight, bias)
            parts = [part.view(*part.shape[:2], heads, head).transpose(1, 2) for part in projected.chunk(3, -1)]
            attended = sdpa.attend(card, *parts)
            rows = attended.transpose(1, 2).reshape(*query.shape[:2], size)
            result = _aten.linear(rows, out_weight, out_bias)
            del rows, attended
            return result, None
    packed = _projected(query, key, value, size, weight)
    batch, tokens = packed.shape[:2]
    parts = _aten.empty.memory_format((3, batch * heads, tokens, head), dtype=packed.dtype, device=packed.device)
    del packed
    queries, keys, values = parts.unbind()
    scores = _aten.bmm(queries, keys.transpose(1, 2)).view(batch, heads, tokens, -1)
    scores = _normalized(runtime, scores, mask, mask_type)
    _aten.bmm.out(scores.view(batch * heads, tokens, -1), values, out=queries)
    kept = scores if need_weights else None
    del scores
    rows = queries.view(batch, heads, tokens, head).permute(0, 2, 1, 3).contiguous().view(batch * tokens, size)
    result = _aten.linear(rows, out_weight, out_bias).view(batch, tokens, -1)
    del rows
    if kept is not None and average:
        kept = kept.sum(1)
        kept /= heads
    return result, kept


def _projected(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, size: int, weight: torch.Tensor
) -> torch.Tensor:
    """Query, key and value side by side (`qkv_projection`), without their bias."""
    if key is not value:
        return torch.cat([each.matmul(w.t()) for each, w in zip((query, key, value), weight.chunk(3), strict=True)], 2)
    if query is key:
        return query.matmul(weight.t())
    return torch.cat([query.matmul(weight[:size].t()), key.matmul(weight[size:].t())], 2)


def _normalized(
    runtime: Runtime, scores: torch.Tensor, mask: torch.Tensor | None, mask_type: int | None
) -> torch.Tensor:
    """Softmax of the scores, in their place if there is no mask (`masked_softmax`)."""
    if mask is None:
        _aten._softmax.out(scores, -1, False, out=scores)
        return scores
    mask = mask if mask.dtype is torch.bool else mask.to(torch.bool)
    return masked_softmax(runtime, scores, mask, scores.dim() - 1, mask_type)


def masked_softmax(
    runtime: Runtime, scores: torch.Tensor, mask: torch.Tensor, dim: int | None = None, mask_type: int | None = None
) -> torch.Tensor:
    """`_masked_softmax`: what its kernel does not take is filled, and softmax of it."""
    out = torch.empty_like(scores)
    wide = scores.shape[-1]
    if mask_type == _OF_PAIRS and mask.dim() == 2:
        mask = mask.expand(scores.shape)
    last = dim is None or dim == scores.dim() - 1
    if last and wide <= _MOST_VALUES and wide * scores.element_size() <= _MOST_BYTES and mask.is_contiguous():
        return out
    if mask_type == _OF_PADDING and mask.dim() == 2:
        mask = mask.view(mask.shape[0], 1, 1, -1)
    filled = scores.masked_fill(mask, float("-inf"))
    made: torch.Tensor = _aten._softmax(filled, -1 if dim is None else dim, False)
    del out, filled
    return made


def encoder_layer(
    runtime: Runtime,
    source: torch.Tensor,
    size: int,
    heads: int,
    weight: torch.Tensor,
    bias: torch.Tensor,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor,
    gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    weight_1: torch.Tensor,
    bias_1: torch.Tensor,
    weight_2: torch.Tensor,
    bias_2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    """`_transformer_encoder_layer_fwd` of tensors (batch, tokens, size)."""
    if not source.numel():
        return source.clone()

    def norm(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = _aten.layer_norm(x, [size], *parameters, eps, True)
        return made

    norm_1, norm_2 = (norm_weight_1, norm_bias_1), (norm_weight_2, norm_bias_2)
    x = norm(source, *norm_1) if norm_first else source
    layer = (size, heads, weight, bias, out_weight, out_bias, mask, False, True, mask_type)
    x = attention(runtime, x, x, x, *layer)[0]
    x.add_(source)
    x = x if norm_first else norm(x, *norm_1)
    before = x
    x = norm(x, *norm_2) if norm_first else x
    flat = x.view(-1, size)
    inner = _aten._addmm_activation(bias_1, flat, weight_1.t(), beta=1, alpha=1, use_gelu=gelu)
    del flat
    x = _aten.addmm(bias_2, inner, weight_2.t()).view(source.shape)
    x.add_(before)
    del inner
    return x if norm_first else norm(x, *norm_2)


FAST_PATH: Final[Mapping[str, Callable[..., Any]]] = {
    "_native_multi_head_attention": attention,
    "_transformer_encoder_layer_fwd": encoder_layer,
    "_masked_softmax": masked_softmax,
}
