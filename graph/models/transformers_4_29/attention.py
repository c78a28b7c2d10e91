"""Attention as transformers 4.29 computed it, for cases with the loss of that time.

transformers 5 computes the same with fewer tensors. Where a layer's recomputation is the peak, or memory is nearly
full, the old ones matter: contiguous keys and values, scores clamped from below, masks kept as buffers, a softmax in
fp32. Checked against allocator events of torch 2.0.1 with transformers 4.29.2.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.functional import dropout, softmax
from torch.overrides import TorchFunctionMode

from graph.errors import CaptureError
from graph.models.transformers_4_29.softmax import ScriptedSoftmax

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Attention classes with the form below, and whether they clamp the scores and take the softmax of fp16 in fp32.
CLAMPED: Final = {"OPTAttention": True, "BioGptAttention": False}
#: Attention classes that had a causal mask as a buffer, [1, 1, positions, positions] in bool.
MASKED: Final = frozenset({"CodeGenAttention"})
#: The buffer of a causal mask's least value, in classes that still have the mask itself.
LEAST: Final = "masked_bias"


def like_transformers_4_29(module: PreTrainedModel, *, cloned: bool = False) -> None:
    """Give the attention of `module` the form of transformers 4.29 (modeling_opt.py, _biogpt.py, _codegen.py,
    _bloom.py, _gpt_neo.py, _gpt_bigcode.py); other classes stay as they are.

    `cloned`: a dropout of probability 0 gives a copy of its input, as under Colossal-AI, and not the input itself.
    """
    scripted = ScriptedSoftmax()
    part: Any  # attributes of the classes that are named
    for part in module.modules():
        kind = type(part).__name__
        if kind in CLAMPED:
            part.forward = types.MethodType(_forward(CLAMPED[kind]), part)
        elif kind in MASKED:
            _require(part, "_attn")
            positions = len(part.embed_positions)
            mask = torch.empty(1, 1, positions, positions, dtype=torch.bool, device=part.embed_positions.device)
            part.register_buffer("causal_mask", mask, persistent=False)
            part._attn = types.MethodType(_masked, part)
            part.forward = types.MethodType(_without_weights(_within(_WholeSlices(), part.forward)), part)
        elif kind == "BloomAttention":
            part.forward = types.MethodType(_bloom, part)
        elif kind == "GPTNeoSelfAttention":
            least = torch.empty((), dtype=part.k_proj.weight.dtype, device=part.k_proj.weight.device)
            part.register_buffer(LEAST, least, persistent=False)
            part.forward = types.MethodType(_without_weights(part.forward), part)
        elif kind == "GPTBigCodeAttention" and part.multi_query:
            part.attn_dropout = torch.nn.Dropout(part.attn_pdrop)
            part.forward = types.MethodType(_multi_query(scripted), part)
    if cloned:
        module.forward = _within(_Clones(), module.forward)
        for part in module.modules():
            if again := getattr(part, "_gradient_checkpointing_func", None):  # runs outside of the module's forward
                part._gradient_checkpointing_func = _within_checkpoints(again)


def _require(part: object, name: str) -> None:
    """CaptureError where the installed transformers wrote a class anew, as 5.24 did CodeGen's attention."""
    if not hasattr(part, name):
        import transformers

        raise CaptureError(
            f"{type(part).__name__} of transformers {transformers.__version__} cannot take the form of 4.29: install "
            '"transformers<5.24", or leave "loss": "transformers-4.29" out of the case'
        )


class _WholeSlices(TorchFunctionMode):
    """Indexing as torch 2.0 did it: a slice, and so a node of backward, for whole dimensions too."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not torch.Tensor.__getitem__ or not isinstance(args[1], tuple):
            return func(*args, **(kwargs or {}))
        tensor, items = args
        dimension = 0
        for place, item in enumerate(items):
            if item is Ellipsis:
                dimension = tensor.dim() - sum(other is not None for other in items[place + 1 :])
            elif item is None:
                tensor = tensor.unsqueeze(dimension)
                dimension += 1
            elif isinstance(item, int):
                tensor = tensor.select(dimension, item)
            elif isinstance(item, slice):
                tensor = torch.ops.aten.slice(tensor, dimension, item.start, item.stop, item.step or 1)
                dimension += 1
            else:
                return func(*args, **(kwargs or {}))
        return tensor


class _Clones(TorchFunctionMode):
    """A dropout of probability 0 copies its input."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func is dropout and given.get("p") == 0.0:
            return args[0].clone()
        return func(*args, **given)


