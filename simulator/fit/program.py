"""The cheapest changes that make a program fit, of those that can be made from outside: allocator settings, processes
of its launcher, arguments of transformers' Trainer where they come from the command line.

A program is recorded on a GPU whose memory never runs out, and its events are replayed on its own. So one recording
serves all allocator settings; every other change is a recording of its own.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from graph.hardware.profile import profile
from graph.keys import nearest
from simulator.allocator.conf import conf_from_environment, parse_conf
from simulator.allocator.releases import parse_release
from simulator.engine.replay import replay
from simulator.estimator.jobs import default_jobs
from simulator.estimator.judging import judged, with_context
from simulator.estimator.outside import bytes_of, least_of, process_terms
from simulator.estimator.step_time import stall_of
from simulator.fit.advice import advise
from simulator.fit.changes import CHANGES, PROPORTIONAL, Change, keep_all
from simulator.fit.measure import endless, peaks_of
from simulator.fit.plans import FittedProgram, Judged, Plans
from simulator.fit.search import Mapped, Table, search_table
from simulator.recording.arguments import NAMES
from simulator.recording.launch import Recorded, RecordError, record
from simulator.recording.request import INTERRUPTED, Request
from simulator.recording.result import step_of
from simulator.what_if.variants import Variant, vary
from traces.errors import ConfigError, Interrupted, LLMemError
from traces.model import Op, Trace
from traces.text import quoted

if TYPE_CHECKING:
    from simulator.engine.result import OutsideTerm
    from simulator.estimator.outside import Context

#: Seconds after which no further change of a program is tried.
SECONDS: Final = 300.0
_BATCH: Final = "per_device_train_batch_size"
_ACCUM: Final = "gradient_accumulation_steps"
#: What no plan changes where it is kept: arguments, and what is set around the program.
_KEYS: Final = (*NAMES, "alloc_conf", "nproc_per_node")
_SETS: Final = "the program sets the allocator itself ({}): none of its settings was tried"
#: Collectives of ranks of which each has a part.
_PARTS: Final = frozenset({"all_gather", "reduce_scatter"})
_When = Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True)
class Started:
    """How a program is started: `alloc_conf` is in force (`settable`: from outside), `arguments` are the Trainer's on
    its command line; `shares` says whether its ranks have parts, `gpus` how many it may use (None: those it has)."""

    request: Request
    ranks: tuple[int, ...] | None = None
    alloc_conf: str = ""
    settable: bool = True
    arguments: Mapping[str, Any] = field(default_factory=dict)
    shares: bool = False
    gpus: int | None = None

    @property
    def recorded_ranks(self) -> tuple[int, ...]:
        """The ranks that are recorded (None: all)."""
        return tuple(range(self.request.world)) if self.ranks is None else self.ranks


# --- the table -------------------------------------------------------------------------------------------------------


def _smaller_batch(program: Started) -> Iterator[Mapping[str, Any]]:
    """Halves down to one sample, with as many more micro-batches."""
    batch, accum = (program.arguments.get(name) or 0 for name in (_BATCH, _ACCUM))
    while batch > 1 and batch % 2 == 0 and accum:
        batch, accum = batch // 2, accum * 2
        yield {_BATCH: batch, _ACCUM: accum}


def _argument(
    name: str, *values: object, when: Callable[[Mapping[str, Any]], bool]
) -> Callable[[Started], Iterator[Any]]:
    """Values of an argument that the Trainer has, where it has others and something holds."""

    def found(program: Started) -> Iterator[Mapping[str, Any]]:
        if name in program.arguments and program.arguments[name] not in values and when(program.arguments):
            yield from ({name: value} for value in values)

    return found


def _optimizer(value: str, *instead: str, package: str = "torch") -> Callable[[Started], Iterator[Any]]:
    """Another optimizer, where the package that it is from is installed."""
    return _argument(
        "optim", value, when=lambda given: given["optim"] in instead and importlib.util.find_spec(package) is not None
    )


def _processes(program: Started) -> Iterator[Mapping[str, Any]]:
    request = program.request
    nodes = request.world // request.processes
    if program.shares and request.launched:
        for count in (2, 4, 8):
            if request.processes < count and count * nodes <= (program.gpus or 0):
                yield {"nproc_per_node": count}


#: Cheapest first, as `simulator.fit.changes.CHANGES`.
_ARGUMENTS: Final = (
    Change("optimizer", "the optimizer in one kernel", "nothing", _optimizer("adamw_torch_fused", "adamw_torch")),
    Change("cache", "cached memory is given back after each step", "time", _argument(
        "torch_empty_cache_steps", 1, when=lambda _: True)),
    Change("activations", "activations are computed again", "time", _argument(
        "gradient_checkpointing", True, when=lambda _: True)),
    Change("batch", "smaller micro-batches", "time", _smaller_batch),
    Change("gpus", "more processes, each with a part, and more samples a step", "time", _processes),
    Change("loss", "Liger's kernels, whose loss keeps no logits", "rounding", _argument(
        "use_liger_kernel", True, when=lambda _: importlib.util.find_spec("liger_kernel") is not None)),
    Change("precision", "mixed precision", "rounding", _argument(
        "bf16", True, when=lambda given: not given.get("fp16"))),
    Change("optimizer", "8-bit optimizer states", "rounding", _optimizer(
        "adamw_bnb_8bit", "adamw_torch", "adamw_torch_fused", package="bitsandbytes")),
    Change("optimizer", "factored optimizer states", "method", _optimizer(
        "adafactor", "adamw_torch", "adamw_torch_fused")),
)  # fmt: skip


def _offered(
    program: Started, needs: int, keep: Collection[str]
) -> Iterator[tuple[Change, Iterator[Mapping[str, Any]]]]:
    """The changes of a program, each with what it may set."""
    settings = (change for change in CHANGES if change.part == "allocator" and program.settable)
    for change in (*settings, *_ARGUMENTS):
        yield change, (keys for keys in change.keys(program) if keep_all(keep, keys))


def _changed(program: Started, keys: Mapping[str, Any]) -> Started | None:
    """The program started otherwise; None where settings contradict each other."""
    arguments = {name: value for name, value in keys.items() if name in NAMES}
    request, conf = program.request, keys.get("alloc_conf", program.alloc_conf)
    try:
        parse_conf(conf, parse_release(request.release))
    except ConfigError:
        return None
    if (count := keys.get("nproc_per_node")) is not None:
        request = replace(request, processes=count, world=request.world // request.processes * count)
    added = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    return replace(
        program,
        request=replace(request, program=(*request.program, *added)),
        alloc_conf=conf,
        arguments={**program.arguments, **arguments},
    )


def _left(program: Started, change: Change, keys: Mapping[str, Any]) -> float:
    """The share that stays of what a change saves, beside another one that sets these keys."""
    if change.part in PROPORTIONAL and _BATCH in keys:
        return float(keys[_BATCH] / program.arguments[_BATCH])
    return 1.0


def _said(keys: Mapping[str, Any], variable: str) -> str:
    """A variable of the environment, then an option of the launcher, then the program's own arguments."""
    spelled = {"alloc_conf": f"{variable}={{}}", "nproc_per_node": "--nproc-per-node {}"}
    names = (*(name for name in spelled if name in keys), *(name for name in keys if name not in spelled))
    return " ".join(spelled.get(name, f"--{name} {{}}").format(keys[name]) for name in names)


