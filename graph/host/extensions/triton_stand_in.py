"""Stands for Triton where it is not installed: its kernels are made, and their launches do nothing.

CUDA builds of PyTorch bring Triton, others do not, and libraries ask whether it is there before they choose their code.
`installed` copies this file to where it is found as `triton`; so it imports the standard library alone.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.abc
import importlib.machinery
import inspect
import operator
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

__version__ = "3.6.0"


def installed(folder: Path) -> Path:
    """Make a folder inside `folder` in which `import triton` and its metadata find this; it is to go on `sys.path`."""
    place = folder / "stand-ins"
    for part in ("triton", f"triton-{__version__}.dist-info"):
        (place / part).mkdir(parents=True)
    shutil.copy(__file__, place / "triton" / "__init__.py")
    metadata = f"Metadata-Version: 2.1\nName: triton\nVersion: {__version__}\n"
    (place / f"triton-{__version__}.dist-info" / "METADATA").write_text(metadata)
    return place


class Anything:
    """What is only named in the source of kernels, which is never run."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __repr__(self) -> str:
        """The same in each process: Inductor writes the backend's hash into the source of kernels."""
        return "Anything"

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Itself."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __getitem__(self, key: object) -> Any:
        return self

    def __contains__(self, key: object) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Constexpr(Anything):
    """`triton.language.constexpr`: a number that kernels know when they are compiled. Libraries read it on the host,
    and choose dtypes by it (Liger's norms). Its operators give others (triton/language/core.py)."""

    def __init__(self, value: object = None) -> None:
        self.value: Any = value.value if isinstance(value, Constexpr) else value

    def __repr__(self) -> str:
        return f"constexpr[{self.value}]"

    def __hash__(self) -> int:
        return hash(self.value)

    def __index__(self) -> int:
        return int(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)


