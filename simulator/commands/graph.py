"""`graph FILE`: questions to a captured step graph, answered on its networkx view (`graph.queries`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from simulator.options.common import print_json, working
from simulator.reports import terminal
from simulator.reports.capture import format_count
from simulator.reports.document import Document, Lines, Section, Table
from simulator.reports.outputs import check_output
from traces.errors import ConfigError
from traces.text import one_line
from traces.units import format_bytes

if TYPE_CHECKING:
    import networkx as nx

    from graph.model import StepGraph
    from simulator.reports.document import Block

#: Rows of a table on screen; `--json` has all.
MOST: Final = 30

_EPILOG = (
    "FILE is what `capture -o FILE.json.gz` wrote. TENSOR is a tensor's number, or its name where no other has it (a "
    "parameter's path, for instance). Without a question the summary of `capture` is shown."
)

#: A question's answer: its name, what stands above the table, its rows.
Answer = tuple[str, str, list[dict[str, Any]]]


@click.command("graph", epilog=_EPILOG)
@click.argument("file", metavar="FILE")
@click.option("--order", is_flag=True, help="The operators in topological order.")
@click.option(
    "--critical-path",
    "path_by",
    type=click.Choice(["flops", "time"]),
    help="The longest chain of operators that wait for each other, by FLOPs or by time on the GPU.",
)
@click.option("--keeps-alive", metavar="TENSOR", help="The tensors that stay for what comes after TENSOR.")
@click.option("--kept-by", metavar="TENSOR", help="The operators that TENSOR stays for.")
@click.option("--recompute", is_flag=True, help="What to keep for backward, and what to compute again instead.")
@click.option("--module", metavar="PATH", help="Look at one module and its parts alone, such as transformer.h.0.")
@click.option("-o", "--output", metavar="OUT", help="Write the graph, or the module's part: .json, .graphml or .dot.")
@click.option("--json", "as_json", is_flag=True, help="Print the answers as one JSON document instead of tables.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
def command(
    file: str, module: str | None, output: str | None, as_json: bool, force: bool, quiet: bool, **asked: object
) -> int:
    """Ask a captured graph: in what order, how long at least, what lives for what, what to recompute."""
    if output is not None:
        check_output(output, force=force)
    graph, view = _opened(file, module, quiet)
    if output is not None:
        from graph.exports import export

        with working("writing", quiet):
            export(view, output, force=force)
    answers = list(_answers(graph, view, asked))
    if as_json:
        print_json({name: {"answer": said, "rows": rows} for name, said, rows in answers})
    elif answers:
        _render(answers)
    elif output is None:
        from graph.summary import summarize
        from simulator.reports import terminal
        from simulator.reports.capture import document_of

        terminal.render(document_of(summarize(graph)))
    return 0


def _opened(file: str, module: str | None, quiet: bool) -> tuple[StepGraph, nx.MultiDiGraph]:
    """The graph in a file, and its view, or that of one module."""
    from graph.dag import to_networkx
    from graph.files import load

    with working("reading the graph", quiet):
        graph = load(file)
        try:
            view = to_networkx(graph)
        except ModuleNotFoundError as error:
            raise ConfigError(f"{error.name} is not installed; install it with: pip install 'vramsim[torch]'") from None
    if module is None:
        return graph, view
    from graph.queries import of_module

    return graph, of_module(view, module)


def _answers(graph: StepGraph, view: nx.MultiDiGraph, asked: Mapping[str, Any]) -> Iterator[Answer]:
    """The answers to all that was asked, in a fixed order."""
    from graph import queries

    if asked["order"]:
        found = queries.operators(view)
        yield "order", f"{len(found):,} operators in topological order", _operator_rows(view, found)
    if asked["path_by"]:
        yield _critical_path(graph, view, asked["path_by"])
    if asked["keeps_alive"]:
        kept = queries.keeps_alive(graph, view, queries.tensor(graph, asked["keeps_alive"]))
        yield "keeps_alive", _total(f"{asked['keeps_alive']} keeps alive", graph, kept), _tensor_rows(graph, kept)
    if asked["kept_by"]:
        found = queries.readers(view, queries.tensor(graph, asked["kept_by"]))
        yield "kept_by", f"{asked['kept_by']} stays for {len(found)} operators", _operator_rows(view, found)
    if asked["recompute"]:
        yield from _recompute(graph, view)


def _critical_path(graph: StepGraph, view: nx.MultiDiGraph, by: str) -> Answer:
    from graph.queries import critical_path
    from simulator.reports.run import format_time

    cost = (_nanoseconds(graph) if by == "time" else graph.operators.flops).tolist()
    path = critical_path(view, cost)
    said = format_time(path.cost) if by == "time" else f"{format_count(path.cost)}FLOP"
    rows = _operator_rows(view, path.operators)
    for row, node in zip(rows, path.operators, strict=True):
        row["ns" if by == "time" else "flops"] = cost[node]
    return "critical_path", f"critical path: {said}, {len(rows):,} operators", rows


def _nanoseconds(graph: StepGraph) -> Any:
    """How long every operator's kernels take on the GPU that the graph was captured for."""
    from simulator.estimator.devices import device
    from strategies.timing.clock import Clock

    return Clock.connected(device(str(graph.environment["gpu"])).name).speed().kernels_ns(graph)


def _recompute(graph: StepGraph, view: nx.MultiDiGraph) -> Iterator[Answer]:
    from graph.queries import recompute

    found = recompute(view)
    said = f"keep {format_bytes(found.kept)} instead of {format_bytes(found.now)} for backward"
    yield "keep", said, _tensor_rows(graph, [storage for _, storage in found.keep])
    moved = format_bytes(found.moved)
    yield "again", f"and compute {len(found.again)} operators again: {moved} moved", _operator_rows(view, found.again)


def _total(words: str, graph: StepGraph, storages: Sequence[int]) -> str:
    size = sum(int(graph.storages.bytes[storage]) for storage in storages)
    return f"{words} {len(storages)} tensors, {format_bytes(size)}"


def _tensor_rows(graph: StepGraph, storages: Iterable[int]) -> list[dict[str, Any]]:
    table = graph.storages
    return [
        {
            "tensor": storage,
            "bytes": int(table.bytes[storage]),
            **{name: graph.name(int(getattr(table, name)[storage])) for name in ("category", "name", "module")},
        }
        for storage in storages
    ]


def _operator_rows(view: nx.MultiDiGraph, nodes: Iterable[int]) -> list[dict[str, Any]]:
    names = ("name", "module", "phase", "step")
    return [{"operator": node, **{name: view.nodes[node][name] for name in names}} for node in nodes]


def _render(answers: Sequence[Answer]) -> None:
    blocks = [_block(said, rows) for _, said, rows in answers]
    terminal.render(Document("", "", sections=(Section("", tuple(blocks)),)))


def _block(said: str, rows: Sequence[Mapping[str, Any]]) -> Block:
    if not rows:
        return Lines((said,))
    cells = tuple(tuple(_cell(name, value) for name, value in row.items()) for row in rows[:MOST])
    more = f"and {len(rows) - MOST:,} more; --json has all" if len(rows) > MOST else ""
    numbers = [place for place, value in enumerate(rows[0].values()) if isinstance(value, int)]
    return Table(said, tuple(rows[0]), cells, numbers, more)


def _cell(name: str, value: Any) -> str:
    if name == "bytes":
        return format_bytes(value)
    if name == "flops":
        return format_count(value)
    return "" if value is None or value == -1 else one_line(str(value)).removeprefix("aten.").removesuffix(".default")
