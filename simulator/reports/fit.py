"""Reports of `fit`: the cheapest plan in a sentence, and the table of all, pure functions of what was found."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from simulator.fit.fit import SCHEMA_VERSION, Fitted
from simulator.fit.plans import FittedProgram
from simulator.reports import markdown
from simulator.reports.document import Block, Document, Section, Size, Table
from simulator.reports.estimate import case_line, what_fits
from simulator.reports.verdict import WORDS
from traces.text import one_line
from traces.units import format_bytes

if TYPE_CHECKING:
    from simulator.fit.advice import Advice
    from simulator.fit.plans import Fitting, Judged, Plan

_NUMBERS: Final = {1: "this", 2: "these two", 3: "these three", 4: "these four", 5: "these five"}
#: What follows from a plan that leaves the results as they are, or not.
_RESULTS: Final = {0: "the results stay the same", 1: "rounding differs", 2: "it is another method"}


def render_json(found: Fitting) -> dict[str, Any]:
    """The document of `fit --json`: the case or program, what it says in words, the plans that fit and those that do
    not."""
    whole = found.whole
    return {
        "schema_version": SCHEMA_VERSION,
        **_subject(found),
        "verdict": whole.verdict,
        "needs": whole.needs,
        "gpu_bytes": whole.total,
        "keep": list(found.keep),
        "says": says(found),
        "tokens_per_second": tokens_per_second(found),
        "plans": [one.document() for one in found.plans.fitting],
        "short": [one.document() for one in found.plans.short],
        "untried": list(found.plans.untried),
    }


def _subject(found: Fitting) -> dict[str, Any]:
    if isinstance(found, FittedProgram):
        return {"program": list(found.program), "advice": [one.document() for one in found.advice]}
    assert isinstance(found, Fitted)
    return {"case": found.case.document()}


def render_markdown(found: Fitting) -> str:
    """The document as Markdown, for an issue."""
    return markdown.render(document_of(found))


def document_of(found: Fitting) -> Document:
    """What it lacks and the cheapest plan, then the table of plans."""
    verdict = found.whole.verdict
    kept = [f"kept: {', '.join(found.keep)}"] if found.keep else []
    sections = () if verdict == "fits" else (Section("", tuple(plans_of(found))),)
    facts = tuple([*_speeds(found), *kept])
    return Document(subject=subject(found), badge=verdict, lead=says(found), facts=facts, sections=sections)


def tokens_per_second(found: Fitting) -> float | None:
    """Of a case as it is, as predicted; None where that is not known, and of a program."""
    return 1e9 / found.whole.ns if isinstance(found, Fitted) and found.whole.ns else None


def _speeds(found: Fitting) -> Iterator[str]:
    speed, plan = tokens_per_second(found), next(iter(found.plans.fitting), None)
    if speed is not None and plan is not None and plan.time:
        yield f"predicted: {speed:,.0f} tokens/s if it did fit, {speed / plan.time:,.0f} with the first plan"


def plans_of(found: Fitting) -> Iterator[Block]:
    """What would fit, what does not alone, and what one would change in a program itself."""
    if not isinstance(found, FittedProgram):
        return what_fits(found.plans)
    return chain(what_fits(found.plans, "recorded and replayed"), _advice(found.advice))


def subject(found: Fitting) -> str:
    """What is to fit, on one line."""
    if isinstance(found, FittedProgram):
        return one_line(shlex.join(found.program))
    assert isinstance(found, Fitted)
    return case_line(found.case.document())


def _advice(advice: Sequence[Advice]) -> Iterator[Table]:
    """Where the memory of a program goes, and what one would change there."""
    rows = tuple(
        (one.kind, Size(line.bytes), line.where, one.words if line is one.lines[0] else "")
        for one in advice
        for line in one.lines
    )
    if rows:
        head = ("alive at the peak", "bytes", "asked for by", "what one may change there")
        yield Table("In the program itself (advice: nothing of this was tried)", head, rows, right=(1,))


def says(found: Fitting) -> str:
    """What is lacking, what to do, and what it costs, in a sentence."""
    whole = found.whole
    if whole.verdict == "fits":
        return f"fits: needs {format_bytes(whole.needs or 0)} of {format_bytes(whole.total)}; nothing has to change"
    lack = _lack(whole)
    plans = found.plans.fitting
    if not plans:
        kept = f" with {', '.join(found.keep)} kept" if found.keep else ""
        return f"{lack}; nothing that was tried makes it fit{kept}"
    return f"{lack}; {advice(plans[0])}"


def _lack(whole: Judged) -> str:
    if whole.needs is None:
        return WORDS[whole.verdict]
    if whole.needs <= whole.total:
        return f"it needs {format_bytes(whole.needs)} of {format_bytes(whole.total)}, which is {WORDS[whole.verdict]}"
    return f"it lacks {format_bytes(whole.needs - whole.total)}"


def advice(plan: Plan) -> str:
    """A plan as what to do: `do these two: ..., they cost 4 % time`."""
    many = len(plan.changes) > 1
    number = _NUMBERS.get(len(plan.changes), "these")
    return f"do {number}: {plan.options} ({plan.words}); {'they' if many else 'it'} {_costs(plan)}{_otherwise(plan)}"


def _costs(plan: Plan) -> str:
    verb = "cost" if len(plan.changes) > 1 else "costs"
    if plan.time is None:
        return f"{verb} time that is not known"
    share = round(100 * (plan.time - 1))
    if share == 0:
        return f"{verb} no time"
    if share < 0:
        return f"{'save' if len(plan.changes) > 1 else 'saves'} {-share} % time"
    return f"{verb} {share} % time"


def _otherwise(plan: Plan) -> str:
    if plan.judged.verdict == "tight":
        return ", and leave it tight" if len(plan.changes) > 1 else ", and leaves it tight"
    return f", and {_RESULTS[plan.level]}" if plan.level in _RESULTS else ""
