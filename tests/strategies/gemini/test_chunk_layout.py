"""Gemini's chunks: recorded runs of the real chunk manager, hand-made cases, and properties of search and packing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.gemini.chunk_layout import (
    ChunkConfig,
    ChunkLayout,
    Parameter,
    layout,
    local_elements,
    local_parameters,
    pack,
    search,
    unused,
)
from tests.support.gemini_data import parameters, rows
from traces.errors import ConfigError

MLP = (("w1", (512, 256)), ("b1", (512,)), ("w2", (255, 512)), ("b2", (255,)))
SMALL: dict[str, Any] = {"minimum": 131_072, "span": 0}


def chunk_bytes(found: ChunkLayout) -> int:
    """Bytes of fp16 and fp32 chunks that a rank keeps between steps, as requested (blocks may be larger)."""
    return sum(6 * chunk.held for chunk in found.chunks)


def adam_elements(found: ChunkLayout, rank: int) -> int:
    """Elements for which a rank has Adam's states: the real parameters in what it keeps."""
    return sum(chunk.valid(found.place(chunk, rank)) for chunk in found.chunks)


def kept(found: ChunkLayout, rank: int) -> int:
    """Bytes that a rank keeps between steps: chunks, and Adam's two states in fp32."""
    return chunk_bytes(found) + 8 * adam_elements(found, rank)


def named(row: dict[str, Any]) -> str:
    return f"{row['model']}-{row['world']}-tp{row['tp']}-rank{row['rank']}-{row['keep_gathered']}"


@pytest.mark.parametrize("row", rows("chunks.csv"), ids=named)
def test_recorded_chunks(row: dict[str, Any]) -> None:
    tensor = max(1, int(row["tp"]))
    data = int(row["world"]) // tensor
    found = layout(parameters()[row["model"]], data=data, tensor=tensor, gather_single=row["keep_gathered"] == "1")
    chunks = [chunk for chunk in found.chunks if chunk.degree == data]
    assert data == int(row["dp_degree"])
    assert found.configs[data].elements == int(row["chunk_elements"])
    assert len(chunks) == int(row["chunks_fp16"])
    assert sum(chunk.private for chunk in chunks) == int(row["chunks_private"])
    assert sum(chunk.elements for chunk in chunks) == int(row["chunk_elements_total"])
    assert sum(chunk.used for chunk in chunks) == int(row["chunk_elements_used"])
    assert adam_elements(found, int(row["rank"])) == int(row["adam_elements"])
    if row["group2_dp_degree"]:
        small = int(row["group2_dp_degree"])
        assert found.configs[small] == ChunkConfig(int(row["group2_chunk_elements"]), True)
        assert len(found.configs) == 2


def test_set_up_of_one_gpu_leaves_the_chunks_and_a_few_small_blocks() -> None:
    # Beside the chunks: a batch (ids, labels, mask: 8,704 B) and six 4-byte tensors in blocks of 512 B. Other rows add
    # buffers, and blocks larger than their request.
    checked = 0
    for row in rows("chunks.csv"):
        if row["world"] == "1" and row["model"] in ("opt-125m", "opt-350m", "biogpt", "bloom-560m", "opt-1.3b"):
            found = layout(parameters()[row["model"]], gather_single=row["keep_gathered"] == "1")
            assert int(row["base_allocated"]) - chunk_bytes(found) == 8_704 + 6 * 512
            checked += 1
    assert checked == 10


def test_mlp_of_the_worked_example() -> None:
    found = layout(MLP, **SMALL)
    assert [(chunk.elements, [slot.name for slot in chunk.slots]) for chunk in found.chunks] == [
        (131_072, ["w1"]),
        (131_072, ["b1", "w2"]),
        (131_072, ["b2"]),
    ]
    assert [chunk.elements - chunk.used for chunk in found.chunks] == [0, 0, 130_817]
    assert kept(found, 0) == 4_458_488
    shared = layout(MLP, data=2, **SMALL)
    assert [adam_elements(shared, rank) * 8 for rank in (0, 1)] == [1_050_616, 1_048_576]
    assert [kept(shared, rank) for rank in (0, 1)] == [2_230_264, 2_228_224]
    assert [[(s.name, s.end - s.start) for s in chunk.pieces(0)] for chunk in shared.chunks] == [
        [("w1", 65_536)],
        [("b1", 512), ("w2", 65_024)],
        [("b2", 255)],
    ]


def test_search_takes_the_first_size_with_the_least_waste() -> None:
    sizes = [4, 6, 4, 6, 10]
    one = [Parameter(f"p{index}", size) for index, size in enumerate(sizes)]
    assert unused(np.array(sizes), np.array([10, 11, 12, 20])).tolist() == [0, 3, 6, 10]
    assert search(one, minimum=10, span=10, interval=1)[1].elements == 10
    # Of 7 and 14 for [7, 7]: no waste in either, the smaller is taken.
    assert search([Parameter("a", 7), Parameter("b", 7)], minimum=7, span=7, interval=1)[1].elements == 7


