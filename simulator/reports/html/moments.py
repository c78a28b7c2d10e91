"""What the page shows of a `Picture`: categories over time, the allocator at chosen moments, the tree of modules.

Columns are packed as in `html_series`. Everything is bounded: blocks beyond a budget are merged with their neighbours,
small modules of the tree are counted together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from simulator.engine.result import Blocks, Moment, Picture, RankResult, Segments
from simulator.reports.html.pieces import colour, stacked
from simulator.reports.html.series import pack, shorten
from traces.model import Int64Array

#: Parts of a node smaller than this share of the peak are not listed one by one.
LEAST_SHARE: Final = 0.0005
#: Parts of a node that is open at first.
MAX_OPEN: Final = 16
#: How much of a block's name is kept.
NAME_LENGTH: Final = 90
#: Codes of blocks beside the categories.
FREE: Final = -1
PENDING: Final = -2
_LAYER: Final = re.compile(r"[0-9]{1,9}")
#: A path is not taken apart further.
MAX_DEPTH: Final = 24
_OPERATOR: Final = re.compile(r"(?:aten|prims|c10d|_c10d_functional|torch\w*|cuda|nccl)(?:\.|::|$)")


@dataclass(frozen=True, slots=True)
class Room:
    """How much of one rank a page shows at most; what is smaller is merged, counted together, or has no name.

    `blocks` are those of one moment; `nodes` those of the tree of modules.
    """

    moments: int = 40
    blocks: int = 5_000
    names: int = 6_000
    nodes: int = 1_500

    @classmethod
    def of(cls, ranks: int, budget: float) -> Room:
        """The room of one of `ranks` in a page that may be `budget` (at most 1) of its usual size."""
        whole = cls()

        def part(most: int, page: int, least: int) -> int:
            return max(least, round(budget * min(most, page // ranks)))

        return cls(
            moments=part(whole.moments, 200, 2),
            blocks=part(whole.blocks, 10_000, 50),
            names=part(whole.names, 12_000, 20),
            nodes=part(whole.nodes, 3_000, 10),
        )


# Categories over time -------------------------------------------------------------------------------------------------


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


# The allocator --------------------------------------------------------------------------------------------------------


def moments(picture: Picture, room: Room) -> dict[str, Any]:
    """The moments for `blocks.js`: those of note where there is not room for all."""
    chosen = _chosen(picture, room.moments)
    shown = [_cells(moment, room.blocks) for moment in chosen]
    names = _names(picture, shown, room.names)
    return {
        "categories": list(picture.categories),
        "names": [shorten(picture.names[code], NAME_LENGTH) for code in names.tolist()],
        "list": [_document(moment, cells, names, picture) for moment, cells in zip(chosen, shown, strict=True)],
    }


def _chosen(picture: Picture, most: int) -> list[Moment]:
    """At most `most` moments: the overall peaks and failures, then the other peaks, then the ends."""
    ranks = [
        0
        if {"peak allocated", "peak reserved", "out of memory"} & set(moment.labels)
        else 1 + (not moment.labels[0].startswith("peak"))
        for moment in picture.moments
    ]
    kept = sorted(sorted(range(len(ranks)), key=lambda place: (ranks[place], place))[:most])
    return [picture.moments[place] for place in kept]


@dataclass(frozen=True)
class _Cells:
    """Blocks and gaps of a moment in the order of addresses; they fill the segments (columns of equal length)."""

    bytes: Int64Array
    kind: Int64Array  # category, FREE or PENDING
    name: Int64Array
    count: Int64Array  # how many blocks were merged to one


def _cells(moment: Moment, most: int) -> _Cells:
    """Blocks and the gaps between them, small neighbours merged until they are few enough."""
    blocks, segments = moment.blocks, moment.segments
    edges = np.concatenate([segments.address, segments.address + segments.bytes])
    marks = np.unique(np.concatenate([edges, blocks.address, blocks.address + blocks.bytes]))
    if len(marks) < 2:
        empty = np.zeros(0, dtype=np.int64)
        return _Cells(empty, empty, empty, empty)
    start, sizes = marks[:-1], np.diff(marks)
    kind, name = _held(blocks, start)
    inside = _within(segments, start)
    cells = _Cells(sizes[inside], kind[inside], name[inside], np.ones(int(inside.sum()), dtype=np.int64))
    return _merged(cells, np.searchsorted(segments.address, start[inside], side="right"), most)


def _held(blocks: Blocks, start: Int64Array) -> tuple[Int64Array, Int64Array]:
    """What lies at the addresses `start`: kind and name."""
    if not len(blocks.address):
        return np.full(len(start), FREE, dtype=np.int64), np.full(len(start), -1, dtype=np.int64)
    at = np.searchsorted(blocks.address, start, side="right") - 1
    place = np.maximum(at, 0)
    used = (at >= 0) & (start < blocks.address[place] + blocks.bytes[place])
    kinds = np.where(blocks.pending, PENDING, blocks.category)
    return np.where(used, kinds[place], FREE), np.where(used, blocks.name[place], -1)


def _within(segments: Segments, start: Int64Array) -> npt.NDArray[np.bool_]:
    at = np.searchsorted(segments.address, start, side="right") - 1
    place = np.maximum(at, 0)
    return np.asarray((at >= 0) & (start < segments.address[place] + segments.bytes[place]))


def _merged(cells: _Cells, segment: Int64Array, most: int) -> _Cells:
    """Neighbours of one kind in one segment merged, where each is small, until at most about `most` are left."""
    least = 0
    while len(cells.bytes) > max(most, int(segment.max(initial=0))) and least < 1 << 40:
        least = max(4096, least * 4)
        small = cells.bytes < least
        joins = small[1:] & small[:-1] & (segment[1:] == segment[:-1])
        if least < 1 << 24:
            joins &= cells.kind[1:] == cells.kind[:-1]
        starts = np.concatenate([[0], np.flatnonzero(~joins) + 1])
        one = np.diff(np.append(starts, len(cells.bytes))) == 1
        cells = _Cells(
            np.add.reduceat(cells.bytes, starts),
            cells.kind[starts],
            np.where(one, cells.name[starts], -1),
            np.add.reduceat(cells.count, starts),
        )
        segment = segment[starts]
    return cells


def _names(picture: Picture, shown: list[_Cells], most: int) -> Int64Array:
    """The names that the page has: all, or those of the largest blocks."""
    largest = np.zeros(len(picture.names), dtype=np.int64)
    for cells in shown:
        known = cells.name >= 0
        np.maximum.at(largest, cells.name[known], cells.bytes[known])
    used = np.flatnonzero(largest)
    order = used[np.argsort(-largest[used], kind="stable")][:most]
    return np.sort(order)


def _document(moment: Moment, cells: _Cells, names: Int64Array, picture: Picture) -> dict[str, Any]:
    place = np.minimum(np.searchsorted(names, cells.name), max(0, len(names) - 1))
    named = names[place] == cells.name if len(names) else np.zeros(len(cells.name), dtype=np.bool_)
    unit = int(np.gcd.reduce(cells.bytes, initial=0)) or 1
    live = ~moment.blocks.pending
    sums = np.bincount(
        moment.blocks.category[live], weights=moment.blocks.bytes[live], minlength=len(picture.categories)
    )
    return {
        "labels": [shorten(label, 60) for label in moment.labels],
        "event": moment.event,
        "phase": None if moment.phase is None else shorten(moment.phase, 60),
        "allocated": moment.allocated,
        "active": moment.active,
        "reserved": moment.reserved,
        "byCategory": [int(total) for total in sums.tolist()],
        "segments": {
            "count": len(moment.segments.bytes),
            "bytes": pack(moment.segments.bytes),
            "stream": pack(moment.segments.stream),
            "expandable": pack(moment.segments.expandable.astype(np.int64)),
        },
        "blocks": {
            "count": len(cells.bytes),
            "unit": unit,
            "bytes": pack(cells.bytes // unit),
            "kind": pack(cells.kind),
            "name": pack(np.where(named, place, -1)),
            "merged": pack(cells.count),
        },
    }


# The tree of modules --------------------------------------------------------------------------------------------------


@dataclass
class Node:
    """A module, or a tensor in it: bytes of its blocks by category, how many they are, and its parts by name."""

    bytes: int = 0
    count: int = 0
    by_category: dict[str, int] = field(default_factory=dict)
    parts: dict[str, Node] = field(default_factory=dict)

    def add(self, category: str, total: int, count: int) -> None:
        """Count blocks in."""
        self.bytes += total
        self.count += count
        self.by_category[category] = self.by_category.get(category, 0) + total


def tree_of(picture: Picture, moment: Moment) -> Node:
    """What was alive at a moment by module path; what belongs to no module stands under its operator's name."""
    blocks = moment.blocks
    live = ~blocks.pending
    keys = np.stack([blocks.name[live], blocks.category[live]])
    pairs, inverse, counts = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
    totals = np.bincount(inverse.ravel(), weights=blocks.bytes[live], minlength=pairs.shape[1]).astype(np.int64)
    root = Node()
    for (name, code), total, count in zip(pairs.T.tolist(), totals.tolist(), counts.tolist(), strict=True):
        category = picture.categories[code]
        node = root
        node.add(category, total, count)
        for part in path_of(picture.names[name] if name >= 0 else ""):
            node = node.parts.setdefault(part, Node())
            node.add(category, total, count)
    return root


