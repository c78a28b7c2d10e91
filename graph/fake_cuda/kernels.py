"""A kernel for every operator that has one in a CUDA build: it makes the outputs, computes nothing, and tells.

Which operators: `graph.fake_cuda.operators.native`. Shapes, strides and dtypes of outputs come from PyTorch's
FakeTensorMode, once for each combination of arguments.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import zeros
from torch.nn.parameter import is_lazy

from graph.fake_cuda.memory import Layout, contiguous, empty_layout, set_storage
from graph.fake_cuda.operators import fits, implemented, iterated, places
from graph.fake_cuda.operators.composed import COMPOSED, differing, evenly
from graph.fake_cuda.operators.native import operator
from graph.fake_cuda.operators.refused import CHECKS, drawing
from graph.fake_cuda.sdpa import corrected
from graph.fake_cuda.shapes import Shapes
from graph.fake_cuda.torch_private import BY_CPU_KERNEL, is_dense, tree_leaves
from graph.fake_cuda.values import alike, knowable, may_have_values
from graph.workspaces import metadata, norm, rules
from traces.release import version_of

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime
    from graph.fake_cuda.torch_private import Operator

Kernel = Callable[..., Any]

_broadcast: Final[Callable[..., torch.Size]] = torch.broadcast_shapes

#: Operators whose CUDA and CPU kernels only write a tensor's sizes, strides and storage: the CPU's does for both.
_METADATA_ONLY: Final = (
    *("as_strided", "view", "_reshape_alias", "unfold", "view_as_real", "view_as_complex", "is_set_to"),
    *("set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor"),
)

#: Operators whose one kernel for CPU and CUDA is made of others (LinearAlgebra.cpp, TensorAdvancedIndexing.cpp).
_GENERIC: Final = (
    *("_unsafe_masked_index", "_unsafe_masked_index_put_accumulate"),
    *("addbmm", "addbmm_", "addbmm.out", "mvlgamma.out", "_to_sparse", "_to_sparse.sparse_dim"),
    *(f"_to_sparse_{layout}" for layout in ("csr", "csc", "bsr", "bsc")),
)

#: Operators whose results are contiguous on CUDA, whatever their operands are (SoftMax.cu, layer_norm_kernel.cu,
#: DepthwiseConv2d.cu, group_norm.cpp, RreluWithNoise.cu); PyTorch's rules for shapes have it lie as an operand does.
_CONTIGUOUS: Final = frozenset(
    {
        *("aten::_log_softmax", "aten::_log_softmax_backward_data", "aten::rrelu_with_noise"),
        *("aten::native_group_norm", "aten::native_group_norm_backward"),
        *("aten::native_layer_norm", "aten::native_layer_norm_backward"),
        *("aten::_conv_depthwise2d", "aten::_fused_rms_norm_backward"),
    }
)

#: Losses whose result keeps the storage that held the loss by element, and where their `reduction` stands: the output
#: is made for the elements and resized when they are reduced (aten/src/ATen/native/BinaryOps.cpp, cuda/Loss.cu).
_REDUCED_LOSSES: Final = {"aten::mse_loss": 2, "aten::smooth_l1_loss": 2, "aten::binary_cross_entropy": 3}

_RELEASE: Final = version_of(torch.__version__)

#: Up to PyTorch 2.6 the seed and the offset of its random numbers (the two results before the last) are on the host.
_FLASH: Final = "aten::_scaled_dot_product_flash_attention"

#: Copies to the host of up to so many bytes get values; larger ones keep what their memory holds.
_FILLED: Final = 1 << 20


# ----------------------------------------------------------------------------------------------------- shapes


def _kind(values: Iterable[Any], exact: bool) -> tuple[Any, ...]:
    """What of arguments decides the shapes of outputs.

    With `exact`, numbers count, and 1, 1.0 and True are three things; without, only tensors and flags do.
    """
    key: list[Any] = []
    for value in values:
        kind = value.__class__
        if kind is _Tensor or kind is _Parameter:
            key.append((value.shape, value.stride(), value.dtype, value.is_cuda, value.is_conj()))
        elif kind is int or value is None:
            key.append(value if exact else None)
        elif kind is list or kind is tuple:
            key.append(_kind(value, exact))
        elif isinstance(value, _Tensor):
            key.append(kind if is_lazy(value) else (value.shape, value.stride(), value.dtype, value.is_cuda))
        elif exact or kind is bool:
            key.append((kind, value) if kind in _NUMBERS else value if isinstance(value, _PLAIN) else None)
    return tuple(key)


_Tensor: Final = torch.Tensor
_Parameter: Final = torch.nn.Parameter
_NUMBERS: Final = (float, bool, complex)
_PLAIN: Final = (str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class Kind:
    """One kind of call: an operator with arguments of certain shapes. `note` is the observer's, None at first;
    `counted`: all that it makes is new, and something may be known of it."""

    __slots__ = ("counted", "made", "note")

    def __init__(self, made: tuple[Any, ...], func: Operator | None = None) -> None:
        self.made = made
        self.counted = bool(made) and all(one.__class__ is Layout and knowable(func, one) for one in made)
        self.note: Any = None


@dataclass(frozen=True, slots=True)
class _Argument:
    """An output that is the argument at this position or of this name."""

    key: int | str


@dataclass(frozen=True, slots=True)
class _Host:
    """An output on the CPU."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Resized:
    """An argument `out=` that takes this shape."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _described(value: object) -> Any:
    """A fake output as what it takes to make it: a Layout, a list of them, or a value."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu":
            return _Host(tuple(value.shape), value.dtype)
        storage = value.untyped_storage().nbytes()
        return Layout(value.shape, value.stride(), value.dtype, storage, int(value.storage_offset()))
    if isinstance(value, list | tuple):
        return [_described(item) for item in value]
    return value


