"""Reports of a selection: the table of methods, the winner with the reason, its margin, and what others lack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulator.estimator.estimate import estimate
from simulator.reports.document import Bar, Cell, Chart, Document, Lines, Section, Size, Table
from simulator.reports.estimate import what_fits
from simulator.reports.verdict import WORDS
from simulator.selector.select import WITHIN
from traces.text import one_line
from traces.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simulator.engine.result import Result
    from simulator.selector.select import Outcome, Selection

    Drawn = tuple[tuple[str, Result], ...]

_COLUMNS = ("method", "verdict", "batch", "samples", "reserved", "left", "step", "tokens/s")


def render_json(found: Selection) -> dict[str, Any]:
    """The document of `select --json`; bytes and seconds; methods best first."""
    asked = found.asked
    winner, second = found.winner, found.runner_up
    return {
        "schema_version": 1,
        "model": asked.keys.get("model"),
        "gpus": list(asked.gpus),
        "policy": asked.policy,
        "global_batch": asked.global_batch,
        "margin": asked.margin,
        "winner": None if winner is None else winner.name,
        "runner_up": None if second is None else second.name,
        "reason": reason(found),
        "advice": found.advice,
        "remedies": [] if found.remedies is None else [one.document() for one in found.remedies.fitting],
        "methods": [_method(one) for one in found.outcomes],
        "within": WITHIN,
        "not_tried": [{"method": one.name, "at_most_tokens_per_second": one.at_most} for one in found.spared],
        "unfinished": list(found.unfinished),
        "outside": [
            {"name": one.name, "bytes": one.bytes, "low": one.low, "high": one.high, "source": one.source}
            for one in found.outside
        ],
        "seconds": round(found.seconds, 3),
    }


def _method(one: Outcome) -> dict[str, Any]:
    document: dict[str, Any] = {
        "method": one.name,
        "verdict": "error" if one.error else one.verdict,
        "case": one.case,
        "batch": one.batch,
        "largest": one.largest,
        "accum": one.accum,
        "samples": one.samples,
        "peak_allocated": one.peak_allocated,
        "peak_reserved": one.peak_reserved,
        "on_gpu": one.on_gpu and one.on_gpu.document(),
        "worst_ranks": list(one.worst),
        "limit": one.limit,
        "left": {"likely": one.slack, "low": one.slack_low, "high": one.slack_high},
        "retries": one.retries,
        "step_retries": one.step_retries,
        "step_seconds": one.step_seconds,
        "tokens_per_second": one.tokens_per_second,
        "score": one.score,
        "tried": {str(batch): fits for batch, fits in one.tried.items()},
        "short": one.short,
        "seconds": round(one.seconds, 3),
    }
    return {**document, "error": one.error} if one.error else document


def reason(found: Selection) -> str:
    """Why the winner is it, in a sentence."""
    winner, second = found.winner, found.runner_up
    if not found.outcomes:
        return "no method is finished"
    if winner is None:
        return f"no method fits a single sample; {found.advice}" if found.advice else "no method fits"
    if found.asked.policy == "llmem":
        text = f"{winner.name}: score {winner.score:g} (LLMem's Algorithm 1)"
        return text if second is None else f"{text}, before {second.name} with {second.score:g}"
    fastest = max((one for one in found.outcomes if one.fits), key=lambda one: one.tokens_per_second)
    if fastest is not winner:
        because = "it is the plainer, current method"
        if fastest.step_retries and not winner.step_retries:
            because = "its steps have no allocator retries"
        return (
            f"{winner.name}: {winner.tokens_per_second:,.0f} tokens/s, within {WITHIN:.0%} of the fastest, "
            f"{fastest.name} with {fastest.tokens_per_second:,.0f}: chosen because {because}"
        )
    text = f"{winner.name} is predicted fastest: {winner.tokens_per_second:,.0f} tokens/s"
    if second is None:
        return text if found.spared else f"{text}; no other method fits"
    ahead = winner.tokens_per_second / second.tokens_per_second - 1
    return f"{text}, {ahead:.0%} more than {second.name}"


def closeness(one: Outcome) -> str:
    """The verdict of a method, and how close it is to the limit, by the range of what lies outside the allocator."""
    span = f"{_signed(one.slack_low)} to {_signed(one.slack_high)} by what lies outside the allocator"
    retries = f" after {one.retries} allocator retries" if one.retries else ""
    steady = f", {one.step_retries} in a steady step" if one.step_retries else ""
    safer = "; a smaller micro-batch is safer" if one.tight else ""
    return f"{WORDS[one.verdict]}: {format_bytes(one.slack)} left on the fullest GPU{retries}{steady} ({span}){safer}"


def _signed(size: int) -> str:
    return f"-{format_bytes(-size)}" if size < 0 else format_bytes(size)


def lines(found: Selection) -> Iterator[str]:
    """What stands under the table."""
    winner = found.winner
    yield reason(found)
    if winner is not None:
        yield f"{winner.name}: {closeness(winner)}"
        if winner.largest > winner.batch:
            yield f"{winner.name}: micro-batch {winner.batch}; the largest that fits is {winner.largest}"
    for one in found.outcomes:
        if one.error:
            yield f"{one.name}: not possible: {one_line(one.error)}"
        elif not one.fits:
            yield f"{one.name}: one sample lacks {format_bytes(one.short)}"
    if winner is not None and found.spared:
        most = max(one.at_most for one in found.spared)
        names = ", ".join(one.name for one in found.spared)
        yield (
            f"not tried, since they cannot be more than {WITHIN:.0%} faster than {winner.name} (at most {most:,.0f} "
            f"tokens/s; --methods NAME tries one): {names}"
        )
    if found.unfinished:
        yield f"not finished: {', '.join(found.unfinished)}"


def document_of(found: Selection, results: Drawn = ()) -> Document:
    """The ranked table and what is to be said about it; a page draws bars of memory and of speed, and `results`."""
    asked = found.asked
    said = list(lines(found))
    return Document(
        subject=_title(found),
        lead=said[0],
        named=found.winner is not None,
        badge="oom" if found.winner is None else found.winner.verdict,
        facts=(f"ranked by {asked.policy}", f"{asked.margin:.0%} of each GPU kept free", f"{found.seconds:.1f} s"),
        head=(*_charts(found), Table("", _COLUMNS, tuple(map(_cells, found.outcomes)), right=range(2, len(_COLUMNS)))),
        sections=(*((Section("", (Lines(tuple(said[1:])),)),) if said[1:] else ()), *_remedies(found)),
        results=results,
    )


def _remedies(found: Selection) -> Iterator[Section]:
    if found.remedies is not None and found.nearest is not None:
        yield Section(f"{found.nearest.name}, one sample", tuple(what_fits(found.remedies)))


def drawn(found: Selection) -> Drawn:
    """The winner and the runner-up at their largest micro-batch, replayed with what a page draws of them."""
    shown = [one for one in (found.winner, found.runner_up) if one is not None]
    context = found.asked.context
    return tuple((one.name, estimate(one.case, context=context, picture=True, analyse=False).result) for one in shown)


def _charts(found: Selection) -> Iterator[Chart]:
    """Peak allocated and reserved of the worst rank with the limit, also of methods that lack some; and the speed."""
    memory = tuple(
        Bar(
            one.name,
            (("allocated", one.peak_allocated), ("free", max(0, one.reserved_there - one.peak_allocated))),
            mark=one.limit or None,
            remark=f"micro-batch {one.batch}" if one.fits else "one sample does not fit",
        )
        for one in found.outcomes
        if one.peak_reserved and not one.error
    )
    speed = tuple(
        Bar(one.name, (("tokens/s", round(one.tokens_per_second)),), remark=f"{one.step_seconds:.3f} s a step")
        for one in found.outcomes
        if one.fits and one.tokens_per_second
    )
    caption = "Of the worst rank: allocated bytes at their peak, what reserved bytes have beyond them at theirs (free)."
    if memory:
        yield Chart("Memory by method", memory, caption=caption)
    if speed:
        yield Chart("Tokens per second, as predicted", speed, unit="number")


def _cells(one: Outcome) -> tuple[Cell, ...]:
    verdict = "" if one.error else one.verdict
    if not one.fits:
        return (one.name, verdict, "-", "", Size(one.peak_reserved) if one.peak_reserved else "", "", "", "")
    return (
        one.name,
        verdict,
        f"{one.accum} x {one.batch}" if one.accum > 1 else str(one.batch),
        str(one.samples),
        Size(one.reserved_there),
        _signed(one.slack),
        f"{one.step_seconds:.3f} s",
        f"{one.tokens_per_second:,.0f}",
    )


def _title(found: Selection) -> str:
    asked = found.asked
    kinds = {name: asked.gpus.count(name) for name in dict.fromkeys(asked.gpus)}
    cards = " + ".join(f"{count} x {name}" for name, count in kinds.items())
    return f"{one_line(str(asked.keys.get('model', '')))} on {cards}"
