"""The CUDA device that is not there: it does what a CUDA build was recorded to do, and goes without a trace."""

from __future__ import annotations

import json
import math
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from graph.errors import CaptureError, UnsupportedTorch
from graph.fake_cuda import device as fake_cuda
from graph.fake_cuda import self_check as fake_check
from graph.fake_cuda.device import Runtime
from graph.fake_cuda.operators import native
from graph.fake_cuda.operators.native import cuda_operators
from graph.fake_cuda.served import unwound
from graph.fake_cuda.shapes import Shapes
from graph.fake_cuda.stubs import FIRST_POINT
from graph.fake_cuda.torch_private import compile_with, compiling
from graph.hardware.profile import profile
from tests.places import DATA
from tests.support import recorded_steps
from traces.release import version_of

A100 = profile("A100", "2.13")


class Log:
    """Everything that the device tells, in order."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.operators: list[str] = []
        self.events: list[str] = []
        self.threads: dict[str, int] = {}
        self.memos: dict[str, list[Any]] = {}
        self.told: list[tuple[Any, ...]] = []
        self._bytes: dict[int, int] = {}

    def operator(self, func: Any, args: Any, kwargs: Any, out: Any, born: list[int], memo: Any) -> None:
        name = str(func).removeprefix("aten.").removesuffix(".default")
        self.operators.append(name)
        self.threads[name] = threading.get_ident()
        self.memos.setdefault(name, []).append(memo)
        for storage in born:
            self._bytes[storage] = self.runtime.bytes(storage)
            self.events.append(f"+{self._bytes[storage]}")

    def freed(self, storage: int) -> None:
        self.events.append(f"-{self._bytes.get(storage, 0)}")

    def resized(self, storage: int, size: int) -> None:
        self.told.append(("resized", storage, size))

    def record_stream(self, storage: int, stream: int) -> None:
        self.told.append(("record_stream", storage, stream))

    def wait_stream(self, stream: int, on: int) -> None:
        self.told.append(("wait_stream", stream, on))

    def reached(self, stream: int) -> None:
        self.told.append(("reached", stream))


def _backward(result: torch.Tensor) -> None:
    torch.autograd.backward(result.sum())


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with fake_cuda.fake_cuda(A100) as runtime:
        yield runtime
        runtime.observer = None


@pytest.fixture
def log(runtime: Runtime) -> Log:
    log = Log(runtime)
    runtime.observer = log
    return log


# ------------------------------------------------------------------------------------- what a CUDA build was seen to do


def test_a_recorded_step_runs_the_same(log: Log) -> None:
    recorded_steps.half_precision_step()
    assert recorded_steps.runs(log.events) == recorded_steps.RECORDED.split()


def test_the_step_that_is_checked_at_first_use(runtime: Runtime) -> None:
    fake_check.verify(runtime)
    assert not runtime.memory.live


@pytest.mark.parametrize("missing", ["silu_backward", "_fused_rms_norm", "native_dropout"])
def test_a_missing_kernel_is_noticed(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = tuple(name for name in native.names() if not name.startswith(missing))
    monkeypatch.setattr(fake_cuda, "names", lambda: names)
    monkeypatch.setattr(fake_cuda, "_verified", [])
    reason = pytest.raises(UnsupportedTorch, match=r"PyTorch 2\.\d+\S* (does not behave|cannot be captured)")
    with reason, fake_cuda.fake_cuda(A100):
        pytest.fail("entered")
    assert fake_cuda._verified == []


def test_gradients_that_accumulate_out_of_place_are_noticed(runtime: Runtime) -> None:
    """A mode in the stack makes every tensor look like a subclass to autograd, which then adds out of place."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Through(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    through: Any = Through
    with through(), pytest.raises(UnsupportedTorch, match=r"at event \d+ of a known training step"):
        fake_check.verify(runtime)


# -------------------------------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize(
    "first",
    [
        lambda: torch.cuda.get_device_name(),
        lambda: torch.cuda.get_rng_state_all(),
        lambda: torch.cuda.initial_seed(),
        lambda: torch.ones(2, device="cuda"),
    ],
    ids=["name", "states", "seed", "tensor"],
)
def test_cuda_is_initialized_by_what_needs_it(runtime: Runtime, first: Callable[[], object]) -> None:
    """As PyTorch 2.13's CUDA build says."""
    assert (torch.cuda.is_available(), torch.cuda.device_count()) == (True, 1)
    initialized: Callable[[], bool] = torch.cuda.is_initialized
    torch.cuda.manual_seed_all(1)
    assert not initialized()
    first()
    assert initialized()


def test_flash_attention_is_there(runtime: Runtime) -> None:
    """As in every CUDA build of PyTorch: xformers asks for it when it is imported, and makes its operators of it."""
    assert torch.backends.cuda.is_flash_attention_available()


def test_dynamo_sees_no_frame_of_a_kernel() -> None:
    """It would compile what it meets there, or end the program where the whole of a function is to be one graph."""
    seen: list[object] = []
    before = compile_with(False)
    try:
        unwound(lambda: seen.append(compiling()))()
        seen.append(compiling())
    finally:
        compile_with(before)
    assert seen == [None, False]


def test_a_kernel_of_ones_own_in_cuda_is_launched_and_does_nothing(runtime: Runtime) -> None:
    """torch.cuda._compile_kernel (since 2.8): the launch's checks are PyTorch's, the driver's answers ours."""
    compile_kernel: Any = getattr(torch.cuda, "_compile_kernel", None)
    if compile_kernel is None:
        pytest.skip("this release compiles no kernels")
    kernel = compile_kernel('extern "C" __global__ void add(float *a, int n) {}', "add", compute_capability="80")
    given = torch.empty(1024, device="cuda")
    before = runtime.allocated()
    kernel((4, 1, 1), (256, 1, 1), (given, 1024), stream=torch.cuda.current_stream())
    kernel((4, 1, 1), (256, 1, 1), (given, 1024))
    assert runtime.allocated() == before
    with pytest.raises(ValueError, match="must be CUDA tensors"):
        kernel((4, 1, 1), (256, 1, 1), (torch.empty(4), 4))


def test_pytorch_says_how_it_was_built(runtime: Runtime) -> None:
    """Programs put it beside their results."""
    assert torch.__config__.show().startswith("PyTorch built with:")


def test_tensors_are_plain_and_on_the_gpu(runtime: Runtime) -> None:
    tensor = torch.empty(3, 4, device="cuda")
    assert type(tensor) is torch.Tensor
    assert tensor.is_cuda
    assert tensor.device == torch.device("cuda", 0)
    assert torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.AutocastCUDA)
    assert nn.Linear(2, 3).to("cuda").weight.device.type == "cuda"
    assert torch.zeros(2).device.type == "cpu"


