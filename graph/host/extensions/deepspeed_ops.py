"""DeepSpeed's compiled optimizers, which it builds with CUDA's compiler when they are first used: they allocate what
they would, and compute nothing. That is so of those on the host too, whose numbers nobody reads.

Their states are made in Python, by DeepSpeed's own classes. What the extensions allocate is that of
csrc/adam/multi_tensor_adam.cu, csrc/lion/multi_tensor_lion.cu (nothing) and csrc/lamb/fused_lamb_cuda.cpp of DeepSpeed
0.19.8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Final

import torch

#: Sums of a norm in LAMB: one for each of this many blocks.
_BLOCKS: Final = 512


def loaded(builder: ModuleType) -> Callable[[], None]:
    """`deepspeed.ops.op_builder.builder` has built these already; gives what undoes that."""
    built: dict[str, ModuleType] = getattr(builder.OpBuilder, "_loaded_ops", {})  # releases of before it build anew
    before = dict(built)
    for name, functions in _FUNCTIONS.items():
        built[name] = ModuleType(name, __doc__)
        vars(built[name]).update(functions)

    def undo() -> None:
        built.clear()
        built.update(before)

    return undo


def _nothing(*operands: object) -> int:
    """A kernel that writes to its operands; those on the host say that all went well."""
    return 0


def _lamb(parameter: torch.Tensor, *operands: object) -> torch.Tensor:
    """The coefficient, (1,); sums of the norms of the parameter and of its update are gone when it is launched."""
    dtype = torch.float32 if parameter.dtype == torch.float16 else parameter.dtype
    sums = [parameter.new_empty(_BLOCKS, dtype=dtype) for _ in range(2)]
    coefficient = parameter.new_empty(1, dtype=dtype)
    del sums
    return coefficient


def _on_host(optimizer: str) -> Mapping[str, Callable[..., object]]:
    did = ("create_{}", "{}_update", "{}_update_copy", "{}_rollback", "destroy_{}")
    return dict.fromkeys((one.format(optimizer) for one in did), _nothing)


#: The functions of each extension, by its name and theirs.
_FUNCTIONS: Final[Mapping[str, Mapping[str, Callable[..., object]]]] = {
    "fused_adam": {"multi_tensor_adam": _nothing},
    "fused_lion": {"multi_tensor_lion": _nothing},
    "fused_lamb": {"lamb": _lamb},
    "cpu_adam": _on_host("adam"),
    "cpu_lion": _on_host("lion"),
    "cpu_adagrad": _on_host("adagrad"),
}
