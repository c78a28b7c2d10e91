"""Triangular and LU solvers: arrays of pointers to the matrices of a batch, copies, and permutations.

Source: aten/src/ATen/native/BatchLinearAlgebra.cpp, cuda/linalg/BatchLinearAlgebra.cpp. What cuSOLVER itself asks for
is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Final, Literal

from graph.workspaces.gemm import by_cublas
from graph.workspaces.metadata import argument, elements, in_order, is_contiguous, shape, size, strides, tensors, width
from graph.workspaces.rules import REST, Call, Plan, Rule, Step, within

if TYPE_CHECKING:
    import torch

_LOOPED_BATCH: Final = 8
_LOOPED_SIZE: Final = 64
#: Matrices of so many rows are factorized one by one; batches of so few are solved so.
_LARGE_FACTORS: Final = 512
_FEW: Final = 2
#: Since when matrices are factorized as they are; before, contiguous ones were transposed (2.10 is not recorded).
_AS_THEY_ARE: Final = (2, 11)
#: Since when batches of Cholesky factors are cuBLAS's, not MAGMA's.
_WITHOUT_MAGMA: Final = (2, 12)


def _batch(matrix: torch.Tensor) -> int:
    return prod(shape(matrix)[:-2])


def _pointers(matrix: torch.Tensor) -> list[tuple[str, int]]:
    """Two arrays of pointers, but where few large matrices are solved one by one (`triangular_solve_kernel`)."""
    batch = _batch(matrix)
    if batch <= _LOOPED_BATCH and shape(matrix)[-1] >= _LOOPED_SIZE:
        return []
    return [("pointers", 8 * batch), ("other pointers", 8 * batch)]


def solve_triangular(call: Call) -> Plan | None:
    """`linalg_solve_triangular`: the triangular matrices come first; copied where they lie neither by rows nor by
    columns."""
    factors = call.args[0]
    copied = [] if is_contiguous(factors) or _by_columns(factors) else [("factors", size(factors))]
    return (REST, *by_cublas(call, [*copied, *_pointers(factors)] if elements(call.args[1]) else ()))


def triangular_solve(call: Call) -> Plan | None:
    """`triangular_solve`: the triangular matrices come second."""
    return (REST, *by_cublas(call, _pointers(call.args[1]) if elements(call.args[0]) else ()))


def _by_columns(matrix: torch.Tensor) -> bool:
    """Whether each matrix is contiguous when transposed."""
    sizes, steps = shape(matrix), strides(matrix)
    order = [*range(len(sizes) - 2), len(sizes) - 1, len(sizes) - 2]
    return in_order([sizes[place] for place in order], [steps[place] for place in order])


def lu_solve(call: Call) -> Plan | None:
    """`linalg_lu_solve`: factors that do not lie by columns are copied so."""
    factors, pivots, right = call.args[:3]
    if not elements(right):
        return None
    copies = [] if _by_columns(factors) else [("factors", size(factors))]
    copies += [] if is_contiguous(pivots) else [("pivots", size(pivots))]
    left, adjoint = bool(call.kwargs.get("left", True)), bool(call.kwargs.get("adjoint", False))
    columns = shape(right)[-1 if left else -2]
    return (REST, *within(copies, *_solved(call, factors, columns, turned=adjoint == left)))


def _factored(call: Call) -> Plan:
    """LU of a batch of small matrices by cuBLAS, which takes an array of pointers; others are cuSOLVER's."""
    matrix = call.args[0]
    rows, columns = shape(matrix)[-2:]
    batched = _batch(matrix) > 1 and rows == columns and rows < _LARGE_FACTORS
    return by_cublas(call, [("matrices", 8 * _batch(matrix))]) if batched and rows else ()


