"""From a step graph to a trace: which module lowers which strategy, and what every lowered trace has in common.

A strategy is a module with a function `ranks(graph, case, mesh, speed) -> Lowered`; `lower` adds the devices, the
allocator's settings and the metadata, all of which the case says.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from graph.case import Case
from graph.hardware.profile import profile
from graph.model import StepGraph
from traces.errors import ConfigError
from traces.model import Device, RankEvents, Trace

if TYPE_CHECKING:
    from strategies.single import Speed

#: The module that lowers each strategy. A new one is its module and a line here.
MODULES: Final[Mapping[str, str]] = {
    "single": "strategies.single",
    "ddp": "strategies.parallel.ddp",
    "ddp-view": "strategies.parallel.ddp",
    "zero1": "strategies.parallel.ddp",
    "fsdp1": "strategies.parallel.fsdp",
    "fsdp2": "strategies.parallel.fsdp",
    "fsdp2-nr": "strategies.parallel.fsdp",
    "fsdp2-offload": "strategies.parallel.fsdp",
    "hsdp": "strategies.parallel.fsdp",
    "tp": "strategies.parallel.tp",
    "tp-sp": "strategies.parallel.tp",
    "tp-megatron": "strategies.megatron.megatron",
    "tp-megatron-sp": "strategies.megatron.megatron",
    "fsdp2-tp": "strategies.parallel.tp",
    "gemini": "strategies.gemini.gemini",
    "deepspeed-1": "strategies.deepspeed",
    "deepspeed-2": "strategies.deepspeed",
    "deepspeed-3": "strategies.deepspeed",
    "pp": "strategies.parallel.pp",
}


@dataclass(frozen=True)
class Lowered:
    """What a strategy makes of a graph: the events of every rank, and the groups of ranks that meet in collectives."""

    ranks: tuple[RankEvents, ...]
    groups: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)


def lower(graph: StepGraph, mesh: Mapping[str, int] | None = None, *, speed: Speed | None = None) -> Trace:
    """The trace of a step graph under the strategy of its case.

    `mesh` gives the sizes of the dimensions over which ranks are spread (default: the case's own). With `speed` the
    trace has kernel events with durations, hence simulated time; without, order only. Device, allocator settings and
    release are the case's. Raises ConfigError for a strategy that is not there, or settings that it cannot have.
    """
    case = Case.of(graph.case)
    name = str(case.strategy)
    if name not in MODULES:
        raise ConfigError(f"strategy {name[:60]!r} is not available yet; there are: {', '.join(MODULES)}")
    make: Callable[..., Lowered] = importlib.import_module(MODULES[name]).ranks
    return finish(make(graph, case, case.mesh if mesh is None else mesh, speed), graph, case)


def finish(lowered: Lowered, graph: StepGraph, case: Case) -> Trace:
    """The trace of what a strategy made: with the devices, settings and metadata of the case, and of its graph."""
    devices, ranks = _devices(case, lowered.ranks)
    return Trace(
        ranks=ranks,
        metadata=_metadata(graph, case),
        conf=case.alloc_conf,
        release=case.release,
        devices=devices,
        groups=lowered.groups,
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


def _metadata(graph: StepGraph, case: Case) -> dict[str, Any]:
    return {
        "producer": "llmem",
        "model": case.model,
        "strategy": case.strategy,
        "case": case.document(),
        "environment": dict(graph.environment),
        "assumptions": list(graph.assumptions),
    }