def _dense(layout: Layout) -> Layout:
    return Layout(layout.shape, contiguous(layout.shape), layout.dtype)


def _as_on_cuda(
    func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], made: tuple[Any, ...]
) -> tuple[Any, ...]:
    """What an operator makes, where its CUDA kernel makes something else than PyTorch's rules for shapes say."""
    first = made[0] if made else None
    if not isinstance(first, Layout):
        return made
    name = func._schema.name
    if name in _CONTIGUOUS and not norm.keeps_format(_RELEASE, name, args):
        return tuple(_dense(one) if isinstance(one, Layout) else one for one in made)
    if iterated.is_iterated(func):
        return (Layout(first.shape, iterated.steps(func, args), first.dtype), *made[1:])
    if name == _FLASH and _RELEASE < (2, 7):
        return (*made[:6], *[_Host((), torch.int64)] * 2, *made[8:])
    if name == "aten::_weight_norm_interface" and first.dtype == torch.float16:  # for the backward (WeightNorm.cu)
        return (first, Layout(made[1].shape, made[1].strides, torch.float32))
    place = _REDUCED_LOSSES.get(name)
    if place is not None and (args[place] if len(args) > place else kwargs.get("reduction", 1)):
        elements = math.prod(_broadcast(args[0].shape, args[1].shape))
        return (Layout((), (), first.dtype, max(elements, 1) * first.dtype.itemsize),)
    return made


# ---------------------------------------------------------------------------------------------------- kernels


@dataclass(frozen=True, slots=True)
class _Schema:
    """What an operator's schema says of its outputs."""

    returns: int
    written: tuple[int | str | None, ...]  # for each output: the argument (position or keyword) that it is, or None
    out: tuple[str, ...]  # keyword-only arguments that are written and may be resized


@functools.cache
def _schema(func: Operator) -> _Schema:
    schema = func._schema
    writes: dict[str, int | str] = {}
    out = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            key: int | str = argument.name if argument.kwarg_only else position
            for name in argument.alias_info.before_set:
                writes[name] = key
            if argument.kwarg_only:
                out.append(argument.name)
    written: list[int | str | None] = []
    for value in schema.returns:
        names = () if value.alias_info is None else value.alias_info.before_set
        written.append(next((writes[name] for name in names if name in writes), None))
    return _Schema(len(schema.returns), tuple(written), tuple(out))


