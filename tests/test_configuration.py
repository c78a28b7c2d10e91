"""Configuration files: read back by the real libraries' own parsers, and what they say against the case."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from simulator.configuration import files
from traces.errors import ConfigError

BASE = {"model": "gpt2", "world": 4, "batch": 6, "accum": 2, "autocast": "bf16", "clip": 1.0}
METHODS = ("ddp", "fsdp1", "fsdp2", "fsdp2-nr", "fsdp2-offload", "hsdp", "fsdp2-tp", "tp")
STAGES = ("deepspeed-1", "deepspeed-2", "deepspeed-3")


def needs(name: str) -> None:
    """Skip only where a library is not installed at all."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")


def written(folder: Path, **keys: Any) -> dict[str, str]:
    found = files({**BASE, **keys})
    for name, text in found.items():
        (folder / name).write_text(text, "utf-8")
    return found


@pytest.mark.parametrize("strategy", [*METHODS, *STAGES])
def test_accelerate_reads_its_file(strategy: str, tmp_path: Path) -> None:
    needs("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file

    written(tmp_path, strategy=strategy)
    config = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    kind = "FSDP" if "fsdp" in strategy or strategy == "hsdp" else "DEEPSPEED" if "deep" in strategy else "MULTI_GPU"
    assert config.distributed_type == kind
    assert config.num_processes == 4
    if kind != "DEEPSPEED":
        assert config.mixed_precision == "bf16"
    if kind == "FSDP":
        assert config.fsdp_config["fsdp_version"] == (1 if strategy == "fsdp1" else 2)
        assert config.fsdp_config["fsdp_offload_params"] is (strategy == "fsdp2-offload")


def test_accelerate_knows_every_key_of_fsdp() -> None:
    needs("accelerate")
    from accelerate.commands.launch import launch_command_parser

    from graph.case import Case
    from simulator.configuration import accelerate

    known = {action.dest for action in launch_command_parser()._actions}
    for strategy in METHODS:
        document = accelerate(Case.of({**BASE, "strategy": strategy}))
        parts = [document.get("fsdp_config", {}), document.get("parallelism_config", {})]
        assert {key for part in parts for key in part} <= known, strategy


@pytest.mark.parametrize("strategy", STAGES)
def test_deepspeed_reads_its_file(strategy: str, tmp_path: Path) -> None:
    needs("deepspeed")
    import sys

    code = (
        "import sys, json, warnings; warnings.simplefilter('ignore');"
        "from deepspeed.runtime.config import DeepSpeedConfig;"
        "c = DeepSpeedConfig(sys.argv[1]);"
        "print(json.dumps([c.train_micro_batch_size_per_gpu, c.gradient_accumulation_steps, c.zero_config.stage,"
        " c.gradient_clipping, c.zero_config.reduce_bucket_size]))"
    )
    written(tmp_path, strategy=strategy, buckets=1000000)
    command = [sys.executable, "-c", code, str(tmp_path / "deepspeed.json")]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr[-2000:]
    assert json.loads(shown.stdout.splitlines()[-1]) == [6, 2, int(strategy[-1]), 1.0, 1000000]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "adamw-8bit", "adafactor", "sgd"])
@pytest.mark.filterwarnings("ignore")
def test_trainer_reads_its_arguments(optimizer: str, tmp_path: Path) -> None:
    needs("transformers")
    from transformers import HfArgumentParser, TrainingArguments

    written(tmp_path, strategy="ddp", optimizer=optimizer, checkpointing="nonreentrant", autocast="")
    parser = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    (read,) = parser.parse_json_file(str(tmp_path / "training_args.json"), allow_extra_keys=False)
    assert read.per_device_train_batch_size == 6
    assert read.gradient_accumulation_steps == 2
    assert read.gradient_checkpointing_kwargs == {"use_reentrant": False}


@pytest.mark.filterwarnings("ignore")
def test_trl_reads_its_arguments(tmp_path: Path) -> None:
    needs("trl")
    from transformers import HfArgumentParser
    from trl import SFTConfig

    written(tmp_path, strategy="fsdp2", autocast="", seq=1024)
    (read,) = HfArgumentParser(SFTConfig).parse_json_file(str(tmp_path / "sft_args.json"), allow_extra_keys=False)
    assert (read.max_length, read.packing, read.per_device_train_batch_size) == (1024, True, 6)


def test_launch_script_is_bash_and_sets_the_allocator(tmp_path: Path) -> None:
    found = written(tmp_path, strategy="fsdp2", alloc_conf="expandable_segments:True")
    assert subprocess.run(["bash", "-n", str(tmp_path / "launch.sh")], check=False).returncode == 0
    lines = found["launch.sh"].splitlines()
    assert "export PYTORCH_ALLOC_CONF=expandable_segments:True" in lines
    assert shlex.split(lines[-1])[:4] == ["torchrun", "--standalone", "--nproc-per-node=4", "train.py"]
    old = files({**BASE, "strategy": "ddp", "alloc_conf": "max_split_size_mb:128", "release": "2.6"})["launch.sh"]
    assert "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128" in old


def test_fsdp2_settings_are_those_of_the_case() -> None:
    found = json.loads(files({**BASE, "strategy": "fsdp2-nr"})["fsdp2.json"])
    assert found["reshard_after_forward"] is False
    assert found["mp_policy"] == {"param_dtype": "torch.bfloat16", "reduce_dtype": "torch.float32"}
    assert json.loads(files({**BASE, "strategy": "hsdp"})["fsdp2.json"])["mesh"] == [2, 2]


@pytest.mark.parametrize("strategy", ["gemini", "pp"])
def test_methods_set_up_in_code_have_no_files(strategy: str) -> None:
    with pytest.raises(ConfigError, match="training script"):
        files({"model": "gpt2", "world": 4, "strategy": strategy})
