"""Large floating-point tensors on the host are memory that nobody touches: weights and random numbers are zeros there.

They have no values on the device either, and memory that is never written takes none of the machine. What would fill
them with random numbers draws as many and forgets them: what is drawn next, as an order of batches, is as in a real
run. Zeros and copies of them take no memory either (`graph.host.pages`); other numbers are written, as masks are.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import mmap
import statistics
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch
from torch.nn import init

from graph.fake_cuda.operators.composed import no_errors_on_host
from graph.fake_cuda.torch_private import BY_CPU_KERNEL
from graph.host import pages

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime

#: Tensors of as many bytes are large.
LARGE: Final = 4 << 20
#: Random numbers that a program may draw for large tensors: 7 to 10 seconds of most initialisers.
MOST_DRAWN: Final = 1 << 30
#: As many are drawn at a time; a multiple of 16, for which `normal_` draws otherwise than for what is left over.
_PART: Final = 1 << 16
#: Of normal numbers, the share inside of bounds up to which trunc_normal_ rejects uniform ones (torch/nn/init.py).
_NORMAL: Final = 0.3
#: What initialisers, copies and optimizers of offloaded parameters are made of.
_RANDOM: Final = (
    "bernoulli_.Tensor",
    "bernoulli_.float",
    "cauchy_",
    "exponential_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
)
_FILLING: Final = ("zero_", "fill_.Scalar", "fill_.Tensor")
_WRITING: Final = (
    *("add_.Tensor", "addcdiv_", "addcmul_", "clamp_", "copy_", "div_.Tensor", "erfinv_", "lerp_.Scalar"),
    *("lerp_.Tensor", "mul_.Tensor", "sqrt_", "sub_.Tensor", *_FILLING, *_RANDOM),
)
#: Files of weights in memory, which nobody reads: their addresses, by where they begin.
_unread: Final[dict[int, range]] = {}
_DTYPES: Final = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def is_large(tensor: torch.Tensor) -> bool:
    """Whether a tensor on the host has no values."""
    return tensor.nbytes >= LARGE and (tensor.is_floating_point() or tensor.is_complex())


def unread(pages: mmap.mmap, tensor: torch.Tensor) -> None:
    """`tensor` lies in `pages` of a file of weights: what is made of it is not written either."""
    start = tensor.data_ptr()
    _unread[start] = there = range(start, start + tensor.nbytes)
    weakref.finalize(pages, _forget, start, there)


def _forget(start: int, there: range) -> None:
    """A file is gone, whose place another one may have by now."""
    if _unread.get(start) is there:
        del _unread[start]


def _is_unread(tensor: torch.Tensor) -> bool:
    """Whether it is a part of a file of weights."""
    place = tensor.data_ptr()
    return any(place in there for there in _unread.copy().values())


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor on the host is neither a part of a file of weights nor large and zero."""
    return not _is_unread(tensor) and (not is_large(tensor) or pages.is_written(tensor))


@contextlib.contextmanager
def untouched(runtime: Runtime) -> Iterator[None]:
    """Inside, what writes large tensors on the host leaves them as they are; up to 2.8 it writes them.

    Only from 2.9 on an operator's own kernel can be called when another stands in its place.
    """
    runtime.override("aten::_linalg_check_errors", functools.partial(no_errors_on_host, runtime), ("CPU",))
    runtime.values.marks.seen = _has_values
    if not hasattr(torch.library, "get_kernel"):
        yield
        return
    draws = _Draws(runtime)
    for name in _WRITING:
        runtime.override(f"aten::{name}", _kernel(name, draws), ("CPU",))
    runtime.override("aten::cat", _joining(), ("CPU",))
    truncated = _truncated(runtime, draws, init._no_grad_trunc_normal_)
    with mock.patch.object(init, "_no_grad_trunc_normal_", truncated):
        yield


class _Draws:
    """Random numbers that large tensors would be filled with: drawn and forgotten, up to `MOST_DRAWN` of them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._left = MOST_DRAWN

    def parts(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Small tensors to be filled one after the other in a large one's place; none where that takes too long.

        `normal_` draws one number for each element of contiguous tensors, and 16 more where their size is no multiple
        of 16; of others it draws pairs (`normal_fill` and `normal_kernel`, ATen/native/cpu/DistributionTemplates.h).
        """
        if not self.may(tensor.numel()):
            return
        self._left -= tensor.numel()
        step = 1 if tensor.is_contiguous() else 2
        part = torch.empty(step * (_PART + 16), dtype=tensor.dtype, device="cpu")[::step]
        wholes, rest = divmod(tensor.numel() - 16, _PART)
        yield from itertools.repeat(part[:_PART], wholes)
        yield part[: 16 + rest]

    def stop(self) -> None:
        """From here on the generator is where it would not be: nothing more is drawn."""
        self._left = 0
        what = (
            f"large tensors on the host ask for more random numbers than are drawn here ({MOST_DRAWN}), or for others:"
            " until it is seeded anew, what the host draws next (batches, seeds) is not what a real run draws"
        )
        self._runtime.assumptions[what] = 1

    def may(self, count: int) -> bool:
        """Whether as many numbers may be drawn; where they may not, none is from here on."""
        if count > self._left:
            self.stop()
        return count <= self._left


