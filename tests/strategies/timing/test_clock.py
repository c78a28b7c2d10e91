"""Durations: published figures of GPUs and links, kernels and collectives by hand, and what always holds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph.hardware.gpus import GPUS, gpu
from strategies.timing.clock import KINDS, Clock, Topology, collective_ns
from strategies.timing.links import LINKS, link
from tests.support.step_graphs import Writer
from traces.errors import ConfigError

MIB = 2**20
A100 = gpu("A100-80GB")
NVLINK = link("nvlink3")


def kernel_ns(card: str, flops: int, moved: int, dtype: str = "float32") -> int:
    """How long a kernel lasts that reads a tensor of `dtype`, as the events of a step graph have it."""
    writer = Writer()
    read = writer.alloc(512, dtype=dtype)
    writer.operator("aten.mm.default", [read], flops=flops, moved=moved)
    (found,) = Clock.of(card).speed().kernels_ns(writer.graph()).tolist()
    return int(found)


@given(st.integers(0, 10**15), st.integers(0, 10**11), st.sampled_from(["float32", "bfloat16", "float64", "int64"]))
def test_one_operator_lasts_as_long_as_in_a_graph(flops: int, moved: int, dtype: str) -> None:
    assert Clock.of("A100-80GB").speed().kernel_ns(flops, moved, dtype) == kernel_ns("A100-80GB", flops, moved, dtype)


def test_every_card_has_speeds() -> None:
    for card in GPUS.values():
        assert card.link in LINKS
        assert card.architecture.pcie in LINKS
        assert card.architecture.infiniband in LINKS
        assert card.half >= card.single >= card.double > 0
    assert all(0 < way.efficiency <= 1 and way.source for way in LINKS.values())


def test_flops_by_dtype() -> None:
    assert A100.flops("bfloat16") == A100.flops("float16") == 312e12
    assert A100.flops("float32") == 19.5e12
    assert gpu("V100-16GB").flops("bfloat16") == 15.7e12
    assert gpu("V100-16GB").flops("int8") == 15.7e12
    assert gpu("H100-80GB").flops("float8_e4m3fn") == 1978.9e12


def test_large_matrices_are_bound_by_arithmetic() -> None:
    # 8192^3 in bf16: 2 * 8192^3 / (312e12 * 0.75) = 4.70 ms; its 402 MB take 0.23 ms.
    size = 8192
    assert kernel_ns("A100-80GB", 2 * size**3, 3 * size**2 * 2, "bfloat16") == pytest.approx(4.70e6, rel=0.01)


def test_elementwise_is_bound_by_memory() -> None:
    # An addition of 1 GiB tensors in fp32: 3 GiB at 0.85 of 2,039 GB/s.
    assert kernel_ns("A100-80GB", 2**28, 3 * 2**30) == pytest.approx(3 * 2**30 / (0.85 * 2039e9) * 1e9, rel=0.01)


def test_small_kernels_take_the_start() -> None:
    assert kernel_ns("A100-80GB", 0, 0) == 0
    assert 3_000 <= kernel_ns("A100-80GB", 10, 10) <= 3_001


def test_collectives_by_hand() -> None:
    # All-reduce of 1 GiB on 8 GPUs over NVLink 3: 2 * 7 / 8 of it at 240 GB/s, 14 steps of 3.4 us, 8.4 us to start.
    time = 8.4e-6 + 14 * 3.4e-6 + 2 * 7 / 8 * 2**30 / 240e9
    assert collective_ns("all_reduce", 2**30, 8, NVLINK) == pytest.approx(time * 1e9, rel=1e-6)
    gather = collective_ns("all_gather", 2**30, 8, NVLINK)
    assert gather == collective_ns("reduce_scatter", 2**30, 8, NVLINK)
    assert 2 * gather == pytest.approx(time * 1e9, rel=0.01)
    assert collective_ns("send", 240_000, 2, NVLINK) == pytest.approx(8_400 + 3_400 + 1_000)


def test_small_all_reduce_takes_the_tree() -> None:
    # 64 ranks: a ring takes 126 steps, a tree 12 levels.
    tree = 14.0e-6 + 2 * (6 * 3.4e-6 + 1024 / 240e9)
    assert collective_ns("all_reduce", 1024, 64, NVLINK) == pytest.approx(tree * 1e9, abs=1)


def test_groups_across_machines_go_over_the_network() -> None:
    clock = Clock.of("A100-80GB")
    inside = clock.collective("all_gather", 2**30, tuple(range(8)))
    across = clock.collective("all_gather", 2**30, tuple(range(0, 64, 8)))
    assert across > 10 * inside
    small = Clock.of("A100-80GB", machine=4)
    assert small.collective("all_gather", MIB, (3, 4)) > clock.collective("all_gather", MIB, (3, 4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Clock.of("A101"), "unknown GPU 'A101'; the nearest is 'A10"),
        (lambda: link("nvlink9"), "no speeds are known of link 'nvlink9'; the nearest is nvlink"),
        (lambda: collective_ns("allreduce", 1, 2, NVLINK), "no collective 'allreduce' is known; these are: all_reduce"),
        (lambda: Topology.of("T4-16GB", machine=0), "a machine of 0 GPUs"),
    ],
)
def test_bad_names_are_one_line(call: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.integers(0, 10**15), st.integers(0, 10**12), st.integers(0, 10**15), st.sampled_from(sorted(GPUS)))
def test_more_work_takes_no_less_time(flops: int, moved: int, more: int, name: str) -> None:
    for dtype in ("float32", "bfloat16"):
        least = kernel_ns(name, flops, moved, dtype)
        assert kernel_ns(name, flops + more, moved, dtype) >= least
        assert kernel_ns(name, flops, moved + more, dtype) >= least


@given(st.sampled_from(KINDS), st.integers(0, 2**40), st.integers(1, 512), st.sampled_from(sorted(LINKS)))
def test_collectives_are_no_faster_than_their_bytes(kind: str, size: int, ranks: int, name: str) -> None:
    way = link(name)
    time = collective_ns(kind, size, ranks, way)
    if ranks == 1 or size == 0:
        assert time == 0
    else:
        assert time >= (ranks - 1) / ranks * size / way.bandwidth * 1e9 - 1
        assert collective_ns(kind, size + 1000, ranks, way) >= time
