"""Which attention kernel PyTorch takes on a GPU, and what `scaled_dot_product_attention` does around it.

PyTorch asks the device for the kernel, so a build without CUDA always takes the plain one. `choose` answers as a CUDA
build on the profile's GPU does, by release (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h);
`install` puts it under the operator. Only the choice and the padding around it are ours: the operators that are
called, their derivatives and the plain path itself are PyTorch's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from operator import attrgetter
from typing import Any, Final, Protocol

import torch

from graph.fake_cuda.operators import refused
from graph.fake_cuda.torch_private import sdpa_order
from graph.hardware.profile import Profile
from graph.workspaces import metadata


class Backend(IntEnum):
    """The kernels; values as `at::SDPBackend`, which `aten::_fused_sdp_choice` answers with."""

    ERROR = -1
    MATH = 0
    FLASH = 1
    EFFICIENT = 2
    CUDNN = 3
    OVERRIDEABLE = 4


#: A length, where it is not known.
_ANY: Final = 2


@dataclass(frozen=True, slots=True)
class Operand:
    """What the choice depends on of a query, key, value or mask. `dtype` as torch prints it without `torch.`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    requires_grad: bool = False
    offset: int = 0  # of the first element in its storage

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Operand:
        """The operand that a tensor is. Of a nested one the lengths that differ count as any."""
        dtype = metadata.dtype(tensor)
        shape, stride = (
            [size if isinstance(size, int) else _ANY for size in of()] for of in (tensor.size, tensor.stride)
        )
        return cls(tuple(shape), tuple(stride), dtype, tensor.requires_grad, int(tensor.storage_offset()))


DEFAULT_PRIORITY: Final = (Backend.FLASH, Backend.EFFICIENT, Backend.MATH, Backend.CUDNN, Backend.OVERRIDEABLE)
_CUDNN_PRIORITY: Final = (Backend.CUDNN, Backend.FLASH, Backend.EFFICIENT, Backend.MATH, Backend.OVERRIDEABLE)


@dataclass(frozen=True, slots=True)
class Flags:
    """The switches of torch.backends.cuda and torch.nn.attention, and deterministic mode (without warn_only).

    A `priority` other than the default is one that the user set; the default gives way to the device's preference.
    """

    flash: bool = True
    efficient: bool = True
    math: bool = True
    cudnn: bool = True
    overrideable: bool = True
    deterministic: bool = False
    priority: tuple[Backend, ...] = DEFAULT_PRIORITY


@dataclass(frozen=True, slots=True)
class Request:
    """One call of the operator, as the choice sees it; `grad` is whether autograd records."""

    query: Operand
    key: Operand
    value: Operand
    mask: Operand | None
    dropout: float
    is_causal: bool
    enable_gqa: bool
    grad: bool = True

    @property
    def needs_grad(self) -> bool:
        """Whether a derivative will be asked for (`input_requires_grad`; the mask does not count)."""
        return self.grad and any(x.requires_grad for x in (self.query, self.key, self.value))


#: cuDNN that the wheels of a release on PyPI bring (their requirement nvidia-cudnn-cu*); newer releases as the last
_CUDNN_VERSION: Final[Mapping[tuple[int, int], int]] = {
    (2, 9): 91002,
    (2, 10): 91002,
    (2, 11): 91900,
    (2, 12): 92000,
    (2, 13): 92000,
    (2, 14): 92400,
    (2, 15): 92600,
}
_HALF: Final = ("float16", "bfloat16")


def cudnn_version(release: tuple[int, int]) -> int:
    """The number that cudnnGetVersion gives under a release's wheel; outside the table the nearest release's."""
    known = sorted(_CUDNN_VERSION)
    return _CUDNN_VERSION[max([r for r in known if r <= release], default=known[0])]


def choose(request: Request, profile: Profile, flags: Flags | None = None) -> Backend:
    """The kernel that `select_sdp_backend` takes; ERROR where PyTorch raises because none is left."""
    flags = flags or Flags()
    for backend in priority(profile, flags):
        if backend is Backend.OVERRIDEABLE:
            if flags.overrideable:
                return Backend.ERROR
        elif _CAN[backend](request, profile, flags):
            return backend
    return Backend.ERROR


