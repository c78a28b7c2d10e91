"""What programs make on a device beside tensors by operators: copies, generators, tensors by the names of types."""

from __future__ import annotations

import copy
import gc
import io
import json
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import save  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: E402
from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

from graph.errors import CaptureError  # noqa: E402
from graph.fake_cuda.device import Runtime, fake_cuda  # noqa: E402
from graph.fake_cuda.ranks.job import LAUNCHER, joined, launching  # noqa: E402
from graph.fake_cuda.ranks.messages import ranks_of  # noqa: E402
from graph.hardware.profile import profile as card  # noqa: E402
from graph.host.imports import changed  # noqa: E402
from tests.support.births import Births, Untold  # noqa: E402


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with fake_cuda(card("A100-80GB", "2.13")) as found:
        yield found


@pytest.fixture
def births(runtime: Runtime) -> Iterator[Births]:
    runtime.observer = found = Births(runtime)
    yield found
    runtime.observer = None


def test_a_copy_of_a_module_is_on_the_device_and_has_as_many_bytes(births: Births) -> None:
    model = torch.nn.Linear(10, 3, device="cuda")
    made = list(births.bytes)
    twin = copy.deepcopy(model)
    assert births.bytes[len(made) :] == made == [120, 12]
    assert twin.weight.is_cuda
    assert twin.weight.data_ptr() != model.weight.data_ptr()


def test_a_copy_keeps_whole_numbers(births: Births) -> None:
    assert copy.deepcopy(torch.tensor([3, 1, 2]).cuda()).tolist() == [3, 1, 2]


def test_what_was_saved_is_loaded_to_where_it_was(births: Births) -> None:
    file = io.BytesIO()
    torch.save({"steps": torch.tensor([4, 5]).cuda()}, file)
    file.seek(0)
    before = len(births.bytes)
    found = torch.load(file)["steps"]
    assert (found.is_cuda, found.tolist(), births.bytes[before:]) == (True, [4, 5], [16])


def test_what_was_saved_is_loaded_where_new_tensors_are_on_the_device(runtime: Runtime) -> None:
    """As on CUDA libraries that do nothing: what was on the host comes there, and a generator's state is there."""
    file = io.BytesIO()
    torch.save({"there": torch.tensor([4, 5]).cuda(), "here": torch.zeros(1 << 20)}, file)
    file.seek(0)
    with torch.device("cuda"):
        found = torch.load(file)
        state = torch.Generator(device="cuda").get_state()
    assert [found["there"].is_cuda, found["here"].is_cuda, state.is_cuda] == [True, False, False]


def test_generators_are_of_their_device(runtime: Runtime) -> None:
    ours, host = torch.Generator(device="cuda").manual_seed(3), torch.Generator()
    assert (ours.device, host.device) == (torch.device("cuda", 0), torch.device("cpu"))
    assert isinstance(ours, torch.Generator)
    assert isinstance(host, torch.Generator)
    assert torch.randn(4, device="cuda", generator=ours).is_cuda
    assert torch.randperm(9, device="cuda", generator=torch.cuda.default_generators[0]).shape == (9,)
    assert ours.set_state(ours.get_state()).initial_seed() == 3
    ours.set_offset(8)
    assert ours.get_offset() == 8
    assert ours.manual_seed(4).get_offset() == 0
    with pytest.raises(RuntimeError, match="offset must be a multiple of 4"):
        ours.set_offset(3)


