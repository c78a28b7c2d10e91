"""Trainings on real GPUs (tests/data/gpu), a few of each kind, to the byte; and the table's own summary."""

from __future__ import annotations

import pytest

from tests.accuracy.on_gpu import FIGURES, Row, edges, judged, summary, trainings, verdict
from tests.accuracy.recordings import Recording

pytest.importorskip("torch")

#: Small models, and by what they differ: dtypes, attention, checkpointing, optimizers, quantization, segments.
KINDS = (
    {"model": "gpt2", "dtype": "bf16", "cudnn_sdp": True, "attn": "sdpa"},
    {"model": "gpt2", "dtype": "fp32", "autocast": "fp16"},
    {"model": "qwen2-0.5b", "dtype": "bf16", "cudnn_sdp": True, "lora": 8},
    {"model": "opt-125m", "dtype": "fp32", "autocast": "bf16", "checkpointing": "nonreentrant"},
    {"model": "pythia-410m", "attn": "eager"},
    {"model": "qwen2-0.5b", "quant": "nf4"},
    {"model": "codegen-350m", "optimizer": "adafactor"},
    {"model": "gpt2", "optimizer": "adamw-8bit"},
    {"model": "qwen2-0.5b", "alloc_conf": "expandable_segments:True"},
)


def chosen() -> list[Recording]:
    """Of each kind the last row."""
    rows = [row for row in trainings() if row.case["gpu"] == "H100-80GB"]
    return [[row for row in rows if kind.items() <= row.case.items()][-1] for kind in KINDS]


@pytest.mark.parametrize("recording", chosen(), ids=str)
def test_peaks_are_the_cards_own(recording: Recording) -> None:
    """To the byte; where they are not, within what the table has."""
    row = judged(recording)
    for figure in FIGURES:
        assert abs(row.off(figure, row.ours)) <= 0.003, figure
    assert row.bare != row.ours


def test_most_of_them_are_exact() -> None:
    rows = [judged(recording) for recording in chosen()]
    assert sum(row.off(figure, row.ours) == 0 for row in rows for figure in FIGURES) >= 2 * len(rows) - 2


def test_the_largest_batch_is_the_cards() -> None:
    """Of gpt2-medium: the card trains 22, and runs out of memory with 23."""
    found = {case["batch"]: (case, theirs) for case, theirs in edges() if case["model"] == "gpt2-medium"}
    for batch in (22, 23):
        case, theirs = found[batch]
        assert verdict(case) == theirs == ("fits" if batch == 22 else "oom")


def test_the_summary_counts_both_pairs() -> None:
    recording = trainings()[0]
    theirs = {figure: recording.figure(figure) or 0 for figure in FIGURES}
    half = {figure: size // 2 for figure, size in theirs.items()}
    text = summary("H100", [Row(recording, theirs, half)])
    assert "peak_reserved: 1 to the byte, median 0.000%" in text
    assert "peak_reserved: 0 to the byte, median 50.000%" in text
