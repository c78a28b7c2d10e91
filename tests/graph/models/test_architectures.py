"""Configurations name a class: that class is built, with as many parameters as transformers' own, or it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from graph.case import Case
from graph.errors import CaptureError
from graph.models.architectures import architecture
from graph.models.sources import build, transformers_config
from traces.errors import ConfigError, LLMemError

#: Classes that are no decoders with a language model's head, of text, images, both, audio, and encoder-decoders.
CLASSES = """
AlbertForMaskedLM ASTForAudioClassification BartForConditionalGeneration BeitForImageClassification BertForPreTraining
BertForQuestionAnswering BertForTokenClassification BertModel Blip2ForConditionalGeneration CLIPModel
CLIPVisionModelWithProjection ConvNextForImageClassification DebertaV2ForSequenceClassification
DeiTForImageClassification Dinov2Model DistilBertForQuestionAnswering ElectraForPreTraining
Gemma3ForConditionalGeneration HubertForCTC LayoutLMv3ForTokenClassification Llama4ForConditionalGeneration
LlavaForConditionalGeneration MarianMTModel ModernBertForMaskedLM MT5EncoderModel PegasusForConditionalGeneration
Qwen2_5_VLForConditionalGeneration Qwen2VLForConditionalGeneration Qwen3VLForConditionalGeneration
RobertaForMultipleChoice SamModel SegformerForSemanticSegmentation SiglipModel SwinModel T5Model ViTMAEForPreTraining
VitsModel Wav2Vec2ForCTC WhisperForConditionalGeneration XLMRobertaForTokenClassification
YolosForObjectDetection
"""
#: Those whose inputs nobody here knows: they are refused, in one line that says what to do.
REFUSED = """
ASTForAudioClassification Blip2ForConditionalGeneration HubertForCTC LayoutLMv3ForTokenClassification
RobertaForMultipleChoice SamModel Wav2Vec2ForCTC
"""


#: Where a default configuration contradicts itself: the published one's values.
MENDED: dict[str, dict[str, int]] = {
    "Gemma3ForConditionalGeneration": {"image_size": 896, "patch_size": 14},
    "Llama4ForConditionalGeneration": {"hidden_size": 1408},
}


def document(name: str, layers: int = 2) -> dict[str, Any]:
    """The default configuration of a class, with few layers, that names the class."""
    found: dict[str, Any] = getattr(transformers, name).config_class().to_dict()
    for part in (found, *(value for key, value in found.items() if key.endswith("_config") and value)):
        for key in ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "depth"):
            if isinstance(part.get(key), int) and "out_features" not in part:
                part[key] = layers
        if isinstance(part.get("layer_types"), list):
            part["layer_types"] = part["layer_types"][:layers]
    found.get("vision_config", {}).update(MENDED.get(name, {}))
    return found | {"architectures": [name]}


def parameters(module: torch.nn.Module) -> tuple[int, int]:
    """Parameters in all, and those that are trained (tables of sines are not)."""
    found = list(module.parameters())
    return sum(p.numel() for p in found), sum(p.numel() for p in found if p.requires_grad)


@pytest.mark.parametrize("name", CLASSES.split())
def test_named_class_is_built_or_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document(name)))
    kind = getattr(transformers, name)
    with torch.device("meta"):
        wanted = kind(kind.config_class.from_dict(document(name)))
    seq = 1024 if name in (*MENDED, "LlavaForConditionalGeneration") else 32
    case = Case.of({"model": str(path), "attn": "eager", "seq": seq})
    chosen = architecture(case, transformers_config(document(name), str(path)), str(path))
    assert (chosen.kind, chosen.note) == (kind, "")
    if name in REFUSED.split():
        with pytest.raises(CaptureError, match=f"^[^\n]*what {name} is fed [^\n]* by module:function$"):
            build(case)
        return
    built = build(case)
    assert (built.facts.name, built.facts.named) == (name, "")
    assert (built.facts.parameters, built.facts.trained) == parameters(wanted) == parameters(built.module)


def said(error: type[LLMemError], tmp_path: Path, **keys: Any) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in keys.items() if key != "head"}))
    with pytest.raises(error) as caught:
        build(Case.of({"model": str(path), "seq": 8, "head": keys.get("head", "")}))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_classes_that_cannot_be_built(tmp_path: Path) -> None:
    absent = said(ConfigError, tmp_path, model_type="gpt2", architectures=["GPT2ForRiddles"])
    assert "names 'GPT2ForRiddles', a class that transformers" in absent
    other = said(ConfigError, tmp_path, model_type="gpt2", architectures=["BertModel"])
    assert other.endswith("names BertModel, which has a BertConfig, but 'model_type' is 'gpt2'")
    assert "names 'torch'" in said(ConfigError, tmp_path, model_type="gpt2", architectures=["torch"])
    named = ["WhisperForConditionalGeneration"]
    assert "has no masked-lm" in said(
        CaptureError, tmp_path, model_type="whisper", architectures=named, head="masked-lm"
    )


def test_another_class_than_the_named_one_is_said(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "architectures": ["GPT2Model"]}))
    head = build(Case.of({"model": str(path), "seq": 8, "head": "causal-lm"}))
    assert (head.facts.name, head.facts.named) == ("GPT2LMHeadModel", "GPT2Model")
    assert head.assumptions == (f"{path} names GPT2Model, and head 'causal-lm' builds GPT2LMHeadModel",)
    named = build(Case.of({"model": str(path), "seq": 8}))
    assert named.assumptions == ("the mean of the first output of GPT2Model stands for a loss",)
    path.write_text(json.dumps({"model_type": "gpt2", "n_layer": 1}))
    assert "names no class (key 'architectures')" in build(Case.of({"model": str(path), "seq": 8})).assumptions[0]


def test_adapters_count_as_trained(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "architectures": ["GPT2LMHeadModel"]}))
    plain = build(Case.of({"model": str(path), "seq": 8})).facts
    adapted = build(Case.of({"model": str(path), "seq": 8, "lora": 4, "dtype": "bf16"})).facts
    assert (adapted.parameters, adapted.trained, adapted.dtype) == (plain.parameters, 4 * (768 + 3 * 768), "bf16")
