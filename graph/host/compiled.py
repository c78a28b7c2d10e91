"""torch.compile where no GPU is: everything is PyTorch's own but the building and launching of kernels.

Dynamo, AOTAutograd, the partitioner and Inductor's code generation run as they are. So compiled code allocates and
frees where it does on a GPU; guards, graph breaks and recompilations happen as they do. Inductor chooses among a Triton
kernel's configurations as there, with the buffers that measuring takes, and as if each took the same time: the first
wins. No kernel is built, and a launch does nothing. What Inductor keeps on disk is kept in a folder of its own, since
the kernels in it are none.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import linecache
import os
import re
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch
import torch._dynamo.eval_frame
from torch._dynamo import callback
from torch.nn.modules import module as modules
from torch.utils import _triton

from graph.hardware.gpus import gpu
from graph.host.compiled_values import OnHost, following
from graph.host.extensions import triton_installed

if TYPE_CHECKING:
    from torch._dynamo.callback import CallbackArgs

    from graph.fake_cuda.device import Runtime  # not before workers are forked: its import starts threads of autograd

#: What Dynamo took of `torch.cuda` when it was imported (torch/_dynamo/device_interface.py).
_INTERFACE: Final = (
    *("current_device", "set_device", "device_count", "stream", "current_stream", "set_stream", "synchronize"),
    *("get_device_properties", "memory_allocated", "is_bf16_supported"),
)
#: What is registered for all modules' forward passes.
_HOOKS: Final = [hooks for name, hooks in vars(modules).items() if name.startswith("_global_forward")]
_OURS: Final = str(Path(__file__).resolve().parents[2])
#: How compiled code makes a buffer, with what we note behind it: the module.
_MADE: Final = re.compile(r"^\s*(\w+) = empty_strided_cuda\(.*?(?:  # of ([\w.]+))?$")
#: How a kernel's arguments begin that it writes.
_WRITTEN: Final = ("out_ptr", "in_out_ptr")
#: How it starts what writes buffers: a kernel of Triton's, an operator.
_STARTS: Final = re.compile(r"([\w.]+?)(?:\.run)?\((.*)")

#: What loads a kernel of Triton's, an autotuner, by its name and its source (torch/_inductor/codecache.py).
_LOAD: Final = "_load_triton_kernel_from_source"
Load = Callable[[str, str], Any]

#: Who is told of the kernel and the module behind the buffer that is made next (None: it is made).
Tell = Callable[[tuple[str, str] | None], None]
#: What is done while something is compiled with a folder of Inductor's.
Keeping = Callable[[Path], contextlib.AbstractContextManager[None]]


#: What the error of a compilation is about, and the way out.
_WAYS_OUT: Final = (
    (
        r"'(Kernel|Autotuner)' object has no attribute",
        "a Triton kernel of the program's own inside compiled code needs Triton itself: pip install triton",
    ),
    (
        r"fake tensors|fake impl|[Mm]eta\b.*(kernel|backend)",
        "on a GPU it ends so as well. torch.library.register_fake tells Dynamo what an operator returns, and "
        "torch.compiler.disable keeps its caller out of compiled code",
    ),
    (r"", "TORCH_COMPILE_DISABLE=1 runs the program without torch.compile"),
)


def way_out(error: BaseException) -> str:
    """A word for the user where Dynamo or Inductor cannot go on, beside what they say; else nothing."""
    if not type(error).__module__.startswith(("torch._dynamo.", "torch._inductor.")):
        return ""
    return next(way for pattern, way in _WAYS_OUT if re.search(pattern, str(error)))


@contextlib.contextmanager
def compiling(
    runtime: Runtime, folder: Path, tell: Tell, keeping: Keeping | None = None, *, on_gpu: bool = False
) -> Iterator[None]:
    """Inside, torch.compile works for the device of `runtime`; Inductor keeps its files in `folder`.

    `on_gpu`: where products of matrices are measured, padded ones win as on a GPU, else as if all took the same time.

    `keeping` (`graph.host.kept`) is there for what was compiled in an earlier run, from when something is compiled.

    `tell` gets the name of the kernel that first writes a buffer of compiled code and the path of the module that the
    buffer is of ("" where unknown), just before it is allocated, and None afterwards.
    """
    with ExitStack() as stack:

        @functools.cache
        def prepare() -> None:
            """Inductor is imported when something is compiled, not before."""
            stack.enter_context(_device(runtime))
            stack.enter_context(_inductor(runtime, folder, tell))
            if on_gpu:
                stack.enter_context(_padded())
            if keeping is not None:
                stack.enter_context(keeping(folder))

        context: Any = torch._dynamo.eval_frame.OptimizeContext
        plain = context.__init__

        def made(self: Any, *args: object, **kwargs: object) -> None:
            prepare()
            plain(self, *args, **kwargs)
            self.enter_exit_hooks.append(_hidden)

        stack.enter_context(mock.patch.object(context, "__init__", made))
        if hasattr(torch.compiler, "save_cache_artifacts"):  # from 2.7 on
            # What was compiled for no device is for no other run, nor what was for a real one for this.
            caches: Any = importlib.import_module("torch.compiler._cache").CacheArtifactManager
            stack.enter_context(mock.patch.object(caches, "record_artifact"))
            stack.enter_context(mock.patch.object(caches, "deserialize", return_value=None))
        stack.enter_context(mock.patch.object(modules, "_has_any_global_hook", return_value=False, create=True))
        stack.enter_context(mock.patch.object(modules.Module, "compile", _followed(modules.Module.compile)))
        yield


def _followed(plain: Callable[..., None]) -> Callable[..., None]:
    """`Module.compile`, whose module then calls what is registered for all modules, outside what is compiled."""

    def compile(self: Any, *args: object, **kwargs: object) -> None:
        plain(self, *args, **kwargs)
        run = self._compiled_call_impl

        def called(*args: object, **kwargs: object) -> Any:
            for hook in list(modules._global_forward_pre_hooks.values()):
                hook(self, args)
            result = None
            try:
                result = run(*args, **kwargs)
            finally:
                for after in list(modules._global_forward_hooks.values()):
                    after(self, args, result)
            return result

        self._compiled_call_impl = called

    return compile


#: Modules of torch._inductor.runtime that are made of what Triton has, in the order of their imports.
_OF_TRITON: Final = ("triton_compat", "triton_helpers", "triton_heuristics")


def told_of_triton() -> None:
    """Where Inductor was imported without Triton before, its parts that are made of Triton's are made anew."""
    compat: Any = sys.modules.get("torch._inductor.runtime.triton_compat")
    if compat is None or compat.HAS_TRITON:
        return
    for part in _OF_TRITON:
        module = sys.modules.get(f"torch._inductor.runtime.{part}")
        if module is None:
            continue
        before = dict(vars(module))
        importlib.reload(module)
        for name in [name for name in sys.modules if name.startswith("torch._inductor.")]:
            held = vars(sys.modules[name])
            stale = [key for key, old in before.items() if not key.startswith("__") and held.get(key, held) is old]
            held.update({key: getattr(module, key) for key in stale})


