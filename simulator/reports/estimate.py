"""Reports of an estimate: the replay's own, under a line that says the case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from graph.case import Case
from simulator.estimator.step_time import StepTime
from simulator.reports import markdown, run
from simulator.reports.document import Block, Document, Lines, Size, Table
from simulator.reports.verdict import WORDS
from traces.text import first_of, one_line
from traces.units import format_bytes

if TYPE_CHECKING:
    from simulator.estimator.epoch import Peaks
    from simulator.estimator.estimate import Estimate
    from simulator.estimator.step_time import GenerationTime, StepTime
    from simulator.fit.plans import Plans

#: What needs a larger share of what the case needs saves nothing worth a word.
_SAVES: Final = 0.99
#: Changes that would fit, of which a sentence speaks.
_MOST: Final = 8
#: Changes that are not enough, and those not tried, of which a report speaks.
_FEW: Final = 3
#: Plans that a report shows.
_SHOWN: Final = 12
#: Keys of a case that the headline does not repeat: the report shows them elsewhere, or the model begins the line.
_SHOWN_ELSEWHERE: Final = frozenset({"model", "memory", "alloc_conf", "release"})


def render_json(estimate: Estimate) -> dict[str, Any]:
    """The document of `estimate --json`: the answer (the case, peaks, phases, the verdict) and that of `run --json`.

    `case` of its metadata has every key with its value, also where that is the default.
    """
    replayed = run.render_json(estimate.result)
    whole = Case.of(estimate.case, any_strategy=True).whole()
    return {
        **estimate.document(),
        "assumptions": list(estimate.assumptions),
        **replayed,
        "metadata": {**replayed.get("metadata", {}), "case": whole},
    }


def render_markdown(estimate: Estimate) -> str:
    """The document of `estimate --markdown`."""
    return markdown.render(document_of(estimate))


def document_of(estimate: Estimate) -> Document:
    """The document of its replay with what an estimate knows besides."""
    return with_case(run.document_of(estimate.result), estimate)


def with_case(found: Document, estimate: Estimate) -> Document:
    """A document under a line that says the case, with what was built, what would fit, the time and the terms of other
    estimators."""
    built = (Lines((facts_line(estimate.facts),)),) if estimate.facts else ()
    failure = found.head[: -1 if found.head else 0]
    tried = () if estimate.remedies is None else what_fits(estimate.remedies)
    head = (*built, *failure, *tried, *found.head[len(failure) :], *_extra(estimate))
    return replace(found, subject=case_line(estimate.case), head=head)


def what_fits(found: Plans, tried: str = "tried by a capture and a replay") -> Iterator[Block]:
    """What would fit, the cheapest change first, and what does not alone; each was `tried` somehow."""
    plans = found.fitting
    rows = tuple(
        (
            one.options,
            WORDS[one.judged.verdict],
            None if one.judged.needs is None else Size(one.judged.needs),
            Size(one.judged.total),
            "" if one.time is None else f"{one.time:.0%}",
            f"{one.words} ({_COSTS[one.cost]})",
        )
        for one in plans[:_SHOWN]
    )
    head = ("options", "verdict", "needs", "of", "time", "what changes")
    if rows:
        more = f"and {len(plans) - _SHOWN} more (--json has all)" if len(plans) > _SHOWN else ""
        yield Table(f"What would fit, each {tried}", head, rows, right=(2, 3, 4), more=more)
    else:
        yield Lines(("Nothing that was tried would fit.",))
    yield Lines(tuple(_not_enough(found)))


def ways_out(found: Plans) -> str:
    """What would fit, in one sentence."""
    if not found.fitting:
        return "nothing that was tried would fit"
    said = (f"{one.options} ({format_bytes(one.judged.needs or 0)})" for one in found.fitting[:_MOST])
    return f"it would fit with {'; '.join(said)}"


#: What a change costs, in words.
_COSTS: Final[Mapping[str, str]] = {
    "nothing": "same results",
    "time": "same results",
    "rounding": "other rounding",
    "method": "another method",
    "inputs": "other inputs",
    "hardware": "other hardware",
}


def _not_enough(found: Plans) -> Iterator[str]:
    """What saves something, but not enough, and what there was no time for."""
    saving = [one for one in found.short if (one.judged.needs or found.needs) < found.needs * _SAVES]
    if saving:
        said = [f"{one.options} ({format_bytes(one.judged.needs or 0)})" for one in saving]
        yield f"Not enough: {first_of(said, _FEW, ' (--json has all)')}."
    if found.untried:
        yield f"Not tried, for want of time: {first_of(found.untried, _FEW)}."


def _extra(estimate: Estimate) -> Iterator[Block]:
    lines = []
    if estimate.step is not None:
        lines.append(_time(estimate.step))
    if estimate.min_fit is not None:
        lines.append(f"smallest GPU: {format_bytes(estimate.min_fit)} ({estimate.min_fit:,} B)")
    yield Lines(tuple(lines))
    if estimate.epoch is not None:
        yield from _epoch(estimate.epoch)
    if estimate.closed:
        yield _closed(estimate)


def _epoch(peaks: Peaks) -> Iterator[Block]:
    """The peaks of a data set's batches, and the batch that has the largest."""
    rows = (("largest", Size(peaks.largest)), ("99th percentile", Size(peaks.p99)), ("median", Size(peaks.median)))
    yield Table(f"Peaks of an epoch of {peaks.batches:,} batches", ("batch", "allocated"), rows)
    samples = ", ".join(str(one) for one in peaks.samples[:_SHOWN])
    more = f" and {len(peaks.samples) - _SHOWN} more" if len(peaks.samples) > _SHOWN else ""
    yield Lines(
        (
            f"The largest is batch {peaks.worst:,}, padded to {peaks.tokens:,} tokens: samples {samples}{more}. "
            f"{peaks.run} lengths were run; between them peaks are taken as linear.",
        )
    )


