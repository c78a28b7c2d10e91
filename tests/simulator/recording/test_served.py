"""What a program sees of the allocator that serves it: PyTorch's own answers, and PyTorch's own error."""

from __future__ import annotations

import gc
import io
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from graph.errors import CaptureError  # noqa: E402
from graph.fake_cuda import sdpa, stubs  # noqa: E402
from graph.fake_cuda.device import Runtime, fake_cuda  # noqa: E402
from graph.fake_cuda.operators import composed  # noqa: E402
from graph.fake_cuda.ranks.futures import callbacks_on_streams  # noqa: E402
from graph.hardware.profile import profile  # noqa: E402
from graph.host.extensions import triton_stand_in  # noqa: E402
from graph.recorder.checkpoints import Saving  # noqa: E402
from graph.recorder.phases import Phases  # noqa: E402
from graph.recorder.program import ProgramRecorder  # noqa: E402
from simulator.allocator.releases import parse_release  # noqa: E402
from simulator.recording.allocator import LiveAllocator  # noqa: E402
from simulator.recording.history import History  # noqa: E402
from simulator.recording.trace import trace_of  # noqa: E402
from traces.model import Device, Op  # noqa: E402

MIB = 1 << 20
TOTAL = 200 * MIB


@pytest.fixture
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    release = getattr(request, "param", "2.13")
    live = LiveAllocator(Device("A100-80GB", TOTAL), parse_release(release), "", torch.OutOfMemoryError)
    with fake_cuda(profile("A100", release), live) as made:
        made.observer = ProgramRecorder(made, live)
        yield made


def bytes_on_device(size: int) -> Any:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def test_counters_follow_tensors(runtime: Runtime) -> None:
    cuda = torch.cuda
    first = bytes_on_device(30 * MIB)
    assert (cuda.memory_allocated(), cuda.memory_reserved()) == (30 * MIB, 30 * MIB)
    assert cuda.mem_get_info() == (170 * MIB, TOTAL)
    del first
    assert (cuda.memory_allocated(), cuda.max_memory_allocated()) == (0, 30 * MIB)
    cuda.reset_peak_memory_stats()
    assert (cuda.max_memory_allocated(), cuda.max_memory_reserved()) == (0, 30 * MIB)
    cuda.empty_cache()
    assert (cuda.memory_reserved(), torch.accelerator.memory_reserved()) == (0, 0)
    stats = cuda.memory_stats()
    assert (stats["allocation.all.allocated"], stats["segment.all.freed"], stats["num_ooms"]) == (1, 1, 0)
    cuda.reset_accumulated_memory_stats()
    assert cuda.memory_stats()["allocation.all.allocated"] == 0
    assert "PyTorch CUDA memory summary, device ID 0" in cuda.memory_summary()


def test_copies_of_another_dtype_are_cast_on_the_device_if_the_host_does_not_wait(runtime: Runtime) -> None:
    """PyTorch 2.7.1 to 2.13 on the stand-in for CUDA: (peak, allocations)."""
    host = torch.zeros(64, 64)
    for waits, source, expected in (
        (True, host, (8192, 1)),
        (True, host.t(), (16384, 2)),
        (False, host, (24576, 2)),
        (False, host.t(), (24576, 2)),
    ):
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
        source.to("cuda", torch.bfloat16, non_blocking=not waits)
        stats = torch.cuda.memory_stats()
        assert (stats["allocated_bytes.all.peak"], stats["allocation.all.allocated"]) == expected


def test_lists_are_copied_one_by_one_from_the_host(runtime: Runtime) -> None:
    """As recorded: a double for each of the two, one after the other; on the device alone, nothing."""
    there, host = torch.ones(32, 24, device="cuda"), torch.full((32, 24), 7.0, dtype=torch.float64)
    for source, expected in ((host, (2 * there.nbytes, 2)), (there.double(), (0, 0))):
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
        before = torch.cuda.memory_allocated()
        torch._foreach_copy_([there, there], [source, source], non_blocking=True)
        stats = torch.cuda.memory_stats()
        assert (stats["allocated_bytes.all.peak"] - before, stats["allocation.all.allocated"]) == expected


def taken(work: Callable[..., object], *args: Any) -> tuple[int, int]:
    """Allocations of some work, and its peak above what there was before."""
    torch.cuda.reset_accumulated_memory_stats()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work(*args)
    stats = torch.cuda.memory_stats()
    return stats["allocation.all.allocated"], stats["allocated_bytes.all.peak"] - before


