"""The worked examples of methods that PyTorch itself has, against captures of its own code: E1, E3, E6 and E7.

The examples are arithmetic made by reading; where the code that ran does otherwise, the test says so (`rewritten`, and
what is added to a number), and compares everything else exactly.
"""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("torch")

from tests.support.captured_examples import captured, expected, rewritten, run
from tests.support.worked_examples import examples

MODEL = "tests.support.worked_models:mlp"
#: A linear layer's backward makes the gradient of its weight before that of its bias (AddmmBackward0 computes for mat1,
#: mat2, then self); the examples have the bias first.
BIAS_FIRST = "+1_020 +522_240 +2_048 +524_288"
WEIGHT_FIRST = "+522_240 +1_020 +524_288 +2_048"


# One GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "optimizer"), [("E1-foreach", "adamw"), ("E1-fused", "adamw-fused")])
def test_adamw(key: str, optimizer: str) -> None:
    example = examples()[key]
    found = run(captured({"model": MODEL, "optimizer": optimizer}), {0: "D"})
    assert found.lines["init"] == expected(example, "init")
    wanted = rewritten(expected(example, "step 2"), BIAS_FIRST, WEIGHT_FIRST)
    if key == "E1-foreach":  # the list of square roots goes from its end
        wanted = [*wanted[:8], *wanted[8:12][::-1], *wanted[12:]]
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
    assert found.lines["init"] == rewritten(
        expected(example, "init"), "+1_020 +1_049_596", "+1_020 +1_049_596 -1_049_596 +1_049_596"
    )
    # Rank 0 tells the others the order of the rebuilt buckets: the numbers of 4 parameters and of buckets, their sizes.
    wanted = rewritten(expected(example, "step 2"), "-1_049_596", "+20 +8 -8 -20 -1_049_596")
    if key == "E3":
        wanted = rewritten(wanted, BIAS_FIRST, WEIGHT_FIRST)
    else:  # a gradient dies when it has been copied into the bucket, and by then both of a layer are there
        one_by_one = "+1_020 -1_020 +522_240 -522_240 +2_048 -2_048 +524_288 -524_288"
        wanted = rewritten(wanted, one_by_one, "+522_240 +1_020 -1_020 -522_240 +524_288 +2_048 -2_048 -524_288")
    assert found.lines["step 2"] == wanted
    assert found.persistent == example.persistent
    assert found.peaks["init"] == example.peaks["init"][:2]
    assert found.peaks["step 1"] == example.peaks["step-1"][:2]
    more = 2_048 if key == "E3-view" else 0  # the bias' gradient beside the weight's
    assert found.peaks["step 2"] == tuple(one + more for one in example.peaks["step-2"][:2])


# FSDP ----------------------------------------------------------------------------------------------------------------

JOB = {"model": MODEL, "world": 2, "optimizer": "adamw-fused", "autocast": "bf16"}


def test_fsdp2() -> None:
    example = examples()["E6"]
    found = run(captured({**JOB, "strategy": "fsdp2"}), {0: "D", 1: "CI", 2: "AG", 3: "RS"})
    assert found.lines["init"] == expected(example, "init")
    wanted = expected(example, "step 2")
    # The first layer's gathered block goes when the second's has been copied out, not before.
    wanted = rewritten(wanted, "-263_168:CI +262_144 +512", "+262_144 +512 -263_168:CI")
    # The gradient of a weight is there before that of its bias; the latter dies after the reduced one is made.
    wanted = rewritten(wanted, "+510 +261_120", "+261_120 +510")
    wanted = rewritten(wanted, "-510 -261_120 +262_656:RS", "-261_120 +262_656:RS -510")
    wanted = rewritten(wanted, "-263_168:CI +1_024 +262_144", "-263_168:CI +262_144 +1_024")
    wanted = rewritten(wanted, "-1_024 -262_144 +263_168:RS", "-262_144 +263_168:RS -1_024")
    assert found.lines["step 2"] == wanted
    assert found.persistent == example.persistent
    assert found.peak == example.peak[:2]
    assert found.late == example.peak[2]
    for part in ("init", "step 1", "step 2"):
        assert found.peaks[part] == example.peaks[part.replace(" ", "-")][:2]
    assert found.waiting == set()  # FSDP2 records nothing on other streams


def test_fsdp1() -> None:
    example = examples()["E7"]
    found = run(captured({**JOB, "strategy": "fsdp1", "sync": False}), {0: "D", 1: "U", 2: "PB", 3: "PU"})
    # The example begins with the shards; here each unit is made, flattened and cut, one after the other.
    made = found.lines["init"]
    shards = expected(example, "init")
    assert [line for line in made if line in shards] == shards
    assert sum(size if sign == "+" else -size for sign, size, _ in made) == example.peaks["init"][0]
    wanted = expected(example, "step 2")
    # Reduced gradients stay in the flat parameter until the next forward: zero_grad drops views of them.
    wanted = [("-", 263_168, "PB"), ("-", 261_632, "PB"), *wanted[:-2]]
    # The flat gradients are made on the stream on which the views were (autograd goes back on forward's streams).
    wanted = rewritten(
        wanted,
        "+510 +261_120 +261_632 -510 -261_120 -261_632:U",
        "+261_120 +510 +261_632:U -261_120 -510 -261_632:U",
    )
    wanted = rewritten(wanted, "-523_264:PB -261_632", "-523_264:PB -261_632:U")
    wanted = rewritten(
        wanted,
        "+1_024 +262_144 +263_168 -1_024 -262_144 -263_168:U",
        "+262_144 +1_024 +263_168:U -262_144 -1_024 -263_168:U",
    )
    wanted = rewritten(wanted, "-526_336:PB -263_168", "-526_336:PB -263_168:U")
    assert found.lines["step 2"] == wanted
    # The example has no step counters (4 bytes, 512 in a block, for each of the two tensors that rank 0 has a part of).
    kept = example.persistent[0] + 263_168 + 261_632
    assert found.persistent == (kept + 8, kept + 1_024)
    assert found.peak == (example.peak[0] + 8, example.peak[1] + 1_024)
    # All that the example has waiting waits; so do gradients that the flat one on the other stream was made of.
    waiting = {(263_168, "U"), (261_632, "U"), (131_584, "PU"), (130_816, "PU")}
    gradients = {(261_120, "D"), (510, "D"), (262_144, "D"), (1_024, "D")}
    assert found.waiting == waiting | gradients
    # The host waits at every gather (limit_all_gathers), which the example leaves out; after the last one wait the
    # first layer's cast, the second's gradients and flat gradient, and the first's gradients; not the gathered
    # parameters, which backward frees on their own stream.
    assert found.late == found.peak[1] + 131_584 + 261_632 + 261_632 + 263_168
