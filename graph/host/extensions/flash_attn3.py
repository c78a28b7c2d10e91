"""FlashAttention-3's operators, which need CUDA to be built: they allocate what they would, and compute nothing.

Its own Python code runs (`flash_attn_interface.py`); what that calls are four operators of the library `flash_attn_3`,
which stand here in place of `flash_attn_3._C`. Their allocations, in order, are those of hopper/flash_api.cpp of
flash-attention (`mha_fwd`, `mha_bwd`, `mha_combine`, `mha_fwd_get_scheduler_metadata`, August 2026), their blocks those
of hopper/tile_size.h. Tensors are (batch, rows, heads, head), or (rows of all, heads, head) where lengths vary.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch

from graph.host.extensions.flash_attn import single
from graph.workspaces.attention import flash_splits
from graph.workspaces.metadata import up, upper

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime

Optional = torch.Tensor | None
Made = tuple[Optional, ...]
Given = Mapping[str, Any]

LIBRARY: Final = "flash_attn_3"
#: The module whose import would register the operators.
_EXTENSION: Final = f"{LIBRARY}._C"
#: The module of its Python code.
_INTERFACE: Final = "flash_attn_interface"
#: What its build writes beside that, and what is in it: all kernels were built.
_WRITTEN: Final[Given] = {LIBRARY: {}, "flash_attn_config": {"CONFIG": {"build_flags": defaultdict[str, bool](bool)}}}
#: Head dimensions that there are kernels for; values may have one more.
_HEADS: Final = (64, 96, 128, 192, 256)
_HEADS_OF_VALUES: Final = (*_HEADS, 512)
#: Bytes of a GPU's second cache that splitting counts on, the most parts of the keys, and blocks that are not split.
_CACHE: Final = 50 << 20
_MOST_PARTS: Final = 128
_FEW_BLOCKS: Final = 4
#: The operators as TORCH_LIBRARY(flash_attn_3) of flash_api.cpp defines them.
_DEFINED: Final = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, Tensor? q_v = None, "
    "Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, "
    "int? max_seqlen_k = None, Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, "
    "Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, "
    "Tensor? k_descale = None, Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False, "
    "int window_size_left = -1, int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, "
    "bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits = 0, "
    "bool? pack_gqa = None, int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)",
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq = None, "
    "Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1, "
    "float softcap = 0.0, bool deterministic = False, int sm_margin = 0) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "fwd_combine(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out = None, ScalarType? out_dtype = None) "
    "-> (Tensor(out!), Tensor)",
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    "int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q = None, "
    "Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, "
    "Tensor? leftpad_k = None, int? page_size = None, int max_seqlen_k_new = 0, bool is_causal = False, "
    "int window_size_left = -1, int window_size_right = -1, int attention_chunk = 0, bool has_softcap = False, "
    "int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0) -> Tensor",
)


def modules(runtime: Runtime) -> dict[str, ModuleType]:
    """The modules that stand in for what would have been compiled, where the Python code is installed."""
    if importlib.util.find_spec(_INTERFACE) is None:
        return {}
    register(runtime)
    made = {_EXTENSION: ModuleType(_EXTENSION, __doc__)}
    for name, has in _WRITTEN.items():
        if importlib.util.find_spec(name) is None:
            made[name] = ModuleType(name, __doc__)
            vars(made[name]).update(has)
    return made


def register(runtime: Runtime, library: str = LIBRARY) -> None:
    """Define the operators in this library, with ours under them, while the runtime lasts."""
    define(runtime, library, _DEFINED)
    for name, kernel in _KERNELS.items():
        schema = getattr(getattr(torch.ops, library), name).default._schema
        defaults = {one.name: one.default_value for one in schema.arguments}
        runtime.override(schema.name, _by_name(defaults, kernel))


def define(runtime: Runtime, library: str, schemas: Sequence[str]) -> None:
    """Operators of these schemas, while the runtime lasts; what they do is told by `Runtime.override`."""
    defined = runtime.library(library, "FRAGMENT")
    for schema in schemas:
        defined.define(schema)


def _by_name(defaults: Given, kernel: Callable[[Given], object]) -> Callable[..., object]:
    """The kernel, which PyTorch calls without the last arguments where those are the defaults."""
    return lambda *args: kernel({**defaults, **dict(zip(defaults, args, strict=False))})


# ---------------------------------------------------------------------------------------------------------- a call


@dataclass(frozen=True)
class _Mask:
    """Which columns a row sees: `window` to its left and right, -1 for all."""

    causal: bool
    window: tuple[int, int]
    chunk: int = 0

    @property
    def local(self) -> bool:
        return not self.causal and (self.chunk > 0 or max(self.window) >= 0)


@dataclass(frozen=True)
class _Call:
    """What decides the blocks of a call; rows and columns are the longest where lengths vary."""

    batch: int
    rows: int
    columns: int
    groups: int
    """Heads of the query to one of the keys."""
    key_heads: int
    head: int
    head_of_values: int
    width: int
    """Bytes of an element."""
    varies: bool
    mask: _Mask
    softcap: bool
    page: int
    """Rows of a page of keys, 0: they lie in one piece."""
    by_pointer: bool
    """Whether pages cannot be loaded by the tensor memory accelerator."""


def _rounded(head: int, heads: tuple[int, ...] = _HEADS) -> int:
    return next((one for one in heads if head <= one), heads[-1])


def _mask(given: Given, rows: int, columns: int, *, drops: bool = False) -> _Mask:
    """What reaches over all columns is no window; `drops`: a causal mask is none of a single row, which sees all."""
    left, right = int(given["window_size_left"]), int(given["window_size_right"])
    left, right = -1 if left >= columns - 1 else left, -1 if right >= rows - 1 else right
    chunk = int(given.get("attention_chunk", 0))
    if given["is_causal"] and not (drops and rows == 1 and (left, right, chunk) == (-1, -1, 0)):
        right = 0
    return _Mask(left < 0 and right == 0 and not chunk, (left, right), chunk)


def _drops(head: int, *, paged: bool) -> bool:
    """Whether the forward leaves out a mask that hides nothing: not where blocks of pages are better with it."""
    return head <= 64 or head > 128 or not paged


def _varies(given: Given) -> bool:
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k")
    return any(given.get(name) is not None for name in names)


def _longest(given: Given) -> tuple[int, int, int]:
    """How many sequences there are, and the most rows and columns of one."""
    q, k, ends, key_ends = (given[name] for name in ("q", "k", "cu_seqlens_q", "cu_seqlens_k"))
    batch, rows = (len(ends) - 1, int(given["max_seqlen_q"])) if ends is not None else q.shape[:2]
    return batch, rows, int(given["max_seqlen_k"]) if key_ends is not None else k.shape[1]


def _call(given: Given) -> _Call:
    """Of `fwd`."""
    q, k, v, table = (given[name] for name in ("q", "k", "v", "page_table"))
    batch, rows, columns = _longest(given)
    page = 0 if table is None else k.shape[1]
    columns = table.shape[1] * page if page else columns
    head, values = q.shape[-1], v.shape[-1]
    return _Call(
        batch=batch,
        rows=rows,
        columns=columns,
        groups=q.shape[-2] // k.shape[-2],
        key_heads=k.shape[-2],
        head=_rounded(head),
        head_of_values=_rounded(values, _HEADS if values == head else _HEADS_OF_VALUES),
        width=q.element_size(),
        varies=_varies(given),
        mask=_mask(given, rows, columns, drops=_drops(head, paged=page > 0)),
        softcap=given["softcap"] > 0,
        page=page,
        by_pointer=page > 0 and (given["leftpad_k"] is not None or given["k_new"] is not None),
    )


def _block(call: _Call, *, by_pointer: bool) -> tuple[int, int]:
    """Rows and columns of a block on Hopper: `tile_size_fwd_sm90`."""
    head, values, local = call.head, call.head_of_values, call.mask.local
    narrow = call.mask.causal or local or by_pointer
    if call.width == 1:
        softcap = call.softcap and local
        columns = {64: 160, 96: 128, 128: 160 if by_pointer else 192 if softcap else 224}
        columns |= {192: 128 if (by_pointer or call.softcap) and local else 160, 256: 64 if local else 128}
        return (192 if head <= 96 else 128), columns[head]
    if head == 64 and values > 192:
        return (64, 64) if values == 512 else (128, 96)
    columns = {64: 128 if narrow else 192, 96: 128 if local or by_pointer else 144, 128: 128 if narrow else 176}
    columns |= {192: 96 if local or by_pointer else 128 if values <= 128 else 112, 256: 64 if local else 80}
    return (192 if head <= 96 else 128), columns[head]


def _parts(call: _Call, processors: int) -> int:
    """Into how many parts the keys are split where the caller leaves that open: `get_num_splits`."""
    rows_of_block, columns_of_block = _block(call, by_pointer=False)
    rows = call.rows * call.groups
    by_pointer = call.page > 0 and (call.by_pointer or call.page % columns_of_block > 0 or rows <= rows_of_block)
    rows_of_block, columns_of_block = _block(call, by_pointer=by_pointer)
    left, right = (
        all_of - 1 if side < 0 else side
        for side, all_of in zip(call.mask.window, (call.columns, call.rows), strict=True)
    )
    seen = call.columns if not call.mask.local else max(0, min(call.columns, left + right + 1 + rows_of_block))
    blocks = up(rows, rows_of_block)
    of_head = call.columns * (call.head + call.head_of_values) * call.width
    all_blocks = (1 if call.varies else call.batch) * call.key_heads * blocks
    masked = call.mask.causal or call.mask.local
    if of_head > _CACHE and blocks >= 2 * processors and not masked:
        return min(up(of_head, _CACHE), _MOST_PARTS)
    key_blocks = up(seen, columns_of_block)
    return 1 if key_blocks <= _FEW_BLOCKS else flash_splits(all_blocks, processors, key_blocks, _MOST_PARTS, empty=True)


# ------------------------------------------------------------------------------------------------------- operators


def _integers(like: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty(number, dtype=torch.int32, device=like.device)


def _metadata_size(batch: int, mask: _Mask, *, varies: bool, semaphore: bool) -> int:
    """Numbers that tell the kernel's blocks what to do: one, and of varying lengths up to four a sequence."""
    vectors = 2 * varies + (not mask.local) + (mask.causal or mask.local)
    return semaphore + upper(batch, 4) * vectors


