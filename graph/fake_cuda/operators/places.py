"""Operands on the host and on the device at once, which PyTorch refuses before CUDA's kernel runs, with its words.

In a process with several GPUs, an operator runs on that of its first tensor, or on the one that it names, and all its
tensors are there.

Around most kernels torchgen writes a check that all tensors are on one device, numbers too. Operators of TensorIterator
have `device_check: NoCheck` in torchgen's table, which comes with PyTorch: they check for themselves, and take one
number from the host as an operand.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, SupportsIndex, cast

import torch

from graph.fake_cuda.torch_private import current_device, set_device
from graph.workspaces.metadata import tensors

if TYPE_CHECKING:
    from graph.fake_cuda.torch_private import Operator

#: Where torchgen's table lies in its package.
_TABLE: Final = "packaged/ATen/native/native_functions.yaml"
#: Write what they are given from wherever it is.
_CARRIED: Final = frozenset({"copy_", "fill_", "masked_fill_", "_foreach_copy_"})


#: Say that of their indices (makeIndices and checks of TensorAdvancedIndexing.cpp).
_INDEXED: Final = frozenset({"index", "_unsafe_index"})
#: Takes indices and a single value to where it writes (makeInfo, `_index_put_impl_`).
_WRITTEN_AT: Final = "_index_put_impl_"
#: Takes single values to where the others are (where_self_out).
_CHOOSING: Final = "where"
#: Operators of lists that take no memory beside their outputs where they go through tensors one by one.
_ONE_BY_ONE: Final[Mapping[str, Callable[..., torch.Tensor]]] = {
    "_foreach_norm": torch.linalg.vector_norm,
    "_foreach_max": torch.max,
}


def checked(func: Operator, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that begins with PyTorch's check."""

    def called(*args: object, **kwargs: object) -> Any:
        together(func, args, kwargs)
        return kernel(*args, **kwargs)

    return called


def number_of(device: object) -> int | None:
    """The number of the GPU that is named by a number, a name or a device; None where that has none."""
    if hasattr(type(device), "__index__"):
        index: int | None = int(cast("SupportsIndex", device))
    else:
        index = getattr(torch.device(device) if isinstance(device, str) else device, "index", None)
    return None if index is None or index < 0 else index


def on_its_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel in a process with several GPUs: where it runs is current meanwhile."""

    def called(*args: object, **kwargs: object) -> Any:
        return _run_on(next(_devices(args, kwargs), None), kernel, args, kwargs)

    return called


def _devices(args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[torch.device]:
    """The GPUs of an operator's tensors, else the one that it names."""
    found = False
    for value in (*args, *kwargs.values()):
        for tensor in tensors(value):
            if tensor.is_cuda:
                found = True
                yield tensor.device
    named = kwargs.get("device")
    if not found and isinstance(named, torch.device) and named.type == "cuda":
        yield named


def _run_on(
    device: torch.device | None, kernel: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
) -> Any:
    """What a kernel makes while a GPU is current (None, or without a number: as it is)."""
    before = current_device()
    if device is None or device.index in (None, before):
        return kernel(*args, **kwargs)
    set_device(device.index)
    try:
        return kernel(*args, **kwargs)
    finally:
        set_device(before)


