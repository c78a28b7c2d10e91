"""Integers and booleans on the fake device: what operators make of them is what the CPU makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graph.fake_cuda import device as fake_cuda
from graph.fake_cuda.values import MOST_BYTES, MOST_FLOAT_BYTES, MOST_INDEX_BYTES, MOST_MASK_BYTES, on_meta
from graph.hardware.profile import profile

Program = Callable[[torch.Tensor], Any]


@pytest.fixture(scope="module")
def runtime() -> Iterator[fake_cuda.Runtime]:
    with fake_cuda.fake_cuda(profile("A100-80GB", "2.13")) as found:
        yield found


def in_place(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(x)
    made.copy_(x)
    made[:, 0] = 7
    made[1:] += x[:1]
    made[x > 2] = -1
    return made.t()


def filled_in_parts(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(x)
    made[1:].copy_(x[1:])
    made[:1] = 4
    return made


def by_list(x: torch.Tensor) -> list[torch.Tensor]:
    lengths = (x.abs().sum(1) % 3 + 1).tolist()
    return list(torch.split(torch.arange(sum(lengths), device=x.device), lengths))


#: Programs over a tensor of integers with at least two rows and columns.
PROGRAMS: dict[str, Program] = {
    "arithmetic": lambda x: (x * 3 - x.max()) // 2 % 5,
    "numbers": lambda x: ((x > 0) & 1, (x > 0) & False, (x > 1) ^ True, x & True, 2 ** x.abs(), x << 1),
    "windows": lambda x: torch.nn.functional.pad(x, (1, 2), value=-100).unfold(1, 2, 1).reshape(-1),
    "cumulated": lambda x: torch.nn.functional.pad(x.abs().sum(1).cumsum(0, dtype=torch.int32), (1, 0)),
    "in place": in_place,
    "filled in parts": filled_in_parts,
    "places": lambda x: x.remainder(2).nonzero(),
    "masks": lambda x: (x[x > 0], x.masked_select(x < 1), torch.where(x[0] > 0, x[0], x[1])),
    "repeated": lambda x: torch.repeat_interleave(x[0], x[1].abs()),
    "distinct": lambda x: torch.unique(x, return_inverse=True, return_counts=True),
    "counted": lambda x: torch.bincount(x.abs().flatten()),
    "sorted": lambda x: x.flatten().sort(descending=True),
    "gathered": lambda x: torch.stack([x, x + 1]).gather(0, (x > 0).long().unsqueeze(0)),
    "one hot": lambda x: torch.nn.functional.one_hot(x.abs(), 20),
    "grid": lambda x: torch.stack(torch.meshgrid(x[0], x[1], indexing="ij")).flatten(1),
    "lists": by_list,
    "flags": lambda x: ((x > 0).all(), (x > 0).any(1), ~(x == x[0, 0])),
}


@pytest.mark.parametrize("name", PROGRAMS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_values_are_those_of_the_cpu(name: str, runtime: fake_cuda.Runtime, data: st.DataObject) -> None:
    rows, columns = data.draw(st.tuples(st.integers(2, 4), st.integers(2, 5)))
    numbers = st.lists(st.integers(-9, 9), min_size=columns, max_size=columns)
    host = torch.tensor(data.draw(st.lists(numbers, min_size=rows, max_size=rows)))
    before = dict(runtime.assumptions)
    found, wanted = PROGRAMS[name](host.to("cuda")), PROGRAMS[name](host)
    if isinstance(wanted, torch.Tensor):
        found, wanted = [found], [wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.is_cuda
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.cpu().tolist() == other.tolist()
    assert runtime.assumptions == before


def test_what_comes_from_chance_has_no_values(runtime: fake_cuda.Runtime) -> None:
    known = torch.tensor([3, 4]).to("cuda")
    unknown = torch.rand(2, device="cuda").long()
    assert runtime.values.of(known) is not None
    for tensor in (unknown, known + unknown, torch.randint(0, 9, (2,), device="cuda"), torch.empty_like(known)):
        assert runtime.values.of(tensor) is None
    known += unknown
    assert runtime.values.of(known) is None
    known.fill_(5)
    assert known.tolist() == [5, 5]


def test_a_schedule_of_noise_has_values(runtime: fake_cuda.Runtime) -> None:
    """As diffusers' schedulers look for the place of a step in what they have sent to the device."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        sigmas = torch.linspace(1, 0, 1000, dtype=dtype)
        steps = sigmas.to("cuda")
        assert (steps == steps[7]).nonzero().flatten().tolist() == (sigmas == sigmas[7]).nonzero().flatten().tolist()
        assert (steps[1:] - steps[:-1]).tolist() == (sigmas[1:] - sigmas[:-1]).tolist()
    assert not runtime.assumptions


