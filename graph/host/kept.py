"""What Inductor compiled is kept for the next run, by PyTorch's own caches of AOTAutograd and of graphs.

A program that was compiled before compiles in a fraction of the time, and allocates what it did in its first run. Which
configuration of a kernel won is not kept, so that autotuning takes its buffers again; the patterns that Inductor looks
for are traced as at a first compilation; what compiling took of the device for a moment is taken again; and Python's
collector runs where it did. Where compiling measures kernels (max-autotune, products that may be padded), code is
compiled anew each time.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from unittest import mock

import torch

from graph.host import compiled
from traces.errors import OutputError
from traces.files import write_atomically
from traces.jit import CACHE_ROOT

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from graph.fake_cuda.device import Observer, Runtime
    from graph.fake_cuda.kernels import Kind
    from graph.fake_cuda.torch_private import Operator

Compiled = Callable[..., object]
Compile = Callable[..., Compiled]
#: The caches in Inductor's folder that are kept (AOTAutogradCache, FxGraphCache).
_CACHES: Final = ("aotautograd", "fxgraph")
#: Bytes on disk from which on the oldest entries go, down to half of it.
_MOST: Final = 1 << 30
#: Bytes that folding constants allocates at most at a time.
_SCALARS: Final = 1 << 12
#: Settings of Inductor under which compiling measures kernels.
_MEASURING: Final = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise")


def _store() -> Path | None:
    """Where it is kept, for this PyTorch and for this code; None where no folder can be written, and where it is not
    known when a backward was compiled."""
    if not CACHE_ROOT or not compiled.tells_of_backwards():
        return None
    made_by = hashlib.sha256(f"{torch.__version__} {torch.version.git_version} {sys.version}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        made_by.update(source.read_bytes())
    return Path(CACHE_ROOT) / f"compiled-{made_by.hexdigest()[:16]}"


@contextlib.contextmanager
def keeping(runtime: Runtime, folder: Path) -> Iterator[None]:
    """Inside, what is compiled with `folder` as Inductor's is looked for in what is kept first, and kept."""
    if (where := _store()) is None:
        yield
        return
    _pruned(where)
    folder.mkdir(parents=True, exist_ok=True)
    for name in _CACHES:
        (where / name).mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(where / name, target_is_directory=True)
    backend, patterns = compiled.inductor("compile_fx"), compiled.inductor("fx_passes.joint_graph")
    taken, collections = _Taken(runtime, where / "taken"), _Collections()
    with (
        mock.patch.object(backend, "compile_fx", _as_if_first(taken, collections, folder, backend.compile_fx)),
        mock.patch.object(patterns, "lazy_init", taken.unnoted(patterns.lazy_init)),
        collections.followed(),
    ):
        yield


def _as_if_first(taken: _Taken, collections: _Collections, folder: Path, plain: Compile) -> Compile:
    """Inductor's `compile_fx`, which calls itself with the settings of a mode in force."""
    config, patterns = compiled.inductor("config"), compiled.inductor("fx_passes.joint_graph")
    by_device = "input_device" in inspect.signature(patterns.lazy_init).parameters
    met: set[str] = set()  # in this run
    began = time.time()

    def compile_fx(model: object, inputs: Sequence[object], *args: object, **kwargs: object) -> Compiled:
        key = _key(model, inputs)
        measures = any(getattr(config, name, False) for name in _MEASURING)
        if key not in met and (measures or max(taken.of(key).taken, default=0) > _SCALARS):
            _parted(folder, began)
        before = _hits()
        collections.generation = -1
        with taken.noted() as noted, compiled.kernels_loaded() as loads:
            made = plain(model, inputs, *args, **kwargs)
        if key in met:  # by a call inside this one, or before, when a first run has it in its cache too
            return made
        met.add(key)
        if _hits() == before:
            facts = Facts(noted, collections.generation)
            taken.keep(key, facts)
            return _at_first_backward(
                made, lambda: collections.of_backward(lambda found: taken.keep(key, facts._replace(backward=found)))
            )
        patterns.lazy_init(*_devices(model, inputs)[:by_device])
        facts = taken.of(key)
        taken.again(facts)
        _collect(facts.forward)
        if (collected := facts.backward) is None:
            return made

        def as_if_compiled() -> None:
            for load in loads:
                load()
            _collect(collected)

        return _at_first_backward(made, as_if_compiled)

    return compile_fx


def _devices(model: object, inputs: Sequence[object]) -> list[torch.device]:
    """Of what goes into a graph of Dynamo's, then of what it makes (as get_inputs_devices: torch/_dynamo/utils.py)."""
    nodes = model.graph.nodes if isinstance(model, torch.fx.GraphModule) else ()
    values = [*inputs, *(node.meta.get("example_value") for node in nodes)]
    return [one.device for one in values if isinstance(one, torch.Tensor) and one.device.type != "meta"]


def _hits() -> int:
    return compiled.counted("aot_autograd", "autograd_cache_hit")


def _collect(generation: int) -> None:
    """Python's collector, for objects of this generation (-1: of none), unless the program has turned it off."""
    if generation >= 0 and gc.isenabled():
        gc.collect(generation)


