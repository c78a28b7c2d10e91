"""Models from a case: catalogue, configurations, users' functions, and what is said of those that cannot be made."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.places import DATA

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from graph.case import KEYS, Case
from graph.errors import CaptureError
from graph.loop import losses
from graph.loop.inputs import hosts
from graph.models import catalogue
from graph.models.lookup import configuration
from graph.models.sources import Built, build, saved_operators, transformers_config
from traces.errors import ConfigError, LLMemError

TRAINING = DATA / "training"
TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}


def recorded(table: str) -> list[dict[str, str]]:
    """The rows of a table of recorded runs."""
    return list(csv.DictReader(io.StringIO(gzip.decompress((TRAINING / f"{table}.csv.gz").read_bytes()).decode())))


def made(**keys: Any) -> Built:
    return build(Case.of(keys))


def numbers(module: Any) -> tuple[int, int]:
    """Parameters, and those that are trained."""
    parameters = list(module.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


@pytest.fixture
def configured(tmp_path: Path) -> Iterator[Any]:
    """Writes a config.json and answers its folder."""

    def write(document: Any, name: str = "config.json") -> str:
        text = document if isinstance(document, str) else json.dumps(document)
        (tmp_path / name).write_text(text)
        return str(tmp_path)

    return write  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------------- catalogue


@pytest.mark.parametrize("name", catalogue.names())
def test_catalogue_model_has_its_published_parameters(name: str) -> None:
    entry = catalogue.entries()[name]
    config = entry["config"]
    if "_class_name" in config:
        pytest.importorskip("diffusers")
    images = {"llama4": 144, "gemma4": 256, "gemma4_unified": 256}  # tokens of its sequence
    seq = images.get(config.get("model_type"), 15) + 1
    built = made(model=name, attn="default", seq=seq, dtype="bf16")
    assert numbers(built.module)[0] == entry["parameters"]
    assert {p.device.type for p in built.module.parameters()} == {"meta"}
    assert type(built.module).__name__ == config.get("_class_name", config.get("architectures", [""])[0])
    assert built.module.training


@pytest.mark.parametrize("table", ["single", "seq2seq", "inference"])
def test_catalogue_models_have_the_recorded_parameters(table: str) -> None:
    tasks = {"cls": "sequence-classification"}
    runs = {
        (row["model"], tasks.get(row.get("task", ""), ""), int(row["params"]))
        for row in recorded(table)
        if row["params"] and row.get("lora", "0") == "0" and not row.get("quant")
    }
    assert len(runs) >= 2
    for model, head, parameters in runs:
        assert numbers(made(model=model, head=head, attn="default", seq=16).module)[0] == parameters, model


def test_catalogue_has_the_models_that_people_ask_for() -> None:
    families = "opt bloom codegen biogpt gpt-neo gpt2 bert roberta vit llama-7b llama-2 llama-3 mistral mixtral qwen2-"
    families += " qwen2.5 qwen3 gemma-2b gemma-2 gemma-3 phi pythia t5 flan-t5 bart santacoder starcoder octocoder"
    for family in families.split():
        assert any(name.startswith(family) for name in catalogue.names()), family


@pytest.mark.parametrize("spelling", ["llama-2-7b", "Llama-2-7B", "meta-llama/Llama-2-7b-hf", "llama-2-7b-hf"])
def test_catalogue_spellings(spelling: str) -> None:
    assert catalogue.find(spelling) == "llama-2-7b"


def test_catalogue_entries_say_where_they_come_from() -> None:
    for name, entry in catalogue.entries().items():
        assert entry["repository"] or entry["note"], name
        assert {"model_type", "architectures"} <= set(entry["config"]) or "_class_name" in entry["config"], name
    copy = catalogue.configuration("gpt2")
    copy["n_layer"] = 1
    assert catalogue.configuration("gpt2")["n_layer"] == 12


# ------------------------------------------------------------------------------------- what training asks for


@pytest.mark.parametrize(
    ("model", "rank"),
    [("opt-125m", 8), ("tinyllama-1.1b", 8), ("llama-2-7b", 16), ("qwen2-0.5b", 16), ("bloom-560m", 8)],
)
def test_adapters_train_what_was_recorded(model: str, rank: int) -> None:
    attn = "eager" if model.startswith("bloom") else "sdpa"
    wanted = {
        int(r["trainable"])
        for r in recorded("single")
        if (r["model"], r["lora"]) == (model, str(rank)) and r["trainable"]
    }
    assert len(wanted) == 1
    assert numbers(made(model=model, lora=rank, attn=attn).module)[1] == wanted.pop()


def test_adapters_of_an_architecture_without_a_list_are_on_all_linear_layers() -> None:
    built = made(model="biogpt", lora=4)
    hidden, inner, layers = 1024, 4096, 24
    assert numbers(built.module)[1] == 4 * layers * (4 * 2 * hidden + 2 * (hidden + inner))
    assert "all linear layers" in built.assumptions[0]


HEADS = [
    ("gpt2", "", "GPT2LMHeadModel", {"input_ids": (2, 8)}),
    ("t5-small", "", "T5ForConditionalGeneration", {"input_ids": (2, 8), "labels": (2, 5)}),
    ("bert-base", "", "BertForMaskedLM", {"input_ids": (2, 8), "labels": (2, 8)}),
    ("bert-base", "sequence-classification", "BertForSequenceClassification", {"input_ids": (2, 8), "labels": (2,)}),
    ("vit-base", "", "ViTForImageClassification", {"pixel_values": (2, 3, 224, 224), "labels": (2,)}),
]


@pytest.mark.parametrize(("model", "head", "kind", "shapes"), HEADS)
def test_head_and_inputs_follow_the_architecture(model: str, head: str, kind: str, shapes: dict[str, Any]) -> None:
    two = {"dec_seq": 5} if "decoder_input_ids" in shapes or kind.startswith(("T5", "Bart")) else {}
    built = made(model=model, head=head, batch=2, seq=8, **two)
    assert type(built.module).__name__ == kind
    assert {name: tuple(tensor.shape) for name, tensor in built.host()} == shapes


def test_without_architectures_the_usual_head_is_taken(configured: Any) -> None:
    encoder = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    assert type(made(model=configured(encoder)).module).__name__ == "BertForMaskedLM"
    assert type(made(model=configured(TINY), seq=8).module).__name__ == "LlamaForCausalLM"


def test_a_mask_is_ones_and_labels_are_the_ids() -> None:
    built = made(model="gpt2", batch=3, seq=4, attention_mask=True)
    batch = {name: tensor for name, tensor in hosts(built.batch)}
    assert batch["attention_mask"].tolist() == [[1] * 4] * 3
    assert [one.keys for one in built.batch] == [("input_ids", "labels"), ("attention_mask",)]


def test_images_are_in_the_dtype_of_the_weights() -> None:
    tensors = dict(made(model="vit-base", dtype="bf16").host())
    assert tensors["pixel_values"].dtype == torch.bfloat16
    assert tensors["labels"].dtype == torch.int64


def test_checkpointing_is_on_where_it_is_asked_for() -> None:
    def layers(**keys: Any) -> list[bool]:
        module = made(model="gpt2", **keys).module
        return [layer.gradient_checkpointing for layer in module.transformer.h]

    assert not any(layers())
    assert all(layers(checkpointing="reentrant"))
    assert layers(checkpointing="nonreentrant", every=4) == [i % 4 == 0 for i in range(12)]


def test_selective_checkpointing_keeps_products_and_attention() -> None:
    names = {str(operator) for operator in saved_operators(("matmul", "attn"))}
    assert {"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"} < names
    assert sum("attention" in name for name in names) == 3


def test_tied_weights_are_one_parameter() -> None:
    module = made(model="gpt2").module
    assert module.lm_head.weight is module.transformer.wte.weight


def test_experts_are_split_as_stated(configured: Any) -> None:
    named = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    mixture = {**TINY, **named, "num_local_experts": 4, "num_experts_per_tok": 2}
    folder = configured(mixture)
    assert made(model=folder, seq=8).assumptions == (
        "mixture of experts: the 4 experts get equal shares of the tokens",
    )
    assert "shares 1, 1, 1, 5" in made(model=folder, seq=8, experts=[1, 1, 1, 5]).assumptions[0]
    with pytest.raises(ConfigError, match="2 shares for the 4 experts"):
        made(model=folder, seq=8, experts=[1, 2])
    with pytest.raises(ConfigError, match="key 'experts': the model has no experts"):
        made(model=configured(TINY), seq=8, experts=[1, 2])


def test_adapters_of_experts_are_counted(configured: Any) -> None:
    mixture = {**TINY, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    built = made(model=configured(mixture), seq=8, lora=2, lora_targets="all-linear")
    adapters = numbers(built.module)[1]
    besides = 2 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + (32 + 4))  # rank 2, two layers: q, o; k, v; the router
    stated = f"lora: {adapters - besides:,} of the {adapters:,} trained parameters are adapters of experts"
    assert [text.partition(";")[0] for text in built.assumptions if text.startswith("lora: ")] == [stated]
    attention = made(model=configured(mixture), seq=8, lora=2, lora_targets=["q_proj"])
    assert not [text for text in attention.assumptions if text.startswith("lora: ")]


def test_a_quantization_of_the_configuration_is_said(configured: Any) -> None:
    named = {**TINY, "architectures": ["LlamaForCausalLM"]}
    quantized = {**named, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}
    (stated,) = made(model=configured(quantized), seq=8).assumptions
    assert stated.startswith("the quantization_config of the configuration (mxfp4) is not followed: weights are in ")


# ----------------------------------------------------------------------------------------------------- losses


def real(folder: str, **keys: Any) -> tuple[Any, Built]:
    """A tiny model with weights on the CPU, in no dropout, and what was built for it."""
    built = made(model=folder, seq=16, batch=2, **keys)
    torch.manual_seed(0)
    module = type(built.module)(built.config).eval()
    return module, built


def test_loss_of_transformers_4_29_is_the_loss(configured: Any) -> None:
    folder = configured(TINY)
    module, built = real(folder, loss="transformers-4.29")
    ids = torch.randint(0, 96, (2, 16))
    wanted = module(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(built.forward(module, {"input_ids": ids}), wanted)


@pytest.mark.parametrize("length", [16, 9, 20])
@pytest.mark.parametrize("loss", ["chunk8", "chunk8-ckpt"])
def test_a_loss_in_parts_is_the_loss(configured: Any, loss: str, length: int) -> None:
    module, built = real(configured(TINY), loss=loss)
    ids = torch.randint(0, 96, (2, length))
    wanted = module(input_ids=ids, labels=ids).loss
    losses.in_parts(module, checkpointed=loss == "chunk8-ckpt")
    torch.testing.assert_close(built.forward(module, {"input_ids": ids}), wanted)


def test_architectures_that_cast_their_logits_cast_the_loss_back() -> None:
    class Model(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> Any:
            return type("Output", (), {"logits": torch.randn(1, 4, 8, dtype=torch.float16)})

    inputs = {"input_ids": torch.zeros(1, 4, dtype=torch.int64), "labels": torch.zeros(1, 4, dtype=torch.int64)}
    model: Any = Model()
    for kind in ("codegen", "opt"):
        assert losses.like_transformers_4_29({}, kind, model, dict(inputs)).dtype == torch.float16


# ------------------------------------------------------------------------------------------------- what is wrong


def said(error: type[LLMemError], **keys: Any) -> str:
    with pytest.raises(error) as caught:
        made(**keys)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text


def test_unknown_model() -> None:
    assert "near it: 'llama-2-7b'" in said(ConfigError, model="llama-2-7c")
    assert "nothing is downloaded" in said(ConfigError, model="somebody/some-model")


def test_bad_configurations(configured: Any, tmp_path: Path) -> None:
    assert "no such file" in said(ConfigError, model=str(tmp_path / "none" / "config.json"))
    assert "no such file" in said(ConfigError, model=str(tmp_path))
    folder = configured('{\n "model_type": "llama",\n oops}')
    assert "config.json, line 3, column 2: not JSON" in said(ConfigError, model=folder)
    assert "a JSON object, not list" in said(ConfigError, model=configured([1]))
    diffusers = configured({"_class_name": "AutoencoderKL", "in_channels": 3})
    assert "a configuration of diffusers (AutoencoderKL)" in said(ConfigError, model=diffusers)
    assert "key 'model_type' is missing" in said(ConfigError, model=configured({"hidden_size": 1}))
    assert "knows no model_type 'lama'; the nearest is 'llama'" in said(
        ConfigError, model=configured({"model_type": "lama"})
    )
    text = said(ConfigError, model=configured({**TINY, "hidden_size": "wide"}))
    assert "hidden_size" in text
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "byte 0 is not UTF-8" in said(ConfigError, model=str(tmp_path))
    assert "config.json" in said(ConfigError, model=configured("[" * 100_000))


def test_sequence_longer_than_positions(configured: Any) -> None:
    text = said(ConfigError, model="gpt2", seq=1025)
    assert text.startswith("key 'seq': 1025 tokens do not fit the 1024 positions of the model (")
    assert text.endswith(" in catalogue: gpt2); 1024 is the longest")
    assert "key 'dec_seq'" in said(ConfigError, model="bart-base", seq=8, dec_seq=2000)
    assert "512 is the longest" in said(ConfigError, model="roberta-base", seq=513)
    assert made(model="t5-small", seq=4096).batch
    assert made(model="bloom-560m", attn="eager", seq=4096).batch


def test_what_transformers_refuses(configured: Any) -> None:
    assert "no attn 'sdpa' for bloom; use 'eager' or 'default'" in said(CaptureError, model="bloom-560m", attn="sdpa")
    assert "transformers has no masked-lm of gpt2" in said(CaptureError, model="gpt2", head="masked-lm")
    assert "config.json" in said(CaptureError, model=configured({**TINY, "num_key_value_heads": 0}), seq=8)


def test_loss_is_for_decoders() -> None:
    assert "key 'loss'" in said(ConfigError, model="t5-small", loss="chunk8")


# --------------------------------------------------------------------------------------------- users' functions

MODULE = """
import torch
from torch import nn

