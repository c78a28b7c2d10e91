"""A written training script is the program that was estimated: `record` of it has the estimate's events."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.accuracy.scripts import Steps, compared, difference
from tests.support import warm


@pytest.mark.parametrize("name", ["fsdp2", "accumulated-fp16", "loss-in-parts", "quantized", "compiled"])
def test_a_script_does_what_was_estimated(name: str, tmp_path: Path) -> None:
    ((_, count, differs),) = compared([name], tmp_path, warm.run)
    assert not differs
    assert count > 1000


def test_what_differs_is_told() -> None:
    ours = Steps([(512, 0), (-1, 0, 0), (-1, 1, 8)], Counter({8: 1}))
    assert difference(ours, ours) == ""
    assert difference(ours, Steps([*ours.rows, (-1, 1, 8)], ours.left)) == ""  # torn down
    assert difference(ours, Steps([*ours.rows, (512, 0)], ours.left)) == "one ends early"
    assert difference(ours, Steps(ours.rows[:2], ours.left)) == "one ends early"
    assert difference(ours, Steps([(1024, 0)], ours.left)) == "event 0: estimate (512, 0), script (1024, 0)"
    assert "leaves {8: 1} more" in difference(ours, Steps(ours.rows, Counter()))
