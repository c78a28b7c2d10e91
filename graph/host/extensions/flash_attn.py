"""flash-attn's compiled extensions, which need CUDA to be built: they allocate what they would, and compute nothing.

flash-attn's own Python code runs (`pip install` of it with FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE brings it); what that
calls is `flash_attn_2_cuda`, whose five functions stand here. Their allocations, in order, are those of
csrc/flash_attn/flash_api.cpp of flash-attn 2.7.3 (`mha_fwd`, `mha_varlen_fwd`, `mha_bwd`, `mha_varlen_bwd`,
`mha_fwd_kvcache`). Tensors are (batch, rows, heads, head), or (rows of all, heads, head) where lengths vary. Up to 2.6
forwards give back their padded operands too, and up to 2.5 sums of varying lengths have rows of the longest (the same
file of v2.3.4 to v2.7.0.post2).
`dropout_layer_norm` is its layer norm and RMS norm, of (rows, hidden): csrc/layer_norm/ln_api.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch

from graph.workspaces.attention import flash_parts, flash_rows
from graph.workspaces.metadata import upper

#: Blocks of the norm's backward that a processor holds: what its registers allow where rows are wide.
_BLOCKS: Final = 2
Optional = torch.Tensor | None
Made = tuple[torch.Tensor, ...]


@cache
def _release() -> tuple[int, ...]:
    """flash-attn's installed release; that of the sources where its metadata is missing."""
    try:
        return tuple(int(part) for part in re.findall(r"\d+", version("flash-attn"))[:3])
    except PackageNotFoundError:
        return (2, 7, 3)


def functions() -> Mapping[str, Mapping[str, Callable[..., object]]]:
    """The functions of each extension, by its name and theirs."""
    return {
        "flash_attn_2_cuda": {
            "fwd": _fwd,
            "varlen_fwd": _varlen_fwd,
            "bwd": _bwd,
            "varlen_bwd": _varlen_bwd,
            "fwd_kvcache": _fwd_kvcache,
        },
        "dropout_layer_norm": {"dropout_add_ln_fwd": _norm_fwd, "dropout_add_ln_bwd": _norm_bwd},
    }


def _rounded(head: int) -> int:
    return upper(head, 32) if head <= 192 else 256


