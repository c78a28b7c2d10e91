"""One process on several GPUs: each has its memory, as real PyTorch has it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import traces
from tests.places import DATA
from tests.simulator.recording.test_record import answer, folder_of, record
from traces.release import DEFAULT_RELEASE, installed_release

PROGRAM = DATA / "programs" / "several_gpus.py"
SPLIT = """
import torch
first, second = torch.nn.Linear(1024, 4096).to("cuda:0"), torch.nn.Linear(4096, 1024).to("cuda:1")
optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
for _ in range(9):
    loss = second(first(torch.randn(64, 1024, device="cuda:0")).to("cuda:1")).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
OF_RANKS = """
import os
import torch
import torch.distributed as dist
print(torch.cuda.current_device(), torch.cuda.device_count())
own = int(os.environ["LOCAL_RANK"])
other = 1 - own
torch.cuda.set_device(own)
dist.init_process_group("nccl")
first, second = torch.nn.Linear(512, 2048).to(own), torch.nn.Linear(2048, 512).to(other)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512).to(own), device_ids=[own])
optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters(), *model.parameters()])
for _ in range(3):
    model(second(first(torch.randn(64, 512, device=own)).to(other)).to(own)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
for gpu in (own, other):
    with torch.cuda.device(gpu):
        figures = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.mem_get_info()
        print(*figures, torch.cuda.memory_stats()["allocation.all.allocated"])
"""
BOUND = """
import torch
import torch.distributed as dist
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
dist.all_reduce(torch.ones(1, device="cuda:0"))
try:
    dist.all_reduce(torch.ones(1, device="cuda:1"))
except dist.DistBackendError as error:
    print(error)
"""
#: What each of OF_RANKS prints; the last number is that of allocations.
FIGURES_OF_RANKS = (
    "0 2",
    "28366848 50331648 (85047640064, 85097971712) 80",
    "20981760 23068672 (85074903040, 85097971712) 30",
)
UNUSED = "import torch\nprint(torch.cuda.device_count())\nkept = torch.ones(1 << 20, device='cuda')\n"


