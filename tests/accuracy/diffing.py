"""The shortest edit between two sequences of tokens (Myers' greedy O(ND) algorithm)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edit:
    """`left[a:b]` stands where `right[c:d]` stands; one of the two may be empty."""

    a: int
    b: int
    c: int
    d: int


def edits(left: Sequence[Hashable], right: Sequence[Hashable], limit: int = 4000) -> list[Edit]:
    """The places where `left` and `right` differ, in order; ValueError if more than `limit` tokens do."""
    codes: dict[Hashable, int] = {}
    one = [codes.setdefault(token, len(codes)) for token in left]
    two = [codes.setdefault(token, len(codes)) for token in right]
    return list(_joined(_backtrack(_furthest(one, two, limit), len(one), len(two))))


def _furthest(one: list[int], two: list[int], limit: int) -> list[dict[int, int]]:
    """For every number of edits, the furthest point reached on each diagonal."""
    ends = {1: 0}
    history: list[dict[int, int]] = []
    for cost in range(limit + 1):
        history.append(dict(ends))
        for diagonal in range(-cost, cost + 1, 2):
            down = diagonal == -cost or (diagonal != cost and ends.get(diagonal - 1, -1) < ends.get(diagonal + 1, -1))
            x = ends.get(diagonal + 1, 0) if down else ends.get(diagonal - 1, 0) + 1
            y = x - diagonal
            while x < len(one) and y < len(two) and one[x] == two[y]:
                x, y = x + 1, y + 1
            ends[diagonal] = x
            if x >= len(one) and y >= len(two):
                return history
    raise ValueError(f"more than {limit} tokens differ")


def _backtrack(history: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int, int, int]]:
    """Single insertions and deletions, first to last."""
    found = []
    for cost in range(len(history) - 1, 0, -1):
        ends = history[cost]
        diagonal = x - y
        down = diagonal == -cost or (diagonal != cost and ends.get(diagonal - 1, -1) < ends.get(diagonal + 1, -1))
        before = diagonal + 1 if down else diagonal - 1
        last_x = ends.get(before, 0)
        last_y = last_x - before
        found.append((last_x, last_x, last_y, last_y + 1) if down else (last_x, last_x + 1, last_y, last_y))
        x, y = last_x, last_y
    return found[::-1]


def _joined(singles: list[tuple[int, int, int, int]]) -> Iterator[Edit]:
    """Neighbouring edits as one."""
    current: list[int] | None = None
    for a, b, c, d in singles:
        if current is not None and a == current[1] and c == current[3]:
            current[1], current[3] = b, d
            continue
        if current is not None:
            yield Edit(*current)
        current = [a, b, c, d]
    if current is not None:
        yield Edit(*current)
