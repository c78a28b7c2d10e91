"""Triangular and LU solvers: arrays of pointers to the matrices of a batch, copies, and permutations.

Source: aten/src/ATen/native/BatchLinearAlgebra.cpp, cuda/linalg/BatchLinearAlgebra.cpp. What cuSOLVER itself asks for
is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Final

from graph.workspaces.metadata import argument, elements, in_order, shape, size, strides
from graph.workspaces.rules import REST, Call, Plan, Rule, Step, after

if TYPE_CHECKING:
    import torch

_LOOPED_BATCH: Final = 8
_LOOPED_SIZE: Final = 64


def _batch(matrix: torch.Tensor) -> int:
    return prod(shape(matrix)[:-2])


def _pointers(matrix: torch.Tensor) -> list[tuple[str, int]]:
    """Two arrays of pointers, but where few large matrices are solved one by one (`triangular_solve_kernel`)."""
    batch = _batch(matrix)
    if batch <= _LOOPED_BATCH and shape(matrix)[-1] >= _LOOPED_SIZE:
        return []
    return [("pointers", 8 * batch), ("other pointers", 8 * batch)]


def solve_triangular(call: Call) -> Plan | None:
    """`linalg_solve_triangular`: the triangular matrices come first."""
    return after(_pointers(call.args[0])) if elements(call.args[1]) else None


def triangular_solve(call: Call) -> Plan | None:
    """`triangular_solve`: the triangular matrices come second."""
    return after(_pointers(call.args[1])) if elements(call.args[0]) else None


def lu_solve(call: Call) -> Plan | None:
    """`linalg_lu_solve`: factors that do not lie by columns are copied so."""
    factors = call.args[0]
    if not elements(call.args[2]):
        return None
    sizes, steps = shape(factors), strides(factors)
    order = [*range(len(sizes) - 2), len(sizes) - 1, len(sizes) - 2]
    by_columns = in_order([sizes[place] for place in order], [steps[place] for place in order])
    pointers = [("pointers", 8 * _batch(factors)), ("other pointers", 8 * _batch(factors))]
    return after([*([] if by_columns else [("factors", size(factors))]), *pointers])


def lu_unpack(call: Call) -> Plan | None:
    """`lu_unpack`: pivots are applied to a range of rows, one for each matrix."""
    factors, rows = call.args[0], shape(call.args[0])[-2]
    if not argument(call, 3, "unpack_pivots", True) or not elements(call.args[1]):
        return None
    steps: list[Step] = [REST, ("alloc", "range", 8 * rows)]
    if len(shape(factors)) == 2:
        return (*steps, ("free", "range"))
    permutations = ("alloc", "permutations", 8 * rows * _batch(factors))
    return (*steps, permutations, ("free", "range"), ("free", "permutations"))


RULES: Mapping[str, Rule] = {
    "aten.linalg_solve_triangular.default": solve_triangular,
    "aten.triangular_solve.default": triangular_solve,
    "aten.linalg_lu_solve.default": lu_solve,
    "aten.lu_unpack.default": lu_unpack,
}
