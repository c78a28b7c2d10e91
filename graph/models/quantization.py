"""Quantized linear layers as bitsandbytes stores and runs them, and its optimizers, on the fake device.

bitsandbytes' own Python code for CUDA (bitsandbytes/backends/cuda/ops.py) decides what is allocated; only the compiled
library that it calls for the arithmetic is replaced by functions that do nothing while the fake device is in use.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from graph.case import Case
from graph.errors import CaptureError
from graph.fake_cuda import device as fake_cuda
from graph.fake_cuda.torch_private import RAW_STREAM
from graph.loop.inputs import DTYPES
from traces.errors import ConfigError

if TYPE_CHECKING:
    from types import ModuleType

    from graph.models.sources import Built, Place

#: The head stays as it is: its usual names (transformers/quantizers/base.py skips the output embeddings).
_KEPT: Final = ("lm_head", "embed_out")
_INT8_THRESHOLD: Final = 6.0
_CUDA_OPS: Final = "bitsandbytes.backends.cuda.ops"


class _Function:
    """One function of the compiled library: nothing while the fake device is in use. That a library is there, Unsloth
    tells by what functions of ctypes have."""

    restype: object = ctypes.c_int
    argtypes: object = None

    def __init__(self, name: str, real: Callable[..., object] | None) -> None:
        self.name, self.real = name, real

    def __call__(self, *arguments: object) -> Any:
        if fake_cuda._active:
            _forget(arguments)
        return 0 if fake_cuda._active or self.real is None else self.real(*arguments)


def _forget(arguments: Iterable[object]) -> None:
    """Let what a function is given, which it may write, have no values: of its arguments, addresses on the device."""
    runtime = fake_cuda._active[0]
    for one in arguments:
        address = getattr(one, "value", one)  # of ctypes
        if isinstance(address, int):
            runtime.memory.values.pop(runtime.number_at(address), None)  # other numbers are too small for a storage


class _Library:
    """The compiled library, function by function."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.functions: dict[str, _Function] = {}

    def __getattr__(self, name: str) -> _Function:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self.functions:
            self.functions[name] = _Function(name, getattr(self.real, name) if self.real is not None else None)
        return self.functions[name]


def ready() -> Any:
    """The package bitsandbytes, ready to run on the fake device. ConfigError if it is missing.

    Called before the fake device is in use (an import looks for a real one). On a real GPU its functions work as
    before, once the fake device is gone.
    """
    try:
        import bitsandbytes
    except ImportError as error:
        raise ConfigError(f"bitsandbytes is needed ({error}); pip install 'vramsim[torch]'") from None
    if not _before_backends():
        _with_cuda_kernels()
    _with_managed_memory(importlib.import_module("bitsandbytes.functional"))
    return bitsandbytes


def loaded(extension: Any) -> None:
    """To be called once `bitsandbytes.cextension` has been imported, and nothing of bitsandbytes after it."""
    if _before_backends() and not isinstance(extension.lib, _Library):
        extension.lib = _Library(extension.lib if getattr(extension.lib, "compiled_with_cuda", False) else None)


class _Setup(Protocol):
    """`CUDASetup` of bitsandbytes up to 0.42."""

    initialized: bool
    lib: object


def set_up(main: ModuleType) -> None:
    """To be called once `bitsandbytes.cuda_setup.main`, which releases up to 0.42 have, has been imported.

    It looks for CUDA's libraries, and where they are absent `bitsandbytes.cextension` raises.
    """
    real = main.CUDASetup.run_cuda_setup

    def run_cuda_setup(self: _Setup) -> None:
        if fake_cuda._active:
            self.initialized, self.lib = True, _Library(None)
        else:
            real(self)

    main.CUDASetup.run_cuda_setup = run_cuda_setup


def _before_backends() -> bool:
    """Releases before 0.46 have no backends: their functions call the compiled library where they stand."""
    return importlib.util.find_spec("bitsandbytes.backends") is None


def _with_cuda_kernels() -> None:
    """bitsandbytes' kernels for CUDA, registered, and calling `_Library`."""
    extension: Any = importlib.import_module("bitsandbytes.cextension")
    loaded: Any = sys.modules.get(_CUDA_OPS)
    if loaded is None:
        before = extension.lib
        absent = not hasattr(*RAW_STREAM)
        extension.lib = _Library(None)
        if absent:
            setattr(*RAW_STREAM, _raw_stream)
        try:
            loaded = importlib.import_module(_CUDA_OPS)
        finally:
            extension.lib = before
            if absent:
                delattr(*RAW_STREAM)
    elif not isinstance(loaded.lib, _Library):  # a real GPU is here: its functions stay behind ours
        loaded.lib = _Library(loaded.lib)
        for table in (value for name, value in vars(loaded).items() if name.startswith("str2optimizer")):
            for name, functions in table.items():
                table[name] = tuple(_Function(name, one) for one in functions)
    if not isinstance(loaded.CUBLAS_Context, _Contexts):
        loaded.CUBLAS_Context = _Contexts(loaded.CUBLAS_Context)
    loaded.torch = _NoOutliers()
    loaded._get_raw_stream = functools.partial(_stream, getattr(*RAW_STREAM, _raw_stream))


