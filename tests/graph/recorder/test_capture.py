"""Captures of small models: against recordings of CUDA builds, and what a step graph says beside its events."""

from __future__ import annotations

import gc
import gzip
import importlib
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.places import DATA as _DATA

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from graph import analysis  # noqa: E402
from graph.case import Case  # noqa: E402
from graph.errors import CaptureError  # noqa: E402
from graph.model import Kind, Role, StepGraph  # noqa: E402

DATA = _DATA / "captured_runs.json.gz"
KIND_OF = {int(Kind.ALLOC): 1, int(Kind.FREE): -1}


@cache
def recordings() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(gzip.decompress(DATA.read_bytes()))
    return document


RUNS = {run["name"]: run for run in recordings()["runs"]}


def captured(case: Case, **options: Any) -> StepGraph:
    graph: StepGraph = importlib.import_module("graph.recorder.capture").capture(case, **options)
    return graph


def tiny(folder: Path, config: str = "tiny-opt", **settings: Any) -> Case:
    path = folder / "config.json"
    path.write_text(json.dumps(recordings()["configs"][config]), "utf-8")
    return Case.of({"model": str(path), "batch": 2, "seq": 128, **settings})


def calls(graph: StepGraph) -> list[int]:
    """Births as bytes, deaths as negative bytes, in order; without what is there on a GPU alone."""
    sizes = graph.storages.bytes.tolist()
    pairs = zip(graph.kind.tolist(), graph.index.tolist(), strict=True)
    return [KIND_OF[kind] * sizes[index] for kind, index in pairs if kind in KIND_OF and sizes[index]]


def bursts_sorted(events: list[int]) -> list[int]:
    """Deaths that follow one another in order of size: autocast empties its cache in the order of a hash table."""
    out: list[int] = []
    burst: list[int] = []
    for event in events:
        if event < 0:
            burst.append(event)
        else:
            out += [*sorted(burst), event]
            burst = []
    return out + sorted(burst)


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> StepGraph:
    return captured(tiny(tmp_path_factory.mktemp("opt"), dtype="bf16"))


# ------------------------------------------------------------------------------------------------ recordings


@pytest.mark.parametrize("name", list(RUNS))
def test_allocator_calls_equal_the_recorded_ones(tmp_path: Path, name: str) -> None:
    run = RUNS[name]
    if run["case"].get("lora"):
        pytest.importorskip("peft")
    graph = captured(tiny(tmp_path, run["config"], **run["case"]))
    assert bursts_sorted(calls(graph)) == bursts_sorted(run["events"])


def test_equal_but_for_bursts_without_autocast() -> None:
    """The order inside a burst of frees matters to fragmentation: where nothing is hashed it is exact."""
    plain = [name for name, run in RUNS.items() if not run["case"].get("autocast")]
    assert len(plain) >= 4


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if not run["case"].get("autocast")])
def test_order_of_frees_is_the_recorded_one(tmp_path: Path, name: str) -> None:
    run = RUNS[name]
    if run["case"].get("lora"):
        pytest.importorskip("peft")
    assert calls(captured(tiny(tmp_path, run["config"], **run["case"]))) == run["events"]


# ------------------------------------------------------------------------------------------- iterations, phases


def test_a_repeated_iteration_is_the_one_that_would_have_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = tiny(tmp_path, "tiny-llama", autocast="fp16", accum=2, clip=1.0, steps=5)
    copied = captured(case)
    monkeypatch.setattr(importlib.import_module("graph.loop.method").Method, "real_steps", 5)
    run = captured(case)
    for name in ("kind", "index", "value"):
        assert np.array_equal(getattr(copied, name), getattr(run, name)), name
    for table in ("storages", "operators", "reads", "writes"):
        one, other = vars(getattr(copied, table)), vars(getattr(run, table))
        for column in one:
            if column in ("name", "category", "dtype", "module"):
                texts = ([graph.name(code) for code in vars(getattr(graph, table))[column]] for graph in (copied, run))
                assert next(texts) == next(texts), (table, column)
            else:
                assert np.array_equal(one[column], other[column]), (table, column)


def test_a_run_that_does_not_repeat_runs_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def never(table: Any, boundaries: list[Any], times: int) -> None:
        asked.append(times)

    case = tiny(tmp_path, steps=5)
    expected = calls(captured(case))
    monkeypatch.setattr(importlib.import_module("graph.recorder.capture"), "repeat", never)
    assert calls(captured(case)) == expected
    assert asked == [3, 2]