def test_what_an_operator_in_place_takes_is_by_its_arguments(runtime: Runtime) -> None:
    """As recorded: a mean counts what comes to each place, a sum does not; a scan along the one row is CUB's."""
    target, source = torch.zeros(5, 5, device="cuda"), torch.zeros(5, 5, device="cuda")
    places = torch.zeros(5, 5, dtype=torch.int64, device="cuda")
    row = torch.zeros(1, 7, device="cuda")

    reductions = [taken(target.scatter_reduce_, 0, places, source, how)[0] for how in ("mean", "sum", "amax")]
    assert reductions == [3, 0, 0]
    assert [taken(row.cumsum_, dim)[0] for dim in (0, 1, 0)] == [0, 1, 0]


def test_operands_that_are_conjugated_are_copied_unless_they_are_transposed(runtime: Runtime) -> None:
    """Allocations as recorded (PyTorch 2.13.0+cu130): the result and the copies."""
    one, two = (torch.zeros(64, 64, device="cuda", dtype=torch.complex64) for _ in range(2))
    _ = one @ two  # takes the workspace

    recorded = {
        lambda: one @ two: 1,
        lambda: one @ two.conj(): 2,
        lambda: one.conj() @ two: 2,
        lambda: one.conj() @ two.conj(): 3,
        lambda: one.mH @ two: 1,
        lambda: one.mT @ two.conj(): 2,
        lambda: one.mT @ two.mH: 1,
        lambda: torch.bmm(one[None], two[None].conj()): 2,
        lambda: torch.baddbmm(one[None], one[None], two[None].conj()): 2,
        lambda: torch.addmm(one[0], one, two.conj()): 2,
        lambda: torch.nn.functional.linear(one, two.conj()): 1,
    }
    assert [taken(work)[0] for work in recorded] == list(recorded.values())


def test_operators_cast_and_reduce_as_recorded(runtime: Runtime) -> None:
    """Allocations and bytes above the start (PyTorch 2.13.0+cu130)."""
    one, two = (torch.rand(1024, 1024, device="cuda") for _ in range(2))
    integers, booleans = one.long(), one.bool()
    small, half, out = integers.to(torch.uint8), one.half(), torch.empty(1024, device="cuda")
    none, found, places = torch.zeros_like(booleans), one.new_empty(0), integers.new_empty(0)
    norm = torch.ops.aten.norm

    recorded = {
        lambda: integers.clamp(min=1e-5): (2, 8388608),
        lambda: torch.clip(booleans, 0, 1): (2, 16777216),
        lambda: one.clamp(0.5, 2): (1, 4194304),
        lambda: torch.dist(one, two): (4, 4195840),
        lambda: integers.clamp_min(0.5): (2, 8388608),
        lambda: integers.clamp_max(0.5): (2, 8388608),
        lambda: norm.ScalarOpt_dim(one, 2, [0]): (3, 8393216),
        lambda: norm.ScalarOpt_dim_dtype(half, 2, [0], False, dtype=torch.float32): (3, 8393216),
        lambda: norm.out(one, 2, [0], False, out=out): (2, 8389120),
        lambda: norm.dtype_out(half, 2, [0], False, dtype=torch.float32, out=out): (2, 8389120),
        lambda: torch.histc(one, 10): (5, 3072),
        lambda: booleans.count_nonzero(0): (4, 25174528),
        lambda: small.trace(): (2, 8704),
        lambda: torch.quantize_per_tensor(one, 0.1, 10, torch.quint8): (1, 1048576),
        lambda: torch.ldexp(half, integers): (1, 2097152),
        lambda: torch.ldexp(one, two): (3, 8388608),
        lambda: torch.ldexp(integers, integers): (3, 8388608),
        lambda: torch.masked_select(one, none, out=found): (3, 18432),
        lambda: torch.nonzero(none, out=places): (3, 18432),
    }
    assert [taken(work) for work in recorded] == list(recorded.values())


def test_much_is_sought_by_sorting(runtime: Runtime) -> None:
    """Allocations and bytes above the start (PyTorch 2.13.0+cu130)."""
    elements, test = (torch.zeros(*shape, dtype=torch.int64, device="cuda") for shape in ((300, 400), (400,)))
    recorded = {
        lambda: torch.isin(elements, test[:5]): (3, 840704),
        lambda: torch.isin(elements, test, assume_unique=True): (9, 5950976),
        lambda: torch.isin(elements, test, assume_unique=True, invert=True): (9, 5950976),
        lambda: torch.isin(elements.float(), test.float().repeat(10), assume_unique=True): (12, 5132800),
    }
    assert [taken(work) for work in recorded] == list(recorded.values())