def _combining(operation: Callable[[Any, Any], object], *, swapped: bool = False) -> Callable[[Constexpr, object], Any]:
    def combined(self: Constexpr, other: object) -> Constexpr:
        left, right = self.value, Constexpr(other).value
        return Constexpr(operation(right, left) if swapped else operation(left, right))

    return combined


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Constexpr, f"__{_name}__", _combining(getattr(operator, _name)))
    setattr(Constexpr, f"__r{_name}__", _combining(getattr(operator, _name), swapped=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "xor", "lshift", "rshift"):
    setattr(Constexpr, f"__{_name.rstrip('_')}__", _combining(getattr(operator, _name)))


def _source(fn: Callable[..., Any] | None) -> str:
    """What libraries read of a kernel, to make others of it: its source without decorators ("" where there is none)."""
    try:
        lines = textwrap.dedent(inspect.getsource(fn)) if callable(fn) else ""
    except OSError:
        return ""
    begin = re.search(r"^def\s", lines, re.MULTILINE)
    return lines[begin.start() :] if begin else ""


class Kernel:
    """A kernel: `kernel[grid](...)` launches nothing."""

    constexprs: Sequence[int] = ()

    def __init__(self, fn: Callable[..., Any] | None = None, *args: object, **options: object) -> None:
        self.fn = fn
        self.__name__ = getattr(fn, "__name__", "kernel")
        self.__doc__ = fn.__doc__
        self.arg_names = list(inspect.signature(fn).parameters) if callable(fn) else []
        self.src = _source(fn)

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.run

    def run(self, *args: object, **kwargs: object) -> None:
        """A launch."""

    warmup = __call__ = run

    @property
    def cache_key(self) -> str:
        """What a kernel is kept under when it is compiled, by its source."""
        return hashlib.sha256(self.src.encode()).hexdigest()


def jit(fn: Any = None, **options: object) -> Any:
    """`@triton.jit`, with options or without."""
    return Kernel(fn) if fn is not None else Kernel


#: Elements of the buffer that a measurement clears before each launch (`get_empty_cache_for_benchmark`).
_CLEARED = 1 << 26


class Autotuner(Kernel):
    """A kernel with several configurations: for new arguments each is measured, which takes a buffer, and a copy of the
    tensors that are to have their values again after a launch (triton/runtime/autotuner.py). Libraries derive of it."""

    def __init__(
        self,
        fn: Kernel,
        arg_names: Sequence[str],
        configs: Sequence[Config],
        key: Sequence[str],
        reset_to_zero: Sequence[str] | None,
        restore_value: Sequence[str] | None,
        pre_hook: Callable[..., object] | None = None,
        post_hook: Callable[..., object] | None = None,
        prune_configs_by: Mapping[str, Any] | None = None,
        **options: object,
    ) -> None:
        super().__init__(fn.fn)
        self.kernel = fn
        self.base_fn = fn.fn
        self.arg_names = list(arg_names)
        self.configs = list(configs) or [Config({})]
        self.keys = key
        self.reset_to_zero, self.restore_value = list(reset_to_zero or ()), list(restore_value or ())
        self.restore_copies: dict[str, Any] = {}
        self.pre_hook, self.post_hook = pre_hook or self._before, post_hook or self._after
        self.user_defined_pre_hook, self.user_defined_post_hook = bool(pre_hook), bool(post_hook)
        self.early_config_prune = (prune_configs_by or {}).get("early_config_prune")
        self.cache: dict[tuple[str, ...], Config] = {}
        self.best_config = self.configs[0]

    def run(self, *args: object, **kwargs: object) -> None:
        """A launch; `best_config` is then the configuration of it."""
        nargs = dict(zip(self.arg_names, args, strict=False))
        named = {**nargs, **kwargs}
        dtypes = (str(value.dtype) for value in named.values() if hasattr(value, "dtype"))  # as triton's Autotuner.run
        key = (*(str(named[name]) for name in self.keys if name in named), *dtypes)
        torch: Any = sys.modules.get("torch")
        self.best_config = self.cache.get(key, self.configs[0])
        if torch is None or len(self.configs) == 1 or key in self.cache:
            return
        configs = self.early_config_prune(self.configs, nargs, **kwargs) if self.early_config_prune else self.configs
        self.cache[key] = self.best_config = configs[0]
        for _ in configs:
            self.launched(named)
            cleared = torch.empty(_CLEARED, dtype=torch.int, device="cuda")
            self.launched(named)
            del cleared

    def launched(self, named: Mapping[str, Any]) -> None:
        """A launch that is measured, once without the buffer and once with it."""
        self.pre_hook(named)
        self.post_hook(named, exception=None)

    def _before(self, named: Mapping[str, Any], reset_only: bool = False) -> None:
        self.restore_copies = {name: named[name].clone() for name in self.restore_value}

    def _after(self, named: Mapping[str, Any], exception: object) -> None:
        self.restore_copies = {}


def autotune(
    configs: Sequence[Config],
    key: Sequence[str] = (),
    prune_configs_by: Mapping[str, Any] | None = None,
    reset_to_zero: Sequence[str] | None = None,
    restore_value: Sequence[str] | None = None,
    pre_hook: Callable[..., object] | None = None,
    post_hook: Callable[..., object] | None = None,
    **kwargs: object,
) -> Any:
    """`@triton.autotune(...)`."""

    def decorated(fn: Kernel) -> Autotuner:
        hooks = pre_hook, post_hook
        return Autotuner(fn, fn.arg_names, configs, key, reset_to_zero, restore_value, *hooks, prune_configs_by)

    return decorated


def heuristics(*args: object, **kwargs: object) -> Any:
    """`@triton.heuristics(...)`."""
    return lambda kernel: kernel


class Config:
    """`triton.Config`."""

    def __init__(
        self,
        kwargs: dict[str, Any],
        num_warps: int = 4,
        num_stages: int = 3,
        num_ctas: int = 1,
        maxnreg: int | None = None,
        pre_hook: object = None,
        ir_override: str | None = None,
    ) -> None:
        self.kwargs = kwargs
        self.num_warps = num_warps
        self.num_stages = num_stages
        self.num_ctas = num_ctas
        self.maxnreg = maxnreg
        self.pre_hook = pre_hook
        self.ir_override = ir_override

    def all_kwargs(self) -> dict[str, Any]:
        """All that a kernel is built with."""
        return {**self.kwargs, "num_warps": self.num_warps, "num_ctas": self.num_ctas, "num_stages": self.num_stages}


class TensorDescriptor(Anything):
    """`triton.tools.tensor_descriptor.TensorDescriptor`: Dynamo looks for its maker where the GPU has a TMA (H100)."""

    @staticmethod
    def from_tensor(*args: object, **kwargs: object) -> TensorDescriptor:
        """A descriptor."""
        return TensorDescriptor()


class Dtype(Anything):
    """`triton.language.dtype`: which types there are, as libraries read them to tell PyTorch's from them."""

    SINT_TYPES: ClassVar = ["int8", "int16", "int32", "int64"]
    UINT_TYPES: ClassVar = ["int1", "uint8", "uint16", "uint32", "uint64"]
    STANDARD_FP_TYPES: ClassVar = ["fp16", "bf16", "fp32", "fp64"]
    FP_TYPES: ClassVar = ["fp8e4b15", "fp8e4nv", "fp8e4b8", "fp8e5", "fp8e5b16", *STANDARD_FP_TYPES]
    OTHER_TYPES: ClassVar = ["void"]


class Scalar(Anything):
    """A type of numbers, as `triton.language.float32`: Inductor asks how many bits it has to size its workspaces."""

    def __init__(self, bits: int) -> None:
        self.primitive_bitwidth = bits


class GPUTarget(Anything):
    """`triton.backends.compiler.GPUTarget`: what is compiled for."""

    def __init__(self, backend: str, arch: int, warp_size: int) -> None:
        self.backend, self.arch, self.warp_size = backend, arch, warp_size


class Options(Anything):
    """What Triton's CUDA backend compiles with: Inductor asks which float8 types kernels may have, and leaves others to
    single operators (triton/backends/nvidia/compiler.py, `parse_options`)."""

    def __init__(self, target: GPUTarget) -> None:
        new = ("fp8e4nv",) if target.arch >= 89 else ()
        self.supported_fp8_dtypes = ("fp8e4b15", *new, "fp8e5")


class Backend(Anything):
    """Triton's CUDA backend, as `triton.compiler.compiler.make_backend` gives it."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def parse_options(self, options: Mapping[str, object]) -> Options:
        """What it would compile with."""
        return Options(self.target)


class Driver(Anything):
    """`triton.runtime.driver`, who answers by whoever is made active (graph/host/extensions/triton_installed.py)."""

    def set_active(self, active: object) -> None:
        """Have `active` answer."""
        self.active = active


def do_bench(
    fn: Callable[[], object],
    warmup: int = 25,
    rep: int = 100,
    grad_to_none: Sequence[Any] | None = None,
    quantiles: Sequence[float] | None = None,
    **options: object,
) -> Any:
    """`triton.testing.do_bench`: as many calls as it makes of what takes as long as the device's clock says, beside the
    buffer that is cleared; milliseconds, or one number for each quantile."""
    torch: Any = sys.modules["torch"]
    fn()
    cleared = torch.empty(_CLEARED, dtype=torch.int, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(5):
        fn()
    end.record()
    torch.cuda.synchronize()
    taken = (begin.elapsed_time(end) / 5) or 1.0
    for _ in range(max(1, int(warmup / taken))):
        fn()
    for _ in range(max(1, int(rep / taken))):
        for tensor in grad_to_none or ():
            tensor.grad = None
        cleared.zero_()
        fn()
    return [taken for _ in quantiles] if quantiles else taken


def cdiv(x: int, y: int) -> int:
    """Division, rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below `n`."""
    return 1 << (n - 1).bit_length()


#: Classes of `triton.language` whose names do not begin with a capital.
_CLASSES = ("tensor", "block_type", "pointer_type")
#: What Triton has under these names.
_NAMED = {
    "Autotuner": Autotuner,
    "JITFunction": Kernel,
    "do_bench": do_bench,
    "jit": jit,
    "KernelInterface": Kernel,
    "TensorDescriptor": TensorDescriptor,
    "dtype": Dtype,
    "constexpr": Constexpr,
    "GPUTarget": GPUTarget,
    "make_backend": Backend,
}
#: Names of its types of numbers, with their bits.
_SCALAR = re.compile(r"(?:u?int|b?float)(\d+)")


def __getattr__(name: str) -> Any:
    """What is not here: a class where the name is that of one, for those who ask what is an instance of it."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name in _NAMED:
        return _NAMED[name]
    if name == "runtime":
        return importlib.import_module("triton.runtime")
    if name == "triton_key":
        return lambda: __version__
    if bits := _SCALAR.match(name):
        return Scalar(int(bits[1]))
    if name.endswith(("Error", "OutOfResources")):
        return type(name, (Exception,), {})
    return type(name, (Anything,), {}) if name[0].isupper() or name in _CLASSES else Anything()


class _Parts(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every module below `triton`: what is imported from it is `Anything`, but for the driver."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        mine = name.startswith("triton.")
        return importlib.machinery.ModuleSpec(name, _Parts(), is_package=True) if mine else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__dict__["__getattr__"] = __getattr__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "triton.runtime.driver":
            vars(module)["driver"] = Driver()
        elif module.__name__ == "triton.runtime":
            vars(module)["driver"] = importlib.import_module("triton.runtime.driver").driver


if __name__ == "triton":
    sys.meta_path.append(_Parts())
