"""The linear function that ZeRO stage 3 puts in place of torch.nn.functional.linear.

It keeps the parameter rather than its value, so that the value may go between forward and backward; and it adds the
bias after the product, unless the input is a matrix (deepspeed/runtime/zero/linear.py of DeepSpeed 0.19.8).
"""

from __future__ import annotations

from typing import Any

import torch


class Linear(torch.autograd.Function):
    """input @ weight.T + bias, of any number of dimensions."""

    @staticmethod
    def forward(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """One fused product for matrices, otherwise a product and a sum in place."""
        if given.dim() == 2 and bias is not None:
            return torch.addmm(bias, given, weight.t())
        product = given.matmul(weight.t())
        if bias is not None:
            product += bias
        return product

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Everything is kept."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Gradients of input, weight and bias; a weight that is not there is gathered for as long."""
        given, weight, bias = ctx.saved_tensors
        shard: Any = getattr(weight, "shard", None)
        gathered = shard is not None and shard.gone
        if gathered:
            shard.gather_alone()
        many = gradient.dim() > 2
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = gradient.matmul(weight)
        if ctx.needs_input_grad[1]:
            if many:
                rows = gradient.reshape(-1, gradient.shape[-1])
                of_weight = rows.t().matmul(given.reshape(-1, given.shape[-1]))
                del rows
            elif gradient.dim() == 1:
                of_weight = gradient.unsqueeze(-1) * given.unsqueeze(0)
            else:
                of_weight = gradient.t().matmul(given)
        if bias is not None and ctx.needs_input_grad[2]:
            if many:
                of_bias = gradient.sum(list(range(gradient.dim() - 1)))
            else:
                of_bias = gradient if gradient.dim() == 1 else gradient.sum(0)
        if gathered:
            shard.drop()
        return of_input, of_weight, of_bias


def linear(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """In place of torch.nn.functional.linear."""
    result: torch.Tensor = Linear.apply(given, weight, bias)  # type: ignore[no-untyped-call]
    return result