def _solved(call: Call, factors: torch.Tensor, columns: int, *, turned: bool) -> Plan:
    """Right sides of so many columns solved by factors (`lu_solve_kernel`), with the transposed ones if `turned`."""
    batch, rows = _batch(factors), shape(factors)[-1]
    way = _way(batch, rows, columns, turned)
    if way == "together":
        return by_cublas(call, [("pointers", 8 * batch), ("other pointers", 8 * batch)])
    if way == "apart":
        return ()
    right = batch * rows * columns * width(factors)
    order = [("range", 8 * rows), ("permutation", 8 * rows * batch)] if batch > 1 else [("permutation", 8 * rows)]
    births: Plan = (*(("alloc", *one) for one in order), *((("free", "range"),) if batch > 1 else ()))
    solves = [by_cublas(call, [(f"{name} {n}", nbytes) for name, nbytes in _pointers(factors)]) for n in range(2)]
    if turned:
        return (*births, *solves[0], *solves[1], *within([("copy", right)]), ("free", "permutation"))
    inverse = [("places", 8 * rows), ("inverse", 8 * rows * batch), ("permuted", right)]
    return (*births, *within(inverse, *solves[0], *solves[1]), ("free", "permutation"))


def _way(batch: int, rows: int, columns: int, turned: bool) -> Literal["together", "apart", "triangular"]:
    """Who solves: cuBLAS all matrices of a batch at once, cuSOLVER one by one, or two triangular solves."""
    if rows == columns:
        return "together" if rows <= 16 else "triangular"
    few = batch <= _FEW
    if rows <= 8:
        return "together"
    if rows <= 64:
        if few and (columns <= 64 or turned or rows <= 32):
            return "apart"
        return "together" if columns <= 8 else "triangular"
    if rows <= 128 and columns <= 2:
        return "apart" if few else "together"
    return "triangular"


def lu_factor(call: Call) -> Plan | None:
    """`linalg_lu_factor_ex`."""
    steps = _factored(call)
    return (REST, *steps) if steps else None


def solve(call: Call) -> Plan | None:
    """`_linalg_solve_ex`: factors, then solves; where right sides are vectors of a batch, of a copy of them."""
    matrix, right = call.args[:2]
    if not elements(matrix) or not elements(right):
        return None
    left = bool(call.kwargs.get("left", True))
    vectors = shape(right) == shape(matrix)[:-1]
    columns = 1 if vectors else shape(right)[-1 if left else -2]
    result = next(tensors(call.out))
    copied = [("vectors", size(result))] if vectors and _batch(matrix) > 1 else []
    factors = _factored(call)
    return (REST, *factors, *within(copied, *_solved(call, matrix, columns, turned=_turned(call, left))))


def _turned(call: Call, left: bool) -> bool:
    """Whether the transposed factors are used, of matrices to the left of what is sought, or to the right."""
    transposed = call.profile.release < _AS_THEY_ARE and is_contiguous(call.args[0])
    return transposed == left


def inverse(call: Call) -> Plan | None:
    """`linalg_inv_ex`: a copy of the matrices becomes their factors, and the identity is solved."""
    matrix = call.args[0]
    rows = shape(matrix)[-1]
    if not elements(matrix):
        return None
    made = [("factors", size(matrix)), ("pivots", 4 * rows * _batch(matrix))]
    return (REST, *within(made, *_factored(call), *_solved(call, matrix, rows, turned=_turned(call, True))))


def determinant(call: Call) -> Plan | None:
    """`_linalg_det`: of the factors, and of how many rows changed places."""
    matrix = call.args[0]
    batch, rows = _batch(matrix), shape(matrix)[-1]
    product, swaps = [("product", batch * width(matrix))], _swaps(batch, rows)
    steps = within([("info", 4 * batch)], *_factored(call), *within(product, *swaps, ("free", "swaps")))
    return (REST, *_not_empty(steps))


def log_determinant(call: Call) -> Plan | None:
    """`_linalg_slogdet`: signs and logarithms of the factors' diagonals."""
    matrix = call.args[0]
    batch, rows = _batch(matrix), shape(matrix)[-1]
    diagonals = batch * rows * width(matrix)
    signs = within([("signs", diagonals), ("sign", batch * width(matrix))])
    steps = (*_factored(call), *_swaps(batch, rows), *signs, ("free", "swaps"), *within([("logarithms", diagonals)]))
    return (REST, *_not_empty(within([("info", 4 * batch)], *steps)))


def _not_empty(steps: Plan) -> Plan:
    """Without what takes no memory."""
    empty = {step[1] for step in steps if step[0] == "alloc" and not step[2]}
    return tuple(step for step in steps if step[1] not in empty)


