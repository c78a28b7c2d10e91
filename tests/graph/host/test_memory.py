"""Large tensors on the host: nothing is written, and the generator goes on as if it were."""

from __future__ import annotations

import contextlib
import mmap
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn import init  # noqa: E402

from graph.fake_cuda.device import Runtime, fake_cuda  # noqa: E402
from graph.hardware.profile import profile  # noqa: E402
from graph.host import memory as host  # noqa: E402

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128)
#: Elements of large tensors of float32: multiples of 16 or not, and of what is drawn at a time.
SIZES = (1 << 20, (1 << 20) + 1, (1 << 20) + 15, (1 << 20) + (1 << 16) - 3)
FILLS: dict[str, Callable[..., Any]] = {
    "normal_": lambda x, **more: x.normal_(0.5, 0.02, **more),
    "uniform_": lambda x, **more: x.uniform_(-0.1, 0.1, **more),
    "exponential_": lambda x, **more: x.exponential_(2.0, **more),
    "cauchy_": lambda x, **more: x.cauchy_(**more),
    "log_normal_": lambda x, **more: x.log_normal_(**more),
    "random_": lambda x, **more: x.random_(**more),
    "bernoulli_.float": lambda x, **more: x.bernoulli_(0.3, **more),
    "bernoulli_.Tensor": lambda x, **more: x.bernoulli_(torch.full_like(x, 0.3), **more),
    "bernoulli_.Tensor, of another dtype": lambda x, **more: x.bernoulli_(torch.tensor([0.3]).double(), **more),
}
MAKERS: dict[str, Callable[[], Any]] = {
    "randn": lambda: torch.randn(1025, 1024),
    "rand": lambda: torch.rand(1025, 1024, dtype=torch.float64),
    "rand_like": lambda: torch.rand_like(torch.empty(1025, 1024)),
    "randint": lambda: torch.randint(5, (1025, 1024), dtype=torch.float32),
    "bernoulli": lambda: torch.bernoulli(torch.zeros(1025, 1024)),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(1025, 1024), 0.1),
    "Linear": lambda: torch.nn.Linear(1025, 1023),
    "Embedding": lambda: torch.nn.Embedding(1025, 1023),
    "kaiming_normal_": lambda: init.kaiming_normal_(torch.empty(1025, 1023)),
    "xavier_uniform_": lambda: init.xavier_uniform_(torch.empty(1025, 1023)),
    "xavier_normal_, transposed": lambda: init.xavier_normal_(torch.empty(1025, 1023).t()),
    "trunc_normal_, none outside": lambda: init.trunc_normal_(torch.empty(1025, 1023), std=0.02),
    "trunc_normal_": lambda: init.trunc_normal_(torch.empty(1025, 1023)),
    "trunc_normal_, most outside": lambda: init.trunc_normal_(torch.empty(1025, 1023), a=-0.2, b=0.9),
    "trunc_normal_, bfloat16": lambda: init.trunc_normal_(torch.empty(2050, 1023, dtype=torch.bfloat16), a=-1, b=1),
    "on meta": lambda: init.trunc_normal_(torch.nn.Linear(1025, 1023, device="meta").weight),
}


@contextlib.contextmanager
def runtime() -> Iterator[Runtime]:
    with fake_cuda(profile("A100", "2.13")) as made, host.untouched(made):
        yield made


def seeded(run: Callable[[], object]) -> bytes:
    """The state of the host's generator after `run`, from a seed and a few numbers."""
    torch.manual_seed(7)
    torch.randn(3)  # draws pairs, and keeps one number for the next call
    run()
    return bytes(torch.get_rng_state().tolist())


def same(runs: dict[str, Callable[[], object]]) -> dict[str, bool]:
    """Which leave the generator where they do without the device that is not there."""
    real = {name: seeded(run) for name, run in runs.items()}
    with runtime() as made:
        found = {name: seeded(run) == real[name] for name, run in runs.items()}
        assert made.assumptions == {}
    return found


@pytest.mark.parametrize("size", SIZES)
def test_what_fills_a_tensor_of_any_size_leaves_the_generator_as_in_a_real_run(size: int) -> None:
    def run(fill: Callable[..., Any]) -> Callable[[], object]:
        return lambda: fill(torch.empty(size))

    assert same({name: run(fill) for name, fill in FILLS.items()}) == dict.fromkeys(FILLS, True)


@pytest.mark.parametrize("step", [1, 2], ids=["contiguous", "strided"])
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=str)
def test_what_fills_a_tensor_of_any_dtype_leaves_the_generator_as_in_a_real_run(dtype: Any, step: int) -> None:
    size = host.LARGE // dtype.itemsize + 1

    def run(fill: Callable[..., Any]) -> Callable[[], object]:
        return lambda: fill(torch.empty(step * size, dtype=dtype)[::step])

    fills = {name: fill for name, fill in FILLS.items() if name == "normal_" or not dtype.is_complex}
    assert same({name: run(fill) for name, fill in fills.items()}) == dict.fromkeys(fills, True)