def test_storages_are_numbered_in_order_of_birth(runtime: Runtime) -> None:
    one, two = torch.empty(3, device="cuda"), torch.empty(5, dtype=torch.float16, device="cuda")
    none = torch.empty(0, device="cuda")
    view = two[2:].view(torch.int16)
    assert [runtime.storage(tensor) for tensor in (one, two, none, view)] == [1, 2, 0, 2]
    assert (runtime.bytes(1), runtime.bytes(2), runtime.allocated()) == (12, 10, 22)
    del one, two
    assert runtime.memory.live == {2: 10}


def test_large_storages_do_not_meet(runtime: Runtime) -> None:
    large = torch.empty(1 << 40, dtype=torch.uint8, device="cuda")  # 1 TiB
    after = torch.empty(1, device="cuda")
    number = runtime.storage(large)
    assert runtime.bytes(number) == 1 << 40
    assert large.data_ptr() + large.nbytes <= after.data_ptr()


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.bool, torch.bfloat16, torch.complex64, torch.int8, torch.uint16, torch.float64],
    ids=str,
)
def test_dtypes(dtype: Any, runtime: Runtime) -> None:
    tensor = torch.empty_strided((2, 3), (1, 2), dtype=dtype, device="cuda")
    assert (tensor.dtype, tensor.stride(), runtime.allocated()) == (dtype, (1, 2), 6 * dtype.itemsize)


def test_births_and_deaths_in_order(log: Log) -> None:
    one = torch.empty(100, device="cuda")
    two = one + 1
    del one
    two += 2
    three = two.view(10, 10).t().contiguous()
    del two, three
    assert log.operators == ["empty.memory_format", "add.Tensor", "add_.Tensor", "empty.memory_format", "copy_"]
    assert log.events == ["+400", "+400", "-400", "+400", "-400", "-400"]


def test_an_operator_that_writes_its_result_goes_by_the_one_that_makes_it() -> None:
    """PyTorch has a rule for `_scaled_mm`, none for `_scaled_mm.out`, which compiled programs call."""
    with fake_cuda.fake_cuda(profile("H100", "2.13")) as runtime:
        first, second = (torch.empty(8192, 4096, device="cuda", dtype=torch.float8_e4m3fn) for _ in range(2))
        scale, out = torch.ones((), device="cuda"), torch.empty(0, device="cuda", dtype=torch.bfloat16)
        log = Log(runtime)
        runtime.observer = log
        made = torch._scaled_mm(first, second.t(), scale, scale, out_dtype=torch.bfloat16, out=out)
        assert made is out
        assert made.shape == (8192, 8192)
        assert log.events == [f"+{2 * 8192 * 8192}"]
        runtime.observer = None
        del first, second, scale, out, made


def test_products_with_a_dtype_of_their_own_are_added_to(log: Log) -> None:
    """PyTorch's own rules take `out_dtype` for beta; trl adds chunks of a loss so."""
    half = torch.empty(4, 8, device="cuda", dtype=torch.bfloat16)
    total = torch.empty(4, 4, device="cuda")
    made = torch.addmm(total, half, half.t(), out_dtype=torch.float32)
    assert (made.shape, made.dtype) == ((4, 4), torch.float32)
    assert torch.addmm(total, half, half.t(), out_dtype=torch.float32, out=total) is total
    batch = torch.baddbmm(total[None], half[None], half.t()[None], out_dtype=torch.float32)
    assert (batch.shape, batch.dtype) == ((1, 4, 4), torch.float32)


def test_resizing_allocates_before_it_frees(log: Log) -> None:
    tensor = torch.empty(10, device="cuda")
    tensor.resize_(5)
    tensor.resize_(20)
    assert tensor.shape == (20,)
    out = torch.empty(0, device="cuda")
    torch.add(tensor, 1, out=out)
    assert out.shape == (20,)
    assert log.events == ["+40", "+80", "-40", "+80"]


def test_an_exception_in_flight_survives_the_death_of_storages(log: Log) -> None:
    def fails(tensor: torch.Tensor) -> None:
        held = [tensor + 1, tensor + 2]
        raise KeyError(len(held))

    function: Any = torch.autograd.Function

    class Stop(function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, tensor: Any) -> Any:
            fails(tensor)

    with pytest.raises(KeyError, match="2"):
        Stop.apply(torch.empty(4, device="cuda", requires_grad=True))
    assert log.events[-2:] == ["-16", "-16"]


def test_equal_calls_have_the_same_memo(log: Log) -> None:
    one, two = torch.empty(4, device="cuda"), torch.empty(5, device="cuda")
    for number in (1.0, 2.0):
        one.mul_(number)
        functional.silu(one)
        functional.silu(two)
    first, other, again, _ = log.memos["silu"]
    assert first is again
    assert first is not other
    assert log.memos["mul_.Tensor"][0] is log.memos["mul_.Tensor"][1], "numbers do not matter in place"


# ------------------------------------------------------------------------------------------------------------ operators


def test_flags_make_calls_in_place_of_two_kinds(log: Log) -> None:
    """Accumulating `index_put_` sorts, the plain one does not; a factor that changes from step to step is no matter."""
    target, index, values = (torch.ones(8, device="cuda"), torch.ones(3, device="cuda").long(), torch.ones(3).cuda())
    for accumulate in (False, True):
        torch.ops.aten._index_put_impl_(target, [index], values, accumulate)
    for factor in (2.0, 3.0):
        torch._foreach_mul_([target], factor)
    assert len({id(memo) for memo in log.memos["_index_put_impl_"]}) == 2
    assert len({id(memo) for memo in log.memos["_foreach_mul_.Scalar"]}) == 1


def test_copies_to_the_host_are_cast_there(log: Log) -> None:
    """copy_kernel_cuda (Copy.cu): on the device only if the host does not wait."""
    tensor, host = torch.ones(64, device="cuda"), torch.ones(64, dtype=torch.bfloat16)
    log.events.clear()
    host.copy_(tensor)
    assert log.events == []
    host.copy_(tensor, non_blocking=True)
    assert log.events == ["+128", "-128"]


def test_what_copies_to_the_device_take_is_a_workspace(log: Log) -> None:
    """And not made here too: rows `aten.copy_.default` of tests/data/workspaces.json say how much it is."""
    target = torch.empty(64, 64, dtype=torch.bfloat16, device="cuda").t()
    log.events.clear()
    target.copy_(torch.zeros(64, 64))
    target.copy_(torch.zeros(64, 64), non_blocking=True)
    assert log.events == []


