"""The page of a selection: methods side by side, their memory and speed, and what the others lack."""

from __future__ import annotations

from simulator.engine.result import Result
from simulator.reports.html.sheet import Bar, Chart, Grid, Sheet, Size, render_sheet
from simulator.reports.select import lines, reason
from simulator.selector.select import Outcome, Selection
from traces.text import one_line

Drawn = tuple[tuple[str, Result], ...]


def render_select(found: Selection, results: Drawn = ()) -> str:
    """The page as text, with methods that are drawn over time (`drawn`): a pure function of both."""
    return render_sheet(sheet_of(found, results))


def drawn(found: Selection) -> Drawn:
    """The winner and the runner-up at their largest micro-batch, replayed with what a page draws of them."""
    from simulator.estimator.estimate import estimate

    shown = [one for one in (found.winner, found.runner_up) if one is not None]
    context = found.asked.context
    return tuple((one.name, estimate(one.case, context=context, picture=True, analyse=False).result) for one in shown)


def sheet_of(found: Selection, results: Drawn = ()) -> Sheet:
    """What the page of a selection shows: bars of memory and of speed, the table of methods, the words under it."""
    asked = found.asked
    kinds = {name: asked.gpus.count(name) for name in dict.fromkeys(asked.gpus)}
    cards = " + ".join(f"{count} x {name}" for name, count in kinds.items())
    said = list(lines(found))
    return Sheet(
        title=f"{one_line(str(asked.keys.get('model', '')))} on {cards}",
        lead=_sentence(reason(found)),
        badge="oom" if found.winner is None else found.winner.verdict,
        facts=(f"ranked by {asked.policy}", f"{asked.margin:.0%} of each GPU kept free", f"{found.seconds:.1f} s"),
        parts=tuple(part for part in (_memory(found), _speed(found), _table(found)) if part is not None),
        results=results,
        notes=tuple(_sentence(line) for line in said[1:]),
    )


def _sentence(words: str) -> str:
    """Words with a stop; the name of a method at their start stays as it is."""
    return f"{words[:1].upper()}{words[1:]}." if words.startswith("no") else f"{words}."


def _memory(found: Selection) -> Chart | None:
    """Peak allocated and reserved of the worst rank, with the limit; also of methods that lack some."""
    shown = [one for one in found.outcomes if one.peak_reserved and not one.error]
    if not shown:
        return None
    bars = tuple(
        Bar(
            one.name,
            (("allocated", one.peak_allocated), ("free", max(0, one.peak_reserved - one.peak_allocated))),
            mark=one.limit or None,
            remark=f"micro-batch {one.batch}" if one.fits else "one sample does not fit",
        )
        for one in shown
    )
    caption = "Of the worst rank: allocated bytes at their peak, what reserved bytes have beyond them at theirs (free)."
    return Chart("Memory by method", bars, caption=caption)


def _speed(found: Selection) -> Chart | None:
    shown = [one for one in found.outcomes if one.fits and one.tokens_per_second]
    if not shown:
        return None
    bars = tuple(
        Bar(one.name, (("tokens/s", round(one.tokens_per_second)),), remark=f"{one.step_seconds:.3f} s a step")
        for one in shown
    )
    return Chart("Tokens per second, as predicted", bars, unit="number")


def _table(found: Selection) -> Grid:
    head = (
        "method",
        "verdict",
        "micro-batch",
        "accum",
        "samples/step",
        "peak reserved",
        "left",
        "step",
        "tokens/s",
        "would fit",
    )
    rows = tuple(_row(one) for one in found.outcomes)
    return Grid("Methods", head, rows, strong=(0,) if found.winner is not None else ())


def _row(one: Outcome) -> tuple[str | int | float | Size | None, ...]:
    if one.error:
        return (one.name, *(None,) * 8, f"not possible: {one_line(one.error)}")
    peak = Size(one.peak_reserved) if one.peak_reserved else None
    if not one.fits:
        return (
            one.name,
            one.verdict,
            None,
            None,
            None,
            peak,
            None,
            None,
            None,
            f"with {' or '.join(one.remedies)}" if one.remedies else None,
        )
    left = Size(max(0, one.slack))
    seconds = f"{one.step_seconds:.3f} s"
    return (
        one.name,
        one.verdict,
        one.batch,
        one.accum,
        one.samples,
        peak,
        left,
        seconds,
        round(one.tokens_per_second),
        None,
    )
