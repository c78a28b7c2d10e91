"""Inference and quantized layers: captured runs against arithmetic and against recorded runs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from graph.case import Case
from graph.errors import CaptureError
from graph.model import Kind, StepGraph
from graph.recorder.capture import capture
from tests.accuracy.recordings import Recording, recordings
from traces.errors import ConfigError

LAYERS, HEADS, WIDTH, HIDDEN, INNER, WORDS = 2, 2, 16, 64, 128, 512
TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "vocab_size": WORDS,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
#: Elements of the linear layers but the head, of the embedding and head, and of the norms.
LINEAR = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * HEADS * WIDTH + 3 * HIDDEN * INNER)
REST = 2 * WORDS * HIDDEN + (2 * LAYERS + 1) * HIDDEN


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny") / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def captured(model: str, **keys: Any) -> StepGraph:
    return capture(Case.of({"model": model, "task": "inference", "dtype": "bf16", **keys}))


def living(graph: StepGraph, phase: str) -> np.ndarray[Any, Any]:
    """The storages that live at the end of a phase, without workspaces."""
    starts = np.flatnonzero(graph.kind == Kind.PHASE)
    names = [graph.phases[graph.index[place]] for place in starts]
    end = starts[names.index(phase) + 1]
    kind, index = graph.kind[:end], graph.index[:end]
    alive = np.setdiff1d(index[kind == Kind.ALLOC], index[kind == Kind.FREE])
    category = [graph.name(int(graph.storages.category[storage])) for storage in alive]
    return alive[np.array([one != "workspace" for one in category], dtype=bool)]


def held(graph: StepGraph, phase: str) -> int:
    return int(graph.storages.bytes[living(graph, phase)].sum())


@pytest.mark.parametrize("mode", ["generate", "manual"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_cache_holds_keys_and_values_of_all_positions(tiny: str, mode: str, cache: str) -> None:
    prompt, new, batch = 24, 5, 3
    graph = captured(tiny, prompt=prompt, new=new, batch=batch, mode=mode, cache=cache)
    assert graph.phases == ("load", "prefill", "first", "decode", "end")
    position = 2 * LAYERS * HEADS * WIDTH * 2  # keys and values, in two bytes
    sizes = graph.storages.bytes[living(graph, "decode" if mode == "manual" else "first")]
    positions = prompt + new - 1 if mode == "manual" else prompt
    if cache == "static":
        positions = prompt + new if mode == "manual" else prompt + new - 1
    one = batch * HEADS * WIDTH * 2 * positions
    assert (sizes == one).sum() == 2 * LAYERS, (sorted(sizes), one)
    assert one * 2 * LAYERS == batch * positions * position


def test_prefill_of_generate_has_logits_of_the_last_position_only(tiny: str) -> None:
    def logits(mode: str) -> bool:
        graph = captured(tiny, prompt=64, new=1, batch=2, mode=mode)
        return bool((graph.storages.bytes == 2 * 64 * WORDS * 2).any())

    assert logits("manual")
    assert not logits("generate")


def test_weights_in_16_bits(tiny: str) -> None:
    rotary = 2 * WIDTH // 2 * 4  # inverse frequencies, twice, in fp32
    assert held(captured(tiny, prompt=8, new=1), "load") == 2 * (LINEAR + REST) + rotary


@pytest.mark.parametrize("double", [True, False])
def test_four_bit_weights_take_what_their_paper_says(tiny: str, double: bool) -> None:
    """QLoRA (arXiv:2305.14314): blocks of 64 with an absolute maximum each, these in 8 bits in blocks of 256."""
    graph = captured(tiny, prompt=8, new=1, quant="nf4", double_quant=double)
    blocks = LINEAR // 64
    maxima = blocks if double else 4 * blocks
    found = held(graph, "load") - 2 * REST
    assert LINEAR // 2 + maxima <= found
    # what comes besides, for each of the 7 layers of a block: the codes, an offset and the maxima of maxima
    assert found <= LINEAR // 2 + maxima + LAYERS * 7 * (16 * 4 + 256 * 4 + 4 + 4 * 32) + 4096


def test_eight_bit_weights_have_a_scale_by_row(tiny: str) -> None:
    graph = captured(tiny, prompt=8, new=1, quant="int8", dtype="fp16")
    rows = LAYERS * (2 * HIDDEN + 2 * HEADS * WIDTH + 2 * INNER + HIDDEN)
    found = held(graph, "load") - 2 * REST
    assert LINEAR + 4 * rows <= found <= LINEAR + 4 * rows + 4096
    assert any("outlier" in text for text in graph.assumptions)


def test_weights_go_up_whole_and_are_quantized_one_after_another(tiny: str) -> None:
    graph = captured(tiny, prompt=8, new=1, quant="nf4")
    end = np.flatnonzero(graph.kind == Kind.PHASE)[1]
    sizes = graph.storages.bytes[graph.index[:end][graph.kind[:end] == Kind.ALLOC]]
    freed = graph.storages.bytes[graph.index[:end][graph.kind[:end] == Kind.FREE]]
    assert (sizes == 2 * HIDDEN * INNER).sum() == 3 * LAYERS
    assert (freed == 2 * HIDDEN * INNER).sum() == 3 * LAYERS


def test_inference_is_for_decoders() -> None:
    with pytest.raises(ConfigError, match="inference is for decoders"):
        captured("t5-small", attn="default")
    with pytest.raises(ConfigError, match="key 'prompt': 1055 tokens do not fit the 1024 positions"):
        captured("gpt2", prompt=1024, new=32)


def test_quantization_needs_linear_layers() -> None:
    with pytest.raises(CaptureError, match=r"no nn\.Linear but its head"):
        captured("gpt2", quant="nf4", prompt=8, new=1)


def chosen() -> list[Recording]:
    """Recorded runs of one small model: each way of loading, each cache, a plain loop."""
    wanted = {
        ("bf16", "generate", "dynamic", "1"),
        ("int8", "generate", "static", "1"),
        ("bf16", "manual", "static", "4"),
    }
    rows = [r for r in recordings("inference") if r.row["model"] == "tinyllama-1.1b" and r.row["prompt"] == "512"]
    found = {(r.row["load"], r.row["mode"], r.row["cache"], r.row["batch"]): r for r in rows if r.row["new"] == "32"}
    return [found[key] for key in sorted(wanted)]


@pytest.mark.parametrize("recording", chosen(), ids=lambda r: f"{r.row['load']}-{r.row['mode']}-{r.row['cache']}")
def test_recorded_runs_are_met(recording: Recording) -> None:
    from simulator.estimator.estimate import answer

    found = answer(recording.case, context=0)
    for figure in ("peak_allocated", "peak_reserved"):
        assert found[figure] == pytest.approx(recording.figure(figure), rel=5e-4), figure
    load = recording.figure("load_peak")
    assert found["phases"]["load"]["peak"] == pytest.approx(load, rel=1e-5)
    assert found["verdict"] == "fits"


@pytest.mark.parametrize("number", [1, 4])
def test_recorded_training_of_quantized_weights_is_met(number: int) -> None:
    from simulator.estimator.estimate import answer

    rows = [r for r in recordings("single") if r.row["quant"] == "nf4" and r.row["model"] == "qwen2-0.5b"]
    row = rows[number]
    found = answer(row.case, context=0)
    for figure in ("peak_allocated", "peak_reserved"):
        assert found[figure] == pytest.approx(row.figure(figure), rel=1e-3), (row, figure)