def priority(profile: Profile, flags: Flags) -> tuple[Backend, ...]:
    """The order in which kernels are tried: cuDNN first on sm90 and sm100 where cuDNN is above 9.15.0."""
    prefers = profile.arch in ((9, 0), (10, 0), (10, 3)) and cudnn_version(profile.release) > 91500
    return _CUDNN_PRIORITY if prefers and flags.priority == DEFAULT_PRIORITY else flags.priority


def _four_dimensional(request: Request) -> bool:
    return len(request.query.shape) == len(request.key.shape) == len(request.value.shape) == 4


def _same_dtype(request: Request, allowed: Sequence[str]) -> bool:
    return request.query.dtype in allowed and request.query.dtype == request.key.dtype == request.value.dtype


def _low_precision(request: Request, profile: Profile) -> bool:
    return _same_dtype(request, _HALF if profile.arch >= (8, 0) else ("float16",))


def _between(profile: Profile, low: tuple[int, int], high: tuple[int, int]) -> bool:
    return low <= profile.arch <= high


def _nonzero_lengths(request: Request) -> bool:
    return request.query.shape[-2] != 0 and request.key.shape[-2] != 0


def _inner_strides(request: Request, *, ignore_single: bool) -> bool:
    """Whether the last dimensions are dense (`check_last_dim_stride_equals_1_dense`)."""
    dense = all(x.stride[-1] == 1 for x in (request.query, request.key, request.value))
    dense = dense or (ignore_single and request.query.shape[-1] == 1)
    return dense and (request.mask is None or request.mask.stride[-1] == 1)


def _heads(request: Request, profile: Profile, *, grouped: bool, same_heads: bool = True) -> bool:
    """Whether batch and heads fit (`check_batch_size_and_num_heads_dense`, `check_grouped_query_attention`).

    From 2.14 on a single head of keys and values is a group of all, asked for or not.
    """
    q, k, v = request.query.shape, request.key.shape, request.value.shape
    if not q[0] == k[0] == v[0]:
        return False
    shared = profile.release >= (2, 14) and k[-3] == v[-3] == 1
    if not ((request.enable_gqa or shared) and grouped):
        return q[-3] == k[-3] == v[-3]
    if same_heads and k[-3] != v[-3]:
        return False
    return q[-3] % k[-3] == 0 and (same_heads or q[-3] % v[-3] == 0)


def _mask_shape(request: Request) -> bool:
    """Whether the mask broadcasts as cuDNN takes it (`check_attn_mask_shape`)."""
    mask = request.mask
    if mask is None:
        return True
    if mask.requires_grad:
        return False
    batch, heads, rows = request.query.shape[:3]
    wanted = (batch, heads, rows, request.key.shape[2])
    if len(mask.shape) not in (2, 4):
        return False
    return all(have in (1, want) for have, want in zip(mask.shape[::-1], wanted[::-1], strict=False))


def _cudnn_shapes(request: Request, profile: Profile) -> bool:
    """Head dimensions and lengths that cuDNN takes (`check_cudnn_tensor_shapes`)."""
    rows, columns = request.query.shape[2], request.key.shape[2]
    heads = request.query.shape[3], request.value.shape[3]
    if max(heads) > 128 and not _cudnn_large_heads(heads, request, profile):
        return False
    if rows == 1 and (request.dropout != 0.0 or (profile.release == (2, 14) and profile.arch[0] == 10)):
        return False
    return columns != 1 and not any(head % 8 for head in heads)


def _cudnn_large_heads(heads: tuple[int, int], request: Request, profile: Profile) -> bool:
    """Head dimensions of query and value above 128: on sm90 and sm100 alone; from 2.14 on two pairs when training."""
    if profile.release >= (2, 14) and profile.arch[0] in (9, 10):
        return max(heads) <= 256 if not request.needs_grad else heads in ((192, 128), (256, 256))
    if profile.arch == (9, 0):
        return max(heads) <= 256
    return profile.release >= (2, 12) and profile.arch[0] == 10 and heads == (192, 128)


