"""What a training loop does with outputs, adapters, grouped heads and the optimizer, against arithmetic by hand."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from graph.case import Case
from graph.models.sources import build
from simulator.estimator.estimate import estimate, forget_graphs, phase_figures
from traces.errors import ConfigError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")

HIDDEN, LAYERS, HEADS, GROUPS, VOCABULARY, BATCH, SEQ = 64, 2, 4, 2, 4096, 2, 64
HEAD = HIDDEN // HEADS
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": SEQ,
    "tie_word_embeddings": False,
}


@pytest.fixture
def phases(tmp_path: Path) -> Any:
    """The figures of every phase for further keys of a small model's case."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))

    def run(**keys: Any) -> dict[str, dict[str, int]]:
        case = {"model": str(path), "dtype": "bf16", "batch": BATCH, "seq": SEQ, "gpu": "A100-80GB", **keys}
        found = phase_figures(estimate(case, analyse=False).worst)
        forget_graphs()
        return found

    return run


def test_outputs_stay_as_long_as_the_loop_keeps_them(phases: Any) -> None:
    logits = BATCH * SEQ * VOCABULARY * 2
    dropped, step, following = (phases(outputs=name) for name in ("dropped", "step", "next"))
    for phase in ("bwd_last", "step_last"):
        assert step[phase]["peak"] - dropped[phase]["peak"] == logits
        assert following[phase] == step[phase]
    assert step["fwd_last"]["peak"] == dropped["fwd_last"]["peak"]
    assert following["fwd_last"]["peak"] - dropped["fwd_last"]["peak"] == logits + 512  # the last loss is one of them


def test_repeated_keys_and_values_are_saved_for_every_head(phases: Any) -> None:
    more = LAYERS * 2 * BATCH * SEQ * (HEADS - GROUPS) * HEAD * 2  # keys and values of the heads of a group
    grouped, repeated = phases(), phases(repeat_kv=True)
    assert repeated["fwd_last"]["peak"] - grouped["fwd_last"]["peak"] == more


def test_a_t4_takes_grouped_heads_in_a_fused_kernel_only_if_they_are_repeated(phases: Any) -> None:
    scores = BATCH * HEADS * SEQ * SEQ * 4
    plain, repeated = (phases(gpu="T4", dtype="fp16", repeat_kv=flag) for flag in (False, True))
    assert plain["fwd_last"]["peak"] - repeated["fwd_last"]["peak"] > LAYERS * scores // 2


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_gradients_of_a_step_in_backward_do_not_stay(phases: Any, optimizer: str) -> None:
    after, during = (phases(optimizer=optimizer, step_in_backward=flag) for flag in (False, True))
    block = HIDDEN * (2 * HIDDEN + 2 * GROUPS * HEAD) + 3 * HIDDEN * 128 + 2 * HIDDEN
    gradients = 2 * (2 * VOCABULARY * HIDDEN + LAYERS * block + HIDDEN)
    rounded = 512 * (2 + 9 * LAYERS + 1)  # every block is rounded up
    difference = after["bwd_last"]["left"] - during["bwd_last"]["left"]
    assert gradients <= difference <= gradients + rounded
    assert during["step_last"]["left"] == during["bwd_last"]["left"]
    assert after["end"]["left"] == pytest.approx(during["end"]["left"], abs=rounded)


def trained(**keys: Any) -> int:
    module = build(Case.of({"model": "tinyllama-1.1b", "lora": 4, **keys})).module
    return sum(one.numel() for one in module.parameters() if one.requires_grad)


def test_adapters_are_on_the_modules_that_are_named() -> None:
    assert trained(lora_targets="q_proj") == 22 * 4 * (2048 + 2048)
    assert trained(lora_targets=["k_proj", "down_proj"]) == 22 * 4 * (2048 + 256 + 5632 + 2048)
    every = 22 * 4 * (2 * (2048 + 2048) + 2 * (2048 + 256) + 3 * (2048 + 5632))
    assert trained(lora_targets="all-linear") == every


def test_a_module_that_is_not_there_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"key 'lora'.*c_attn") as caught:
        trained(lora_targets="c_attn")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keys", [{"outputs": "step"}, {"repeat_kv": True}])
def test_a_function_returns_its_model_so_itself(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(keys))):
        build(Case.of({"model": "tests.support.worked_models:mlp", **keys}))
