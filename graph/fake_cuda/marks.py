"""Floating-point numbers of large tensors on devices that hold nothing have no values: which are masks, and which not.

A mask is one number, but for places where another was scattered. It is asked where it is 1 (`torch.where(mask == 1.0)`
in PEFT's SHiRA), and how many places that are decides shapes. What comes from the host and is no mask, as pictures, is
asked where it is 0 (Idefics3 leaves out those that are padding): nowhere, for it hits no number exactly.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import zeros  # not what a program puts in its place

if TYPE_CHECKING:
    from graph.fake_cuda.torch_private import Operator

_K = TypeVar("_K")
_T = TypeVar("_T")

#: Operators in place that make masks, and what masks are made of.
_MAKING: Final = frozenset({"fill_", "zero_", "scatter_", "copy_"})
#: Comparisons.
COMPARING: Final = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
#: So many storages are known to be of one number, the last of them.
_NEWEST: Final = 64
#: So many masks are kept: a program asks the one that it has made.
_MASKS: Final = 4
#: Masks of more elements are not kept.
_MOST: Final = 1 << 25
#: So many storages are known to be no masks, the last of them.
_DATA: Final = 1 << 10
#: Tensors on the host with larger storages may not have been written, and are not looked at.
_LOOKED_AT: Final = 1 << 20
#: So many elements are looked at.
_SAMPLE: Final = 1 << 8


@dataclass(frozen=True)
class _Mask:
    """What a storage is: `on` where `places`, of its elements, are true, else `off`. `version` is that of the tensor's
    counter as long as nobody writes it again."""

    version: int
    off: float
    on: float
    places: torch.Tensor


class Marks:
    """The masks of one device, by storage. `key(tensor)` says which storage a tensor has, `size(tensor)` how many bytes
    it has, `values(tensor)` what its values are, if it has any."""

    def __init__(
        self,
        key: Callable[[torch.Tensor], int],
        size: Callable[[torch.Tensor], int],
        values: Callable[[torch.Tensor], torch.Tensor | None],
    ) -> None:
        self._key, self._size, self._values = key, size, values
        self._filled: dict[int, float] = {}  # the one number of storages that are new
        self._masks: dict[int, _Mask] = {}
        self._data: dict[int, None] = {}  # storages of what came from the host and is no mask

    def restart(self) -> None:
        """Storages are counted from 1 again."""
        self._filled.clear()
        self._masks.clear()
        self._data.clear()

    def told(self, func: Operator) -> Callable[[tuple[Any, ...]], None] | None:
        """What is to be told the arguments of an operator in place, before it writes them; None: nothing."""
        return functools.partial(self._written, func) if func._opname in _MAKING else None

    def _written(self, func: Operator, args: tuple[Any, ...]) -> None:
        target = args[0]
        if func._opname == "copy_":
            self._copied(target, args[1])
            return
        if target.is_inference() or not target.is_floating_point():
            return
        if func._opname == "scatter_":  # others (`reduce`) compute with what is there
            if func._overloadname in ("src", "value"):
                self._scattered(target, *args[1:4])
            return
        number = args[1] if func._opname == "fill_" else 0.0
        whole = target.numel() * target.itemsize == self._size(target)
        if isinstance(number, int | float) and whole and target._version == 0:
            remember(self._filled, self._key(target), float(number), _NEWEST)

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        data = source.is_floating_point() and (not _may_be_mask(source) if source.is_cpu else self.is_data(source))
        key = self._key(target)
        if not data:
            self._data.pop(key, None)
        elif target.is_floating_point() and target.numel() * target.itemsize == self._size(target):
            remember(self._data, key, None, _DATA)

    def is_data(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor came from the host and is no mask."""
        return self._key(tensor) in self._data

    def _scattered(self, target: torch.Tensor, dim: int, index: torch.Tensor, source: object) -> None:
        off, places = self._number(target), self._values(index)
        on = self._number(source) if isinstance(source, torch.Tensor) else source
        size = self._size(target) // target.itemsize
        if off is None or places is None or not isinstance(on, int | float) or size > _MOST:
            return
        mask = zeros(size, dtype=torch.bool)
        _seen(mask, target).scatter_(dim, places, True)
        remember(self._masks, self._key(target), _Mask(target._version + 1, off, float(on), mask), _MASKS)

    def _number(self, tensor: torch.Tensor) -> float | None:
        """The one number of a tensor that nobody has written since it was made."""
        return self._filled.get(self._key(tensor)) if not tensor.is_inference() and tensor._version == 0 else None

    def compared(self, func: Operator, args: tuple[Any, ...]) -> torch.Tensor | None:
        """How a mask compares with a number; None where the first argument is none, or has been written since."""
        if func._opname not in COMPARING or not isinstance(args[0], torch.Tensor):
            return None
        mask = self._masks.get(self._key(args[0]))
        number = args[1] if len(args) > 1 else None
        if mask is None or not isinstance(number, int | float) or args[0]._version != mask.version:
            return None
        answer = getattr(operator, func._opname)
        on, off = bool(answer(mask.on, number)), bool(answer(mask.off, number))
        return torch.where(_seen(mask.places, args[0]), on, off)


def _may_be_mask(source: torch.Tensor) -> bool:
    """Whether a tensor on the host has one or two different numbers, as far as it is looked at."""
    if source.untyped_storage().nbytes() > _LOOKED_AT or source.itemsize == 1:
        return False
    elements = source.reshape(-1)
    if len(elements) <= _SAMPLE:  # so few have values
        return True
    found = set(elements[:: -(-len(elements) // _SAMPLE)].tolist())
    return len(found) <= len(("on", "off"))


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
