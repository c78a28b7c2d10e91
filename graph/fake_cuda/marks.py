"""Floating-point numbers of large tensors on devices that hold nothing have no values: which are masks, and which not.

A mask is one number, but for places where another was scattered. It is asked where it is 1 (`torch.where(mask == 1.0)`
in PEFT's SHiRA), and how many places that are decides shapes. What comes from the host and is no mask, as pictures, is
asked where it is 0 (Idefics3 leaves out those that are padding): where whole pictures are zeros, and nowhere else, for
it hits no number exactly. What was drawn evenly and is asked where it is below a number (`torch.rand(...) < 0.15`,
`bernoulli`: the tokens that a model is to guess) is so at as many places as are to be expected.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import Generator, float64, full, randperm, zeros  # not what a program puts in their place

from graph.user_code import reader

if TYPE_CHECKING:
    from graph.fake_cuda.torch_private import Operator

_K = TypeVar("_K")
_T = TypeVar("_T")

#: Operators in place that make masks, and what masks are made of.
MAKING: Final = frozenset({"fill_", "zero_", "scatter_", "copy_", "uniform_", "bernoulli_"})
#: Operators that make the largest numbers of rows, or their norms.
_LARGEST: Final = frozenset({"amax", "max", "norm", "linalg_vector_norm"})
#: Operators that take some or all of the elements.
TAKING: Final = frozenset({"index", "index_select"})
#: Operators that make new tensors of which something is known without their values.
MARKED: Final = _LARGEST | TAKING | {"scatter", "div"}
#: A bound up to this asks for what is zero, or was never trained.
_TINY: Final = 1e-6
#: Comparisons.
COMPARING: Final = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
#: So many storages are known to be of one number, the last of them.
_NEWEST: Final = 64
#: So many masks are kept: a program asks the one that it has made.
_MASKS: Final = 4
#: Masks of more elements are not kept.
_MOST: Final = 1 << 28
#: Booleans that are converted leave a mask behind up to as many.
_CONVERTED: Final = 1 << 24
#: What of a mask of ones follows from its places: sums, and parts of it.
_FOLLOWING: Final = TAKING | {"sum", "cumsum", "any"}
#: So many storages are known to be no masks, the last of them.
_DATA: Final = 1 << 16
#: Tensors on the host with larger storages may not have been written, and are not looked at.
_LOOKED_AT: Final = 1 << 20
#: After so many elements those that are drawn begin again.
_PERIOD: Final = 1 << 20
#: So many elements are looked at.
_SAMPLE: Final = 1 << 8


@dataclass(frozen=True)
class _Mask:
    """What a storage is: `on` where `places`, of its elements, are true, else `off`. `version` is that of the tensor's
    counter as long as nobody writes it again. `on` is None, and `off` 0, where nobody knows what was scattered.
    `itemsize` is an element's: bytes of it, as of storages that are copied, are no mask."""

    version: int
    itemsize: int
    off: float
    on: float | None
    found: Callable[[], torch.Tensor]

    @functools.cached_property
    def places(self) -> torch.Tensor:
        """Found when they are asked for: dropout draws masks that nobody asks."""
        return self.found()

    @property
    def is_zero(self) -> bool:
        """Whether it is zero but for its places."""
        return self.off == 0 != self.on


