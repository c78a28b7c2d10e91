"""Measured training as programs: what is typed for a row, and what is printed of it."""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.accuracy.sft import Run, read
from tests.accuracy.trainers import (
    GIB,
    KEPT,
    PROGRAMS,
    TABLE,
    TOKENS,
    Compared,
    command,
    kept,
    prepare,
    prepare_scratch,
    summary,
)

ROWS = read(TABLE)


def test_what_is_typed_for_a_row(tmp_path: Path) -> None:
    for row in ROWS:
        words = command(row, Path("root"), tmp_path)
        if row["program"] == "scratch":
            assert words == ["train.py"]
        elif row["program"] == "torchao":
            assert Path(words[0]).parts[:2] == ("root", "benchmarks")
            assert words[-2] == "--optim"
        elif row["program"] == "torchao-int8":
            assert Path(words[0]).parts[:2] == ("root", "benchmarks")
            assert ("--quantize" in words) == ("quantized" in row["id"])
        elif row["program"] == "deepspeed":
            assert words[:2] == ["deepspeed", "--num_gpus=4"]
            assert Path(words[4]).stem == row["id"].removeprefix("deepspeed-7b-")
            assert "--activation_checkpointing" in words
        elif row["program"] == "torchtune":
            assert Path(words[0]).parts[:2] == ("root", "recipes")
            assert ("compile=True" in words) == (row["id"] != "torchtune-3b-packed")
        else:
            given = dict(word.partition("=")[::2] for word in words if word.startswith("--"))
            size = next((size for size in ("70B", "405B") if size in row["id"]), "8B").lower()
            assert Path(words[words.index("--job.config_file") + 1]).name == f"llama3_{size}.toml"
            degrees = [int(many) for option, many in given.items() if option.endswith("parallel_degree")]
            assert 8 * int(given["--nnodes"]) % math.prod(degrees) == 0
            eager = row["id"].endswith("8gpu-FSDP") or ("nocompile" in row["id"] and not row["id"].endswith("float8"))
            assert ("--training.compile" in given) == (not eager)
            if row["program"] == "torchtitan":
                assert ("--model.converters" in given) == (not row["id"].endswith("bf16"))


def test_files_for_the_programs(tmp_path: Path) -> None:
    prepare(tmp_path)
    lines = (tmp_path / "tokenizer.model").read_bytes().splitlines()
    tokens = [base64.b64decode(line.split()[0]) for line in lines]
    assert len(set(tokens)) == TOKENS
    assert {bytes([byte]) for byte in range(256)} <= set(tokens)
    texts = (tmp_path / "tests" / "assets" / "c4_test" / "data.json").read_text().splitlines()
    assert all(len(json.loads(text)["text"]) > 8192 for text in texts)
    weights = list(tmp_path.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in weights) // 2 == pytest.approx(3.2128e9, rel=1e-4)
    assert sum(file.stat().st_blocks for file in weights) * 512 < 1 << 20


def test_a_program_is_changed_as_a_row_says(tmp_path: Path) -> None:
    (place := tmp_path / "ch05" / "10_llm-training-speed").mkdir(parents=True)
    (place / "one.py").write_text('settings = {"batch_size": 32}\nmodel = torch.compile(model)\n')
    (folder := tmp_path / "run").mkdir()
    words = 'one.py; "batch_size": 32 -> "batch_size": 8; model = torch.compile(model) -> pass'
    prepare_scratch({"words": words}, tmp_path, folder)
    assert (folder / "train.py").read_text() == 'settings = {"batch_size": 8}\npass\n'
    scope: dict[str, Any] = {}
    exec((folder / "tiktoken.py").read_text(), scope)
    text = (folder / "middlemarch.txt").read_text()
    assert len(scope["get_encoding"]("gpt2").encode(text)) == len(text) // 4 == 450_000
    with pytest.raises(ValueError, match="has no 'three'"):
        prepare_scratch({"words": "one.py; three -> four"}, tmp_path, folder)


@pytest.mark.parametrize("program", list(PROGRAMS))
def test_what_is_printed(program: str) -> None:
    row = {"id": "a row", "program": program, "gib": "10.00"}
    workspace = PROGRAMS[program].workspace
    exact, failed = (
        Compared(row, run) for run in (Run(10 * GIB - workspace, 10 * GIB - workspace), Run(failure="ImportError: x"))
    )
    assert str(exact).endswith(" 10.00 for  10.00 GiB +0.00%")
    assert str(failed).endswith("FAILED: ImportError: x")
    far = Compared(row, Run(11 * GIB - workspace, 11 * GIB - workspace))
    assert summary([exact, far, failed]) == "2 of 3 rows ran: median 5.00%, worst 10.00%"


def test_runs_are_kept_of_every_row() -> None:
    assert [row["id"] for row in read(KEPT)] == [row["id"] for row in ROWS]
    counted = Counter(row["program"] for row in ROWS)
    assert [line.split(" rows ran")[0].split()[-3:] for line in kept()[1:]] == [
        [str(counted[program]), "of", str(counted[program])] for program in PROGRAMS
    ]
