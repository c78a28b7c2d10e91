"""Denoisers of FLUX and Stable Diffusion: what they are fed, against diffusers itself and a script written by hand."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

import diffusers
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import vramsim
from graph.analysis import by_phase, saved_for_backward
from graph.case import Case
from graph.model import Kind, StepGraph
from graph.models.sources import Built, build
from graph.recorder.capture import capture
from traces.errors import ConfigError, LLMemError

UNET: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": [32, 64],
    "layers_per_block": 1,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "cross_attention_dim": 24,
    "attention_head_dim": 8,
    "norm_num_groups": 8,
}
SDXL = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 80}
FLUX = {
    **{"in_channels": 16, "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4},
    **{"joint_attention_dim": 24, "pooled_projection_dim": 20, "axes_dims_rope": [4, 4, 8]},
}
SD3 = {
    **{"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2},
    **{"attention_head_dim": 16, "num_attention_heads": 4, "joint_attention_dim": 24, "caption_projection_dim": 64},
    **{"pooled_projection_dim": 20, "pos_embed_max_size": 8},
}
#: By a name: the class, and a small configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": ("FluxTransformer2DModel", FLUX),
    "flux with guidance": ("FluxTransformer2DModel", FLUX | {"guidance_embeds": True}),
    "flux of filled pictures": ("FluxTransformer2DModel", FLUX | {"in_channels": 96, "out_channels": 16}),
    "sd3": ("SD3Transformer2DModel", SD3),
    "sd3.5": ("SD3Transformer2DModel", SD3 | {"dual_attention_layers": [0], "qk_norm": "rms_norm"}),
    "sd": ("UNet2DConditionModel", UNET),
    "sd of filled pictures": ("UNet2DConditionModel", UNET | {"in_channels": 9, "sample_size": [8, 12]}),
    "sdxl": ("UNet2DConditionModel", UNET | SDXL),
}


def case(name: str, folder: Path, **keys: Any) -> Case:
    kind, config = MODELS[name]
    path = folder / "config.json"
    path.write_text(json.dumps({"_class_name": kind, "_diffusers_version": "0.42.1"} | config))
    edges = {} if "sample_size" in config else {"image_size": "64x96"}
    return Case.of({"model": str(path), "batch": 2, "seq": 10, **edges, **keys})


def born(graph: StepGraph, category: str) -> list[int]:
    """Bytes of the storages of a category, in order of birth."""
    return graph.storages.bytes[graph.storages.category == graph.names.index(category)].tolist()


def lives(graph: StepGraph) -> list[tuple[int, int]]:
    """Births and deaths of storages, in order."""
    calls = zip(graph.kind.tolist(), graph.index.tolist(), strict=True)
    return [(kind, index) for kind, index in calls if kind in (Kind.ALLOC, Kind.FREE)]


def real(name: str) -> Any:
    """The model with weights, on the CPU."""
    torch.manual_seed(0)
    return getattr(diffusers, MODELS[name][0])(**MODELS[name][1])


# ---------------------------------------------------------------------------------------------- what they are fed


@pytest.mark.parametrize("name", MODELS)
def test_inputs_are_what_the_model_takes(name: str, tmp_path: Path) -> None:
    """diffusers itself checks, on the CPU with weights; an output that is not of the target's shape warns."""
    built = build(case(name, tmp_path))
    loss = built.forward(real(name), dict(built.host()))
    assert torch.isfinite(loss)
    assert loss.requires_grad
    assert built.facts.parameters == sum(parameter.numel() for parameter in real(name).parameters())


@pytest.mark.parametrize("name", MODELS)
def test_captured_end_to_end(name: str, tmp_path: Path) -> None:
    """... with the products and convolutions of a real forward on the CPU."""
    asked = case(name, tmp_path)
    graph, built = capture(asked), build(asked)
    inputs = dict(built.host())
    assert born(graph, "input")[: len(inputs)] == [tensor.nbytes for tensor in inputs.values()]
    assert born(graph, "parameter") == [parameter.nbytes for parameter in built.module.parameters()]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        built.forward(real(name), inputs)
    work = {(total.name, total.step): total.flops for total in by_phase(graph)}
    assert work["forward", 1] == counter.get_total_flops()


