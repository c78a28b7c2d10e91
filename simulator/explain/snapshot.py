"""The out-of-memory of a torch memory snapshot: its failing event, and the state that the snapshot ends with."""

from __future__ import annotations

from typing import Any, Final

from simulator.explain.message import Held, OutOfMemory
from traces.errors import TraceError
from traces.snapshot.layout import ALLOC, OOM, DeviceRecord, read_layout
from traces.snapshot.unpickle import load_builtins

#: Stacks that are kept, those that hold most.
MOST_STACKS: Final = 12
_UNKNOWN: Final = "asked for before the recording began, or without a stack"


def read(data: bytes, where: str) -> tuple[OutOfMemory, ...]:
    """The last failure of every device of a snapshot, as pickled; `where` names the file in errors.

    What tensors hold is that of the snapshot's end. Raises TraceError where `data` is no memory snapshot, or nothing
    fails in it.
    """
    return of_snapshot(load_builtins(data, where), where)


def of_snapshot(snapshot: Any, where: str) -> tuple[OutOfMemory, ...]:
    """As `read`, of an unpickled snapshot."""
    layout = read_layout(snapshot, where, fill=False)
    conf = layout.settings.conf if layout.settings is not None else ""
    found = tuple(_failure(device, conf) for device in layout.devices if OOM in device.entries.kind)
    if not found:
        raise TraceError(f"{where}: no allocation fails in this snapshot; `run` and `verify` say what it holds")
    return found


def _failure(device: DeviceRecord, conf: str) -> OutOfMemory:
    entries = device.entries
    place = max(i for i, kind in enumerate(entries.kind) if kind == OOM)
    free = [(segment.pool, block.size) for segment in device.segments for block in segment.blocks
            if block.state == "inactive"]  # fmt: skip
    pieces = [size for pool, size in free if pool == (0, 0)]
    reserved = sum(segment.size for segment in device.segments)
    return OutOfMemory(
        source="snapshot",
        party="PyTorch",
        said=f"entry {entries.entry[place]} of device {device.device}: {entries.name[place] or 'no stack recorded'}",
        times=entries.kind.count(OOM),
        gpu=device.device,
        conf=conf,
        asked=entries.size[place],
        free=entries.address[place],
        allocated=reserved - sum(pieces),
        unallocated=sum(pieces),
        private=sum(size for pool, size in free if pool != (0, 0)) or None,
        largest=max(pieces, default=0),
        tensors=_tensors(device),
    )


def _tensors(device: DeviceRecord) -> tuple[Held, ...]:
    """Live bytes at the end by the stack that asked for them, most first."""
    entries = device.entries
    names = {entries.address[i]: entries.name[i] for i, kind in enumerate(entries.kind) if kind == ALLOC}
    held: dict[str, list[int]] = {}
    for segment in device.segments:
        for block in segment.blocks:
            if block.state != "inactive":
                held.setdefault(names.get(block.address) or _UNKNOWN, []).append(block.size)
    found = sorted((Held(name, len(sizes), sum(sizes)) for name, sizes in held.items()), key=lambda one: -one.bytes)
    return tuple(found[:MOST_STACKS])
