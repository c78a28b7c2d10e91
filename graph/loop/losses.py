"""Losses other than a model's own: that of transformers 4.29, and head and loss over parts of the sequence."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.functional import cross_entropy, pad

from graph.models.transformers_4_29.masks import like_transformers_4_29 as masks_of_4_29

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PARTS: Final = 8

#: Architectures whose classes in transformers 4.29 cast their logits to fp32 (modeling_codegen.py, modeling_gptj.py,
#: modeling_gpt_neo.py, "make sure ... fp32") and the loss back to the dtype of the hidden states.
_CAST_LOGITS: Final = frozenset({"codegen", "gptj", "gpt_neo"})


def like_transformers_4_29(
    extra: dict[str, Any], kind: str, module: PreTrainedModel, inputs: dict[str, Any]
) -> torch.Tensor:
    """Logits in the weights' dtype, a contiguous copy of all but the last position, cross-entropy.

    modeling_opt.py and its kin in transformers 4.29; `kind` is the model_type. The logits die with this call.
    """
    labels = inputs["labels"]
    given = {key: value for key, value in inputs.items() if key != "labels"}
    if kind in _CAST_LOGITS and given.get("attention_mask") is not None:
        mask = given["attention_mask"][:, None, None, :].to(module.dtype)  # one row for all queries, in those classes
        given["attention_mask"] = (1.0 - mask) * torch.finfo(module.dtype).min
        del mask
    if kind == "biogpt" and given.get("attention_mask") is not None:
        given["position_ids"] = _positions(given["attention_mask"])
    if kind == "gpt_bigcode" and given.get("attention_mask") is not None:
        given |= _causal(module, given["attention_mask"])
    with masks_of_4_29(kind, module):
        logits = module(**given, **extra).logits
    dtype = logits.dtype
    if kind in _CAST_LOGITS:
        logits = logits.to(torch.float32)
    # Python indexing of torch 2.0 takes both slices; later ones leave the full one out, and with it a node of backward.
    shifted = torch.ops.aten.slice(logits, 0) if kind == "biogpt" else logits  # [:, :-1, :] there, not [..., :-1, :]
    shifted = torch.ops.aten.slice(shifted[..., :-1, :], -1).contiguous()
    wanted = labels[..., 1:].contiguous()
    loss = cross_entropy(shifted.view(-1, shifted.size(-1)), wanted.view(-1))
    if kind == "gpt_neo":
        logits = logits.to(dtype)  # for the outputs, which nobody reads
    return loss.to(dtype) if kind in _CAST_LOGITS else loss


def _positions(mask: torch.Tensor) -> torch.Tensor:
    """Positions of BioGPT, [batch, length]: of each sequence its own (modeling_biogpt.py, 4.29)."""
    mask = mask.long()
    return (torch.cumsum(mask, dim=1).type_as(mask) * mask).long() - 1


def _causal(module: PreTrainedModel, mask: torch.Tensor) -> dict[str, Any]:
    """Mask [batch, length, 1, length] in bool and positions of GPT-BigCode (modeling_gpt_bigcode.py, 4.29)."""
    whole: Any = module.base_model
    positions = mask.long().cumsum(-1) - 1
    positions.masked_fill_(mask == 0, 1)
    batch, length = mask.shape
    causal = whole.bias[None, :length, :length] * mask.view(batch, 1, -1).to(dtype=torch.bool)
    return {"attention_mask": causal.unsqueeze(2 if whole.multi_query else 1), "position_ids": positions}


def chunked(extra: dict[str, Any], module: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
    """The loss of a model that `in_parts` has changed, however it is wrapped."""
    loss: torch.Tensor = module(**inputs, **extra)
    return loss


def in_parts(module: PreTrainedModel, *, checkpointed: bool) -> None:
    """Make a model's forward give the loss over 8 parts of the sequence, as a loop of one's own in it does.

    The head and a cross-entropy run on one part after another, each under checkpoint if asked for. The training script
    that is written for a case has the same function.
    """
    own = weakref.ref(module)

    def forward(labels: torch.Tensor, **given: object) -> torch.Tensor:
        return _in_parts(own(), checkpointed, labels, {key: value for key, value in given.items() if value is not None})

    module.forward = forward


def _in_parts(module: Any, checkpointed: bool, labels: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    hidden = module.base_model(**given).last_hidden_state
    head = module.get_output_embeddings()

    def part(states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits = head(states).float()
        if wanted.size(1) < states.size(1):  # nothing follows the last token
            wanted = pad(wanted, (0, 1), value=-100)
        return cross_entropy(logits.view(-1, logits.size(-1)), wanted.reshape(-1), reduction="sum")

    total: Any = 0
    size = -(-hidden.size(1) // PARTS)
    for states, wanted in zip(hidden.split(size, dim=1), torch.split(labels[:, 1:], size, dim=1), strict=False):
        if checkpointed:
            from torch.utils.checkpoint import checkpoint

            total = total + checkpoint(part, states, wanted, use_reentrant=False)
        else:
            total = total + part(states, wanted)
    result: torch.Tensor = total / labels[:, 1:].numel()
    return result