def test_few_floating_point_numbers_have_values(runtime: fake_cuda.Runtime) -> None:
    most = MOST_FLOAT_BYTES // 4
    assert runtime.values.of(torch.zeros(most, device="cuda")) is not None
    assert runtime.values.of(torch.linspace(0, 1, most, device="cuda")) is not None
    assert runtime.values.of(torch.linspace(0, 1, most + 1, device="cuda")) is None
    assert runtime.values.of(torch.linspace(0, 1, most + 1).to("cuda")[:2]) is None


def test_a_mask_of_floating_point_numbers_has_values(runtime: fake_cuda.Runtime) -> None:
    """As PEFT makes them for virtual tokens: ones before the tokens' own, which transformers asks whether all are."""
    for dtype in (torch.float32, torch.bfloat16):
        tokens = torch.arange(700).lt(torch.tensor([700, 10, 300, 0])[:, None]).long().to("cuda")
        prefix = torch.ones(4, 1000, dtype=dtype)
        for ones in (prefix.to("cuda"), torch.ones(4, 1000, dtype=dtype, device="cuda")):
            mask = torch.cat((ones, tokens), dim=1)
            assert mask.bool().sum().item() == 4 * 1000 + 700 + 10 + 300
            assert mask.bool().all(dim=1).tolist() == [True, False, False, False]
            assert mask.long().to(dtype).bool().sum(1).tolist() == mask.bool().sum(1).tolist()
    assert not runtime.assumptions
    most = MOST_MASK_BYTES // 4
    assert runtime.values.of(torch.zeros(most, device="cuda")) is not None
    assert runtime.values.of(torch.zeros(most + 1, device="cuda")) is None
    assert runtime.values.of(torch.zeros(most + 1).to("cuda")[:2]) is None


def test_rows_without_values_all_differ(runtime: fake_cuda.Runtime) -> None:
    rows = torch.empty(2, 100, dtype=torch.int64, device="cuda").random_()
    for unique in (torch.unique, torch.unique_consecutive):
        found, places, counts = unique(rows, dim=1, return_inverse=True, return_counts=True)
        assert (found.shape, found.dtype, found.stride()) == (rows.shape, rows.dtype, (1, 2))
        assert (places.tolist(), counts.tolist()) == (list(range(100)), [1] * 100)
        assert runtime.values.of(found) is None
        assert unique(rows, dim=0).shape == rows.shape
    assert {what.partition(" asks for ")[2].partition(":")[0] for what in runtime.assumptions} == {"values that differ"}
    runtime.assumptions.clear()


def test_what_is_written_with_numbers_unknown_is_forgotten(runtime: fake_cuda.Runtime) -> None:
    total, unknown = torch.zeros(2, device="cuda"), torch.rand(2, device="cuda")
    total += 3
    assert total.tolist() == [3, 3]
    copy = total.clone()
    total += unknown
    torch._foreach_add_([copy], [unknown])
    for forgotten in (total, copy):
        assert runtime.values.of(forgotten) is None
    total.fill_(2)
    assert total.sum().item() == 4


def test_what_a_compiled_kernel_writes_is_forgotten(runtime: fake_cuda.Runtime) -> None:
    read, written = (torch.tensor([1, 2]).to("cuda") for _ in range(2))
    runtime.launched("triton_poi_fused_add_0", (read, written, 2), (False, True, False))
    assert (runtime.values.of(read) is None, runtime.values.of(written) is None) == (False, True)


def test_large_tensors_on_the_host_may_not_have_been_written(runtime: fake_cuda.Runtime) -> None:
    assert runtime.values.of(torch.empty(1 << 20)[:8].to("cuda")) is None
    assert runtime.values.of(torch.ones(8).to("cuda")) is not None


