"""Starts the process in which a program runs, waits for it, and reads what it left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import traces
from simulator.recording.exchange import Exchange
from simulator.recording.launchers import Program, StartedError
from simulator.recording.request import FACTS, FAULT, STARTED, TRACE, Request
from simulator.signals import ENDING, answered
from traces.errors import LLMemError
from traces.model import Trace
from traces.text import quoted

if TYPE_CHECKING:
    from simulator.recording.durations import Durations

_ROOT: Final = str(Path(__file__).resolve().parents[2])
#: Our folder comes first until our own modules are there: the program's may have their names. Ctrl-C, which is blocked
#: when the process starts, ends it without a word until the program begins, unless it is ignored. torch comes before
#: what else is ours: as much of the collector's work is the program's own. So does Dynamo, for when that imports it.
_START: Final = """
import gc, importlib, signal, sys
gc.disable()  # until the program begins
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
sys.path[0] = {root!r}
from traces.collecting import left_at_exit
left_at_exit()
import torch
gc.collect()
objects = len(gc.get_objects())
from graph.fake_cuda.torch_private import DYNAMO
gc.freeze()
importlib.import_module(DYNAMO)
further = [len(gc.get_objects())]
gc.collect()
further.append(len(gc.get_objects()))
from simulator.recording.process import main
sys.exit(main({text!r}, objects, *further))
"""


#: What a silent process says on stderr, in the request's folder.
_SAID: Final = "said"
#: What all ranks may read, in a folder of theirs.
_STORE: Final = "store"
#: Where packages are in the folder of Python's library.
_PACKAGES: Final = "/site-packages/"
#: After so many signals the program is killed.
_PATIENCE: Final = 3


class RecordError(LLMemError):
    """Nothing was recorded of a program."""


@dataclass(frozen=True)
class Recorded:
    """What a program did: its exit code, the optimizer's steps, what was assumed of values, what else there is to say
    of the run, the trace, where time was asked for what phases of each rank took, the Trainer's arguments of the
    command line, or the line of the program where they are written, why it failed, if it did, and whether it asked for
    figures of memory."""

    exit_code: int
    steps: int
    assumptions: tuple[str, ...]
    notices: tuple[str, ...]
    trace: Trace
    durations: Mapping[int, Durations] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    written: str = ""
    raised: str = ""
    asked: bool = False


def record(
    request: Request,
    ranks: Sequence[int] = (0,),
    told: Callable[[str], None] | None = None,
    *,
    silent: bool = False,
) -> Recorded:
    """Run the program of a request (its folder is chosen here) to its end, as each of `ranks` of its world.

    A process each, one after another but for as many as there are cores, or more where they wait for each other
    (`simulator.recording.exchange`), with this process's streams, or if it is to be `silent` without any. Ctrl-C,
    SIGTERM and SIGHUP end the program, and what was recorded is the answer; ranks that have not begun then are left
    out. `told` is called with a word where one of several ranks has ended. RecordError where one ended before it left
    anything, StartedError where it started another program, and KeyboardInterrupt where all were interrupted so early.
    """
    processes = _Processes(silent)
    exchange = Exchange(ranks, min(len(ranks), os.cpu_count() or 1))
    done, one_at_a_time = 0, threading.Lock()

    def one(rank: int, speaks: socket.socket) -> Recorded | None:
        nonlocal done
        try:
            own = replace(request, rank=rank, store=str(Path(shared) / _STORE))
            found = processes.recorded(own, speaks if len(ranks) > 1 else None)
        finally:
            exchange.end(rank)
            speaks.close()
        with one_at_a_time:
            done += 1
            if told is not None and len(ranks) > 1:
                told(f"rank {rank} has ended, {done} of {len(ranks)}")
        return found

    folder = tempfile.TemporaryDirectory(prefix="llmem-record-")
    with folder as shared, processes.signalled(), ThreadPoolExecutor(1 + len(ranks)) as pool:
        pool.submit(_prepare)
        ends = [pool.submit(one, rank, exchange.begin(rank)) for rank in ranks]
        found = [recorded for end in ends if (recorded := end.result()) is not None]
    from simulator.recording.trace import together

    if not found:
        raise KeyboardInterrupt
    return Recorded(
        exit_code=next((one.exit_code for one in found if one.exit_code), 0),
        steps=found[0].steps,
        assumptions=tuple(dict.fromkeys(text for one in found for text in one.assumptions)),
        notices=tuple(dict.fromkeys(text for one in found for text in one.notices)),
        trace=together([one.trace for one in found]),
        durations={rank: phases for one in found for rank, phases in one.durations.items()},
        arguments=found[0].arguments,
        written=found[0].written,
        raised=next((one.raised for one in found if one.exit_code), ""),
        asked=any(one.asked for one in found),
    )


def _prepare() -> None:
    """Load what comes after a program, while it runs: a replay's kernels take as long as a small program."""
    import simulator.allocator.prepared
    import simulator.recording.trace  # noqa: F401


