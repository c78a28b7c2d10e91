"""The process in which a program runs: as `python PROGRAM ARGS...` would run it, but for the GPU.

What was recorded is left in a folder: `trace.npz`, and `facts.json` with the exit code. Also where the program raises,
calls os._exit, or is interrupted.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import json
import os
import runpy
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import traces
from graph.fake_cuda import sdpa
from graph.fake_cuda.device import Runtime, fake_cuda
from graph.fake_cuda.ranks.collectives import Collectives
from graph.fake_cuda.ranks.job import joined, upon_import
from graph.fake_cuda.served import OutOfMemoryError, has_triton
from graph.fake_cuda.torch_private import DYNAMO
from graph.hardware.profile import profile
from graph.host import compiled, kept
from graph.host.driver import smi
from graph.host.extensions import triton_stand_in
from graph.host.extensions.stand_ins import launching_nothing, way_out
from graph.host.imports import changed
from graph.host.lbfgs import never_converged
from graph.host.memory import untouched
from graph.host.pretrained import kept_as_made
from graph.host.weights import never_read
from graph.models import own_modules
from graph.recorder import libraries
from graph.recorder.phases import Finished, Phases
from graph.recorder.program import ProgramRecorder
from graph.user_code import told
from simulator.allocator.releases import parse_release
from simulator.engine.ranks import format_ranks
from simulator.recording import arguments, cycles
from simulator.recording.allocator import LiveAllocator, warm_up
from simulator.recording.durations import of_phases
from simulator.recording.exchange import Connection
from simulator.recording.history import History
from simulator.recording.launchers import Program, is_launcher, is_script, starting
from simulator.recording.prices import Prices
from simulator.recording.repeats import Found, Progress, Repeats
from simulator.recording.request import DEVICES, FACTS, FAULT, INTERRUPTED, REPEATS, STARTED, TRACE, Request
from simulator.recording.trace import together, trace_of
from simulator.signals import ENDING, answered
from strategies.timing.clock import LAUNCH_NS, Clock
from traces.collecting import as_if_on, not_yet_imported
from traces.model import Device
from traces.release import installed_release

_OURS: Final = str(Path(__file__).resolve().parents[2])
#: PR_SET_PDEATHSIG of Linux (prctl.h): the signal that comes when whoever started this process is gone.
_DIE_WITH_PARENT: Final = 1
#: What runs the code of a program's first module.
_BASE: Final[types.CodeType] = runpy._run_code.__code__  # type: ignore[attr-defined]


def main(text: str, objects: int, further: int, lasting: int) -> int:
    """Run what the request (`Request`, as JSON) asks for; the program's exit code. Importing torch made so many objects
    that the collector looks at, and importing Dynamo, as the first optimizer does, makes `further` ones, some of them
    `lasting`."""
    request = Request.parse(text)
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGTERM)
    if not faulthandler.is_enabled():
        faulthandler.enable(os.open(Path(request.folder) / FAULT, os.O_WRONLY | os.O_CREAT), all_threads=False)
    card = profile(request.gpu, request.release, cudnn_sdp=True)
    _stand_in(Path(request.folder))
    warm_up()
    device = Device(card.name, request.memory or card.total_bytes, request.context)
    if request.on_gpu:
        device = dataclasses.replace(device, placement="driver")
    prices = Prices(Clock.connected(request.gpu, request.interconnect)) if request.timed else None
    if prices is not None:
        device = dataclasses.replace(device, launch_ns=LAUNCH_NS)
    index = request.local_rank if request.gpus == 1 and request.local_rank < DEVICES else 0
    allocators = [
        LiveAllocator(
            device,
            parse_release(request.release),
            request.conf,
            OutOfMemoryError,
            late=request.late,
            times=None if prices is None else prices.collective,
            endless=request.endless,
            gpu=gpu,
        )
        for gpu in range(index, index + request.gpus)
    ]
    allocator, *others = allocators
    card = dataclasses.replace(card, total_bytes=device.total_bytes)
    count = max(min(request.processes, DEVICES), request.gpus)
    with fake_cuda(card, allocator, index, count, others) as runtime:
        sdpa.install(runtime)
        runtime.values.number = request.floats
        runtime.values.share = request.nonzero
        price = None if prices is None else prices.kernel
        run, base = _way(request)
        recorder = ProgramRecorder(runtime, allocator, base, price, request.on_gpu, others)
        for live, known in zip(allocators, recorder.cards, strict=True):
            live.told = History(functools.partial(trace_of, live, known.labels, {}))
        end = _End(request, allocators)
        phases = Phases(recorder, end)
        keeper = _Keeper(request, runtime, recorder, phases, allocators, end)
        runtime.observer = recorder
        runtime.synchronizations = recorder.synchronize
        folder = Path(request.folder)
        keeping = functools.partial(kept.keeping, runtime)
        with (
            keeper.kept_at_exit(),
            launching_nothing(runtime),
            smi.in_path(runtime, folder),
            untouched(runtime),
            never_read(runtime, folder),
            kept_as_made(runtime),
            never_converged(runtime),
            compiled.compiling(runtime, folder / "inductor", recorder.writes, keeping, on_gpu=request.on_gpu),
            recorder.ordered_casts(),
            cycles.followed(recorder),
            joined(
                runtime,
                recorder,
                Connection(request.exchange, request.store) if request.exchange >= 0 else None,
                begins=request.begins,
                late=request.late,
            ) as job,
            changed(upon_import(job)),
            phases.followed(),
            arguments.followed(keeper.arguments),
            contextlib.ExitStack() as stack,
        ):
            phases.settle = _settling(job, recorder)
            not_yet_imported(DYNAMO, further, lasting)
            as_if_on(objects)
            if not request.launched:
                stack.enter_context(starting(_meant(request, allocators), _leaving(folder), torchrun=request.command))
            code, error = _run(request, run)
            keeper.raised = "" if error is None else told(error)
        keeper.keep(code)  # what the error's frames hold is alive, as it is where Python tells of it
        del error
        job.release()
    return code


def _meant(request: Request, allocators: Sequence[LiveAllocator]) -> Callable[[tuple[str, ...]], bool]:
    """Whether a process of these words is what is to be recorded: ranks, and of a command a script, that are started
    before there is something on a GPU."""

    def meant(words: tuple[str, ...]) -> bool:
        starts = is_launcher(words) or (request.command and is_script(words))
        return starts and not any(live.born for live in allocators)

    return meant


def _leaving(folder: Path) -> Callable[[Program], None]:
    """A program ends here, and leaves what it has started."""

    def leave(program: Program) -> None:
        (folder / STARTED).write_text(program.text())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    return leave


def _settling(job: Collectives, recorder: ProgramRecorder) -> Callable[[], None]:
    """What is done where a phase ends: works of collectives are let go of, and waited for."""

    def settle() -> None:
        job.settle(recorder.operators, recorder.waits)
        recorder.settle()

    return settle


def _stand_in(folder: Path) -> None:
    """A CUDA build of PyTorch brings Triton: where it is not installed, something stands for it."""
    if not has_triton():
        sys.path.append(str(triton_stand_in.installed(folder)))


class _End:
    """When the program is left: after the steps that were asked for, or when they repeat."""

    def __init__(self, request: Request, allocators: Sequence[LiveAllocator]) -> None:
        self.notice = ""
        self._most = request.steps
        self._repeats = Repeats(*allocators)
        self._watched = request.watched
        self._progress = Progress(allocators[0], " of which no two were alike" * (request.steps == REPEATS))

    def __call__(self, steps: int, stepped: bool) -> bool:
        """After a step; `stepped`: every optimizer has made one."""
        if self._watched:
            self._progress(steps)
        if self._most != REPEATS:
            return steps == self._most
        found = self._repeats()
        if found is None or not stepped:
            return False
        self.notice = (
            f"{_alike(steps, found)}, and the run was ended: "
            "what comes later (evaluation, saving) is reached with --steps all"
        )
        return True


def _alike(steps: int, found: Found) -> str:
    """How steps repeat, after so many, in words."""
    if found.exactly and found.turn == 1:
        return f"steps {steps - 1} and {steps} did the same, event for event"
    before = "the one before" if found.turn == 1 else f"the step {found.turn} before it"
    which = f"steps {steps - found.steps + 1} to {steps}"
    if found.exactly:
        return f"{which} each did what {before} did, event for event"
    return f"{which} each asked for the same memory as {before}, without a new peak"


class _Keeper:
    """Leaves what was recorded, once."""

    def __init__(
        self,
        request: Request,
        runtime: Runtime,
        recorder: ProgramRecorder,
        phases: Phases,
        allocators: Sequence[LiveAllocator],
        end: _End,
    ) -> None:
        self.request = request
        self.runtime = runtime
        self.recorder = recorder
        self.phases = phases
        self.allocators = allocators
        self.end = end
        self.arguments = arguments.Arguments()  # of the Trainer
        self.raised = ""
        self._kept = False

    def keep(self, code: int) -> None:
        """Write trace and facts, whatever signals come then; what happens after it is not recorded."""
        with _undisturbed():
            if not self._kept:
                self._kept = True
                self.runtime.observer = None
                self._write(code)

    def _write(self, code: int) -> None:
        folder = Path(self.request.folder)
        counted = self.runtime.assumptions.items()
        assumptions = [what if count == 1 else f"{what} ({count} times)" for what, count in counted]
        if (asked := self.allocators[0].release.text) != installed_release():
            assumptions.append(
                f"PyTorch {installed_release()} ran the program; allocator and kernels are those of {asked}"
            )
        durations = of_phases(self.allocators[0].ended())
        used = [one for one in zip(self.allocators, self.recorder.cards, strict=True) if one[0].born]
        found, notices = [], [self.end.notice]
        told, named = _told(self.request, [card.index for _, card in used])
        for live, card in used or [(self.allocators[0], self.recorder.cards[0])]:
            found.append(trace_of(live, card.labels, {}, told.get(card.index, self.request.rank)))
            on = f"GPU {card.index}: " if len(used) > 1 else ""
            collected = cycles.notice(card.labels, live.machine.ids[:, 1])
            own = libraries.of_program(card.labels, found[-1].ranks[0].events)
            notices += [on + text for text in (collected, own) if text]
        trace = together(found)
        notices.append(named)
        facts = {
            "exit_code": code,
            "steps": self.phases.steps,
            "assumptions": assumptions,
            "notices": [text for text in notices if text],
        }
        what = {"name": os.path.basename(self.request.program[0]), "program": self.request.program}
        trace = dataclasses.replace(trace, metadata={**trace.metadata, **what, **facts})
        traces.write(trace, folder / TRACE, force=True)
        facts |= {"arguments": self.arguments.given, "written": self.arguments.written, "durations": durations}
        facts |= {"raised": self.raised, "asked": any(live.asked for live in self.allocators)}
        (folder / FACTS).write_text(json.dumps(facts))

    @contextlib.contextmanager
    def kept_at_exit(self) -> Iterator[None]:
        """Inside, os._exit of this process, SIGTERM and SIGHUP leave what was recorded; of its forks they do what they
        did."""
        plain, mine = os._exit, os.getpid()

        def leave(status: int) -> Any:
            if os.getpid() == mine:
                self.keep(status)
            plain(status)

        def terminated(number: int, frame: object) -> None:
            leave(128 + number)

        os._exit = leave
        try:
            with answered(ENDING, terminated):
                _ended_as_before(terminated)
                yield
        finally:
            os._exit = plain


def _undisturbed() -> contextlib.AbstractContextManager[None]:
    """Inside, signals do nothing that end a program (one to all processes of a job comes from `llmem` once more) or
    that it handles (a DataLoader raises where a worker was ended)."""
    handled = [number for number in signal.valid_signals() if callable(signal.getsignal(number))]
    return answered({*ENDING, *handled}, lambda *_: None)


def _told(request: Request, used: Sequence[int]) -> tuple[Mapping[int, int], str]:
    """Of which ranks what a process did on GPUs is told, by the numbers of those that it used; and a notice of it.

    A rank's own is that of its place on the node, or the first that it used; others follow the job's ranks.
    """
    numbers = format_ranks(used)
    if request.world == 1:
        several = f"one process worked on GPUs {numbers}, which are told of as the ranks of these numbers"
        return {gpu: gpu for gpu in used}, several if len(used) > 1 else ""
    if request.gpus == 1 or not used:
        return {}, ""
    own = request.local_rank if request.local_rank in used else used[0]
    further = {gpu: request.world + request.rank * request.gpus + gpu for gpu in used if gpu != own}
    there = "".join(f", and GPU {gpu}, which is told of as rank {rank}" for gpu, rank in further.items())
    there += ", beside what GPUs' own ranks have: that is not added up" if further else ""
    elsewhere = further or own != request.local_rank
    return further, f"rank {request.rank} worked on GPU {own}{there}" if elsewhere else ""


def _ended_as_before(handler: Callable[[int, Any], None]) -> None:
    """From now on SIGTERM and SIGHUP end what is forked, as they do where `handler` is not this process's: at any
    moment, also while Python begins the fork, when it forgets the signals that have come."""
    masks = threading.local()

    def hold() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)

    def resume() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def begin() -> None:
        for number in ENDING:
            if signal.getsignal(number) is handler:
                signal.signal(number, signal.SIG_DFL)
        resume()

    os.register_at_fork(before=hold, after_in_parent=resume, after_in_child=begin)


def _way(request: Request) -> tuple[Callable[[], object], types.CodeType]:
    """What runs the program as `__main__`, and the code of its outermost frame that is not the program's."""
    name = request.program[0]
    if request.kind == "notebook":
        from graph.host import notebook

        return functools.partial(notebook.run, name), notebook.BASE
    if request.kind == "script":
        return functools.partial(runpy.run_path, name, run_name="__main__"), _BASE
    return functools.partial(runpy.run_module, name, run_name="__main__", alter_sys=True), _BASE


