"""What a page knows of a `Picture`: categories over time, and the life of every block and segment.

The lives are one string: base64 of a zlib stream of a little-endian 32-bit length, so many bytes of JSON, and the
columns (`series.varints`), each as long as the JSON says. So `memory.js` finds what was alive after any event.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from simulator.engine.result import Blocks, Picture, RankResult, Segments
from simulator.reports.html.series import pack, shorten, varints
from traces.model import Int64Array
from traces.snapshot.names import FOREIGN, FRAME

#: How much of a name or of a frame is kept.
_LENGTH: Final = 200
#: Of zlib: higher ones take twice as long for a twentieth less.
_LEVEL: Final = 4


def categories_over_time(rank: RankResult, picture: Picture, index: Int64Array) -> list[Mapping[str, Any]]:
    """Allocated bytes of every category after the events `index`, packed; those that are never there are left out."""
    delta = np.diff(rank.timeline.allocated, prepend=np.int64(sum(picture.before)))
    found: list[Mapping[str, Any]] = []
    for code, name in enumerate(picture.categories):
        mine = picture.changed == code
        if name == "unknown":
            mine = mine | (picture.changed < 0)  # what no allocation of the trace explains
        values = (picture.before[code] + np.cumsum(np.where(mine, delta, 0)))[index]
        if values.any():
            unit = int(np.gcd.reduce(values)) or 1
            found.append({"name": name, "unit": unit, "bytes": pack(values // unit)})
    return found


def lives(rank: RankResult, picture: Picture) -> str:
    """The lives of all blocks and segments of a rank."""
    kinds, kind = _kinds(picture.blocks)
    stacks, used = _used(picture.frames, kinds[:, 2])
    frames = sorted({frame for stack in stacks for frame in stack})
    place = {frame: number for number, frame in enumerate(frames)}
    names, named = _used_names(picture.names, kinds[:, 1])
    groups = {
        "blocks": {**_lived(picture.blocks, rank.events), **_sizes(picture.blocks), "kind": kind},
        "segments": {
            **_lived(picture.segments, rank.events),
            "bytes": picture.segments.bytes >> 9,
            "stream": picture.segments.stream,
            "expandable": picture.segments.expandable.astype(np.int64),
        },
        "kinds": {"category": kinds[:, 0], "name": named, "stack": used},
    }
    head = {
        "events": rank.events,
        "moments": [{"labels": [shorten(one, 60) for one in m.labels], "event": m.event} for m in picture.moments],
        "categories": picture.categories,
        "names": [shorten(name, _LENGTH) for name in names],
        "frames": [shorten(frame, _LENGTH) for frame in frames],
        "foreign": [int(_is_foreign(frame)) for frame in frames],
        "stacks": [[place[frame] for frame in stack] for stack in stacks],
    }
    return _written(head, groups)


def _written(head: dict[str, Any], groups: Mapping[str, Mapping[str, Int64Array]]) -> str:
    packed = {group: {name: varints(column) for name, column in each.items()} for group, each in groups.items()}
    head["columns"] = {
        group: {
            "count": len(next(iter(groups[group].values()))),
            "bytes": {name: len(one) for name, one in each.items()},
        }
        for group, each in packed.items()
    }
    said = json.dumps(head, separators=(",", ":")).encode("ascii")
    columns = [one for each in packed.values() for one in each.values()]
    return base64.b64encode(zlib.compress(b"".join([len(said).to_bytes(4, "little"), said, *columns]), _LEVEL)).decode(
        "ascii"
    )


def _lived(held: Blocks | Segments, events: int) -> dict[str, Int64Array]:
    """Addresses, births, and how long it takes from them to the end; every block lies on a multiple of 512 bytes."""
    return {"address": held.address >> 9, "born": held.born, "life": np.minimum(held.died, events) - held.born}


def _sizes(blocks: Blocks) -> dict[str, Int64Array]:
    return {
        "bytes": blocks.bytes >> 9,
        "slack": blocks.bytes - blocks.requested,
        "wait": blocks.died - np.minimum(blocks.freed, blocks.died),
    }


def _kinds(blocks: Blocks) -> tuple[Int64Array, Int64Array]:
    """The distinct triples of category, name and frames, and which of them each block is."""
    names, stacks = (int(column.max(initial=-1)) + 2 for column in (blocks.name, blocks.frames))
    keys, kind = np.unique(
        (blocks.category * names + blocks.name + 1) * stacks + blocks.frames + 1, return_inverse=True
    )
    rest, stack = np.divmod(keys, stacks)
    category, name = np.divmod(rest, names)
    return np.stack([category, name - 1, stack - 1], axis=1), kind.astype(np.int64)


def _used_names(table: Sequence[str], codes: Int64Array) -> tuple[list[str], Int64Array]:
    """The texts of a table that are in use, and the codes in them."""
    known = np.unique(codes[codes >= 0])
    return [table[code] for code in known.tolist()], np.where(codes < 0, -1, np.searchsorted(known, codes))


def _used(table: Sequence[str], codes: Int64Array) -> tuple[list[list[str]], Int64Array]:
    texts, used = _used_names(table, codes)
    return [text.split("\n") for text in texts], used


def _is_foreign(frame: str) -> bool:
    """Whether a frame is a library's that works for the user's code, or of no file."""
    found = FRAME.fullmatch(frame)
    return found is None or FOREIGN.search(found[1]) is not None