class _Collections:
    """The oldest generation for which Python's collector ran, since it was set to -1."""

    def __init__(self) -> None:
        self.generation = -1
        self._told: Callable[[int], None] | None = None

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, it is followed."""
        gc.callbacks.append(self._collected)
        try:
            with compiled.after_backwards(self._backward_compiled):
                yield
        finally:
            gc.callbacks.remove(self._collected)

    def of_backward(self, told: Callable[[int], None]) -> None:
        """A backward is compiled now; `told` gets what there was until its end."""
        self.generation = -1
        self._told = told

    def _collected(self, phase: str, info: Mapping[str, int]) -> None:
        self.generation = max(self.generation, info["generation"])

    def _backward_compiled(self) -> None:
        """A backward was compiled."""
        if self._told:
            self._told(self.generation)
            self._told = None


def _at_first_backward(made: Compiled, do: Callable[[], object]) -> Compiled:
    """Compiled code before whose first backward `do` is called."""
    waiting = True

    @functools.wraps(made)
    def called(*args: object) -> object:
        nonlocal waiting
        results = made(*args)
        if waiting:
            for one in results if isinstance(results, (list, tuple)) else [results]:
                if isinstance(one, torch.Tensor) and one.grad_fn is not None:
                    waiting = False
                    _once(one.grad_fn, do)
                    break
        return results

    return called


def _once(node: Node, do: Callable[[], object]) -> None:
    """Before a node of autograd runs for the first time, `do` is called."""

    def before(gradients: object) -> None:
        handle.remove()
        do()

    handle = node.register_prehook(before)


class Facts(NamedTuple):
    """What compiling took of the device for a moment, bytes of what was allocated, in order (-n: the n-th was freed),
    and the oldest generations that Python's collector went through meanwhile; None where the backward was not compiled
    when it first ran (with the forward, where shapes vary, or never)."""

    taken: Sequence[int] = ()
    forward: int = -1
    backward: int | None = None


class _Taken:
    """The facts of what is compiled."""

    def __init__(self, runtime: Runtime, where: Path) -> None:
        self.runtime, self.where = runtime, where

    @contextlib.contextmanager
    def noted(self) -> Iterator[list[int]]:
        """What is taken inside."""
        noted: list[int] = []
        with self._told(_Watching(self.runtime, noted)):
            yield noted

    def unnoted(self, plain: Callable[..., object]) -> Callable[..., object]:
        """A function, of which nothing is noted."""

        @functools.wraps(plain)
        def called(*args: object) -> object:
            with self._told(getattr(self.runtime.observer, "observer", self.runtime.observer)):
                return plain(*args)

        return called

    @contextlib.contextmanager
    def _told(self, observer: Observer | None) -> Iterator[None]:
        before = self.runtime.observer
        self.runtime.observer = observer
        try:
            yield
        finally:
            self.runtime.observer = before

    def keep(self, key: str, facts: Facts) -> None:
        """Keep the facts."""
        self.where.mkdir(exist_ok=True)
        with contextlib.suppress(OSError, OutputError), write_atomically(self.where / key, force=True) as file:
            file.write(json.dumps(facts).encode())

    def of(self, key: str) -> Facts:
        """The facts; none where nothing was kept."""
        try:
            return Facts(*json.loads((self.where / key).read_bytes()))
        except (OSError, ValueError, TypeError):
            return Facts()

    def again(self, facts: Facts) -> None:
        """Take what was taken again."""
        living: list[torch.Tensor | None] = []
        for size in facts.taken:
            if size > 0:
                living.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            else:
                living[-size - 1] = None


class _Watching:
    """An observer that notes what is allocated and freed, and tells the one that was there before."""

    def __init__(self, runtime: Runtime, noted: list[int]) -> None:
        self.observer: Any = getattr(runtime.observer, "observer", runtime.observer)
        self._runtime, self._noted = runtime, noted
        self._numbers: dict[int, int] = {}
        self._born = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.observer, name)

    def operator(
        self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: object, born: list[int], memo: Kind
    ) -> None:
        """A kernel ran."""
        for storage in born:
            self._born += 1
            self._numbers[storage] = self._born
            self._noted.append(self._runtime.bytes(storage))
        self.observer.operator(func, args, kwargs, out, born, memo)

    def freed(self, storage: int) -> None:
        """A storage died."""
        if number := self._numbers.pop(storage, 0):
            self._noted.append(-number)
        self.observer.freed(storage)


def _key(model: object, inputs: Sequence[object]) -> str:
    """What is compiled: its code, what its inputs are like, and the modes that change what it does."""
    modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    return hashlib.sha256(f"{getattr(model, 'code', '')} {_likeness(inputs)} {modes}".encode()).hexdigest()


def _likeness(one: object) -> object:
    """What a tensor is like; of a list (compiled autograd has all of its inputs in one), what its members are."""
    if isinstance(one, torch.Tensor):
        return tuple(one.shape), one.stride(), one.dtype, one.device, one.requires_grad
    return [_likeness(part) for part in one] if isinstance(one, list | tuple) else one


def _parted(folder: Path, began: float) -> None:
    """From here on only what this run has compiled is looked for, and nothing is kept."""
    for name in _CACHES:
        link = folder / name
        if not link.is_symlink():
            continue
        found = [path for path in link.rglob("*") if path.is_file() and path.stat().st_mtime >= began]
        places = [(path.read_bytes(), path.relative_to(link)) for path in found]
        link.unlink()
        link.mkdir()
        for content, place in places:
            (link / place).parent.mkdir(parents=True, exist_ok=True)
            (link / place).write_bytes(content)


def _pruned(where: Path) -> None:
    """The oldest entries go where there are too many; another run may do the same now."""
    files = [(path.stat(), path) for path in where.rglob("*") if path.is_file()] if where.exists() else []
    total = sum(facts.st_size for facts, _ in files)
    if total <= _MOST:
        return
    for facts, path in sorted(files, key=lambda file: file[0].st_mtime):
        with contextlib.suppress(OSError):
            path.unlink()
        total -= facts.st_size
        if total <= _MOST // 2:
            return
