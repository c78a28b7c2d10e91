"""What CUDA's kernels refuse, though PyTorch's rules for shapes take it: operands of different dtypes, dtypes without a
kernel, numbers that a dtype does not hold, the largest of no elements. The program ends where it ends on a GPU, with
the same words.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

import torch

from graph.fake_cuda.objects import of_device
from graph.fake_cuda.operators import places

if TYPE_CHECKING:
    from graph.fake_cuda.torch_private import Operator

_aten: Final = torch.ops.aten
#: Each dtype's name as a ScalarType and as a C++ type (c10/core/ScalarType.h).
_NAMES: Final[Mapping[torch.dtype, tuple[str, str]]] = {
    torch.float32: ("Float", "float"),
    torch.bfloat16: ("BFloat16", "c10::BFloat16"),
    torch.float16: ("Half", "c10::Half"),
    torch.float64: ("Double", "double"),
    torch.int64: ("Long", "long int"),
    torch.int32: ("Int", "int"),
    torch.int16: ("Short", "short int"),
    torch.int8: ("Char", "signed char"),
    torch.uint8: ("Byte", "unsigned char"),
    torch.bool: ("Bool", "bool"),
}
#: What integers are called where a number does not fit.
_WIDE: Final = {torch.int64: "int64_t", torch.int16: "int16_t", torch.int8: "int8_t", torch.uint8: "uint8_t"}
_HALF: Final = frozenset({torch.float16, torch.bfloat16})

#: What distributions say of a dtype.
_CONTINUOUS: Final = (
    "distribution is a continuous probability distribution. dtype must be a floating point but you specified {}"
)

Check = Callable[[Sequence[Any]], None]


def _scalar(tensor: torch.Tensor) -> str:
    return _NAMES.get(tensor.dtype, (str(tensor.dtype), ""))[0]


def _type(tensor: torch.Tensor) -> str:
    return _NAMES.get(tensor.dtype, ("", str(tensor.dtype)))[1]


def not_implemented(kernel: str, tensor: torch.Tensor) -> NotImplementedError:
    """What PyTorch says where a kernel does not take a tensor's dtype (aten/src/ATen/Dispatch.h)."""
    return NotImplementedError(f"\"{kernel}\" not implemented for '{_scalar(tensor)}'")


@functools.cache
def _place_of_generator(func: Operator) -> int | None:
    return next((place for place, one in enumerate(func._schema.arguments) if one.name == "generator"), None)


