"""The host's part of a step in simulated time: copies over PCIe, and an optimizer whose states are on the host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from graph.case import Case
from simulator.estimator.estimate import captured
from strategies import registry
from strategies.rank_events import events_of
from strategies.timing import host
from strategies.timing.roofline import Speed
from traces.model import Op

RATE = 1e9


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model of two layers; its matrices are large enough for time to be that of bytes."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64}
    more = {"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps({**config, **more}), "utf-8")
    return str(tmp_path / "config.json")


#: Embedding and head, per layer 4 attention and 3 MLP matrices and 2 norms, and the last norm.
ELEMENTS = 2 * 512 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64


def case_of(model: str, **more: Any) -> Case:
    return Case.of({"model": model, "seq": 64, "batch": 2, "world": 4, "dtype": "bf16", **more})


def method_of(case: Case) -> Any:
    return registry.find(case).method(case, 0)


def test_fsdp2_offload_carries_shards_and_steps_on_the_host(model: str) -> None:
    """A rank's quarter goes up before each unit's forward and backward, and its gradients come down once."""
    method: Any = method_of(case_of(model, strategy="fsdp2-offload"))
    graph = captured(method.captured_case(), None, method)
    last = graph.operators.step == graph.operators.step.max()
    over = host.copies(graph) & last
    down = over & (np.diff(graph.reads.start) > 0)
    shard = ELEMENTS // 4 * 2
    inputs = 2 * 64 * 8
    assert int(host.one_way(graph, down).sum()) == shard
    assert int(host.one_way(graph, over & ~down).sum()) == 2 * shard + inputs
    wanted = round(shard * host.EAGER / host.MEMORY * 1e9)
    assert host.optimizer_ns(graph, RATE, on_host=True) == wanted
    events = events_of(graph, Speed(1e15, 1e15, 0, {}, RATE), on_host=True)
    starts = events.op == Op.PHASE
    names = [events.strings("name").get(int(place)) for place in np.flatnonzero(starts)]
    assert events.ints("host_ns")[starts].tolist() == [wanted if name == "optimizer" else 0 for name in names]
    copied = events.ints("duration_ns")[events.op == Op.KERNEL]
    assert copied.max() == 512 * 64 // 4 * 2  # the embedding's shard at a byte a nanosecond


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_with_states_on_the_host(model: str, stage: int) -> None:
    case = case_of(model, strategy=f"deepspeed-{stage}", offload="optimizer")
    method: Any = method_of(case)
    graph = captured(method.captured_case(), None, method)
    share = ELEMENTS / 4
    assert host.optimizer_ns(graph, RATE) == round(share * (28 / host.MEMORY + 4 / RATE) * 1e9)


def test_an_optimizer_on_the_device_takes_no_time_of_the_host(model: str) -> None:
    method: Any = method_of(case_of(model, strategy="fsdp2"))
    graph = captured(method.captured_case(), None, method)
    assert host.optimizer_ns(graph, RATE) == 0
    assert "host_ns" not in events_of(graph, Speed(1e15, 1e15, 0, {}, RATE)).columns
