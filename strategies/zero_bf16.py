"""DeepSpeed's BF16_Optimizer: stage 1 in bf16 with gradients summed in fp32, all of them on every rank.

After each backward pass the gradients are added to one flat tensor, which is reduced at the end of a step; each rank
updates its share of the parameters (deepspeed/runtime/bf16_optimizer.py of DeepSpeed 0.19.8).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from strategies import zero_norm as norms
from strategies.zero_flat import MakeOptimizer, aligned, flatten
from strategies.zero_settings import Settings


class Bf16:
    """One rank's optimizer. `parameters` are on the device; `make` makes the optimizer inside."""

    scale = 1.0
    micro = 0

    def __init__(self, settings: Settings, parameters: list[torch.nn.Parameter], make: MakeOptimizer) -> None:
        self.settings = settings
        self.parameters = parameters
        self.device = parameters[0].device
        self.boundary = True
        self.flat = aligned(parameters, 2 * settings.world)
        begin = 0
        for parameter in parameters:
            parameter.data = self.flat.narrow(0, begin, parameter.numel()).view(parameter.shape).data
            begin += parameter.numel()
        share = self.flat.numel() // settings.world
        self.mine = self.flat.narrow(0, settings.rank * share, share)
        master: Any = self.mine.clone().float().detach().requires_grad_()
        self.master: torch.nn.Parameter = master
        self.gradients = torch.zeros_like(self.flat, dtype=torch.float32)
        sizes = [parameter.numel() for parameter in parameters]
        self.parts = list(torch.split(self.gradients.narrow(0, 0, sum(sizes)), sizes))
        self.my_gradients = self.gradients.narrow(0, settings.rank * share, share)
        self.optimizer = make([master])
        self.norm: torch.Tensor | None = None
        self.noted: torch.Tensor | None = None

    def forward_begins(self) -> None:
        """What a forward pass clears before it runs: nothing here."""

    def backward_begins(self) -> None:
        """What is left of the gradients of the last micro-batch is set to zero."""
        left = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if left:
            torch._foreach_zero_(left)

    @torch.no_grad()
    def backward_ends(self) -> None:
        """Add the gradients up in fp32; reduce the sums after the last micro-batch."""
        for parameter, total in zip(self.parameters, self.parts, strict=True):
            if parameter.grad is not None:
                total.data.add_(parameter.grad.data.to(total.dtype).view(total.shape))
        if self.boundary:
            self._reduce()

    def _reduce(self) -> None:
        flat = flatten([self.gradients])
        sent = flat.to(torch.bfloat16)
        dist.all_reduce(sent)
        if self.settings.world != 1:
            sent.mul_(1.0 / self.settings.world)
        flat.copy_(sent)
        del sent
        self.gradients.copy_(flat)

    @property
    def state(self) -> dict[Any, Any]:
        """The states of the optimizer inside."""
        return dict(self.optimizer.state)

    @torch.no_grad()
    def step(self) -> None:
        """Norm, clipping, update of this rank's share, all shares gathered; sums back to zero."""
        self.norm = self._norm()
        norms.invalid(self.norm)
        if self.settings.clip > 0.0:
            self._clip(self.norm)
        self.master.grad = self.my_gradients
        self.optimizer.step()
        self.mine.data.copy_(self.master.data)
        if self.settings.world > 1:
            norms.gather_shares(self.flat, self.mine)
        self.gradients.zero_()
        self.noted = self.norm
        self.zero_grad()
        self.gradients.zero_()

    def _norm(self) -> torch.Tensor:
        found = []
        for part in self.parts:
            found.append(part.detach().float().norm(2.0).to(self.device))
        powers = torch.stack(found).pow(2.0)
        total = powers.sum()
        norm = total.to(self.device).pow(0.5)
        norms.mask_invalid(norm)
        return norm

    def _clip(self, norm: torch.Tensor) -> None:
        factor = self.settings.clip / (norm + 1e-6)
        if factor < 1:
            for part in self.parts:
                part.detach().mul_(factor)

    def zero_grad(self) -> None:
        """No gradients."""
        for parameter in self.parameters:
            parameter.grad = None