class _Processes:
    """The processes of ranks that run now."""

    def __init__(self, silent: bool) -> None:
        self._silent = silent
        self._running: set[subprocess.Popen[bytes]] = set()
        self._signals: list[int] = []  # that came

    def signalled(self) -> contextlib.AbstractContextManager[None]:
        """Inside, Ctrl-C is left to the program, which has it as well; SIGTERM, SIGHUP, and Ctrl-C again, are passed
        on."""
        return answered((signal.SIGINT, *ENDING), self._signal)

    def _signal(self, number: int, frame: object) -> None:
        self._signals.append(number)
        if number in ENDING or len(self._signals) > 1:
            ending = number if number in ENDING else signal.SIGTERM
            for process in tuple(self._running):
                process.send_signal(ending if len(self._signals) <= _PATIENCE else signal.SIGKILL)

    def recorded(self, request: Request, speaks: socket.socket | None) -> Recorded | None:
        """What one rank did, which speaks with others over a socket; None where it was interrupted before it began."""
        if self._signals:
            return None
        with tempfile.TemporaryDirectory(prefix="llmem-record-") as folder:
            with self._streams(folder) as streams:
                given = {} if speaks is None else {"pass_fds": [speaks.fileno()]}
                number = -1 if speaks is None else speaks.fileno()
                code = self._run(replace(request, folder=folder, exchange=number), {**streams, **given})
            if (Path(folder) / STARTED).exists():
                raise StartedError(Path(request.program[0]).name, Program.parse((Path(folder) / STARTED).read_text()))
            last = _last_line(Path(folder) / _SAID)
            facts = Path(folder) / FACTS
            if not facts.exists():
                if self._signals or code == -signal.SIGINT:  # which may be told here before it is to ourselves
                    return None
                name = quoted(request.program[0])
                end = f"ended with exit code {code}"
                if code < 0:
                    end = f"was ended by signal {-code}{_place(Path(folder) / FAULT)}"
                raise RecordError(f"the process of {name} {end} before anything was recorded")
            found = json.loads(facts.read_text())
            trace = traces.read(Path(folder) / TRACE)
        return Recorded(
            exit_code=found["exit_code"],
            steps=found["steps"],
            assumptions=tuple(found["assumptions"]),
            notices=tuple(found["notices"]),
            trace=trace,
            durations={request.rank: tuple((name, step, ns) for name, step, ns in found["durations"])},
            arguments=found["arguments"],
            written=found["written"],
            raised=found["raised"] or last,
            asked=found["asked"],
        )

    @contextlib.contextmanager
    def _streams(self, folder: str) -> Iterator[Mapping[str, Any]]:
        """The streams of a process that has not this one's."""
        if not self._silent:
            yield {}
            return
        with open(Path(folder) / _SAID, "wb") as said:
            yield {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": said}

    def _run(self, request: Request, streams: Mapping[str, Any]) -> int:
        """The exit code of the process of a rank."""
        command = [sys.executable, "-c", _START.format(root=_ROOT, text=request.text())]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # of this thread, and of what it starts
        try:
            process = subprocess.Popen(command, env=environment(request), **streams)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._running.add(process)
        try:
            return process.wait()
        finally:
            self._running.discard(process)
            if process.poll() is None:
                process.kill()
                process.wait()


def _place(file: Path) -> str:
    """The innermost line outside Python's library and PyTorch where a fault came, if it is told, and a likely cause."""
    found = re.findall(r'File "(.+)", line (\d+) in (.+)', file.read_text(errors="replace")) if file.exists() else []
    library = sysconfig.get_path("stdlib")
    places = [one for one in found if "/torch/" not in one[0] and (_PACKAGES in one[0] or library not in one[0])]
    if not places:
        return ""
    path, line, name = places[0]
    return f" in {name} ({path}, line {line}), where compiled code may have read a GPU's memory, which is not there,"


def _last_line(file: Path) -> str:
    """The last line of what was said, if anything was."""
    said = file.read_text(errors="replace") if file.exists() else ""
    return next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")


def environment(request: Request) -> dict[str, str]:
    """The environment of a rank: this process's, what the launcher adds, and its places, as torchrun sets them."""
    given = {**os.environ, **request.environment}
    if request.world == 1 and not request.launched:
        return given
    node, local = divmod(request.rank, request.processes)
    nodes = request.world // request.processes
    torchrun: dict[str, object] = {
        "RANK": request.rank,
        "WORLD_SIZE": request.world,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": request.processes,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": nodes,
        "ROLE_RANK": request.rank,
        "ROLE_WORLD_SIZE": request.world,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "none",
    }
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    return {**meeting, **given, **{name: str(value) for name, value in torchrun.items()}}
