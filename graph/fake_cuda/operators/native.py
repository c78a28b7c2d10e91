"""Which operators have a kernel in a CUDA build: those with such an entry in PyTorch's own `native_functions.yaml`.

The file ships with every wheel, in torchgen. All other operators are made of these, by PyTorch's own C++.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
import torchgen  # type: ignore[import-untyped]

from graph.errors import CaptureError

if TYPE_CHECKING:
    from graph.fake_cuda.torch_private import Operator

#: Operators that ask DispatchStub without an entry for CUDA in native_functions.yaml, and one that reads values.
_ALSO: Final = ("copy_", "ldexp.Tensor", "ldexp.out", "mode.values", "_linalg_check_errors")


@functools.cache
def cuda_operators() -> tuple[str, ...]:
    """Names (`add.Tensor`) of the operators that have a kernel of their own in a CUDA build of this PyTorch."""
    return tuple(name for name, kernels in _kernels().items() if any("CUDA" in keys for keys in kernels))


@functools.cache
def shared_operators(layout: str) -> tuple[str, ...]:
    """Names of the operators that have one kernel, written in operators, for CPU and CUDA, of tensors of a layout as
    dispatch keys name it (`Sparse`, `SparseCsr`, `NestedTensor`)."""
    both = {f"{layout}CPU", f"{layout}CUDA"}
    return tuple(name for name, kernels in _kernels().items() if any(both <= keys for keys in kernels))


@functools.cache
def _kernels() -> Mapping[str, Sequence[Set[str]]]:
    """By operator: the dispatch keys of each of its kernels."""
    path = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    kernels: dict[str, list[Set[str]]] = {}
    delegate: dict[str, str] = {}
    for name, entry in _entries(path.read_text()):
        kernels[name] = []
        inside = False
        for line in entry:
            if line.startswith("  dispatch:"):
                inside = True
            elif line.startswith("    ") and inside:
                if not line.lstrip().startswith("#"):
                    kernels[name].append({key.strip() for key in line.partition(":")[0].split(",")})
            elif line.startswith("  ") and not line.lstrip().startswith("#"):
                inside = False
                if line.startswith("  ufunc_inner_loop:"):  # torchgen/dest/ufunc.py makes its CUDA kernel
                    kernels[name].append({"CUDA"})
                if line.startswith("  structured_delegate:"):
                    delegate[name] = line.partition(":")[2].strip()
    if not delegate:
        raise CaptureError(f"{path}: no operators found; this PyTorch is not laid out as expected")
    for name, base in delegate.items():
        kernels[name].extend(keys & {"CUDA"} for keys in kernels.get(base, ()))
    return kernels


def _entries(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each operator's name, and the lines of its entry."""
    name = ""
    lines: list[str] = []
    for line in text.splitlines():
        found = re.match(r"- func: ([\w.]+)\(", line)
        if found is not None:
            if name:
                yield name, lines
            name, lines = found[1], []
        else:
            lines.append(line)
    if name:
        yield name, lines


@functools.cache
def operator(name: str) -> Operator:
    """The overload called `name` (`add.Tensor`, `mm`) of aten."""
    packet, _, overload = name.partition(".")
    found: Operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return found


@functools.cache
def functional(func: Operator) -> Operator:
    """The overload that makes what `func` writes into arguments `out=` (`sort.values_stable`: `sort.stable`), or
    `func`."""
    given = [(one.name, str(one.type)) for one in func._schema.arguments if not one.is_out]
    if len(given) == len(func._schema.arguments):
        return func
    packet = func._overloadpacket
    for name in packet.overloads():  # type: ignore[no-untyped-call]
        other: Operator = getattr(packet, name)
        if [(one.name, str(one.type)) for one in other._schema.arguments] == given:
            return other
    return func


def names() -> tuple[str, ...]:
    """Every operator that gets a kernel."""
    return (*cuda_operators(), *_ALSO)
