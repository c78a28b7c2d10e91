"""The operators of attention by token, as xformers and nested tensors call them: what each keeps, and its peak."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

FLASH, EFFICIENT = torch.ops.aten._flash_attention_forward, torch.ops.aten._efficient_attention_forward
BACKWARD = torch.ops.aten._efficient_attention_backward


def said(name: str, call: Callable[[], object]) -> None:
    """Print what a call makes, keeps and takes meanwhile."""
    before, count = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.reset_peak_memory_stats()
    made = call()
    results = [(tuple(one.shape), one.stride(), one.device.type) for one in made if isinstance(one, torch.Tensor)]
    kept, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    print(name, results, kept, peak, torch.cuda.memory_stats()["allocation.all.allocated"] - count)


def efficient(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    """The efficient kernel and its backward, with and without a bias, windows, and gradients that share a tensor."""
    batch, rows, heads, _ = shape
    query, key, value = (torch.ones(shape, dtype=dtype, device="cuda") for _ in range(3))
    bias = torch.zeros(batch, heads, rows, -(-rows // 32) * 32, dtype=dtype, device="cuda")[..., :rows]
    for added, (mask, window), dropout in itertools.product((None, bias), ((0, None), (1, None), (1, 64)), (0.0, 0.1)):
        of = (query, key, value, added)
        name = f"{dtype} {shape[1:]} {'bias' if added is not None else 'none'} {mask} {window} {dropout}"
        said(f"{name} forward", lambda: EFFICIENT(*of, None, None, -1, -1, dropout, mask, False, window_size=window))
        out, sums, *seeds, _, _ = EFFICIENT(*of, None, None, -1, -1, dropout, mask, True, window_size=window)
        if not dropout:
            seeds = [torch.Tensor(), torch.Tensor()]
        for wanted, shared in itertools.product((False, True) if added is not None else (False,), (False, True)):
            rest = (out, None, None, rows, rows, sums, dropout, *seeds, mask, wanted)
            with_options = {"scale": 0.5, "window_size": window, "shared_storage_dqdkdv": shared}
            said(f"{name} backward {wanted} {shared}", lambda: BACKWARD(out, *of, *rest, **with_options))


def flash(head: int) -> None:
    """The flash kernel, of batches and of packed sequences."""
    query = torch.ones(2, 512, 2, head, dtype=torch.bfloat16, device="cuda")
    packed = query.flatten(0, 1)
    starts = torch.tensor([0, 300, 512, 1024], device="cuda", dtype=torch.int32)
    for dropout in (0.0, 0.1):
        rest = (512, 512, dropout, False, False)
        said(f"flash {head} {dropout}", lambda: FLASH(query, query, query, None, None, *rest))
        said(f"packed {head} {dropout}", lambda: FLASH(packed, packed, packed, starts, starts, *rest))


for kind, size in itertools.product((torch.float32, torch.bfloat16), ((2, 100, 4, 64), (1, 512, 2, 128))):
    efficient(kind, size)
for width in (64, 96):
    flash(width)
