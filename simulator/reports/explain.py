"""Reports of `explain`: a document with the arithmetic of each cause, and JSON, pure functions of an `Explanation`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from simulator.explain.explain import SCHEMA_VERSION, Beside, Explanation
from simulator.explain.judgement import WORDS, Cause
from simulator.fit.plans import FittedProgram
from simulator.reports import fit, markdown
from simulator.reports.document import Block, Cell, Document, Lines, Name, Section, Size, Table
from simulator.reports.run import largest_table
from traces.text import one_line
from traces.units import format_bytes

if TYPE_CHECKING:
    from simulator.explain.judgement import Judgement
    from simulator.explain.message import OutOfMemory

#: Rows of the table of all messages.
MOST: Final = 16


def render_json(found: Explanation) -> dict[str, Any]:
    """The document of `explain --json`: every message with its figures in bytes, null where it does not say them."""
    messages = [_message_json(message, judged) for message, judged in found.messages]
    case = {} if found.beside is None else {"fit": fit.render_json(found.beside.fitted)}
    return {"schema_version": SCHEMA_VERSION, "messages": messages, **case}


def _message_json(message: OutOfMemory, judged: Judgement) -> dict[str, Any]:
    derived = ("held", "pieces", "process", "outside", "others", "elsewhere", "shortage")
    return {**asdict(judged), **asdict(message), **{name: getattr(message, name) for name in derived}}


def render_markdown(found: Explanation) -> str:
    """The document as Markdown, for an issue."""
    return markdown.render(document_of(found))


def document_of(found: Explanation) -> Document:
    """The first message of every cause with its arithmetic, and a table of all where there are several."""
    firsts: dict[Cause, tuple[OutOfMemory, Judgement]] = {}
    for message, judged in found.messages:
        firsts.setdefault(judged.cause, (message, judged))
    several = len(found.messages) > 1
    return Document(
        subject="",
        title="Out of memory",
        says="out of memory",
        badge="oom",
        lead="; ".join(WORDS[cause] for cause in firsts),
        facts=tuple(_facts(found)),
        head=(_all(found),) if several else (),
        sections=(
            *(
                Section(f"{_place(message)}: {WORDS[judged.cause]}" if several else "", tuple(_blocks(message, judged)))
                for message, judged in firsts.values()
            ),
            *(() if found.beside is None else (_case(found.beside),)),
        ),
    )


def _case(beside: Beside) -> Section:
    """The tensors of the case or program at its peak, or where it fails, and the plans that make it fit."""
    found, rank = beside.fitted, beside.rank
    lines = [fit.says(found)]
    if found.whole.verdict == "fits":
        what = "program" if isinstance(found, FittedProgram) else "case"
        lines.append(f"The {what} as given fits: what ran needs more than it, or the GPU had less.")
    when = "at the peak" if rank.oom is None else "when it failed"
    tried = () if found.whole.verdict == "fits" else fit.plans_of(found)
    return Section(fit.subject(found), (Lines(tuple(lines)), largest_table(rank.shown.largest, when), *tried))


def _facts(found: Explanation) -> Iterator[str]:
    if len(found.messages) > 1:
        yield f"{len(found.messages)} messages"
    else:
        yield _place(found.messages[0][0])
    releases = dict.fromkeys(message.releases for message, _ in found.messages if message.releases)
    if releases:
        yield "as PyTorch " + " and ".join(releases) + " says it"


def _place(message: OutOfMemory) -> str:
    """Where it happened: rank, GPU and line, as far as they are known."""
    parts = [f"rank {message.rank}"] if message.rank is not None else []
    parts += [f"GPU {message.gpu}"] if message.gpu is not None else []
    parts += (
        [f"line {message.line}" + (f" ({message.times} times)" if message.times > 1 else "")] if message.line else []
    )
    return ", ".join(parts or [message.party])


def _all(found: Explanation) -> Table:
    rows = tuple(
        (_place(message), *map(_size, (message.asked, message.free, message.allocated)), judged.cause.replace("_", " "))
        for message, judged in found.messages[:MOST]
    )
    hidden = len(found.messages) - len(rows)
    more = f"and {hidden} more (--json has all)" if hidden else ""
    return Table("", ("where", "asked", "free", "allocated", "cause"), rows, right=range(1, 4), more=more)


def _blocks(message: OutOfMemory, judged: Judgement) -> Iterator[Block]:
    yield Lines((judged.because,))
    rows = tuple(_figures(message))
    if rows:
        yield Table("", ("figure", "size", "remark"), rows, right=(1,))
    yield Lines(tuple(f"{place}. {step}" for place, step in enumerate(judged.first, 1)), "What to try first")
    if judged.also:
        yield Lines(judged.also, "Also")
    if message.tensors:
        tensors = tuple((Size(one.bytes), one.count, Name(one.name)) for one in message.tensors)
        yield Table("Largest tensors at the snapshot's end, by stack", ("bytes", "tensors", "asked for by"), tensors)
    yield Lines((one_line(message.said),), "It says" if message.source != "snapshot" else "Where it failed")


def _figures(message: OutOfMemory) -> Iterator[tuple[Cell, ...]]:
    """Every figure that is known, what was asked for first, then the parts of the card."""
    tensors = None if message.allocated is None else message.allocated - (message.private or 0)
    machine = message.source in ("host", "library")
    listed = ", ".join(f"{one.pid}: {_told(one.bytes)}" for one in message.processes)
    others = ("other processes", message.others, f"processes {listed}" if listed else "")
    together = ("elsewhere", message.elsewhere, "this process's context, and other processes")
    table = (
        ("asked for", message.asked, ""),
        ("lacking", message.shortage, "asked for, less free") if message.free is not None else ("", None, ""),
        ("limit", message.allowed, "set_per_process_memory_fraction"),
        ("card", message.total, ""),
        ("free", message.free, "by the driver"),
        ("held" if machine else "tensors", tensors, ""),
        ("in pieces", message.pieces, "PyTorch's, without a tensor"),
        ("largest piece", message.largest, ""),
        ("private pools", message.private, "PyTorch's, without a tensor, kept for CUDA graphs"),
        ("outside the allocator", message.outside, "this process's context, NCCL, handles of libraries"),
        together if message.outside is None else others,
    )
    yield from ((name, Size(size), remark) for name, size, remark in table if size is not None)


def _size(size: int | None) -> Cell:
    return "-" if size is None else Size(size)


def _told(size: int | None) -> str:
    return "not told" if size is None else format_bytes(size)
