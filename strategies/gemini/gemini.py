"""LLMem's methods on Colossal-AI's Gemini: one GPU, CDP, ADP, TP and DP+TP, from the step graph of the whole model.

The mesh of the case says which: `dp` ranks share chunks (ADP; `adp` and `gemini` mean the same), `cdp` ranks keep them
whole and reduce gradients in place, `tp` ranks split every linear layer. The case is that of LLMem's scripts: fp16,
reentrant checkpointing, eager attention, the loss of transformers 4.29, release 2.0. The card is none of these: without
`gpu` it is the usual one of a case, and LLMem's own was a V100-16GB.
"""

from __future__ import annotations

import numpy as np

from graph.case import Case
from graph.model import Int64Array, StepGraph
from strategies.gemini.chunk_layout import ChunkConfig, ChunkLayout, layout, local_parameters, pack, search
from strategies.gemini.chunk_moves import GROUP, WORLD, Gemini, Options
from strategies.gemini.event_builder import EventBuilder
from strategies.gemini.skeleton import Skeleton
from strategies.gemini.tensor_parallel import GROUP as TENSOR
from strategies.gemini.tensor_parallel import GeminiTensorParallel
from strategies.parallel.mesh import Mesh
from strategies.strategy import Capture, Lowered
from strategies.timing.roofline import Speed
from traces.errors import ConfigError
from traces.model import Op, RankEvents


def lowered(case: Case, axes: Mesh, capture: Capture, speed: Speed | None) -> Lowered:
    """The events of every rank, equal ones once. Raises ConfigError for a model that it cannot have."""
    graph = capture(case, None)
    data, tensor = axes.world // axes.size("tp"), axes.size("tp")
    skeleton = Skeleton.captured(graph)
    frozen = [one.name for one in skeleton.parameters if not one.trainable]
    if frozen:
        raise ConfigError(
            f"strategy 'gemini': {len(frozen)} parameters are frozen, {frozen[0]} the first; it trains all"
        )
    shapes = [(one.name, one.shape) for one in skeleton.parameters]
    whole = axes.size("cdp") > 1
    chunks = _whole(shapes, data, tensor) if whole else layout(shapes, data=data, tensor=tensor)
    entries = []
    for members in distinct(chunks):
        out = EventBuilder()
        if case.deferred == "late":
            out.add(Op.HOLD_EVENTS, hold=True)
        kind = GeminiTensorParallel if tensor > 1 else Gemini
        walker = kind(skeleton, chunks, members[0], Options(), out)
        if speed is not None:
            walker.durations, walker.speed = _durations(graph, walker, speed), speed
        entries.append(RankEvents(members, walker.run().events()))
    return Lowered(tuple(entries), groups(data, tensor), graph)


def _durations(graph: StepGraph, walker: Gemini, speed: Speed) -> Int64Array:
    """Nanoseconds of each operator of a rank: tensor parallelism divides the products of linear layers."""
    flops, moved = graph.operators.flops.copy(), graph.operators.moved.copy()
    if isinstance(walker, GeminiTensorParallel):
        plan = walker.plan
        split = np.asarray([*plan.linears, *plan.inputs, *plan.weights], dtype=np.int64)
        flops[split] //= walker.tensor
        moved[split] //= walker.tensor  # weights and one side of the activations: nearly all
    return speed.kernels_ns(graph, flops, moved)


def distinct(chunks: ChunkLayout) -> tuple[tuple[int, ...], ...]:
    """Ranks by what they keep of each chunk: all of one tuple have the same events."""
    found: dict[tuple[object, ...], list[int]] = {}
    for rank in range(chunks.data * chunks.tensor):
        pieces = (chunk.pieces(chunks.place(chunk, rank)) for chunk in chunks.chunks)
        key = tuple(tuple((slot.name, slot.end - slot.start) for slot in some) for some in pieces)
        found.setdefault(key, []).append(rank)
    return tuple(tuple(members) for members in found.values())


def groups(data: int, tensor: int) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Who meets whom: along `dp`, along `tp` (neighbours), and all."""
    mesh = Mesh((("dp", data), ("tp", tensor)))
    return {GROUP: mesh.groups("dp"), TENSOR: mesh.groups("tp"), WORLD: (tuple(range(mesh.world)),)}


def _whole(shapes: list[tuple[str, tuple[int, ...]]], data: int, tensor: int) -> ChunkLayout:
    """Conventional data parallelism: the same chunks, every one of them kept whole by every rank."""
    parameters = local_parameters(shapes, data=data, tensor=tensor)
    configs = {degree: ChunkConfig(one.elements, True) for degree, one in search(parameters).items()}
    return ChunkLayout(configs, pack(parameters, configs), data, tensor)
