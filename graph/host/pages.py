"""Pages of the host's memory: which of a tensor were ever touched, and zeros that take none.

Memory of the CPU's allocator is private and anonymous, so that Linux forgets a page that is given back, and has zeros
there when it is touched again (madvise(2), MADV_DONTNEED). Elsewhere nothing is given back and all counts as touched.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

_SIZE: Final = mmap.PAGESIZE
_DONTNEED: Final = 4
#: Bytes of a page's entry in /proc/self/pagemap.
_ENTRY: Final = 8
#: Runs of touched pages that are copied one by one.
_MOST_RUNS: Final = 1 << 12


@functools.cache
def _system() -> ctypes.CDLL | None:
    """The C library, where it is Linux'."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library


def _is_private(tensor: torch.Tensor) -> bool:
    """Whether the CPU's allocator made its memory: what is shared, a file's or numpy's cannot be resized."""
    return tensor.untyped_storage().resizable() and not tensor.is_shared() and _system() is not None  # type: ignore[no-untyped-call]


def emptied(tensor: torch.Tensor) -> bool:
    """Have a tensor be zeros without touching them; False where that cannot be, and nothing is done."""
    system = _system()
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    if system is None or not _is_private(tensor) or not tensor.permute(order).is_contiguous():
        return False
    start = tensor.data_ptr()
    end = start + tensor.nbytes
    first, last = -(-start // _SIZE) * _SIZE, end // _SIZE * _SIZE
    if first >= last or system.madvise(first, last - first, _DONTNEED):
        return False
    ctypes.memset(start, 0, first - start)
    ctypes.memset(last, 0, end - last)
    return True


def _touched(start: int, size: int) -> list[tuple[int, int]] | None:
    """Where memory from an address on was touched: runs of pages, from and to which byte; None where nobody knows.

    Bits 62 and 63 of a page's entry: it is in swap, or in memory (Documentation/admin-guide/mm/pagemap.rst).
    """
    first, last = start // _SIZE, -(-(start + size) // _SIZE)
    try:
        with open("/proc/self/pagemap", "rb") as file:
            file.seek(first * _ENTRY)
            entries = np.frombuffer(file.read((last - first) * _ENTRY), np.uint64)
    except OSError:
        return None
    if len(entries) < last - first:
        return None
    there = (entries >> np.uint64(62) != 0).astype(np.int8)
    edges = np.flatnonzero(np.diff(there, prepend=0, append=0)) * _SIZE - start % _SIZE
    return [(begin, end) for begin, end in edges.clip(0, size).reshape(-1, 2).tolist()]


def is_written(tensor: torch.Tensor) -> bool:
    """Whether its memory is other than zeros, or may be."""
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    runs = _touched(start, storage.nbytes()) if _is_private(tensor) else None
    return runs is None or any(_bytes(start + begin, end - begin).any() for begin, end in runs)


def _bytes(start: int, size: int) -> NDArray[np.uint8]:
    return np.frombuffer(memoryview((ctypes.c_ubyte * size).from_address(start)), np.uint8)


def copied(target: torch.Tensor, source: torch.Tensor, copy: Callable[[torch.Tensor, torch.Tensor], object]) -> bool:
    """Have `target` be what `source` is, by a copy of the parts that were touched; False where nothing is done."""
    alike = target.shape == source.shape and target.is_contiguous() and source.is_contiguous()
    if not alike or not _is_private(source):
        return False
    runs, each = _touched(source.data_ptr(), source.nbytes), source.element_size()
    if runs is None or len(runs) > _MOST_RUNS or not emptied(target):
        return False
    to, of = target.view(-1), source.view(-1)
    for begin, end in runs:
        part = slice(begin // each, -(-end // each))
        copy(to[part], of[part])
    return True