def _within(mode: TorchFunctionMode, function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def run(*args: object, **options: object) -> Any:
        with mode:
            return function(*args, **options)

    return run


def _within_checkpoints(checkpoint: Callable[..., Any]) -> Any:
    def run(function: Callable[..., Any], *args: object, **options: object) -> Any:
        return checkpoint(_within(_Clones(), function), *args, **options)

    return run


def _without_weights(forward: Callable[..., Any]) -> Any:
    """Layers of GPT-Neo and CodeGen dropped the attention's weights at once; today's hold them until they end."""

    def dropped(self: object, *args: object, **options: object) -> tuple[Any, None]:
        return forward(*args, **options)[0], None

    return dropped


def _masked(
    self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> tuple[Any, Any]:
    length, total = query.size(-2), key.size(-2)
    causal_mask = self.causal_mask[:, :, total - length : total, :total]
    query = query.to(torch.float32)
    key = key.to(torch.float32)
    weights = torch.matmul(query, key.transpose(-1, -2))
    weights = weights / self.scale_attn
    least = torch.tensor(torch.finfo(weights.dtype).min, dtype=weights.dtype).to(weights.device)
    weights = torch.where(causal_mask, weights, least)
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = softmax(weights, dim=-1)
    weights = weights.to(value.dtype)
    weights = self.attn_dropout(weights)
    return torch.matmul(weights, value), weights


def _bloom(
    self: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    alibi: torch.Tensor,
    attention_mask: torch.Tensor,
    *_: object,
    **__: object,
) -> tuple[Any, Any]:
    """Scores of fp16 filled in fp32: two such tensors that transformers 5 has not; keys copied as [heads, dim, length].

    The mask is boolean (graph/models/transformers_4_29/masks.py).
    """
    batch, length, width = hidden_states.shape
    heads, dim = self.num_heads, self.head_dim
    fused = self.query_key_value(hidden_states)
    split = fused.view(batch, length, heads, 3, dim)
    with _WholeSlices():
        query, key, value = split[..., 0, :], split[..., 1, :], split[..., 2, :]
    query = query.transpose(1, 2).reshape(batch * heads, length, dim)
    key = key.permute(0, 2, 3, 1).reshape(batch * heads, dim, length)
    value = value.transpose(1, 2).reshape(batch * heads, length, dim)
    product = alibi.baddbmm(batch1=query, batch2=key, beta=self.beta, alpha=self.inv_norm_factor)
    scores = product.view(batch, heads, length, length)
    dtype = scores.dtype
    if dtype == torch.float16:
        scores = scores.to(torch.float32)
    weights = scores
    if attention_mask is not None:
        weights = torch.masked_fill(scores, attention_mask, torch.finfo(scores.dtype).min)
    probabilities = softmax(weights, dim=-1, dtype=torch.float32).to(dtype)
    probabilities = self.attention_dropout(probabilities)
    flat = probabilities.view(batch * heads, length, length)
    context = torch.bmm(flat, value)
    context = context.view(batch, heads, length, dim).permute(0, 2, 1, 3).reshape(batch, length, width)
    output = self.dense(context)
    output = residual + dropout(output, p=self.hidden_dropout, training=self.training)
    return output, None


def _multi_query(scripted: ScriptedSoftmax) -> Any:
    """Multi-query attention of GPT-BigCode: one product for all heads into an empty tensor, and a scripted softmax.

    The mask is boolean, [batch, length, 1, length].
    """

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        layer_past: object = None,
        attention_mask: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[Any, Any]:
        batch, length = hidden_states.shape[:2]
        query, both = self.c_attn(hidden_states).split((self.embed_dim, 2 * self.kv_dim), dim=2)
        key, value = both.split((self.head_dim, self.head_dim), dim=-1)

        def attend(query: torch.Tensor, key: torch.Tensor) -> tuple[Any, Any]:
            shape, flat = query.shape, (batch, length * self.num_heads, length)
            query = query.reshape(batch, length * self.num_heads, self.head_dim)
            upcast = self.attention_softmax_in_fp32 and query.dtype != torch.float32
            unscale = self.layer_idx + 1 if self.scale_attention_softmax_in_fp32 and upcast else 1
            scores = torch.empty(flat, device=query.device, dtype=query.dtype)
            scores = torch.baddbmm(scores, query, key, beta=0, alpha=self.scaling / unscale)
            scores = scores.view(batch, length, self.num_heads, length)
            kind = torch.float32 if upcast else scores.dtype
            if attention_mask is not None and self.mask_value is None:
                self.mask_value = torch.full([], torch.finfo(kind).min, dtype=kind, device=query.device)
            if upcast and attention_mask is not None:
                scores = scripted(scores, attention_mask, self.mask_value, float(unscale))
            else:
                if attention_mask is not None:
                    scores = torch.where(attention_mask, scores, self.mask_value)
                scores = softmax(scores, dim=-1, dtype=kind).to(query.dtype)
            scores = self.attn_dropout(scores)
            return torch.bmm(scores.view(flat), value).view(shape), scores

        output, _weights = attend(query, key.transpose(-1, -2))  # held until the end
        output = self.c_proj(output)
        return self.resid_dropout(output), None

    return forward


def _forward(clamped: bool) -> Any:
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        past_key_values: object = None,
        attention_mask: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[Any, Any]:
        batch, length, width = hidden_states.size()
        heads, flat = self.num_heads, (batch * self.num_heads, -1, self.head_dim)

        def shaped(states: torch.Tensor) -> Any:
            return states.view(batch, -1, heads, self.head_dim).transpose(1, 2).contiguous()

        query = self.q_proj(hidden_states) * self.scaling
        key = shaped(self.k_proj(hidden_states))
        value = shaped(self.v_proj(hidden_states))
        present = (key, value)  # the layer holds them until it ends
        query = shaped(query).view(*flat)
        key, value = key.view(*flat), value.view(*flat)
        weights = torch.bmm(query, key.transpose(1, 2))
        if attention_mask is not None:
            weights = weights.view(batch, heads, length, -1) + attention_mask
            if clamped:
                weights = torch.max(weights, torch.tensor(torch.finfo(weights.dtype).min))
            weights = weights.view(batch * heads, length, -1)
        if clamped and weights.dtype == torch.float16:
            weights = softmax(weights, dim=-1, dtype=torch.float32).to(torch.float16)
        else:
            weights = softmax(weights, dim=-1)
        probabilities = dropout(weights, p=self.dropout, training=self.training)
        output = torch.bmm(probabilities, value)
        output = output.view(batch, heads, length, self.head_dim).transpose(1, 2)
        output = output.reshape(batch, length, width)
        output = self.out_proj(output)
        return output, present

    return forward