def test_sizes_that_no_gpu_has_are_an_error(runtime: Runtime) -> None:
    """The program goes on if it catches it."""
    with pytest.raises(
        RuntimeError, match=r"^Storage size calculation overflowed with sizes=\[4611686018427387904, 3\]$"
    ):
        torch.empty(1 << 62, 3, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate more than 1EB memory"):
        torch.empty(1 << 60, device="cuda")
    assert torch.empty(3, device="cuda").shape == (3,)


def test_tensors_by_the_names_of_types(births: Births) -> None:
    made = torch.cuda.FloatTensor(3, 4)
    assert (made.shape, made.dtype, made.is_cuda, births.bytes) == ((3, 4), torch.float32, True, [48])
    assert isinstance(made, torch.cuda.FloatTensor)
    assert not isinstance(made, torch.cuda.LongTensor | torch.FloatTensor)
    assert torch.cuda.LongTensor([5, 6]).tolist() == [5, 6]
    assert torch.zeros(2).type(torch.cuda.HalfTensor).dtype is torch.float16


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_the_default_type_may_be_one_of_the_device(runtime: Runtime) -> None:
    try:
        torch.set_default_tensor_type("torch.cuda.DoubleTensor")
        assert (torch.zeros(2).is_cuda, torch.zeros(2).dtype) == (True, torch.float64)
        made = [
            torch.Tensor([1e10]),
            torch.Tensor(2, 3),
            torch.nn.Parameter(torch.Tensor(3)),
            torch.Tensor(torch.ones(2)),
        ]
        assert all(one.is_cuda and one.dtype is torch.float64 for one in made)
        assert not torch.FloatTensor([1.0]).is_cuda
    finally:
        torch.set_default_tensor_type("torch.FloatTensor")
    assert not any(one.is_cuda for one in (torch.zeros(2), torch.Tensor([1.0])))


def test_programs_may_be_profiled(runtime: Runtime, capfd: pytest.CaptureFixture[str]) -> None:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found, record_function("part"):
        torch.cuda.nvtx.range_push("inner")
        torch.ones(3, device="cuda").sum()
        torch.cuda.nvtx.range_pop()
    assert "part" in {event.key for event in found.key_averages()}
    assert "Failed to record CUDA event" not in capfd.readouterr().err


def test_a_program_that_spawns_its_ranks_is_the_first_of_them(runtime: Runtime) -> None:
    seen: list[object] = []

    def work(rank: int, world: int) -> None:
        dist.init_process_group("nccl", rank=rank, world_size=world)
        total = torch.ones(2, device=rank)
        dist.all_reduce(total)
        given: list[object] = [None]
        dist.scatter_object_list(scatter_object_output_list=given, scatter_object_input_list=["plan"] * world, src=0)
        assert given == ["plan"]
        seen.append((rank, dist.get_rank(), dist.get_world_size(), total.device))

    with joined(runtime, Untold()):
        assert torch.multiprocessing.spawn(work, args=(4,), nprocs=4) is None
        dist.destroy_process_group()
        assert torch.multiprocessing.spawn(seen.append, nprocs=2, join=False).join()
    assert seen == [(0, 0, 4, torch.device("cuda", 0)), 0]


def test_of_ranks_that_are_waited_for_elsewhere_the_others_end(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning waits for what the first rank puts in a queue, and looks at the processes it started."""
    seen: list[int] = []
    with joined(runtime, Untold()):
        started = torch.multiprocessing.start_processes(seen.append, nprocs=2, join=False)
        assert (started.join(), list(started.processes)) == (True, [])
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(SystemExit) as ended:
            torch.multiprocessing.start_processes(seen.append, nprocs=2, join=False)
    assert (seen, ended.value.code) == ([0, 1], 0)


def test_a_launch_of_a_function_is_the_first_rank_where_none_is_given(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the environment is as it was afterwards."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def work(word: str) -> tuple[str, int, int, str]:
        dist.init_process_group("nccl")
        return word, dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"]

    config = LaunchConfig(min_nodes=2, max_nodes=2, nproc_per_node=4)
    with joined(runtime, Untold()), changed({LAUNCHER: launching}):
        done = elastic_launch(config, work)("hello")
    assert done == dict.fromkeys(range(4), ("hello", 0, 8, "0"))
    assert "LOCAL_RANK" not in os.environ


def test_an_object_of_a_rank_that_is_not_recorded_is_missed(runtime: Runtime) -> None:
    """As the shapes that a pipeline's stage is sent by the one before."""
    with joined(runtime, Untold()):
        dist.init_process_group("nccl", rank=1, world_size=2)
        with pytest.raises(CaptureError, match=r"from a rank that is not recorded.*--ranks"):
            dist.recv_object_list([None], src=0)


def test_a_job_may_begin_with_a_barrier(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what its processes have in common, which ours do not (`_is_barrier_after_init`); OLMo-core asks for it."""
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    with joined(runtime, Untold()):
        dist.init_process_group("nccl", rank=0, world_size=2)
        assert dist.get_process_group_ranks(dist.new_group([0, 1])) == [0, 1]


def test_ranks_of_a_group_may_be_integers_of_numpy(runtime: Runtime) -> None:
    """As nanotron has them, from an array of all ranks: what other processes are told is plain."""
    with joined(runtime, Untold()):
        dist.init_process_group("nccl", rank=0, world_size=2)
        group = dist.new_group([*np.arange(2)])
        assert json.dumps(ranks_of(group)) == "[0, 1]"


def test_what_lightning_asks_of_a_job(runtime: Runtime) -> None:
    """Its barriers are gloo's monitored ones (fabric/utilities/distributed.py), and it reads DDP's log at the end."""
    with joined(runtime, Untold()):
        dist.init_process_group("nccl", rank=0, world_size=2)
        group = dist.new_group(backend="gloo")
        group.monitored_barrier()
        dist.monitored_barrier(group, timeout=timedelta(seconds=5), wait_all_ranks=True)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 2, device="cuda"))
        for _ in range(2):
            model(torch.ones(3, 6, device="cuda")).sum().backward()
        told = model._get_ddp_logging_data()
    assert (told["module_name"], told["world_size"], told["iteration"]) == ("Linear", 2, 0)
    assert told["total_parameter_size_bytes"] == 4 * (2 * 6 + 2)


def test_nothing_is_left_of_a_replica_that_the_program_lets_go(runtime: Runtime) -> None:
    """As a CUDA build: parameters and buckets die with DistributedDataParallel. So of a program that makes several."""
    with joined(runtime, Untold()):
        dist.init_process_group("nccl", rank=0, world_size=2)
        before = runtime.allocated()
        replica = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 2, device="cuda"))
        held = runtime.allocated() - before
        del replica
        gc.collect()
        assert (held > 0, runtime.allocated() - before) == (True, 0)


def test_collectives_on_the_host_need_a_backend_for_it(runtime: Runtime) -> None:
    with joined(runtime, Untold()):
        dist.init_process_group("nccl", rank=0, world_size=2)
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2), group=dist.new_group(backend="gloo"))
        dist.destroy_process_group()
        dist.init_process_group(rank=0, world_size=2)
        dist.all_reduce(torch.ones(2))


def test_batches_are_normalized_over_all_ranks(runtime: Runtime) -> None:
    """Statistics are fp32 where images are fp16 (cuda/Normalization.cu)."""
    norm = torch.nn.SyncBatchNorm(6, device="cuda")
    image = torch.ones(2, 6, 4, 4, device="cuda", dtype=torch.half, requires_grad=True)
    mean, scale = torch.batch_norm_stats(image, 1e-5)
    assert {(one.shape, one.dtype, one.is_cuda) for one in (mean, scale)} == {((6,), torch.float32, True)}
    with joined(runtime, Untold()):
        dist.init_process_group("nccl", rank=0, world_size=2)
        norm(image).sum().backward()
    assert image.grad is not None
    assert (image.grad.shape, image.grad.dtype) == (image.shape, torch.half)
    assert norm.weight.grad is not None
    assert (norm.weight.grad.shape, norm.weight.grad.dtype) == ((6,), torch.float32)


def test_evaluation_of_padded_texts_goes_without_nested_tensors(runtime: Runtime) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, device="cuda")
    model = torch.nn.TransformerEncoder(layer, 2).eval()
    padding = torch.tensor([[False, False, True]] * 2).to("cuda")
    with torch.no_grad():
        assert model(torch.ones(2, 3, 8, device="cuda"), src_key_padding_mask=padding).shape == (2, 3, 8)


def test_a_rank_saves_its_shards(runtime: Runtime, tmp_path: Path) -> None:
    with joined(runtime, Untold()):
        dist.init_process_group("nccl", rank=0, world_size=4)
        mesh = init_device_mesh("cuda", (4,))
        weight = distribute_tensor(torch.ones(8, 3, device="cuda"), mesh, [Shard(0)])
        save({"weight": weight}, checkpoint_id=tmp_path / "saved")
    assert (tmp_path / "saved" / ".metadata").exists()


def test_a_rank_saves_the_optimizer_states_of_all_parameters(runtime: Runtime) -> None:
    """Of the last layer rank 0 has no part, so no state either. The CUDA build of 2.13 on libraries that do nothing,
    whose ranks told each other by gloo, gave as many."""
    with joined(runtime, Untold()):
        dist.init_process_group("nccl", rank=0, world_size=2)
        layers = [torch.nn.Linear(64, 64), torch.nn.Linear(64, 256), torch.nn.Linear(256, 8)]
        model = FullyShardedDataParallel(torch.nn.Sequential(*layers).cuda(), use_orig_params=True, device_id=0)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(4, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        states = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    assert {name: tuple(state["exp_avg"].shape) for name, state in states.items()} == {
        **{"0.bias": (64,), "0.weight": (64, 64), "1.bias": (256,), "1.weight": (256, 64)},
        **{"2.bias": (8,), "2.weight": (8, 256)},
    }


def test_unsigned_numbers_beyond_the_signed_ones_are_read(runtime: Runtime) -> None:
    """torchtitan's seeds are some."""
    seeds = torch.tensor([-1, 3], device="cuda").view(torch.uint64)
    assert [seed.item() for seed in seeds] == seeds.tolist() == [(1 << 64) - 1, 3]


def test_a_generators_state_is_read_under_fake_tensors_too(runtime: Runtime) -> None:
    """As PyTorch's C++ makes it, below all modes: the partitioner of 2.6 asks for it there."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        state = torch.cuda.get_rng_state()
    assert type(state) is torch.Tensor
    assert state.dtype == torch.uint8
    assert state.tolist() == [0] * 16


class _Wrapper(Tensor):
    """A tensor around another one, as quantized ones are."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> _Wrapper:
        made: _Wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        return made

    @classmethod
    def __torch_dispatch__(cls, *call: object) -> object:
        raise NotImplementedError(call)


def test_a_tensor_around_another_one_has_a_size_and_no_data(runtime: Runtime) -> None:
    """Dynamo asks for it; a CUDA build answers the same."""
    storage = _Wrapper(torch.empty(4, 4, device="cuda")).untyped_storage()
    assert storage.size() == storage.nbytes() == 64
