"""Checkpoints of holes: what a reader finds in them, and that they take no room."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graph.models import catalogue
from tests.accuracy.checkpoints import write, write_gptq, write_nf4

safetensors = pytest.importorskip("safetensors")


def test_a_file_of_holes_is_read_as_its_tensors(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write(file, [("one", "BF16", (3, 5)), ("two", "I32", (1 << 20, 1 << 8))])
    assert file.stat().st_size > 1 << 30
    assert file.stat().st_blocks * 512 < 1 << 20
    with safetensors.safe_open(file, "np") as opened:
        assert list(opened.keys()) == ["one", "two"]
        assert [opened.get_slice(name).get_shape() for name in opened.keys()] == [[3, 5], [1 << 20, 1 << 8]]  # noqa: SIM118
        assert opened.get_slice("two").get_dtype() == "I32"


def test_gptq_takes_what_published_checkpoints_take(tmp_path: Path) -> None:
    """Files of 4.16, 23.81 and 35.33 GB: TheBloke's, main branches."""
    for name, group, gigabytes in (("mistral-7b", 128, 4.16), ("mixtral-8x7b", -1, 23.81), ("llama-2-70b", -1, 35.33)):
        write_gptq(tmp_path, catalogue.configuration(catalogue.find(name) or name), group)
        assert abs((tmp_path / "model.safetensors").stat().st_size / 1e9 - gigabytes) < 0.02
        assert json.loads((tmp_path / "quantize_config.json").read_text())["group_size"] == group


def test_four_bits_are_what_bitsandbytes_reads(tmp_path: Path) -> None:
    """Its sixteen numbers and a matrix's shape can be read; a scale of a byte for 64 numbers of half a byte."""
    model = {
        "model_type": "qwen3", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "head_dim": 64,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000, "tie_word_embeddings": True,
    }  # fmt: skip
    write_nf4(tmp_path, model)
    name = "model.layers.1.mlp.down_proj.weight"
    with safetensors.safe_open(tmp_path / "model.safetensors", "np") as opened:
        state = json.loads(opened.get_tensor(f"{name}.quant_state.bitsandbytes__nf4").tobytes())
        numbers = opened.get_tensor(f"{name}.quant_map").tolist()
        shapes = {part: opened.get_slice(name + part).get_shape() for part in ("", ".absmax", ".nested_absmax")}
        assert opened.get_slice("model.layers.0.self_attn.q_norm.weight").get_shape() == [64]
        assert "lm_head.weight" not in opened.keys()  # noqa: SIM118
    assert (state["shape"], state["blocksize"]) == ([512, 1024], 64)
    assert (numbers[0], numbers[7], numbers[15], sorted(numbers)) == (-1, 0, 1, numbers)
    assert shapes == {"": [512 * 1024 // 2, 1], ".absmax": [8192], ".nested_absmax": [32]}
