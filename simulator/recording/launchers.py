"""What stands behind `record`'s options: a program, or a launcher with its own options, read by its own parser.

A launcher decides which processes there are and what their environment is; nothing of it runs but that. A command of
the environment (what pip makes of a package's entry point: trl, llamafactory-cli) may train itself or start what does:
it runs until it starts a program.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias
from unittest import mock

import msgspec

from traces.errors import ConfigError, LLMemError
from traces.text import path_text

_USAGE: Final = "options come first, then train.py ARGS..."
#: A word of a command, and what subprocess takes for one.
_Word: TypeAlias = str | bytes | os.PathLike[str]
_Words: TypeAlias = _Word | Sequence[_Word]
#: Flags of Python that change nothing here.
_FLAGS: Final = ("-u", "-B", "-O", "-s", "-E", "-I")


@dataclass(frozen=True)
class Program:
    """A program (`kind`), its path or module's name with its arguments, and the processes that its launcher starts.

    There are `nodes` nodes with `processes` each. `environment` is what the launcher adds to it, beside the ranks;
    `local` an argument that goes before the program's own, with the local rank in it. `launched`: by a launcher that
    tells ranks their places, also where there is one. `command`: it may start a program that is meant.
    """

    kind: Literal["script", "module", "notebook"]
    words: tuple[str, ...]
    processes: int = 1
    nodes: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    local: str = ""
    launched: bool = False
    command: bool = False

    def text(self) -> str:
        """As JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, text: str) -> Program:
        """From JSON."""
        return msgspec.json.decode(text, type=cls)


class StartedError(LLMemError):
    """A program has started another, which is what is to be recorded."""

    def __init__(self, command: str, program: Program) -> None:
        super().__init__(f"{command} starts {' '.join(program.words)}: give that as the program")
        self.program = program


def program_of(words: Sequence[str], module: str | None = None, gpus: int | None = None) -> Program:
    """The program that `words` start; `module` is what stood behind -m, `gpus` how many there are on a node, if told.

    ConfigError for what is no program and no known launcher.
    """
    words = tuple(words)
    if module is not None:
        launcher = _MODULES.get(module)
        return Program("module", (module, *words)) if launcher is None else launcher(words, gpus)
    first = Path(words[0]).name if words else ""
    if first in _COMMANDS:
        return _COMMANDS[first](words[1:], gpus)
    if not words:
        raise ConfigError(f"no program is given: {_USAGE}")
    if first.startswith("python") and not first.endswith(".py"):
        return _python(words[1:], gpus)
    if first.endswith(".ipynb") and Path(words[0]).is_file():
        return _notebook(words)
    if Path(words[0]).is_file() and (first.endswith(".py") or _is_python(words[0])):
        return Program("script", words)
    command = None if first.endswith(".py") or first != words[0] else _command(first)
    if command is None:
        raise ConfigError(f"{path_text(words[0])}: {_what(words[0])}: {_USAGE}")
    return Program("script", (command, *words[1:]), command=True)


def _what(word: str) -> str:
    """What is wrong with what does not begin a program."""
    if word.endswith((".py", ".ipynb")):
        return "is not a file"
    if Path(word).is_file() or shutil.which(word) is not None:
        return "is not a Python program; record what it starts, or put `llmem record` behind it"
    return "is not a Python program, nor a launcher that is known"


def _is_python(path: str) -> bool:
    """Whether a file without .py is a script for Python: one for another program says so, or is no text."""
    with open(path, "rb") as file:
        begins = file.read(512)
    if not begins.startswith(b"#!"):
        return b"\0" not in begins and not path.endswith(".sh")
    first, second = (*begins.splitlines(), b"")[:2]
    return b"python" in first or (b"python" in second and second.startswith(b"'''exec'"))  # pip's, of long paths


def _command(name: str) -> str | None:
    """The path of a command that is a Python script, of this environment or in PATH."""
    own = Path(sysconfig.get_path("scripts"), name)
    found = str(own) if own.is_file() else shutil.which(name)
    return found if found is not None and _is_python(found) else None