def test_what_is_made_of_random_numbers_leaves_the_generator_as_in_a_real_run() -> None:
    assert same(MAKERS) == dict.fromkeys(MAKERS, True)


def test_a_generator_of_the_programs_own_goes_on_alone() -> None:
    def own(fill: Callable[..., Any]) -> bytes:
        generator = torch.Generator().manual_seed(3)
        fill(torch.empty(SIZES[1]), generator=generator)
        return bytes(generator.get_state().tolist())

    def truncated(x: Any, generator: Any) -> object:
        return init.trunc_normal_(x, generator=generator)

    fills = {**FILLS, "trunc_normal_": truncated}
    real = {name: own(fill) for name, fill in fills.items()}
    with runtime():  # the first of a process looks whether PyTorch does what it should, with random weights
        pass
    before = torch.get_rng_state()
    with runtime():
        assert {name: own(fill) == real[name] for name, fill in fills.items()} == dict.fromkeys(fills, True)
    assert torch.equal(torch.get_rng_state(), before)


def test_data_is_shuffled_as_in_a_real_run() -> None:
    def order() -> list[int]:
        torch.manual_seed(0)
        torch.nn.Linear(2048, 2047)
        return [int(batch) for batch in torch.utils.data.DataLoader(range(100), shuffle=True)]

    real = order()
    with runtime():
        assert order() == real


def test_random_numbers_are_zeros() -> None:
    """Whatever was there before: nothing that a program looks at is left of it."""
    fills = {**FILLS, "trunc_normal_": init.trunc_normal_}
    tensors = {name: torch.full((SIZES[1],), 5.0) for name in fills}
    with runtime():
        for name, fill in fills.items():
            assert fill(tensors[name]) is tensors[name]
    assert {name for name, tensor in tensors.items() if tensor.any()} == set()


WIDE = 1030
#: Large tensors of numbers that a program says: masks, graphs, codes.
SAID: dict[str, Callable[[], Any]] = {
    "zeros": lambda: torch.zeros(WIDE, WIDE),
    "ones": lambda: torch.ones(WIDE, WIDE, dtype=torch.float64),
    "full": lambda: torch.full((WIDE, WIDE), 3.0),
    "eye": lambda: torch.eye(WIDE),
    "causal": lambda: torch.full((WIDE, WIDE), float("-inf")).triu(1),
    "causal, in bfloat16": lambda: torch.full((2 * WIDE, WIDE), float("-inf")).triu(1).to(torch.bfloat16),
    "one_hot": lambda: torch.nn.functional.one_hot(torch.arange(WIDE), WIDE).float(),
    "of a graph": lambda: torch.zeros(WIDE, WIDE).index_put_((torch.arange(9), torch.arange(9) * 3), torch.tensor(1.0)),
    "of a graph, in float64": lambda: SAID["of a graph"]().double(),
    "of a graph, twice": lambda: torch.cat([SAID["of a graph"](), torch.eye(WIDE)]),
    "a part": lambda: torch.ones(WIDE, WIDE)[3:].zero_()._base,
    "a part that is not contiguous": lambda: torch.ones(2 * WIDE, WIDE)[:, 3:].zero_()._base,
    "transposed": lambda: torch.ones(WIDE, WIDE).triu().t().contiguous(),
    "with channels last": lambda: (
        torch.zeros(2, 9, 300, 300).index_fill_(1, torch.tensor(4), 2.0).to(memory_format=torch.channels_last)
    ),
    "of itself": lambda: (whole := torch.eye(WIDE)).copy_(whole),
    "of itself, otherwise": lambda: (whole := torch.eye(WIDE)).copy_(whole.view(WIDE, WIDE)),
    "of few, transposed": lambda: torch.zeros(WIDE, WIDE).index_fill_(0, torch.tensor(3), 2.0).t().contiguous(),
    "numpy's": lambda: torch.from_numpy(np.eye(WIDE)).clone(),
    "shared": lambda: torch.ones(WIDE, WIDE).share_memory_().zero_(),
    "padded": lambda: torch.nn.functional.pad(torch.ones(WIDE, WIDE), (4, 4, 4, 4)),
}


@pytest.mark.parametrize("name", SAID)
def test_numbers_that_a_program_says_are_there(name: str) -> None:
    """Where freed memory is full of others."""
    real = SAID[name]()
    dirty = [torch.full((2 * WIDE, WIDE), 7.0) for _ in range(9)]
    del dirty
    with runtime():
        made = SAID[name]()
        assert (made.dtype, made.stride()) == (real.dtype, real.stride())
        assert torch.equal(made, real)


def test_zeros_and_copies_of_what_was_never_written_take_no_memory() -> None:
    with runtime():
        before = resident()
        weights = torch.empty(8 << 20).normal_()
        made = [weights.double(), weights.to(torch.bfloat16), torch.zeros(8 << 20), weights.clone().view(1024, -1).t()]
        made += [made[-1].contiguous(), torch.zeros(3, 8 << 20).double()]
        weights[5] = 1.0
        copy = weights.double()
        assert resident() - before < 2 << 20
        assert (int(copy.argmax()), float(copy.sum())) == (5, 1.0)