SCRIPT = """
import json
import torch
from diffusers import UNet2DConditionModel
from torch.nn.functional import mse_loss

class Script(torch.nn.Module):
    def __init__(self, unet):
        super().__init__()
        self.unet = unet

    def forward(self, sample, timestep, encoder_hidden_states, added, target):
        noise = self.unet(sample, timestep, encoder_hidden_states, added_cond_kwargs=added, return_dict=False)[0]
        return mse_loss(noise.float(), target.float())

def script(batch, seq, dtype):
    unet = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config("config.json"))
    unet.enable_gradient_checkpointing()
    added = {"text_embeds": torch.zeros(batch, 80 - 6 * 8), "time_ids": torch.zeros(batch, 6)}
    latents = torch.zeros(batch, 4, 16, 8)
    inputs = {"sample": latents, "timestep": torch.zeros(batch, dtype=torch.int64),
              "encoder_hidden_states": torch.zeros(batch, seq, 24), "added": added, "target": latents}
    return Script(unet), inputs
"""


def test_a_script_written_by_hand_needs_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sdxl_script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    keys = {"batch": 3, "seq": 10, "dtype": "bf16", "steps": 2}
    own = capture(case("sdxl", tmp_path, **keys, image_size="128x64", checkpointing="nonreentrant"))
    script = capture(Case.of({"model": "sdxl_script:script", **keys}))
    assert own.storages.bytes.tolist() == script.storages.bytes.tolist()
    assert lives(own) == lives(script)


def test_a_text_has_the_tokens_that_the_scripts_give_it() -> None:
    usual = {"stable-diffusion-v1-5": 77, "sdxl": 77, "sd3-medium": 2 * 77, "flux.1-dev": 512, "gpt2": 512}
    for model, tokens in usual.items():
        asked = Case.of({"model": model})
        assert (asked.seq, Case.of(asked.document()).seq) == (tokens, tokens)
        assert Case.of(Case.of({"model": model, "seq": 512}).document()).seq == 512


def test_pictures_are_as_large_as_the_model_is_for() -> None:
    said = {"stable-diffusion-2-1": 768, "stable-diffusion-3.5-large": 1024, "flux.1-schnell": 1024}
    for model, edge in said.items():
        assert build(Case.of({"model": model})).assumptions[0].startswith(f"a sample is a picture of {edge} x {edge} ")


# -------------------------------------------------------------------------------------------- what training asks for


