"""What ProcessGroupNCCL refuses, in its words, before a collective begins.

After torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (`check_gpu_single_tensor`, each collective's own checks,
`getNcclDataType`, `getNcclReduceOp`) and Utils.hpp (`checkSplitSizes`, `assertRootRank`, `assertTypeAndSizesMatch`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist

#: The dtypes that NCCL moves.
_MOVED: Final = frozenset(
    {
        *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    }
)
#: PyTorch's names of dtypes that it does not.
_NAMES: Final = {
    torch.int16: "Short",
    torch.uint16: "UInt16",
    torch.uint32: "UInt32",
    torch.uint64: "UInt64",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}
#: Collectives that take complex numbers, as pairs of real ones.
_COMPLEX: Final = frozenset({"allreduce_", "broadcast_", "reduce_", "allgather_", "_allgather_base_"})
#: Reductions that NCCL does not have.
_BITWISE: Final = ("BAND", "BOR", "BXOR")

Given: TypeAlias = Mapping[str, Any]
Tensors: TypeAlias = Sequence[torch.Tensor]
#: What looks at a collective's arguments, the group's size and this rank's place: it gives the tensors that are moved.
Check: TypeAlias = Callable[[Given, int, int], Tensors]


def checked(
    name: str,
    given: Given,
    members: int,
    rank: int,
    asked: Callable[[], object],
    bound: torch.device | None = None,
) -> None:
    """Raise what NCCL's process group raises of a collective's arguments: ValueError, TypeError or RuntimeError.

    `name` is c10d's operator's, `given` its arguments by name, `members` and `rank` the group's; `asked()` says which
    reduction is asked for. `bound`: the only device that the group has (`initNCCLComm`).
    """
    check = _CHECKS.get(name)
    if check is not None:
        moved = check(given, members, rank)
        _reducible(name, moved, asked)
        _movable(name, moved)
        if bound is not None and any(tensor.device != bound for tensor in moved):
            raise dist.DistBackendError(
                "Attempt to perform collective on tensor not on device passed to init_process_group"
            )


def _plain(*tensors: torch.Tensor) -> None:
    """`check_gpu_single_tensor`."""
    for tensor in tensors:
        if not tensor.is_cuda or tensor.layout is not torch.strided:
            raise ValueError("Tensors must be CUDA and dense")
        if not tensor.is_contiguous() and not _is_channels_last(tensor):
            raise ValueError("Tensors must be contiguous")


def _is_channels_last(tensor: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.ndim in formats and tensor.is_contiguous(memory_format=formats[tensor.ndim])


def _alone(given: Given, members: int, rank: int) -> Tensors:
    tensors: Tensors = given["tensors"]
    if tensors[0].layout is not torch.strided and "reduce_op" in given:
        raise RuntimeError("NCCL does not support all_reduce with sparse tensors. Please use dense tensors instead.")
    _plain(*tensors)
    return tensors


def _gathered_whole(given: Given, members: int, rank: int) -> Tensors:
    output, source = given["output_tensor"], given["input_tensor"]
    _plain(source, output)
    if source.dtype is not output.dtype:
        raise TypeError("output tensor must have the same type as input tensor")
    if source.numel() * members != output.numel():
        raise ValueError("output tensor size must be equal to world_size times input tensor size")
    return [source]


def _scattered_whole(given: Given, members: int, rank: int) -> Tensors:
    output, source = given["output_tensor"], given["input_tensor"]
    if source.dtype is not output.dtype:
        raise TypeError("input tensor must be the same type as the output tensor.")
    if source.numel() != output.numel() * members:
        raise ValueError("input tensor must be the same size as output size times world size")
    return [source]


def _each(side: str) -> Check:
    """Of lists, those of which a rank has its own."""

    def check(given: Given, members: int, rank: int) -> Tensors:
        tensors: Tensors = given[side]
        _plain(*tensors)
        return tensors

    return check


def _at_root(name: str, side: str, own: str) -> Check:
    """Of the root's tensors, a list at `side`, and of those that each rank has, at `own`."""

    def check(given: Given, members: int, rank: int) -> Tensors:
        tensors: Tensors = given[own]
        _rooted(name, given, members)
        _plain(*tensors)
        if rank == given["root_rank"]:
            _of_each(name, side, given[f"{side.lower()}_tensors"][0], tensors[0], members)
        return tensors

    return check