@pytest.mark.skipif(version_of(torch.__version__) < (2, 9), reason="they come by dimension")
def test_places_of_a_mask_on_the_host_come_as_one_tensor(log: Log) -> None:
    """`expandTensors` (IndexingUtils.h), as PyTorch 2.13.0+cu130 allocated it; not where what is put accumulates."""
    source, mask = torch.ones(8, 4, 2, device="cuda"), torch.arange(64).view(8, 4, 2) % 3 == 0
    places = f"+{22 * 3 * 8}"
    log.events.clear()
    made = source[mask]
    assert [event for event in log.events if event[0] == "+"] == [places, "+88"]
    log.events.clear()
    source[mask] = made
    assert [event for event in log.events if event[0] == "+"] == [places]


def test_the_gradient_of_a_squared_error_is_contiguous(runtime: Runtime) -> None:
    """Recorded, PyTorch 2.13: `mse_loss_backward` makes it so whatever the operands are (BinaryOps.cpp)."""
    source = torch.ones(5, 6, device="cuda").t()
    assert torch.ops.aten.mse_loss_backward(torch.ones((), device="cuda"), source, source, 1).stride() == (5, 1)
    by_element = torch.ones((), device="cuda").expand(6, 5)
    assert torch.ops.aten.binary_cross_entropy_backward(by_element, source, source).stride() == (1, 6)
    assert (2**source).stride() == (5, 1)  # pow.Scalar
    assert torch.floor_divide(source, torch.ones((), device="cuda")).stride() == (1, 6)
    assert torch.complex(source, torch.ones((), device="cuda")).stride() == (1, 6)


def _mask(size: int) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


def _pixel(x: torch.Tensor) -> torch.Tensor:
    """An image of one pixel whose channels come last: contiguous either way."""
    return x.as_strided((4, 6, 1, 1), (6, 1, 6, 6))


ELEMENTWISE: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    functional.silu,
    functional.hardswish,
    lambda x: x + x.contiguous(),
    lambda x: x**2.0,
    lambda x: torch.where(x > x, x, x),
)

OPERATORS: dict[str, Callable[..., Any]] = {
    "mm": lambda x: x @ x.t(),
    "scalar to int": lambda x: x.int() * 2.5,
    "int division": lambda x: x.int() / 2,
    "remainder": lambda x: torch.remainder(x.int(), 2),
    "power": lambda x: x**2 + 2**x,
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "cat of dtypes": lambda x: torch.cat([x, x.double()]),
    "stack": lambda x: torch.stack([x, x], dim=1),
    "strided out": lambda x: functional.gelu(x.t()),
    "softmax": lambda x: torch.softmax(x.bfloat16(), -1, dtype=torch.float32),
    "layer norm": lambda x: functional.layer_norm(x, (6,)),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(dim=0),
    "topk": lambda x: x.topk(2),
    "var": lambda x: torch.var_mean(x, dim=1, keepdim=True),
    "any": lambda x: (x.any(dim=0), x.all()),
    "embedding": lambda x: functional.embedding(torch.zeros(2, 3, dtype=torch.long, device=x.device), x),
    "gather": lambda x: x.gather(1, torch.zeros(4, 2, dtype=torch.long, device=x.device)),
    "index": lambda x: x[torch.zeros(3, dtype=torch.long, device=x.device), :2],
    "masked": lambda x: x[:, :4].masked_fill(_mask(4).to(x.device), -1.0),
    "einsum": lambda x: torch.einsum("ab,cb->ac", x, x),
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None], torch.ones(1, 6, 6, device=x.device)),
    "conv1d": lambda x: functional.conv1d(x[None], torch.ones(5, 4, 3, device=x.device), padding=1),
    "conv2d": lambda x: functional.conv2d(x[None, None], torch.ones(2, 1, 3, 3, device=x.device)),
    "conv transpose": lambda x: functional.conv_transpose1d(x[None], torch.ones(4, 2, 3, device=x.device), stride=2),
    "channels last": lambda x: torch.empty(2, 3, 4, 5, device=x.device).to(memory_format=torch.channels_last) * 2,
    "one pixel, elementwise": lambda x: tuple(call(_pixel(x)) for call in ELEMENTWISE),
    "one pixel, one by one": lambda x: (_pixel(x) * 2.0, _pixel(x).clone(), functional.hardtanh(_pixel(x))),
    "one pixel, layer norm": lambda x: functional.layer_norm(_pixel(x), (6, 1, 1)),
    "one pixel, log softmax": lambda x: _pixel(x).log_softmax(1),
    "pad": lambda x: functional.pad(x, (1, 2)),
    "arange": lambda x: torch.arange(0.0, 1.0, 0.1, device=x.device),
    "one hot": lambda x: functional.one_hot(torch.zeros(3, dtype=torch.long, device=x.device), 7),
    "cross entropy": lambda x: functional.cross_entropy(x, torch.zeros(4, dtype=torch.long, device=x.device)),
    "complex": lambda x: torch.view_as_real(torch.fft.rfft(x)),
    "scatter": lambda x: torch.zeros_like(x).scatter_add_(1, torch.zeros(4, 6, dtype=torch.long, device=x.device), x),
    "logsumexp": lambda x: x.logsumexp(1),
    "without a rule": lambda x: torch.logcumsumexp(x, 0),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=0, dtype=torch.float64),
    "foreach": lambda x: torch._foreach_mul([x, x.double(), x, x[:2]], [1.0, 2.0, 3.0, 4.0]),
    "foreach norm": lambda x: torch._foreach_norm([x, x.double(), x], 2.0),
    "vmap": lambda x: torch.vmap(lambda row: row.sum())(x),
    "to the host": lambda x: x.to("cpu", torch.float16),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_results_have_the_form_that_the_cpu_gives(name: str, runtime: Runtime) -> None:
    call = OPERATORS[name]
    expected, found = call(torch.ones(4, 6)), call(torch.ones(4, 6).to("cuda"))
    if isinstance(expected, torch.Tensor):
        expected, found = (expected,), (found,)
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert (other.shape, other.dtype, other.stride()) == (one.shape, one.dtype, one.stride())


def test_group_norm_of_one_pixel_is_contiguous(runtime: Runtime) -> None:
    """On CUDA alone: `native_group_norm` asks for memory formats on the CPU only (group_norm.cpp)."""
    assert functional.group_norm(_pixel(torch.ones(4, 6, device="cuda")), 2).stride() == (6, 1, 1, 1)


