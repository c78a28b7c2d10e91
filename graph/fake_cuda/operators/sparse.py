"""Sparse tensors of CUDA builds, whose kernels ask the GPU how many elements there are: how many of them differ.

The other kernels of sparse tensors are PyTorch's own, which are written in operators; a CPU build has none of them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

import torch

from graph.workspaces.cub.temporary import merge_sort_pairs, unique_by_key_of_thrust

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime

_aten: Final = torch.ops.aten


def install(runtime: Runtime) -> None:
    """Have sparse tensors coalesced, where PyTorch's own kernel would find nothing on a GPU that is not there."""
    runtime.override("aten::_coalesce", functools.partial(_coalesced, runtime), ("SparseCUDA",))


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
    return _ready(_aten._sparse_coo_tensor_unsafe.default(flat, made, tensor.shape))


def _ready(tensor: torch.Tensor) -> torch.Tensor:
    coalesced: torch.Tensor = _aten._coalesced_.default(tensor, True)
    return coalesced


def _different(runtime: Runtime, indices: torch.Tensor) -> int:
    known = runtime.values.of(indices)
    if known is not None:
        return int(torch.unique(known, dim=1).shape[1])
    runtime.assume("indices of a sparse tensor that differ", "that all do")
    return runtime.values.different(indices) if len(indices) == 1 else indices.shape[1]