def test_one_side_may_decide(runtime: fake_cuda.Runtime) -> None:
    unknown = torch.rand(2, device="cuda") > 0
    no, yes, some = (torch.tensor(values).to("cuda") for values in ([False], [True], [True, False]))
    assert [(no & unknown).tolist(), (unknown | yes).tolist()] == [[False, False], [True, True]]
    for undecided in (unknown & some, unknown | some, unknown & yes, unknown | no, unknown ^ yes):
        assert runtime.values.of(undecided) is None


def test_large_tensors_have_no_values(runtime: fake_cuda.Runtime) -> None:
    for dtype, most in ((torch.uint8, MOST_BYTES), (torch.bool, MOST_INDEX_BYTES)):
        assert runtime.values.of(torch.zeros(most, dtype=dtype, device="cuda")) is not None
        assert runtime.values.of(torch.zeros(most + 1, dtype=dtype, device="cuda")) is None


def test_values_go_with_their_storage(runtime: fake_cuda.Runtime) -> None:
    tensor = torch.arange(6, device="cuda")
    view = tensor[2:4]
    count = len(runtime.memory.values)
    del tensor
    assert view.tolist() == [2, 3]
    del view
    assert len(runtime.memory.values) == count - 1


def test_values_on_meta() -> None:
    with on_meta() as values:
        grid = torch.tensor([[1, 4, 6]])
        ids = torch.zeros(2, 8, dtype=torch.int64)
        ids[:, 1:3] = grid[0, 1]
        mask = torch.cat([ids, ids + 1], 1) > 0
        weight = torch.nn.Linear(4, 4).weight
        assert {one.device.type for one in (grid, ids, mask, weight)} == {"meta"}
        found = values.of(mask)
    assert found is not None
    assert found[0].tolist() == [False, True, True, *[False] * 5, *[True] * 8]
    assert values.of(weight) is None


def test_unknown_booleans_count_as_many_as_they_select(
    runtime: fake_cuda.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of `x[mask] = y[: mask.sum()]`: what is selected, counted, added up and converted is one number."""
    assert runtime.values.of((torch.rand(4, device="cuda") < 0.5).sum()) is None
    monkeypatch.setattr(runtime.values, "finite", True)
    mask = torch.randn(4, 6, device="cuda") < 0.5
    assert runtime.values.of(mask) is None
    counts = mask.sum(), mask.count_nonzero(), mask.long().sum(), mask.float().sum(), mask.nonzero().shape[0]
    assert [int(one) for one in counts] == [24] * 5
    assert mask.sum(1).tolist() == [6] * 4
    assert mask.cumsum(1)[:, -1].tolist() == [6] * 4
    kinds = torch.rand(10, 4, device="cuda").argmax(-1)
    assert kinds.bincount(minlength=4).tolist() == [3, 3, 2, 2]
    assert torch._unique2(kinds, return_counts=True)[2].tolist() == [3, 3, 2, 2]


def test_a_part_of_a_router_s_choice_has_its_share(runtime: fake_cuda.Runtime) -> None:
    """transformers' loop over experts asks for the rows of each one by a number on the device."""
    chosen = torch.rand(64, 8, device="cuda").topk(2)[1]
    mask = torch.nn.functional.one_hot(chosen, num_classes=8).permute(2, 1, 0)
    expert = torch.tensor([3], device="cuda")
    for part in (mask[3], mask[expert].squeeze(0), mask.index_select(0, expert)[0], mask[3].clone()):
        assert len(torch.where(part)[0]) == 64 * 2 // 8


def ways_to_count(logits: torch.Tensor, chosen: torch.Tensor, experts: int) -> list[list[int]]:
    """How often each expert is chosen, as torchtitan, Megatron-LM, DeepSeek and others count."""
    flat, blank = chosen.view(-1), torch.zeros_like(logits)
    tokens = torch.arange(len(logits), device=logits.device)
    one_hot = torch.nn.functional.one_hot(chosen, experts)
    routed = blank.int().scatter(1, chosen, 1).bool()
    return [
        torch.histc(chosen, bins=experts, min=0, max=experts).tolist(),
        torch.histc(flat.float(), bins=experts, min=0, max=experts).tolist(),
        flat.bincount(minlength=experts).tolist(),
        one_hot.sum((0, 1)).tolist(),
        [len(torch.where(chosen == expert)[0]) for expert in range(experts)],
        [len(logits[(chosen == expert).any(-1)]) for expert in range(experts)],
        [len(torch.where(part)[0]) for part in one_hot.permute(2, 1, 0)],
        [len(tokens.masked_select(part)) for part in routed.T.contiguous()],
        routed.sum(0).tolist(),
        blank.scatter_(1, chosen, 1).sum(0).tolist(),
        flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat)).tolist(),
        torch.searchsorted(flat.sort()[0], torch.arange(experts + 1, device=flat.device)).diff().tolist(),
    ]


