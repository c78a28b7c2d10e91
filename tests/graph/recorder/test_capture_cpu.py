"""A capture against real eager runs on the CPU: event by event, with neither recordings nor a GPU.

Tiny models are trained for real on the CPU while PyTorch's profiler notes every allocation, and captured as on a GPU
without its kernels' workspaces. Both go through the same Python and the same autograd, so that births and deaths come
in the same order, at the same sizes. What the CPU run has besides: scratch inside a single CPU kernel (born and freed
within one operator), and the states of the host's random generator that checkpointing keeps.
"""

from __future__ import annotations

import gc
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from graph.case import Case  # noqa: E402
from graph.model import Kind, StepGraph  # noqa: E402

TOKENS, SEQUENCES = 64, 2
#: Smaller storages are counters and scalars, some of which stay on the host.
LEAST = 64
#: torch.get_rng_state() of the CPU.
HOST_STATE = 5056

MODELS: dict[str, dict[str, Any]] = {
    "opt": {
        "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 256,
        "max_position_embeddings": 128, "word_embed_proj_dim": 64, "dropout": 0.0,
    },
    "llama": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    },
    "gpt2": {
        "vocab_size": 512, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "bloom": {"vocab_size": 512, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "t5": {
        "vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2,
        "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0,
    },
}  # fmt: skip

#: Operators whose CPU kernels take scratch of their own: partial sums, a copy in another layout or dtype.
KERNELS = {"aten::native_layer_norm_backward", "aten::cumsum", "aten::embedding_dense_backward", "aten::mul"}

Event = tuple[str, int]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No workspaces: those of CUDA kernels are not those of the CPU."""
    monkeypatch.setattr(importlib.import_module("graph.recorder.capture"), "_planner", lambda card: None)


def captured(graph: StepGraph) -> list[Event]:
    """Births and deaths from the first iteration on."""
    sizes = graph.storages.bytes
    start = int((graph.kind == Kind.STEP).argmax())
    letters = {int(Kind.ALLOC): "born", int(Kind.FREE): "dies"}
    pairs = zip(graph.kind[start:].tolist(), graph.index[start:].tolist(), strict=True)
    return [(letters[kind], int(sizes[index])) for kind, index in pairs if kind in letters]


def measured(kind: str, setting: str) -> list[Event]:
    """Births and deaths of a real run on the CPU, without scratch inside one operator."""
    model = real_model(kind)
    if setting == "checkpointing":
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
    host = torch.zeros(SEQUENCES, TOKENS, dtype=torch.long)
    gc.collect()
    gc.disable()
    try:
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            _ = steps(model, optimizer, host, kind, setting)
    finally:
        gc.enable()
    return allocations(profile.kineto_results.experimental_event_tree())


def real_model(kind: str) -> Any:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **MODELS[kind])
    auto: Any = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    return auto.from_config(config, attn_implementation="eager")


def steps(model: Any, optimizer: Any, host: Any, kind: str, setting: str) -> Any:
    inputs: dict[str, Any] = {}
    for _ in range(3):
        for _ in range(2 if setting == "accumulation and clipping" else 1):
            if kind == "t5":
                inputs = {"input_ids": host.clone(), "labels": host.clone()}
            else:
                inputs["input_ids"] = host.clone()
                inputs["labels"] = inputs["input_ids"]
            loss = model(**inputs, use_cache=False).loss
            loss.backward()
        if setting == "accumulation and clipping":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        del loss
    return inputs


def allocations(tree: Any) -> list[Event]:
    """The profiler's allocations in order of time, but for scratch of `KERNELS`."""
    found: list[tuple[int, int, int, int]] = []  # time, bytes, address, the call of one of `KERNELS` around it or 0

    def visit(event: Any, kernel: int) -> None:
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.alloc_size, fields.ptr, kernel))
        inside = event.start_time_ns if event.name in KERNELS else kernel
        for child in event.children:
            visit(child, inside)

    for event in tree:
        visit(event, 0)
    found.sort(key=lambda one: one[0])
    return [event for _, event in sorted(kept(found))]


def kept(found: list[tuple[int, int, int, int]]) -> Iterator[tuple[int, Event]]:
    """(place, event) of storages that do not both live and die in one call of a kernel; births may come late."""
    living: dict[int, tuple[int, int, int]] = {}
    for place, (_, size, address, kernel) in enumerate(found):
        if size > 0:
            living[address] = (place, size, kernel)
            continue
        born, bytes_, maker = living.pop(address, (-1, -size, 0))
        if born >= 0 and maker == kernel and maker:
            continue
        if born >= 0:
            yield born, ("born", bytes_)
        yield place, ("dies", bytes_)
    for born, bytes_, _ in living.values():
        yield born, ("born", bytes_)


def comparable(events: list[Event]) -> list[Event]:
    """Without small ones; frees that follow one another in order of size (autocast's cache is a hash table)."""
    out: list[Event] = []
    burst: list[Event] = []
    for event in events:
        if event[1] <= LEAST or event[1] == HOST_STATE:
            continue
        if event[0] == "dies":
            burst.append(event)
            continue
        out += [*sorted(burst), event]
        burst = []
    return out + sorted(burst)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("setting", ["plain", "checkpointing", "accumulation and clipping"])
@pytest.mark.parametrize("kind", list(MODELS))
def test_events_equal_those_of_a_real_run(tmp_path: Path, kind: str, setting: str) -> None:
    from graph.recorder.capture import capture

    mine = comparable(captured(capture(case_of(tmp_path, kind, setting))))
    real = comparable(measured(kind, setting))
    assert len(mine) > 500
    assert mine == real


def case_of(folder: Path, kind: str, setting: str) -> Case:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": kind, **MODELS[kind]}), "utf-8")
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "checkpointing": {"checkpointing": "nonreentrant"},
        "accumulation and clipping": {"accum": 2, "clip": 1.0},
    }
    document = {"model": str(path), "attn": "eager", "batch": SEQUENCES, "seq": TOKENS, **settings[setting]}
    return Case.of(document)
