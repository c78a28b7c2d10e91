"""Which method, and which micro-batch, for a model on given GPUs: every method is simulated at its best micro-batch.

`select` is the whole of it. For each method and split of the GPUs (`simulator.selector.candidates`) it captures the
step at a micro-batch, replays it on the device less what lies outside the allocator, and searches the largest one that
fits (`simulator.selector.batch_search`). Methods are searched in parallel, each in one worker, in the order of
preference; one that cannot win any more by what is known (`simulator.selector.bounds`) is not tried.
"""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from graph.case import Case
from simulator.engine.result import OnGpu, OutsideTerm, Verdict
from simulator.estimator.devices import device
from simulator.estimator.jobs import Dispatch, MakeExecutor, local_pool
from simulator.estimator.outside import bytes_of, least_of, most_of, outside_of
from simulator.estimator.step_time import Stall, stall_of
from simulator.selector.batch_search import Probe, largest, largest_rung, rungs
from simulator.selector.bounds import Work, most_tokens, work_between
from simulator.selector.candidates import LIKELY, Candidate, candidates, preference
from strategies import registry
from strategies.strategy import Axis, Kind
from strategies.timing.clock import Clock
from traces.errors import ConfigError, Interrupted, LLMemError
from traces.text import reason

if TYPE_CHECKING:
    from simulator.estimator.outside import Context
    from simulator.fit.plans import Plans

POLICIES: Final = ("throughput", "llmem")
#: The share of a device that stays free beside the likely size of what lies outside the allocator.
MARGIN: Final = 0.02
#: Speeds that differ by less cannot be told apart by a model of time (docs/explanation/time.md: 8 to 15 %).
WITHIN: Final = 0.10
#: Largest micro-batch that is tried.
MOST: Final = 4096
#: What the fork server imports once for all workers.
PRELOADED: Final = (
    "simulator.allocator.prepared",
    "simulator.estimator.estimate",
    "graph.recorder.capture",
    "graph.models.sources",
    "strategies.parallel.native",
    "transformers.modeling_layers",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)
