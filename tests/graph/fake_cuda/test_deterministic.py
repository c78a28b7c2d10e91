"""What has no deterministic kernel, with the words of PyTorch 2.13.0 (CUDA 13.0) on stub CUDA libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import functional as F  # noqa: N812

from graph.fake_cuda import device as fake_cuda
from graph.fake_cuda.device import Runtime
from graph.hardware.profile import profile


def r(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda", requires_grad=True)


def i(*size: int) -> torch.Tensor:
    return torch.zeros(*size, dtype=torch.int64, device="cuda")


#: Calls, and what the alert names (empty: it runs).
CALLS: list[tuple[Callable[[], torch.Tensor], str]] = [
    (lambda: F.adaptive_max_pool2d(r(1, 2, 8, 8), 3), "adaptive_max_pool2d_backward_cuda"),
    (lambda: F.adaptive_avg_pool2d(r(1, 2, 8, 8), 3), "adaptive_avg_pool2d_backward_cuda"),
    (lambda: F.adaptive_avg_pool2d(r(1, 2, 8, 8), 1), ""),
    (lambda: F.max_pool2d(r(1, 2, 8, 8), 2), ""),
    (lambda: F.max_pool3d(r(1, 2, 8, 8, 8), 2), "max_pool3d_with_indices_backward_cuda"),
    (lambda: F.pad(r(1, 2, 8), [1, 1], mode="reflect"), "reflection_pad1d_backward_out_cuda"),
    (lambda: F.pad(r(1, 2, 8, 8), [1, 1, 1, 1], mode="reflect"), ""),
    (lambda: F.interpolate(r(1, 2, 8, 8), scale_factor=2, mode="bilinear"), ""),
    (lambda: F.interpolate(r(1, 2, 8, 8), scale_factor=2, mode="bicubic"), "upsample_bicubic2d_backward_out_cuda"),
    (lambda: F.grid_sample(r(1, 2, 8, 8), r(1, 4, 4, 2), align_corners=False), "grid_sampler_2d_backward_cuda"),
    (lambda: F.embedding_bag(i(2, 4), r(10, 8), mode="max"), "embedding_bag_backward_cuda_max"),
    (lambda: F.embedding_bag(i(2, 4), r(10, 8), mode="sum"), ""),
    (lambda: F.cross_entropy(r(1, 3, 4, 4), i(1, 4, 4)), "nll_loss2d_forward_out_cuda_template"),
    (lambda: F.cross_entropy(r(4, 3), i(4)), ""),
    (
        lambda: F.ctc_loss(r(8, 1, 5).log_softmax(-1), i(1, 2) + 1, i(1).cpu() + 8, i(1).cpu() + 2),
        "ctc_loss_backward_gpu",
    ),
    (lambda: r(10, 8).take(i(4)), "put_"),
    (lambda: r(10, 8).scatter_reduce(0, i(4, 8), r(4, 8).detach(), "prod"), "scatter_reduce_cuda_prod_"),
    (lambda: r(10, 8).scatter_reduce(0, i(4, 8), r(4, 8).detach(), "sum"), ""),
    (lambda: r(10, 8).detach().scatter(0, i(4, 1), r(4, 1).detach(), reduce="multiply"), "scatter_reduce_cuda_kernel"),
    (lambda: r(10, 8).index_reduce(0, i(4), r(4, 8).detach(), "amax"), "index_reduce_cuda"),
    (lambda: i(4).bincount(), ""),
    (lambda: i(4).bincount(r(4).detach()), "_bincount_cuda"),
    (lambda: r(8).detach().histc(), "_histc_cuda with floating point input"),
]


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[Runtime]:
    with fake_cuda.fake_cuda(profile("A100-80GB", "2.13")) as runtime:
        yield runtime


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _run(call: Callable[[], torch.Tensor]) -> None:
    made = call()
    if made.requires_grad:
        torch.autograd.backward(made.sum())


@pytest.mark.parametrize(("call", "named"), CALLS)
def test_what_is_not_deterministic_ends_the_program(call: Callable[[], torch.Tensor], named: str) -> None:
    if not named:
        _run(call)
        return
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation, but you set") as caught:
        _run(call)
    assert str(caught.value).startswith(f"{named} does")


def test_it_runs_where_nobody_asked() -> None:
    torch.use_deterministic_algorithms(False)
    for call, _ in CALLS:
        _run(call)


def test_it_warns_where_a_warning_was_asked_for() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="put_ does not have a deterministic implementation"):
        _run(lambda: r(10, 8).take(i(4)))


#: Sizes of the target, of the index (1: expanded to the size that follows) and of the source, and the dimension.
PLACES = [
    ([6], [4], [4], 0),
    ([6], [4], [5], 0),
    ([6, 3], [4, 3], [4, 3], 0),
    ([6, 3], [4, 2], [5, 3], 0),
    ([6, 3], [6, 2], [6, 2], 1),
    ([2, 6, 3], [2, 4, 3], [2, 4, 3], 1),
    ([], [], [], 0),
]


@pytest.mark.parametrize(("target", "index", "source", "dim"), PLACES)
@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("name", ["scatter_", "scatter", "scatter_add_", "scatter_add", "index_add_", "index_copy"])
def test_what_is_written_is_what_the_host_writes(
    name: str, target: list[int], index: list[int], source: list[int], dim: int, expanded: bool, device: Runtime
) -> None:
    """Whole numbers have values."""
    place = torch.randperm(target[dim])[: index[dim]] if target else torch.tensor(0)
    if name.startswith("index"):
        source = [index[dim] if one == dim else extent for one, extent in enumerate(target)]
    else:
        around = [index[dim] if one == dim else 1 for one in range(len(index))]
        place = place.view(around).expand(index)
        place = place if expanded else place.contiguous()
    given = torch.randint(0, 100, target), place, torch.randint(0, 100, source)
    here, there = (
        getattr(one.clone(), name)(dim, at, values) for one, at, values in (given, [one.to("cuda") for one in given])
    )
    found = device.values.of(there)
    assert found is not None
    assert torch.equal(found, here)
