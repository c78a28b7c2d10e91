"""pynvml in recorded programs: it calls a library that comes with NVIDIA's driver, which is not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.places import ROOT
from tests.simulator.recording.test_record import folder_of, record
from tests.support import warm

#: As nvidia-ml-py 13 and the pynvml before it call the library, of which they keep pointers to functions.
CALLS = """
from ctypes import CDLL, POINTER, Structure, byref, c_int, c_uint, c_ulonglong, create_string_buffer

nvmlLib, _nvmlGetFunctionPointer_cache = None, {}

class NVMLError(Exception):
    pass

class NVMLError_DriverNotLoaded(NVMLError):
    pass

class Device(Structure):
    pass

class Memory(Structure):
    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]

class Rates(Structure):
    _fields_ = [("gpu", c_uint), ("memory", c_uint)]

def call(name, *args):
    if name not in _nvmlGetFunctionPointer_cache:
        _nvmlGetFunctionPointer_cache[name] = getattr(nvmlLib, name)
    if code := _nvmlGetFunctionPointer_cache[name](*args):
        raise NVMLError(code)

def nvmlInit():
    global nvmlLib
    if nvmlLib is None:
        nvmlLib = CDLL("libnvidia-ml.so.1")
    call("nvmlInitWithFlags", 0)

def nvmlDeviceGetHandleByIndex(index):
    device = POINTER(Device)()
    call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(device))
    return device

def given(kind, name, *args):
    found = kind()
    call(name, *args, byref(found))
    return found

def nvmlDeviceGetCount():
    return given(c_uint, "nvmlDeviceGetCount_v2").value

def nvmlDeviceGetMemoryInfo(handle):
    return given(Memory, "nvmlDeviceGetMemoryInfo", handle)

def nvmlDeviceGetUtilizationRates(handle):
    return given(Rates, "nvmlDeviceGetUtilizationRates", handle)

def nvmlDeviceGetPowerUsage(handle):
    return given(c_uint, "nvmlDeviceGetPowerUsage", handle).value

def nvmlDeviceGetName(handle):
    name = create_string_buffer(96)
    call("nvmlDeviceGetName", handle, name, c_uint(96))
    return name.value.decode()

def nvmlDeviceGetCudaComputeCapability(handle):
    major, minor = c_int(), c_int()
    call("nvmlDeviceGetCudaComputeCapability", handle, byref(major), byref(minor))
    return major.value, minor.value

def nvmlDeviceGetComputeRunningProcesses(handle):
    count = given(c_uint, "nvmlDeviceGetComputeRunningProcesses_v3", handle)
    return [None] * count.value
"""

PROGRAM = """
import torch

held = torch.empty(1 << 20, device="cuda")
print(torch.cuda.utilization(), torch.cuda.power_draw(), torch.cuda.device_memory_used())

from pynvml import *

nvmlInit()
handle = nvmlDeviceGetHandleByIndex(0)
memory = nvmlDeviceGetMemoryInfo(handle)
print(nvmlDeviceGetName(handle) == torch.cuda.get_device_name(), nvmlDeviceGetCudaComputeCapability(handle))
print((memory.free, memory.total) == torch.cuda.mem_get_info(), memory.total - memory.free - memory.used)
print(nvmlDeviceGetCount(), nvmlDeviceGetComputeRunningProcesses(handle))
try:
    nvmlDeviceGetHandleByIndex(1)
except NVMLError as error:
    print(error)
"""


@pytest.mark.parametrize("place", ["pynvml.py", "pynvml/nvml.py"])
def test_what_the_driver_says_of_a_gpu_is_known(place: str, tmp_path: Path) -> None:
    """4 MiB are in a segment of 20, as allocations below 10 MiB are; an index that no GPU has is error 2 of NVML."""
    files = {"train.py": PROGRAM, f"packages/{place}": CALLS}
    if place != "pynvml.py":
        files["packages/pynvml/__init__.py"] = "from .nvml import *\n"
    packages = os.pathsep.join((str(ROOT), str(tmp_path / "packages")))
    done = record(folder_of(tmp_path, files), "--gpu", "A10", "train.py", run=warm.cold, PYTHONPATH=packages)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"0 0 {20 << 20}", "True (8, 6)", "True 0", "1 []", "2"]
