"""The one verdict of a run on its GPU: replays beside what lies outside the allocator, over the range of that.

Beside the replay of the trace as it stands there is one of it as on a GPU (`engine.on_gpu`), whose peaks the result has
too; the verdict is the worse of the two. Where that runs out of memory cuDNN does without its workspaces. Without
anything outside the allocator the trace as it stands is all there is. The device is replayed less the likely size of
that. `tight` is what the least of the range serves and the most does not, and what the allocator serves only by giving
memory back and trying again, which stops the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from simulator.engine.on_gpu import has_choice, on_gpu
from simulator.engine.replay import prepare, replay
from simulator.engine.result import OnGpu, OutsideTerm, RankResult, Result
from simulator.estimator.outside import bytes_of, least_of, most_of
from traces.errors import ConfigError
from traces.model import Trace


def judged(trace: Trace, terms: tuple[OutsideTerm, ...], *, analyse: bool = True, **kept: Any) -> Result:
    """The replay of a trace beside what lies outside the allocator, with the verdict over the range of that.

    Each device has `terms` less for the allocator, at their likely sizes; where that runs out of memory and their
    least sizes do not, the result is that with the least. `analyse` and `kept` are those of `simulator.replay`, and so
    are the errors. ConfigError where a size that is no range, so given by somebody, is more than a device has.
    """
    found = _beside(trace, terms, {"analyse": analyse, **kept})
    if not terms:
        return found
    real, tries = on_gpu(trace), 0
    there = _beside(real, terms, {"analyse": False})
    if there.verdict == "oom" and has_choice(trace):
        real, tries = on_gpu(trace, lean=True), 1
        there = _beside(real, terms, {"analyse": False})
    if there.verdict == "oom":  # which needs more than what has no libraries
        return _beside(real, terms, {"analyse": analyse, **kept})
    if found.verdict == "oom":
        return found
    return replace(found, ranks=tuple(_with(rank, there.for_rank(rank.ranks[0]), tries) for rank in found.ranks))


def sides(trace: Trace, terms: tuple[OutsideTerm, ...]) -> Iterator[Trace]:
    """The traces that have to fit: as it stands, and as on a GPU where anything lies outside the allocator."""
    yield trace
    if terms:
        yield on_gpu(trace, lean=True)


def _with(rank: RankResult, there: RankResult, tries: int) -> RankResult:
    """A rank with its peaks on a GPU, and the least outside the allocator with which it runs out of memory; `tries`:
    how often at least a library had to do without what it would have taken, for which the allocator tries again."""
    limits = [limit for limit in (rank.oom_with, there.oom_with) if limit is not None]
    peaks = OnGpu(there.peak_allocated, there.peak_reserved, max(there.retries, tries))
    return replace(rank, on_gpu=peaks, oom_with=min(limits, default=None))


def _beside(trace: Trace, terms: tuple[OutsideTerm, ...], kept: Mapping[str, Any]) -> Result:
    """The replay of one of the two, and its verdict; `kept` are arguments of `simulator.replay`."""
    made = prepare(trace)
    likely, least, most = bytes_of(terms), least_of(terms), most_of(terms)
    room = min(device.total_bytes for device in trace.devices)
    if bytes_of(least) == most > room:
        raise ConfigError(f"a context of {most} bytes does not fit a device of {room}: give less")

    def beside(aside: int, how: Mapping[str, Any]) -> Result:
        return replay(replace(made, trace=with_context(trace, aside)), **how)

    found = beside(likely, kept)
    if found.verdict == "oom" and bytes_of(least) < likely:
        other = beside(bytes_of(least), {**kept, "analyse": False})
        if other.verdict != "oom":
            return _marked(other, least, found, likely)
    if found.verdict == "oom" or _has_room(found, most):
        return _marked(found, terms, found, None)
    return _marked(found, terms, beside(most, {"analyse": False}), most)


def with_context(trace: Trace, aside: int) -> Trace:
    """The trace on devices of which `aside` bytes are not PyTorch's, or all, where they have less."""
    devices = (replace(device, context_bytes=min(aside, device.total_bytes)) for device in trace.devices)
    return replace(trace, devices=tuple(devices))


def _has_room(found: Result, outside: int) -> bool:
    """Whether no call of the driver would go otherwise with so much outside the allocator."""
    return all(rank.peak_reserved + outside <= rank.device.total_bytes for rank in found.ranks)


def _marked(found: Result, terms: tuple[OutsideTerm, ...], other: Result, aside: int | None) -> Result:
    """The result with its terms; ranks that run out of memory in `other`, with `aside` bytes outside, are marked."""
    failed = {rank.ranks for rank in other.ranks if rank.oom}
    ranks = (replace(rank, outside=terms, oom_with=aside if rank.ranks in failed else None) for rank in found.ranks)
    return replace(found, ranks=tuple(ranks))
