"""What the fused attention kernels take from the allocator besides their outputs, in order.

The steps are read from flash_attn/flash_api.cpp, attention.cu and attention_backward.cu (all in PyTorch,
aten/src/ATen/native/transformers/cuda), mem_eff_attention/kernel_backward.h and kernels/cutlassB.h, and
native/cudnn/MHA.cpp with cuDNN's front end. They were compared, event by event, with what the allocator saw when the
wheels of 2.9.1, 2.10.0, 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0 ran these operators; tests/data/attention.json holds
a sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from graph.hardware.profile import Profile
from graph.workspaces.metadata import argument, in_order, is_contiguous, size, up, upper, width
from graph.workspaces.rules import ENFORCED, REST, Call, Plan, Rule, Step, within

if TYPE_CHECKING:
    import torch

_LARGE_SHARED_MEMORY: Final = 160 << 10  # A100 and the data centre cards after it


def _contiguous_by_token(tensor: torch.Tensor) -> bool:
    """Whether a tensor of (batch, heads, tokens, head) is contiguous as (batch, tokens, heads, head)."""
    b, h, s, d = tensor.shape
    sb, sh, ss, sd = tensor.stride()
    return in_order((b, s, h, d), (sb, ss, sh, sd))


class _Steps:
    """Collects steps; no allocation is made for 0 bytes."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.live: set[str] = set()

    def alloc(self, key: str, nbytes: int) -> None:
        if nbytes > 0:
            self.steps.append(("alloc", key, nbytes))
            self.live.add(key)

    def free(self, *keys: str) -> None:
        for key in keys:
            if key in self.live:
                self.live.remove(key)
                self.steps.append(("free", key))

    def out(self, *outputs: int) -> None:
        self.steps += [("out", i) for i in outputs]

    def plan(self) -> Plan:
        return (*self.steps, ("rest",))


# ---------------------------------------------------------------------------------------------------------- flash


def flash_splits(blocks: int, processors: int, key_blocks: int, most: int = 128, *, empty: bool = False) -> int:
    """How many parts the keys are split into: `num_splits_heuristic` of flash_api.cpp, in its single precision.

    The smallest number of parts within 85 % of the best filling of the processors, each part a whole number of key
    blocks; 1 if the row blocks alone fill 80 % of them. `empty`: also parts of which the last have no keys.
    """
    if np.float32(blocks) >= np.float32(0.8) * np.float32(processors):
        return 1
    most = min(most, processors, key_blocks)
    filling: dict[int, np.float32] = {}
    for splits in range(1, most + 1):
        if not empty and splits > 1 and up(key_blocks, splits) == up(key_blocks, splits - 1):
            continue
        waves = np.float32(blocks * splits) / np.float32(processors)
        filling[splits] = waves / np.ceil(waves)
    if not filling:
        return 1
    enough = 0.85 * float(max(filling.values()))
    return next(splits for splits, value in filling.items() if float(value) >= enough)


def flash_parts(batch: int, heads: int, rows: int, columns: int, head: int, processors: int, at_once: int = 2) -> int:
    """Into how many parts a call's keys are split (`set_params_splitkv`): blocks of 64 rows, so many at once on each
    of the processors."""
    block = 256 if head <= 64 else 128 if head <= 128 else 64
    return flash_splits(batch * heads * up(rows, 64), at_once * processors, up(columns, block))


