"""Plain CUDA tensors without memory: a tensor whose storage has a made-up address, and a word when that storage dies.

Tensors are made through DLPack, the public C protocol for tensors: any build of PyTorch takes a capsule that says "so
many bytes on CUDA device 0, at this address", and calls the capsule's deleter at the moment the last reference to the
storage goes. Nothing ever reads the address. It says which storage it is: storage `i` begins at `i << ADDRESS_BITS`.

The deleter is numpy's own, for arrays that it lends: it takes the interpreter's lock, frees the record and drops one
reference to a Python object (numpy/_core/src/multiarray/dlpack.c). That object is ours, and its end is the storage's.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np
import torch
from torch import empty  # not what a program puts in its place

from graph.fake_cuda.torch_private import BY_CPU_KERNEL, current_device, from_dlpack, mark_zero
from traces.forks import locking

#: A storage has this much of the address space to itself (256 GiB); larger ones take several slots.
ADDRESS_BITS: Final = 38

#: PyTorch's allocator takes no more than 1 EB, and sizes have 63 bits.
_EXA_BITS: Final = 60
_SIZE_BITS: Final = 63

_KDL_CUDA: Final = 2
_CAPSULE: Final = b"dltensor"

#: DLPack's type code and bits of each dtype.
_DLPACK: Final[dict[torch.dtype, tuple[int, int]]] = {
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.uint16: (1, 16),
    torch.uint32: (1, 32),
    torch.uint64: (1, 64),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
    torch.complex32: (5, 32),
    torch.complex64: (5, 64),
    torch.complex128: (5, 128),
    torch.bool: (6, 8),
}


class _Record(ctypes.Structure):
    """DLManagedTensor of DLPack (dlpack.h): a tensor, and who deletes it."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("owner", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_RECORD_BYTES: Final = ctypes.sizeof(_Record)


def _numpy_deleter() -> int:
    """The address of numpy's deleter, taken from an array that it lends."""
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    lent = np.zeros(1).__dlpack__()
    deleter = _Record.from_address(address(lent, _CAPSULE)).deleter
    assert isinstance(deleter, int)
    return deleter


_DELETER: Final = _numpy_deleter()
_take = ctypes.pythonapi.PyMem_Malloc
_take.restype, _take.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_keep = ctypes.pythonapi.Py_IncRef
_keep.restype, _keep.argtypes = None, [ctypes.py_object]
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_copy = ctypes.memmove


class Layout:
    """Shape, strides (in elements), dtype and bytes of storage of tensors to be made; made once, used often."""

    __slots__ = ("_address", "_record", "_sizes", "_view", "dtype", "nbytes", "offset", "shape", "strides")

    def __init__(
        self,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        nbytes: int | None = None,
        offset: int = 0,
    ) -> None:
        self.shape = tuple(shape)
        self.strides = tuple(strides)
        self.dtype = dtype
        self.offset = offset
        dense = storage_bytes(self.shape, self.strides, dtype.itemsize)
        self.nbytes = dense if nbytes is None else nbytes
        # A storage that is larger than its tensor, or of a dtype that DLPack lacks, is made as bytes and viewed.
        self._view = self.nbytes != dense or offset != 0 or dtype not in _DLPACK
        size, stride = ((self.nbytes,), (1,)) if self._view else (self.shape, self.strides)
        self._sizes = (ctypes.c_int64 * (2 * len(size) + 1))(*size, *stride)
        code, bits = _DLPACK[torch.uint8 if self._view else dtype]
        start = ctypes.addressof(self._sizes)
        self._record = _Record(
            0, _KDL_CUDA, 0, len(size), code, bits, 1, start, start + 8 * len(size), 0, None, _DELETER
        )
        self._address = ctypes.addressof(self._record)


def storage_bytes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes that a storage needs for such a tensor (at::detail::computeStorageNbytes)."""
    last = 1
    for size, stride in zip(shape, strides, strict=True):
        if size == 0:
            return 0
        last += (size - 1) * stride
    return last * itemsize


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of this shape."""
    strides = list(itertools.accumulate((max(1, size) for size in reversed(shape[1:])), lambda a, b: a * b, initial=1))
    return tuple(reversed(strides)) if shape else ()


def empty_layout(shape: tuple[int, ...], dtype: torch.dtype, memory_format: torch.memory_format | None) -> Layout:
    """How a tensor lies that `torch.empty` makes."""
    if memory_format is None or memory_format is torch.contiguous_format:
        return Layout(shape, contiguous(shape), dtype)
    strides = empty(shape, dtype=dtype, device="meta", memory_format=memory_format).stride()
    return Layout(shape, strides, dtype)


class _Life:
    """Lives as long as one storage."""

    __slots__ = ("memory", "number")

    def __init__(self, memory: Memory, number: int) -> None:
        self.memory = memory
        self.number = number

    def __del__(self) -> None:
        memory = self.memory
        del memory.live[self.number]
        memory.values.pop(self.number, None)
        memory.freed(self.number)


