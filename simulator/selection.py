"""Which method, and which micro-batch, for a model on given GPUs: every method is simulated at its largest batch.

`select` is the whole of it: for each method and split of the GPUs it captures the step at a batch, replays it on the
device less what lies outside the allocator, and searches the largest micro-batch that fits; a straight line through
what it has seen only says where to look next. Methods are searched in parallel, each in one worker.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from simulator.dispatching import Dispatch, MakeExecutor, local_pool
from simulator.result import OutsideTerm
from traces.errors import ConfigError, LLMemError
from traces.model import Events
from traces.text import one_line

if TYPE_CHECKING:
    from graph.case import Case
    from graph.method import Method
    from graph.model import StepGraph
    from simulator.result import Result
    from traces.model import Trace

POLICIES: Final = ("throughput", "llmem")
#: The share of a device that stays free beside the likely size of what lies outside the allocator.
MARGIN: Final = 0.02
#: A device on which peaks are taken where nothing fits.
AMPLE: Final = 1 << 42
#: Largest micro-batch that is tried.
MOST: Final = 4096
#: The micro-batches that are tried first: by the two steps the largest is guessed (one of a single sample has other
#: operators than those of more).
FIRST: Final = 2
SECOND: Final = 8
#: How many times the largest that fits is tried at most.
LEAP: Final = 8
#: Methods whose kinds of rank differ only in the sizes of their shards: the one that needs most at one batch needs most
#: at all, and only it is searched; the answer is checked with all of them.
UNIFORM: Final = frozenset({"zero1", "fsdp1", "fsdp2", "fsdp2-nr", "fsdp2-offload", "hsdp", "fsdp2-tp"})
#: What is tried where a method does not fit with one sample, in this order: what it is called, keys of the case.
REMEDIES: Final = (
    ("expandable_segments:True", {"alloc_conf": "expandable_segments:True"}),
    ("activation checkpointing", {"checkpointing": "nonreentrant"}),
)
#: LLMem's methods in the order in which its Algorithm 1 breaks ties: name, mesh of 4 GPUs, samples' weight.
CDP_BONUS: Final = 1.5


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method on a split of the GPUs: what it is called, and the keys of the case that say it.

    `shares` are the ranks that work on different samples.
    """

    name: str
    keys: Mapping[str, Any]
    shares: int


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked: keys of the case that all methods share (`model`, `seq`, ...), the GPUs by rank, and how.

    `gpus` has a name a rank; `margin` is the share of each device that stays free.
    """

    keys: Mapping[str, Any]
    gpus: tuple[str, ...]
    policy: str = "throughput"
    global_batch: int | None = None
    margin: float = MARGIN
    remedies: bool = True

    @property
    def world(self) -> int:
        """The number of GPUs."""
        return len(self.gpus)


@dataclass(frozen=True)
class Outcome:
    """What a method can do: its largest micro-batch (0: none fits), and peaks, time and speed at it.

    Bytes are of the worst rank; `limit` is its device less what lies outside the allocator and the margin. `slack` is
    what is left on the device when everything outside has its likely size, `slack_low` at its largest, `slack_high` at
    its least. `tried` maps micro-batches to whether they fit. `remedies` would make a method fit that does not.
    """

    name: str
    keys: Mapping[str, Any]
    shares: int
    batch: int = 0
    accum: int = 1
    peak_allocated: int = 0
    peak_reserved: int = 0
    worst: tuple[int, ...] = ()
    limit: int = 0
    slack: int = 0
    slack_low: int = 0
    slack_high: int = 0
    retries: int = 0
    step_seconds: float = 0.0
    tokens_per_second: float = 0.0
    score: float = 0.0
    tried: Mapping[int, bool] = field(default_factory=dict)
    short: int = 0
    remedies: tuple[str, ...] = ()
    error: str = ""
    seconds: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether at least one sample fits."""
        return self.batch > 0

    @property
    def samples(self) -> int:
        """Samples of a step, of all ranks."""
        return self.batch * self.accum * self.shares * int(self.keys.get("microbatches", 1))

    @property
    def case(self) -> dict[str, Any]:
        """The case at the largest batch."""
        return {**self.keys, "batch": max(1, self.batch), **({"accum": self.accum} if self.accum > 1 else {})}


