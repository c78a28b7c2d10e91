"""Compiled extensions of others: those of bitsandbytes, flash-attn, Apex, mamba-ssm and DeepSpeed's optimizers do
nothing, xformers does without, of the rest one line says the way out.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Final

from graph.host.driver import nvml
from graph.host.extensions import (
    apex,
    deepspeed_ops,
    flash_attn,
    flash_attn3,
    hub,
    mamba,
    torchvision,
    triton_installed,
    xformers,
)
from graph.host.imports import Change, changed
from graph.models import quantization

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime

#: Packages whose Python code runs here, and where the functions stand that they would have compiled for CUDA.
_STAND_INS: Final = {
    "flash_attn": flash_attn.functions,
    "apex": apex.functions,
    "mamba_ssm": mamba.scans,
    "causal_conv1d": mamba.convolutions,
}

#: Extensions that `pip install` of their package does not bring: programs that can do without do so where they are not.
_FURTHER: Final = ("dropout_layer_norm",)

#: What the error of an extension that is not here says, and what to do instead.
_WAYS_OUT: Final = (
    (
        r"flash_attn_interface|flash_attn_3",
        "FlashAttention-3's Python code is enough here, and installs without CUDA from the folder `hopper` of "
        "flash-attention's repository: FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE "
        "pip install --no-build-isolation --no-deps ./hopper",
    ),
    (
        r"No module named 'dropout_layer_norm",
        "flash-attn's norms are an extension of their own (its folder csrc/layer_norm): here an empty file "
        "dropout_layer_norm.py on the PYTHONPATH is enough",
    ),
    (
        r"flash.?attn|FlashAttention",
        "flash-attn's Python code is enough here, and installs without CUDA: FLASH_ATTENTION_FORCE_BUILD=TRUE "
        "FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE pip install --no-build-isolation --no-deps flash-attn einops",
    ),
    (
        r"mamba.ssm|causal.conv1d|selective.scan",
        "the Python code of mamba-ssm and causal-conv1d is enough here, and installs without CUDA: "
        "MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE CAUSAL_CONV1D_FORCE_BUILD=TRUE "
        "CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE pip install --no-build-isolation --no-deps mamba-ssm causal-conv1d einops",
    ),
    (
        r"No module named 'apex|amp_C",
        "NVIDIA Apex's Python code is enough here: the folder `apex` of its repository on the PYTHONPATH",
    ),
    (
        r"^xformers |No module named 'xformers|install xformers",
        "xformers' Python code is enough here: pip install --no-deps xformers",
    ),
    (
        r"'(Sparse|NestedTensor)\w*CUDA' backend",
        "most that is done with sparse and nested tensors is recorded, but not this: docs/explanation/record.md says "
        "what else is missing",
    ),
    (
        r"DispatchStub: missing kernel for cuda",
        "an operator asks for a kernel of CUDA builds that is not recorded: docs/explanation/record.md says what is "
        "missing",
    ),
    (
        r"^ (division by zero|float division|float modulo|math domain error)",
        "numbers that the program reads of the GPU are 0 (`assumptions` of --json): record --floats 1 has them be 1",
    ),
    (
        r"No such file or directory: '\S*/nvidia-smi'",
        "nvidia-smi stands in the PATH of a recorded program, not at this place",
    ),
    (
        r"your machine only has|invalid device ordinal",
        "record --nproc-per-node says how many GPUs the machine has, each with a rank of the program; --visible-gpus "
        "how many one process works on (DataParallel, device_map)",
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
    """Inside, bitsandbytes, flash-attn, Apex, mamba-ssm, DeepSpeed's optimizers and Triton run when they are imported:
    what they launch does nothing.
    """
    logging.getLogger("bitsandbytes.cextension").setLevel(logging.CRITICAL)  # it says that CUDA's libraries are absent
    xformers.quiet()
    changes: dict[str, Change] = {
        "bitsandbytes.cuda_setup.main": quantization.set_up,
        "bitsandbytes.cextension": quantization.loaded,
        "bitsandbytes": _ready,
        "deepspeed.ops.op_builder.builder": deepspeed_ops.loaded,
        "torchvision.extension": lambda module: torchvision.ready(runtime),
        "xformers._cpp_lib": functools.partial(xformers.loaded, runtime),
    }
    changes |= triton_installed.changes(runtime)
    changes |= nvml.changes(runtime)
    standing = _standing(runtime)
    sys.modules.update(standing)
    try:
        with changed(changes), hub.found(runtime):
            yield
    finally:
        for name in standing:
            sys.modules.pop(name, None)


def _standing(runtime: Runtime) -> Mapping[str, ModuleType]:
    """The extensions of packages of this environment, by name, compiled or not; of those that do not come with their
    package only what is there."""
    made = flash_attn3.modules(runtime)
    for package, extensions in _STAND_INS.items():
        if importlib.util.find_spec(package) is not None:
            for name, functions in extensions().items():
                if name not in _FURTHER or importlib.util.find_spec(name) is not None:
                    made[name] = ModuleType(name, extensions.__doc__)
                    vars(made[name]).update(functions)
    return made


def way_out(error: BaseException) -> str:
    """A word for the user where a program fails for what is not here, an extension or a number; else nothing."""
    known = ImportError | OSError | RuntimeError | AssertionError | ArithmeticError | ValueError
    if not isinstance(error, known) and type(error).__name__ != "MisconfigurationException":  # Lightning's
        return ""
    found = (way for pattern, way in _WAYS_OUT if re.search(pattern, f"{getattr(error, 'name', '')} {error}"))
    return next(found, "")
