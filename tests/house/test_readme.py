"""What the README shows is what the commands print."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.places import ROOT

RECORDING = "tests/data/snapshots/opt-125m_fp32_sdpa_b2_s512_sgd_A100.pickle.gz"
ESTIMATE = "estimate opt-1.3b --dtype bf16 --batch 2 --checkpointing nonreentrant --gpu RTX3090"
CAPTURE = "capture opt-1.3b --dtype bf16 --batch 2 --checkpointing nonreentrant"
STRESS = [
    word
    for conf in ("expandable_segments:True", "large_segment_size_mb:64", "max_split_size_mb:128")
    for word in ("--allocator", conf)
]


def blocks() -> list[list[str]]:
    """The README's blocks of output, as lines."""
    text = (ROOT / "README.md").read_text()
    return [block.strip().splitlines() for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL)]


@pytest.mark.parametrize(
    ("number", "arguments"),
    [
        (0, ["run", "traces/samples/tiny.json"]),
        (1, ESTIMATE.split()),
        (2, CAPTURE.split()),
        (3, ["verify", RECORDING]),
        (4, ["run", RECORDING]),
        (5, ["stress", RECORDING, *STRESS]),
    ],
)
def test_output_shown_is_output_printed(number: int, arguments: list[str]) -> None:
    if arguments[0] in ("estimate", "capture"):
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
        assert re.search(rf"^llmem {' '.join(arguments)}( -o \S+)?$", (ROOT / "README.md").read_text(), re.MULTILINE)
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "simulator", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    shown = [line.rstrip() for line in blocks()[number]]
    printed = [line.rstrip() for line in done.stdout.strip().splitlines()]
    assert shown == printed[: len(shown)]
    assert len(shown) > 3