@contextlib.contextmanager
def anew(blocks: bool) -> Iterator[None]:
    """Inside, nothing that was compiled before is known, and nothing is kept.

    Compiling a whole model makes so many objects that Python's collector looks at all of them at some time: here it
    does so after its backward. Compiling `blocks` makes too few, and what Dynamo has the collector do after compiling
    (run_gc_after_compile) is for young objects: what is of interest here has become old by then.
    """
    torch._dynamo.reset()
    _patterns_unknown()
    try:
        with _young_ones_stay() if blocks else after_backwards(gc.collect):
            yield
    finally:
        torch._dynamo.reset()


def _young_ones_stay() -> contextlib.AbstractContextManager[Any]:
    """Without Dynamo's own call of the collector, where this release has one."""
    config: Any = torch._dynamo.config
    known = hasattr(config, "run_gc_after_compile")
    return config.patch(run_gc_after_compile=False) if known else contextlib.nullcontext()


#: What Inductor looks for in a graph is traced at the first compilation for a device, with scalars on that device; by
#: module of torch._inductor.fx_passes. Patterns that are known already are passed by.
_PATTERNS: Final = (
    *(("joint_graph", "lazy_init"), ("pad_mm", "_pad_mm_init")),
    *(("fuse_attention", "_sfdp_init"), ("misc_patterns", "_misc_patterns_init")),
)


