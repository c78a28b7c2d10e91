"""Many cases, estimated in parallel: `sweep`, with its worker processes, or any executor in their place.

Cases that share a captured graph go to a worker together. Every answer is a line of the results file, written when it
is there; a sweep that was interrupted goes on where it stopped, by the content of the cases. A case that fails, or that
kills its worker, has an answer with `error`, and the others go on.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from simulator.results_file import Case as Given
from simulator.results_file import Results, content
from traces.errors import ConfigError, LLMemError
from traces.text import one_line

if TYPE_CHECKING:
    from simulator.estimation import Capture

#: Most cases that go to a worker at once; an interruption loses at most so many a worker.
CHUNK: Final = 8
#: Memory that a worker is assumed to need, for the number of workers.
WORKER_BYTES: Final = 1 << 30
#: Tasks that wait in an executor whose size is not known.
FOREIGN_WINDOW: Final = 64

MakeExecutor = Callable[[], Executor]


@dataclass(frozen=True, slots=True)
class Options:
    """What every case of a sweep is estimated with; the fields are arguments of `simulator.estimation.answer`."""

    context: int | Literal["auto"] | None = None
    min_memory: bool = False
    capture: Capture | None = None


@dataclass(slots=True)
class Summary:
    """How a sweep stands: cases in all, kept from an earlier run, and answers by kind (kept ones counted in)."""

    total: int = 0
    kept: int = 0
    fits: int = 0
    oom: int = 0
    failed: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Cases that have an answer."""
        return self.fits + self.oom + self.failed

    def count(self, answer: Mapping[str, Any]) -> None:
        """Count one answer."""
        kind = "failed" if "error" in answer else str(answer.get("verdict"))
        setattr(self, kind, getattr(self, kind) + 1)