def test_gradients_of_batch_norm_lie_as_recorded(runtime: Runtime) -> None:
    records = json.loads((DATA / "workspaces.json").read_text())["records"]
    ours = [record for record in records if record[0] == "aten.native_batch_norm_backward.default"]
    for _, _, _, _, _, args, _, out, *_ in ours:
        given = [_recorded(value) if isinstance(value, dict) else value for value in args]
        found = torch.ops.aten.native_batch_norm_backward(*given)
        for one, other, asked in zip(found, out, args[9], strict=True):
            expected = None if other is None else _recorded(other)
            if one is None or expected is None:
                assert one is None
                assert expected is None or not asked or not expected.numel()  # where there is no weight
            else:
                assert (one.dtype, one.shape, one.stride()) == (expected.dtype, expected.shape, expected.stride()), args
    assert len(ours) > 50


@pytest.mark.parametrize("name", ["im2col", "col2im"])
def test_columns_keep_the_storage_that_they_begin_with(name: str, runtime: Runtime) -> None:
    records = json.loads((DATA / "workspaces.json").read_text())["records"]
    ours = [record for record in records if record[0] == f"aten.{name}.default"]
    for _, _, _, _, _, args, _, out, outputs, _ in ours:
        found = getattr(torch.ops.aten, name)(_recorded(args[0]), *args[1:])
        assert (found.untyped_storage().nbytes(), found.shape) == (outputs[0], _recorded(out).shape), args
    assert len(ours) > 5


def _recorded(value: dict[str, list[Any]]) -> torch.Tensor:
    dtype, sizes, *steps = value["t"]
    strides = steps[0] if steps else torch.empty(sizes, device="meta").stride()
    return torch.empty_strided(sizes, strides, dtype=getattr(torch, dtype), device="cuda")


@pytest.mark.parametrize("name", ["celu", "elu", "hardsigmoid", "hardswish", "hardtanh", "relu6", "selu", "softplus"])
def test_gradients_of_activations_lie_as_what_comes_in(name: str, runtime: Runtime) -> None:
    """Recorded with PyTorch 2.13.0 (CUDA 13.0): TensorIterator takes the strides of its first operand."""
    plain = torch.ones(2, 8, 6, 6, device="cuda")
    last = plain.contiguous(memory_format=torch.channels_last)
    for image, incoming in ((plain, last), (last, plain)):
        source = image.clone().requires_grad_()
        (found,) = torch.autograd.grad(getattr(functional, name)(source), source, incoming)
        assert found.stride() == incoming.stride()


def test_results_lie_as_the_first_operand(runtime: Runtime) -> None:
    """As recorded with PyTorch 2.13.0 (CUDA 13.0)."""
    plain = torch.ones(2, 8, 6, 6, device="cuda")
    last = plain.contiguous(memory_format=torch.channels_last)
    for one in (torch.abs, torch.isinf, torch.logical_not):
        assert one(last).stride() == last.stride() == one(last[:, :, :, :]).stride()
        assert one(plain[:, :, ::2, ::2]).stride() == (72, 9, 3, 1)
        assert one(last[:, :, ::2, ::2]).stride() == (72, 1, 24, 8)
    for two in (torch.copysign, torch.logical_and, torch.logical_or, torch.logical_xor, torch.xlogy):
        assert (two(plain, last).stride(), two(last, plain).stride()) == (plain.stride(), last.stride())


def test_interpolations_of_few_channels_keep_them_last(runtime: Runtime) -> None:
    """As PyTorch 2.13.0+cu130 has them; its rules for shapes take fewer than 16 channels first."""
    for mode, form, sizes, steps in (
        ("bilinear", torch.channels_last, (2, 3, 8, 8), (768, 1, 48, 3)),
        ("bilinear", torch.contiguous_format, (2, 3, 8, 8), (768, 256, 16, 1)),
        ("trilinear", torch.channels_last_3d, (1, 15, 4, 4, 4), (7680, 1, 960, 120, 15)),
    ):
        image = torch.ones(sizes, device="cuda").contiguous(memory_format=form)
        assert functional.interpolate(image, scale_factor=2.0, mode=mode).stride() == steps


def test_operators_with_kernels_of_their_own() -> None:
    known = set(cuda_operators())
    assert {"mm", "add.Tensor", "add_.Tensor", "add.out", "silu_backward", "_fused_rms_norm", "native_dropout"} <= known
    assert not known & {"matmul", "linear", "dropout", "clone", "_to_copy", "transpose.int", "layer_norm"}


def test_dropout_keeps_one_byte_an_element(log: Log) -> None:
    functional.dropout(torch.empty(8, 8, device="cuda"), 0.1)
    assert log.operators[-1] == "native_dropout"
    assert sorted(log.events[1:3]) == ["+256", "+64"]


def test_statistics_of_half_precision_norms_are_single(log: Log) -> None:
    hidden = torch.empty(8, 16, dtype=torch.bfloat16, device="cuda")
    _, mean, scale = torch.ops.aten.native_layer_norm(hidden, (16,), None, None, 1e-5)
    assert (mean.dtype, scale.dtype, mean.shape) == (torch.float32, torch.float32, (8, 1))
    functional.rms_norm(hidden, (16,), torch.empty(16, dtype=torch.bfloat16, device="cuda"))
    assert log.operators[-1] == "_fused_rms_norm"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_norms_of_half_precision_weights_are_single(dtype: torch.dtype, runtime: Runtime) -> None:
    """Recorded, PyTorch 2.13: `weight_norm` stashes them for its backward (cuda/WeightNorm.cu)."""
    v, g = torch.ones(64, 32, 3, dtype=dtype, device="cuda"), torch.ones(64, 1, 1, dtype=dtype, device="cuda")
    weight, norms = torch._weight_norm_interface(v, g, 0)
    assert (weight.dtype, norms.shape) == (dtype, (64, 1, 1))
    assert norms.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_bad_operands_are_refused(runtime: Runtime) -> None:
    tensor = torch.empty(2, 3, device="cuda")
    with pytest.raises(RuntimeError, match=r"reduction dim|shapes cannot be multiplied"):
        tensor @ tensor
    with pytest.raises(RuntimeError, match="same device"):
        tensor + torch.empty(2, 3)


# ---------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("truth", [True, False])
def test_values_are_assumed_and_said(truth: bool, runtime: Runtime) -> None:
    waited = []
    runtime.synchronizations = lambda: waited.append(1)
    runtime.truth = truth
    tensor = torch.rand(3, device="cuda")
    assert bool((tensor == 1).all()) is truth
    assert tensor.sum().item() == 0.0
    assert tensor.int().max().item() == 0
    assert (tensor > 0).cpu().tolist() == [truth] * 3
    assert torch.equal(tensor, tensor.clone())
    assert len(waited) == 5
    said = [re.sub(r"py:\d+", "py:LINE", text) for text in runtime.assumptions]
    here = "tests/graph/fake_cuda/test_device.py:LINE (test_values_are_assumed_and_said) asks for"
    end = "is assumed, for a device that is not there has no values"
    assert said == [
        f"{here} the value of a bool: {truth} {end}",
        f"{here} the value of a float32: 0.0 {end}",
        f"{here} the value of a int32: 0 {end}",
        f"{here} the values of a bool tensor: {truth} {end}",
        f"{here} whether two tensors are equal: that they are {end}",
    ]


