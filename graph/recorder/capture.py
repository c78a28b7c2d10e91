"""Captures a training run: case in, step graph out, with no GPU and no weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from graph.case import GRAPHED
from graph.errors import CaptureError
from graph.fake_cuda import sdpa as attention
from graph.hardware.profile import profile
from graph.host.compiled import way_out
from graph.loop import generation
from graph.loop.compiled import compiling
from graph.loop.method import Method
from graph.loop.placement import described
from graph.loop.training import LOAD, Clock
from graph.model import Role, StepGraph
from graph.models.mixtures import Routed, shares
from graph.models.sources import build
from graph.recorder import libraries
from graph.recorder.assembly import repeat, step_graph, tables
from graph.recorder.attribution import Roles, followed
from graph.recorder.flops import cost
from graph.recorder.recorder import Progress, Recorder
from graph.user_code import quiet, raised
from graph.workspaces import plan
from graph.workspaces.rules import Call
from traces.collecting import uncollected
from traces.errors import LLMemError
from traces.text import reason
from traces.units import format_bytes

if TYPE_CHECKING:
    from graph.case import Case
    from graph.hardware.profile import Profile


def capture(case: Case, *, progress: Progress | None = None, method: Method | None = None) -> StepGraph:
    """One training run of `case` (a `graph.case.Case`), or one generation, as a step graph.

    The model is built without weights, placed on a fake GPU, and trained for `case.steps` iterations: two (or
    three) for real, the others as copies of the last, after a check that it repeats and that nothing of the first is
    still to be dropped. `progress(phase, step,
    operators)` is called from time to time; it may raise to stop the capture. Raises CaptureError for what cannot
    be captured, ConfigError for a bad case, UnsupportedTorch where this PyTorch does not behave as the capture
    needs. `method` runs the model as one rank of a job; None: on one GPU.
    """
    if case.compile in GRAPHED:
        raise CaptureError(
            f"CUDA graphs ask the allocator, and a capture has none: without 'compile': {case.compile!r} the step is "
            "captured, with it estimate and record work out its memory"
        )
    method = Method() if method is None else method
    fewest = method.real_steps + bool(case.compile)  # a compiled function may be compiled anew at its second call
    real = case.steps if case.lengths else min(case.steps, fewest)
    with quiet():
        while True:
            graph = _attempt(case, real, progress, method)
            if graph is not None:
                return graph
            real = min(case.steps, fewest + 1 if real == fewest else 2 * real)


def line_of(case: Case, operator: int, method: Method | None = None) -> str:
    """The line of the model's code that calls an operator of a capture, `file:line (function)`; empty if none does.

    The case is captured anew, up to that operator. Raises what `capture` raises.
    """
    method = Method() if method is None else method
    with quiet():
        try:
            _attempt(case, min(case.steps, method.real_steps), None, method, until=operator)
        except _ReachedError as error:
            return raised(error)
    return ""


class _ReachedError(LLMemError):
    """The operator that was looked for is about to run."""


class _Until(Recorder):
    """A recorder that stops the capture before an operator."""

    until: int | None = None

    def operator(self, *call: Any) -> None:
        if len(self.log.operators) == self.until:
            raise _ReachedError
        super().operator(*call)


def _attempt(
    case: Case, real: int, progress: Progress | None, method: Method, until: int | None = None
) -> StepGraph | None:
    """A capture with `real` iterations run for real; None if the last one does not repeat and there are more."""
    from graph.fake_cuda.device import fake_cuda

    card = profile(case.gpu, case.release, case.cudnn_sdp)
    inference = case.task == "inference"
    built = build(case)  # before there is a GPU: libraries look for one when they are imported
    if inference:
        generation.check(case, built)
    with uncollected(), fake_cuda(card) as runtime:
        attention.install(runtime)
        kind = Recorder if until is None else _Until
        recorder = kind(runtime, torch.device("cuda", 0), plan=_planner(card), cost=_cost(), progress=progress)
        if isinstance(recorder, _Until):
            recorder.until = until
        roles = Roles()
        clock = Clock(recorder, case.sync, method.settle, generation.PHASES if inference else method.phases)
        runtime.observer = recorder
        runtime.synchronizations = recorder.synchronize
        runtime.emptied = recorder.empty_cache
        if experts := shares(case, built.config):
            runtime.nonzero = Routed(experts)
        running = ExitStack()
        try:
            running.enter_context(method.running(runtime, recorder))
            clock.begin(LOAD, -1, Role.LOAD)
            with (
                _told(case, recorder),
                recorder.ordered_casts(),
                recorder.nested_backward(),
                compiling(case, runtime, recorder, method.compiles_blocks(case)),
            ):
                parameters = method.load(recorder, built)
                tensors = described(recorder, built.module)
                modules = tuple((name, type(part).__name__) for name, part in built.module.named_modules())
                buffers = frozenset(name for name, _ in built.module.named_buffers(remove_duplicate=False))
                if case.compile:
                    method.compile(case, built.module)
                with followed(recorder, built.module, roles):
                    if inference:
                        generation.generate(clock, built, case, roles)
                    else:
                        method.train(clock, built, case, roles, real)
        finally:
            runtime.observer = None
            running.close()
            runtime.synchronizations = runtime.emptied = None
        facts = built.facts
        assumptions = (*built.assumptions, *map(str, runtime.assumptions), *_about_managed(runtime.managed))
        if told := libraries.of_log(recorder.log):
            assumptions += (told,)
        del built
    log = recorder.log
    table = tables(log, roles, parameters, buffers)
    if case.steps > real and not inference:
        repeated = repeat(table, clock.boundaries, case.steps - real) if method.settled else None
        if repeated is None:
            return None
        table = repeated
    return step_graph(
        table,
        case=case.document(),
        environment={
            "gpu": card.name,
            "arch": list(card.arch),
            "release": case.release,
            "torch": str(torch.__version__),
            "model": facts.document(),
        },
        names=tuple(log.names),
        phases=generation.PHASES if inference else method.phases,
        parameters=parameters,
        assumptions=assumptions,
        tensors=tensors,
        modules=modules,
    )


@contextmanager
def _told(case: Case, recorder: Recorder) -> Iterator[None]:
    """What the model itself raises becomes one line that says where."""
    try:
        yield
    except (LLMemError, MemoryError):
        raise
    except Exception as error:
        place = f"step {recorder.step}" if recorder.step >= 0 else "loading"
        module, line = recorder.where(), raised(error)
        way = f"; {hint}" if (hint := way_out(error)) else ""
        raise CaptureError(
            f"model {case.model}: {type(error).__name__} in {place}{f', in or after {module}' if module else ''}"
            f"{f', at {line}' if line else ''}: {reason(error)}{way}"
        ) from error


def _about_managed(size: int) -> Iterator[str]:
    """What is to be said of CUDA managed memory, which is no part of what the allocator has."""
    if size:
        yield (
            f"{format_bytes(size)} of optimizer states are paged: CUDA managed memory, which is on the GPU where there "
            "is room and on the host where not, and is not counted"
        )


def _planner(card: Profile) -> Any:
    """The workspace rules, as the recorder calls them."""

    def planned(
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: object,
        stream: int,
        thread: int,
        grad: bool,
        state: dict[Any, Any],
    ) -> Any:
        return plan(Call(name, args, kwargs, out, card, stream, thread, grad, state))

    return planned


def _cost() -> Any:
    return cost
