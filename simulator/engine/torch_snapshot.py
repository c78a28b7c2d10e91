"""The final state of a replay in the layout of PyTorch's memory snapshots, its log as the trace.

Follows torch/cuda/memory.py and the viewer's rules: protocol-4 pickles of plain builtins (see traces.snapshot.writer).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from simulator.allocator import layout as at
from simulator.allocator.conf import AllocatorSettings
from simulator.engine.machine import Machine
from simulator.engine.result import LOG_KINDS, RECORDED, EventLog
from traces.model import Events, Op
from traces.snapshot.names import FRAME

Frame = dict[str, str | int]

_UNKNOWN: Final = "unknown"
_STATES: Final = {"allocated": "active_allocated", "pending_free": "active_pending_free", "inactive": "inactive"}


def torch_snapshot(machine: Machine, log: EventLog, device: int = 0) -> dict[str, Any]:
    """Segments, trace and settings of one rank as device `device`, as plain builtins."""
    entries = _entries(machine, log)
    frames = {entry["addr"]: entry.get("frames", []) for entry in entries if entry["action"] == "alloc"}
    return {
        "segments": [_segment(segment, device, frames) for segment in machine.segments()],
        "device_traces": [[] for _ in range(device)] + [entries],
        "allocator_settings": _settings(machine.settings),
        "external_annotations": _annotations(machine.program.events, device),
    }


def _segment(segment: Mapping[str, Any], device: int, frames: Mapping[int, list[Frame]]) -> dict[str, Any]:
    """One segment of `Machine.segments` as torch writes it; `frames` are those of the last allocation at an address."""
    address = int(segment["address"])
    blocks = []
    for size, requested, state, _ in segment["blocks"]:
        stack = [] if state == "inactive" else frames.get(address, [])
        blocks.append(
            {"address": address, "size": size, "requested_size": requested, "state": _STATES[state], "frames": stack}
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
    """The log's trace entries, with what the trace says of allocations."""
    label = _Labels(machine.program.events)
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
            "frames": [],
            "compile_context": "N/A",
            "user_metadata": "",
        }
        if action == "alloc":
            entry.update(label.of(event))
        elif label.categories:
            entry["category"] = _UNKNOWN  # the viewer fails at a trace whose categories lack it
        entries.append(entry)
    return entries


def _annotations(events: Events, device: int) -> list[dict[str, Any]]:
    """The regions of a trace, as torch notes `record_function`; time is counted in events, as in the entries."""
    names = events.strings("name")
    places = np.flatnonzero((events.op == Op.REGION_BEGIN) | (events.op == Op.REGION_END)).tolist()
    stages = ("START" if events.op[place] == Op.REGION_BEGIN else "END" for place in places)
    return [
        {"stage": stage, "name": names.get(place), "device": device, "time_us": place}
        for place, stage in zip(places, stages, strict=True)
    ]


class _Labels:
    """What entries of allocations say beside the numbers: name, category, and frames, one list for each stack."""

    def __init__(self, events: Events) -> None:
        self._names, self._categories = events.strings("name"), events.strings("category")
        self.categories = bool(self._categories.table)
        self._stacks = events.strings("frames")
        self._frames: dict[str, Frame] = {}
        self._known: dict[int, list[Frame]] = {}

    def of(self, event: int) -> dict[str, Any]:
        """The fields of the allocation of an event. One without a stack has its name and category as a frame."""
        found: dict[str, Any] = {}
        name, category = self._names.get(event), self._categories.get(event)
        if name is not None:
            found = {"frames": [_frame(name, 0, category or _UNKNOWN)], "user_metadata": name}
        if category is not None:
            found["category"] = category
        stack = int(self._stacks.codes[event])
        if stack >= 0:
            found["frames"] = self._known[stack] = self._known.get(stack) or self._read(self._stacks.table[stack])
        return found

    def _read(self, stack: str) -> list[Frame]:
        return [self._frames.setdefault(line, _frame_of(line)) for line in stack.split("\n")]


def _frame(filename: str, line: int, name: str) -> Frame:
    return {"filename": filename, "line": line, "name": name}


def _frame_of(text: str) -> Frame:
    """A line of the field `frames`; of one that is no `file:line:function`, all is the function."""
    found = FRAME.fullmatch(text)
    return _frame(found[1], int(found[2]), found[3]) if found else _frame("", 0, text)


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