def _fwd(given: Given) -> Made:
    q, v, ends = given["q"], given["v"], given["cu_seqlens_q"]
    call = _call(given)
    shape, heads = (*q.shape[:-1], v.shape[-1]), q.shape[-2]
    sums = (heads, q.shape[0]) if ends is not None else (call.batch, heads, call.rows)
    dtype = torch.bfloat16 if call.width == 1 else q.dtype
    out = given["out"] if given["out"] is not None else torch.empty(shape, dtype=dtype, device=q.device)
    lse = single(q, *sums)
    card = torch.cuda.get_device_properties(q.device)
    hopper, parts = card.major >= 9, int(given["num_splits"])
    if parts <= 0:
        parts = _parts(call, card.multi_processor_count - int(given["sm_margin"])) if hopper else 1
    masked = call.mask.causal or (hopper and call.mask.local)
    semaphore = (hopper or parts > 1) if call.varies else masked and (parts == 1 or not hopper)
    metadata = given["scheduler_metadata"]
    if metadata is None and (semaphore or call.varies):
        metadata = _integers(q, _metadata_size(call.batch, call.mask, varies=call.varies, semaphore=semaphore))
    if parts <= 1:
        return out, lse, None, None
    return out, lse, single(q, parts, *sums, shape[-1]), single(q, parts, *sums)


