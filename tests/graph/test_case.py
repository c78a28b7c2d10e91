"""Cases: which keys and values are taken, what defaults they have, and what is said of bad ones."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph.case import KEYS, STRATEGIES, Case
from tests.places import ROOT
from traces.errors import ConfigError

#: Keys with the default that stands first in the documented table.
DOCUMENTED: dict[str, Any] = {
    "task": "train",
    "dtype": "fp32",
    "autocast": "",
    "quant": "",
    "attn": "sdpa",
    "batch": 1,
    "seq": 512,
    "dec_seq": None,
    "checkpointing": "",
    "optimizer": "adamw",
    "sgd_momentum": 0.0,
    "lora": 0,
    "accum": 1,
    "grad_sync": "each",
    "clip": 0.0,
    "steps": 3,
    "use_cache": False,
    "attention_mask": False,
    "cudnn_sdp": False,
    "loss": "",
    "strategy": "single",
    "world": 1,
    "schedule": "1F1B",
    "microbatches": 4,
    "return_outputs": True,
    "shapes": "given",
    "offload": "",
    "prompt": 512,
    "new": 32,
    "cache": "dynamic",
    "gpu": "A100-80GB",
    "memory": None,
    "alloc_conf": "",
    "release": "2.13",
    "deferred": "prompt",
    "sync": True,
}


def test_defaults_are_the_documented_ones() -> None:
    case = Case.of({"model": "gpt2"})
    assert {key: getattr(case, key) for key in DOCUMENTED} == DOCUMENTED
    assert case.document() == {"model": "gpt2"}


GOOD: list[dict[str, Any]] = [
    {"dtype": "bf16", "autocast": "fp16", "attn": "default", "attention_mask": "padded"},
    {"checkpointing": "selective", "save": ["attn", "matmul"], "every": 2},
    {"strategy": "fsdp2-tp", "world": 8, "mesh": {"fsdp2": 4, "tp": 2}, "memory": [None] * 7 + [10**10]},
    {"zero_extra": {"stage3_prefetch_bucket_size": 0}, "overlap_comm": True, "buckets": 50_000_000},
    {"task": "inference", "quant": "nf4", "prompt": 2048, "new": 1, "cache": "static"},
    {"quant": "int8", "lora": 8, "clip": 1, "release": "2.11.0+cu130"},
    {"experts": [1, 2, 0.5]},
    {"lora": 8, "lora_targets": ["q_proj", "v_proj"], "repeat_kv": True, "outputs": "next", "step_in_backward": True},
]


@pytest.mark.parametrize("given", GOOD, ids=lambda given: next(iter(given)))
def test_document_is_read_back(given: dict[str, Any]) -> None:
    case = Case.of({"model": "m", **given})
    document = json.loads(json.dumps(case.document()))
    assert Case.of(document) == case
    assert set(document) >= {"model"}


def test_words_to_save_come_in_one_text_as_well() -> None:
    for text in ("matmul+attn", "attn,matmul"):
        assert Case.of({"model": "m", "checkpointing": "selective", "save": text}).save == ("matmul", "attn")


def test_further_keys_of_zero_come_in_one_text_as_well() -> None:
    case = Case.of({"model": "m", "zero_extra": "stage3_max_live_parameters=0,round_robin_gradients=true"})
    assert case.zero_extra == {"stage3_max_live_parameters": 0, "round_robin_gradients": True}


@pytest.mark.parametrize(("quant", "dtype"), [("nf4", "bf16"), ("int8", "fp16"), ("", "fp32")])
def test_quantized_inference_has_16_bits_beside_its_layers(quant: str, dtype: str) -> None:
    case = Case.of({"model": "m", "task": "inference", "quant": quant})
    assert case.dtype == dtype
    full = Case.of({"model": "m", "task": "inference", "quant": quant, "dtype": "fp32"})
    assert Case.of(full.document()).dtype == "fp32"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"ckpt": "reentrant"}, "unknown key 'ckpt'; the nearest is 'checkpointing'"),
    ({"bacth": 2}, "unknown key 'bacth'; the nearest is 'batch'"),
    ({"device": "A100"}, "the nearest is 'gpu'"),
    ({"dtype": "bfloat16"}, "key 'dtype': 'bfloat16' should be one of 'fp32', 'bf16', 'fp16'; the nearest is 'bf16'"),
    ({"attn": "flash"}, "key 'attn'"),
    ({"batch": 0}, "key 'batch': 0 should be a whole number of at least 1"),
    ({"batch": True}, "key 'batch': True"),
    ({"batch": 2.0}, "key 'batch': 2.0"),
    ({"batch": "2"}, "key 'batch': '2'"),
    ({"batch": 2**60}, "key 'batch'"),
    ({"clip": float("nan")}, "key 'clip': nan should be a number of at least 0"),
    ({"clip": -1}, "key 'clip'"),
    ({"use_cache": 1}, "key 'use_cache': 1 should be true or false"),
    ({"attention_mask": "ones"}, "key 'attention_mask': 'ones' should be true, false or 'padded'"),
    ({"memory": 0}, "key 'memory': 0"),
    ({"memory": [1, 2]}, "key 'memory': 2 sizes for a world of 1"),
    ({"mesh": {"tp": 0}}, "key 'mesh'"),
    ({"strategy": "fsdp3"}, "the nearest is 'fsdp"),
    ({"world": 4}, "key 'world': 4 ranks need a 'strategy'"),
    ({"release": "latest"}, "key 'release'"),
    ({"alloc_conf": "a\nb"}, "key 'alloc_conf'"),
    ({"checkpointing": "selective"}, "key 'save': selective checkpointing needs"),
    ({"save": ["attn"]}, "key 'save': only for"),
    ({"every": 2}, "key 'every': only with 'checkpointing'"),
    ({"quant": "nf4"}, "key 'quant': quantized weights train only under adapters"),
    ({"experts": [0, 0]}, "key 'experts'"),
    ({"zero_extra": "no equals sign"}, "key 'zero_extra'"),
    ({"lora_targets": ["q_proj"]}, "key 'lora_targets': only with 'lora'"),
    ({"lora": 8, "lora_targets": "q proj"}, "key 'lora_targets': 'q proj' should be names of modules"),
    ({"repeat_kv": True, "attn": "eager"}, "key 'repeat_kv': only with"),
    ({"outputs": "kept"}, "key 'outputs'"),
    ({"outputs": "step", "loss": "chunk8"}, "key 'outputs': the loss 'chunk8'"),
    ({"step_in_backward": True, "accum": 2}, "key 'step_in_backward': not with"),
    ({"step_in_backward": True, "strategy": "ddp", "world": 2}, "key 'step_in_backward': only with"),
    ({"model": ""}, "key 'model'"),
    ({"model": 7}, "key 'model'"),
]


@pytest.mark.parametrize(("given", "said"), BAD, ids=lambda value: str(value)[:30])
def test_bad_keys_and_values_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Case.of({"model": "m", **given}, "cases.jsonl line 3")
    text = str(caught.value)
    assert text.startswith("cases.jsonl line 3: ")
    assert said in text
    assert "\n" not in text


def test_a_case_is_an_object_with_a_model() -> None:
    with pytest.raises(ConfigError, match="a case is an object"):
        Case.of(["gpt2"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="key 'model' is missing"):
        Case.of({"batch": 1})


@given(
    st.dictionaries(
        st.sampled_from(KEYS), st.none() | st.booleans() | st.integers() | st.floats() | st.text(), max_size=4
    )
)
def test_any_values_are_a_case_or_one_line(values: dict[str, Any]) -> None:
    said, case = "", None
    try:
        case = Case.of({"model": "m", **values})
    except ConfigError as error:
        said = str(error)
    assert len(said.splitlines()) <= 1
    assert case is None or Case.of(json.loads(json.dumps(case.document()))) == case


def test_every_key_has_a_check_and_strategies_are_named_once() -> None:
    assert all("check" in one.metadata for one in dataclasses.fields(Case))
    assert len(set(STRATEGIES)) == len(STRATEGIES)


def test_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from graph.case import Case; Case.of({'model': 'gpt2'})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
