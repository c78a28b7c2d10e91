"""DDP's buckets: torch's own assignment where torch is there, hand-made cases, and what always holds."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.buckets import CAP, FIRST, Gradient, assign, first_buckets, limits, rebuilt_buckets
from tests.worked_examples import SHAPES, examples

MIB = 2**20
SIZES = {"float32": 4, "bfloat16": 2, "float64": 8}


def gradient(elements: int, dtype: str = "float32") -> Gradient:
    return Gradient(f"g{elements}", elements, dtype, SIZES[dtype])


def test_first_iteration_has_one_bucket_a_dtype() -> None:
    mine = [gradient(5), gradient(7, "bfloat16"), gradient(9)]
    assert [(bucket.members, bucket.bytes) for bucket in first_buckets(mine)] == [((1,), 14), ((0, 2), 56)]


def test_unused_parameters_ask_for_buckets_from_the_start() -> None:
    mine = [gradient(MIB) for _ in range(9)]  # 4 MiB each
    found = first_buckets(mine, find_unused=True)
    assert [bucket.members for bucket in found] == [(8,), (1, 2, 3, 4, 5, 6, 7), (0,)]
    assert [bucket.bytes for bucket in found] == [4 * MIB, 28 * MIB, 4 * MIB]


def test_rebuilt_in_the_order_of_readiness() -> None:
    mine = [gradient(MIB) for _ in range(9)]
    found = rebuilt_buckets(mine, tuple(reversed(range(9))))
    assert [bucket.members for bucket in found] == [(8,), (7, 6, 5, 4, 3, 2, 1), (0,)]
    with pytest.raises(ValueError, match="is not one of the 9 given"):
        rebuilt_buckets(mine, (0, 1))


def test_caps() -> None:
    assert limits() == (FIRST, CAP) == (1_048_576, 26_214_400)
    assert limits(1000) == (1000, 1000)
    with pytest.raises(ValueError, match="at least one limit"):
        assign([], ())


def test_buckets_of_the_worked_example() -> None:
    # A cap of 524,288 bytes; gradients are ready b2, w2, b1, w1.
    names = list(SHAPES)
    mine = [
        Gradient(name, shape[0] * (shape[1] if len(shape) > 1 else 1), "float32", 4) for name, shape in SHAPES.items()
    ]
    ready = [names.index(name) for name in ("b2", "w2", "b1", "w1")]
    born = [size for sign, name, size in examples()["E3"].lines("step 2 forward") if sign == "+" and "bucket" in name]
    assert [bucket.bytes for bucket in rebuilt_buckets(mine, ready, cap=524_288)] == born == [525_308, 524_288]


GRADIENTS = st.lists(st.tuples(st.integers(1, 400), st.sampled_from(sorted(SIZES))), max_size=30)
LIMITS = st.lists(st.integers(1, 3000), min_size=1, max_size=3)


@given(GRADIENTS, LIMITS)
def test_every_gradient_is_in_one_bucket(drawn: list[tuple[int, str]], bounds: list[int]) -> None:
    mine = [gradient(*one) for one in drawn]
    found = assign(mine, bounds)
    assert sorted(member for bucket in found for member in bucket.members) == list(range(len(mine)))
    for bucket in found:
        assert {mine[member].dtype for member in bucket.members} == {bucket.dtype}
        assert bucket.bytes == sum(mine[member].bytes for member in bucket.members)
        assert bucket.bytes - mine[bucket.members[-1]].bytes < max(bounds)  # it closed as soon as it was full


@given(GRADIENTS, LIMITS, st.randoms(use_true_random=False), st.booleans())
def test_as_torch_assigns(drawn: list[tuple[int, str]], bounds: list[int], random: object, ready: bool) -> None:
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    mine = [gradient(*one) for one in drawn]
    tensors = [torch.empty(one.elements, dtype=getattr(torch, one.dtype)) for one in mine]
    order = list(range(len(mine)))
    random.shuffle(order)  # type: ignore[attr-defined]
    # Remaining buckets of several dtypes come out in the order of a hash table there, unless they are sorted.
    one = len({gradient.dtype for gradient in mine}) <= 1
    if not mine:
        return
    if ready and one:
        theirs, _ = torch.distributed._compute_bucket_assignment_by_size(
            [tensors[index] for index in order], bounds, [False] * len(mine), order
        )
        found = assign([mine[index] for index in order], bounds, order)
    else:
        theirs, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, bounds)
        found = assign(mine, bounds)
    assert [list(bucket.members) for bucket in found] == theirs


def test_one_bucket_as_torch_assigns() -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.empty(size) for size in (3, 4, 5)]
    theirs, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, [sys.maxsize])
    found = first_buckets([gradient(size) for size in (3, 4, 5)])
    assert [list(bucket.members) for bucket in found] == theirs == [[0, 1, 2]]
