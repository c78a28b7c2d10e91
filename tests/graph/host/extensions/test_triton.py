"""Triton's kernels launch nothing, where it is installed and where something stands for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from graph.fake_cuda.device import fake_cuda
from graph.hardware.profile import profile
from graph.host.extensions import triton_installed, triton_stand_in
from graph.host.imports import changed
from tests.support.births import Births

#: What `triton.testing.do_bench` clears before each launch.
CLEARED = 256 << 20


@pytest.fixture
def births() -> Iterator[Births]:
    with fake_cuda(profile("A10", "2.13")) as runtime:
        runtime.observer = found = Births(runtime)
        yield found


@pytest.mark.parametrize(("configurations", "measured"), [(1, 0), (3, 3)])
def test_a_stand_in_measures_configurations_once_for_an_argument(
    configurations: int, measured: int, births: Births
) -> None:
    """Two configurations of one kernel: the CUDA build of 2.13 with Triton 3.7 took the buffer twice."""
    ran: list[int] = []

    @triton_stand_in.autotune(configs=[triton_stand_in.Config({"BLOCK": 64})] * configurations, key=["n"])
    @triton_stand_in.jit
    def kernel(x: object, n: int) -> None:
        ran.append(n)

    x = torch.empty(8, device="cuda")
    births.bytes.clear()
    for size in (8, 8, 16):
        kernel[(1,)](x, size, BLOCK=64)
    assert ran == []
    assert births.bytes == [CLEARED] * measured * 2


def test_libraries_read_the_source_of_a_kernel() -> None:
    """xformers makes new kernels of it when it is imported: without decorators, as of a function of a module."""

    @triton_stand_in.autotune(configs=[], key=[])
    @triton_stand_in.jit
    def kernel(x: object) -> None:
        pass

    assert kernel.kernel.src == kernel.src == "def kernel(x: object) -> None:\n    pass\n"
    assert triton_stand_in.jit(eval("lambda x: x")).src == ""


def test_a_stand_in_says_which_types_there_are() -> None:
    """As triton/language/core.py: optimi's optimizers go through them when they are imported."""
    dtype = triton_stand_in.__getattr__("dtype")
    assert {"int64", "int1", "bf16", "fp8e5"} < {*dtype.SINT_TYPES, *dtype.UINT_TYPES, *dtype.FP_TYPES}
    assert isinstance(dtype("bf16"), dtype)


@pytest.mark.parametrize(("arch", "expected"), [(80, ("fp8e4b15", "fp8e5")), (89, ("fp8e4b15", "fp8e4nv", "fp8e5"))])
def test_a_stand_in_says_which_float8_types_a_card_has(arch: int, expected: tuple[str, ...]) -> None:
    """As Triton 3.7 answers Inductor (`_triton_supported_fp8_dtypes`)."""
    backend = triton_stand_in.Backend(triton_stand_in.GPUTarget("cuda", arch, 32))
    assert backend.parse_options({}).supported_fp8_dtypes == expected


def test_types_of_numbers_have_bits() -> None:
    """Inductor sizes the workspace of a scan over a long row by them."""
    bits = {name: getattr(triton_stand_in, name) for name in ("int1", "uint8", "float32", "bfloat16", "float8e4nv")}
    assert [one.primitive_bitwidth for one in bits.values()] == [1, 8, 32, 16, 8]
    assert not isinstance(triton_stand_in.interleave, triton_stand_in.Scalar)


def test_kernels_have_keys_by_their_source() -> None:
    """Inductor keeps what it measured of several kernels under them."""

    @triton_stand_in.jit
    def one(x: object) -> None:
        pass

    @triton_stand_in.jit
    def other(x: object) -> None:
        pass

    assert one.cache_key == triton_stand_in.jit(one.fn).cache_key != other.cache_key


def test_numbers_that_kernels_know_are_read_on_the_host() -> None:
    """As triton/language/core.py of 3.7: Liger's RMSNorm makes its sums of fp32 where the mode's number is this one."""
    constexpr = triton_stand_in.__getattr__("constexpr")
    mode = constexpr(constexpr(2))
    assert (mode.value, [10, 20, 30][mode], bool(constexpr(0)), repr(mode)) == (2, 30, False, "constexpr[2]")
    assert [(mode * 3).value, (3 - mode).value, (mode < 1).value, (mode == constexpr(2)).value] == [6, 1, False, True]
    assert isinstance(mode, constexpr)


