"""Kernels under `torch.use_deterministic_algorithms(True)`: those that have no deterministic form end the program, and
others are made of an `index_put` that sorts.

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
Concern = Callable[[tuple[Any, ...], Mapping[str, Any]], bool]
_put: Final = torch.ops.aten.index_put_.default
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


def _reduction(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    return args[4] if len(args) > 4 else kwargs.get("reduce")


def _product(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return _reduction(args, kwargs) == "prod"


#: The same where it depends on the arguments.
_SOMETIMES: Final[Mapping[str, tuple[str, Concern]]] = {
    "_embedding_bag_backward": ("embedding_bag_backward_cuda_max", _bag),
    "bincount": ("_bincount_cuda", _weighted),
    "histc": ("_histc_cuda with floating point input", _floating),
    "scatter": ("scatter_reduce_cuda_kernel", _multiplied),
    "scatter_": ("scatter_reduce_cuda_kernel", _multiplied),
    "scatter_reduce": ("scatter_reduce_cuda_prod_", _product),
    "scatter_reduce_": ("scatter_reduce_cuda_prod_", _product),
}


def _index_add_(target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, alpha: float = 1) -> Any:
    """`index_add_cuda_` (aten/src/ATen/native/cuda/Indexing.cu)."""
    return _rows(target, dim, index, source.mul(alpha), True)


def _index_copy_(target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> Any:
    """`index_copy_` (aten/src/ATen/native/TensorAdvancedIndexing.cpp)."""
    return _rows(target, dim, index, source, False)


def _rows(target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, accumulate: bool) -> Any:
    whole = target if target.dim() else target.view(1)
    _put(whole, [*[None] * (dim % whole.dim()), index], source, accumulate)
    return target


def _scattered(accumulate: bool) -> Kernel:
    """`_scatter_via_index_put` (aten/src/ATen/native/TensorAdvancedIndexing.cpp)."""

    def scatter_(target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> Any:
        whole, index, source = (one if one.dim() else one.view(1) for one in (target, index, source))
        dim %= whole.dim()
        given = source.as_strided(index.shape, source.stride())
        others = [place for place in range(index.dim()) if place != dim]
        if all(index.stride(place) == 0 and index.shape[place] == whole.shape[place] for place in others):
            row = index[tuple([0 if place in others else slice(None) for place in range(index.dim())])]
            return _rows(target, dim, row, given, accumulate)
        places = []
        for place, extent in enumerate(index.shape):
            around = [1] * index.dim()
            around[place] = extent
            places.append(index if place == dim else torch.arange(extent, device=index.device).view(around))
        _put(whole, places, given, accumulate)
        return target

    return scatter_


_add: Final = _scattered(True)


def _scatter_reduce_(
    target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """`scatter_reduce_two` of sums and means (aten/src/ATen/native/TensorAdvancedIndexing.cpp)."""
    if not include_self:
        target.scatter_(dim, index, 0)
    _add(target, dim, index, source)
    if reduce == "mean":
        ones = torch.ones_like(source)
        count = torch.ones_like(target) if include_self else torch.zeros_like(target)
        _add(count, dim, index, ones)
        target.div_(count.masked_fill_(count == 0, 1))
    return target


def _rounded(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return bool(args[0].is_floating_point() or args[0].is_complex())


def _summed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return _rounded(args, kwargs) and _reduction(args, kwargs) in ("sum", "mean")


#: What is done in the place of an operator that writes its first argument, by its name and overload, and of which
#: arguments (None: of all): atomic sums of integers are the same in any order.
_INSTEAD: Final[Mapping[str, tuple[Kernel, Concern | None]]] = {
    "index_add_.default": (_index_add_, None),
    "index_copy_.default": (_index_copy_, None),
    "scatter_.src": (_scattered(False), None),
    "scatter_add_.default": (_add, _rounded),
    "scatter_reduce_.two": (_scatter_reduce_, _summed),
}


def deterministic(func: Operator, kernel: Kernel) -> Kernel:
    """The kernel of an operator, which does what PyTorch does where determinism was asked for."""
    name = f"{func._opname}.{func._overloadname}"
    instead, of = _INSTEAD.get(name, (None, None))
    if instead is None and (written := _INSTEAD.get(name.replace(".", "_.", 1))) is not None:
        instead, of = _on_a_copy(written[0]), written[1]
    caller, concerns = _SOMETIMES.get(func._opname, (_ALWAYS.get(func._opname, ""), None))
    if not caller and instead is None:
        return kernel

    @functools.wraps(kernel)
    def asked(*args: object, **kwargs: object) -> Any:
        if not torch.are_deterministic_algorithms_enabled():
            return kernel(*args, **kwargs)
        if instead is not None and (of is None or of(args, kwargs)):
            return instead(*args, **kwargs)
        if caller and (concerns is None or concerns(args, kwargs)):
            alert_not_deterministic(caller)
        return kernel(*args, **kwargs)

    return asked


def _on_a_copy(written: Kernel) -> Kernel:
    return lambda target, *args, **kwargs: written(target.clone(), *args, **kwargs)
