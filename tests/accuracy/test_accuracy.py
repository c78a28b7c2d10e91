"""Predictions against recorded runs: a few small rows of every table, each with the bounds that the whole table has."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.accuracy.__main__ import GOALS, Outcome, predict, summary
from tests.accuracy.recordings import FOLDER, TABLES, Recording, read_table, recordings

pytest.importorskip("torch")

SMALL = ("opt-125m", "gpt2", "qwen2-0.5b", "t5-small", "bert-base", "bart-base", "vit-base")
ROWS = {"single": 14, "seq2seq": 6, "inference": 2, "multi": 5, "offload": 4, "min_fit": 2}


def chosen(table: str) -> list[Recording]:
    """Rows of small models, spread evenly over the table."""
    models = (*SMALL, "tinyllama-1.1b") if table == "inference" else SMALL
    rows = [row for row in recordings(table) if row.case["model"] in models and row.fits]
    count = min(ROWS[table], len(rows))
    return [rows[place * len(rows) // count] for place in range(count)]


@pytest.mark.parametrize("row", [row for table in ROWS for row in chosen(table)], ids=str)
def test_prediction_is_as_close_as_its_table_allows(row: Recording) -> None:
    found = Outcome(row, predict(dict(row.case), smallest=row.table == "min_fit"))
    assert "error" not in found.answer, found.answer
    for figure, (_, _, worst) in GOALS[row.table].items():
        error = found.error(figure)
        if error is not None:
            assert abs(error) <= worst
    assert found.answer["verdict"] != "oom"


@pytest.mark.parametrize("row", list(recordings("releases")), ids=str)
def test_cases_of_the_installed_release_are_exact(row: Recording) -> None:
    """To the byte, under the torch and the transformers that the row was recorded with."""
    found = Outcome(row, predict(dict(row.case), smallest=False))
    assert "error" not in found.answer, found.answer
    for figure in GOALS["releases"]:
        assert found.figures[figure] == row.figure(figure), figure


def test_every_release_has_as_many_cases() -> None:
    rows = read_table(FOLDER / "releases.csv.gz")
    releases = Counter((row["torch"], row["transformers"], row["peft"]) for row in rows)
    assert set(releases.values()) == {20}
    assert [version.rpartition(".")[0] for version, _, _ in releases] == ["2.7", "2.9", "2.11", "2.13"]


def test_runs_that_ran_out_of_memory_are_told() -> None:
    rows = [row for row in recordings("single") if not row.fits and row.case["model"] in ("opt-1.3b", "tinyllama-1.1b")]
    row = rows[0]
    assert predict(dict(row.case), smallest=False)["verdict"] == "oom"


def test_every_table_has_goals_and_cases() -> None:
    for table in {*TABLES, *ROWS, "releases"}:
        assert GOALS[table]
        assert all(row.case["model"] for row in recordings(table))


def test_summary_tells_misses() -> None:
    row = next(recordings("single"))
    exact = {name: row.figure(name) for name in ("peak_allocated", "peak_reserved")}
    assert "MISSED" not in summary("single", [Outcome(row, {**exact, "verdict": "fits"})], 1)
    off = {name: (value or 0) * 1.02 for name, value in exact.items()}
    told = summary("single", [Outcome(row, {**off, "verdict": "oom"})], 1)
    assert "MISSED: median, p95, worst" in told
    assert "verdicts: 0 of 1 right" in told