def flash_rows(rows: int, heads: int, key_heads: int) -> tuple[int, int]:
    """Rows and heads as flash attention without dropout counts them: one row of grouped heads is a row a group."""
    return (heads // key_heads, key_heads) if rows == 1 and heads > key_heads else (rows, heads)


def _flash_head(head: int, profile: Profile) -> int:
    """A head dimension as flash attention's accumulators hold it: to 32, from 2.11 on above 128 to 64."""
    return upper(head, 32 if head <= 128 or profile.release < (2, 11) else 64)


def flash_forward(call: Call) -> Plan | None:
    """aten::_scaled_dot_product_flash_attention (`mha_fwd`) of tensors (batch, heads, rows, head)."""
    query, key = (tuple(tensor.shape) for tensor in call.args[:2])
    return _flash_forward(call, query, key, float(argument(call, 3, "dropout_p", 0.0)))


def flash_by_token_forward(call: Call) -> Plan | None:
    """aten::_flash_attention_forward of tensors (batch, rows, heads, head): the same. Keys of packed ones
    (`mha_varlen_fwd`) are not split."""
    dropout = float(argument(call, 7, "dropout_p", 0.0))
    if argument(call, 3, "cum_seq_q", None) is not None:
        steps = _Steps()
        steps.out(0, 1)
        _random_state(steps, call, dropout)
        return steps.plan()
    if len(call.args[0].shape) != 4:
        return None
    query, key = ((b, h, s, d) for b, s, h, d in (tensor.shape for tensor in call.args[:2]))
    return _flash_forward(call, query, key, dropout)


def _flash_forward(call: Call, query: tuple[int, ...], key: tuple[int, ...], dropout: float) -> Plan | None:
    """Output, logsumexp, split keys, random state.

    Keys are split, without dropout, where the row blocks of 64 fill few processors (twice their number is counted):
    accumulators are fp32 (splits, batch, heads, rows) and (splits, batch, heads, rows, head). A single query row of
    grouped heads counts as one row a group of the key's heads.
    """
    batch, heads, rows, head = query
    key_heads, columns = key[1], key[2]
    if batch == 0:
        return None
    steps = _Steps()
    steps.out(0, 1)
    if dropout == 0.0:
        rows, heads = flash_rows(rows, heads, key_heads)
        splits = flash_parts(batch, heads, rows, columns, head, call.profile.sm_count)
        if splits > 1:
            lines = splits * batch * heads * rows
            steps.alloc("lse_accum", lines * 4)
            steps.alloc("out_accum", lines * _flash_head(head, call.profile) * 4)
    _random_state(steps, call, dropout)
    steps.free("lse_accum", "out_accum")
    return steps.plan()


def _random_state(steps: _Steps, call: Call, dropout: float) -> None:
    """The random state, which dropout makes twice; up to 2.6 there is none on the device."""
    if call.profile.release < (2, 7):
        return
    if dropout == 0.0:
        steps.out(2, 3)
    else:
        steps.alloc("first_rng_state", 16)
        steps.out(3, 2)
        steps.free("first_rng_state")


def flash_backward(call: Call) -> Plan | None:
    """aten::_scaled_dot_product_flash_attention_backward (`mha_bwd`): copies, row sums, dQ in fp32, gradients by head.

    The output and its gradient are copied if not contiguous by token. Row sums are fp32 (batch, heads, rows to 128),
    dQ's accumulator fp32 (batch, rows to 128, heads, head to 32, above 128 to 64). Grouped heads get dK and dV by head
    of the query first. Where the order of sums is to be the same each time, there is an accumulator for each part into
    which the keys are then split.
    """
    (batch, heads, rows, _), (_, key_heads, columns, _) = call.args[1].shape, call.args[2].shape
    of = heads, key_heads
    return _flash_backward(call, _contiguous_by_token, of, batch, batch * upper(rows, 128), batch * columns)


def flash_by_token_backward(call: Call) -> Plan | None:
    """aten::_flash_attention_backward: the same of tensors (batch, rows, heads, head).

    Of packed sequences (`mha_varlen_bwd`; varlen_attn and nested tensors) tensors are (tokens, heads, head), and rows
    are 128 more than tokens for each sequence (numbers of `cum_seq_q` less one).
    """
    query, key, starts = call.args[1], call.args[2], argument(call, 6, "cum_seq_q", None)
    of = query.shape[-2], key.shape[-2]
    if starts is not None and len(query.shape) == 3:
        sequences = starts.shape[0] - 1
        return _flash_backward(call, is_contiguous, of, sequences, query.shape[0] + 128 * sequences, key.shape[0])
    if starts is not None or len(query.shape) != 4:
        return None
    batch, rows = query.shape[:2]
    return _flash_backward(call, is_contiguous, of, batch, batch * upper(rows, 128), batch * key.shape[1])


def _flash_backward(
    call: Call,
    contiguous: Callable[[torch.Tensor], bool],
    of: tuple[int, int],
    sequences: int,
    rows: int,
    key_rows: int,
) -> Plan:
    """The backward of so many sequences, of all of which are the rows; `of` so many heads and heads of the keys."""
    grad_out, query, out = call.args[0], call.args[1], call.args[4]
    (heads, key_heads), head = of, query.shape[-1]
    steps = _Steps()
    for name, tensor in (("grad_out", grad_out), ("out", out)):
        if not contiguous(tensor):
            steps.alloc(name, size(tensor))
    steps.out(0, 1, 2)
    steps.alloc("softmax_d", heads * rows * 4)
    splits = up(call.profile.sm_count, sequences * heads) if call.deterministic == ENFORCED else 1
    steps.alloc("dq_accum", splits * rows * heads * _flash_head(head, call.profile) * 4)
    if key_heads != heads:
        expanded = key_rows * heads * head * width(query)
        steps.alloc("dk_expanded", expanded)
        steps.alloc("dv_expanded", expanded)
    steps.free("dv_expanded", "dk_expanded", "dq_accum", "softmax_d", "out", "grad_out")
    return steps.plan()


# ------------------------------------------------------------------------------------------------------ efficient


def efficient_forward(call: Call) -> Plan | None:
    """aten::_scaled_dot_product_efficient_attention: output, logsumexp, and an fp32 output for half precision.

    The accumulator is there where a head dimension is above 128 (`kNeedsOutputAccumulatorBuffer`). Seed and offset are
    on the host; where a CUDA graph is captured, and from 2.14 on without dropout, they come first on the device.
    """
    query, value = call.args[0], call.args[2]
    logsumexp = bool(argument(call, 4, "compute_log_sumexp", False))
    batch, heads, rows, head = query.shape
    return _efficient_forward(call, batch * rows * heads, (head, value.shape[3]), logsumexp)


def efficient_by_token_forward(call: Call) -> Plan | None:
    """aten::_efficient_attention_forward of tensors (batch, rows, heads, head) or packed sequences (1, tokens, heads,
    head): the same."""
    query, value = call.args[0], call.args[2]
    logsumexp = bool(argument(call, 10, "compute_log_sumexp", False))
    return _efficient_forward(call, math.prod(query.shape[:3]), (query.shape[3], value.shape[3]), logsumexp)


def _efficient_forward(call: Call, rows: int, heads: tuple[int, int], logsumexp: bool) -> Plan:
    """The forward of so many rows in all heads; `heads` are the dimensions of a key's and a value's head."""
    steps = _Steps()
    if isinstance(call.out, tuple) and call.out[2].device.type == "cuda":
        steps.out(*((2, 3) if logsumexp else (1, 2)))  # without a logsumexp they are the second and the third
    steps.out(0)
    if logsumexp:
        steps.out(1)
    if width(call.args[0]) == 2 and max(heads) > 128:
        steps.alloc("out_accum", rows * heads[1] * 4)
    steps.free("out_accum")
    return steps.plan()


def efficient_blocks(profile: Profile, half: bool, head: int, dropout: bool) -> tuple[int, int, bool]:
    """(rows, columns) of the backward kernel's block, and whether dK and dV are accumulated in memory.

    The first kernel of kernels/cutlassB.h that holds `head` (the larger of key's and value's), applies dropout if
    asked, and fits the card's shared memory; found on every architecture by the sizes that the allocator saw.
    """
    large = profile.shared_memory_per_block >= _LARGE_SHARED_MEMORY
    if head <= 64:
        return 64, 64, False
    if not half:
        return (128 if large else 64), 64, False
    if head > 128:
        return 128, 64, True
    if profile.arch < (8, 0):
        return 128, 64, False
    if large:
        return 128, 128, False
    if head <= 96 and not dropout and profile.arch in ((8, 6), (8, 9)):
        return 128, 64, False
    return 64, 64, True


def efficient_backward_workspace(
    profile: Profile, shape: tuple[int, int, int, int], columns: int, value_head: int, half: bool, dropout: bool
) -> int:
    """Bytes of the backward kernel's workspace (`Params::workspace_size`); `shape` is the query's."""
    batch, heads, rows, head = shape
    block_i, block_j, accumulates = efficient_blocks(profile, half, max(head, value_head), dropout)
    elements = up(rows, block_i) * up(head, block_j) * (4 + block_i * block_j)
    if accumulates:
        splits = max(1, min(up(columns, block_j), 200 // (batch * heads)))
        elements += splits * block_j * (upper(head, block_i) + upper(value_head, block_i))
    return batch * heads * upper(elements, 4) * 4


def efficient_backward(call: Call) -> Plan | None:
    """aten::_scaled_dot_product_efficient_attention_backward: delta and the kernel's workspace.

    Delta, the row sums of gradient times output, is made by PyTorch for fp32 (and, on V100, for large heads): products
    in fp32, their sum by token, and its copy by head; else by the kernel. Grouped heads (from 2.14 on) get dK and dV by
    head of the query first.
    """
    grad_out, query, key, value, bias, out = call.args[:6]
    dropout = float(argument(call, 9, "dropout_p", 0.0)) != 0.0
    batch, heads, rows, head = query.shape
    value_head = value.shape[3]
    half = width(query) == 2
    steps = _Steps()
    if not _contiguous_by_token(grad_out):
        steps.alloc("grad_out", size(grad_out))
    steps.out(0, 1, 2)
    if key.shape[1] != heads:
        for name, tensor in (("dk_expanded", key), ("dv_expanded", value)):
            steps.alloc(name, size(tensor) // key.shape[1] * heads)
    if bias is not None and bool(argument(call, 10, "grad_input_mask")[3]):
        steps.out(3)
    _delta(steps, call, out, of=(heads, rows, max(head, value_head)), sums=batch * heads * rows * 4, dropout=dropout)
    extents = (batch, heads, rows, head)
    steps.alloc(
        "workspace",
        efficient_backward_workspace(call.profile, extents, key.shape[2], value_head, half, dropout),
    )
    steps.free("delta", "workspace", "dv_expanded", "dk_expanded", "grad_out")
    return steps.plan()


def efficient_by_token_backward(call: Call) -> Plan | None:
    """aten::_efficient_attention_backward of tensors (batch, rows, heads, head); of packed sequences (1, tokens, ...)
    each has a workspace as the longest."""
    gradient, query, key, value, bias, out, starts = call.args[:7]
    dropout = float(argument(call, 11, "dropout_p", 0.0)) != 0.0
    batch, rows, heads, head = query.shape
    value_head = value.shape[3]
    copied = ["grad_out"] * (not is_contiguous(gradient))
    steps = _Steps()
    for name in copied:
        steps.alloc(name, size(gradient))
    steps.out(0, 1, 2)
    if bias is not None and bool(argument(call, 15, "bias_requires_grad")):
        steps.out(3)
    _delta(steps, call, out, of=(heads, rows, max(head, value_head)), sums=batch * heads * rows * 4, dropout=dropout)
    sequences, longest, columns = batch, rows, key.shape[1]
    if starts is not None:
        sequences, longest, columns = len(starts) - 1, int(call.args[8]), int(call.args[9])
    extents = (sequences, heads, longest, head)
    workspace = efficient_backward_workspace(call.profile, extents, columns, value_head, width(query) == 2, dropout)
    steps.alloc("workspace", workspace)
    steps.free("delta", "workspace", *copied)
    return steps.plan()


def _delta(steps: _Steps, call: Call, out: torch.Tensor, *, of: tuple[int, int, int], sums: int, dropout: bool) -> None:
    """`delta` by the kernel, or (grad_out.to(float) * out.to(float)).sum(-1).transpose(-2, -1).contiguous().

    `of`: heads, rows, and the larger dimension of a head; `sums` bytes are what there is then.
    """
    heads, rows, head = of
    half, arch = width(out) == 2, call.profile.arch
    volta = arch[0] == 7 and arch[1] < 5
    if half and not (volta and efficient_blocks(call.profile, half, head, dropout)[2]):
        steps.alloc("delta", sums)
        return
    copied = rows > 1 and heads > 1
    products = math.prod(out.shape) * 4
    if half:
        steps.alloc("out_float", products)
        steps.alloc("grad_float", products)
    steps.alloc("products", products)
    steps.alloc("sums" if copied else "delta", sums)
    if copied:
        steps.alloc("delta", sums)
    steps.free("sums", "products", "grad_float", "out_float")


# ---------------------------------------------------------------------------------------------------------- cuDNN


#: Bytes that a plan of cuDNN's attention asks for.
_CUDNN_PLAN: Final = 256


def cudnn_forward(call: Call) -> Plan | None:
    """aten::_scaled_dot_product_cudnn_attention: seed and offset on the card first, then output and logsumexp; on a GPU
    a workspace of cuDNN's for more than one row.
    """
    outputs = (2, 3, 0, 1) if bool(argument(call, 4, "compute_log_sumexp", False)) else (1, 2, 0)
    plan = within([("workspace", 0, _CUDNN_PLAN)] if call.args[0].shape[2] > 1 else [])
    return (*(("out", i) for i in outputs), REST, *plan)


def cudnn_backward(call: Call) -> Plan | None:
    """aten::_scaled_dot_product_cudnn_attention_backward: the front end's row sums and dQ in fp32, as one workspace.

    In 2.9 with rows, in 2.10 with columns that do not fill blocks of 128 also two lengths (int32) a sequence.
    A gradient whose elements of a head do not follow one another is copied (`permute_to_matching_layout`).
    On a GPU the workspace also has what cuDNN's own plan asks for: with grouped heads dK and dV by head of the query
    (cuDNN 9.19 on an H100: tests/data/gpu).
    """
    grad_out, query = call.args[:2]
    batch, heads, rows, head = query.shape
    release = call.profile.release
    padded = 0 if release > (2, 10) else call.args[2].shape[2] if release == (2, 10) else rows
    lengths = 8 * batch if padded % 128 else 0
    taken: list[tuple[str, int] | tuple[str, int, int]] = []
    if grad_out.stride()[-1] != 1:
        taken.append(("grad_out", size(grad_out)))
    known = batch * heads * rows * (4 + head * 4) + lengths
    key = call.args[2]
    by_head = 2 * size(key) // key.shape[1] * heads if key.shape[1] != heads else 0
    taken.append(("workspace", known, known + by_head + _CUDNN_PLAN))
    return (("out", 0), ("out", 1), ("out", 2), *within(taken), REST)


RULES: Final[Mapping[str, Rule]] = {
    "aten._scaled_dot_product_flash_attention.default": flash_forward,
    "aten._scaled_dot_product_flash_attention_backward.default": flash_backward,
    "aten._flash_attention_forward.default": flash_by_token_forward,
    "aten._flash_attention_backward.default": flash_by_token_backward,
    "aten._scaled_dot_product_efficient_attention.default": efficient_forward,
    "aten._scaled_dot_product_efficient_attention_backward.default": efficient_backward,
    "aten._efficient_attention_forward.default": efficient_by_token_forward,
    "aten._efficient_attention_backward.default": efficient_by_token_backward,
    "aten._scaled_dot_product_cudnn_attention.default": cudnn_forward,
    "aten._scaled_dot_product_cudnn_attention_backward.default": cudnn_backward,
}
