"""The worked examples that are sums rather than lists of events: E8 to E13, against captures of the code they name.

Where the code that ran differs from the example, a comment says how, and the number is the code's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from graph.case import Case
from graph.model import Kind, StepGraph
from graph.recorder.capture import capture
from strategies import registry
from strategies.megatron import megatron
from strategies.parallel.native import place_all

MODELS = "tests.support.worked_models"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}
Keep = Callable[[str, str], bool]


def births(graph: StepGraph, phase: str, step: int, keep: Keep = lambda category, module: True) -> list[int]:
    """Bytes of what is born in a phase, in order, but kernels' workspaces and scalars; `keep(category, module)`."""
    found, inside = [], False
    for kind, index, value in zip(graph.kind.tolist(), graph.index.tolist(), graph.value.tolist(), strict=True):
        if kind == Kind.PHASE:
            inside = graph.phases[index] == phase and value == step
        elif kind == Kind.ALLOC and inside:
            size = int(graph.storages.bytes[index])
            category = graph.name(int(graph.storages.category[index])) or ""
            module = graph.name(int(graph.storages.module[index])) or ""
            if category != "workspace" and size > 4 and keep(category, module):
                found.append(size)
    return found


def held(graph: StepGraph, phase: str, step: int, categories: tuple[str, ...]) -> int:
    """Bytes of some categories alive where a phase starts, but scalars."""
    alive: dict[int, int] = {}
    for kind, index, value in zip(graph.kind.tolist(), graph.index.tolist(), graph.value.tolist(), strict=True):
        if kind == Kind.PHASE and graph.phases[index] == phase and value == step:
            break
        if kind == Kind.ALLOC and graph.name(int(graph.storages.category[index])) in categories:
            alive[index] = int(graph.storages.bytes[index])
        elif kind == Kind.FREE:
            alive.pop(index, None)
    return sum(size for size in alive.values() if size > 4)


# E8: tensor parallelism of the MLP over 2 ranks ----------------------------------------------------------------------


class Split(megatron.Megatron):
    """The MLP: first layer by columns, second by rows; `tp-megatron-sp` begins with a part of the sequence."""

    def wrap(self, recorder: Any, built: Any) -> Any:
        from strategies.megatron.parts import Shared, scatter

        sequence = self.case.strategy == "tp-megatron-sp"
        shared = Shared(self.rank, 2, sequence=sequence)
        layers = built.module.fc
        layers[0] = megatron.sliced("fc.0", layers[0], column=True, shared=shared)
        layers[1] = megatron.sliced("fc.1", layers[1], column=False, shared=shared)
        if sequence:
            built.module.register_forward_pre_hook(lambda part, args: (scatter(args[0], shared).detach(),))
        return place_all(recorder, built)


def test_e8_megatron() -> None:
    case = Case.of({"model": f"{MODELS}:mlp_entered", "dtype": "bf16", "strategy": "tp-megatron", "world": 2})
    graph = capture(case, method=Split(case, 1))
    assert births(graph, "load", -1) == [131_072, 512, 130_560, 510]
    # Input; y1 and, which the example leaves out, its sum with the bias, out of place; ReLU; partial y; y + b2.
    assert births(graph, "forward", 1) == [32_768, 32_768, 32_768, 32_768, 32_640, 32_640]
    # db2 (of an addition after the layer), grad_h, [the loss's gradient made whole], dW2, ReLU's, grad_x, dW1, db1.
    wanted = [510, 32_768, 32_640, 130_560, 32_768, 32_768, 131_072, 512]
    assert births(graph, "backward", 1) == wanted
    reduced = [graph.value[at] for at in range(len(graph.kind)) if graph.kind[at] == Kind.COLLECTIVE]
    assert reduced[-2:] == [32_640, 32_768]  # y in place, grad_x


def test_e8_sequence_parallel() -> None:
    case = Case.of({"model": f"{MODELS}:mlp_entered", "dtype": "bf16", "strategy": "tp-megatron-sp", "world": 2})
    graph = capture(case, method=Split(case, 0))
    first, second = births(graph, "forward", 0), births(graph, "forward", 1)
    # Input and the part of it, which is what is saved; the shared buffer, in the first step only; y1, y1 + b1, ReLU;
    # partial y, its part after the reduce-scatter, and that with the bias.
    after = [32_768, 32_768, 32_768, 32_640, 16_320, 16_320]
    assert first == [32_768, 16_384, 32_768, *after]
    assert second == [32_768, 16_384, *after]
    # db2, gathered gradient of y, grad_h, dW2, ReLU's, whole grad_x and this rank's part of it, dW1, db1; the gradient
    # of y is a scalar spread out, so a copy of the part comes before.
    backward = births(graph, "backward", 1)
    assert backward[-5:] == [32_768, 32_768, 16_384, 131_072, 512]
    assert sorted(backward[:-5]) == sorted([510, 16_320, 32_640, 32_768, 130_560])


# E9: a pipeline of two stages and four micro-batches -----------------------------------------------------------------


