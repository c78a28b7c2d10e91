"""What is tried where a case does not fit: each change proved by an estimate of its own, or combined."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from graph.case import Case
from graph.hardware.gpus import GPUS, gpu
from simulator.estimator.remedies import CHANGES, COSTS, KEPT, Judged, Remedies, cards, options_of, search
from simulator.options.case import case_from, case_options
from traces.errors import Interrupted

GIB = 1 << 30
FULL = {"model": "llama-2-7b", "dtype": "fp32", "batch": 4, "gpu": "RTX4090"}
#: What a change leaves of a need, of a device that is made up.
LEAVES = {"dtype": 0.5, "checkpointing": 0.7, "lora": 0.4, "seq": 0.9, "optimizer": 0.9, "quant": 0.5}


def made_up(limit: float, whole: float = 100.0) -> Callable[[Case], Judged]:
    """A judge of needs that are products of what changed keys leave; half the batch leaves 0.64, a quarter 0.41."""

    def judge(case: Case) -> Judged:
        before, after = Case.of(FULL).whole(), case.whole()
        needs = whole * 0.8 ** (before["batch"] // after["batch"] if after["batch"] < before["batch"] else 0)
        for name, share in LEAVES.items():
            needs *= share if after[name] != before[name] else 1
        total = gpu(case.gpu).total_bytes / GIB if case.gpu != "RTX4090" else limit
        return Judged(round(needs * GIB), round(total * GIB), "fits" if needs <= total else "oom")

    return judge


def tried(limit: float, keys: dict[str, Any] = FULL, **more: Any) -> Remedies:
    return search(Case.of(keys), 100 * GIB, made_up(limit), **more)


def test_single_changes_come_the_mildest_first() -> None:
    found = tried(75)
    options = [one.options for one in found.fitting]
    assert options.index("--checkpointing nonreentrant") < options.index("--dtype bf16") < options.index("--lora 16")
    assert [COSTS.index(one.cost) for one in found.fitting] == sorted(COSTS.index(one.cost) for one in found.fitting)
    assert all((one.judged.needs or 0) <= one.judged.total for one in found.fitting)
    assert all(len(one.changes) == 1 for one in found.tried)  # nothing is combined that needs not be


def test_values_of_a_change_end_with_the_first_that_fits() -> None:
    def batches(limit: float) -> list[str]:
        return [one.options for one in tried(limit).tried if one.changes[0].part == "batch" and len(one.changes) == 1]

    assert batches(70) == ["--batch 2 --accum 2"]
    assert batches(50) == ["--batch 2 --accum 2", "--batch 1 --accum 4"]


def test_what_no_single_change_serves_a_pair_does() -> None:
    found = tried(36)
    (pair,) = (one for one in found.fitting if one.cost in KEPT)
    assert pair.options == "--batch 1 --accum 4 --dtype bf16"  # what saves most
    assert pair.judged.needs == round(100 * GIB * 0.8**4 * 0.5)
    assert pair.cost == "rounding"


def test_all_together_are_tried_first_and_end_it() -> None:
    """Where even they do not fit, no pair is tried; nor is a combination without the method."""
    found = tried(0.5)
    combined = [one for one in found.tried if len(one.changes) > 1]
    assert not any(one.fits for one in combined)
    assert len(combined) == 2
    assert "lora" not in combined[0].keys
    assert "lora" in combined[1].keys
    assert {one.cost for one in found.fitting} <= {"hardware"}


def test_a_change_that_saves_nothing_is_in_no_combination() -> None:
    for one in tried(0.5).tried:
        assert len(one.changes) == 1 or "offload" not in one.keys


def test_time_that_is_up_leaves_the_rest_untried() -> None:
    found = tried(50, seconds=-1.0)
    assert found.tried == ()
    assert "--dtype bf16" in found.untried


def test_ctrl_c_keeps_what_was_tried() -> None:
    calls = []

    def judge(case: Case) -> Judged:
        calls.append(case)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return made_up(50)(case)

    with pytest.raises(Interrupted) as caught:
        search(Case.of(FULL), 100 * GIB, judge)
    assert len(caught.value.found.tried) == 2


def test_cases_that_cannot_run_are_left_out() -> None:
    assert search(Case.of(FULL), 100 * GIB, lambda case: None) == Remedies(100 * GIB)


CASES = [
    FULL,
    {"model": "gpt2", "autocast": "bf16", "dtype": "fp32", "alloc_conf": "max_split_size_mb:64", "memory": 8 * GIB},
    {"model": "gpt2", "lora": 4, "optimizer": "sgd"},
    {"model": "llama-2-7b", "lora": 4, "quant": "nf4", "gpu": "T4"},
    {"model": "gpt2", "task": "inference", "batch": 8, "dtype": "fp32", "gpu": "V100-16GB"},
    {"model": "gpt2", "strategy": "fsdp2", "world": 4, "checkpointing": "nonreentrant"},
]


@pytest.mark.parametrize("keys", CASES, ids=lambda keys: " ".join(map(str, keys.values())))
def test_options_say_the_case_that_was_tried(keys: dict[str, Any]) -> None:
    """As one would type them behind the command line of the case."""
    seen: list[Case] = []

    @click.command()
    @case_options
    def command(**options: Any) -> None:
        seen.append(case_from(str(keys["model"]), options))

    def typed(document: dict[str, Any], words: str) -> Case:
        own = [
            part
            for name, value in document.items()
            if name != "model"
            for part in shlex.split(options_of({name: value}))
        ]
        outcome = CliRunner().invoke(command, [*own, *shlex.split(words)], standalone_mode=False)
        assert outcome.exception is None, outcome.exception
        return seen[-1]

    found = search(Case.of(keys), 10**12, lambda case: Judged(1, 1, "oom"))
    assert found.tried
    for one in found.tried:
        kept = {
            name: value for name, value in Case.of(keys).document().items() if one.keys.get(name, value) is not None
        }
        wanted = Case.of({name: value for name, value in {**kept, **one.keys}.items() if value is not None})
        assert (
            typed(
                {name: value for name, value in kept.items() if name not in one.keys},
                one.options.split(",")[0] if None in one.keys.values() else one.options,
            )
            == wanted
        )


def test_every_change_of_the_table_is_tried_for_some_case() -> None:
    known = {change for keys in CASES for one in search(Case.of(keys), 1, made_up(0)).tried for change in one.changes}
    assert known >= set(CHANGES)


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({}, "--strategy fsdp2 --world 2"),
        ({"strategy": "ddp", "world": 4}, "--strategy fsdp2 --world 4"),
        ({"strategy": "fsdp2", "world": 4}, "--world 8"),
        ({"strategy": "fsdp2", "world": 4}, "--strategy fsdp2-offload"),
    ],
)
def test_methods_have_changes_of_their_own(keys: dict[str, Any], options: str) -> None:
    found = search(Case.of({**FULL, **keys}), 100 * GIB, lambda case: Judged(99 * GIB, 90 * GIB, "oom"))
    assert options in [one.options for one in found.tried]


def test_cards_are_the_smallest_that_may_do() -> None:
    found = [keys["gpu"] for keys in cards(Case.of(FULL), 30 * GIB)]
    sizes = [GPUS[name].total_bytes for name in found]
    others = [card.total_bytes for card in GPUS.values() if card.has_bf16 and card.total_bytes >= 30 * GIB]
    assert sizes == sorted(others)[: len(sizes)]
    assert list(cards(Case.of(FULL), 1 << 50)) == []
    assert all(keys["memory"] is None for keys in cards(Case.of({**FULL, "memory": 8 * GIB}), 9 * GIB))


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip


def test_what_is_promised_is_what_an_estimate_of_it_says(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from simulator.estimator.estimate import estimate

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    keys: dict[str, Any] = {"model": str(tmp_path), "batch": 2, "seq": 128, "steps": 2}
    keys["memory"] = int(0.7 * estimate(keys, context=0).worst.peak_allocated)
    found = estimate(keys, context=0, remedies=True, analyse=False)
    assert found.verdict == "oom"
    assert found.remedies is not None
    needed = found.result.decisive.needed
    assert needed is not None
    assert estimate({**keys, "memory": needed}, context=0).verdict != "oom"
    some = [*found.remedies.fitting[:2], *found.remedies.short[:2]]
    assert len(some) == 4
    for one in some:
        document = {**keys, **one.keys}
        again = estimate({name: value for name, value in document.items() if value is not None}, context=0)
        assert again.verdict == one.judged.verdict, one.options
        assert again.result.decisive.needed == one.judged.needs, one.options
    listed = found.document()["remedies"]
    assert [one["options"] for one in listed] == [
        one.options for one in (*found.remedies.fitting, *found.remedies.short)
    ]
    assert json.loads(json.dumps(listed)) == listed