def _with_managed_memory(functional: Any) -> None:
    """States of paged optimizers: tensors of the host, as bitsandbytes has them, of the size of CUDA managed memory."""
    real = functional.get_paged
    if real.__module__ == __name__:
        return
    if not isinstance(functional.lib, _Library):
        functional.lib = _Library(functional.lib)

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device) -> Any:
        if not fake_cuda._active:
            return real(*shape, dtype=dtype, device=device)
        found: Any = torch.zeros((), dtype=dtype).expand(shape)  # takes no memory here
        found.is_paged, found.page_deviceid = True, device.index
        fake_cuda._active[0].managed += found.nbytes
        return found

    functional.get_paged = get_paged


class _NoOutliers:
    """PyTorch as bitsandbytes' kernels see it: a search for outlier columns on the fake device finds none."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def argwhere(tensor: torch.Tensor) -> torch.Tensor:
        if not fake_cuda._active:
            return torch.argwhere(tensor)
        runtime = fake_cuda._active[0]
        before, runtime.nonzero = runtime.nonzero, lambda _tensor: 0
        try:
            return torch.argwhere(tensor)
        finally:
            runtime.nonzero = before


class _Contexts:
    """`CUBLAS_Context` of bitsandbytes, which makes no handle on the fake device."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def get_instance(self) -> Any:
        return self if fake_cuda._active else self.real.get_instance()

    @staticmethod
    def get_context(device: torch.device) -> None:
        """No handle."""


def _raw_stream(index: int) -> int:
    return 0


def _stream(real: Any, index: int) -> int:
    return 0 if fake_cuda._active else int(real(index))


def loader(case: Case, prepare: Callable[[Built, Case, str], None], built: Built, place: Place) -> Any:
    """Load a quantized model as its users do: linear layers one after another, the rest, then what training needs.

    Each weight goes to the device in the model's dtype and is quantized there. For training: peft's
    prepare_model_for_kbit_training, then `prepare` (adapters and the like) on the device.
    """
    bitsandbytes = ready()
    quantize(bitsandbytes, built.module, case)
    placed = place(built.module, lambda tensor: bool(tensor.is_cuda))
    built.module.is_quantized = True
    if case.quant == "nf4":
        built.module.is_loaded_in_4bit = True
    else:
        built.module.is_loaded_in_8bit = True
    if case.task == "train":
        import peft

        built.module = peft.prepare_model_for_kbit_training(  # type: ignore[no-untyped-call]
            built.module,
            use_gradient_checkpointing=bool(case.checkpointing) and hasattr(built.module, "get_input_embeddings"),
            gradient_checkpointing_kwargs={"use_reentrant": case.checkpointing == "reentrant"},
        )
    prepare(built, case, "cuda")
    return placed


def quantize(bitsandbytes: ModuleType, module: torch.nn.Module, case: Case) -> None:
    """Put every linear layer of a meta model, but its head, on the device in quantized form, in order of modules."""
    make = _four_bit if case.quant == "nf4" else _eight_bit
    count = 0
    for name, layer in list(module.named_modules()):
        if not isinstance(layer, torch.nn.Linear) or any(word in name for word in _KEPT):
            continue
        parent, _, own = name.rpartition(".")
        module.get_submodule(parent).register_module(own, make(bitsandbytes, layer, case))
        count += 1
    if not count:
        raise CaptureError(f"key 'quant': the model has no nn.Linear but its head for {case.quant}")


def _four_bit(bitsandbytes: ModuleType, layer: torch.nn.Linear, case: Case) -> Any:
    new = bitsandbytes.nn.Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        compute_dtype=compute_dtype(case),
        compress_statistics=case.double_quant,
        quant_type="nf4",
        device="meta",
    )
    new.weight = bitsandbytes.nn.Params4bit(
        _host(layer.weight), requires_grad=False, compress_statistics=case.double_quant, quant_type="nf4", module=new
    ).to(torch.device("cuda"))
    _bias(new, layer)
    return new


def _eight_bit(bitsandbytes: ModuleType, layer: torch.nn.Linear, case: Case) -> Any:
    new = bitsandbytes.nn.Linear8bitLt(
        layer.in_features,
        layer.out_features,
        layer.bias is not None,
        has_fp16_weights=False,
        threshold=_INT8_THRESHOLD,
        device="meta",
    )
    new.weight = bitsandbytes.nn.Int8Params(_host(layer.weight), requires_grad=False, has_fp16_weights=False).to(
        torch.device("cuda")
    )
    _bias(new, layer)
    return new


def _bias(new: torch.nn.Module, layer: torch.nn.Linear) -> None:
    if layer.bias is not None:
        new.bias = torch.nn.Parameter(torch.empty(layer.out_features, dtype=layer.bias.dtype, device="cuda"))


def _host(weight: torch.Tensor) -> torch.Tensor:
    """A weight on the host, never touched: only its pages are reserved."""
    return torch.empty(weight.shape, dtype=weight.dtype, device="cpu")


def compute_dtype(case: Case) -> torch.dtype:
    """In what 4-bit layers compute: bf16, and for inference the model's dtype where that has 16 bits."""
    if case.compute:
        return DTYPES[case.compute]
    return torch.float16 if case.task == "inference" and case.dtype == "fp16" else torch.bfloat16
