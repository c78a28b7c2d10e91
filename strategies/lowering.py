"""From a case or a step graph to the trace of all its ranks, and what every lowered trace has in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graph.case import Case
from graph.hardware.profile import profile
from graph.model import StepGraph
from strategies import modifiers, registry
from strategies.strategy import Capture, Lowered
from strategies.timing.clock import Clock, timed
from strategies.timing.roofline import Speed
from traces.errors import ConfigError
from traces.model import Device, RankEvents, Trace

if TYPE_CHECKING:
    from graph.loop.method import Method


def lower(
    source: Case | StepGraph,
    *,
    capture: Capture | None = None,
    speed: Speed | None = None,
    clock: Clock | None = None,
    rank: int | None = None,
) -> Trace:
    """The trace of every rank of a case, or of the case that a step graph was captured of.

    `capture(case, method)` makes the step graphs that the strategy needs (default: `graph.capture`); a graph given as
    `source` serves a strategy that needs that of one GPU. With `rank` that rank alone is captured and stands for all.
    With `speed` kernels have durations, hence the trace simulated time; with a `clock` collectives and the host's
    launches too; without, order only. Device, allocator settings and release are the case's.

    Raises ConfigError for a strategy that is not there or that the case contradicts, and what `capture` raises.
    """
    case = source if isinstance(source, Case) else Case.of(source.case)
    if clock is not None:
        return timed(lower(source, capture=capture, speed=speed or clock.speed(), rank=rank), clock)
    modifiers.check(case)
    return finish(registry.find(case).lower(case, capture or _captured(source), speed, rank), case)


def _captured(source: Case | StepGraph) -> Capture:
    """Captures anew, but for the graph of one GPU where that is given."""

    def capture(case: Case, method: Method | None) -> StepGraph:
        if method is None and isinstance(source, StepGraph):
            return source
        from graph.recorder.capture import capture as capture_anew

        return capture_anew(case, method=method)

    return capture


def finish(lowered: Lowered, case: Case) -> Trace:
    """The trace of what a strategy made: with the devices, settings and metadata of the case, and of its graph."""
    graph = lowered.graph
    return finished(lowered.ranks, lowered.groups, case, graph.environment, graph.assumptions)


def finished(
    ranks: tuple[RankEvents, ...],
    groups: Mapping[str, tuple[tuple[int, ...], ...]],
    case: Case,
    environment: Mapping[str, Any],
    assumptions: Sequence[str],
) -> Trace:
    """The trace of a case's ranks: with its devices and settings, the `environment` that they ran in, and what was
    assumed."""
    devices, parted = _devices(case, ranks)
    return Trace(
        ranks=parted,
        metadata={
            "producer": "llmem",
            "model": case.model,
            "strategy": case.strategy,
            "case": case.document(),
            "environment": dict(environment),
            "assumptions": list(assumptions),
        },
        conf=case.alloc_conf,
        release=case.release,
        devices=devices,
        groups=groups,
    )


def device_of(case: Case, rank: int = 0) -> Device:
    """The device that a rank of a case runs on; `memory` of the case, by rank where it is a list, is its total."""
    card = profile(case.gpu, case.release, case.cudnn_sdp)
    memory = case.memory
    if isinstance(memory, int):
        return Device(card.name, memory)
    if memory is None:
        return Device(card.name, card.total_bytes)
    if not rank < len(memory):
        raise ConfigError(f"'memory' has {len(memory)} sizes, but there is a rank {rank}: give one size a rank")
    return Device(card.name, memory[rank] or card.total_bytes)


def _devices(case: Case, ranks: tuple[RankEvents, ...]) -> tuple[tuple[Device, ...], tuple[RankEvents, ...]]:
    """Kinds of device, and the ranks with the kind of each; ranks that share events but not a device are parted."""
    kinds: list[Device] = []
    parted = []
    for entry in ranks:
        members: dict[int, list[int]] = {}
        for rank in entry.ranks:
            found = device_of(case, rank)
            if found not in kinds:
                kinds.append(found)
            members.setdefault(kinds.index(found), []).append(rank)
        parted += [replace(entry, ranks=tuple(some), device=number) for number, some in members.items()]
    return tuple(kinds), tuple(parted)
