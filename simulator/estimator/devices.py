"""GPUs by name as devices of a trace, with the total that cudaMemGetInfo shows on each."""

from __future__ import annotations

from graph.hardware.gpus import gpu
from traces.model import DEFAULT_DEVICE, Device


def device(name: str) -> Device:
    """The device called `name`, as `graph.hardware.gpus.gpu` finds it; ConfigError if none is."""
    found = gpu(name)
    return DEFAULT_DEVICE if found.name == DEFAULT_DEVICE.name else Device(found.name, found.total_bytes)