def _distinct(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]]:
    """Arguments of a foreach operator with one entry for each kind of its lists' entries, and which it is for each."""
    length = next(len(value) for value in args if isinstance(value, list | tuple))
    lists = [value for value in args if isinstance(value, list | tuple) and len(value) == length]
    seen: dict[tuple[Any, ...], int] = {}
    places = [seen.setdefault(_kind(entries, False), len(seen)) for entries in zip(*lists, strict=True)]
    kept = [places.index(place) for place in range(len(seen))]
    return tuple([[v[i] for i in kept] if any(v is one for one in lists) else v for v in args]), places


#: Outputs by operator, architecture and arguments, while the process lives: so many, without long lists of tensors.
_REMEMBERED: Final = 50_000
_LONG: Final = 32
_known: dict[tuple[Any, ...], tuple[Any, ...]] = {}


class Kernels:
    """Makes the kernel of each operator for one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.shapes = Shapes()
        self._special: Mapping[str, Callable[[Any], Kernel]] = {
            "empty.memory_format": self._empty,
            "empty_strided": self._empty_strided,
            "copy_": self._copy,
            "_foreach_copy_": self._copies,
            "resize_": self._resize,
            "_local_scalar_dense": self._scalar,
            "equal": lambda func: places.checked(func, self._equal(func)),
            **dict.fromkeys(("nonzero", "nonzero.out"), self._nonzero),
            **dict.fromkeys(("index.Tensor", "index.Tensor_out"), self._indexed),
            "_unsafe_index.Tensor": self._indexed,
            "_index_put_impl_": self._indexed,
            "_nested_tensor_from_mask_left_aligned": self._padded,
            **dict.fromkeys(("_unique", "_unique2", "unique_consecutive"), self._unique),
            **dict.fromkeys(("_use_cudnn_ctc_loss", "_use_cudnn_ctc_loss.Tensor"), self._never),
            **dict.fromkeys(("_use_miopen_ctc_loss", "_use_miopen_ctc_loss.Tensor"), self._never),
        }

    def of(self, name: str) -> Kernel:
        """The kernel for operator `name` (`add.Tensor`)."""
        func = operator(name)
        return drawing(func, self._of(name, func))

    def _of(self, name: str, func: Operator) -> Kernel:
        if name in self._special:
            return self._special[name](func)
        if name in COMPOSED:
            return places.checked(func, implemented.checked(func, functools.partial(COMPOSED[name], self.runtime)))
        if name in _METADATA_ONLY or name in _GENERIC:
            return functools.partial(func.redispatch, BY_CPU_KERNEL)
        return self._dynamic(func) if torch.Tag.dynamic_output_shape in func.tags else self._usual(func)

    def _usual(self, func: Operator) -> Kernel:
        """The kernel that the operator's schema and PyTorch's rules for shapes ask for."""
        schema = _schema(func)
        if schema.out:
            return self._out(func, schema)
        if schema.returns == 0 or all(key is not None for key in schema.written):
            return self._in_place(func, schema)
        return self._functional(func, schema)

    def _functional(self, func: Operator, schema: _Schema) -> Kernel:
        """A kernel that makes new tensors."""
        runtime, kinds, values = self.runtime, dict[Any, Kind](), self.runtime.values
        single = schema.returns == 1
        new, captured = runtime.memory.new, runtime.captured

        def make(what: Any, args: tuple[Any, ...], kwargs: dict[str, Any], born: list[int]) -> Any:
            kind = what.__class__
            if kind is Layout:
                return new(what, born)
            if kind is list:
                return [make(item, args, kwargs, born) for item in what]
            if kind is _Argument:
                return args[what.key] if what.key.__class__ is int else kwargs[what.key]
            return zeros(what.shape, dtype=what.dtype) if kind is _Host else what

        def kernel(*args: object, **kwargs: object) -> Any:
            key = (_kind(args, True), *kwargs, _kind(kwargs.values(), True)) if kwargs else _kind(args, True)
            if captured:
                key = (*key, "captured")
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = Kind(self._remembered(func, schema, key, args, kwargs), func)
            born: list[int] = []
            if single:
                what = kind.made[0]
                out = new(what, born) if what.__class__ is Layout else make(what, args, kwargs, born)
            else:
                out = tuple([make(what, args, kwargs, born) for what in kind.made])
            if kind.counted:
                values.made(func, args, kwargs, out)
            if runtime.observer is not None:
                runtime.observer.operator(func, args, kwargs, out, born, kind)
            return out

        return kernel

    def _in_place(self, func: Operator, schema: _Schema) -> Kernel:
        """A kernel that only writes its arguments; numbers count where they may decide what it takes meanwhile."""
        runtime, kinds, written = self.runtime, dict[Any, Kind](), schema.written
        first = written[0] if len(written) == 1 else None
        checks = CHECKS.get(func), implemented.check_of(func), runtime.values.marks.told(func)
        told = [one for one in checks if one is not None]
        exact = str(func) in rules()

        def kernel(*args: object, **kwargs: object) -> Any:
            for one in told:
                one(args)
            if first == 0:
                out = args[0]
            else:
                values = tuple([args[key] if isinstance(key, int) else kwargs[str(key)] for key in written])
                out = None if not values else values[0] if first is not None else values
            if not isinstance(out, _Tensor) or may_have_values(out):
                self._written(func, args, kwargs, out)
            if runtime.observer is not None:
                key = (_kind(args, exact), *kwargs, _kind(kwargs.values(), exact)) if kwargs else _kind(args, exact)
                kind = kinds.get(key)
                if kind is None:
                    fits.written(self.shapes, func, args, kwargs)
                    kind = kinds[key] = Kind(())
                runtime.observer.operator(func, args, kwargs, out, [], kind)
            return out

        return kernel

    def _written(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        """Values of what an operator has written: of lists, those that `_foreach_` makes of known ones, by entry."""
        values = self.runtime.values
        if isinstance(out, _Tensor):
            if out.is_cuda:
                values.written(func, args, kwargs, (out,))
            return
        if out is None and func._opname.startswith("_foreach_"):
            for place, one in enumerate(args[0]):
                if one.is_cuda and may_have_values(one) and values.of(one) is not None:
                    entry = tuple([arg[place : place + 1] if isinstance(arg, list | tuple) else arg for arg in args])
                    values.written(func, entry, kwargs, (one,))
                else:
                    values.forget((one,))
            return
        listed = [value for value in args if isinstance(value, list | tuple)] if out is None else []
        targets = tuple([t for t in tree_leaves(listed or out) if isinstance(t, _Tensor) and may_have_values(t)])
        if listed:
            values.forget(targets)
        elif targets and all(target.is_cuda for target in targets):
            values.written(func, args, kwargs, targets)

    def _out(self, func: Operator, schema: _Schema) -> Kernel:
        """A kernel with arguments `out=`, which it resizes where PyTorch does."""
        runtime, kinds, names = self.runtime, dict[Any, Kind](), schema.out

        def kernel(*args: Any, **kwargs: Any) -> Any:
            key = (_kind(args, True), *kwargs, _kind(kwargs.values(), True))
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = Kind(self._remembered(func, schema, key, args, kwargs))
            born: list[int] = []
            old = [self._grow(kwargs[what.name], what.shape, what.strides, born) for what in kind.made]
            values = tuple([kwargs[name] for name in names]) if schema.returns else ()
            out = None if not values else values[0] if len(values) == 1 else values
            if values and may_have_values(values[0]):
                self._written(func, args, kwargs, out)
            if runtime.observer is not None:
                runtime.observer.operator(func, args, kwargs, out, born, kind)
            del old
            return out

        return kernel

    def _remembered(
        self, func: Operator, schema: _Schema, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """What such a call makes (or resizes), by PyTorch's rules; asked once in a process, but for long lists."""
        if any(isinstance(value, list | tuple) and len(value) > _LONG for value in args):
            return self._ask(func, schema, args, kwargs)
        whole = (func, self.runtime.profile.arch, key)
        made = _known.get(whole)
        if made is None:
            if len(_known) >= _REMEMBERED:
                _known.clear()
            made = _known[whole] = self._ask(func, schema, args, kwargs)
        return made

    def _ask(self, func: Operator, schema: _Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        places = None
        if func._schema.name.startswith("aten::_foreach_") and schema.written == (None,):
            args, places = _distinct(args)
        fake, fakes = self.shapes.infer(func, args, kwargs)
        if schema.out:
            steps = iterated.steps(func, args) if iterated.is_iterated(func) else None
            return tuple(
                _Resized(name, tuple(fakes[name].shape), tuple(steps or fakes[name].stride()))
                for name in schema.out
                if isinstance(kwargs[name], torch.Tensor) and kwargs[name].shape != fakes[name].shape
            )
        outputs = corrected(self.runtime.profile, str(func), fake, args, kwargs, bool(self.runtime.captured))
        if places is not None:
            outputs = [outputs[place] for place in places]
        made = tuple(
            _described(value) if written is None else _Argument(written)
            for value, written in zip((outputs,) if schema.returns == 1 else outputs, schema.written, strict=True)
        )
        return _as_on_cuda(func, args, kwargs, made)

    def _grow(self, tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], born: list[int]) -> Any:
        """Resize `tensor` as `resize_` does on CUDA: a larger storage is born before the old one dies.

        The answer is the old one, to be kept until the birth has been told.
        """
        old = tensor.untyped_storage()
        layout = Layout(shape, strides, tensor.dtype)
        needed = layout.nbytes + tensor.storage_offset() * tensor.dtype.itemsize if layout.nbytes else 0
        if needed <= tensor.untyped_storage().nbytes():
            torch.ops.aten.as_strided_.default(tensor, shape, strides, tensor.storage_offset())
        else:
            set_storage(tensor, self.runtime.memory.new(layout, born).untyped_storage(), shape, strides)
        return old

    # -- operators with rules of their own: each method makes the kernel

    def _new(self, func: Operator, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        born: list[int] = []
        made, out = kind.made[0], kwargs.get("out")
        old = None if out is None else self._grow(out, made.shape, made.strides, born)
        out = self.runtime.memory.new(made, born) if out is None else out
        if kind.counted:
            self.runtime.values.unwritten(out)
        if self.runtime.observer is not None:
            self.runtime.observer.operator(func, args, kwargs, out, born, kind)
        del old
        return cast(torch.Tensor, out)

    def _empty(self, func: Operator) -> Kernel:
        kinds = dict[Any, Kind]()

        def kernel(size: Sequence[int], *args: Any, **kwargs: Any) -> torch.Tensor:
            device = kwargs.get("device")
            key = (tuple(size), kwargs.get("dtype") or torch.get_default_dtype(), kwargs.get("memory_format"), device)
            kind = kinds.get(key)
            if kind is None:
                self.runtime.asked_for(device)
                kind = kinds[key] = Kind((empty_layout(*key[:3]),))
            return self._new(func, kind, (size, *args), kwargs)

        return kernel

    def _empty_strided(self, func: Operator) -> Kernel:
        kinds = dict[Any, Kind]()

        def kernel(size: Sequence[int], stride: Sequence[int], *args: Any, **kwargs: Any) -> torch.Tensor:
            key = (tuple(size), tuple(stride), kwargs.get("dtype") or torch.get_default_dtype(), kwargs.get("device"))
            kind = kinds.get(key)
            if kind is None:
                self.runtime.asked_for(key[3])
                kind = kinds[key] = Kind((Layout(*key[:3]),))
            return self._new(func, kind, (size, stride, *args), kwargs)

        return kernel

    def _copy(self, func: Operator) -> Kernel:
        """at::native::copy_ (ATen/native/cuda/Copy.cu, copy_requires_temporaries): to the host, a tensor that is not
        contiguous, or of another dtype, goes through a temporary, and is cast there, if the host waits. What the way to
        the device takes is a workspace (`graph.workspaces.elementwise.copy_`)."""
        on_device = self._in_place(func, _schema(func))
        runtime = self.runtime

        def kernel(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if target.is_cuda == source.is_cuda:
                on_device(target, source, non_blocking)
                return target
            if target.is_cuda:
                on_device(target, source, non_blocking)
                if not non_blocking and runtime.allocators:  # a step graph has its own waits
                    runtime.synchronized()
                return target
            plain = target.dtype == source.dtype and (
                (target.is_contiguous() and source.is_contiguous())
                or (target.stride() == source.stride() and is_dense(source))
            )
            cast = source.to(target.dtype) if non_blocking and not plain else source
            sent = cast if plain else cast.expand_as(target).contiguous()
            boolean = target.dtype is torch.bool
            # a larger one is offloaded, not read: its pages stay untouched
            known = runtime.values.of(source)
            if known is not None:
                target.copy_(known)
            elif target.nbytes <= _FILLED and not runtime.host_copies_keep:
                value = runtime.truth if boolean else runtime.unread(source)
                runtime.assume(f"the values of a {metadata.dtype(target)} tensor", value)
                target.fill_(value)
            on_device(target, sent, non_blocking)
            if not non_blocking:
                runtime.synchronized()
            return target

        return kernel

    def _copies(self, func: Operator) -> Kernel:
        """Where one is on the host, each is copied by itself (ATen/native/cuda/ForeachBinaryOpList.cu)."""
        on_device = self._usual(func)

        def kernel(
            targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool = False
        ) -> None:
            if all(tensor.is_cuda for tensor in (*targets, *sources)):
                on_device(targets, sources, non_blocking)
            else:
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking)

        return kernel

    def _resize(self, func: Operator) -> Kernel:
        runtime = self.runtime

        def kernel(tensor: torch.Tensor, size: Sequence[int], **kwargs: object) -> torch.Tensor:
            shape = tuple(size)
            if tensor.shape != shape:
                born: list[int] = []
                old = self._grow(tensor, shape, contiguous(shape), born)
                if runtime.observer is not None:
                    runtime.observer.operator(func, (tensor, size), kwargs, tensor, born, Kind(()))
                del old
            return tensor

        return kernel

    def _scalar(self, func: Operator) -> Kernel:
        runtime = self.runtime

        def kernel(tensor: torch.Tensor) -> Any:
            value = runtime.read(tensor)
            if runtime.observer is not None:
                runtime.observer.operator(func, (tensor,), {}, value, [], Kind(()))
            runtime.synchronized()
            return value

        return kernel

    def _equal(self, func: Operator) -> Kernel:
        def kernel(one: torch.Tensor, other: torch.Tensor) -> bool:
            runtime, same = self.runtime, one.shape == other.shape
            if not same or alike(one, other):
                return same
            first, second = runtime.values.of(one), runtime.values.of(other)
            if first is not None and second is not None:
                same = torch.equal(first, second)
            else:
                runtime.assume("whether two tensors are equal", "that they are")
            if runtime.observer is not None:
                runtime.observer.operator(func, (one, other), {}, same, [], Kind(()))
            runtime.synchronized()
            return same

        return kernel

    def _nonzero(self, func: Operator) -> Kernel:
        """Places of elements that are not zero, by dimension: as many as `Runtime.nonzero` says, the first ones."""
        runtime, kinds = self.runtime, dict[Any, Kind]()

        def kernel(tensor: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
            known = runtime.values.places(tensor)
            found = None if known is None else torch.nonzero(known)
            rows = runtime.ones(tensor) if found is None else len(found)
            key = (rows, _kind((tensor,), True))
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = Kind((Layout((rows, tensor.ndim), (1, max(rows, 1)), torch.int64),))
            places = self._new(func, kind, (tensor,), out)
            runtime.synchronized()
            if found is None and tensor.ndim == 1:
                found = torch.arange(rows).unsqueeze(1)
            if found is not None:
                runtime.values.put(places, found)
            return places

        return kernel

    def _indexed(self, func: Operator) -> Kernel:
        """Masks become the places where they are set (`expandTensors`); a number put there fills (IndexingUtils.h)."""
        usual = self._usual(func)
        fills = func._opname == "_index_put_impl_"
        comes = self.runtime.profile.release >= (2, 9)  # as one tensor, not by dimension

        def kernel(source: torch.Tensor, indices: Sequence[torch.Tensor | None], *rest: Any, **kwargs: Any) -> Any:
            masks = [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]
            if not masks:
                return usual(source, indices, *rest, **kwargs)
            accumulate = rest[1] if len(rest) > 1 else kwargs.get("accumulate", False)
            alone = masks[0].is_cuda and sum(index is not None for index in indices) == 1
            if fills and alone and not accumulate and not rest[0].is_cuda and rest[0].numel() == 1:
                mask = masks[0][(..., *[None] * (source.ndim - len(indices) + 1 - masks[0].ndim))]
                return torch.ops.aten.masked_fill_.Scalar(source, mask, rest[0].item())
            places: list[Any] = []
            for index in indices:
                if index is None or index.dtype not in (torch.bool, torch.uint8):
                    places.append(index)
                    continue
                found = torch.ops.aten.nonzero.default(index)
                places.extend((found.to(source.device) if comes and not accumulate else found).unbind(1))
            return usual(source, places, *rest, **kwargs)

        return kernel

    def _dynamic(self, func: Operator) -> Kernel:
        """An operator whose result has a shape by values: what it makes of those, where they are known."""
        usual, kinds, runtime = self._usual(func), dict[Any, Kind](), self.runtime

        def kernel(*args: object, **kwargs: object) -> Any:
            found = runtime.values.computed(func, args, kwargs)
            if found is None and (found := differing(runtime, func, args, kwargs)) is None:
                return usual(*args, **kwargs)
            hosts = (found,) if isinstance(found, torch.Tensor) else tuple(found)
            shapes = tuple((tuple(host.shape), host.stride(), host.dtype) for host in hosts)
            key = (shapes, _kind((*args, *kwargs.values()), True))
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = Kind(tuple(Layout(*shape) for shape in shapes))
            born: list[int] = []
            made = tuple([runtime.memory.new(layout, born) for layout in kind.made])
            for tensor, host in zip(made, hosts, strict=True):
                runtime.values.put(tensor, host)
            out = made[0] if isinstance(found, torch.Tensor) else made
            if runtime.observer is not None:
                runtime.observer.operator(func, args, kwargs, out, born, kind)
            runtime.synchronized()
            return out

        return kernel

    def _unique(self, func: Operator) -> Kernel:
        """Values that differ, in room for all (cuda/Unique.cu resizes it down); all of them, where they are unknown."""
        runtime, names = self.runtime, [argument.name for argument in func._schema.arguments]
        dynamic, kinds = self._dynamic(func), dict[Any, Kind]()

        def kernel(source: torch.Tensor, *args: object, **kwargs: object) -> Any:
            given = dict(zip(names[1:], args, strict=False)) | kwargs
            if given.get("dim") is not None or not source.numel():
                return dynamic(source, *args, **kwargs)
            found = runtime.values.computed(func, (source, *args), kwargs)
            if found is None:
                runtime.assume("values that differ", "that all do")
            count = runtime.values.different(source) if found is None else len(found[0])
            flags = source.dtype is torch.bool and not func._opname.startswith("unique_")
            counts = given.get("return_counts") or (flags and func._opname == "_unique2")
            rest = 2 if flags else source.numel(), bool(given.get("return_inverse")), bool(counts)
            key = (count, _kind((source,), True), *rest)
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = Kind(_unique_layouts(source, count, *rest, len(func._schema.returns)))
            born: list[int] = []
            out = tuple([runtime.memory.new(layout, born) for layout in kind.made])
            for tensor, host in zip(out, found or (), strict=False):
                if tensor.shape == host.shape:
                    runtime.values.put(tensor, host)
            if found is None and given.get("return_counts") and knowable(None, out[-1]):
                runtime.values.put(out[-1], evenly(source.numel(), count))
            if runtime.observer is not None:
                runtime.observer.operator(func, (source, *args), kwargs, out, born, kind)
            runtime.synchronized()
            return out

        return kernel

    def _padded(self, func: Operator) -> Kernel:
        def kernel(*_: object) -> bool:
            self.runtime.assume("whether padding comes last, where nested tensors leave it out", False)
            return False

        return kernel

    def _never(self, func: Operator) -> Kernel:
        return lambda *args, **kwargs: False


def _unique_layouts(
    source: torch.Tensor, count: int, room: int, inverse: bool, counts: bool, outputs: int
) -> tuple[Layout, ...]:
    """Values, the place of each among them, how often each comes."""
    made = (
        Layout((count,), (1,), source.dtype, room * source.dtype.itemsize),
        Layout(source.shape, contiguous(source.shape), torch.int64) if inverse else Layout((0,), (1,), torch.int64),
        Layout((count,), (1,), torch.int64, room * 8) if counts else Layout((0,), (1,), torch.int64),
    )
    return made[:outputs]