def _patterns_unknown() -> None:
    """The next compilation is the first."""
    for part, name in _PATTERNS:
        if module := sys.modules.get(f"torch._inductor.fx_passes.{part}"):
            getattr(module, name).cache_clear()


def tells_of_backwards() -> bool:
    """Whether PyTorch says what was compiled: from 2.8 on."""
    return hasattr(callback, "CallbackTrigger")


@contextlib.contextmanager
def after_backwards(do: Callable[[], object]) -> Iterator[None]:
    """Inside, `do` is called after a backward was compiled, also once a program forgets all (torch.compiler.reset)."""

    def compiled(*finished: CallbackArgs) -> None:  # nothing, where it `tells_of_backwards` not
        if any(one.callback_trigger.name == "LAZY_BACKWARD" for one in finished):
            do()

    def cleared(handler: object) -> None:
        clear(handler)
        callback.on_compile_end(compiled)

    kind: Any = type(callback.callback_handler)
    clear, kind.clear = kind.clear, cleared
    callback.on_compile_end(compiled)
    try:
        yield
    finally:
        kind.clear = clear
        callback.callback_handler.remove_end_callback(compiled)


def _hidden() -> Callable[[], None]:
    """Hide what is registered for all modules from Dynamo, which would trace it: on a GPU there is nothing."""
    before = [dict(hooks) for hooks in _HOOKS]
    for hooks in _HOOKS:
        hooks.clear()

    def shown() -> None:
        for hooks, held in zip(_HOOKS, before, strict=True):
            hooks.update(held)

    return shown


@contextlib.contextmanager
def _device(runtime: Runtime) -> Iterator[None]:
    """Dynamo's view of the device is what `torch.cuda` is now, and Triton is there for it."""
    interface = _dynamo("device_interface")
    cuda, raw = torch.cuda, torch._C._cuda_getCurrentRawStream
    answers = {name: staticmethod(getattr(cuda, name)) for name in _INTERFACE}
    answers |= {name: getattr(cuda, name) for name in ("device", "Event", "Stream")}
    answers |= {
        "get_raw_stream": staticmethod(raw),
        "exchange_device": staticmethod(cuda._exchange_device),
        "maybe_exchange_device": staticmethod(cuda._maybe_exchange_device),
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(interface.CudaInterface, name, answer))
        rules = _dynamo("trace_rules")  # the device's kernels are no code to be traced
        skipped = re.compile(f"{rules.SKIP_DIRS_RE.pattern}|{re.escape(_OURS)}/(graph|simulator|strategies|traces)/")
        stack.enter_context(mock.patch.object(rules, "SKIP_DIRS_RE", skipped))
        utils = _dynamo("utils")
        stack.enter_context(mock.patch.object(utils, "triton", importlib.import_module("triton"), create=True))
        for module, name, told in _triton_answers(runtime):
            stack.enter_context(mock.patch.object(importlib.import_module(module), name, told, create=True))
        _know(stack, rules, utils)
        _forget()
        stack.callback(_forget)
        yield


def _know(stack: ExitStack, rules: ModuleType, utils: ModuleType) -> None:
    """What Dynamo knows of functions and classes of torch, it knows of those that stand in their place."""
    for table in _tables(rules):
        stack.enter_context(mock.patch.dict(table, _also_ours(table)))
    contexts = _dynamo("variables.ctx_manager")
    for name in ("exchange", "maybe_exchange"):
        if hasattr(contexts.CUDADeviceVariable, f"_{name}_fn"):
            ours = staticmethod(getattr(torch.cuda, f"_{name}_device"))
            stack.enter_context(mock.patch.object(contexts.CUDADeviceVariable, f"_{name}_fn", ours))
    streams = _streams()
    for name in ("_get_stream_by_index", "_get_event_by_index"):  # since 2.14 they ask for PyTorch's own classes
        if hasattr(streams, name):
            stack.enter_context(mock.patch.object(streams, name, streams.get_external_object_by_index))
    for module in (utils, _dynamo("guards")):  # since 2.15 they ask C++ which stream is the current one
        if hasattr(module, "get_current_stream"):
            stack.enter_context(mock.patch.object(module, "get_current_stream", torch.accelerator.current_stream))
    stubs, objects = (importlib.import_module(f"graph.fake_cuda.{name}") for name in ("stubs", "objects"))
    utils.common_constant_types.add(stubs.DEVICE_PROPERTIES)
    stack.callback(utils.common_constant_types.discard, stubs.DEVICE_PROPERTIES)
    scripts = _dynamo("variables.script_object")
    scripted = getattr(scripts, "CustomClassObjectVariable", None) or scripts.TorchScriptObjectVariable  # since 2.14
    plain = scripted.is_matching_cls
    of_scripts = staticmethod(lambda kind: kind is not objects.Generator and plain(kind))  # since 2.12 those are, too
    stack.enter_context(mock.patch.object(scripted, "is_matching_cls", of_scripts))