@pytest.mark.parametrize(("stage", "order", "most"), [(0, "FFBFBFBB", 2), (1, "FBFBFBFB", 1)])
def test_e9_pipeline(tmp_path: Path, stage: int, order: str, most: int) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    case = Case.of({"model": str(path), "dtype": "bf16", "seq": 64, "strategy": "pp", "world": 2, "microbatches": 4})
    graph = capture(case, method=registry.find(case).method(case, stage))
    layer = next(name for name, kind in graph.modules if kind == "LlamaDecoderLayer")
    weight = graph.parameters[f"{layer}.mlp.up_proj.weight"]
    start = [at for at in range(len(graph.kind)) if graph.kind[at] == Kind.STEP][1]
    told = ""
    for kind, index in zip(graph.kind[start:].tolist(), graph.index[start:].tolist(), strict=True):
        if kind == Kind.ENTER and graph.names[index] == layer:
            told += "F"
        elif kind == Kind.GRADIENT and index == weight:
            told += "B"
        elif kind == Kind.STEP and told:
            break
    assert told == order
    assert max(told[:end].count("F") - told[:end].count("B") for end in range(len(told) + 1)) == most
    # Over the boundary go hidden states and their gradients: 64 tokens of 256 values in two bytes.
    messages = {
        int(size)
        for kind, index, size in zip(graph.kind, graph.index, graph.value, strict=True)
        if kind == Kind.COLLECTIVE and graph.names[index].startswith("send_recv")
    }
    assert messages == {64 * 256 * 2}


# E10: checkpointing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "saved", "again"),
    [
        ("blocks", 4 * 98_304, []),
        ("blocks_reentrant", 4 * 32_768, [65_536, 65_536, 32_768]),  # the block's output is made again as well
        ("blocks_nonreentrant", 4 * 32_768, [65_536, 65_536]),
    ],
)
def test_e10_checkpointing(model: str, saved: int, again: list[int]) -> None:
    graph = capture(Case.of({"model": f"{MODELS}:{model}", "dtype": "bf16"}))
    assert held(graph, "backward", 1, ("input", "activation", "temporary")) == saved
    # Backward of a block: its gradients after what is computed again. The input's `.grad` of the reentrant way, which
    # the example counts besides, is the tensor that the last product made.
    inside = births(graph, "backward", 1, lambda kind, module: module.startswith("blocks.2") and kind != "gradient")
    assert inside == [*again, 65_536, 65_536, 32_768]


# E11: LoRA of rank 8 on the first layer ------------------------------------------------------------------------------


def test_e11_lora() -> None:
    graph = capture(Case.of({"model": f"{MODELS}:mlp_lora"}))
    sizes = {name: int(graph.storages.bytes[storage]) for name, storage in graph.parameters.items()}
    assert {name: size for name, size in sizes.items() if "lora" in name} == {
        "base_model.model.fc.0.lora_A.default.weight": 8_192,
        "base_model.model.fc.0.lora_B.default.weight": 16_384,
    }
    adapted = births(graph, "forward", 1, lambda kind, module: ".fc.0" in module)
    # The layer's own output, then x in fp32 and A's output, saved; B's output, scaled, summed; the sum in bf16.
    assert adapted == [65_536, 65_536, 2_048, 131_072, 131_072, 131_072, 65_536]
    states = births(graph, "optimizer", 0, lambda kind, module: kind == "optimizer_state")
    assert sum(states) == 49_152


# E12: NF4 with double quantization -----------------------------------------------------------------------------------


def test_e12_nf4(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    graph = capture(Case.of({"model": str(path), "dtype": "bf16", "seq": 64, "quant": "nf4", "lora": 8}))
    name = next(one for one in graph.parameters if one.endswith("layers.1.mlp.gate_proj.weight"))
    assert int(graph.storages.bytes[graph.parameters[name]]) == 65_536
    loaded = births(graph, "load", -1, lambda kind, module: True)
    # 131,072 values: packed; absmax in fp32, then 2,048 of it in a byte each, 8 in fp32 (each of 256), the map.
    for size in (65_536, 8_192, 2_048, 32, 1_024, 64):
        assert loaded.count(size) >= 4, size
    backward = births(graph, "backward", 1, lambda kind, place: place.endswith("layers.1.mlp.gate_proj"))
    assert backward.count(8_192) == 1  # the absmax again
    assert backward.count(262_144) == 1  # the weight again, in bf16


# E13: Adam in 8 bits -------------------------------------------------------------------------------------------------


def test_e13_adam_8bit() -> None:
    pytest.importorskip("bitsandbytes")
    states = {}
    for optimizer in ("adamw-8bit", "adamw"):
        graph = capture(Case.of({"model": f"{MODELS}:mlp", "optimizer": optimizer}))
        states[optimizer] = births(graph, "optimizer", 0, lambda kind, module: kind == "optimizer_state")
    maps, weight1, bias1 = [1_024] * 2, [131_072] * 2 + [512 * 4] * 2, [4 * 512] * 2
    weight2, bias2 = [130_560] * 2 + [510 * 4] * 2, [4 * 255] * 2
    assert states["adamw-8bit"] == [*maps, *weight1, *bias1, *weight2, *bias2]
    assert sum(states["adamw-8bit"]) == 539_624
    assert sum(states["adamw"]) == 2_099_192
