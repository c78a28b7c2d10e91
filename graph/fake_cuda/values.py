"""Values of integers, booleans and a few floating-point numbers on devices that hold nothing.

What comes from the host has values: token ids, masks, sizes of images, lengths, schedules of noise. They and what
operators make of them alone are computed on the host beside the shapes, so that shapes that depend on them are what
they are (`nonzero`, masks among indices, lists of lengths). What derives from weights or from chance has no values, nor
has what is larger than `MOST_BYTES`, of booleans and long integers than `MOST_INDEX_BYTES`, of floating-point numbers
than `MOST_FLOAT_BYTES`, of masks of those than `MOST_MASK_BYTES`.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import mmap
import operator
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import empty, full, randperm  # not those that a program puts in their place
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from graph.fake_cuda.marks import COMPARING, MAKING, MARKED, TAKING, Marks, drawn_among, is_on_or_off, remember
from graph.fake_cuda.shapes import numbers_as_tensors
from graph.fake_cuda.torch_private import TorchDispatchMode, current_node, tree_leaves

if TYPE_CHECKING:
    from graph.fake_cuda.memory import Layout
    from graph.fake_cuda.torch_private import Operator

#: Storages of more bytes have no values.
MOST_BYTES: Final = 1 << 25
#: The same of floating-point numbers: a schedule of a thousand steps has room, in any precision, weights have not.
MOST_FLOAT_BYTES: Final = 1 << 13
#: The same of those that are a mask: all the same number, converted from what has values, or several such in a row.
MOST_MASK_BYTES: Final = 1 << 18
#: The same of booleans and long integers, which weights never are.
MOST_INDEX_BYTES: Final = 1 << 27
_NO_WEIGHTS: Final = frozenset({torch.bool, torch.int64})
#: Floating-point numbers in larger storages on the host may not have been written.
_UNWRITTEN: Final = 1 << 20
#: So many storages are known to be unwritten.
_NEWEST: Final = 64
#: Values of as many bytes have pages of their own, which go back to the system with them; malloc would keep them.
_PAGES: Final = 1 << 20
#: The dtypes that have values up to `MOST_BYTES` at least.
COUNTED: Final = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
#: So many numbers are looked at whether they all differ.
_MOST_DIFFERENT: Final = 1 << 14
#: Of so many integers or places, those that are chosen are experts or classes, and no tokens.
FEW: Final = 512
#: Operators in place after which nothing is left of what was there.
_OVERWRITING: Final = frozenset({"copy_", "fill_", "zero_"})

#: Operators that make or write floating-point numbers which are a mask, if what they read are such.
CARRYING: Final = frozenset({"cat", *_OVERWRITING})
#: Those that make one where what comes out is zeros and ones.
_MASKING: Final = frozenset({"eye", "tril", "triu", "mul", "rsub", "sub", "where"})
_MAY_MASK: Final = CARRYING | _MASKING

#: What is asked of floating-point numbers, and the answer where they are finite.
_FINITE: Final = {"isnan": False, "isinf": False, "isposinf": False, "isneginf": False, "isfinite": True}

#: Operators that give what all booleans are that they are given, of so many tensors, or the contrary.
_CONTRARY: Final = frozenset({"bitwise_not", "logical_not"})
_FOLLOWING: Final = {
    **dict.fromkeys(("any", "all", "_is_any_true", "_is_all_true", *_CONTRARY), 1),
    **dict.fromkeys(("mul", "bitwise_and", "bitwise_or", "logical_and", "logical_or"), 2),
}

#: Operators on booleans that have one answer as soon as one side is that.
_DECISIVE: Final = {"bitwise_and": False, "logical_and": False, "bitwise_or": True, "logical_or": True}

_CPU: Final = torch.device("cpu")


def has_room(dtype: torch.dtype, size: int, *, mask: bool = False) -> bool:
    """Whether a storage of `size` bytes can have values; `mask`: if it has floating-point numbers, they are a mask."""
    if dtype in _NO_WEIGHTS:
        return size <= MOST_INDEX_BYTES
    return size <= (MOST_BYTES if dtype in COUNTED else MOST_MASK_BYTES if mask else MOST_FLOAT_BYTES)


def knowable(func: Operator | None, made: torch.Tensor | Layout) -> bool:
    """The same of what `func` makes, or whether it may be known that all booleans of it are one, or that it is a
    mask."""
    mask, marked = (func is not None and func._opname in kinds for kinds in (_MAY_MASK, MARKED))
    return marked or made.dtype is torch.bool or has_room(made.dtype, made.nbytes, mask=mask)


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same values of one storage in the same order."""
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    about, also = ((t.dtype, t.shape, t.stride(), t.storage_offset()) for t in (one, other))
    return about == also


