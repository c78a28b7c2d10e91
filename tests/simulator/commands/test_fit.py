"""The command `fit`, with graphs written by hand in the place of captured ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from click.testing import Result as Outcome

from graph.case import Case
from graph.model import StepGraph
from simulator.cli import main
from simulator.reports.schemas import schema
from tests.support.step_graphs import in_place_of_captures
from tests.support.step_graphs import training as stubbed

MIB = 1 << 20
#: Tensors of 60 MiB, of which four are alive at once, and of 30 MiB with checkpointing.
CASE = ("m", "--context", "0", "--memory", "150MiB", "--jobs", "1")


@pytest.fixture(autouse=True)
def _written(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("torch")  # FSDP2 is tried

    def made(case: Case, progress: Any = None, method: Any = None) -> StepGraph:
        return stubbed(case.document(), unit=30 * MIB if case.checkpointing else 60 * MIB)

    yield from in_place_of_captures(monkeypatch, made)


def call(*arguments: str) -> Outcome:
    outcome = CliRunner().invoke(main, ["fit", *arguments])
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), outcome.output
    return outcome


def test_it_says_what_lacks_and_what_to_do() -> None:
    outcome = call(*CASE)
    assert outcome.exit_code == 0
    shown = " ".join(outcome.stdout.split())
    assert "it lacks 90.00 MiB; do this: --checkpointing nonreentrant --every 4 (activations of every" in shown
    assert "and the results stay the same" in shown
    assert "What would fit, each tried by a capture and a replay" in shown


def test_json_has_the_plans_and_the_case() -> None:
    document = json.loads(call(*CASE, "--json").stdout)
    jsonschema.validate(document, schema("fit"))
    first = document["plans"][0]
    assert (document["verdict"], document["needs"], document["gpu_bytes"]) == ("oom", 240 * MIB, 150 * MIB)
    assert (first["change"], first["needs"]) == ({"checkpointing": "nonreentrant", "every": 4}, 120 * MIB)
    assert document["case"]["memory"] == 150 * MIB


def test_what_is_kept_is_not_changed() -> None:
    outcome = call(*CASE, "--keep", "checkpointing,gpu", "--json")
    document = json.loads(outcome.stdout)
    assert (outcome.exit_code, document["plans"], document["keep"]) == (3, [], ["checkpointing", "gpu"])
    assert not any({"checkpointing", "gpu"} & one["change"].keys() for one in document["short"])
    assert document["says"] == ("it lacks 90.00 MiB; nothing that was tried makes it fit with checkpointing, gpu kept")
    wrong = call(*CASE, "--keep", "chekpointing")
    assert wrong.exit_code == 1
    assert "the nearest is 'checkpointing'" in wrong.stderr


def test_what_fits_needs_nothing() -> None:
    outcome = call("m", "--context", "0", "--memory", "300MiB", "--jobs", "1")
    assert outcome.exit_code == 0
    assert "fits: needs 240.00 MiB of 300.00 MiB; nothing has to change" in " ".join(outcome.stdout.split())


def test_a_case_in_a_file_and_a_page(tmp_path: Path) -> None:
    (tmp_path / "case.json").write_text(json.dumps({"model": "m", "memory": 150 * MIB}))
    page = tmp_path / "page.html"
    words = [str(tmp_path / "case.json"), "--context", "0", "--jobs", "1", "--html", str(page)]
    outcome = call(*words, "--markdown")
    assert outcome.exit_code == 0
    assert "| --checkpointing nonreentrant --every 4 | fits | 120.00 MiB | 150.00 MiB |" in outcome.stdout
    assert "--checkpointing nonreentrant --every 4" in page.read_text()
    assert call(*words).exit_code == 1  # the page is there
    assert call(*words, "--force", "--memory", "300MiB").exit_code == 0


def test_a_case_beside_an_out_of_memory_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulator.fit.fit.default_jobs", lambda: 1)
    (tmp_path / "case.json").write_text(json.dumps({"model": "m", "memory": 2000 * MIB}))
    log = Path("tests/data/out_of_memory/four_ranks.log")
    words = ["explain", str(log.resolve()), "--case", str(tmp_path / "case.json")]
    shown = " ".join(CliRunner().invoke(main, words).stdout.split())
    assert "What to try first" in shown
    assert "Largest tensors alive at the peak" in shown
    assert "nothing has to change The case as given fits" in shown
    document = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)
    jsonschema.validate(document, schema("explain"))
    assert document["fit"]["case"]["memory"] == 2000 * MIB
    assert len(document["messages"]) == 4
