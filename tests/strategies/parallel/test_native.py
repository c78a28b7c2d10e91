"""PyTorch's own distributed methods, captured rank by rank: which ranks are alike, what each holds, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph.case import Case
from graph.errors import CaptureError
from graph.loop.method import layers
from simulator.estimator.estimate import estimate
from strategies import registry
from strategies.parallel import meshes
from traces.errors import LLMemError
from traces.model import Op

torch = pytest.importorskip("torch")

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("tiny") / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def trained(config: str, **keys: Any) -> Any:
    return estimate({"model": config, "seq": 64, "batch": 2, **keys}, analyse=False)


def held(found: Any, rank: int) -> int:
    """Bytes of parameters that a rank allocates while loading, and keeps."""
    entry = next(entry for entry in found.trace.ranks if rank in entry.ranks)
    events = entry.events
    first = int((events.op == Op.PHASE).nonzero()[0][1])
    alive: dict[int, int] = {}
    for op, ident, size in zip(events.op[:first], events.ints("id")[:first], events.ints("bytes")[:first], strict=True):
        if op == Op.ALLOC:
            alive[int(ident)] = int(size)
        elif op == Op.FREE:
            alive.pop(int(ident), None)
    return sum(alive.values())


def states(found: Any, rank: int) -> int:
    """Bytes of the optimizer's states on a rank."""
    events = next(entry for entry in found.trace.ranks if rank in entry.ranks).events
    sizes, categories = events.ints("bytes"), events.strings("category")
    born = (events.op == Op.ALLOC).nonzero()[0].tolist()
    return sum(int(sizes[place]) for place in born if categories.get(place) == "optimizer_state")


def parameters() -> int:
    hidden, inner, head = 96, 176, 96 // 8
    layer = 2 * hidden * hidden + 2 * hidden * 4 * head + 3 * hidden * inner + 2 * hidden
    return 2 * 1000 * hidden + 2 * layer + hidden


def test_each_rank_of_fsdp2_holds_its_rows(config: str) -> None:
    """1000 rows over 3 ranks are 334, 334 and 332, 176 are 59, 59 and 58: padded while held, but not in the states."""
    found = trained(config, strategy="fsdp2", world=3)
    assert [entry.ranks for entry in found.trace.ranks] == [(0, 1), (2,)]
    padded = 2 * 96 * 334 + 2 * (2 * 96 * 32 + 2 * 96 * 16 + 2 * 96 * 59 + 176 * 32 + 2 * 32) + 32
    assert padded * 4 <= held(found, 0) < padded * 4 + 2048  # the rotary frequencies are there besides
    assert held(found, 2) == held(found, 0)
    assert states(found, 0) - states(found, 2) == 2 * 4 * 96 * (2 * 2 + 2 * 2)


def test_data_parallel_ranks_hold_the_model_and_are_alike(config: str) -> None:
    found = trained(config, strategy="ddp", world=3)
    assert [entry.ranks for entry in found.trace.ranks] == [(0, 1, 2)]
    assert held(found, 0) >= parameters() * 4
    ends = [
        estimate({"model": config, "seq": 64, "strategy": name, "world": 3}).document()["phases"]["step_last"]["peak"]
        for name in ("ddp", "ddp-view")
    ]
    assert ends[0] - ends[1] == pytest.approx(parameters() * 4, rel=0.01)  # gradients beside their buckets, or in them


def test_sharding_the_optimizer_saves_its_states(config: str) -> None:
    whole, shared = trained(config, strategy="ddp", world=4), trained(config, strategy="zero1", world=4)
    assert len(shared.trace.ranks) == 4
    assert whole.worst.peak_allocated - shared.worst.peak_allocated > parameters() * 4


def test_tensor_parallel_ranks_hold_parts(config: str) -> None:
    found = trained(config, strategy="tp", world=2)
    norms = 5 * 96
    assert held(found, 0) >= (parameters() - norms) * 2 + norms * 4
    assert held(found, 0) < parameters() * 4 * 0.55


@pytest.mark.parametrize(
    ("strategy", "world", "load", "allocated", "reserved"),
    [
        ("tp", 2, 25482752, 186016768, 247463936),
        ("fsdp2-tp", 4, 37614592, 173580800, 243269632),
        ("fsdp2", 3, 33573376, 161680896, 236978176),
    ],
)
def test_tied_weights_load_as_recorded(
    strategy: str, world: int, load: int, allocated: int, reserved: int, tmp_path: Path
) -> None:
    """Peaks of the recorder (torch 2.13, A100) for this model, where the whole embedding outweighs everything else.

    Tensor parallelism splits embedding and head apart, so no rank ever has a whole one; `fully_shard` gets a placed
    model. The recorder collected garbage after it placed the model: a reference cycle of its own kept the whole one.
    """
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY | {"vocab_size": 64000, "tie_word_embeddings": True}))
    found = estimate({"model": str(path), "seq": 64, "batch": 2, "strategy": strategy, "world": world})
    assert found.document()["phases"]["load"]["peak"] == load
    assert (found.worst.peak_allocated, found.worst.peak_reserved) == (allocated, reserved)


def test_collectives_name_groups_that_the_trace_has(config: str) -> None:
    found = trained(config, strategy="hsdp", world=4)
    assert set(found.trace.groups) == {"default_pg", "mesh_dp", "mesh_fsdp2"}
    case = Case.of({"model": "gpt2", "strategy": "hsdp", "world": 6})
    assert registry.find(case).groups(case)["mesh_dp"] == ((0, 3), (1, 4), (2, 5))
    pairs = Case.of({"model": "gpt2", "strategy": "fsdp2-tp", "world": 4})
    assert registry.find(pairs).groups(pairs)["mesh_fsdp2"] == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"strategy": "tp", "world": 5}, "do not divide"),
        ({"strategy": "hsdp", "world": 3}, "even number"),
        ({"strategy": "fsdp2-tp", "world": 3}, "even number"),
        ({"strategy": "tp", "world": 2, "model": "gpt2"}, "Linear"),
    ],
)
def test_what_cannot_be_split_is_one_clear_line(config: str, keys: dict[str, Any], told: str) -> None:
    with pytest.raises(LLMemError, match=told) as caught:
        trained(keys.pop("model", config), **keys)
    assert "\n" not in str(caught.value)


@given(rows=st.integers(1, 500), ranks=st.integers(1, 40))
def test_shards_are_those_of_chunk(rows: int, ranks: int) -> None:
    """The sizes by which ranks are told apart are those of torch.chunk, which FSDP2 shards by."""
    ours = [meshes.pieces(rows, ranks, rank) for rank in range(ranks)]
    theirs = [len(part) for part in torch.zeros(rows).chunk(ranks)]
    assert ours == theirs + [0] * (ranks - len(theirs))


def test_layers_are_the_outermost_lists() -> None:
    nn = torch.nn
    experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(8))
    block = nn.ModuleDict({"experts": experts})
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([block, nn.Linear(2, 2)]))
    assert len(layers(model)) == 2
    with pytest.raises(CaptureError, match="no list of layers"):
        layers(nn.Linear(2, 2))
