"""Attention: the kernel chosen, what it allocates, and the operator around it, against recordings of CUDA builds."""

from __future__ import annotations

import json
import math
import unittest.mock
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from graph.fake_cuda.sdpa import Backend, Flags, Operand, Request, choose, priority
from graph.hardware.profile import profile
from graph.workspaces.attention import (
    RULES,
    efficient_backward_workspace,
    efficient_blocks,
    flash_splits,
)
from graph.workspaces.rules import Call, Plan
from tests.places import DATA as _DATA
from tests.support.plans import as_recorded

DATA: Final = _DATA / "attention.json"
ITEM_BYTES: Final = {"float64": 8, "int64": 8, "uint64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "bool": 1}


@cache
def recorded() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(DATA.read_text())
    return document


# ---------------------------------------------------------------------------------------------------- the choice


def operand(row: Sequence[Any]) -> Operand:
    return Operand(tuple(row[0]), tuple(row[1]), row[2], row[3], row[4])


def dense(shape: tuple[int, ...], dtype: str = "bfloat16", requires_grad: bool = False, offset: int = 0) -> Operand:
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return Operand(shape, stride, dtype, requires_grad, offset)


def request(
    head: int = 64,
    rows: int = 128,
    columns: int | None = None,
    *,
    dtype: str = "bfloat16",
    heads: int = 8,
    key_heads: int = 8,
    mask: Operand | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    gqa: bool = False,
    train: bool = True,
    offset: int = 0,
) -> Request:
    columns = rows if columns is None else columns
    query = dense((2, heads, rows, head), dtype, train, offset)
    key = dense((2, key_heads, columns, head), dtype, train, offset)
    return Request(query, key, key, mask, dropout, causal, gqa)


def test_every_recorded_choice() -> None:
    rows = recorded()["selector"]
    wrong = []
    for gpu, release, query, key, value, mask, dropout, causal, gqa, grad, off, deterministic, answer in rows:
        asked = Request(
            operand(query), operand(key), operand(value), mask and operand(mask), dropout, causal, gqa, grad
        )
        switched_off: dict[str, Any] = dict.fromkeys(off, False)
        flags = Flags(deterministic=deterministic, **switched_off)
        found = choose(asked, profile(gpu, release, True), flags)
        if found is not Backend[answer]:
            wrong.append((gpu, release, asked, flags, answer, found.name))
    assert not wrong
    assert {row[-1] for row in rows} == {"MATH", "FLASH", "EFFICIENT", "CUDNN", "ERROR"}


@pytest.mark.parametrize(
    ("gpu", "release", "asked", "answer"),
    [
        ("A100", "2.13", request(), Backend.FLASH),
        ("A100", "2.13", request(dtype="float32"), Backend.EFFICIENT),
        ("A100", "2.13", request(dtype="float64"), Backend.MATH),
        ("A100", "2.13", request(mask=dense((2, 1, 128, 128), "bool")), Backend.EFFICIENT),
        ("A100", "2.13", request(key_heads=2, gqa=True), Backend.FLASH),
        ("A100", "2.13", request(key_heads=1), Backend.MATH),  # and the next three as 2.14.1 and 2.15.0 allocated
        ("A100", "2.14", request(key_heads=1), Backend.FLASH),
        ("A100", "2.15", request(key_heads=1, dtype="float32"), Backend.EFFICIENT),
        ("A100", "2.15", request(key_heads=2), Backend.MATH),
        ("A100", "2.13", request(key_heads=2, gqa=True, dtype="float32"), Backend.MATH),
        ("A100", "2.13", request(key_heads=2, gqa=True, mask=dense((128, 128))), Backend.MATH),
        ("A100", "2.13", request(rows=100, columns=128, causal=True), Backend.EFFICIENT),
        ("A100", "2.13", request(head=60), Backend.FLASH),
        ("A100", "2.13", request(head=320), Backend.EFFICIENT),
        ("T4", "2.13", request(dtype="float16"), Backend.EFFICIENT),
        ("T4", "2.13", request(), Backend.MATH),
        ("V100", "2.9", request(dtype="float16", head=60), Backend.MATH),
        ("H100", "2.9", request(), Backend.FLASH),
        ("H100", "2.11", request(), Backend.CUDNN),
        ("H100", "2.13", request(mask=dense((2, 1, 128, 128), "bool")), Backend.CUDNN),
        ("H100", "2.11", request(dropout=0.1), Backend.CUDNN),
        ("H100", "2.13", request(dropout=0.1), Backend.FLASH),
        ("H100", "2.13", request(dropout=0.25), Backend.CUDNN),
        ("H100", "2.13", request(rows=1, columns=1), Backend.FLASH),
        ("H100", "2.13", request(dtype="float32"), Backend.EFFICIENT),
        ("RTX3090", "2.13", request(head=256, train=False), Backend.FLASH),
        ("RTX3090", "2.13", request(head=208), Backend.EFFICIENT),
        ("RTX3090", "2.13", request(head=208, train=False), Backend.FLASH),
        ("RTX3090", "2.13", request(head=256, dropout=0.1), Backend.EFFICIENT),
        ("A100", "2.12", request(dtype="float32", offset=1), Backend.EFFICIENT),
        ("A100", "2.13", request(dtype="float32", offset=1), Backend.MATH),
    ],
)
def test_choices_that_matter(gpu: str, release: str, asked: Request, answer: Backend) -> None:
    assert choose(asked, profile(gpu, release, True)) is answer


def test_switches() -> None:
    card = profile("H100", "2.13", True)
    assert choose(request(), card, Flags(cudnn=False)) is Backend.FLASH
    assert choose(request(), card, Flags(cudnn=False, flash=False)) is Backend.EFFICIENT
    assert choose(request(), card, Flags(cudnn=False, flash=False, efficient=False)) is Backend.MATH
    assert choose(request(), card, Flags(cudnn=False, flash=False, efficient=False, math=False)) is Backend.ERROR
    assert choose(request(), card, Flags(deterministic=True)) is Backend.FLASH


def test_an_order_that_the_user_set_is_kept() -> None:
    order = (Backend.EFFICIENT, Backend.FLASH, Backend.MATH, Backend.CUDNN, Backend.OVERRIDEABLE)
    assert priority(profile("H100", "2.13"), Flags(priority=order)) == order
    assert choose(request(), profile("H100", "2.13", True), Flags(priority=order)) is Backend.EFFICIENT


# ---------------------------------------------------------------------------------------------------- workspaces


class Stand:
    """Stands for a tensor: what rules may read of one."""

    def __init__(self, shape: Sequence[int], stride: Sequence[int], dtype: str) -> None:
        self.shape = tuple(shape)
        self.dtype = f"torch.{dtype}"
        self._stride = tuple(stride)

    def stride(self) -> tuple[int, ...]:
        return self._stride

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return ITEM_BYTES[self.dtype.removeprefix("torch.")]


def argument(value: Any) -> Any:
    return Stand(value["shape"], value["stride"], value["dtype"]) if isinstance(value, Mapping) else value


def played(plan: Plan, outputs: Sequence[int]) -> list[int]:
    """Events of a plan in the recordings' notation; `outputs` are the bytes of new output storages."""
    events: list[int] = []
    places: dict[Any, int] = {}
    named = {step[1] for step in plan if step[0] == "out"}

    def born(key: Any, nbytes: int) -> None:
        places[key] = len(places)
        events.append(nbytes)

    def others() -> None:
        for i, nbytes in enumerate(outputs):
            if i not in named:
                born(i, nbytes)

    if ("rest",) not in plan:
        others()
    for step in as_recorded(plan):
        match step:
            case ("out", i):
                born(i, outputs[i])
            case ("alloc", key, nbytes):
                born(key, nbytes)
            case ("free", key):
                events.append(-1 - places.pop(key))
                places[object()] = -1  # numbers are not used again
            case ("rest",):
                others()
            case _:
                pytest.fail(f"unknown step {step}")
    return events


def kernel_rows() -> Iterator[tuple[str, Call, list[int], list[int]]]:
    for gpu, release, name, arguments, places, events in recorded()["kernels"]:
        sizes = [event for event in events if event > 0]
        call = Call(name, tuple(argument(x) for x in arguments), {}, None, profile(gpu, release, True), 0, 0, True, {})
        yield f"{gpu} {release} {name} {arguments}", call, [sizes[i] for i in places], events


#: What tests/data/workspaces.json has, and what test_served has.
_BY_TOKEN = ("flash", "efficient")


def test_every_recorded_kernel() -> None:
    wrong = []
    names = set()
    for where, call, outputs, events in kernel_rows():
        plan = RULES[call.name](call)
        assert plan is not None
        names.add(call.name)
        if played(plan, outputs) != events:
            wrong.append((where, events, plan))
    assert not wrong
    by_token = {f"aten._{kind}_attention_{way}.default" for kind in _BY_TOKEN for way in ("forward", "backward")}
    assert names == set(RULES) - by_token


def test_recorded_kernels_allocate_more_than_outputs() -> None:
    """The recordings can tell: without rules most of them would differ."""
    differ = sum(played((), outputs) != events for _, _, outputs, events in kernel_rows())
    assert differ > len(recorded()["kernels"]) // 2


@given(st.integers(1, 3000), st.integers(2, 300), st.integers(1, 200))
def test_split_keys(blocks: int, processors: int, key_blocks: int) -> None:
    """The smallest number of parts within 85 % of the best filling, by plain arithmetic with a little slack."""
    splits = flash_splits(blocks, processors, key_blocks)
    if blocks >= 0.8 * processors * (1 + 1e-6):
        assert splits == 1
        return

    def filling(parts: int) -> float:
        waves = blocks * parts / processors
        return waves / math.ceil(waves)

    def whole(parts: int) -> bool:
        return parts == 1 or -(-key_blocks // parts) != -(-key_blocks // (parts - 1))

    if blocks >= 0.8 * processors * (1 - 1e-6):
        return
    candidates = [parts for parts in range(1, min(128, processors, key_blocks) + 1) if whole(parts)]
    best = max(filling(parts) for parts in candidates)
    assert splits in candidates
    assert filling(splits) >= 0.85 * best * (1 - 1e-6)
    assert all(filling(parts) < 0.85 * best * (1 + 1e-6) for parts in candidates if parts < splits)


@given(
    st.sampled_from(["V100-16GB", "T4", "A100", "RTX3090", "RTX4090", "H100", "B200"]),
    st.booleans(),
    st.integers(1, 512),
    st.booleans(),
)
def test_blocks_of_the_efficient_backward(gpu: str, half: bool, head: int, dropout: bool) -> None:
    rows, columns, accumulates = efficient_blocks(profile(gpu, "2.13"), half, head, dropout)
    assert {rows, columns} <= {64, 128}
    assert not (accumulates and not half)
    assert half is False or accumulates or rows >= head  # else dK and dV do not fit the registers


def test_workspace_of_the_efficient_backward_by_hand() -> None:
    """fp32, 2 x 12 heads, 512 rows, head 64: blocks of 64 x 64, each with 4 words of bookkeeping."""
    assert efficient_backward_workspace(profile("A100", "2.13"), (2, 12, 512, 64), 512, 64, False, False) == (
        24 * 8 * (64 * 64 + 4) * 4
    )


# -------------------------------------------------------------------------------------------------- the operator


class Events:
    """Observer of a fake device: events in the recordings' notation, kernel-internal allocations included."""

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        self.restart()

    def restart(self) -> None:
        self.events: list[int] = []
        self.places: dict[Any, int] = {}
        self.count = 0
        self.names: list[str] = []

    def _born(self, key: Any, nbytes: int) -> None:
        self.places[key] = self.count
        self.count += 1
        self.events.append(nbytes)

    def freed(self, storage: int) -> None:
        if storage in self.places:
            self.events.append(-1 - self.places.pop(storage))

    def operator(self, func: Any, args: Any, kwargs: Any, out: Any, born: list[int], *more: Any) -> None:
        self.names.append(str(func))
        plan = self._plan(str(func), args, kwargs, out)
        named = {step[1] for step in plan if step[0] == "out"}
        rest = [storage for i, storage in enumerate(born) if i not in named]
        if ("rest",) not in plan:
            plan = (("rest",), *plan)
        for step in as_recorded(plan):
            match step:
                case ("out", i):
                    self._born(born[i], self.runtime.bytes(born[i]))
                case ("alloc", key, nbytes):
                    self._born(key, nbytes)
                case ("free", key):
                    self.events.append(-1 - self.places.pop(key))
                case ("rest",):
                    for storage in rest:
                        self._born(storage, self.runtime.bytes(storage))

    def _plan(self, name: str, args: Any, kwargs: Any, out: Any) -> Plan:
        if name == "aten.native_dropout.default":  # the mask is made first
            return (("out", 1), ("out", 0))
        if name == "aten._softmax_backward_data.default":  # the product of gradient and output
            return (("alloc", "product", args[0].numel() * args[0].dtype.itemsize), ("free", "product"))
        rule = RULES.get(name)
        return (rule and rule(Call(name, args, kwargs, out, self.runtime.profile, 0, 0, True, {}))) or ()


def tensors(case: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Leaves, and query, key, value and mask of a recorded call, on the device that counts as CUDA."""
    import torch

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    batch, heads, rows, head = case["q"]
    leaves, views = [], []
    for count, tokens, width in (
        (heads, rows, head),
        (case["hk"], case["sk"], head),
        (case["hk"], case["sk"], case["dv"]),
    ):
        shape = {
            "bhsd": (batch, count, tokens, width),
            "bshd": (batch, tokens, count, width),
            "packed": (batch, tokens, 3, count, width),
        }[case["layout"]]
        leaf = torch.empty(shape, dtype=dtypes[case["dtype"]], device="cuda", requires_grad=case["grad"])
        leaves.append(leaf)
        view = leaf[:, :, 1] if case["layout"] == "packed" else leaf
        views.append(view if case["layout"] == "bhsd" else view.transpose(1, 2))
    mask = None
    if case["mask"]:
        kind, shape, beyond = case["mask"]  # a part of a wider one, if not 0
        mask = torch.empty([*shape[:-1], shape[-1] + beyond], dtype=dtypes.get(kind, torch.bool), device="cuda")
        mask = mask[..., : shape[-1]] if beyond else mask
        leaves.append(mask.requires_grad_() if case["mgrad"] else mask)
    return leaves, [*views, mask]


def differences(gpu: str, release: str, rows: Sequence[Any]) -> list[Any]:
    """Recorded calls whose events are others here."""
    import torch

    from graph.fake_cuda.device import fake_cuda
    from graph.fake_cuda.sdpa import install

    wrong = []
    with fake_cuda(profile(gpu, release, True)) as runtime:
        install(runtime)
        seen = Events(runtime)
        for case, forward, backward, shape in rows:
            leaves, inputs = tensors(case)
            seen.restart()
            runtime.observer = seen
            with torch.set_grad_enabled(not case["nograd"]):
                query, key, value, mask = inputs
                out = torch.nn.functional.scaled_dot_product_attention(
                    query,
                    key,
                    value,
                    mask,
                    case["dropout"],
                    case["causal"],
                    scale=case["scale"],
                    enable_gqa=case["gqa"],
                )
            found = [list(seen.events)]
            if out.requires_grad:
                grad_out = torch.empty_like(out)
                seen.restart()
                wanted = [leaf for leaf in leaves if leaf.requires_grad]
                kept = torch.autograd.grad(out, wanted, grad_out, allow_unused=True)
                found.append(list(seen.events))
                del kept
            runtime.observer = None
            if [*found, []][:2] != [forward, backward] or list(out.shape) != shape:
                wrong.append((gpu, release, case, found, forward, backward, seen.names))
            del out, query, key, value, mask, inputs, leaves
    return wrong


@pytest.mark.filterwarnings("ignore")  # PyTorch tells of every kernel that is put in place of another
def test_every_recorded_call_of_the_operator() -> None:
    """Forward and backward of scaled_dot_product_attention, whole: conversions, padding, kernels, derivatives."""
    pytest.importorskip("torch")
    by_device: dict[tuple[str, str], list[Any]] = {}
    for gpu, release, *row in recorded()["operator"]:
        by_device.setdefault((gpu, release), []).append(row)
    assert [wrong for (gpu, release), rows in by_device.items() for wrong in differences(gpu, release, rows)] == []


#: Forward and backward of operands (4, 3, 8) without a dimension for the batch, on an A100 under 2.15.0+cu132.
WITHOUT_BATCH: Final = {
    "float32": (
        [8, 8, 384, 512],
        [384, 384, 384, 384, 48, 48, -5, -4, 65600, -6, -7],
    ),
    "bfloat16": ([192, 48, 16, 8], [192, 192, 192, 192, 192, 2048, 65536, -7, -6]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", WITHOUT_BATCH)
def test_operands_without_a_batch_are_one(dtype: str) -> None:
    """From 2.14 on fused kernels take them; before, the plain path does."""
    import torch

    from graph.fake_cuda.device import fake_cuda
    from graph.fake_cuda.sdpa import install

    found = {}
    for release in ("2.13", "2.15"):
        with fake_cuda(profile("A100", release, True)) as runtime:
            install(runtime)
            runtime.observer = seen = Events(runtime)
            query = torch.empty(4, 3, 8, dtype=getattr(torch, dtype), device="cuda", requires_grad=True)
            seen.restart()
            out = torch.nn.functional.scaled_dot_product_attention(query, query, query)
            forward = list(seen.events)
            grad = torch.empty_like(out)
            seen.restart()
            torch.autograd.backward(out, grad)
            found[release] = forward, seen.events[: len(WITHOUT_BATCH[dtype][1])]
            runtime.observer = None
            del out, query, grad
    assert found["2.15"] == WITHOUT_BATCH[dtype]
    assert len(found["2.13"][0]) > len(WITHOUT_BATCH[dtype][0])


def test_attention_of_evaluated_modules_keeps_what_it_projects_until_its_end() -> None:
    """Heads of 6 are padded to 8: as the CUDA builds of 2.13.0 and 2.15.0 allocated and freed after the kernel."""
    torch = pytest.importorskip("torch")
    from graph.fake_cuda.device import fake_cuda
    from graph.fake_cuda.sdpa import install

    with fake_cuda(profile("A100", "2.13", True)) as runtime, torch.no_grad():
        install(runtime)
        like = {"device": "cuda", "dtype": torch.bfloat16}
        module = torch.nn.MultiheadAttention(36, 6, batch_first=True, **like).eval()
        tokens = torch.empty(4, 100, 36, **like)
        module(tokens, tokens, tokens, need_weights=False)
        runtime.observer = seen = Events(runtime)
        result = module(tokens, tokens, tokens, need_weights=False)
        runtime.observer = None
        del result
    assert [size for size in seen.events if size > 0] == [86400, *[38400] * 4, 9600, 16, 8, 28800, 28800]
    assert seen.events[-5:] == [28800, 28800, -9, -5, -1]


@pytest.mark.filterwarnings("ignore")
def test_programs_hear_which_kernel_could_take_a_call() -> None:
    """As the CUDA build of 2.13 answered for an A100; jagged nested tensors ask the same way."""
    torch = pytest.importorskip("torch")

    from graph.fake_cuda.device import fake_cuda
    from graph.fake_cuda.sdpa import install

    with fake_cuda(profile("A100", "2.13", True)) as runtime:
        install(runtime)
        query = torch.empty(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
        mask = torch.ones(128, 128, dtype=torch.bool, device="cuda")
        cuda: Any = torch.backends.cuda
        kernels = cuda.can_use_flash_attention, cuda.can_use_efficient_attention, cuda.can_use_cudnn_attention
        for given, causal, answers in ((None, True, [True, True, True]), (mask, False, [False, True, True])):
            asked = cuda.SDPAParams(query, query, query, given, 0.0, causal, False)
            assert [can(asked) for can in kernels] == answers
        cudnn: Any = torch.backends.cudnn
        assert (cudnn.is_available(), cudnn.version()) == (True, 92000)
        rows = [torch.empty(length, 64, device="cuda", dtype=torch.float16) for length in (5, 17, 30)]
        nested = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
        heads = nested.unflatten(-1, [4, 16]).transpose(1, 2)
        attend = torch.nn.functional.scaled_dot_product_attention
        assert attend(heads, heads, heads, is_causal=True).shape[1:] == heads.shape[1:]


@pytest.mark.filterwarnings("ignore")
def test_no_kernel_left_is_pytorchs_error_before_anything_is_made() -> None:
    """A program that asks for one kernel may catch it and take another; masks are not converted before."""
    torch = pytest.importorskip("torch")

    from graph.fake_cuda.device import fake_cuda
    from graph.fake_cuda.sdpa import attend

    with fake_cuda(profile("A100", "2.13")):
        query = torch.empty(1, 2, 16, 8, dtype=torch.float64, device="cuda")
        with (
            torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.FLASH_ATTENTION]),
            pytest.raises(RuntimeError, match=r"^No available kernel. Aborting execution.$"),
            unittest.mock.patch("graph.fake_cuda.sdpa._additive") as converted,
        ):
            attend(profile("A100", "2.13"), query, query, query, torch.ones(16, 16, dtype=torch.bool, device="cuda"))
    converted.assert_not_called()
