"""How tensors are cut over ranks: torch.chunk's rows (FSDP2, DTensor), FSDP1's flat parameters, ZeRO's partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

#: FSDP1 aligns the parameters inside a flat parameter to so many bytes (with use_orig_params).
ALIGNMENT: Final = 16


def chunk_rows(rows: int, ranks: int) -> tuple[int, ...]:
    """Rows of each rank as torch.chunk cuts them: ceil(rows / ranks) each, and what is left, or 0, for the last ones.

    Raises ValueError for fewer than 1 rank or less than 0 rows.
    """
    if ranks < 1 or rows < 0:
        raise ValueError(f"{rows} rows cannot be cut over {ranks} ranks")
    step = -(-rows // ranks)
    return tuple(max(0, min(step, rows - rank * step)) for rank in range(ranks))


@dataclass(frozen=True, slots=True)
class RowShard:
    """A tensor cut on dimension 0: what one rank has of it, and the padded size that all ranks store (FSDP2)."""

    elements: int
    padded: int


def row_shard(shape: Sequence[int], ranks: int, rank: int) -> RowShard:
    """The shard of `rank`: FSDP2 stores ceil(d0 / ranks) rows on every rank, zero-padded; a scalar counts as one row.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py (_init_sharded_param).
    """
    rows, rest = (shape[0], prod(shape[1:])) if shape else (1, 1)
    own = chunk_rows(rows, ranks)
    return RowShard(own[rank] * rest, -(-rows // ranks) * rest)


@dataclass(frozen=True, slots=True)
class FlatShard:
    """FSDP1's flat parameter of a unit: its length with all padding, and a rank's part of it."""

    length: int
    shard: int
    starts: tuple[int, ...]


def flat_shard(elements: Sequence[int], ranks: int, *, item: int, original: bool = True) -> FlatShard:
    """The flat parameter of tensors of these `elements`; `item` is bytes an element in the forward's dtype.

    With `original` (use_orig_params) every tensor starts at a multiple of 16 bytes, and the flat parameter is padded to
    a multiple of the ranks; without, only the shard is padded. Either way a shard has ceil(length / ranks) elements.

    Source: torch/distributed/fsdp/_flat_param.py (_init_flat_param_and_metadata, _get_shard).
    """
    step = max(1, ALIGNMENT // item) if original else 1
    starts: list[int] = []
    length = 0
    for count in elements:
        length += -length % step
        starts.append(length)
        length += count
    if original:
        length += -length % ranks
    return FlatShard(length, -(-length // ranks), tuple(starts))


def even_shard(elements: int, ranks: int) -> int:
    """Elements of a rank where a flat of `elements` is padded to a multiple of the ranks (DeepSpeed's partitions)."""
    if ranks < 1 or elements < 0:
        raise ValueError(f"{elements} elements cannot be cut over {ranks} ranks")
    return -(-elements // ranks)


def part(elements: int, ranks: int, rank: int) -> tuple[int, int]:
    """First and last real element of a rank's part of a flat cut by `even_shard`; empty parts begin at the end."""
    step = even_shard(elements, ranks)
    return min(elements, rank * step), min(elements, (rank + 1) * step)