def test_bad_arguments_are_told_as_in_a_real_run() -> None:
    with runtime(), pytest.raises(RuntimeError, match="expects std >= 0"):
        torch.empty(SIZES[0]).normal_(0, -1)


def test_too_many_numbers_are_not_drawn_and_it_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MOST_DRAWN", 5 << 20)
    fill = FILLS["normal_"]
    once = seeded(lambda: fill(torch.empty(4 << 20)))
    with runtime() as made:

        def thrice() -> None:
            fill(torch.empty(4 << 20))
            assert made.assumptions == {}
            fill(torch.empty(2 << 20))
            fill(torch.empty(1 << 20))  # there would be time for it, to no avail

        assert seeded(thrice) == once
        (told,) = made.assumptions
    assert "not what a real run draws" in told


@pytest.mark.parametrize(
    ("a", "b"),
    [(-100, 100), (-4, 4), (-3, 3), (-2, 2), (-1, 2), (-0.5, 0.5), (-0.1, 0.1), (0, 0.2), (1, 3), (0.9, 1)],
)
def test_truncated_numbers_are_drawn_on_the_gpu_as_often_as_in_a_real_run(a: float, b: float) -> None:
    def choices(device: str, seed: int = 0) -> int:
        torch.manual_seed(seed)
        with mock.patch.object(torch, "where", wraps=torch.where) as chosen:
            init.trunc_normal_(torch.empty(300, 300, device=device), a=a, b=b)
        return chosen.call_count

    real = [choices("cpu", seed) for seed in range(9)]
    with runtime():
        assert min(real) <= choices("cuda") <= max(real)


@pytest.mark.parametrize("b", [0.1, 9.0], ids=["uniform numbers", "many rounds"])
def test_truncated_numbers_that_are_not_drawn_are_told(b: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MOST_DRAWN", 2 << 20)
    with runtime() as made:
        init.trunc_normal_(torch.empty(1 << 20), a=0, b=b)
        assert len(made.assumptions) == 1


def test_matrices_of_weights_can_be_inverted_on_the_host() -> None:
    """They are zeros; PEFT's FRoD inverts such products while it makes its adapters."""
    with runtime() as made:
        weight = torch.nn.Linear(64, 64).cuda().weight.detach().cpu()
        assert torch.linalg.inv(weight.T @ weight).shape == (64, 64)
        assert torch.linalg.cholesky(weight.T @ weight).shape == (64, 64)
        assert any("could not be factorized" in one for one in made.assumptions)
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.inv(torch.zeros(2, 2))


#: Above 32 MiB, which malloc always takes from the system anew.
JOINED: dict[str, Callable[[], Any]] = {
    "cat": lambda: torch.cat([torch.zeros(10000, 1024), torch.zeros(49, 1024)]),
    "cat, along the last": lambda: torch.cat([torch.zeros(1024, 10000), torch.zeros(1024, 49)], -1),
    "cat, of two dtypes": lambda: torch.cat([torch.zeros(10 << 20), torch.zeros(3, dtype=torch.float64)]),
    "cat, with nothing": lambda: torch.cat([torch.zeros(0), torch.zeros(10049, 1024)]),
    "cat, of images": lambda: torch.cat([torch.zeros(9, 8, 256, 256).to(memory_format=torch.channels_last)] * 2),
    "stack": lambda: torch.stack([torch.zeros(2048, 1024, dtype=torch.bfloat16)] * 9),
    "stack, behind": lambda: torch.stack([torch.zeros(4 << 20)] * 3, -1),
}


@pytest.mark.parametrize("name", JOINED)
def test_joined_tensors_lie_as_in_a_real_run_and_take_no_memory(name: str) -> None:
    def about(made: Any) -> tuple[Any, ...]:
        return made.shape, made.stride(), made.dtype, made.device

    real = about(JOINED[name]())
    with runtime():
        before = resident()
        made = JOINED[name]()
        assert resident() - before < made.nbytes // 2
        assert about(made) == real


def resident() -> int:
    """Bytes of this process that are in memory (proc(5), statm)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_small_tensors_and_integers_are_joined() -> None:
    with runtime():
        assert torch.cat([torch.ones(3), torch.zeros(2)]).tolist() == [1, 1, 1, 0, 0]
        assert int(torch.cat([torch.ones(1 << 20, dtype=torch.int64)] * 2).sum()) == 1 << 21
        images = torch.stack([torch.tensor(3.0).expand(3, 224, 224)] * 24)
        assert (images == 3).all()
        with pytest.raises(RuntimeError, match="Sizes of tensors must match except in dimension 0"):
            torch.cat([torch.empty(1 << 20, 2), torch.empty(3, 3)])


def test_a_file_that_is_gone_leaves_its_place_to_another() -> None:
    """Python may collect the first one late, when another lies where it was."""
    tensor = torch.zeros(8)
    first, second = (mmap.mmap(-1, mmap.PAGESIZE) for _ in range(2))
    host.unread(first, tensor)
    host.unread(second, tensor)
    del first
    assert not host._has_values(tensor)
    del second
    assert host._has_values(tensor)
