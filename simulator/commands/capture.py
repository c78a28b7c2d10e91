"""`capture MODEL`: run a model's training step without a GPU and keep it as a step graph."""

from __future__ import annotations

import click

from simulator.options.case import MODEL_HELP, CaseCommand, case_from, case_options, models_like
from simulator.options.common import print_json, working
from simulator.reports.outputs import check_output
from traces.errors import ConfigError
from traces.text import one_line


@click.command("capture", cls=CaseCommand, epilog=MODEL_HELP)
@click.argument("model", metavar="MODEL", shell_complete=models_like)
@click.option(
    "-o", "--output", metavar="FILE", help="Write the graph: .json or .json.gz (for `graph`), .graphml, .dot."
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON document instead of tables.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
@case_options
def command(model: str, output: str | None, as_json: bool, force: bool, quiet: bool, **options: object) -> int:
    """Capture MODEL's training steps: every operator, every tensor's birth and death, in order."""
    case = case_from(model, options)
    if case.strategy != "single":
        raise ConfigError(f"--strategy {case.strategy}: a step graph is of one GPU; `llmem estimate` takes strategies")
    if output is not None:
        from graph.files import check_ending

        check_ending(output)
        check_output(output, force=force)

    from simulator.estimator.estimate import capture_of

    name = one_line(model)
    with working(f"capturing {name}", quiet) as say:
        graph = capture_of(
            case, lambda phase, step, count: say(f"capturing {name}: {phase} {step}, {count:,} operators")
        )

        from graph.files import save
        from graph.summary import document, summarize

        summary = summarize(graph)
    if output is not None:
        with working("writing", quiet):
            save(graph, output, force=force)
    if as_json:
        print_json(document(summary))
    else:
        from simulator.reports import terminal
        from simulator.reports.capture import document_of

        terminal.render(document_of(summary))
    return 0