def sweep(
    cases: Iterable[Given | Mapping[str, Any]],
    results: str | os.PathLike[str],
    *,
    jobs: int | None = None,
    executor: Executor | MakeExecutor | None = None,
    context: int | Literal["auto"] | None = None,
    min_memory: bool = False,
    retry: bool = False,
    force: bool = False,
    capture: Capture | None = None,
    progress: Callable[[Summary], None] | None = None,
) -> Summary:
    """Estimate every case and append its answer to the file `results`, one JSON object a line, as they are done.

    An answer is the case as it was given, and what `simulator.estimation.answer` adds, or `error`. Answers that the
    file has already are kept, and their cases not estimated again (`retry`: those with `error` are; `force`: the file
    begins anew). `jobs` worker processes run (default: a core each, as far as memory goes), or else `executor`: an
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
            file.append({**case.repeated(), **found})
            summary.count(found)
            report(summary)

        good = []
        for case in waiting:
            if case.error is not None:
                finished(case, {"error": case.error})
            else:
                good.append(case)
        if good:
            _Dispatch(options, finished, jobs, executor).run(good)
    summary.seconds = time.perf_counter() - started
    return summary


def _waiting(given: Sequence[Given], file: Results, summary: Summary, *, retry: bool, min_memory: bool) -> list[Given]:
    """The cases that have no answer in the file yet; equal cases need as many answers."""
    wanted = Counter(case.key for case in given)
    if retry:
        file.drop(lambda answer: "error" in answer and content(answer) in wanted)
    known = Counter[str]()
    left = Counter(wanted)
    for answer in file.answers:
        key = content(answer)
        if min_memory and answer.get("verdict") == "fits" and "min_fit" not in answer:
            continue
        if left[key] > 0:
            left[key] -= 1
            known[key] += 1
            summary.kept += 1
            summary.count(answer)
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


# --- dispatch -----------------------------------------------------------------------------------------------------


def chunks(cases: Sequence[Given], jobs: int) -> list[list[Given]]:
    """The cases in groups for a worker each: those with one captured graph together, unless workers would be idle."""
    groups: dict[str, list[Given]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    found = []
    for group in groups.values():
        size = min(CHUNK, max(1, math.ceil(len(group) * len(groups) / jobs)))
        found += [group[start : start + size] for start in range(0, len(group), size)]
    return found


class _Dispatch:
    """Hands chunks of cases to an executor and takes their answers, whatever becomes of single ones."""

    def __init__(
        self,
        options: Options,
        finished: Callable[[Given, Mapping[str, Any]], None],
        jobs: int | None,
        executor: Executor | MakeExecutor | None,
    ) -> None:
        self._options = options
        self._finished = finished
        self._jobs = jobs or (default_jobs() if executor is None else FOREIGN_WINDOW)
        self._ours = executor is None
        self._window = self._jobs + 2 if self._ours else self._jobs
        self._make: MakeExecutor | None
        if executor is None:
            self._make = lambda: local_pool(self._jobs, captures=options.capture is None)
        elif isinstance(executor, Executor) or not callable(executor):
            self._make = None
        else:
            self._make = executor
        self._given = executor if self._make is None else None
        self._executor: Any = None
        self._children: set[Any] = set()
        self._running: dict[Future[Any], list[Given]] = {}
        self._alone: deque[Given] = deque()  # cases that are tried one by one, since something went wrong with them

    def run(self, cases: Sequence[Given]) -> None:
        """Estimate all cases; on KeyboardInterrupt the answers that are there are taken first."""
        self._jobs = min(self._jobs, len(cases))
        pending = deque(chunks(cases, self._jobs))
        self._open()
        try:
            while pending or self._alone or self._running:
                self._fill(pending)
                done, _ = wait(self._running, return_when=FIRST_COMPLETED)
                self._take([future for future in self._running if future in done])  # in the order of submission
        except BaseException:
            self._take_finished()
            self._stop()
            raise
        if self._make is not None:
            self._executor.shutdown(wait=True)

    def _open(self) -> None:
        before = set(multiprocessing.active_children())
        self._executor = self._given if self._make is None else self._make()
        if not hasattr(self._executor, "submit"):
            raise ConfigError(f"an executor must have a method 'submit'; {type(self._executor).__name__} has none")
        self._before = before

    def _fill(self, pending: deque[list[Given]]) -> None:
        """Submit what the executor has room for; one case at a time while some are suspected."""
        while self._alone or pending:
            if self._alone and self._running:
                return
            if not self._alone and len(self._running) >= self._window:
                return
            chunk = [self._alone.popleft()] if self._alone else pending.popleft()
            documents = [case.document for case in chunk]
            try:
                future = self._executor.submit(work, documents, self._options)
            except (BrokenExecutor, RuntimeError) as error:
                self._broken(chunk, error)
                continue
            self._running[future] = chunk

    def _take(self, done: Iterable[Future[Any]]) -> None:
        for future in list(done):
            chunk = self._running.pop(future, None)
            if chunk is None:  # taken with a broken executor
                continue
            error = future.exception()
            if error is None:
                for case, found in zip(chunk, future.result(), strict=True):
                    self._finished(case, found)
            elif isinstance(error, BrokenExecutor):
                self._broken(chunk, error)
            else:
                self._suspect(chunk, f"{type(error).__name__}: {one_line(error)}")

    def _suspect(self, chunk: list[Given], reason: str) -> None:
        """Try cases one by one; one that was alone has its answer now."""
        if len(chunk) > 1:
            self._alone.extend(chunk)
        else:
            self._finished(chunk[0], {"error": reason})

    def _broken(self, chunk: list[Given], error: BaseException) -> None:
        """The executor lost a worker, and with it everything that ran: begin again, with the suspects one by one."""
        if self._make is None:
            raise ConfigError(f"the executor does not work any more: {one_line(error) or type(error).__name__}")
        self._take(future for future in list(self._running) if future.done() and future.exception() is None)
        lost = [chunk, *self._running.values()]
        self._running.clear()
        alone = len(lost) == 1 and len(chunk) == 1
        self._stop()
        self._open()
        if alone:
            self._suspect(chunk, "the worker process ended: it was killed, crashed or ran out of this machine's memory")
        else:
            self._alone.extend(case for part in lost for case in part)

    def _take_finished(self) -> None:
        """Keep the answers that have come meanwhile."""
        with contextlib.suppress(Exception):
            self._take([one for one in self._running if one.done() and not one.cancelled() and one.exception() is None])

    def _stop(self) -> None:
        """End the executor at once: nothing that runs in it is wanted any more."""
        for future in self._running:
            future.cancel()
        if self._make is None or self._executor is None:
            return
        with contextlib.suppress(Exception):
            self._executor.shutdown(wait=False, cancel_futures=True)
        if self._ours:
            for process in set(multiprocessing.active_children()) - self._before:
                process.terminate()


# --- workers ------------------------------------------------------------------------------------------------------


def work(cases: Sequence[Mapping[str, Any]], options: Options) -> list[dict[str, Any]]:
    """What a worker does: the part of each case's answer that is not the case itself, in order."""
    return [_one(case, options) for case in cases]


