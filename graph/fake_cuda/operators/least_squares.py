"""Least squares on CUDA: copies by columns, and what cuBLAS is given (BatchLinearAlgebra.cpp, `linalg_lstsq_out`).

The results have shapes that follow from the arguments, since CUDA has the driver "gels" alone: no rank is asked for.
What cuSOLVER itself takes is not known here. Below aten/src/ATen/native: cuda/linalg/BatchLinearAlgebra.cpp,
BatchLinearAlgebraLibBlas.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime

_aten: Final = torch.ops.aten
_broadcast: Final[Callable[..., torch.Size]] = torch.broadcast_shapes
#: Matrices of more rows are solved one by one.
_ROWS: Final = 256
_DIMENSIONS: Final = (
    "torch.linalg.lstsq: input.dim() must be greater or equal to other.dim() and (input.dim() - other.dim()) <= 1"
)


def _lstsq(
    runtime: Runtime,
    source: torch.Tensor,
    other: torch.Tensor,
    rcond: float | None = None,
    *,
    driver: str | None = None,
    solution: torch.Tensor,
    residuals: torch.Tensor,
    rank: torch.Tensor,
    singular_values: torch.Tensor,
) -> Any:
    """The solution lies by columns in room for the larger of rows and columns, which begins with the right sides."""
    if not 0 <= source.ndim - other.ndim <= 1:
        raise RuntimeError(_DIMENSIONS)
    rows, columns = source.shape[-2:]
    vectors = other.ndim == 1 or other.shape == source.shape[:-1]
    right = other.unsqueeze(-1) if vectors else other
    batch = _broadcast(source.shape[:-2], right.shape[:-2])
    infos = source.new_empty([max(1, prod(source.shape[:-2]))], dtype=torch.int32)
    count, longest = right.shape[-1], max(rows, columns)
    _aten.resize_.default(solution, [*batch, count, longest])
    factors = source.new_empty(source.shape)
    if rows >= columns and _together(rows, prod(batch)):
        copy = source.new_empty([*batch, rows, columns])
        _by_cublas(factors, prod(batch))
        del copy
    elif source.numel():
        _factored(source, factors, prod(batch))
    if rows > columns:
        _aten.sum.IntList_out(solution.narrow(-1, columns, rows - columns), [-1], out=residuals)
    del factors
    _aten._linalg_check_errors.default(infos, "torch.linalg.lstsq", is_matrix=source.ndim == 2)
    del infos
    steps = (*solution.stride()[:-2], 1, longest)
    shape = [*batch, columns, count]
    _aten.as_strided_.default(solution, shape[:-1] if vectors else shape, steps[:-1] if vectors else steps)
    return solution, residuals, rank, singular_values


def _together(rows: int, batch: int) -> bool:
    """Whether cuBLAS takes all matrices of a batch at once."""
    return rows <= _ROWS and batch >= max(2, rows // 16)


def _by_cublas(factors: torch.Tensor, batch: int) -> None:
    """Two arrays of pointers, and the handle, which comes with a workspace: as a product of two numbers takes it."""
    pointers = [factors.new_empty([batch], dtype=torch.int64) for _ in range(2)]
    one = factors.as_strided((1, 1), (1, 1))
    _aten.mm.out(one, one, out=one.detach())
    del pointers


def _factored(source: torch.Tensor, factors: torch.Tensor, batch: int) -> None:
    """`linalg_lstsq_gels`: by a QR decomposition, of the transposed matrices where they have more columns than rows."""
    rows, columns = source.shape[-2:]
    scales = source.new_empty([*source.shape[:-2], min(rows, columns)])
    turned = source.new_empty(source.shape) if rows < columns else None
    if _together(max(rows, columns), prod(source.shape[:-2])):
        _by_cublas(factors, prod(source.shape[:-2]))
    del turned, scales


#: As `composed.COMPOSED`, which has them too.
LEAST_SQUARES: Final[Mapping[str, Callable[..., Any]]] = {"linalg_lstsq.out": _lstsq}