def on_one_device(func: Operator, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The same, and RuntimeError for tensors on more than one, as PyTorch has it. Of lists (the `_foreach_` operators)
    those of each GPU are done apart."""
    carried, of_lists = func._opname in _CARRIED, func._opname.startswith("_foreach_")

    def called(*args: object, **kwargs: object) -> Any:
        devices = tuple(dict.fromkeys(_devices(args, kwargs)))
        if carried or len(devices) < 2:
            return _run_on(devices[0] if devices else None, kernel, args, kwargs)
        if of_lists:
            return _by_device(func, called, args, kwargs)
        if func._opname == _WRITTEN_AT:
            return called(*_brought(args), **kwargs)
        if func._opname == _CHOOSING and (near := _near(args)) is not args:
            return called(*near, **kwargs)
        together(func, args, kwargs)
        if func._opname in _INDEXED:
            raise RuntimeError(
                f"indices should be either on cpu or on the same device as the indexed tensor ({devices[0]})"
            )
        written = (tensor.device for tensor in tensors(kwargs.get("out")))  # comes first
        raise apart(*[*dict.fromkeys((*written, *devices))][:2])

    return called


def _near(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `where`, of which single values come to the others."""
    here = next((one.device for one in args if one.dim()), args[0].device)
    away = [one.is_cuda and not one.dim() and one.device != here for one in args]
    return tuple(one.to(here) if far else one for one, far in zip(args, away, strict=True)) if any(away) else args


def _brought(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an operator that writes at indices, which come to its target as a single value does."""
    target, indices, value, *rest = args
    here = target.device
    if value.is_cuda and value.device != here and value.dim():
        raise apart(here, value.device)
    moved: list[Any] = []
    for one in indices:
        away = isinstance(one, torch.Tensor) and one.is_cuda and one.device != here
        places = one.nonzero().unbind(1) if away and one.dtype in (torch.bool, torch.uint8) else (one,)
        moved += [place.to(here) for place in places] if away else places
    return (target, moved, value.to(here) if value.is_cuda else value, *rest)


def _by_device(func: Operator, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a kernel makes of lists of tensors on several GPUs, one GPU at a time; of some it takes one by one."""
    first = args[0]
    for one, *beside in zip(*(value for value in args if _is_beside(value, first)), strict=True):
        away = [t.device for t in beside if isinstance(t, torch.Tensor) and t.dim() and t.device != one.device]
        if away:
            raise apart(one.device, away[0])
    if func._opname in _ONE_BY_ONE:
        return [_ONE_BY_ONE[func._opname](one, *args[1:], **kwargs) for one in first]
    made: list[Any] = [None] * len(first)
    for device in dict.fromkeys(tensor.device for tensor in first):
        places = [place for place, tensor in enumerate(first) if tensor.device == device]
        part = [[value[place] for place in places] if _is_beside(value, first) else value for value in args]
        for place, one in zip(places, kernel(*part, **kwargs) or (), strict=False):
            made[place] = one
    return None if made[0] is None else made  # in place


def _is_beside(value: object, first: Sequence[object]) -> bool:
    """Whether an argument has an entry for each of the first one's."""
    return isinstance(value, list | tuple) and len(value) == len(first)


def together(func: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """RuntimeError where PyTorch refuses tensors of these devices."""
    if len({tensor.device for value in (*args, *kwargs.values()) for tensor in tensors(value)}) < 2:
        return
    method = _check(func)
    if method is None:
        return
    arguments = func._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)
    ordered = sorted((a for a in arguments if a.is_out or not a.kwarg_only), key=lambda a: not a.is_out)
    common: torch.device | None = None
    for argument in ordered:
        for tensor in tensors(given.get(argument.name)):
            common = common or tensor.device
            if tensor.device != common:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but got {argument.name} is on {tensor.device}, "
                    f"different from other tensors on {common} (when checking argument in method {method})"
                )


def written(func: Operator, operands: Sequence[Any]) -> None:
    """RuntimeError where an operator of TensorIterator would write something of the device into a tensor of the host,
    the first operand, or takes more from the host than numbers."""
    given = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    target, device = given[0], next((tensor.device for tensor in given if tensor.is_cuda), None)
    if device is None or func._opname in _CARRIED:
        return
    if not target.is_cuda or any(tensor.dim() for tensor in given if not tensor.is_cuda):
        raise apart(device, torch.device("cpu"))


def apart(one: torch.device, other: torch.device) -> RuntimeError:
    """What operators of TensorIterator raise of operands on two devices."""
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {one} and {other}!"
    )


@functools.cache
def _table() -> Mapping[str, str]:
    """What torchgen's table says of each operator."""
    found = importlib.util.find_spec("torchgen")
    places = () if found is None else tuple(found.submodule_search_locations or ())
    path = next((path for place in places if (path := Path(place, _TABLE)).is_file()), None)
    if path is None:
        return {}
    rows = re.split(r"^- func: ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {row.partition("(")[0]: row for row in rows}


@functools.cache
def _check(func: Operator) -> str | None:
    """The name of the function in which PyTorch checks an operator's devices; None where it does not."""
    name, overload = func._opname, func._overloadname.removeprefix("default")
    named = f"{name}.{overload}".rstrip(".")
    out = "_out" if any(argument.is_out for argument in func._schema.arguments) else ""
    row = _table().get(named, "") if func.namespace == "aten" else ""
    if "structured_delegate:" in row or "structured: True" in row:
        method = named.replace(".", "_")
    elif re.search(r"^ +[\w, ]*\bCUDA\b", row, re.MULTILINE):
        method = f"{overload}_{name}"
    else:
        return None
    return None if "device_check: NoCheck" in row else f"wrapper_CUDA_{method}{out}"