#: Objects that a worker makes before Python's collector looks through the young ones.
COLLECTED: Final = 50_000
#: LLMem's methods in the order in which its Algorithm 1 breaks ties: name, mesh of 4 GPUs, samples' weight.
CDP_BONUS: Final = 1.5


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked: keys of the case that all methods share (`model`, `seq`, ...), the GPUs by rank, and how.

    `gpus` has a name a rank; `margin` is the share of each device that stays free; `context` are the bytes of each that
    are not PyTorch's (`simulator.estimator.outside`). `methods` are names of methods, meshes such as `fsdp2=4,tp=2` or
    families (`simulator.selector.candidates`), of which each is then searched; `exclude` those that are left out.
    """

    keys: Mapping[str, Any]
    gpus: tuple[str, ...]
    policy: str = "throughput"
    global_batch: int | None = None
    margin: float = MARGIN
    context: Context = "auto"
    methods: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        """The number of GPUs."""
        return len(self.gpus)


@dataclass(frozen=True)
class Outcome:
    """What a method can do: its best micro-batch (0: none fits), and peaks, time and speed at it.

    `largest` is the largest micro-batch that fits, as sizes between captured steps say. `retries` are those of the
    whole run, `step_retries` those of a steady step, whose time has what they take. `at_most` are the tokens per second
    that a method cannot exceed that was not searched for it. `work` is what a sample costs at the least.

    Bytes are of the worst rank, replayed beside what lies outside the allocator, without the margin; `limit` is its
    device less both. `slack` is what is left on the device when everything outside has its likely size, `slack_low` at
    its largest, `slack_high` at its least; `tight` is the verdict of that replay. `tried` maps micro-batches to whether
    they fit.
    """

    name: str
    keys: Mapping[str, Any]
    shares: int
    batch: int = 0
    largest: int = 0
    accum: int = 1
    peak_allocated: int = 0
    peak_reserved: int = 0
    on_gpu: OnGpu | None = None
    worst: tuple[int, ...] = ()
    limit: int = 0
    slack: int = 0
    slack_low: int = 0
    slack_high: int = 0
    retries: int = 0
    step_retries: int = 0
    tight: bool = False
    step_seconds: float = 0.0
    tokens_per_second: float = 0.0
    score: float = 0.0
    tried: Mapping[int, bool] = field(default_factory=dict)
    short: int = 0
    at_most: float = 0.0
    work: Work | None = None
    error: str = ""
    seconds: float = 0.0

    @property
    def reserved_there(self) -> int:
        """The peak of reserved bytes on a GPU, as far as it is known."""
        return self.peak_reserved if self.on_gpu is None else self.on_gpu.peak_reserved

    @property
    def fits(self) -> bool:
        """Whether at least one sample fits."""
        return self.batch > 0

    @property
    def verdict(self) -> Verdict:
        """That of the case at the largest batch, as an estimate of it has it."""
        return "oom" if not self.fits else "tight" if self.tight else "fits"

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
    """The answer: all methods, the best first, then by speed, then those that do not fit; what was asked.

    `spared` are methods that were not searched, since they cannot win.
    """

    asked: Asked
    outcomes: tuple[Outcome, ...]
    spared: tuple[Outcome, ...] = ()
    outside: tuple[OutsideTerm, ...] = ()
    seconds: float = 0.0
    unfinished: tuple[str, ...] = ()
    advice: str = ""
    remedies: Plans | None = None
    """What was tried for the method that lacks least, where none fits."""

    @property
    def nearest(self) -> Outcome | None:
        """The method that lacks least of one sample, where none fits and some could run."""
        return None if self.winner else next((one for one in self.outcomes if not one.error), None)

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
) -> Selection:
    """Search every method on the GPUs that were asked for and rank them.

    `jobs` worker processes (default: one a core) or `executor` do it; `progress(done, total, name)` is called after
    every method. Raises ConfigError for a bad case or GPU, and where no method can take the model; Interrupted with
    what is finished on KeyboardInterrupt.
    """
    _check(asked)
    course = _Course(asked, candidates(asked), progress)
    try:
        course.run(jobs, executor)
    except KeyboardInterrupt:
        raise Interrupted(course.selection()) from None
    errors = {outcome.error for outcome in course.found.values()}
    if len(errors) == 1 and "" not in errors:  # what all methods say alike is about the case
        raise ConfigError(errors.pop())
    return course.selection()


class _Course:
    """A selection under way: what was found, and what may still win."""

    def __init__(
        self, asked: Asked, wanted: tuple[Candidate, ...], progress: Callable[[int, int, str], None] | None
    ) -> None:
        self.asked = asked
        self.wanted = wanted
        self.found: dict[str, Outcome] = {}
        self.spared: dict[str, Outcome] = {}
        self._seq = Case.of({**asked.keys, "gpu": asked.gpus[0]}, any_strategy=True).seq
        self._progress = progress
        self._started = time.perf_counter()

    def run(self, jobs: int | None, executor: Executor | MakeExecutor | None) -> None:
        """Search what may win, until nothing is left."""

        def do(work: list[_Job]) -> None:
            if jobs == 1 and executor is None:
                for job in work:
                    self._finished(job, _work([job.document], None)[0])
            else:
                Dispatch(_work, None, self._finished, jobs, executor, pool=_pool, most=1).run(work)

        left = [_Job(one, self) for one in self.wanted]
        while left:
            do(left)
            left = [_Job(one, self) for one in self.wanted if self._may_win(one)]

    def _may_win(self, candidate: Candidate) -> bool:
        """Whether one that was spared, by what was known then, may win by what is known now."""
        spared = self.spared.get(candidate.name)
        return spared is not None and spared.at_most > self.rival(candidate).floor

    def rival(self, candidate: Candidate) -> Rival:
        """What a candidate has to beat, when it is looked at now: nothing where it is likely or asked for by name."""
        if self.asked.methods or self.asked.policy == "llmem":
            return Rival()
        best = chosen(list(self.found.values()))
        if best is None:  # where a sample was too much so far, it may be so again
            return Rival(near=1 if any(one.short for one in self.found.values()) else 0)
        if best.step_retries:
            return Rival()
        if candidate.name in LIKELY or preference(candidate.name, candidate.keys) < preference(best.name, best.keys):
            return Rival()
        micro = int(candidate.keys.get("microbatches", 1))
        if self.asked.global_batch is not None:
            micro = max(micro, self.asked.global_batch // candidate.shares)
        known = [one.work for one in self.found.values() if one.work is not None]
        fastest = most_tokens(candidate, micro, self._seq, known, clock_of(self.asked))
        near = 2 * best.samples // (candidate.shares * int(candidate.keys.get("microbatches", 1)))
        return Rival(best.tokens_per_second * (1 + WITHIN), fastest, near)

    def _finished(self, job: _Job, answer: Mapping[str, Any]) -> None:
        candidate = job.candidate
        outcome = answer.get("outcome")
        if outcome is None:
            error = str(answer.get("error", "no answer"))
            outcome = Outcome(candidate.name, candidate.keys, candidate.shares, error=error)
        self.spared.pop(candidate.name, None)
        (self.spared if outcome.at_most else self.found)[candidate.name] = outcome
        if self._progress is not None:
            self._progress(len(self.found) + len(self.spared), len(self.wanted), candidate.name)

    def selection(self) -> Selection:
        """What is known now."""
        missing = tuple(one.name for one in self.wanted if one.name not in self.found and one.name not in self.spared)
        outcomes = [self.found[one.name] for one in self.wanted if one.name in self.found]
        spared = tuple(self.spared[one.name] for one in self.wanted if one.name in self.spared)
        return ranked(self.asked, outcomes, missing, self._started, spared)


@dataclass(frozen=True, slots=True)
class Rival:
    """What a method has to beat to be searched to the end: tokens per second of which it needs more; the most that it
    can have; and a micro-batch to begin with that is probably larger than its largest.
    """

    floor: float = 0.0
    fastest: float = math.inf
    near: int = 0


def ranked(
    asked: Asked,
    outcomes: Sequence[Outcome],
    missing: tuple[str, ...],
    started: float,
    spared: tuple[Outcome, ...] = (),
) -> Selection:
    """The outcomes in the order of the policy, with the terms outside the allocator and advice where nothing fits."""
    if asked.policy == "llmem":
        outcomes = [replace(one, score=llmem_score(one)) for one in outcomes]
        best = sorted(outcomes, key=lambda one: -one.score)  # stable: ties stay in the order of the algorithm
    else:
        outcomes = [replace(one, score=one.tokens_per_second) for one in outcomes]
        first = chosen(outcomes)
        best = sorted(outcomes, key=lambda one: (one is not first, -one.score, one.short))
    advice = ""
    if best and not any(one.fits for one in best):
        advice = "CPU offload" if asked.policy == "llmem" else "larger or more GPUs"
    seconds = time.perf_counter() - started
    outside_terms = outside(asked, min(1, asked.world - 1))
    return Selection(asked, tuple(best), spared, outside_terms, seconds, missing, advice)


def chosen(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The method to take: of those that a model of time cannot tell from the fastest, one whose steady steps have no
    allocator retries, before one that has; then the first in the order of preference, then the one with most room.
    """
    fitting = [one for one in outcomes if one.fits]
    fastest = max((one.tokens_per_second for one in fitting), default=0.0)
    near = [one for one in fitting if one.tokens_per_second * (1 + WITHIN) >= fastest]
    return min(near, key=_merit, default=None)


