"""The worked examples of methods that PyTorch itself has, against captures of its own code: E1, E3, E6 and E7.

The examples are arithmetic made by reading; where the code that ran does otherwise, the test says so (`swapped`, and
what is added or taken from a number), and compares everything else exactly.
"""

from __future__ import annotations

import functools
import itertools

import pytest

from tests.captured_examples import captured, expected, run, swapped
from tests.worked_examples import examples

MODEL = "tests.worked_models:mlp"
W1, B1, W2, B2 = 524_288, 2_048, 522_240, 1_020  # bytes in fp32
#: A linear layer's backward makes the gradient of its weight before that of its bias (AddmmBackward0's outputs come in
#: the order mat1, mat2, self); the examples have the bias first.
WEIGHT_FIRST = ((("+", B2), ("+", W2)), (("+", B1), ("+", W1)))


# One GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "optimizer"), [("E1-foreach", "adamw"), ("E1-fused", "adamw-fused")])
def test_adamw(key: str, optimizer: str) -> None:
    example = examples()[key]
    found = run(captured({"model": MODEL, "optimizer": optimizer}), {0: "D"})
    assert found.lines["init"] == expected(example, "init")
    wanted = swapped(expected(example, "step 2"), *WEIGHT_FIRST)
    if key == "E1-foreach":  # a list of tensors goes from its end
        wanted = wanted[:8] + wanted[8:12][::-1] + wanted[12:]
    assert found.lines["step 2"] == wanted
    assert found.persistent == example.persistent
    assert found.peak == example.peak[:2]
    assert found.late == example.peak[2]
    for part in ("step 1", "step 2"):
        assert found.peaks[part] == example.peaks[part.replace(" ", "-")][:2]


# DistributedDataParallel ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "strategy"), [("E3", "ddp"), ("E3-view", "ddp-view")])
def test_ddp(key: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.parallel.distributed import DistributedDataParallel as DDP  # noqa: N817

    monkeypatch.setattr(DDP, "__init__", functools.partialmethod(DDP.__init__, bucket_cap_mb=0.5))
    example = examples()[key]
    events = captured({"model": MODEL, "strategy": strategy, "world": 2, "optimizer": "adamw-fused"})
    found = run(events, {0: "D"})
    # Parameters go to the other ranks in one flat copy before there is a bucket.
    flat = W1 + B1 + W2 + B2
    init = expected(example, "init")
    assert found.lines["init"] == [*init[:4], ("+", flat, "D"), ("-", flat, "D"), *init[4:]]
    wanted = expected(example, "step 2")
    if key == "E3":
        wanted = swapped(wanted, *WEIGHT_FIRST)
    else:
        # Gradients of a layer die only when the next node has run: the hook of a parameter is called after both
        # gradients were made, and the engine still holds them.
        births = [("+", W2, "D"), ("+", B2, "D"), ("-", B2, "D"), ("-", W2, "D")]
        wanted = [*wanted[:3], *births, ("+", W1, "D"), ("+", B1, "D"), ("-", B1, "D"), ("-", W1, "D")]
    assert found.lines["step 2"] == wanted
    assert found.persistent == example.persistent
    # With views a weight's gradient is there together with its bias': B1 more at the peak.
    more = B1 if key == "E3-view" else 0
    assert found.peaks["step 2"] == tuple(one + more for one in example.peaks["step-2"][:2])


# FSDP ----------------------------------------------------------------------------------------------------------------


def test_fsdp2() -> None:
    example = examples()["E6"]
    events = captured(
        {"model": MODEL, "strategy": "fsdp2", "world": 2, "optimizer": "adamw-fused", "autocast": "bf16"}
    )
    found = run(events, {0: "D", 1: "CI", 2: "AG", 3: "RS"})
    assert found.lines["init"] == expected(example, "init")
    wanted = expected(example, "step 2")
    # The first layer's gather output dies after the second one's copy-out: the event that it waits for is taken there.
    late = wanted.index(("-", 263_168, "CI"))
    wanted = [*wanted[:late], *wanted[late + 1 : late + 3], wanted[late], *wanted[late + 3 :]]
    # bf16 gradients: the weight's is made and dies first; its list is emptied while the reduced gradient is made.
    wanted = swapped(wanted, (("+", 510), ("+", 261_120)), (("-", 510), ("-", 261_120)))
    wanted = swapped(wanted, (("-", 510), ("+", 262_656)), (("+", 1_024), ("+", 262_144)))
    backward = wanted.index(("+", 526_336, "D"))
    wanted[backward + 1 : backward + 4] = [("-", 262_144, "D"), ("+", 263_168, "RS"), ("-", 1_024, "D")]
    assert found.lines["step 2"] == wanted
    assert found.persistent == example.persistent
    assert found.peak == example.peak[:2]
    assert found.waiting == set()  # nothing is recorded on another stream


def test_fsdp1() -> None:
    example = examples()["E7"]
    events = captured(
        {"model": MODEL, "strategy": "fsdp1", "world": 2, "optimizer": "adamw-fused", "autocast": "bf16"}
    )
    found = run(events, {0: "D", 1: "U", 2: "PB", 3: "PU"})
    # The example begins with the shards; here each unit is made, flattened and cut, one after the other.
    made = list(itertools.accumulate(size if sign == "+" else -size for sign, size in found.sizes("init")))
    assert made[-1] == example.peaks["init"][0]
    assert [one for one in found.lines["init"] if one in expected(example, "init")] == expected(example, "init")
    assert found.lines["step 2"] == expected(example, "step 2")