@pytest.mark.skipif(installed_release() != DEFAULT_RELEASE, reason="recorded with one release")
def test_each_gpu_does_what_was_recorded(tmp_path: Path) -> None:
    """Copies between GPUs, which one is current, streams, errors, optimizers, a split model, nn.DataParallel, memory
    that runs out: as several_gpus.txt has it, of PyTorch 2.13.0+cu130."""
    asked = ("--steps", "all", "--visible-gpus", "2", "--gpu", "A100", str(PROGRAM))
    done = record(tmp_path, *asked, CUBLAS_WORKSPACE_CONFIG=":0:0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == PROGRAM.with_suffix(".txt").read_text().splitlines()


def test_what_is_told_of_each_gpu(tmp_path: Path) -> None:
    """The figures are those that real PyTorch said at the end of three steps."""
    program = folder_of(tmp_path, {"train.py": SPLIT})
    done = record(
        program, "--visible-gpus", "2", "--gpu", "A100", "-o", "trace.npz", "train.py", CUBLAS_WORKSPACE_CONFIG=":0:0"
    )
    assert done.returncode == 0, done.stderr
    found = answer(program)
    ranks = {tuple(rank["ranks"]): (rank["peak_allocated"], rank["peak_reserved"]) for rank in found["ranks"]}
    assert ranks == {(0,): (83_968_000, 85_983_232), (1,): (83_907_072, 88_080_384)}
    assert found["steps"] == 3  # the third did on each GPU what the second did
    assert "one process worked on GPUs 0-1, which are told of as the ranks of these numbers" in done.stderr
    trace = traces.read(program / "trace.npz")
    assert [rank.ranks for rank in trace.ranks] == [(0,), (1,)]
    for rank in trace.ranks:
        steps = {int(step) for step in rank.events.ints("step") if step >= 0}
        assert steps == {0, 1, 2, 3}  # phases are marked on both
        names = set(rank.events.strings("name").table)
        assert ("weight" in names, "weight.grad" in names, "weight.exp_avg" in names) == (True, True, True)


@pytest.mark.skipif(installed_release() != DEFAULT_RELEASE, reason="recorded with one release")
def test_ranks_that_work_on_each_others_gpus(tmp_path: Path) -> None:
    """Figures of PyTorch 2.13.0+cu130, of each rank on its own GPU and on the other one, which begins on the first;
    those of other ranks' GPUs are told of after the ranks."""
    program = folder_of(tmp_path, {"train.py": OF_RANKS})
    asked = ("--visible-gpus", "2", "--steps", "all", "--gpu", "A100-80GB", "--nproc-per-node", "2")
    done = record(program, *asked, "train.py", CUBLAS_WORKSPACE_CONFIG=":0:0")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(2 * FIGURES_OF_RANKS)
    found = {tuple(rank["ranks"]): rank["allocations"] for rank in answer(program)["ranks"]}
    assert found == {(0, 1): 80, (3, 4): 30}
    assert "rank 0 worked on GPU 0, and GPU 1, which is told of as rank 3" in done.stderr
    assert "rank 1 worked on GPU 1, and GPU 0, which is told of as rank 4" in done.stderr
    assert done.stderr.count("beside what GPUs' own ranks have: that is not added up") == 2


def test_a_group_of_a_device_takes_nothing_from_another_one(tmp_path: Path) -> None:
    """In the words of PyTorch 2.13.0+cu130."""
    program = folder_of(tmp_path, {"train.py": BOUND})
    done = record(program, "--visible-gpus", "2", "--nproc-per-node", "2", "--ranks", "0", "train.py")
    said = "Attempt to perform collective on tensor not on device passed to init_process_group"
    assert (done.returncode, done.stdout) == (0, f"{said}\n"), done.stderr


def test_a_rank_that_keeps_to_the_first_gpu(tmp_path: Path) -> None:
    """It is told of as the rank that it is."""
    program = folder_of(tmp_path, {"train.py": UNUSED})
    done = record(program, "--visible-gpus", "3", "--nproc-per-node", "2", "train.py")
    assert (done.returncode, done.stdout) == (0, "3\n3\n"), done.stderr
    assert [rank["ranks"] for rank in answer(program)["ranks"]] == [[0, 1]]
    assert "rank 1 worked on GPU 0" in done.stderr
    assert "rank 0 worked" not in done.stderr


def test_how_many_gpus_a_program_sees(tmp_path: Path) -> None:
    """As many as it is given, or as CUDA_VISIBLE_DEVICES names; what it does not use is not told."""
    program = folder_of(tmp_path, {"train.py": UNUSED})
    for asked, visible, count in (((), "", 1), ((), "2", 1), ((), "4,1,7", 3), (("--visible-gpus", "8"), "4", 8)):
        done = record(program, "--steps", "all", *asked, "train.py", CUDA_VISIBLE_DEVICES=visible)
        assert (done.returncode, done.stdout) == (0, f"{count}\n"), done.stderr
        assert [rank["ranks"] for rank in answer(program)["ranks"]] == [[0]]
        assert "one process worked on GPUs" not in done.stderr


@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        (("--nproc-per-node", "3", "train.py"), 1, "--visible-gpus 2: each of the 3 ranks of a node has a GPU"),
        (("--", "torchrun", "--nproc-per-node", "3", "train.py"), 1, "each of the 3 ranks of a node has a GPU"),
        (("--time", "train.py"), 1, "--time is not there for one process on several GPUs"),
        (("--visible-gpus", "9", "train.py"), 2, "9 is not in the range 1<=x<=8"),
    ],
)
def test_what_cannot_be_asked(asked: tuple[str, ...], code: int, said: str, tmp_path: Path) -> None:
    done = record(folder_of(tmp_path, {"train.py": UNUSED}), "--visible-gpus", "2", *asked)
    assert done.returncode == code
    assert said in done.stderr
