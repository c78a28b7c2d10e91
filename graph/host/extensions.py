"""Compiled extensions of others: bitsandbytes does nothing on the device, and of the rest one line says the way out."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Final

from graph.host.imports import changed
from graph.models import quantization

#: What the error of an extension that is not here says, and what to do instead.
_WAYS_OUT: Final = (
    (
        r"flash.?attn|FlashAttention",
        "flash-attn is compiled for CUDA and cannot be installed without it. attn_implementation='sdpa' uses PyTorch's "
        "own flash kernels, which need as much memory, but for what is packed without padding",
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


@contextlib.contextmanager
def launching_nothing() -> Iterator[None]:
    """Inside, bitsandbytes runs when it is imported: its compiled functions do nothing."""
    logging.getLogger("bitsandbytes.cextension").setLevel(logging.CRITICAL)  # it says that CUDA's libraries are absent
    with changed({"bitsandbytes": lambda module: quantization.ready()}):
        yield


def way_out(error: BaseException) -> str:
    """A word for the user where a program fails for an extension that is not here; else nothing."""
    if not isinstance(error, ImportError | OSError | RuntimeError | AssertionError):
        return ""
    found = (way for pattern, way in _WAYS_OUT if re.search(pattern, f"{getattr(error, 'name', '')} {error}"))
    return next(found, "")
