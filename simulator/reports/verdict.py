"""The verdict of a run in words, the same in every report: the verdict, and the sentence that says what it rests on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from simulator.engine.ranks import format_ranks
from simulator.engine.result import RankResult, Result, Verdict
from traces.text import one_line
from traces.units import format_bytes

#: The verdicts as reports print them.
WORDS: Final[Mapping[str, str]] = {"fits": "fits", "tight": "tight", "oom": "out of memory"}


def exit_code(verdict: Verdict) -> int:
    """3 out of memory, else 0: what is tight runs."""
    return 3 if verdict == "oom" else 0


def summary(result: Result) -> str:
    """What the verdict rests on, in one sentence without the verdict itself: needed, the GPU's size, what is left."""
    if not result.ranks:
        return "the trace has no ranks"
    rank = result.decisive
    where = f" on {label_of(rank.ranks)}" if len(result.ranks) > 1 else ""
    if rank.oom is not None:
        return _lacks(rank, where)
    total = rank.device.total_bytes
    left = f"{format_bytes(total - rank.device_total)} left" + ("" if rank.outside else ", no CUDA context counted")
    text = f"needs {format_bytes(rank.device_total)} of {format_bytes(total)}{where} ({left})"
    return "; ".join([text, *_reasons(rank)])


def headline(result: Result) -> str:
    """The verdict in words, and what it rests on."""
    return f"{WORDS[result.verdict]}: {summary(result)}"


def label_of(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0-3`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}"


def _lacks(rank: RankResult, where: str) -> str:
    """How much is missing, or what was asked for where that is not known."""
    assert rank.oom is not None
    total = rank.device.total_bytes
    needed = rank.needed
    if needed is None or needed <= total:
        asked, left = format_bytes(rank.oom.requested), format_bytes(rank.oom.device_free)
        return f"asked for {asked} with {left} of {format_bytes(total)} left{where}"
    return (
        f"needs {format_bytes(needed)}{where}, lacks {format_bytes(needed - total)} (the GPU has {format_bytes(total)})"
    )


def failure(rank: RankResult) -> str:
    """Where a rank runs out of memory, in one sentence: when, for what, where, what was asked for and what was left."""
    oom = rank.oom
    assert oom is not None
    when = f"in {one_line(oom.phase)} (event {oom.event})" if oom.phase else f"at event {oom.event}"
    whom = f", for {one_line(oom.name)}" if oom.name else ""
    whom += f", at {one_line(oom.line)}" if oom.line else ""
    asked, left = format_bytes(oom.requested), format_bytes(oom.device_free)
    return f"it fails {when}{whom}: asked for {asked} with {left} left on the GPU"


def _reasons(rank: RankResult) -> Iterable[str]:
    """Why a rank that fits is tight; nothing where it is not."""
    if retries := rank.retries_there:
        times = "once" if retries == 1 else f"{retries} times"
        yield f"to fit, the allocator gives memory back and tries again {times}, which costs time"
    if rank.oom_with is not None:
        counted = format_bytes(rank.device_total - rank.reserved_there)
        yield f"outside the allocator {counted} are counted, with {format_bytes(rank.oom_with)} it runs out of memory"