def path_of(name: str) -> list[str]:
    """The path in the tree of an allocation's name: `a.b: aten.mm` is `a`, `b`, `aten.mm`; `a.b.weight` its parts."""
    module, colon, what = name.partition(": ")
    if not name:
        return ["(no name)"]
    if _OPERATOR.match(module):
        return ["(no module)", name]
    return [*_split(module), *([what] if colon else [])]


def _split(module: str) -> list[str]:
    return [part for part in module.split(".", MAX_DEPTH) if part] or [module]


@dataclass(frozen=True, slots=True)
class Branch:
    """A line of the tree, with what is inside; `largest` has the bytes of the largest module beside it."""

    name: str
    bytes: int
    count: int
    categories: tuple[tuple[str, int], ...] = ()
    largest: int = 0
    inner: tuple[Branch, ...] = ()
    open: bool = False

    @property
    def words(self) -> str:
        """The shares of categories."""
        return ", ".join(f"{what.replace('_', ' ')} {total / self.bytes:.0%}" for what, total in self.categories)

    @property
    def bar(self) -> str:
        """The bar of categories."""
        return stacked([(colour(what), total) for what, total in self.categories], self.largest)


def tree(rank: RankResult, room: Room) -> tuple[Branch, ...]:
    """The tree at the peak of allocated bytes; nothing without a picture."""
    picture = rank.picture
    if picture is None:
        return ()
    moment = next((one for one in picture.moments if "peak allocated" in one.labels), None)
    if moment is None or not len(moment.blocks.address):
        return ()
    root = tree_of(picture, moment)
    return tuple(_branches(root, root.bytes, 0, [room.nodes]))


