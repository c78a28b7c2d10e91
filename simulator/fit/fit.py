"""`fit`: the cheapest changes that make a case fit, searched by several processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from graph.case import Case
from simulator.estimator.estimate import captured
from simulator.estimator.jobs import default_jobs, local_pool
from simulator.fit.measure import measured
from simulator.fit.plans import Fitting, Judged, Plans
from simulator.fit.search import SECONDS, Mapped, search
from traces.errors import ConfigError, Interrupted

if TYPE_CHECKING:
    from graph.loop.method import Method
    from graph.model import StepGraph
    from simulator.estimator.outside import Context

SCHEMA_VERSION: Final = 1
#: What workers import once for all.
PRELOADED: Final = (
    "simulator.allocator.prepared",
    "simulator.estimator.estimate",
    "graph.recorder.capture",
    "graph.models.sources",
    "transformers.modeling_layers",
)


@dataclass(frozen=True, kw_only=True)
class Fitted(Fitting):
    """A case and the plans that make it fit; `gpus` are those that there are."""

    case: Case
    gpus: int | None = None


def fit(
    case: Case,
    *,
    keep: Collection[str] = (),
    gpus: int | None = None,
    context: Context = "auto",
    seconds: float = SECONDS,
    jobs: int | None = None,
    trying: Callable[[str], object] | None = None,
) -> Fitted:
    """The cheapest changes of a case that make it fit its GPU, each plan proved by a capture and a replay.

    No plan changes a key of `keep`; with `gpus` so many GPUs may be used. `context` are the bytes of each that are not
    PyTorch's. `jobs` processes work (default: one a core; 1: this one). `trying(options)` is called before each try.
    Raises ConfigError for a bad case or key, and for one that cannot run; Interrupted, with what is known, on Ctrl-C.
    """
    jobs = jobs or default_jobs()
    started = time.monotonic()
    judge = partial(_judge, context=context)

    def found(mapped: Mapped) -> Plans:
        left = seconds - (time.monotonic() - started)
        return search(case, judge, keep=keep, gpus=gpus, seconds=left, mapped=mapped, width=jobs, trying=trying)

    try:
        if jobs == 1:
            plans = found(map)
        else:
            with local_pool(jobs, PRELOADED) as pool:
                plans = found(pool.map)
    except Interrupted as error:
        raise Interrupted(Fitted(case=case, plans=error.found, keep=tuple(keep), gpus=gpus)) from None
    if plans.whole is None:
        from simulator.estimator.estimate import estimate

        estimate(case, context=context, analyse=False)  # says why
        raise ConfigError("the case cannot be replayed")
    return Fitted(case=case, plans=plans, keep=tuple(keep), gpus=gpus)


def _judge(case: Case, context: Context) -> Judged | None:
    return measured(case, context, _graph_of)


def _graph_of(case: Case, method: Method | None) -> StepGraph:
    return captured(case, None, method)