# --- recording -------------------------------------------------------------------------------------------------------


class _Recorder:
    """Records a program once for each way in which it is started, and judges it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: dict[str, Recorded] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def recorded(self, program: Started) -> Recorded:
        """What a program does where memory never runs out. RecordError where it fails."""
        text = program.request.text()
        with self._lock:
            lock = self._locks.setdefault(text, threading.Lock())
        with lock:
            if text not in self._known:
                self._known[text] = _run(replace(program.request, timed=True, endless=True), program)
        return self._known[text]

    def __call__(self, program: Started) -> Judged | None:
        """The answer for a program; None where it cannot run so."""
        try:
            recorded = self.recorded(program)
            trace, terms = events_of(recorded, program), self.terms(program.request)
            found = judged(trace, terms, analyse=False, needs=True)
            if found.verdict != "oom" and recorded.asked:  # what it does may be another thing on its own GPU
                _run(replace(program.request, conf=program.alloc_conf, context=bytes_of(terms)), program)
        except LLMemError:
            return None
        ns: float | None = sum(step_of(recorded).values()) or None
        waits = 0.0
        if ns is not None and found.verdict == "tight":
            waits = stall_of(with_context(trace, bytes_of(terms))).seconds * 1e9
        total = found.decisive.device.total_bytes
        peaks = peaks_of(replay(endless(trace), analyse=False))
        world = program.request.world
        taken = None if ns is None else (ns + waits) / world
        return Judged(
            found.needed, total, found.verdict, taken, total - bytes_of(least_of(terms)), peaks, waits / world
        )

    def terms(self, request: Request) -> tuple[OutsideTerm, ...]:
        """What lies outside the allocator for a rank."""
        return process_terms([profile(request.gpu, request.release)], self._context, int(request.world > 1))


def events_of(recorded: Recorded, program: Started) -> Trace:
    """The events of a recording in simulated time as they are without it, under a program's settings."""
    return replace(vary(recorded.trace, Variant(deferred="prompt")), conf=program.alloc_conf)


