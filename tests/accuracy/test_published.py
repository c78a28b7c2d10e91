"""Published measurements: columns become cases, and the simulation is as close to the judged rows as it should be."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.places import DATA

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.accuracy.published import (
    GOAL,
    Compared,
    LeftOutError,
    compared,
    matches,
    model_of,
    read,
    rows,
    summary,
    told,
)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")

TABLE = DATA / "published" / "peaks.csv"
ROWS = rows(TABLE)


def row(source: str, **columns: str) -> Any:
    """The first row of a source, with some columns changed."""
    found = next(one for one in ROWS if one["source"].startswith(source))
    return {**found, **columns}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Llama 3.2 3B", "llama-3.2-3b"),
        ("Llama 2 7 B", "llama-2-7b"),
        ("meta-llama/Llama-3.2-3B", "llama-3.2-3b"),
        ("google/gemma-2-2b-it", "gemma-2-2b"),
        ("TinyLlama-1.1B", "tinyllama-1.1b"),
        ("tiny-llama", "tinyllama-1.1b"),
        ("phi-1.5 1.3 B", "phi-1.5"),
        ("qwen-1_8b-chat", "qwen-1.8b"),
        ("qwen-14b-chat", "qwen-14b"),
        ("stablelm-base-alpha-3b", "stablelm-alpha-3b"),
        ("StableLM Alpha 3 B", "stablelm-alpha-3b"),
        ("bert-large-uncased (sequence classification)", "bert-large"),
        ("T5-small", "t5-small"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "deepseek-r1-distill-qwen-1.5b"),
    ],
)
def test_models_by_the_names_that_people_print(text: str, name: str) -> None:
    assert model_of(text) == name


def test_an_unknown_model_is_left_out() -> None:
    for text in ("Frobnitz 12B", ""):
        with pytest.raises(LeftOutError, match="no configuration"):
            model_of(text)


def test_columns_become_keys() -> None:
    assert read(row("fitcheck")).case == {
        "model": "tinyllama-1.1b",
        "lora": 32,
        "lora_targets": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "dtype": "fp16",
        "quant": "nf4",
        "compute": "fp16",
        "double_quant": False,
        "batch": 2,
        "seq": 512,
        "optimizer": "adamw",
        "checkpointing": "nonreentrant",
        "attn": "eager",
        "outputs": "step",
        "gpu": "T4-16GB",
    }
    lean = read(next(one for one in ROWS if "8bit" in one["optimizer"])).case
    assert (lean["optimizer"], lean["step_in_backward"], lean["offload"]) == ("adamw-8bit", True, "checkpoints")
    assert (lean["loss"], lean["release"], lean["gpu"]) == ("chunk8", "2.5", "A100-80GB")
    theirs = next(one for one in ROWS if one["strategy"] == "FSDP2 128-way")
    spread = read({**theirs, "source": "another page"}).case
    assert (spread["strategy"], spread["world"], spread["autocast"], spread["seq"]) == ("fsdp2", 128, "bf16", 8192)
    assert read({**row("HF"), "source": "another page"}).case["head"] == "sequence-classification"


@pytest.mark.parametrize(
    ("columns", "keys"),
    [
        ({"gpu": "A100-SXM4-40GB"}, {"gpu": "A100-40GB"}),
        ({"gpu": "A10G 24GB"}, {"gpu": "A10", "memory": 24 << 30}),
        ({"torch_version": "2.0 (CUDA 11.8)"}, {"release": "2.0"}),
        ({"torch_version": "~2.2-2.4 (not stated)"}, {"release": "2.4"}),
        ({"quantization": "bnb.nf4-dq"}, {"double_quant": True}),
        (
            {"dtype": "fp32 params, bf16 FSDP mixed precision", "quantization": ""},
            {"dtype": "fp32", "autocast": "bf16"},
        ),
        ({"quantization": "bnb int8", "dtype": "fp16"}, {"quant": "int8", "compute": None}),
        ({"quantization": "none", "method": "lora"}, {"quant": None, "lora": 32}),
        ({"seq_len": "Alpaca, unpacked"}, {"seq": 1304}),
        ({"lora_targets": "q,gate,down"}, {"lora_targets": ["q_proj", "gate_proj", "down_proj"]}),
        ({"act_checkpointing": "off (1 GPU)"}, {"checkpointing": None}),
        ({"lora_targets": '["up_proj", "down_proj"]'}, {"lora_targets": ["up_proj", "down_proj"]}),
        ({"strategy": "DDP", "n_gpus": "8"}, {"strategy": "ddp", "world": 8}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_other_words_in_a_column(columns: dict[str, str], keys: dict[str, Any]) -> None:
    case = read(row("fitcheck", **columns)).case
    assert {key: case.get(key) for key in keys} == keys


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"method": "boft"}, "no case has the method 'boft'"),
        ({"quantization": "GPTQ int4"}, "is not simulated"),
        ({"seq_len": "unpacked"}, "seq_len is not stated"),
        ({"strategy": "FSDP 32 x TP 8 2D", "n_gpus": "256"}, "no single method"),
        ({"strategy": "FSDP2 +float8 linear", "n_gpus": "8"}, "float8"),
        ({"metric": "OOM verdict (no peak printed)"}, "no peak was printed"),
        ({"optimizer": "HybridAdam"}, "table2"),
    ],
)
def test_what_no_case_says_is_left_out(columns: dict[str, str], reason: str) -> None:
    left = compared(row("fitcheck", **columns))
    assert reason in left.left_out
    assert reason in told(left)


def test_every_row_is_a_case_or_has_a_reason() -> None:
    from graph.case import Case

    left_out = []
    for one in ROWS:
        try:
            Case.of(read(one).case)
        except LeftOutError as reason:
            left_out.append(str(reason))
    assert len(left_out) == 5
    assert all(len(reason) > 10 for reason in left_out)
    for table in ("litgpt", "guide", "trainers"):
        assert any(f"tests.accuracy {table}" in reason for reason in left_out)


def test_rows_are_chosen_by_columns_and_keys() -> None:
    one = Compared(row("fitcheck"), {"batch": 2, "model": "tinyllama-1.1b"}, ())
    assert matches(one, ["grade=A", "batch=2", "source=fitcheck", "model=tiny"])
    assert not matches(one, ["batch=4"])
    assert not matches(one, ["nothing=4"])


def test_a_missed_goal_is_said() -> None:
    good = row("fitcheck")
    close = Compared(good, {}, (), int(int(good["peak_bytes"]) * 1.01))
    far = Compared(good, {}, (), int(int(good["peak_bytes"]) * 1.12))
    assert summary([close])[0].endswith("met")
    assert summary([close, close, far])[0].endswith("MISSED")
    assert "left out: 1: MISSED" in summary([Compared(good, {}, (), left_out="why")])[0]


JUDGED = [one for one in ROWS if Compared(one, {}, ()).judged]


def test_judged_rows_are_as_close_as_they_should_be() -> None:
    errors = []
    for one in JUDGED:
        found = compared(one)
        assert found.error is not None, found.left_out
        errors.append(abs(found.error))
    assert len(errors) == 7
    assert sorted(errors)[3] <= GOAL[0]
    assert max(errors) <= GOAL[1]
    assert max(errors) <= 0.015  # where it stands: worse than that, something broke
