"""The guard of CUDA devices that releases before 2.10 lack: devices and streams of threads, and no more.

From 2.10 on PyTorch compiles c10::impl::FakeGuardImpl for CUDA, for fake tensors where there is no GPU. This is the
same, function by function, for releases that have only its header (c10/core/impl/FakeGuardImpl.h): numba's LLVM
compiles it, since autograd's threads ask it without the interpreter's lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Final

#: A c10::Device is type and index, a byte each; a c10::Stream the device and, in the next word, its number. A thread
#: has its device's index under a key of its own, and the number of its stream on each device.
_CODE: Final = """
@streams = constant [8 x i32] [STREAMS]
declare i64 @pthread_getspecific(i32)
declare i32 @pthread_setspecific(i32, i64)
define i64 @none() { ret i64 0 }
define i8 @one() { ret i8 1 }
define i8 @deviceCount() { ret i8 8 }
define double @elapsedTime() { ret double 0.0 }
define i16 @getDevice(i64 %self) {
  %index = call i64 @pthread_getspecific(i32 DEVICE)
  %short = trunc i64 %index to i16
  %high = shl i16 %short, 8
  %device = or i16 %high, 1
  ret i16 %device
}
define void @setDevice(i64 %self, i16 %device) {
  %short = lshr i16 %device, 8
  %index = zext i16 %short to i64
  %ignored = call i32 @pthread_setspecific(i32 DEVICE, i64 %index)
  ret void
}
define i16 @exchangeDevice(i64 %self, i16 %device) {
  %before = call i16 @getDevice(i64 %self)
  call void @setDevice(i64 %self, i16 %device)
  ret i16 %before
}
define {i64, i64} @getDefaultStream(i64 %self, i16 %device) {
  %word = zext i16 %device to i64
  %stream = insertvalue {i64, i64} {i64 0, i64 0}, i64 %word, 0
  ret {i64, i64} %stream
}
define i32 @stream(i64 %device) {
  %high = lshr i64 %device, 8
  %index = and i64 %high, 7
  %place = getelementptr [8 x i32], [8 x i32]* @streams, i64 0, i64 %index
  %key = load i32, i32* %place
  ret i32 %key
}
define {i64, i64} @getStream(i64 %self, i16 %device) {
  %word = zext i16 %device to i64
  %key = call i32 @stream(i64 %word)
  %number = call i64 @pthread_getspecific(i32 %key)
  %default = call {i64, i64} @getDefaultStream(i64 %self, i16 %device)
  %stream = insertvalue {i64, i64} %default, i64 %number, 1
  ret {i64, i64} %stream
}
define {i64, i64} @exchangeStream(i64 %self, i64 %device, i64 %number) {
  %short = trunc i64 %device to i16
  %before = call {i64, i64} @getStream(i64 %self, i16 %short)
  %key = call i32 @stream(i64 %device)
  %ignored = call i32 @pthread_setspecific(i32 %key, i64 %number)
  ret {i64, i64} %before
}
"""
_COMPILED: Final = ("deviceCount", "elapsedTime", "getDevice", "setDevice", "exchangeDevice", "getDefaultStream")
_FUNCTIONS: Final[Mapping[str, str]] = {
    **{name: name for name in (*_COMPILED, "getStream", "exchangeStream")},
    "uncheckedSetDevice": "setDevice",
    **dict.fromkeys(("getStreamFromGlobalPool", "getNewStream"), "getDefaultStream"),
    **dict.fromkeys(("type", "queryEvent", "queryStream"), "one"),
}
_engine: list[Any] = []
_DEVICES: Final = 8


def _key() -> int:
    """A key under which every thread has a word of its own."""
    key = ctypes.c_uint()
    ctypes.CDLL(None).pthread_key_create(ctypes.byref(key), None)
    return key.value


def functions(names: Mapping[str, int]) -> Any:
    """The addresses of the guard's virtual functions, at the places that `names` says; others do nothing."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    streams = ", ".join(f"i32 {_key()}" for _ in range(_DEVICES))
    code = _CODE.replace("STREAMS", streams).replace("DEVICE", str(_key()))
    engine = llvm.create_mcjit_compiler(
        llvm.parse_assembly(code), llvm.Target.from_default_triple().create_target_machine()
    )
    engine.finalize_object()
    _engine.append(engine)  # its code lives as long as the process
    none = engine.get_function_address("none")
    table = (ctypes.c_void_p * (len(names) + 2))(*[none] * (len(names) + 2))  # the destructor has two places at the end
    for name, place in names.items():
        table[place] = engine.get_function_address(_FUNCTIONS.get(name, "none"))
    return table
