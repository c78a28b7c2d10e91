"""What is tried where a case does not fit: plans that are proved, ranked by what they cost, none to be spared."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from graph.case import Case
from graph.hardware.gpus import GPUS, gpu
from simulator.engine.result import Verdict
from simulator.fit.changes import CHANGES, COSTS, LEVELS, cards, changed, options_for, options_of
from simulator.fit.plans import Judged, Plans
from simulator.fit.search import search
from simulator.options.case import case_from, case_options
from traces.errors import ConfigError, Interrupted

GIB = 1 << 30
FULL = {"model": "llama-2-7b", "dtype": "fp32", "batch": 4, "gpu": "RTX4090"}
#: What a change leaves of a need, and of the time, of a device that is made up.
LEAVES = {"dtype": 0.5, "checkpointing": 0.7, "lora": 0.4, "seq": 0.9, "optimizer": 0.9, "quant": 0.5, "loss": 0.95}
TAKES = {"dtype": 0.6, "checkpointing": 1.25, "lora": 0.8, "seq": 1.1, "optimizer": 0.95, "quant": 1.2, "loss": 1.03}


def made_up(limit: float, whole: float = 100.0) -> Callable[[Case], Judged]:
    """A judge of needs and times that are products of what changed keys leave; half the batch leaves 0.64."""

    def judge(case: Case) -> Judged:
        before, after = Case.of(FULL).whole(), case.whole()
        smaller = before["batch"] // after["batch"] if after["batch"] < before["batch"] else 0
        needs, ns = whole * 0.8**smaller, 1.0 + 0.04 * smaller
        for name, share in LEAVES.items():
            if after[name] != before[name]:
                needs, ns = needs * share, ns * TAKES[name]
        total = gpu(case.gpu).total_bytes / GIB if case.gpu != "RTX4090" else limit
        return Judged(round(needs * GIB), round(total * GIB), "fits" if needs <= total else "oom", ns)

    return judge


def tried(limit: float, keys: dict[str, Any] = FULL, **more: Any) -> Plans:
    return search(Case.of(keys), made_up(limit), **more)


def test_plans_are_ranked_by_what_else_they_change_then_by_time() -> None:
    fitting = tried(75).fitting
    options = [one.options for one in fitting]
    assert options.index("--batch 2 --accum 2") < options.index("--dtype bf16") < options.index("--lora 16")
    assert [one.level for one in fitting] == sorted(one.level for one in fitting)
    for level in range(LEVELS["hardware"]):
        prices = [one.price for one in fitting if one.level == level]
        assert prices == sorted(prices)
    assert all((one.judged.needs or 0) <= one.judged.total for one in fitting)


def test_values_of_a_change_end_with_the_first_that_fits() -> None:
    def batches(limit: float) -> list[str]:
        return [one.options for one in tried(limit).tried if one.changes[0].part == "batch" and len(one.changes) == 1]

    assert batches(70) == ["--batch 2 --accum 2"]
    assert batches(50) == ["--batch 2 --accum 2", "--batch 1 --accum 4"]


#: A case to which fewer changes apply.
KEPT = {**FULL, "alloc_conf": "expandable_segments:True", "offload": "activations"}


def exhaustive(limit: float, level: int) -> float:
    """The least time of all choices of the table up to a level that fit, with no more than five changes."""
    case, judge = Case.of(KEPT), made_up(limit)
    parts: dict[str, list[tuple[Any, Any] | None]] = {}
    for change, values in options_for(case, 100 * GIB):
        if change.level <= level and not change.alone:
            parts.setdefault(change.part, [None]).extend((change, keys) for keys in values)
    best = float("inf")
    for picked in product(*parts.values()):
        choice = [one for one in picked if one is not None]
        if not 0 < len(choice) <= 5:
            continue
        keys = {name: value for _, part in choice for name, value in part.items()}
        made = changed(case, keys)
        if made is None:
            continue
        found = judge(made)
        best = min(best, found.ns or best) if found.verdict == "fits" else best
    return best


@pytest.mark.parametrize("limit", [92, 80, 63, 57, 45, 36, 31, 24])
def test_the_first_plan_costs_no_more_than_the_best_of_all(limit: float) -> None:
    first = tried(limit, KEPT).fitting[0]
    assert first.level == 0 or exhaustive(limit, 0) == float("inf")
    assert first.time is not None
    assert first.time <= 1.05 * exhaustive(limit, first.level)


@pytest.mark.parametrize("limit", [80, 30])
@pytest.mark.parametrize("keep", [{"batch"}, {"batch", "dtype", "optimizer"}, {"checkpointing", "lora"}])
def test_what_is_kept_is_in_no_plan(limit: float, keep: set[str]) -> None:
    found = tried(limit, keep=keep)
    assert all(keep.isdisjoint(one.keys) for one in found.tried)
    for one, other in combinations(found.fitting, 2):
        assert not one.keys.items() < other.keys.items() or other.price < one.price


def test_a_key_that_is_not_there_cannot_be_kept() -> None:
    with pytest.raises(ConfigError, match="no key 'batsch'; the nearest is 'batch'"):
        tried(50, keep=["batsch"])


def test_what_no_single_change_serves_a_combination_does() -> None:
    found = tried(36)
    first = found.fitting[0]
    assert len(first.changes) > 1
    assert first.level == 0
    assert first.judged.needs == made_up(36)(changed(Case.of(FULL), first.keys) or Case.of(FULL)).needs


def test_nothing_is_combined_where_all_together_do_not_fit() -> None:
    """Of each level the strongest, which rule out all others."""
    found = tried(0.5)
    assert not any(one.fits for one in found.tried if one.cost != "hardware")
    combined = [one for one in found.tried if len(one.changes) > 1 and "alloc_conf" not in one.keys]
    assert len(combined) <= 3 * len({one.level for one in combined})
    assert not any(len(one.changes) == 1 and one.level == 0 for one in found.tried)
    assert {one.cost for one in found.fitting} <= {"hardware"}


def test_two_peaks_that_each_need_a_change_of_their_own() -> None:
    """Neither change alone saves anything, so that nothing foresees that both do."""

    def judge(case: Case) -> Judged:
        peaks = {"a": 50 if case.checkpointing or case.offload else 100, "b": 50 if case.loss else 100}
        needs = max(peaks.values())
        return Judged(needs, 60, "fits" if needs <= 60 else "oom", 1.0, 60, {"": needs})

    first = search(Case.of(FULL), judge, keep=["batch"]).fitting[0]
    assert {change.part for change in first.changes} == {"activations", "loss"}


def test_what_does_not_fit_is_replayed_with_expandable_segments_from_the_same_graph() -> None:
    """Whatever else is changed, and only where it does not fit without."""
    groups: list[tuple[list[Case], int]] = []

    def mapped(several: Callable[[Any], Any], cases: Any) -> list[Any]:
        found = [several(one) for one in cases]
        groups.extend((list(one), len(answers)) for one, answers in zip(cases, found, strict=True))
        return found

    def judge(case: Case) -> Judged:
        needs = 50 if case.checkpointing and case.alloc_conf == "expandable_segments:True" else 100
        return Judged(needs, 60, "fits" if case.batch == 1 or needs <= 60 else "oom", 1.0)

    first = search(Case.of(FULL), judge, keep=["batch"], mapped=mapped).fitting[0]
    assert {change.part for change in first.changes} == {"activations", "allocator"}
    pairs = [group for group, _ in groups if len(group) > 1]
    assert pairs
    for one, other in pairs:
        assert other == changed(one, {"alloc_conf": "expandable_segments:True"})
    groups.clear()
    search(Case.of(FULL), judge, mapped=mapped)
    assert [count for group, count in groups if group[0].batch == 1 and group[0].optimizer == "adamw"] == [1]


def test_savings_at_different_times_are_added_by_parts_of_phases() -> None:
    """What saves at the start of the forward and what saves at its end are foreseen to fit together."""
    tried: list[Case] = []

    def judge(case: Case) -> Judged:
        tried.append(case)
        start = 100 - 50 * bool(case.checkpointing)
        end = 90 - 45 * bool(case.loss) - 20 * bool(case.checkpointing)
        needs = max(start, end)
        ns = 1.0 + 0.1 * bool(case.checkpointing) + 0.05 * bool(case.loss) + (case.offload != "")
        return Judged(needs, 55, "fits" if needs <= 55 else "oom", ns, 55, {"forward": start, "forward 1": end})

    keep = ["batch", "alloc_conf", "step_in_backward", "optimizer", "seq", "dtype", "lora", "gpu", "autocast"]
    first = search(Case.of(FULL), judge, keep=keep).fitting[0]
    assert {change.part for change in first.changes} == {"activations", "loss"}
    both = [place for place, case in enumerate(tried) if case.checkpointing and case.loss and not case.offload]
    assert len(both) <= 2


def test_where_weights_alone_are_too_much_what_leaves_them_waits() -> None:
    def judge(case: Case) -> Judged:
        load = 100 if case.dtype == "fp32" else 50
        return Judged(load + 10, 80, "fits" if load + 10 <= 80 else "oom", 1.0, 80, {"load": load, "step": load + 10})

    found = search(Case.of(FULL), judge)
    assert found.fitting[0].options == "--dtype bf16"
    assert [one.level for one in found.tried].index(0) > [one.options for one in found.tried].index("--dtype bf16")


def test_of_changes_that_differ_alike_several_may_be_cheaper_than_one() -> None:
    """One change of its level fits, and is slow: two others of the same level together are faster."""

    def judge(case: Case) -> Judged:
        dear = case.optimizer == "paged-adamw-8bit"
        needs = 100 - 50 * (case.dtype == "bf16") - 20 * (case.optimizer == "adamw-8bit") - 70 * dear
        return Judged(needs, 40, "fits" if needs <= 40 else "oom", 1.0 - 0.5 * (case.dtype == "bf16") + dear, 40)

    first = search(Case.of(FULL), judge, keep=["quant", "batch", "lora", "autocast"]).fitting[0]
    assert first.keys == {"dtype": "bf16", "optimizer": "adamw-8bit"}


def test_what_retries_take_is_not_of_a_change() -> None:
    """A change by itself leaves too little room and waits for the allocator; together with another one it does not."""

    def judge(case: Case) -> Judged:
        half, small = case.dtype == "bf16", case.optimizer == "adamw-8bit"
        needs = 100 - 30 * half - 40 * small
        tight = 50 < needs <= 70
        verdict: Verdict = "tight" if tight else "fits" if needs <= 50 else "oom"
        waits = 2.0 * tight
        return Judged(needs, 70, verdict, 1.0 - 0.3 * half + 0.1 * small + waits, 70, waits=waits)

    first = search(Case.of(FULL), judge, keep=["quant", "batch", "lora", "autocast", "seq", "gpu"]).fitting[0]
    assert first.keys == {"dtype": "bf16", "optimizer": "adamw-8bit"}


def test_times_are_foreseen_from_what_is_next_to_a_choice() -> None:
    """Offloading waits for the host: what leaves little to move saves most of the time, whatever else is changed."""

    def judge(case: Case) -> Judged:
        chunks, again = bool(case.loss), bool(case.checkpointing)
        moved = 1.0 if not again else 0.5 if not chunks else 0.1
        ns = moved + 0.4 * (chunks and not again) + 0.05 * case.step_in_backward
        needs = 100 - 20 * chunks - 20 * again - 20 * case.step_in_backward
        return Judged(needs, 65, "fits" if needs <= 65 else "oom", ns, 65)

    kept = ["batch", "alloc_conf", "optimizer", "dtype", "lora", "gpu", "autocast", "offload", "seq"]
    first = search(Case.of(FULL), judge, keep=kept).fitting[0]
    assert {change.part for change in first.changes} == {"loss", "activations"}


def test_what_costs_time_is_not_tried_where_nothing_faster_lacks_memory() -> None:
    def judge(case: Case) -> Judged:
        needs = 100 - 60 * (case.dtype == "bf16") - 30 * bool(case.loss and case.checkpointing)
        return Judged(needs, 50, "fits" if needs <= 50 else "oom", 1.0 - 0.5 * (case.dtype == "bf16"), 50)

    found = search(Case.of(FULL), judge, keep=["optimizer", "autocast", "batch"])
    assert found.fitting[0].options == "--dtype bf16"
    assert not any(one.options.startswith(("--loss", "--checkpointing")) and one.level == 0 for one in found.tried)


def test_time_that_is_up_leaves_the_rest_untried() -> None:
    found = tried(50, seconds=-1.0)
    assert found.tried == ()
    assert "--dtype bf16" in found.untried


def test_milder_changes_leave_time_for_adapters_and_other_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("simulator.fit.search.time.monotonic", lambda: clock[0])

    def judge(case: Case) -> Judged:
        clock[0] += 2.0
        return made_up(30)(case)

    found = search(Case.of(FULL), judge, seconds=40.0)
    assert found.untried
    options = [one.options for one in found.tried]
    assert "--lora 16" in options
    assert any(one.startswith("--gpu ") for one in options)
    assert clock[0] < 50.0


def test_what_fits_needs_no_plan() -> None:
    assert tried(101).tried == ()


def test_ctrl_c_keeps_what_was_tried() -> None:
    calls = []

    def judge(case: Case) -> Judged:
        calls.append(case)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return made_up(50)(case)

    with pytest.raises(Interrupted) as caught:
        search(Case.of(FULL), judge)
    assert len(caught.value.found.tried) == 2  # the first call is for the case as it is


def test_cases_that_cannot_run_are_left_out() -> None:
    assert search(Case.of(FULL), lambda case: None) == Plans(None)
    others = search(Case.of(FULL), lambda case: made_up(50)(case) if not case.lora else None)
    assert others.tried
    assert not any("lora" in one.keys for one in others.tried)


CASES = [
    FULL,
    {"model": "gpt2", "autocast": "bf16", "dtype": "fp32", "alloc_conf": "max_split_size_mb:64", "memory": 8 * GIB},
    {"model": "gpt2", "lora": 4, "optimizer": "sgd", "attn": "eager"},
    {"model": "llama-2-7b", "lora": 4, "quant": "nf4", "gpu": "T4"},
    {"model": "gpt2", "task": "inference", "batch": 8, "dtype": "fp32", "gpu": "V100-16GB"},
    {"model": "gpt2", "strategy": "fsdp2", "world": 4, "checkpointing": "nonreentrant"},
]


def many_fit(keys: dict[str, Any]) -> Callable[[Case], Judged]:
    """A judge for which only what differs in more than three keys fits, so that everything is tried alone."""
    before = Case.of(keys).whole()

    def judge(case: Case) -> Judged:
        after = case.whole()
        differ = sum(after[name] != value for name, value in before.items())
        return Judged(10**12, 1, "fits" if differ > 3 else "oom", 1.0)

    return judge


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

    found = search(Case.of(keys), many_fit(keys))
    assert found.tried
    for one in found.tried:
        kept = {
            name: value for name, value in Case.of(keys).document().items() if one.keys.get(name, value) is not None
        }
        wanted = Case.of({name: value for name, value in {**kept, **one.keys}.items() if value is not None})
        assert (
            typed(
                {name: value for name, value in kept.items() if name not in one.keys},
                one.options.split(", without")[0] if None in one.keys.values() else one.options,
            )
            == wanted
        )


def test_every_change_of_the_table_is_tried_for_some_case() -> None:
    known = {change for keys in CASES for one in search(Case.of(keys), many_fit(keys)).tried for change in one.changes}
    more = {change for change in known if change.part == "gpus"}
    assert known >= {change for change in CHANGES if change.words != "a larger card"}
    assert {change.words for change in more} == {"more GPUs, each with a part"}  # no card has a terabyte


def test_costs_and_levels_have_the_same_words() -> None:
    assert tuple(LEVELS) == COSTS
    assert list(LEVELS.values()) == sorted(LEVELS.values())


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
    found = search(Case.of({**FULL, **keys}), many_fit({**FULL, **keys}))
    assert options in [one.options for one in found.tried]


def test_gpus_that_are_there_are_no_other_hardware() -> None:
    found = search(Case.of(FULL), many_fit(FULL), gpus=4)
    shared = [one for one in found.tried if "world" in one.keys]
    assert {one.keys["world"] for one in shared} == {4}
    assert {one.keys["strategy"] for one in shared} == {"zero1", "fsdp2", "fsdp2-offload"}
    assert {one.level for one in shared if len(one.changes) == 1} == {0}


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
    keys["memory"] = int(0.9 * estimate(keys, context=0).worst.peak_allocated)
    found = estimate(keys, context=0, remedies=True, analyse=False)
    assert found.verdict == "oom"
    assert found.remedies is not None
    needed = found.result.decisive.needed
    assert needed is not None
    assert estimate({**keys, "memory": needed}, context=0).verdict != "oom"
    base = estimate({**keys, "memory": None}, context=0, time_steps=True).step
    assert base is not None
    for one in (*found.remedies.fitting, *found.remedies.short[:2]):
        document = {**keys, **one.keys}
        again = estimate({name: value for name, value in document.items() if value is not None}, context=0)
        assert again.verdict == one.judged.verdict, one.options
        assert again.result.decisive.needed == one.judged.needs, one.options
    first = next(one for one in found.remedies.fitting if one.judged.verdict == "fits" and "gpu" not in one.keys)
    timed = estimate({**keys, **first.keys, "memory": None}, context=0, time_steps=True).step
    assert timed is not None
    assert first.time == pytest.approx(base.tokens_per_second / timed.tokens_per_second, rel=0.01)
    listed = found.document()["remedies"]
    assert [one["options"] for one in listed] == [
        one.options for one in (*found.remedies.fitting, *found.remedies.short)
    ]
    assert json.loads(json.dumps(listed)) == listed


def test_a_plan_fits_also_where_works_keep_their_tensors(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from simulator.estimator.estimate import captured, estimate
    from simulator.fit.measure import measured
    from tests.support.launched import model

    keys = {"model": model(tmp_path / "model"), "batch": 1, "seq": 8, "strategy": "ddp", "world": 2}
    soon, late = (estimate(keys, context=0, deferred=when) for when in ("prompt", "late"))
    assert soon.result.needed is not None
    assert late.result.needed is not None
    assert late.worst.peak_allocated > soon.worst.peak_allocated
    assert any("watchdog" in text for text in soon.assumptions)
    assert not late.assumptions
    found = measured(Case.of(keys), 0, lambda case, method: captured(case, None, method))
    assert found is not None
    assert found.needs == max(soon.result.needed, late.result.needed)


def test_of_replicas_with_sharded_states_the_heaviest_is_judged(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from simulator.estimator.estimate import captured, estimate
    from simulator.fit.measure import measured
    from tests.support.launched import model

    keys = {"model": model(tmp_path / "model"), "batch": 1, "seq": 8, "strategy": "zero1", "world": 3}
    graphs = []

    def capture(case: Case, method: Any) -> Any:
        graphs.append(case)
        return captured(case, None, method)

    found = measured(Case.of(keys), 0, capture)
    assert found is not None
    assert len(graphs) == 3  # at once, late, and with a clock, of one rank of three
    whole = (estimate(keys, context=0, deferred=when) for when in ("prompt", "late"))
    assert found.needs == max(one.result.needed or 0 for one in whole)


def test_several_processes_find_what_one_does(tmp_path: Path) -> None:
    """Their server imports what they need, but starts no thread of autograd: none survives a fork."""
    pytest.importorskip("torch")
    from simulator.fit.fit import fit

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    case = Case.of({"model": str(tmp_path), "batch": 4, "seq": 128, "steps": 2, "memory": 96 << 20})
    keep = ("optimizer", "step_in_backward", "checkpointing", "loss", "offload", "alloc_conf")
    one, two = (fit(case, keep=keep, context=0, jobs=jobs) for jobs in (1, 2))
    assert one.whole.verdict == "oom"
    assert one.plans.fitting
    assert [plan.options for plan in two.plans.fitting] == [plan.options for plan in one.plans.fitting]
