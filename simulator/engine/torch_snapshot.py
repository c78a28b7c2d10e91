"""The final state of a replay in the layout of PyTorch's memory snapshots, its log as the trace.

Follows torch/cuda/memory.py and the viewer's rules: protocol-4 pickles of plain builtins (see traces.snapshot.writer).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from simulator.allocator import layout as at
from simulator.allocator.conf import AllocatorSettings
from simulator.engine.machine import Machine
from simulator.engine.result import LOG_KINDS, RECORDED, EventLog
from traces.model import Strings

_STATES: Final = {"allocated": "active_allocated", "pending_free": "active_pending_free", "inactive": "inactive"}


def torch_snapshot(machine: Machine, log: EventLog, device: int = 0) -> dict[str, Any]:
    """Segments, trace and settings of one rank as device `device`, as plain builtins."""
    return {
        "segments": [_segment(segment, device) for segment in machine.segments()],
        "device_traces": [[] for _ in range(device)] + [_entries(machine, log)],
        "allocator_settings": _settings(machine.settings),
        "external_annotations": [],
    }


def _segment(segment: Mapping[str, Any], device: int) -> dict[str, Any]:
    """One segment of `Machine.segments` as torch writes it."""
    address = int(segment["address"])
    blocks = []
    for size, requested, state, _ in segment["blocks"]:
        blocks.append(
            {"address": address, "size": size, "requested_size": requested, "state": _STATES[state], "frames": []}
        )
        address += size
    return {
        "device": device,
        "address": segment["address"],
        "total_size": segment["total_size"],
        "allocated_size": segment["allocated_size"],
        "active_size": segment["active_size"],
        "requested_size": segment["requested_size"],
        "stream": segment["stream"],
        "segment_type": "large" if segment["large"] else "small",
        "segment_pool_id": (0, segment["pool_id"]),
        "is_expandable": segment["expandable"],
        "frames": [],
        "blocks": blocks,
    }


def _entries(machine: Machine, log: EventLog) -> list[dict[str, Any]]:
    """The log's trace entries; an allocation carries its name as a frame, its category as `category`."""
    events = machine.program.events
    names, categories = events.strings("name"), events.strings("category")
    entries: list[dict[str, Any]] = []
    columns = (log.kind.tolist(), log.event.tolist(), log.address.tolist(), log.bytes.tolist(), log.stream.tolist())
    for kind, event, address, size, stream in zip(*columns, strict=True):
        action = RECORDED.get(LOG_KINDS[kind])
        if action is None:
            continue
        place = "device_free" if action == "oom" else "addr"
        entry: dict[str, Any] = {
            "action": action,
            place: address,
            "size": size,
            "stream": stream,
            "time_us": event,
            "compile_context": "N/A",
            "user_metadata": "",
        }
        if action == "alloc":
            _label(entry, names, categories, event)
        entries.append(entry)
    return entries


def _label(entry: dict[str, Any], names: Strings, categories: Strings, event: int) -> None:
    """Give an allocation's entry the tensor's name and category."""
    name, category = names.get(event), categories.get(event)
    if name is not None:
        entry["frames"] = [{"filename": name, "line": 0, "name": category or "unknown"}]
        entry["user_metadata"] = name
    if category is not None:
        entry["category"] = category


def _settings(settings: AllocatorSettings) -> dict[str, Any]:
    """`allocator_settings` of a snapshot."""
    unlimited = settings.max_split_size >= at.UNLIMITED
    return {
        "PYTORCH_CUDA_ALLOC_CONF": settings.conf,
        "max_split_size": -1 if unlimited else settings.max_split_size,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "pinned_num_register_threads": settings.pinned_num_register_threads,
        "release_lock_on_cudamalloc": settings.release_lock_on_cudamalloc,
        "pinned_use_cuda_host_register": settings.pinned_use_cuda_host_register,
        "graph_capture_record_stream_reuse": settings.graph_capture_record_stream_reuse,
        "roundup_power2_divisions": {str(1 << i): value for i, value in enumerate(settings.roundup_power2_divisions)},
    }
