"""Checkpoints whose numbers are holes in a file: as large as real ones for who loads them, almost nothing on disk."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

#: A tensor of a checkpoint: its name, dtype by safetensors' name, and shape.
Tensor = tuple[str, str, tuple[int, ...]]
_BYTES: Final = {"BF16": 2, "F16": 2, "I32": 4}
_BITS: Final = 4


def write(file: Path, tensors: Iterable[Tensor]) -> None:
    """A file of safetensors whose numbers are not written."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + _BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        opened.truncate(8 + len(text) + end)


def llama(model: Mapping[str, Any]) -> Iterator[Tensor]:
    """The weights of a Llama or Qwen2 in bf16. `model` is its config.json."""
    width, heads = model["hidden_size"], model["num_attention_heads"]
    size = model.get("head_dim") or width // heads
    shared = model.get("num_key_value_heads") or heads
    yield "model.embed_tokens.weight", "BF16", (model["vocab_size"], width)
    for number in range(model["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for name, rows in (("q", heads * size), ("k", shared * size), ("v", shared * size)):
            yield f"{layer}.self_attn.{name}_proj.weight", "BF16", (rows, width)
            if model["model_type"] == "qwen2":
                yield f"{layer}.self_attn.{name}_proj.bias", "BF16", (rows,)
        yield f"{layer}.self_attn.o_proj.weight", "BF16", (width, heads * size)
        for name in ("gate", "up"):
            yield f"{layer}.mlp.{name}_proj.weight", "BF16", (model["intermediate_size"], width)
        yield f"{layer}.mlp.down_proj.weight", "BF16", (width, model["intermediate_size"])
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{name}.weight", "BF16", (width,)
    yield "model.norm.weight", "BF16", (width,)
    if not model.get("tie_word_embeddings"):
        yield "lm_head.weight", "BF16", (model["vocab_size"], width)


def write_gptq(folder: Path, model: Mapping[str, Any], group: int) -> None:
    """The 4-bit weights of a Llama, Mistral or Mixtral as AutoGPTQ keeps them, in fp16 beside; with act-order.

    `model` is its config.json; `group` how many rows of a matrix share scales, -1 all.
    """
    settings = {"bits": _BITS, "group_size": group, "desc_act": True, "sym": True, "true_sequential": True}
    names = {"model_file_base_name": "model", "quant_method": "gptq", "checkpoint_format": "gptq"}
    (folder / "quantize_config.json").write_text(json.dumps({**settings, "damp_percent": 0.1, **names}))
    write(folder / "model.safetensors", _gptq(model, group))


def _gptq(model: Mapping[str, Any], group: int) -> Iterator[Tensor]:
    width, wide, vocabulary = model["hidden_size"], model["intermediate_size"], model["vocab_size"]
    heads = model["num_attention_heads"]
    keys = width // heads * (model.get("num_key_value_heads") or heads)
    experts = model.get("num_local_experts") or 0
    yield "model.embed_tokens.weight", "F16", (vocabulary, width)
    for number in range(model["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for name, rows, columns in (("q", width, width), ("k", width, keys), ("v", width, keys), ("o", width, width)):
            yield from _packed(f"{layer}.self_attn.{name}_proj", rows, columns, group)
        for part in [f"{layer}.block_sparse_moe.experts.{one}" for one in range(experts)] or [f"{layer}.mlp"]:
            up, gate, down = ("w1", "w3", "w2") if experts else ("up_proj", "gate_proj", "down_proj")
            for name in (up, gate):
                yield from _packed(f"{part}.{name}", width, wide, group)
            yield from _packed(f"{part}.{down}", wide, width, group)
        if experts:
            yield f"{layer}.block_sparse_moe.gate.weight", "F16", (experts, width)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{name}.weight", "F16", (width,)
    yield "model.norm.weight", "F16", (width,)
    yield "lm_head.weight", "F16", (vocabulary, width)


def _packed(name: str, rows: int, columns: int, group: int) -> Iterator[Tensor]:
    """A matrix of (rows, columns): eight numbers of 4 bits in an int32; zeros and scales by group; each row's group."""
    packed, groups = 32 // _BITS, rows // group if group > 0 else 1
    yield f"{name}.qweight", "I32", (rows // packed, columns)
    yield f"{name}.qzeros", "I32", (groups, columns // packed)
    yield f"{name}.scales", "F16", (groups, columns)
    yield f"{name}.g_idx", "I32", (rows,)
