"""Softmax and dropout: contiguous copies, the product that softmax's derivative makes, and the order of outputs.

Source: aten/src/ATen/native/cuda/SoftMax.cu and Dropout.cu.
"""

from __future__ import annotations

from collections.abc import Mapping

from graph.workspaces.metadata import argument, is_contiguous, is_dense, size
from graph.workspaces.rules import Call, Plan, Rule, after


def softmax(call: Call) -> Plan | None:
    """`_softmax`, `_log_softmax`: a strided input is copied after the output is made (host_softmax)."""
    source = call.args[0]
    return None if is_contiguous(source) else after([("input", size(source))])


def log_softmax_backward(call: Call) -> Plan | None:
    """`_log_softmax_backward_data`: strided arguments are copied (host_softmax_backward)."""
    return _backward([("gradient", size(call.args[0]), not is_contiguous(call.args[0]))], call)


def softmax_backward(call: Call) -> Plan | None:
    """`_softmax_backward_data`: gradient times output in a new tensor, which is copied where it is strided."""
    gradient, output = call.args[0], call.args[1]
    first = gradient if is_dense(gradient) else output
    product = size(gradient)
    copies = [("product", product, True), ("gradient", product, is_dense(first) and not is_contiguous(first))]
    return _backward(copies, call)


def _backward(copies: list[tuple[str, int, bool]], call: Call) -> Plan | None:
    output = call.args[1]
    copies = [*copies, ("output", size(output), not is_contiguous(output))]
    return after((name, nbytes) for name, nbytes, needed in copies if needed)


def native_dropout(call: Call) -> Plan | None:
    """`native_dropout`: the mask is born before the output, unless everything is dropped (dropout_cuda)."""
    train = argument(call, 2, "train")
    if float(argument(call, 1, "p", 0.5)) == 1.0 and train is not False:
        return None
    return (("out", 1), ("out", 0))


RULES: Mapping[str, Rule] = {
    "aten._softmax.default": softmax,
    "aten._softmax.out": softmax,
    "aten._log_softmax.default": softmax,
    "aten._softmax_backward_data.default": softmax_backward,
    "aten._log_softmax_backward_data.default": log_softmax_backward,
    "aten.native_dropout.default": native_dropout,
}