@pytest.mark.parametrize(("name", "targets"), [("sd", ()), ("sd3", ()), ("flux", ("to_q", "proj_mlp"))])
def test_adapters_are_those_of_the_scripts(name: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    built = build(case(name, tmp_path, lora=4, lora_targets=list(targets), dtype="bf16"))
    endings = targets or {"sd": ("to_q", "to_k", "to_v", "to_out.0"), "sd3": ("attn.to_q", "attn.add_k_proj")}[name]
    adapted = {one.removesuffix(".lora_A.default") for one, _ in built.module.named_modules() if "lora_A.d" in one}
    linear = {one: part for one, part in real(name).named_modules() if isinstance(part, torch.nn.Linear)}
    assert {one for one in linear if one.endswith(endings)} <= adapted
    assert built.facts.trained == sum(4 * sum(linear[one].weight.shape) for one in adapted)
    graph = capture(case(name, tmp_path, lora=4, lora_targets=list(targets), dtype="bf16"))
    assert sum(born(graph, "optimizer_state")) >= 2 * 2 * built.facts.trained


@pytest.mark.parametrize("name", ["flux", "sd3", "sdxl"])
def test_checkpointing_keeps_less(name: str, tmp_path: Path) -> None:
    saved = [
        sum(row.read for row in saved_for_backward(capture(case(name, tmp_path, checkpointing=checkpointing))))
        for checkpointing in ("", "nonreentrant")
    ]
    assert saved[1] < saved[0] / 2


@pytest.mark.parametrize(
    ("name", "keys"), [("flux", {"dtype": "bf16"}), ("flux", {"autocast": "bf16"}), ("sdxl", {"autocast": "bf16"})]
)
def test_quantised_weights_under_adapters(name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """Half a byte a weight of every linear layer; the rest is in fp32, as peft has it."""
    pytest.importorskip("bitsandbytes")
    found = born(capture(case(name, tmp_path, lora=2, quant="nf4", checkpointing="nonreentrant", **keys)), "parameter")
    linear = [part.weight for part in real(name).modules() if isinstance(part, torch.nn.Linear)]
    packed = Counter(weight.numel() // 2 for weight in linear)
    assert not packed - Counter(found)


def test_quantised_convolutions_need_autocast(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"key 'quant': peft keeps the convolutions of .* with 'autocast' alone"):
        build(case("sd", tmp_path, lora=2, quant="nf4", dtype="bf16"))


def test_a_module_in_hand(tmp_path: Path) -> None:
    module = real("sd").requires_grad_(False)
    module.conv_out.requires_grad_(True)
    found = vramsim.estimate(module, batch=2, seq=10)
    named = vramsim.estimate(case("sd", tmp_path).model, batch=2, seq=10)
    assert found.facts["trained"] == sum(parameter.numel() for parameter in module.conv_out.parameters())
    assert found.result.ranks[0].peak_allocated < named.result.ranks[0].peak_allocated


# ------------------------------------------------------------------------------------------------- what is said


def test_nothing_is_ignored(tmp_path: Path) -> None:
    config = {"_class_name": "UNet2DConditionModel", "is_tp": True, "quantization_config": {"quant_method": "gguf"}}
    (tmp_path / "config.json").write_text(json.dumps(UNET | config))
    said = build(Case.of({"model": str(tmp_path)})).assumptions
    assert said[-1].endswith("config.json: UNet2DConditionModel of diffusers takes no is_tp")
    assert said[0].startswith("the quantization_config of the configuration (gguf) is not followed")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"head": "causal-lm"}, "key 'head': it means nothing to a denoiser of diffusers .*; leave it out"),
        ({"images": 2}, "key 'images': it means nothing"),
        ({"attention_mask": True}, "key 'attention_mask': it means nothing .*; leave it out"),
        ({"strategy": "gemini", "world": 2}, "key 'attention_mask': .*; strategy 'gemini' sets it"),
        ({"loss": "chunk8"}, "key 'loss': it means nothing"),
        ({"task": "inference", "seq": 512}, "key 'task': .* takes 'train', not 'inference'"),
        ({"attn": "eager"}, "key 'attn': .* takes 'default' or 'sdpa', not 'eager'"),
        ({"checkpointing": "reentrant"}, "key 'checkpointing': .* takes 'nonreentrant', not 'reentrant'"),
        ({"checkpointing": "nonreentrant", "offload": "checkpoints"}, "key 'offload': .* takes 'optimizer' or "),
        ({"image_size": "60x64"}, "key 'image_size': .* multiples of 16 pixels, not 60 x 64"),
        ({"image_size": "144x64"}, "key 'image_size': .* takes sides of at most 128 that are multiples of 16"),
        ({"lora": 2, "lora_targets": ["none"]}, "key 'lora': peft cannot adapt the model of .*none"),
    ],
)
def test_what_a_case_may_not_ask_for(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(LLMemError, match=message) as caught:
        build(case("sd3", tmp_path, **keys))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"class_embed_type": "timestep"},
            "what a UNet2DConditionModel with 'class_embed_type' 'timestep' is fed",
        ),
        ({"cross_attention_dim": [24, 24]}, "with 'cross_attention_dim' .* is fed is not known here; give model"),
        (
            {**SDXL, "addition_time_embed_dim": 16},
            "with 'projection_class_embeddings_input_dim' 80 is fed is not known",
        ),
        ({"addition_embed_type": "image"}, "config.json: "),
        ({"block_out_channels": [32]}, "config.json: diffusers cannot build it: "),
        ({"sample_size": "wide"}, "config.json: key 'sample_size': 'wide' should be height and width of a latent"),
        (
            {"_class_name": "AutoencoderKL"},
            r"a configuration of diffusers \(AutoencoderKL\), whose inputs",
        ),
    ],
)
def test_configurations_that_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"_class_name": "UNet2DConditionModel", **UNET, **changed}))
    with pytest.raises(LLMemError, match=message) as caught:
        build(Case.of({"model": str(path)}))
    assert len(str(caught.value).splitlines()) == 1


def test_without_diffusers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ConfigError, match=r"diffusers is needed to build UNet2D.*'vramsim\[diffusers\]'"):
        build(case("sd", tmp_path))


def test_built_for_training(tmp_path: Path) -> None:
    built: Built = build(case("sd", tmp_path, autocast="bf16"))
    assert built.module.training
    assert {parameter.device.type for parameter in built.module.parameters()} == {"meta"}