def test_what_is_the_same_is_not_compared(log: Log) -> None:
    """As `allocation.all.allocated` tells of the CUDA build of PyTorch 2.13 on libraries that do nothing."""
    many, square = torch.rand(100, device="cuda"), torch.rand(10, 10, device="cuda")
    same = [
        (many, many),
        (many.view(100), many),
        (many[:50], many[:50]),
        (square.t(), square.t()),
        (many, many.detach()),
    ]
    other = [(many[:50], many[50:]), (square, square.t()), (many, many.double())]
    log.events.clear()
    assert all(torch.equal(*pair) for pair in same)
    assert not torch.equal(many, square)
    assert not log.events
    assert all(torch.equal(*pair) for pair in other)
    assert log.operators.count("equal") == 3


def test_host_tensors_may_keep_their_values(runtime: Runtime) -> None:
    runtime.host_copies_keep = True
    host = torch.tensor([1, 2, 3])
    host.copy_(host.to("cuda"))
    assert host.tolist() == [1, 2, 3]
    assert not runtime.assumptions


def test_shapes_that_depend_on_values_are_refused(runtime: Runtime) -> None:
    with pytest.raises(CaptureError, match=r"^operator aten\.\w+.*depends on values on the device$"):
        Shapes().infer(torch.ops.aten.nonzero.default, (torch.rand(3, device="cuda"),), {})


def test_values_that_are_not_known_count_as_different(runtime: Runtime) -> None:
    unique = torch.ops.aten._unique2
    assert unique(torch.rand(3, device="cuda"))[0].shape == (3,)
    assert unique(torch.tensor([4, 4, 7]).cuda())[0].tolist() == [4, 7]
    unknown = torch.randn(5000, 4, device="cuda") > 0
    assert [len(one) for one in unique(unknown, return_counts=True)] == [2, 0, 2]
    assert torch.tensor([1, 1, 3]).cuda().bincount().tolist() == [0, 2, 0, 1]
    assert [text for text in runtime.assumptions if "values that differ: that all do is assumed" in text]


