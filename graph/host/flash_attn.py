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

from graph.workspaces.attention import flash_parts, flash_rows
from graph.workspaces.metadata import upper

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
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    splits = flash_parts(batch, heads, rows, columns, head, processors)
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
    if not dropout:
        rows, heads = flash_rows(rows, heads, key_heads)
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
    rows, heads = flash_rows(rows, heads, key_heads)
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


def _backward(
    operands: Sequence[torch.Tensor], made: Sequence[Optional], *sums: int, rows: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    """dQ, dK, dV and the sums by row, of this shape; dQ's accumulator, whose rows are so, is gone again."""
    q, k, _ = operands
    gradients = _gradients(operands, made)
    by_row = _float(q, *sums)
    accumulated = _float(q, *rows, q.shape[-2], _rounded(q.shape[-1]))
    _summed(q, k, *gradients[1:])
    del accumulated
    return (*gradients, by_row)


def _bwd(_dout: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Arguments: q, k, v, the output and its logsumexp, dQ, dK, dV or None, and more."""
    batch, rows, heads, _ = rest[0].shape
    rounded = upper(rows, 128)
    return _backward(rest[:3], rest[5:8], batch, heads, rounded, rows=(batch, rounded))


def _varlen_bwd(_dout: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As `_bwd`, and where the sequences begin among the query's rows."""
    rows = rest[0].shape[0] + 128 * (len(rest[8]) - 1)
    return _backward(rest[:3], rest[5:8], rest[0].shape[1], rows, rows=(rows,))