def _streams() -> Any:
    """Dynamo's module of streams, since 2.9; else None."""
    return sys.modules.get("torch._dynamo.variables.streams")


def _tables(rules: ModuleType) -> list[dict[Any, Any]]:
    """What Dynamo knows of functions and classes, by themselves."""
    functions = _dynamo("variables.torch")
    streams = _streams()
    contexts = _dynamo("variables.ctx_manager")
    return [
        rules.get_torch_obj_rule_map(),
        functions.constant_fold_functions,
        functions.constant_fold_functions_need_guards,
        getattr(streams, "_stream_fn_to_variable_cls", {}),
        getattr(contexts, "_device_context_manager_map", {}),
    ]


def _also_ours(table: Mapping[Any, Any]) -> dict[Any, Any]:
    """What the table says of functions of `torch.cuda`, for those that stand in their place now."""
    known = {one: one.__name__ for one in table if str(getattr(one, "__module__", "")).startswith("torch.cuda")}
    return {getattr(torch.cuda, name): table[one] for one, name in known.items() if hasattr(torch.cuda, name)}


def _triton_answers(runtime: Runtime) -> list[tuple[str, str, object]]:
    """What Triton is asked of the device, by module and name: it would ask the driver."""
    card = gpu(runtime.profile.name)
    driver = SimpleNamespace(active=triton_installed.driver(runtime))

    def peak(dtype: torch.dtype) -> float:
        """PyTorch gives Triton the clock in MHz, which takes kHz: a thousandth. So products count as bound by it."""
        return card.flops(str(dtype).removeprefix("torch.")) / 1e15

    return [
        ("triton.runtime.driver", "driver", driver),
        ("triton.runtime", "driver", driver),
        ("triton.testing", "get_dram_gbps", lambda: card.memory / 1e9),
        ("triton.testing", "get_max_tensorcore_tflops", peak),
        ("triton.testing", "get_max_simd_tflops", peak),
    ]


def _forget() -> None:
    """Forget what PyTorch keeps of the device and of Triton's absence."""
    for answer in (_triton.has_triton_package, _triton.has_triton):
        answer.cache_clear()
    for module, owner, name in (
        ("torch._inductor.runtime.hints", "DeviceProperties", "create"),
        ("torch._inductor.codecache", "CacheBase", "get_system"),
    ):
        if module in sys.modules:
            getattr(getattr(sys.modules[module], owner), name).cache_clear()


def _dynamo(part: str) -> Any:
    """A module of Dynamo."""
    return importlib.import_module(f"torch._dynamo.{part}")


def inductor(part: str) -> Any:
    """A module of Inductor."""
    return importlib.import_module(f"torch._inductor.{part}")


def counted(what: str, event: str) -> int:
    """How often PyTorch has counted an event of compilation."""
    return int(_dynamo("utils").counters[what][event])