def test_a_program_may_put_its_own_constructors_in_place(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """As accelerate's `init_on_device` and nanotron do: all tensors of a model are made on one device."""

    def there(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: plain(*args, **{**kwargs, "device": "cuda"})

    for name in ("empty", "zeros", "ones", "full"):
        monkeypatch.setattr(torch, name, there(getattr(torch, name)))
    lengths = torch.zeros(2, dtype=torch.int64)
    lengths[1] = 5
    assert lengths.is_cuda
    assert (lengths.tolist(), lengths.nonzero().tolist(), (lengths > 2).tolist()) == ([0, 5], [[1]], [False, True])
    assert torch.empty(2, 3, 4, 5, memory_format=torch.channels_last).stride() == (60, 1, 15, 3)


def test_integers_that_are_drawn_are_in_their_range(runtime: Runtime) -> None:
    """A program that draws how many of something to make gets as many as may be, not 0."""
    drawn = torch.randint(3, 6, (4,), device="cuda")
    assert drawn.tolist() == [3] * 4
    assert drawn[1].int().item() == drawn.to("cpu")[0] == 3
    assert torch.randint(-5, -2, (1,), device="cuda").item() == -3
    assert torch.randint(6, (1,), device="cuda").item() == 0
    assert len(torch.unique(torch.randint(10, 14, (99,), device="cuda"))) == 4
    assert runtime.assumptions
    runtime.assumptions.clear()
    assert torch.randint(2, 3, (2,), device="cuda").mul(2).tolist() == [4, 4]
    assert torch.empty(2, dtype=torch.int32, device="cuda").random_(1).tolist() == [0, 0]
    assert not runtime.assumptions


def test_a_number_that_is_drawn_is_in_its_range(runtime: Runtime) -> None:
    """As augmentations draw an angle, or the logarithm of a ratio."""
    numbers = [torch.empty(1, device="cuda").uniform_(*between) for between in ((1, 2), (-3, -2), (-1, 1))]
    assert not runtime.assumptions
    assert [number.item() for number in numbers] == [1, -2, 0]
    assert [number.exp().item() for number in numbers] == [pytest.approx(math.exp(power)) for power in (1, -2, 0)]
    assert sum(runtime.assumptions.values()) == 6


def test_a_random_order_has_each_place_once(runtime: Runtime) -> None:
    """And takes nothing of what the program draws on the host."""
    before = torch.get_rng_state()
    order = torch.randperm(6, device="cuda")
    assert sorted(order.tolist()) == list(range(6))
    assert sorted(torch.arange(10, 16, device="cuda")[order].tolist()) == list(range(10, 16))
    narrow = torch.randperm(7, device="cuda", dtype=torch.int32, generator=torch.Generator("cuda"))
    assert (narrow.dtype, len(torch.unique(narrow[:4]))) == (torch.int32, 4)
    out = torch.empty(5, dtype=torch.int64, device="cuda")
    assert sorted(torch.randperm(5, out=out).tolist()) == sorted(out.tolist()) == list(range(5))
    assert torch.equal(torch.get_rng_state(), before)
    assert not runtime.assumptions


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_gradients_of_bags_are_those_of_their_table(mode: str, log: Log) -> None:
    """EmbeddingBag.cpp: it asks for a sparse gradient (with a CUDA build of PyTorch alone) or for a dense one."""
    bag = nn.EmbeddingBag(5000, 32, mode=mode).to("cuda")
    _backward(bag(torch.arange(640).cuda(), torch.arange(0, 640, 10).cuda()))
    assert "_embedding_bag_dense_backward" in log.operators
    assert bag.weight.grad is not None
    assert bag.weight.grad.shape == (5000, 32)


def test_what_is_overwritten_with_itself_has_no_values_if_it_had_none(runtime: Runtime) -> None:
    unknown = torch.rand(4, device="cuda")
    assert runtime.values.of(unknown.abs_()) is None  # abs.out(x, out=x)
    assert runtime.values.of(torch.mul(unknown, unknown, out=unknown)) is None
    known = torch.tensor([1, -2]).cuda()
    assert known.abs_().tolist() == [1, 2]
    assert torch.add(known, 1, out=torch.empty_like(known)).tolist() == [2, 3]


def _soft_clamped(x: torch.Tensor, limit: float) -> torch.Tensor:
    return (x / limit).tanh() * limit


def test_functions_of_torchscript_are_seen_each_time(log: Log) -> None:
    """From the second call on a CUDA build fuses them, and the kernel's results are not told to the dispatcher."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        function = torch.jit.script(_soft_clamped)
    source = torch.empty(1000, device="cuda")
    for _ in range(4):
        begin = len(log.operators)
        result = function(source, 50.0)
        assert log.operators[begin:] == ["div.Tensor", "tanh", "mul.Tensor"]
        assert log.events[-1] == "-4000"  # of tanh, while the result is there
        del result


def test_grids_are_sampled_by_cudnn(log: Log) -> None:
    """A sum's gradient has no strides: it is copied (cudnn/GridSampler.cpp)."""
    source = torch.empty(2, 3, 8, 10, device="cuda", requires_grad=True)
    grid = torch.empty(2, 4, 5, 2, device="cuda", requires_grad=True)
    result = functional.grid_sample(source, grid, align_corners=True)
    begin = len(log.events)
    torch.autograd.backward(result.sum())
    out, first, second = 2 * 3 * 4 * 5 * 4, 2 * 3 * 8 * 10 * 4, 2 * 4 * 5 * 2 * 4
    assert log.events[begin:] == ["+4", "+4", f"+{out}", f"+{first}", f"+{second}", f"-{out}", "-4", "-4"]


def test_batch_norm_of_known_numbers_in_evaluation(runtime: Runtime) -> None:
    """Its statistics are empty on the CPU, where small numbers are computed, and are not on CUDA."""
    norm = nn.BatchNorm1d(32).to("cuda").eval()
    assert norm(torch.ones(8, 32).cuda()).shape == (8, 32)
    assert nn.InstanceNorm2d(4, track_running_stats=True).to("cuda").eval()(torch.ones(2, 4, 3, 3).cuda()).ndim == 4


def test_parameters_of_a_distribution_are_in_range(runtime: Runtime) -> None:
    runtime.values.finite = True
    mean = nn.Linear(3, 1).to("cuda")(torch.rand(1, 3, device="cuda"))
    normal = torch.distributions.Normal(mean, mean.exp(), validate_args=True)
    assert torch.distributions.Gamma(mean.exp(), mean.exp(), validate_args=True).log_prob(mean.exp()).shape == (1, 1)  # type: ignore[no-untyped-call]
    assert normal.scale.shape == (1, 1)
    assert not (mean > 0).item()  # elsewhere it compares as 0


def test_a_matrix_can_be_factorized(runtime: Runtime) -> None:
    square = torch.rand(3, 4, 4, device="cuda")
    for info in (
        torch.linalg.cholesky_ex(square)[1],
        torch.linalg.lu_factor_ex(square)[2],
        torch.linalg.inv_ex(square)[1],
        torch.linalg.solve_ex(square, square)[1],
    ):
        assert (info.tolist(), bool(info.any())) == ([0, 0, 0], False)


def test_places_along_a_dimension_have_no_more_values_than_that(runtime: Runtime) -> None:
    """As torchmetrics asks of predicted classes: no more than there are."""
    scores = torch.rand(32, 10, device="cuda")
    places = scores.argmax(1), scores.max(1).indices, scores.topk(3).indices, scores.sort().indices, scores.argmin()
    copied = scores.argmax(1).view(4, 8).t().flatten()
    others = scores.argmax(), torch.rand(32, device="cuda").long()
    assert [len(torch.unique(one)) for one in (*places, copied, *others)] == [10, 10, 10, 10, 1, 10, 1, 32]


def test_windows_of_an_inverse_transform_overlap(runtime: Runtime) -> None:
    runtime.values.finite = True
    window, parts = torch.hann_window(256, device="cuda"), torch.empty(4, 129, 65, dtype=torch.cfloat, device="cuda")
    assert torch.istft(parts, 256, 64, 256, window, length=4096).shape == (4, 4096)
    assert (parts.real.min() < 1e-3).item() is True
    assert len([text for text in runtime.assumptions if "compares" in text]) == 1


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}, {"bias": False}]
)
def test_recurrent_layers_run_by_cudnn(kind: Any, options: dict[str, Any], log: Log, runtime: Runtime) -> None:
    """Weights lie in one buffer, their gradients in another; the workspace is told as a range."""
    layer = kind(8, 16, **options).to("cuda")
    result, state = layer(torch.empty(5, 3, 8, device="cuda", requires_grad=True))
    _backward(result)
    assert result.shape == (5, 3, 32 if options.get("bidirectional") else 16)
    assert "_cudnn_rnn" not in log.operators  # it is told as what it allocates
    weights = list(layer.parameters())
    assert len({runtime.storage(weight) for weight in weights}) == 1
    assert len({runtime.storage(weight.grad) for weight in weights if weight.grad is not None}) == 1
    assert [weight.grad.shape for weight in weights if weight.grad is not None] == [w.shape for w in weights]
    assert any("cuDNN's workspace of a call" in text for text in runtime.assumptions)
    del result, state


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_copies_recurrent_weights_into_one_buffer_of_float16(
    kind: Any, gates: int, dtype: torch.dtype, log: Log, runtime: Runtime
) -> None:
    """As aten/src/ATen/cudnn/AutocastRNN.cpp: at each call, whatever autocast's dtype; their gradients are float32."""
    layer, data = kind(64, 128).to("cuda"), torch.empty(20, 8, 64, device="cuda")
    weights = gates * (128 * 64 + 128 * 128 + 2 * 128)
    for _ in range(2):
        begin = len(log.events)
        with torch.autocast("cuda", dtype):
            result = layer(data)[0]
        assert result.dtype == torch.float16
        assert log.events[begin:].count(f"+{2 * weights}") == 1
        _backward(result)
        del result
    assert {weight.grad.dtype for weight in layer.parameters() if weight.grad is not None} == {torch.float32}


def test_an_operator_can_be_given_a_rule_of_its_own() -> None:
    with fake_cuda.fake_cuda(A100) as runtime:
        runtime.override("aten::bincount", lambda x, *rest: torch.empty(7, dtype=torch.int64, device=x.device))
        assert torch.ones(5, dtype=torch.int64, device="cuda").bincount().shape == (7,)
    with fake_cuda.fake_cuda(A100):
        assert torch.ones(5, dtype=torch.int64).cuda().bincount().shape == (2,)


