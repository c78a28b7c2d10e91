"""Checkpoints whose numbers are holes in a file: as large as real ones for who loads them, almost nothing on disk."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

#: A tensor of a checkpoint: its name, dtype by safetensors' name, and shape.
Tensor = tuple[str, str, tuple[int, ...]]
_BYTES: Final = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "U8": 1}
_BITS: Final = 4
#: Elements that share a scale in bitsandbytes' NF4, and scales that share one.
_NF4_BLOCK: Final = 64
_NESTED_BLOCK: Final = 256
#: Its sixteen numbers (`create_normal_map`).
_NF4: Final = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def write(file: Path, tensors: Iterable[Tensor], contents: Mapping[str, bytes] = MappingProxyType({})) -> None:
    """A file of safetensors whose numbers are not written, but those of `contents`, by their names."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + _BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        for name, content in contents.items():
            opened.seek(8 + len(text) + header[name]["data_offsets"][0])
            opened.write(content)
        opened.truncate(8 + len(text) + end)


def write_tokenizer(folder: Path, words: Sequence[str], special: Mapping[str, int]) -> None:
    """Put a tokenizer of whole words into a folder, which are numbered as they come; the first stands for others.

    `special` are texts that mean something, and their numbers."""
    numbers = {word: number for number, word in enumerate(words)}
    told = {
        "model": {"type": "WordLevel", "vocab": {**numbers, **special}, "unk_token": words[0]},
        "pre_tokenizer": {"type": "Whitespace"},
        "added_tokens": [
            {"id": number, "content": text, "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for text, number in special.items()
        ],
    }
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", **told}))


def llama(model: Mapping[str, Any]) -> Iterator[Tensor]:
    """The weights of a Llama, Qwen2 or Qwen3 in bf16. `model` is its config.json."""
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
        for name in ("q_norm", "k_norm") if model["model_type"] == "qwen3" else ():
            yield f"{layer}.self_attn.{name}.weight", "BF16", (size,)
        yield f"{layer}.self_attn.o_proj.weight", "BF16", (width, heads * size)
        for name in ("gate", "up"):
            yield f"{layer}.mlp.{name}_proj.weight", "BF16", (model["intermediate_size"], width)
        yield f"{layer}.mlp.down_proj.weight", "BF16", (width, model["intermediate_size"])
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{name}.weight", "BF16", (width,)
    yield "model.norm.weight", "BF16", (width,)
    if not model.get("tie_word_embeddings"):
        yield "lm_head.weight", "BF16", (model["vocab_size"], width)


def write_nf4(folder: Path, model: Mapping[str, Any]) -> None:
    """The weights of such a model and its config.json as bitsandbytes keeps them, its layers' matrices in NF4 with
    scales that are quantized too."""
    skipped = ["lm_head", "multi_modal_projector", "merger", "modality_projection"]
    kinds = {"bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4"}
    choices = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True, "llm_int8_skip_modules": skipped}
    settings = {"quant_method": "bitsandbytes", **kinds, **choices}
    (folder / "config.json").write_text(json.dumps({**model, "quantization_config": settings}))
    tensors, contents = list[Tensor](), dict[str, bytes]()
    for name, dtype, shape in llama(model):
        if len(shape) < len(("rows", "columns")) or not name.startswith("model.layers."):
            tensors.append((name, dtype, shape))
            continue
        state = _quant_state(shape)
        blocks = -(-math.prod(shape) // _NF4_BLOCK)
        contents[f"{name}.quant_state.bitsandbytes__nf4"] = state
        contents[f"{name}.quant_map"] = struct.pack("<16f", *_NF4)
        tensors += [
            (name, "U8", (math.prod(shape) // 2, 1)),
            (f"{name}.absmax", "U8", (blocks,)),
            (f"{name}.nested_absmax", "F32", (-(-blocks // _NESTED_BLOCK),)),
            (f"{name}.nested_quant_map", "F32", (_NESTED_BLOCK,)),
            (f"{name}.quant_map", "F32", (len(_NF4),)),
            (f"{name}.quant_state.bitsandbytes__nf4", "U8", (len(state),)),
        ]
    write(folder / "model.safetensors", tensors, contents)


def _quant_state(shape: tuple[int, ...]) -> bytes:
    nested = {"nested_blocksize": _NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": 0.04}
    told = {"quant_type": "nf4", "blocksize": _NF4_BLOCK, "dtype": "bfloat16", "shape": shape, **nested}
    return json.dumps(told).encode()


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