@dataclass(frozen=True)
class Selection:
    """The answer: all methods, best first, then those that do not fit; what was asked; notes."""

    asked: Asked
    outcomes: tuple[Outcome, ...]
    outside: tuple[OutsideTerm, ...] = ()
    seconds: float = 0.0
    unfinished: tuple[str, ...] = ()
    advice: str = ""

    @property
    def winner(self) -> Outcome | None:
        """The best method that fits, or None."""
        return self.outcomes[0] if self.outcomes and self.outcomes[0].fits else None

    @property
    def runner_up(self) -> Outcome | None:
        """The second best method that fits, or None."""
        return self.outcomes[1] if len(self.outcomes) > 1 and self.outcomes[1].fits else None


def select(
    asked: Asked,
    *,
    jobs: int | None = None,
    executor: Executor | MakeExecutor | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    partial: Callable[[Selection], None] | None = None,
) -> Selection:
    """Search every method on the GPUs that were asked for and rank them.

    `jobs` worker processes (default: one a core) or `executor` do it; `progress(done, total, name)` is called after
    every method. On KeyboardInterrupt `partial` gets what was finished. Raises ConfigError for a bad case or GPU.
    """
    started = time.perf_counter()
    _check(asked)
    wanted = candidates(asked)
    found: dict[str, Outcome] = {}

    def finished(job: _Job, answer: Mapping[str, Any]) -> None:
        candidate = job.candidate
        outcome = answer.get("outcome")
        if outcome is None:
            error = str(answer.get("error", "no answer"))
            outcome = Outcome(candidate.name, candidate.keys, candidate.shares, error=error)
        found[candidate.name] = outcome
        if progress is not None:
            progress(len(found), len(wanted), candidate.name)

    def selection() -> Selection:
        missing = tuple(one.name for one in wanted if one.name not in found)
        return ranked(asked, [found[one.name] for one in wanted if one.name in found], missing, started)

    work = [_Job(candidate, asked) for candidate in wanted]
    try:
        if jobs == 1 and executor is None:
            for job in work:
                finished(job, _work([job.document], None)[0])
        else:
            Dispatch(_work, None, finished, jobs, executor, pool=_pool, most=1).run(work)
    except KeyboardInterrupt:
        if partial is not None:
            partial(selection())
        raise
    return selection()


def ranked(asked: Asked, outcomes: Sequence[Outcome], missing: tuple[str, ...], started: float) -> Selection:
    """The outcomes in the order of the policy, with the terms outside the allocator and advice where nothing fits."""
    if asked.policy == "llmem":
        outcomes = [replace(one, score=llmem_score(one)) for one in outcomes]
        best = sorted(outcomes, key=lambda one: -one.score)  # stable: ties stay in the order of the algorithm
    else:
        outcomes = [replace(one, score=one.tokens_per_second) for one in outcomes]
        best = sorted(outcomes, key=lambda one: (-one.score, one.short))
    advice = ""
    if not any(one.fits for one in best):
        advice = "CPU offload" if asked.policy == "llmem" else _advice(best)
    seconds = time.perf_counter() - started
    return Selection(asked, tuple(best), outside_of(asked), seconds, missing, advice)


def llmem_score(outcome: Outcome) -> float:
    """LLMem's score (Algorithm 1): samples of a step, and 1.5 times that of conventional data parallelism."""
    return outcome.batch * outcome.shares * (CDP_BONUS if "cdp" in outcome.keys.get("mesh", {}) else 1.0)


def _advice(outcomes: Sequence[Outcome]) -> str:
    return next((f"{one.name} with {one.remedies[0]}" for one in outcomes if one.remedies), "larger or more GPUs")


def _check(asked: Asked) -> None:
    """Refuse what no method could do, before the long work."""
    from graph.case import Case
    from simulator.devices import device

    if asked.policy not in POLICIES:
        raise ConfigError(f"policy {asked.policy!r}: there are {' and '.join(POLICIES)}")
    if not 0 <= asked.margin < 1:
        raise ConfigError(f"a margin of {asked.margin:g} is out of range: give a share of the device from 0 to below 1")
    if asked.global_batch is not None and asked.global_batch < 1:
        raise ConfigError(f"a global batch of {asked.global_batch} is out of range: give 1 or more")
    for name in asked.gpus:
        device(name)
    Case.of({**asked.keys, "gpu": asked.gpus[0]}, where="options")


