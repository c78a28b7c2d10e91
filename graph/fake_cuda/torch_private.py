"""The private names of PyTorch that captures need, in one place, each with what it is for.

A release without one of them is told in one line (UnsupportedTorch) when this module is imported, or where a name of a
package that is loaded late is first asked for. Elsewhere only `graph.fake_cuda.device` (guards and hooks in C++) and
`graph.fake_cuda.leftovers` (caches) name what is private.
"""

from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch.distributed import distributed_c10d

from graph.errors import UnsupportedTorch
from traces.release import version_of

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.distributed.tensor._op_schema import OpSchema

__all__ = [
    "BINDINGS",
    "BY_CPU_KERNEL",
    "BY_CPU_KERNEL_OF",
    "CHECKED",
    "DEVICE_TYPES",
    "JITTED",
    "MODE_KEYS",
    "NVTX",
    "OBJECT_OF_BYTES",
    "OPERATOR_CALLS",
    "RAW_STREAM",
    "RUN_BACKWARD",
    "STATES_BROADCAST",
    "SYMMETRIC_MEMORY",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "FileReader",
    "FileWriter",
    "Operator",
    "ShardedCall",
    "StorageBase",
    "TorchDispatchMode",
    "UnsupportedOperatorException",
    "alert_not_deterministic",
    "compile_with",
    "compiling",
    "cuda_utils",
    "cudnn_rnn",
    "current_device",
    "current_node",
    "fake_backend",
    "fake_store",
    "fake_tensor",
    "finished_work",
    "flatten_dense",
    "from_dlpack",
    "functional_collectives",
    "graph_task",
    "group_named",
    "grouped_mm_output",
    "has_kernel",
    "has_triton_package",
    "interpreted_groups",
    "is_dense",
    "is_excluded",
    "mark_zero",
    "next_sequence_number",
    "of_two_devices",
    "operator_names",
    "schemas",
    "sdpa_order",
    "set_device",
    "set_excluded",
    "softmax_backward",
    "symmetric_memory",
    "takes_numbers",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "typed_future",
    "unflatten_dense",
    "with_plain_parameters",
    "without_modes",
    "zero_all",
]

#: One overload of an operator, such as `aten.add.Tensor`; kernels and observers read its private `_schema`.
Operator: TypeAlias = "OpOverload[..., Any]"
#: A call whose shardings DTensor propagates: an operator and what is known of its arguments.
ShardedCall: TypeAlias = "OpSchema"


#: PyTorch's compiler, which the first optimizer imports, and a recording before all.
DYNAMO: Final = "torch._dynamo"
#: What errors say of releases that there are others.
CHECKED: Final = "captures were checked with PyTorch 2.6 to 2.15"


