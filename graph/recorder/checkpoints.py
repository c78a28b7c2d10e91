"""What a program saves of large tensors is counted, not written: files have their size, and holes where numbers were.

A file that was there before the program is left as it is: it may be a checkpoint of a real run.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from typing import IO, Any, Final
from unittest import mock

import torch
from torch.serialization import skip_data

from graph.fake_cuda.torch_private import BINDINGS, FileWriter

#: Floating-point storages of as many bytes are holes.
LARGE: Final = 1 << 20


_made: Final[set[str]] = set()


def may_write(path: object) -> bool:
    """Whether a file is the program's own: it is not there yet, or was made in this process."""
    place = os.path.realpath(str(path))
    if os.path.lexists(place) and place not in _made:
        return False
    _made.add(place)
    return True


class Saving:
    """`torch.save` in place of PyTorch's, which is `plain`; `values` says what is known of a tensor on the device.
    `saved` are the bytes of storages so far."""

    def __init__(self, plain: Callable[..., Any], values: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self.plain = plain
        self.saved = 0
        self.writer = type("Writer", (_Writer,), {"values": staticmethod(values), "count": staticmethod(self._count)})

    def _count(self, size: int) -> None:
        self.saved += size

    def __call__(self, obj: object, f: object, *args: object, **kwargs: object) -> None:
        """Save, but for the bytes of storages, and not over a file that the program has not made itself.

        PyTorch's old format, in which `pickle` has storages, has no holes.
        """
        if not kwargs.get("_use_new_zipfile_serialization", (*args[2:], True)[0]):
            self.plain(obj, os.devnull if isinstance(f, str | os.PathLike) and not may_write(f) else f, *args, **kwargs)
            return
        with skip_data(), mock.patch.object(BINDINGS, "PyTorchFileWriter", self.writer):
            if isinstance(f, str | os.PathLike):
                self.plain(obj, f if may_write(f) else os.devnull, *args, **kwargs)
                return
            with tempfile.NamedTemporaryFile() as file:
                self.plain(obj, file.name, *args, **kwargs)
                _copy(file, f)


class _Writer(FileWriter):
    """PyTorch's writer, to be used under `skip_data`: small storages, and integers, are written all the same."""

    values: Callable[[torch.Tensor], torch.Tensor | None]
    count: Callable[[int], None]

    def write_record_metadata(self, name: str, size: int) -> None:
        """Called for each storage; which one is known to the caller (`_save` of torch.serialization)."""
        caller = sys._getframe(1).f_locals
        storage: torch.UntypedStorage = caller["storage"]
        self.count(size)
        dtype = caller["storage_dtypes"].get(storage.data_ptr())
        real = size < LARGE or not (dtype is None or dtype.is_floating_point)
        known = self.values(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)) if real else None
        if known is not None:
            self.write_record(name, known.untyped_storage(), size)  # type: ignore[arg-type]
        else:
            super().write_record_metadata(name, size)  # type: ignore[misc]


def _copy(file: Any, to: Any) -> None:
    """Write a file with holes to a stream, which gets holes too where it can be told to go on elsewhere."""
    stream: IO[bytes] = to if _seeks(to) or not _seeks(getattr(to, "raw", None)) else to.raw
    number, place, end = file.fileno(), 0, os.fstat(file.fileno()).st_size
    while place < end:
        begin = os.lseek(number, place, os.SEEK_DATA)
        if _seeks(stream):
            stream.seek(begin - place, os.SEEK_CUR)
        else:
            stream.write(bytes(begin - place))
        place = min(os.lseek(number, begin, os.SEEK_HOLE), end)
        stream.write(os.pread(number, place - begin, begin))


def _seeks(stream: object) -> bool:
    return bool(getattr(stream, "seekable", bool)())
