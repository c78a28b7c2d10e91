"""Kernels that have no deterministic form: under `torch.use_deterministic_algorithms(True)` the program ends at them.

Names are those of `alertNotDeterministic` in aten/src/ATen/native/cuda, as PyTorch 2.13.0 gave them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from graph.fake_cuda.torch_private import alert_not_deterministic

if TYPE_CHECKING:
    from graph.fake_cuda.torch_private import Operator

Kernel = Callable[..., Any]
#: What an operator is called in the alert, by its name.
_ALWAYS: Final[Mapping[str, str]] = {
    "_adaptive_avg_pool2d_backward": "adaptive_avg_pool2d_backward_cuda",
    "_adaptive_avg_pool3d_backward": "adaptive_avg_pool3d_backward_cuda",
    "_ctc_loss_backward": "ctc_loss_backward_gpu",
    "_upsample_bicubic2d_aa_backward": "upsample_bicubic2d_aa_backward_out_cuda",
    "_upsample_bilinear2d_aa_backward": "upsample_bilinear2d_aa_backward_out_cuda",
    "adaptive_max_pool2d_backward": "adaptive_max_pool2d_backward_cuda",
    "avg_pool3d_backward": "avg_pool3d_backward_cuda",
    "fractional_max_pool2d_backward": "fractional_max_pool2d_backward_cuda",
    "fractional_max_pool3d_backward": "fractional_max_pool3d_backward_cuda",
    "grid_sampler_2d_backward": "grid_sampler_2d_backward_cuda",
    "grid_sampler_3d_backward": "grid_sampler_3d_backward_cuda",
    "index_reduce": "index_reduce_cuda",
    "index_reduce_": "index_reduce_cuda",
    "max_pool3d_with_indices_backward": "max_pool3d_with_indices_backward_cuda",
    "max_unpool2d": "max_unpooling2d_forward_out",
    "max_unpool3d": "max_unpooling3d_forward_out",
    "nll_loss2d_forward": "nll_loss2d_forward_out_cuda_template",
    "put_": "put_",
    "reflection_pad1d_backward": "reflection_pad1d_backward_out_cuda",
    "reflection_pad3d_backward": "reflection_pad3d_backward_out_cuda",
    "upsample_bicubic2d_backward": "upsample_bicubic2d_backward_out_cuda",
    "upsample_linear1d_backward": "upsample_linear1d_backward_out_cuda",
}
_MAX: Final = 2  # the mode of an embedding bag


def _bag(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return bool(args[8] == _MAX)


def _weighted(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return (args[1] if len(args) > 1 else kwargs.get("weights")) is not None


def _floating(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return bool(args[0].is_floating_point())


def _multiplied(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("reduce") == "multiply"


def _product(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return (args[4] if len(args) > 4 else kwargs.get("reduce")) == "prod"


#: The same where it depends on the arguments.
_SOMETIMES: Final[Mapping[str, tuple[str, Callable[[tuple[Any, ...], Mapping[str, Any]], bool]]]] = {
    "_embedding_bag_backward": ("embedding_bag_backward_cuda_max", _bag),
    "bincount": ("_bincount_cuda", _weighted),
    "histc": ("_histc_cuda with floating point input", _floating),
    "scatter": ("scatter_reduce_cuda_kernel", _multiplied),
    "scatter_": ("scatter_reduce_cuda_kernel", _multiplied),
    "scatter_reduce": ("scatter_reduce_cuda_prod_", _product),
    "scatter_reduce_": ("scatter_reduce_cuda_prod_", _product),
}


def alerting(func: Operator, kernel: Kernel) -> Kernel:
    """The kernel of an operator, which raises or warns as PyTorch does where determinism was asked for."""
    caller, concerns = _SOMETIMES.get(func._opname, (_ALWAYS.get(func._opname, ""), None))
    if not caller:
        return kernel

    @functools.wraps(kernel)
    def alerted(*args: Any, **kwargs: Any) -> Any:
        if torch.are_deterministic_algorithms_enabled() and (concerns is None or concerns(args, kwargs)):
            alert_not_deterministic(caller)
        return kernel(*args, **kwargs)

    return alerted
