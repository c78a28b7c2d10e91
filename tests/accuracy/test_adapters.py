"""PEFT's comparison of adapters as programs: what they find, and what is printed of a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.accuracy.adapters import FITTED, KEPT, LONGEST, TABLE, Compared, Run, kept, prepare, summary, usual
from tests.accuracy.sft import read

ROWS = read(TABLE)
BENCHMARK = """
def main():
    with base_model_context():
        assert 1 < wiki_loss_before < 2, (
            "Sanity check failed"
        )

    print("trained")
"""


def test_files_for_the_benchmark(tmp_path: Path) -> None:
    benchmark, folder = tmp_path / "benchmark", tmp_path / "run"
    (benchmark / "experiments" / "lora" / "small").mkdir(parents=True)
    (benchmark / "experiments" / "lora" / "small" / "training_params.json").write_text('{"use_amp": true, "seed": 1}')
    (benchmark / "run.py").write_text(BENCHMARK)
    (benchmark / "utils.py").write_text("")
    defaults = {"use_amp": False, "max_steps": 5000, "generation_kwargs": {"max_length": 800}}
    (benchmark / "default_training_params.json").write_text(json.dumps(defaults))
    folder.mkdir()
    prepare(folder, benchmark, "lora/small")
    assert (folder / "run.py").read_text() == BENCHMARK.partition("        assert")[0] + '\n    print("trained")\n'
    settings = json.loads((folder / "experiments" / "lora" / "small" / "training_params.json").read_text())
    assert settings["use_amp"] is True
    assert settings["max_steps"] == settings["eval_steps"] == 30
    assert settings["generation_kwargs"]["max_length"] == 800
    lengths = json.loads((folder / "lengths.json").read_text())["train"]
    assert len(lengths) == 160
    assert max(lengths[:80]) < max(lengths[80:]) == LONGEST
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    assert len(tokenizer("word " * 9).input_ids) == 9
    assert transformers.AutoConfig.from_pretrained(folder / "model").num_hidden_layers == 28


def test_samples_are_as_long_as_their_logs_say() -> None:
    assert sum(usual()) / 80 == pytest.approx(4_198_051 / 20_000 - 1, rel=0.005)


def test_what_is_printed() -> None:
    row = {"id": "a row", "reserved": str(1000 << 20), "trained": "5"}
    exact, more, failed = (
        Compared(row, run) for run in (Run(1000 << 20, 5), Run(1020 << 20, 6), Run(failure="ImportError: no module"))
    )
    assert str(exact).endswith("1,000 for    1,000 MiB +0.00%")
    assert str(more).endswith("1,020 for    1,000 MiB +2.00%, trains 6 for 5")
    assert str(failed).endswith("FAILED: ImportError: no module")
    fitted = Compared({**row, "id": FITTED}, Run(1500 << 20, 5))
    assert summary([exact, more, failed, fitted]) == ("3 of 4 rows ran: median 1.00%, worst 2.00%; 1 of 2 within 1 %")


def test_runs_are_kept_of_rows() -> None:
    runs = [row["id"] for row in read(KEPT)]
    assert [row["id"] for row in ROWS if row["id"] in runs] == runs
    assert f"{len(runs) - 3} of {len(runs)} rows ran" in kept()[1]  # three compute with the values of weights
