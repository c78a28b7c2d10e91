"""Images and audio beside text: small models of eight families run from their configuration to a step graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from graph.case import Case
from graph.model import StepGraph
from graph.models.sources import Built, build
from graph.recorder.capture import capture
from traces.errors import ConfigError, LLMemError

WIDTH: dict[str, int] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = WIDTH | {"hidden_size": 64, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 512}
VISION = WIDTH | {"image_size": 32, "patch_size": 8}
#: 16 patches of 8 x 8 pixels; joined four by four they are 4 tokens.
PATCHES, JOINED = 16, 4
QWEN_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 64}
QWEN_TOKENS = {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502, "vision_end_token_id": 503}
#: By class: the configuration, and how many of a sample's 64 tokens are an image (the largest square that half of them
#: has room for where images have any size).
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "LlavaForConditionalGeneration": (
        {
            "model_type": "llava",
            "image_token_index": 500,
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {"model_type": "clip_vision_model", **VISION},
        },
        PATCHES,
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        {
            "model_type": "qwen2_5_vl",
            **QWEN_TOKENS,
            "text_config": {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
            "vision_config": {**QWEN_VISION, "fullatt_block_indexes": [1], "window_size": 56},
        },
        25,
    ),
    "Qwen3VLForConditionalGeneration": (
        {
            "model_type": "qwen3_vl",
            **QWEN_TOKENS,
            "text_config": {
                **TEXT,
                "head_dim": 16,
                "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]},
            },
            "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
        },
        25,
    ),
    "Gemma3ForConditionalGeneration": (
        {
            "model_type": "gemma3",
            "image_token_index": 500,
            "mm_tokens_per_image": JOINED,
            "text_config": {**TEXT, "head_dim": 16, "sliding_window": 64},
            "vision_config": VISION,
        },
        JOINED,
    ),
    "Llama4ForConditionalGeneration": (
        {
            "model_type": "llama4",
            "image_token_index": 500,
            "text_config": {
                **TEXT,
                "head_dim": 16,
                "intermediate_size_mlp": 96,
                "num_local_experts": 4,
                "attention_chunk_size": 64,
                "pad_token_id": 0,
            },
            "vision_config": {
                **VISION,
                "intermediate_size": 128,
                "vision_output_dim": 64,
                "projector_input_dim": 64,
                "projector_output_dim": 64,
                "pixel_shuffle_ratio": 0.5,
            },
        },
        JOINED,
    ),
    "WhisperForConditionalGeneration": (
        {
            "model_type": "whisper",
            "d_model": 32,
            **{f"{part}_{key}": n for part in ("encoder", "decoder") for key, n in (("layers", 2), ("ffn_dim", 64))},
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "max_source_positions": 100,
            "max_target_positions": 64,
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
            **ENDS,
        },
        0,
    ),
    "CLIPModel": (
        {
            "model_type": "clip",
            "text_config": {**WIDTH, **ENDS, "max_position_embeddings": 64},
            "vision_config": VISION,
        },
        0,
    ),
    "SiglipModel": (
        {"model_type": "siglip", "text_config": {**WIDTH, **ENDS, "projection_size": 32}, "vision_config": VISION},
        0,
    ),
}


def case(name: str, folder: Path, **keys: Any) -> Case:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(MODELS[name][0] | {"architectures": [name]}))
    return Case.of({"model": str(path), "batch": 2, "seq": 64, "steps": 2, **keys})


def born(graph: StepGraph, category: str) -> list[int]:
    """Bytes of the storages of a category, in order of birth."""
    return graph.storages.bytes[graph.storages.category == graph.names.index(category)].tolist()


GEMMA_4 = {
    **TEXT,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}
GEMMA_4_VISION = WIDTH | {"num_key_value_heads": 4, "head_dim": 8, "global_head_dim": 8}
#: Of those whose images come as patches with their places, too.
PLACED: dict[str, dict[str, Any]] = {
    "Gemma4ForConditionalGeneration": {
        "model_type": "gemma4",
        "image_token_id": 500,
        "text_config": GEMMA_4,
        "vision_config": GEMMA_4_VISION,
    },
    "Gemma4UnifiedForConditionalGeneration": {
        "model_type": "gemma4_unified",
        "image_token_id": 500,
        "text_config": {**GEMMA_4, "vocab_size_per_layer_input": 0},
        "vision_config": {"mm_embed_dim": 64, "output_proj_dims": 64},
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_inputs_are_what_the_model_takes(name: str, tmp_path: Path) -> None:
    """transformers itself checks, on the CPU with weights, that image tokens and features of images agree."""
    built = build(case(name, tmp_path))
    host = dict(built.host())
    tokens = MODELS[name][1]
    if tokens:
        assert (host["input_ids"] == 500).sum(1).tolist() == [tokens] * 2
        assert built.assumptions[-1].endswith(f" a sample, {tokens} of its 64 tokens")
    torch.manual_seed(0)
    module = type(built.module)(built.config)
    loss = built.forward(module, host)
    assert torch.isfinite(loss)
    assert loss.requires_grad


@pytest.mark.parametrize("name", MODELS)
def test_captured_end_to_end(name: str, tmp_path: Path) -> None:
    asked = case(name, tmp_path, dtype="bf16")
    built = build(asked)
    graph = capture(asked)
    wanted = sum(parameter.numel() for parameter in built.module.parameters())
    facts = graph.environment["model"]
    assert (facts["class"], facts["parameters"], facts["dtype"]) == (name, wanted, "bf16")
    inputs = [tensor.nbytes for _, tensor in built.host()]
    assert born(graph, "input")[: len(inputs)] == inputs
    assert not any("elements that are not zero" in text for text in graph.assumptions)


def test_patches_are_in_rows_with_their_grid(tmp_path: Path) -> None:
    host = dict(build(case("Qwen2_5_VLForConditionalGeneration", tmp_path)).host())
    assert host["image_grid_thw"].tolist() == [[1, 10, 10]] * 2
    assert host["pixel_values"].shape == (200, 3 * 2 * 14 * 14)
    assert host["mm_token_type_ids"].sum(1).tolist() == [25, 25]


@pytest.mark.parametrize("size", ["", "300x1000"])
@pytest.mark.parametrize("name", PLACED)
def test_patches_have_their_places(name: str, size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the model's own processor, and transformers checks, on the CPU with weights, that image tokens
    and features agree."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    monkeypatch.setitem(MODELS, name, (PLACED[name], 0))
    asked = case(name, tmp_path, seq=300, **({"image_size": size} if size else {}))
    built = build(asked)
    host = dict(built.host())
    height, width = (int(side) for side in (size or "448x448").split("x"))
    picture = np.zeros((3, height, width), dtype=np.uint8)
    made = Gemma4ImageProcessorPil()(picture, return_tensors="pt", input_data_format="channels_first")
    tokens = int(made["num_soft_tokens_per_image"][0])
    assert host["mm_token_type_ids"].sum(1).tolist() == [tokens] * 2
    if name == "Gemma4ForConditionalGeneration":
        assert host["pixel_values"][0].shape == made["pixel_values"][0].shape
        assert host["image_position_ids"][0].equal(made["image_position_ids"][0])
    torch.manual_seed(0)
    assert torch.isfinite(built.forward(type(built.module)(built.config), host))
    assert not any("elements that are not zero" in text for text in capture(asked).assumptions)


def test_no_room_for_the_image_or_the_text(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^key 'seq': an image is 16 tokens of the sequence, which has 16; give more$"
    ):
        build(case("LlavaForConditionalGeneration", tmp_path, seq=16))
    with pytest.raises(ConfigError, match=r"^key 'seq': 65 tokens do not fit the 64 positions of the decoder in "):
        build(case("WhisperForConditionalGeneration", tmp_path, seq=65))
    with pytest.raises(ConfigError, match=r"^key 'seq': 65 tokens do not fit the 64 positions"):
        build(case("CLIPModel", tmp_path, seq=65))


def test_routers_that_peft_cannot_adapt_stay_as_they_are(tmp_path: Path) -> None:
    """Llama 4's text model alone, for which peft has no list: its router gives two tensors."""
    document = MODELS["Llama4ForConditionalGeneration"][0]
    path = tmp_path / "config.json"
    text = {**document["text_config"], "model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"]}
    path.write_text(json.dumps(text))
    asked = {"model": str(path), "batch": 2, "seq": 64, "steps": 2, "lora": 4}
    graph = capture(Case.of(asked))
    assert any(text.startswith("lora: on all linear layers but the head and router, ") for text in graph.assumptions)
    adapted = {name for name in graph.parameters if "lora_A" in name}
    assert any("q_proj" in name for name in adapted)
    assert not any("router" in name for name in adapted)
    with pytest.raises(ConfigError, match=r"^key 'lora_targets': peft adapts every linear layer, also router of "):
        build(Case.of({**asked, "lora_targets": "all-linear"}))


