"""DeepSpeed's compiled optimizers and the quantizer of ZeRO++, which it builds with CUDA's compiler when they are first
used: they allocate what they would, and compute nothing. That is so of those on the host too, whose numbers nobody
reads.

States of optimizers are made in Python, by DeepSpeed's own classes. What the extensions allocate is that of
csrc/adam/multi_tensor_adam.cu, csrc/lion/multi_tensor_lion.cu (nothing), csrc/lamb/fused_lamb_cuda.cpp and
csrc/quantization/pt_binding.cpp of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import enum
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


class _Quantization(enum.IntEnum):
    """The extension's `QuantizationType`; the value is how many more than its scale a group keeps (its offset)."""

    Symmetric = 0
    Asymmetric = 1


def _scales(like: torch.Tensor, groups: int, kind: _Quantization) -> torch.Tensor:
    return like.new_empty((groups, 1 + kind), dtype=torch.float32)


def _quantize(values: torch.Tensor, groups: int, bits: int, kind: _Quantization) -> list[torch.Tensor]:
    """Codes of 8 bits, or two of 4 in a byte along the last dimension, and what each group was scaled by."""
    scales = _scales(values, groups, kind)
    codes = values.new_empty((*values.shape[:-1], values.shape[-1] // (1 if bits == 8 else 2)), dtype=torch.int8)
    return [codes, scales]


def _dequantize(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    def dequantize(codes: torch.Tensor, scales: torch.Tensor, groups: int, bits: int, kind: int) -> torch.Tensor:
        return codes.new_empty((*codes.shape[:-1], codes.shape[-1] * (1 if bits == 8 else 2)), dtype=dtype)

    return dequantize


def _dequantize_groups(
    codes: torch.Tensor, scales: torch.Tensor, lowest: torch.Tensor, groups: int, size: int
) -> torch.Tensor:
    return codes.new_empty((groups, size), dtype=torch.float16)


def _swizzle_quant(
    values: torch.Tensor, groups: int, bits: int, kind: _Quantization, pipeline: int, nodes: int, devices: int
) -> list[torch.Tensor]:
    """The same in the order in which ranks send it, of one dimension."""
    scales = _scales(values, groups, kind)
    return [values.new_empty(values.numel() // (8 // bits), dtype=torch.int8), scales]


def _quantized_reduction(
    codes: torch.Tensor, scales: torch.Tensor, groups: int, out: int, bits: int, kind: _Quantization, devices: int
) -> list[torch.Tensor]:
    """Codes of the sum of what `devices` ranks have sent."""
    sums = _scales(codes, out, kind)
    return [codes.new_empty((*codes.shape[:-1], codes.shape[-1] // devices)), sums]


def _on_host(optimizer: str) -> Mapping[str, Callable[..., object]]:
    did = ("create_{}", "{}_update", "{}_update_copy", "{}_rollback", "destroy_{}")
    return dict.fromkeys((one.format(optimizer) for one in did), _nothing)


#: The functions of each extension, and its constants, by its name and theirs.
_FUNCTIONS: Final[Mapping[str, Mapping[str, object]]] = {
    "fused_adam": {"multi_tensor_adam": _nothing},
    "fused_lion": {"multi_tensor_lion": _nothing},
    "fused_lamb": {"lamb": _lamb},
    "quantizer": {
        "QuantizationType": _Quantization,
        **_Quantization.__members__,
        "quantize": _quantize,
        "dequantize": _dequantize(torch.float16),
        "dequantize_fp32": _dequantize(torch.float32),
        "dequantize_int4_to_half_experimental": _dequantize_groups,
        "dequantize_int8_to_half_experimental": _dequantize_groups,
        "swizzle_quant": _swizzle_quant,
        "quantized_reduction": _quantized_reduction,
    },
    "cpu_adam": _on_host("adam"),
    "cpu_lion": _on_host("lion"),
    "cpu_adagrad": _on_host("adagrad"),
}