@contextlib.contextmanager
def _needed() -> Iterator[None]:
    """UnsupportedTorch where a name is gone."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise UnsupportedTorch(
            f"PyTorch {torch.__version__} lacks what captures need: {str(error).partition(' (/')[0]}; {CHECKED}"
        ) from error


if version_of(torch.__version__) < (2, 6):
    raise UnsupportedTorch(f"PyTorch {torch.__version__} is too old: {CHECKED}")

with _needed():
    # In this order: a typed future of what a function gives at once; a work of c10d that is done; shapes of results,
    # as PyTorch's own rules say; parameters as one flat tensor and back; a mode that sees every operator; nested
    # arguments and outputs, flat and back; whether Triton is installed.
    from torch._C import fork as typed_future
    from torch._C._distributed_c10d import _create_work_from_future as finished_work  # type: ignore[attr-defined]
    from torch._C._dynamo.eval_frame import get_eval_frame_callback as _callback
    from torch._C._dynamo.eval_frame import set_eval_frame as compile_with
    from torch._prims_common import alert_not_deterministic
    from torch._subclasses import fake_tensor
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedOperatorException,
    )
    from torch.cuda import _utils as cuda_utils
    from torch.cuda import jiterator
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as without_modes
    from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten
    from torch.utils._triton import has_triton_package

    #: What PyTorch has in C++: some of its functions are replaced, by name.
    BINDINGS: Final[ModuleType] = torch._C
    #: Reader and writer of the files of `torch.save`, and the class of all storages.
    FileReader = torch._C.PyTorchFileReader
    FileWriter = torch._C.PyTorchFileWriter
    StorageBase = torch._C.StorageBase
    #: Where the Python lies that stands between a call of an operator and its kernel: a module, and a folder.
    OPERATOR_CALLS: Final = (torch._ops.__file__, os.path.join(os.path.dirname(torch.__file__), "_library"))
    #: A recurrent network by cuDNN.
    cudnn_rnn: Operator = torch.ops.aten._cudnn_rnn.default
    #: The node that autograd runs on this thread, None outside of backward; and the number that the next node gets.
    current_node: Callable[[], Any] = torch._C._current_autograd_node
    next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
    #: The number of the backward that runs on this thread, -1 outside of one.
    graph_task: Callable[[], int] = torch._C._current_graph_task_id
    #: The GPU that is current on this thread, by number; and to make another one current.
    current_device: Callable[[], int] = torch._C._accelerator_getDeviceIndex
    set_device: Callable[[int], None] = torch._C._accelerator_setDeviceIndex
    #: A tensor of a DLPack capsule, which is taken over.
    from_dlpack: Callable[[Any], torch.Tensor] = torch._C._from_dlpack
    #: To call the CPU's kernel of an operator whatever its operands are.
    BY_CPU_KERNEL: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    BY_CPU_KERNEL_OF: Final = {
        layout: torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"{layout}CPU"))
        for layout in ("Sparse", "SparseCsr", "NestedTensor")
    }
    #: Whether an operator (`aten::_nnz`) has a kernel for a dispatch key.
    has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
    #: Keys by which modes see operators; whether one is excluded on this thread, and to say so.
    MODE_KEYS: Final = (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot)
    is_excluded: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
    set_excluded: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_excluded
    #: Whether Python may call an operator of this name with numbers in place of tensors.
    takes_numbers: Callable[[str], bool] = torch._C._should_allow_numbers_as_tensors
    #: Numbers of the kernels of scaled_dot_product_attention, in the order in which they are tried.
    sdpa_order: Callable[[], list[int]] = torch._C._get_sdp_priority_order
    #: The names of all operators, with their overloads, and the schemas of the overloads of one (`aten::add`).
    operator_names: Callable[[], list[str]] = torch._C._dispatch_get_all_op_names
    schemas: Callable[[str], list[torch.FunctionSchema]] = torch._C._jit_get_schemas_for_operator
    #: The derivative of softmax, from (gradient, result, dimension, dtype of the input).
    softmax_backward: Callable[[torch.Tensor, torch.Tensor, int, torch.dtype], torch.Tensor]
    softmax_backward = torch._softmax_backward_data
    #: A function that `torch.cuda.jiterator` made of CUDA source.
    JITTED: Final[type[Any]] = jiterator._JittedFunction
    #: Tensors of one dtype behind one another, and as views of what was made of them.
    flatten_dense: Callable[[list[torch.Tensor]], torch.Tensor] = torch._utils._flatten_dense_tensors
    unflatten_dense: Callable[[torch.Tensor, list[torch.Tensor]], list[torch.Tensor]]
    unflatten_dense = torch._utils._unflatten_dense_tensors
    #: Sets all tensors of a list to zero.
    zero_all: Callable[[list[torch.Tensor]], None] = torch._foreach_zero_

_hold = ctypes.pythonapi.Py_IncRef
_hold.argtypes, _hold.restype = (ctypes.py_object,), None


def _held_callback() -> object:
    """PyTorch 2.6 and 2.7 give a reference away that they never took (`get_eval_frame_callback_py`,
    torch/csrc/dynamo/eval_frame.c), mostly to None, of which Python up to 3.11 has a number that runs out."""
    callback = _callback()
    _hold(callback)
    return callback


#: What compiles the frames that Python enters on this thread, None outside of compiled code.
compiling: Callable[[], Any] = _callback if version_of(torch.__version__) >= (2, 8) else _held_callback

_prims: Any = torch._prims_common
#: Whether a tensor's elements fill its storage from first to last; up to 2.9 it has a shorter name.
is_dense: Callable[[torch.Tensor], bool]
is_dense = getattr(_prims, "is_non_overlapping_and_dense_or_false", None) or _prims.is_non_overlapping_and_dense


def of_two_devices(error: Exception) -> bool:
    """Whether a fake operator failed because of the devices of its operands (up to 2.11 it has no class of its own)."""
    return re.search("found (two different|at least two) devices", str(error)) is not None


#: Where CUDA builds have the function that gives the number of the current stream, and its name; others lack it.
RAW_STREAM: Final[tuple[ModuleType, str]] = (BINDINGS, "_cuda_getCurrentRawStream")
#: Where autograd's Python side has the function that runs its engine, and its name (torch.compiler replaces both too).
RUN_BACKWARD: Final[tuple[tuple[ModuleType, str], ...]] = (
    (torch.autograd.graph, "_engine_run_backward"),
    (torch.autograd, "_engine_run_backward"),
)
#: Where `torch.cuda.nvtx` has what it calls in C++, and its name; builds for the CPU have something that fails.
NVTX: Final[tuple[ModuleType, str]] = (torch.cuda.nvtx, "_nvtx")

#: The address of what C++ has of a generator.
generator_address: Callable[[torch.Generator], int] = operator.attrgetter("_cdata")

#: Where torch.distributed has the class of memory that ranks of a host share, and its name.
SYMMETRIC_MEMORY: Final[tuple[ModuleType, str]] = (BINDINGS._distributed_c10d, "_SymmetricMemory")
#: The process group of a name.
group_named: Callable[[str], Any] = operator.attrgetter("_resolve_process_group")(distributed_c10d)
#: What a group tells of the devices that its backends serve: where barriers, messages and checkpoints go.
DEVICE_TYPES: Final = "_device_types"
#: Where torch.distributed makes an object of the bytes that a collective has brought, and its name.
OBJECT_OF_BYTES: Final[tuple[ModuleType, str]] = (distributed_c10d, "_tensor_to_object")
#: Where ZeroRedundancyOptimizer broadcasts a rank's states, as bytes that `torch.save` makes, and the function's name.
STATES_BROADCAST: Final = ("torch.distributed.optim.zero_redundancy_optimizer", "_broadcast_object")


@contextlib.contextmanager
def interpreted_groups() -> Iterator[None]:
    """Inside, groups that TorchScript fuses run operator by operator: a fused kernel allocates past the dispatcher.

    What a group gives is the same; what it makes in between is there for a moment. The older fuser, which programs ask
    for by name (ChatGLM's), is not turned on: it compiles for the driver that is not there.
    """
    bindings: Any = BINDINGS
    with _needed():
        allowed, allow = bindings._jit_texpr_fallback_allowed, bindings._jit_texpr_set_fallback_allowed
        fuses, fuse = bindings._jit_can_fuse_on_gpu, bindings._jit_override_can_fuse_on_gpu
    before = allowed(), fuses()
    allow(True)
    fuse(False)
    bindings._jit_override_can_fuse_on_gpu = lambda wanted: None
    try:
        yield
    finally:
        bindings._jit_override_can_fuse_on_gpu = fuse
        allow(before[0])
        fuse(before[1])


def mark_zero(tensor: torch.Tensor) -> None:
    """`tensor` is one of zeros that have no memory, as `_efficientzerotensor` makes them: a key says so."""
    place = tensor._cdata + 8 * _place_of_keys()
    ctypes.c_uint64.from_address(place).value |= torch._C.DispatchKeySet(torch._C.DispatchKey.ZeroTensor).raw_repr()


@cache
def _place_of_keys() -> int:
    """Which word of a TensorImpl (c10/core/TensorImpl.h) has its dispatch keys: that which has them of these three."""
    found = set(range(_WORDS))
    for tensor in (torch.empty(1), torch.empty(1, device="meta"), torch._efficientzerotensor((1,))):
        words = (ctypes.c_uint64 * _WORDS).from_address(tensor._cdata)
        keys = torch._C._dispatch_keys(tensor).raw_repr()
        found &= {place for place, word in enumerate(words) if word == keys}
    if len(found) != 1:
        raise UnsupportedTorch(f"PyTorch {torch.__version__} does not keep a tensor's keys where it did; {CHECKED}")
    return found.pop()


#: Words of a TensorImpl that are looked at.
_WORDS: Final = 24


def fake_store() -> Any:
    """A store for a process group of the backend `fake`, which never meets others."""
    with _needed():
        from torch.testing._internal.distributed.fake_pg import FakeStore
    return FakeStore()


def fake_backend() -> Any:
    """The class of the backend `fake`."""
    with _needed():
        from torch.testing._internal.distributed import fake_pg
    return vars(fake_pg)["FakeProcessGroup"]


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """PyTorch's own `_c10d_functional::wait_tensor`, which is the same for each device, where another is put before."""
    host = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    waited: torch.Tensor = torch.ops._c10d_functional.wait_tensor.default.redispatch(host, tensor)
    return waited


def grouped_mm_output() -> Callable[..., torch.Tensor]:
    """What makes the result of `_grouped_mm`, from 2.8 on: operands, offsets of groups and dtype."""
    with _needed():
        from torch._meta_registrations import _create_grouped_mm_output_tensor
    return _create_grouped_mm_output_tensor


def symmetric_memory() -> tuple[ModuleType, dict[str, Any], dict[str, Any]]:
    """What uses memory that ranks of a host share; and the stores and workspaces of the groups that do, by name."""
    with _needed():
        from torch.distributed import _symmetric_memory as module

        return module, module._group_name_to_store, module._group_name_to_workspace_tensor


def functional_collectives() -> ModuleType:
    """Collectives that give their result as a new tensor, such as DTensor asks for."""
    with _needed():
        from torch.distributed import _functional_collectives
    return _functional_collectives


def fsdp_states() -> ModuleType:
    """How FSDP1 saves states of optimizers; only jobs need it."""
    with _needed():
        from torch.distributed.fsdp import _optim_utils
    return _optim_utils


def with_plain_parameters(module: torch.nn.Module) -> None:
    """Have a module of distributed tensors look to DistributedDataParallel like one of plain parameters."""
    with _needed():
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
    _pre_dp_module_transform(module)
