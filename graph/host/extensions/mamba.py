"""The compiled extensions of mamba-ssm and causal-conv1d, which need CUDA to be built: they allocate what they would,
and compute nothing.

Their Python code runs, and so do mamba-ssm's Triton kernels (`pip install` of them with MAMBA_SKIP_CUDA_BUILD=TRUE and
CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE). Allocations, in order, are those of csrc/selective_scan/selective_scan.cpp of
mamba-ssm 2.3 and of csrc/causal_conv1d.cpp of causal-conv1d 1.6 (from 1.5 on results are given to it; before, it made
them). Sequences are (batch, channels, length).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Final

import torch

from graph.workspaces.metadata import up

#: Steps of a sequence after which the scan keeps a state.
_CHUNK: Final = 2048
#: Arguments after the first of a convolution before 1.5.
_OLD: Final = 6
Optional = torch.Tensor | None


def scans() -> Mapping[str, Mapping[str, Callable[..., object]]]:
    """The functions of mamba-ssm's extension, by its name and theirs."""
    return {"selective_scan_cuda": {"fwd": _scan, "bwd": _scan_backward}}


def convolutions() -> Mapping[str, Mapping[str, Callable[..., object]]]:
    """The functions of causal-conv1d's extension, by its name and theirs."""
    return {
        "causal_conv1d_cuda": {
            "causal_conv1d_fwd": _convolution,
            "causal_conv1d_bwd": _convolution_backward,
            "causal_conv1d_update": _update,
        },
    }


def _scan(
    source: torch.Tensor,
    delta: torch.Tensor,
    decay: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
    skip: Optional,
    gate: Optional,
    *rest: object,
) -> list[torch.Tensor]:
    """The output, the states at the end of each chunk, and with a gate (`z`) the gated output."""
    gated = [] if gate is None else [torch.empty_like(gate)]
    out = torch.empty_like(delta)
    batch, channels, length = source.shape
    return [out, decay.new_empty(batch, channels, up(length, _CHUNK), 2 * decay.shape[1]), *gated]


def _scan_backward(
    source: torch.Tensor,
    delta: torch.Tensor,
    decay: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
    skip: Optional,
    gate: Optional,
    bias: Optional,
    gradient: torch.Tensor,
    states: Optional,
    out: Optional,
    of_gate: Optional,
    softplus: bool,
    again: bool,
) -> list[Optional]:
    """Gradients, those of `into` and `out_of` (B and C) in fp32 first where they vary along the sequence, and what the
    gated output is computed `again` into."""
    if gate is not None and of_gate is None:
        of_gate = torch.empty_like(gate)
    computed = [] if gate is None or out is None or not again else [torch.empty_like(out)]
    made = [torch.empty_like(source), torch.empty_like(delta), torch.zeros_like(decay)]
    sums = [torch.zeros_like(one, dtype=torch.float32 if one.ndim > 2 else one.dtype) for one in (into, out_of)]
    small = [None if one is None else torch.zeros_like(one) for one in (skip, bias)]
    cast = [one.to(like.dtype) for one, like in zip(sums, (into, out_of), strict=True)]
    return [*made, *cast, *small, *([] if gate is None else [of_gate]), *computed]


def _convolution(source: torch.Tensor, *rest: object) -> Optional:
    """Before 1.5, where no result is among the arguments, it makes one."""
    return torch.empty_like(source) if len(rest) == _OLD else None


def _update(source: torch.Tensor, *rest: object) -> Optional:
    """The same of one step: the result would stand after the bias."""
    return None if isinstance(rest[3], torch.Tensor) else torch.empty_like(source)


def _convolution_backward(
    source: torch.Tensor, weight: torch.Tensor, bias: Optional, gradient: torch.Tensor, *rest: object
) -> list[Optional] | None:
    """A gradient that lies otherwise is copied, before 1.5 into results that it makes."""
    last = source.stride(1) == 1 and source.stride(2) > 1
    copied = gradient if gradient.stride(1 if last else 2) == 1 else (gradient.mT if last else gradient).contiguous()
    made = None
    if isinstance(rest[4], bool):  # before 1.5: whether the state before the sequence has a gradient
        made = _gradients(source, weight, bias, rest[3], rest[4])
    elif _is_deterministic():
        _sum_of_parts(source, weight, bias, last)
    del copied
    return made


def _gradients(
    source: torch.Tensor, weight: torch.Tensor, bias: Optional, given: object, first: bool
) -> list[Optional]:
    """Gradients of the sequence, which may be `given`, of weight and bias, summed in fp32, and of its first state."""
    made = given if isinstance(given, torch.Tensor) else torch.empty_like(source)
    sums = [None if one is None else torch.zeros_like(one, dtype=torch.float32) for one in (weight, bias)]
    state = source.new_empty(source.shape[0], weight.shape[1] - 1, source.shape[1]).mT if first else None
    return [made, *(None if one is None else one.to(weight.dtype) for one in sums), state]


def _is_deterministic() -> bool:
    said = os.environ.get("CAUSAL_CONV1D_DETERMINISTIC", "")[:1]
    return said == "1" or (said != "0" and torch.are_deterministic_algorithms_enabled())


def _sum_of_parts(source: torch.Tensor, weight: torch.Tensor, bias: Optional, last: bool) -> None:
    """Each part of a batch has its own sums in fp32: a sequence, or where channels lie last 64 or 128 steps of it."""
    batch, channels, length = source.shape
    parts = [batch, up(length, 64 if length <= 128 else 128)] if last else [batch]
    of = [one for one in (weight, bias) if one is not None]
    sums = [source.new_zeros((*parts, channels, *one.shape[1:]), dtype=torch.float32) for one in of]
    for one in sums:
        one.sum(tuple(range(len(parts))))
