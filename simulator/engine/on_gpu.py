"""A trace as it is on a GPU: with what libraries take there, and addresses as CUDA's driver gives them.

Recordings, and what is compared with them, have libraries that do nothing. On a real H100 (tests/data/gpu) cuBLAS has a
workspace for autograd's thread too, plans of cuDNN's attention have one, and the driver takes address space downwards;
the allocator chooses among blocks of one size by address, so that this decides on reserved memory.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from traces.model import Events, Trace


def on_gpu(trace: Trace) -> Trace:
    """The same events with `gpu_bytes` for `bytes`, on devices whose addresses are the driver's.

    A trace that has addresses of its own (`recorded`, `bump`) keeps them. Source: 263 trainings on an H100 with PyTorch
    2.11, of which 241 have the same peaks of allocated and reserved bytes.
    """
    ranks = tuple(replace(entry, events=_there(entry.events)) for entry in trace.ranks)
    devices = (replace(one, placement="driver") if one.placement == "first-fit" else one for one in trace.devices)
    return replace(trace, ranks=ranks, devices=tuple(devices))


def _there(events: Events) -> Events:
    if "gpu_bytes" not in events.columns:
        return events
    size = events.ints("gpu_bytes")
    return events.with_columns(bytes=np.where(size >= 0, size, events.ints("bytes")))
