"""`record PROGRAM`: run a program unmodified on a GPU that is not there, and report what its allocator did."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import click

from simulator.options.common import announce, context_size, size_option, working
from simulator.options.program import UNTIMED, Programs, program_options, request_of
from simulator.options.shared import output_options
from simulator.reports.outputs import Outputs, check_output
from traces.errors import ConfigError
from traces.files import write_atomically
from traces.release import installed_release

if TYPE_CHECKING:
    from simulator.engine.result import OutsideTerm
    from simulator.recording.launch import Recorded
    from simulator.recording.launchers import Program
    from simulator.recording.request import Request

_EPILOG: Final = (
    "Options stand before the program; what follows it is the program's own. Standard output is the program's, and so "
    "is the exit code. Memory is that of PyTorch's allocator, on a GPU without other processes."
)


@click.command("record", cls=Programs, epilog=_EPILOG, context_settings={"allow_interspersed_args": False})
@click.argument("program", metavar="PROGRAM ARGS...", nargs=-1, type=click.UNPROCESSED)
@click.option("--gpu", metavar="GPU", default="A100-80GB", show_default=True, help="The GPU (`llmem gpus`).")
@click.option("--memory", metavar="SIZE", help="Total memory of the GPU (default: the card's own).")
@click.option("--context", metavar="SIZE", help="Memory of the GPU that is not PyTorch's, or auto (default: none).")
@click.option("--alloc-conf", metavar="CONF", help="Allocator settings (default: PYTORCH_ALLOC_CONF).")
@click.option("--release", metavar="R", help="PyTorch release of the allocator (default: the installed one's).")
@program_options
@click.option("--time", "timing", is_flag=True, help="Kernels and collectives take time: also the time of a step.")
@click.option(
    "--deferred",
    type=click.Choice(["prompt", "late"], case_sensitive=False),
    default="prompt",
    show_default=True,
    help="When memory that another stream used comes back: at once, or when the host waits.",
)
@click.option(
    "--on-gpu", is_flag=True, help="Serve it as a GPU would, where libraries allocate and the driver gives addresses."
)
@click.option(
    "--floats", metavar="X", default=0.0, show_default=True, help="What numbers are that it reads of the GPU."
)
@click.option(
    "--nonzero",
    metavar="SHARE",
    type=click.FloatRange(0, 1),
    help="How many elements are not zero, where only the GPU would know (default: all).",
)
@click.option("--json", "document", metavar="FILE", help="Write figures, steps and assumptions as JSON.")
@click.option("--markdown", metavar="FILE", help="Write the report as Markdown, for a pull request.")
@click.option("-o", "--output", metavar="FILE", help="Keep the trace (.json, .json.gz or .npz).")
@output_options
def command(
    program: tuple[str, ...],
    gpu: str,
    memory: str | None,
    context: str | None,
    alloc_conf: str | None,
    release: str | None,
    timing: bool,
    deferred: str,
    on_gpu: bool,
    floats: float,
    nonzero: float | None,
    document: str | None,
    written: Outputs,
    quiet: bool,
    **program_is: Any,
) -> int:
    """Run PROGRAM (script, notebook, -m module) unmodified on a GPU that is not there; report what its memory did."""
    from graph.hardware.profile import profile
    from simulator.estimator.outside import bytes_of, process_terms
    from simulator.recording.launch import record
    from simulator.recording.launchers import StartedError

    if program_is["interconnect"] is not None and not timing:
        raise click.UsageError("--interconnect needs --time")
    if document is not None:
        check_output(document, force=written.force)

    def recorded_of(program: tuple[str, ...] | Program) -> tuple[Request, Recorded, tuple[OutsideTerm, ...]]:
        request, chosen = request_of(
            program,
            **program_is,
            gpu=gpu,
            memory=size_option("--memory", memory),
            alloc_conf=alloc_conf,
            release=release or installed_release(),
            watched=not quiet and sys.stderr.isatty(),
            late=deferred == "late",
            timed=timing,
        )
        request = replace(request, floats=floats, nonzero=nonzero, on_gpu=on_gpu)
        cards = [profile(request.gpu, request.release)]
        outside = process_terms(cards, context_size(context), int(request.world > 1))
        if context is not None:
            request = replace(request, context=bytes_of(outside))
        written.check(request.program[0])
        recorded = record(request, chosen, None if quiet else lambda what: print(what, file=sys.stderr))
        if request.command and timing and request.gpus > 1:  # it has started no ranks
            raise ConfigError(UNTIMED)
        return request, recorded, outside

    try:
        request, recorded, outside = recorded_of(program)
    except StartedError as start:
        request, recorded, outside = recorded_of(start.program)

    from simulator.engine.replay import replay  # both are there by now
    from simulator.recording import result as result_of

    with working("replaying", quiet, compiles=True):
        result = replay(recorded.trace, analyse=False, after_oom="continue")  # as the program did
        told = result  # unless somebody looks at it
        if written.paths or document is not None or not quiet:
            told = result_of.shown(recorded.trace, result, outside, **written.kept)
    with working("writing", quiet):
        written.write(told, recorded.trace, lambda found: result_of.document_of(found, told, recorded))
    if document is not None:
        with write_atomically(document, force=written.force) as file:
            file.write(json.dumps(result_of.document(recorded, result, told), indent=1).encode())
    if not quiet:
        print(f"recorded {recorded.steps} steps on {request.gpu}, PyTorch {request.release}", file=sys.stderr)
        for line in result_of.told(told, recorded):
            print(line, file=sys.stderr)
    announce((*recorded.notices, *recorded.assumptions), quiet)
    return recorded.exit_code