def _merit(one: Outcome) -> tuple[bool, tuple[bool, int, int], int]:
    return (one.step_retries > 0, preference(one.name, one.keys), -one.slack)


def llmem_score(outcome: Outcome) -> float:
    """LLMem's score (Algorithm 1): samples of a step, and 1.5 times that of conventional data parallelism."""
    return outcome.batch * outcome.shares * (CDP_BONUS if "cdp" in outcome.keys.get("mesh", {}) else 1.0)


def _check(asked: Asked) -> None:
    """Refuse what no method could do, before the long work."""
    if asked.policy not in POLICIES:
        raise ConfigError(f"policy {asked.policy!r}: there are {' and '.join(POLICIES)}")
    if not 0 <= asked.margin < 1:
        raise ConfigError(f"a margin of {asked.margin:g} is out of range: give a share of the device from 0 to below 1")
    if asked.global_batch is not None and asked.global_batch < 1:
        raise ConfigError(f"a global batch of {asked.global_batch} is out of range: give 1 or more")
    for name in asked.gpus:
        device(name)
    Case.of({**asked.keys, "gpu": asked.gpus[0]}, where="options", any_strategy=True)


# --- one method ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    candidate: Candidate
    course: _Course

    @property
    def group(self) -> str:
        """Each method for itself."""
        return self.candidate.name

    @property
    def document(self) -> Any:
        """What a worker gets; made when the job is handed out, so that it has what is known by then."""
        return (self.candidate, self.course.asked, self.course.rival(self.candidate))


