"""Operators of PyTorch's own database allocate on the fake device what they allocated on a CUDA build."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("expecttest")  # the database imports it

import torch

from tests.accuracy.opinfo import BY_VALUE, Found, compared, measured, recording

#: Some of each mechanism: plain, copies into a memory format, scratch, kernels made of other operators. None uses
#: cuBLAS, whose workspace goes to whoever is first.
NAMES = frozenset(
    [
        "abs",
        "add",
        "cumsum",
        "sort",
        "topk",
        "var_mean",
        "softmax",
        "cfloat",
        "equal",
        "unique_consecutive",
        "renorm",
        "median",
        "nanmedian",
        "mode",
        "multinomial",
        "bincount",
        "count_nonzero",
        "normal",
        "unfold",
        "scatter_reduce.mean",
        "index_reduce.mean",
        "lu_unpack",
        "_segment_reduce.lengths",
        "_segment_reduce.offsets",
        "nn.functional.avg_pool2d",
        "nn.functional.max_pool3d",
        "nn.functional.adaptive_avg_pool2d",
        "nn.functional.interpolate.bilinear",
        "nn.functional.pad.reflect",
        "nn.functional.multi_margin_loss",
        "nn.functional.multilabel_margin_loss",
        "nn.functional.fractional_max_pool3d",
        "logcumsumexp",
        "jiterator_binary",
        "jiterator_2inputs_2outputs",
        "nn.functional.conv_transpose1d",
        "masked_select",
    ]
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_operators_allocate_what_a_cuda_build_did(dtype: str) -> None:
    recorded = recording(dtype)
    assert recorded.keys() >= NAMES
    found = compared(recorded, measured(NAMES, getattr(torch, dtype)))
    assert not found.lines
    assert found.equal > 100
    assert found.by_value <= 4  # masked_select: its mask was read as zeros


STRIDED = frozenset(
    f"nn.functional.{name}"
    for name in ("layer_norm", "rms_norm", "cross_entropy", "embedding", "max_unpool2d", "multilabel_margin_loss")
) | {"sort", "argsort", "cummax", "kthvalue", "bucketize", "searchsorted", "_chunk_cat", "lu_unpack", "argmax", "histc"}


def test_operands_with_gaps_take_what_a_cuda_build_took() -> None:
    recorded = recording("float32-strided")
    assert recorded.keys() >= STRIDED
    found = compared(recorded, measured(STRIDED, torch.float32, strided=True))
    assert not found.lines
    assert found.equal > 50


def test_samples_are_judged_by_figures_and_then_by_shapes() -> None:
    recorded = {"add": [[512, 1], [1024, 2], "an error"], "nonzero": [[512, 1], [512, 1]], "lost": [[512, 1]]}
    assert "nonzero" in BY_VALUE
    ours = {"add": [[512, 1], [1024, 3], [512, 1]], "nonzero": [[1024, 2, 1], [1024, 2, 0]], "lost": ["Error: no"]}
    found = compared(recorded, ours)
    assert (found.equal, found.differ, found.died, found.by_value) == (1, 2, 1, 1)
    assert found.lines[0] == "add 1: 1,024 bytes in 3 for 1,024 bytes in 2"
    assert found.summary.startswith("1 of 4 samples equal (25.0%), 2 differ, 1 die; 1 more")
    assert Found().summary.startswith("0 of 0 samples equal (100.0%)")