def test_a_measurement_copies_what_it_restores(births: Births) -> None:
    """Triton clones before each launch the tensors that `restore_value` names (triton/runtime/autotuner.py): a launch
    without the buffer, and one beside it."""

    @triton_stand_in.autotune(
        [triton_stand_in.Config({"BLOCK": size}) for size in (64, 128)], ["n"], restore_value=["x"]
    )
    @triton_stand_in.jit
    def kernel(x: object, y: object, n: int) -> None: ...

    x, y = torch.empty(1 << 20, device="cuda"), torch.empty(1 << 20, device="cuda")
    births.bytes.clear()
    kernel[(1,)](x, y, 1 << 20)
    assert births.bytes == [4 << 20, CLEARED, 4 << 20] * 2
    kernel[(1,)](x, y, 1 << 20)
    assert len(births.bytes) == 6


def test_a_function_is_measured_beside_a_buffer(births: Births) -> None:
    """As triton.testing.do_bench where each call takes as long: once without it, five times for an estimate."""
    found = triton_stand_in.do_bench(lambda: torch.empty(1 << 10, device="cuda"), quantiles=[0.5, 0.2])
    assert births.bytes[:3] == [4 << 10, CLEARED, 4 << 10]
    assert len(births.bytes) == 2 + 5 + int(25 / found[0]) + int(100 / found[0])
    assert isinstance(triton_stand_in.do_bench(lambda: None), float)


def test_libraries_derive_from_the_autotuner(births: Births) -> None:
    """As flash-linear-attention does: by Triton's own arguments, with hooks of its own and configurations left out."""
    calls: list[str] = []

    class Cached(triton_stand_in.Autotuner):
        def run(self, *args: object, **kwargs: object) -> None:
            calls.append(",".join(self.arg_names))
            super().run(*args, **kwargs)

    configs = [triton_stand_in.Config({"BLOCK": size}) for size in (32, 64, 128)]
    kernel = triton_stand_in.jit(lambda x, n: None)
    fewer = {"early_config_prune": lambda configs, named, **kwargs: configs[1:]}
    tuned = Cached(kernel, kernel.arg_names, configs, ["n"], None, ["x"], prune_configs_by=fewer, cache_results=True)
    tuned.pre_hook = lambda named: calls.append("before")
    x = torch.empty(4, device="cuda")
    births.bytes.clear()
    tuned[(1,)](x, 4)
    assert calls == ["x,n", *["before"] * 4]
    assert births.bytes == [CLEARED] * 2
    assert [config.kwargs["BLOCK"] for config in tuned.cache.values()] == [64]


class _Settings:
    """As `DriverConfig` of triton/runtime/driver.py, where there is no driver."""

    def __init__(self) -> None:
        self._active: Any = None

    @property
    def active(self) -> Any:
        if self._active is None:
            raise ImportError("libcuda.so.1: cannot open shared object file")
        return self._active

    def set_active(self, driver: Any) -> None:
        self._active = driver


class _Function:
    """As `JITFunction` of triton/runtime/jit.py."""

    def run(self, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        raise ImportError("libcuda.so.1: cannot open shared object file")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Triton's modules, as far as they are asked."""
    found: dict[str, Any] = {name: ModuleType(name) for name in ("triton.runtime.driver", "triton.runtime.jit")}
    found["triton.runtime.driver"].driver = _Settings()
    found["triton.runtime.jit"].JITFunction = _Function
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    backend = SimpleNamespace(GPUTarget=lambda *target: target)
    monkeypatch.setitem(sys.modules, "triton.backends.compiler", backend)
    return found


def test_triton_that_is_installed_needs_no_driver(births: Births, modules: dict[str, Any]) -> None:
    """bitsandbytes asks it for a way to measure when it is imported."""
    settings, calls = modules["triton.runtime.driver"].driver, list[int]()
    with changed(triton_installed.changes(births.runtime)):
        measure = settings.active.get_benchmarker()
        assert measure(lambda: calls.append(1), quantiles=(0.5, 0.2, 0.8)) == [0.0, 0.0, 0.0]
        assert settings.active.get_current_target() == ("cuda", 86, 32)
        assert settings.active.utils.get_device_properties(0)["multiprocessor_count"] == 72
    assert len(calls) > 0
    assert births.bytes == [CLEARED]
    with pytest.raises(ImportError):
        _ = settings.active


def test_values_that_a_kernel_may_have_written_are_not_known(births: Births, modules: dict[str, Any]) -> None:
    runtime = births.runtime
    with changed(triton_installed.changes(runtime)):
        kept, written = torch.tensor([3, 4]).cuda(), torch.tensor([3, 4]).cuda()
        _Function().run(written, grid=(1,), warmup=False)
        assert kept.tolist() == [3, 4]
        assert not runtime.assumptions
        written.tolist()
        assert runtime.assumptions
    with pytest.raises(ImportError):
        _Function().run(written, grid=(1,), warmup=False)
