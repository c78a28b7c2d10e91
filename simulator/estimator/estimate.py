"""From a case to an answer: capture the model's step, lower it to a trace, replay it, say whether it fits.

`estimate` is the whole of it. Graphs are kept for a while (`captured`), since cases that differ only in memory or in
allocator settings share one. Torch is loaded by the capture alone, when it runs.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from graph.case import Case
from graph.hardware.gpus import assumed, gpu
from simulator.allocator.conf import parse_conf
from simulator.allocator.releases import parse_release
from simulator.engine.min_memory import smallest_memory
from simulator.engine.result import OnGpu, OutsideTerm, RankResult, Result, Shown, Verdict
from simulator.estimator.closed_form import closed_forms
from simulator.estimator.devices import device
from simulator.estimator.epoch import Epoch, Peaks, epoch_of, peaks_of
from simulator.estimator.failing_line import Captured, with_line
from simulator.estimator.outside import bytes_of, communicators, outside_of
from simulator.estimator.step_time import of_case
from simulator.estimator.traced import trace_of
from simulator.fit.measure import measured
from simulator.fit.plans import Judged
from simulator.fit.search import search
from simulator.reports.verdict import summary
from strategies import registry, strategy
from strategies.timing.clock import Clock
from traces.errors import ConfigError, Interrupted
from traces.model import Trace

if TYPE_CHECKING:
    from torch.nn import Module

    from graph.case import Case
    from graph.loop.method import Method
    from graph.model import StepGraph
    from simulator.estimator.closed_form import ClosedForm
    from simulator.estimator.outside import Context
    from simulator.estimator.step_time import GenerationTime, StepTime
    from simulator.fit.plans import Plans
    from strategies.timing.clock import Clock

#: Keys of a case that change nothing in the captured graph, only its replay.
REPLAY_KEYS: Final = frozenset({"memory", "alloc_conf", "deferred"})
#: Keys that an answer adds to its case.
ANSWER_KEYS: Final = (
    "schema_version",
    "peak_allocated",
    "peak_reserved",
    "device_total",
    "on_gpu",
    "phases",
    "verdict",
    "summary",
    "needs",
    "gpu_bytes",
    "min_fit",
    "ranks",
    "model_facts",
    "events",
    "seconds",
    "error",
    "step_time_ns",
    "tokens_per_second",
    "tokens_per_second_per_gpu",
    "first_token_ns",
    "decode_tokens_per_second",
    "step_time_note",
    "estimators",
    "remedies",
    "epoch",
)
#: Packages of the extra `torch`, without which nothing is captured.
NEEDED: Final = frozenset({"torch", "transformers", "networkx"})
#: Graphs that a process keeps. One of a large model takes some ten MiB.
KEPT_GRAPHS: Final = 8
#: Seconds for which changes are tried of a case that does not fit.
REMEDY_SECONDS: Final = 40.0
#: Phases that micro-batches of a step repeat: of those the last one counts, as where a loop notes its peaks by name.
_REPEATED: Final = frozenset({"forward", "backward", "optimizer", "step"})

Capture = Callable[["Case"], "StepGraph"]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, repr=False)
class Estimate(Shown):
    """What a case needs: its replay beside what lies outside the allocator (`simulator.estimator.judging`), and the
    trace.

    The devices of the trace have what the replay set aside as their context. `min_fit` is the smallest device in bytes,
    where it was asked for; `step` the time of a steady iteration, or of an inference run, likewise; `closed` the
    closed-form estimates that were asked for; `remedies` what was tried where it does not fit; `epoch` the peaks of a
    data set's batches, where its samples were given.
    """

    case: Mapping[str, Any]
    result: Result
    trace: Trace
    assumptions: tuple[str, ...]
    seconds: float
    min_fit: int | None = None
    step: StepTime | GenerationTime | None = None
    closed: tuple[ClosedForm, ...] = ()
    remedies: Plans | None = None
    epoch: Peaks | None = None

    def _replayed(self) -> Result:
        return self.result

    def _title(self) -> str:
        return str(self.case["model"])

    @property
    def verdict(self) -> Verdict:
        """The verdict of the replay."""
        return self.result.verdict

    @property
    def outside(self) -> tuple[OutsideTerm, ...]:
        """What the replay set aside for what lies outside the allocator."""
        return self.worst.outside

    @property
    def facts(self) -> Mapping[str, Any]:
        """What was built: `graph.model.ModelFacts` as JSON; empty for a graph that does not say."""
        found: Mapping[str, Any] = self.trace.metadata.get("environment", {}).get("model", {})
        return found

    @property
    def worst(self) -> RankResult:
        """The rank that needs most."""
        return self.result.ranks[0]

    def document(self) -> dict[str, Any]:
        """The answer: the case, and peaks in bytes (null where it runs out of memory), phases and the verdict.

        Of several GPUs the peaks are the largest, `phases` and `events` those of the rank that needs most, and `ranks`
        has the figures of every kind of rank. `needs` is what a device must have of the `gpu_bytes`, also where it runs
        out of memory.
        """
        fits = self.verdict != "oom"
        stats = self.worst.memory_stats
        answer: dict[str, Any] = {
            **self.case,
            "peak_allocated": max(rank.peak_allocated for rank in self.result.ranks) if fits else None,
            "peak_reserved": max(rank.peak_reserved for rank in self.result.ranks) if fits else None,
            "device_total": max(rank.device_total for rank in self.result.ranks) if fits else None,
            "on_gpu": _most_of([rank.on_gpu for rank in self.result.ranks if rank.on_gpu]),
            "phases": phase_figures(self.worst) if fits else None,
            "verdict": self.verdict,
            "summary": summary(self.result),
            "needs": self.result.needed,
            "gpu_bytes": self.result.decisive.device.total_bytes,
            "model_facts": dict(self.facts),
            "events": stats["allocation.all.allocated"] + stats["allocation.all.freed"],
            "seconds": round(self.seconds, 3),
        }
        if self.min_fit is not None:
            answer["min_fit"] = self.min_fit
        if self.step is not None:
            answer |= self.step.document()
        if self.closed:
            answer["estimators"] = {one.name: one.document() for one in self.closed}
        if self.remedies is not None:
            answer["remedies"] = self.remedies.document()
        if self.epoch is not None:
            answer["epoch"] = self.epoch.document()
        if self.trace.world > 1:
            groups = sorted(self.result.ranks, key=lambda rank: rank.ranks)
            answer["ranks"] = [{"ranks": list(rank.ranks), **_figures(rank)} for rank in groups]
        return answer


def estimate(
    case: Case | Mapping[str, Any] | str | Module,
    *,
    inputs: object = None,
    samples: Sequence[int] | None = None,
    context: Context = "auto",
    min_memory: bool = False,
    events: bool = False,
    log: bool = False,
    snapshot: bool = False,
    picture: bool = False,
    analyse: bool = True,
    capture: Capture | None = None,
    progress: Progress | None = None,
    time_steps: bool = False,
    interconnect: str = "",
    estimators: Iterable[str] = (),
    remedies: bool = False,
    budget: int | None = None,
    trying: Callable[[str], object] | None = None,
    **keys: object,
) -> Estimate:
    """What a training or inference run needs of its GPU, worked out without one.

    `case` is a `graph.case.Case`, a mapping of its keys, the name of a model, or an `nn.Module`: one of transformers,
    or any with example `inputs` (a mapping of keyword arguments, a sequence, or one tensor), of which shapes and dtypes
    count. `keys` are keys of the case: `estimate("gpt2", batch=8)`. `samples` are the lengths of a data set's samples
    in tokens: batches of it are run (`simulator.estimator.epoch`), and their peaks are in `epoch`. `context` are the
    bytes of the device that are not PyTorch's ("auto": the table of `simulator.estimator.outside`, with its ranges; 0:
    none). `min_memory` also finds the smallest device. `events`, `log`, `snapshot`, `picture` and `analyse` are those
    of `simulator.replay`. `capture` makes the graph of a case (default: `captured`); `progress(phase, step, operators)`
    is called from time to time while the default one does. `time_steps` gives kernels and collectives durations, so
    that memory in use on several streams comes back in simulated time, and finds the time of a step; the GPUs meet over
    `interconnect` (`strategies.timing.Clock.connected`). `estimators` are closed forms to stand beside the simulation
    (`simulator.estimator.closed_form`). With `remedies`, changes of a case that does not fit, or needs more than the
    bytes of a `budget`, are tried, each by a capture and a replay (`simulator.fit`); `trying(options)` is called before
    each.

    Raises ConfigError for a bad case, CaptureError where its model cannot be captured, what `replay` raises, and on
    Ctrl-C while remedies are tried Interrupted, a KeyboardInterrupt that has the estimate.
    """
    from simulator.estimator.judging import judged, sides, with_context

    started = time.perf_counter()
    with _asked(case, inputs, keys) as asked:
        epoch = None if samples is None else epoch_of(samples, asked.batch, asked.seq)
        if epoch is not None:
            asked = epoch.case(asked)
        _check(asked, context)

        captures: list[Captured] = []  # of the case itself, until its answer stands

        def graph_of(part: Case, method: Method | None) -> StepGraph:
            return captured(part, progress, method) if capture is None else capture(part)

        def kept_graph(part: Case, method: Method | None) -> StepGraph:
            captures.append((part, method, graph_of(part, method)))
            return captures[-1][-1]

        def answered(one: Case, graph: strategy.Capture = graph_of, **kept: bool) -> tuple[Trace, Result]:
            clock = _clock(one, interconnect) if time_steps else None
            trace = trace_of(one, capture=graph, clock=clock, interconnect=interconnect)
            return trace, judged(trace, outside_of(one, context, communicators(trace)), **kept)

        lines = analyse and capture is None
        trace, found = answered(
            asked,
            kept_graph if lines else graph_of,
            analyse=analyse,
            needs=True,
            events=events,
            log=log,
            snapshot=snapshot,
            picture=picture,
        )
        if captures and found.verdict == "oom":
            found = with_line(found, captures, _line)
        captures.clear()
        aside = bytes_of(found.ranks[0].outside)
        trace = with_context(trace, aside)
        made = Estimate(
            case=asked.document(),
            result=found,
            trace=trace,
            assumptions=(
                *_about_gpu(asked),
                *_about_works(asked),
                *_about_samples(asked, epoch),
                *trace.metadata.get("assumptions", ()),
            ),
            min_fit=aside + max(map(smallest_memory, sides(trace, found.ranks[0].outside))) if min_memory else None,
            step=of_case(trace, asked, found) if time_steps else None,
            closed=closed_forms(asked, estimators, aside),
            epoch=None if epoch is None else peaks_of(epoch, asked, found.ranks[0]),
            seconds=time.perf_counter() - started,
        )
        return _with_remedies(made, asked, context, graph_of, budget, trying) if remedies else made


def _about_samples(case: Case, epoch: Epoch | None) -> Iterator[str]:
    """What is assumed of a data set's batches."""
    if epoch is not None:
        yield "batches are of samples in a random order, each padded to its longest"
        if epoch.cut:
            yield f"{epoch.cut:,} samples are longer than 'seq', and are cut to {max(epoch.lengths):,} tokens"
        if not case.attention_mask:
            yield "no attention mask is given with the padding ('attention_mask': 'padded' has one)"


