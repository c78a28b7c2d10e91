"""Which method, and which micro-batch, for a model on given GPUs: every method is simulated at its largest batch.

`select` is the whole of it: for each method and split of the GPUs it captures the step at a micro-batch, replays it on
the device less what lies outside the allocator, and searches the largest one that fits
(`simulator.selector.batch_search`). Methods are searched in parallel, each in one worker.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from graph.case import Case, meaningful
from simulator.engine.result import OutsideTerm, Verdict
from simulator.estimator.devices import device
from simulator.estimator.jobs import Dispatch, MakeExecutor, local_pool
from simulator.estimator.outside import bytes_of, least_of, most_of, outside_of
from simulator.selector.batch_search import Probe, largest
from strategies import registry
from strategies.gemini.record import STRATEGIES
from strategies.strategy import MACHINE, Axis, Kind, Share
from strategies.timing.clock import Clock
from traces.errors import ConfigError, LLMemError
from traces.text import one_line

if TYPE_CHECKING:
    from simulator.estimator.outside import Context
    from strategies.timing.clock import Clock

POLICIES: Final = ("throughput", "llmem")
#: The share of a device that stays free beside the likely size of what lies outside the allocator.
MARGIN: Final = 0.02
#: Largest micro-batch that is tried.
MOST: Final = 4096
#: What is tried where a method does not fit with one sample, beside what it offers itself: words, keys of the case.
REMEDIES: Final[tuple[tuple[str, Mapping[str, Any]], ...]] = (
    ("expandable_segments:True", {"alloc_conf": "expandable_segments:True"}),
    ("the fused AdamW", {"optimizer": "adamw-fused"}),
    ("activation checkpointing", {"checkpointing": "nonreentrant"}),
    ("activations on the host", {"offload": "activations"}),
)
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

    `gpus` has a name a rank; `margin` is the share of each device that stays free; `context` are the bytes of each that
    are not PyTorch's (`simulator.estimator.outside`).
    """

    keys: Mapping[str, Any]
    gpus: tuple[str, ...]
    policy: str = "throughput"
    global_batch: int | None = None
    margin: float = MARGIN
    remedies: bool = True
    context: Context = "auto"

    @property
    def world(self) -> int:
        """The number of GPUs."""
        return len(self.gpus)


@dataclass(frozen=True)
class Outcome:
    """What a method can do: its largest micro-batch (0: none fits), and peaks, time and speed at it.

    Bytes are of the worst rank, replayed beside what lies outside the allocator, without the margin; `limit` is its
    device less both. `slack` is what is left on the device when everything outside has its likely size, `slack_low` at
    its largest, `slack_high` at its least; `tight` is the verdict of that replay. `tried` maps micro-batches to whether
    they fit. `remedies` would make a method fit that does not.
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
    tight: bool = False
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


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while methods were searched; `found` is what was finished."""

    def __init__(self, found: Selection) -> None:
        super().__init__("interrupted")
        self.found = found


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
        raise Interrupted(selection()) from None
    errors = {outcome.error for outcome in found.values()}
    if len(errors) == 1 and "" not in errors:  # what all methods say alike is about the case
        raise ConfigError(errors.pop())
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
    if best and not any(one.fits for one in best):
        advice = "CPU offload" if asked.policy == "llmem" else _advice(best)
    seconds = time.perf_counter() - started
    return Selection(asked, tuple(best), outside(asked, min(1, asked.world - 1)), seconds, missing, advice)


def llmem_score(outcome: Outcome) -> float:
    """LLMem's score (Algorithm 1): samples of a step, and 1.5 times that of conventional data parallelism."""
    return outcome.batch * outcome.shares * (CDP_BONUS if "cdp" in outcome.keys.get("mesh", {}) else 1.0)


def _advice(outcomes: Sequence[Outcome]) -> str:
    return next((f"{one.name} with {one.remedies[0]}" for one in outcomes if one.remedies), "larger or more GPUs")


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


# --- candidates ---------------------------------------------------------------------------------------------------


def candidates(asked: Asked) -> tuple[Candidate, ...]:
    """Every method and split of the GPUs, those that are dear to search first; those of LLMem for its policy.

    Keys of the case that mean nothing for a method are left out of its own.
    """
    return tuple(replace(one, keys=meaningful(one.keys)) for one in _candidates(asked))


