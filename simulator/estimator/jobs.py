"""Work in parallel: `Dispatch` hands chunks of jobs to worker processes, or to any executor in their place.

A job that fails, or that kills its worker, has an answer with `error`, and the others go on. On an interruption what is
finished is kept.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from typing import Any, Final, Generic, Protocol, TypeVar

from simulator.free_memory import free_bytes
from simulator.signals import answered
from traces.errors import ConfigError
from traces.text import reason

#: Most jobs that go to a worker at once; an interruption loses at most so many a worker.
CHUNK: Final = 8
#: Memory that a worker is assumed to need, for the number of workers.
WORKER_BYTES: Final = 1 << 30
#: Tasks that wait in an executor whose size is not known.
FOREIGN_WINDOW: Final = 64

MakeExecutor = Callable[[], Executor]


class Job(Protocol):
    """A piece of work: `document` is what a worker gets of it; jobs of equal `group` share what is dear to make."""

    @property
    def group(self) -> str:
        """Equal for jobs that go to one worker together, where that is possible."""

    @property
    def document(self) -> Any:
        """What a worker gets."""


AnyJob = TypeVar("AnyJob", bound=Job)


def chunks(cases: Sequence[AnyJob], jobs: int, most: int = CHUNK) -> list[list[AnyJob]]:
    """The jobs in groups for a worker each: those of one `group` together, unless workers would be idle."""
    groups: dict[str, list[AnyJob]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    found = []
    for group in groups.values():
        size = min(most, max(1, math.ceil(len(group) * len(groups) / jobs)))
        found += [group[start : start + size] for start in range(0, len(group), size)]
    return found


class Dispatch(Generic[AnyJob]):
    """Hands chunks of jobs to an executor and takes their answers, whatever becomes of single ones.

    `work(documents, options)` runs in a worker and answers a list of mappings, one a document; `finished(job, answer)`
    is called for each here. `jobs` worker processes of `pool(jobs)` run, or `executor`: one as of `concurrent.futures`,
    or a function that makes one.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Any], Any], list[dict[str, Any]]],
        options: object,
        finished: Callable[[AnyJob, Mapping[str, Any]], None],
        jobs: int | None,
        executor: Executor | MakeExecutor | None,
        *,
        pool: Callable[[int], Executor],
        most: int = CHUNK,
    ) -> None:
        self._work = work
        self._options = options
        self._finished = finished
        self._most = most
        self._jobs = jobs or (default_jobs() if executor is None else FOREIGN_WINDOW)
        self._ours = executor is None
        self._window = self._jobs + 2 if self._ours else self._jobs
        self._make: MakeExecutor | None
        if executor is None:
            self._make = lambda: pool(self._jobs)
        elif isinstance(executor, Executor) or not callable(executor):
            self._make = None
        else:
            self._make = executor
        self._given = executor if self._make is None else None
        self._executor: Any = None
        self._running: dict[Future[Any], list[AnyJob]] = {}
        self._alone: deque[AnyJob] = deque()  # jobs that are tried one by one, since something went wrong with them

    def run(self, cases: Sequence[AnyJob]) -> None:
        """Do all jobs; on KeyboardInterrupt the answers that are there are taken first."""
        self._jobs = min(self._jobs, len(cases))
        pending = deque(chunks(cases, self._jobs, self._most))
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

    def _fill(self, pending: deque[list[AnyJob]]) -> None:
        """Submit what the executor has room for; one case at a time while some are suspected."""
        while self._alone or pending:
            if self._alone and self._running:
                return
            if not self._alone and len(self._running) >= self._window:
                return
            chunk = [self._alone.popleft()] if self._alone else pending.popleft()
            documents = [case.document for case in chunk]
            try:
                future = self._executor.submit(self._work, documents, self._options)
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
                with uninterrupted():
                    for case, found in zip(chunk, future.result(), strict=True):
                        self._finished(case, found)
            elif isinstance(error, BrokenExecutor):
                self._broken(chunk, error)
            else:
                self._suspect(chunk, f"{type(error).__name__}: {reason(error)}")

    def _suspect(self, chunk: list[AnyJob], reason: str) -> None:
        """Try cases one by one; one that was alone has its answer now."""
        if len(chunk) > 1:
            self._alone.extend(chunk)
        else:
            self._finished(chunk[0], {"error": reason})

    def _broken(self, chunk: list[AnyJob], error: BaseException) -> None:
        """The executor lost a worker, and with it everything that ran: begin again, with the suspects one by one."""
        if self._make is None:
            raise ConfigError(f"the executor does not work any more: {reason(error)}")
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
        if self._ours:
            for process in set(multiprocessing.active_children()) - self._before:
                process.terminate()
        with contextlib.suppress(Exception):  # the thread of a pool whose workers are gone ends at once
            self._executor.shutdown(wait=self._ours, cancel_futures=True)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until what is inside is done, so that an answer is kept everywhere or nowhere."""
    came: list[int] = []
    try:
        with answered([signal.SIGINT], lambda number, _: came.append(number)):
            yield
    finally:
        for number in came[:1]:
            signal.raise_signal(number)


# --- workers ------------------------------------------------------------------------------------------------------


def local_pool(
    jobs: int, modules: Sequence[str] = (), prepare: Callable[..., object] | None = None, *arguments: Any
) -> ProcessPoolExecutor:
    """A pool of worker processes, forked from a server that has imported `modules` once for all.

    `prepare(*arguments)` is called in every worker before it works.
    """
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(list(modules))
        _start_server()
        ready = context.Process(target=_nothing, daemon=True)
        ready.start()  # Ctrl-C while the server imports meets no worker that is half started
        ready.join()
    return ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(prepare, *arguments))


def _start_server() -> None:
    """Start the server that workers are forked from such that Ctrl-C is not for it, not even while it imports."""
    from multiprocessing import forkserver

    with answered([signal.SIGINT], signal.SIG_IGN):
        forkserver.ensure_running()


def _nothing() -> None:
    """What the first process does."""


def _begin(prepare: Callable[..., object] | None = None, *arguments: object) -> None:
    """Set up a worker: Ctrl-C is the parent's to handle, nothing goes to stdout, and it does not outlive the parent."""
    gc.freeze()  # what the server has imported lasts
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.dup2(2, 1)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    if prepare is not None:
        prepare(*arguments)