def _one(case: Mapping[str, Any], options: Options) -> dict[str, Any]:
    from simulator.estimation import ANSWER_KEYS, answer

    started = time.perf_counter()
    try:
        found = answer(case, context=options.context, min_memory=options.min_memory, capture=options.capture)
    except LLMemError as error:
        found = {"error": one_line(error)}
    except MemoryError:
        found = {"error": "not enough memory on this machine for the job"}
    except (Exception, SystemExit) as error:
        found = {"error": f"{type(error).__name__}: {one_line(error)}".rstrip(": ")}
    found.setdefault("seconds", round(time.perf_counter() - started, 3))
    return {key: found[key] for key in ANSWER_KEYS if key in found}


def local_pool(jobs: int, *, captures: bool = True) -> ProcessPoolExecutor:
    """A pool of worker processes, forked from a server that has imported once what all need (`captures`: torch too)."""
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        heavy = ["graph.capture", "graph.sources", "transformers"] if captures else []
        context.set_forkserver_preload(["simulator.prepared", "simulator.estimation", *heavy])
    return ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin)


def _begin() -> None:
    """Set up a worker: Ctrl-C is the parent's to handle, nothing goes to stdout, and it does not outlive the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.dup2(2, 1)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def _follow(parent: Any) -> None:
    parent.join()
    os._exit(1)


def default_jobs() -> int:
    """A worker for every core that this process may use, as far as the machine's free memory goes."""
    with contextlib.suppress(AttributeError, OSError):
        cores = len(os.sched_getaffinity(0))
        return max(1, min(cores, _free_bytes() // WORKER_BYTES))
    return os.cpu_count() or 1


def _free_bytes() -> int:
    """Memory that processes can still take, as Linux says it; very much where it cannot be told."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62


# --- executors of others ------------------------------------------------------------------------------------------


def named_executor(name: str) -> Executor | MakeExecutor:
    """The executor that `module:attribute` names, or the function or class that makes one; ConfigError if none does."""
    import importlib

    module, colon, path = name.partition(":")
    if not colon or not module or not path:
        raise ConfigError(f"executor {name!r}: write module:attribute, as in concurrent.futures:ThreadPoolExecutor")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except ImportError as error:
        raise ConfigError(f"executor {name!r}: cannot be imported: {one_line(error)}") from None
    except AttributeError:
        raise ConfigError(f"executor {name!r}: module {module!r} has no {path!r}") from None
    if not callable(found) and not hasattr(found, "submit"):
        raise ConfigError(f"executor {name!r}: is neither an executor nor a function that makes one")
    return found


@contextlib.contextmanager
def dask_executor(address: str, *, timeout: float = 20) -> Iterator[tuple[Executor, int]]:
    """The workers of a Dask cluster as an executor, and how many cases they can work on at once.

    The cluster's workers need this package, and its extra `torch`, in their Python. Raises ConfigError without dask,
    where no scheduler answers at `address` within `timeout` seconds, or where its workers cannot do the work.
    """
    try:
        from dask.distributed import Client
    except ImportError:
        raise ConfigError("--dask needs dask; install it with: pip install 'llmem[dask]'") from None
    try:
        client = Client(address, timeout=timeout, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise ConfigError(f"--dask {address}: no scheduler answers there ({one_line(error)})") from None
    with client:
        try:
            workers = client.run(_ready)
        except Exception as error:
            raise ConfigError(
                f"--dask {address}: its workers cannot import this package ({one_line(error)}); install it there"
            ) from None
        if not workers:
            raise ConfigError(f"--dask {address}: the cluster has no workers")
        yield client.get_executor(pure=False), sum(client.nthreads().values())


def _ready() -> bool:
    """Whether a remote worker has this module."""
    return True