def _cudnn_dropout(request: Request, profile: Profile) -> bool:
    """From 2.12 on only multiples of 1/16, which is all that cuDNN can do (`check_cudnn_dropout`)."""
    return profile.release < (2, 12) or (request.dropout * 16.0).is_integer()


def _cudnn_can(request: Request, profile: Profile, flags: Flags) -> bool:
    """`can_use_cudnn_attention`, dense inputs."""
    return (
        flags.cudnn
        and not flags.deterministic
        and _four_dimensional(request)
        and _low_precision(request, profile)
        and _mask_shape(request)
        and _between(profile, (8, 0), (12, 1))
        and _nonzero_lengths(request)
        and _inner_strides(request, ignore_single=True)
        and _heads(request, profile, grouped=True, same_heads=False)
        and _cudnn_shapes(request, profile)
        and _cudnn_dropout(request, profile)
    )


def _flash_head_dim(request: Request, profile: Profile) -> bool:
    """Equal head dimensions up to 256; no training on consumer cards in (192, 224], or above with dropout."""
    head = request.query.shape[-1]
    if not (head == request.key.shape[-1] == request.value.shape[-1] and head <= 256):
        return False
    small = _between(profile, (8, 6), (8, 9)) or _between(profile, (12, 0), (12, 1))
    return not (request.needs_grad and small and head > 192 and (head <= 224 or request.dropout > 0.0))


def _flash_can(request: Request, profile: Profile, flags: Flags) -> bool:
    """`can_use_flash_attention`, dense inputs."""
    return (
        flags.flash
        and request.mask is None
        and _four_dimensional(request)
        and _between(profile, (8, 0), (12, 1))
        and _flash_head_dim(request, profile)
        and (not request.is_causal or request.query.shape[-2] == request.key.shape[-2])
        and _low_precision(request, profile)
        and _heads(request, profile, grouped=True)
        and _nonzero_lengths(request)
        and _inner_strides(request, ignore_single=True)
    )


def _efficient_alignment(request: Request, profile: Profile) -> int:
    """What head dimensions must be multiples of (`minimum_gemm_alignment`)."""
    half = request.query.dtype in _HALF
    if profile.arch >= (8, 0):
        return 8 if half else 4
    return 8 if half and profile.arch >= (7, 0) else 1


def _efficient_offsets(request: Request, profile: Profile) -> bool:
    """From 2.13 on and on sm80 or newer: addresses as aligned as the kernel needs; storages start at 512 bytes."""
    if profile.release < (2, 13) or profile.arch < (8, 0):
        return True
    alignment = _efficient_alignment(request, profile)
    return all(
        math.prod(x.shape) == 0 or x.offset % alignment == 0 for x in (request.query, request.key, request.value)
    )


def _efficient_can(request: Request, profile: Profile, flags: Flags) -> bool:
    """`can_use_mem_efficient_attention`, dense inputs."""
    alignment = _efficient_alignment(request, profile)
    inner, outer = request.query.shape[-1], request.value.shape[-1]
    dtypes = ("float16", "float32", "bfloat16") if profile.arch >= (8, 0) else ("float16", "float32")
    return (
        flags.efficient
        and _four_dimensional(request)
        and _between(profile, (5, 0), (12, 1))
        and inner == request.key.shape[-1]
        and inner > 0
        and outer > 0
        and inner % alignment == 0
        and outer % alignment == 0
        and _nonzero_lengths(request)
        and _inner_strides(request, ignore_single=False)
        and _heads(request, profile, grouped=profile.release >= (2, 14))
        and _same_dtype(request, dtypes)
        and _efficient_offsets(request, profile)
    )


_CAN: Final[Mapping[Backend, Callable[[Request, Profile, Flags], bool]]] = {
    Backend.CUDNN: _cudnn_can,
    Backend.FLASH: _flash_can,
    Backend.EFFICIENT: _efficient_can,
    Backend.MATH: lambda _request, _profile, flags: flags.math,
}

# ------------------------------------------------------------------------------------------------- the operator


