"""torchvision's operators on CUDA, whose kernels a build without CUDA lacks: they allocate what they would, and compute
nothing.

Their autograd and autocast are torchvision's own. Allocations, in order, are those of torchvision/csrc/ops/cuda of
torchvision 0.28.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from graph.workspaces.metadata import upper

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime

Tensors = tuple[torch.Tensor, ...]
#: Boxes that one word of the mask of overlaps stands for.
_WORD: Final = 64
#: Most images whose columns a deformable convolution lays out at once.
_IMAGES: Final = 32


def ready(runtime: Runtime) -> None:
    """torchvision has registered its operators."""
    if hasattr(torch.ops.torchvision, "nms"):  # not where its library could not be loaded
        for name, kernel in _KERNELS.items():
            runtime.override(f"torchvision::{name}", kernel)


def _nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """(kept,): of boxes (n, 4), by their scores (n,)."""
    if not boxes.numel():
        return boxes.new_empty(0, dtype=torch.int64)
    order = scores.sort(stable=True, dim=0, descending=True)[1]
    ordered = boxes.index_select(0, order).contiguous()
    count = len(boxes)
    mask = boxes.new_empty(count * upper(count, _WORD) // _WORD, dtype=torch.int64)
    kept = order.masked_select(boxes.new_empty(count, dtype=torch.bool))
    del mask, ordered
    return kept


def _roi_align(
    image: torch.Tensor, rois: torch.Tensor, scale: float, height: int, width: int, *rest: object
) -> torch.Tensor:
    out = image.new_zeros(len(rois), image.shape[1], height, width)
    _read(out, image, rois)
    return out


def _roi_pool(image: torch.Tensor, rois: torch.Tensor, scale: float, height: int, width: int) -> Tensors:
    """The result, and where each number was found."""
    return _pooled(image, rois, image.shape[1], height, width)


def _by_position(
    image: torch.Tensor, rois: torch.Tensor, scale: float, height: int, width: int, *rest: object
) -> Tensors:
    """The result, whose channels are shared out among its positions, and from which channel each number is."""
    return _pooled(image, rois, image.shape[1] // (height * width), height, width)


def _pooled(image: torch.Tensor, rois: torch.Tensor, *shape: int) -> Tensors:
    out = image.new_zeros(len(rois), *shape)
    places = torch.zeros_like(out, dtype=torch.int32)
    _read(out, image, rois)
    return out, places


def _read(out: torch.Tensor, *operands: torch.Tensor) -> None:
    """A kernel that reads contiguous operands, unless its result is empty."""
    if out.numel():
        copies = [operand.contiguous() for operand in operands]
        del copies


def _roi_align_backward(
    grad: torch.Tensor, rois: torch.Tensor, scale: float, height: int, width: int, *rest: int
) -> torch.Tensor:
    made = grad.new_zeros(rest[:4])
    _read(grad, rois)
    return made


def _roi_pool_backward(
    grad: torch.Tensor, rois: torch.Tensor, places: torch.Tensor, scale: float, height: int, width: int, *shape: int
) -> torch.Tensor:
    made = grad.new_zeros(shape)
    _read(grad, places, rois)
    return made


def _by_position_backward(
    grad: torch.Tensor, rois: torch.Tensor, places: torch.Tensor, scale: float, height: int, width: int, *rest: int
) -> torch.Tensor:
    made = grad.new_zeros(rest[-4:])  # of `ps_roi_align`, a ratio comes before the shape
    _read(grad, grad, rois)
    return made


class _Deformed:
    """A deformable convolution: its operands as its kernels want them, and in how many parts the batch goes."""

    def __init__(self, operands: Sequence[torch.Tensor], groups: int) -> None:
        self.image, self.weight, self.offset, self.mask, self.bias = (one.contiguous() for one in operands)
        batch = len(self.image)
        self.images = max((n for n in range(1, min(batch, _IMAGES) + 1) if not batch % n), default=1)
        self.parts, self.groups = batch // self.images, groups
        self.places = self.offset.shape[2:]  # height and width of the result
        self.weights = self.weight.reshape(groups, -1, *self.weight.shape[1:]).flatten(2)

    def columns(self) -> torch.Tensor:
        """(groups, rows of a filter, places in a part)."""
        channels = self.image.shape[1] // self.groups
        rows, places = channels * math.prod(self.weight.shape[2:]), self.images * math.prod(self.places)
        return self.image.new_empty(self.groups, rows, places)

    def by_part(self, grad: torch.Tensor) -> torch.Tensor:
        """A gradient of the result as (parts, groups, channels, images, height, width)."""
        shape = (self.parts, self.images, self.groups, len(self.weight) // self.groups, *self.places)
        return grad.reshape(shape).permute(0, 2, 3, 1, 4, 5)

    def products(self) -> list[tuple[int, int]]:
        """Part and group of each product of matrices."""
        return [(part, group) for part in range(self.parts) for group in range(self.groups)]


def _deform(
    image: torch.Tensor,
    weight: torch.Tensor,
    offset: torch.Tensor,
    mask: torch.Tensor,
    bias: torch.Tensor,
    *rest: int,
) -> torch.Tensor:
    call = _Deformed((image, weight, offset, mask, bias), rest[6])
    out = image.new_zeros(len(image), len(weight), *call.places)
    if not len(image):
        return out
    filters = len(weight) // call.groups
    made = image.new_zeros(call.parts, call.groups, filters, call.images * call.places[0], call.places[1])
    columns = call.columns()
    for part, group in call.products():
        made[part][group].flatten(1).addmm_(call.weights[group], columns[group])
    biased = out + call.bias.view(1, -1, 1, 1)
    del columns, made, out
    return biased


def _deform_backward(
    grad: torch.Tensor,
    image: torch.Tensor,
    weight: torch.Tensor,
    offset: torch.Tensor,
    mask: torch.Tensor,
    bias: torch.Tensor,
    *rest: int,
) -> Tensors:
    grad = grad.contiguous()
    call = _Deformed((image, weight, offset, mask, bias), rest[6])
    made = [torch.zeros_like(one) for one in (call.image, call.offset, call.mask)]
    if len(image):
        columns, by_part = call.columns(), call.by_part(grad)
        for part, group in call.products():
            columns[group].addmm_(call.weights[group].transpose(0, 1), by_part[part][group].flatten(1))
        del columns
    weights = torch.zeros_like(call.weight)
    if len(image):
        filters = weights.view(call.groups, -1, *weight.shape[1:]).flatten(2)
        by_part = call.by_part(grad).contiguous()
        columns = call.columns()
        for part, group in call.products():
            filters[group].addmm_(by_part[part][group].flatten(1), columns[group].transpose(0, 1))
        del columns, by_part
    sums = grad.sum((0, 2, 3))
    made.append(torch.ones_like(call.bias) * sums)
    del sums
    return made[0], weights, *made[1:]


_KERNELS: Final[Mapping[str, Callable[..., Any]]] = {
    "nms": _nms,
    "roi_align": _roi_align,
    "_roi_align_backward": _roi_align_backward,
    "roi_pool": _roi_pool,
    "_roi_pool_backward": _roi_pool_backward,
    "ps_roi_align": _by_position,
    "_ps_roi_align_backward": _by_position_backward,
    "ps_roi_pool": _by_position,
    "_ps_roi_pool_backward": _by_position_backward,
    "deform_conv2d": _deform,
    "_deform_conv2d_backward": _deform_backward,
}
