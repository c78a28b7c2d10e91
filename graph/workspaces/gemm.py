"""Matrix products: cuBLAS and cuBLASLt workspaces, and copies of operands that cuBLAS can't read.

A handle exists for each (thread, stream); PyTorch gives it a workspace from its own allocator at the first product
there: autograd's thread has one of its own (on an H100: tests/data/gpu).
Sizes and life times by release, checked against recordings of the CUDA builds 2.9.1, 2.11.0, 2.12.1, 2.13.0 and
2.15.0 (aten/src/ATen/cuda/CublasHandlePool.cpp, aten/src/ATen/native/cuda/Blas.cpp):

| release      | cuBLAS                             | cuBLASLt                                            |
| ------------ | ---------------------------------- | --------------------------------------------------- |
| up to 2.8    | stays                              | 1 MiB for the call (by source, not recorded)        |
| 2.9 to 2.11  | stays                              | 1 MiB stays, beside the handle's cuBLAS workspace   |
| 2.12, 2.13   | stays, serves cuBLASLt too         |                                                     |
| from 2.15    | for the call                       | 1 MiB for the call                                  |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from graph.hardware.profile import Profile
from graph.workspaces.metadata import (
    FLOATING,
    argument,
    dtype,
    elements,
    is_conjugated,
    is_contiguous,
    is_dense,
    is_half,
    shape,
    size,
    strides,
    upper,
)
from graph.workspaces.rules import THREADS, Call, Plan, Rule, Step, within

if TYPE_CHECKING:
    import torch

_MIB: Final = 1 << 20
_DEFAULT: Final = (2 * 4096 + 8 * 16) << 10
_HOPPER: Final = 32 * _MIB
_LT: Final = _MIB


def workspace_bytes(profile: Profile) -> int:
    """Bytes of a handle's cuBLAS workspace: 8.125 MiB; 32 MiB on compute capability 9.0, from 2.12 on 10.x and 12.x.

    `getChosenWorkspaceSize`, aten/src/ATen/cuda/CublasHandlePool.cpp.
    """
    if profile.arch == (9, 0) or (profile.arch[0] in (10, 12) and profile.release >= (2, 12)):
        return _HOPPER
    return _DEFAULT


#: Set this key in `Call.state` to the environment of the program, whose settings are read at the first product.
ENVIRONMENT: Final = "environment"
_SETTINGS: Final = "workspace settings"
#: Rows or columns of a group's product that a small tile holds.
_SMALL: Final = 128
#: Bytes of a grouped product's workspace a multiprocessor of Blackwell, with small tiles and with large ones, since.
_ON_BLACKWELL: Final = {(2, 11): (5376, 5888), (2, 10): (6912, 7168), (0, 0): (512, 512)}


class Settings(NamedTuple):
    """Bytes of a handle's cuBLAS workspace (0: it has none) and of cuBLASLt's, and whether that is cuBLAS's."""

    cublas: int
    lt: int
    unified: bool

    @classmethod
    def of(cls, profile: Profile, environment: Mapping[str, str]) -> Settings:
        """As CUBLAS_WORKSPACE_CONFIG (`:KIB:COUNT`, also several), CUBLASLT_WORKSPACE_SIZE (KiB) and
        TORCH_CUBLASLT_UNIFIED_WORKSPACE say; what cannot be read is as if it were not there.

        `parseChosenWorkspaceSize`, `parseCUDABlasLtWorkspaceSize` and `getCUDABlasLtWorkspace`,
        aten/src/ATen/cuda/CublasHandlePool.cpp and CUDABlas.cpp.
        """
        parts = re.findall(":([0-9]+):([0-9]+)", environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
        total = sum(int(size) * int(count) << 10 for size, count in parts)
        lt = re.match(r"\s*([0-9]+)", environment.get("CUBLASLT_WORKSPACE_SIZE", ""))
        unified = {"0": False, "1": True}.get(environment.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", ""))
        return cls(
            total if parts else workspace_bytes(profile),
            int(lt[1]) << 10 if lt else _LT,
            profile.release >= (2, 12) if unified is None else unified,
        )


def _settings(call: Call) -> Settings:
    found = call.state.get(_SETTINGS)
    if found is None:
        found = call.state[_SETTINGS] = Settings.of(call.profile, call.state.get(ENVIRONMENT, {}))
    return found


def _stays(call: Call, kind: str, nbytes: int) -> list[Step]:
    """The workspace of a handle that has none yet: another thread's is there on a GPU alone, for in the recordings all
    threads have one handle."""
    key = (kind, call.thread, call.stream)
    if key in call.state or not nbytes:
        return []
    others = any((kind, thread, call.stream) in call.state for thread in THREADS)
    call.state[key] = nbytes
    return [("keep", key, 0, nbytes)] if others else [("keep", key, nbytes)]


def cublas(call: Call) -> tuple[list[Step], list[Step]]:
    """The steps before and after a kernel that uses a cuBLAS handle."""
    nbytes = _settings(call).cublas
    if call.profile.release >= (2, 15):
        return _taken("cublas", nbytes)
    return _stays(call, "cublas", nbytes), []


def by_cublas(call: Call, scratch: Iterable[tuple[str, int]] = (), kernels: int = 1) -> Plan:
    """So many kernels that use a cuBLAS handle, one after another, and what they are given."""
    return within(scratch, *(step for _ in range(kernels) for steps in cublas(call) for step in steps))


def cublaslt(call: Call) -> tuple[list[Step], list[Step]]:
    """The steps before and after a kernel that uses cuBLASLt, whose handle is the cuBLAS one."""
    release, settings = call.profile.release, _settings(call)
    if release >= (2, 15):
        return _taken("cublaslt", settings.lt)
    handle, _ = cublas(call)
    if settings.unified:
        return handle, []
    if release >= (2, 9):
        return [*handle, *_stays(call, "cublaslt", settings.lt)], []
    before, after = _taken("cublaslt", settings.lt)
    return [*before, *handle], after


def _taken(kind: str, nbytes: int) -> tuple[list[Step], list[Step]]:
    """A workspace for one call."""
    return ([("alloc", kind, nbytes)], [("free", kind)]) if nbytes else ([], [])


def _unreadable(matrix: torch.Tensor, transposed: bool) -> bool:
    """Whether cuBLAS needs a copy of this matrix (`prepare_matrix_for_cublas`); it conjugates what it transposes."""
    if is_conjugated(matrix) and _is_by_rows(matrix) is transposed:
        return True
    if is_dense(matrix):
        return False
    (rows, columns), (down, right) = shape(matrix), strides(matrix)
    return not ((down == 1 and right >= max(1, rows)) or (right == 1 and down >= max(1, columns)))


def _unreadable_batch(matrix: torch.Tensor, leading: int, fast: int, least_rows: int, least_columns: int) -> bool:
    """Whether cuBLAS needs a copy of this batch of matrices (`prepare_batch_matrix_for_cublas`)."""
    step = strides(matrix)
    if step[fast] == 1 and step[leading] >= max(1, least_rows):
        return is_conjugated(matrix)
    if step[leading] == 1 and step[fast] >= max(1, least_columns):
        return False
    whole = is_contiguous(matrix) and step[1] != 0 and step[2] != 0
    return not whole or (fast == 2 and is_conjugated(matrix))


def _product(call: Call, copies: list[tuple[str, int]], lt: bool) -> Plan:
    """Outputs, copies, workspace; what the call made goes in reverse order."""
    before, after = cublaslt(call) if lt else cublas(call)
    return within(copies, *before, *after)


def _matrix_copies(first: torch.Tensor, second: torch.Tensor, transposed: bool) -> list[tuple[str, int]]:
    order = (second, first) if transposed else (first, second)
    return [(f"operand {i}", size(matrix)) for i, matrix in enumerate(order) if _unreadable(matrix, transposed)]


def _is_by_rows(matrix: torch.Tensor) -> bool:
    """Whether a matrix is to cuBLAS, which goes by columns, a transposed one: a result it then writes transposed."""
    if is_dense(matrix):
        return is_contiguous(matrix)
    (rows, _), (down, right) = shape(matrix), strides(matrix)
    return not (down == 1 and right >= max(1, rows))


def mm(call: Call) -> Plan | None:
    """`mm`: badly strided operands are copied, then the cuBLAS workspace (addmm_out_cuda_impl, Blas.cpp)."""
    first, second = call.args[0], call.args[1]
    if elements(first) == 0 or elements(second) == 0:
        return None
    result = call.kwargs.get("out", call.out)
    return _product(call, _matrix_copies(first, second, _is_by_rows(result)), lt=False) or None


def addmm(call: Call) -> Plan | None:
    """`addmm`, `_addmm_activation`: as mm; a bias goes to cuBLASLt's epilogue.

    That is for beta 1, both sizes of the second matrix above 1, a contiguous bias of the result's columns (one
    dimension; two with a single row from 2.10, any two with an activation; in 2.10 not of one row of results) and
    floating point (`isInputCompliesAddmmCudaLt`, Blas.cpp). From 2.15 on a whole matrix of 16 bits is added by cuBLASLt
    too.
    """
    bias, first, second = call.args[0], call.args[1], call.args[2]
    if elements(first) == 0 or elements(second) == 0:
        return None
    result = call.kwargs.get("out", call.out)
    lt = _takes_lt(call, bias, second, result)
    return _product(call, _matrix_copies(first, second, _is_by_rows(result)), lt) or None


def _takes_lt(call: Call, bias: torch.Tensor, second: torch.Tensor, result: torch.Tensor) -> bool:
    release = call.profile.release
    columns = shape(second)[1]
    if call.name.startswith("aten.addmm_."):
        return False
    if release >= (2, 15) and _adds_whole(call, bias, second, result):
        return True
    if call.kwargs.get("beta", 1) != 1 or dtype(second) not in FLOATING:
        return False
    if shape(second)[0] <= 1 or columns <= 1 or not (is_contiguous(bias) and is_contiguous(result)):
        return False
    if release == (2, 10) and shape(result)[0] == 1:
        return False
    form = shape(bias)
    if form == (columns,):
        return True
    if len(form) != 2 or release < (2, 10):
        return False
    return form == (1, columns) or "_addmm_activation" in call.name


def _adds_whole(call: Call, bias: torch.Tensor, second: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether cuBLASLt adds a matrix as large as the result, which is another tensor: both lie by rows."""
    rows, columns = shape(result)
    if bias is result or shape(bias) != (rows, columns) or min(rows, *shape(second)) <= 1 or not is_half(second):
        return False
    by_rows = all(strides(one)[1] == 1 and strides(one)[0] >= columns for one in (bias, result))
    return by_rows and call.kwargs.get("beta", 1) != 0


def bmm(call: Call) -> Plan | None:
    """`bmm`, `baddbmm`: as mm, with the rules for batches (baddbmm_out_cuda_impl, Blas.cpp).

    From 2.13 `bmm` of columns and rows multiplies them without cuBLAS, where it makes its result.
    """
    first, second = (call.args[1], call.args[2]) if "baddbmm" in call.name else (call.args[0], call.args[1])
    result = call.kwargs.get("out", call.out)
    if elements(first) == 0 or elements(second) == 0:
        return None
    outer = call.name == "aten.bmm.default" and shape(first)[2] == 1 and not dtype(first).startswith("complex")
    if outer and call.profile.release >= (2, 13):
        return None
    step, extent = strides(result), shape(result)
    transposed = not (step[1] == 1 and (extent[2] == 1 or step[2] >= max(1, extent[1])))
    fast, leading = (2, 1) if transposed else (1, 2)
    m, n = extent[fast], extent[leading]
    order = (second, first) if transposed else (first, second)
    k = shape(order[0])[leading]
    limits = ((m, k), (k, n))
    copies = [
        (f"operand {i}", size(matrix))
        for i, (matrix, limit) in enumerate(zip(order, limits, strict=True))
        if _unreadable_batch(matrix, leading, fast, *limit)
    ]
    return _product(call, copies, lt=False) or None


def vector(call: Call) -> Plan | None:
    """`dot`, `vdot`: the cuBLAS workspace alone, also for no elements (Blas.cpp)."""
    return _product(call, [], lt=False) or None


def int_mm(call: Call) -> Plan | None:
    """`_int_mm`: cuBLASLt without a workspace; its handle's own is born up to 2.11 (`int8_gemm`, CUDABlas.cpp)."""
    if elements(call.args[0]) == 0:
        return None
    copies = _matrix_copies(call.args[0], call.args[1], _is_by_rows(call.kwargs.get("out", call.out)))
    return within(copies, *(cublas(call)[0] if call.profile.release < (2, 12) else [])) or None


def _vectors(operand: torch.Tensor) -> list[tuple[str, int]]:
    """`mv` copies a matrix that cuBLAS can't read and a vector of stride 0 (`addmv_out_cuda`, Blas.cpp)."""
    if len(shape(operand)) == 2:
        (rows, columns), (down, right) = shape(operand), strides(operand)
        readable = (down == 1 and right >= max(1, rows)) or (right == 1 and down >= max(1, columns))
        return [] if readable else [("matrix", size(operand))]
    return [("vector", size(operand))] if strides(operand) == (0,) else []


def mv(call: Call) -> Plan | None:
    """`mv`, `addmv`: as `vector`, with copies."""
    matrix, other = call.args[-2], call.args[-1]
    if elements(matrix) == 0:
        return None
    return _product(call, [*_vectors(other), *_vectors(matrix)], lt=False) or None


def scaled_mm(call: Call) -> Plan | None:
    """`_scaled_mm`: cuBLASLt (`scaled_gemm`, CUDABlas.cpp).

    With a scale for each row CUTLASS serves, without a workspace, where cuBLASLt cannot: but on 9.0 with CUDA 12.9 or
    newer, which wheels have since 2.11 (Blas.cpp, `_scaled_mm_out_cuda`). Checked on H100 with 2.7 and 2.13, on B200
    with 2.13. On 8.9 CUTLASS has a workspace of some KiB, which is not here.
    """
    scale = argument(call, 2, "scale_a")
    by_rows = elements(scale) > 1 and shape(scale)[1:] == (1,)
    if elements(call.args[0]) == 0 or (by_rows and (call.profile.arch != (9, 0) or call.profile.release < (2, 11))):
        return None
    return _product(call, [], lt=True) or None


def grouped_mm(call: Call) -> Plan | None:
    """`_grouped_mm`: bf16 on 9.0 and 10.x by CUTLASS, with its arguments by group and a workspace by multiprocessor.

    Elsewhere a loop of products, batched if both operands are (aten/src/ATen/native/cuda/GroupedBlas.cpp, GroupMM.cu).
    Checked on H100 with 2.9 to 2.15 and on B200 with 2.9 to 2.15, where small products have tiles of their own.
    """
    first, second = call.args[0], call.args[1]
    profile = call.profile
    if dtype(first) == "bfloat16" and (profile.arch == (9, 0) or profile.arch[0] == 10):
        offsets = argument(call, 2, "offs")
        groups = elements(offsets) if offsets is not None else shape(first)[0]
        arguments = 3 * upper(8 * groups, 16) + 36 * groups
        if profile.arch[0] == 10:
            tiles = next(tiles for since, tiles in _ON_BLACKWELL.items() if profile.release >= since)
            block = tiles[not _small(first, second, groups)]
        else:
            block = 512 if profile.release >= (2, 11) else 640
        return within([("arguments", arguments), ("cutlass", block * profile.sm_count)])
    if len(shape(first)) == 3 and len(shape(second)) == 3:
        return _product(call, [], lt=False) or None
    return None


def _small(first: torch.Tensor, second: torch.Tensor, groups: int) -> bool:
    """Whether the products of groups that share the rows, or the columns, have few of either."""
    rows, columns = shape(first)[-2], shape(second)[-1]
    if len(shape(first)) < len(shape(second)):
        rows //= max(groups, 1)
    if len(shape(second)) < len(shape(first)):
        columns //= max(groups, 1)
    return rows <= _SMALL or columns <= _SMALL


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("aten.mm.default", "aten.mm.out", "aten.mm.dtype", "aten.mm.dtype_out"), mm),
    **dict.fromkeys(
        (
            "aten.addmm.default",
            "aten.addmm.out",
            "aten.addmm_.default",
            "aten.addmm.dtype",
            "aten.addmm.dtype_out",
            "aten._addmm_activation.default",
            "aten._addmm_activation.out",
        ),
        addmm,
    ),
    **dict.fromkeys(
        (
            "aten.bmm.default",
            "aten.bmm.out",
            "aten.bmm.dtype",
            "aten.baddbmm.default",
            "aten.baddbmm.out",
            "aten.baddbmm_.default",
            "aten.baddbmm.dtype",
            "aten.baddbmm.dtype_out",
        ),
        bmm,
    ),
    **dict.fromkeys(("aten.mv.default", "aten.addmv.default", "aten.addmv_.default"), mv),
    **dict.fromkeys(("aten.dot.default", "aten.vdot.default"), vector),
    **dict.fromkeys(("aten._scaled_mm.default", "aten._scaled_mm.out"), scaled_mm),
    "aten._grouped_mm.default": grouped_mm,
    **dict.fromkeys(("aten._int_mm.default", "aten._int_mm.out"), int_mm),
}
