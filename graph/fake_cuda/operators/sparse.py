"""Sparse and nested tensors, whose kernels are PyTorch's own where those are written in operators, as most are.

In a CPU build those of the CPU serve them, which are the same ones as a CUDA build's. Those of CUDA alone, which would
ask a driver, are here for both (sparse/cuda/SparseCUDATensorMath.cu, SparseBlas.cpp); one asks the GPU how many
elements there are: how many of them differ. Not here are products of two sparse tensors, batches of them, softmax,
`index_select`, and what nested tensors have of CUDA alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch

from graph.fake_cuda.operators.native import operator, shared_operators
from graph.fake_cuda.torch_private import BY_CPU_KERNEL_OF, has_kernel
from graph.user_code import reader
from graph.workspaces.cub.temporary import merge_sort_pairs, unique_by_key_of_thrust

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime

_aten: Final = torch.ops.aten


def install(runtime: Runtime) -> None:
    """Have sparse and nested tensors on a GPU that is not there."""
    of_a_cuda_build = has_kernel("aten::_nnz", "SparseCUDA")
    for layout in BY_CPU_KERNEL_OF:
        if of_a_cuda_build:  # whose own ask a driver
            kernels = {name: _refusing(name, layout) for name in _NOT_HERE.get(layout, ())}
        else:
            kernels = {name: _redispatched(name, layout) for name in shared_operators(layout)}
        kernels |= _OF_CUDA.get(layout, {})
        named = [(name, _of_tensors(name, functools.partial(kernel, runtime))) for name, kernel in kernels.items()]
        runtime.register([(name, f"{layout}CUDA", kernel) for name, kernel in named])


def _redispatched(name: str, layout: str) -> Callable[..., Any]:
    """The CPU's kernel for tensors of a layout."""
    func, keys = operator(name), BY_CPU_KERNEL_OF[layout]
    return lambda runtime, *args, **kwargs: func.redispatch(keys, *args, **kwargs)


def _refusing(name: str, layout: str) -> Callable[..., Any]:
    """A kernel that is not here."""

    def refuse(*args: object, **kwargs: object) -> Any:
        raise _missing(name, layout)

    return refuse


