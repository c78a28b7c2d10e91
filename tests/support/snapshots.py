"""The recorded snapshots in `tests/data/snapshots` (see the README there), for the tests that need real ones."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import Any

from simulator.snapshots.reader import read_recording, snapshot_to_recording
from tests.places import DATA
from traces.model import Trace
from traces.snapshot.unpickle import load_builtins

FOLDER = DATA / "snapshots"
NAMES = sorted(path.name.removesuffix(".pickle.gz") for path in FOLDER.glob("*.pickle.gz"))
RELEASES = [f"2.{minor}" for minor in range(1, 16)]


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.pickle.gz"


@functools.cache
def data_of(name: str) -> bytes:
    """The pickle, decompressed."""
    return gzip.decompress(path_of(name).read_bytes())


def snapshot_of(name: str) -> Any:
    """A fresh copy of the snapshot's dicts."""
    return load_builtins(data_of(name), name)


@functools.cache
def memory_stats() -> dict[str, dict[str, dict[str, int]]]:
    """What torch's own statistics said at the end of a recording, by name and device."""
    stats: dict[str, dict[str, dict[str, int]]] = json.loads((FOLDER / "memory_stats.json").read_text())
    return stats


def cut(snapshot: Any, dropped: list[int]) -> Any:
    """The snapshot as a ring buffer would have left it, without the first `dropped` entries of each device."""
    traces = [entries[count:] for entries, count in zip(snapshot["device_traces"], dropped, strict=True)]
    return {**snapshot, "device_traces": traces}


def tiny(**changes: Any) -> dict[str, Any]:
    """A snapshot written by hand: two allocations in a 2 MiB segment, one of them freed."""
    base = 0x7F0000000000
    entries = [
        {"action": "segment_alloc", "addr": base, "size": 2 << 20, "stream": 0, "time_us": 1},
        {"action": "alloc", "addr": base, "size": 1000, "stream": 0, "time_us": 2},
        {"action": "alloc", "addr": base + 1024, "size": 600, "stream": 0, "time_us": 3},
        {"action": "free_requested", "addr": base, "size": 1000, "stream": 0, "time_us": 4},
        {"action": "free_completed", "addr": base, "size": 1000, "stream": 0, "time_us": 4},
    ]
    blocks = [
        {"address": base, "size": 1024, "requested_size": 1000, "state": "inactive"},
        {"address": base + 1024, "size": 1024, "requested_size": 600, "state": "active_allocated"},
        {"address": base + 2048, "size": (2 << 20) - 2048, "requested_size": 0, "state": "inactive"},
    ]
    segment = {
        "device": 0,
        "address": base,
        "total_size": 2 << 20,
        "stream": 0,
        "segment_type": "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": blocks,
    }
    return {"segments": [segment], "device_traces": [entries], **changes}


def read_snapshot(path: Path, *, release: str | None = None) -> Trace:
    """The trace of a snapshot file."""
    return read_recording(path, release=release).trace


def snapshot_to_trace(snapshot: Any, *, where: str, release: str | None = None) -> Trace:
    """The trace of an unpickled snapshot."""
    return snapshot_to_recording(snapshot, where=where, release=release).trace
