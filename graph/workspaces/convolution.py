"""Convolutions: copies of operands into the memory format that is computed in, and the bias gradient's sum.

cuDNN's own workspace depends on the algorithm that it chooses; recordings have none. What is likely on a GPU is a copy
of each operand as the fastest kernels want it: with channels last, and their number a multiple of 16 bytes. Where cuDNN
is not taken (`torch.backends.cudnn.enabled`), PyTorch lays out the columns of one image and multiplies them.
Source: aten/src/ATen/native/Convolution.cpp, cudnn/ConvShared.cpp, cuda/DepthwiseConv2d.cu, cuda/ConvolutionMM2d.cu,
cuda/NaiveDilatedConvolution.cu, cuda/NaiveConvolutionTranspose2d.cu, cuda/NaiveConvolutionTranspose3d.cu,
cuda/Im2Col.cu, cuda/Col2Im.cu and c10/core/MemoryFormat.h.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Final

from graph.workspaces.gemm import by_cublas
from graph.workspaces.metadata import (
    CHANNELS_LAST,
    argument,
    dtype,
    in_format,
    is_contiguous,
    is_half,
    packed,
    shape,
    size,
    strides,
    suggests_channels_last,
    tensors,
    width,
)
from graph.workspaces.reduction import merged, scratch
from graph.workspaces.rules import EMPTY, REST, Call, Plan, Rule, Step, after, within
from traces.model import BY_CHOICE

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class _Operand:
    """Sizes and strides of an operand as convolutions see it: a sequence is an image of height 1 (`view4d`)."""

    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Operand:
        sizes, steps = shape(tensor), strides(tensor)
        if len(sizes) == 3:
            sizes, steps = (*sizes[:2], 1, sizes[2]), (*steps[:2], sizes[2] * steps[2], steps[2])
        return cls(sizes, steps, size(tensor))

    @property
    def channels_last(self) -> bool:
        """Whether channels come last in memory, as strides suggest it."""
        return suggests_channels_last(self.sizes, self.steps)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes, as reductions read them of a tensor."""
        return self.sizes

    def stride(self) -> tuple[int, ...]:
        """Strides in elements, the same."""
        return self.steps

    def lies(self, channels_last: bool) -> bool:
        """Whether it is contiguous in a memory format."""
        return in_format(self.sizes, self.steps, channels_last)

    def put(self, channels_last: bool) -> _Operand:
        """Contiguous in a memory format (`Tensor.contiguous`): itself, where it is so already."""
        return self if self.lies(channels_last) else self.copied(channels_last)

    def part(self, groups: int) -> _Operand:
        """One of as many groups of its channels, where it lies."""
        return _Operand((self.sizes[0], self.sizes[1] // groups, *self.sizes[2:]), self.steps, self.bytes // groups)

    def image(self) -> _Operand:
        """The first of its images."""
        return _Operand((1, *self.sizes[1:]), self.steps, self.bytes // max(self.sizes[0], 1))

    def copied(self, channels_last: bool) -> _Operand:
        """A copy in a memory format."""
        rank = len(self.sizes)
        return _Operand(
            self.sizes, packed(self.sizes, CHANNELS_LAST[rank] if channels_last else range(rank)[::-1]), self.bytes
        )


#: Bytes of channels that tensor cores read at once; pixels of a filter from which copies are worth it for fewer.
_READ: Final = 16
_LARGE_FILTER: Final = 49
#: Channels of which fp32 outputs are written as they lie.
_FEW: Final = 64
#: Elements of the largest operand that is copied: FLUX's autoencoder has convolutions of 2^31 for 8 pictures, where an
#: H100's cuDNN took copies, and of 2^32 for 16, where it took none (tests/data/published/pipelines.csv).
_MOST_COPIED: Final = 1 << 31


def _last(first: _Operand, second: _Operand, wide: bool) -> bool:
    """Whether cuDNN computes with channels last (`cudnn_conv_suggest_memory_format`); `wide`: doubles, never."""
    return not wide and (first.channels_last or second.channels_last)


def _needed(operands: Sequence[tuple[str, _Operand]], channels_last: bool) -> list[tuple[str, int]]:
    """The operands that are copied into a memory format."""
    return [(name, one.bytes) for name, one in operands if not one.lies(channels_last)]


def cudnn_convolution(call: Call) -> Plan | None:
    """`cudnn_convolution`, also transposed: weight, then input, in its format, after the output (ConvShared.cpp)."""
    source, weight, out = (_Operand.of(tensor) for tensor in (*call.args[:2], next(tensors(call.out))))
    last = _last(source, weight, dtype(call.args[0]) == "float64")
    copies = _needed([("weight", weight), ("input", source)], last)
    search = _search(call, call.name, (source, weight), last, call.args[2:6])
    stride, _, groups = call.args[4:7] if "transpose" in call.name else call.args[3:6]
    kernel = _Kernel("out", source, out, weight, width(call.args[0]), groups, max(stride))
    own = _likely(kernel, last)
    return (REST, *within(copies, *own, *search)) if copies or own or search else None


@dataclass(frozen=True)
class _Kernel:
    """What cuDNN computes of a convolution, "out", or the gradient of "input" or "weight".

    `given` and `made` are what it reads beside the filter and what it writes (of the weight's gradient: input and
    gradient); `item` are bytes of an element, `stride` the largest.
    """

    way: str
    given: _Operand
    made: _Operand
    weight: _Operand
    item: int
    groups: int
    stride: int

    def copies(self, last: bool) -> int:
        """Bytes of the likely copies; `last`: operands have channels last.

        On an H100 (cuDNN 9.19, 192 convolutions in tests/data/gpu) that is all but what the last sums of a weight's
        gradient take, to 0 to 147 bytes, for four of five in 16 bits and two of three in fp32.
        """
        channels = [one.sizes[1] // self.groups for one in (self.given, self.made)]
        largest = max(self.given.bytes, self.made.bytes) // self.item
        if self.item > 4 or (self.groups > 1 and min(channels) == 1) or largest > _MOST_COPIED:
            return 0
        full = [-(-count * self.item // _READ) * _READ // self.item for count in channels]
        given, made = (
            one.bytes // count * whole
            for one, count, whole in zip((self.given, self.made), channels, full, strict=True)
        )
        weight = self.weight.bytes // prod(channels) * prod(full)
        if last:
            padded = [size for size, one in ((given, self.given), (made, self.made)) if size != one.bytes]
            return sum(padded) + weight if padded else 0
        if prod(self.weight.sizes[2:]) == 1:
            return 0 if self._is_product() else given + made
        if self._has_own_kernel(channels):
            return 0
        return given + weight + (0 if self._is_written_as_it_is(channels[0]) else made)

    def _is_product(self) -> bool:
        """Whether filters of one pixel make it a product of matrices, whose rows begin where they can be read."""
        return self.stride == 1 and prod(self.given.sizes[2:]) % 8 == 0

    def _is_small(self) -> bool:
        return prod(self.weight.sizes[2:]) < _LARGE_FILTER

    def _is_written_as_it_is(self, reads: int) -> bool:
        """Whether the output needs no copy: in fp32, of few channels."""
        return self.way == "out" and self.item == 4 and self.groups == 1 and reads <= _FEW and self._is_small()

    def _has_own_kernel(self, channels: Sequence[int]) -> bool:
        """Whether there are kernels that read and write operands as they are: of a few channels, and of patches."""
        if self.way == "weight":
            return False
        reads, writes = (count * self.item < _READ for count in channels)
        if self.item == 2:
            patches = self.way == "input" and not self._is_small() and self.stride == self.weight.sizes[-1]
            return (reads and self._is_small()) or patches
        return writes


def _likely(kernel: _Kernel, last: bool) -> Plan:
    """What cuDNN likely takes on a GPU."""
    size = kernel.copies(last)
    return within([(BY_CHOICE, 0, size)]) if size else ()


def _search(call: Call, operation: str, operands: Sequence[_Operand], last: bool, settings: Sequence[Any]) -> Plan:
    """With `torch.backends.cudnn.benchmark` the first of its kind gives back what is cached (Conv_v8.cpp): by the sizes
    of input and weight and the format of the input, where all begin at aligned addresses."""
    torch = sys.modules.get("torch")  # rules work without it
    if torch is None or not torch.backends.cudnn.benchmark:
        return ()
    key = ("convolution", operation, *(one.sizes for one in operands), last, dtype(call.args[0]), str(settings))
    if key in call.state:
        return ()
    call.state[key] = True
    return (EMPTY,)


def depthwise_convolution(call: Call) -> Plan | None:
    """`_conv_depthwise2d`: contiguous operands, then the output (`conv_depthwise2d_cuda_out`)."""
    source, weight = (_Operand.of(tensor) for tensor in call.args[:2])
    bias = argument(call, 3, "bias")
    strided = [("bias", size(bias))] if bias is not None and not is_contiguous(bias) else []
    copies = [*_needed([("input", source), ("weight", weight)], False), *strided]
    return within(copies, REST) if copies else None


def convolution_backward(call: Call) -> Plan | None:
    """`convolution_backward`: gradients of input and weight, then the gradient summed for the bias.

    Arguments: gradient, input, weight, bias sizes, stride, padding, dilation, transposed, output padding, groups, mask.
    """
    wanted = [bool(flag) for flag in call.args[10]]
    gradient, source, weight = (_Operand.of(tensor) for tensor in call.args[:3])
    sequence = _needed([("sequence", source)] if len(shape(call.args[1])) == 3 else [], False)
    source = source.put(False) if sequence else source
    wide = dtype(call.args[1]) == "float64"
    bias = (("out", sum(wanted[:2])), *_sum(call, gradient)) if wanted[2] else ()
    by_filter = _is_depthwise(call, source, weight)
    if not by_filter and _by_columns(call):
        return within(sequence, *_columns_backward(call, gradient, source, weight, wanted))
    if not by_filter or _cudnn_depthwise(call, source, weight):
        way: Callable[..., Plan] = partial(_cudnn_backward, call)
    elif len(source.sizes) == 4:
        way = _depthwise_backward
    else:  # of volumes: a strided gradient is copied when its results are there (DepthwiseConv3d.cu)
        births = [("out", number) for number in range(sum(wanted[:2]))]
        return (*births, *within(_needed([("gradient", gradient)], False), *bias))
    return within(sequence, *way(gradient, source, weight, wanted, wide), *bias)


def _sum(call: Call, gradient: _Operand) -> Plan:
    """What it takes to sum a gradient over all but channels."""
    if 0 in gradient.sizes:
        return ()
    item = width(call.args[0])
    loop = merged(gradient, [place for place in range(len(gradient.sizes)) if place != 1], item, item)
    return scratch(call.profile, loop, item, max(item, 4), item, is_half(call.args[0]))


def _cudnn_backward(
    call: Call, gradient: _Operand, source: _Operand, weight: _Operand, wanted: Sequence[bool], wide: bool
) -> Plan:
    """`cudnn_convolution_backward`: each of the two gradients copies what it needs into its own memory format.

    Of a transposed convolution the gradient is put into the format of the input, once.
    """
    steps: Plan = ()
    kept: list[tuple[str, int]] = []
    item, groups, stride = width(call.args[1]), int(call.args[9]), max(call.args[4])
    if wanted[1]:
        last = _last(source, weight, wide)
        kept = _needed([("contiguous input", source)], last)
        source = source.put(last)
    if call.args[7]:
        kept += _needed([("gradient", gradient)], source.channels_last)
        gradient = gradient.put(source.channels_last)
    elif gradient.channels_last != source.channels_last:
        kept.append(("gradient", gradient.bytes))
        gradient = gradient.copied(source.channels_last)
    if wanted[0]:
        last = _last(gradient, weight, wide)
        copies = _needed([("weight", weight), ("its gradient", gradient)], last)
        kernel = _Kernel("input", gradient, source, weight, item, groups, stride)
        own = (*_likely(kernel, last), *_search(call, "input", (source, weight), last, call.args[4:10]))
        steps += (("out", 0), *within(copies, *own))
    if wanted[1]:
        last = _last(source, gradient, wide)
        copies = _needed([("weight's gradient", gradient), ("input", source)], last)
        kernel = _Kernel("weight", source, gradient, weight, item, groups, stride)
        own = (*_likely(kernel, last), *_search(call, "weight", (source, weight), last, call.args[4:10]))
        steps += within(copies, ("out", int(wanted[0])), *own)
    return within(kept, *steps)


def _depthwise_backward(
    gradient: _Operand, source: _Operand, weight: _Operand, wanted: Sequence[bool], wide: bool
) -> Plan:
    """`conv_depthwise2d_cuda_backward_out`: the weight's gradient first, all of contiguous operands."""
    steps: Plan = ()
    for place, operand in ((1, ("input", source)), (0, ("weight", weight))):
        if wanted[place]:
            steps += within(_needed([operand], False), ("out", place if wanted[0] else 0))
    return within(_needed([("gradient", gradient)], False), *steps)


def _is_depthwise(call: Call, source: _Operand, weight: _Operand) -> bool:
    """Whether a convolution has filters of one channel each (`ConvParams::is_depthwise`)."""
    channels, groups = source.sizes[1], int(call.args[9])
    return (
        not call.args[7] and len(source.sizes) in (4, 5) and 1 < groups == channels and not weight.sizes[0] % channels
    )


def _cudnn_depthwise(call: Call, source: _Operand, weight: _Operand) -> bool:
    """Whether such a convolution is cuDNN's: with channels last, and where it is fast (`use_cudnn_depthwise`)."""
    if not _has_cudnn():
        return False
    if _last(source, weight, dtype(call.args[1]) == "float64"):
        return True
    stride, dilation = ([*values] * 2 if len(values) == 1 else [*values] for values in (call.args[4], call.args[6]))
    even = stride[0] == stride[-1] or source.sizes[2] == 1
    if len(source.sizes) == 5 or dtype(call.args[1]) != "float16" or max(dilation) > 1 or not even:
        return False
    return source.sizes[1] >= 32 and _fast_in_cudnn(source, weight, stride[-1])


def _has_cudnn() -> bool:
    """Whether cuDNN may be taken (`torch.backends.cudnn.enabled`)."""
    torch = sys.modules.get("torch")  # rules work without it
    return torch is None or bool(torch.backends.cudnn.enabled)


def _fast_in_cudnn(source: _Operand, weight: _Operand, stride: int) -> bool:
    """Whether cuDNN is taken for 16-bit depthwise convolutions (`check_cudnn_depthwise_workload_with_filter`)."""
    batch, channels, height, wide = source.sizes
    filter_size = weight.sizes[3]
    if height == 1 and stride == 1:
        return True
    if weight.sizes[2] != filter_size or filter_size not in (1, 3, 5) or wide < 7 or stride > 2:
        return False
    if stride == 1:
        return True
    if batch == 1:
        return filter_size > 1 or wide <= 28
    if filter_size == 1:
        return batch <= 16 and channels >= 128 and wide <= 7
    return channels >= 512 or (channels >= 256 and wide >= 28)


def _by_columns(call: Call) -> bool:
    """Whether a convolution goes around cuDNN (`ConvParams::use_cudnn`)."""
    if not _has_cudnn() or (dtype(call.args[1]) == "bfloat16" and call.profile.arch < (8, 0)):
        return True
    return any(more >= step for more, step in zip(call.args[8], call.args[4], strict=False))


def _row(weight: _Operand) -> int:
    """Elements of a column for one filter."""
    return prod(weight.sizes[1:])


def columns_forward(call: Call) -> Plan | None:
    """`_slow_conv2d_forward`, `slow_conv_dilated2d`, `3d`: columns of an image; filters of one pixel need none."""
    source, weight, out = (_Operand.of(tensor) for tensor in (*call.args[:2], next(tensors(call.out))))
    stride, padding = argument(call, 4, "stride"), argument(call, 5, "padding")
    plain = "2d_forward" in call.name and _row(weight) == weight.sizes[1] and max(stride) == 1 and max(padding) == 0
    inside = [] if plain else [("columns", _row(weight) * prod(out.sizes[2:]) * width(call.args[0]))]
    images = by_cublas(call, inside, source.sizes[0])
    return within(_needed([("input", source), ("weight", weight)], False), REST, *images)


def transposed_forward(call: Call) -> Plan | None:
    """`slow_conv_transpose2d`, `3d`: columns of an image, and ones to add the bias with; the output of volumes begins
    as large as the input."""
    source, weight, out = (_Operand.of(tensor) for tensor in (*call.args[:2], next(tensors(call.out))))
    item, operands = width(call.args[0]), [("input", source), ("weight", weight)]
    inside = [("columns", _row(weight) * prod(source.sizes[2:]) * item)]
    biased = argument(call, 3, "bias") is not None
    if biased:
        inside.append(("ones", prod(out.sizes[2:]) * item))
    steps = within(_needed(operands, False), *by_cublas(call, inside, source.sizes[0] * (1 + biased)))
    if len(source.sizes) == 4 or out.bytes <= source.bytes:
        return (REST, *steps)
    return (("alloc", "first", source.bytes), REST, ("free", "first"), *steps)


@dataclass(frozen=True)
class _Group:
    """The gradients of a convolution by columns, or of one of its groups.

    `births` are those of the gradients of input, weight and bias, None where it is not wanted; `copied` is the copy
    that a strided gradient needs, `gradient` what it is then.
    """

    call: Call
    births: Sequence[Step | None]
    copied: Sequence[tuple[str, int]]
    gradient: _Operand
    columns: Sequence[tuple[str, int]]

    def born(self, *places: int) -> Plan:
        """The births at these places, of those that are wanted."""
        return tuple(step for place in places if (step := self.births[place]) is not None)

    def products(self) -> Plan:
        """A product of matrices for each image."""
        return by_cublas(self.call, kernels=self.gradient.sizes[0])

    def total(self) -> Plan:
        """The sum that is the bias's gradient."""
        return _sum(self.call, self.gradient) if self.births[2] else ()

    def flat(self) -> Plan:
        """`_slow_conv2d_backward`: columns for the first gradient that needs them, which the next one has too."""
        bias = (*self.born(2), *self.total())
        made: Plan = bias
        if self.births[0]:
            weight = (*self.born(1), *self.products()) if self.births[1] else ()
            made = (*self.born(0), *within(self.columns, *self.products(), *bias, *weight))
        elif self.births[1]:
            made = (*bias, *self.born(1), *within(self.columns, *self.products()))
        return within(self.copied, *made)

    def dilated(self) -> Plan:
        """`slow_conv_dilated2d_backward`, `3d`: image by image; the bias has a sum of each added to it."""
        by_products = [birth for birth in self.births[:2] if birth]
        total: Plan = ()
        if self.births[2]:
            image = self.gradient.image()
            total = within([("sum", image.sizes[1] * width(self.call.args[0]))], *_sum(self.call, image))
        images = range(self.gradient.sizes[0])
        inside = tuple(step for _ in images for step in (*by_cublas(self.call, kernels=len(by_products)), *total))
        if by_products:
            inside = within(self.columns, *inside)
        return within(self.copied, *self.born(0, 1, 2), *inside)

    def transposed(self) -> Plan:
        """`slow_conv_transpose2d_backward`, `3d`: the input's gradient, then the others."""
        made: Plan = ()
        if self.births[0]:
            made = within(self.copied, *self.born(0), *within(self.columns, *self.products()))
        if self.births[1] or self.births[2]:
            inside = within(self.columns, *(self.products() if self.births[1] else ()), *self.total())
            made += (*self.born(1, 2), *within(self.copied, *inside))
        return made


def _columns_backward(
    call: Call, gradient: _Operand, source: _Operand, weight: _Operand, wanted: Sequence[bool]
) -> Plan:
    """`convolution_backward` without cuDNN: group by group, whose results are put together at the end."""
    transposed, groups, item = bool(call.args[7]), int(call.args[9]), width(call.args[1])
    columns = [("columns", _row(weight) * prod((source if transposed else gradient).sizes[2:]) * item)]
    steps, padding, dilation = (max(call.args[place]) for place in (4, 5, 6))
    if transposed and _row(weight) == weight.sizes[1] and (steps, padding, dilation) == (1, 0, 1):
        columns = []  # filters of one pixel read the gradient as it is
    sizes = source.bytes // groups, weight.bytes // groups, gradient.sizes[1] // groups * item
    copies = _needed([("input", source), ("weight", weight)], False)

    def way(births: Sequence[Step | None], given: _Operand) -> Plan:
        group = _Group(call, births, _needed([("gradient", given)], False), given.put(False), columns)
        if transposed:
            return group.transposed()
        even = len(source.sizes) == 4 and dilation == 1
        return group.flat() if even else group.dilated()

    outs = [("out", sum(wanted[:place])) if flag else None for place, flag in enumerate(wanted)]
    if groups == 1:
        return within(copies, *way(outs, gradient))
    keys = [[(place, group) for group in range(groups)] for place in (2, 1, 0) if wanted[place]]
    parts: Plan = ()
    last, part, image = gradient.channels_last, gradient.part(groups), source.put(False).part(groups)
    cut = _needed([("group's gradient", part)], last) + _needed([("group's input", image)], False)
    for group in range(groups):
        births = [("alloc", (place, group), sizes[place]) if flag else None for place, flag in enumerate(wanted)]
        parts += within(cut, *way(births, part.put(last)))
    ends = [("free", key) for of_place in keys for key in of_place]
    return within(copies, *parts, *(step for step in outs if step is not None), *ends)


def columns(call: Call) -> Plan | None:
    """`im2col` (`unfold`), `col2im` (`fold`): the output begins as large as the input, and is made again where it is
    larger; a strided input is copied before that."""
    source = call.args[0]
    copied = [] if is_contiguous(source) else [("input", size(source))]
    if size(next(tensors(call.out))) <= size(source):
        return after(copied)
    return (("alloc", "first", size(source)), *within(copied, REST, ("free", "first")))


RULES: Mapping[str, Rule] = {
    "aten.cudnn_convolution.default": cudnn_convolution,
    "aten.cudnn_convolution_transpose.default": cudnn_convolution,
    "aten._conv_depthwise2d.default": depthwise_convolution,
    "aten.convolution_backward.default": convolution_backward,
    "aten._slow_conv2d_forward.default": columns_forward,
    "aten.slow_conv_dilated2d.default": columns_forward,
    "aten.slow_conv_dilated3d.default": columns_forward,
    "aten.slow_conv_transpose2d.default": transposed_forward,
    "aten.slow_conv_transpose3d.default": transposed_forward,
    "aten.im2col.default": columns,
    "aten.col2im.default": columns,
}
