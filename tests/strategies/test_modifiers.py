"""Modifiers with methods of several GPUs: what does not go together is one line, what does changes its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graph.case import Case
from simulator.estimator.estimate import Estimate, estimate
from strategies.modifiers import check
from traces.errors import ConfigError

torch = pytest.importorskip("torch")

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("modified") / "config.json"
    path.write_text(json.dumps(MODEL))
    return str(path)


def trained(config: str, **keys: Any) -> Estimate:
    world = {} if "mesh" in keys or keys.get("strategy", "single") == "single" else {"world": 4}
    return estimate({"model": config, "dtype": "bf16", "batch": 4, "seq": 256, **world, **keys}, analyse=False)


@pytest.mark.parametrize(
    ("method", "keys", "key"),
    [
        ("single", {"offload": "optimizer"}, "offload"),
        ("ddp", {"offload": "parameters"}, "offload"),
        ("fsdp2", {"offload": "optimizer"}, "offload"),
        ("deepspeed-3", {"offload": "parameters"}, "offload"),
        ("tp", {"offload": "activations-pin"}, "offload"),
        ("tp-megatron", {"offload": "activations"}, "offload"),
        ("fsdp2", {"optimizer": "adamw-8bit"}, "optimizer"),
        ("tp-sp", {"optimizer": "adamw-8bit"}, "optimizer"),
        ("fsdp2", {"optimizer": "paged-adamw-32bit"}, "optimizer"),
        ("hsdp", {"optimizer": "adafactor"}, "optimizer"),
        ("fsdp2-nr", {"quant": "int8", "lora": 4}, "quant"),
        ("fsdp1", {"quant": "nf4", "lora": 4}, "quant"),
        ("fsdp1", {"lora": 4}, "lora"),
        ("tp", {"lora": 4}, "lora"),
        ("fsdp2-tp", {"quant": "nf4", "lora": 4}, "quant"),
        ("tp", {"clip": 1.0}, "clip"),
        ("fsdp2-tp", {"clip": 1.0}, "clip"),
        ("tp", {"autocast": "fp16"}, "autocast"),
        ("fsdp2,tp", {"lora": 4}, "lora"),
        ("dp,tp", {"offload": "parameters"}, "offload"),
    ],
)
def test_what_does_not_go_together(method: str, keys: dict[str, Any], key: str) -> None:
    place: dict[str, Any] = {"strategy": method, "world": 1 if method == "single" else 4}
    if "," in method:
        place = {"mesh": dict.fromkeys(method.split(","), 2)}
    case = Case.of({"model": "opt-125m", "dtype": "bf16", **place, **keys})
    with pytest.raises(ConfigError, match=rf"^key '{key}': not .* with strategy '{method}': \w[^\n]+$"):
        check(case)
    with pytest.raises(ConfigError, match=rf"^key '{key}'"):
        estimate(case)


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("ddp", {"offload": "activations-pin"}),
        ("fsdp2", {"offload": "parameters", "clip": 1.0}),
        ("fsdp1", {"lora": 4, "dtype": "fp32"}),
        ("fsdp1", {"optimizer": "adamw-8bit"}),
        ("deepspeed-2", {"offload": "optimizer", "quant": "nf4", "lora": 4}),
        ("tp-sp", {"clip": 1.0, "autocast": "fp16"}),
    ],
)
def test_what_goes(method: str, keys: dict[str, Any]) -> None:
    check(Case.of({"model": "opt-125m", "strategy": method, "world": 4, "dtype": "bf16", **keys}))


@pytest.mark.parametrize("method", ["single", "ddp", "fsdp1", "fsdp2", "tp", "deepspeed-3"])
def test_a_loss_in_parts_never_has_whole_logits(config: str, method: str) -> None:
    buckets = {"buckets": 100_000} if method == "deepspeed-3" else {}
    whole, parts = (trained(config, strategy=method, loss=loss, **buckets) for loss in ("", "chunk8"))
    logits = 4 * 256 * 8000 * 4  # in fp32
    assert parts.worst.peak_allocated < whole.worst.peak_allocated - logits
    largest = max(parts.trace.ranks[0].events.ints("bytes"))
    assert largest < logits


@pytest.mark.parametrize("method", ["fsdp2", "hsdp", "mesh"])
def test_parameters_on_the_host(config: str, method: str) -> None:
    place: dict[str, Any] = {"mesh": {"fsdp2": 2, "tp": 2}} if method == "mesh" else {"strategy": method}
    here, there = (trained(config, offload=where, **place) for where in ("", "parameters"))
    assert not any(name == "optimizer_state" for name in there.trace.ranks[0].events.strings("category").table)
    assert any(name == "optimizer_state" for name in here.trace.ranks[0].events.strings("category").table)
    assert there.worst.peak_allocated < here.worst.peak_allocated
    if method == "fsdp2":
        assert there.worst.peak_allocated == trained(config, strategy="fsdp2-offload").worst.peak_allocated


def test_zero1_shards_the_states_of_the_case_s_optimizer(config: str) -> None:
    def states(found: Estimate) -> int:
        events = found.trace.ranks[0].events
        wanted = [text == "optimizer_state" for text in events.strings("category").table]
        codes = events.strings("category").codes
        return sum(size for code, size in zip(codes, events.ints("bytes"), strict=True) if code >= 0 and wanted[code])

    adamw = states(trained(config, strategy="zero1"))
    assert adamw > 0
    assert states(trained(config, strategy="zero1", optimizer="sgd")) == 0
    assert states(trained(config, strategy="zero1", optimizer="sgd", sgd_momentum=0.9)) == pytest.approx(
        adamw / 2, 0.01
    )


def test_deepspeed_casts_adapters_to_its_type(config: str) -> None:
    found = trained(config, strategy="deepspeed-2", lora=4, buckets=100_000)
    events = found.trace.ranks[0].events
    names = events.strings("name")
    adapters = [at for at in range(len(events)) if (names.get(at) or "").endswith("lora_A.default.weight")]
    flat = {int(events.ints("bytes")[at]) for at in adapters} - {0}
    elements = 2 * 4 * (256 + 256 + 256 + 128)  # two layers of q and v, rank 4
    assert flat == {2 * elements}  # one tensor of all, in bf16
