"""The guard that releases without a compiled FakeGuardImpl get: devices and streams of threads. And what older releases
count wrong."""

from __future__ import annotations

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from graph.fake_cuda import guard
from graph.fake_cuda.device import _virtual, fake_cuda
from graph.hardware.profile import profile

PLACES = _virtual((Path("c10") / "core" / "impl" / "DeviceGuardImplInterface.h",))
CUDA = 1


class Stream(ctypes.Structure):
    """c10::Stream: its device (type and index, a byte each), then its number."""

    _fields_ = [("type", ctypes.c_int8), ("index", ctypes.c_int8), ("id", ctypes.c_int64)]


@pytest.fixture(scope="module")
def table() -> Any:
    return guard.functions(PLACES)


def called(table: Any, name: str, result: Any, *arguments: Any) -> Any:
    """What a virtual function answers, called as C++ does: with its object first."""
    kinds = [type(argument) for argument in arguments]
    return ctypes.CFUNCTYPE(result, ctypes.c_void_p, *kinds)(table[PLACES[name]])(None, *arguments)


def device(index: int) -> ctypes.c_uint16:
    return ctypes.c_uint16(CUDA | index << 8)


def test_each_thread_has_a_current_device(table: Any) -> None:
    def exchanged(index: int) -> tuple[int, int]:
        before = called(table, "exchangeDevice", ctypes.c_uint16, device(index))
        return before, called(table, "getDevice", ctypes.c_uint16)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(exchanged, 3).result() == (device(0).value, device(3).value)
        assert called(table, "getDevice", ctypes.c_uint16) == device(0).value
        assert thread.submit(exchanged, 5).result() == (device(3).value, device(5).value)
    called(table, "setDevice", None, device(2))
    assert called(table, "getDevice", ctypes.c_uint16) == device(2).value
    called(table, "uncheckedSetDevice", None, device(0))
    assert called(table, "getDevice", ctypes.c_uint16) == device(0).value


def test_each_thread_has_a_current_stream(table: Any) -> None:
    def exchanged(number: int, index: int = 4) -> tuple[Any, ...]:
        before = called(table, "exchangeStream", Stream, Stream(CUDA, index, number))
        now = called(table, "getStream", Stream, device(index))
        return before.id, now.type, now.index, now.id

    far = 1 << 40  # numbers of streams are pointers and counts beside flags: 64 bits
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(exchanged, far).result() == (0, CUDA, 4, far)
        assert called(table, "getStream", Stream, device(4)).id == 0
        assert thread.submit(exchanged, 5, 0).result() == (0, CUDA, 0, 5)  # each device has its own
        assert thread.submit(exchanged, 7).result() == (far, CUDA, 4, 7)
        assert thread.submit(exchanged, 6, 0).result() == (5, CUDA, 0, 6)
        assert thread.submit(called, table, "getDefaultStream", Stream, device(4)).result().id == 0


def test_what_else_is_asked(table: Any) -> None:
    assert called(table, "type", ctypes.c_int8) == CUDA
    assert called(table, "deviceCount", ctypes.c_int8) == 8
    assert called(table, "queryEvent", ctypes.c_bool, ctypes.c_void_p(None))
    assert called(table, "elapsedTime", ctypes.c_double) == 0.0
    called(table, "synchronizeDevice", None, ctypes.c_int8(0))


def test_a_kernel_leaves_as_many_references_to_none() -> None:
    """PyTorch 2.6 and 2.7 took one each time; Python up to 3.11 ends where there are no more."""
    with fake_cuda(profile("A100-80GB", torch.__version__)):
        ones = torch.ones(2, device="cuda")
        before = sys.getrefcount(None)
        for _ in range(1000):
            ones.add_(1)
        assert abs(sys.getrefcount(None) - before) < 100
