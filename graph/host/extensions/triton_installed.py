"""Triton as it is installed, for a card that is not there: it needs no driver, and its kernels launch nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from graph.fake_cuda.device import Runtime
    from graph.host.imports import Change

#: Elements of the buffer that a measurement clears before each launch (`get_empty_cache_for_benchmark`).
_CLEARED: Final = 1 << 26


def changes(runtime: Runtime) -> Mapping[str, Change]:
    """What is done to Triton's modules when they are imported."""
    active = driver(runtime)

    def answering(module: ModuleType) -> Callable[[], None]:
        before = dict(vars(module.driver))
        module.driver.set_active(active)
        return lambda: vars(module.driver).update(before)

    def launching(module: ModuleType) -> Callable[[], None]:
        plain = module.JITFunction.run

        def run(self: object, *args: object, **kwargs: object) -> None:
            given = (*args, *kwargs.values())
            runtime.values.forget([one for one in given if isinstance(one, torch.Tensor) and one.is_cuda])

        def undo() -> None:
            module.JITFunction.run = plain

        module.JITFunction.run = run
        return undo

    return {"triton.runtime.driver": answering, "triton.runtime.jit": launching}


def driver(runtime: Runtime) -> SimpleNamespace:
    """What answers Triton's questions about the device instead of CUDA's driver (triton/backends/nvidia/driver.py)."""
    profile = runtime.profile
    properties = {
        "max_shared_mem": profile.shared_memory_per_block,
        "multiprocessor_count": profile.sm_count,
        "warpSize": 32,
    }
    major, minor = profile.arch

    def target() -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 10 * major + minor, 32)

    def cleared() -> torch.Tensor:
        return torch.empty(_CLEARED, dtype=torch.int, device="cuda")

    def measured(call: Callable[[], object], quantiles: object = None, **options: object) -> Any:
        """As triton.testing.do_bench, once: all configurations are as fast, so that the first one is taken."""
        call()
        cache = cleared()
        call()
        del cache
        return [0.0 for _ in quantiles] if isinstance(quantiles, list | tuple) else 0.0

    return SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=lambda device: properties),
        get_current_target=target,
        get_current_device=lambda: runtime.device.index,
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: runtime.device,
        get_device_interface=lambda: torch.cuda,
        get_benchmarker=lambda: measured,
        get_empty_cache_for_benchmark=cleared,
        clear_cache=lambda cache: cache.zero_(),
    )