def may_have_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor is not too large to have values."""
    return tensor.dtype in COUNTED or tensor.numel() <= MOST_MASK_BYTES // 4


class _UnknownError(Exception):
    """A tensor has no values."""


class Values:
    """The values of tensors of one device, by storage.

    `key(tensor)` says which storage a tensor has, `size(tensor)` how many bytes it has; `known` has the bytes of those
    with values, on the host. Whoever knows when a storage dies takes its key out of `known`.
    """

    def __init__(
        self,
        key: Callable[[torch.Tensor], int],
        known: MutableMapping[int, torch.UntypedStorage] | None = None,
        size: Callable[[torch.Tensor], int] = lambda tensor: tensor.untyped_storage().nbytes(),
    ) -> None:
        self.key = key
        self.size = size
        self.finite = False  # whether floating-point numbers without values count as finite
        self.number = 0.0  # what floating-point numbers without values are read as
        self.share: float | None = None  # of elements without values that are not zero, of all where it is not given
        self.assume: Callable[[str, object], None] = lambda what, value: None  # told of what is taken to be so
        self.ones: Callable[[torch.Tensor, bool], int] = lambda booleans, quiet: booleans.numel()  # that are true
        self.wanted: Callable[[], bool | None] = lambda: None  # what has to be so for the program not to raise
        self._comparing: bool | None = None  # how numbers without values compare: None, as they are read
        self.known: MutableMapping[int, torch.UntypedStorage] = {} if known is None else known
        self._bounds: dict[int, range] = {}  # of storages of integers, what they are among
        self._unwritten: dict[int, None] = {}  # storages that nobody has written, the last of them
        self._order = torch.Generator()  # of random orders
        self._uniform: dict[int, bool] = {}  # what all booleans of large storages are, of the last of those
        self._assumed: dict[int, None] = {}  # storages whose values follow from what was assumed, the last of them
        self._shares: dict[int, float] = {}  # of elements that are not zero, of storages scattered into
        self.marks = Marks(key, size, self.of, lambda: self.finite)

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of `tensor` on the host, as a view of what is kept; None if it has none."""
        if tensor.is_cpu:
            written = tensor.dtype in COUNTED or tensor.untyped_storage().nbytes() <= _UNWRITTEN
            return tensor if written else None
        if not tensor.numel():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_CPU)
        storage = self.known.get(self.key(tensor))
        return None if storage is None else _view(storage, tensor)

    def put(self, tensor: torch.Tensor, host: torch.Tensor, *, mask: bool = False) -> None:
        """Let `tensor`, new, have the values of `host`, if there are any ("meta" has none) and there is room."""
        there = tensor.numel() and not host.is_meta
        storage = _room(tensor.dtype, self.size(tensor), mask) if there else None
        if storage is not None:
            _view(storage, tensor).copy_(host)
            self.known[self.key(tensor)] = storage

    def suppose(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Let `tensor`, new, have values that are assumed."""
        self.put(tensor, host)
        self._assume([tensor])

    def received(self, written: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Tensors are overwritten by values on the host; without any (None), by what nobody knows."""
        there = [pair for pair in written if pair[0].device.type != "cpu"]
        parts = collections.Counter[int]()
        for tensor, _ in there:
            parts[self.key(tensor)] += tensor.nbytes
        unknown = {self.key(tensor) for tensor, host in there if host is None}
        self.marks.forget(*[tensor for tensor, _ in there])
        self._begin(tuple(tensor for tensor, _ in there))
        self._forget(*[tensor for tensor, _ in there if self.key(tensor) in unknown])
        for tensor, _ in there:
            whole = parts[self.key(tensor)] >= self.size(tensor)
            if whole and self.key(tensor) not in unknown and self.of(tensor) is None:
                self._give_room(tensor)
        for tensor, host in written:
            known = self.of(tensor)
            if host is not None and known is not None:
                known.copy_(host)

    @contextlib.contextmanager
    def comparing(self, answer: bool) -> Iterator[None]:
        """Inside, single numbers without values compare so: a check that a program must pass to go on."""
        self._comparing = answer
        try:
            yield
        finally:
            self._comparing = None

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """The storages of `tensors` have no values any more, and are no masks."""
        written = list(tensors)
        self.marks.forget(*written)
        self._forget(*written)

    def _forget(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            key = self.key(tensor)
            for known in (self.known, self._shares, self._bounds, self._uniform, self._unwritten):
                known.pop(key, None)

    def unwritten(self, tensor: torch.Tensor) -> None:
        """`tensor` is new, and what is in it is nobody's: zeros, once a part of it is written by values."""
        remember(self._unwritten, self.key(tensor), None, _NEWEST)

    def restart(self) -> None:
        """Storages are counted from 1 again."""
        self.marks.restart()
        for known in (self._unwritten, self._assumed, self._shares, self._bounds, self._uniform):
            known.clear()

    def bound(self, tensor: torch.Tensor, most: int, least: int = 0) -> None:
        """The integers of `tensor`, new, are from `least` on and below `most`: places along a dimension, or drawn."""
        self._bounds[self.key(tensor)] = range(least, most)

    def different(self, tensor: torch.Tensor) -> int:
        """How many different values a tensor without values has at most."""
        among = range(2) if tensor.dtype is torch.bool else self._bounds.get(self.key(tensor))
        return tensor.numel() if among is None else min(tensor.numel(), among.stop - among.start)

    def integer(self, tensor: torch.Tensor) -> int:
        """What an integer without a value is read as: 0, or what is next to it of what the integer can be."""
        among = self._bounds.get(self.key(tensor))
        return 0 if among is None else min(max(0, among.start), among.stop - 1)

    def _drawn(self, func: Operator, args: tuple[Any, ...]) -> None:
        """`random_` has drawn integers, of which is known what they are among (Distributions.cpp, `random_from_to`)."""
        target, first, last = (args[0], 0, args[1]) if func._overloadname == "to" else args
        if last is None or target.dtype not in COUNTED or target.numel() * target.itemsize != self.size(target):
            return
        if last - first == 1:
            self.put(target, full(target.shape, first, dtype=target.dtype))
            return
        self.bound(target, last, first)
        if self.finite and last - first <= min(FEW, target.numel()) and has_room(target.dtype, self.size(target)):
            self.suppose(target, drawn_among(range(first, last), target.numel()).view(target.shape))
            self.assume("which of a few integers are drawn", "each as often")

    def _drawn_number(self, target: torch.Tensor, low: float, high: float = 1.0) -> None:
        """One number drawn between bounds, as augmentations draw it: what is next to 0 of what it can be."""
        self._assume([target])
        self.put(target, full(target.shape, min(max(0.0, low), high), dtype=target.dtype))

    def nonzero(self, tensor: torch.Tensor) -> int | None:
        """How many elements are not zero of a part of zeros into which a number was scattered, where nobody knows to
        what places (`one_hot` of a router's choice): the part's share of them. Of others the share that is given."""
        share = self._shares.get(self.key(tensor), self.share)
        return None if share is None else round(share * tensor.numel())

    def places(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What is zero or not where the tensor is, on the host; None if nobody knows."""
        if (known := self.of(tensor)) is None:
            return self.marks.places(tensor)
        if self.is_assumed(tensor):
            self.assume("elements that are not zero", "what follows from other assumptions")
        return known

    def _scattered(self, func: Operator, args: tuple[Any, ...]) -> float | None:
        """The share of elements that this operator makes other than zero, if it scatters a number into zeros."""
        if func._opname != "scatter_" or func._overloadname != "value" or not args[3]:
            return None
        before = self.of(args[0])
        return None if before is None or before.any() else args[2].numel() / max(1, args[0].numel())

    def _is_unknown(self, args: tuple[Any, ...]) -> bool:
        """Whether one of these has no values."""
        return any(isinstance(arg, torch.Tensor) and self.of(arg) is None for arg in args)

    def computed(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func` gives on the values of its arguments, or those, where it only writes; None where one has none."""
        ordered = func._opname == "randperm" and args[0] <= MOST_BYTES // 8
        if self._is_unknown(args) or (torch.Tag.nondeterministic_seeded in func.tags and not ordered):
            return None
        try:
            host_args, host_kwargs = self._host((args, kwargs))
            if ordered:  # any order is as good as the GPU's, and what the program draws on the host stays as it is
                given = {name: host_kwargs[name] for name in ("dtype", "out") if name in host_kwargs}
                return randperm(host_args[0], generator=self._order, **given)
            made = func(*numbers_as_tensors(func, host_args), **host_kwargs)
            return host_args if made is None else made
        except (_UnknownError, RuntimeError, IndexError):  # NotImplementedError is a RuntimeError: no kernel on the CPU
            return None

    def made(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        """`func` has made `out`: new tensors that have room for values, or large ones of booleans."""
        made = _leaves(out)
        if any(one.dtype is torch.bool and not has_room(one.dtype, self.size(one)) for one in made):
            self._large(func, args, made)
            return
        result = self.computed(func, args, kwargs)
        if result is not None and self.is_assumed(*args):
            result = self._checked(func, made) or result
            self._assume(made)
        if result is None and (result := self._marked(func, args, kwargs)) is not None and self.is_assumed(*args):
            self._drawn_alike()
            self._assume(made)
        for assumed in (self._one_of, self._drawn_below, self._counted):
            if result is None and (result := assumed(func, args, made[0])) is not None:
                self._assume(made)
        if result is None and made[0].dtype is torch.bool and (truth := self._truth(func, args)) is not None:
            result = [full(one.shape, truth) for one in made]
        if result is not None:
            for tensor, host in zip(made, _leaves(result), strict=True):
                if tensor.shape == host.shape:  # statistics of batch norm in evaluation are empty on the CPU
                    masks = func._opname in _MASKING and is_on_or_off(host)
                    self.put(tensor, host, mask=masks or func._opname in CARRYING)
        elif func._opname in TAKING and (share := self._shares.get(self.key(args[0]))) is not None:
            self._shares[self.key(made[0])] = share
        if func._opname in MARKED and self.of(made[0]) is None:
            self.marks.made(func, args, made[0], result)

    def _marked(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """What follows from where a mask is on."""
        ones = self.marks.ones(func, args)
        return self.marks.compared(func, args) if ones is None else self._of_places(func, ones, args[1:], kwargs)

    def _drawn_below(self, func: Operator, args: tuple[Any, ...], made: torch.Tensor) -> torch.Tensor | None:
        """How random numbers compare with one number."""
        if (found := self.marks.below(func, args, made)) is not None:
            self._drawn_alike()
        return found

    def _drawn_alike(self) -> None:
        self.assume("how random numbers compare", "as many as are to be expected")

    def _of_places(self, func: Operator, ones: torch.Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return func(ones, *self._host(rest), **self._host(kwargs))
        except _UnknownError:
            return None

    def _assume(self, made: Iterable[torch.Tensor]) -> None:
        """What is known of these tensors follows from what was assumed."""
        for tensor in made:
            remember(self._assumed, self.key(tensor), None, _NEWEST)

    def follows(self, made: Iterable[torch.Tensor], given: Iterable[object]) -> None:
        """What is known of tensors follows from what they were made of."""
        if self.is_assumed(*given):
            self._assume(made)

    def is_assumed(self, *args: object) -> bool:
        """Whether the values of one of these, on the device, follow from what was assumed."""
        if not self._assumed:
            return False
        there = (arg for arg in args if isinstance(arg, torch.Tensor) and arg.device.type != "cpu")
        return any(self.key(arg) in self._assumed for arg in there)

    def _checked(self, func: Operator, made: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """How single numbers that follow from what was assumed compare, where a program raises if they do otherwise."""
        if func._opname not in COMPARING or made[0].numel() != 1:
            return None
        wanted = self._demanded()
        return None if wanted is None else [full(one.shape, wanted) for one in made]

    def _demanded(self) -> bool | None:
        """How a comparison has to come out for the program to go on, if it has to."""
        return self.wanted() if self._comparing is None else self._comparing

    def _one_of(self, func: Operator, args: tuple[Any, ...], made: torch.Tensor) -> torch.Tensor | None:
        """Where unknown numbers are equal to known ones that all differ, as time steps to those of a schedule: each is
        one of them, in turn."""
        if (
            func._opname not in ("eq", "ne")
            or not self.finite
            or not all(isinstance(arg, torch.Tensor) for arg in args)
        ):
            return None
        given = [self.of(arg) for arg in args]
        known, other = given[0] if given[1] is None else given[1], args[1] if given[1] is None else args[0]
        if known is None or not _differ(known) or made.numel() != known.numel() * other.numel():
            return None
        self.assume("which of different numbers others are", "each as often")
        turn = known.reshape(-1)[torch.arange(other.numel(), device=_CPU) % known.numel()].reshape(other.shape)
        return func(*[turn if one is None else one for one in given])  # type: ignore[no-any-return]

    def _counted(self, func: Operator, args: tuple[Any, ...], made: torch.Tensor) -> torch.Tensor | None:
        """Sums of booleans without values; None where nothing says them, or `func` makes none."""
        source = args[0] if args else None
        if func._opname not in ("sum", "cumsum") or not isinstance(source, torch.Tensor):
            return None
        true = self._true(source)
        if true is None:
            return None
        if func._opname == "sum":
            return full(made.shape, round(true / max(1, made.numel())), dtype=made.dtype)
        each = self._each(true, source, made.dtype)
        return None if each is None else each.cumsum(args[1])

    def _true(self, source: torch.Tensor, quiet: bool = False) -> int | None:
        """How many of booleans without values are true: as many as there are places of true ones (`nonzero`); None of
        others, and where numbers do not count as finite (a check for overflow would find one)."""
        if (
            not self.finite
            or source.dtype is not torch.bool
            or source.device.type == "cpu"
            or self.of(source) is not None
        ):
            return None
        uniform = self._uniform.get(self.key(source))
        return self.ones(source, quiet) if uniform is None else source.numel() * uniform

    def _each(self, true: int, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Booleans as numbers, where all are the same."""
        return full(source.shape, int(true > 0), dtype=dtype) if true in (0, source.numel()) else None

    def _large(self, func: Operator, args: tuple[Any, ...], made: Sequence[torch.Tensor]) -> None:
        """Of large tensors of booleans no more is kept than what all of them are, if that is known."""
        if (truth := self._truth(func, args)) is not None:
            for tensor in made:
                remember(self._uniform, self.key(tensor), truth, _NEWEST)

    def _of_uniform(self, func: Operator, args: tuple[Any, ...]) -> bool | None:
        """The same where it follows from what all elements of large arguments are."""
        count = _FOLLOWING.get(func._opname) if self._uniform else None
        if count is None:
            return None
        tensors = [arg for arg in args[:count] if isinstance(arg, torch.Tensor) and arg.device.type != "cpu"]
        given = {self._uniform.get(self.key(tensor)) for tensor in tensors}
        one = given.pop() if len(given) == 1 and len(tensors) == count else None
        return one if one is None or func._opname not in _CONTRARY else not one

    def _truth(self, func: Operator, args: tuple[Any, ...]) -> bool | None:
        """What all elements of the answer are although the values of some argument are not known, if that is so."""
        if (uniform := self._of_uniform(func, args)) is not None:
            return uniform
        decisive = _DECISIVE.get(func._opname)
        if decisive is not None and any(self._all(arg, decisive) for arg in args):
            return decisive
        if not self.finite:
            return None
        if func._opname == "isin" and isinstance(args[0], torch.Tensor):  # is this token one that ends a sequence?
            self.assume("whether numbers are among others", False)
            return False
        known = _of_finite(func, args)
        if known is None:
            known = _of_autograd(func, args)
        if known is None and func._opname in ("eq", "ne") and self._is_data(args):
            self.assume("which of the numbers that the host sent are a given one", "none")
            known = func._opname == "ne"
        if known is None and self.marks.are_large(func, args):
            self.assume("whether the largest of many numbers is next to nothing", False)
            known = False
        return self._compared(func, args) if known is None and func._opname in COMPARING else known

    def _is_data(self, args: tuple[Any, ...]) -> bool:
        """Whether what came from the host and is no mask is asked where it is a number."""
        several = isinstance(args[0], torch.Tensor) and args[0].numel() > 1
        return several and isinstance(args[1], int | float) and self.marks.is_data(args[0])

    def _compared(self, func: Operator, args: tuple[Any, ...]) -> bool | None:
        """How single numbers compare, those without values as they are read; None if there are several."""
        if any(isinstance(arg, torch.Tensor) and arg.numel() != 1 for arg in args):
            return None
        wanted = self._demanded()
        if wanted is not None:
            return wanted
        self.assume("how a floating-point number compares", f"{self.number} in its place")
        return bool(getattr(operator, func._opname)(*map(self._number, args)))

    def _number(self, given: object) -> Any:
        if not isinstance(given, torch.Tensor):
            return given
        known = self.of(given)
        return self.number if known is None else known.item()

    def _all(self, arg: object, truth: bool) -> bool:
        """Whether an argument is a tensor of booleans that are known, and all `truth`."""
        known = self.of(arg) if isinstance(arg, torch.Tensor) and arg.dtype is torch.bool else None
        return known is not None and bool((known == truth).all())

    def written(
        self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[torch.Tensor, ...]
    ) -> None:
        """`func` has written its arguments `targets`."""
        if func._opname not in MAKING:
            self.marks.forget(*targets)
        share = self._scattered(func, args)
        read = args[1:] if func._opname in _OVERWRITING else args
        if not self._is_unknown(read):
            tested = func._opname in _MASKING and self._fit_as_mask(targets) and self.of(targets[0]) is None
            if _writes_over(func):
                self._begin(targets)
                mask = func._opname in CARRYING and self._fit_as_mask(targets) and all(map(self._is_mask, args[1:2]))
                self._make_room(targets, read, mask or tested)
            done = self.computed(func, args, kwargs) is not None
            if done and (not tested or is_on_or_off(self.of(targets[0]))):
                self.marks.known(targets)
                self.follows(targets, read)
                return
        self._forget(*targets)
        if share is not None:
            self._shares[self.key(args[0])] = share
        if func._opname == "copy_" and not args[1].is_cpu:
            self._copied(*args[:2])
        elif func._opname == "random_" and len(args) > 1:
            self._drawn(func, args)
        elif func._opname == "uniform_" and len(args) > 1 and self.size(args[0]) == args[0].itemsize:
            self._drawn_number(*args)
        elif func._opname == "bernoulli_" and self.marks.numbers(args[0]) is not None:
            self._assume(targets)
            self._marked_whole(args[0])

    def _marked_whole(self, target: torch.Tensor) -> None:
        """The target is one number, or a mask, which says its values."""
        if has_room(target.dtype, self.size(target)) and (host := self.marks.numbers(target)) is not None:
            self.put(target, host)
            self.marks.known([target])
            if self.is_assumed(target):
                self._drawn_alike()

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """The target is a copy of booleans without values, of a mask, or of integers, of which is known what they are
        among."""
        if target.numel() * target.itemsize != self.size(target):
            return
        self.follows([target], [source])
        self._marked_whole(target)
        if (share := self._shares.get(self.key(source))) is not None:
            self._shares[self.key(target)] = share
        if (among := self._bounds.get(self.key(source))) is not None:
            self.bound(target, among.stop, among.start)
        if target.dtype is not torch.bool and has_room(target.dtype, self.size(target)):
            true = self._true(source, quiet=target.is_floating_point())  # who reads a floating-point number is told
            each = None if true is None else self._each(true, source, target.dtype)
            if each is not None and each.shape == target.shape:
                self.put(target, each)
                self._assume([target])

    def _begin(self, targets: tuple[torch.Tensor, ...]) -> None:
        """Targets that are a part of what nobody has written: the rest is zeros."""
        for target in targets:
            if self.key(target) in self._unwritten and (room := self._give_room(target)) is not None:
                empty(0, dtype=torch.uint8, device=_CPU).set_(room).zero_()
            self._unwritten.pop(self.key(target), None)

    def _fit_as_mask(self, targets: tuple[torch.Tensor, ...]) -> bool:
        """Whether there is room for their values if those are a mask, and else is not."""
        sizes = [(target.dtype, self.size(target)) for target in targets]
        return any(has_room(*one, mask=True) and not has_room(*one) for one in sizes)

    def _is_mask(self, source: object) -> bool:
        """Whether what is read has values which, as floating-point numbers, are a mask; a number is."""
        if not isinstance(source, torch.Tensor):
            return True
        if source.device.type != "cpu":
            return self.of(source) is not None
        return source.dtype in COUNTED or _is_even(source) or is_on_or_off(source)

    def _make_room(self, targets: tuple[torch.Tensor, ...], read: tuple[object, ...], mask: bool) -> None:
        """All of the targets is overwritten; what is `read` for that keeps what it has."""
        leaves = [one for one in tree_leaves(read) if isinstance(one, torch.Tensor) and one.device.type != "cpu"]
        kept = set(map(self.key, leaves))
        for target in targets:
            whole = target.numel() * target.dtype.itemsize == self.size(target)
            if whole and self.key(target) not in kept and self.of(target) is None:
                self._give_room(target, mask)

    def _give_room(self, tensor: torch.Tensor, mask: bool = False) -> torch.UntypedStorage | None:
        """Memory on the host for the values of a tensor's storage, if that is not too large."""
        room = _room(tensor.dtype, self.size(tensor), mask)
        if room is not None:
            self.known[self.key(tensor)] = room
        return room

    def _host(self, value: object) -> Any:
        """Arguments with host tensors in place of the device's; raises _UnknownError."""
        if isinstance(value, torch.Tensor):
            found = self.of(value)
            if found is None:
                raise _UnknownError
            return found
        if isinstance(value, list | tuple):
            made = [self._host(one) for one in value]
            return made if isinstance(value, list) else tuple(made)
        if isinstance(value, dict):
            return {name: self._host(one) for name, one in value.items()}
        return _CPU if isinstance(value, torch.device) else value


def _leaves(out: object) -> list[Any]:
    """The tensors, and what else there is, of what an operator gives."""
    return [out] if isinstance(out, torch.Tensor) else tree_leaves(out)


def _of_finite(func: Operator, args: tuple[Any, ...]) -> bool | None:
    """What a question has for an answer, whichever finite numbers are asked; None if it depends on them."""
    known = _FINITE.get(func._opname)
    if known is not None or func._opname not in ("eq", "ne"):
        return known
    itself = args[1] is args[0]
    endless = isinstance(args[1], float) and math.isinf(args[1])
    return (func._opname == "eq") is itself if itself or endless else None


def _of_autograd(func: Operator, args: tuple[Any, ...]) -> bool | None:
    """The same where autograd compares floating-point numbers with one number, as the gradients of `prod` and `cumprod`
    do (FunctionsManual.cpp): what is computed hits none exactly. A program's own comparison may be of a mask."""
    if func._opname not in ("eq", "ne") or not isinstance(args[1], int | float) or not args[0].is_floating_point():
        return None
    node = current_node()
    return None if node is None or isinstance(node, BackwardCFunction) else func._opname == "ne"


def _differ(known: torch.Tensor) -> bool:
    """Whether these numbers all differ, and are enough for a schedule: a few may be the tokens that end a text."""
    return 16 <= known.numel() <= _MOST_DIFFERENT and len(torch.unique(known)) == known.numel()


@functools.cache
def _writes_over(func: Operator) -> bool:
    """Whether an operator writes over what was there."""
    return func._opname in _OVERWRITING or (func._schema.is_mutable and bool(_outs(func)))


def _outs(func: Operator) -> list[str]:
    """Arguments `out=` of an operator."""
    return [
        a.name for a in func._schema.arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write
    ]


def _is_even(source: torch.Tensor) -> bool:
    """Whether a tensor on the host, not too large for a mask, has one number in all places."""
    small = 0 < source.nbytes <= MOST_MASK_BYTES and source.untyped_storage().nbytes() <= _UNWRITTEN
    plain = source.is_floating_point() and source.itemsize > 1  # others do not compare
    return small and plain and bool((source == source.flatten()[0]).all())


def _room(dtype: torch.dtype, size: int, mask: bool = False) -> torch.UntypedStorage | None:
    """Memory on the host for a storage of so many bytes; None if that is too large."""
    if not has_room(dtype, size, mask=mask):
        return None
    if size < _PAGES:
        return empty(size, dtype=torch.uint8, device=_CPU).untyped_storage()
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).untyped_storage()


def _view(storage: torch.UntypedStorage, tensor: torch.Tensor) -> torch.Tensor:
    """The storage seen as `tensor` sees its own."""
    plain = empty(0, dtype=tensor.dtype, device=_CPU)
    return plain.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


@contextlib.contextmanager
def on_meta() -> Iterator[Values]:
    """Tensors are made on "meta" while inside, and those of integers and booleans have values."""
    values = Values(lambda tensor: tensor.untyped_storage()._cdata)
    with torch.device("meta"), _Literals(values), _Operators(values):
        yield values


class _Literals(TorchFunctionMode):
    """Lists of numbers become tensors below where a dispatch mode sees it."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self.values = values

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        literals = func in (torch.tensor, torch.as_tensor) and not (args and isinstance(args[0], torch.Tensor))
        if literals and out.is_meta and out.dtype in COUNTED:
            literal = func(*args, **{**(kwargs or {}), "device": _CPU})
            self.values.put(out, literal)
        return out


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every operator on "meta"."""

    def __init__(self, values: Values) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values = values
        self._alive: list[Any] = []  # storages, so that none is taken for another

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        leaves = [leaf for leaf in _leaves(out) if isinstance(leaf, torch.Tensor)]
        if leaves and all(leaf.is_meta and leaf.dtype in COUNTED for leaf in leaves):
            self._alive += [leaf.untyped_storage() for leaf in leaves]
            if func._schema.is_mutable:
                self.values.written(func, args, kwargs, tuple(leaves))
            elif "empty" not in func._opname and not any(value.alias_info for value in func._schema.returns):
                self.values.made(func, args, kwargs, out)
        return out
