"""The line of the model's code at which an estimate runs out of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

from graph.model import Role
from simulator.cli import main
from simulator.estimator.estimate import captured, estimate
from simulator.estimator.failing_line import _of_the_first_steps

MIB = 1 << 20
SOURCE = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x):
        y = self.layer(x)
        return self.squared(y)

    def squared(self, y):
        z = y @ y.T  # 64 MiB
        z = z.exp()
        z = z.exp()  # 64 MiB more for its derivative
        return z.sum()


def build():
    return Net(), {"x": torch.ones(4096, 64)}
"""


def line(text: str) -> int:
    return next(number for number, one in enumerate(SOURCE.splitlines(), 1) if text in one)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all: a process imports a module once."""
    path = tmp_path_factory.mktemp("own")
    (path / "squares.py").write_text(SOURCE)
    return path


@pytest.fixture
def keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(folder)
    return {"model": "squares.py:build", "dtype": "fp32", "steps": 2, "optimizer": "sgd"}


@pytest.mark.parametrize("job", [{}, {"strategy": "ddp", "world": 2}], ids=["one GPU", "ddp"])
@pytest.mark.parametrize(
    ("memory", "phase", "text"), [(50, "forward 0", "# 64 MiB"), (160, "backward 0", "more for its derivative")]
)
def test_the_line_that_asks_or_whose_derivative_does(
    keys: dict[str, Any], job: dict[str, Any], memory: int, phase: str, text: str
) -> None:
    found = estimate({**keys, **job, "memory": memory * MIB}, context=0)
    oom = found.result.decisive.oom
    assert oom is not None
    assert (oom.phase, oom.requested) == (phase, 64 * MIB)
    assert oom.line == f"squares.py:{line(text)} (squared)"


def test_the_answer_says_it(keys: dict[str, Any]) -> None:
    outcome = CliRunner().invoke(
        main, ["estimate", keys["model"], "--dtype", "fp32", "--memory", "50MiB", "--context", "0", "--no-remedies"]
    )
    assert f", at squares.py:{line('# 64 MiB')} (squared): asked for 64.00 MiB with " in " ".join(
        outcome.stdout.split()
    )


def test_what_no_line_of_the_model_asks_for_has_none(keys: dict[str, Any]) -> None:
    """Parameters are loaded by nobody's forward pass."""
    found = estimate({**keys, "memory": MIB}, context=0)
    oom = found.result.decisive.oom
    assert oom is not None
    assert (oom.phase, oom.line) == ("load", "")


def test_operators_of_later_steps_are_those_of_the_second(keys: dict[str, Any]) -> None:
    from graph.case import Case

    operators = captured(Case.of({**keys, "steps": 4})).operators
    later = np.flatnonzero((operators.step == 3) & (operators.role == Role.FORWARD))
    assert len(later)
    for number in later.tolist():
        first = _of_the_first_steps(operators.step, number)
        assert operators.step[first] == 1
        assert (operators.name[first], operators.module[first]) == (operators.name[number], operators.module[number])
