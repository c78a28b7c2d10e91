"""Attention by xformers, as models call it: what stays after the forward, and the peaks of forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import xformers.ops
from xformers.ops.fmha import attn_bias

attend = xformers.ops.memory_efficient_attention


def said(name: str, call: Callable[[], torch.Tensor]) -> None:
    """Print what a call leaves and takes meanwhile, then its backward."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made = call()
    figures = [torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before]
    if made.requires_grad:
        torch.cuda.reset_peak_memory_stats()
        made.float().square().sum().backward()
        figures += [torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before]
    print(name, made.grad_fn is not None, *figures)


def by_bias(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    """Attention of tensors that are parts of one, and of three, with each kind of bias."""
    batch, rows, heads, head = shape
    whole = torch.ones(batch, rows, 3 * heads * head, dtype=dtype, device="cuda", requires_grad=True)
    biases: dict[str, object] = {
        "none": None,
        "lower": attn_bias.LowerTriangularMask(),
        "from the right": attn_bias.LowerTriangularFromBottomRightMask(),
        "tensor": torch.zeros(batch, heads, rows, rows, dtype=dtype, device="cuda"),
    }
    if dtype is torch.bfloat16:
        biases["window"] = attn_bias.LowerTriangularFromBottomRightLocalAttentionMask(64)
    if batch == 1:
        lengths = [rows // 4, rows // 2, rows // 4]
        biases["blocks"] = attn_bias.BlockDiagonalMask.from_seqlens(lengths)
        biases["lower blocks"] = attn_bias.BlockDiagonalCausalMask.from_seqlens(lengths)
    for (name, bias), dropout in itertools.product(biases.items(), (0.0, 0.1)):
        if dropout and name == "window":
            continue  # xformers has no backward for it

        def parts(of: Callable[..., object], bias: object = bias, dropout: float = dropout) -> torch.Tensor:
            return attend(*of(whole.reshape(batch, rows, 3, heads, head), 2), attn_bias=bias, p=dropout)

        def apart(bias: object = bias, dropout: float = dropout) -> torch.Tensor:
            return attend(*(torch.ones(shape, dtype=dtype, device="cuda") for _ in range(3)), bias, dropout)

        said(f"{dtype} {shape} {name} {dropout} parts", lambda: parts(torch.unbind))  # noqa: B023
        said(f"{dtype} {shape} {name} {dropout} parts of xformers", lambda: parts(xformers.ops.unbind))  # noqa: B023
        said(f"{dtype} {shape} {name} {dropout} apart", apart)


def others(dtype: torch.dtype) -> None:
    """SwiGLU, the norm that Triton computes, and heads folded into the batch."""
    source = torch.ones(8, 64, 256, dtype=dtype, device="cuda", requires_grad=True)
    gated = xformers.ops.SwiGLU(256, 512).cuda().to(dtype)
    norm = xformers.ops.RMSNorm(256).cuda().to(dtype)
    said(f"{dtype} gated", lambda: gated(source))
    with torch.no_grad():
        said(f"{dtype} norm", lambda: norm(source))
        said(f"{dtype} norm of a sum", lambda: norm.increment_and_forward_(source.clone(), source))
    said(f"{dtype} folded", lambda: attend(source, source, source))


for kind in (torch.bfloat16, torch.float32):
    for size in ((2, 512, 4, 64), (1, 1024, 2, 96), (2, 256, 3, 32)):
        by_bias(kind, size)
    others(kind)
