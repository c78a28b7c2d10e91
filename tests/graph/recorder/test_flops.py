"""Costs of operator calls: FLOPs against torch's own counter, bytes against arithmetic by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graph.recorder.flops import cost  # noqa: E402
from tests.support.device_threads import start_device_threads  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _device_threads() -> None:
    start_device_threads()


@pytest.fixture
def run() -> Callable[[Callable[[], Any]], tuple[dict[str, tuple[int, int]], int]]:
    """Runs a function: the cost of each operator it called (of the last call), and the FLOPs of torch's counter."""
    mode = pytest.importorskip("torch.utils._python_dispatch").TorchDispatchMode
    counter = pytest.importorskip("torch.utils.flop_counter").FlopCounterMode

    class Log(mode):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.costs: dict[str, tuple[int, int]] = {}
            self.total = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            self.costs[func.name()] = found = cost(str(func), args, kwargs or {}, out)
            self.total += found[0]
            return out

    def call(function: Callable[[], Any]) -> tuple[dict[str, tuple[int, int]], int]:
        with counter(display=False) as theirs, Log() as ours:
            function()
        assert ours.total == theirs.get_total_flops()
        return ours.costs, ours.total

    return call


def meta(*shape: int, dtype: Any = None, grad: bool = False) -> Any:
    return torch.empty(*shape, device="meta", dtype=dtype or torch.float32, requires_grad=grad)


