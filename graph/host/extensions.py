"""Compiled extensions of others: bitsandbytes' and flash-attn's do nothing, of the rest one line says the way out."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from graph.host import flash_attn, triton_installed
from graph.host.imports import Change, changed
from graph.models import quantization

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime

#: What the error of an extension that is not here says, and what to do instead.
_WAYS_OUT: Final = (
    (
        r"flash.?attn|FlashAttention",
        "flash-attn's Python code is enough here, and installs without CUDA: FLASH_ATTENTION_FORCE_BUILD=TRUE "
        "FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE pip install --no-build-isolation --no-deps flash-attn einops",
    ),
    (
        r"xformers",
        "xformers is compiled for CUDA. torch.nn.functional.scaled_dot_product_attention needs as much memory",
    ),
    (
        r"libcu\w+\.so|libnv\w+\.so|No CUDA runtime|CUDA_HOME|Unable to find CUDA|CUDAExtension",
        "an extension in C++ needs CUDA itself, and what it would do on the GPU cannot be recorded. Use its "
        "implementation in Python or Triton, or PyTorch's own operators, if it has such a switch",
    ),
)


def _ready(module: object) -> None:
    quantization.ready()


@contextlib.contextmanager
def launching_nothing(runtime: Runtime) -> Iterator[None]:
    """Inside, bitsandbytes, flash-attn and Triton run when they are imported: what they launch does nothing."""
    logging.getLogger("bitsandbytes.cextension").setLevel(logging.CRITICAL)  # it says that CUDA's libraries are absent
    changes: dict[str, Change] = {"bitsandbytes.cextension": quantization.loaded, "bitsandbytes": _ready}
    changes |= triton_installed.changes(runtime)
    if flash_attn.wanted():
        sys.modules[flash_attn.NAME] = flash_attn.module()
    try:
        with changed(changes):
            yield
    finally:
        sys.modules.pop(flash_attn.NAME, None)


def way_out(error: BaseException) -> str:
    """A word for the user where a program fails for an extension that is not here; else nothing."""
    if not isinstance(error, ImportError | OSError | RuntimeError | AssertionError):
        return ""
    found = (way for pattern, way in _WAYS_OUT if re.search(pattern, f"{getattr(error, 'name', '')} {error}"))
    return next(found, "")