def test_a_router_s_choice_is_the_same_however_it_is_counted(runtime: fake_cuda.Runtime) -> None:
    """Nobody knows it: each is chosen as often. None is chosen twice for a token, so the parts have 2 of 8 each."""
    runtime.assumptions.clear()
    logits = torch.rand(64, 8, device="cuda")
    assert ways_to_count(logits, logits.topk(2)[1], 8) == [[16] * 8] * 12
    assert ways_to_count(logits, logits.max(1, keepdim=True)[1], 8) == [[8] * 8] * 12
    assert [len(logits[logits.argmax(-1) == expert]) for expert in range(8)] == [8] * 8
    assert any("which of a few places are chosen" in what for what in runtime.assumptions)
    real = torch.rand(64, 8)
    histc = mock.Mock(side_effect=lambda x, bins, **limits: x.flatten().long().bincount(minlength=bins))
    with mock.patch.object(torch, "histc", histc):  # the CPU has none of integers
        counts = ways_to_count(real, real.topk(2)[1], 8)
    assert counts == [counts[0]] * 12
    few, many = torch.rand(4, 8, device="cuda"), torch.rand(2048, 600, device="cuda")
    assert runtime.values.of(few.argmax(-1)) is runtime.values.of(many.argmax(-1)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_an_unknown_time_step_is_one_of_the_schedule(
    runtime: fake_cuda.Runtime, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """As diffusers' programs look up the noise of time steps that were drawn on the GPU (`get_sigmas`)."""
    schedule = torch.linspace(0, 999, 1000).flip(0).to(dtype).cuda()
    steps = torch.randint(0, 1000, (2,), device="cuda")
    drawn = torch.rand(3, 1, device="cuda").to(dtype)
    monkeypatch.setattr(runtime.values, "finite", True)
    assert [int((schedule == step).nonzero().item()) for step in steps] == [0, 0]
    assert (drawn == schedule).sum(1).tolist() == (schedule == drawn).sum(1).tolist() == [1, 1, 1]
    assert (drawn == schedule).int().argmax(1).tolist() == [0, 1, 2]
    assert (schedule != drawn).sum().item() == 3 * 999
    for few in (schedule[:4], schedule // 10):
        assert runtime.values.of(few == drawn) is None


def test_few_integers_that_are_drawn_are_as_often_each(
    runtime: fake_cuda.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As labels of classes are drawn, and counted by `one_hot` (MONAI's DiceMetric); of tokens nobody knows any."""
    monkeypatch.setattr(runtime.values, "finite", True)
    labels = torch.randint(0, 5, (1, 1000), device="cuda")
    others = torch.randint(2, 7, (1000,), device="cuda")
    for count in ways_to_count(torch.zeros(1, 5, device="cuda"), labels, 5)[:4]:
        assert count == [200] * 5
    assert torch.nn.functional.one_hot(labels, 5).float().sum(1).tolist() == [[200] * 5]
    assert others.bincount().tolist() == [0, 0, *[200] * 5]
    assert (others - 2 == labels[0]).sum().item() == pytest.approx(200, rel=0.2)
    for unknown in (torch.randint(0, 1000, (5000,), device="cuda"), torch.randint(0, 9, (8,), device="cuda")):
        assert runtime.values.of(unknown) is None
    runtime.assumptions.clear()


def test_an_order_of_unknown_numbers_is_some_order(runtime: fake_cuda.Runtime) -> None:
    score, group = torch.rand(30, device="cuda"), torch.arange(3).repeat_interleave(10).to("cuda")
    for order in (score.argsort(), torch.sort(score, stable=True)[1], score.topk(30)[1]):
        assert sorted(order.tolist()) == list(range(30))
        assert group[order].bincount().tolist() == [10] * 3
    assert runtime.values.of(score.topk(5)[1]) is None
    assert runtime.values.of(torch.rand(MOST_INDEX_BYTES // 8 + 1, device="cuda").argsort()) is None


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_large_masks_of_finite_numbers_are_one_thing(runtime: fake_cuda.Runtime) -> None:
    """What is asked of numbers that count as finite, where the answer has no room for values."""
    runtime.values.finite = True
    try:
        large = torch.empty(MOST_INDEX_BYTES + 1, device="cuda")
        unusual = large.isnan()
        whole = large.isfinite().all(), (~unusual).all()
        found = [unusual.any(), *whole, torch._is_any_true(unusual), large.isinf().any()]
        assert [bool(one) for one in found] == [False, True, True, False, False]
        assert runtime.values.of((large.isfinite() & False).all()) is None
        unusual[3:5] = True
        assert runtime.values.of(unusual.any()) is None
        with torch.autograd.detect_anomaly():
            loss: torch.Tensor = (torch.zeros(1, requires_grad=True, device="cuda") * large).sum()
            torch.autograd.backward(loss)
    finally:
        runtime.values.finite = False


def pairs(count: int, device: str) -> torch.Tensor:
    """Which of two views are of one picture."""
    labels = torch.arange(count // 2, device=device).repeat(2)
    return labels[:, None] == labels[None]


#: Masks of (count, count) that are floating-point numbers for a while, and for which counts.
MASKS: dict[str, tuple[Callable[[int, str], torch.Tensor], int]] = {
    "eye": (lambda count, device: torch.eye(count, device=device).bool(), 256),
    "compared": (lambda count, device: torch.eye(count, device=device) == 1, 256),
    "contrary": (lambda count, device: 1 - torch.eye(count, device=device) > 0, 256),
    "causal": (lambda count, device: torch.ones(count, count, device=device).tril() == 0, 256),
    "upper": (lambda count, device: torch.ones(count, count, device=device).triu_(1).bool(), 256),
    "product": (lambda count, device: (torch.eye(count, device=device) * pairs(count, device)).bool(), 256),
    "pairs": (lambda count, device: pairs(count, device).float().bool(), 600),
    "pairs in bfloat16": (lambda count, device: ~pairs(count, device).bfloat16().bool(), 1200),
    "from the host": (lambda count, device: torch.eye(count).to(device).bool(), 512),
    "pairs from the host": (lambda count, device: pairs(count, "cpu").float().to(device).bool(), 512),
    "rows of pairs": (lambda count, device: pairs(count, device).float()[torch.arange(count).flip(0)].bool(), 600),
    "pairs of strides": (lambda count, device: pairs(count, device).triu().t().float().bool(), 600),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_may_be_floating_point_numbers_for_a_while(runtime: fake_cuda.Runtime, name: str) -> None:
    make, most = MASKS[name]
    for count in (46, most):
        rows = torch.zeros(count, count, device="cuda")[make(count, "cuda")]
        assert len(rows) == int(make(count, "cpu").sum())


@pytest.mark.parametrize("count", [46, 128, 512])
def test_parts_of_a_mask_are_one(runtime: fake_cuda.Runtime, count: int) -> None:
    """As SimCLR leaves each with itself out of pairs, made on the host, and of similarities: one positive is left."""
    labels = pairs(count, "cpu").float().to("cuda")
    itself = torch.eye(count, dtype=torch.bool).to("cuda")
    labels = labels[~itself].view(count, -1)
    similarities = torch.randn(count, count, device="cuda")[~itself].view(count, -1)
    assert similarities.shape == labels.shape == (count, count - 1)
    assert similarities[labels.bool()].view(count, -1).shape == (count, 1)
    assert similarities[~labels.bool()].view(count, -1).shape == (count, count - 2)


def test_numbers_of_that_size_that_are_no_masks_have_no_values(runtime: fake_cuda.Runtime) -> None:
    made = torch.eye(100, device="cuda")
    runtime.values.forget([kept := made.clone()])
    for one in (made * 3, made - 0.5, torch.ones(100, 100, device="cuda").tril() * made * 2, kept.mul_(made)):
        assert runtime.values.of(one) is None
