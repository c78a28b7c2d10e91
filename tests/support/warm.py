"""`llmem record` without the seconds that each process takes to import torch and numba: forked where they are imported.

A server has imported what a command and the process of a rank import. For each call it forks, and the fork goes on as
`python -m simulator` would from there, with an environment, a folder and streams of its own; a rank's process is
forked again where a real one is started (`_Starter`), and runs the same code. So exit codes and outputs are those of
processes. What a test says of the start of a process itself (paths, modules with our names, signals to all) needs real
ones, and so do variables that a library reads when it is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol
from unittest import mock

from simulator.integrations import process
from tests.places import ROOT

_SERVE: Final = "import sys; from tests.support.warm import serve; serve(int(sys.argv[1]))"
_MODULES: Final = (
    *("simulator.allocator.prepared", "simulator.commands.record", "simulator.recording.process"),
    # What they import later: a rank before its program begins, both where they write and read what was recorded.
    *("torch.distributed.tensor.debug", "traces.writing", "traces.reading", "traces.forms.columnar"),
    *("simulator.cli", "simulator.recording.result", "simulator.reports.run", "simulator.reports.document"),
)
#: PR_SET_CHILD_SUBREAPER of Linux (prctl.h): orphans below this process are its children.
_ADOPT: Final = 36
#: CPU seconds of the commands so far: they are no children of this process.
spent = 0.0


class Run(Protocol):
    """How a command is started: it gives what subprocess.run does with the output captured as text."""

    def __call__(
        self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float = 300
    ) -> subprocess.CompletedProcess[str]: ...


def cold(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """By subprocess.run itself."""
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def run(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float = 300, given: str = ""
) -> subprocess.CompletedProcess[str]:
    """By a fork of the server, which is started at the first call: `[sys.executable, "-m", "simulator", ...]`.

    `given` is its standard input."""
    global spent
    assert list(command[:3]) == [sys.executable, "-m", "simulator"]
    server = _server()
    with contextlib.ExitStack() as stack:
        source, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        source.write(given.encode())
        source.seek(0)
        asked = json.dumps({"words": command[3:], "cwd": str(cwd), "env": dict(env)})
        socket.send_fds(server, [b"."], [source.fileno(), out.fileno(), err.fileno()])
        server.sendall(asked.encode() + b"\n")
        answers = stack.enter_context(server.makefile("r"))
        pid = int(answers.readline())
        ended = threading.Timer(timeout, os.kill, (pid, signal.SIGKILL))
        ended.start()
        code, cpu = json.loads(answers.readline())
        late = ended.finished.is_set()
        ended.cancel()
        spent += cpu
        texts = [(file.seek(0), file.read().decode())[1] for file in (out, err)]
    if late:
        raise subprocess.TimeoutExpired(command, timeout, *texts)
    return subprocess.CompletedProcess(list(command), code, *texts)


def llmem(words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """`process.llmem` by a fork, where programs are run: what captures models in itself is none."""
    return process.llmem(words, run=_as_subprocess, **options)


def _as_subprocess(
    command: Sequence[str], *, cwd: str | Path | None, env: Mapping[str, str], input: str, **_: object
) -> subprocess.CompletedProcess[str]:
    """`run` with the arguments of `subprocess.run`."""
    return run(command, cwd=Path(cwd or ROOT), env=env, given=input)


@cache
def _server() -> socket.socket:
    """The connection to the server, which ends with it."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", _SERVE, str(theirs.fileno())]
    process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL)
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def serve(number: int) -> None:
    """Fork for each command that comes from a connection, one after another, until it is closed."""
    import torch

    from graph import workspaces
    from graph.fake_cuda.operators import native
    from simulator.recording import allocator

    with mock.patch.object(torch.autograd, "backward"):  # no thread is in a fork: `_code` starts autograd's
        for name in _MODULES:
            importlib.import_module(name)
    workspaces.rules()
    allocator.warm_up()
    for name in native.names():
        native.operator(name)
    for one in list(vars(weakref.finalize)["_registry"]):
        one.atexit = False  # what ends with the server, torch's libraries among it, is no fork's to end
    gc.freeze()  # passes of the collector in a fork would copy all of it
    with socket.socket(fileno=number) as client:
        while True:
            asked, files = _next(client)
            if asked is None:
                return
            pid = _forked(lambda: _command(asked, files, client))  # noqa: B023 - it is called at once
            for file in files:
                os.close(file)
            client.sendall(f"{pid}\n".encode())
            _, status, usage = os.wait4(pid, 0)
            answer = [os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime]
            client.sendall(json.dumps(answer).encode() + b"\n")


