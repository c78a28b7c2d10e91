"""`record PROGRAM`: run a program unmodified on a GPU that is not there, and report what its allocator did."""

from __future__ import annotations

import json
import sys
from typing import Any, Final

import click

from graph.hardware.gpus import gpu as gpu_of
from simulator.allocator.releases import parse_release
from simulator.options.common import announce, context_size, size_option, working
from simulator.options.shared import output_options
from simulator.recording.request import REPEATS, Request
from simulator.reports.outputs import Outputs, check_output
from traces.errors import ConfigError
from traces.files import write_atomically

_EPILOG: Final = (
    "Options stand before the program; what follows it is the program's own. Standard output is the program's, and so "
    "is the exit code. Memory is that of PyTorch's allocator, on a GPU without other processes."
)


class ProgramCommand(click.Command):
    """A command whose arguments end with those of a program: `-m MODULE` ends the options as a script does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click, but for what stands behind `-m MODULE`."""
        options = {name: option for option in self.params for name in option.opts}
        place = 0
        while place < len(args) and args[place].startswith("-") and args[place] != "--":
            if args[place] == "-m":
                args = [*args[: place + 2], "--", *args[place + 2 :]]
                break
            option: Any = options.get(args[place])
            place += 1 if option is None or option.is_flag else 2
        return super().parse_args(ctx, args)


def _steps(text: str | None) -> int:
    """How many optimizer steps `--steps` asks for; 0: all."""
    if text is None:
        return REPEATS
    if text == "all":
        return 0
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--steps {text}: give a number of optimizer steps above 0, or all")
    return int(text)


@click.command("record", cls=ProgramCommand, epilog=_EPILOG, context_settings={"allow_interspersed_args": False})
@click.argument("program", metavar="PROGRAM ARGS...", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "module", metavar="MODULE", help="Run a module, as `python -m MODULE ARGS...` does.")
@click.option("--gpu", metavar="GPU", default="A100-80GB", show_default=True, help="The GPU (`llmem gpus`).")
@click.option("--memory", metavar="SIZE", help="Total memory of the GPU (default: the card's own).")
@click.option("--context", metavar="SIZE", help="Memory of the GPU that is not PyTorch's, or auto (default: none).")
@click.option("--alloc-conf", metavar="CONF", help="Allocator settings (default: PYTORCH_ALLOC_CONF).")
@click.option("--release", metavar="R", default="2.13", show_default=True, help="PyTorch release of the allocator.")
@click.option("--nproc-per-node", metavar="N", type=click.IntRange(1), help="Ranks on a node, as torchrun's.")
@click.option("--nnodes", metavar="N", type=click.IntRange(1), help="Nodes, as torchrun's.")
@click.option("--ranks", metavar="0,3-5|all", default="all", show_default=True, help="Ranks to run.")
@click.option("--steps", metavar="N|all", help="End after N optimizer steps (default: when two do the same).")
@click.option("--time", "timing", is_flag=True, help="Kernels and collectives take time: also the time of a step.")
@click.option(
    "--interconnect", metavar="WAY", help="With --time: nvlink, pcie, infiniband, ethernet, or a link's name."
)
@click.option(
    "--deferred",
    type=click.Choice(["prompt", "late"], case_sensitive=False),
    default="prompt",
    show_default=True,
    help="When memory that another stream used comes back: at once, or when the host waits.",
)
@click.option("--json", "document", metavar="FILE", help="Write figures, steps and assumptions as JSON.")
@click.option("-o", "--output", metavar="FILE", help="Keep the trace (.json, .json.gz or .npz).")
@output_options
def command(
    program: tuple[str, ...],
    module: str | None,
    gpu: str,
    memory: str | None,
    context: str | None,
    alloc_conf: str | None,
    release: str,
    nproc_per_node: int | None,
    nnodes: int | None,
    ranks: str,
    steps: str | None,
    timing: bool,
    interconnect: str | None,
    deferred: str,
    document: str | None,
    written: Outputs,
    quiet: bool,
) -> int:
    """Run PROGRAM (a script, or a module with -m) unmodified on a GPU that is not there; report what its memory did."""
    from graph.hardware.profile import profile
    from simulator.allocator.conf import parse_conf
    from simulator.engine.ranks import parse_ranks
    from simulator.estimator.outside import bytes_of, process_terms
    from simulator.recording.launch import record
    from simulator.recording.launchers import program_of
    from strategies.timing.links import ways

    if interconnect is not None and not timing:
        raise click.UsageError("--interconnect needs --time")
    found = program_of(program, module, nproc_per_node)
    processes = nproc_per_node or found.processes
    world = processes * (nnodes or found.nodes)
    chosen = sorted(range(world) if ranks == "all" else parse_ranks(ranks, range(world)))
    behaviour = parse_release(release)
    if alloc_conf is not None:
        parse_conf(alloc_conf, behaviour)
    card = gpu_of(gpu)
    ways(card.name, interconnect or "")
    outside = process_terms([profile(card.name, behaviour.text)], context_size(context), int(world > 1))
    request = Request(
        program=found.words,
        kind=found.kind,
        folder="",
        gpu=card.name,
        release=behaviour.text,
        memory=size_option("--memory", memory) or 0,
        context=0 if context is None else bytes_of(outside),
        conf=alloc_conf,
        steps=_steps(steps),
        world=world,
        watched=not quiet and sys.stderr.isatty(),
        processes=processes,
        environment=found.environment,
        local=found.local,
        launched=found.launched or nproc_per_node is not None,
        late=deferred == "late",
        timed=timing,
        interconnect=interconnect or "",
    )
    written.check(found.words[0])
    if document is not None:
        check_output(document, force=written.force)
    recorded = record(request, chosen, None if quiet else lambda what: print(what, file=sys.stderr))

    from simulator.engine.replay import replay  # both are there by now
    from simulator.recording import result as result_of

    with working("replaying", quiet, compiles=True):
        result = replay(recorded.trace, analyse=False, after_oom="continue")  # as the program did
        told = result  # unless somebody looks at it
        if written.paths or not quiet:
            told = result_of.shown(recorded.trace, result, outside, **written.kept)
    with working("writing", quiet):
        written.write(told, recorded.trace)
    if document is not None:
        with write_atomically(document, force=written.force) as file:
            file.write(json.dumps(result_of.document(recorded, result), indent=1).encode())
    if not quiet:
        print(f"recorded {recorded.steps} steps on {card.name}", file=sys.stderr)
        for line in result_of.told(told, recorded):
            print(line, file=sys.stderr)
    announce((*recorded.notices, *recorded.assumptions), quiet)
    return recorded.exit_code
