"""Losses: copies of strided scores, the loss by element that is then reduced, and the order of outputs.

Source: aten/src/ATen/native/cuda/Loss.cu, NLLLoss2d.cu, aten/src/ATen/native/BinaryOps.cpp and Loss.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from numpy import broadcast_shapes

from graph.workspaces.metadata import argument, elements, is_contiguous, is_half, is_tensor, shape, size, tensors, width
from graph.workspaces.reduction import flat, scratch
from graph.workspaces.rules import REST, Call, Plan, Rule, after, within

if TYPE_CHECKING:
    import torch


def nll_loss_forward(call: Call) -> Plan | None:
    """`nll_loss_forward`: strided log-probabilities, targets and weights are copied, after the outputs."""
    return after(_strided(call, 0, 1, 2))


def _broadcast(one: torch.Tensor, other: torch.Tensor) -> tuple[int, list[tuple[str, int]]]:
    """Batches of two tensors of rows, and the copies of those that are strided or broadcast (native/Distance.cpp)."""
    batch = broadcast_shapes(shape(one)[:-2], shape(other)[:-2])
    copies = [
        (f"rows {place}", prod(batch) * prod(shape(rows)[-2:]) * width(rows))
        for place, rows in enumerate((one, other))
        if shape(rows)[:-2] != batch or not is_contiguous(rows)
    ]
    return prod(batch), copies


def cdist_forward(call: Call) -> Plan | None:
    """`_cdist_forward`: rows that are strided or broadcast are copied."""
    copies = _broadcast(call.args[0], call.args[1])[1]
    return within(copies, REST) if copies else None


def cdist_backward(call: Call) -> Plan | None:
    """`_cdist_backward`: the gradient of each pair of rows, which is then summed, but for that of the number of unequal
    elements (p = 0), which is zero (cuda/DistanceKernel.cu)."""
    one, other = call.args[1], call.args[2]
    batch, copies = _broadcast(one, other)
    count = batch * prod(shape(one)[-2:]) * shape(other)[-2]
    pairs = [("pairs", count * width(one))] if argument(call, 3, "p") else []
    return within([*copies, *_strided(call, 4, 0)], REST, *within(pairs)) if count else None


def nll_loss2d_forward(call: Call) -> Plan | None:
    """`nll_loss2d_forward`: the total weight is born before the loss; of a reduced one strided arguments are copied."""
    return (("out", 1), ("out", 0), *(within(_strided(call, 0, 1)) if argument(call, 3, "reduction", 1) else ()))


def nll_loss2d_backward(call: Call) -> Plan | None:
    """`nll_loss2d_backward`: strided targets are copied (NLLLoss2d.cu)."""
    return after(_strided(call, 2)) if argument(call, 4, "reduction", 1) else None


def nll_loss_backward(call: Call) -> Plan | None:
    """`nll_loss_backward`: strided targets, log-probabilities, gradients and weights are copied, in this order."""
    return after(_strided(call, 2, 1, 0, 3))


def _strided(call: Call, *places: int) -> list[tuple[str, int]]:
    """Copies of the arguments at these places that are strided, in this order."""
    given = [(place, call.args[place]) for place in places if place < len(call.args)]
    return [(f"argument {i}", size(one)) for i, one in given if is_tensor(one) and not is_contiguous(one)]


def multi_margin_loss(call: Call) -> Plan | None:
    """`multi_margin_loss`: strided scores are copied, and a loss for each row made to be reduced (MultiMarginLoss.cu).

    Arguments: self, target, p, margin, weight, reduction.
    """
    source = call.args[0]
    rows = elements(source) // max(shape(source)[-1], 1) if len(shape(source)) > 1 else 0
    reduced = [("loss", rows * width(source))] if argument(call, 5, "reduction", 1) and rows else []
    return after([*_strided(call, 0, 1, 4), *reduced])


def multi_margin_loss_backward(call: Call) -> Plan | None:
    """`multi_margin_loss_backward`: strided scores, gradients, targets and weights are copied."""
    return after(_strided(call, 1, 0, 2, 5))


def multilabel_margin_loss_backward(call: Call) -> Plan | None:
    """`multilabel_margin_loss_backward`: strided scores, targets and gradients are copied."""
    return after(_strided(call, 1, 2, 0))


def multilabel_margin_loss(call: Call) -> Plan | None:
    """`multilabel_margin_loss_forward`: the targets are born before the loss (MultiLabelMarginCriterion.cu)."""
    source = call.args[0]
    rows = elements(source) // max(shape(source)[-1], 1) if len(shape(source)) > 1 else 0
    made = [("loss", rows * width(source))] if argument(call, 2, "reduction", 1) and rows else []
    return within(_strided(call, 0, 1), ("out", 1), *within(made, ("out", 0)))


def _reduced(call: Call, source: torch.Tensor, like: torch.Tensor) -> Plan:
    """The reduction of one value for each of `source`, of the type of `like`."""
    item = width(like)
    return scratch(call.profile, flat(elements(source), item), item, max(item, 4), item, is_half(like))


def elementwise_loss(call: Call) -> Plan | None:
    """`mse_loss`, `smooth_l1_loss`: with a reduction, the loss by element is made after the output, in its type."""
    source, out = call.args[0], next(tensors(call.out))
    if argument(call, 2, "reduction", 1) == 0 or elements(source) == 0:
        return None
    return (REST, *within([("loss", elements(source) * width(out))], *_reduced(call, source, out)))


def binary_cross_entropy(call: Call) -> Plan | None:
    """`binary_cross_entropy`: with a reduction, the result is made after the loss by element, which is the output."""
    source = call.args[0]
    if argument(call, 3, "reduction", 1) == 0 or elements(source) == 0:
        return None
    return (REST, *within([("result", width(source))], *_reduced(call, source, source)))


def huber_loss(call: Call) -> Plan | None:
    """`huber_loss`: with a reduction, the loss by element is made before the output."""
    source = call.args[0]
    if argument(call, 2, "reduction", 1) == 0 or elements(source) == 0:
        return None
    return within([("loss", size(source))], REST, *_reduced(call, source, source))


RULES: Mapping[str, Rule] = {
    "aten.nll_loss_forward.default": nll_loss_forward,
    "aten.nll_loss_forward.output": nll_loss_forward,
    "aten.nll_loss_backward.default": nll_loss_backward,
    "aten.multi_margin_loss.default": multi_margin_loss,
    "aten.multi_margin_loss_backward.default": multi_margin_loss_backward,
    "aten.multilabel_margin_loss_forward.default": multilabel_margin_loss,
    "aten.multilabel_margin_loss_backward.default": multilabel_margin_loss_backward,
    "aten.nll_loss2d_forward.default": nll_loss2d_forward,
    "aten.nll_loss2d_backward.default": nll_loss2d_backward,
    "aten._cdist_forward.default": cdist_forward,
    "aten._cdist_backward.default": cdist_backward,
    "aten.binary_cross_entropy.default": binary_cross_entropy,
    "aten.mse_loss.default": elementwise_loss,
    "aten.smooth_l1_loss.default": elementwise_loss,
    "aten.huber_loss.default": huber_loss,
}