def _run(request: Request, program: Started) -> Recorded:
    found = record(request, program.recorded_ranks, silent=True)
    if found.exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    if found.exit_code:
        why = f": {found.raised}" if found.raised else ""
        raise RecordError(f"{quoted(request.program[0])} ended with exit code {found.exit_code}{why}")
    return found


def _shares(trace: Trace) -> bool:
    """Whether ranks gather what each has a part of."""
    for rank in trace.ranks:
        names = rank.events.strings("name")
        kernels = {names.get(int(place)) or "" for place in (rank.events.op == Op.KERNEL).nonzero()[0]}
        if any(part in name for name in kernels for part in _PARTS):
            return True
    return False


# --- the whole -------------------------------------------------------------------------------------------------------


def fit_program(
    request: Request,
    ranks: Collection[int] | None = None,
    *,
    keep: Collection[str] = (),
    gpus: int | None = None,
    context: Context = "auto",
    seconds: float = SECONDS,
    jobs: int | None = None,
    trying: Callable[[str], object] | None = None,
) -> FittedProgram:
    """The cheapest changes from outside that make the program of a request fit its GPU, each plan recorded.

    `ranks` are recorded (None: all). No plan changes an argument or setting of `keep`; with `gpus` a launcher may start
    as many processes. `context` are the bytes of each GPU that are not PyTorch's. `jobs` processes run at once
    (default: one a core). `trying(options)` is called before each try. Raises RecordError where the program fails,
    ConfigError for a bad name of `keep`, and Interrupted, with what is known, on Ctrl-C.
    """
    for name in keep:
        if name not in _KEYS:
            raise ConfigError(f"keep: no plan changes {name!r} of a program; the nearest is '{nearest(name, _KEYS)}'")
    begun = time.monotonic()
    recorder = _Recorder(context)
    plain = Started(request, None if ranks is None else tuple(ranks), gpus=gpus)
    first = recorder.recorded(plain)
    release = parse_release(request.release)
    outside = request.conf if request.conf is not None else conf_from_environment(os.environ, release) or ""
    program = replace(
        plain,
        alloc_conf=first.trace.conf,
        settable=first.trace.conf == outside,
        arguments=first.arguments,
        shares=_shares(first.trace),
    )
    notes = (*first.notices, *first.assumptions, *(() if program.settable else (_SETS.format(first.trace.conf),)))
    said = partial(_said, variable=release.alloc_conf_variable)
    table = Table(partial(_offered, keep=keep), _changed, _left, said)
    width = max(1, (jobs or default_jobs()) // len(program.recorded_ranks))

    def fitted(plans: Plans) -> FittedProgram:
        needed = plans.whole is not None and plans.whole.verdict != "fits"
        trace = events_of(first, program)
        rank = judged(trace, recorder.terms(request), analyse=False, needs=True).decisive
        advice = advise(trace, "" if first.arguments else first.written) if needed else ()
        return FittedProgram(
            plans=plans, keep=tuple(keep), notes=notes, program=request.program, rank=rank, advice=advice
        )

    def found(mapped: Mapped) -> Plans:
        left = seconds - (time.monotonic() - begun)
        return search_table(program, recorder, table, seconds=left, mapped=mapped, width=width, trying=trying)

    try:
        if width == 1:
            return fitted(found(map))
        with ThreadPoolExecutor(width) as pool:
            return fitted(found(pool.map))
    except Interrupted as error:
        raise Interrupted(fitted(error.found)) from None
