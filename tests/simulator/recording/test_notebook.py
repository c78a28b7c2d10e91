"""Notebooks: their cells run as a script of the same lines does, and end where Jupyter ends."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("nbformat")

import traces
from tests.simulator.recording.test_record import answer, record

MODEL = "import torch\nmodel = torch.nn.Linear(512, 512).cuda()\noptimizer = torch.optim.AdamW(model.parameters())\n"
STEPS = "for _ in range(9):\n    model(torch.ones(8, 512, device='cuda')).sum().backward()\n    optimizer.step()\n"


def written(folder: Path, *cells: str, tags: tuple[str, ...] = ()) -> None:
    """A notebook with these cells, of which the one before the last has `tags`."""
    all_cells: list[dict[str, object]] = [{"cell_type": "markdown", "id": "0", "metadata": {}, "source": "# A title"}]
    for number, cell in enumerate(cells, 1):
        metadata = {"tags": list(tags)} if number == len(cells) - 1 else {}
        source = cell.splitlines(keepends=True)
        code: dict[str, object] = {"cell_type": "code", "id": str(number), "metadata": metadata, "source": source}
        all_cells.append({**code, "outputs": [], "execution_count": None})
    notebook = {"cells": all_cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (folder / "train.ipynb").write_text(json.dumps(notebook))


def ran(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run it, as in a terminal of another environment."""
    return record(
        folder, *options, "train.ipynb", IPYTHONDIR=str(folder / "ipython"), VIRTUAL_ENV=str(folder / "elsewhere")
    )


def test_it_does_what_a_script_does(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MODEL + STEPS)
    assert record(tmp_path, "-o", "script.npz", "train.py").returncode == 0
    script = answer(tmp_path)
    written(tmp_path, MODEL, "%time 1\n!ls *.ipynb\nasync def nothing(): pass\nawait nothing()", STEPS)
    done = ran(tmp_path, "-o", "notebook.npz")
    assert done.returncode == 0, done.stderr
    assert "train.ipynb" in done.stdout.splitlines()
    notebook = answer(tmp_path)
    assert notebook["steps"] == script["steps"] == 3  # they repeat
    (one,), (other,) = script["ranks"], notebook["ranks"]
    assert one["end_allocated"] < other["end_allocated"]  # a kernel's variables stay
    assert one["phases"][:-1] == other["phases"][:-1]
    figures = ("peak_allocated", "peak_reserved", "allocations")
    assert {name: one[name] for name in figures} == {name: other[name] for name in figures}
    sizes, lines = zip(*(told(tmp_path / f"{name}.npz") for name in ("script", "notebook")), strict=True)
    assert sizes[1] == sizes[0][: len(sizes[1])]
    first = [[frame.split(":")[:2] for frame in one if frame.startswith("train.")] for one in lines]
    assert ["train.py", "2"] in first[0]
    assert ["train.ipynb[1]", "2"] in first[1]
    assert ["train.ipynb[3]", "2"] in first[1]


def told(path: Path) -> tuple[list[int], list[str]]:
    """The sizes of a trace's allocations in order, and the frames of its stacks."""
    events = traces.read(path).ranks[0].events
    stacks = {events.strings("frames").get(place) or "" for place in range(len(events))}
    return events.ints("bytes").tolist(), [frame for stack in stacks for frame in stack.splitlines()]


def test_it_ends_at_the_cell_that_raises(tmp_path: Path) -> None:
    written(tmp_path, "import torch", "x = torch.ones(256).cuda()\nraise ValueError('no such thing')", "print(1)")
    done = ran(tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    said = 'Traceback (most recent call last):\n  File "train.ipynb[2]", line 2, in <module>\n'
    assert done.stderr.startswith(said + "    raise ValueError('no such thing')\nValueError: no such thing\n")
    assert answer(tmp_path)["ranks"][0]["peak_allocated"] == 1024


@pytest.mark.parametrize("tag", ["skip-execution", "raises-exception"])
def test_tags_of_cells(tag: str, tmp_path: Path) -> None:
    written(tmp_path, "said = 1", "said = 2\nraise ValueError", "print(said)", tags=(tag,))
    done = ran(tmp_path)
    assert (done.returncode, done.stdout) == (0, "1\n" if tag == "skip-execution" else "2\n")


def test_what_is_no_python_is_told_as_python_tells_it(tmp_path: Path) -> None:
    written(tmp_path, "x = 1 +")
    assert ran(tmp_path).stderr.startswith('  File "train.ipynb[1]", line 1\n    x = 1 +\n')


def test_files_that_are_no_notebooks(tmp_path: Path) -> None:
    (tmp_path / "train.ipynb").write_text("import torch\n")
    done = ran(tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: train.ipynb: is not a notebook: ")
    assert done.stderr.count("\n") == 1
