"""Masks of floating-point numbers on the fake device: where they are on is where they are on the CPU."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch

from graph.fake_cuda import device as fake_cuda
from graph.fake_cuda.marks import remember
from graph.fake_cuda.values import MOST_MASK_BYTES
from graph.hardware.profile import profile

ROWS, COLUMNS = 384, 400
QUESTIONS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda mask: mask == 1.0,
    lambda mask: mask.t()[7:] != 0,
    lambda mask: mask[3:, ::2] < 0.5,
    lambda mask: mask >= 0,
    lambda mask: mask > 1,
]
assert ROWS * COLUMNS * 2 > MOST_MASK_BYTES


@pytest.fixture(scope="module")
def runtime() -> Iterator[fake_cuda.Runtime]:
    with fake_cuda.fake_cuda(profile("A100-80GB", "2.13")) as found:
        yield found


def places(count: int) -> torch.Tensor:
    """So many of the mask's places, on the host."""
    return torch.randperm(ROWS * COLUMNS, generator=torch.Generator().manual_seed(0))[:count]


def mask_on(device: str, count: int, number: bool = False) -> torch.Tensor:
    """PEFT's `random_mask` of SHiRA: zeros, but ones at places drawn on the host."""
    weight = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device=device)
    index = places(count).to(device).unsqueeze(0)
    mask = torch.zeros_like(weight.view(1, -1))
    if number:
        return mask.scatter_(1, index, 1.0).view(weight.shape)
    return mask.scatter_(1, index, torch.ones_like(index.type(weight.dtype))).view(weight.shape)


@pytest.mark.parametrize("number", [False, True])
def test_a_mask_is_on_where_it_is_on_the_cpu(runtime: fake_cuda.Runtime, number: bool) -> None:
    here, there = (mask_on(device, 5000, number) for device in ("cpu", "cuda"))
    for ask in QUESTIONS:
        for one, other in zip(torch.where(ask(here)), torch.where(ask(there)), strict=True):
            assert one.tolist() == other.tolist()


def test_a_mask_that_is_written_again_is_none(runtime: fake_cuda.Runtime) -> None:
    added, scattered = mask_on("cuda", 5000), mask_on("cuda", 5000)
    added += torch.rand_like(added)
    scattered.view(-1).scatter_(0, places(7).cuda(), 3.0)
    for mask in (added, scattered):
        assert runtime.values.of(mask == 1.0) is None


def test_what_is_computed_with_what_is_there_is_no_mask(runtime: fake_cuda.Runtime) -> None:
    """`reduce="multiply"` leaves zeros zeros, `"add"` adds what comes twice."""
    for reduce in ("multiply", "add"):
        mask = torch.zeros(ROWS * COLUMNS, device="cuda")
        mask.scatter_(0, places(5).cuda(), 1.0, reduce=reduce)
        assert runtime.values.of(mask == 1.0) is None


def test_what_was_written_before_is_no_mask(runtime: fake_cuda.Runtime) -> None:
    zeros = torch.zeros(ROWS * COLUMNS, device="cuda")
    zeros.add_(torch.rand_like(zeros))
    zeros.scatter_(0, places(5).cuda(), 1.0)
    assert runtime.values.of(zeros == 1.0) is None