def _next(client: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """What is asked next over a connection (None: it is closed), and the files that come with it: the standard streams,
    and what else is passed on."""
    begin, files, _, _ = socket.recv_fds(client, 1, 4)
    if not begin:
        return None, []
    with client.makefile("r") as words:
        return json.loads(words.readline()), files


def _forked(work: Callable[[], object]) -> int:
    """The number of a process that does `work` and ends as the interpreter does."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    os._exit(code)


def _command(asked: Mapping[str, Any], files: Sequence[int], client: socket.socket) -> None:
    """`python -m simulator`, from where its modules are imported."""
    client.close()
    _streams(files)
    os.chdir(asked["cwd"])
    _begin(asked["cwd"], asked["env"])
    sys.argv = [str(ROOT / "simulator" / "__main__.py"), *asked["words"]]
    from simulator.cli import main
    from simulator.recording import launch

    vars(launch)["subprocess"] = _Starter()
    main()


def _streams(files: Sequence[int]) -> None:
    """This process's standard streams from now on."""
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)


def _begin(first: str, env: Mapping[str, str]) -> None:
    """The environment of a process, and where its imports look."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    rest = [place for place in sys.path[1:] if place not in before]
    sys.path[:] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *rest]
    os.environ.clear()
    os.environ.update(env)


class _Starter:
    """What a command has for `subprocess`: its `python -c` is a fork where the modules are imported.

    A process without threads forks, since a fork of one thread keeps the locks that others hold. What it starts is
    given over to the command: whoever forked it ends at once.
    """

    DEVNULL = subprocess.DEVNULL

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_ADOPT, 1)
        self._lock = threading.Lock()
        self._process, theirs = socket.socketpair()
        pid = _forked(lambda: self._serve(theirs))
        theirs.close()

        def end() -> None:
            self._process.close()
            os.waitpid(pid, 0)

        atexit.register(end)

    def Popen(self, command: Sequence[str], env: Mapping[str, str], **streams: Any) -> _Started:  # noqa: N802
        """The process of `python -c text`, which has this one's streams but for those that are given."""
        with contextlib.ExitStack() as stack, self._lock:
            files = []
            for name in ("stdin", "stdout", "stderr"):
                file = streams.get(name, getattr(sys, f"__{name}__"))
                file = stack.enter_context(open(os.devnull, "r+b")) if file == subprocess.DEVNULL else file
                files.append(file.fileno())
            passed = list(streams.get("pass_fds", ()))
            socket.send_fds(self._process, [b"."], [*files, *passed])
            self._process.sendall(json.dumps({"text": command[2], "env": dict(env), "passed": passed}).encode() + b"\n")
            with self._process.makefile("r") as answers:
                return _Started(int(answers.readline()))

    def _serve(self, client: socket.socket) -> None:
        self._process.close()
        while True:
            asked, files = _next(client)
            if asked is None:
                return
            ours, theirs = os.pipe()
            between = os.fork()
            if not between:
                pid = _forked(functools.partial(_code, asked, files, os.getpid()))
                os.write(theirs, str(pid).encode())
                os._exit(0)
            os.waitpid(between, 0)  # from here on the command is the parent
            client.sendall(os.read(ours, 20) + b"\n")
            for file in (ours, theirs, *files):
                os.close(file)


class _Started:
    """A process of a command, as subprocess.Popen has it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def poll(self) -> int | None:
        return self._code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _code(asked: Mapping[str, Any], files: Sequence[int], between: int) -> None:
    """`python -c text`, once the process that forked this one has ended."""
    while os.getppid() == between:
        time.sleep(0.001)
    _streams(files[:3])
    for file, number in zip(files[3:], asked["passed"], strict=True):
        os.dup2(file, number)
    from graph.fake_cuda import device

    device._start_autograd()
    _begin("", asked["env"])
    sys.argv = ["-c"]
    exec(compile(asked["text"], "<string>", "exec"), {"__name__": "__main__"})