PRODUCTS: dict[str, tuple[Callable[[], Any], int]] = {
    "mm": (lambda: meta(3, 5) @ meta(5, 7), 2 * 3 * 5 * 7),
    "addmm": (lambda: torch.addmm(meta(7), meta(3, 5), meta(5, 7)), 2 * 3 * 5 * 7),
    "bmm": (lambda: torch.bmm(meta(2, 3, 5), meta(2, 5, 7)), 2 * 2 * 3 * 5 * 7),
    "baddbmm": (lambda: torch.baddbmm(meta(1, 3, 7), meta(2, 3, 5), meta(2, 5, 7)), 2 * 2 * 3 * 5 * 7),
    "linear of 3 dimensions": (lambda: torch.nn.functional.linear(meta(2, 3, 5), meta(7, 5)), 2 * 6 * 5 * 7),
    "linear and backward": (
        lambda: torch.nn.functional.linear(meta(4, 5, grad=True), meta(7, 5, grad=True), meta(7)).sum().backward(),
        3 * 2 * 4 * 5 * 7,
    ),
    "convolution": (
        lambda: torch.nn.functional.conv2d(meta(2, 3, 9, 9), meta(4, 3, 2, 2), stride=2),
        2 * 2 * (4 * 4) * 3 * 4 * 4,
    ),
    "transposed convolution": (
        lambda: torch.nn.functional.conv_transpose1d(meta(2, 3, 9), meta(3, 4, 2)),
        2 * 2 * 9 * 3 * 4 * 2,
    ),
    "attention": (
        lambda: torch.ops.aten._scaled_dot_product_flash_attention(*[meta(2, 4, 16, 8, dtype=torch.half)] * 3),
        2 * 2 * 2 * 4 * 16 * 16 * 8,
    ),
    "grouped attention": (
        lambda: torch.ops.aten._scaled_dot_product_efficient_attention(
            meta(2, 4, 16, 8), meta(2, 2, 32, 8), meta(2, 2, 32, 8), None, False
        ),
        2 * 2 * 2 * 4 * 16 * 32 * 8,
    ),
    "nothing": (lambda: torch.softmax(meta(3, 5), -1) * 2 + 1, 0),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_are_those_of_torchs_counter(name: str, run: Any) -> None:
    function, flops = PRODUCTS[name]
    assert run(function)[1] == flops


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("mask", [(True, True, True), (False, True, False), (True, False, False)])
def test_backward_of_convolutions(transposed: bool, mask: tuple[bool, ...], run: Any) -> None:
    x, weight = meta(2, 3, 9, 7), meta(*((3, 4) if transposed else (4, 3)), 2, 3)
    out = torch.ops.aten.convolution(x, weight, None, [1, 2], [0, 1], [1, 1], transposed, [0, 0], 1)
    given = ([4], [1, 2], [0, 1], [1, 1], transposed, [0, 0], 1, list(mask))
    assert run(lambda: torch.ops.aten.convolution_backward(out, x, weight, *given))[1] > 0


@pytest.mark.parametrize("kind", ["flash", "efficient"])
def test_backward_of_attention(kind: str, run: Any) -> None:
    query, key = meta(2, 4, 16, 8, dtype=torch.half), meta(2, 4, 32, 8, dtype=torch.half)
    lengths = meta(2, 4, 32)
    seeds = meta(2, dtype=torch.uint64)
    given: tuple[Any, ...]
    if kind == "flash":
        operator = torch.ops.aten._scaled_dot_product_flash_attention_backward
        rest = (lengths, None, None, 16, 32, 0.0, False, seeds, seeds)
        given = (query, query, key, key, query, *rest)
    else:
        operator = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        given = (query, query, key, key, None, query, lengths, seeds, seeds, 0.0, [True, True, True, False])
    assert run(lambda: operator(*given))[1] == 5 * 2 * 2 * 4 * 16 * 32 * 8


def test_inner_attention_has_its_heads_after_its_length() -> None:
    query, key = meta(2, 16, 4, 8), meta(2, 32, 4, 8)
    full = 2 * 2 * 2 * 4 * 16 * 32 * 8
    args: tuple[Any, ...] = (query, key, key, None, None, 16, 32, 0.0, True, False)
    assert cost("aten._flash_attention_forward.default", args, {}, query)[0] == full
    args = (query, key, key, None, None, None, 16, 32, 0.0, 0)
    assert cost("aten._efficient_attention_forward.default", args, {}, query)[0] == full
    backward = (query, query, key, key, query, None, None, None, 16, 32, 0.0, False)
    assert cost("aten._flash_attention_backward.default", backward, {}, query)[0] == full * 5 // 2
    packed = (meta(40, 4, 8), meta(70, 4, 8), meta(70, 4, 8), meta(3), meta(3), 16, 32, 0.0, True, False)
    assert cost("aten._flash_attention_forward.default", packed, {}, packed[0])[0] == full


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_heads_that_queries_share_count_for_each(heads: int) -> None:
    """Also in releases whose own formulas refuse keys with fewer heads than the queries have."""
    query, key = meta(2, 4, 16, 8), meta(2, heads, 32, 8)
    full = 2 * 2 * 2 * 4 * 16 * 32 * 8
    for kind in ("flash", "efficient", "cudnn"):
        name = f"aten._scaled_dot_product_{kind}_attention"
        assert cost(f"{name}.default", (query, key, key), {}, query)[0] == full
        backward = (query, query, key, key, query)
        assert cost(f"{name}_backward.default", backward, {}, query)[0] == full * 5 // 2
    inner, shared = meta(2, 16, 4, 8), meta(2, 32, heads, 8)
    args: tuple[Any, ...] = (inner, shared, shared, None, None, 16, 32, 0.0, True, False)
    assert cost("aten._flash_attention_forward.default", args, {}, inner)[0] == full


def test_products_that_torch_does_not_count() -> None:
    assert cost("aten.mv.default", (meta(3, 5), meta(5)), {}, meta(3)) == (30, 4 * (15 + 5 + 3))
    assert cost("aten.addmv.default", (meta(3), meta(3, 5), meta(5)), {}, meta(3))[0] == 30
    assert cost("aten.dot.default", (meta(5), meta(5)), {}, meta(1))[0] == 10
    assert cost("aten.addr.default", (meta(3, 5), meta(3), meta(5)), {}, meta(3, 5))[0] == 30
    experts = (meta(10, 4), meta(3, 4, 6), meta(3))
    assert cost("aten._grouped_mm.default", experts, {}, meta(10, 6))[0] == 2 * 10 * 4 * 6
    packed = (meta(1, 8), meta(24, 1), [6, 8], meta(1), meta(16), 64)
    assert cost("bitsandbytes.gemv_4bit.default", packed, {}, meta(1, 6))[0] == 2 * 8 * 6


def test_a_model_counts_as_in_torch(run: Any) -> None:
    with torch.device("meta"):
        layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        x = torch.empty(2, 8, 16)
    tokens = 2 * 8
    forward = 2 * tokens * (4 * 16 * 16 + 2 * 16 * 32) + 2 * 2 * 2 * 8 * 8 * 16
    # backward is twice the forward, less the gradient of the input's projection
    assert run(lambda: layer(x).sum().backward())[1] == 3 * forward - 2 * tokens * 3 * 16 * 16


MOVED: dict[str, tuple[str, Callable[[], tuple[Any, ...]], Any, int]] = {
    "elementwise": ("aten.add.Tensor", lambda: (meta(10), meta(10)), (10,), 3 * 40),
    "with a number": ("aten.mul.Tensor", lambda: (meta(10), 2.0), (10,), 2 * 40),
    "broadcast": ("aten.add.Tensor", lambda: (meta(4, 10), meta(10).expand(4, 10)), (4, 10), 160 + 40 + 160),
    "half": ("aten.mul.Tensor", lambda: (meta(10, dtype=torch.half), 2), None, 20),
    "view": ("aten.view.default", lambda: (meta(10), [2, 5]), (2, 5), 0),
    "empty": ("aten.empty.memory_format", lambda: ([10],), (10,), 0),
    "zeros": ("aten.zeros.default", lambda: ([10],), (10,), 40),
    "copy": ("aten.copy_.default", lambda: (meta(10), meta(10, dtype=torch.half)), (10,), 60),
    "lookup": ("aten.embedding.default", lambda: (meta(1000, 8), meta(5)), (5, 8), 20 + 2 * 160),
    "scatter": ("aten.scatter_add_.default", lambda: (meta(1000), 0, meta(5), meta(5)), (1000,), 20 + 20 + 40),
    "product": ("aten.mm.default", lambda: (meta(3, 5), meta(5, 7)), (3, 7), 4 * (15 + 35 + 21)),
    "list, in place": ("aten._foreach_mul_.Scalar", lambda: ([meta(10), meta(5)], 2.0), None, 2 * 60),
    "list, zeroed": ("aten._foreach_zero_.default", lambda: ([meta(10), meta(5)],), None, 60),
    "fused Adam": (
        "aten._fused_adamw_.default",
        lambda: (*([meta(10)] for _ in range(4)), [], [torch.empty((), device="meta")]),
        None,
        40 * (4 + 3) + 2 * 4,
    ),
    "fused SGD": ("aten._fused_sgd_.default", lambda: ([meta(10)], [meta(10)], [meta(10)]), None, 40 * 5),
    "scalar on the host": ("aten.mul.Tensor", lambda: (meta(10), torch.tensor(2.0)), (10,), 80),
    "unknown": ("mine.thing.default", lambda: (meta(10), "x", None, [meta(2)]), (3,), 40 + 8 + 12),
}


@pytest.mark.parametrize("name", MOVED)
def test_bytes_moved(name: str) -> None:
    operator, args, shape, moved = MOVED[name]
    out = None if shape is None else meta(*shape)
    assert cost(operator, args(), {}, out) == (PRODUCTS["mm"][1] if name == "product" else 0, moved)


def test_results_given_by_name_are_not_read() -> None:
    out = meta(10)
    assert cost("aten.add.out", (meta(10), meta(10)), {"out": out}, out) == (0, 120)
    assert cost("aten.add.Tensor", (meta(10),), {"other": meta(10)}, out) == (0, 120)


def test_a_call_costs_microseconds() -> None:
    import timeit

    args, out = (meta(3, 5), meta(5, 7)), meta(3, 7)
    seconds = min(timeit.repeat(lambda: cost("aten.mm.default", args, {}, out), number=1000, repeat=5)) / 1000
    assert seconds < 50e-6