def _notebook(words: tuple[str, ...]) -> Program:
    try:
        from graph.host.notebook import cells

        cells(words[0])
    except ImportError as error:
        raise ConfigError(f"{words[0]}: its cells are run by IPython: pip install 'vramsim[notebook]'") from error
    return Program("notebook", words)


def _python(words: tuple[str, ...], gpus: int | None) -> Program:
    while words and words[0] in _FLAGS:
        words = words[1:]
    if words[:1] == ("-m",):
        return program_of(words[2:], words[1] if len(words) > 1 else "", gpus)
    return program_of(words, None, gpus)


def _torchrun(words: tuple[str, ...], gpus: int | None, local: str = "") -> Program:
    """torchrun: as many nodes as it allows at most."""
    from torch.distributed.run import get_args_parser

    return _elastic(get_args_parser().parse_args(list(words)), gpus, local)


def _elastic(given: Any, gpus: int | None, local: str = "") -> Program:
    """The program of torchrun's arguments."""
    from torch.distributed.run import parse_min_max_nnodes

    count = str(given.nproc_per_node)
    if not count.isdecimal() and gpus is None:
        raise ConfigError(f"--nproc-per-node {count}: give a number: there is no GPU to count")
    return replace(
        _started(given.module, (given.training_script, *given.training_script_args)),
        processes=int(count) if count.isdecimal() else gpus or 1,
        nodes=parse_min_max_nnodes(str(given.nnodes))[1],
        local=local,
        launched=True,
    )


def _started(module: bool, words: Sequence[str]) -> Program:
    return Program("module", tuple(words)) if module else program_of(words)


def _launch(words: tuple[str, ...], gpus: int | None) -> Program:
    """`python -m torch.distributed.launch`, which gives the program --local-rank."""
    from torch.distributed import launch

    given: Any = launch.parse_args(list(words))  # type: ignore[no-untyped-call]
    return _elastic(given, gpus, "" if given.use_env else "--local-rank={}")


def _deepspeed(words: tuple[str, ...], gpus: int | None) -> Program:
    """DeepSpeed's launcher (deepspeed/launcher/runner.py and launch.py)."""
    with _on_stderr(), _needed("deepspeed"):
        from deepspeed.launcher import runner  # type: ignore[import-untyped]

        given = runner.parse_args(list(words))
        pool = runner.fetch_hostfile(given.hostfile) or {"localhost": list(range(gpus or 8))}
        pool = {host: list(range(slots)) if isinstance(slots, int) else slots for host, slots in pool.items()}
        pool = runner.parse_resource_filter(pool, include_str=given.include, exclude_str=given.exclude)
    if given.num_gpus <= 0 and gpus is None and not given.include:
        raise ConfigError("deepspeed: give --num_gpus: there is no GPU to count")
    processes = given.num_gpus if given.num_gpus > 0 else min(len(slots) for slots in pool.values())
    return replace(
        _started(given.module, (given.user_script, *given.user_args)),
        processes=processes,
        nodes=given.num_nodes if given.num_nodes > 0 else len(pool),
        environment={"LOCAL_SIZE": str(processes)},
        local="" if given.no_local_rank else "--local_rank={}",
        launched=True,
    )


def _accelerate(words: tuple[str, ...], gpus: int | None) -> Program:
    """`accelerate launch`: it does all that it does, up to where it would start processes."""
    if words[:1] != ("launch",):
        raise ConfigError("accelerate: of its commands, launch starts a program: accelerate launch [OPTIONS] train.py")
    return _accelerate_launch(words[1:], gpus)


def _accelerate_launch(words: tuple[str, ...], gpus: int | None) -> Program:
    import torch

    with _on_stderr(), _needed("accelerate"):
        from accelerate.commands import launch
    count = gpus or 1
    changes: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: count),
        (launch, "check_cuda_p2p_ib_support", lambda: True),
    ]
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_on_stderr())
            for owner, name, answer in changes:
                stack.enter_context(mock.patch.object(owner, name, answer))
            stack.enter_context(starting(lambda words: True, _Starts.leave, torchrun=True))
            launch.launch_command(launch.launch_command_parser().parse_args(list(words)))
    except _Starts as starts:
        return starts.program
    except ValueError as error:
        raise ConfigError(f"accelerate launch: {error}") from error
    raise ConfigError("accelerate launch: it starts no program on a GPU here")


