"""`capture`: its options are the keys of a case, its summary is that of the graph, and what it writes can be read."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from click.testing import Result as Outcome
from rich.console import Console

from graph.case import KEYS, Case
from graph.files import load
from graph.model import StepGraph
from graph.summary import summarize
from simulator.cli import main
from simulator.options.case import OPTION_KEYS, CaseCommand, assumed, case_from, case_options
from simulator.reports import terminal
from simulator.reports.capture import document_of, format_count
from tests.places import ROOT
from tests.support.made_graphs import Maker, assert_equal, example
from traces.errors import ConfigError


def call(*arguments: str) -> Outcome:
    outcome = CliRunner().invoke(main, ["capture", *arguments])
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), outcome.output
    return outcome


# Options


def test_every_key_is_an_option() -> None:
    assert sorted(OPTION_KEYS) == sorted(set(KEYS) - {"model"})


@click.command(cls=CaseCommand)
@case_options
def probe(**options: Any) -> None:
    click.echo(json.dumps(case_from("gpt2", options).document()))


def given(*arguments: str) -> dict[str, Any]:
    outcome = CliRunner().invoke(probe, arguments)
    if outcome.exception is not None:
        raise outcome.exception
    found = json.loads(outcome.stdout)
    assert found.pop("model") == "gpt2"
    assert isinstance(found, dict)
    return found


def test_nothing_given_is_all_defaults() -> None:
    assert given() == {}


ZERO = ["--strategy", "deepspeed-1", "--world", "2"]


@pytest.mark.parametrize(
    ("arguments", "document"),
    [
        (["--dtype", "bf16"], {"dtype": "bf16"}),
        (["--batch", "4", "--dec-seq", "64"], {"batch": 4, "dec_seq": 64}),
        (["--optimizer", "sgd", "--sgd-momentum", "0.9", "--clip", "1"], {"sgd_momentum": 0.9, "clip": 1.0}),
        (["--autocast", "none", "--checkpointing", "none"], {}),
        (["--autocast", "fp16"], {"autocast": "fp16"}),
        (["--attention-mask", "true"], {"attention_mask": True}),
        (["--attention-mask", "padded"], {"attention_mask": "padded"}),
        (["--use-cache", "--no-sync"], {"use_cache": True, "sync": False}),
        (["--no-use-cache", "--sync"], {}),
        (["--memory", "16GiB"], {"memory": 16 << 30}),
        (["--strategy", "ddp", "--world", "2", "--memory", "16GB,2000000"], {"memory": [16 * 10**9, 2000000]}),
        (["--strategy", "fsdp2-tp", "--world", "8", "--mesh", "fsdp2=4, tp=2"], {"mesh": {"fsdp2": 4, "tp": 2}}),
        (["--checkpointing", "selective", "--save", "attn,matmul"], {"save": ["matmul", "attn"]}),
        (["--experts", "1,2,0.5"], {"experts": [1.0, 2.0, 0.5]}),
        ([*ZERO, "--zero-extra", "a=1,b=true"], {"zero_extra": {"a": 1, "b": True}}),
        ([*ZERO, "--overlap-comm", "false"], {"overlap_comm": False}),
        (["--gpu", "V100-16GB"], {"gpu": "V100-16GB"}),
        (["--per-device-train-batch-size", "4", "--bf16"], {"batch": 4, "autocast": "bf16"}),
        (["--per_device_train_batch_size", "4", "--gradient-checkpointing"], {"batch": 4}),
        (["--optim", "adamw_torch_fused"], {"optimizer": "adamw-fused"}),
        (["--strategy", "zero3", "--nproc-per-node", "2"], {"strategy": "deepspeed-3", "world": 2}),
        (["--release", "2.11"], {"release": "2.11"}),
    ],
    ids=" ".join,
)
def test_options_mean_values_of_a_case(arguments: list[str], document: dict[str, Any]) -> None:
    found = given(*arguments)
    assert {key: found.get(key) for key in document} == document
    assert Case.of({"model": "gpt2", **found}).document() == {"model": "gpt2", **found}
    assert set(found) - set(document) <= {"strategy", "world", "checkpointing", "optimizer"}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--dtype", "fp8"], "--dtype: 'fp8' should be one of 'auto', 'fp32', 'bf16', 'fp16'"),
        (["--batch", "many"], "--batch: 'many' should be a whole number"),
        (["--batch", "1.5"], "--batch: 1.5 should be a whole number"),
        (["--batch", "0"], "--batch: 0 should be a whole number of at least 1"),
        (["--clip", "nan"], "--clip: nan should be a number"),
        (["--memory", "16G"], "--memory: size '16G' is ambiguous"),
        (["--memory", "24"], "--memory: size '24' has no unit: write 24GB or 24GiB"),
        (["--memory", "24B"], "--memory: 24 should be bytes (at least 1 MiB)"),
        (["--buckets", "5"], "--buckets: only with --strategy: 'deepspeed-1', 'deepspeed-2' or 'deepspeed-3'"),
        (["--mesh", "tp"], "mesh: 'tp' in 'tp' is not of the form axis=size, as in dp=2,tp=2"),
        (["--mesh", "dp=2,dp=4"], "mesh: 'dp=2,dp=4' names the axis dp twice"),
        (["--gpu", "V99"], "unknown GPU 'V99'"),
        (["--world", "2"], "--world: 2 ranks need a --strategy other than 'single'"),
        (["--grad-sync", "never"], "--grad-sync: 'never' should be one of"),
    ],
    ids=" ".join,
)
def test_wrong_values_name_their_option(arguments: list[str], reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        given(*arguments)
    assert str(error.value).startswith(reason)
    assert "key '" not in str(error.value)


def test_two_names_of_a_key_exclude_each_other() -> None:
    with pytest.raises(click.UsageError, match="--alloc-conf and --allocator are the same: give one of them"):
        case_from("gpt2", {"alloc_conf": "a:1", "allocator": "b:1"})


def test_help_has_groups_with_every_option_and_its_default_once() -> None:
    shown = CliRunner().invoke(main, ["estimate", "--help"], terminal_width=100).stdout
    lines = shown.splitlines()
    titles = [line.removesuffix(":") for line in lines if line[:1].isalpha() and line.endswith(":")]
    assert titles[:3] == ["Common options", "Options of this command", "Precision and attention"]
    assert "Pipeline (only with --strategy pp, or a --mesh with pp)" in titles
    assert "Inference (only with --task inference)" in titles
    for name in OPTION_KEYS:
        option = "--" + name.replace("_", "-")
        assert sum(line.startswith(f"  {option} ") for line in lines) == 1, option
    words = " ".join(shown.split())
    assert words.count("default: ") >= len(OPTION_KEYS)
    for said in (
        "[default: 512]",
        "[default: A100-80GB]",
        "only with --quant nf4; default: yes]",
        "[also --optim; default: adamw]",
    ):
        assert said in words


def test_a_memory_without_a_gpu_is_noted() -> None:
    assert assumed({"memory": "24GB", "gpu": None}) == (
        "--gpu is not given: an A100-80GB is assumed, with the memory that --memory says",
    )
    assert assumed({"memory": "24GB", "gpu": "A10"}) == assumed({"memory": None, "gpu": None}) == ()


# The command, with a graph that is there already


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> StepGraph:
    """What the command gets instead of capturing: the example."""
    made = example()
    module = types.ModuleType("graph.recorder.capture")
    module.capture = lambda case, **_: made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "graph.recorder.capture", module)
    return made


def test_writes_the_graph(tmp_path: Path, graph: StepGraph) -> None:
    path = tmp_path / "graph.json.gz"
    outcome = call("gpt2", "-o", str(path))
    assert outcome.exit_code == 0
    assert outcome.stdout.startswith("captured: opt-125m, as on A100-80GB under PyTorch ?\n")
    assert outcome.stderr == ""
    assert_equal(load(path), graph)
    assert call("gpt2", "-o", str(path)).stderr == f"error: {path}: exists already; give --force to replace it\n"
    assert call("gpt2", "-o", str(path), "--force").exit_code == 0


def test_without_output_only_the_summary(tmp_path: Path, graph: StepGraph) -> None:
    outcome = call("gpt2")
    assert outcome.exit_code == 0
    assert list(tmp_path.iterdir()) == []
    said = json.loads(call("gpt2", "--json").stdout)
    assert said["peak"]["bytes"] == 6444
    assert said["saved_for_backward"]["bytes"] == 744
    assert said["parameters"]["bytes"] == 0  # the example names no tensors
    assert said["case"] == {"model": "opt-125m"}


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        ((), 2, "Missing argument 'MODEL'"),
        (("gpt2", "--nothing"), 2, "No such option"),
        (("gpt2", "-o", "graph.txt"), 1, "must end in .json, .json.gz, .graphml, .dot"),
        (("gpt2", "-o", "/no/such/graph.json"), 1, "there is no folder /no/such"),
        (("gpt2", "--strategy", "ddp", "--world", "2"), 1, "--strategy ddp: a step graph is of one GPU"),
        (("gpt2", "--attn", "flash"), 1, "--attn: 'flash' should be one of 'sdpa', 'eager', 'default'"),
    ],
)
def test_wrong_calls_do_no_work(arguments: tuple[str, ...], code: int, reason: str, graph: StepGraph) -> None:
    outcome = call(*arguments)
    assert outcome.exit_code == code
    assert reason in outcome.stderr
    assert outcome.stdout == ""


def test_without_torch_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "graph.recorder.capture", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    outcome = call("gpt2")
    assert outcome.exit_code == 1
    assert outcome.stderr == (
        "error: torch is not installed, which runs the model's code; install it with: pip install 'vramsim[torch]'\n"
    )


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from simulator.cli import main; main(['capture', '--help'], standalone_mode=False)"
    report = f"import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); {code}"
    shown = subprocess.run([sys.executable, "-c", report], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--sgd-momentum" in shown.stdout
    heavy = {"torch", "numba", "llvmlite", "networkx", "transformers", "numpy", "rich", "pyarrow"}
    assert heavy & set(shown.stderr.split()) == set()


# The report


def rendered(graph: StepGraph, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    terminal.render(document_of(summarize(graph)), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_report_of_the_example() -> None:
    lines = [" ".join(line.split()) for line in rendered(example()).splitlines()]
    assert "operators 9 11 tensors, 34 events" in lines
    assert "peak requested 6.29 KiB 6,444 B backward 0, for a perfect allocator" in lines
    assert "kept for backward 744 B 744 B when the last backward begins" in lines
    assert "forward 0 3.80 KiB 3.75 KiB 3 1.20 k 1.95 KiB" in lines
    assert "gradient 2.93 KiB 46.6%" in lines
    assert "layers.*.act 1 400 B 53.8% 400 B" in lines
    assert lines[-2:] == ["Assumed", "every token is real"]


def test_report_of_a_graph_without_anything() -> None:
    text = rendered(Maker().graph())
    assert "Kept for backward" not in text
    assert "peak requested" in text


def test_names_stay_on_their_lines_and_are_no_markup() -> None:
    make = Maker()
    make.phase("[red]forward[/]\nx", 0)
    make.alloc(10, made=False, name="[bold]a[/]\nb", module="m\tn")
    text = rendered(make.graph())
    assert "[red]forward[/] x" in text
    assert "[bold]a[/] b" in text


def test_80_columns_are_enough() -> None:
    assert max(map(len, rendered(example(), 80).splitlines())) <= 80


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 "),
        (999, "999 "),
        (1000, "1.00 k"),
        (125_239_296, "125.24 M"),
        (999_996_000, "1.00 G"),
        (5 * 10**18, "5,000.00 P"),
    ],
)
def test_counts_for_people(count: int, text: str) -> None:
    assert format_count(count) == text


# A real capture


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """The path of a configuration of two small layers."""
    for name in ("torch", "transformers"):
        pytest.importorskip(name)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 100,
        "max_position_embeddings": 64,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def test_a_real_capture(tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    outcome = call(tiny, "--batch", "2", "--seq", "16", "--steps", "2", "-o", str(path), "--json")
    assert outcome.exit_code == 0, outcome.stderr
    said = json.loads(outcome.stdout)
    # embedding and head 2 x 100 x 64; a layer: four of 64 x 64, three of 64 x 128, two norms; the last norm
    elements = 2 * 6400 + 2 * (4 * 4096 + 3 * 8192 + 2 * 64) + 64
    assert said["parameters"]["elements"] == said["parameters"]["trained_elements"] == elements
    assert said["parameters"]["bytes"] == 4 * elements
    tokens = 2 * 16
    products = 2 * tokens * (2 * (4 * 4096 + 3 * 8192) + 6400)
    attention = 2 * 2 * (2 * 2 * 4 * 16 * 16 * 16)
    work = {(phase["name"], phase["step"]): phase for phase in said["phases"]}
    assert work["forward", 1]["flops"] == products + attention
    # backward has two products for each, but fused attention five for two
    assert work["backward", 1]["flops"] == 2 * products + attention * 5 // 2
    states = 2 * 4 * elements
    assert said["peak"]["by_category"]["optimizer_state"] >= states
    assert work["optimizer", 1]["left"] >= 4 * elements * 2 + states
    graph = load(path)
    assert len(graph.operators) == said["operators"]
    assert {role for role in set(graph.operators.role.tolist())} >= {0, 1, 2, 4}
    nx = pytest.importorskip("networkx")
    from graph.dag import to_networkx

    assert nx.is_directed_acyclic_graph(to_networkx(graph))