def _follow(parent: Any) -> None:
    parent.join()
    os._exit(1)


def default_jobs() -> int:
    """A worker for every core that this process may use, as far as the machine's free memory goes."""
    with contextlib.suppress(AttributeError, OSError):
        cores = len(os.sched_getaffinity(0))
        return max(1, min(cores, free_bytes() // WORKER_BYTES))
    return os.cpu_count() or 1


# --- executors of others ------------------------------------------------------------------------------------------


def named_executor(name: str) -> Executor | MakeExecutor:
    """The executor that `module:attribute` names, or the function or class that makes one; ConfigError if none does."""
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
        raise ConfigError(f"executor {name!r}: cannot be imported: {reason(error)}") from None
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
        cluster: Any = importlib.import_module("dask.distributed")
    except ImportError:
        raise ConfigError("--dask needs dask; install it with: pip install 'vramsim[dask]'") from None
    try:
        client = cluster.Client(address, timeout=timeout, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise ConfigError(f"--dask {address}: no scheduler answers there ({reason(error)})") from None
    with client:
        try:
            with contextlib.suppress(TimeoutError):
                client.wait_for_workers(1, timeout=timeout)
            workers = client.run(_ready)
        except Exception as error:
            raise ConfigError(
                f"--dask {address}: its workers cannot import this package ({reason(error)}); install it there"
            ) from None
        if not workers:
            raise ConfigError(f"--dask {address}: the cluster has no workers")
        yield _Cluster(client.get_executor(pure=False)), sum(client.nthreads().values())


def _ready() -> bool:
    """Whether a remote worker has this module."""
    return True


class _Cluster(Executor):
    """The executor of a Dask client, whose workers do not sample the frames of what runs in them (`_undisturbed`)."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """Hand the call to a worker."""
        found: Future[Any] = self._inner.submit(_undisturbed, function, *arguments, **named)
        return found

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End what was submitted; the cluster stays."""
        self._inner.shutdown(wait=wait)


_sampling: Final = threading.Lock()
_calls = 0


def _undisturbed(function: Callable[..., Any], *arguments: object, **named: object) -> Any:
    """Call a function in a Dask worker while the worker's profiler pauses.

    The profiler holds frames of the function's thread for a moment, and with them local variables of functions that
    have returned: tensors of a captured model would die later than they do.
    """
    global _calls
    from dask.distributed import get_worker

    worker = get_worker()
    sampler = worker.periodic_callbacks.get("profile")
    if sampler is None:
        return function(*arguments, **named)

    def told(action: Callable[[], None]) -> None:
        done = threading.Event()

        def act() -> None:
            action()
            done.set()

        worker.loop.add_callback(act)
        done.wait()

    with _sampling:
        _calls += 1
        told(sampler.stop)
    try:
        return function(*arguments, **named)
    finally:
        with _sampling:
            _calls -= 1
            if not _calls:
                told(sampler.start)
