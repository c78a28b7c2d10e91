"""`segment_reduce`: where segments begin, of their lengths, or lengths of where they begin.

Source: aten/src/ATen/native/SegmentReduce.cpp and cuda/SegmentReduce.cu.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from graph.workspaces.cub.temporary import scan
from graph.workspaces.metadata import is_contiguous, shape, size
from graph.workspaces.rules import REST, Call, Plan, Rule, Step, within


def _bounds(call: Call, *inside: Step) -> Plan:
    """Offsets of the lengths, by a sum over them, or lengths of the offsets; and what comes while they are there."""
    lengths = call.kwargs.get("lengths")
    if lengths is None:
        lengths = call.kwargs["offsets"]
        return within([("lengths", (shape(lengths)[-1] - 1) * 8 * prod(shape(lengths)[:-1]))], *inside)
    rows, segments = prod(shape(lengths)[:-1]), shape(lengths)[-1]
    count = rows * (segments + 1)
    zero, offsets = ("alloc", "zero", rows * 8), ("alloc", "offsets", count * 8)
    temporary = within([("sum", scan(call.profile, count, 8))]) if rows == 1 else ()
    return (zero, offsets, ("free", "zero"), *temporary, *inside, ("free", "offsets"))


def _checks(call: Call) -> Plan:
    """Lengths are checked unless they are `unsafe`: the least, and whether they add up."""
    lengths = call.kwargs.get("lengths")
    if lengths is None or call.kwargs.get("unsafe", False):
        return ()
    rows = prod(shape(lengths)[:-1])
    least: Plan = within([("least", 8), *_copied(("all lengths", lengths))])
    return (*least, *within([("total", 8 * rows), ("right", rows), ("all", 1)]))


def _copied(*named: tuple[str, Any]) -> list[tuple[str, int]]:
    return [(name, size(tensor)) for name, tensor in named if tensor is not None and not is_contiguous(tensor)]


def _segments(call: Call) -> list[tuple[str, int]]:
    """Copies of strided lengths, or offsets."""
    return _copied(*((f"given {name}", call.kwargs.get(name)) for name in ("lengths", "offsets")))


def forward(call: Call) -> Plan | None:
    """`segment_reduce`: of a single row by CUB, which asks for a byte."""
    data = call.args[0]
    if call.kwargs.get("indices") is not None:
        return None
    single = within([("reduction", 1)]) if len(shape(data)) == 1 else ()
    right = _checks(call)
    return within(_copied(("data", data)), *right, *within(_segments(call), REST, *_bounds(call, *single)))


def backward(call: Call) -> Plan | None:
    """`_segment_reduce_backward`. Arguments: gradient, output, data, reduce."""
    gradient, output, data = call.args[:3]
    copies = _copied(("gradient", gradient), ("output", output), ("data", data))
    return within([*copies, *_segments(call)], REST, *_bounds(call))


RULES: Mapping[str, Rule] = {
    "aten.segment_reduce.default": forward,
    "aten._segment_reduce_backward.default": backward,
}
