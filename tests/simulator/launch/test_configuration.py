"""Configuration files: which there are for every method, what they say, and that what starts the run is right."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from graph.case import Case
from graph.optimizers import OPTIMIZERS, Optimizer
from simulator.allocator.conf import parse_conf
from simulator.allocator.releases import parse_release
from simulator.launch.configuration import FILES, absent, files, launch
from simulator.launch.training_script import axes_of
from tests.support.launched import METHODS, methods, written

BASE = {"model": "gpt2", "world": 4, "batch": 6, "accum": 2, "autocast": "bf16", "clip": 1.0}
TRAINER = {"accelerate.yaml", "training_args.json", "sft_args.json"}
#: The files of each method on four GPUs, beside the start script.
WRITTEN: dict[str, set[str]] = {
    "ddp": {"train.py", *TRAINER},
    "zero1": {"train.py"},
    "deepspeed-1": {"train.py", "deepspeed.json", *TRAINER},
    "deepspeed-2": {"train.py", "deepspeed.json", *TRAINER},
    "deepspeed-3": {"train.py", "deepspeed.json", *TRAINER},
    "fsdp1": {"train.py", *TRAINER},
    "fsdp2": {"train.py", *TRAINER},
    "fsdp2-offload": {"train.py", *TRAINER},
    "hsdp": {"train.py", *TRAINER},
    "tp": {"train.py", *TRAINER},
    "tp-sp": {"train.py"},
    "tp-megatron": {"accelerate.yaml"},
    "tp-megatron-sp": {"accelerate.yaml"},
    "pp": set(),
    "dp=2,tp=2": {"train.py"},
    "fsdp2=2,tp=2": {"train.py", *TRAINER},
    "pp=2,dp=2": set(),
    "pp=2,fsdp2=2": set(),
    "pp=2,tp=2": set(),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_its_files_and_a_reason_for_the_others(method: str, tmp_path: Path) -> None:
    found = written(tmp_path, method)
    assert set(found) == {"launch.sh", *WRITTEN[method]}
    missing = absent({"model": "gpt2", "batch": 2, **methods(4)[method]})
    assert set(missing) == set(FILES) - set(found)
    assert all(reason and "\n" not in reason for reason in missing.values())


@pytest.mark.parametrize("method", ["CDP-4", "4DP", "4TP", "2DP+2TP"])
def test_llmems_methods_have_a_start_script_alone(method: str, tmp_path: Path) -> None:
    found = written(tmp_path, method)
    assert set(found) == {"launch.sh"}
    assert "# train.py is yours: Colossal-AI" in found["launch.sh"]


def test_one_gpu_needs_no_launcher(tmp_path: Path) -> None:
    found = written(tmp_path, "single", 1)
    assert found["launch.sh"].splitlines()[-1] == 'python train.py "$@"'
    assert "dist" not in found["train.py"]


@pytest.mark.parametrize(
    ("keys", "axes"),
    [
        ({"strategy": "ddp"}, {"dp": 4}),
        ({"strategy": "hsdp"}, {"dp": 2, "fsdp2": 2}),
        ({"strategy": "fsdp2-tp"}, {"fsdp2": 2, "tp": 2}),
        ({"strategy": "pp"}, {"pp": 4}),
        ({"strategy": "deepspeed-3"}, {}),
        ({"mesh": {"pp": 1, "ddp": 2, "tp": 2}}, {"dp": 2, "tp": 2}),
        ({"mesh": {"hsdp": 4}}, {"dp": 2, "fsdp2": 2}),
    ],
    ids=str,
)
def test_axes_of_a_case(keys: dict[str, Any], axes: dict[str, int]) -> None:
    from graph.case import Case

    assert axes_of(Case.of({"model": "gpt2", "world": 4, **keys})) == axes


@pytest.mark.parametrize("method", METHODS)
def test_the_start_script_is_bash_and_torchrun_takes_it(method: str, tmp_path: Path) -> None:
    from torch.distributed.run import get_args_parser

    found = written(tmp_path, method, alloc_conf="expandable_segments:True")
    assert subprocess.run(["bash", "-n", str(tmp_path / "launch.sh")], check=False).returncode == 0
    words = shlex.split(found["launch.sh"].splitlines()[-1])
    assert words[0] == "torchrun"
    options = get_args_parser().parse_args(words[1:])
    assert (options.standalone, options.nproc_per_node, options.training_script) == (True, "4", "train.py")


def test_more_gpus_than_a_machine_has_are_several_machines() -> None:
    from torch.distributed.run import get_args_parser

    text = files({**BASE, "strategy": "fsdp2", "world": 24})["launch.sh"]
    options = get_args_parser().parse_args(shlex.split(text.splitlines()[-1])[1:])
    assert (options.nnodes, options.nproc_per_node, options.rdzv_backend) == ("3", "8", "c10d")
    assert "run it on all 3 machines" in text
    assert "num_machines: 3" in files({**BASE, "strategy": "fsdp2", "world": 24})["accelerate.yaml"]


@pytest.mark.parametrize(
    ("conf", "release", "name"),
    [
        ("expandable_segments:True", "2.13", "PYTORCH_ALLOC_CONF"),
        ("roundup_power2_divisions:[256:1,512:2,>:8],max_split_size_mb:256", "2.9", "PYTORCH_CUDA_ALLOC_CONF"),
        ("max_split_size_mb:128,garbage_collection_threshold:0.8", "2.6", "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_allocator_settings_come_back_from_bash(conf: str, release: str, name: str, tmp_path: Path) -> None:
    keys = {**BASE, "strategy": "ddp", "alloc_conf": conf, "release": release}
    (tmp_path / "launch.sh").write_text(files(keys)["launch.sh"].replace("torchrun", f"printenv {name} #"))
    shown = subprocess.run(["bash", str(tmp_path / "launch.sh")], capture_output=True, text=True, check=True)
    known = parse_release(release)
    assert parse_conf(shown.stdout.strip(), known) == parse_conf(conf, known)


def test_what_the_trainer_cannot_do_is_said() -> None:
    for keys, words in (
        ({"checkpointing": "selective", "save": "attn"}, "selective checkpointing"),
        ({"checkpointing": "reentrant", "every": 2}, "every n-th layer"),
        ({"offload": "activations"}, "offloads activations"),
        ({"loss": "chunk8"}, "the loss 'chunk8'"),
    ):
        missing = absent({**BASE, "strategy": "fsdp2", **keys})
        assert words in missing["training_args.json"]
        assert words in missing["sft_args.json"]
        assert "accelerate.yaml" not in missing


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model": "bert-base"}, "decoders"),
        ({"model": "tests.support.worked_models:mlp"}, "decoders"),
        ({"loss": "transformers-4.29"}, "your own script"),
        ({"strategy": "pp"}, "pipelining"),
        ({"strategy": "tp-megatron"}, "pretrain_gpt.py"),
        ({"model": "opt-2l"}, "in no repository"),
    ],
)
def test_what_has_no_training_script_is_said(keys: dict[str, Any], words: str) -> None:
    case = {"model": "gpt2", "strategy": "ddp", "world": 4, **keys}
    assert words in absent(case)["train.py"]
    assert words in files(case)["launch.sh"]


def test_arguments_follow_the_case() -> None:
    found = files({**BASE, "strategy": "fsdp2", "dtype": "bf16", "autocast": "", "checkpointing": "reentrant"})
    arguments = json.loads(found["training_args.json"])
    assert (arguments["per_device_train_batch_size"], arguments["gradient_accumulation_steps"]) == (6, 2)
    assert arguments["activation_checkpointing_kwargs"] == {"use_reentrant": True}
    assert json.loads(found["sft_args.json"])["model_init_kwargs"] == {"dtype": "bfloat16"}  # as transformers chooses
    eager = files({**BASE, "strategy": "fsdp2", "attn": "eager"})
    assert json.loads(eager["sft_args.json"])["model_init_kwargs"]["attn_implementation"] == "eager"
    last = json.loads(files({**BASE, "strategy": "ddp", "grad_sync": "last"})["training_args.json"])
    assert "accelerator_config" not in last


@pytest.mark.parametrize(
    ("keys", "made"),
    [
        ({"optimizer": "sgd", "sgd_momentum": 0.9}, "torch.optim.SGD, lr=LEARNING_RATE, momentum=0.9)"),
        ({"optimizer": "adamw-fused"}, "torch.optim.AdamW, lr=LEARNING_RATE, fused=True)"),
        ({}, "torch.optim.AdamW, lr=LEARNING_RATE)"),
    ],
)
def test_zero1_shards_the_optimizer_of_the_case(keys: dict[str, Any], made: str) -> None:
    text = files({**BASE, "strategy": "zero1", **keys})["train.py"]
    assert f"ZeroRedundancyOptimizer(trained, optimizer_class={made}" in text


def test_an_optimizer_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the table is enough for capturing it, for the script and for the Trainer."""
    import torch

    from graph.loop.training import make_optimizer

    row = Optimizer("torch.optim.NAdam", "nadam", {"foreach": False}, {"momentum_decay": "clip"})
    monkeypatch.setitem(OPTIMIZERS, "adamw", row)
    keys = {**BASE, "strategy": "ddp", "clip": 0.5}
    made = make_optimizer(Case.of(keys), [torch.nn.Parameter(torch.zeros(2))])
    assert isinstance(made, torch.optim.NAdam)
    assert (made.defaults["foreach"], made.defaults["momentum_decay"]) == (False, 0.5)
    found = files(keys)
    assert "torch.optim.NAdam(trained, lr=LEARNING_RATE, foreach=False, momentum_decay=0.5)" in found["train.py"]
    assert json.loads(found["training_args.json"])["optim"] == "nadam"


def test_adapters_are_named_for_trl() -> None:
    from graph.case import Case

    keys = {"model": "llama-2-7b", "quant": "nf4", "lora": 16, "lora_targets": "q_proj,v_proj"}
    text = launch(Case.of({**keys, "strategy": "ddp", "world": 2}))
    assert "--load_in_4bit --use_peft --lora_r 16 --lora_target_modules q_proj v_proj" in text


def test_select_says_why_a_file_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from types import SimpleNamespace

    from simulator.commands.select import _configure

    case = {"model": "gpt2", "strategy": "zero1", "world": 2}
    winner = SimpleNamespace(case=case, worst=(1,), peak_allocated=12345, peak_reserved=23456)
    found: Any = SimpleNamespace(winner=winner)
    _configure(found, tmp_path, force=False, quiet=False)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("note: wrote launch.sh, train.py to ")
    assert "note: no accelerate.yaml: accelerate has no ZeroRedundancyOptimizer" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["launch.sh", "train.py"]