def test_phases_are_what_lies_between_marks(opt: StepGraph) -> None:
    at = np.flatnonzero(opt.kind == Kind.PHASE)
    told = [(opt.phases[opt.index[place]], int(opt.value[place])) for place in at]
    steps = [(phase, step) for step in range(3) for phase in ("forward", "backward", "optimizer")]
    assert told == [("load", -1), *steps, ("end", -1)]
    # zero_grad stands after the optimizer's mark: gradients die in the next forward, or in "end"
    gradients = {int(i) for i in opt.index[opt.kind == Kind.GRADIENT]}
    deaths = np.flatnonzero((opt.kind == Kind.FREE) & np.isin(opt.index, opt.value[opt.kind == Kind.GRADIENT]))
    phases = Counter(told[int(np.searchsorted(at, place)) - 1] for place in deaths)
    assert phases == {("forward", 1): len(gradients), ("forward", 2): len(gradients), ("end", -1): len(gradients)}


def test_micro_steps(tmp_path: Path) -> None:
    graph = captured(tiny(tmp_path, accum=2, steps=2))
    at = graph.kind == Kind.MICRO_STEP
    assert graph.value[at].tolist() == [0, 1, 0, 1]
    assert graph.value[graph.kind == Kind.STEP].tolist() == [0, 1, 2]
    trainable = sum(tensor.requires_grad for tensor in graph.tensors)
    assert int((graph.kind == Kind.GRADIENT).sum()) == 4 * trainable


