"""Meshes: axes alone are the strategies, combined ones make sound traces, ranks that do the same are captured once."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from graph.case import Case
from simulator.estimator.estimate import estimate
from strategies.parallel.meshes import MESH
from tests.accuracy.sequences import tokens
from traces.check import check
from traces.errors import LLMemError
from traces.model import Trace

LLAMA = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


def model(folder: Path, **changes: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**LLAMA, **changes}))
    return str(path)


def traced(folder: Path, tied: bool = False, **more: Any) -> Trace:
    config = model(folder, tie_word_embeddings=tied)
    return estimate({"model": config, "dtype": "bf16", "seq": 64, **more}, analyse=False).trace


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("mesh", "alone"),
    [
        ({"dp": 2}, {"strategy": "ddp", "world": 2}),
        ({"fsdp2": 4}, {"strategy": "fsdp2", "world": 4}),
        ({"hsdp": 4}, {"strategy": "hsdp", "world": 4}),
        ({"dp": 2, "fsdp2": 2}, {"strategy": "hsdp", "world": 4}),
        ({"tp": 2}, {"strategy": "tp", "world": 2}),
        ({"fsdp2": 2, "tp": 2}, {"strategy": "fsdp2-tp", "world": 4}),
        ({"pp": 2}, {"strategy": "pp", "world": 2}),
        ({"pp": 2, "dp": 1}, {"strategy": "pp", "world": 2}),
    ],
    ids=lambda value: ",".join(f"{key}={size}" for key, size in value.items()),
)
def test_a_mesh_is_the_strategy_that_it_describes(
    mesh: dict[str, int], alone: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    found, expected = traced(tmp_path, tied, mesh=mesh), traced(tmp_path, tied, **alone)
    assert found.world == expected.world
    for rank in range(found.world):
        places = [
            next(place for place, entry in enumerate(trace.ranks) if rank in entry.ranks) for trace in (found, expected)
        ]
        assert tokens(found, places[0]).tokens == tokens(expected, places[1]).tokens


@pytest.mark.parametrize(
    "mesh",
    [
        {"dp": 2, "tp": 2},
        {"pp": 2, "dp": 2},
        {"pp": 2, "tp": 2},
        {"pp": 2, "fsdp2": 2},
        {"pp": 2, "hsdp": 4},
        {"pp": 2, "dp": 2, "fsdp2": 2, "tp": 2},
    ],
    ids=lambda mesh: ",".join(f"{axis}={size}" for axis, size in mesh.items()),
)
def test_combined_axes_make_a_sound_trace_of_every_rank(mesh: dict[str, int], tmp_path: Path) -> None:
    trace = traced(tmp_path, mesh=mesh, steps=2)
    world = trace.world
    assert sorted(rank for entry in trace.ranks for rank in entry.ranks) == list(range(world))
    check(trace)
    assert len(trace.ranks) == mesh.get("pp", 1), "replicas, equal shards and tensor ranks are events of one rank"


def test_tensor_ranks_and_shards_divide_what_a_stage_holds(tmp_path: Path) -> None:
    """Bytes of weights, gradients and states of the layers, by arithmetic on the configuration."""
    attention, mlp, norms = 64 * 64 * 2 + 64 * 32 * 2, 3 * 64 * 176, 2 * 64
    table = 512 * 64
    whole = 2 * (attention + mlp + norms) + 2 * table + 64
    split = (2 * (attention + mlp) + 2 * table) // 2 + 2 * 2 * 64 + 64
    stage = attention + mlp + norms + table
    for mesh, elements in (({"dp": 2}, whole), ({"tp": 2}, split), ({"dp": 2, "tp": 2}, split), ({"pp": 2}, stage)):
        trace = traced(tmp_path, mesh=mesh)
        events = trace.ranks[0].events
        categories, sizes = events.strings("category"), events.ints("bytes")
        held = sum(int(sizes[place]) for place in range(len(events.op)) if categories.get(place) == "parameter")
        assert held == 2 * elements, mesh


def test_ranks_with_shards_of_other_sizes_are_apart(tmp_path: Path) -> None:
    """500 rows over 8 shards: seven of 63 and one of 59; the other parameters divide."""
    case = Case.of({"model": model(tmp_path, vocab_size=500), "seq": 64, "mesh": {"fsdp2": 8, "tp": 1}})
    assert MESH.distinct(case) == (tuple(range(7)), (7,))
    staged = Case.of({"model": model(tmp_path, vocab_size=512), "seq": 64, "mesh": {"pp": 2, "dp": 2, "tp": 2}})
    assert MESH.distinct(staged) == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_a_thousand_ranks_are_a_few_kinds(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 32000, "num_attention_heads": 16,
             "num_key_value_heads": 16}  # fmt: skip
    case = Case.of({"model": model(tmp_path, **sizes), "seq": 64, "mesh": {"fsdp2": 128, "tp": 8}})
    started = time.perf_counter()
    found = MESH.distinct(case)
    assert sum(map(len, found)) == case.world == 1024
    assert [len(ranks) for ranks in found] == [1000, 24], (
        "4,000 rows of a vocabulary's eighth: 125 shards of 32, 3 empty"
    )
    assert len(MESH.groups(case)["mesh_tp"]) == 128
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"mesh": {"dp": 2, "tp": 2}, "world": 8}, "dp=2,tp=2 has 4 ranks, but world is 8"),
        ({"mesh": {"fdsp2": 2}}, "no axis 'fdsp2'; did you mean fsdp2"),
        ({"mesh": {"tp": 3}}, "num_attention_heads is 4, which 3 tensor-parallel ranks do not divide"),
        ({"mesh": {"tp": 4}}, "num_key_value_heads is 2, which 4 tensor-parallel ranks do not divide"),
        ({"mesh": {"pp": 4, "fsdp2": 2}}, "mesh: pp: 4 stages for 2 layers"),
        ({"mesh": {"dp": 2, "ddp": 2}}, "dp and ddp are one axis"),
        ({"mesh": {"hsdp": 4, "fsdp2": 2}}, "hsdp shards and replicates by itself"),
        ({"mesh": {"hsdp": 3}}, "hsdp=3.*even"),
        ({"mesh": {"tp": 2}, "strategy": "fsdp2", "world": 2}, "strategy 'fsdp2' contradicts tp=2"),
        ({"mesh": {"tp": 2}, "strategy": "zero1", "world": 2}, "strategy 'zero1' contradicts tp=2"),
        ({"mesh": {"pp": 2, "tp": 2}, "accum": 2}, "'accum'"),
        ({"mesh": {"dp": 2}, "task": "inference"}, "'task': 'train'"),
    ],
    ids=lambda value: str(value.get("mesh")) if isinstance(value, dict) else None,
)
def test_a_bad_mesh_is_one_line(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(LLMemError, match=message) as caught:
        estimate({"model": model(tmp_path), "dtype": "bf16", "seq": 64, **more}, analyse=False)
    assert "\n" not in str(caught.value)
