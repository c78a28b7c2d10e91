"""`models`, and that wrong names are said before anything heavy is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

_RUN = """
import sys
from simulator.cli import main
try:
    main(sys.argv[1:])
finally:
    print("heavy:", sorted({"torch", "numba", "numpy", "networkx"} & set(sys.modules)))
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _RUN, *words], capture_output=True, text=True)


def test_the_list_has_names_families_parameters_and_repositories() -> None:
    done = run("models")
    assert done.returncode == 0
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0] == ["name", "family", "parameters", "repository"]
    assert ["gpt-oss-20b", "gpt_oss", "20,914,757,184", "openai/gpt-oss-20b"] in rows
    assert len(rows) > 200
    assert rows[-1] == ["heavy:", "[]"]


@pytest.mark.parametrize("pattern", ["whisper-large", "openai/WHISPER-large"])
def test_a_pattern_chooses_among_names_families_and_repositories(pattern: str) -> None:
    names = [line.split()[0] for line in run("models", pattern).stdout.splitlines()[1:-1]]
    assert names == ["whisper-large-v2", "whisper-large-v3", "whisper-large-v3-turbo"]


def test_a_spelling_names_its_model() -> None:
    lines = run("models", "unsloth/Llama-3.2-1B-Instruct-bnb-4bit").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["llama-3.2-1b"]


def test_a_pattern_that_nothing_has_is_an_error() -> None:
    done = run("models", "nosuch")
    assert (done.returncode, done.stderr) == (1, "error: no model of the catalogue has 'nosuch'\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nosuch-model",), "error: model 'nosuch-model' is neither in the catalogue nor in the Hub cache"),
        (("gpt2", "--gpu", "nosuch"), "error: unknown GPU 'nosuch'"),
        (("gpt2", "--strategy", "nosuch"), "error: --strategy: 'nosuch' should be one of"),
    ],
)
def test_wrong_names_are_said_before_anything_heavy_is_imported(words: tuple[str, ...], said: str) -> None:
    done = run("estimate", *words)
    assert done.returncode == 1
    assert done.stderr.startswith(said)
    assert done.stdout == "heavy: []\n"