def drawing(func: Operator, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that takes no generator of the host, if it takes any."""
    place = _place_of_generator(func)
    if place is None:
        return kernel

    def called(*args: object, **kwargs: object) -> Any:
        generator: Any = args[place] if len(args) > place else kwargs.get("generator")
        if generator is not None and not of_device(generator):
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        return kernel(*args, **kwargs)

    return called


def _computed(kernel: str, tensor: torch.Tensor) -> None:
    if tensor.numel() and not (tensor.is_floating_point() or tensor.is_complex()):
        raise not_implemented(kernel, tensor)


def _mm(args: Sequence[Any]) -> None:
    left, right = args[:2]
    if left.dtype != right.dtype:
        raise RuntimeError(f"expected mat1 and mat2 to have the same dtype, but got: {_type(left)} != {_type(right)}")
    _computed("addmm_cuda", left)


def _addmm(args: Sequence[Any]) -> None:
    added, left, right = args[:3]
    for name, one in (("self", added), ("mat1", left)):
        if one.dtype != right.dtype:
            names = f"{_scalar(one)} and {_scalar(right)}"
            raise RuntimeError(f"{name} and mat2 must have the same dtype, but got {names}")
    _computed("addmm_cuda", left)


def _bmm(args: Sequence[Any]) -> None:
    left, right = args[:2]
    _expected(left, right)
    _computed("baddbmm_cuda", left)


def _baddbmm(args: Sequence[Any]) -> None:
    added, left, right = args[:3]
    if added.dtype != left.dtype:
        names = f"input {_type(added)}, batch1: {_type(left)}, batch2: {_type(right)}"
        raise RuntimeError(f"Input dtypes must be the same, got: {names}")
    _bmm((left, right))


def _addmv(args: Sequence[Any]) -> None:
    added, matrix, vector = args[:3]
    if not added.dtype == matrix.dtype == vector.dtype:
        names = f"{_scalar(added)}, {_scalar(matrix)}, and {_scalar(vector)}"
        raise RuntimeError(f"addmv input tensors must have the same dtype, but got {names}")


def _expected(source: torch.Tensor, *others: torch.Tensor | None) -> None:
    for other in others:
        if other is not None and other.dtype != source.dtype:
            raise RuntimeError(f"expected scalar type {_scalar(source)} but found {_scalar(other)}")


def _layer_norm(args: Sequence[Any]) -> None:
    _expected(args[0], *args[2:4])


def _huber_loss_backward(args: Sequence[Any]) -> None:
    source, target = args[1:3]
    if target.dtype != source.dtype:
        raise RuntimeError(f"Found dtype {_scalar(target)} but expected {_scalar(source)}")


def _group_norm(args: Sequence[Any]) -> None:
    source = args[0]
    if source.dtype in _HALF:
        _expected(source, *args[1:3])
    elif any(one is not None and one.dtype != source.dtype for one in args[1:3]):
        raise RuntimeError("mixed dtype (CPU): expect parameter to have scalar type of Float")


def _batch_norm(args: Sequence[Any]) -> None:
    source, weight = args[:2]
    allowed = {source.dtype, torch.float32} if source.dtype in _HALF else {source.dtype}
    if weight is not None and weight.dtype not in allowed:
        raise RuntimeError(f"Expected weight to have type {_scalar(source)} but got {_scalar(weight)}")


def _held(tensor: torch.Tensor, number: object) -> None:
    """Whether a dtype holds a number (`overflows`, c10/util/TypeCast.h)."""
    if not isinstance(number, int | float) or tensor.dtype is torch.bool or tensor.is_complex():
        return
    floating = tensor.is_floating_point()
    limits = torch.finfo(tensor.dtype) if floating else torch.iinfo(tensor.dtype)
    least = limits.min if tensor.dtype is not torch.uint8 else -limits.max  # wraps
    if (floating and not math.isfinite(number)) or least <= number <= limits.max:
        return
    name = _WIDE.get(tensor.dtype) or _NAMES.get(tensor.dtype, ("", f"c10::{str(tensor.dtype)[6:].capitalize()}"))[1]
    raise RuntimeError(f"value cannot be converted to type {name} without overflow")


def _holding(place: int) -> Check:
    """A check of the number at a place of the arguments."""
    return lambda args: _held(args[0], args[place] if place < len(args) else 0)


def _masked_fill(args: Sequence[Any]) -> None:
    target, mask = args[:2]
    if mask.device != target.device:
        where = f"mask on {mask.device} and self on {target.device}"
        raise RuntimeError(f"expected self and mask to be on the same device, but got {where}")
    _held(target, args[2])


def _where(args: Sequence[Any]) -> None:
    """A Python number comes as one of 64 bits on the host."""
    sides = args[1:3]
    for number, other in (sides, sides[::-1]):
        if not number.is_cuda and number.dtype is torch.float64 and not number.dim() and other.is_floating_point():
            _held(other, number.item())


def _in_place(args: Sequence[Any]) -> None:
    target, other = args[:2]
    if not target.is_floating_point():
        _kept(target, torch.result_type(target, other))


def _divided(args: Sequence[Any]) -> None:
    target, other = args[:2]
    if target.is_floating_point():
        return
    common = torch.result_type(target, other)
    _kept(target, common if common.is_floating_point or common.is_complex else torch.get_default_dtype())


def _kept(target: torch.Tensor, common: torch.dtype) -> None:
    if not torch.can_cast(common, target.dtype):
        name = _NAMES.get(common, (str(common), ""))[0]
        raise RuntimeError(f"result type {name} can't be cast to the desired output type {_scalar(target)}")


def _lerp(args: Sequence[Any]) -> None:
    """A weight without dimensions may be of another dtype."""
    first, end, weight = args[:3]
    others = {"end": end} | ({"weight": weight} if isinstance(weight, torch.Tensor) and weight.dim() else {})
    for name, one in others.items():
        if one.dtype != first.dtype:
            raise RuntimeError(f"expected dtype {_type(first)} for `{name}` but got dtype {_type(one)}")


def _of_each(check: Check) -> Check:
    """A check of operands one by one, each from its list or the same for all."""

    def checked(args: Sequence[Any]) -> None:
        for operands in zip(*(one if isinstance(one, list | tuple) else repeat(one) for one in args), strict=False):
            check(operands)

    return checked


def _nll(args: Sequence[Any]) -> None:
    source, target, _, reduction = args[:4]
    if target.dtype not in (torch.int64, torch.uint8):
        raise RuntimeError(f"expected target dtype to be Long or Byte, but got {_scalar(target)}")
    reduced = f"reduce_cuda_kernel_{source.dim()}d" if reduction or source.dim() == 1 else "no_reduce_cuda_kernel"
    _computed(f"nll_loss_forward_{reduced}", source)


def _logcumsumexp(args: Sequence[Any]) -> None:
    _computed("logcumsumexp_cuda", args[0])


def _cudnn(args: Sequence[Any]) -> None:
    """`getCudnnDataTypeFromScalarType` (cudnn/Descriptors.cpp) has integers that cuDNN has."""
    if args[0].dtype in (torch.bool, torch.int64, torch.int16):
        raise RuntimeError(f"getCudnnDataTypeFromScalarType() not supported for {_scalar(args[0])}")


def _no_booleans(said: str, then: Check | None = None) -> Check:
    def check(args: Sequence[Any]) -> None:
        if args[0].dtype is torch.bool:
            raise RuntimeError(said)
        if then is not None:
            then(args)

    return check


def _floating(said: str, place: int = 0, named: Callable[[torch.Tensor], str] = _scalar) -> Check:
    """A check that an operand is of floating-point numbers, or there are none; `said` holds its dtype's name."""

    def check(args: Sequence[Any]) -> None:
        one = args[place]
        if one.numel() and not (one.is_floating_point() or one.is_complex()):
            raise RuntimeError(said.format(named(one)))

    return check


def _addcdiv(args: Sequence[Any]) -> None:
    if not any(one.is_floating_point() or one.is_complex() for one in args[1:3]):
        raise RuntimeError(
            "Integer division with addcdiv is no longer supported, and in a future  release addcdiv will perform a "
            "true division of tensor1 and tensor2. The historic addcdiv behavior can be implemented as (input + value "
            "* torch.trunc(tensor1 / tensor2)).to(input.dtype) for integer inputs and as (input + value * tensor1 / "
            "tensor2) for float inputs. The future addcdiv behavior is just the latter implementation: (input + value "
            "* tensor1 / tensor2), for all dtypes."
        )


def _index(args: Sequence[Any]) -> None:
    indices = [index for index in args[1] if index is not None]
    if any(index.dtype.is_floating_point for index in indices):
        raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
    if not args[0].is_cuda and any(index.is_cuda for index in indices):
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")


def _index_put(args: Sequence[Any]) -> None:
    target, values = args[0], args[2]
    if target.dtype != values.dtype:
        raise RuntimeError(
            f"Index put requires the source and destination dtypes match, got {_scalar(target)} for the destination "
            f"and {_scalar(values)} for the source."
        )
    if values.dim() and values.device != target.device:
        raise places.apart(target.device, values.device)


def _index_add(args: Sequence[Any]) -> None:
    target, source = args[0], args[3]
    if target.dtype != source.dtype:
        names = f"self ({_scalar(target)}) and source ({_scalar(source)})"
        raise RuntimeError(f"index_add_(): {names} must have the same scalar type")


def _masked_scatter(args: Sequence[Any]) -> None:
    target, source = args[0], args[2]
    if target.dtype != source.dtype:
        names = f"{_scalar(target)} and {_scalar(source)}"
        raise RuntimeError(f"masked_scatter_: expected self and source to have same dtypes but got {names}")


def _entropy(args: Sequence[Any]) -> None:
    source, target = args[:2]
    if source.dtype != target.dtype:
        raise RuntimeError(f"Found dtype {_scalar(target)} but expected {_scalar(source)}")


def _bias(args: Sequence[Any]) -> None:
    if args[3] is not None and args[3].dtype != args[0].dtype:
        raise RuntimeError("invalid dtype for bias - should match query's dtype")


def scale_of_channels(scale: torch.Tensor) -> None:
    """Fake quantization's scale (quantized/FakeQuantPerChannelAffine.cpp)."""
    if scale.dtype not in (torch.float32, torch.bfloat16):
        raise RuntimeError(f"Scale must be Float or BFloat16, found {_scalar(scale)}")


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """The same for operands of attention (`validate_sdpa_input`)."""
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got query.dtype: "
            f"{_type(query)} key.dtype: {_type(key)} and value.dtype: {_type(value)} instead."
        )


