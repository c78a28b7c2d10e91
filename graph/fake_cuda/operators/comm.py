"""What PyTorch copies between the GPUs of one process (`torch.nn.parallel`): its C++ is in builds for CUDA alone.

As in torch/csrc/cuda/comm.cpp. What NCCL would do is done by copies, which allocate as little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from graph.fake_cuda.torch_private import BINDINGS, flatten_dense, unflatten_dense
from graph.workspaces.metadata import suggests_channels_last

Tensors = list[torch.Tensor]

#: The number by which `gather` knows the host.
_HOST: Final = -1
#: Dimensions of a batch of images.
_IMAGES: Final = 4


def changes() -> list[tuple[Any, str, Any]]:
    """Owner, name and function of each."""
    names = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")
    nccl = {f"_nccl_{name}": _by_nccl for name in names}
    answers = nccl | {
        "_broadcast": _broadcast,
        "_broadcast_out": _broadcast_out,
        "_broadcast_coalesced": _broadcast_coalesced,
        "_scatter": _scatter,
        "_scatter_out": _scatter_out,
        "_gather": _gather,
        "_gather_out": _gather_out,
    }
    return [(BINDINGS, name, answer) for name, answer in answers.items()]


def _by_nccl(*args: object) -> None:
    """What is written has no values."""


def _broadcast_out(tensor: torch.Tensor, out: Tensors) -> Tensors:
    for target in out:
        target.copy_(tensor, non_blocking=True)
    return out


def _broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> Tensors:
    """A tensor on each device: itself where it is."""
    here = tensor.get_device()
    copies = {
        device: torch.empty_like(tensor, device=torch.device("cuda", device)) for device in devices if device != here
    }
    _broadcast_out(tensor, list(copies.values()))
    return [copies.get(device, tensor) for device in devices]


def _broadcast_coalesced(tensors: Tensors, devices: Sequence[int], buffer_size: int) -> list[Tensors]:
    """Tensors on each device: themselves on the first, on others views of what was sent together."""
    if any(tensor.get_device() != devices[0] for tensor in tensors):
        raise RuntimeError(f"All tensors must be on devices[0]: {devices[0]}")
    places: list[dict[int, torch.Tensor]] = [{} for _ in devices[1:]]
    with torch.cuda.device(devices[0]):
        for group in _together(tensors, buffer_size):
            sent = _sent([tensors[place] for place in group], devices)
            for found, views in zip(places, sent, strict=True):
                found.update(zip(group, views, strict=True))
    return [list(tensors), *([found[place] for place in range(len(tensors))] for found in places)]


def _sent(tensors: Tensors, devices: Sequence[int]) -> list[Tensors]:
    """Tensors of one dtype on each device but the first, as views of one."""
    _, *sent = _broadcast(flatten_dense(tensors), devices)
    return [[view.data for view in unflatten_dense(flat, tensors)] for flat in sent]


def _together(tensors: Tensors, most: int) -> Iterator[list[int]]:
    """Which tensors are sent together: of one dtype, until they have so many bytes (take_tensors,
    torch/csrc/utils/tensor_flatten.cpp)."""
    groups: dict[torch.dtype, list[int]] = {}
    sizes: Counter[torch.dtype] = Counter()
    for place, tensor in enumerate(tensors):
        dtype = tensor.dtype
        groups.setdefault(dtype, []).append(place)
        sizes[dtype] += tensor.nbytes
        if sizes[dtype] >= most:
            sizes[dtype] = 0
            yield groups.pop(dtype)
    yield from groups.values()


def _scatter(
    tensor: torch.Tensor,
    devices: Sequence[int],
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Sequence[Any] | None = None,
) -> Tensors:
    """Parts of a tensor, each copied to its device on its stream."""
    parts = tensor.chunk(len(devices), dim) if sizes is None else tensor.split_with_sizes(list(sizes), dim)
    found = []
    for part, device, stream in zip(parts, devices, streams or [None] * len(devices), strict=False):
        with torch.cuda.stream(None if device == tensor.get_device() else stream):
            found.append(part.to(torch.device("cuda", device), non_blocking=True))
    return found


def _scatter_out(tensor: torch.Tensor, out: Tensors, dim: int = 0, streams: Sequence[Any] | None = None) -> Tensors:
    parts = tensor.split_with_sizes([one.size(dim) for one in out], dim)
    for target, part, stream in zip(out, parts, streams or [None] * len(out), strict=True):
        with torch.cuda.stream(stream):
            target.copy_(part, non_blocking=True)
    return out


def _gather(tensors: Tensors, dim: int, destination: int | None = None) -> torch.Tensor:
    """Tensors behind one another on a device (-1: on the host; None: on the current GPU)."""
    first = tensors[0]
    for place, tensor in enumerate(tensors):
        _fits(place, tensor, first, dim)
    shape = list(first.shape)
    shape[dim] = sum(tensor.size(dim) for tensor in tensors)
    last = all(suggests_channels_last(tensor.shape, tensor.stride()) for tensor in tensors)
    images = torch.channels_last if first.dim() == _IMAGES else torch.channels_last_3d
    out = torch.empty(
        shape,
        dtype=first.dtype,
        device="cpu" if destination == _HOST else "cuda" if destination is None else f"cuda:{destination}",
        memory_format=images if last else torch.contiguous_format,
    )
    return _gather_out(tensors, out, dim)


def _fits(place: int, tensor: torch.Tensor, first: torch.Tensor, dim: int) -> None:
    """RuntimeError where a tensor does not go behind the first one."""
    which = f"tensor at index {place}"
    if not tensor.is_cuda:
        raise RuntimeError(f"Expected all input tensors to be CUDA tensors, but {which} has device {tensor.device}")
    if tensor.dim() != first.dim():
        said = f"{which}has {tensor.dim()} dimensions, (expected {first.dim()})"
        raise RuntimeError(f"Expected all input tensors to have the same number of dimensions, but {said}")
    expected = [*first.shape]
    expected[dim] = tensor.size(dim)
    if [*tensor.shape] != expected:
        raise RuntimeError(f"Input {which} has invalid shape {[*tensor.shape]}, but expected {expected}")


def _gather_out(tensors: Tensors, out: torch.Tensor, dim: int) -> torch.Tensor:
    parts = out.split_with_sizes([one.size(dim) for one in tensors], dim)
    for part, tensor in zip(parts, tensors, strict=True):
        part.copy_(tensor, non_blocking=out.is_cuda)
    return out