def test_a_choice_that_nobody_knows_is_spread_evenly_over_its_classes(log: Log) -> None:
    """As a mixture of experts asks for the tokens of each expert; written anew, nothing is known of it."""
    chosen = torch.rand(12, 8, device="cuda").sort(1).indices[:, :2]
    mask = torch.nn.functional.one_hot(chosen, num_classes=8).permute(2, 1, 0)
    assert [len(torch.where(mask[expert])[0]) for expert in range(8)] == [3] * 8  # 12 tokens x 2 of 8
    assert len(mask.nonzero()) == 24
    other = torch.zeros(4, 8, dtype=torch.int64, device="cuda").scatter_(1, chosen[:4], 1).bitwise_xor_(chosen[:4, :1])
    assert len(other.nonzero()) == 32
    product = torch.zeros(12, 8, dtype=torch.int64, device="cuda").scatter_(1, chosen, 3, reduce="multiply")
    assert len(product.nonzero()) == 96


def test_unknown_booleans_as_numbers_are_an_assumption_where_they_are_read(log: Log) -> None:
    """As training programs work out an accuracy for each batch, and log it now and then."""
    log.runtime.values.finite = True  # as in recorded programs
    right = torch.rand(2, 3, device="cuda") == torch.rand(2, 3, device="cuda")
    accuracy = right.float().mean()
    assert not log.runtime.assumptions
    assert accuracy.item() == 1.0
    (told,) = log.runtime.assumptions
    assert "asks for the value of a float32: 1.0 is assumed" in told
    log.runtime.assumptions.clear()
    assert len((right.float() > 0.5).nonzero()) == 6
    (told,) = log.runtime.assumptions
    assert "asks for elements that are not zero: what follows from other assumptions is assumed" in told


def test_places_that_are_not_zero(log: Log) -> None:
    """All are, unless the runtime says otherwise; they lie as in `nonzero_cuda_out_impl`, column by column."""
    places = torch.rand(2, 3, device="cuda").nonzero()
    assert (places.shape, places.stride()) == ((6, 2), (1, 6))
    (told,) = log.runtime.assumptions
    assert re.search(r"test_device\.py:\d+ .* asks for elements that are not zero: that all are not is assumed", told)
    log.runtime.nonzero = lambda tensor: 4
    rows, columns = torch.where(torch.rand(2, 3, device="cuda") > 0)
    assert rows.shape == columns.shape == (4,)
    flags = torch.rand(9, device="cuda").nonzero()
    assert [int(place) for place in flags] == [0, 1, 2, 3]
    assert len(log.runtime.assumptions) == 1


def test_masks_among_indices(log: Log) -> None:
    """A mask is as many places (8 bytes a dimension) as it has elements; a number put through one fills in place."""
    tensor, mask = torch.ones(4, 6, 8, device="cuda"), torch.ones(4, 6, device="cuda") > 0
    log.events.clear()
    assert tensor[mask].shape == (24, 8)
    assert log.events == ["+384", "+768", "-384", "-768"]
    assert tensor[mask, 2:].shape == (24, 6)
    assert tensor[:, mask[0]].shape == (4, 6, 8)
    log.events.clear()
    tensor[mask] = 0.0
    tensor[:, mask[0]] = 0.0
    assert log.events == []
    assert log.operators[-2:] == ["masked_fill_.Scalar"] * 2
    tensor[mask] = torch.ones(24, 8, device="cuda")
    assert log.events == ["+768", "+384", "-384", "-768"]
    assert log.operators[-1] == "_index_put_impl_"


@pytest.mark.parametrize("loss", [functional.mse_loss, functional.smooth_l1_loss, functional.binary_cross_entropy])
def test_reduced_losses_keep_their_storage(loss: Any, log: Log) -> None:
    """As recorded: the output is made for the loss by element and resized (PyTorch 2.9 to 2.13, A100)."""
    value = loss(torch.ones(7, 3, device="cuda"), torch.ones(7, 3, device="cuda"))
    assert value.shape == ()
    assert value.untyped_storage().nbytes() == 7 * 3 * 4
    assert loss(value, value, reduction="none").untyped_storage().nbytes() == 4


def test_gradients_that_lie_in_order(log: Log) -> None:
    """What some kernels make is contiguous, whatever they read."""
    x = torch.ones(2, 5, 8, device="cuda", requires_grad=True)
    hidden = functional.layer_norm(x, (8,))
    (gradient,) = torch.autograd.grad(hidden, x, torch.ones(2, 8, 5, device="cuda").transpose(1, 2))
    assert gradient.is_contiguous()
    image = torch.ones(2, 6, 5, 5, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    weight = torch.ones(6, 1, 3, 3, device="cuda", dtype=torch.bfloat16)
    assert torch.ops.aten._conv_depthwise2d(image, weight, [3, 3], None, [1, 1], [1, 1], [1, 1]).is_contiguous()


# ---------------------------------------------------------------------------------------------------- training


def _grown(log: Log) -> int:
    """Bytes alive."""
    return sum(int(event) for event in log.events)


def test_gradients_that_meet_are_added_in_place(log: Log) -> None:
    source = torch.empty(1000, device="cuda", requires_grad=True)
    _backward(source.sin() + source.cos() + source.tanh())
    backward = log.operators[log.operators.index("fill_.Scalar") + 1 :]
    assert backward.count("add_.Tensor") == 2
    assert "add.Tensor" not in backward
    assert _grown(log) == 4000 * 2, "the source and its gradient"


def test_a_gradient_that_is_held_elsewhere_is_not_added_in_place(log: Log) -> None:
    source = torch.empty(1000, device="cuda", requires_grad=True)
    middle = source * 2
    middle.retain_grad()
    _backward(middle.sin() + source.cos())
    assert middle.grad is not None
    assert _grown(log) == 4000 * 4


def test_backward_runs_on_the_thread_of_the_device(log: Log) -> None:
    _backward(torch.empty(4, device="cuda", requires_grad=True).exp())
    assert log.threads["exp"] == threading.get_ident()
    assert log.threads["mul.Tensor"] != threading.get_ident()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_a_weight_once(dtype: Any, log: Log) -> None:
    linear = nn.Linear(8, 8, bias=False, device="cuda")
    log.operators.clear()
    with torch.autocast("cuda", dtype=dtype):
        hidden = linear(linear(torch.empty(2, 8, device="cuda")))
    assert hidden.dtype == dtype
    assert log.operators.count("copy_") == 2, "the input and the weight"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_recompute(reentrant: bool, log: Log) -> None:
    layer = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 8)).to("cuda")
    inputs = torch.empty(4, 8, device="cuda", requires_grad=True)
    log.operators.clear()
    _backward(checkpoint(layer, inputs, use_reentrant=reentrant))
    assert log.operators.count("native_dropout") == 2
    assert log.operators.count("gelu") == 2
    assert log.operators.count("addmm") == (4 if reentrant else 3), "the other one stops where it has enough"
    assert inputs.grad is not None


