"""DDP's buckets: which gradients share a flat buffer, at first and after the rebuilding in the second iteration.

Written from torch/csrc/distributed/c10d/reducer.cpp (compute_bucket_assignment_by_size, rebuild_buckets) and
torch/nn/parallel/distributed.py (_ddp_init_helper).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

#: The default cap of a bucket, and of the first one where the cap is the default; bytes.
CAP: Final = 25 * 2**20
FIRST: Final = 2**20


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient that DDP reduces: its name, elements, and dtype as torch prints it, with `size` bytes an element."""

    name: str
    elements: int
    dtype: str
    size: int

    @property
    def bytes(self) -> int:
        """Bytes of the gradient."""
        return self.elements * self.size


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat buffer: which gradients (indices into the list given) lie in it, in this order."""

    members: tuple[int, ...]
    dtype: str
    bytes: int


def assign(
    gradients: Sequence[Gradient], limits: Sequence[int], order: Sequence[int] | None = None
) -> tuple[Bucket, ...]:
    """Buckets by size, as compute_bucket_assignment_by_size: a gradient is added, and the bucket closes at its limit.

    `gradients` are in the order in which they are packed; `order` gives their indices where that is the order in which
    gradients got ready (they are then not sorted). Each dtype has buckets of its own, and takes the next limit with
    each bucket that it closes, the last one for ever.
    Raises ValueError where there is no limit.
    """
    if not limits:
        raise ValueError("buckets need at least one limit")
    opened: dict[str, list[int]] = {}
    filled: dict[str, int] = {}
    taken: dict[str, int] = {}
    done: list[Bucket] = []
    for place, gradient in enumerate(gradients):
        key = gradient.dtype
        opened.setdefault(key, []).append(place if order is None else order[place])
        filled[key] = filled.get(key, 0) + gradient.bytes
        level = taken.setdefault(key, 0)
        if filled[key] >= limits[level]:
            done.append(Bucket(tuple(opened.pop(key)), key, filled.pop(key)))
            taken[key] = min(level + 1, len(limits) - 1)
    done.extend(Bucket(tuple(members), key, filled[key]) for key, members in opened.items())
    return tuple(done) if order is not None else tuple(sorted(done, key=lambda bucket: min(bucket.members)))


def limits(cap: int | None = None) -> tuple[int, int]:
    """First and further limits: 1 MiB and 25 MiB, or `cap` bytes for both where the user gave one."""
    return (FIRST, CAP) if cap is None else (cap, cap)


def first_buckets(
    gradients: Sequence[Gradient], *, find_unused: bool = False, cap: int | None = None
) -> tuple[Bucket, ...]:
    """The buckets with which DDP is built, in the order in which it reduces them (last layers first).

    Gradients are in the order of `module.parameters()`. Without `find_unused_parameters` (or with a static graph) all
    gradients of a dtype are in one bucket, since the buckets will be rebuilt.
    """
    bounds = limits(cap) if find_unused else (sys.maxsize,)
    return tuple(reversed(assign(gradients, bounds)))


def rebuilt_buckets(
    gradients: Sequence[Gradient], ready: Sequence[int], *, cap: int | None = None
) -> tuple[Bucket, ...]:
    """The buckets from the second iteration on: by the order `ready` in which the first one's gradients got ready.

    Raises ValueError where `ready` does not name every gradient once.
    """
    if sorted(ready) != list(range(len(gradients))):
        raise ValueError(f"the order of {len(ready)} gradients is not one of the {len(gradients)} given")
    return assign([gradients[index] for index in ready], limits(cap), ready)
