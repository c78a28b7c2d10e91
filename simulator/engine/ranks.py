"""Sets of ranks as people write them: `0,3-5` for an option, `0-3` for a row of a table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from simulator.engine.result import Result
from traces.errors import ConfigError

_PART: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)


def parse_ranks(text: str, known: Iterable[int]) -> frozenset[int]:
    """The ranks that `text` (such as `0,3-5`) names; ConfigError if it is malformed or names one not in `known`."""
    ranks = set(known)
    chosen: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"ranks {text[:60]!r} are not understood: write numbers and ranges, as in 0,3-5")
        first = int(match[1])
        last = int(match[2] or first)
        named = {rank for rank in ranks if first <= rank <= last}
        if len(named) != last - first + 1:
            missing = first if first not in ranks else last
            raise ConfigError(f"rank {missing} is not in the trace, which has ranks {format_ranks(sorted(ranks))}")
        chosen |= named
    return frozenset(chosen)


def format_ranks(ranks: Sequence[int], limit: int = 40) -> str:
    """Ascending `ranks` as `0-3,7`; past `limit` characters the rest is a count."""
    starts = [rank for before, rank in pairwise((-2, *ranks)) if rank != before + 1]
    stops = [rank for rank, after in pairwise((*ranks, -2)) if after != rank + 1]
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in zip(starts, stops, strict=True)]
    text = ",".join(parts)
    if len(text) <= limit:
        return text
    kept = text[:limit].rpartition(",")[0]
    return f"{kept},... ({len(ranks)} ranks)"


def only_ranks(result: Result, ranks: frozenset[int]) -> Result:
    """The part of `result` that is about `ranks`."""
    groups = []
    for group in result.ranks:
        kept = tuple(rank for rank in group.ranks if rank in ranks)
        if kept:
            groups.append(replace(group, ranks=kept, timeline=replace(group.timeline, ranks=kept)))
    return replace(result, ranks=tuple(groups))