def _swaps(batch: int, rows: int) -> Plan:
    """How many pivots are not their rows, which stays: compared with a range, and added up as 64 bits."""
    compared = ("alloc", "range", 4 * rows), ("alloc", "moved", batch * rows), ("alloc", "swaps", 8 * batch)
    return (*compared, *within([("numbers", 8 * batch * rows)]), ("free", "moved"), ("free", "range"))


def lu_unpack(call: Call) -> Plan | None:
    """`lu_unpack`: pivots are applied to a range of rows, one for each matrix."""
    factors, pivots = call.args[:2]
    if not argument(call, 3, "unpack_pivots", True) or not elements(pivots):
        return None
    copied = within([] if is_contiguous(pivots) else [("pivots", size(pivots))])
    return (REST, *_permuted(factors, *copied))


def _permuted(factors: torch.Tensor, *inside: Step) -> Plan:
    """A range of rows, one for each matrix of a batch."""
    rows = 8 * shape(factors)[-2]
    if len(shape(factors)) == 2:
        return within([("range", rows)], *inside)
    permutations = ("alloc", "permutations", rows * _batch(factors))
    return (("alloc", "range", rows), permutations, ("free", "range"), *inside, ("free", "permutations"))


def decomposition(call: Call) -> Plan | None:
    """`linalg_lu` (BatchLinearAlgebra.cpp): factors by columns, with pivots, are unpacked."""
    matrix = call.args[0]
    if not elements(matrix):
        return None
    unpacked = _permuted(matrix) if argument(call, 1, "pivot", True) else ()
    pivots = ("pivots", 4 * min(shape(matrix)[-2:]) * _batch(matrix)), ("info", 4 * _batch(matrix))
    factors = ("alloc", "factors", size(matrix))
    return (REST, factors, *within(pivots, *_factored(call), ("free", "factors"), *unpacked))


def cholesky_solve(call: Call) -> Plan | None:
    """`_cholesky_solve_helper`: a single matrix is copied for cuSOLVER; those of a batch are solved by cuBLAS, twice
    triangular (before, by MAGMA, which copied them)."""
    right, factors = call.args[:2]
    if not elements(right) or not elements(factors):
        return None
    together, copy = call.profile.release >= _WITHOUT_MAGMA, [("factors", size(factors))]
    if _batch(right) > 1:
        return (REST, *(_solved_twice(call, factors) if together else by_cublas(call, copy)))
    return (REST, *within([("info", 4), *copy])) if together else within([("info", 4)], REST, *within(copy))


def cholesky_inverse(call: Call) -> Plan | None:
    """`cholesky_inverse`: the identity is solved by a copy of the factors."""
    factors = call.args[0]
    if not elements(factors):
        return None
    together, copy = call.profile.release >= _WITHOUT_MAGMA, ("working copy", size(factors))
    if _batch(factors) > 1:
        solves = _solved_twice(call, factors, lying=True) if together else by_cublas(call)
        return (REST, *within([copy], *solves))
    return (REST, *within([copy, ("info", 4), *([("factors", size(factors))] if together else [])]))


def _solved_twice(call: Call, factors: torch.Tensor, *, lying: bool = False) -> Plan:
    """Lower and upper triangular matrices solved one after the other, each time of a copy where they do not lie as
    cuBLAS takes them."""
    taken = lying or is_contiguous(factors) or _by_columns(factors)
    copied = [] if taken else [("factors", size(factors))]
    return tuple(step for _ in range(2) for step in within(copied, *by_cublas(call, _pointers(factors))))


RULES: Mapping[str, Rule] = {
    "aten.linalg_solve_triangular.default": solve_triangular,
    "aten.triangular_solve.default": triangular_solve,
    "aten.linalg_lu_solve.default": lu_solve,
    "aten.linalg_lu_factor_ex.default": lu_factor,
    "aten.linalg_lu.default": decomposition,
    "aten._linalg_solve_ex.default": solve,
    "aten.linalg_inv_ex.default": inverse,
    "aten._cholesky_solve_helper.default": cholesky_solve,
    "aten.cholesky_inverse.default": cholesky_inverse,
    "aten._linalg_det.default": determinant,
    "aten._linalg_slogdet.default": log_determinant,
    "aten.lu_unpack.default": lu_unpack,
}
