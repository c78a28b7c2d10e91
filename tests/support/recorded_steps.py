"""A training step that was recorded with a CUDA build of PyTorch, to be run on the fake device.

`RECORDED` is what PyTorch 2.13.0+cu130 asked of its caching allocator during `half_precision_step()` (an A100;
torch.cuda.memory._record_memory_history; sizes in bytes, + birth, - death), without the workspace of cuBLAS (over
1 MiB) and the 288 bytes that summing 36 booleans takes inside its kernel, as `runs` orders them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Final

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

RECORDED: Final = """
+6400 +6400 -6400 +160 +160 +240 +288 +480 +480 +864 +864 +2880 +2880 +3200 +5760 +6400 +6400 +8640 +9600 +19200
+19200 -864 +144 +144 -144 +144 +1728 +1728 -144 -1728 +1728 -1728 +432 +864 +864 -432 -864 +2880 -864 +80 +2880 +3200
-2880 +2880 -144 -864 -1728 -2880 -8640 +240 +864 +864 +8640 +9600 -864 +144 +144 -144 +144 +1728 +1728 -144 -1728
+1728 -1728 +432 +864 +864 -432 -864 +2880 -864 +80 +2880 +3200 -2880 +2880 -144 -864 -1728 -2880 -8640 +2880 +5760
-2880 +4 +4 +144 +144 +5760 -144 +4 +4 +8 +36 +36 -4 -36 +4 +4 +4 -4 -4 -4 -4 -80 -80 -144 -240 -240 -3200 -3200 -5760
-9600 -9600 +4 +4 +4 +4 +4 +4 +4 -4 +4 -4 -8 +144 -4 -36 +144 -144 +5760 -4 -4 +5760 -144 -5760 +5760 -5760 -5760
+2880 -5760 +2880 +3200 -2880 -2880 -3200 +240 +864 +864 +8640 +9600 -864 +144 +144 -144 +144 +1728 +1728 -1728 +1728
-1728 +432 +864 +864 -864 +80 +2880 +2880 +2880 +3200 -80 -144 -240 -864 -2880 +80 +2880 +3200 -2880 -3200 +6400 -3200
+160 -80 +864 +2880 -864 -2880 +864 -432 -864 +1728 -864 +1728 -1728 -1728 +1728 -144 -1728 +864 -1728 +864 -864 +2880
+2880 -864 -8640 +8640 -2880 -2880 -2880 +240 +2880 +9600 -8640 -9600 +2880 -2880 +19200 -9600 +480 -240 -2880 -2880
-2880 +240 +864 +864 +8640 +9600 -864 +144 +144 -144 +144 +1728 +1728 -1728 +1728 -1728 +432 +864 +864 -864 +80 +2880
+2880 +2880 +3200 -80 -144 -240 -864 -2880 +80 +2880 +3200 -2880 -3200 +6400 -3200 +160 -80 +864 +2880 -864 -2880 +864
-432 -864 +1728 -864 +1728 -1728 -1728 +1728 -144 -1728 +864 -1728 +864 -864 +2880 +2880 -864 -8640 +8640 -2880 -2880
-2880 +240 +2880 +9600 -8640 -9600 +2880 -2880 +19200 -9600 +480 -240 -2880 -2880 -2880 +3200 -2880 -2880 +3200 -3200
-3200 +6400 -4 -4 -3200 +8 +8 -8 +4 -8 +4 +4 +4 -4 -4 -4 +160 +160 +480 +480 +6400 +6400 +6400 +19200 +19200 -4 -4
-160 -160 -288 -480 -480 -5760 -6400 -6400 -6400 -19200 -19200 +240 +288 +864 +864 +2880 +2880 +3200 +5760 +8640 +9600
-864 +144 +144 -144 +144 +1728 +1728 -144 -1728 +1728 -1728 +432 +864 +864 -432 -864 +2880 -864 +80 +2880 +3200 -2880
+2880 -144 -864 -1728 -2880 -8640 +240 +864 +864 +8640 +9600 -864 +144 +144 -144 +144 +1728 +1728 -144 -1728 +1728
-1728 +432 +864 +864 -432 -864 +2880 -864 +80 +2880 +3200 -2880 +2880 -144 -864 -1728 -2880 -8640 +2880 +5760 -2880 +4
+4 +144 +144 +5760 -144 +4 +4 +8 +36 +36 -4 -36 +4 +4 +4 -4 -4 -4 -4 -80 -80 -144 -240 -240 -3200 -3200 -5760 -9600
-9600 +4 +4 +4 +4 +4 -4 +4 -4 -8 +144 -4 -36 +144 -144 +5760 -4 -4 +5760 -144 -5760 +5760 -5760 -5760 +2880 -5760
+2880 +3200 -2880 -2880 -3200 +240 +864 +864 +8640 +9600 -864 +144 +144 -144 +144 +1728 +1728 -1728 +1728 -1728 +432
+864 +864 -864 +80 +2880 +2880 +2880 +3200 -80 -144 -240 -864 -2880 +80 +2880 +3200 -2880 -3200 +6400 -3200 +160 -80
+864 +2880 -864 -2880 +864 -432 -864 +1728 -864 +1728 -1728 -1728 +1728 -144 -1728 +864 -1728 +864 -864 +2880 +2880
-864 -8640 +8640 -2880 -2880 -2880 +240 +2880 +9600 -8640 -9600 +2880 -2880 +19200 -9600 +480 -240 -2880 -2880 -2880
+240 +864 +864 +8640 +9600 -864 +144 +144 -144 +144 +1728 +1728 -1728 +1728 -1728 +432 +864 +864 -864 +80 +2880 +2880
+2880 +3200 -80 -144 -240 -864 -2880 +80 +2880 +3200 -2880 -3200 +6400 -3200 +160 -80 +864 +2880 -864 -2880 +864 -432
-864 +1728 -864 +1728 -1728 -1728 +1728 -144 -1728 +864 -1728 +864 -864 +2880 +2880 -864 -8640 +8640 -2880 -2880 -2880
+240 +2880 +9600 -8640 -9600 +2880 -2880 +19200 -9600 +480 -240 -2880 -2880 -2880 +3200 -2880 -2880 +3200 -3200 -3200
+6400 -4 -4 -3200 +8 +8 -8 +4 -8 +4 +4 +4 -4 -4 -4 -4 -4 -4 -4 -160 -160 -160 -160 -160 -160 -288 -480 -480 -480 -480
-480 -480 -5760 -6400 -6400 -6400 -6400 -6400 -6400 -6400 -6400 -6400 -19200 -19200 -19200 -19200 -19200 -19200
"""


class _Mixer(nn.Module):
    """Tokens mixed by gates instead of a softmax, whose backward has scratch memory inside its kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(40, 120, device="cuda")
        self.out = nn.Linear(40, 40, device="cuda")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Same shape as `hidden`."""
        query, key, value = self.qkv(hidden).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / 6.0
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").tril()
        weights = torch.sigmoid(scores.float().masked_fill(~causal, -1e4))
        mixed: torch.Tensor = self.out(functional.dropout(weights.to(value.dtype), 0.1) @ value)
        return hidden + mixed


def half_precision_step() -> None:
    """Two steps of SGD with momentum under fp16 autocast and a GradScaler, with reentrant checkpointing."""
    first = nn.Linear(40, 40, bias=False, device="cuda")
    last = nn.Linear(40, 40, bias=False, device="cuda")
    last.weight = first.weight
    blocks = [_Mixer() for _ in range(2)]
    modules = nn.ModuleList([first, *blocks, last])
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    for _ in range(2):
        inputs = torch.zeros(3, 12, 40).to("cuda")
        targets = torch.zeros(36, dtype=torch.long).to("cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            hidden = first(inputs)
            for block in blocks:
                hidden = checkpoint(block, hidden, use_reentrant=True)
            loss = functional.cross_entropy(last(hidden).flatten(0, 1).float(), targets, label_smoothing=0.1)
        del hidden
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        del loss, inputs, targets


def runs(events: Iterable[str]) -> list[str]:
    """`events` with births that follow one another, and deaths that do, sorted by size.

    Two outputs of one kernel come in either order, and autocast drops its casts in the order of their addresses.
    """
    return [
        event
        for _, run in groupby(events, key=lambda event: event[0])
        for event in sorted(run, key=lambda e: int(e[1:]))
    ]