def _kernel(name: str, draws: _Draws) -> Callable[..., Any]:
    plain = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed
    takes_tensor = name.endswith(".Tensor") or name == "copy_"

    def kernel(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if takes_tensor and args[0].__class__ in _DTYPES:  # a number comes here as Python's own
            args = (_tensor(args[0]), *args[1:])
        if not is_large(tensor):
            return plain(BY_CPU_KERNEL, tensor, *args, **kwargs)
        if (name in _FILLING and not _is_filled(tensor, *args)) or (
            name == "copy_" and not _is_copied(tensor, args[0], functools.partial(plain, BY_CPU_KERNEL))
        ):
            return plain(BY_CPU_KERNEL, tensor, *args, **kwargs)
        if name in _RANDOM:
            pages.emptied(tensor)
            if takes_tensor:  # of probabilities: any one does, of their dtype
                args = (torch.zeros((), dtype=args[0].dtype, device="cpu"), *args[1:])
            for part in draws.parts(tensor):
                plain(BY_CPU_KERNEL, part, *args, **kwargs)
        return tensor

    return kernel


def _is_filled(tensor: torch.Tensor, number: object = 0) -> bool:
    """Whether a large tensor is one number throughout and nothing has to be written: zeros are where nothing is."""
    unknown = isinstance(number, torch.Tensor) and not number.is_cpu
    return unknown or (not number and pages.emptied(tensor))


def _is_copied(target: torch.Tensor, source: torch.Tensor, copy: Callable[..., object]) -> bool:
    """Whether a large tensor is a copy by now; of what is on a device, in a file of weights, or zero, it is zeros."""
    if source.is_cpu and not _is_unread(source):
        if not is_large(source):
            return source.numel() == 1 and _is_filled(target, source)
        if target.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
            return False  # nothing may be emptied
        if pages.copied(target, source, copy):
            return True
        if pages.is_written(source):
            return False
    pages.emptied(target)
    return True


def _joining() -> Callable[..., torch.Tensor]:
    """`cat`, and with it `stack`, of what has no values: transformers loads the experts of a layer one by one and makes
    one tensor of them."""
    plain = torch.library.get_kernel("aten::cat", "CPU").call_boxed

    def kernel(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        whole = sum([tensor.nbytes for tensor in tensors])
        if (
            whole < LARGE
            or not all(tensor.is_floating_point() for tensor in tensors)
            or sum(tensor.nbytes for tensor in tensors if _has_values(tensor)) >= LARGE  # as images of a batch
        ):
            made: torch.Tensor = plain(BY_CPU_KERNEL, tensors, dim)
            return made
        there = [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta") for one in tensors]
        joined = torch.cat(there, dim)
        empty = torch.empty_strided(joined.shape, joined.stride(), dtype=joined.dtype, device="cpu")
        pages.emptied(empty)  # it may be where something was before
        return empty

    return kernel


def _truncated(runtime: Runtime, draws: _Draws, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """trunc_normal_, which draws again until no number is outside: without values, as often as is to be expected."""

    def drawn(tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> torch.Tensor:
        if not tensor.is_cuda:
            if tensor.is_meta or not is_large(tensor):
                return plain(tensor, mean, std, a, b, generator)
            pages.emptied(tensor)
            _draw_inside(draws, tensor, mean, std, a, b, generator)
            return tensor
        share = _share(mean, std, a, b)
        asks, taken = (1, share) if share > _NORMAL else (2, _accepted(share, mean, std, a, b))
        calls = asks * (_rounds(tensor.numel(), taken) - 1)
        made = itertools.count(1)
        where: Callable[..., torch.Tensor] = torch.where

        def again(*args: Any) -> torch.Tensor:
            runtime.truth = next(made) < calls
            return where(*args)

        with mock.patch.object(torch, "where", again), mock.patch.object(runtime, "truth", calls > 0):
            return plain(tensor, mean, std, a, b, generator)

    return drawn


def _draw_inside(
    draws: _Draws, tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any
) -> None:
    """Draw for a large tensor on the host as often as trunc_normal_ does: every element anew while one is outside.

    Of the numbers, the places of those outside are kept, part by part.
    """
    share, size = _share(mean, std, a, b), tensor.numel()
    if not tensor.is_contiguous() or share <= _NORMAL:
        draws.stop()
    if not draws.may(size if share == 1 else size * _rounds(size, share)):
        return
    low, high = (tensor.new_tensor(bound, device="cpu").item() for bound in (a, b))
    outside: list[torch.Tensor] = []
    while not outside or any(map(len, outside)):
        before, outside = outside, []
        for index, part in enumerate(draws.parts(tensor)):
            part.normal_(mean, std, generator=generator)
            places = _outside(part[before[index]] if before else part, low, high)
            outside.append(before[index][places] if before else places)
        if not outside:
            return


def _outside(numbers: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """The places of those that are below or above."""
    least, most = torch.aminmax(numbers) if len(numbers) else (low, high)
    if least >= low and most <= high:  # as most are, which takes a fifth of the time to see
        return torch.empty(0, dtype=torch.int32, device="cpu")
    return ((numbers < low) | (numbers > high)).nonzero().flatten().int()


def _share(mean: float, std: float, a: float, b: float) -> float:
    """Of normal numbers, the share from a to b."""
    normal = statistics.NormalDist(mean, std)
    return normal.cdf(b) - normal.cdf(a)


def _accepted(share: float, mean: float, std: float, a: float, b: float) -> float:
    """Of uniform numbers from a to b, the share that is taken for a normal one; a hundredth of them at least."""
    most = (b - a) * statistics.NormalDist(mean, std).pdf(max(a, min(mean, b)))
    return max(share, most / 100) / most if most else 0.01


def _rounds(size: int, share: float) -> int:
    """How often `size` numbers are drawn, in the median, until of each the last is inside, where a share of them is."""
    outside = 1 - share
    return 1 if outside <= 0 else max(1, math.ceil(math.log(size / math.log(2)) / -math.log(outside)))


def _tensor(number: Any) -> torch.Tensor:
    """A number as the tensor that PyTorch's C++ makes of it."""
    return torch.scalar_tensor(number, dtype=_DTYPES[number.__class__])
