"""Whole runs, event for event: what is predicted for a case against what PyTorch's allocator recorded of that run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accuracy.diffing import edits
from tests.accuracy.recorded_events import difference, recorded

pytest.importorskip("torch")

#: Recorded events that may differ, with the reason; all others must be equal in order and size.
EXPLAINED = {
    # recorded with 2.11; the FSDP2 of 2.13, which runs here, makes no scratch of 512 bytes when it shards
    "tinyllama-1.1b_bf16_fsdp2x4_b2_s512_adamw_A100": 2,
}


@pytest.mark.parametrize("path", list(recorded()), ids=lambda path: path.name.removesuffix(".pickle.gz"))
def test_predicted_events_are_the_recorded_ones(path: Path) -> None:
    found = difference(path)
    assert len(found.recorded.tokens) > 5000
    assert found.count <= EXPLAINED.get(path.name.removesuffix(".pickle.gz"), 0), found.edits[:5]


def test_the_comparison_sees_what_is_missing_moved_or_larger() -> None:
    run = [("+", 512), ("+", 1024), ("-", 512), ("+", 2048), ("-", 1024)]
    assert edits(run, run) == []
    assert [(edit.a, edit.b, edit.c, edit.d) for edit in edits(run, run[:2] + run[3:])] == [(2, 3, 2, 2)]
    assert len(edits(run, [run[1], run[0], *run[2:]])) == 2
    assert sum(edit.b - edit.a for edit in edits(run, [("+", 1536), *run[1:]])) == 1