def mlp(batch, seq):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    return model, torch.zeros(batch, seq, 8), lambda out: out.mean()

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 1)
    def forward(self, x, scale):
        return {"loss": self.line(x).mean() * scale}

def named():
    return Named(), {"x": torch.zeros(2, 4), "scale": 3}

def wide():
    return nn.Linear(4, 4), torch.zeros(2, 4)

def broken():
    raise RuntimeError("no\\nluck")

def nothing():
    return 7

number = 1
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_models.py").write_text(MODULE)
    (tmp_path / "own_faulty.py").write_text("import absent_package_of_mine\n")
    monkeypatch.chdir(tmp_path)
    yield
    import sys

    sys.modules.pop("own_models", None)


@pytest.mark.usefixtures("own")
def test_own_function_gives_module_and_inputs() -> None:
    built = made(model="own_models:mlp", batch=3, seq=5)
    (name, host), *others = built.host()
    assert (tuple(host.shape), others) == ((3, 5, 8), [])
    assert numbers(built.module)[0] == 8 * 16 + 16 + 16 + 1
    meta = {name: host.to("meta")}
    assert built.forward(built.module, meta).shape == ()
    named = made(model="own_models:named", dtype="bf16")
    assert next(named.module.parameters()).dtype == torch.bfloat16
    tensors = {name: host.to("meta") for name, host in named.host()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert named.forward(named.module, tensors).shape == ()


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("written", ["own_models.py:mlp", "./own_models.py:mlp"])
def test_a_function_may_be_named_by_its_file(written: str) -> None:
    assert numbers(made(model=written).module) == numbers(made(model="own_models:mlp").module)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("key", ["batch", "seq"])
def test_a_size_that_the_function_does_not_take_is_refused(key: str) -> None:
    text = said(ConfigError, model="own_models:named", **{key: 8})
    assert text.startswith(f"key '{key}': own_models:named has no parameter '{key}'")
    made(model="own_models:named", **{key: KEYS[key].default})


@pytest.mark.usefixtures("own")
def test_own_function_that_is_wrong() -> None:
    assert "has no function 'mpl'; the nearest name is 'mlp'" in said(ConfigError, model="own_models:mpl")
    assert "no module 'own_absent'" in said(ConfigError, model="own_absent:mlp")
    assert "has no function 'number'" in said(ConfigError, model="own_models:number")
    broken = said(CaptureError, model="own_models:broken")
    assert re.fullmatch(r"model own_models:broken: RuntimeError at own_models\.py:\d+ \(broken\): no luck", broken)
    assert "not int" in said(CaptureError, model="own_models:nothing")
    assert "absent_package_of_mine" in said(CaptureError, model="own_faulty:mlp")
    assert "key 'lora': only with a model that is a configuration" in said(ConfigError, model="own_models:mlp", lora=8)
    wide = made(model="own_models:wide")
    tensors = {name: host.to("meta") for name, host in wide.host()}
    with pytest.raises(CaptureError, match=r"gives \(2, 4\), not a scalar loss"):
        wide.forward(wide.module, tensors)


@pytest.mark.parametrize("kind", ["bamba", "falcon_h1", "mamba2", "nemotron_h", "granitemoehybrid"])
def test_a_configuration_with_infinity_as_transformers_writes_it(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    written = transformers.AutoConfig.for_model(kind)
    written.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    if "__float__" not in text:  # a release that writes it otherwise: as the others wrote it
        written.time_step_limit = (0.0, math.inf)
        written.save_pretrained(tmp_path)
        text = (tmp_path / "config.json").read_text()
    assert '"__float__": "Infinity"' in text
    found = configuration(str(tmp_path))
    assert found.document["time_step_limit"] == [0.0, math.inf]
    assert transformers_config(found.document, found.place).model_type == kind


def test_an_object_that_only_resembles_a_float_stays_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": {"__float__": "1.5"}, "b": {"__float__": "NaN", "more": 1}}')
    assert configuration(str(tmp_path)).document == {"a": {"__float__": "1.5"}, "b": {"__float__": "NaN", "more": 1}}


@pytest.mark.parametrize(("kind", "expected"), [("bloom", "eager"), ("gpt2", "sdpa"), ("gpt_oss", "eager")])
def test_attention_is_what_transformers_chooses(tmp_path: Path, kind: str, expected: str) -> None:
    sizes = {
        "bloom": {"hidden_size": 32, "n_layer": 1, "n_head": 2, "vocab_size": 50},
        "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 50},
        "gpt_oss": {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 50, "num_local_experts": 2},
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **sizes[kind]}))
    assert build(Case(str(tmp_path), seq=8)).module.config._attn_implementation == expected