def _branches(node: Node, whole: int, depth: int, left: list[int]) -> Iterator[Branch]:
    ordered = sorted(node.parts.items(), key=lambda item: -item[1].bytes)
    largest = ordered[0][1].bytes if ordered else 0
    shown = [item for item in ordered if item[1].bytes >= LEAST_SHARE * whole][: max(0, left[0])]
    left[0] -= len(shown)
    if all(_LAYER.fullmatch(name) for name, _ in shown):  # layers, in their order
        shown.sort(key=lambda item: int(item[0]))
    for name, part in shown:
        yield _branch(name, part, (whole, largest), depth, left)
    if rest := [part for _, part in ordered[len(shown) :]]:  # the smallest
        yield Branch(f"{len(rest):,} smaller", sum(one.bytes for one in rest), sum(one.count for one in rest))


def _branch(name: str, node: Node, scale: tuple[int, int], depth: int, left: list[int]) -> Branch:
    """One module; `scale` has the bytes of the whole tree and of its largest sibling."""
    whole, largest = scale
    while len(node.parts) == 1:  # a chain is one line
        (below, only), *_ = node.parts.items()
        name, node = (f"{name}: {below}" if not only.parts and "." in below else f"{name}.{below}"), only
    inner = list(_branches(node, whole, depth + 1, left))
    own = node.bytes - sum(part.bytes for part in node.parts.values())
    if inner and own:
        inner.insert(0, Branch("(itself)", own, node.count - sum(part.count for part in node.parts.values())))
    start = depth == 0 and node.bytes >= whole / 4 and len(node.parts) <= MAX_OPEN
    categories = sorted(node.by_category.items(), key=lambda item: -item[1])
    return Branch(name, node.bytes, node.count, tuple(categories), largest, tuple(inner), start)
