"""Memory over time as text for a page: thinned without losing a peak, then packed into a few bytes a point.

Every number is an integer. A column becomes differences, zigzag-coded (0, -1, 1, -2 ... as 0, 1, 2, 3 ...), each a
little-endian base-128 varint, and the whole base64: `page.js` reads it back. Byte columns are divided by their
common divisor first (512 in practice), and `active` is kept as its excess over `allocated`, mostly 0: about six
bytes a point in all.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from traces.model import Int64Array
from traces.timelines.downsampling import downsample
from traces.timelines.timeline import PhaseSpan, Region, Timeline

#: At most so many out-of-memory marks of a rank are drawn; the text counts all of them.
MAX_OOMS: Final = 500
_LONGEST_VARINT: Final = 9  # 63 bits


@dataclass(frozen=True)
class Series:
    """What `page.js` draws of one rank: `document` is plain JSON, `points` how many events it holds, `index` which."""

    document: Mapping[str, Any]
    points: int
    index: Int64Array


def series(timeline: Timeline, marks: tuple[int, ...], max_points: int) -> Series:
    """Pack `timeline` for the page in about `max_points` points; the events `marks` are among them."""
    phases = timeline.phases if len(timeline.phases) <= max_points // 4 else ()  # else nobody could tell them apart
    ooms = timeline.ooms[:MAX_OOMS]
    index = _kept(timeline, phases, (*marks, *ooms), max_points)
    allocated = timeline.allocated[index]
    above = timeline.active[index] - allocated
    reserved = timeline.reserved[index]
    unit = _common_divisor(allocated, above, reserved)
    time = timeline.time_ns
    names = {name: code for code, name in enumerate(dict.fromkeys(phase.name for phase in phases))}
    document = {
        "events": len(timeline),
        "points": len(index),
        "unit": unit,
        "limit": timeline.limit_bytes,
        "event": pack(index),
        "allocated": pack(allocated // unit),
        "above": pack(above // unit),
        "reserved": pack(reserved // unit),
        "time": None if time is None or not time.any() else pack(time[index]),
        "names": [shorten(name) for name in names],
        "phases": {
            "count": len(phases),
            "name": pack(_int64(names[phase.name] for phase in phases)),
            "step": pack(_int64(-1 if phase.step is None else phase.step for phase in phases)),
            "start": pack(_int64(phase.start for phase in phases)),
            "stop": pack(_int64(phase.stop for phase in phases)),
        },
        "regions": _regions(timeline.regions if len(timeline.regions) <= max_points // 4 else ()),
        "phasesLeftOut": len(timeline.phases) - len(phases),
        "ooms": list(ooms),
    }
    return Series(document, len(index), index)


def _regions(regions: tuple[Region, ...]) -> Mapping[str, Any]:
    names = {name: code for code, name in enumerate(dict.fromkeys(region.name for region in regions))}
    columns = {
        "name": (names[region.name] for region in regions),
        "start": (region.start for region in regions),
        "stop": (region.stop for region in regions),
        "depth": (region.depth for region in regions),
    }
    packed = {name: pack(_int64(column)) for name, column in columns.items()}
    return {"count": len(regions), "names": [shorten(name, 80) for name in names], **packed}


def shorten(text: str, length: int = 160) -> str:
    """`text` with its middle left out where it is longer than `length` characters."""
    if len(text) <= length:
        return text
    half = (length - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def pack(values: Int64Array) -> str:
    """The varints of `values` as base64."""
    return base64.b64encode(varints(values)).decode("ascii")


def varints(values: Int64Array) -> bytes:
    """The differences of `values` as varints (see the module's docstring); the first from 0."""
    delta = np.diff(values, prepend=np.int64(0))
    zigzag = ((delta << 1) ^ (delta >> 63)).view(np.uint64)
    lengths = np.ones(len(zigzag), dtype=np.int64)
    for size in range(1, _LONGEST_VARINT + 1):
        lengths += zigzag >= np.uint64(1 << 7 * size)
    ends = np.cumsum(lengths)
    out = np.zeros(int(ends[-1]) if len(ends) else 0, dtype=np.uint8)
    starts = ends - lengths
    for size in range(int(lengths.max(initial=0))):
        has = lengths > size
        low = (zigzag[has] >> np.uint64(7 * size)).astype(np.uint8) & np.uint8(0x7F)
        more = (lengths[has] > size + 1).astype(np.uint8) << np.uint8(7)
        out[starts[has] + size] = low | more
    return out.tobytes()


def _kept(timeline: Timeline, phases: tuple[PhaseSpan, ...], marks: tuple[int, ...], max_points: int) -> Int64Array:
    """The events to draw: those that keep all peaks, and every phase boundary and mark."""
    count = len(timeline)
    edges = [edge for phase in phases for edge in (phase.start, phase.stop)]
    fixed: npt.NDArray[np.int64] = np.array([*edges, *marks], dtype=np.int64)
    fixed = fixed[(fixed >= 0) & (fixed < count)]
    peaks = downsample(replace(timeline, phases=(), ooms=()), max(1, max_points))
    return np.unique(np.concatenate([peaks, fixed]))


def _int64(values: Iterable[int]) -> Int64Array:
    return np.fromiter(values, dtype=np.int64)


def _common_divisor(*columns: Int64Array) -> int:
    divisor = 0
    for column in columns:
        divisor = int(np.gcd.reduce(column, initial=divisor))
    return divisor or 1
