"""Cases that torch.compile compiles: the peaks of real runs, kernels by name with what they move, and refusals."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from graph.case import Case
from graph.recorder.capture import capture
from simulator.estimator.estimate import estimate
from strategies import modifiers
from tests.places import DATA, ROOT
from tests.support.launched import model
from traces.errors import ConfigError

RECORDED = [json.loads(line) for line in (DATA / "compiled" / "cases.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: row["name"])
def test_cases_have_the_peaks_of_real_runs(row: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(row["config"]))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # as a command: nothing ran before it
        peaks = pool.submit(_peaks, {"model": str(tmp_path), **row["case"]}).result()
    assert peaks == {name: row[name] for name in peaks}


def _peaks(case: dict[str, Any]) -> dict[str, int]:
    rank = estimate(case, context=0, analyse=False).result.ranks[0]
    return {"peak_allocated": rank.peak_allocated, "peak_reserved": rank.peak_reserved}


def test_buffers_have_kernels_and_kernels_move_bytes(tmp_path: Path) -> None:
    case = Case.of({"model": model(tmp_path, layers=1), "batch": 2, "seq": 16, "compile": "default"})
    graph = capture(case)
    made = {graph.names[code] for code in graph.storages.name}
    fused = [place for place, code in enumerate(graph.operators.name) if graph.names[code].startswith("triton_")]
    assert {graph.names[graph.operators.name[place]] for place in fused} & made
    for place in fused:
        writes = graph.writes.storage[graph.writes.start[place] : graph.writes.start[place + 1]]
        assert graph.operators.moved[place] >= 0
        assert len(writes), graph.names[graph.operators.name[place]]
        assert not graph.operators.flops[place]
    eager = capture(Case.of({"model": model(tmp_path, layers=1), "batch": 2, "seq": 16}))
    assert graph.operators.flops.sum() == eager.operators.flops.sum()  # of matrix products, none of them Inductor's own
    moved = [one.operators.moved[one.operators.step == 2].sum() for one in (graph, eager)]
    assert moved[0] < moved[1]


INDUCTOR_FIRST = """
import sys
import torch
import torch._inductor.codegen.triton, torch._inductor.codegen.wrapper, torch._inductor.compile_fx
import torch._inductor.runtime.triton_heuristics
from graph.case import Case
from graph.recorder.capture import capture

graph = capture(Case.of({"model": sys.argv[1], "batch": 2, "seq": 16, "steps": 1, "compile": "default"}))
print(sum(name.startswith("triton_") for name in graph.names) > 0)
"""


def test_inductor_may_have_been_imported_before(tmp_path: Path) -> None:
    """As in a notebook that has compiled something for the CPU: without Triton, Inductor has placeholders for it."""
    words = [sys.executable, "-W", "ignore", "-c", INDUCTOR_FIRST, model(tmp_path, layers=1)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_a_compiled_case_after_another_is_as_in_a_new_process(tmp_path: Path) -> None:
    """Inductor traces the patterns that it looks for once, on the device: it does so again for each capture."""
    case = Case.of({"model": model(tmp_path, layers=1), "batch": 2, "seq": 16, "steps": 1, "compile": "default"})
    first, second = (capture(case) for _ in range(2))
    assert first.storages.bytes.tolist() == second.storages.bytes.tolist()


@pytest.mark.parametrize("keys", [{"strategy": "deepspeed-2", "world": 2}, {"strategy": "pp", "world": 2}])
def test_methods_that_compile_in_ways_of_their_own_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="key 'compile': not 'default' with strategy"):
        modifiers.check(Case.of({"model": "gpt2", "compile": "default", **keys}))


def test_blocks_are_compiled_only_where_something_is() -> None:
    with pytest.raises(ConfigError, match="key 'compile_blocks': only with 'compile'"):
        Case.of({"model": "gpt2", "compile_blocks": True})
