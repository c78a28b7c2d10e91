"""Compiling kernels with numba: one decorator, and a cache that works where the package itself is read-only.

Machine code is kept under `$NUMBA_CACHE_DIR` where that is set, else under the user's cache directory, in a folder
named after a digest of all kernel sources: numba notices a change of the file a kernel stands in, but not of the
files it calls into.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import numba
from numba.core import config as _config
from numba.core import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

config: Any = _config  # its options are set at run time
Function = TypeVar("Function", bound=Callable[..., Any])

_ROOT: Final = Path(__file__).resolve().parent.parent
#: Every module that holds kernels; the cache is keyed by their contents.
KERNEL_SOURCES: Final = (
    "traces/_lifecycle.py",
    "simulator/allocator/layout.py",
    "simulator/allocator/freelist.py",
    "simulator/allocator/driver.py",
    "simulator/allocator/allocator.py",
    "simulator/engine/streams.py",
    "simulator/engine/kernels.py",
)


def _digest() -> str:
    """A short digest of all kernel sources and of numba's version."""
    digest = hashlib.sha256(numba.__version__.encode())
    for name in KERNEL_SOURCES:
        path = _ROOT / name
        if path.exists():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _writable(folder: Path) -> bool:
    """Whether files can be made in `folder`, which is created where it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _user_cache() -> Path:
    """The user's cache directory by the platform's habit."""
    if "XDG_CACHE_HOME" in os.environ:
        return Path(os.environ["XDG_CACHE_HOME"])
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if sys.platform == "win32" and "LOCALAPPDATA" in os.environ:
        return Path(os.environ["LOCALAPPDATA"])
    return Path.home() / ".cache"


def _cache_dir() -> str:
    """Where compiled kernels are kept."""
    if os.environ.get("NUMBA_CACHE_DIR"):
        return os.environ["NUMBA_CACHE_DIR"]
    try:
        folder = _user_cache() / "llmem" / f"kernels-{_digest()}"
        if _writable(folder):
            return str(folder)
    except RuntimeError:  # no home directory
        pass
    user = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"llmem-{user}" / f"kernels-{_digest()}"
    return str(folder) if _writable(folder) else ""


CACHE_DIR: Final = _cache_dir()


@intrinsic
def _data_pointer(typing_context: Any, array: Any) -> Any:
    """The address of an array's first element, as a typed pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        make: Any = make_array
        return make(signature.args[0])(context, builder, arguments[0]).data

    pointer_type: Any = types.CPointer
    return pointer_type(array.dtype)(array), generate


if config.DISABLE_JIT:

    def pointer(array: Any) -> Any:
        """Kernels run as plain Python: they index the array itself."""
        return array

else:

    @numba.njit
    def pointer(array: Any) -> Any:
        """An array's data as a typed pointer for kernels: no bounds, no reference count, no negative indices.

        Only valid while the caller holds the array; indices are flat.
        """
        return _data_pointer(array)  # type: ignore[call-arg]  # numba gives the typing context


def kernel(function: Function | None = None, *, inline: bool = False) -> Any:
    """Compile `function` to machine code at its first call, without Python objects and without the GIL.

    `inline` asks LLVM to inline it into every caller. With `NUMBA_DISABLE_JIT=1` the function stays plain Python.
    """

    def decorate(plain: Function) -> Function:
        before = config.CACHE_DIR
        config.CACHE_DIR = CACHE_DIR
        try:
            compiled: Any = numba.njit(cache=bool(CACHE_DIR), nogil=True, forceinline=inline)(plain)
            return compiled
        finally:
            config.CACHE_DIR = before

    return decorate if function is None else decorate(function)
