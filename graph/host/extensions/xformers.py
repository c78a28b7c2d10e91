"""xformers without its compiled library: from 0.0.29 on its attention is PyTorch's own operators, which run without it.

What is in the library is missing then: 2:4 sparsity, and in wheels before 0.0.34 FlashAttention-3 and a fused SwiGLU,
instead of which xformers takes what it takes on other GPUs.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime

#: The CUDA that PyTorch brings, if any: a program is told of one.
_CUDA: Final = torch.version.cuda
#: Where wheels have FlashAttention-3, below xformers' folder.
_THIRD: Final = ("flash_attn_3/_C.so", "_C_flashattention3.so")


def quiet() -> None:
    """It does not say that its library cannot be loaded, as it does while it is imported."""
    logging.getLogger("xformers").setLevel(logging.CRITICAL)


def loaded(runtime: Runtime, library: ModuleType) -> None:
    """`xformers._cpp_lib` has looked for its library: where that cannot be loaded, it goes on as if it were, unless
    PyTorch brings another CUDA than it asks for, with which it could not be loaded on a GPU either."""
    logging.getLogger("xformers").setLevel(logging.NOTSET)
    if library._cpp_library_load_exception is None:
        return
    folder = Path(str(library.__file__)).parent
    written = folder / "cpp_lib.json"  # not where it was installed without compiling
    facts = json.loads(written.read_text("utf-8")) if written.exists() else {"version": {"cuda": 0}, "env": {}}
    theirs = facts["version"]["cuda"] // 100
    if theirs and _CUDA is not None and _CUDA.partition(".")[0] != str(theirs):
        runtime.note(
            f"xformers was built for CUDA {theirs}, which PyTorch here does not bring: its library is not loaded"
        )
        return
    found = library._BuildInfo(facts)
    vars(library).update(
        _build_metadata=found,
        _built_with_cuda=True,
        _cpp_library_load_exception=None,
        _register_extensions=lambda: found,  # Unsloth tries for itself
    )
    if any((folder / name).exists() for name in _THIRD):
        runtime.note(
            "xformers' compiled library cannot be loaded: PyTorch's attention stands for its FlashAttention-3, and "
            "PyTorch's operators for its fused SwiGLU"
        )