def _work(jobs: Sequence[Any], _: object) -> list[dict[str, Any]]:
    """What a worker does: the outcome of each method, or its error."""
    return [_one(*job) for job in jobs]


def _one(candidate: Candidate, asked: Asked, known: Rival) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch says about a captured model is not about this choice
            return {"outcome": search(candidate, asked, known)}
    except LLMemError as error:
        return {"error": reason(error)}
    except MemoryError:
        return {"error": "not enough memory on this machine for the job"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {reason(error)}"}


def _pool(jobs: int) -> Executor:
    return local_pool(jobs, PRELOADED, _ready)


def _ready() -> None:
    """In a worker: the collector does not look through what was imported again and again."""
    gc.freeze()
    gc.set_threshold(COLLECTED)


def search(candidate: Candidate, asked: Asked, rival: Rival = Rival()) -> Outcome:
    """The best micro-batch of a method, and what it does at it, unless it cannot beat `rival`. Raises what `estimate`
    raises.
    """
    started = time.perf_counter()
    outcome = Outcome(candidate.name, candidate.keys, candidate.shares)
    if rival.fastest <= rival.floor:
        return replace(outcome, at_most=rival.fastest)
    probe = _probe(candidate, asked)
    whole = None
    if asked.global_batch is not None:
        whole = asked.global_batch // (candidate.shares * int(candidate.keys.get("microbatches", 1)))
        if whole < 1:
            raise ConfigError(f"a global batch of {asked.global_batch} is less than a sample for each of the ranks")
    first = 1 if rival.near == 1 else probe.first(rival.near)
    bound = _bound(candidate, asked, probe, first) if rival.floor and whole is None else math.inf
    if bound <= rival.floor:
        return replace(outcome, at_most=bound, seconds=time.perf_counter() - started)
    if asked.policy == "llmem":
        batch = most = largest(probe.fits, probe.guess, MOST if whole is None else whole, first)
    else:
        batch, most = largest_rung(rungs(MOST, whole), probe.fits, probe.guess, first)
    outcome = replace(outcome, largest=most)
    found = _best(outcome, candidate, asked, probe, list(_divided(batch, whole)))
    found = _too_large(outcome, probe, asked) if found is None else found
    work = _work_of(candidate, asked, probe)
    return replace(found, tried=probe.tried, work=work, seconds=time.perf_counter() - started)


def _bound(candidate: Candidate, asked: Asked, probe: Probe, batch: int) -> float:
    """Tokens per second that a method cannot exceed, where this micro-batch does not fit: those that it would have
    with it.
    """
    if probe.fits(batch):
        return math.inf
    case = probe.case(batch)
    samples = batch * candidate.shares * int(candidate.keys.get("microbatches", 1))
    return samples * case.seq / probe.seconds(case, clock_of(asked))


def _best(
    outcome: Outcome, candidate: Candidate, asked: Asked, probe: Probe, sizes: list[tuple[int, int]]
) -> Outcome | None:
    """The method at the first of these micro-batches that fits; where steady steps have retries then, at the next one
    if it has none and is about as fast.
    """
    found = None
    for micro, accum in sizes:
        made = _measured(outcome, candidate, asked, probe, micro, accum)
        if made is None:
            continue
        if found is None and made.step_retries and asked.policy != "llmem":
            found = made
        elif found is None or (
            not made.step_retries and made.tokens_per_second * (1 + WITHIN) >= found.tokens_per_second
        ):
            return made
        else:
            break
    return found


def _divided(batch: int, whole: int | None) -> Iterator[tuple[int, int]]:
    """Micro-batches up to `batch`, largest first, and how many of them make a step.

    Where the global batch was asked for (`whole` samples a rank) gradients that stay while micro-batches pass may make
    the largest one too large.
    """
    if whole is None:
        yield from [(batch, 1), (batch // 2, 1)][: batch.bit_length()]
    else:
        yield from ((micro, whole // micro) for micro in range(batch, 0, -1) if whole % micro == 0)


def _work_of(candidate: Candidate, asked: Asked, probe: Probe) -> Work | None:
    """What a sample costs at the least, by two captured steps of a method that is no pipeline and has no work of its
    own making; None where there are not two.
    """
    strategy = registry.find(probe.case(1))
    tensor = candidate.size(Axis.TENSOR)
    alone = candidate.shares == asked.world or (candidate.name == Axis.TENSOR and tensor > 1)
    if len(probe.traces) < 2 or not alone or Kind.OWN_LOSS in strategy.kind or asked.policy == "llmem":
        return None
    clock = clock_of(asked)
    low, high = min(probe.traces), max(probe.traces)
    small, large = (probe.trace(probe.case(batch), clock) for batch in (low, high))
    return work_between(large, high, small, low, tensor)


def _probe(candidate: Candidate, asked: Asked) -> Probe:
    margin = 0 if asked.policy == "llmem" else round(asked.margin * _least(asked))  # Algorithm 1 has none
    return Probe(candidate.keys, candidate.name, lambda groups: outside(asked, groups), margin)


def _least(asked: Asked) -> int:
    """Bytes of the smallest GPU."""
    memory = asked.keys.get("memory")
    return min(device(name).total_bytes for name in asked.gpus) if memory is None else int(memory)


def _too_large(outcome: Outcome, probe: Probe, asked: Asked) -> Outcome:
    """What a method lacks with one sample."""
    case = probe.case(1)
    found = probe.unlimited(case)
    top = max(found.ranks, key=lambda rank: rank.peak_reserved)
    limit = _least(asked) - probe.aside(probe.trace(case))
    return replace(
        outcome,
        peak_allocated=top.peak_allocated,
        peak_reserved=top.peak_reserved,
        worst=top.ranks if probe.alone is None else (probe.alone,),
        limit=limit,
        short=top.peak_reserved - limit,
    )


def _measured(
    outcome: Outcome, candidate: Candidate, asked: Asked, probe: Probe, batch: int, accum: int
) -> Outcome | None:
    """Peaks, slack and speed of a method at a micro-batch, with so many of them a step; None if that does not fit."""
    from simulator.engine.on_gpu import on_gpu
    from simulator.estimator.judging import judged

    if accum > 1 and "microbatches" in candidate.keys:  # a pipeline accumulates over its micro-batches
        keys = {**candidate.keys, "microbatches": accum * int(candidate.keys["microbatches"])}
        outcome, accum = replace(outcome, keys=keys), 1
        probe = _probe(replace(candidate, keys=keys), asked)
    case = probe.case(batch)
    if accum > 1:
        case = replace(case, accum=2)
    trace = probe.trace(case)
    fits = probe.fits(batch) if accum == 1 else probe.replayed(trace).verdict != "oom"
    found = judged(trace, probe.terms(trace), analyse=False) if fits else None
    if found is None or found.verdict == "oom":
        return None
    top = max(found.ranks, key=lambda rank: rank.peak_reserved - rank.device.total_bytes)
    total = top.device.total_bytes
    clock = clock_of(asked)
    seconds = probe.seconds(case, clock)
    if accum > 1:
        once = probe.seconds(replace(case, accum=1), clock)
        seconds = once + (accum - 1) * max(0.0, seconds - once)
    retries = max(rank.retries_there for rank in found.ranks)
    served = trace if top.on_gpu is None else on_gpu(trace)
    stall = stall_of(served, bytes_of(top.outside)) if retries else Stall()
    seconds += stall.seconds
    done = replace(
        outcome,
        batch=batch,
        accum=accum,
        peak_allocated=top.peak_allocated,
        peak_reserved=top.peak_reserved,
        on_gpu=top.on_gpu,
        worst=top.ranks if probe.alone is None else (probe.alone,),
        limit=total - probe.aside(trace),
        slack=total - top.device_total,
        slack_low=total - top.reserved_there - most_of(top.outside),
        slack_high=total - top.reserved_there - bytes_of(least_of(top.outside)),
        retries=retries,
        step_retries=stall.retries,
        tight=found.verdict == "tight",
        step_seconds=seconds,
    )
    return replace(done, tokens_per_second=done.samples * case.seq / seconds)


def clock_of(asked: Asked) -> Clock:
    """The speeds of the slowest card: it decides."""
    clocks = [Clock.of(name) for name in asked.gpus]
    return min(clocks, key=lambda clock: (clock.card.half, clock.card.memory))


# --- outside ------------------------------------------------------------------------------------------------------


def outside(asked: Asked, groups: int) -> tuple[OutsideTerm, ...]:
    """What lies outside the allocator for a rank in so many groups, on the card that has most of it."""
    return outside_of(Case.of({**asked.keys, "gpu": asked.gpus[0]}), asked.context, groups, asked.gpus)