def test_search_leaves_outliers_out_and_gives_them_a_chunk_of_their_own() -> None:
    sizes = [1_000_003, *[10] * 50]
    mine = [Parameter(f"p{index}", size, 4) for index, size in enumerate(sizes)]
    configs = search(mine, minimum=100, span=0, interval=1)
    assert configs == {4: ChunkConfig(100, False)}
    chunks = pack(mine, configs)
    assert (chunks[0].elements, chunks[0].private, chunks[0].used) == (1_000_004, True, 1_000_003)
    assert [chunk.elements for chunk in chunks[1:]] == [100] * 5
    assert search(mine, minimum=100, span=0, interval=1, filter_large=False)[4].elements == 1_000_004


def test_search_rounds_to_every_degree_and_keeps_small_groups_whole() -> None:
    mine = [Parameter("a", 1001, 2), Parameter("b", 1001, 6), Parameter("c", 7, 3)]
    configs = search(mine, minimum=1000, span=0, interval=1)
    assert configs == {3: ChunkConfig(7, True), 2: ChunkConfig(1002, False), 6: ChunkConfig(1002, False)}


def test_single_degree_is_sharded_only_without_the_change_of_llmem() -> None:
    assert layout(MLP, **SMALL).configs == {1: ChunkConfig(131_072, True)}
    assert layout(MLP, **SMALL, gather_single=False).configs == {1: ChunkConfig(131_072, False)}


def test_tensor_parallel_splits_the_last_dimension_of_matrices() -> None:
    assert local_parameters(MLP, data=3, tensor=2) == [
        Parameter("w1", 65_536, 3),
        Parameter("b1", 512, 6),
        Parameter("w2", 65_280, 3),
        Parameter("b2", 255, 6),
    ]
    with pytest.raises(ConfigError, match=r"tp=5: the last dimension of w1, 256, is not a multiple of it"):
        local_elements("w1", (512, 256), 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: search([]), "no parameters"),
        (lambda: search([Parameter("a", 1)], interval=0), "not all are positive"),
        (lambda: search([Parameter("a", 1)], minimum=0), "not all are positive"),
    ],
)
def test_bad_searches_are_one_line(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_rank_outside_the_group() -> None:
    with pytest.raises(ValueError, match="rank 2 is not one of the 2"):
        layout(MLP, data=2, **SMALL).chunks[0].bounds(2)


# Properties ----------------------------------------------------------------------------------------------------------

SIZES = st.lists(st.integers(1, 5000), min_size=1, max_size=40)
DEGREES = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def models(draw: st.DrawFn) -> list[Parameter]:
    return [Parameter(f"p{index}", size, draw(DEGREES)) for index, size in enumerate(draw(SIZES))]


def plain_unused(sizes: list[int], chunk: int) -> int:
    """Waste counted by filling lists, one after another."""
    filled: list[list[int]] = []
    for size in sizes:
        if not filled or sum(filled[-1]) + size > chunk:
            filled.append([])
        filled[-1].append(size)
    return sum(chunk - sum(part) for part in filled)


@given(SIZES, st.lists(st.integers(5000, 9000), min_size=1, max_size=8))
def test_waste_is_what_filling_leaves(sizes: list[int], candidates: list[int]) -> None:
    found = unused(np.array(sizes), np.array(candidates))
    assert found.tolist() == [plain_unused(sizes, candidate) for candidate in candidates]


@given(models(), st.integers(1, 4000), st.integers(0, 4000), st.integers(1, 64))
def test_search_and_packing_keep_their_promises(mine: list[Parameter], minimum: int, span: int, interval: int) -> None:
    configs = search(mine, minimum=minimum, span=span, interval=interval)
    chunks = pack(mine, configs)
    for degree in {parameter.degree for parameter in mine}:
        group = [parameter for parameter in mine if parameter.degree == degree]
        own = [chunk for chunk in chunks if chunk.degree == degree]
        slots = [slot for chunk in own for slot in chunk.slots]
        assert [(slot.name, slot.end - slot.start) for slot in slots] == [(p.name, p.elements) for p in group]
        assert [chunk.index for chunk in own] == list(range(len(own)))
        for chunk in own:
            assert chunk.used <= chunk.elements
            assert chunk.gathered or chunk.elements % degree == 0
            assert chunk.private == (chunk.slots[0].end > configs[degree].elements)
            # Every element lies in exactly one rank's shard; a kept chunk is whole on every rank.
            valid = [chunk.valid(rank) for rank in range(degree)]
            assert valid == [sum(s.end - s.start for s in chunk.pieces(rank)) for rank in range(degree)]
            assert valid == [chunk.used] * degree if chunk.gathered else sum(valid) == chunk.used
        for before, after in pairwise(own):
            first = after.slots[0]
            assert before.used + first.end - first.start > before.elements  # it did not fit


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 60), st.integers(0, 60), DEGREES)
def test_search_agrees_with_trying_every_size(sizes: list[int], minimum: int, span: int, degree: int) -> None:
    mine = [Parameter(f"p{index}", size, degree) for index, size in enumerate(sizes)]
    found = search(mine, minimum=minimum, span=span, interval=1, filter_large=False)[degree]
    if sum(sizes) < minimum:
        assert found == ChunkConfig(sum(sizes), True)
        return
    start = max(minimum, *sizes)
    best = min(range(start, start + span + 1), key=lambda size: (plain_unused(sizes, size), size))
    assert found.elements == best + -best % degree