def _of_tensors(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Have a kernel called with tensors, where numbers come in their place (`x * 2.0`)."""
    tensors = _takes_tensors(name)

    def called(*args: object, **kwargs: object) -> Any:
        pairs = zip(args, tensors, strict=False)
        given = [torch.tensor(arg) if wanted and isinstance(arg, int | float) else arg for arg, wanted in pairs]
        return kernel(*given, **kwargs)

    return called


@functools.cache
def _takes_tensors(name: str) -> tuple[bool, ...]:
    """Whether each argument of an operator is a tensor."""
    return tuple(str(argument.type) == "Tensor" for argument in operator(name)._schema.arguments)


def _sum(runtime: Runtime, one: torch.Tensor, other: torch.Tensor, *, alpha: float = 1, out: torch.Tensor) -> Any:
    """`add_out_sparse_cuda`: of two sparse tensors both follow each other, not coalesced."""
    if not one.is_sparse:
        return _sum_with_dense(one, other, alpha, out)
    if not other.is_sparse:
        raise RuntimeError("add(sparse, dense) is not supported. Use add(dense, sparse) instead.")
    if not other._nnz():
        return _aten.copy_sparse_to_sparse_.default(out, one)
    common = torch.result_type(one, other)
    first, second = one._values().to(common), other._values().to(common)
    if alpha != 1:
        second = second * alpha
    indices = torch.cat((one._indices(), other._indices()), 1)
    made = _tensor(indices, torch.cat((first, second), 0), one.shape)
    out.data = made.coalesce() if made._nnz() > made.numel() else made
    return out


def _sum_with_dense(dense: torch.Tensor, sparse: torch.Tensor, alpha: float, out: torch.Tensor) -> torch.Tensor:
    """`add_out_dense_sparse_cuda`: where elements may be there twice they are added by their places."""
    if not sparse._nnz():
        return out if out is dense else out.resize_(dense.shape).copy_(dense)
    common = torch.result_type(dense, sparse)
    result = out if out.dtype == common else torch.empty_like(dense, dtype=common)
    dense = dense.to(common)  # there until the end
    if result is not dense:
        result.resize_(dense.shape)
        result.copy_(dense)
    values = sparse._values().to(common)
    if values.numel() and not sparse.is_coalesced():
        indices = sparse._indices()
        flat = indices[0] if len(indices) == 1 else indices.new_empty(indices.shape[1])
        rows = sparse.shape[: len(indices)].numel()
        result.view(rows, -1).index_add_(0, flat, values.reshape(len(flat), -1), alpha=alpha)
    return out if result is out else out.copy_(result)


def _product(runtime: Runtime, one: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """sparse/SparseTensorMath.cpp, `_mul_dense_sparse_out`: values are multiplied by those that are in their places."""
    sparse, dense = (one, other) if one.is_sparse else (other, one)
    if dense.is_sparse or dense.ndim > sparse.ndim:
        raise _missing("mul.out", "Sparse")
    indices = sparse._indices()
    if dense.ndim:
        dense = dense.expand(sparse.shape)[tuple(indices)]
    made = _tensor(indices.clone(), (sparse._values() * dense).to(out.dtype), sparse.shape)
    out.data = _aten._coalesced_.default(made, sparse.is_coalesced())
    return out


def _matrix_product(
    runtime: Runtime,
    added: torch.Tensor,
    sparse: torch.Tensor,
    dense: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`s_addmm_out_sparse_dense_cuda`: by cuSPARSE, with 32-bit offsets of rows, and with the result transposed."""
    out = added.new_empty(0) if out is None else out
    out.resize_(sparse.shape[0], dense.shape[1])
    sparse = sparse.coalesce()
    indices = sparse._indices()
    integers = functools.partial(indices.new_empty, dtype=torch.int32)
    offsets, rows = integers(sparse.shape[0] + 1), integers(indices.shape[1])
    del rows
    columns = integers(indices.shape[1])
    if beta and out is not added:
        out.copy_(added)
    if sparse._nnz():
        _of_cusparse(runtime)
        transposed = out.stride() == (1, out.shape[0])
        result = out if transposed else out.t().clone(memory_format=torch.contiguous_format)
        dense = dense if dense.stride() == (1, dense.shape[0]) else dense.contiguous()
        if not transposed:
            out.copy_(result.t())
    del offsets, columns
    return out


def _matrix_product_in_place(
    runtime: Runtime, added: torch.Tensor, *factors: torch.Tensor, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return _matrix_product(runtime, added, *factors, beta=beta, alpha=alpha, out=added)


def _tensor(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    made: torch.Tensor = _aten._sparse_coo_tensor_unsafe.default(indices, values, shape)
    return made


def _compressed_product(
    runtime: Runtime, added: torch.Tensor, *factors: torch.Tensor, out: torch.Tensor, **scales: float
) -> torch.Tensor:
    """`addmm_out_sparse_compressed_cuda`, `addmv_out_sparse_compressed_cuda`: by cuSPARSE."""
    sparse, dense = factors
    if sparse.is_sparse or dense.layout is not torch.strided:
        raise _missing("addmm.out", "SparseCsr")
    if out is not added:
        out.resize_(sparse.shape[0], *dense.shape[1:])
        out.copy_(added)
    _of_cusparse(runtime)
    return out


def _to_layout(name: str, layout: torch.layout, other: torch.layout) -> Callable[..., Any]:
    """The kernel of `_to_sparse_csr` or `_to_sparse_csc`: that of the CPU, but of a matrix in the `other` layout."""
    usual = _redispatched(name, "SparseCsr")

    def kernel(runtime: Runtime, sparse: torch.Tensor, *args: object, **kwargs: object) -> Any:
        if sparse.ndim == 2 and sparse.layout is other:
            return _flipped(sparse, layout)
        return usual(runtime, sparse, *args, **kwargs)

    return kernel


def _flipped(sparse: torch.Tensor, layout: torch.layout) -> torch.Tensor:
    """TensorConversions.cpp, `sparse_compressed_to_flipped`, which sorts flat indices: as PyTorch 2.13.0+cu130
    allocated."""
    rows, columns = sparse.shape if layout is torch.sparse_csc else sparse.shape[::-1]
    values = sparse.values()
    integers = functools.partial(torch.empty, dtype=torch.int64, device=sparse.device)
    batches = torch.arange(1, device=sparse.device).cumsum(0)
    lengths, offsets = integers(rows), integers(rows + 1)
    del lengths
    pairs, places = integers(2, len(values)), [integers(len(values)) for _ in range(2)]
    del places
    flat, order = integers(len(values)).sort()
    indices, values = integers(2, len(values)), values.index_select(0, order)
    ends, counts = integers(columns + 1), integers(columns + 1)
    integers(columns)
    del counts, order, flat, pairs, offsets, batches
    return torch.sparse_compressed_tensor(ends, indices[0], values, sparse.shape, layout=layout)


def _missing(name: str, layout: str) -> NotImplementedError:
    """What PyTorch says of an operator without a kernel."""
    return NotImplementedError(f"Could not run 'aten::{name}' with such arguments from the '{layout}CUDA' backend")


def _of_cusparse(runtime: Runtime) -> None:
    runtime.note(f"{reader()} multiplies by a sparse matrix: what cuSPARSE itself takes is not counted")


def _coalesced(runtime: Runtime, tensor: torch.Tensor) -> torch.Tensor:
    """sparse/cuda/SparseCUDATensor.cu, `coalesce_sparse_cuda`: indices are sorted with their places, those that differ
    are kept in room for all, and values made for them; all of them differ, where they are unknown."""
    indices, values = _aten._indices.default(tensor), _aten._values.default(tensor)
    count = indices.shape[1]
    if count < 2:
        return _ready(tensor.clone())
    flat = indices[0].clone() if len(indices) == 1 else indices.new_empty(count)
    places, kept = torch.empty_like(flat), torch.empty_like(flat)
    for nbytes in (merge_sort_pairs(runtime.profile, count, 8, 8), unique_by_key_of_thrust(runtime.profile, count)):
        torch.empty(nbytes, dtype=torch.uint8, device=flat.device)
    found = _different(runtime, indices)
    runtime.synchronized()
    made = values.new_empty((found, *values.shape[1:]))
    values = values.contiguous()
    flat.resize_(1, found)
    if len(indices) > 1:
        flat = indices.new_empty((len(indices), found))
    del places, kept
    return _ready(_tensor(flat, made, tensor.shape))


def _ready(tensor: torch.Tensor) -> torch.Tensor:
    coalesced: torch.Tensor = _aten._coalesced_.default(tensor, True)
    return coalesced


def _different(runtime: Runtime, indices: torch.Tensor) -> int:
    known = runtime.values.of(indices)
    if known is not None:
        return int(torch.unique(known, dim=1).shape[1])
    runtime.assume("indices of a sparse tensor that differ", "that all do")
    return runtime.values.different(indices) if len(indices) == 1 else indices.shape[1]


#: By layout: what a CUDA build has for CUDA alone and is not here; in a CPU build it has no kernel.
_NOT_HERE: Final[dict[str, tuple[str, ...]]] = {
    "Sparse": (
        *("_sparse_softmax", "_sparse_softmax_backward_data", "_sparse_log_softmax"),
        *("_sparse_log_softmax_backward_data", "_sparse_sparse_matmul", "bmm", "bmm.out", "hspmm", "hspmm.out"),
    ),
    "SparseCsr": ("sparse_sampled_addmm", "sparse_sampled_addmm.out", "add.out", "triangular_solve.X"),
}

#: By layout and operator: what has a kernel of its own in a CUDA build.
_OF_CUDA: Final[dict[str, dict[str, Callable[..., Any]]]] = {
    "Sparse": {
        "_coalesce": _coalesced,
        "add.out": _sum,
        "mul.out": _product,
        "addmm": _matrix_product,
        "addmm.out": _matrix_product,
        "addmm_": _matrix_product_in_place,
    },
    "SparseCsr": {
        "addmm.out": _compressed_product,
        "addmv.out": _compressed_product,
        "_to_sparse_csr": _to_layout("_to_sparse_csr", torch.sparse_csr, torch.sparse_csc),
        "_to_sparse_csc": _to_layout("_to_sparse_csc", torch.sparse_csc, torch.sparse_csr),
    },
}