def _with_remedies(
    made: Estimate,
    asked: Case,
    context: Context,
    capture: strategy.Capture,
    budget: int | None,
    trying: Callable[[str], object] | None,
) -> Estimate:
    """The estimate with what was tried to make it fit its device and the budget, where it does not."""
    needs = made.result.needed
    over = budget is not None and needs is not None and needs > budget
    if needs is None or not (over or made.verdict == "oom"):  # it fails on any device, or fits
        return made

    def judge(case: Case) -> Judged | None:
        if over and case.gpu != asked.gpu:  # no card helps
            return None
        return measured(case, context, capture, budget)

    try:
        return replace(made, remedies=search(asked, judge, seconds=REMEDY_SECONDS, trying=trying))
    except Interrupted as error:
        raise Interrupted(replace(made, remedies=error.found)) from None


@contextmanager
def _asked(case: object, inputs: object, keys: Mapping[str, Any]) -> Iterator[Case]:
    """The case that was asked for; a module that was given is known by its name meanwhile."""
    if inputs is None and isinstance(case, str | Case | Mapping):
        found = {"model": case} if isinstance(case, str) else case.document() if isinstance(case, Case) else case
        yield case if isinstance(case, Case) and not keys else Case.of({**found, **keys})
        return
    if isinstance(case, str | Case | Mapping):
        raise ConfigError("'inputs' are for an nn.Module; a module:function returns its own")
    with _needs_torch():
        from graph.models.given import named
    with named(case, inputs) as given:
        yield Case.of({**given, **keys})


