"""Captured graphs of small models against what PyTorch itself does with them on the CPU: FLOPs, and what is saved."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from graph.analysis import by_phase, saved_for_backward
from graph.case import Case
from graph.check import check
from graph.dag import edges
from graph.files import load, save
from graph.model import StepGraph
from tests.support.made_graphs import assert_equal

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

BATCH, SEQ = 2, 16
CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    },
    "opt": {
        "architectures": ["OPTForCausalLM"],
        "hidden_size": 64,
        "ffn_dim": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 64,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    },
}


class Real(NamedTuple):
    """A real run on the CPU: bytes that autograd saved (parameters and inputs apart), FLOPs forward and backward."""

    saved: int
    forward: int
    backward: int


def config(name: str, folder: Path) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": name, "vocab_size": 100, **CONFIGS[name]}))
    return str(path)


def captured(path: str, **options: Any) -> StepGraph:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from graph.recorder.capture import capture

    return capture(Case.of({"model": path, "batch": BATCH, "seq": SEQ, "attn": "eager", "steps": 2, **options}))


def real(path: str) -> Real:
    """Forward and backward of the model on the CPU, with hooks on what autograd saves."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    counter = pytest.importorskip("torch.utils.flop_counter").FlopCounterMode
    settings = transformers.AutoConfig.from_pretrained(path)
    settings._attn_implementation = "eager"
    settings.use_cache = False
    model = getattr(transformers, settings.architectures[0])(settings).train()
    ids = torch.randint(1, 99, (BATCH, SEQ))
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), ids)}
    held, saved = [], {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        held.append(storage)  # so that no other takes its address
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with counter(display=False) as flops:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(input_ids=ids, labels=ids).loss
        forward = flops.get_total_flops()
        loss.backward()
        return Real(sum(saved.values()), forward, flops.get_total_flops() - forward)


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_bytes_and_flops_are_those_of_a_real_run(name: str, tmp_path: Path) -> None:
    path = config(name, tmp_path)
    graph = captured(path)
    expected = real(path)
    saved = saved_for_backward(graph)
    assert sum(row.read for row in saved) == expected.saved
    assert sum(row.bytes for row in saved) == expected.saved + 4  # the loss is only held
    work = {(total.name, total.step): total.flops for total in by_phase(graph)}
    assert (work["forward", 1], work["backward", 1]) == (expected.forward, expected.backward)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attn": "sdpa", "dtype": "bf16", "optimizer": "adamw-fused"},
        {"checkpointing": "nonreentrant", "autocast": "bf16"},
        {"checkpointing": "reentrant", "clip": 1.0},
        {"accum": 2, "lora": 4},
    ],
    ids=lambda options: " ".join(map(str, options.values())) or "plain",
)
def test_captured_graphs_hold_together(options: dict[str, Any], tmp_path: Path) -> None:
    if options.get("lora"):
        pytest.importorskip("peft")
    graph = captured(config("llama", tmp_path), **options)
    check(graph)
    found = edges(graph)
    inner = found.source < len(graph.operators)
    assert (found.source[inner] < found.target[inner]).all()
    # what operators say to have read is what the last writer left
    last: dict[tuple[int, int], set[int]] = {}
    for source, storage, version in zip(
        found.source.tolist(), found.storage.tolist(), found.version.tolist(), strict=True
    ):
        last.setdefault((storage, version), set()).add(source)
    assert all(len(writers) == 1 for writers in last.values())
    read = set(zip(graph.reads.storage.tolist(), graph.reads.version.tolist(), strict=True))
    assert read <= set(last)
    save(graph, tmp_path / "graph.json.gz")
    assert_equal(load(tmp_path / "graph.json.gz"), graph)
