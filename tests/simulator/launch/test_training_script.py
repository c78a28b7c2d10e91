"""Training scripts that are written: each one runs, as rank 0 of its job on the CPU, and does what its case says."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.places import ROOT

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from graph.case import Case
from simulator.launch.training_script import Predicted, script, why_not
from tests.support.launched import METHODS, model, written
from traces.errors import ConfigError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")

#: Not here: FSDP1 refuses the CPU, replicas need a real group (below), DeepSpeed may not be installed.
FAKED = ("fsdp2", "fsdp2-offload", "hsdp", "tp", "tp-sp", "fsdp2=2,tp=2")
VARIANTS: dict[str, dict[str, Any]] = {
    "accumulated": {"strategy": "fsdp2", "autocast": "bf16", "accum": 2, "grad_sync": "last", "clip": 1.0},
    "replicas": {"mesh": {"dp": 2, "fsdp2": 2}, "checkpointing": "nonreentrant"},
    "kept": {"strategy": "fsdp2-nr", "checkpointing": "selective", "save": "matmul,attn", "optimizer": "adamw-forloop"},
    "vocabulary": {"strategy": "tp", "tp_loss": "vocab"},
    "adapted": {"strategy": "fsdp2", "lora": 4, "lora_targets": "q_proj,v_proj"},
}
ALONE: dict[str, dict[str, Any]] = {
    "single": {"clip": 1.0, "autocast": "bf16", "offload": "activations"},
    "in-backward": {"step_in_backward": True, "optimizer": "sgd"},
    "ddp": {"strategy": "ddp", "accum": 2, "grad_sync": "last", "attention_mask": True},
    "ddp-view": {"strategy": "ddp-view", "lora": 4, "checkpointing": "reentrant"},
    "zero1": {"strategy": "zero1"},
    "scaled": {"strategy": "ddp", "autocast": "fp16", "accum": 2, "clip": 1.0},
}


def run(world: int, paths: list[Path]) -> dict[str, str]:
    """What each script printed or raised, by its folder."""
    command = [sys.executable, "-m", "tests.support.script_runner", str(world), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))
    return {Path(name).parent.name: shown for name, shown in lines}


def put(folder: Path, keys: dict[str, Any], world: int) -> Path:
    case = {"model": model(folder.parent / "model"), "batch": 2, "seq": 16, **keys}
    folder.mkdir()
    path = folder / "train.py"
    path.write_text(script(Case.of({**case, **({"world": world} if "strategy" in keys else {})})))
    return path


def test_scripts_of_shards_and_split_tensors_run(tmp_path: Path) -> None:
    paths = []
    for method in FAKED:
        (tmp_path / method).mkdir()
        written(tmp_path / method, method)
        paths.append(tmp_path / method / "train.py")
    paths += [put(tmp_path / name, keys, 4) for name, keys in VARIANTS.items()]
    found = run(4, paths)
    assert set(found) == {*FAKED, *VARIANTS}
    for name, shown in found.items():
        assert [line.split(":")[0] for line in shown.splitlines()] == ["step 0", "step 1"], (name, shown)


def test_scripts_of_replicas_run_in_a_real_group(tmp_path: Path) -> None:
    paths = [put(tmp_path / name, keys, 2 if "strategy" in keys else 1) for name, keys in ALONE.items()]
    found = run(1, paths)
    assert set(found) == set(ALONE)
    for name, shown in found.items():
        assert shown.startswith("step 0: loss 4."), (name, shown)


@pytest.mark.parametrize("method", [name for name in METHODS if "pp" not in name and "megatron" not in name])
def test_every_script_is_python_that_uses_what_it_imports(method: str, tmp_path: Path) -> None:
    text = written(tmp_path, method, autocast="bf16", accum=2, clip=1.0, checkpointing="nonreentrant")["train.py"]
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    used = {node.id for node in names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                assert (alias.asname or alias.name).split(".")[0] in used, alias.name
    assert all(len(line) <= 120 for line in text.splitlines())


def test_fsdp1_is_called_with_arguments_that_it_has(tmp_path: Path) -> None:
    import inspect

    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    text = written(tmp_path, "fsdp1", autocast="bf16")["train.py"]
    calls = {ast.unparse(node.func): node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)}
    for kind in (FullyShardedDataParallel, MixedPrecision):
        call = calls[kind.__name__]
        inspect.signature(kind).bind(*call.args, **{word.arg: None for word in call.keywords if word.arg})


def test_the_model_is_the_repository_of_the_catalogue() -> None:
    text = script(Case.of({"model": "opt-1.3b", "strategy": "ddp", "world": 2, "dtype": "bf16"}))
    assert 'MODEL = "facebook/opt-1.3b"' in text
    assert '"dtype": torch.bfloat16' in text


def test_quantized_models_are_loaded_so() -> None:
    keys = {"model": "llama-2-7b", "quant": "nf4", "lora": 8, "compute": "fp16", "double_quant": False}
    text = script(Case.of({**keys, "strategy": "ddp", "world": 2}))
    assert "bnb_4bit_compute_dtype=torch.float16, bnb_4bit_use_double_quant=False" in text
    assert "prepare_model_for_kbit_training(made, False)" in text
    assert "module.to(DEVICE)" not in text


@pytest.mark.parametrize("keys", [{"strategy": "fsdp2-offload"}, {"strategy": "fsdp2", "offload": "parameters"}])
def test_shards_on_the_host_are_asked_for(keys: dict[str, Any]) -> None:
    text = script(Case.of({"model": "opt-1.3b", "world": 2, **keys}))
    assert '"offload_policy": CPUOffloadPolicy(pin_memory=DEVICE == "cuda"),' in text


@pytest.mark.parametrize("loss", ["chunk8", "chunk8-ckpt"])
def test_a_loss_in_parts_is_the_models_own(loss: str, tmp_path: Path) -> None:
    folder = model(tmp_path)
    names: dict[str, Any] = {"__name__": "train"}
    exec(script(Case.of({"model": folder, "loss": loss})), names)
    kind: Any = AutoModelForCausalLM
    made = kind.from_config(AutoConfig.from_pretrained(folder)).eval()
    ids = torch.randint(made.config.vocab_size, (2, 13))
    wanted = made(input_ids=ids, labels=ids).loss
    names["in_parts"](made)
    torch.testing.assert_close(made(input_ids=ids, labels=ids), wanted)


def test_no_script_is_one_line() -> None:
    case = Case.of({"model": "gpt2", "strategy": "pp", "world": 2})
    with pytest.raises(ConfigError, match="no training script: pipeline stages") as caught:
        script(case)
    assert why_not(case) in str(caught.value)


@pytest.mark.parametrize("predicted", [None, Predicted(0, 3 << 20, 5 << 20)])
def test_measured_peaks_stand_beside_the_predicted_ones(
    predicted: Predicted | None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.of({"model": model(tmp_path / "model"), "batch": 2, "seq": 16, "strategy": "ddp", "world": 2})
    program = compile(script(case, predicted), "train.py", "exec")
    names: dict[str, Any] = {"__name__": "train"}
    exec(program, names)
    dumped: list[str] = []
    memory = SimpleNamespace(_dump_snapshot=dumped.append)
    cuda = SimpleNamespace(max_memory_allocated=lambda: 2 << 20, max_memory_reserved=lambda: 4 << 20, memory=memory)
    names |= {"DEVICE": "cuda", "torch": SimpleNamespace(cuda=cuda)}
    monkeypatch.setenv("RANK", "1")
    names["report"]("other.pickle")
    monkeypatch.setenv("RANK", "0")
    names["report"](None)
    names["report"]("snapshot.pickle")
    assert dumped == ["snapshot.pickle"], "of one rank, where it is asked for"
    beside = (", 3.00 MiB predicted", ", 5.00 MiB predicted") if predicted else ("", "")
    lines = [f"peak allocated: 2.00 MiB measured{beside[0]}", f"peak reserved: 4.00 MiB measured{beside[1]}"]
    assert capsys.readouterr().out.splitlines() == 2 * lines


@pytest.mark.parametrize(
    ("keys", "once"),
    [({"strategy": "fsdp2"}, True), ({"strategy": "hsdp"}, True), ({"strategy": "ddp"}, False),
     ({"strategy": "fsdp2-offload"}, False), ({"strategy": "fsdp2", "lora": 4}, False)],
)  # fmt: skip
def test_fsdp2_loads_the_weights_once(keys: dict[str, Any], once: bool, tmp_path: Path) -> None:
    text = script(Case.of({"model": model(tmp_path / "model"), "seq": 16, "world": 4, **keys}))
    assert ("broadcast_from_rank0=True" in text) is once
    assert ('torch.device("meta")' in text) is once
