"""Copies between host and device, and other operators that make a temporary for each element.

Source: aten/src/ATen/native/cuda/Copy.cu (`copy_requires_temporaries`, `copy_kernel_cuda`).
"""

from __future__ import annotations

from collections.abc import Mapping

from graph.workspaces.metadata import dtype, elements, is_contiguous, is_dense, on_device, shape, size, strides, width
from graph.workspaces.rules import Call, Plan, Rule


def copy_(call: Call) -> Plan | None:
    """`copy_` between host and device: a strided side on the device goes through a contiguous one."""
    target, source = call.args[0], call.args[1]
    if on_device(target) == on_device(source) or elements(target) == 0:
        return None
    same = dtype(target) == dtype(source)
    alike = shape(target) == shape(source) and strides(target) == strides(source)
    if same and ((is_contiguous(target) and is_contiguous(source)) or (alike and is_dense(target))):
        return None
    if on_device(target):
        nbytes = 0 if is_contiguous(target) else size(target)
    else:
        expanded = shape(source) != shape(target)
        nbytes = elements(target) * width(source) if expanded or not is_contiguous(source) else 0
    return (("alloc", "contiguous", nbytes), ("free", "contiguous")) if nbytes else None


RULES: Mapping[str, Rule] = {"aten.copy_.default": copy_}