def _fused(args: Sequence[Any]) -> None:
    for together in zip(*args[:4], strict=False):
        if len({tensor.dtype for tensor in together}) > 1:
            raise RuntimeError("params, grads, exp_avgs, and exp_avg_sqs must have same dtype, device, and layout")


def _none_of(name: str, default: int | None = None, *, whole: type[Exception] = RuntimeError) -> Check:
    """A check that there is an element to be found, among all or along dimensions (`zero_numel_check_dims`)."""
    way = " Specify the reduction dim with the 'dim' argument." if whole is RuntimeError else ""

    def check(args: Sequence[Any]) -> None:
        source, dims = args[0], args[1] if len(args) > 1 else default
        if source.numel():
            return
        if dims is None or dims == []:
            raise whole(f"{name}(): Expected reduction dim to be specified for input.numel() == 0.{way}")
        for dim in [dims % source.dim()] if isinstance(dims, int) else dims:
            if source.shape[dim] == 0:
                raise IndexError(f"{name}(): Expected reduction dim {dim} to have non-zero size.")

    return check


def _spread_of(name: str) -> Check:
    def check(args: Sequence[Any]) -> None:
        if not (args[0].is_floating_point() or args[0].is_complex()):
            raise RuntimeError(f"{name} only support floating point and complex dtypes")

    return check


