"""Compiling kernels with numba: one decorator, and a cache that works where the package itself is read-only.

Machine code is kept under `$NUMBA_CACHE_DIR` where that is set, else under the user's cache directory, in a folder
named after a digest of all that a module's kernels are made of: numba notices a change of the file a kernel stands in,
but not of the files it calls into.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

import numba
from numba.core import config as _config
from numba.core import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

config: Any = _config  # its options are set at run time
Function = TypeVar("Function", bound=Callable[..., Any])

#: The packages that hold kernels, and what these are made of.
_PACKAGES: Final = ("traces", "simulator")


def sources(scope: Mapping[str, Any]) -> dict[str, Path]:
    """The modules of this project that the machine code of a module's kernels is made of, by name.

    They are the module itself (`scope` is its namespace) and those that its names refer to, each in turn: kernel
    modules take constants of other modules through the module, never by name.
    """
    found: dict[str, Path] = {}
    waiting = [scope]
    while waiting:
        scope = waiting.pop()
        name = scope["__name__"]
        if name not in found and name.partition(".")[0] in _PACKAGES:
            found[name] = Path(scope["__file__"])
            waiting += [vars(value) for value in scope.values() if isinstance(value, ModuleType)]
            waiting += [value.py_func.__globals__ for value in scope.values() if hasattr(value, "py_func")]
    return found


@functools.cache
def digest(module: str) -> str:
    """A short digest of numba's version and all sources of an imported module's kernels."""
    content = hashlib.sha256(numba.__version__.encode())
    for _, path in sorted(sources(vars(sys.modules[module])).items()):
        content.update(path.read_bytes())
    return content.hexdigest()[:16]


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


def _cache_root() -> str:
    """Where compiled kernels are kept; empty where no folder can be written."""
    try:
        folder = _user_cache() / "llmem"
        if _writable(folder):
            return str(folder)
    except RuntimeError:  # no home directory
        pass
    user = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"llmem-{user}"
    return str(folder) if _writable(folder) else ""


CACHE_ROOT: Final = os.environ.get("NUMBA_CACHE_DIR") or _cache_root()


def _cache_dir(module: str) -> str:
    """The folder for the kernels of a module."""
    return CACHE_ROOT if os.environ.get("NUMBA_CACHE_DIR") else f"{CACHE_ROOT}/kernels-{digest(module)}"


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
        config.CACHE_DIR = _cache_dir(plain.__module__)
        try:
            compiled: Any = numba.njit(cache=bool(CACHE_ROOT), nogil=True, forceinline=inline)(plain)
            return compiled
        finally:
            config.CACHE_DIR = before

    return decorate if function is None else decorate(function)
