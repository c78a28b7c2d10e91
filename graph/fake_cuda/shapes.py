"""Shapes of what operators make on CUDA: PyTorch's own rules (FakeTensorMode), which need no GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import empty, zeros  # not those that a program puts in their place

from graph.errors import CaptureError
from graph.fake_cuda.memory import storage_bytes
from graph.fake_cuda.operators import fits, implemented, places
from graph.fake_cuda.operators.refused import CHECKS
from graph.fake_cuda.torch_private import (
    MODE_KEYS,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    grouped_mm_output,
    is_dense,
    is_excluded,
    of_two_devices,
    set_excluded,
    takes_numbers,
    tree_map,
    without_modes,
)
from graph.workspaces import batch_norm
from graph.workspaces.metadata import suggests_channels_last, tensors, upper
from traces.forks import locking

if TYPE_CHECKING:
    from graph.fake_cuda.torch_private import Operator

_CUDA: Final = torch.device("cuda", 0)
_META: Final = torch.device("meta")
#: Most elements of operands for which an operator without a rule for shapes is run on the CPU instead.
_COMPUTED: Final = 1 << 24
_HALF: Final = frozenset({torch.float16, torch.bfloat16})


@contextlib.contextmanager
def _seen() -> Iterator[None]:
    """Modes see operators while inside, also where PyTorch hides them (`no_dispatch` of torch.utils._mode_utils)."""
    hidden = [key for key in MODE_KEYS if is_excluded(key)]
    if not hidden:
        yield
        return
    with without_modes():
        for key in hidden:
            set_excluded(key, False)
        try:
            yield
        finally:
            for key in hidden:
                set_excluded(key, True)


class Shapes:
    """Shapes of outputs by arguments: PyTorch's own rules for a CUDA device, remembered."""

    def __init__(self) -> None:
        self._mode: FakeTensorMode | None = None
        self.asked = 0
        self.lock: AbstractContextManager[Any]
        locking(self)

    def infer(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The fake outputs of `func`, and the fake keyword arguments it was called with.

        Raises CaptureError if PyTorch has no rule for it, or if shapes depend on values, and what PyTorch raises where
        CUDA's kernel does not take these arguments.
        """
        with self.lock:  # one thread at a time is in the mode
            made = self._infer(func, args, kwargs)
        if (check := implemented.check_of(func)) is not None:
            check(args)
        return made

    def _infer(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self._mode is None:
            self._mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.asked += 1
        places.together(func, args, kwargs)
        if (check := CHECKS.get(func)) is not None:
            check(args)
        if fits.elementwise(func):
            fits.together(args)
            if any(argument.is_out for argument in func._schema.arguments):
                for target in tensors(tuple(kwargs.values())):
                    fits.disjoint(target, args)
                places.written(func, (*kwargs.values(), *args))
        func, args, kwargs = _stand_in(func, args, kwargs)
        if func in ALIKE and not kwargs and (made := _on_meta_alone(func, args)) is not None:
            return made, kwargs
        refused: Exception | None = None
        with _seen(), self._mode:
            fake_args = numbers_as_tensors(func, tuple(_fake(arg) for arg in args))
            fake_kwargs = {key: _fake(value) for key, value in kwargs.items()}
            try:
                rule = _RULES.get(func)
                if rule is not None:
                    return rule(*fake_args, **fake_kwargs), fake_kwargs
                return func(*fake_args, **fake_kwargs), fake_kwargs
            except (DynamicOutputShapeException, DataDependentOutputException) as error:
                raise CaptureError(
                    f"operator {func}: the shape of its result depends on values on the device"
                ) from error
            except (UnsupportedOperatorException, NotImplementedError):
                pass
            except (RuntimeError, IndexError, ValueError) as error:
                if not of_two_devices(error) or _of_two_devices(fake_args):
                    refused = error.with_traceback(None)
        if refused is not None:
            raise _in_cpu_words(func, args, kwargs) or refused
        if (plain := _without_out(func)) is not None:
            return self._by_results(plain, func, args, kwargs)
        return self._compute(func, args, kwargs)

    def _by_results(
        self, plain: Operator, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """As `infer`, for an overload that writes into `out=`, by the one that makes its results."""
        names = [argument.name for argument in func._schema.arguments if argument.is_out]
        given = {name: value for name, value in kwargs.items() if name not in names}
        made, fakes = self.infer(plain, args, given)
        return made, {**fakes, **dict(zip(names, made if isinstance(made, tuple) else (made,), strict=True))}

    def _compute(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """As `infer`, for an operator that PyTorch has no rule for: run on zeros on the CPU, if it is not too large."""
        if _is_large(args, kwargs):
            raise CaptureError(f"operator {func}: PyTorch has no rule for the shape of its result")
        try:
            return _on_cpu(func, args, kwargs)
        except (NotImplementedError, RuntimeError) as error:
            raise CaptureError(f"operator {func}: PyTorch has no rule for the shape of its result") from error


def _in_cpu_words(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """What the CPU's kernel raises, which checks as CUDA's does: PyTorch's rules in Python have words of their own.

    None where it raises nothing, or what only a CPU would, and of large tensors, which would have to be there.
    """
    if _is_large(args, kwargs):
        return None
    try:
        _made(func, *tree_map(_zeros, (args, kwargs)))
    except (RuntimeError, IndexError, ValueError) as error:
        of_cpu = isinstance(error, NotImplementedError) or "cpu" in str(error).lower()
        return None if of_cpu else error.with_traceback(None)
    return None


def _is_large(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether there are too many elements to be run on the CPU."""
    count: int = sum(tensor.numel() for tensor in tensors((*args, *kwargs.values())))
    return count > _COMPUTED


def _without_out(func: Operator) -> Operator | None:
    """The overload of an operator that makes what this one writes into `out=` (`mm` of `mm.out`, `add.Tensor` of
    `add.Tensor_out`)."""
    if not any(argument.is_out for argument in func._schema.arguments):
        return None
    _, _, overload = str(func).rpartition(".")
    found: Operator | None = getattr(func.overloadpacket, overload.removesuffix("out").rstrip("_") or "default", None)
    return found


def _on_cpu(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What `func` makes of zeros on the CPU; of fp32 where it has a CPU kernel for no other floating-point numbers."""
    try:
        return _made(func, *tree_map(_zeros, (args, kwargs)))
    except (NotImplementedError, RuntimeError):
        half = {value.dtype for value in tensors((*args, *kwargs.values()))} & _HALF
        if len(half) != 1:
            raise
        made = _made(func, *tree_map(lambda value: _cast(_zeros(value), _HALF, torch.float32), (args, kwargs)))
        narrow: tuple[Any, dict[str, Any]] = tree_map(lambda value: _cast(value, {torch.float32}, *half), made)
        return narrow


def _made(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    made: tuple[Any, dict[str, Any]] = tree_map(_on_meta, (func(*args, **kwargs), kwargs))
    return made


def _cast(value: object, dtypes: Collection[torch.dtype], dtype: torch.dtype) -> Any:
    """A tensor of one of `dtypes` as one of `dtype`."""
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype in dtypes else value


def _grouped(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """The result of `_grouped_mm`, on CUDA for all floating-point dtypes (ATen/native/cuda/GroupedBlas.cpp)."""
    return grouped_mm_output()(left, right, offs, out_dtype)


def _of_channels(image: torch.Tensor, *rest: object) -> Any:
    """Two statistics of each channel, as exact as sums are (cuda/Normalization.cu, `batch_norm_stats_cuda`)."""
    dtype = torch.float64 if image.dtype is torch.float64 else torch.float32
    return tuple(image.new_empty(image.shape[1], dtype=dtype) for _ in range(2))


def _reduced(
    grad: torch.Tensor, image: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, weight: Any, *asked: bool
) -> Any:
    """Sums of gradients by channel, and gradients of weight and bias, as asked (`batch_norm_backward_reduce_cuda`)."""
    sums = [torch.empty_like(mean) if asked[0] else None for _ in range(2)]
    return (*sums, *(torch.empty_like(mean if weight is None else weight) if one else None for one in asked[1:]))


def _batch_norm_gradients(
    grad: torch.Tensor,
    image: torch.Tensor,
    weight: torch.Tensor | None,
    running_mean: object,
    running_var: object,
    mean: torch.Tensor,
    invstd: object,
    train: bool,
    eps: float,
    mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the input, weight and bias, as asked; that of the input lies as PyTorch's kernels leave it
    (`batch_norm_backward_cuda`), not as the incoming gradient does."""
    form = torch.contiguous_format
    if train and not batch_norm.fused(image, train, mask):
        form = _suggested(image)
    like = mean if weight is None else weight
    gradient = torch.empty_like(image, memory_format=form) if mask[0] else None
    return (gradient, *(torch.empty_like(like) if one else None for one in mask[1:]))


def _cudnn_batch_norm_gradients(image: torch.Tensor, grad: object, weight: torch.Tensor, *rest: object) -> Any:
    """The same by cuDNN: that of the input lies as the input suggests (cudnn/BatchNorm.cpp)."""
    gradient = torch.empty_like(image, memory_format=_suggested(image))
    return gradient, torch.empty_like(weight), torch.empty_like(weight)


def _suggested(image: torch.Tensor) -> torch.memory_format:
    """`suggest_memory_format` of c10."""
    if not suggests_channels_last(image.shape, image.stride()):
        return torch.contiguous_format
    return torch.channels_last if image.dim() == 4 else torch.channels_last_3d


def _as_large(func: Operator) -> Callable[..., torch.Tensor]:
    """The rule of an operator whose output begins as large as its input and keeps that (cuda/Im2Col.cu, Col2Im.cu)."""

    def made(source: torch.Tensor, *rest: object) -> torch.Tensor:
        return torch.empty_like(source, memory_format=torch.contiguous_format).resize_(func(source, *rest).shape)

    return made


def _as_dense(func: Operator) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Results have the strides of a dense input, also those of dimensions of one element (Sorting.cpp): PyTorch's rule
    in Python gives what `empty_like` has."""

    def made(source: torch.Tensor, *rest: object, **named: object) -> tuple[torch.Tensor, ...]:
        out: tuple[torch.Tensor, ...] = func(source, *rest, **named)
        return tuple(one.new_empty_strided(one.shape, source.stride()) for one in out) if is_dense(source) else out

    return made


def _as_suggested(func: Operator) -> Callable[..., torch.Tensor]:
    """The rule of an operator whose result lies as the input suggests it, also of few channels (UpSampleBilinear2d.cpp,
    UpSampleTrilinear3d.cpp)."""

    def made(image: torch.Tensor, *rest: object) -> torch.Tensor:
        result: torch.Tensor = func(image, *rest)
        return result.contiguous(memory_format=_suggested(image))

    return made


def _like_input(image: torch.Tensor, *rest: object) -> torch.Tensor:
    """As `empty_like` on CUDA: `meta` forgets odd strides over extents of one element."""
    return image.new_empty_strided(image.shape, image.stride()) if is_dense(image) else torch.empty_like(image)


def _attention_gradients(
    grad: object, query: object, key: torch.Tensor, value: torch.Tensor, *rest: object, **scale: object
) -> Any:
    """Gradients of grouped keys and values have their heads: PyTorch's rule says so from 2.14 on, which takes them."""
    found = _aten._scaled_dot_product_efficient_attention_backward.default(grad, query, key, value, *rest, **scale)
    like = [torch.empty_permuted(one.shape, (0, 2, 1, 3), dtype=one.dtype, device=one.device) for one in (key, value)]
    return found[0], *like, found[3]


def _attention_gradients_by_token(
    grad: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    *rest: object,
    shared_storage_dqdkdv: bool = False,
    **named: object,
) -> Any:
    """Gradients lie by token, whatever the operands do, and a bias has one where it is asked for, with rows of a
    multiple of 16 (attention_backward.cu, `_efficient_attention_backward`). Those that are parts of one tensor are that
    one, before it is parted.
    """
    if shared_storage_dqdkdv:
        made = [query.new_empty((*query.shape[:2], 3, *query.shape[2:])), *(query.new_empty(0) for _ in range(2))]
    else:
        made = [one.new_empty(one.shape) for one in (query, key, value)]
    if bias is None or not rest[10]:
        return *made, None
    *extents, columns = bias.shape
    return *made, bias.new_empty((*extents, upper(columns, 16)))[..., :columns]


def _dropped(image: torch.Tensor, *rest: object) -> Any:
    """The result and the mask of `native_dropout`, which lie as the input does (cuda/Dropout.cu)."""
    made = _like_input(image)
    return made, made.new_empty_strided(made.shape, made.stride(), dtype=torch.bool)


def _lstm_cell(gates: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor, *biases: torch.Tensor | None) -> Any:
    """PyTorch's rule asks biases that are not there for their device: others stand for them."""
    given = [gates.new_empty(gates.shape[1:]) if bias is None else bias for bias in biases or (None, None)]
    return _aten._thnn_fused_lstm_cell.default(gates, hidden, cell, *given)


def _product(
    added: FakeTensor,
    first: FakeTensor,
    second: FakeTensor,
    dtype: torch.dtype,
    *,
    out: FakeTensor | None = None,
    **_: object,
) -> Any:
    """`addmm_dtype_cuda`, `baddbmm_dtype_cuda`, Blas.cpp."""
    return first.new_empty((*first.shape[:-1], second.shape[-1]), dtype=dtype) if out is None else out


_aten: Final = torch.ops.aten
#: Rules of our own. That of `_grouped_mm` refuses all dtypes but bfloat16; operators of SyncBatchNorm have none.
_RULES: Final[dict[Any, Any]] = {
    # with `out_dtype`, which PyTorch's own rules take for beta
    **{
        getattr(packet, name): _product
        for packet in (_aten.addmm, _aten.baddbmm)
        for name in ("dtype", "dtype_out")
        if hasattr(packet, name)
    },
    **({_aten._grouped_mm.default: _grouped} if hasattr(_aten, "_grouped_mm") else {}),  # from 2.8 on
    **{one: _as_dense(one) for one in (_aten.sort.default, _aten.sort.stable)},
    _aten.im2col.default: _as_large(_aten.im2col.default),
    _aten.col2im.default: _as_large(_aten.col2im.default),
    _aten.upsample_bilinear2d.default: _as_suggested(_aten.upsample_bilinear2d.default),
    _aten.upsample_trilinear3d.default: _as_suggested(_aten.upsample_trilinear3d.default),
    _aten.native_batch_norm_backward.default: _batch_norm_gradients,
    _aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_gradients,
    _aten.batch_norm_stats.default: _of_channels,
    _aten.batch_norm_gather_stats_with_counts.default: _of_channels,
    _aten.batch_norm_elemt.default: _like_input,
    _aten.batch_norm_backward_reduce.default: _reduced,
    _aten.batch_norm_backward_elemt.default: lambda grad, image, *rest: _like_input(image),
    _aten.native_dropout.default: _dropped,
    _aten._thnn_fused_lstm_cell.default: _lstm_cell,
    _aten._scaled_dot_product_efficient_attention_backward.default: _attention_gradients,
    _aten._efficient_attention_backward.default: _attention_gradients_by_token,
    _aten.log_sigmoid_backward.default: lambda grad, *rest: torch.empty_like(grad),  # Activation.cpp
    _aten.glu_backward.default: lambda grad, source, dim: _plain(source),  # cuda/Activation.cpp
    _aten.mse_loss_backward.default: lambda grad, source, *rest: _plain(source),  # BinaryOps.cpp
    _aten.binary_cross_entropy_backward.default: lambda grad, source, *rest: torch.empty_like(source),  # Loss.cu
}


def _plain(source: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of this one's type."""
    return torch.empty_like(source, memory_format=torch.contiguous_format)


#: Operators whose rules say the same of `meta` as of CUDA, in a fraction of the time.
ALIKE: Final = frozenset(
    getattr(getattr(_aten, name), overload)
    for overload, names in {
        "default": "mm bmm addmm cat gelu gelu_backward index_select native_layer_norm native_layer_norm_backward "
        "native_dropout native_dropout_backward _softmax _softmax_backward_data _log_softmax silu tanh sigmoid neg exp "
        "rsqrt",
        "Tensor": "add sub mul div",
        "Scalar": "eq ne",
        "Tensor_Scalar": "pow",
        "dim": "mean",
    }.items()
    for name in names.split()
)


def _on_meta_alone(func: Operator, args: tuple[Any, ...]) -> Any:
    """What a rule says of tensors on `meta`; None where a tensor is not CUDA's, and where PyTorch raises."""
    if not all(one.is_cuda and one.__class__ is not FakeTensor for one in tensors(args)):
        return None
    try:
        return _RULES.get(func, func)(*(_likeness(arg, _META) for arg in args))
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):  # FakeTensorMode says it better
        return None


def _stand_in(
    func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A call whose result has the same shape, for convolutions of CUDA, which have no rules of their own."""
    aten = torch.ops.aten
    if func is aten.cudnn_convolution.default:
        image, weight, padding, stride, dilation, groups = args[:6]
        return aten.convolution.default, (image, weight, None, stride, padding, dilation, False, [0], groups), {}
    if func is aten.cudnn_convolution_transpose.default:
        image, weight, padding, more, stride, dilation, groups = args[:7]
        return aten.convolution.default, (image, weight, None, stride, padding, dilation, True, more, groups), {}
    if func in (aten._conv_depthwise2d.default, aten.conv_depthwise3d.default):
        image, weight, _, *rest = args
        return aten.convolution.default, (image, weight, *rest, False, [0], image.shape[1]), {}
    if func is aten.cudnn_grid_sampler.default:
        return aten.grid_sampler_2d.default, (*args, 0, 0, True), {}
    return func, args, kwargs


def _likeness(value: object, cuda: torch.device) -> Any:
    """What stands for a tensor, on `cuda` where it is on CUDA; anything else itself."""
    if isinstance(value, torch.Tensor) and value.__class__ is not FakeTensor:
        device = cuda if value.is_cuda else value.device
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if isinstance(value, list | tuple):
        return [_likeness(item, cuda) for item in value]
    return value


def _fake(value: object) -> Any:
    """A likeness made inside FakeTensorMode."""
    return _likeness(value, _CUDA)


def numbers_as_tensors(func: Operator, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Python numbers in place of tensors (`remainder.Tensor(x, 2)`) as tensors on the CPU that promote alike, for
    operators that cannot be called from Python with numbers."""
    schema = func._schema
    places = [
        place
        for place, value in enumerate(args)
        if value.__class__ in (int, float, bool) and isinstance(schema.arguments[place].type, torch.TensorType)
    ]
    if not places or takes_numbers(schema.name.removeprefix("aten::")):
        return args
    alike = next(value for value in args if isinstance(value, torch.Tensor))
    found = list(args)
    for place in places:
        found[place] = torch.scalar_tensor(args[place], dtype=torch.result_type(alike, args[place]))
    return tuple(found)


def _of_two_devices(args: tuple[Any, ...]) -> bool:
    """Whether tensors with dimensions are on the host and on the device, which is an error of the caller."""
    return len({tensor.device.type for tensor in tensors(args) if tensor.ndim}) > 1


def _zeros(value: object) -> Any:
    """Zeros like a CUDA tensor, on the CPU."""
    if isinstance(value, torch.Tensor) and value.is_cuda:
        count = storage_bytes(value.shape, value.stride(), 1)
        return zeros(count, dtype=value.dtype).as_strided(value.shape, value.stride())
    return value


def _on_meta(value: object) -> Any:
    """A result on the CPU without its values: what stands for the CPU itself comes from FakeTensorMode alone."""
    if isinstance(value, torch.Tensor):
        size = value.untyped_storage().nbytes() // value.dtype.itemsize
        storage = empty(size, dtype=value.dtype, device="meta")
        return storage.as_strided(value.shape, value.stride(), value.storage_offset())
    return value
