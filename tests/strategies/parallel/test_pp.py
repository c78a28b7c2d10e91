"""Pipeline parallel: how a decoder is cut, what each stage holds, and how many micro-batches are in flight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import numpy as np
import torch

from graph.analysis import makers
from graph.case import Case
from graph.loop.method import layers
from graph.model import Role, StepGraph
from simulator.estimator.estimate import captured, estimate
from strategies import lower, registry
from strategies.parallel.stages import cut, shares
from traces.check import check
from traces.errors import ConfigError
from traces.model import Op

WIDTH, VOCABULARY, SEQ, LAYERS = 64, 512, 64, 5
#: Bytes of one micro-batch's hidden states in bf16.
HIDDEN = SEQ * WIDTH * 2
LLAMA = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 176,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
OTHERS = {
    "gpt2": {"model_type": "gpt2", "n_embd": WIDTH, "n_layer": 4, "n_head": 4, "vocab_size": VOCABULARY},
    "opt": {
        "model_type": "opt", "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 4,
        "num_attention_heads": 4, "ffn_dim": 128, "max_position_embeddings": 256, "word_embed_proj_dim": WIDTH,
    },
    "bloom": {"model_type": "bloom", "vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 4, "n_head": 4},
    "gemma2": {
        "model_type": "gemma2", "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 128,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 256, "sliding_window": 16,
    },
}  # fmt: skip


def model(folder: Path, config: dict[str, Any]) -> str:
    path = folder / f"{config['model_type']}.json"
    path.write_text(json.dumps(config))
    return str(path)


def keys(folder: Path, config: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    base = {"dtype": "bf16", "seq": SEQ, "strategy": "pp", "world": 2, "steps": 2}
    return {"model": model(folder, config or LLAMA), **base, **more}


def events_of(folder: Path, **more: Any) -> Any:
    return estimate(keys(folder, **more), analyse=False)


def test_layers_are_split_evenly_and_the_first_stages_have_one_more() -> None:
    assert [len(share) for share in shares(22, 4)] == [6, 6, 5, 5]
    assert [list(share) for share in shares(5, 2)] == [[0, 1, 2], [3, 4]]
    assert list(shares(3, 3)) == [range(0, 1), range(1, 2), range(2, 3)]
    with pytest.raises(ConfigError, match="4 stages for 3 layers"):
        shares(3, 4)


@pytest.mark.parametrize("config", [LLAMA, *OTHERS.values()], ids=lambda config: config["model_type"])
def test_stages_one_after_another_compute_what_the_model_computes(config: dict[str, Any], tmp_path: Path) -> None:
    from graph.models.sources import build

    case = Case.of({"model": model(tmp_path, config), "seq": 16, "attn": "eager"})
    torch.manual_seed(1)
    whole = build(case).module.to_empty(device="cpu").eval()
    with torch.no_grad():
        for tensor in whole.parameters():
            tensor.normal_(std=0.05)
        _fill_buffers(whole)
    ids = torch.randint(0, VOCABULARY, (2, 16))
    with torch.no_grad():
        expected = whole(input_ids=ids, use_cache=False).logits
        out: torch.Tensor = ids
        for stage in range(2):
            part = cut(build(case).module, stage, 2).to_empty(device="cpu").eval()
            _copy(whole, part, config)
            out = part(out)
    if config["model_type"] == "gemma2":  # the model caps its logits after the head
        out = torch.tanh(out / 30.0) * 30.0
    assert torch.allclose(out, expected, atol=1e-4)


def _fill_buffers(module: torch.nn.Module) -> None:
    parts: list[Any] = list(module.modules())
    for part in parts:
        if hasattr(part, "inv_freq"):
            size = part.inv_freq.numel() * 2
            part.inv_freq.copy_(1.0 / (10000.0 ** (torch.arange(0, size, 2).float() / size)))
        if hasattr(part, "embed_scale") and isinstance(part.embed_scale, torch.Tensor):
            part.embed_scale.fill_(WIDTH**0.5)


def _copy(whole: torch.nn.Module, part: torch.nn.Module, config: dict[str, Any]) -> None:
    own = {name: tensor for name, tensor in [*part.named_parameters(), *part.named_buffers()]}
    theirs = dict([*whole.named_parameters(remove_duplicate=False), *whole.named_buffers(remove_duplicate=False)])
    assert set(own) <= set(theirs), "parts keep their names"
    for name, tensor in own.items():
        tensor.copy_(theirs[name])


def test_the_ends_hold_embedding_and_head_and_an_untied_head_is_a_tensor_of_its_own(tmp_path: Path) -> None:
    from graph.models.sources import build

    tied = {**LLAMA, "tie_word_embeddings": True}
    case = Case.of({"model": model(tmp_path, tied), "seq": SEQ})
    layer = sum(p.numel() for p in layers(build(case).module)[0].parameters())
    table = VOCABULARY * WIDTH
    counts = []
    for stage in range(3):
        part = cut(build(case).module, stage, 3)
        counts.append(sum(p.numel() for p in part.parameters()))
    assert counts == [2 * layer + table, 2 * layer, layer + WIDTH + table]


def test_in_1f1b_more_micro_batches_cost_only_their_receive_buffers(tmp_path: Path) -> None:
    """Stage 0 of 2 holds two micro-batches at most, whatever their number; each has a buffer for its gradient."""
    peaks = {}
    for count in (4, 8):
        peaks[count] = _peak(events_of(tmp_path, microbatches=count), 0)
    tokens = SEQ * 8
    assert peaks[8] - peaks[4] == 4 * (HIDDEN + tokens)


def test_in_gpipe_every_micro_batch_holds_its_activations(tmp_path: Path) -> None:
    few, many = (events_of(tmp_path, schedule="GPipe", microbatches=count) for count in (4, 8))
    one = (_peak(many, 0) - _peak(few, 0)) // 4
    assert one > 3 * 6 * HIDDEN, "three layers keep more than six tensors each"


def _peak(found: Any, rank: int) -> int:
    """The most bytes alive in phase `pipe` of the last step, from the events themselves."""
    (entry,) = [one for one in found.trace.ranks if rank in one.ranks]
    events = entry.events
    ids, sizes, steps = events.ints("id"), events.ints("bytes"), events.ints("step")
    alive, now, peak, inside = {}, 0, 0, False
    for place, op in enumerate(events.op.tolist()):
        if op == Op.PHASE:
            inside = (events.strings("name").get(place), int(steps[place])) == ("pipe", 1)
            peak = max(peak, now) if inside else peak
        elif op == Op.ALLOC:
            alive[int(ids[place])] = int(sizes[place])
            now += int(sizes[place])
        elif op == Op.FREE:
            now -= alive.pop(int(ids[place]))
        if inside:
            peak = max(peak, now)
    return peak


def test_kept_outputs_are_the_logits_of_all_micro_batches_one_by_one_and_merged(tmp_path: Path) -> None:
    kept = _left(events_of(tmp_path, microbatches=4), 1)
    dropped = _left(events_of(tmp_path, microbatches=4, return_outputs=False), 1)
    assert kept - dropped == 2 * 4 * SEQ * VOCABULARY * 2


def _left(found: Any, rank: int) -> int:
    """Bytes alive at the end of the last `pipe`."""
    (entry,) = [one for one in found.result.ranks if rank in one.ranks]
    return next(phase.left for phase in entry.phases if (phase.name, phase.step) == ("pipe", 1))


@pytest.mark.parametrize("release", ["2.11", "2.13"])
def test_shapes_found_by_a_run_change_the_first_step_alone(release: str, tmp_path: Path) -> None:
    """One more forward of one micro-batch (since 2.12 with its backward) before the first step."""
    given, runtime = (events_of(tmp_path, shapes=shapes, release=release) for shapes in ("given", "runtime"))
    for stage in range(2):
        counts = []
        for found in (given, runtime):
            (entry,) = [one for one in found.trace.ranks if stage in one.ranks]
            names = entry.events.strings("name")
            starts = [
                place
                for place, op in enumerate(entry.events.op.tolist())
                if op == Op.PHASE and names.get(place) == "pipe"
            ]
            allocations = entry.events.op == Op.ALLOC
            counts.append((int(allocations[starts[0] : starts[1]].sum()), int(allocations[starts[1] :].sum())))
        assert counts[1][0] > counts[0][0] + 20
        assert counts[1][1] == counts[0][1]


def test_messages_meet_in_pairs_and_the_trace_is_sound(tmp_path: Path) -> None:
    found = events_of(tmp_path, world=3, microbatches=4)
    assert [entry.ranks for entry in found.trace.ranks] == [(0,), (1,), (2,)]
    check(found.trace)
    counts: dict[str, list[int]] = {}
    for entry in found.trace.ranks:
        groups = entry.events.strings("group")
        for place, op in enumerate(entry.events.op.tolist()):
            if op == Op.COLLECTIVE:
                name = groups.get(place) or ""
                counts.setdefault(name, [0, 0, 0])[entry.ranks[0]] += 1
    assert counts == {
        "default_pg:0>1": [8, 8, 0],
        "default_pg:1>0": [8, 8, 0],
        "default_pg:1>2": [0, 8, 8],
        "default_pg:2>1": [0, 8, 8],
    }


@pytest.mark.parametrize("config", list(OTHERS.values()), ids=lambda config: config["model_type"])
def test_other_decoders_run_in_stages(config: dict[str, Any], tmp_path: Path) -> None:
    case = Case.of(keys(tmp_path, config, attn="default", checkpointing="nonreentrant", microbatches=2))
    for rank in range(2):
        graph = captured(case, None, registry.find(case).method(case, rank))
        assert graph.phases == ("load", "pipe", "step", "end")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"world": 6}, "6 stages for 5 layers"),
        ({"accum": 2}, "'accum'.*'microbatches'"),
        ({"loss": "chunk8"}, "'loss'"),
        ({"attention_mask": True}, "'attention_mask'"),
        ({"autocast": "fp16"}, "'autocast'.*'bf16'"),
        ({"microbatches": 1}, "'microbatches'.*as many micro-batches as stages"),
        ({"offload": "parameters"}, "'offload'.*'activations'"),
        ({"quant": "nf4", "lora": 8}, "'quant'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_a_pipeline_cannot_do_is_one_line(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        lower(Case.of(keys(tmp_path, **more)))
    assert "\n" not in str(caught.value)


def test_a_model_that_is_no_decoder_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "bert", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
              "num_attention_heads": 2, "intermediate_size": 64}  # fmt: skip
    with pytest.raises(ConfigError, match="decoders"):
        lower(Case.of(keys(tmp_path, config)))


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_what_a_stage_keeps_for_backward_is_an_activation(schedule: str, tmp_path: Path) -> None:
    """As on one GPU: what forward operators make, backward ones read, and no parameter, input or workspace is."""
    found: list[StepGraph] = []

    def kept(case: Case, method: Any) -> StepGraph:
        found.append(captured(case, None, method))
        return found[-1]

    lower(Case.of(keys(tmp_path, schedule=schedule, microbatches=3)), capture=kept)
    lower(Case.of({**keys(tmp_path), "strategy": "single", "world": 1}), capture=kept)
    assert len(found) == 3
    for graph in found:
        role, maker = graph.operators.role, makers(graph)
        reader = np.repeat(np.arange(len(graph.operators)), np.diff(graph.reads.start))
        read = np.unique(graph.reads.storage[role[reader] == Role.BACKWARD])
        made = read[(maker[read] >= 0) & (role[maker[read]] == Role.FORWARD)]
        categories = {graph.name(code) for code in graph.storages.category[made].tolist()}
        assert "activation" in categories
        assert categories <= {"activation", "parameter", "buffer", "input", "workspace"}