@contextlib.contextmanager
def _inductor(runtime: Runtime, folder: Path, tell: Tell) -> Iterator[None]:
    """Inductor makes code for the device, whose kernels do nothing."""
    backend = inductor("compile_fx")
    parts = {name: sys.modules[f"torch._inductor.{name}"] for name in ("config", "codegen.wrapper")}
    later = ("runtime.triton_heuristics", "runtime.triton_helpers", "fx_passes.joint_graph")
    parts |= {name: inductor(name) for name in later}
    wrapper: Any = parts["codegen.wrapper"].PythonWrapperCodegen
    folder_of: Any = parts["fx_passes.joint_graph"].UniformValueConstantFolder
    autotuner = parts["runtime.triton_heuristics"].CachingAutotuner
    own = {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
    # A program that takes this away, or says another one, gets nothing of the user's own, and puts nothing there.
    fixed = SimpleNamespace(**{**vars(os), "environ": ChainMap(dict(own), os.environ)})
    with (
        parts["config"].patch(compile_threads=1, bundle_triton_into_fx_graph_cache=False),
        mock.patch.object(inductor("async_compile"), "get_compile_threads", return_value=1),  # whatever is asked for
        mock.patch.dict(os.environ, {**own, "TRITON_CACHE_DIR": str(folder)}),
        mock.patch.object(inductor("runtime.cache_dir_utils"), "os", fixed),
        mock.patch.object(inductor("cpu_vec_isa"), "valid_vec_isa_list", list),  # it asks the compiler: ten seconds
        mock.patch.object(autotuner, "_precompile_config", _building(runtime)),
        mock.patch.object(autotuner, "bench", _measured(runtime, tell, autotuner.bench)),
        mock.patch.object(parts["runtime.triton_helpers"], "set_driver_to_gpu"),
        mock.patch.object(torch._C._dynamo.guards, "_empty_strided_cuda", _empty(tell)),
        mock.patch.object(wrapper, "make_buffer_allocation", _noted(wrapper.make_buffer_allocation)),
        mock.patch.object(folder_of, "run", _folded(runtime, folder_of, folder_of.run)),
        _own_kernels(),
        following(runtime.values, backend),
    ):
        yield


def _padded() -> contextlib.AbstractContextManager[object]:
    """Where Inductor measures it (`pad_mm.py`), a product of matrices whose rows do not begin at multiples of 16 bytes
    is slower than that of padded ones, if tensor cores make it: in 16 bits, and in 32 by TF32."""
    module = inductor("fx_passes.pad_mm")
    name = "_should_pad" if hasattr(module, "_should_pad") else "_should_pad_bench"  # from 2.11 on
    plain = getattr(module, name)

    def asked(match: object, first: torch.Tensor, *rest: object, **named: object) -> Any:
        cores = first.dtype in (torch.float16, torch.bfloat16) or torch.backends.cuda.matmul.allow_tf32
        with mock.patch.object(module, "_skip_do_bench_times", cores):
            return plain(match, first, *rest, **named)

    return mock.patch.object(module, name, asked)


def _own_kernels() -> contextlib.AbstractContextManager[object]:
    """Each graph has its own objects of the kernels that it shares with others, and tunes them, as where processes
    compile (`AsyncCompile.triton`); one that is tuned already is found on disk. One process would keep the object, from
    PyTorch 2.8 on."""
    cache = inductor("codecache").PyCodeCache
    kept: dict[str, object] = getattr(cache, "modules_no_attr", {})

    def anew(plain: Load) -> Load:
        def load(kernel: str, source: str) -> Any:
            kept.pop(cache.write(source)[1], None)
            return plain(kernel, source)

        return load

    return _loaded_by(anew)


@contextlib.contextmanager
def kernels_loaded() -> Iterator[list[Callable[[], None]]]:
    """What loads each kernel that was loaded inside once more, if it was not tuned until then."""
    again: list[Callable[[], None]] = []

    def noted(plain: Load) -> Load:
        def load(kernel: str, source: str) -> Any:
            made = plain(kernel, source)

            def load_again() -> None:
                if len(made.launchers) > 1:  # it may have been tuned for another graph since
                    made.__dict__.update(vars(inductor("async_compile").AsyncCompile().triton(kernel, source)))

            again.append(load_again)
            return made

        return load

    with _loaded_by(noted):
        yield again


def _loaded_by(around: Callable[[Load], Load]) -> contextlib.AbstractContextManager[object]:
    """Inside, `around` stands before what loads kernels; where PyTorch has no function for that, nothing does."""
    module = inductor("async_compile")
    plain = getattr(module, _LOAD, None)
    return mock.patch.object(module, _LOAD, around(plain)) if plain else contextlib.nullcontext()


# ---------------------------------------------------------------------------------------------------------- kernels


@dataclass
class _Built:
    """A kernel for one of its configurations, as Triton's compiler would give it to Inductor."""

    config: Any
    kernel: SimpleNamespace
    launched: Callable[..., None]

    def make_launcher(self) -> Any:
        """What launches it: nothing happens."""

        def launcher(*args: object, stream: object, **kwargs: object) -> None:
            self.launched(args)

        facts = {
            "config": self.config,
            "n_regs": None,
            "n_spills": 0,
            "shared": 0,
            "cache_hash": "",
            "store_cubin": False,
        }
        launcher.__dict__.update(facts)
        return launcher


def _building(runtime: Runtime) -> Callable[..., object]:
    """In place of `CachingAutotuner._precompile_config`, which in 2.6 has one argument more and gives the launcher too.

    How many registers a kernel takes is not known.
    """

    def built(autotuner: Any, config: object, *of_2_6: object) -> object:
        name = autotuner.fn.__name__
        written = [word.startswith(_WRITTEN) for word in autotuner.fn.arg_names]
        kernel = SimpleNamespace(hash="", n_regs=None)
        one = _Built(config, kernel, lambda args: runtime.launched(name, args, written))
        return (kernel, one.make_launcher()) if of_2_6 else one

    return built


def _nothing(*launch: object) -> None:
    """A launch that is not told; a mock would keep its tensors."""


def _measured(runtime: Runtime, tell: Tell, plain: Callable[..., Any]) -> Callable[..., Any]:
    """`CachingAutotuner.bench`: its launches are not told, and what it allocates is for measuring a kernel."""

    def bench(self: Any, *args: object, **kwargs: object) -> Any:
        tell((f"autotuning of {self.fn.__name__}", ""))
        try:
            with mock.patch.object(runtime, "launched", _nothing):
                return plain(self, *args, **kwargs)
        finally:
            tell(None)

    return bench


# ---------------------------------------------------------------------------------------------------------- buffers


def _empty(tell: Tell) -> Callable[..., torch.Tensor]:
    """How compiled code makes a buffer."""

    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        caller = sys._getframe(1)
        tell(_behind(caller.f_code.co_filename, caller.f_lineno))
        try:
            return torch.empty_strided(size, stride, dtype=dtype, device="cuda")
        finally:
            tell(None)

    return empty


@functools.lru_cache(1 << 16)
def _behind(file: str, line: int) -> tuple[str, str]:
    """The kernel that first writes the buffer made at a line of generated code, and its module."""
    lines = linecache.getlines(file)
    if not (made := _MADE.match(lines[line - 1] if line <= len(lines) else "")):
        return "", ""
    name = re.compile(rf"\b{made[1]}\b")
    for text in lines[line:]:
        start = _STARTS.search(text)
        if start and name.search(start[2]) and "empty_strided" not in start[1]:
            return start[1], made[2] or ""
    return "", made[2] or ""


def _noted(plain: Callable[..., str]) -> Callable[..., str]:
    """Code that makes a buffer says which module it is of."""

    def noted(self: object, buffer: Any) -> str:
        name = _module(getattr(buffer, "origins", ()))
        return plain(self, buffer) + (f"  # of {name}" if name else "")

    return noted


def _module(nodes: Any) -> str:
    """The innermost module behind nodes of a graph; "" where none is noted."""
    found = ""
    for node in nodes:
        stack: Mapping[str, tuple[str, object]] | None
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        for path, _ in (stack or {}).values():
            plain = re.sub(r"_modules\['(\w+)'\]|\['?(\w+)'?\]", r".\1\2", re.sub(r"^[LG]\['self'\]", "", path))
            plain = re.sub(r"\.+", ".", plain).strip(".")
            found = max(found, plain, key=len)
    return found


# ---------------------------------------------------------------------------------------------------- constant folding


def _folded(runtime: Runtime, folder: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Tensors of one value throughout are worked out on the host beside the device, where they have none."""

    def run(self: Any, *args: object, **kwargs: object) -> Any:
        if isinstance(self, on_host):
            return plain(self, *args, **kwargs)
        with mock.patch.dict(runtime.assumptions):
            done = plain(self, *args, **kwargs)
        with OnHost():
            beside = on_host(self.module)
            beside.run()
        self.node_replacements.update(beside.node_replacements)
        return done

    on_host = type("OnHost", (folder,), {})
    return run
