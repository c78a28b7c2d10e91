"""One trace under many circumstances: allocator settings, devices, releases, orders, lengths, late frees.

`stress` replays the trace once for every `Scenario` and finds which setting lowers reserved memory. Workers get the
trace once; a replay computes only what a table needs. Draws are reproducible by their seed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pickle
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

from simulator.allocator import layout as at
from simulator.allocator.conf import parse_conf
from simulator.allocator.releases import Release, parse_release
from simulator.engine.min_memory import smallest_memory
from simulator.estimator.jobs import Dispatch, MakeExecutor, local_pool, uninterrupted
from simulator.estimator.results_file import Results
from simulator.what_if.variants import LEAST, Deferred, Variant, has_deferred_frees, movable_steps, vary
from traces.errors import ConfigError, Interrupted, LLMemError, ReplayError
from traces.model import Op, Strings, Trace
from traces.release import DEFAULT_RELEASE
from traces.text import reason

#: Settings that are tried where nobody names any; those that a release does not know are left out. Garbage collection
#: works below a memory limit only, which the string can set from PyTorch 2.10 on.
SETTINGS: Final = (
    "",
    "expandable_segments:True",
    *(f"max_split_size_mb:{size}" for size in (32, 64, 128, 256, 512)),
    *(f"roundup_power2_divisions:{count}" for count in (2, 4, 8, 16)),
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.99",
    "garbage_collection_threshold:0.8,per_process_memory_fraction:0.99",
    "large_segment_size_mb:64",
    "large_segment_size_mb:128",
    "expandable_segments:True,roundup_power2_divisions:8",
    "expandable_segments:True,large_segment_size_mb:64",
    "max_split_size_mb:128,roundup_power2_divisions:8",
    "max_split_size_mb:128,garbage_collection_threshold:0.8,per_process_memory_fraction:0.99",
)
#: Tried as well where the program itself sets a memory limit, which older releases have no option for.
LIMITED: Final = ("garbage_collection_threshold:0.6", "garbage_collection_threshold:0.8")
#: Most scenarios that go to a worker at once.
CHUNK: Final = 32
#: Events in all below which no worker processes are started.
FEW_EVENTS: Final = 4_000_000
#: Replays that the search for the smallest device takes, about.
_SEARCH: Final = 12
#: Traces and variants of them that a process keeps ready.
_KEPT: Final = 4

_SCENARIO_KEYS: Final = ("conf", "release", "memory", "deferred", "order", "lengths", "seed")
_RECORDED: Final = Variant()


@dataclass(frozen=True, slots=True)
class Scenario:
    """One circumstance: the whole string of allocator settings, PyTorch's release, the device's bytes (None: the
    trace's own), and what is changed in the events (`simulator.what_if.variants.Variant`).
    """

    conf: str
    release: str
    memory: int | None = None
    variant: Variant = _RECORDED

    @property
    def group(self) -> str:
        """Equal for scenarios that replay the same events."""
        return repr(self.variant)

    @property
    def document(self) -> dict[str, Any]:
        """The scenario as JSON: what differs from the trace as it is, besides settings and release."""
        changed = {name: value for name, value in asdict(self.variant).items() if value != _PLAIN[name]}
        return {"conf": self.conf, "release": self.release, "memory": self.memory, **changed}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Scenario:
        """The scenario that `document` describes (other keys are passed by)."""
        changed = {name: document.get(name, value) for name, value in _PLAIN.items()}
        return cls(document["conf"], document["release"], document.get("memory"), Variant(**changed))


_PLAIN: Final = asdict(Variant())


@dataclass(frozen=True, slots=True)
class Outcome:
    """A scenario and what became of it: a mapping of figures in bytes and counts, or `error`.

    `verdict`; `peak_allocated`, `peak_reserved` and `peak_requested` of the worst rank; `requested`, `rounding`,
    `unsplit_remainder`, `pending`, `stranded` and `cached_segments`: its reserved bytes at their peak, by cause;
    `num_alloc_retries`, `num_ooms` and `device_calls` of all ranks together; `min_fit` where it was asked for; and
    `cpu_seconds`, what the replay took.
    """

    scenario: Scenario
    figures: Mapping[str, Any]

    @property
    def failed(self) -> bool:
        """Whether there are no figures: the settings are undefined in PyTorch for these events, or the worker died."""
        return "error" in self.figures

    def __getitem__(self, name: str) -> Any:
        return self.figures[name]

    @property
    def fragmented(self) -> int:
        """Reserved bytes at their peak that no tensor had asked for."""
        return int(self["peak_reserved"] - self["requested"])


@dataclass(frozen=True, slots=True)
class Row:
    """One setting (with a release and a device) over all variants of the events: the worst of each figure."""

    conf: str
    release: str
    memory: int | None
    outcomes: tuple[Outcome, ...]

    @property
    def good(self) -> tuple[Outcome, ...]:
        """The outcomes that have figures."""
        return tuple(one for one in self.outcomes if not one.failed)

    @property
    def error(self) -> str | None:
        """Why there are no figures, where there are none."""
        return None if self.good else str(self.outcomes[0]["error"])

    @property
    def worst(self) -> Outcome:
        """The outcome that needs most; only of a row with figures."""
        return max(self.good, key=lambda one: (one["num_ooms"] > 0, one["peak_reserved"], one["num_alloc_retries"]))

    def most(self, name: str) -> int:
        """The largest value of a figure."""
        return max(int(one[name]) for one in self.good)

    @property
    def min_fit(self) -> int | None:
        """The smallest device on which every variant runs, where that was asked for."""
        sizes = [one.figures.get("min_fit") for one in self.good]
        return None if any(size is None for size in sizes) else max(int(size) for size in sizes if size is not None)

    @property
    def fits(self) -> bool:
        """Whether every variant ran through without an out-of-memory event."""
        return len(self.good) == len(self.outcomes) and all(one["verdict"] == "fits" for one in self.good)

    def rank(self) -> tuple[Any, ...]:
        """The better row is the smaller one: it fits, then peak reserved, retries, device calls, fewer options."""
        names = ("num_ooms", "peak_reserved", "num_alloc_retries", "device_calls")
        return (not self.fits, *(self.most(name) for name in names), self.conf.count(":"), self.conf)


@dataclass(frozen=True, slots=True)
class Stress:
    """What `stress` found: all outcomes, and how the trace runs as it is (`conf`, `release`, `device_bytes`)."""

    outcomes: tuple[Outcome, ...]
    conf: str
    release: str
    device_bytes: int
    events: int
    total: int
    kept: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    def rows(self) -> list[Row]:
        """A row for each setting, release and device, in the order in which they were asked for."""
        found: dict[tuple[str, str, int | None], list[Outcome]] = {}
        for one in self.outcomes:
            scenario = one.scenario
            found.setdefault((scenario.conf, scenario.release, scenario.memory), []).append(one)
        return [Row(*key, tuple(outcomes)) for key, outcomes in found.items()]

    def baseline(self) -> Row | None:
        """The row of the trace's own settings; None where it is not there, or has no figures."""
        same = (row for row in self.comparable() if row.conf == self.conf)
        return next(same, None)

    def comparable(self) -> list[Row]:
        """The rows with figures for the trace's own release and device (else for the first ones asked for)."""
        rows = [row for row in self.rows() if row.good]
        own = [row for row in rows if row.release == self.release and row.memory is None]
        if own or not rows:
            return own
        return [row for row in rows if (row.release, row.memory) == (rows[0].release, rows[0].memory)]

    def best(self) -> Row | None:
        """The best setting for the trace's own release and device, over all variants of its events."""
        return min(self.comparable(), key=Row.rank, default=None)

    def saved(self) -> int | None:
        """Bytes of peak reserved that the best setting saves; None where there is nothing to compare."""
        best, base = self.best(), self.baseline()
        if best is None or base is None:
            return None
        return base.most("peak_reserved") - best.most("peak_reserved")


# --- what to try --------------------------------------------------------------------------------------------------


def settings_for(release: str, trace: Trace | None = None) -> list[str]:
    """The settings of `SETTINGS` that a release knows, and those of `LIMITED` where the trace sets a limit."""
    chosen = parse_release(release)
    limited = trace is not None and any((rank.events.op == Op.SET_MEMORY_FRACTION).any() for rank in trace.ranks)
    return [conf for conf in (*SETTINGS, *(LIMITED if limited else ())) if _refusal(conf, chosen) is None]


def _refusal(conf: str, release: Release) -> ConfigError | None:
    """Why a release refuses a setting; None where it takes it."""
    try:
        parse_conf(conf, release)
    except ConfigError as error:
        return error
    return None


def grid(varied: Mapping[str, Sequence[str]]) -> list[str]:
    """The settings that combine every value of every option; the value `none` leaves the option out."""
    parts = [
        [None if value == "none" else f"{option}:{value}" for value in values] for option, values in varied.items()
    ]
    return [",".join(part for part in chosen if part is not None) for chosen in itertools.product(*parts)]


@dataclass(frozen=True)
class Axes:
    """What is combined: each list empty for the trace's own; `orders` and `lengths` are numbers of draws.

    Of `combined` settings (`grid`) those are left out that are illegal together.
    """

    settings: Sequence[str] = ()
    combined: Sequence[str] = ()
    releases: Sequence[str] = ()
    memories: Sequence[int] = ()
    deferred: Sequence[Deferred] = ()
    orders: int = 0
    lengths: int = 0
    seed: int = 0


def scenarios(trace: Trace, axes: Axes) -> tuple[list[Scenario], list[str]]:
    """Every combination of `axes` for a trace, its own settings first, and notes on what was left out.

    Raises ConfigError for settings that none of the releases knows, and where no combined one is legal.
    """
    notes: list[str] = []
    _check_settings(trace, axes)
    variants = _variants(trace, axes, notes)
    found: dict[str, Scenario] = {}
    for release in axes.releases or (trace.release or DEFAULT_RELEASE,):
        chosen = parse_release(release)
        asked = [*axes.settings, *axes.combined] or settings_for(release, trace)
        settings = _known([trace.conf, *asked], chosen, notes)
        for memory, variant, conf in itertools.product((None, *axes.memories), variants, settings):
            one = Scenario(conf, chosen.text, memory, variant)
            found.setdefault(json.dumps(one.document, sort_keys=True), one)
    if not found:
        raise ConfigError("; ".join(notes))
    return list(found.values()), notes


def _check_settings(trace: Trace, axes: Axes) -> None:
    """Refuse a setting that is illegal in every release, and a grid without a legal combination."""
    releases = [parse_release(release) for release in axes.releases or (trace.release or DEFAULT_RELEASE,)]

    def refusal(conf: str) -> ConfigError | None:
        """The last release's, where all refuse it."""
        errors = [_refusal(conf, release) for release in releases]
        return errors[-1] if all(errors) else None

    refused = [refusal(conf) for conf in axes.settings]
    combined = [refusal(conf) for conf in axes.combined]
    refused += combined[:1] if all(combined) else []
    for error in filter(None, refused):
        raise error


def _known(settings: Iterable[str], release: Release, notes: list[str]) -> list[str]:
    """The settings that a release knows, each once."""
    refusals = {conf: _refusal(conf, release) for conf in settings}
    notes += [f"left out for PyTorch {release.text}: {error}" for error in refusals.values() if error is not None]
    return [conf for conf, error in refusals.items() if error is None]


def _variants(trace: Trace, axes: Axes, notes: list[str]) -> list[Variant]:
    """The trace as it is, then one kind of change at a time."""
    found = [Variant()]
    if any(one != "recorded" for one in axes.deferred):
        if has_deferred_frees(trace):
            found += [Variant(deferred=one) for one in axes.deferred if one != "recorded"]
        else:
            notes.append("no tensor is in use on a second stream, so that no free waits: prompt and late are the same")
    if axes.orders or axes.lengths:
        steps = movable_steps(trace)
        kinds: dict[Literal["orders", "lengths"], int] = {"orders": axes.orders, "lengths": axes.lengths}
        for what, draws in kinds.items():
            if draws and steps < LEAST[what]:
                notes.append(f"{what} are left out: {steps} of the trace's steps could change places")
                kinds[what] = 0
        found += [Variant(order=number, seed=axes.seed) for number in range(1, kinds["orders"] + 1)]
        found += [Variant(lengths=number, seed=axes.seed) for number in range(1, kinds["lengths"] + 1)]
    return found


# --- the whole ----------------------------------------------------------------------------------------------------


def stress(
    trace: Trace,
    axes: Axes | Iterable[Scenario] = Axes(),
    *,
    smallest: bool = False,
    context: int | None = None,
    jobs: int | None = None,
    executor: Executor | MakeExecutor | None = None,
    results: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Stress:
    """Replay a trace under every scenario of `axes`.

    `smallest` also finds the smallest device of every scenario; `context` is that of `simulator.replay`. `jobs` worker
    processes run (by default one a core, none for little work), or `executor` in their place, as of
    `concurrent.futures`. To `results` every outcome is appended as a line of JSON, and what it has already is not
    replayed again (`force`: it begins anew). `progress(done, total)` is called after every outcome.

    Raises ConfigError for settings, sizes and releases that do not exist, TraceError where the trace is bad, and on
    Ctrl-C Interrupted, a KeyboardInterrupt that has what was finished.
    """
    from simulator.engine.replay import prepare

    started = time.perf_counter()
    prepare(trace)
    wanted, notes = scenarios(trace, axes) if isinstance(axes, Axes) else (list(axes), [])
    task = _Task(_key(trace), smallest, context)
    own = parse_release(trace.release or DEFAULT_RELEASE).text
    found = Stress(
        outcomes=(),
        conf=trace.conf,
        release=own,
        device_bytes=max(trace.device_of(rank).total_bytes for rank in trace.ranks),
        events=sum(len(rank.events) for rank in trace.ranks),
        total=len(wanted),
        notes=(*trace.notes, *notes),
    )
    done: dict[Scenario, Outcome] = {}
    report = progress or (lambda _done, _total: None)

    def so_far() -> Stress:
        ordered = tuple(done[one] for one in wanted if one in done)
        return replace(found, outcomes=ordered, seconds=time.perf_counter() - started)

    with _opened(results, force) as file:
        if file is not None:
            done.update(_kept(file.answers, wanted, task))
            found = replace(found, kept=len(done), notes=(*found.notes, *file.notes))
        report(len(done), len(wanted))

        def finished(scenario: Scenario, figures: Mapping[str, Any]) -> None:
            with uninterrupted():
                if file is not None:
                    file.append({**scenario.document, "trace": task.key, "context": context, **figures})
                done[scenario] = Outcome(scenario, figures)
            report(len(done), len(wanted))

        try:
            _run([one for one in wanted if one not in done], trace, task, finished, jobs, executor)
        except KeyboardInterrupt:
            raise Interrupted(so_far()) from None
    return so_far()


def _opened(results: str | os.PathLike[str] | None, force: bool) -> Any:
    if results is None:
        return nullcontext(None)
    return Results(results, force=force, sync=False)  # replays are many and quick


def _kept(answers: Iterable[Mapping[str, Any]], wanted: Iterable[Scenario], task: _Task) -> dict[Scenario, Outcome]:
    """The outcomes that a results file has already of these scenarios, this trace and these options."""
    asked = set(wanted)
    kept = {}
    for answer in answers:
        if answer.get("trace") != task.key or answer.get("context") != task.context:
            continue
        scenario = Scenario.of(answer)
        figures = {name: value for name, value in answer.items() if name not in (*_SCENARIO_KEYS, "trace", "context")}
        whole = not task.smallest or scenario.memory is not None or "min_fit" in figures
        if scenario in asked and ("error" in figures or whole):
            kept[scenario] = Outcome(scenario, figures)
    return kept


def _run(
    waiting: Sequence[Scenario],
    trace: Trace,
    task: _Task,
    finished: Callable[[Scenario, Mapping[str, Any]], None],
    jobs: int | None,
    executor: Executor | MakeExecutor | None,
) -> None:
    """Replay the scenarios here, in worker processes, or in an executor of others."""
    if not waiting:
        return
    events = sum(len(rank.events) for rank in trace.ranks) * len(waiting) * (_SEARCH if task.smallest else 1)
    receive(task.key, trace)
    if executor is None and jobs is None and events < FEW_EVENTS:
        for scenario in waiting:
            finished(scenario, work([scenario.document], task)[0])
        return
    packed = pack(trace)
    if executor is not None:
        task = replace(task, packed=packed)

    def pool(size: int) -> Executor:
        return local_pool(size, ["simulator.allocator.prepared", "simulator.what_if.stress"], receive, task.key, packed)

    Dispatch(work, task, finished, jobs, executor, pool=pool, most=CHUNK).run(list(waiting))


# --- workers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    """What all scenarios have in common; `packed` is the trace for workers that were not given it before."""

    key: str
    smallest: bool
    context: int | None
    packed: bytes | None = field(default=None, repr=False)


_traces: Final[OrderedDict[str, Trace]] = OrderedDict()
_ready: Final[OrderedDict[tuple[str, Variant], Any]] = OrderedDict()
_making: Final = threading.Lock()


def _key(trace: Trace) -> str:
    """A digest of all that decides a replay of the trace."""
    from simulator.engine.schedule import _digest

    digest = hashlib.blake2b(repr((trace.conf, trace.release, trace.devices, trace.groups)).encode(), digest_size=12)
    for rank in trace.ranks:
        digest.update(repr(rank.ranks).encode() + _digest(rank))
    return digest.hexdigest()


def pack(trace: Trace) -> bytes:
    """A trace for the way to a worker, without what no replay needs."""
    unneeded = ("flops", "address")
    entries = []
    for rank in trace.ranks:
        events = rank.events
        columns = {name: column for name, column in events.columns.items() if name not in unneeded}
        names = columns.get("name")
        if isinstance(names, Strings):
            columns["name"] = names.only(events.op == Op.PHASE)
        entries.append(replace(rank, events=replace(events, columns=columns, extra={}), extra={}))
    bare = replace(trace, ranks=tuple(entries), metadata={}, extra={}, notes=())
    return zlib.compress(pickle.dumps(bare, pickle.HIGHEST_PROTOCOL), 1)


def receive(key: str, given: Trace | bytes) -> None:
    """Keep a trace for the scenarios that will come."""
    with _making:
        if key not in _traces:
            _traces[key] = pickle.loads(zlib.decompress(given)) if isinstance(given, bytes) else given
        _traces.move_to_end(key)
        while len(_traces) > _KEPT:
            _traces.popitem(last=False)


def _prepared(task: _Task, variant: Variant) -> Any:
    """The trace of a task, changed, and ready for the kernels."""
    from simulator.engine.replay import prepare

    if task.key not in _traces and task.packed is not None:
        receive(task.key, task.packed)
    with _making:
        made = _ready.get((task.key, variant))
        if made is None:
            made = prepare(vary(_traces[task.key], variant))
            while len(_ready) >= _KEPT:
                _ready.popitem(last=False)
            _ready[(task.key, variant)] = made
        return made


def work(documents: Sequence[Mapping[str, Any]], task: _Task) -> list[dict[str, Any]]:
    """What a worker does: the figures of each scenario, in order."""
    return [_figures(Scenario.of(document), task) for document in documents]


def _figures(scenario: Scenario, task: _Task) -> dict[str, Any]:
    started = time.thread_time()
    try:
        found = _measured(scenario, task)
    except LLMemError as error:
        found = {"error": reason(error)}
    except MemoryError:
        found = {"error": "not enough memory on this machine for the job"}
    return {**found, "cpu_seconds": round(time.thread_time() - started, 4)}


def _measured(scenario: Scenario, task: _Task) -> dict[str, Any]:
    from simulator.engine import analysis
    from simulator.engine.replay import serve

    made = _prepared(task, scenario.variant)
    conf, release = scenario.conf, scenario.release
    given = scenario.memory
    ranks = serve(made, conf=conf, release=release, memory=given, context=task.context, after_oom="continue")

    def peak(machine: Any, stat: int) -> int:
        return int(machine.stat(stat)["all"][1])

    def counted(*cells: int) -> int:
        return sum(len(one.ranks) * int(one.machine.memory[cell]) for one in ranks for cell in cells)

    worst = max(ranks, key=lambda one: (one.oom is not None, peak(one.machine, at.RESERVED_BYTES))).machine
    causes = asdict(analysis.fragmentation_of(worst))
    verdict: Literal["fits", "oom"] = "fits" if all(one.oom is None for one in ranks) else "oom"
    found = {
        "verdict": verdict,
        "peak_allocated": peak(worst, at.ALLOCATED_BYTES),
        "peak_reserved": peak(worst, at.RESERVED_BYTES),
        "peak_requested": peak(worst, at.REQUESTED_BYTES),
        **{name: causes[name] for name in causes if name not in ("event", "reserved")},
        "num_alloc_retries": counted(at.RETRIES),
        "num_ooms": counted(at.OOMS),
        "device_calls": counted(at.DEVICE_ALLOCS, at.DEVICE_FREES),
    }
    if task.smallest and scenario.memory is None:
        try:
            found["min_fit"] = smallest_memory(made, conf=conf, release=release)
        except ReplayError:  # an allocation fails whatever the size
            found["min_fit"] = None
    return found