def _candidates(asked: Asked) -> tuple[Candidate, ...]:
    world = asked.world
    keys = _shared_keys(asked)
    if asked.policy == "llmem":
        return tuple(_llmem_candidates(keys, world))
    if world == 1:
        return (Candidate("single", keys, 1),)
    micro = int(keys.get("microbatches", 0))
    quiet = {"return_outputs": False}  # nobody looks at the logits of all micro-batches
    piped = {**keys, **quiet, "strategy": "pp", "world": world, "microbatches": max(micro, world)}
    splits = []
    for axes in meshes(world):
        more = {**quiet, "microbatches": max(micro, axes["pp"])} if "pp" in axes else {}
        name = ",".join(f"{axis}={size}" for axis, size in axes.items())
        shares = axes.get(Axis.REPLICAS, 1) * axes.get(Axis.SHARDS, 1)
        splits.append(Candidate(name, {**keys, "mesh": axes, "world": world, **more}, shares))
    return (Candidate("pp", piped, 1), *splits[::-1], *_plain(keys, world))


def _plain(keys: Mapping[str, Any], world: int) -> Iterator[Candidate]:
    """The methods by themselves; pipelines, whose micro-batches are chosen, apart."""
    for one in registry.known().values():
        if one.share is not Share.NO and one.sensible(world):
            own = {**keys, "strategy": one.name, "world": world}
            if one.half_weights and keys.get("autocast"):
                own |= {"dtype": keys["autocast"], "autocast": ""}
            yield Candidate(one.name, own, world if one.share is Share.EACH else 1)