class Marks:
    """The masks of one device, by storage. `key(tensor)` says which storage a tensor has, `size(tensor)` how many bytes
    it has, `values(tensor)` what its values are, if it has any, `finite()` whether numbers without values count as
    finite: what is drawn is as is to be expected then, and else nobody knows."""

    def __init__(
        self,
        key: Callable[[torch.Tensor], int],
        size: Callable[[torch.Tensor], int],
        values: Callable[[torch.Tensor], torch.Tensor | None],
        finite: Callable[[], bool],
    ) -> None:
        self._key, self._size, self._values, self._finite = key, size, values, finite
        self._filled: dict[int, tuple[float, torch.dtype]] = {}  # the one number of storages that are new
        self._masks: dict[int, _Mask] = {}
        self._drawn: dict[int, tuple[int, float, float]] = {}  # the version, and between what numbers, drawn evenly
        # storages of what came from the host and is no mask: which of its pictures are zeros, where there are such
        self._data: dict[int, torch.Tensor | None] = {}
        #: Whether a tensor on the host, however large, has the values that it will have.
        self.seen: Callable[[torch.Tensor], bool] = _is_looked_at
        self._largest: dict[int, None] = {}  # storages of the largest numbers of rows of it

    def restart(self) -> None:
        """Storages are counted from 1 again."""
        self._filled.clear()
        self._masks.clear()
        self._drawn.clear()
        self._data.clear()
        self._largest.clear()

    def forget(self, *tensors: torch.Tensor) -> None:
        """Somebody writes these tensors."""
        for tensor in tensors if self._filled or self._masks or self._drawn else ():
            for known in (self._filled, self._masks, self._drawn):
                known.pop(self._key(tensor), None)

    def known(self, tensors: Iterable[torch.Tensor]) -> None:
        """These tensors have values: as masks they would be there twice."""
        for tensor in tensors if self._masks else ():
            self._masks.pop(self._key(tensor), None)

    def told(self, func: Operator) -> Callable[[tuple[Any, ...]], None] | None:
        """What is to be told the arguments of an operator in place, before it writes them; None: nothing."""
        return functools.partial(self._written, func) if func._opname in MAKING else None

    def _written(self, func: Operator, args: tuple[Any, ...]) -> None:
        if args[0].is_cpu:  # whose storage is not counted: its number may be another's
            return
        target, number = args[0], self._number(args[0])
        self.forget(target)
        if func._opname == "copy_":
            self._copied(target, args[1])
        elif func._opname == "uniform_":
            self._draw(target, number is not None, *args[1:])
        elif func._opname == "bernoulli_":
            self._draw_mask(target, *args[1:])
        elif func._opname == "scatter_":
            self._scattered(func, (number, *args[1:]), target, self._version(target) + _is_versioned(target))
        else:
            self._fill(target, args[1] if func._opname == "fill_" else 0.0)

    def _fill(self, target: torch.Tensor, number: object) -> None:
        if isinstance(number, int | float) and self._is_whole(target) and not self._version(target):
            remember(self._filled, self._key(target), (float(number), target.dtype), _NEWEST)

    def _draw(self, target: torch.Tensor, filled: bool, low: float = 0.0, high: float = 1.0) -> None:
        """What was `filled` before is drawn by the program, which the tensor's counter counts; in torch.rand, it stays
        where it was."""
        if self._finite() and self._is_whole(target) and low < high and not self._version(target):
            remember(self._drawn, self._key(target), (int(filled), low, high), _NEWEST)

    def _draw_mask(self, target: torch.Tensor, share: torch.Tensor | float = 0.5) -> None:
        """Each element is 1 with this probability, or else 0."""
        version = self._version(target)
        if isinstance(share, torch.Tensor):  # torch.bernoulli's result is new, and its counter stays where it was
            share = math.nan if (number := self._number(share)) is None else number
        else:
            version += _is_versioned(target)
        if 0 <= share <= 1 and self._finite() and self._is_whole(target) and target.numel() <= _MOST:
            found = functools.partial(_drawn_by, share, target.numel(), reader())
            remember(self._masks, self._key(target), _Mask(version, target.itemsize, 0.0, 1.0, found), _MASKS)

    def _version(self, target: torch.Tensor) -> int:
        """How often it has been written, if that counts: of integers, whatever writes them makes us forget them."""
        return (-1 if target.is_inference() else target._version) if _is_versioned(target) else 0

    def _is_whole(self, target: torch.Tensor) -> bool:
        return target.numel() * target.itemsize == self._size(target)

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        data = source.is_floating_point() and (not _may_be_mask(source) if source.is_cpu else self.is_data(source))
        key = self._key(target)
        if not data:
            self._data.pop(key, None)
        elif target.is_floating_point() and self._is_whole(target):
            remember(self._data, key, self._empty(source), _DATA)
        if not target.numel() or target.shape != source.shape:  # a lazy parameter has no shape
            return
        if not source.is_cpu:
            self._converted(target, source)
        elif not data and source.is_floating_point() and is_on_or_off(self._values(source)):
            self._lay(target, source != 0)

    def _empty(self, source: torch.Tensor) -> torch.Tensor | None:
        """Which pictures of a batch, (..., channels, height, width), are zeros: those that fill it up."""
        if not source.is_cpu:
            return self._data.get(self._key(source))
        if source.dim() < len("NCHW") or not source.numel() or not source.is_contiguous() or not self.seen(source):
            return None
        pictures = source.reshape(math.prod(source.shape[:-3]), -1)
        empty = (pictures[:, :_SAMPLE] == 0).all(dim=1)
        for index in empty.nonzero().flatten().tolist():
            empty[index] = not pictures[index].any()
        return empty if empty.any() else None

    def _converted(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A new tensor is one number, or a mask, where it is a copy of such, as another dtype has it."""
        number, mask = self._number(source), self._mask(source)
        if number is not None:
            self._fill(target, full((), number, dtype=float64).to(target.dtype).item())
        elif mask is not None and mask.is_zero:
            on = 1.0 if target.dtype is torch.bool else mask.on
            if on is None and not target.is_floating_point():
                return
            self._lay(target, _seen(mask.places, source), on)
        elif not source.is_floating_point() and target.numel() <= _CONVERTED:  # one_hot makes integers
            known = self._values(source)
            masks = source.dtype is torch.bool or (target.is_floating_point() and is_on_or_off(known))
            if known is not None and masks:
                self._lay(target, known != 0)

    def _lay(self, target: torch.Tensor, places: torch.Tensor, on: float | None = 1.0) -> None:
        """A new tensor is zero but where `places` are true."""
        if self._is_whole(target) and not self._version(target):
            mask = zeros(target.numel(), dtype=torch.bool)
            _seen(mask, target).copy_(places)
            remember(self._masks, self._key(target), _Mask(0, target.itemsize, 0.0, on, lambda: mask), _MASKS)

    def is_data(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor came from the host and is no mask."""
        return self._key(tensor) in self._data

    def are_large(self, func: Operator, args: tuple[Any, ...]) -> bool:
        """Whether it is asked which rows of what came from the host are next to nothing, as who looks for tokens that
        were never trained does: none is."""
        asks = func._opname in ("lt", "le") and isinstance(args[1], float) and 0 < args[1] <= _TINY
        return asks and isinstance(args[0], torch.Tensor) and self._key(args[0]) in self._largest

    def made(self, func: Operator, args: tuple[Any, ...], made: torch.Tensor, result: object) -> None:
        """`func`, one of `MARKED`, has made this of its arguments; `result` is what it is, if that follows from theirs:
        parts of a mask are one too."""
        if func._opname in _LARGEST:
            if self.is_data(args[0]):
                remember(self._largest, self._key(made), None, _NEWEST)
        elif func._opname == "div":
            self._divided(made, *args[:2])
        elif func._opname not in TAKING:
            self._scattered(func, (self._number(args[0]), *args[1:]), made, 0)
        elif isinstance(result, torch.Tensor) and self._is_part(made, result):
            self._lay(made, result != 0)

    def _divided(self, made: torch.Tensor, mask: object, number: object) -> None:
        """A mask divided by a number is one: shares of what is averaged (Gemma 4's patches)."""
        found = self._mask(mask)
        if found is None or not found.is_zero or found.on is None or not made.is_floating_point():
            return
        if isinstance(number, torch.Tensor) and number.is_cpu and not number.ndim:
            number = number.item()
        if isinstance(mask, torch.Tensor) and isinstance(number, int | float) and number:
            self._lay(made, _seen(found.places, mask), found.on / number)

    def _is_part(self, made: torch.Tensor, result: torch.Tensor) -> bool:
        """Whether these are zeros and ones that were taken of a mask of floating-point numbers, and not too many."""
        fits = made.is_floating_point() and made.numel() <= _CONVERTED and made.shape == result.shape
        return fits and is_on_or_off(result)

    def _scattered(self, func: Operator, args: tuple[Any, ...], target: torch.Tensor, version: int) -> None:
        """`target` is one number, but where others are scattered; with `reduce` it is computed."""
        if func._overloadname not in ("src", "value"):
            return
        off, dim, index, source = args
        places = self._values(index)
        on = self._number(source) if isinstance(source, torch.Tensor) else source
        size = self._size(target) // target.itemsize
        if off is None or places is None or size > _MOST or (on is None and off):
            return
        mask = zeros(size, dtype=torch.bool)
        _seen(mask, target).scatter_(dim, places, True)
        on = None if on is None else float(on)
        remember(self._masks, self._key(target), _Mask(version, target.itemsize, off, on, lambda: mask), _MASKS)

    def _number(self, tensor: torch.Tensor) -> float | None:
        """The one number of a tensor that nobody has written since it was made."""
        number, dtype = self._filled.get(self._key(tensor), (None, None))
        return number if tensor.dtype is dtype and not self._version(tensor) else None

    def _mask(self, tensor: object) -> _Mask | None:
        """What mask a tensor is, if it is one that has not been written since."""
        if not self._masks or not isinstance(tensor, torch.Tensor):
            return None
        mask = self._masks.get(self._key(tensor))
        same = mask is not None and (self._version(tensor), tensor.itemsize) == (mask.version, mask.itemsize)
        return mask if same else None

    def compared(self, func: Operator, args: tuple[Any, ...]) -> torch.Tensor | None:
        """How a mask compares with a number; None where the first argument is none, or has been written since. What
        was scattered and nobody knows counts as more than 0, as weights are, and compares with nothing else."""
        mask = self._mask(args[0]) if func._opname in COMPARING else None
        number = args[1] if len(args) > 1 else None
        if func._opname in ("eq", "ne") and isinstance(number, int | float) and not number:
            pictures = self._zeros(args[0])
            if pictures is not None:
                return pictures if func._opname == "eq" else ~pictures
        if mask is None or not isinstance(number, int | float) or (mask.on is None and number):
            return None
        answer = getattr(operator, func._opname)
        on, off = bool(answer(1.0 if mask.on is None else mask.on, number)), bool(answer(mask.off, number))
        return torch.where(_seen(mask.places, args[0]), on, off)

    def _zeros(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Where a batch of pictures, some of which are zeros, is 0; None of others."""
        empty = self._data.get(self._key(tensor))
        size = self._size(tensor) // tensor.itemsize
        if empty is None or size > _MOST or size % len(empty):
            return None
        return _seen(empty.repeat_interleave(size // len(empty)), tensor)

    def below(self, func: Operator, args: tuple[Any, ...], made: torch.Tensor) -> torch.Tensor | None:
        """How evenly drawn numbers compare with a number: as many as are to be expected. None of others."""
        if func._opname not in COMPARING or not isinstance(args[0], torch.Tensor):
            return None
        drawn, number = self._drawn.get(self._key(args[0])), args[1]
        if drawn is None or not isinstance(number, int | float) or func._opname in ("eq", "ne"):
            return None
        version, low, high = drawn
        if version != self._version(args[0]):
            return None
        share = min(1.0, max(0.0, (number - low) / (high - low)))
        share = share if func._opname in ("lt", "le") else 1 - share
        return _drawn_by(share, made.numel(), reader()).view(made.shape)

    def places(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Where a tensor is other than zero, on the host; None if it is no mask, or none of zeros."""
        mask = self._mask(tensor)
        return _seen(mask.places, tensor) if mask is not None and mask.is_zero else None

    def numbers(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What a tensor is that is one number, or zeros and ones; None if it is neither."""
        number, mask = self._number(tensor), self._mask(tensor)
        if number is not None:
            return full((), number, dtype=float64).expand(tensor.shape)
        return self.places(tensor) if mask is not None and mask.on == 1 else None

    def ones(self, func: Operator, args: tuple[Any, ...]) -> torch.Tensor | None:
        """The first argument as booleans of which an operator makes what it makes of the mask; None if it is none."""
        mask = self._mask(args[0]) if args and func._opname in _FOLLOWING else None
        whole = mask is not None and mask.off == 0 and (mask.on == 1 or func._opname == "any")
        return self.places(args[0]) if whole else None


def drawn_among(numbers: range, count: int) -> torch.Tensor:
    """So many integers, each of these as often, in an order that follows from the line of the program that draws."""
    return _in_order(count, _line(reader())).remainder(len(numbers)) + numbers.start


def _drawn_by(share: float, count: int, place: str) -> torch.Tensor:
    """So many booleans, of which this share is true, and which ones follows from the line of the program that draws:
    so steps are alike, and what different lines draw goes together as chance has it."""
    return _in_order(count, _line(place), share)


def _line(place: str) -> int:
    return zlib.crc32(place.rpartition(os.sep)[2].encode())


def _in_order(count: int, seed: int, share: float | None = None) -> torch.Tensor:
    """Places in a random order, or which of them are among the first, of this share."""
    found = _shuffled(min(count, _PERIOD), share, seed)
    return found.repeat(-(-count // _PERIOD))[:count]


@functools.lru_cache(maxsize=8)
def _shuffled(count: int, share: float | None, seed: int) -> torch.Tensor:
    """Places in a random order; with `share` whether each is among the first, as many as are to be expected."""
    order = randperm(count, generator=Generator("cpu").manual_seed(seed), device="cpu")
    return order if share is None else order < round(share * count)


def _is_versioned(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _may_be_mask(source: torch.Tensor) -> bool:
    """Whether a tensor on the host has one or two different numbers, as far as it is looked at."""
    if source.itemsize == 1 or not _is_looked_at(source):
        return False
    elements = source.reshape(-1)
    if len(elements) <= _SAMPLE:  # so few have values
        return True
    found = set(elements[:: -(-len(elements) // _SAMPLE)].tolist())
    return len(found) <= len(("on", "off"))


def _is_looked_at(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() <= _LOOKED_AT


def is_on_or_off(numbers: torch.Tensor | None) -> bool:
    """Whether these are zeros and ones, if they are known."""
    return numbers is not None and bool(((numbers == 0) | (numbers == 1)).all())


def _seen(elements: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Elements of a storage, as a tensor sees its own."""
    return elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def remember(known: dict[_K, _T], key: _K, value: _T, most: int) -> None:
    """Add to what is known, of which the newest `most` are kept; another thread may do the same."""
    known.pop(key, None)
    known[key] = value
    while len(known) > most:
        with contextlib.suppress(KeyError, RuntimeError):
            del known[next(iter(known))]
