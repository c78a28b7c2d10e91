"""Cases: which keys and values are taken, what defaults they have, and what is said of bad ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph.case import GROUPS, KEYS, Case, meaningful
from tests.accuracy.recordings import COLUMNS, recordings
from tests.places import ROOT
from traces.errors import ConfigError

#: Keys with the default that stands first in the documented table.
DOCUMENTED: dict[str, Any] = {
    "task": "train",
    "dtype": "fp32",
    "autocast": "",
    "quant": "",
    "attn": "default",
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


ZERO: dict[str, Any] = {"model": "m", "strategy": "deepspeed-3", "world": 2}
GOOD: list[dict[str, Any]] = [
    {"dtype": "bf16", "autocast": "fp16", "attn": "default", "attention_mask": "padded"},
    {"checkpointing": "selective", "save": ["attn", "matmul"], "every": 2},
    {"strategy": "fsdp2-tp", "world": 8, "mesh": {"fsdp2": 4, "tp": 2}, "memory": [None] * 7 + [10**10]},
    {
        "strategy": "deepspeed-3",
        "world": 2,
        "zero_extra": {"stage3_prefetch_bucket_size": 0},
        "overlap_comm": True,
        "buckets": 50_000_000,
    },
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


@pytest.mark.parametrize("table", COLUMNS)
def test_recorded_runs_have_no_key_that_means_nothing(table: str) -> None:
    cases = [Case.of(one.case, str(one)) for one in recordings(table)]
    assert len(cases) > 10


def test_words_to_save_come_in_one_text_as_well() -> None:
    for text in ("matmul+attn", "attn,matmul"):
        assert Case.of({"model": "m", "checkpointing": "selective", "save": text}).save == ("matmul", "attn")


def test_further_keys_of_zero_come_in_one_text_as_well() -> None:
    case = Case.of({**ZERO, "zero_extra": "stage3_max_live_parameters=0,round_robin_gradients=true"})
    assert case.zero_extra == {"stage3_max_live_parameters": 0, "round_robin_gradients": True}


@pytest.mark.parametrize(("quant", "dtype"), [("nf4", "bf16"), ("int8", "fp16"), ("", "fp32")])
def test_quantized_inference_has_16_bits_beside_its_layers(quant: str, dtype: str) -> None:
    case = Case.of({"model": "m", "task": "inference", "quant": quant})
    assert case.dtype == dtype
    full = Case.of({"model": "m", "task": "inference", "quant": quant, "dtype": "fp32"})
    assert Case.of(full.document()).dtype == "fp32"


#: A configuration and further keys, and the dtype that a case has without one.
USUAL_DTYPES: list[tuple[Any, dict[str, Any], str]] = [
    ({"dtype": "bfloat16"}, {}, "bf16"),
    ({"torch_dtype": "float16"}, {}, "fp16"),
    ({"text_config": {"torch_dtype": "bfloat16"}}, {}, "bf16"),
    ({"torch_dtype": "float8_e4m3fn"}, {}, "fp32"),
    ({"torch_dtype": None}, {}, "fp32"),
    ({}, {}, "fp32"),
    ([], {}, "fp32"),
    ({"dtype": "bfloat16"}, {"dtype": "auto"}, "bf16"),
    ({"dtype": "bfloat16"}, {"dtype": "fp32"}, "fp32"),
    ({"dtype": "bfloat16"}, {"autocast": "bf16"}, "fp32"),
    ({"dtype": "bfloat16"}, {"strategy": "gemini", "world": 2}, "fp16"),
    ({"dtype": "bfloat16"}, {"task": "inference", "quant": "int8"}, "fp16"),
]


@pytest.mark.parametrize(("config", "given", "dtype"), USUAL_DTYPES, ids=str)
def test_the_dtype_is_that_of_the_configuration(config: Any, given: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model in (str(tmp_path), str(tmp_path / "config.json")):
        case = Case.of({"model": model, **given})
        assert case.dtype == case.whole()["dtype"] == case.headline()["dtype"] == dtype
        assert Case.of(case.document()) == case
        if dtype != "fp32":  # a case that is read where the configuration has gone stays what it was
            assert case.document()["dtype"] == dtype


@pytest.mark.parametrize(
    ("model", "dtype"),
    [("llama-3.1-8b", "bf16"), ("Qwen/Qwen2.5-7B", "bf16"), ("llama-2-7b", "fp16"), ("gpt2", "fp32"), ("no:t", "fp32")],
)
def test_models_of_today_have_sixteen_bits(model: str, dtype: str) -> None:
    assert Case.of({"model": model}).dtype == dtype


@pytest.mark.parametrize("model", ["nothing", "/dev/null", "~nobody/x", "a" * 5000, "a\0b", "."])
def test_a_model_that_cannot_be_read_is_left_to_those_who_build_it(model: str) -> None:
    assert Case.of({"model": model}).dtype == "fp32"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"ckpt": "reentrant"}, "unknown key 'ckpt'; the nearest is 'checkpointing'"),
    ({"bacth": 2}, "unknown key 'bacth'; the nearest is 'batch'"),
    ({"device": "A100"}, "the nearest is 'gpu'"),
    (
        {"dtype": "bfloat"},
        "key 'dtype': 'bfloat' should be one of 'auto', 'fp32', 'bf16', 'fp16'; the nearest is 'bf16'",
    ),
    ({"max_length": 8, "seq": 9}, "'seq' is given under two names"),
    ({"bf16": "yes"}, "key 'bf16': 'yes' should be true or false"),
    ({"bf16": True, "autocast": "fp16"}, "'autocast' is given under two names"),
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
    ({"memory": 24}, "key 'memory': 24 should be bytes (at least 1 MiB)"),
    ({"memory": [10**9, 2 * 10**9]}, "key 'memory': 2 sizes for a world of 1"),
    ({"mesh": {"tp": 0}}, "key 'mesh'"),
    ({"strategy": "fsdp3"}, "the nearest is 'fsdp"),
    ({"world": 4}, "key 'world': 4 ranks need a 'strategy'"),
    ({"release": "latest"}, "key 'release'"),
    ({"alloc_conf": "a\nb"}, "key 'alloc_conf'"),
    ({"checkpointing": "selective"}, "key 'save': selective checkpointing needs"),
    ({"save": ["attn"]}, "key 'save': only with 'checkpointing': 'selective'"),
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


#: Keys and values as transformers, TRL, peft, accelerate, torchrun and DeepSpeed spell them, and their own names.
THEIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, {"batch": 4, "accum": 2}),
    ({"max_length": 128, "max_grad_norm": 1.0, "max_steps": 5}, {"seq": 128, "clip": 1.0, "steps": 5}),
    ({"torch_dtype": "bfloat16", "attn_implementation": "eager"}, {"dtype": "bf16", "attn": "eager"}),
    ({"dtype": "torch.float16", "bf16": False}, {"dtype": "fp16", "autocast": ""}),
    ({"bf16": True, "gradient_checkpointing": True}, {"autocast": "bf16", "checkpointing": "nonreentrant"}),
    ({"mixed_precision": "no"}, {"autocast": ""}),
    ({"optim": "adamw_torch"}, {"optimizer": "adamw"}),
    ({"optim": "adamw_torch_fused"}, {"optimizer": "adamw-fused"}),
    ({"optim": "adamw_bnb_8bit"}, {"optimizer": "adamw-8bit"}),
    ({"load_in_4bit": True, "lora_r": 8, "lora_target_modules": ["q_proj"]}, {"quant": "nf4", "lora": 8}),
    ({"nproc_per_node": 4, "strategy": "fsdp"}, {"world": 4, "strategy": "fsdp2"}),
    ({"num_processes": 4, "strategy": "zero3"}, {"world": 4, "strategy": "deepspeed-3"}),
    ({"world": 4, "strategy": "zero2", "grad_accum_dtype": "float32"}, {"grad_accum_dtype": "fp32"}),
    ({"task": "inference", "max_new_tokens": 9, "cache_implementation": "static"}, {"new": 9, "cache": "static"}),
]


@pytest.mark.parametrize(("given", "own"), THEIRS, ids=lambda value: " ".join(value))
def test_names_of_other_libraries_are_taken(given: dict[str, Any], own: dict[str, Any]) -> None:
    case = Case.of({"model": "gpt2", **given})
    assert {key: getattr(case, key) for key in own} == own
    assert set(case.document()) <= set(KEYS)


@given(
    st.dictionaries(
        st.sampled_from([*KEYS]), st.none() | st.booleans() | st.integers() | st.floats() | st.text(), max_size=4
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


def test_every_key_is_declared_whole() -> None:
    for key in KEYS.values():
        assert key.about.help.endswith("."), key.name
        assert key.about.group in GROUPS, key.name
        assert key.parts, key.name
    names = [name for key in KEYS.values() for name in (key.name, *key.about.aliases, *key.about.switches)]
    assert len(names) == len(set(names))


MESH = {"mesh": {"pp": 2, "dp": 2}}
#: A case with a key that means nothing in it, where it would mean something, and keys that make it so.
NOWHERE: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"buckets": 5}, "'strategy': 'deepspeed-1', 'deepspeed-2' or 'deepspeed-3'", ZERO),
    ({"init": "zero.Init", "strategy": "deepspeed-2", "world": 2}, "'strategy': 'deepspeed-3'", ZERO),
    ({"schedule": "GPipe"}, "'strategy': 'pp', or a 'mesh' with pp", {"strategy": "pp", "world": 2}),
    ({"microbatches": 8, "mesh": {"dp": 2}}, "'strategy': 'pp', or a 'mesh' with pp", MESH),
    ({"prompt": 3}, "'task': 'inference'", {"task": "inference"}),
    ({"seq": 64, "task": "inference"}, "'task': 'train'", {"task": "train"}),
    ({"clip": 1.0, "task": "inference"}, "'task': 'train'", {"task": "train"}),
    ({"sgd_momentum": 0.9}, "'optimizer': 'sgd'", {"optimizer": "sgd"}),
    ({"double_quant": False, "quant": "int8", "lora": 4}, "'quant': 'nf4'", {"quant": "nf4"}),
    ({"tp_loss": "vocab", **MESH}, "'strategy': 'tp' or 'tp-sp'", {"mesh": {}, "strategy": "tp", "world": 2}),
    ({"grad_sync": "last", "strategy": "gemini", "mesh": {"dp": 2}}, "'strategy': 'ddp'", {"strategy": "ddp"}),
    ({"reshard_backward": False, "strategy": "fsdp2", "world": 2}, "'grad_sync': 'last'", {"grad_sync": "last"}),
    ({"attention_mask": True, "model": "mine:make"}, "a model that is a configuration", {"model": "gpt2"}),
]


@pytest.mark.parametrize(("given", "said", "more"), NOWHERE, ids=lambda value: next(iter(value)))
def test_a_key_that_means_nothing_says_where_it_does(given: dict[str, Any], said: str, more: dict[str, Any]) -> None:
    name = next(iter(given))
    with pytest.raises(ConfigError, match=rf"^case: key '{name}': only with {re.escape(said)}"):
        Case.of({"model": "gpt2", **given})
    default = KEYS[name].default
    assert getattr(Case.of({"model": "gpt2", **given, name: default}), name) == default  # as where nothing is given
    assert getattr(Case.of({"model": "gpt2", **given, **more}), name) == given[name]


def test_keys_of_some_strategies_may_wait_for_one() -> None:
    assert Case.of({"model": "gpt2", "schedule": "GPipe"}, any_strategy=True).schedule == "GPipe"
    with pytest.raises(ConfigError, match="key 'prompt': only with 'task': 'inference'"):
        Case.of({"model": "gpt2", "prompt": 3}, any_strategy=True)
    keys = {"model": "gpt2", "seq": 64, "schedule": "GPipe"}
    assert meaningful({**keys, "strategy": "pp"}) == {**keys, "strategy": "pp"}
    assert meaningful({**keys, "strategy": "ddp"}) == {"model": "gpt2", "seq": 64, "strategy": "ddp"}


def test_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from graph.case import Case; Case.of({'model': 'gpt2'})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
