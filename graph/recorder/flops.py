"""What one operator call costs: floating-point operations, and bytes read and written on the GPU.

FLOPs are those of matrix products, convolutions and attention, by torch's own formulas (`torch/utils/flop_counter.py`:
a multiply and an add are two; causal attention counts as full), and by formulas of ours for products that torch's
counter passes by; every other operator counts 0. Bytes are those of a kernel that reads each operand once and writes
each result once: what is broadcast is read once, views and empty tensors move nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

Shape = Sequence[int]
Arguments = tuple[Any, ...]
Options = Mapping[str, Any]
Formula = Callable[[Arguments, Options, Any], int]


def cost(name: str, args: Arguments, kwargs: Options, out: object) -> tuple[int, int]:
    """(FLOPs, bytes moved) of one call.

    `name` is an overload's full name ("aten.mm.default"); `args` and `kwargs` are in the order of its schema, with
    tensors that have shapes, strides and dtypes (fake ones will do); `out` is what it returned. An operator that no
    table here knows has 0 FLOPs, and reads its tensor arguments and writes its results.
    """
    packet = name[: name.rfind(".")] if name.count(".") > 1 else name
    formula = FLOPS.get(packet)
    flops = 0 if formula is None else formula(args, kwargs, out)
    moved = MOVED.get(packet)
    if moved is not None:
        return flops, moved(args, kwargs, out)
    return flops, _ordinary(packet, args, kwargs, out)


# Bytes ---------------------------------------------------------------------------------------------------------------


def _tensors(value: object) -> Iterator[Any]:
    """The tensors in an argument: itself, or those in (lists of) lists."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "nbytes"):
        yield value