def _rooted(name: str, given: Given, members: int) -> None:
    if not 0 <= given["root_rank"] < members:
        raise ValueError(f"ProcessGroupNCCL::{name}: invalid root rank: {given['root_rank']}")


def _of_each(name: str, side: str, tensors: Tensors, like: torch.Tensor, members: int) -> None:
    """At the root there is a tensor for each rank, all like that of one."""
    if len(tensors) != members:
        said = f"Incorrect {side.lower()} list size {len(tensors)}. {side} list size should be {members}"
        raise ValueError(f"ProcessGroupNCCL::{name}: {said}, same as size of the process group.")
    for place, tensor in enumerate(tensors):
        if tensor.shape != like.shape:
            expected, got = ("(" + ", ".join(map(str, one.shape)) + ")" for one in (like, tensor))
            said = f"invalid tensor size at index {place} (expected {expected}, got {got})"
            raise ValueError(f"ProcessGroupNCCL::{name}: {said}")


def _exchanged_whole(given: Given, members: int, rank: int) -> Tensors:
    output, source = given["output"], given["input"]
    _plain(output, source)
    sizes = given["input_split_sizes"], given["output_split_sizes"]
    for splits, tensor in zip(sizes, (source, output), strict=True) if any(map(len, sizes)) else ():
        _split(splits, tensor, members)
    return [source]


def _split(sizes: Sequence[int], tensor: torch.Tensor, members: int) -> None:
    """`checkSplitSizes`."""
    rows = tensor.shape[0] if tensor.ndim else 0
    if not sizes:
        if rows % members:
            raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
        return
    if len(sizes) != members:
        raise RuntimeError("Number of tensor splits not equal to group size")
    if sum(sizes) != rows:
        raise RuntimeError("Split sizes doesn't match total dim 0 size")


def _exchanged_list(given: Given, members: int, rank: int) -> Tensors:
    for output, source in zip(given["output_tensors"], given["input_tensors"], strict=False):
        _plain(output, source)
    return list(given["input_tensors"])


def _reducible(name: str, moved: Tensors, asked: Callable[[], object]) -> None:
    if "reduce" not in name:
        return
    operation = asked()
    for unknown in _BITWISE:
        if operation == getattr(dist.ReduceOp, unknown):
            raise ValueError(f"Cannot use ReduceOp.{unknown} with NCCL")
    if operation == dist.ReduceOp.AVG and any(tensor.dtype is torch.bool for tensor in moved):
        raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")


def _movable(name: str, moved: Tensors) -> None:
    for tensor in moved:
        if tensor.dtype not in _MOVED and not (tensor.is_complex() and name in _COMPLEX):
            said = _NAMES.get(tensor.dtype, str(tensor.dtype))
            if name.startswith(("alltoall", "gather", "scatter")):
                raise RuntimeError(f"Unconvertible NCCL type {said}")
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {said}")


_CHECKS: Final[Mapping[str, Check]] = {
    "allreduce_": _alone,
    "broadcast_": _alone,
    "reduce_": _alone,
    "_allgather_base_": _gathered_whole,
    "_reduce_scatter_base_": _scattered_whole,
    "allgather_": _each("input_tensors"),
    "reduce_scatter_": _each("output_tensors"),
    "gather_": _at_root("gather", "Output", own="input_tensors"),
    "scatter_": _at_root("scatter", "Input", own="output_tensors"),
    "alltoall_base_": _exchanged_whole,
    "alltoall_": _exchanged_list,
}