OWN = """
import torch
from torch import nn

class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 8)

    def forward(self, sample, added, sizes, scale):
        assert torch.is_tensor(added["rest"][0]) and scale == 2
        parts = self.line(sample + added["embeds"]).split(sizes["lengths"].tolist())
        kept = [part[: int(sizes["most"])] for part in parts]
        return torch.cat(kept).sum() * scale

def nested():
    sizes = {"lengths": torch.tensor([1, 2, 5]), "most": torch.tensor(2, dtype=torch.int32)}
    added = {"embeds": torch.zeros(8, 4), "rest": [torch.zeros(3)]}
    return Nested(), {"sample": torch.zeros(8, 4), "added": added, "sizes": sizes, "scale": 2}
"""


def test_nested_inputs_of_a_function_keep_their_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_nested.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    asked = Case.of({"model": "own_nested:nested", "dtype": "bf16", "steps": 2})
    built: Built = build(asked)
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in built.host()}
    assert shapes == {
        "sample": ((8, 4), torch.bfloat16),
        "added/embeds": ((8, 4), torch.bfloat16),
        "added/rest/0": ((3,), torch.bfloat16),
        "sizes/lengths": ((3,), torch.int64),
        "sizes/most": ((), torch.int32),
    }
    graph = capture(asked)
    kept = [1 + 2 + 2, 8]  # the first part, the second, two rows of the third; as wide as the layer is
    assert kept[0] * kept[1] * 2 in graph.storages.bytes.tolist()
    assert graph.assumptions == ()