class _Starts(BaseException):
    """A launcher would start a program's processes now."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.program = program

    @classmethod
    def leave(cls, program: Program) -> None:
        raise cls(program)


@contextlib.contextmanager
def starting(
    meant: Callable[[tuple[str, ...]], bool], leave: Callable[[Program], None], *, torchrun: bool
) -> Iterator[None]:
    """Inside, where a process of words that are `meant` would be started, it leaves with the program that they start.

    `torchrun`: also where torchrun's own function is called, of whose words there are none."""
    import torch

    before = dict(os.environ)

    def found(program: Program, environment: Mapping[str, str]) -> None:
        added = {name: value for name, value in environment.items() if before.get(name) != value}
        leave(replace(program, environment={**added, **program.environment}))

    def elastic(plain: Callable[..., Any], given: object) -> Any:
        if meant(()):
            found(_elastic(given, torch.cuda.device_count()), os.environ)
        return plain(given)

    def started(words: Sequence[_Word], environment: object) -> None:
        texts = tuple(os.fsdecode(word) for word in words)
        if meant(texts):
            found(
                program_of(texts, None, torch.cuda.device_count()),
                environment if isinstance(environment, Mapping) else os.environ,
            )

    make: Callable[..., None] = subprocess.Popen.__init__

    def process(self: subprocess.Popen[bytes], args: _Words, *others: object, **options: object) -> None:
        words = [args] if isinstance(args, str | bytes | os.PathLike) else args
        if options.get("shell") and isinstance(args, str):
            with contextlib.suppress(ValueError):  # what only a shell understands starts something else
                words = shlex.split(args)
        started(words, options.get("env"))
        make(self, args, *others, **options)

    def executes(plain: Callable[..., Any], file: str, words: Sequence[str], *environment: Mapping[str, str]) -> Any:
        started((file, *words[1:]), *environment or (None,))
        return plain(file, words, *environment)

    changes: list[tuple[object, str, object]] = [(subprocess.Popen, "__init__", process)]
    if torchrun:
        from torch.distributed import run

        changes.append((run, "run", partial(elastic, run.run)))
    changes += [(os, name, partial(executes, getattr(os, name))) for name in ("execv", "execve", "execvp", "execvpe")]
    with contextlib.ExitStack() as stack:
        for owner, name, answer in changes:
            stack.enter_context(mock.patch.object(owner, name, answer))
        yield


def is_launcher(words: tuple[str, ...]) -> bool:
    """Whether a process of these words is a launcher's; of none, that is torchrun's function."""
    first = Path(words[0]).name if words else "torchrun"
    rest = _behind_python(words)
    return first in _COMMANDS or (rest[:1] == ["-m"] and rest[1:2] != [] and rest[1] in _MODULES)


def is_script(words: tuple[str, ...]) -> bool:
    """Whether it is Python's, with a script that is not PyTorch's own, as Inductor's worker is."""
    import torch

    rest = _behind_python(words)
    return rest != [] and Path(rest[0]).is_file() and not Path(rest[0]).is_relative_to(Path(torch.__file__).parent)


def _behind_python(words: tuple[str, ...]) -> list[str]:
    """The words behind Python's name and flags; none of another program."""
    if not words or not Path(words[0]).name.startswith("python"):
        return []
    return [word for word in words[1:] if word not in _FLAGS]


@contextlib.contextmanager
def _on_stderr() -> Iterator[None]:
    """What a launcher says is not the program's standard output."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def _needed(package: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{package} is not installed here ({error}); its launcher's options are read by it"
        ) from error


_COMMANDS: Final[Mapping[str, Callable[[tuple[str, ...], int | None], Program]]] = {
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "accelerate-launch": _accelerate_launch,
    "deepspeed": _deepspeed,
}
_MODULES: Final[Mapping[str, Callable[[tuple[str, ...], int | None], Program]]] = {
    "torch.distributed.run": _torchrun,
    "torch.distributed.launch": _launch,
    "accelerate.commands.launch": _accelerate_launch,
    "deepspeed": _deepspeed,
    "deepspeed.launcher.runner": _deepspeed,
}