def answer(
    case: Case | Mapping[str, Any],
    *,
    min_memory: bool = False,
    context: Context = "auto",
    capture: Capture | None = None,
) -> dict[str, Any]:
    """The answer document of one case (`Estimate.document`), without anything tried on out of memory.

    With `min_memory` it has `min_fit`, the smallest device in bytes. Raises what `estimate` raises.
    """
    return estimate(case, min_memory=min_memory, context=context, analyse=False, capture=capture).document()


def _most_of(ranks: Sequence[OnGpu]) -> dict[str, int] | None:
    """The largest of each figure on a GPU; None where no replay says them."""
    found = [one.document() for one in ranks]
    return {name: max(one[name] for one in found) for name in found[0]} if found else None


def _figures(rank: RankResult) -> dict[str, Any]:
    """Peaks, phases and verdict of one kind of rank."""
    fits = rank.oom is None
    return {
        "peak_allocated": rank.peak_allocated if fits else None,
        "peak_reserved": rank.peak_reserved if fits else None,
        "device_total": rank.device_total if fits else None,
        "on_gpu": rank.on_gpu and rank.on_gpu.document(),
        "phases": phase_figures(rank) if fits else None,
        "verdict": rank.verdict,
    }


def phase_figures(rank: RankResult) -> dict[str, dict[str, int]]:
    """Peak and remainder of every phase in allocated bytes, keyed as in the JSON document of a replay.

    Where the micro-batches of a step repeat a phase, the last one counts (a replay's own document has the largest).
    """
    figures: dict[str, dict[str, int]] = {}
    allocated = rank.timeline.allocated
    keys: dict[tuple[str, int | None], list[str]] = {}
    for phase in rank.phases:
        keys.setdefault((phase.name, phase.step), []).append(phase.key)
    for span in rank.timeline.phases:
        window = allocated[span.start : span.stop]
        peak, left = int(window.max()), int(window[-1])
        for key in keys.get((span.name, span.step), ()):
            if key in figures and span.name not in _REPEATED:
                peak = max(peak, figures[key]["peak"])
            figures[key] = {"peak": peak, "left": left}
    return figures