def test_operators_with_given_results_take_what_those_that_make_them_take(runtime: Runtime) -> None:
    """Allocations and bytes above the start (PyTorch 2.13.0+cu130)."""
    one, places = torch.rand(64, 5000, device="cuda"), torch.zeros(64, 5000, dtype=torch.int64, device="cuda")
    out, counts, drawn = torch.empty_like(one), one.new_empty(10), places.new_empty(64, 20)
    row = torch.zeros(5000, dtype=torch.int64, device="cuda")

    recorded = {
        lambda: torch.sort(one, out=(out, places)): (5, 10356224),
        lambda: torch.msort(one, out=out): (2, 2560512),
        lambda: torch.multinomial(one, 20, out=drawn): (13, 1287168),
        lambda: torch.multinomial(one, 20, True, out=drawn): (3, 3840000),
        lambda: torch.normal(one, one, out=out): (4, 1536),
        lambda: torch.normal(0.0, one, out=out): (5, 1536),
        lambda: torch.histc(one, 10, out=counts): (5, 2560),
        lambda: torch.renorm(one, 2, 0, 1.0, out=out): (1, 512),
        lambda: torch.scatter_reduce(one, 0, places, one, "mean", out=out): (3, 2880000),
        lambda: torch.index_reduce(one, 1, row, one, "mean", out=out): (3, 2560000),
        lambda: one.mvlgamma_(2): (3, 3840000),
    }
    assert [taken(work) for work in recorded] == list(recorded.values())
    torch.mode(one, 0, out=(out[0], places[0]))  # it has no kernel for CUDA of its own


@pytest.mark.parametrize(
    ("runtime", "recorded"),
    [
        ("2.11", [9216, 6 << 20, 13312, 8 << 20, 13312, 13312, 4096]),
        ("2.13", [9216, 4 << 20, 14336, 6 << 20, 13312, 12288, 4096]),
        ("2.15", [8192, 4 << 20, 13312, 6 << 20, 13312, 12288, 4096]),
    ],
    indirect=["runtime"],
)
def test_seeds_of_graphs_are_the_releases(runtime: Runtime, recorded: list[int]) -> None:
    """What PyTorch 2.11.0, 2.13.0 and 2.15.0 (CUDA wheels) had: up to 2.11 all graphs share seeds on the stream that is
    captured, until the last is gone; from 2.14 on only those have some that draw random numbers."""
    cuda, one = torch.cuda, torch.zeros(1000, device="cuda")
    found: list[int] = []
    graphs: list[Any] = []
    kept: list[Any] = []
    works: list[Callable[[], Any]] = [lambda: one * 2, lambda: torch.bernoulli(one)]
    for work in works:
        graph: Any = cuda.CUDAGraph
        graphs.append(graph())
        with cuda.graph(graphs[-1]):
            kept.append(work())
        found += [cuda.memory_allocated(), cuda.memory_reserved()]
    for graph in graphs:
        graph.reset()
        found.append(cuda.memory_allocated())
    del graph
    graphs.clear()
    kept.clear()
    assert [*found, cuda.memory_allocated()] == recorded