def _size(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's distinct elements: an expanded dimension counts once. A scalar on the host is no traffic."""
    size = int(tensor.nbytes)
    strides = tensor.stride()
    if not strides:
        return 0 if tensor.device.type == "cpu" else size
    if 0 in strides and size:
        shape = tensor.shape
        for length, stride in zip(shape, strides, strict=True):
            if stride == 0:
                size //= length
    return int(size)


def _sizes(values: Iterable[Any]) -> int:
    return sum(_size(tensor) for value in values for tensor in _tensors(value))


def _ordinary(packet: str, args: Arguments, kwargs: Options, out: object) -> int:
    """All operands read and all results written; an operator that changes its first argument writes that."""
    read = _sizes(args) + _sizes(value for key, value in kwargs.items() if key != "out")
    if out is None and packet.endswith("_"):
        out = args[0] if args else ()
    return read + _sizes((out,))


def _nothing(args: Arguments, kwargs: Options, out: object) -> int:
    return 0


def _written(args: Arguments, kwargs: Options, out: object) -> int:
    """A result is filled without any operand being read (`zeros`, `fill_`)."""
    return _sizes((args[0] if out is None else out,))


def _copied(args: Arguments, kwargs: Options, out: object) -> int:
    """`copy_(to, from)`, single or of lists: the target is not read."""
    return _sizes(args[:2])


def _gathered(args: Arguments, kwargs: Options, out: object) -> int:
    """Of the first operand only the chosen elements are read: as many as the result has."""
    return 2 * _sizes((out,)) + _sizes(args[1:])


def _scattered(args: Arguments, kwargs: Options, out: object) -> int:
    """In place, elements that an index chooses are read and written: as many as the source (the last operand) has."""
    operands = list(_tensors(args[1:]))
    return _sizes(operands) + (2 * _size(operands[-1]) if operands else 0)


def _adam(args: Arguments, kwargs: Options, out: object) -> int:
    """Fused Adam: (parameters, gradients, averages, squares, largest squares, steps); all but gradients are written."""
    lists = [_sizes((value,)) for value in args[:6]]
    return 2 * sum(lists) - (lists[1] if len(lists) > 1 else 0)


def _sgd(args: Arguments, kwargs: Options, out: object) -> int:
    """Fused SGD: (parameters, gradients, momenta); all but gradients are written."""
    lists = [_sizes((value,)) for value in args[:3]]
    return 2 * sum(lists) - (lists[1] if len(lists) > 1 else 0)


_VIEWS: Final = (
    "view,_unsafe_view,_reshape_alias,transpose,transpose_,t,t_,permute,expand,slice,select,split,split_with_sizes,"
    "unsafe_split,unsafe_split_with_sizes,chunk,unsafe_chunk,unbind,unsqueeze,unsqueeze_,squeeze,squeeze_,detach,"
    "detach_,alias,as_strided,as_strided_,diagonal,narrow,unfold,view_as_real,view_as_complex,lift_fresh,lift,movedim,"
    "swapaxes,_conj,_neg_view,set_,resize_,empty,empty_like,empty_strided,empty_permuted,new_empty,new_empty_strided,"
    "sym_size,sym_stride,sym_numel,is_same_size,record_stream,_local_scalar_dense,_has_same_storage_numel"
)
_FILLS: Final = (
    "zeros,ones,full,zeros_like,ones_like,full_like,new_zeros,new_ones,new_full,fill_,zero_,_foreach_zero_,arange,"
    "bernoulli_,normal_,uniform_,random_,exponential_,rand,randn,randint,rand_like,randn_like,eye,linspace,"
    "scalar_tensor,tril_indices,triu_indices"
)
_GATHERS: Final = "embedding,index_select,index,_unsafe_index,gather,take,take_along_dim"
_SCATTERS: Final = "index_put_,_index_put_impl_,index_add_,index_copy_,scatter_,scatter_add_,scatter_reduce_"


def _aten(names: str) -> list[str]:
    return [f"aten.{name}" for name in names.split(",")]


#: Rules for bytes, where they are not those of all operands and results.
MOVED: Final[dict[str, Formula]] = {
    **dict.fromkeys(_aten(_VIEWS), _nothing),
    **dict.fromkeys(_aten(_FILLS), _written),
    **dict.fromkeys(_aten("copy_,_foreach_copy_"), _copied),
    **dict.fromkeys(_aten(_GATHERS), _gathered),
    **dict.fromkeys(_aten(_SCATTERS), _scattered),
    **dict.fromkeys(_aten("_fused_adam_,_fused_adamw_"), _adam),
    "aten._fused_sgd_": _sgd,
}


# FLOPs ---------------------------------------------------------------------------------------------------------------


def _product(first: Shape, second: Shape) -> int:
    """[..., m, k] times [..., k, n], with as many matrices as `first` has."""
    return 2 * prod(first) * int(second[-1])


def _products(place: int) -> Formula:
    """A product of the operands at `place` and after it."""

    def formula(args: Arguments, kwargs: Options, out: object) -> int:
        return _product(args[place].shape, args[place + 1].shape)

    return formula


def _vector(place: int) -> Formula:
    """A matrix, or a vector, at `place` times a vector."""

    def formula(args: Arguments, kwargs: Options, out: object) -> int:
        return int(2 * prod(args[place].shape))

    return formula


def _linear(args: Arguments, kwargs: Options, out: object) -> int:
    """[..., k] times the transpose of [n, k]."""
    return int(2 * prod(args[0].shape) * int(args[1].shape[0]))


def _grouped(args: Arguments, kwargs: Options, out: object) -> int:
    """`_grouped_mm`: each row of the first operand meets the matrix of its own group.

    With two operands of two dimensions the groups split the inner dimension: together one product.
    """
    return _product(args[0].shape, args[1].shape)


def _outer(args: Arguments, kwargs: Options, out: object) -> int:
    return int(2 * prod(args[1].shape) * int(args[2].shape[0]))


def _heads_first(shape: Shape, offsets: torch.Tensor | None, longest: int) -> list[int]:
    """[batch, heads, length, width] of an operand [batch, length, heads, width] of the inner attention kernels.

    With offsets, where sequences are packed one after another, every sequence counts as the longest one.
    """
    if offsets is None:
        return [shape[0], shape[2], shape[1], shape[3]]
    return [int(offsets.shape[0]) - 1, shape[-2], int(longest), shape[-1]]


def _inner(first: int, offsets: int, count: Callable[..., int]) -> Formula:
    """Kernels below `scaled_dot_product_attention`: query, key, value from `first`, offsets and lengths from `offsets`.

    Their lengths come before their heads, which torch's counter overlooks where there are no offsets.
    """

    def formula(args: Arguments, kwargs: Options, out: object) -> int:
        query, key, value = (operand.shape for operand in args[first : first + 3])
        queries, keys, longest_query, longest_key = args[offsets : offsets + 4]
        query = _heads_first(query, queries, longest_query)
        others = (_heads_first(other, keys, longest_key) for other in (key, value))
        return count(query, *(_all_heads(query, other) for other in others))

    return formula


def _four_bit(args: Arguments, kwargs: Options, out: object) -> int:
    """A vector times a packed matrix, whose shape [n, k] is the third argument."""
    return int(2 * prod(args[0].shape) * int(args[2][0]))


def _attention_backward(query: Shape, key: Shape, value: Shape) -> int:
    """The gradient of the result has the shape of the queries, as wide as the values."""
    counted: Callable[..., int] = sdpa_backward_flop_count
    return counted([*query[:3], value[3]], query, key, value)


def _of_torch(counted: Callable[..., int]) -> Formula:
    """A formula of torch's over shapes, without what it wraps around it, which takes as long as a small kernel."""
    plain = inspect.unwrap(counted)

    def formula(args: Arguments, kwargs: Options, out: object) -> int:
        named = {name: _shape(value) for name, value in kwargs.items()}
        return int(plain(*map(_shape, args), **named, out_shape=_shape(out)))

    return formula


def _of_attention(name: str, counted: Callable[..., int]) -> Formula:
    """The same for query, key and value, which the gradient of the result comes before in a `_backward`."""
    plain, first = _of_torch(counted), int(name.endswith("_backward"))

    def formula(args: Arguments, kwargs: Options, out: object) -> int:
        query, key, value = map(_shape, args[first : first + 3])
        whole = (query, _all_heads(query, key), _all_heads(query, value))
        return plain((*args[:first], *whole, *args[first + 3 :]), kwargs, out)

    return formula


def _all_heads(query: Shape, other: Shape) -> Shape:
    """The shape of keys or values with as many heads as the queries: a kernel reads a shared head for each of them.

    Shapes are [batch, heads, length, width]. PyTorch's formulas refuse fewer heads in older releases (2.9 and 2.11 do).
    """
    return (other[0], query[1], *other[2:])


def _shape(value: object) -> Any:
    return value.shape if isinstance(value, torch.Tensor) else value


#: Formulas by operator, overloads apart: torch's, and ours for what its counter passes by or takes in another order.
FLOPS: Final[dict[str, Formula]] = {
    **{str(packet): _of_torch(counted) for packet, counted in flop_registry.items()},
    **{
        str(packet): _of_attention(str(packet), counted)
        for packet, counted in flop_registry.items()
        if str(packet).startswith("aten._scaled_dot_product")
    },
    "aten._int_mm": _products(0),
    **dict.fromkeys(_aten("addmm_,baddbmm_,_addmm_activation,addbmm,addbmm_"), _products(1)),
    **dict.fromkeys(_aten("mv,dot,vdot"), _vector(0)),
    **dict.fromkeys(_aten("addmv,addmv_"), _vector(1)),
    **dict.fromkeys(_aten("addr,addr_"), _outer),
    **dict.fromkeys(_aten("_grouped_mm,_scaled_grouped_mm"), _grouped),
    "aten.linear": _linear,
    "aten._flash_attention_forward": _inner(0, 3, sdpa_flop_count),
    "aten._efficient_attention_forward": _inner(0, 4, sdpa_flop_count),
    "aten._flash_attention_backward": _inner(1, 6, _attention_backward),
    "aten._efficient_attention_backward": _inner(1, 6, _attention_backward),
    "bitsandbytes.int8_linear_matmul": _linear,
    "bitsandbytes.int8_scaled_mm": _linear,
    "bitsandbytes.gemv_4bit": _four_bit,
}
