"""Configuration files, read by the libraries that they are for: accelerate, DeepSpeed, transformers and TRL."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.places import ROOT

pytest.importorskip("torch")
pytest.importorskip("transformers")

from graph.optimizers import OPTIMIZERS
from simulator.launch.training_script import axes_of
from tests.support.launched import METHODS, methods, model, written

pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = {"ddp": "MULTI_GPU", "tp": "MULTI_GPU", "tp-megatron": "MEGATRON_LM", "tp-megatron-sp": "MEGATRON_LM"}
STAGES = ("deepspeed-1", "deepspeed-2", "deepspeed-3")
#: Settings that change what is written.
RICH: dict[str, Any] = {"autocast": "bf16", "accum": 2, "clip": 1.0, "checkpointing": "nonreentrant"}
VARIANTS: tuple[dict[str, Any], ...] = ({}, RICH, {"dtype": "bf16", "grad_sync": "last", "accum": 4})


def meant(method: str, keys: dict[str, Any]) -> dict[str, Any]:
    """The keys without `grad_sync` where it means nothing for the method."""
    from graph.methods import taking

    takes = method in taking("grad_sync") or "=" in method
    return keys if takes else {key: value for key, value in keys.items() if key != "grad_sync"}


def with_file(name: str) -> list[str]:
    """The methods that have this file."""
    from simulator.launch.configuration import absent

    return [one for one in METHODS if name not in absent({"model": "tinyllama-1.1b", **methods(4)[one]})]


# ----------------------------------------------------------------------------------------------- accelerate


def launched(path: Path) -> tuple[Any, dict[str, str]]:
    """What `accelerate launch` makes of a file: its checked arguments, and the environment of the processes."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    arguments = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    arguments.deepspeed_fields_from_accelerate_config = ""
    environment = (
        prepare_deepspeed_cmd_env(arguments)[1] if arguments.use_deepspeed else prepare_multi_gpu_env(arguments)
    )
    return arguments, {key: str(value) for key, value in environment.items()}