@pytest.mark.parametrize(
    ("name", "keys", "tokens", "said"),
    [
        ("Qwen2_5_VLForConditionalGeneration", {"image_size": "84x140"}, 3 * 5, "one image of 84 x 140 pixels"),
        ("Qwen2_5_VLForConditionalGeneration", {"image_size": "70x30"}, 2 * 1, "one image of 56 x 28 pixels"),
        ("Qwen2_5_VLForConditionalGeneration", {"images": 3}, 3 * 9, "3 images of 84 x 84 pixels"),
        ("Qwen3VLForConditionalGeneration", {"images": 2, "image_size": "64"}, 2 * 4, "2 images of 64 x 64 pixels"),
        ("Gemma3ForConditionalGeneration", {"images": 3}, 3 * JOINED, "3 images of 32 x 32 pixels"),
        ("LlavaForConditionalGeneration", {"images": 2}, 2 * PATCHES, "2 images of 32 x 32 pixels"),
    ],
)
def test_images_of_any_number_and_size(name: str, keys: dict[str, Any], tokens: int, said: str, tmp_path: Path) -> None:
    """As above: transformers checks that tokens and features agree, where the case says how many images of what size.

    Qwen's processor rounds both sides to whole tokens of 28 (Qwen3: 32) pixels, as `smart_resize` does.
    """
    built = build(case(name, tmp_path, **keys))
    host = dict(built.host())
    assert (host["input_ids"] == 500).sum(1).tolist() == [tokens] * 2
    assert built.assumptions[-1] == f"{said} a sample, {tokens} of its 64 tokens"
    torch.manual_seed(0)
    assert torch.isfinite(built.forward(type(built.module)(built.config), host))


def test_audio_fits_the_window_or_is_refused(tmp_path: Path) -> None:
    whole, short = (
        dict(build(case("WhisperForConditionalGeneration", tmp_path, **keys)).host()) for keys in ({}, {"audio": 1.5})
    )
    assert whole["input_features"].shape == short["input_features"].shape == (2, 80, 200)
    with pytest.raises(ConfigError, match=r"^key 'audio': 2.5 seconds do not fit the window of 2 in "):
        build(case("WhisperForConditionalGeneration", tmp_path, audio=2.5))


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("LlavaForConditionalGeneration", {"images": 4}, "key 'seq': 4 images are 64 tokens of the sequence"),
        ("LlavaForConditionalGeneration", {"audio": 1}, "key 'audio': the model of .* takes no audio"),
        ("WhisperForConditionalGeneration", {"images": 2}, "key 'images': the model of .* takes no images"),
        ("CLIPModel", {"images": 2}, "key 'images': the model of .* takes one image a sample"),
        ("LlavaForConditionalGeneration", {"image_size": "48x32"}, "does not take an image of 48 x 32 pixels: .*size"),
    ],
)
def test_images_that_a_model_does_not_take(name: str, keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(LLMemError, match=message):
        build(case(name, tmp_path, **keys))


def test_a_model_of_text_takes_no_images() -> None:
    with pytest.raises(ConfigError, match="key 'images': the model of catalogue: gpt2 takes no images; leave it out"):
        build(Case.of({"model": "gpt2", "images": 2}))


@pytest.mark.parametrize("size", ["0x4", "4x", "large", "448x448x3", "1000000"])
def test_a_size_of_images_is_height_and_width(size: str) -> None:
    with pytest.raises(
        ConfigError, match=r"key 'image_size': .* should be height and width in pixels such as '448x336'"
    ):
        Case.of({"model": "gpt2", "image_size": size})
    assert Case.of({"model": "gpt2", "image_size": "448X336"}).image_size == "448x336"