# --- candidates ---------------------------------------------------------------------------------------------------


def candidates(asked: Asked) -> tuple[Candidate, ...]:
    """Every method and split of the GPUs, those that are dear to search first; those of LLMem for its policy."""
    from strategies.lowering import MODULES

    world = asked.world
    keys = _shared_keys(asked)
    if asked.policy == "llmem":
        return tuple(_llmem_candidates(keys, world))
    if world == 1:
        return (Candidate("single", keys, 1),)
    found = []
    for strategy in ("ddp", "zero1", "deepspeed-1", "deepspeed-2", "deepspeed-3", "fsdp1", "fsdp2", "fsdp2-offload"):
        if strategy in MODULES:
            found.append(Candidate(strategy, {**keys, "strategy": strategy, "world": world}, world))
    if world % 2 == 0 and world > 2:
        found.append(Candidate("hsdp", {**keys, "strategy": "hsdp", "world": world}, world))
        found.append(Candidate("fsdp2-tp", {**keys, "strategy": "fsdp2-tp", "world": world}, world // 2))
    for strategy in ("tp", "tp-sp"):
        found.append(Candidate(strategy, {**keys, "strategy": strategy, "world": world}, 1))
    if "pp" in MODULES:
        microbatches = max(int(keys.get("microbatches", 0)), world)
        piped = {**keys, "strategy": "pp", "world": world, "microbatches": microbatches}
        found.append(Candidate("pp", piped, 1))
    return tuple(found)


def _shared_keys(asked: Asked) -> dict[str, Any]:
    """The keys of the case that all methods have, with the memory of each rank where the GPUs differ."""
    from simulator.devices import device

    keys = {key: value for key, value in asked.keys.items() if key not in ("batch", "strategy", "world", "mesh")}
    keys["gpu"] = asked.gpus[0]
    if len(set(asked.gpus)) > 1:
        keys["memory"] = [device(name).total_bytes for name in asked.gpus]
    return keys


def _llmem_candidates(keys: Mapping[str, Any], world: int) -> list[Candidate]:
    """Conventional data parallelism, ADP, TP and DP+TP on Gemini, in LLMem's own setting."""
    own = {
        **keys,
        "dtype": "fp16",
        "attn": "eager",
        "checkpointing": "reentrant",
        "loss": "transformers-4.29",
        "attention_mask": True,
        "strategy": "gemini",
        "release": "2.0",
        "world": world,
    }
    meshes = [(f"CDP-{world}", {"cdp": world}, world), (f"{world}DP", {"dp": world}, world)]
    if world > 1:
        meshes.append((f"{world}TP", {"tp": world}, 1))
    for tensor in range(2, world):
        if world % tensor == 0:
            data = world // tensor
            meshes.append((f"{data}DP+{tensor}TP", {"dp": data, "tp": tensor}, data))
    return [Candidate(name, {**own, "mesh": mesh}, shares) for name, mesh, shares in meshes]


# --- one method ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    candidate: Candidate
    asked: Asked

    @property
    def group(self) -> str:
        """Each method for itself."""
        return self.candidate.name

    @property
    def document(self) -> Any:
        """What a worker gets."""
        return (self.candidate, self.asked)


def _work(jobs: Sequence[Any], _: Any) -> list[dict[str, Any]]:
    """What a worker does: the outcome of each method, or its error."""
    return [_one(candidate, asked) for candidate, asked in jobs]


def _one(candidate: Candidate, asked: Asked) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch says about a captured model is not about this choice
            return {"outcome": search(candidate, asked)}
    except LLMemError as error:
        return {"error": one_line(error)}
    except MemoryError:
        return {"error": "not enough memory on this machine for the job"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {one_line(error)}".rstrip(": ")}


def _pool(jobs: int) -> Executor:
    heavy = ["graph.capture", "graph.sources", "transformers", "strategies.native"]
    return local_pool(jobs, ["simulator.prepared", "simulator.estimation", *heavy])


class _Probe:
    """Simulates a method at one micro-batch after the other; keeps what it saw."""

    def __init__(self, candidate: Candidate, asked: Asked) -> None:
        from simulator.devices import device

        self.candidate = candidate
        self.asked = asked
        self.worst: tuple[int, ...] = ()
        self.tried: dict[int, bool] = {}
        self.traces: dict[int, Trace] = {}
        self.best: tuple[int, Result] | None = None
        self.least = min(device(name).total_bytes for name in asked.gpus)

    def case(self, batch: int, **more: Any) -> Case:
        """The case of the method at a micro-batch."""
        from graph.case import Case

        return Case.of({**self.candidate.keys, "batch": batch, **more}, where=self.candidate.name)

    def replayed(self, case: Case, *, limited: bool = True) -> Result:
        """Simulate a case on its devices less what lies outside and the margin (`limited`), or on ample ones."""
        from simulator.replay import replay

        made = self.trace(case if limited else replace(case, memory=AMPLE))
        return self._replay(made, case) if limited else replay(made, context=0, analyse=False)

    def aside(self, case: Case) -> int:
        """Bytes of a device that the allocator may not have: the likely size of what lies outside, and the margin."""
        outside = sum(term.bytes for term in outside_of(self.asked, groups_of(case)))
        margin = 0.0 if self.asked.policy == "llmem" else self.asked.margin  # Algorithm 1 has none
        return outside + round(margin * self.least)

    def fits(self, batch: int) -> bool:
        """Whether a micro-batch fits."""
        if batch not in self.tried:
            self._try(batch)
        return self.tried[batch]

    def _try(self, batch: int) -> None:
        case = self.case(batch)
        whole = case.strategy not in UNIFORM or not self.worst
        made = self.trace(case, whole=whole)
        found = self._replay(made, case)
        self.tried[batch] = found.verdict == "fits"
        if not self.tried[batch] and not self.worst and batch <= FIRST:
            return
        if self.tried[batch] and whole and batch >= max(self.traces, default=0):
            self.best = (batch, found)
        if not self.worst:
            self.worst = max(found.ranks, key=lambda rank: rank.peak_allocated).ranks
            if case.strategy in UNIFORM and len(made.ranks) > 1:
                made = self.trace(case, whole=False)
        self.traces[batch] = made

    def trace(self, case: Case, *, whole: bool = True) -> Trace:
        """The trace of a case: of all kinds of rank, or (not `whole`) of the one that needs most alone."""
        from strategies.tracing import trace

        narrow = not whole and self.worst and case.strategy in UNIFORM
        return self._worst_trace(case) if narrow else trace(case, shared_graph)

    def _replay(self, trace: Trace, case: Case) -> Result:
        from simulator.replay import replay

        return replay(trace, context=self.aside(case), analyse=False)

    def at(self, batch: int) -> Result:
        """The replay of all kinds of rank at a micro-batch."""
        if self.best is None or self.best[0] != batch:
            self.best = (batch, self.replayed(self.case(batch)))
        return self.best[1]

    def guess(self) -> tuple[int, bool]:
        """Where the largest batch may be: by replays of the two largest captured steps, with every size on the line
        through its sizes in both. False where they differ in more than sizes, so that a line says nothing.
        """
        if len(self.traces) < 2:
            return 2 * max(self.traces, default=1), False
        first, last = sorted(self.traces)[-2:]
        case = self.case(1)

        def fits(batch: int) -> bool:
            made = between(self.traces[first], self.traces[last], (batch - first) / (last - first))
            return made is not None and self._replay(made, case).verdict == "fits"

        if between(self.traces[first], self.traces[last], 1.0) is None:
            return (2 * last if self.tried[last] else (first + last) // 2), False
        low, high = (last, LEAP * last) if self.tried[last] else (first, last)
        while fits(high) and high < MOST:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low, True

    def _worst_trace(self, case: Case) -> Trace:
        """The trace of a job all whose ranks do what the worst one does."""
        import importlib

        from strategies.lowering import MODULES, Lowered, finish
        from strategies.single import events_of
        from traces.model import RankEvents

        module: Any = importlib.import_module(MODULES[case.strategy])
        method = module.method(case, self.worst[0])
        graph = shared_graph(method.captured_case(), method)
        entry = RankEvents(tuple(range(case.world)), events_of(graph, late=case.deferred == "late"))
        groups = module.groups(case) if hasattr(module, "groups") else {"default_pg": (tuple(range(case.world)),)}
        return finish(Lowered((entry,), groups), graph, case)


def shared_graph(case: Case, method: Method | None) -> StepGraph:
    """Captures a case; the graph of one GPU that a strategy rewrites is shared by all its meshes."""
    from simulator.estimation import captured

    if method is None:
        case = replace(case, world=1, mesh={}, memory=None)
    return captured(case, None, method)


def between(first: Trace, last: Trace, place: float) -> Trace | None:
    """A trace whose sizes lie on the lines through those of two: `place` 0 is the first, 1 the last, 2 as far beyond.

    None where the two differ in anything but sizes.
    """
    ranks = []
    if len(first.ranks) != len(last.ranks):
        return None
    for one, other in zip(first.ranks, last.ranks, strict=True):
        same = len(one.events) == len(other.events) and np.array_equal(one.events.op, other.events.op)
        if not same or not np.array_equal(one.events.ints("id"), other.events.ints("id")):
            return None
        start, end = one.events.ints("bytes"), other.events.ints("bytes")
        sizes = np.maximum(np.rint(start + place * (end - start)), np.minimum(start, 1)).astype(np.int64)
        events = Events(one.events.op, {**one.events.columns, "bytes": sizes})
        ranks.append(replace(one, events=events))
    return replace(first, ranks=tuple(ranks))


def search(candidate: Candidate, asked: Asked) -> Outcome:
    """The largest micro-batch of a method that fits, and what it does at it. Raises what `estimate` raises."""
    started = time.perf_counter()
    probe = _Probe(candidate, asked)
    most = MOST
    if asked.global_batch is not None:
        most = asked.global_batch // (candidate.shares * int(candidate.keys.get("microbatches", 1)))
        if most < 1:
            raise ConfigError(f"a global batch of {asked.global_batch} is less than a sample for each of the ranks")
    outcome = Outcome(candidate.name, candidate.keys, candidate.shares)
    batch = largest(probe.fits, probe.guess, most)
    while batch and probe.at(batch).verdict != "fits":  # all kinds of rank have to
        batch -= 1
    outcome = replace(outcome, tried=dict(sorted(probe.tried.items())))
    if not batch:
        outcome = _too_large(outcome, probe)
    else:
        batch, accum = _divided(batch, most)
        outcome = _measured(outcome, probe, batch, accum)
    return replace(outcome, seconds=time.perf_counter() - started)


def largest(fits: Callable[[int], bool], guess: Callable[[], tuple[int, bool]], most: int) -> int:
    """The largest whole number up to `most` that fits, 0 for none.

    `guess()` says, after a try or two, where it may be, and whether that is worth following: if not, it is asked again
    after the next try. What fits is taken to be monotonous. From the guess it goes up or down by 1, 2, 4 ..., and what
    is left between two bounds is halved: two tries are enough where the guess is right.
    """
    if most >= SECOND and fits(SECOND):  # no need of less
        low, high = SECOND, most + 1
    elif most < FIRST or not fits(FIRST):
        return int(fits(1))
    else:
        low, high = FIRST, min(most + 1, SECOND)
    middle, stride, turned, sure = low, 1, False, False
    before: bool | None = None
    while high - low > 1:
        if not sure:
            middle, sure = guess()
            stride, before = 1, None
        good = fits(middle := min(max(middle, low + 1), high - 1))
        low, high = (middle, high) if good else (low, middle)
        turned = turned or before is (not good)
        middle = (low + high) // 2 if turned else (low + stride if good else high - stride)
        stride, before = 2 * stride, good
    return low


def _divided(batch: int, most: int) -> tuple[int, int]:
    """Micro-batch and accumulation for `most` samples a rank, where the global batch was asked for."""
    if most == MOST:
        return batch, 1
    best = next(one for one in range(min(batch, most), 0, -1) if most % one == 0)
    return best, most // best


def _too_large(outcome: Outcome, probe: _Probe) -> Outcome:
    """What a method lacks with one sample, and what would make it fit."""
    case = probe.case(1)
    found = probe.replayed(case, limited=False)
    top = max(found.ranks, key=lambda rank: rank.peak_reserved)
    limit = probe.least - probe.aside(case)
    remedies = _remedies(probe) if probe.asked.remedies and probe.asked.policy != "llmem" else ()
    return replace(
        outcome,
        peak_allocated=top.peak_allocated,
        peak_reserved=top.peak_reserved,
        worst=top.ranks,
        limit=limit,
        short=top.peak_reserved - limit,
        remedies=remedies,
    )


def _remedies(probe: _Probe) -> tuple[str, ...]:
    """What makes one sample fit, of the settings that the case does not have yet, and of one GPU more."""
    found = []
    for name, keys in REMEDIES:
        if any(probe.candidate.keys.get(key) for key in keys):
            continue
        try:
            fits = probe.replayed(probe.case(1, **keys)).verdict == "fits"
        except LLMemError:
            continue
        if fits:
            found.append(name)
    return tuple(found) or _larger(probe)


def _larger(probe: _Probe) -> tuple[str, ...]:
    """One GPU more (of the smallest kind), or two where the method needs pairs."""
    case = probe.case(1)
    for more in (1, 2):
        world = case.world + more
        memory = (*case.memory, *[probe.least] * more) if isinstance(case.memory, tuple) else case.memory
        try:
            wider = replace(case, world=world, memory=memory)
            if probe.replayed(wider).verdict == "fits":
                return (f"{more} GPU{'s' * (more > 1)} more",)
        except LLMemError:
            continue
    return ()


def _measured(outcome: Outcome, probe: _Probe, batch: int, accum: int) -> Outcome:
    """Peaks, slack and speed of a method at its largest batch."""
    case = probe.case(batch)
    if accum > 1:
        case = replace(case, accum=2)
    found = probe.at(batch) if accum == 1 else probe.replayed(case)
    if found.verdict != "fits":  # gradients that stay while micro-batches pass: a smaller micro-batch does
        if batch == 1:
            return _too_large(outcome, probe)
        per_rank = batch * accum
        smaller = next(one for one in range(batch - 1, 0, -1) if per_rank % one == 0)
        return _measured(outcome, probe, smaller, per_rank // smaller)
    terms = outside_of(probe.asked, groups_of(case))
    top = max(found.ranks, key=lambda rank: rank.peak_reserved - rank.device.total_bytes)
    total = top.device.total_bytes
    seconds = _seconds(case, probe.asked)
    if accum > 1:
        once = _seconds(replace(case, accum=1), probe.asked)
        seconds = once + (accum - 1) * max(0.0, seconds - once)
    done = replace(
        outcome,
        batch=batch,
        accum=accum,
        peak_allocated=top.peak_allocated,
        peak_reserved=top.peak_reserved,
        worst=top.ranks,
        limit=total - probe.aside(case),
        slack=total - top.peak_reserved - sum(term.bytes for term in terms),
        slack_low=total - top.peak_reserved - sum(term.bytes if term.high is None else term.high for term in terms),
        slack_high=total - top.peak_reserved - sum(term.bytes if term.low is None else term.low for term in terms),
        retries=top.memory_stats["num_alloc_retries"],
        step_seconds=seconds,
    )
    return replace(done, tokens_per_second=done.samples * case.seq / seconds)


def _seconds(case: Case, asked: Asked) -> float:
    """Seconds of a step of a case; the slowest card and the slowest rank decide."""
    from simulator.devices import device
    from simulator.throughput import speed_of, step_seconds
    from strategies.timing import Clock
    from strategies.tracing import trace

    clocks = [Clock.of(device(name).name) for name in asked.gpus]
    slowest = min(clocks, key=lambda clock: (clock.card.half, clock.card.memory))
    timed = trace(case, shared_graph, speed=speed_of(case, slowest))
    return step_seconds(timed, case, [slowest])


# --- outside ------------------------------------------------------------------------------------------------------


def groups_of(case: Case) -> int:
    """The process groups in which a rank meets others."""
    if case.world == 1:
        return 0
    axes = sum(size > 1 for size in case.mesh.values())
    return 2 if axes > 1 or case.strategy in ("hsdp", "fsdp2-tp") else 1


def outside_of(asked: Asked, groups: int = 1) -> tuple[OutsideTerm, ...]:
    """What lies outside the allocator on the card that has most of it."""
    from graph.device import profile
    from simulator.devices import device
    from simulator.outside import communicator_terms, outside_terms

    best: tuple[OutsideTerm, ...] = ()
    for name in dict.fromkeys(asked.gpus):
        card = profile(name, str(asked.keys.get("release", "2.13")), bool(asked.keys.get("cudnn_sdp", False)))
        terms = outside_terms(device(name).name, card.sm_count * card.max_threads_per_sm)
        if sum(term.bytes for term in terms) > sum(term.bytes for term in best):
            best = terms
    return best + communicator_terms(groups if asked.world > 1 else 0)