def _run(request: Request, run: Callable[[], object]) -> tuple[int, BaseException | None]:
    """Run the program: its exit code, and what it raised, told on stderr as Python tells it."""
    folder = os.getcwd() if request.kind == "module" else str(Path(request.program[0]).resolve().parent)
    _forget_our_folder()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with own_modules.of(folder).first():
            local = [request.local.format(request.local_rank)] if request.local else []
            sys.argv = [request.program[0], *local, *request.program[1:]]
            run()
    except Finished:
        return 0, None
    except SystemExit as stop:
        return _exit_code(stop.code), None
    except BaseException as error:
        _tell(error)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1, error
    return 0, None


def _forget_our_folder() -> None:
    """The program's imports look where they would without us; our own packages are found at the end of the path."""
    del sys.path[0]  # ours, put there by whoever started this process
    if _OURS not in sys.path:
        sys.path.append(_OURS)


def _exit_code(code: object) -> int:
    """What the interpreter makes of SystemExit's argument."""
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def _tell(error: BaseException) -> None:
    """Print the program's traceback, from its own first frame on, by its own excepthook."""
    frames = error.__traceback__
    while frames is not None and _is_ours(frames):
        frames = frames.tb_next
    error = error.with_traceback(frames if frames or isinstance(error, SyntaxError) else error.__traceback__)
    sys.excepthook(type(error), error, error.__traceback__)
    if hint := way_out(error) or compiled.way_out(error):
        print(f"llmem: {hint}", file=sys.stderr)


def _is_ours(frames: types.TracebackType) -> bool:
    name = frames.tb_frame.f_code.co_filename
    return name.startswith(("<frozen runpy", "<frozen importlib", f"{_OURS}/simulator/", f"{_OURS}/graph/"))