@pytest.mark.parametrize("keys", VARIANTS, ids=lambda keys: "-".join(keys) or "plain")
@pytest.mark.parametrize("method", with_file("accelerate.yaml"))
def test_accelerate_launches_its_file(method: str, keys: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin

    from graph.case import Case

    keys = meant(method, keys)
    written(tmp_path, method, **keys)
    config = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    kind = KINDS.get(method, "DEEPSPEED" if "deepspeed" in method else "FSDP")
    assert config.distributed_type == kind
    arguments, environment = launched(tmp_path / "accelerate.yaml")
    assert arguments.num_processes == 4
    assert arguments.use_fsdp is (kind == "FSDP")
    if kind != "DEEPSPEED":
        assert environment["ACCELERATE_MIXED_PRECISION"] == keys.get("autocast", "no")
    if kind != "FSDP":
        return
    axes = axes_of(Case.of({"model": "gpt2", **methods(4)[method]}))
    gpu = mock.patch("accelerate.utils.dataclasses.is_cuda_available", return_value=True)
    with mock.patch.dict(os.environ, environment), gpu, mock.patch("torch.cuda.current_device", return_value=0):
        plugin = FullyShardedDataParallelPlugin()
        split = ParallelismConfig() if len(axes) > 1 else None
    assert plugin.fsdp_version == (1 if method == "fsdp1" else 2)
    if method == "fsdp2-offload":
        assert type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
    if split is not None:
        sizes = (split.dp_replicate_size, split.dp_shard_size, split.tp_size)
        assert sizes == tuple(axes.get(axis, 1) for axis in ("dp", "fsdp2", "tp"))


# ------------------------------------------------------------------------------------------------ DeepSpeed

_READ = """
import json, sys
from deepspeed.runtime.config import DeepSpeedConfig
for name in sys.argv[1:]:
    c = DeepSpeedConfig(name)
    z = c.zero_config
    print("read", json.dumps([c.train_micro_batch_size_per_gpu, c.gradient_accumulation_steps, z.stage,
        c.gradient_clipping, z.reduce_bucket_size, str(z.offload_optimizer and z.offload_optimizer.device),
        bool(getattr(c, "bfloat16_config", None) and c.bfloat16_config.enabled)]))
"""


def test_deepspeed_reads_its_files(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    variants: list[dict[str, Any]] = [
        {},
        {"buckets": 1_000_000, "clip": 1.0},
        {"offload": "optimizer", "dtype": "bf16"},
    ]
    wanted, paths = [], []
    for stage, method in enumerate(STAGES, 1):
        for number, keys in enumerate(variants):
            folder = tmp_path / f"{method}-{number}"
            folder.mkdir()
            written(folder, method, accum=3, **keys)
            paths.append(str(folder / "deepspeed.json"))
            bucket = keys.get("buckets", 500_000_000)
            device = "cpu" if "offload" in keys else "None"
            wanted.append([2, 3, stage, keys.get("clip", 0.0), bucket, device, "dtype" in keys])
    done = subprocess.run([sys.executable, "-c", _READ, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("read ")]
    assert found == wanted


def test_deepspeeds_scripts_run(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    paths = []
    for method, keys in (
        ("deepspeed-1", {}),
        ("deepspeed-2", {"dtype": "bf16"}),
        ("deepspeed-3", {"accum": 2, "clip": 1.0}),
    ):
        (tmp_path / method).mkdir()
        written(tmp_path / method, method, **keys)
        paths.append(str(tmp_path / method / "train.py"))
    command = [sys.executable, "-m", "tests.support.script_runner", "1", *paths]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert len(lines) == 3, done.stderr[-2000:]
    for name, shown in lines:
        assert "step 1: loss 4." in shown, (name, shown)


# ------------------------------------------------------------------------------------ transformers and TRL


@pytest.mark.parametrize("keys", VARIANTS, ids=lambda keys: "-".join(keys) or "plain")
@pytest.mark.parametrize("method", with_file("training_args.json"))
def test_trainer_and_trl_read_their_arguments(
    method: str, keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "deepspeed" in method:
        pytest.importorskip("deepspeed")
    trl = pytest.importorskip("trl")
    from transformers import HfArgumentParser, TrainingArguments

    keys = meant(method, keys)
    found = written(tmp_path, method, **keys)
    monkeypatch.chdir(tmp_path)
    kinds: dict[str, Any] = {"training_args.json": TrainingArguments, "sft_args.json": trl.SFTConfig}
    for name, kind in kinds.items():
        given = {**json.loads(found[name]), "use_cpu": True}  # else it asks the GPU whether it knows bf16
        (read,) = HfArgumentParser(kind).parse_dict(given, allow_extra_keys=False)
        assert (read.per_device_train_batch_size, read.gradient_accumulation_steps) == (2, keys.get("accum", 1))
        assert read.max_grad_norm == keys.get("clip", 0.0)
        assert read.bf16 is ("autocast" in keys or ("dtype" in keys and "deepspeed" in method))
        assert read.activation_checkpointing is read.gradient_checkpointing is ("checkpointing" in keys)
        each = keys.get("accum", 1) > 1 and "grad_sync" not in keys and "deepspeed" not in method
        settings = read.accelerator_config.gradient_accumulation_kwargs or {}
        assert bool(settings.get("sync_each_batch")) is each
        if name == "sft_args.json":
            assert (read.max_length, read.packing, read.packing_strategy) == (16, True, "wrapped")
            assert ("tp_plan" in read.model_init_kwargs) is ("tp" in method.split(",")[-1])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trainer_knows_every_optimizer(optimizer: str, tmp_path: Path) -> None:
    from transformers import TrainingArguments

    found = json.loads(written(tmp_path, "ddp", optimizer=optimizer)["training_args.json"])
    read: Any = TrainingArguments(**found, use_cpu=True)
    assert read.optim.value == found["optim"]


def test_trl_takes_the_command_of_the_start_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    make_parser = importlib.import_module("trl.scripts.sft").make_parser
    text = written(tmp_path, "ddp", lora=8, lora_targets="q_proj,v_proj")["launch.sh"]
    monkeypatch.chdir(tmp_path)
    lines = [line.strip("# \\") for line in text.splitlines()]
    start = next(number for number, line in enumerate(lines) if line.startswith("With TRL"))
    words = " ".join(lines[start : start + 2]).partition("trl sft ")[2].split()
    place = words.index("--accelerate_config")
    del words[place : place + 2]  # the launcher's own
    _, arguments, adapters, _ = make_parser().parse_args_and_config([*words, "--use_cpu", "True"])
    assert (arguments.max_length, arguments.per_device_train_batch_size) == (16, 2)
    assert (adapters.use_peft, adapters.lora_r, adapters.lora_target_modules) == (True, 8, ["q_proj", "v_proj"])


# -------------------------------------------------------------------------------------------- all together


def started(folder: Path, **settings: str) -> list[str]:
    """The lines that a start script prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(folder / "launch.sh")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "STEPS": "2", "OMP_NUM_THREADS": "1", "PATH": path, **settings},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "FutureWarning" not in done.stderr
    return done.stdout.splitlines()


def test_the_start_script_runs_as_it_is(tmp_path: Path) -> None:
    """bash, torchrun, two processes and PyTorch's FSDP2, on the CPU: the second gets its shards from the first, whose
    first loss is that of the model whole.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    alone, both = tmp_path / "alone", tmp_path / "both"
    written(alone, "single", 1, checkpointing="nonreentrant")
    written(both, "fsdp2", 2, checkpointing="nonreentrant")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model(tmp_path / "model"), initializer_range=0.3)
    for folder in (alone, both):
        causal: Any = AutoModelForCausalLM
        causal.from_config(config).save_pretrained(folder / "model")
        torch.manual_seed(0)
    found = started(both)
    assert [line.split(":")[0] for line in found] == ["step 0", "step 1"]
    assert found[0] == started(alone)[0] != "step 0: loss 4.1589, peak 0 MiB"
