"""Layers that hold a slice of a weight on each tensor-parallel rank, with the memory of Megatron-LM's.

What is saved, reduced in place and gathered into the shared buffer follows megatron/core/tensor_parallel (layers.py,
mappings.py, cross_entropy.py). Activations may be split along the sequence; a gathered activation is then the ranks'
parts one after another, without regard to which positions these are, since no value is ever computed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional

# Newer releases have other names for these two, and warn of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Shared:
    """What the layers of one rank share: its place, and the buffer that gathered inputs go to.

    The buffer of a dtype is as large as the largest gathered input so far, and stays (the global memory buffer "mpu").
    """

    def __init__(self, rank: int, size: int, *, sequence: bool) -> None:
        self.rank = rank
        self.size = size
        self.sequence = sequence
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        self._gathered: tuple[torch.Tensor, torch.Tensor] | None = None

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The whole of an activation, in the shared buffer, for column layers to take."""
        with torch.no_grad():
            whole = self.buffer(part)
            _all_gather(whole, part.contiguous())
        self._gathered = (whole, part)
        return whole

    def parts(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(whole, part) of the input of a column layer, which is the part, or a view of the last gathered whole."""
        last = self._gathered
        if last is None or last[0].data_ptr() != x.data_ptr() or last[0].numel() != x.numel():
            self.gather(x)
        assert self._gathered is not None
        return self._gathered

    def buffer(self, part: torch.Tensor) -> torch.Tensor:
        """Room for what all ranks' `part`s make together, in the shared buffer."""
        shape = self.whole(part.shape)
        wanted = part.numel() * self.size
        held = self._buffers.get(part.dtype)
        if held is None or held.numel() < wanted:
            held = self._buffers[part.dtype] = torch.empty(wanted, dtype=part.dtype, device=part.device)
        return held[:wanted].view(shape)

    def whole(self, shape: torch.Size) -> tuple[int, ...]:
        """The shape of an activation whose part along the sequence has this one."""
        return (*shape[:-2], shape[-2] * self.size, shape[-1])

    def part(self, shape: torch.Size) -> tuple[int, ...]:
        """The shape of this rank's part of an activation."""
        return (*shape[:-2], shape[-2] // self.size, shape[-1])


class _Linear(torch.autograd.Function):
    """x @ weight.T + bias. `column`: the input's gradient is summed over the ranks while the weight's is computed.

    `x` is what is saved and gets the gradient; `whole`, where given, is what it was gathered to.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        shared: Shared,
        column: bool,
        whole: torch.Tensor | None,
    ) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.biased, ctx.shared, ctx.column = bias is not None, shared, column
        whole = x if whole is None else whole
        out = torch.matmul(whole, weight.t())
        if bias is not None:
            out = out + bias
        return out

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        shared: Shared = ctx.shared
        scattered = ctx.column and shared.sequence
        whole, work = x, None
        if scattered:
            whole = shared.buffer(x)
            work = _all_gather(whole, x.contiguous(), async_op=True)
        grad_x = grad.matmul(weight)
        if work is not None:
            work.wait()
        rows = grad.contiguous().view(-1, grad.shape[-1])
        if scattered:
            mine = torch.empty_like(x, memory_format=torch.contiguous_format)
            work = _reduce_scatter(mine, grad_x, async_op=True)
        elif ctx.column:
            work = dist.all_reduce(grad_x, async_op=True)
        grad_weight = rows.t().matmul(whole.reshape(-1, whole.shape[-1]))
        grad_bias = rows.sum(dim=0) if ctx.biased else None
        if work is not None:
            work.wait()
        return (mine if scattered else grad_x), grad_weight, grad_bias, None, None, None


class _Reduce(torch.autograd.Function):
    """The sum over the ranks, in place; the gradient goes back as it is."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> Any:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> Any:
        return grad


class _ReduceScatter(torch.autograd.Function):
    """This rank's part of the sum over the ranks; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shared: Shared) -> Any:
        ctx.shared = shared
        mine = torch.empty(shared.part(x.shape), dtype=x.dtype, device=x.device)
        _reduce_scatter(mine, x.contiguous())
        return mine

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _gathered(grad, ctx.shared), None


class _Scatter(torch.autograd.Function):
    """This rank's part of an activation that all have, as a copy, so that the whole may go; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shared: Shared) -> Any:
        ctx.shared = shared
        return x.reshape(shared.size, -1)[shared.rank].view(shared.part(x.shape)).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _gathered(grad, ctx.shared), None


def _gathered(part: torch.Tensor, shared: Shared) -> torch.Tensor:
    whole = torch.empty(shared.whole(part.shape), dtype=part.dtype, device=part.device)
    _all_gather(whole, part.contiguous())
    return whole


def scatter(x: torch.Tensor, shared: Shared) -> torch.Tensor:
    """This rank's part of `x` along the sequence."""
    part: torch.Tensor = _Scatter.apply(x, shared)  # type: ignore[no-untyped-call]
    return part


def _reduced(x: torch.Tensor, shared: Shared) -> torch.Tensor:
    """The sum of the ranks' `x`: whole, or this rank's part along the sequence."""
    out: torch.Tensor = _ReduceScatter.apply(x, shared) if shared.sequence else _Reduce.apply(x)  # type: ignore[no-untyped-call]
    return out


class _Parallel(torch.nn.Module):
    """A linear layer of which each rank has a part."""

    def __init__(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None, shared: Shared) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.shared = shared


class ColumnParallel(_Parallel):
    """A linear layer whose output is split: weight [out / ranks, in], bias [out / ranks]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out / ranks]; where the sequence is split, `x` is this rank's part or the whole."""
        whole = None
        if self.shared.sequence:
            whole, x = self.shared.parts(x)
        out: torch.Tensor = _Linear.apply(x, self.weight, self.bias, self.shared, True, whole)  # type: ignore[no-untyped-call]
        return out


class RowParallel(_Parallel):
    """A linear layer whose input is split: weight [out, in / ranks], and the whole bias on every rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in / ranks] -> [..., out], reduced; the bias is added out of place."""
        out = _reduced(_Linear.apply(x, self.weight, None, self.shared, False, None), self.shared)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


class VocabularyParallel(torch.nn.Module):
    """An embedding of which each rank has a range of rows; `whole`: its output is not split along the sequence."""

    def __init__(self, weight: torch.nn.Parameter, shared: Shared, *, whole: bool) -> None:
        super().__init__()
        self.weight = weight
        self.shared = shared
        self.whole = whole

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[..., tokens] -> [..., tokens, hidden], reduced. A scalar put by a mask is a masked_fill_ on CUDA."""
        mask, own = _own(tokens, self.weight.shape[0], self.shared)
        out = functional.embedding(own, self.weight)
        out.masked_fill_(mask.unsqueeze(-1), 0.0)
        if self.whole and self.shared.sequence:
            return _Reduce.apply(out)  # type: ignore[no-untyped-call, no-any-return]
        return _reduced(out, self.shared)


def _own(tokens: torch.Tensor, rows: int, shared: Shared) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens are not of this rank's rows (bool), and the tokens as rows of it (those others: row 0)."""
    start = shared.rank * rows
    mask = (tokens < start) | (tokens >= start + rows)
    own = tokens.clone() - start
    own.masked_fill_(mask, 0)
    return mask, own


class _CrossEntropy(torch.autograd.Function):
    """Loss of each token from logits whose vocabulary is split; backward works in place on the saved softmax."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, shared: Shared) -> Any:
        logits = logits.float()
        largest = torch.max(logits, dim=-1)[0]
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        logits -= largest.unsqueeze(-1)
        mask, own = _own(target, logits.shape[-1], shared)
        rows = logits.view(-1, logits.shape[-1])
        places = torch.arange(rows.shape[0], device=rows.device)
        predicted = rows[places, own.view(-1)].clone().view_as(target)
        predicted.masked_fill_(mask, 0.0)
        torch.exp(logits, out=logits)
        total = logits.sum(dim=-1)
        dist.all_reduce(predicted)
        dist.all_reduce(total)
        loss = torch.log(total) - predicted
        logits.div_(total.unsqueeze(-1))
        ctx.save_for_backward(logits, mask, own.view(-1))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        softmax, mask, own = ctx.saved_tensors
        rows = softmax.view(-1, softmax.shape[-1])
        places = torch.arange(rows.shape[0], device=rows.device)
        update = 1.0 - mask.view(-1).float()
        rows[places, own] -= update
        softmax.mul_(grad.unsqueeze(-1))
        return softmax, None, None


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, shared: Shared) -> torch.Tensor:
    """The mean loss of logits [..., vocabulary / ranks] (any dtype) for targets [...]."""
    rows = target.view(logits.shape[:-1])
    losses: torch.Tensor = _CrossEntropy.apply(logits, rows, shared)  # type: ignore[no-untyped-call]
    return losses.mean()


def reduce_gradients(parameters: list[torch.nn.Parameter]) -> None:
    """Sum the gradients of parameters that every rank has whole but saw a part of the sequence of, in one flat copy."""
    gradients = [one.grad for one in parameters if one.grad is not None]
    if not gradients:
        return
    flat = torch.cat([one.reshape(-1) for one in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, torch.split(flat, [one.numel() for one in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
