"""The worked examples, each against the strategy that it describes: births and deaths in order, bytes kept, peaks."""

from __future__ import annotations

import pytest

from strategies.gemini.chunk_layout import layout
from strategies.gemini.chunk_moves import Gemini, Options
from tests.support.worked_examples import NAMES, SHAPES, Line, examples, mlp, told

CHUNKED = tuple((NAMES[short], shape) for short, shape in SHAPES.items())


def test_every_example_is_read() -> None:
    found = examples()
    assert len(found) == 16
    for example in found.values():
        assert example.lines("init") or example.lines("optimizer init")
        assert example.lines("step 2 backward")
        assert example.persistent[0] > 0
        assert example.peak[0] == max(peak for peak, _, _ in example.peaks.values())


def test_examples_agree_with_themselves() -> None:
    # The lines of step 2 alone lead from the persistent bytes back to them.
    for key, example in examples().items():
        change = sum(size if sign == "+" else -size for sign, _, size in example.lines("step 2"))
        assert change == 0, key


# Gemini --------------------------------------------------------------------------------------------------------------

GEMINI = {
    "E2-gathered": (1, 0, True, True),
    "E2-sharded": (1, 0, False, True),
    "E2-rank0": (2, 0, True, True),
    "E2-rank1": (2, 1, True, True),
    "E2-no-flat": (2, 0, True, False),
}


def without(lines: list[Line], *prefixes: str) -> list[Line]:
    return [line for line in lines if not line[1].startswith(prefixes)]


@pytest.mark.parametrize("key", GEMINI)
def test_gemini(key: str) -> None:
    world, rank, gather, flat = GEMINI[key]
    example = examples()[key]
    chunks = layout(CHUNKED, data=world, minimum=131_072, span=0, gather_single=gather)
    # In the examples each gradient passes the hooks alone; in recorded runs a layer's pass together.
    options = Options(flat=flat, protocol=False, small=False, paired=False)
    run = told(Gemini(mlp("float16"), chunks, rank, options).run().events(), {"gradient": "grad."})
    # The example drops each fp32 copy at once; recorded runs keep it until the next one is made.
    assert without(run.lines("init"), "float.") == without(example.lines("init"), "float.")
    assert run.lines("step 2") == example.lines("step 2")
    assert {name for _, name in run.waiting} == {name for _, name in example.waiting}
    assert (run.live, run.blocks) == example.persistent
    assert run.peak == example.peak[:2]
    assert run.late_peak == example.peak[2]
    assert run.peaks["step-2"] == example.peaks["step-2"]
    assert run.peaks["step-1"] == example.peaks["step-1"]