def _time(step: StepTime | GenerationTime) -> str:
    """The time of a step, or of the first token and those after it."""
    speed = f"{step.tokens_per_second:,.0f} tokens/s"
    if not isinstance(step, StepTime):
        rest = f", then {speed}" if step.tokens else ""
        return f"first token: {run.format_time(step.first_token_ns)}{rest} (a model, not a measurement)"
    per_gpu = f", {step.tokens_per_second / step.ranks:,.0f} a GPU" if step.ranks > 1 else ""
    return f"step time: {run.format_time(step.step_ns)}, {speed}{per_gpu} (a model, not a measurement)"


def _closed(estimate: Estimate) -> Table:
    """Closed-form estimates beside the simulation: the device's total, and the terms of each."""
    ours = max(rank.device_total for rank in estimate.result.ranks)
    note = "reserved by the worst rank, and what is outside"
    total = Size(ours) if estimate.verdict != "oom" else WORDS["oom"]
    others = (
        (one.name, Size(one.total), ", ".join(f"{name} {format_bytes(size)}" for name, size in one.terms.items()))
        for one in estimate.closed
    )
    return Table("Estimators", ("estimator", "device total", "terms"), (("simulation", total, note), *others))


def case_line(case: Mapping[str, Any]) -> str:
    """A case on one line: the model, then what always matters, and every other key that is not the default."""
    shown = Case.of(case, any_strategy=True).headline()
    parts = [one_line(str(shown["model"]))]
    parts += [f"{key} {one_line(_value(value))}" for key, value in shown.items() if key not in _SHOWN_ELSEWHERE]
    return ", ".join(parts)


def facts_line(facts: Mapping[str, Any]) -> str:
    """What was built: the class, its parameters and their dtype, those that are trained; another class than named."""
    said = f"{facts['class']}, {_count(facts['parameters'])} parameters {facts['dtype']}"
    if facts["trained"]:
        said += f", {_count(facts['trained'])} trained"
    return said + (f" (the configuration names {one_line(facts['named'])})" if facts.get("named") else "")


def _count(number: int) -> str:
    """A number of parameters with three digits: 6.74 B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:#.3g}".rstrip(".") + f" {unit}"
    return str(number)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ",".join(f"{key}={size}" for key, size in value.items())
    if isinstance(value, list | tuple) and len(value) > _SHOWN:
        return f"{len(value)} from {min(value)} to {max(value)}"
    return "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
