"""The Python of the documentation runs, block after block, as a reader would type it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.places import ROOT

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("networkx")

from graph import Case, capture, save

DOCS = ROOT / "docs"
MODEL = ROOT / "tests" / "data" / "tiny_gpt2.json"


def blocks(page: str, language: str = "python") -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert found, page
    return found


def run(page: str, capsys: pytest.CaptureFixture[str]) -> str:
    names: dict[str, object] = {}
    for block in blocks(page):
        exec(compile(block, page, "exec"), names)
    return capsys.readouterr().out


def test_the_four_floors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny_gpt2.json").write_text(blocks("tutorials/four-floors.md", "json")[0])
    said = run("tutorials/four-floors.md", capsys)
    assert "ranks with the same events: (0, 1)" in said
    assert "on T4" in said
    assert "<Estimate tiny_gpt2.json: fits: needs " in said


def test_the_graph_in_python_and_its_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save(capture(Case(str(MODEL), seq=32, steps=2)), "gpt2.json.gz")
    assert "bytes to keep" in run("how-to/graph.md", capsys)
    text = (DOCS / "how-to/graph.md").read_text("utf-8")
    known = subprocess.run(
        [sys.executable, "-m", "simulator", "graph", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    asked = set(re.findall(r"--[a-z][a-z-]+", text)) - {"--gpu", "--checkpointing", "--save", "--json"}
    assert {"--order", "--critical-path", "--keeps-alive", "--kept-by", "--recompute", "--module"} == asked
    assert all(option in known for option in asked)
