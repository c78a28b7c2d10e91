"""Causal masks as transformers 4.29 made them once for all layers, for cases with the loss of that time.

transformers 5 makes its own from index ranges, of other sizes: the largest temporaries between embeddings and layers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch

#: The function by which models of transformers 5 make their mask.
NAME: Final = "create_causal_mask"


@contextmanager
def like_transformers_4_29(kind: str, module: torch.nn.Module) -> Iterator[None]:
    """Within it the forward of `module` makes its mask by 4.29's code, where `kind` (model_type) is one known here."""
    form = _FORMS.get(kind)
    home = sys.modules[type(module).__module__]
    own = getattr(home, NAME, None)
    if form is None or own is None:
        yield
        return
    setattr(home, NAME, form)
    try:
        yield
    finally:
        setattr(home, NAME, own)


def _additive(*, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, **_: object) -> torch.Tensor:
    """A sum of two masks [batch, 1, length, length] in the dtype of the model (modeling_opt.py and its kin)."""
    batch, length = inputs_embeds.shape[:2]
    dtype, device = inputs_embeds.dtype, inputs_embeds.device
    if attention_mask is None:
        attention_mask = torch.ones(batch, length, dtype=torch.bool, device=device)
    causal = _least_above(length, dtype, device)[None, None].expand(batch, 1, length, length)
    return _least_where_padded(attention_mask, length, dtype) + causal


def _least_above(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    least = _from_host(torch.finfo(dtype).min, device)
    mask = torch.full((length, length), torch.finfo(dtype).min, device=device)
    del least  # its value is read by the host
    positions = torch.arange(length, device=device)
    mask.masked_fill_(positions < (positions + 1).view(length, 1), 0)
    mask = mask.to(dtype)
    return mask


def _least_where_padded(mask: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    expanded = mask[:, None, None, :].expand(len(mask), 1, length, length).to(dtype)
    inverted = 1.0 - expanded
    return inverted.masked_fill(inverted.to(torch.bool), torch.finfo(dtype).min)


def _from_host(value: float, device: torch.device) -> torch.Tensor:
    """A value made on the host: the host waits for its copy."""
    return torch.tensor(value, dtype=torch.float32).to(device)


def _boolean(*, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, **_: object) -> torch.Tensor:
    """True where attention must not go, [batch, 1, length, length] (modeling_bloom.py)."""
    batch, length = inputs_embeds.shape[:2]
    device = inputs_embeds.device
    _from_host(1.0, device)  # the base of alibi's slopes, right before
    if attention_mask is None:
        attention_mask = torch.ones(batch, length, device=device)
    causal = torch.empty(length, length, dtype=torch.bool, device=device)
    positions = torch.arange(length, device=device)
    causal[:, 0:] = positions[:, None] < positions[None, :]
    padded = ~attention_mask[:, None, None, :].to(torch.bool)
    return padded.expand(batch, 1, length, length) | causal[None, None].expand(batch, 1, length, length)


_FORMS: Final[Mapping[str, Callable[..., torch.Tensor]]] = {
    "opt": _additive,
    "biogpt": _additive,
    "llama": _additive,
    "bloom": _boolean,
}
