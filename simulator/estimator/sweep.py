"""Many cases, estimated in parallel: `sweep`, with its worker processes, or any executor in their place.

Cases that share a captured graph go to a worker together. Every answer is a line of the results file, written when it
is there; a sweep that was interrupted goes on where it stopped, by the content of the cases. A case that fails, or that
kills its worker, has an answer with `error`, and the others go on.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from simulator.estimator.estimate import ANSWER_KEYS, answer
from simulator.estimator.jobs import Dispatch, MakeExecutor, local_pool, uninterrupted
from simulator.estimator.results_file import Case as Given
from simulator.estimator.results_file import Results, content
from traces.errors import LLMemError
from traces.text import reason

if TYPE_CHECKING:
    from simulator.estimator.estimate import Capture
    from simulator.estimator.outside import Context


#: Version of the layout of a line of results.
SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Options:
    """What every case of a sweep is estimated with; the fields are arguments of
    `simulator.estimator.estimate.answer`."""

    context: Context = "auto"
    min_memory: bool = False
    capture: Capture | None = None


@dataclass(slots=True)
class Summary:
    """How a sweep stands: cases in all, kept from an earlier run, and answers by kind (kept ones counted in).

    `nearest` is the answer out of memory that lacks least.
    """

    total: int = 0
    kept: int = 0
    fits: int = 0
    tight: int = 0
    oom: int = 0
    failed: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    nearest: Mapping[str, Any] | None = None

    @property
    def done(self) -> int:
        """Cases that have an answer."""
        return self.fits + self.tight + self.oom + self.failed

    def count(self, answer: Mapping[str, Any]) -> None:
        """Count one answer."""
        kind = "failed" if "error" in answer else str(answer.get("verdict"))
        setattr(self, kind, getattr(self, kind) + 1)
        if kind == "oom" and (self.nearest is None or _lacks(answer) < _lacks(self.nearest)):
            self.nearest = answer


def _lacks(answer: Mapping[str, Any]) -> float:
    """Bytes that a GPU lacks; without end where that is not known."""
    needs = answer.get("needs")
    return math.inf if needs is None else needs - answer["gpu_bytes"]


def sweep(
    cases: Iterable[Given | Mapping[str, Any]],
    results: str | os.PathLike[str],
    *,
    jobs: int | None = None,
    executor: Executor | MakeExecutor | None = None,
    context: Context = "auto",
    min_memory: bool = False,
    retry: bool = False,
    force: bool = False,
    capture: Capture | None = None,
    progress: Callable[[Summary], None] | None = None,
) -> Summary:
    """Estimate every case and append its answer to the file `results`, one JSON object a line, as they are done.

    An answer is the case as it was given, and what `simulator.estimator.estimate.answer` adds, or `error`. Answers that
    the file has already are kept, and their cases not estimated again (`retry`: those with `error` are; `force`: the
    file begins anew). `jobs` worker processes run (default: a core each, as far as memory goes), or else `executor`: an
    executor as of `concurrent.futures`, or a function that makes one. `context`, `min_memory` and `capture` are those
    of `answer`; `capture` must be picklable. `progress` is called after every answer.

    Raises OutputError where the file cannot be written or holds something else, ConfigError where the executor cannot
    work; on KeyboardInterrupt what is finished is in the file.
    """
    started = time.perf_counter()
    given = [one if isinstance(one, Given) else Given(one) for one in cases]
    options = Options(context, min_memory, capture)
    summary = Summary(total=len(given))
    with Results(results, force=force) as file:
        summary.notes += file.notes
        waiting = _waiting(given, file, summary, retry=retry, min_memory=min_memory)
        report = progress or (lambda _: None)
        report(summary)

        def finished(case: Given, found: Mapping[str, Any]) -> None:
            line = {**case.repeated(), "schema_version": SCHEMA_VERSION, **found}
            with uninterrupted():
                file.append(line)
                summary.count(line)
            report(summary)

        good = []
        for case in waiting:
            if case.error is not None:
                finished(case, {"error": case.error})
            else:
                good.append(case)
        if good:
            Dispatch(work, options, finished, jobs, executor, pool=lambda size: _pool(size, capture is None)).run(good)
    summary.seconds = time.perf_counter() - started
    return summary


def _waiting(given: Sequence[Given], file: Results, summary: Summary, *, retry: bool, min_memory: bool) -> list[Given]:
    """The cases that have no answer in the file yet; equal cases need as many answers."""
    wanted = Counter(case.key for case in given)
    if retry:
        file.drop(lambda answer: "error" in answer and content(answer) in wanted)
    known = Counter[str]()
    left = Counter(wanted)
    for one in file.answers:
        key = content(one)
        if min_memory and one.get("verdict") in ("fits", "tight") and "min_fit" not in one:
            continue
        if left[key] > 0:
            left[key] -= 1
            known[key] += 1
            summary.kept += 1
            summary.count(one)
    others = len(file.answers) - summary.kept
    if others:
        summary.notes.append(f"the results file has {others} more answers, which stay: not of these cases or options")
    waiting = []
    for case in given:
        if known[case.key] > 0:
            known[case.key] -= 1
        else:
            waiting.append(case)
    return waiting


# --- workers ------------------------------------------------------------------------------------------------------


def work(cases: Sequence[Mapping[str, Any]], options: Options) -> list[dict[str, Any]]:
    """What a worker does: the part of each case's answer that is not the case itself, in order."""
    return [_one(case, options) for case in cases]


def _one(case: Mapping[str, Any], options: Options) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        found = answer(case, context=options.context, min_memory=options.min_memory, capture=options.capture)
    except LLMemError as error:
        found = {"error": reason(error)}
    except MemoryError:
        found = {"error": "not enough memory on this machine for the job"}
    except (Exception, SystemExit) as error:
        found = {"error": f"{type(error).__name__}: {reason(error)}"}
    found.setdefault("seconds", round(time.perf_counter() - started, 3))
    return {key: found[key] for key in ANSWER_KEYS if key in found}


def _pool(jobs: int, captures: bool) -> Executor:
    """Worker processes that have imported once what all need (`captures`: torch too)."""
    heavy = ["graph.recorder.capture", "graph.models.sources", "transformers"] if captures else []
    return local_pool(jobs, ["simulator.allocator.prepared", "simulator.estimator.estimate", *heavy])
