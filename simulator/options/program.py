"""The options of a program that is run: what it is, its processes, and how far; shared by the commands that record."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from graph.hardware.gpus import gpu as gpu_of
from simulator.allocator.releases import parse_release
from simulator.recording.request import DEVICES, REPEATS, Request
from traces.errors import ConfigError

if TYPE_CHECKING:
    from simulator.recording.launchers import Program

#: What a word may be that begins a program: a script, Python, or a launcher.
_BEGINS: Final = ("torchrun", "accelerate", "accelerate-launch", "deepspeed")
_OPTIONS: Final = (
    click.option("-m", "module", metavar="MODULE", help="Run a module, as `python -m MODULE ARGS...` does."),
    click.option("--nproc-per-node", metavar="N", type=click.IntRange(1), help="Ranks on a node, as torchrun's."),
    click.option(
        "--visible-gpus",
        metavar="N",
        type=click.IntRange(1, DEVICES),
        help="GPUs that a program, or each rank, works on (default: as CUDA_VISIBLE_DEVICES names; a rank: its own).",
    ),
    click.option("--nnodes", metavar="N", type=click.IntRange(1), help="Nodes, as torchrun's."),
    click.option("--ranks", metavar="0,3-5|all", default="all", show_default=True, help="Ranks to run."),
    click.option("--steps", metavar="N|all", help="End after N optimizer steps (default: when two do the same)."),
    click.option(
        "--interconnect", metavar="WAY", help="Of timed ranks: nvlink, pcie, infiniband, ethernet, or a link's name."
    ),
)

#: Why there is no time.
UNTIMED: Final = "--time is not there for one process on several GPUs: their streams would have to be timed together"

#: Their names, and what they are where they are not given.
PROGRAM_OPTIONS: Final[Mapping[str, Any]] = {
    "module": None, "nproc_per_node": None, "visible_gpus": None, "nnodes": None, "ranks": "all", "steps": None,
    "interconnect": None,
}  # fmt: skip


class Programs(click.Command):
    """A command whose arguments end with those of a program: it ends the options, and so does `-m MODULE`.

    With `begins` its first argument may be something else, after which options go on.
    """

    begins: Callable[[str], bool] | None = None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click, but for what stands behind a program."""
        spelled = ctx.token_normalize_func or str
        options = {name: option for option in self.params for name in option.opts}
        place = 0
        while place < len(args) and args[place].startswith("-") and args[place] not in ("--", "-"):
            if args[place] == "-m":
                return super().parse_args(ctx, [*args[: place + 2], "--", *args[place + 2 :]])
            option: Any = options.get(spelled(args[place]))
            place += 1 if option is None or option.is_flag else 2
        if self.begins is not None and place < len(args) and self.begins(args[place]):
            args = [*args[:place], "--", *args[place:]]
        return super().parse_args(ctx, args)


def begins_program(word: str) -> bool:
    """Whether a word begins a program: a script's path, Python or a launcher."""
    name = Path(word).name
    return name.endswith((".py", ".ipynb")) or name in _BEGINS or name.startswith("python")


def program_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that `request_of` understands, but for those that cases have as well."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def request_of(
    program: tuple[str, ...] | Program,
    *,
    module: str | None = None,
    nproc_per_node: int | None = None,
    visible_gpus: int | None = None,
    nnodes: int | None = None,
    ranks: str = "all",
    steps: str | None = None,
    interconnect: str | None = None,
    gpu: str,
    memory: int | None = None,
    alloc_conf: str | None = None,
    release: str,
    watched: bool = False,
    late: bool = False,
    timed: bool = False,
) -> tuple[Request, list[int]]:
    """What is to be recorded, and of which ranks; names are those of a Request's fields where it has them.

    `program`: its words, or what a command has started.

    ConfigError for a program that there is not, an unknown GPU, release, way or setting, and ranks out of range.
    """
    from simulator.allocator.conf import parse_conf
    from simulator.engine.ranks import parse_ranks
    from simulator.recording.launchers import program_of
    from strategies.timing.links import ways

    found = program_of(program, module, nproc_per_node) if isinstance(program, tuple) else program
    if found is program and found.launched:  # the command saw them
        visible_gpus = None
    if found.command:  # as many GPUs as it may give ranks to, which it starts itself
        visible_gpus, nproc_per_node, nnodes, ranks = visible_gpus or nproc_per_node, None, None, "all"
    processes = nproc_per_node or found.processes
    world = processes * (nnodes or found.nodes)
    launched = found.launched or nproc_per_node is not None
    if visible_gpus is not None and visible_gpus < processes:
        raise ConfigError(f"--visible-gpus {visible_gpus}: each of the {processes} ranks of a node has a GPU")
    visible = 1 if launched or world > 1 else _visible(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    if timed and (visible_gpus or visible) > 1 and not found.command:
        raise ConfigError(UNTIMED)
    chosen = sorted(range(world) if ranks == "all" else parse_ranks(ranks, range(world)))
    behaviour = parse_release(release)
    if alloc_conf is not None:
        parse_conf(alloc_conf, behaviour)
    card = gpu_of(gpu)
    ways(card.name, interconnect or "")
    request = Request(
        program=found.words,
        kind=found.kind,
        folder="",
        gpu=card.name,
        release=behaviour.text,
        memory=memory or 0,
        conf=alloc_conf,
        steps=_steps(steps),
        world=world,
        processes=processes,
        environment=found.environment,
        local=found.local,
        launched=launched,
        gpus=visible_gpus or visible,
        command=found.command,
        begins=nproc_per_node is not None and not found.launched,
        interconnect=interconnect or "",
        watched=watched,
        late=late,
        timed=timed,
    )
    return request, chosen


def _visible(devices: str) -> int:
    """How many GPUs `CUDA_VISIBLE_DEVICES` names; 1 where it names none, or is not set."""
    return min(len([name for name in devices.split(",") if name.strip()]) or 1, DEVICES)


def _steps(text: str | None) -> int:
    """How many optimizer steps `--steps` asks for; 0: all."""
    if text is None:
        return REPEATS
    if text == "all":
        return 0
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--steps {text}: give a number of optimizer steps above 0, or all")
    return int(text)