class Runtime(Protocol):
    """What `install` needs of `graph.fake_cuda.Runtime`."""

    profile: Profile

    def override(self, name: str, kernel: Callable[..., Any], keys: Sequence[str] = ("CUDA",)) -> None:
        """Put `kernel` in place of operator `name` at dispatch keys `keys`."""


def install(runtime: Runtime) -> None:
    """Put the choice under aten::scaled_dot_product_attention and aten::_fused_sdp_choice, above autograd.

    Autocast has cast the arguments by then; what is called below records its own derivative.
    """
    for name, kernel in (("scaled_dot_product_attention", attend), ("_fused_sdp_choice", choice)):
        runtime.override(f"aten::{name}", partial(kernel, runtime.profile), ("AutogradCUDA", "CUDA"))


def attend(
    card: Profile,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`at::native::scaled_dot_product_attention` (transformers/attention.cpp) on the GPU of `card`.

    Tensors are (batch, heads, tokens, head), or (heads, tokens, head); the result has the query's batch, heads and
    tokens and the value's head. Temporaries die in the order in which C++ drops them. Raises what PyTorch raises
    where no kernel is left, and for operands of several dtypes.
    """
    aten = torch.ops.aten
    refused.attention(query, key, value)
    if card.release >= (2, 14) and all(x.dim() == 3 for x in (query, key, value)):
        one = partial(attend, card, query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), _of_one_batch(attn_mask))
        return one(dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa).squeeze(0)
    backend, needs_grad = _chosen(card, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if backend is Backend.ERROR:
        raise RuntimeError("No available kernel. Aborting execution.")
    if backend is Backend.FLASH:
        head = query.shape[-1]
        padded = [_padded_head(x) for x in (query, key, value)]
        factor = 1.0 / math.sqrt(head) if scale is None else scale
        out = _first(aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=factor))
        while padded:
            del padded[-1]
        return out if out.shape[-1] == head else aten.slice.Tensor(out, -1, 0, head)
    if backend is Backend.EFFICIENT:
        bias = None if attn_mask is None else _aligned_bias(_additive(attn_mask, query.dtype), query, key)
        return _first(
            aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale
            )
        )
    bias = _additive(attn_mask, query.dtype)
    if backend is Backend.CUDNN:
        return _first(
            aten._scaled_dot_product_cudnn_attention(
                query, key, value, bias, needs_grad, dropout_p, is_causal, False, scale=scale
            )
        )
    return _first(
        aten._scaled_dot_product_attention_math(
            query, key, value, bias, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
    )


def _of_one_batch(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask of operands that have no dimension for the batch, as one that has."""
    return mask.unsqueeze(0) if mask is not None and mask.dim() == 3 else mask


def answers(card: Profile) -> dict[str, Callable[..., bool]]:
    """What functions of PyTorch's bindings say, by their names: whether a kernel takes a call of these `SDPAParams`.

    torch.backends.cuda has them for programs, and torch.nested asks them for jagged tensors.
    """

    parts = attrgetter("query", "key", "value", "attn_mask", "dropout", "is_causal", "enable_gqa")

    def ask(backend: Backend, asked: object, debug: bool = False) -> bool:
        return _CAN[backend](_request(*parts(asked)), card, _flags(card))

    kernels = {"flash": Backend.FLASH, "mem_efficient": Backend.EFFICIENT, "cudnn": Backend.CUDNN}
    return {f"_can_use_{name}_attention": partial(ask, backend) for name, backend in kernels.items()}


def choice(card: Profile, *args: Any, scale: float | None = None, **kwargs: Any) -> int:
    """`aten::_fused_sdp_choice` on the GPU of `card`."""
    return int(_chosen(card, *args, **kwargs)[0])


def _chosen(card: Profile, *args: Any, **kwargs: Any) -> tuple[Backend, bool]:
    """The kernel for a call, and whether it is to keep what its derivative needs; from 2.14 on that of the mask too."""
    request = _request(*args, **kwargs)
    of_mask = card.release >= (2, 14) and request.grad and request.mask is not None and request.mask.requires_grad
    return choose(request, card, _flags(card)), request.needs_grad or of_mask


def _request(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Request:
    """A call, as the choice sees it."""
    return Request(
        Operand.of(query),
        Operand.of(key),
        Operand.of(value),
        None if attn_mask is None else Operand.of(attn_mask),
        dropout_p,
        is_causal,
        enable_gqa,
        torch.is_grad_enabled(),
    )


def _flags(card: Profile) -> Flags:
    """The switches as they are set now."""
    cuda: Any = torch.backends.cuda
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return Flags(
        flash=cuda.flash_sdp_enabled(),
        efficient=cuda.mem_efficient_sdp_enabled(),
        math=cuda.math_sdp_enabled(),
        cudnn=card.cudnn_sdp and cuda.cudnn_sdp_enabled(),
        deterministic=strict,
        priority=tuple(Backend(value) for value in sdpa_order()),
    )


def _first(outputs: Sequence[torch.Tensor]) -> Any:
    """The first of an operator's outputs; the others die in order."""
    rest = list(outputs)
    del outputs
    while len(rest) > 1:
        del rest[1]
    return rest[0]


def _padded_head(tensor: torch.Tensor) -> Any:
    """`tensor` with its last dimension padded to a multiple of 8 (`pad_last_dim`)."""
    missing = -tensor.shape[-1] % 8
    return torch.ops.aten.pad(tensor, [0, missing]) if missing else tensor


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> Any:
    """A boolean mask as one that is added: 0 where it is true, else minus infinity (`convert_boolean_attn_mask`)."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    aten = torch.ops.aten
    return aten.where.ScalarSelf(mask, 0.0, aten.scalar_tensor(-math.inf, dtype=dtype, device=mask.device))


def _aligned_bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Any:
    """`mask` with rows aligned to 8 elements, padded if need be, and expanded to all heads (`preprocess_mask`).

    Strides that are symbols of what is compiled count as not aligned (`aligned_tensor`).
    """
    aten = torch.ops.aten
    if any(not isinstance(step, int) or step % 8 for step in mask.stride()[:-1]) or mask.stride(-1) != 1:
        width = mask.shape[-1]
        mask = aten.slice.Tensor(aten.pad(mask, [0, 8 - width % 8]), -1, 0, width)
    return aten.expand(mask, [query.shape[0], query.shape[1], query.shape[2], key.shape[2]])


#: Forwards of the efficient kernel, and where their `dropout_p` stands.
_EFFICIENT: Final = {
    "aten._scaled_dot_product_efficient_attention.default": 5,
    "aten._efficient_attention_forward.default": 8,
}


def corrected(
    card: Profile,
    name: str,
    outputs: Sequence[torch.Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    captured: bool,
) -> Any:
    """What operator `name` (`aten._scaled_dot_product_efficient_attention.default`) returns on CUDA, where PyTorch's
    rules for shapes say something else: random state of the efficient kernel is on the host (but where a CUDA graph is
    captured, and from 2.14 on without dropout), up to 2.6 that of the flash kernel by token too, cuDNN's makes no
    logsumexp if not asked to, and the flash kernel's output lies as a query by rows does (of one that is expanded too).
    Any other `outputs` are returned as they are.
    """
    if name == "aten._scaled_dot_product_flash_attention.default":
        return (torch.empty_like(args[0].transpose(1, 2), device="meta").transpose(1, 2), *outputs[1:])
    if (place := _EFFICIENT.get(name)) is not None and not captured:
        dropout = args[place] if len(args) > place else kwargs.get("dropout_p", 0.0)
        return outputs if card.release >= (2, 14) and not dropout else _seeded_on_host(outputs)
    if name == "aten._flash_attention_forward.default" and not captured and card.release < (2, 7):
        return _seeded_on_host(outputs)
    if name == "aten._scaled_dot_product_cudnn_attention.default":
        wanted = args[4] if len(args) > 4 else kwargs.get("compute_log_sumexp", False)
        return outputs if wanted else (outputs[0], None, *outputs[2:])
    return outputs


def _seeded_on_host(outputs: Sequence[torch.Tensor]) -> Any:
    """The random state, two numbers, on the host."""
    host = torch.empty((), dtype=torch.long, device="cpu")
    return (*outputs[:2], host, host, *outputs[4:])