def test_powers_of_ldexp_have_the_dtype_of_what_is_scaled(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocations and bytes above the start (PyTorch 2.8.0+cu128, before it had a kernel for them)."""
    monkeypatch.setattr(composed, "_scales_at_once", lambda: False)
    half, integers = (torch.zeros(1024, 1024, device="cuda", dtype=dtype) for dtype in (torch.half, torch.int64))
    assert taken(lambda: torch.ldexp(half, integers)) == (3, 4194304)


def test_draws_with_replacement_need_an_array_less_since_2_15(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocations and bytes above the start (PyTorch 2.14.1+cu130, then 2.15.0+cu130)."""
    rows = torch.rand(4, 1000, device="cuda")
    assert taken(lambda: torch.multinomial(rows, 200, True)) == (4, 55808)
    monkeypatch.setattr(runtime, "profile", profile("A100", "2.15"))
    assert taken(lambda: torch.multinomial(rows, 200, True)) == (3, 39424)


def test_images_with_gaps_are_copied_where_a_kernel_wants_their_channels_last(runtime: Runtime) -> None:
    """Allocations and bytes above the start (PyTorch 2.13.0+cu130) of a pyramid's level, cut out of tokens."""
    functional = torch.nn.functional

    def level(channels: int) -> Any:
        return torch.empty(2, 149, channels, device="cuda")[:, :144].transpose(1, 2).view(2, channels, 12, 12)

    many, few = level(32), level(8)
    recorded = {
        lambda: functional.interpolate(many, size=(24, 24), mode="bilinear"): (2, 184320),
        lambda: functional.interpolate(many, size=(12, 12), mode="bilinear"): (1, 36864),
        lambda: functional.interpolate(many.contiguous(), size=(24, 24), mode="bilinear"): (2, 184320),
        lambda: functional.interpolate(few, size=(24, 24), mode="bilinear"): (1, 36864),
        lambda: functional.interpolate(many, size=(24, 24), mode="nearest"): (2, 184320),
        lambda: functional.interpolate(many, size=(12, 12), mode="nearest"): (1, 36864),
        lambda: functional.interpolate(many, size=(12, 12), mode="nearest-exact"): (1, 36864),
        lambda: functional.adaptive_avg_pool2d(many, 3): (1, 2560),
        lambda: functional.interpolate(many, size=(5, 5), mode="area"): (1, 6656),
    }
    assert [taken(work) for work in recorded] == list(recorded.values())
    assert functional.rrelu(many, training=True).stride() == (4608, 144, 12, 1)


def test_attention_of_an_expanded_query_lies_by_rows(runtime: Runtime) -> None:
    """As PyTorch 2.13.0+cu130 has it."""
    sdpa.install(runtime)
    rows = torch.empty(2, 1, 24, device="cuda", dtype=torch.half).expand(2, 32, 24)
    query = rows.unflatten(-1, (3, 8)).transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert out.stride() == (768, 8, 24, 1)


def test_a_loop_that_goes_on_by_what_is_on_the_device_ends(runtime: Runtime) -> None:
    """As of `kornia.filters.canny`, until nothing changes; also where it is called again, and one is in another."""
    values, outer, inner = torch.rand(4, device="cuda"), 0, 0
    for _ in range(2):
        while (values > 0.5).any():
            outer += 1
            while True:
                if not (values > 0.5).any():
                    break
                inner += 1
    assert (outer, inner) == (2 * 99, 2 * 99 * 99)
    assert sum("that it ends after 100 rounds is assumed" in told for told in runtime.assumptions) == 2


def test_columns_by_rows_take_cublas_where_the_result_is_given(runtime: Runtime) -> None:
    """PyTorch 2.13.0+cu130: its workspace stays, one for each stream."""
    columns, rows, result = (torch.zeros(*shape, device="cuda") for shape in ((7, 64, 1), (7, 1, 32), (7, 64, 32)))
    assert taken(torch.bmm, columns, rows) == (1, 57344)
    assert taken(lambda: torch.bmm(columns, rows, out=result)) == (1, 8519680)


def test_selections_factors_and_packed_attention_take_what_they_took(runtime: Runtime) -> None:
    """Allocations and bytes above the start (PyTorch 2.13.0+cu130)."""
    row, rows, matrices = (torch.zeros(*shape, device="cuda") for shape in ((18432,), (64, 10000), (8, 64, 64)))
    tokens = [torch.zeros(count, 256, device="cuda") for count in (50, 90, 30, 170)]
    torch.matmul(matrices, matrices)  # cuBLAS has its workspace

    def attended(dtype: Any) -> None:
        given = torch.nested.nested_tensor(tokens, layout=torch.jagged, dtype=dtype, device="cuda")
        heads = given.unflatten(-1, [4, 64]).transpose(1, 2).detach().requires_grad_()
        gc.collect()

        def work() -> None:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
                out = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
            torch.autograd.grad(out, heads, torch.ones_like(out))

        assert taken(work) == {torch.float32: (14, 2547200), torch.float16: (12, 1676800)}[dtype]

    recorded = {
        lambda: row.topk(5530): (7, 256000),
        lambda: rows.topk(4097): (19, 15233024),
        lambda: rows.t().topk(4097, 0, largest=False): (23, 19428352),
        lambda: rows.topk(4097, sorted=False): (11, 3548160),
        lambda: torch.linalg.lu(matrices): (9, 527360),
        lambda: torch.linalg.lu(matrices[:, :32]): (8, 198144),
        lambda: torch.linalg.lu(matrices[:, :, :32]): (8, 296448),
    }
    assert [taken(work) for work in recorded] == list(recorded.values())
    attended(torch.float32)
    attended(torch.float16)


def test_what_foreach_makes_of_known_numbers_is_known(runtime: Runtime) -> None:
    """As of steps that torch.load(map_location="cuda") has brought to the GPU: optimizers read them."""
    steps = [torch.tensor(2.0).cuda(), torch.tensor(5.0).cuda()]
    torch._foreach_add_(steps, 1)
    torch._foreach_mul_(steps, [2.0, 3.0])
    torch._foreach_add_(steps, [steps[1], torch.rand((), device="cuda")])
    assert steps[0].item() == 24.0
    assert runtime.values.of(steps[1]) is None


def test_a_tensor_that_goes_to_another_process_is_refused(runtime: Runtime) -> None:
    with pytest.raises(CaptureError, match="goes to another process"):
        torch.multiprocessing.reductions.reduce_tensor(torch.zeros(4, device="cuda"))


@pytest.mark.parametrize(("start", "expected"), [(512, 9), (1024, 9)])
def test_gradients_of_slices_without_elements_are_added_in_place(start: int, expected: int, runtime: Runtime) -> None:
    """Allocations as recorded (PyTorch 2.13.0+cu130): LitGPT's rotary embedding has such a slice where all rotates."""
    source = torch.ones(512, 1024, device="cuda", requires_grad=True)
    made = source * 1.0
    torch.cuda.reset_accumulated_memory_stats()
    torch.cat((made * 2, made[:, start:]), 1).sum().backward()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == expected


@pytest.mark.parametrize(
    ("product", "expected"),
    [
        (lambda x: x.prod(1), (17839104, 12)),
        (lambda x: x.prod(), (16778752, 14)),
        (lambda x: x.cumprod(1), (30409728, 17)),
    ],
)
def test_gradients_of_products_are_those_of_numbers_other_than_zero(
    product: Callable[[Any], Any], expected: tuple[int, int], runtime: Runtime
) -> None:
    """Peak and allocations as recorded (PyTorch 2.13.0+cu130, whose booleans read False)."""
    source = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    product(source * 1.0).sum().backward()
    stats = torch.cuda.memory_stats()
    assert (stats["allocated_bytes.all.peak"], stats["allocation.all.allocated"]) == expected
    assert not runtime.assumptions


def test_the_threads_of_autograd_have_let_go_of_their_last_tensors(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each run of the engine, one that fails too, this thread lets its threads on until they wait for work."""
    threads = stubs.threads_of_autograd(os.getpid())
    weight = torch.ones(4, device="cuda", requires_grad=True)
    for _ in range(20):
        weight.sum().backward()
        torch.autograd.grad(weight.sum(), weight)
        with pytest.raises(RuntimeError):
            weight.sum().backward(torch.ones(2, device="cuda"))
        assert {one.read_text().rpartition(") ")[2][0] for one in threads} == {"S"}

    waits: list[float] = []
    states = iter("RRDS")
    monkeypatch.setattr("graph.fake_cuda.stubs.time.sleep", waits.append)
    monkeypatch.setattr(Path, "read_text", lambda path: f"1 (pt_autograd_0) {next(states)} 1")
    monkeypatch.setattr(stubs, "threads_of_autograd", lambda process: [Path("stat")])
    weight.sum().backward()
    assert len(waits) == 4


def test_pinned_memory_says_so(runtime: Runtime) -> None:
    pinned = torch.ones(4).pin_memory()
    assert pinned.is_pinned()
    assert pinned.tolist() == [1, 1, 1, 1]


def test_only_what_was_asked_for_is_pinned(runtime: Runtime) -> None:
    """As of a CUDA build, also where a pinned tensor lay before."""
    on_gpu = torch.ones(300, 300, device="cuda")
    pinned = [on_gpu.to("cpu", non_blocking=True), torch.empty(9, pin_memory=True), torch.ones(4).pin_memory()[1:]]
    assert [one.is_pinned() for one in pinned] == [True] * 3
    loaded = next(iter(DataLoader(torch.ones(8, 4), batch_size=4, pin_memory=True)))
    assert loaded.is_pinned()
    others = [on_gpu.cpu(), loaded.clone(), torch.empty_like(pinned[0]), pinned[1] * 2, torch.ones(300, 300)]
    assert [one.is_pinned() for one in others] == [False] * 5
    assert pinned[0].pin_memory() is pinned[0]
    where = {torch.ones(1000, pin_memory=True).untyped_storage().data_ptr() for _ in range(9)}
    again = [torch.ones(1000) for _ in range(99)]
    assert not any(one.is_pinned() for one in again)
    assert where.isdisjoint(one.untyped_storage().data_ptr() for one in again)


def test_snapshot_has_the_blocks(runtime: Runtime) -> None:
    kept = bytes_on_device(3 * MIB)
    (segment,) = torch.cuda.memory._snapshot()["segments"]
    assert (segment["total_size"], segment["allocated_size"]) == (20 * MIB, 3 * MIB)
    assert [block["state"] for block in segment["blocks"]] == ["active_allocated", "inactive"]
    assert torch.cuda.memory_snapshot() == [segment]
    del kept


def test_a_snapshot_has_a_trace_for_each_device_and_one_of_them_is_its_own() -> None:
    """As of the second rank of two: programs ask for that of their local rank."""
    live = LiveAllocator(Device("A100-80GB", TOTAL), parse_release("2.13"), "", torch.OutOfMemoryError)
    with fake_cuda(profile("A100", "2.13"), live, index=1, count=2) as made:
        made.observer = recorder = ProgramRecorder(made, live)
        live.told = History(lambda: trace_of(live, recorder.labels, {}))
        torch.cuda.memory._record_memory_history()
        kept = bytes_on_device(3 * MIB)
        found = torch.cuda.memory._snapshot()
        assert [len(trace) for trace in found["device_traces"]] == [0, 2]
        assert [segment["device"] for segment in found["segments"]] == [1]
        del kept


def test_cudnn_is_off_for_a_region(runtime: Runtime) -> None:
    """As the losses of Wav2Vec2ForCTC have it; the number of plans that it tries is kept, and put back."""
    with torch.backends.cudnn.flags(enabled=False, benchmark_limit=3):
        assert not torch.backends.cudnn.enabled
        assert 3 in torch.backends.cudnn.set_flags()  # what there is before
    assert torch.backends.cudnn.enabled
    assert 10 in torch.backends.cudnn.set_flags()


def test_exponentials_of_matrices_need_all_terms(runtime: Runtime) -> None:
    matrices = torch.rand(8, 64, 64, device="cuda", requires_grad=True)
    made = torch.linalg.matrix_exp(matrices)
    made.sum().backward()
    assert made.shape == matrices.shape
    assert matrices.grad is not None
    assert any("one that needs all terms and no squares is assumed" in told for told in runtime.assumptions)


def test_a_pool_shows_its_own_segments(runtime: Runtime) -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = bytes_on_device(3 * MIB)
    outside = bytes_on_device(5 * MIB)
    assert [segment["allocated_size"] for segment in pool.snapshot()] == [3 * MIB]
    assert [segment["allocated_size"] for segment in torch.cuda.memory_snapshot()] == [3 * MIB, 5 * MIB]
    del inside, outside


def test_memory_without_a_tensor(runtime: Runtime) -> None:
    """`caching_allocator_alloc`, as frameworks that share memory with PyTorch call it."""
    stream = torch.cuda.Stream()
    taken = [torch.cuda.caching_allocator_alloc(MIB), torch.cuda.caching_allocator_alloc(2 * MIB, stream=stream)]
    assert torch.cuda.memory_allocated() == 3 * MIB
    assert sorted(segment["stream"] for segment in torch.cuda.memory_snapshot()) == [0, stream.cuda_stream]
    for address in taken:
        torch.cuda.caching_allocator_delete(address)
    assert torch.cuda.memory_allocated() == 0


def test_a_history_is_asked_for_in_words_that_are_known(runtime: Runtime) -> None:
    with pytest.raises(RuntimeError, match="expected state to be 'state', 'all', or None"):
        torch.cuda.memory._record_memory_history("some")


def test_a_fraction_limits_the_process(runtime: Runtime) -> None:
    torch.cuda.set_per_process_memory_fraction(0.25)
    assert torch.cuda.get_per_process_memory_fraction() == 0.25
    with pytest.raises(torch.OutOfMemoryError, match=r"is free\. 50\.00 MiB allowed; Of the allocated memory 0 bytes"):
        bytes_on_device(60 * MIB)


def test_where_memory_runs_out(runtime: Runtime) -> None:
    kept = bytes_on_device(150 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        bytes_on_device(60 * MIB)
    assert str(raised.value) == (  # to the end as PyTorch 2.13 has it, where NVML does not answer
        "CUDA out of memory. Tried to allocate 60.00 MiB. GPU 0 has a total capacity of 200.00 MiB of which 50.00 MiB "
        "is free. Of the allocated memory 150.00 MiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
        "Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
        "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )
    assert torch.cuda.memory_stats()["num_ooms"] == 1
    assert torch.cuda.memory_allocated() == kept.nbytes


def test_a_failed_operator_keeps_nothing_alive_while_its_error_is_handled(runtime: Runtime) -> None:
    def operand() -> Any:
        return bytes_on_device(120 * MIB)

    try:
        operand().add(1)
    except torch.OutOfMemoryError:
        assert torch.cuda.memory_allocated() == 0
        assert bytes_on_device(190 * MIB).nbytes == 190 * MIB
    else:
        pytest.fail("it fits")


def test_what_failed_in_backward_is_given_back(runtime: Runtime) -> None:
    x = torch.ones(10 * MIB, device="cuda", requires_grad=True)
    with pytest.raises(torch.OutOfMemoryError):
        (x.exp().exp().exp() * 2).sum().backward()
    assert torch.cuda.memory_allocated() == 40 * MIB


def test_floats_are_finite_and_masks_without_values_take_all(runtime: Runtime) -> None:
    x = torch.randn(100, device="cuda")
    assert not torch.isnan(x).any().item()
    assert torch.isfinite(x).all().item()
    assert not torch.isinf(x.sum()).item()
    assert x.masked_select(x > 0).shape == (100,)
    known = torch.tensor([3, 0, 5], device="cuda")
    assert known[known > 0].shape == (2,)
    (told,) = runtime.assumptions
    assert "asks for elements that are not zero: that all are not is assumed" in told


def test_masks_without_values_take_the_share_that_is_given(runtime: Runtime) -> None:
    runtime.values.share = 0.1
    x = torch.randn(100, device="cuda")
    assert x.masked_select(x > 0).shape == (10,)
    assert (x > 0).nonzero().shape == (10, 1)
    assert x[x > 0].shape == (10,)
    known = torch.tensor([3, 0, 5], device="cuda")
    assert known[known > 0].shape == (2,)
    assert any("that a share of them is not is assumed" in told for told in runtime.assumptions)


def test_a_number_without_value_compares_as_it_reads(runtime: Runtime) -> None:
    norm = torch.randn(100, device="cuda").norm()
    invalid = ~torch.isfinite(norm) | (norm < 0)
    assert not bool(invalid.any())
    assert norm.item() == 0
    assert [bool(one) for one in (norm <= 0, norm > 0, norm == 1, norm < norm + 1)] == [True, False, False, False]
    assert any("how a floating-point number compares: 0.0 in its place" in told for told in runtime.assumptions)


def test_phases_and_steps_are_found(runtime: Runtime) -> None:
    live = runtime.allocators[0]
    assert live is not None
    recorder = runtime.observer
    assert isinstance(recorder, ProgramRecorder)
    phases = Phases(recorder)
    marks: list[tuple[int, int]] = []
    live.mark = lambda phase, step: marks.append((phase, step))  # type: ignore[method-assign]
    net = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    with phases.followed():
        for _ in range(2):
            with torch.no_grad():
                net(torch.ones(2, 8, device="cuda"))
            for _ in range(2):
                net(torch.ones(2, 8, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    load, forward, backward, step, evaluation, _ = range(6)
    once = [evaluation, forward, backward, forward, backward, step]
    steps = [[*((phase, number) for phase in once), (forward, number + 1)] for number in range(2)]
    assert marks == [(load, -1), *steps[0], *steps[1]]
    categories = recorder.labels.names
    found = list(recorder.labels.category.values())
    assert found.count(categories["parameter"]) == 2
    assert found.count(categories["optimizer_state"]) == 4


def test_checkpoints_and_sleep_take_time_for_watchdogs(runtime: Runtime) -> None:
    """NCCL's lets go of what works keep: it looks every 100 ms, in which a host issues 2,000 operators."""
    recorder = runtime.observer
    assert isinstance(recorder, ProgramRecorder)
    with Phases(recorder).followed():
        before = recorder.operators
        torch.save(torch.nn.Linear(4000, 4000, bias=False).state_dict(), io.BytesIO())  # 64 MB
        saved = recorder.operators
        time.sleep(0.01)
        slept = recorder.operators
        thread = threading.Thread(target=time.sleep, args=(0.01,))
        thread.start()
        thread.join()
    assert saved - before > 2000
    assert slept - saved == 200
    assert recorder.operators == slept


def test_what_is_saved_has_its_size_and_no_file_is_overwritten(tmp_path: Path, runtime: Runtime) -> None:
    there = tmp_path / "there.pt"
    there.write_bytes(b"precious")
    save = Saving(torch.save, runtime.values.of)
    tensors = {"weight": torch.ones(1 << 20), "epoch": 3, "batches": torch.tensor(7, device="cuda")}
    for path in (there, tmp_path / "new.pt", tmp_path / "new.pt"):
        save(tensors, path)
    assert there.read_bytes() == b"precious"
    assert (tmp_path / "new.pt").stat().st_size >= 4 << 20
    loaded = torch.load(tmp_path / "new.pt")
    assert (loaded["epoch"], loaded["weight"].shape, loaded["batches"].item()) == (3, (1 << 20,), 7)
    assert os.stat(tmp_path / "new.pt").st_blocks * 512 < 1 << 20


def test_kernels_of_triton_launch_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    @triton_stand_in.autotune(configs=[triton_stand_in.Config({"BLOCK": 64}, num_warps=4)], key=["n"])
    @triton_stand_in.jit
    def kernel(x: object, n: int) -> None:
        ran.append(n)

    kernel[(triton_stand_in.cdiv(100, 64),)](None, 100, BLOCK=triton_stand_in.next_power_of_2(33))
    assert ran == []
    place = triton_stand_in.installed(tmp_path)
    assert (place / "triton" / "__init__.py").read_bytes() == Path(triton_stand_in.__file__).read_bytes()


def test_no_generated_token_ends_its_sequence(runtime: Runtime) -> None:
    """As transformers' `generate` asks: it goes on to the length that it was given."""
    tokens = torch.randn(3, 50, device="cuda").argmax(1)
    ended = torch.isin(tokens, torch.tensor([2, 7]).cuda())
    assert (ended | torch.tensor([False] * 3).cuda()).tolist() == [False] * 3


@pytest.mark.parametrize(("rows", "asked"), [(10, [70, 4, 1, 1023]), (5000, [35000, 4, 17663, 1023])])
def test_a_masked_selection_looks_for_places(runtime: Runtime, rows: int, asked: list[int]) -> None:
    """By a mask that is broadcast and has nothing set: what the CUDA build of 2.13 asks for on an A100."""
    source, mask = torch.empty(rows, 7, device="cuda"), torch.zeros(rows, 1, dtype=torch.bool, device="cuda")
    before = len(runtime.allocators[0].history)  # type: ignore[attr-defined]
    assert source.masked_select(mask).shape == (0,)
    events = runtime.allocators[0].history[before:]  # type: ignore[attr-defined]
    assert [size for op, _, size, _ in events.tolist() if op == Op.ALLOC] == asked


def test_what_a_future_is_given_runs_on_a_stream_of_its_own(runtime: Runtime) -> None:
    """As recorded (PyTorch 2.13.0+cu130, two ranks, the callback of an all-reduce): a cuBLAS workspace for each, and no
    block of one stream for the next while the one that waited may still read it."""
    square = torch.zeros(1024, 1024, device="cuda")
    _ = square @ square
    found = []
    with callbacks_on_streams():
        for _ in range(4):
            future: Any = torch.futures.Future()
            future.set_result([square])
            product = future.then(lambda done: done.value()[0] @ square).then(lambda done: done.value()).wait()
            found.append((torch.cuda.memory_allocated() - product.nbytes, torch.cuda.memory_reserved()))
            del product
            torch.cuda.synchronize()
    assert [allocated for allocated, _ in found] == [21233664, 29753344, 38273024, 46792704]
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_callbacks_of_what_is_not_on_the_device_are_left_alone(runtime: Runtime) -> None:
    with callbacks_on_streams():
        future: Any = torch.futures.Future()
        future.set_result([torch.zeros(2)])
        assert future.then(lambda done: torch.cuda.current_stream().stream_id).wait() == 0
