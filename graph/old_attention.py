"""Attention as transformers 4.29 computed it, for cases with the loss of that time.

transformers 5 computes the same with fewer tensors. Where a layer's recomputation is the peak, or memory is nearly
full, the old ones matter: contiguous keys and values, scores clamped from below, masks kept as buffers, a softmax in
fp32.
"""

from __future__ import annotations

import types
from typing import Any, Final

import torch
from torch.nn.functional import dropout, softmax

#: Attention classes with the form below, and whether they clamp the scores and take the softmax of fp16 in fp32.
CLAMPED: Final = {"OPTAttention": True, "BioGptAttention": False}
#: Attention classes that had a causal mask as a buffer, [1, 1, positions, positions] in bool.
MASKED: Final = frozenset({"CodeGenAttention"})


def like_transformers_4_29(module: Any, *, cloned: bool = False) -> None:
    """Give the attention of `module` the form of transformers 4.29 (modeling_opt.py, _biogpt.py, _codegen.py).

    `cloned`: a dropout of probability 0 gives a copy of its input, as under Colossal-AI, and not the input itself.
    """
    for part in module.modules():
        kind = type(part).__name__
        if kind in CLAMPED:
            part.forward = types.MethodType(_forward(CLAMPED[kind], cloned), part)
        elif kind in MASKED:
            positions = len(part.embed_positions)
            mask = torch.empty(1, 1, positions, positions, dtype=torch.bool, device=part.embed_positions.device)
            part.register_buffer("causal_mask", mask, persistent=False)
            part._attn = types.MethodType(_masked, part)
        elif cloned and isinstance(part, torch.nn.Dropout) and part.p == 0.0:
            part.__dict__["forward"] = types.MethodType(lambda self, input: input.clone(), part)


def _masked(self: Any, query: Any, key: Any, value: Any, attention_mask: Any = None) -> tuple[Any, Any]:
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


def _forward(clamped: bool, cloned: bool) -> Any:
    def forward(
        self: Any, hidden_states: Any, past_key_values: Any = None, attention_mask: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        batch, length, width = hidden_states.size()
        heads, flat = self.num_heads, (batch * self.num_heads, -1, self.head_dim)

        def shaped(states: Any) -> Any:
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
        chance = self.dropout if self.training else 0.0
        probabilities = weights.clone() if cloned and chance == 0.0 else dropout(weights, p=chance, training=True)
        output = torch.bmm(probabilities, value)
        output = output.view(batch, heads, length, self.head_dim).transpose(1, 2)
        output = output.reshape(batch, length, width)
        return self.out_proj(output), present

    return forward
