"""flash-attn's compiled extension, which needs CUDA to be built: it allocates what it would, and computes nothing.

flash-attn's own Python code runs (`pip install` of it with FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE brings it); what that
calls is `flash_attn_2_cuda`, whose five functions stand here. Their allocations, in order, are those of
csrc/flash_attn/flash_api.cpp of flash-attn 2.7.3 (`mha_fwd`, `mha_varlen_fwd`, `mha_bwd`, `mha_varlen_bwd`,
`mha_fwd_kvcache`). Tensors are (batch, rows, heads, head), or (rows of all, heads, head) where lengths vary.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final

import torch

from graph.workspaces.attention import flash_splits
from graph.workspaces.metadata import up, upper

NAME: Final = "flash_attn_2_cuda"
Optional = torch.Tensor | None
Made = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def wanted() -> bool:
    """Whether flash-attn is installed, and its extension is not."""
    return importlib.util.find_spec("flash_attn") is not None and importlib.util.find_spec(NAME) is None


def module() -> ModuleType:
    """What `import flash_attn_2_cuda` gives."""
    made = ModuleType(NAME, __doc__)
    vars(made).update(fwd=_fwd, varlen_fwd=_varlen_fwd, bwd=_bwd, varlen_bwd=_varlen_bwd, fwd_kvcache=_fwd_kvcache)
    return made


def _rounded(head: int) -> int:
    return upper(head, 32) if head <= 192 else 256


def _float(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _split(q: torch.Tensor, batch: int, heads: int, rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    """`set_params_splitkv`: fp32 sums of each split of the keys, where the rows alone would not fill the card."""
    head = q.shape[-1]
    block = 256 if head <= 64 else 128 if head <= 128 else 64
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    splits = flash_splits(batch * heads * up(rows, 64), 2 * processors, up(columns, block))
    if splits <= 1:
        return ()
    return _float(q, splits, batch, heads, rows), _float(q, splits, batch, heads, rows, _rounded(head))


def _rest(q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *split: int) -> Made:
    """The empty probabilities, the sums of split keys (gone when the kernel has been launched), the random state."""
    p = torch.empty(0, dtype=q.dtype, device=q.device)
    sums = _split(q, *split) if split else ()
    state = torch.empty(2, dtype=torch.int64, device=q.device)
    del sums
    return out, lse, p, state


def _fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, *rest: Any) -> Made:
    batch, rows, heads, _ = q.shape
    columns, key_heads = k.shape[1:3]
    dropout = float(rest[1])
    if rows == 1 and heads > key_heads and not dropout:  # a single row of grouped heads is a row a group
        rows, heads = heads // key_heads, key_heads
    out = torch.empty_like(q) if out is None else out
    lse = _float(q, batch, heads, rows)
    return _rest(q, out, lse, *(() if dropout else (batch, heads, rows, columns)))


def _varlen_fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, *rest: object) -> Made:
    total, heads, _ = q.shape
    out = torch.empty_like(q) if out is None else out
    return _rest(q, out, _float(q, heads, total))


def _fwd_kvcache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    batch, rows, heads, _ = q.shape
    columns, key_heads = k.shape[1:3]
    if rows == 1 and heads > key_heads:
        rows, heads = heads // key_heads, key_heads
    out = torch.empty_like(q)
    lse = _float(q, batch, heads, rows)
    _split(q, batch, heads, rows, columns)
    return out, lse


def _gradients(operands: Sequence[torch.Tensor], made: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """dQ, dK and dV: those that the caller has made, or new ones."""
    return [torch.empty_like(one) if done is None else done for one, done in zip(operands, made, strict=True)]


def _summed(q: torch.Tensor, k: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> None:
    """Grouped heads: dK and dV by head of the query, then summed."""
    heads, key_heads, head = q.shape[-2], k.shape[-2], q.shape[-1]
    if heads == key_heads:
        return
    shape = (*k.shape[:-2], heads, head)
    by_head = [torch.empty(shape, dtype=k.dtype, device=k.device) for _ in (dk, dv)]
    for one, out in zip(by_head, (dk, dv), strict=True):
        torch.sum(one.view(*k.shape[:-2], key_heads, heads // key_heads, head), dim=-2, out=out)


def _bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dq: Optional,
    dk: Optional,
    dv: Optional,
    *rest: object,
) -> tuple[torch.Tensor, ...]:
    batch, rows, heads, head = q.shape
    rounded = upper(rows, 128)
    gradients = _gradients((q, k, v), (dq, dk, dv))
    sums = _float(q, batch, heads, rounded)
    accumulated = _float(q, batch, rounded, heads, _rounded(head))
    _summed(q, k, *gradients[1:])
    del accumulated
    return (*gradients, sums)


def _varlen_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dq: Optional,
    dk: Optional,
    dv: Optional,
    cu_seqlens_q: torch.Tensor,
    *rest: object,
) -> tuple[torch.Tensor, ...]:
    total, heads, head = q.shape
    rows = total + 128 * (len(cu_seqlens_q) - 1)
    gradients = _gradients((q, k, v), (dq, dk, dv))
    sums = _float(q, heads, rows)
    accumulated = _float(q, rows, heads, _rounded(head))
    _summed(q, k, *gradients[1:])
    del accumulated
    return (*gradients, sums)
