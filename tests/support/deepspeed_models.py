"""The worked examples' MLP as a module whose gradients come one after another: a bias's, then its weight's."""

from __future__ import annotations

from typing import Any

import torch


class Times(torch.autograd.Function):
    """given @ weight.T, which keeps the parameter itself, not what it holds."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(given, weight)
        return given.matmul(weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        given, weight = ctx.saved_tensors
        before = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
        return before, gradient.t().matmul(given)


class Layer(torch.nn.Linear):
    """A product, then a sum."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = Times.apply(given, self.weight)  # type: ignore[no-untyped-call]
        return product + self.bias


class Mlp(torch.nn.Module):
    """256 -> 512 -> 255."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = Layer(256, 512)
        self.fc2 = Layer(512, 255)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.fc2(self.fc1(given))
        return result


def mlp() -> tuple[torch.nn.Module, dict[str, torch.Tensor], Any]:
    """The model, its input and its loss, as a case names them."""
    return Mlp(), {"given": torch.zeros(3, 256, dtype=torch.bfloat16)}, lambda output: output.sum()