# --- graphs -------------------------------------------------------------------------------------------------------

_graphs: OrderedDict[str, StepGraph] = OrderedDict()
_capturing: Final = threading.Lock()  # a capture changes torch for the whole process while it runs


def captured(case: Case, progress: Progress | None = None, method: Method | None = None) -> StepGraph:
    """The graph of a case: captured now, or kept from a case that differs in nothing that a capture sees.

    `method` runs the model as one rank of a job (None: on one GPU). `progress(phase, step, operators)` is called from
    time to time. Raises what `graph.capture.capture` raises.
    """
    key = capture_key(case, method)
    with _capturing:
        graph = _graphs.get(key)
        if graph is None:
            while len(_graphs) >= KEPT_GRAPHS:  # first, so that the old ones' memory serves the new one
                _graphs.popitem(last=False)
            graph = capture_of(case, progress, method)
            _graphs[key] = graph
        _graphs.move_to_end(key)
        return graph


def capture_of(case: Case, progress: Progress | None = None, method: Method | None = None) -> StepGraph:
    """The graph of a case, captured; ConfigError where torch or transformers is not installed."""
    with _needs_torch():
        from graph.recorder.capture import capture
    return capture(case, progress=progress, method=method)


@contextmanager
def _needs_torch() -> Iterator[None]:
    """ConfigError, with what to install, where an import inside finds no torch or transformers."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in NEEDED:
            raise
        raise ConfigError(
            f"{error.name} is not installed, which runs the model's code; install it with: pip install 'vramsim[torch]'"
        ) from None


def _line(case: Case, operator: int, method: Method | None) -> str:
    from graph.recorder.capture import line_of

    with _capturing:
        return line_of(case, operator, method)


def forget_graphs() -> None:
    """Let go of every graph that `captured` keeps."""
    with _capturing:
        _graphs.clear()


def capture_key(case: Case, method: Method | None = None) -> str:
    """Text that is the same for cases that share one captured graph (of one rank of a job, where `method` is given).

    Raises ConfigError for a GPU or release that does not exist.
    """
    replayed = REPLAY_KEYS if method is None else REPLAY_KEYS - {"deferred"}  # works of collectives hold their tensors
    relevant = {key: value for key, value in case.document().items() if key not in replayed}
    relevant |= {"gpu": device(case.gpu).name, "release": parse_release(case.release).text}
    if method is not None:
        job = getattr(method, "case", case)
        relevant |= {"job": capture_key(job), "rank": getattr(method, "rank", 0), "method": type(method).__name__}
    return json.dumps(relevant, sort_keys=True, default=str)


# --- settings -----------------------------------------------------------------------------------------------------


def _about_gpu(case: Case) -> Iterator[str]:
    """What to say of a case's GPU: which one is taken where the name leaves it open, and bf16 where it has none."""
    card = gpu(case.gpu)
    if (text := assumed(case.gpu)) is not None:
        yield text
    if "bf16" in (case.dtype, case.autocast, case.compute) and not card.has_bf16:
        yield f"{card.name} has no tensor cores for bf16, which PyTorch emulates there, slowly; fp16 has them"


def _about_works(case: Case) -> Iterator[str]:
    """What to say of collectives whose tensors live as long as a clock decides."""
    if case.sync and case.deferred == "prompt" and registry.find(case).keeps_works(case):
        yield (
            "DistributedDataParallel's first buckets are taken as gone by the second step; where NCCL's watchdog has "
            "not looked by then (it does every 0.1 s), 'deferred': 'late' is what it needs"
        )


def _clock(case: Case, interconnect: str) -> Clock:
    """The speeds of a case's GPU and of what joins it to others."""
    return Clock.connected(case.gpu, interconnect)


def _check(case: Case, context: Context) -> None:
    """Refuse illegal allocator settings and sizes before the long work begins."""
    parse_conf(case.alloc_conf, parse_release(case.release))
    outside_of(case, context, 0)
