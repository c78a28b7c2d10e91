"""Convolutions through cuDNN: copies of strided gradients and the bias gradient's sum.

cuDNN's own workspace depends on the algorithm it chooses and is not known here; it is taken as zero.
Source: aten/src/ATen/native/Convolution.cpp and cudnn/ConvShared.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping

from graph.workspaces.metadata import dtype, elements, is_contiguous, is_half, shape, size, tensors, width
from graph.workspaces.reduction import merged, scratch
from graph.workspaces.rules import Call, Plan, Rule, Step


def convolution_backward(call: Call) -> Plan | None:
    """`convolution_backward`: gradients of input and weight, then the gradient summed for the bias.

    A depthwise convolution goes around cuDNN, but for fp16, and makes the weight's gradient first.

    Arguments: gradient, input, weight, bias sizes, stride, padding, dilation, transposed, output padding, groups, mask.
    """
    gradient = call.args[0]
    wanted = [bool(flag) for flag in call.args[10]]
    outputs = list(tensors(call.out))
    steps: list[Step] = []
    number = sum(wanted[:2])
    strided = not is_contiguous(gradient)
    if strided:
        steps.append(("alloc", "gradient", size(gradient)))
    depthwise = number == 2 and int(call.args[9]) == shape(call.args[1])[1] > 1 and dtype(gradient) != "float16"
    steps += [("out", i) for i in ((1, 0) if depthwise else range(number))]
    if strided:
        steps.append(("free", "gradient"))
    if wanted[2]:
        steps.append(("out", number))
        dims = [i for i in range(len(shape(gradient))) if i != 1]
        item = width(gradient)
        accumulator = max(item, 4)
        if elements(gradient) and outputs:
            steps += scratch(
                call.profile, merged(gradient, dims, item, item), item, accumulator, item, is_half(gradient)
            )
    return tuple(steps)


RULES: Mapping[str, Rule] = {"aten.convolution_backward.default": convolution_backward}