def single(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Numbers of single precision, beside a tensor."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _split(q: torch.Tensor, batch: int, heads: int, rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    """`set_params_splitkv`: fp32 sums of each split of the keys, where the rows alone would not fill the card."""
    head = q.shape[-1]
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    at_once = 2 if _release() >= (2, 5, 7) else 1
    splits = flash_parts(batch, heads, rows, columns, head, processors, at_once)
    if splits <= 1:
        return ()
    return single(q, splits, batch, heads, rows), single(q, splits, batch, heads, rows, _rounded(head))


def _rest(q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *split: int) -> Made:
    """The empty probabilities, the sums of split keys (gone when the kernel has been launched), the random state."""
    p = torch.empty(0, dtype=q.dtype, device=q.device)
    sums = _split(q, *split) if split else ()
    state = torch.empty(2, dtype=torch.int64, device=q.device)
    del sums
    return out, lse, p, state


def _number(kind: type, rest: Sequence[object]) -> Any:
    """The first of this kind: dropout's probability, the longest query's rows; more tensors stand before them from
    release to release."""
    return next(one for one in rest if type(one) is kind)


def _padded(one: torch.Tensor) -> torch.Tensor:
    """Heads of a multiple of 8, as up to 2.6 the extension makes them; later its Python side does."""
    lacking = -one.shape[-1] % 8
    return torch.nn.functional.pad(one, [0, lacking]) if lacking and _release() < (2, 7) else one


def _returned(made: Made, head: int, *operands: torch.Tensor) -> Made:
    """What a forward gives back: up to 2.6 with its operands, and the output that has their heads."""
    if _release() >= (2, 7):
        return made
    out, lse, p, state = made
    return (out[..., :head], *operands, out, lse, p, state)


def _fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, *rest: object) -> Made:
    head = q.shape[-1]
    q, k, v = map(_padded, (q, k, v))
    batch, rows, heads, _ = q.shape
    columns, key_heads = k.shape[1:3]
    dropout = _number(float, rest)
    if not dropout:
        rows, heads = flash_rows(rows, heads, key_heads)
    out = torch.empty_like(q) if out is None else out
    lse = single(q, batch, heads, rows)
    return _returned(_rest(q, out, lse, *(() if dropout else (batch, heads, rows, columns))), head, q, k, v)


def _varlen_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, ends: torch.Tensor, *rest: object
) -> Made:
    head = q.shape[-1]
    q, k, v = map(_padded, (q, k, v))
    total, heads, _ = q.shape
    out = torch.empty_like(q) if out is None else out
    sums = (heads, total) if _release() >= (2, 6) else (len(ends) - 1, heads, _number(int, rest))
    return _returned(_rest(q, out, single(q, *sums)), head, q, k, v)


def _fwd_kvcache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    batch, rows, heads, _ = q.shape
    columns, key_heads = k.shape[1:3]
    rows, heads = flash_rows(rows, heads, key_heads)
    out = torch.empty_like(q)
    lse = single(q, batch, heads, rows)
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
    by_row = single(q, *sums)
    accumulated = single(q, *rows, q.shape[-2], _rounded(q.shape[-1]))
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
    count, heads = len(rest[8]) - 1, rest[0].shape[1]
    rows = rest[0].shape[0] + 128 * count
    sums = (heads, rows) if _release() >= (2, 6) else (count, heads, upper(_number(int, rest), 128))
    return _backward(rest[:3], rest[5:8], *sums, rows=(rows,))


def _norm_fwd(
    x0: torch.Tensor,
    residual: Optional,
    _gamma: torch.Tensor,
    _beta: Optional,
    rowscale: Optional,
    colscale: Optional,
    x0_subset: Optional,
    _z_subset: Optional,
    dropout: float,
    _epsilon: float,
    _scale: float,
    _rows: int,
    _generator: object,
    in_fp32: bool = False,
    _rms: bool = False,
) -> tuple[Optional, ...]:
    """The norm, the sum that it is of, dropout's mask, the mean and the inverse deviation of each row.

    Raises NotImplementedError where it is taken of a subset of the rows.
    """
    if x0_subset is not None:
        raise NotImplementedError("flash-attn's layer norm of a subset of the rows is not recorded")
    dtype = residual.dtype if residual is not None else torch.float32 if in_fp32 else x0.dtype
    changed = residual is not None or dropout > 0 or rowscale is not None or colscale is not None or dtype != x0.dtype
    x = torch.empty_like(x0, dtype=dtype) if changed else None
    mask = torch.empty_like(x0, dtype=torch.uint8) if dropout > 0 else None
    z = torch.empty_like(x0)
    return z, x, mask, single(x0, len(x0)), single(x0, len(x0))


def _norm_bwd(
    dz: torch.Tensor,
    _dx: Optional,
    x: torch.Tensor,
    _x0: Optional,
    _mask: Optional,
    _mean: torch.Tensor,
    _inverse: torch.Tensor,
    gamma: torch.Tensor,
    _rowscale: Optional,
    colscale: Optional,
    _x0_subset: Optional,
    _z_subset: Optional,
    _dropout: float,
    _scale: float,
    _rows: int,
    has_residual: bool,
    _rms: bool = False,
) -> tuple[Optional, ...]:
    """The gradients of both operands and of the weights, with the weights' sums by block of rows."""
    dx0 = torch.empty_like(x, dtype=dz.dtype)
    dresidual = torch.empty_like(x) if has_residual else None
    weights = [gamma, gamma] if colscale is None else [gamma, gamma, colscale]
    gradients = [torch.empty_like(one) for one in weights]
    blocks = _BLOCKS * torch.cuda.get_device_properties(x.device).multi_processor_count
    parts = [single(x, blocks, gamma.numel()) for _ in weights]
    return dx0, dresidual, *gradients[:2], *parts[:2], *gradients[2:], *parts[2:]