def _scaled_mm(args: Sequence[Any]) -> None:
    """`_scaled_mm_allowed_device` of cuda/Blas.cpp."""
    if torch.cuda.get_device_capability() < (8, 9):
        name = _aten._scaled_mm.__name__
        raise RuntimeError(
            f"torch.{name} is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm MI300+"
        )


def _grouped_mm(args: Sequence[Any]) -> None:
    """Rows or columns begin at multiples of 16 bytes (`check_valid_strides_and_return_transposed`)."""
    for one in args[:2]:
        (rows, columns), (down, along) = one.shape[-2:], one.stride()[-2:]
        if down == 1 and along >= max(1, rows):
            between = along
        elif along == 1 and down >= max(1, columns):
            between = down
        else:
            strides, sizes = list(one.stride()), list(one.shape)
            raise RuntimeError(f"Invalid strides/sizes, got {strides} for strides and {sizes} for sizes")
        if between * one.itemsize % 16:
            raise RuntimeError("strides should be multiple of 16 bytes")


def _softmax(args: Sequence[Any]) -> None:
    source, dim = args[:2]
    most = max(source.dim(), 1)
    if not -most <= dim < most:
        within = f"expected to be in range of [{-most}, {most - 1}], but got {dim}"
        raise IndexError(f"Dimension out of range ({within})")
    _computed("host_softmax", source)


def _index_select(args: Sequence[Any]) -> None:
    if args[2].dim() > 1:
        raise RuntimeError("Index is supposed to be an empty tensor or a vector")


def _filled(args: Sequence[Any]) -> None:
    if args[2].dtype is not torch.int64:
        raise IndexError("index_fill_(): Expected dtype int64 for index.")
    _held(args[0], args[3])


def _gelu(args: Sequence[Any]) -> None:
    _computed("GeluCUDAKernelImpl", args[0])


def _of_bits(name: str) -> Check:
    def check(args: Sequence[Any]) -> None:
        for one in args[:2]:
            if isinstance(one, torch.Tensor) and (one.is_floating_point() or one.is_complex()):
                raise not_implemented(f"{name}_cuda", one)

    return check