def meshes(world: int) -> list[dict[str, int]]:
    """Every split of GPUs over pipeline stages, replicas or shards, and tensor parallelism, two or three of them."""
    found: list[dict[str, int]] = []
    for stages in _divisors(world):
        for tensor in _divisors(world // stages):
            data = world // stages // tensor
            inner = {"tp": tensor} if tensor > 1 else {}
            outer = {"pp": stages} if stages > 1 else {}
            if tensor > MACHINE or len(outer) + len(inner) + (data > 1) < 2:
                continue
            kinds = (Axis.REPLICAS.value, Axis.SHARDS.value) if data > 1 else ("",)
            found += [{**outer, **({kind: data} if kind else {}), **inner} for kind in kinds]
    return found


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _shared_keys(asked: Asked) -> dict[str, Any]:
    """The keys of the case that all methods have, with the memory of each rank where the GPUs differ."""
    keys = {key: value for key, value in asked.keys.items() if key not in ("batch", "strategy", "world", "mesh")}
    keys["gpu"] = asked.gpus[0]
    if len(set(asked.gpus)) > 1:
        keys["memory"] = [device(name).total_bytes for name in asked.gpus]
    return keys


def _llmem_candidates(keys: Mapping[str, Any], world: int) -> list[Candidate]:
    """Conventional data parallelism, ADP, TP and DP+TP on Gemini, in LLMem's own setting."""
    (gemini,) = STRATEGIES
    own = {**keys, **gemini.usual, "strategy": gemini.name, "world": world}
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
    return local_pool(jobs, PRELOADED, _ready)


def _ready() -> None:
    """In a worker: the collector does not look through what was imported again and again."""
    gc.freeze()
    gc.set_threshold(COLLECTED)


def search(candidate: Candidate, asked: Asked) -> Outcome:
    """The largest micro-batch of a method that fits, and what it does at it. Raises what `estimate` raises."""
    started = time.perf_counter()
    probe = _probe(candidate, asked)
    most = MOST
    if asked.global_batch is not None:
        most = asked.global_batch // (candidate.shares * int(candidate.keys.get("microbatches", 1)))
        if most < 1:
            raise ConfigError(f"a global batch of {asked.global_batch} is less than a sample for each of the ranks")
    outcome = Outcome(candidate.name, candidate.keys, candidate.shares)
    batch = largest(probe.fits, probe.guess, most, probe.first())
    outcome = replace(outcome, tried=probe.tried)
    found = None
    for micro, accum in _divided(batch, most):
        found = _measured(outcome, candidate, asked, probe, micro, accum)
        if found is not None:
            break
    outcome = _too_large(outcome, probe, asked) if found is None else found
    return replace(outcome, seconds=time.perf_counter() - started)


def _divided(batch: int, most: int) -> Iterator[tuple[int, int]]:
    """Micro-batches up to `batch`, largest first, and how many of them make a step.

    Where the global batch was asked for (`most` samples a rank) gradients that stay while micro-batches pass may make
    the largest one too large.
    """
    if most == MOST:
        yield from [(batch, 1)] * (batch > 0)
    else:
        yield from ((micro, most // micro) for micro in range(batch, 0, -1) if most % micro == 0)


def _probe(candidate: Candidate, asked: Asked) -> Probe:
    margin = 0 if asked.policy == "llmem" else round(asked.margin * _least(asked))  # Algorithm 1 has none
    return Probe(candidate.keys, candidate.name, lambda groups: outside(asked, groups), margin)


def _least(asked: Asked) -> int:
    """Bytes of the smallest GPU."""
    memory = asked.keys.get("memory")
    return min(device(name).total_bytes for name in asked.gpus) if memory is None else int(memory)


def _too_large(outcome: Outcome, probe: Probe, asked: Asked) -> Outcome:
    """What a method lacks with one sample, and what would make it fit."""
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
        remedies=_remedies(probe, asked) if asked.remedies and asked.policy != "llmem" else (),
    )


def _remedies(probe: Probe, asked: Asked) -> tuple[str, ...]:
    """What makes one sample fit, of the settings that the case does not have yet, else one GPU more."""
    own = registry.find(probe.case(1)).remedies
    found = []
    for name, keys in (*REMEDIES[:-1], *own, REMEDIES[-1]):
        given = any(probe.keys.get(key) for key in keys if key != "strategy")
        if not given and _would_fit(probe, {**probe.keys, **keys}):
            found.append(name)
    return tuple(found) or _larger(probe, asked)


def _larger(probe: Probe, asked: Asked) -> tuple[str, ...]:
    """One GPU more (of the smallest kind), or two where the method needs pairs.

    It is no help to a method that keeps all on every GPU, and a mesh has its splits already.
    """
    if probe.keys.get("mesh") or (asked.world > 1 and Kind.WHOLE in registry.find(probe.case(1)).kind):
        return ()
    memory = probe.keys.get("memory")
    alone = {"strategy": Axis.SHARDS.value} if asked.world == 1 else {}
    for more in (1, 2):
        keys = {**probe.keys, **alone, "world": asked.world + more}
        if isinstance(memory, list):
            keys["memory"] = [*memory, *[min(memory)] * more]
        if _would_fit(probe, keys):
            return (f"{more} GPU{'s' * (more > 1)} more{' and fsdp2' * bool(alone)}",)
    return ()


def _would_fit(probe: Probe, keys: Mapping[str, Any]) -> bool:
    """Whether a sample would fit with other keys; not where the method cannot have them."""
    other = Probe(keys, probe.name, probe.outside, probe.margin)
    try:
        return other.fits(1)
    except LLMemError:
        return False


def _measured(
    outcome: Outcome, candidate: Candidate, asked: Asked, probe: Probe, batch: int, accum: int
) -> Outcome | None:
    """Peaks, slack and speed of a method at a micro-batch, with so many of them a step; None if that does not fit."""
    from simulator.estimator.judging import judged

    if accum > 1 and "microbatches" in candidate.keys:  # a pipeline accumulates over its micro-batches
        keys = {**candidate.keys, "microbatches": accum * int(candidate.keys["microbatches"])}
        outcome, accum = replace(outcome, keys=keys), 1
        probe = _probe(replace(candidate, keys=keys), asked)
    case = probe.case(batch)
    if accum > 1:
        case = replace(case, accum=2)
    trace = probe.trace(case)
    found = probe.results[batch] if accum == 1 and batch in probe.results else probe.replayed(trace)
    if found.verdict != "oom":
        found = judged(trace, probe.terms(trace), analyse=False)
    if found.verdict == "oom":
        return None
    top = max(found.ranks, key=lambda rank: rank.peak_reserved - rank.device.total_bytes)
    total = top.device.total_bytes
    clock = _clock(asked)
    seconds = probe.seconds(case, clock)
    if accum > 1:
        once = probe.seconds(replace(case, accum=1), clock)
        seconds = once + (accum - 1) * max(0.0, seconds - once)
    done = replace(
        outcome,
        batch=batch,
        accum=accum,
        peak_allocated=top.peak_allocated,
        peak_reserved=top.peak_reserved,
        worst=top.ranks if probe.alone is None else (probe.alone,),
        limit=total - probe.aside(trace),
        slack=total - top.device_total,
        slack_low=total - top.peak_reserved - most_of(top.outside),
        slack_high=total - top.peak_reserved - bytes_of(least_of(top.outside)),
        retries=max(rank.retries for rank in found.ranks),
        tight=found.verdict == "tight",
        step_seconds=seconds,
    )
    return replace(done, tokens_per_second=done.samples * case.seq / seconds)


def _clock(asked: Asked) -> Clock:
    """The speeds of the slowest card: it decides."""
    clocks = [Clock.of(name) for name in asked.gpus]
    return min(clocks, key=lambda clock: (clock.card.half, clock.card.memory))


# --- outside ------------------------------------------------------------------------------------------------------


def outside(asked: Asked, groups: int) -> tuple[OutsideTerm, ...]:
    """What lies outside the allocator for a rank in so many groups, on the card that has most of it."""
    return outside_of(Case.of({**asked.keys, "gpu": asked.gpus[0]}), asked.context, groups, asked.gpus)