def _bwd_block(head: int, mask: _Mask, major: int, minor: int, *, softcap: bool) -> tuple[int, int]:
    """Rows and columns of a block of the backward: of Hopper, of consumers' cards before it, of A100."""
    if major >= 9:
        few = mask.causal or mask.local or softcap
        rows = {64: 96 if mask.causal and softcap else 128, 128: 64 if few else 80}
        return rows.get(head, 64), 128 if head <= 128 else 96 if head <= 192 else 80
    if (major, minor) in ((8, 6), (8, 9)):
        return (64 if head <= 192 else 32), 128 if head <= 96 else 96 if head <= 128 else 64
    return (128 if head <= 64 else 64), 128 if head <= 128 else 80 if head <= 192 else 64


def _bwd(given: Given) -> Made:
    """The sums by row and those in base 2, fp32 accumulators of dQ and, of grouped heads, of dK and dV."""
    q, k, v, ends, key_ends = (given[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"))
    heads, key_heads = q.shape[-2], k.shape[-2]
    head = _rounded(max(q.shape[-1], v.shape[-1]))
    batch, rows, columns = _longest(given)
    mask = _mask(given, rows, columns)
    card = torch.cuda.get_device_properties(q.device)
    of_rows, of_columns = _bwd_block(head, mask, card.major, card.minor, softcap=given["softcap"] > 0)
    gradients = [torch.empty_like(one) for name, one in (("dq", q), ("dk", k), ("dv", v)) if given[name] is None]
    all_rows = q.shape[0] if ends is not None else batch * rows
    all_columns = k.shape[0] if key_ends is not None else batch * columns
    sums: tuple[int, ...] = (heads, upper(all_rows + batch * of_rows, of_rows))
    keys: tuple[int, ...] = (key_heads, upper(all_columns + batch * of_columns, of_columns))
    if not _varies(given):
        sums, keys = (batch, heads, upper(rows, of_rows)), (batch, key_heads, upper(columns, of_columns))
    by_row, in_base_2 = single(q, *sums), single(q, *sums)
    grouped = heads != key_heads
    dq = single(q, *sums, head)
    dk, dv = (single(q, *keys, head) if grouped else None for _ in range(2))
    semaphores = [_integers(q, up(rows, of_rows) * batch * heads)]
    if grouped and given["deterministic"]:
        semaphores += [_integers(q, up(columns, of_columns) * batch * key_heads) for _ in range(2)]
    del gradients, semaphores
    return by_row, in_base_2, dq, dk, dv


def _combine(given: Given) -> Made:
    parts, lse, out = given["out_partial"], given["lse_partial"], given["out"]
    lacking = -parts.shape[-1] % 4
    padded = torch.nn.functional.pad(parts, [0, lacking]) if lacking else parts
    if out is None or lacking:
        dtype = given["out_dtype"] or parts.dtype
        out = torch.empty(padded.shape[1:], dtype=dtype, device=parts.device)
    batch, rows, heads = lse.shape[1:]
    return out, single(parts, batch, heads, rows).transpose(1, 2)


def _scheduler_metadata(given: Given) -> torch.Tensor:
    rows, columns, head = (int(given[name]) for name in ("max_seqlen_q", "max_seqlen_k", "headdim"))
    mask = _mask(given, rows, columns, drops=_drops(head, paged=given["page_size"] is not None))
    used = given["seqused_k"]
    semaphore = torch.cuda.get_device_properties(used.device).major >= 9 or int(given["num_splits"]) > 1
    return _integers(used, _metadata_size(int(given["batch_size"]), mask, varies=True, semaphore=semaphore))


_KERNELS: Final[Mapping[str, Callable[[Given], object]]] = {
    "fwd": _fwd,
    "bwd": _bwd,
    "fwd_combine": _combine,
    "get_scheduler_metadata": _scheduler_metadata,
}
