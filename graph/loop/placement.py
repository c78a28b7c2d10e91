"""Puts a model on the device as `module.to(device)` does, tensor by tensor, so that births come in the same order."""

from __future__ import annotations

from collections.abc import Callable

import torch

from graph.model import TensorInfo
from graph.recorder.recorder import Recorder


def place(
    recorder: Recorder, module: torch.nn.Module, *, keep: Callable[[torch.Tensor], bool] = lambda tensor: False
) -> dict[str, int]:
    """Give every meta parameter and buffer of `module` a storage on the recorder's device; answers name -> storage.

    `Module._apply` (torch/nn/modules/module.py) walks children first, then a module's parameters, then its
    buffers, and moves a shared tensor once. A plain attribute that is a tensor stays on the host. Tensors for which
    `keep` holds are left alone. A tied parameter has one storage and several names.
    """
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            new = torch.empty_like(tensor, device=recorder.device)
            if isinstance(tensor, torch.nn.Parameter):
                new = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
            moved[id(tensor)] = (new, tensor)
        return moved[id(tensor)][0]

    def walk(part: torch.nn.Module) -> None:
        for child in part.children():
            walk(child)
        for name, value in list(vars(part).items()):
            if isinstance(value, torch.Tensor) and value.is_meta:
                setattr(part, name, torch.empty_like(value, device="cpu"))
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None and not keep(tensor):
                    table[name] = move(tensor)  # type: ignore[assignment]

    walk(module)
    moved.clear()  # `walk` refers to itself: without this the old and new tensors would live until a garbage collection
    numbers = {name: recorder.number(tensor) for name, tensor in _named(module)}
    return {name: number for name, number in numbers.items() if number >= 0}


def _named(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """All names of parameters and buffers, a tied one under each of its names."""
    parameters = list(module.named_parameters(remove_duplicate=False))
    return [*parameters, *module.named_buffers(remove_duplicate=False)]


def described(recorder: Recorder, module: torch.nn.Module) -> tuple[TensorInfo, ...]:
    """The parameters, then the buffers, of a placed module; a tied one once."""

    def info(name: str, tensor: torch.Tensor, kind: str) -> TensorInfo:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return TensorInfo(name, tuple(tensor.shape), dtype, tensor.requires_grad, kind, recorder.number(tensor))

    parameters = [info(name, tensor, "parameter") for name, tensor in module.named_parameters()]
    return (*parameters, *(info(name, tensor, "buffer") for name, tensor in module.named_buffers()))