def test_one_step(tmp_path: Path) -> None:
    graph = captured(tiny(tmp_path, steps=1))
    assert [graph.phases[i] for i in graph.index[graph.kind == Kind.PHASE]] == [
        "load", "forward", "backward", "optimizer", "end",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ what is what


def test_storages_are_born_once_and_die_at_most_once(opt: StepGraph) -> None:
    born = opt.index[opt.kind == Kind.ALLOC]
    died = opt.index[opt.kind == Kind.FREE]
    assert np.array_equal(np.sort(born), np.arange(len(opt.storages)))
    assert len(np.unique(died)) == len(died)
    first = {int(i): place for place, i in zip(np.flatnonzero(opt.kind == Kind.ALLOC), born, strict=True)}
    assert all(first[int(i)] < place for place, i in zip(np.flatnonzero(opt.kind == Kind.FREE), died, strict=True))


def test_categories(opt: StepGraph) -> None:
    """Sums by hand: embeddings (512 + 258) x 128; two layers of 4 x (128^2 + 128) + (128 x 512) x 2 + 512 + 128 and
    two norms of 2 x 128; a final norm. The head is tied. 2 bytes each, AdamW's two states as the weights."""
    layer = 4 * (128 * 128 + 128) + 2 * 128 * 512 + 512 + 128 + 2 * 2 * 128
    weights = 2 * ((512 + 258) * 128 + 2 * layer + 2 * 128)
    totals: Counter[str] = Counter()
    for code, size in zip(opt.storages.category.tolist(), opt.storages.bytes.tolist(), strict=True):
        totals[str(opt.name(code))] += size
    assert totals["parameter"] == weights
    assert totals["optimizer_state"] == 2 * weights
    assert totals["gradient"] == 3 * weights
    assert totals["input"] == 3 * 2 * 128 * 8
    assert {"activation", "temporary", "workspace"} <= set(totals)


def test_states_and_gradients_know_their_parameter(opt: StepGraph) -> None:
    names = {opt.storages.name[number]: name for name, number in opt.parameters.items()}
    for number in range(len(opt.storages)):
        category = opt.name(int(opt.storages.category[number]))
        source = int(opt.storages.source[number])
        if category == "gradient":
            assert opt.storages.bytes[number] == opt.storages.bytes[source]
        elif category == "optimizer_state":
            text = str(opt.name(int(opt.storages.name[number])))
            parameter, _, state = text.rpartition(".")
            assert opt.parameters[parameter] == source
            assert state in ("exp_avg", "exp_avg_sq")
    assert len(names) == len(set(opt.parameters.values()))


def test_tied_weights_are_one_storage(opt: StepGraph) -> None:
    assert opt.parameters["lm_head.weight"] == opt.parameters["model.decoder.embed_tokens.weight"]
    assert [tensor.name for tensor in opt.tensors].count("lm_head.weight") == 0


def test_modules_nest(opt: StepGraph) -> None:
    stack: list[int] = []
    for kind, index in zip(opt.kind.tolist(), opt.index.tolist(), strict=True):
        if kind == Kind.ENTER:
            stack.append(index)
        elif kind == Kind.EXIT:
            assert stack.pop() == index
    assert not stack
    assert opt.modules[0] == ("", "OPTForCausalLM")


@pytest.mark.parametrize(("experts", "tokens"), [((), {16}), ((1, 0, 2, 5), {8, 16, 40})])
def test_experts_that_run_one_by_one_get_their_shares(
    tmp_path: Path, experts: tuple[float, ...], tokens: set[int]
) -> None:
    """Of 32 tokens each goes to 2 of 4 experts: 64 rows of hidden states are looked up in all, in each of two layers,
    by as many experts as have a share; backward adds them up again, recomputation looks them up a second time."""
    config = {
        "model_type": "dbrx",
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "vocab_size": 512,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    }
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    case = {"model": str(tmp_path), "seq": 32, "attn": "default", "experts": experts, "steps": 1}
    graph = captured(Case.of({**case, "checkpointing": "nonreentrant"}))
    makers = analysis.makers(graph)
    looked_up = [
        size // (64 * 4)
        for storage, size in enumerate(graph.storages.bytes.tolist())
        if graph.name(graph.operators.name[makers[storage]]) == "aten.index.Tensor" and size % (64 * 4) == 0
    ]
    rows = [count for count in looked_up if count in tokens]
    assert set(rows) == tokens
    assert sum(rows) == 2 * 2 * 64


@pytest.mark.parametrize("checkpointing", ["", "nonreentrant", "reentrant"])
def test_backward_belongs_to_the_forward_it_differentiates(tmp_path: Path, checkpointing: str) -> None:
    graph = captured(tiny(tmp_path, "tiny-llama", checkpointing=checkpointing, attn="eager"))
    operators = graph.operators
    names = [str(graph.name(code)) for code in operators.name.tolist()]
    softmaxes = [i for i, name in enumerate(names) if name == "aten._softmax_backward_data.default"]
    assert softmaxes
    for i in softmaxes:
        origin = int(operators.origin[i])
        assert names[origin] == "aten._softmax.default"
        assert operators.module[i] == operators.module[origin]
        assert str(graph.name(int(operators.module[i]))).endswith("self_attn")
        assert operators.step[i] == operators.step[origin]
        again = checkpointing == "reentrant"  # then what was recomputed is differentiated, else the first forward
        assert operators.role[origin] == (Role.RECOMPUTE if again else Role.FORWARD)
    assert bool((operators.role == Role.RECOMPUTE).any()) == bool(checkpointing)
    backward = operators.role == Role.BACKWARD
    assert float((operators.module[backward] >= 0).mean()) > 0.95


def test_writes_count_versions(opt: StepGraph) -> None:
    """The versions that operators write to one storage go up by one each; what is read was written."""
    latest: dict[int, int] = {}
    for i in range(len(opt.operators)):
        for access, written in ((opt.reads, False), (opt.writes, True)):
            part = slice(access.start[i], access.start[i + 1])
            for storage, version in zip(access.storage[part].tolist(), access.version[part].tolist(), strict=True):
                if not written:
                    assert version == latest.get(storage, 0)
                elif storage in latest or version:
                    assert version == latest.get(storage, 0) + 1
                if written:
                    latest[storage] = version


# ----------------------------------------------------------------------------------------- errors, side effects


def untouched() -> tuple[Any, ...]:
    return (
        torch.cuda.is_available(),
        gc.isenabled(),
        torch.clear_autocast_cache,
        len(torch.nn.modules.module._global_forward_hooks),
    )


def test_a_capture_leaves_no_trace(tmp_path: Path) -> None:
    before = untouched()
    captured(tiny(tmp_path, steps=1))
    assert untouched() == before


@pytest.mark.parametrize("after", [0, 300])
def test_it_can_be_interrupted(tmp_path: Path, after: int) -> None:
    before = untouched()

    def progress(phase: str, step: int, operators: int) -> None:
        if operators >= after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        captured(tiny(tmp_path), progress=progress)
    assert untouched() == before
    assert len(captured(tiny(tmp_path, steps=1)).operators) > 100


def test_progress_tells_phases_and_operators(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    graph = captured(tiny(tmp_path, accum=16), progress=lambda *what: told.append(what))
    assert len(graph.operators) > 1024  # so that it is told within a phase as well
    assert list(dict.fromkeys(phase for phase, _, _ in told)) == ["load", "forward", "backward", "optimizer", "end"]
    counts = [count for _, _, count in told]
    assert counts == sorted(counts)
    assert counts[-1] <= len(graph.operators)


USERS = """
import torch

class Broken(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
    def forward(self, x):
        return self.inner(x) @ torch.ones(7, 3, device=x.device)

class Values(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
    def forward(self, x):
        return self.inner(x).unique().sum()

class Frozen(torch.nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.requires_grad_(False)

def broken():
    return Broken(), torch.zeros(4, 8)

def values():
    return Values(), torch.zeros(4, 8)

def frozen():
    return Frozen(), torch.zeros(4, 8)
"""


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("broken", ["step 0", "RuntimeError"]),
        ("values", ["step 0", "derivative"]),
        ("frozen", ["requires_grad"]),
    ],
)
def test_errors_are_one_line_that_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, says: list[str]
) -> None:
    (tmp_path / "users_of_capture.py").write_text(USERS, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    before = untouched()
    with pytest.raises(CaptureError) as caught:
        captured(Case.of({"model": f"users_of_capture:{function}"}))
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in says), text
    assert untouched() == before
