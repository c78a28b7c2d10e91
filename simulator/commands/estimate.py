"""`estimate MODEL`: what a run of a model needs of its GPU, without one."""

from __future__ import annotations

import click

from simulator.options.case import MODEL_HELP, CaseCommand, assumed, case_from, case_options, models_like
from simulator.options.common import announce, context_size, show, working
from simulator.options.shared import context_option, file_options, remedies_option
from simulator.reports.outputs import Outputs
from traces.errors import Interrupted
from traces.text import one_line


@click.command("estimate", cls=CaseCommand, epilog=MODEL_HELP)
@click.argument("model", metavar="MODEL", shell_complete=models_like)
@case_options
@context_option
@click.option("--min-memory", is_flag=True, help="Also find the smallest GPU on which it runs.")
@click.option("--time", "timing", is_flag=True, help="Kernels and collectives take time: also the time of a step.")
@click.option(
    "--interconnect", metavar="WAY", help="With --time: nvlink, pcie, infiniband, ethernet, or a link's name."
)
@click.option(
    "--estimator",
    "estimators",
    multiple=True,
    type=click.Choice(["simulation", "llmem", "dnnmem"], case_sensitive=False),
    help="Also the closed form of LLMem or DNNMem (may be repeated); the simulation always stands.",
)
@click.option(
    "--samples",
    metavar="FILE",
    help="Lengths of a data set's samples in tokens, one a line: the peaks of its batches. --seq is the longest.",
)
@remedies_option
@click.option("-o", "--output", metavar="FILE", help="Keep the trace (.json, .json.gz or .npz).")
@file_options
def command(
    model: str,
    context: str,
    min_memory: bool,
    timing: bool,
    interconnect: str | None,
    estimators: tuple[str, ...],
    samples: str | None,
    remedies: bool,
    as_json: bool,
    as_markdown: bool,
    written: Outputs,
    quiet: bool,
    **options: object,
) -> int:
    """Work out what a run of MODEL needs of its GPU: no GPU, no weights, nothing downloaded."""
    if interconnect is not None and not timing:
        raise click.UsageError("--interconnect needs --time")
    outside = context_size(context)
    case = case_from(model, options)
    written.check(model)

    from simulator.estimator.epoch import read_lengths
    from simulator.estimator.estimate import estimate
    from simulator.reports import estimate as report
    from simulator.reports.verdict import exit_code

    lengths = None if samples is None else read_lengths(samples)
    name = one_line(model)
    interrupted = False
    with working(f"capturing {name}", quiet, compiles=True) as say:
        try:
            found = estimate(
                case,
                samples=lengths,
                context=outside,
                min_memory=min_memory,
                **written.kept,
                time_steps=timing,
                interconnect=interconnect or "",
                estimators=[name for name in estimators if name != "simulation"],
                remedies=remedies,
                progress=lambda phase, step, count: say(f"capturing {name}: {phase} {step}, {count:,} operators"),
                trying=lambda change: say(f"out of memory; trying {change}"),
            )
        except Interrupted as error:
            found, interrupted = error.found, True
    with working("writing", quiet):
        written.write(found.result, found.trace, lambda said: report.with_case(said, found))
    announce((*assumed(options), *found.assumptions, *found.result.notes), quiet)
    show(report, found, as_json, as_markdown)
    return 130 if interrupted else exit_code(found.verdict)
