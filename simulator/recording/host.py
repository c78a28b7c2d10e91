"""Large floating-point tensors on the host are memory that nobody touches: what would fill them does nothing.

They have no values on the device either, and memory that is never written takes none of the machine.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch
from torch.nn import init

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime

#: Tensors of as many bytes are large.
LARGE: Final = 4 << 20
#: What initialisers, copies and optimizers of offloaded parameters are made of.
_RANDOM: Final = (
    "bernoulli_.Tensor",
    "bernoulli_.float",
    "cauchy_",
    "exponential_",
    "log_normal_",
    "normal_",
    "random_",
)
_WRITING: Final = (
    *(
        "add_.Tensor",
        "addcdiv_",
        "addcmul_",
        "clamp_",
        "copy_",
        "div_.Tensor",
        "erfinv_",
        "fill_.Scalar",
        "fill_.Tensor",
    ),
    *("lerp_.Scalar", "lerp_.Tensor", "mul_.Tensor", "sqrt_", "sub_.Tensor", "uniform_", "zero_", *_RANDOM),
)
_DTYPES: Final = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_CPU: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def is_large(tensor: torch.Tensor) -> bool:
    """Whether a tensor on the host has no values."""
    return tensor.nbytes >= LARGE and (tensor.is_floating_point() or tensor.is_complex())


@contextlib.contextmanager
def untouched(runtime: Runtime) -> Iterator[None]:
    """Inside, what writes large tensors on the host leaves them as they are."""
    for name in _WRITING:
        runtime.override(f"aten::{name}", _kernel(name), ("CPU",))
    truncated = _truncated(runtime, init._no_grad_trunc_normal_)
    with mock.patch.object(init, "_no_grad_trunc_normal_", truncated):
        yield


def _kernel(name: str) -> Callable[..., Any]:
    plain = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed
    takes_tensor = name.endswith(".Tensor") or name == "copy_"

    def kernel(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_large(tensor):
            return tensor
        if takes_tensor and args[0].__class__ in _DTYPES:  # a number comes here as Python's own
            args = (_tensor(args[0]), *args[1:])
        return plain(_CPU, tensor, *args, **kwargs)

    return kernel


def _truncated(runtime: Runtime, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """trunc_normal_, which draws again until no number is outside: without values, as often as is to be expected."""

    def drawn(tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> torch.Tensor:
        if not tensor.is_cuda:
            return tensor if is_large(tensor) else plain(tensor, mean, std, a, b, generator)
        normal = statistics.NormalDist(mean, std)
        outside = 1 - min(normal.cdf(b) - normal.cdf(a), 0.99)
        rounds = iter(range(round(math.log(tensor.numel() + 1) / -math.log(outside))))
        where = torch.where

        def again(*args: Any) -> torch.Tensor:
            runtime.truth = next(rounds, None) is not None
            return where(*args)

        with mock.patch.object(torch, "where", again), mock.patch.object(runtime, "truth", True):
            return plain(tensor, mean, std, a, b, generator)

    return drawn


def _tensor(number: Any) -> torch.Tensor:
    """A number as the tensor that PyTorch's C++ makes of it."""
    return torch.scalar_tensor(number, dtype=_DTYPES[number.__class__])