class Memory:
    """Where storages are born and die: numbers them from 1 in order of birth and tells `freed` of each death.

    `freed` is called with the storage's number, on whichever thread dropped the last reference; it must be quick and
    must not raise. A storage of 0 bytes has no number, as the CUDA allocator does nothing for it.
    """

    def __init__(self) -> None:
        self.index: int | None = 0  # of the GPU; None: of that which is current on the thread
        self.freed: Callable[[int], None] = ignore
        self.live: dict[int, int] = {}
        self.values: dict[int, torch.UntypedStorage] = {}  # what storages hold, of those that have values
        self.again_bytes: dict[int, int] = {}  # of storages that were made again, and of those that are elsewhere
        self._next = 1
        self.lock: AbstractContextManager[Any]
        locking(self)

    @property
    def born(self) -> int:
        """A number that grows with every storage that is born; 0 before the first."""
        return self._next - 1

    def restart(self) -> None:
        """Number from 1 again."""
        assert not self.live
        self.again_bytes.clear()
        self._next = 1

    def again(self, number: int, size: int) -> torch.Tensor:
        """A tensor of bytes with a storage where storage `number` was, whose death is told as that of the first."""
        layout = Layout((size,), (1,), torch.uint8)
        with self.lock:
            self.again_bytes[number] = size
            place = self._placed(layout, number, _Again(self, number))
        return from_dlpack(_capsule(place, _CAPSULE, None))

    def new(self, layout: Layout, born: list[int]) -> torch.Tensor:
        """A tensor of `layout` on the device, with a storage of its own, whose number is appended to `born`."""
        with self.lock:  # threads of a program: the number, and the layout's record, are one's own meanwhile
            nbytes = layout.nbytes
            if nbytes:
                if nbytes >> _EXA_BITS:
                    raise _too_much(layout)
                number = self._next
                self._next = number + 1 + (nbytes >> ADDRESS_BITS)
                self.live[number] = nbytes
                born.append(number)
                place = self._placed(layout, number, _Life(self, number))
            else:
                place = self._placed(layout, 0, None)
        return _made(place, layout)

    def elsewhere(self, layout: Layout) -> torch.Tensor:
        """A tensor whose memory is not the allocator's: nobody is told of its life."""
        with self.lock:
            number = self._next
            self._next = number + 1 + (layout.nbytes >> ADDRESS_BITS)
            self.again_bytes[number] = layout.nbytes
            place = self._placed(layout, number, None)
        return _made(place, layout)

    def zeros(self, layout: Layout) -> torch.Tensor:
        """A tensor of zeros, which take no memory: it has a size, and a null address (`ZeroTensorAllocator`)."""
        with self.lock:
            place = self._placed(layout, 0, None)
        tensor = _made(place, layout)
        mark_zero(tensor)
        return tensor

    def _placed(self, layout: Layout, number: int, life: object) -> int:
        """Where the record of a tensor of `layout` is, whose storage has this number; `life` goes with it."""
        record = layout._record
        record.data = number << ADDRESS_BITS
        record.owner = None if life is None else id(life)
        record.device_id = current_device() if self.index is None else self.index
        if life is not None:
            _keep(life)
        place: int = _take(_RECORD_BYTES)
        _copy(place, layout._address, _RECORD_BYTES)
        return place


class _Again:
    """Lives as long as a storage that was made again."""

    __slots__ = ("memory", "number")

    def __init__(self, memory: Memory, number: int) -> None:
        self.memory = memory
        self.number = number

    def __del__(self) -> None:
        self.memory.freed(self.number)


def _too_much(layout: Layout) -> RuntimeError:
    """What PyTorch raises (aten/src/ATen/EmptyTensor.cpp, c10/cuda/CUDACachingAllocator.cpp)."""
    if layout.nbytes >> _SIZE_BITS:
        return RuntimeError(f"Storage size calculation overflowed with sizes={list(layout.shape)}")
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than 1EB memory.")


def ignore(storage: int) -> None:
    """Nobody wants to know."""


_as_strided = torch.ops.aten.as_strided.default.redispatch
_set = torch.ops.aten.set_.source_Storage_storage_offset.redispatch


def _made(place: int, layout: Layout) -> torch.Tensor:
    """The tensor of `layout` whose record is at `place`."""
    tensor = from_dlpack(_capsule(place, _CAPSULE, None))
    return _viewed(tensor, layout) if layout._view else tensor


def _viewed(storage: torch.Tensor, layout: Layout) -> torch.Tensor:
    """`storage`, a tensor of bytes, seen as `layout` says. PyTorch's own kernels copy the tensor's dispatch keys."""
    tensor = storage
    if layout.dtype is not torch.uint8:
        whole = storage.numel() // layout.dtype.itemsize * layout.dtype.itemsize
        tensor = torch.ops.aten.view.dtype(_as_strided(BY_CPU_KERNEL, storage, (whole,), (1,), 0), layout.dtype)
    view: torch.Tensor = _as_strided(BY_CPU_KERNEL, tensor, layout.shape, layout.strides, layout.offset)
    return view


def set_storage(
    tensor: torch.Tensor,
    source: torch.UntypedStorage,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int = 0,
) -> None:
    """Give `tensor` the storage `source`, with this shape, these strides and this offset (in elements)."""
    _set(BY_CPU_KERNEL, tensor, source, offset, shape, strides)
