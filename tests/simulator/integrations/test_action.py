"""The steps of the GitHub Action, run by a shell as a runner runs them; `gh` writes what it is given."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.places import ROOT

ACTION: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "actions" / "check" / "action.yml").read_text())
SAMPLE = str(ROOT / "traces" / "samples" / "tiny.json")
GH = '#!/bin/sh\nwhile [ "$1" != --body-file ]; do echo "$1" >>"$0.words"; shift; done\ncat "$2" >"$0.body"\n'
LLMEM = f'#!/bin/sh\nexec {sys.executable} -m simulator "$@"\n'


def ran(folder: Path, **inputs: str) -> int:
    """The exit code of the job on a pull request: all steps but the installation, until one fails."""
    outputs: dict[str, str] = {}
    known = {f"inputs.{name}": one.get("default", "") for name, one in ACTION["inputs"].items()}
    known |= {f"inputs.{name.replace('_', '-')}": value for name, value in inputs.items()}
    known |= {"github.token": "t", "github.event.pull_request.number": "7", "github.repository": "me/mine"}
    for name, text in (("gh", GH), ("llmem", LLMEM)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    for step in ACTION["runs"]["steps"][1:]:
        known |= {f"steps.check.outputs.{name}": value for name, value in outputs.items()}
        given = {name: _filled(text, known) for name, text in step["env"].items()}
        runner = {"RUNNER_TEMP": str(folder)}
        runner |= {name: str(folder / name.lower()) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        path = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        code = subprocess.run(command, env={**os.environ, **runner, **path, **given}, check=False).returncode
        if code:
            return code
        if (folder / "github_output").exists():
            outputs = dict(line.split("=", 1) for line in (folder / "github_output").read_text().splitlines())
    return 0


def _filled(text: str, known: dict[str, str]) -> str:
    return re.sub(r"\$\{\{ ([\w.-]+) \}\}", lambda found: known[found[1]], text)


@pytest.mark.parametrize(
    ("budget", "code", "said"), [("1GiB", 0, "ok: tiny.json"), ("20MiB", 3, "over budget: tiny.json")]
)
def test_the_answer_is_a_comment_and_an_exit_code(budget: str, code: int, said: str, tmp_path: Path) -> None:
    assert ran(tmp_path, run=SAMPLE, budget=budget) == code
    body = (tmp_path / "gh.body").read_text()
    assert said in body
    assert body == (tmp_path / "github_step_summary").read_text()
    assert (tmp_path / "gh.words").read_text().split() == [
        *("pr", "comment", "7", "--repo", "me/mine", "--edit-last", "--create-if-none"),
    ]


def test_a_baseline_and_what_may_grow(tmp_path: Path) -> None:
    assert ran(tmp_path, run=SAMPLE, budget="1GiB", against=SAMPLE, fail_over="2%") == 0
    assert "tiny.json" in (tmp_path / "gh.body").read_text()


def test_every_input_is_used() -> None:
    steps = str(ACTION["runs"]["steps"])
    assert all(f"inputs.{name} " in steps for name in ACTION["inputs"])