OPTIMIZERS: dict[str, tuple[Callable[..., Any], str, int]] = {
    "adamw": (torch.optim.AdamW, "_foreach_addcdiv_.ScalarList", 2),
    "adamw fused": (lambda p: torch.optim.AdamW(p, fused=True), "_fused_adamw_", 2),
    "adamw for loop": (lambda p: torch.optim.AdamW(p, foreach=False), "addcdiv_", 2),
    "sgd": (lambda p: torch.optim.SGD(p, momentum=0.9), "_foreach_add_.List", 1),
    "adafactor": (torch.optim.Adafactor, "linalg_vector_norm", 0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, log: Log) -> None:
    make, operator, copies = OPTIMIZERS[name]
    linear = nn.Linear(64, 64, bias=False, device="cuda")
    optimizer = make(linear.parameters())
    before = _grown(log)
    for _ in range(2):
        _backward(linear(torch.empty(2, 64, device="cuda")))
        torch.nn.utils.clip_grad_norm_(linear.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert operator in log.operators
    vectors = 2 * 64 * 4 if name == "adafactor" else 0  # its second moment is a row and a column
    steps = 4 if "fused" in name else 0  # the count of steps is on the device
    assert _grown(log) - before == copies * 64 * 64 * 4 + vectors + steps


def test_a_grad_scaler_steps(log: Log) -> None:
    linear = nn.Linear(8, 8, device="cuda")
    scaler, optimizer = torch.amp.GradScaler("cuda"), torch.optim.SGD(linear.parameters())
    _backward(scaler.scale(linear(torch.empty(2, 8, device="cuda")).sum()))
    scaler.step(optimizer)
    scaler.update()
    assert [name for name in log.operators if "amp" in name or name == "_foreach_add_.List"] == [
        "_amp_foreach_non_finite_check_and_unscale_",
        "_foreach_add_.List",
        "_amp_update_scale_",
    ]


# ------------------------------------------------------------------------------------------- torch.cuda, streams


def test_torch_cuda_answers_for_the_card() -> None:
    with fake_cuda.fake_cuda(profile("T4", "2.13")):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1
        assert torch.cuda.get_device_capability() == (7, 5)
        assert torch.cuda.get_device_name() == "Tesla T4"
        properties = torch.cuda.get_device_properties(0)
        assert (properties.multi_processor_count, properties.total_memory) == (40, 15_828_320_256)
        held = torch.empty(1000, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() == held.nbytes
        assert torch.cuda.mem_get_info() == (15_828_320_256 - 1000, 15_828_320_256)
        assert torch.accelerator.current_accelerator() == torch.device("cuda")


def test_streams_and_storages_that_change_their_size(log: Log) -> None:
    tensor = torch.empty(100, device="cuda")
    cuda: Any = torch.cuda
    side = cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert log.runtime.stream is side
        event = side.record_event()
    torch.cuda.current_stream().wait_event(event)
    tensor.record_stream(side)
    tensor.untyped_storage().resize_(0)
    assert (tensor.untyped_storage().nbytes(), log.runtime.bytes(1)) == (0, 0)
    tensor.untyped_storage().resize_(400)
    point = FIRST_POINT  # an event is a stream of its own
    assert log.told == [
        ("wait_stream", 1, 0),
        ("wait_stream", point, 1),
        ("wait_stream", 0, point),
        ("record_stream", 1, 1),
        ("resized", 1, 0),
        ("resized", 1, 400),
    ]


def test_the_host_waits_for_an_event_alone(log: Log) -> None:
    cuda: Any = torch.cuda
    first, second = cuda.Event(), cuda.Event()
    first.record()
    second.record()
    first.record()  # anew: its number was free again
    second.synchronize()
    del second
    third = cuda.Event()
    third.record()
    waits = [("wait_stream", FIRST_POINT + at, 0) for at in (0, 1, 0)]
    assert log.told == [*waits, ("reached", FIRST_POINT + 1), ("wait_stream", FIRST_POINT + 1, 0)]
    waited = []
    log.runtime.synchronizations = lambda: waited.append(True)
    log.runtime.late = True  # work ends only as the host waits: for any event, then for all of it
    first.synchronize()
    assert waited == [True]


def test_backward_goes_to_the_stream_of_its_forward(log: Log) -> None:
    """torch/csrc/autograd/engine.cpp: a node runs on the stream of its forward, and its gradient is recorded there."""
    source = torch.empty(100, device="cuda", requires_grad=True)
    cuda: Any = torch.cuda
    side = cuda.Stream()
    with torch.cuda.stream(side):
        middle = source.exp()
        seen = []
        hook: Any = middle.register_hook
        hook(lambda gradient: seen.append(log.runtime.stream.stream_id))
    result = middle.sin()
    gradients: list[int] = []
    hook(lambda gradient: gradients.append(log.runtime.storage(gradient)))
    _backward(result)
    assert seen == [1]
    assert log.runtime.stream.stream_id == 0
    assert ("record_stream", gradients[0], 1) in log.told


# ------------------------------------------------------------------------------------------------------ and it is gone


def _state() -> list[dict[str, Any]]:
    kept = [
        torch.cuda,
        torch.cuda.memory,
        torch.cuda.random,
        torch.version,
        torch.UntypedStorage,
        torch.Tensor,
        torch._C,
    ]
    return [dict(vars(place)) for place in kept]


def test_all_is_undone() -> None:
    with fake_cuda.fake_cuda(A100):
        pass  # importing more of PyTorch on the way is no change
    before = _state()

    def fails() -> None:
        _backward(torch.ones(3, requires_grad=True, device="cuda"))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), fake_cuda.fake_cuda(A100):
        fails()
    assert _state() == before
    if not torch._C._has_cuda:
        assert not torch.cuda.is_available()
        assert torch.accelerator.current_accelerator(False) is None
        with pytest.raises((RuntimeError, AssertionError)):
            torch.empty(2, device="cuda")
    parameter = torch.ones(3, requires_grad=True)
    _backward(parameter.square())
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [2.0, 2.0, 2.0]


def test_one_at_a_time(runtime: Runtime) -> None:
    with pytest.raises(CaptureError, match="in use already"), fake_cuda.fake_cuda(A100):
        pytest.fail("entered")
    assert torch.cuda.is_available()


def test_tensors_may_outlive_the_device() -> None:
    with fake_cuda.fake_cuda(A100):
        kept = torch.empty(10, device="cuda")
    assert sys.getrefcount(kept) >= 1
    del kept


def test_headers_that_do_not_fit_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = {name: place for name, place in fake_cuda._slots().items() if name != "hasPrimaryContext"}
    monkeypatch.setattr(fake_cuda, "_slots", lambda: slots)
    with pytest.raises(UnsupportedTorch, match="have no hasPrimaryContext"), fake_cuda.fake_cuda(A100):
        pytest.fail("entered")
    assert not fake_cuda._active