def weights_on(device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A router's weights of the two experts in eight that it chose for each token, in turn; 0 of the others."""
    tokens = torch.arange(40000, device=device).unsqueeze(1)
    chosen = (tokens + torch.arange(2, device=device)) % 8
    weights = torch.rand(40000, 2, device=device).add(0.1).to(dtype)
    return torch.zeros(40000, 8, dtype=dtype, device=device, requires_grad=True).scatter(1, chosen, weights)


def dispatched(weights: torch.Tensor) -> list[list[int]]:
    """How the well-known sparsely-gated mixture of experts finds each expert's tokens, and other ways."""
    experts = weights.nonzero()[:, 1]
    parts = (weights > 0).sum(0).tolist()
    return [
        [len(part) for part in torch.split(experts, parts)],
        experts.bincount(minlength=8).tolist(),
        weights.bool().sum(0).tolist(),
        weights.bool().int().T.contiguous().sum(1).tolist(),
        [len(torch.where(part)[0]) for part in weights.T],
        weights.detach().double().count_nonzero(0).tolist(),
        [len(part[part != 0]) for part in weights.unbind(1)],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_experts_are_where_they_are_on_the_cpu(runtime: fake_cuda.Runtime, dtype: torch.dtype) -> None:
    """Which numbers they are nobody knows: they count as more than 0, and how they compare with others is open."""
    here, there = (weights_on(device, dtype) for device in ("cpu", "cuda"))
    assert dispatched(there) == dispatched(here) == [[10000] * 8] * 7
    assert there.nonzero().tolist() == here.nonzero().tolist()
    assert runtime.values.of(there > 0.5) is None
    assert runtime.values.of(there.sum(0)) is None


def one_hot_on(device: str) -> torch.Tensor:
    """A hundred experts' choices by transformers' way, of more numbers than have values."""
    chosen = (torch.arange(50000, device=device).unsqueeze(1) + torch.arange(4, device=device)) % 100
    return torch.nn.functional.one_hot(chosen, 100)


def test_large_choices_are_counted_as_on_the_cpu(runtime: fake_cuda.Runtime) -> None:
    here, there = one_hot_on("cpu"), one_hot_on("cuda")
    assert runtime.values.of(there) is None
    for mask in (here, there):
        assert mask.sum((0, 1)).tolist() == [2000] * 100
        experts = mask.permute(2, 1, 0)
        expert = torch.tensor([7], device=mask.device)
        for part in (experts[7], experts[expert].squeeze(0), experts.index_select(0, expert)[0], experts[7].bool()):
            assert len(torch.where(part)[0]) == 2000
        assert experts.any(2).shape == (100, 4)
        assert experts.any(2).all().item()
    there[0] += 1
    assert runtime.values.of(there.sum((0, 1))) is None


def test_choices_of_zeros_made_of_a_router_s_scores(runtime: fake_cuda.Runtime) -> None:
    """Megatron-LM's: zeros of the scores' dtype, as integers, then booleans."""

    def counts(device: str) -> list[int]:
        scores = torch.rand(100000, 8, device=device)
        chosen = (torch.arange(100000, device=device).unsqueeze(1) + torch.arange(2, device=device)) % 8
        routed = torch.zeros_like(scores).int().scatter(1, chosen, 1).bool()
        return [*routed.sum(0).tolist(), len(scores.masked_select(routed))]

    assert counts("cuda") == counts("cpu")


def test_integers_that_are_written_again_are_no_mask(runtime: fake_cuda.Runtime) -> None:
    first, unknown = torch.zeros(20000, 1, dtype=torch.int64, device="cuda"), torch.rand(20000, 1000, device="cuda")
    for copied in (False, True):
        zeros = torch.zeros(20000, 1000, dtype=torch.int64, device="cuda").scatter_(1, first, 1)
        assert zeros.sum().item() == 20000
        zeros = zeros.copy_(unknown) if copied else zeros.add_(1)
        assert runtime.values.of(zeros.sum()) is None


def test_random_masks_are_on_as_often_as_is_to_be_expected(
    runtime: fake_cuda.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that a model is to guess, drawn on the GPU: of each row alike, and not where a mask of tokens says no."""
    monkeypatch.setattr(runtime.values, "finite", True)
    shape, tokens = (8, 4096), torch.arange(8 * 4096).view(8, 4096).cuda()
    half, known = tokens % 2 == 0, torch.full(shape, 0.15, device="cuda")
    drawn = [
        torch.rand(shape, device="cuda") < 0.15,
        torch.rand_like(known) >= 0.85,
        torch.zeros_like(tokens).float().uniform_(-1, 1) < -0.7,
        torch.bernoulli(known).bool(),
        torch.empty(shape, device="cuda").bernoulli_(0.15) > 0,
        torch.empty(shape, dtype=torch.bool, device="cuda").bernoulli_(0.15),
    ]
    for mask in drawn:
        count = round(0.15 * 8 * 4096)
        assert len(tokens[mask]) == sum(mask.sum(1).tolist()) == count
        assert max(mask.sum(1).tolist()) < 2 * min(mask.sum(1).tolist())
        assert (~mask).sum().item() == 8 * 4096 - count
        assert int((mask & half).sum()) == pytest.approx(count / 2, rel=0.1)
    assert int((drawn[0] & drawn[1]).sum()) == pytest.approx(0.15 * count, rel=0.2)
    assert runtime.values.of(torch.rand(shape, device="cuda").mul_(2) < 0.15) is None
    assert runtime.values.of(torch.zeros(shape, device="cuda").uniform_().mul_(2) < 0.15) is None
    assert runtime.values.of(torch.randn(shape, device="cuda") < 0.15) is None


def pictures(dtype: torch.dtype) -> torch.Tensor:
    return torch.rand(2, 3, 100, 100, generator=torch.Generator().manual_seed(1)).add(0.5).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_pictures_from_the_host_are_no_padding(runtime: fake_cuda.Runtime, dtype: torch.dtype) -> None:
    """As Idefics3, SmolVLM and LLaVA-OneVision look for pictures that are padding."""

    def real(pictures: torch.Tensor) -> torch.Tensor:
        seen = pictures.to(torch.bfloat16).view(1, *pictures.shape).flatten(0, 1)
        of_each = (seen == 0.0).sum(dim=(-1, -2, -3)) != seen.shape[1:].numel()
        return seen[of_each.contiguous()].contiguous()

    found = real(pictures(dtype).cuda())
    assert found.shape == real(pictures(dtype)).shape == (2, 3, 100, 100)


@pytest.mark.parametrize("rows", [100, 70_000])
@pytest.mark.parametrize(
    "largest",
    [
        lambda weights: torch.amax(weights[:-1], dim=1),
        lambda weights: weights.max(dim=1)[0],
        lambda weights: weights.norm(dim=-1),
        lambda weights: torch.linalg.vector_norm(weights, dim=1),
    ],
)
def test_no_row_of_weights_is_next_to_nothing(
    runtime: fake_cuda.Runtime,
    largest: Callable[[torch.Tensor], torch.Tensor],
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Unsloth looks for tokens that were never trained."""
    monkeypatch.setattr(runtime.values, "finite", True)
    weights = torch.nn.Parameter(torch.randn(rows, 64).bfloat16().cuda(), requires_grad=False)
    found = largest(weights) <= 1e-16
    both = found | torch.zeros_like(found)
    assert len(torch.where(found)[0]) == found.sum().item() == (found.cpu() & both.cpu()).sum() == 0
    computed = weights @ weights[:32].T
    assert runtime.values.of(torch.amax(computed, dim=1) <= 1e-16) is None  # may have come near to what it goes to
    assert runtime.values.of(largest(weights) <= 0.5) is None
    monkeypatch.setattr(runtime.values, "finite", False)
    assert runtime.values.of(largest(weights) <= 1e-16) is None


def test_shares_of_what_is_averaged_are_where_something_is(runtime: fake_cuda.Runtime) -> None:
    """As Gemma 4 pools the patches of an image, three by three, into the tokens that are not padding."""
    runtime.assumptions.clear()
    places = torch.cartesian_prod(torch.arange(48), torch.arange(48)).flip(-1)
    places = torch.nn.functional.pad(places, (0, 0, 0, 2520 - len(places)), value=-1).cuda()
    pooled = places.clamp(min=0).div(3, rounding_mode="floor")
    shares = torch.nn.functional.one_hot(pooled[:, 0] + 16 * pooled[:, 1], 280).float() / 9
    tokens = torch.randn(280, 64, device="cuda")[torch.logical_not((shares == 0).all(dim=0))]
    assert tokens.shape == (16 * 16, 64)
    assert not [what for what in runtime.assumptions if "not zero" in what]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_storages_on_the_host_are_no_masks(runtime: fake_cuda.Runtime, dtype: torch.dtype) -> None:
    """They are not counted: where they lie is some other storage's number, which would be taken for one."""
    marks = runtime.values.marks
    marks.restart()
    host = torch.tensor([0, 1], dtype=dtype).cuda().to("cpu", torch.int32)
    assert host.tolist() == [0, 1]
    assert runtime.storage(host) not in marks._masks


def test_the_first_weights_of_a_large_model_stay_weights(runtime: fake_cuda.Runtime) -> None:
    """Of Qwen3.5 27B, which has 1,184, the embedding is loaded first, and asked for tokens that were never trained."""
    weights = [torch.randn(8, 64).cuda() for _ in range(2000)]
    assert all(runtime.values.marks.is_data(one) for one in weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pictures_that_fill_up_a_batch_are_left_out(runtime: fake_cuda.Runtime, dtype: torch.dtype) -> None:
    """As Idefics3 and SmolVLM do, whose samples have different numbers of pictures."""
    runtime.assumptions.clear()
    batch = torch.randn(2, 3, 3, 16, 16)
    batch[1, 2] = 0
    batch[0, 0, 0] = 0  # a black part of one
    there = batch.cuda().to(dtype).view(6, 3, 16, 16)
    real = (there == 0.0).sum(dim=(-1, -2, -3)) != 3 * 16 * 16
    assert there[real].shape == (5, 3, 16, 16)
    assert real.tolist() == [True] * 5 + [False]
    assert (there[:5] != 0).all()
    assert not runtime.assumptions


def test_pictures_that_nobody_has_written_are_not_looked_at(
    runtime: fake_cuda.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are weights, in files of which nothing is read."""
    monkeypatch.setattr(runtime.values.marks, "seen", lambda tensor: False)
    monkeypatch.setattr(runtime.values, "finite", True)
    weights = torch.randn(64, 16, 3, 3)
    weights[3] = 0
    assert (weights.cuda() == 0.0).sum().item() == 0


def test_masks_from_the_host_may_be_any_number(runtime: fake_cuda.Runtime) -> None:
    mask = (pictures(torch.float32) > 1).float()
    there = mask.cuda()
    assert not runtime.values.marks.is_data(there)
    there.copy_(pictures(torch.float32))
    assert runtime.values.marks.is_data(there)
    there.copy_(mask)
    assert not runtime.values.marks.is_data(there)


@pytest.mark.parametrize("rows", [8, 300, 512])
def test_masks_can_be_copied_with_their_storage(
    runtime: fake_cuda.Runtime, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `copy.deepcopy` copies a model's buffers, for an average of it or for what it is compared with."""
    monkeypatch.setattr(runtime.values, "finite", True)
    drawn = (torch.rand(rows, rows, device="cuda") < 0.5).float()
    for mask in (torch.tril(torch.ones(rows, rows)).cuda(), drawn, torch.bernoulli(torch.full_like(drawn, 0.5))):
        copied = copy.deepcopy(mask)
        assert (copied.shape, copied.untyped_storage().nbytes()) == (mask.shape, mask.untyped_storage().nbytes())
        there = runtime.values.of(copied == 1)
        assert there is None or there.equal((mask == 1).cpu())
        assert not runtime.values.marks.places(mask.view(torch.uint8))  # bytes of it are none
    half = torch.full((rows, rows), 0.5, device="cuda")
    copied = copy.deepcopy(half)
    assert runtime.values.marks.numbers(copied) is None
    there = runtime.values.of(copied > 0.4)
    assert there is None or there.all()


def test_threads_that_remember_at_once() -> None:
    known: dict[int, None] = {}
    failed: list[threading.ExceptHookArgs] = []

    def work(first: int) -> None:
        for number in range(first, 40000, 4):
            remember(known, number, None, 8)

    before = sys.getswitchinterval()
    with mock.patch.object(threading, "excepthook", failed.append):
        sys.setswitchinterval(1e-6)
        try:
            threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(before)
    assert [args.exc_value for args in failed] == []
    remember(known, -1, None, 8)
    assert -1 in known
    assert len(known) == 8
