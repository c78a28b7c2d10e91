"""What the host has a part in: copies between it and the device, and optimizers whose states are there."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from graph.case import Case
from graph.model import Int64Array, StepGraph

COPY: Final = "aten.copy_.default"
#: Bytes a second of the host's memory for each GPU: 16 channels of DDR4-3200 for 8 GPUs (DGX A100), three quarters of
#: it reached, about what STREAM shows.
MEMORY: Final = 16 * 25.6e9 / 8 * 0.75
#: How often torch's AdamW reads or writes each of its tensors on the host (torch/optim/adam.py, _single_tensor_adam):
#: mul_ 2, lerp_ 3, mul_ 2, addcmul_ 3, sqrt 2, div 2, add_ 2, addcdiv_ 4.
EAGER: Final = 20
#: Bytes that DeepSpeedCPUAdam reads and writes an element: the gradient in 16 bits, parameter and two states in fp32,
#: the parameter in 16 bits.
FUSED: Final = 2 + 2 * 12 + 2
HALF: Final = 2


def copies(graph: StepGraph) -> npt.NDArray[np.bool_]:
    """Which operators copy between host and device: they touch memory of the device on one side alone."""
    named = np.asarray([name == COPY for name in graph.names], dtype=np.bool_)[graph.operators.name]
    reads, writes = (np.diff(accesses.start) > 0 for accesses in (graph.reads, graph.writes))
    return np.asarray(named & (reads != writes), dtype=np.bool_)


def one_way(graph: StepGraph, chosen: npt.NDArray[np.bool_]) -> Int64Array:
    """Bytes that copies carry: half of what they read and write."""
    return graph.operators.moved[chosen] // 2


def optimizer_ns(graph: StepGraph, rate: float, *, on_host: bool = False) -> int:
    """Nanoseconds that the host's optimizer takes in an iteration; 0 where the optimizer is on the device.

    `rate` is bytes a second between host and device. `on_host`: parameters are there as well, and gradients came down
    by copies of the graph (FSDP2); else the gradients of the rank's share go down, and its parameters up, in this time.
    """
    if on_host:
        down = copies(graph) & (np.diff(graph.reads.start) > 0)
        last = graph.operators.step == graph.operators.step.max(initial=-1)
        return round(int(one_way(graph, down & last).sum()) * EAGER / MEMORY * 1e9)
    if graph.case.get("offload") == "optimizer":
        share = _trained(graph) / int(graph.case.get("world", 1))
        return round(share * (FUSED / MEMORY + 2 * HALF / rate) * 1e9)
    return 0


def _trained(graph: StepGraph) -> int:
    """Elements of the model that are trained; stage 3 leaves none of them whole in the graph."""
    from graph.models.sources import build

    return sum(one.numel() for one in build(Case.of(graph.case)).module.parameters() if one.requires_grad)
