"""The private names of PyTorch that captures need, each in one place, with what it is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch._ops import OpOverload

#: One overload of an operator, such as `aten.add.Tensor`; kernels and observers read its private `_schema`.
Operator: TypeAlias = "OpOverload[..., Any]"