#: What raises as PyTorch does if an operator's kernel does not take its arguments.
CHECKS: Final[Mapping[Any, Check]] = {
    **dict.fromkeys((_aten.mm.default, _aten.mm.out), _mm),
    **dict.fromkeys((_aten._scaled_mm.default, _aten._scaled_mm.out), _scaled_mm),
    **({_aten._grouped_mm.default: _grouped_mm} if hasattr(_aten, "_grouped_mm") else {}),  # from 2.8 on
    **dict.fromkeys((_aten.addmm.default, _aten.addmm.out), _addmm),
    _aten.addmm_.default: _addmm,
    _aten.bmm.default: _bmm,
    _aten.baddbmm.default: _baddbmm,
    _aten.baddbmm_.default: _baddbmm,
    _aten.addmv.default: _addmv,
    _aten.addmv_.default: _addmv,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.huber_loss_backward.out: _huber_loss_backward,
    _aten.native_group_norm.default: _group_norm,
    _aten.native_batch_norm.default: _batch_norm,
    _aten.cudnn_batch_norm.default: _batch_norm,
    _aten.fill_.Scalar: _holding(1),
    **dict.fromkeys((_aten.masked_fill.Scalar, _aten.masked_fill.Tensor), _masked_fill),
    **dict.fromkeys((_aten.masked_fill_.Scalar, _aten.masked_fill_.Tensor), _masked_fill),
    _aten.constant_pad_nd.default: _holding(2),
    _aten.scatter.value: _holding(3),
    _aten.scatter_.value: _holding(3),
    **dict.fromkeys((_aten.index_fill.int_Scalar, _aten.index_fill_.int_Scalar), _filled),
    **dict.fromkeys((_aten._softmax.default, _aten._log_softmax.default), _softmax),
    _aten.index_select.default: _index_select,
    _aten.gelu.default: _gelu,
    **dict.fromkeys((_aten.bitwise_and.Tensor, _aten.bitwise_and.Scalar), _of_bits("bitwise_and")),
    **dict.fromkeys((_aten.bitwise_or.Tensor, _aten.bitwise_or.Scalar), _of_bits("bitwise_or")),
    **dict.fromkeys((_aten.bitwise_xor.Tensor, _aten.bitwise_xor.Scalar), _of_bits("bitwise_xor")),
    _aten.where.self: _where,
    **dict.fromkeys((_aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor), _in_place),
    **dict.fromkeys((_aten.add_.Scalar, _aten.sub_.Scalar, _aten.mul_.Scalar), _in_place),
    **dict.fromkeys((_aten.div_.Tensor, _aten.div_.Scalar), _divided),
    **dict.fromkeys((_aten.lerp_.Scalar, _aten.lerp_.Tensor), _lerp),
    **dict.fromkeys((_aten._foreach_lerp_.Scalar, _aten._foreach_lerp_.List), _of_each(_lerp)),
    **dict.fromkeys((_aten.max.default, _aten.max.dim), _none_of("max")),
    **dict.fromkeys((_aten.min.default, _aten.min.dim), _none_of("min")),
    _aten.amax.default: _none_of("amax"),
    _aten.amin.default: _none_of("amin"),
    **{
        getattr(_aten, name).default: _no_booleans(
            f"{name}(): does not support bool input", _none_of(name, whole=IndexError)
        )
        for name in ("argmax", "argmin")
    },
    **dict.fromkeys((_aten.median.dim_values, _aten.nanmedian.dim_values), _none_of("median")),
    _aten.mode.default: _none_of("mode", -1),
    **dict.fromkeys((_aten.std.correction, _aten.var.correction), _spread_of("std and var")),
    _aten.std_mean.correction: _spread_of("std_mean"),
    _aten.var_mean.correction: _spread_of("var_mean"),
    _aten.nll_loss_forward.default: _nll,
    _aten._logcumsumexp.default: _logcumsumexp,
    _aten.cudnn_convolution.default: _cudnn,
    _aten.cudnn_convolution_transpose.default: _cudnn,
    _aten.relu.default: _no_booleans("Boolean inputs not supported for relu"),
    _aten.relu_.default: _no_booleans("Boolean inputs not supported for relu"),
    _aten.topk.default: _no_booleans("topk does not support bool dtypes on CPU"),
    _aten.multinomial.default: _floating("multinomial only supports floating-point dtypes for input, got: {}"),
    _aten.bernoulli_.Tensor: _floating("expected probabilities tensor to have floating type, got {}", place=1),
    _aten.exponential_.default: _floating(f"Exponential {_CONTINUOUS}"),
    _aten.cauchy_.default: _floating(f"Cauchy {_CONTINUOUS}", named=_type),
    _aten.linalg_matrix_exp.default: _floating(
        "linalg.matrix_exp: Expected a floating point or complex tensor as input. Got {}"
    ),
    **dict.fromkeys((_aten.addcdiv.default, _aten.addcdiv_.default), _addcdiv),
    _aten.index.Tensor: _index,
    _aten._index_put_impl_.default: _index_put,
    _aten.index_add.default: _index_add,
    _aten.index_add_.default: _index_add,
    _aten.masked_scatter.default: _masked_scatter,
    _aten.masked_scatter_.default: _masked_scatter,
    _aten.binary_cross_entropy.default: _entropy,
    _aten._scaled_dot_product_efficient_attention.default: _bias,
    _aten._fused_adam_.default: _fused,
    _aten._fused_adamw_.default: _fused,
}
