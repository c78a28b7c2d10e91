"""NVIDIA's management library, which comes with the driver: pynvml's Python code runs, and this is what it calls.

The device's name, its number of bytes and how many are free are those of the GPU that is not there; what is measured
(load, power, temperature, clocks) is 0, and no process is listed. So `torch.cuda.utilization()`, `power_draw()` and
`device_memory_used()` answer, where pynvml is installed. Functions as in nvml.h of the NVML API reference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Protocol

from graph.host.imports import Change

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime

#: `NVML_SUCCESS` and `NVML_ERROR_INVALID_ARGUMENT`.
_DONE: Final = 0
_INVALID: Final = 2
#: A driver for CUDA 13.0, and that number as NVML has it.
DRIVER: Final = "580.65.06"
CUDA: Final = 13000
#: The handle of GPU 0: others follow.
_FIRST: Final = 1


class Reference(Protocol):
    """`ctypes.byref` of what a function writes."""

    _obj: Any


class Text(Protocol):
    """`ctypes.create_string_buffer`."""

    value: bytes


class Library:
    """What pynvml takes for the library: a function of C for each name, which writes where its arguments point."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Callable[..., int]:
        answer = _ANSWERS.get(name.partition("_")[0])
        return _done if answer is None else lambda *args: _DONE if answer(self._runtime, *args) is None else _INVALID


def changes(runtime: Runtime) -> dict[str, Change]:
    """What is done to pynvml when it is imported, as nvidia-ml-py has it and as the older package of that name has."""

    def ready(module: ModuleType) -> Callable[[], None] | None:
        known = "_nvmlGetFunctionPointer_cache"
        pointers: dict[str, object] | None = vars(module).get(known)  # of a real library, else of this one
        if pointers is None:  # the older package's outer module, or what torch has where there is none
            return None
        pointers.clear()
        vars(module)["nvmlLib"] = Library(runtime)
        return pointers.clear

    return dict.fromkeys(("pynvml", "pynvml.nvml"), ready)


def _done(*args: object) -> int:
    return _DONE


def _count(runtime: Runtime, count: Reference) -> None:
    count._obj.value = runtime.count


def _handle(runtime: Runtime, index: ctypes.c_uint | int, handle: Reference) -> int | None:
    number = index if isinstance(index, int) else index.value
    if not 0 <= number < runtime.count:
        return _INVALID
    ctypes.c_uint64.from_address(ctypes.addressof(handle._obj)).value = _FIRST + number
    return None


def _name(runtime: Runtime, handle: object, text: Text, length: object) -> None:
    text.value = runtime.profile.product.encode()


def _uuid(runtime: Runtime, handle: ctypes.c_void_p, text: Text, length: object) -> None:
    text.value = uuid(_number(handle)).encode()


def uuid(index: int) -> str:
    """The name of a GPU that no other one has."""
    return f"GPU-00000000-0000-0000-0000-{index:012}"


def _capability(runtime: Runtime, handle: object, major: Reference, minor: Reference) -> None:
    major._obj.value, minor._obj.value = runtime.profile.arch


def _memory(runtime: Runtime, handle: ctypes.c_void_p, memory: Reference) -> None:
    free, total = free_and_all(runtime, _number(handle))
    memory._obj.total, memory._obj.free, memory._obj.used = total, free, total - free


def _number(handle: ctypes.c_void_p) -> int:
    return (ctypes.cast(handle, ctypes.c_void_p).value or 0) - _FIRST


def free_and_all(runtime: Runtime, index: int) -> tuple[int, int]:
    """Free bytes of the GPU of this number, and all: what another rank has is not known, and counts as this one's."""
    total = runtime.profile.total_bytes
    if not runtime.allocators or not runtime.memory.born:  # PyTorch has not looked at its settings yet
        return total - runtime.allocated(), total
    return runtime.allocators[index if runtime.several else 0].memory_info()


def _driver(runtime: Runtime, text: Text, length: object) -> None:
    text.value = DRIVER.encode()


def _cuda(runtime: Runtime, version: Reference) -> None:
    version._obj.value = CUDA


#: What functions do that answer something, by their names without version.
_ANSWERS: Final[dict[str, Callable[..., int | None]]] = {
    "nvmlDeviceGetCount": _count,
    "nvmlDeviceGetHandleByIndex": _handle,
    "nvmlDeviceGetName": _name,
    "nvmlDeviceGetUUID": _uuid,
    "nvmlDeviceGetCudaComputeCapability": _capability,
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlSystemGetDriverVersion": _driver,
    "nvmlSystemGetCudaDriverVersion": _cuda,
}
