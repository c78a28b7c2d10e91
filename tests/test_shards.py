"""How tensors are cut: torch.chunk itself where torch is there, the worked examples of FSDP, and what always holds."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.shards import chunk_rows, even_shard, flat_shard, part, row_shard
from tests.worked_examples import SHAPES, examples

COUNTS = st.integers(0, 300)
RANKS = st.integers(1, 17)


def test_rows_by_hand() -> None:
    assert chunk_rows(255, 2) == (128, 127)
    assert chunk_rows(5, 4) == (2, 2, 1, 0)
    assert chunk_rows(3, 8) == (1, 1, 1, 0, 0, 0, 0, 0)
    assert chunk_rows(0, 2) == (0, 0)
    with pytest.raises(ValueError, match="4 rows cannot be cut over 0 ranks"):
        chunk_rows(4, 0)


def test_padding_of_fsdp2() -> None:
    one = row_shard((3, 64), 8, 7)
    assert (one.elements, one.padded) == (0, 64)
    assert row_shard((), 2, 0).padded == 1
    # The persistent bytes of example E6: fp32 shard and two states of each parameter, and four 4-byte steps.
    kept = sum(12 * row_shard(shape, 2, 0).padded for shape in SHAPES.values()) + 16
    assert kept == examples()["E6"].persistent[0] == 1_577_488


def test_flat_parameters_of_fsdp1() -> None:
    units = [("w1", "b1"), ("w2", "b2")]
    flats = [flat_shard([prod(SHAPES[name]) for name in unit], 2, item=2) for unit in units]
    assert [flat.length for flat in flats] == [131_584, 130_816]
    assert sum(12 * flat.shard for flat in flats) == examples()["E7"].persistent[0] == 1_574_400


def test_alignment_of_flat_parameters() -> None:
    flat = flat_shard([3, 5, 8], 4, item=2)
    assert (flat.starts, flat.length, flat.shard) == ((0, 8, 16), 24, 6)
    plain = flat_shard([3, 5, 8], 3, item=2, original=False)
    assert (plain.starts, plain.length, plain.shard) == ((0, 3, 8), 16, 6)
    assert flat_shard([3, 5], 2, item=4).starts == (0, 4)


def test_partitions_of_zero() -> None:
    assert [part(10, 4, rank) for rank in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [part(2, 4, rank) for rank in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]
    with pytest.raises(ValueError, match="cannot be cut over 0 ranks"):
        even_shard(1, 0)


@given(COUNTS, RANKS)
def test_rows_as_torch_chunks(rows: int, ranks: int) -> None:
    found = chunk_rows(rows, ranks)
    assert sum(found) == rows
    assert list(found) == sorted(found, reverse=True)
    torch = pytest.importorskip("torch")
    if rows:
        theirs = [len(piece) for piece in torch.chunk(torch.empty(rows), ranks)]
        assert list(found) == theirs + [0] * (ranks - len(theirs))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=3), RANKS)
def test_shards_together_are_the_tensor(shape: list[int], ranks: int) -> None:
    found = [row_shard(shape, ranks, rank) for rank in range(ranks)]
    assert sum(one.elements for one in found) == prod(shape)
    assert all(one.elements <= one.padded == found[0].padded for one in found)
    assert found[0].elements == found[0].padded


@given(st.lists(st.integers(1, 200), min_size=1, max_size=8), RANKS, st.sampled_from([1, 2, 4]), st.booleans())
def test_flat_parameters_hold_everything(elements: list[int], ranks: int, item: int, original: bool) -> None:
    flat = flat_shard(elements, ranks, item=item, original=original)
    ends = [start + count for start, count in zip(flat.starts, elements, strict=True)]
    assert all(end <= start for end, start in zip(ends, flat.starts[1:], strict=False))
    assert ends[-1] <= flat.length <= flat.shard * ranks < flat.length + ranks
    if original:
        assert all(start * item % 16 == 0 for start in flat.starts)
        assert flat.length % ranks == 0


@given(COUNTS, RANKS)
def test_parts_are_neighbours(elements: int, ranks: int) -> None:
    found = [part(elements, ranks, rank) for rank in range(ranks)]
    assert found[0][0] == 0
    assert found[-1][1] == elements
    assert all(before[1] == after[0] for before, after in pairwise(found))
    assert all(end - start <= even_shard(elements, ranks) for start, end in found)
