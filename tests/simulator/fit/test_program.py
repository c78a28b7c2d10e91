"""`llmem fit PROGRAM`: programs as they are, what can be changed from outside, and what is advice."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

pytest.importorskip("torch")

from simulator.fit.program import Started, _changed, _offered, _said
from simulator.recording.request import Request
from simulator.reports.schemas import schema
from tests.places import ROOT
from tests.support import warm

MIB = 1 << 20
HOLES = """
import torch

def take(size):
    return torch.empty(size << 20, dtype=torch.uint8, device="cuda")

first = take(200)
del first
kept = take(40)
last = take(200)
"""
TRAINS = """
import torch

hidden = torch.nn.Linear(1024, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(hidden.parameters(), lr=0.1, momentum=0.9)
batch = torch.ones(4096, 1024, device="cuda")
for step in range(4):
    made = hidden(batch)
    made.pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, place):
        words = torch.arange(256) % 64
        return {"input_ids": words, "labels": words}

(given,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
config = GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=64)
Trainer(GPT2LMHeadModel(config), given, train_dataset=Texts()).train()
"""


def ran(folder: Path, command: str, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A command with a program, whose text this is, in a folder."""
    (folder / "train.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return warm.run([sys.executable, "-m", "simulator", command, *words], cwd=folder, env=environment)


def fitted(folder: Path, program: str, *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the document of `fit`."""
    done = ran(folder, "fit", program, "--json", "--context", "0", "--jobs", "1", *words)
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    jsonschema.validate(document, schema("fit"))
    return done.returncode, document


def needs(folder: Path, program: str) -> int:
    """What `record` says that a program reserves."""
    done = ran(folder, "record", program, "--json", "answer.json", "--force", "-q", "train.py")
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads((folder / "answer.json").read_text())["ranks"]
    return int(rank["peak_reserved"])


def test_allocator_settings_are_tried_on_the_same_events(tmp_path: Path) -> None:
    code, found = fitted(tmp_path, HOLES, "--memory", "300MiB", "train.py")
    assert (code, found["verdict"], found["needs"]) == (0, "oom", 400 * MIB)
    plans = {one["options"]: one for one in found["plans"]}
    plan = plans["PYTORCH_ALLOC_CONF=expandable_segments:True"]
    assert (plan["needs"], plan["costs"]) == (240 * MIB, "nothing")
    proof = ["--memory", "300MiB", "--alloc-conf", plan["change"]["alloc_conf"], "train.py"]
    assert ran(tmp_path, "record", HOLES, *proof).returncode == 0
    assert ran(tmp_path, "record", HOLES, "--memory", "300MiB", "train.py").returncode == 1


def test_what_the_program_sets_itself_is_not_tried(tmp_path: Path) -> None:
    program = "import os\nos.environ['PYTORCH_ALLOC_CONF'] = 'max_split_size_mb:512'\n" + HOLES
    done = ran(tmp_path, "fit", program, "--memory", "300MiB", "--context", "0", "--json", "train.py")
    assert (done.returncode, json.loads(done.stdout)["plans"]) == (3, [])
    assert "the program sets the allocator itself (max_split_size_mb:512)" in done.stderr


def test_a_program_with_nothing_to_change_from_outside_gets_advice(tmp_path: Path) -> None:
    code, found = fitted(tmp_path, TRAINS, "--memory", "150MiB", "--", sys.executable, "train.py", "--lr", "1")
    assert (code, found["plans"], found["program"]) == (3, [], ["train.py", "--lr", "1"])
    assert found["needs"] == needs(tmp_path, TRAINS)
    advice = {one["kind"]: one for one in found["advice"]}
    weight = 1024 * 4096 * 4
    assert advice["optimizer states"]["lines"] == [{"where": "train.py:10 (<module>)", "bytes": weight}]
    assert advice["parameters"]["lines"] == [{"where": "train.py:4 (<module>)", "bytes": weight}]
    lines = {one["where"]: one["bytes"] for one in advice["activations"]["lines"]}
    assert lines["train.py:8 (<module>)"] == 4096 * 4096 * 4
    assert lines["train.py:6 (<module>)"] == 4096 * 1024 * 4
    shown = ran(tmp_path, "fit", TRAINS, "--memory", "150MiB", "train.py").stdout
    assert "advice: nothing of this was tried" in " ".join(shown.split())


def test_arguments_of_a_trainer_are_tried_and_the_plan_is_one(tmp_path: Path) -> None:
    kept = "alloc_conf,optim,bf16,torch_empty_cache_steps,gradient_accumulation_steps"
    program = ["train.py", "--report_to", "none", "--per_device_train_batch_size", "16"]
    code, found = fitted(tmp_path, TRAINER, "--memory", "150MiB", "--keep", kept, *program)
    assert (code, found["verdict"]) == (0, "oom")
    first = found["plans"][0]
    assert (first["change"], first["options"]) == ({"gradient_checkpointing": True}, "--gradient_checkpointing True")
    assert first["needs"] <= 150 * MIB < found["needs"]
    assert first["time"] > 1
    proof = ran(tmp_path, "record", TRAINER, "--memory", "150MiB", *program, *shlex.split(first["options"]))
    assert proof.returncode == 0, proof.stderr


def test_arguments_in_the_program_are_advice_with_their_line(tmp_path: Path) -> None:
    made = 'TrainingArguments("out", report_to="none", per_device_train_batch_size=16)'
    program = TRAINER.replace(
        "(given,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()", f"given = {made}"
    )
    code, found = fitted(tmp_path, program, "--memory", "100MiB", "--keep", "alloc_conf", "train.py")
    assert (code, found["plans"]) == (3, [])
    advice = {one["kind"]: one["words"] for one in found["advice"]}
    assert advice["activations"].startswith("train.py:13 (<module>) makes the Trainer's arguments: gradient_checkpoint")


def test_what_is_offered_depends_on_the_arguments() -> None:
    request = Request(("train.py",), "script", "", "A100-80GB", "2.13")
    given = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 2, "optim": "adamw_torch", "bf16": False}
    program = Started(request, arguments={**given, "fp16": True, "gradient_checkpointing": True}, settable=False)
    offered = [keys for _, values in _offered(program, 0, ("optim",)) for keys in values]
    assert offered == [
        {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 8},
    ]
    assert next(keys for _, values in _offered(program, 0, ()) for keys in values) == {"optim": "adamw_torch_fused"}
    smaller = _changed(program, offered[0])
    assert smaller is not None
    assert smaller.request.program[1:] == tuple(_said(offered[0], "").split())
    assert _changed(program, {"alloc_conf": "expandable_segments:maybe"}) is None


def test_processes_are_offered_where_ranks_have_parts_and_gpus_are_there() -> None:
    request = Request(("train.py",), "script", "", "A100-80GB", "2.13", world=2, processes=2, launched=True)

    def offered(**how: Any) -> list[Any]:
        found = _offered(Started(request, settable=False, **how), 0, ())
        return [keys for _, values in found for keys in values]

    assert offered(shares=True, gpus=7) == [{"nproc_per_node": 4}]
    assert offered(shares=False, gpus=8) == offered(shares=True) == []
    more = _changed(Started(request), {"nproc_per_node": 8, "alloc_conf": "expandable_segments:True"})
    assert more is not None
    assert (more.request.world, more.request.processes, more.recorded_ranks) == (8, 8, tuple(range(8)))
    assert _said({"nproc_per_node": 8, "alloc_conf": "a:1"}, "PYTORCH_ALLOC_CONF") == (
        "PYTORCH_ALLOC_CONF=a:1 --nproc-per-node 8"
    )


def test_the_program_beside_the_text_of_its_failure(tmp_path: Path) -> None:
    program = HOLES.replace("00)", "000)").replace("(40)", "(400)")
    failed = ran(tmp_path, "record", program, "--memory", "3584MiB", "train.py")
    (tmp_path / "train.log").write_text(failed.stderr)
    words = ["train.log", "--program", "python train.py", "--gpu", "RTX4090", "--json"]
    done = ran(tmp_path, "explain", program, *words)
    document = json.loads(done.stdout)
    jsonschema.validate(document, schema("explain"))
    found = document["fit"]
    assert document["messages"][0]["total"] == found["gpu_bytes"] == 3584 * MIB
    assert found["program"] == ["train.py"]
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in [one["options"] for one in found["plans"]]
    (line,) = found["advice"][0]["lines"]
    assert line == {"where": "train.py:5 (take)", "bytes": 2400 * MIB}
    shown = " ".join(ran(tmp_path, "explain", program, *words[:-1]).stdout.split())
    assert "Largest tensors alive" in shown
    assert "each recorded and replayed" in shown


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["train.py"], 1, "'train.py' ended with exit code 1: ValueError at train.py:2 (<module>): no such luck"),
        (["--keep", "batch", "train.py"], 1, "keep: no plan changes 'batch' of a program"),
        (["--batch", "4", "train.py"], 2, "--batch is a case's"),
        (["--nproc-per-node", "2", "gpt2"], 2, "--nproc-per-node is for a program, and gpt2 is a case"),
        (["absent.py"], 1, "absent.py: is not a file"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_a_line(words: list[str], code: int, says: str, tmp_path: Path) -> None:
    done = ran(tmp_path, "fit", "import torch\nraise ValueError('no such luck')\n", *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in " ".join(done.stderr.split())
    assert code == 2 or len(done.stderr.splitlines()) == 1


def test_ranks_are_asked_for_as_of_record(tmp_path: Path) -> None:
    program = "import os, torch\nheld = torch.ones((1 + 40 * int(os.environ['RANK'])) << 20, device='cuda')\n"
    words = ("--nproc-per-node", "2", "--context", "0", "--json", "train.py")
    found = json.loads(ran(tmp_path, "fit", program, *words).stdout)
    assert (found["verdict"], found["needs"]) == ("fits", 164 * MIB)
