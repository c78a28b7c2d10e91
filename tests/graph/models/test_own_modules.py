"""A user's modules that are named as our packages are: the user's code gets the user's, ours stay ours."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import graph
import traces
from graph.models.own_modules import Folder
from tests.places import ROOT

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.part = nn.Linear(width, width)

    def forward(self, x):
        return self.part(x).sum()
"""
TRAIN = """
import torch
import graph
from strategies import WIDTH
from traces.deep import BATCH

def build():
    from simulator import late  # imported when it is called
    from traces import again
    assert late == again == 5
    return graph.Net(WIDTH), {"x": torch.zeros(BATCH, WIDTH)}
"""


def folder(path: Path) -> Path:
    (path / "graph.py").write_text(NET)
    (path / "strategies.py").write_text("WIDTH = 640\n")
    (path / "simulator.py").write_text("late = 5\n")
    (path / "traces").mkdir()
    (path / "traces" / "__init__.py").write_text("from .deep import again\n")
    (path / "traces" / "deep.py").write_text("BATCH, again = 7, 5\n")
    (path / "train.py").write_text(TRAIN)
    return path


def run(code: str, where: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, **environment}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=where, env=settings, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("model", ["train:build", "graph:build"])
def test_the_users_code_gets_the_users_modules(tmp_path: Path, model: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    folder(tmp_path)
    if model == "graph:build":  # even the module of the function may have such a name
        made = "\ndef build():\n    return Net(640), {'x': torch.zeros(7, 640)}\n"
        (tmp_path / "graph.py").write_text(NET + made)
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from simulator.cli import main; sys.path.pop(0)"
    done = run(f"{start}; main(['capture', {model!r}, '--steps', '1', '--json'])", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["parameters"]["elements"] == 640 * 640 + 640


def test_the_command_runs_in_a_folder_with_a_graph_of_the_users(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "simulator.py").unlink()  # `-m simulator` means the first in the path, whatever it holds
    command = [sys.executable, "-m", "simulator", "run", str(ROOT / "traces/samples/tiny.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fits")


def test_ours_are_there_again_afterwards(tmp_path: Path) -> None:
    folder(tmp_path)
    own, before = Folder(str(tmp_path)), list(sys.path)
    with own.first():
        users = importlib.import_module("traces")
        assert users.__file__ == str(tmp_path / "traces" / "__init__.py")
        assert traces.Trace.__module__ == "traces.model"  # imported in our file: there the name means ours
        assert sys.modules["traces"] is users
    assert (sys.modules["traces"], sys.modules["graph"], sys.path) == (traces, graph, before)
    with own.first():
        assert importlib.import_module("traces") is users  # imported once
