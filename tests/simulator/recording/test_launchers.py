"""What launchers would start: their programs, ranks and environment, and what the ranks of a job see."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from simulator.recording.launch import environment
from simulator.recording.launchers import Program, program_of
from simulator.recording.request import Request
from tests.places import DATA
from tests.simulator.recording.test_record import answer, folder_of, record
from traces.errors import ConfigError
from traces.release import DEFAULT_RELEASE, installed_release

FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 4
machine_rank: 0
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A program in the current folder."""
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path, {"train.py": "pass\n", "fsdp.yaml": FSDP})
    return "train.py"


@pytest.mark.parametrize(
    ("words", "processes", "nodes", "local"),
    [
        ("train.py --lr 1", 1, 1, ""),
        ("python -u train.py --lr 1", 1, 1, ""),
        ("torchrun --nproc-per-node 4 --nnodes 1:2 train.py --lr 1", 4, 2, ""),
        ("python -m torch.distributed.run --nproc-per-node=4 train.py --lr 1", 4, 1, ""),
        ("python3 -m torch.distributed.launch --nproc-per-node=2 train.py --lr 1", 2, 1, "--local-rank={}"),
        ("python3 -m torch.distributed.launch --use-env --nproc-per-node=2 train.py --lr 1", 2, 1, ""),
    ],
)
def test_programs_of_launchers(words: str, processes: int, nodes: int, local: str, script: str) -> None:
    launched = "torch" in words
    expected = Program("script", (script, "--lr", "1"), processes, nodes, {}, local, launched)
    assert program_of(words.split()) == expected


def test_a_single_rank_is_told_its_place_where_it_is_launched() -> None:
    request = Request(("train.py",), "script", "", "A100-80GB", "2.13")
    alone, launched = (environment(replace(request, launched=so)) for so in (False, True))
    assert "WORLD_SIZE" not in alone
    assert (launched["RANK"], launched["LOCAL_RANK"], launched["WORLD_SIZE"]) == ("0", "0", "1")


def test_modules(script: str) -> None:
    assert program_of(["--lr", "1"], "package.train") == Program("module", ("package.train", "--lr", "1"))
    found = program_of(["torchrun", "--nproc-per-node=2", "-m", "package.train", "--lr", "1"])
    assert found == Program("module", ("package.train", "--lr", "1"), 2, launched=True)


def test_gpus_are_counted_where_they_are_told(script: str) -> None:
    words = ["torchrun", "--nproc-per-node", "gpu", script]
    assert program_of(words, gpus=4).processes == 4
    with pytest.raises(ConfigError, match="--nproc-per-node gpu: give a number"):
        program_of(words)


@pytest.mark.filterwarnings("ignore")
def test_accelerate_gives_its_environment(script: str) -> None:
    pytest.importorskip("accelerate")
    found = program_of(["accelerate", "launch", "--config_file", "fsdp.yaml", script, "--lr", "1"])
    assert (found.words, found.processes, found.nodes) == ((script, "--lr", "1"), 4, 1)
    told = {
        name: found.environment.get(name) for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "FSDP_STATE_DICT_TYPE")
    }
    assert told == {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    assert found.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    plain = ["accelerate", "launch", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "fp16"]
    alone = program_of([*plain, "--dynamo_backend", "no", script])
    assert (alone.words, alone.processes) == ((script,), 1)
    assert alone.environment["ACCELERATE_MIXED_PRECISION"] == "fp16"
    with pytest.raises(ConfigError, match=r"accelerate launch: You can only use one of"):
        program_of(["accelerate", "launch", "--multi_gpu", "--use_fsdp", script])


@pytest.mark.filterwarnings("ignore")
def test_deepspeed_gives_the_local_rank(script: str) -> None:
    pytest.importorskip("deepspeed")
    found = program_of(["deepspeed", "--num_gpus", "2", script, "--deepspeed", "zero.json"])
    assert (found.words, found.processes, found.local) == ((script, "--deepspeed", "zero.json"), 2, "--local_rank={}")
    assert program_of(["deepspeed", "--include", "localhost:1,3,4", script]).processes == 3
    with pytest.raises(ConfigError, match="give --num_gpus"):
        program_of(["deepspeed", script])


COMMAND = """#!/usr/bin/env python3
import os, shlex, subprocess, sys
import torch
way, *words = sys.argv[1:]
script = os.path.join(os.path.dirname(__file__), "train.py")
ranks = f"torchrun --nproc-per-node={torch.cuda.device_count()} {script} " + " ".join(words)
print("begins", way, torch.cuda.device_count(), flush=True)
if way == "trains":
    torch.ones(1 << 20, device="cuda")
    print(subprocess.run([sys.executable, script, *words]).returncode)
if way == "script":
    subprocess.run([sys.executable, "-u", script, *words], env={**os.environ, "GIVEN": "so"}, check=True)
if way == "launcher":
    subprocess.run(shlex.split(ranks), check=True)
if way == "shell":
    subprocess.run('echo "it', shell=True)
    subprocess.check_call(ranks.replace("node=2", "node=gpu"), shell=True)
if way == "executes":
    os.execvp("torchrun", shlex.split(ranks))
if way == "in the process":
    from torch.distributed.run import get_args_parser, run
    run(get_args_parser().parse_args(shlex.split(ranks)[1:]))
if way == "warms":  # as importing Inductor does
    from torch._inductor import compile_worker
    subprocess.run([sys.executable, os.path.join(os.path.dirname(compile_worker.__file__), "__main__.py"), "--help"],
                   capture_output=True, check=True)
    subprocess.run([sys.executable, script], check=True)
if way == "asks":
    print(subprocess.run([sys.executable, "-c", "print(3)"], capture_output=True, text=True).stdout, end="")
"""
STARTED = """
import os, sys, torch
held = [torch.ones(1 << 20, device="cuda"), torch.ones(int(os.environ.get("RANK", 0)) << 20, device="cuda")]
print(sys.argv[1:], os.environ.get("WORLD_SIZE"), os.environ.get("GIVEN"))
"""


FAILS = "import sys\nsys.exit(1)\n"


def path_of_toy(folder: Path, script: str = STARTED) -> str:
    """A search path with the command `toy`, beside which there is a `script`."""
    folder_of(folder, {"bin/toy": COMMAND, "bin/train.py": script})
    (folder / "bin" / "toy").chmod(0o755)
    return os.pathsep.join((str(folder / "bin"), os.environ["PATH"]))


@pytest.mark.parametrize("way", ["launcher", "trains"])
def test_ranks_and_time_are_asked_of_what_a_command_starts(way: str, tmp_path: Path) -> None:
    found = path_of_toy(tmp_path)
    words = ("--time", "--nproc-per-node", "2", "--ranks", "1", "--json", "answer.json", "--", "toy", way)
    done = record(tmp_path, *words, PATH=found)
    if way == "trains":
        assert done.returncode == 1
        assert "error: --time is not there for one process on several GPUs" in done.stderr
        return
    assert done.stdout.splitlines() == ["begins launcher 2", "[] 2 None"], done.stderr
    assert [rank["peak_allocated"] >> 20 for rank in answer(tmp_path)["ranks"]] == [8]


def test_workers_of_pytorchs_are_not_what_a_command_starts(tmp_path: Path) -> None:
    done = record(tmp_path, "--json", "answer.json", "--", "toy", "warms", PATH=path_of_toy(tmp_path))
    assert done.stdout.splitlines() == ["begins warms 1", "[] None None"], done.stderr


@pytest.mark.parametrize("way", ["script", "launcher", "shell", "executes", "in the process"])
def test_what_a_command_starts_is_recorded(way: str, tmp_path: Path) -> None:
    found = path_of_toy(tmp_path)
    count = 1 if way == "script" else 2
    words = ("--nproc-per-node", str(count)) if count > 1 else ()
    done = record(tmp_path, *words, "--json", "answer.json", "--", "toy", way, "--lr", "1", PATH=found)
    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.splitlines()
    assert first == f"begins {way} {count}"
    told = "['--lr', '1'] 2 None" if count == 2 else "['--lr', '1'] None so"
    assert others == [told] * count
    peaks = [rank["peak_allocated"] >> 20 for rank in answer(tmp_path)["ranks"]]
    assert peaks == [4, 8][:count]


@pytest.mark.parametrize(("way", "said"), [("launcher", ["[] 2 None"] * 2), ("trains", ["1"]), ("script", [])])
def test_of_what_a_script_starts_ranks_are_recorded(way: str, said: list[str], tmp_path: Path) -> None:
    """A script of its own is a process beside it, which finds no GPU where PyTorch is built without CUDA."""
    folder_of(tmp_path, {"toy.py": COMMAND, "train.py": STARTED if way == "launcher" else FAILS})
    done = record(tmp_path, "--visible-gpus", "2", "--json", "answer.json", "toy.py", way)
    assert done.stdout.splitlines() == [f"begins {way} 2", *said], done.stderr
    assert done.returncode == (1 if way == "script" else 0)
    peaks = [rank["peak_allocated"] >> 20 for rank in answer(tmp_path)["ranks"]]
    assert peaks == {"launcher": [4, 8], "trains": [4], "script": [0]}[way]


@pytest.mark.parametrize(("way", "said"), [("trains", ["1"]), ("asks", ["3"])])
def test_a_command_that_trains_itself_is_recorded(way: str, said: list[str], tmp_path: Path) -> None:
    """It has something on the GPU already, or what it starts is no program of its own."""
    found = path_of_toy(tmp_path, FAILS)
    done = record(tmp_path, "--json", "answer.json", "--", "toy", way, PATH=found)
    assert done.stdout.splitlines() == [f"begins {way} 1", *said], done.stderr
    assert answer(tmp_path)["ranks"][0]["peak_allocated"] == (4 * 2**20 if way == "trains" else 0)


def test_files_that_are_not_pythons_are_refused(tmp_path: Path) -> None:
    texts = {"run": "#!/bin/bash\npython train.py\n", "run.sh": "python train.py\n", "tool": "\0ELF", "train": "pass\n"}
    folder_of(tmp_path, texts)
    for name in ("run", "run.sh", "tool"):
        with pytest.raises(ConfigError, match="is not a Python program; record what it starts, or put `llmem record`"):
            program_of([str(tmp_path / name)])
    with pytest.raises(ConfigError, match="no_command: is not a Python program, nor a launcher that is known"):
        program_of(["no_command", "--lr", "1"])
    assert program_of([str(tmp_path / "train"), "1"]) == Program("script", (str(tmp_path / "train"), "1"))


RANKS = """
import functools, os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def work(local, world):
    torch.cuda.set_device(local)
    if world is None:
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("nccl", rank=local, world_size=world)
    device = torch.device("cuda", local)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).to(device), device_ids=[local])
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    for _ in range(2):
        net(torch.ones(2, 64).to(f"cuda:{local}")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert {p.device for p in net.parameters()} == {device}
    assert torch.ones(1, device="cuda").device == torch.ones(1).cuda().device == device
    extra = torch.ones(dist.get_rank(), 1 << 20, device="cuda")
    print(dist.get_rank(), dist.get_world_size(), torch.cuda.current_device(), torch.cuda.device_count(), flush=True)

if __name__ == "__main__":
    if sys.argv[1:] == ["spawn"]:
        mp.spawn(work, (torch.cuda.device_count(),), nprocs=torch.cuda.device_count())
    elif sys.argv[1:] == ["launch"]:  # as accelerate's notebook_launcher does
        many = torch.cuda.device_count()
        config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=many, start_method="fork")
        done = elastic_launch(config, lambda world: work(int(os.environ["LOCAL_RANK"]), world))(None)
        assert sorted(done) == list(range(many))
    elif sys.argv[1:] == ["start"]:  # as PyTorch's tutorial "Writing distributed applications with PyTorch" does
        mp.set_start_method("spawn")
        ranks = [mp.Process(target=functools.partial(work, world=2), args=(rank,)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert [rank.exitcode for rank in ranks] == [0, 0]
    else:
        work(int(os.environ["LOCAL_RANK"]), None)
"""


@pytest.mark.parametrize(
    ("options", "words", "said"),
    [
        (
            ("--ranks", "0,3"),
            ("torchrun", "--nproc-per-node", "2", "--nnodes", "2", "train.py"),
            {"0 4 0 2", "3 4 1 2"},
        ),
        (("--nproc-per-node", "2", "--nnodes", "3", "--ranks", "5"), ("train.py",), {"5 6 1 2"}),
        (("--nproc-per-node", "2"), ("train.py", "spawn"), {"0 2 0 2", "1 2 1 2"}),
        (("--nproc-per-node", "2"), ("train.py", "launch"), {"0 2 0 2", "1 2 1 2"}),
        (("--nproc-per-node", "2"), ("train.py", "start"), {"0 2 0 2", "1 2 1 2"}),
    ],
)
def test_each_rank_has_the_gpu_of_its_number(
    options: tuple[str, ...], words: tuple[str, ...], said: set[str], tmp_path: Path
) -> None:
    done = record(folder_of(tmp_path, {"train.py": RANKS}), *options, "--", *words)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == said
    ranks = sorted(rank for one in answer(tmp_path)["ranks"] for rank in one["ranks"])
    assert ranks == sorted(int(line.split()[0]) for line in said)
    for one in answer(tmp_path)["ranks"]:
        (rank,) = one["ranks"]
        assert one["peak_allocated"] >= rank << 22


GROUP = """
import sys
import torch.distributed as dist

dist.init_process_group("gloo", **eval(sys.argv[1]))
print(dist.get_rank(), dist.get_world_size())
"""


@pytest.mark.parametrize(
    ("launcher", "given", "noted"),
    [
        ((), "{}", True),
        ((), "{'rank': 0}", True),
        ((), "{'rank': 0, 'world_size': 1, 'init_method': 'tcp://localhost:29500'}", False),
        (("torchrun",), "{}", False),
    ],
)
def test_a_group_that_no_launcher_started_is_said_to_be_of_one_rank(
    launcher: tuple[str, ...], given: str, noted: bool, tmp_path: Path
) -> None:
    """PyTorch refuses: "environment variable RANK expected, but not set"."""
    done = record(folder_of(tmp_path, {"train.py": GROUP}), "--", *launcher, "train.py", given)
    assert done.stdout == "0 1\n", done.stderr
    assumed = answer(tmp_path)["assumptions"]
    assert [one.partition(" starts a process group")[0] for one in assumed] == ["train.py:5 (<module>)"] * noted


BARRIERS = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group(*sys.argv[1:])
torch.cuda.init()  # before it memory_stats() is empty
names = [f"{name}_bytes.all.{value}" for name, value in (("allocated", "current"), ("requested", "current"))]


def said(what):
    stats = torch.cuda.memory_stats()
    peak, count = stats["allocated_bytes.all.peak"], stats["allocation.all.allocated"]
    print(what, *(stats[name] for name in names), peak, count)


dist.barrier()
dist.barrier()
said("barriers")
dist.barrier(device_ids=[0])
said("on a device")
dist.barrier(dist.new_group([0]))
said("of a group")
work = dist.barrier(async_op=True)
said("that goes on")
work.wait()
tensor = torch.zeros(4, device="cuda")
dist.all_reduce(tensor)
dist.barrier()
said("a collective")
dist.broadcast_object_list([1], 0)
said("an object")
print(dist.get_backend())
"""
#: What PyTorch 2.13.0+cu130 said of it on the stand-in for CUDA (tests/data/programs/README.md), by backend.
SAID_OF_BARRIERS = {
    "nccl": """\
barriers 0 0 1024 4
on a device 0 0 1024 6
of a group 0 0 1024 8
that goes on 512 4 1024 10
a collective 1024 20 2048 13
an object 1024 20 2560 16
nccl
""",
    "cpu:gloo,cuda:nccl": """\
barriers 0 0 0 0
on a device 0 0 1024 2
of a group 0 0 1024 2
that goes on 0 0 1024 2
a collective 512 16 1024 3
an object 512 16 1024 3
cpu:gloo,cuda:nccl
""",
}
SAID_OF_BARRIERS[""] = SAID_OF_BARRIERS["nccl"].replace("nccl", "undefined")


@pytest.mark.parametrize("backend", SAID_OF_BARRIERS)
def test_barriers_and_messages_take_memory_where_their_group_is(backend: str, tmp_path: Path) -> None:
    folder_of(tmp_path, {"train.py": BARRIERS})
    done = record(tmp_path, "-q", "--", "torchrun", "--nproc-per-node", "1", "train.py", *backend.split())
    assert done.stdout == SAID_OF_BARRIERS[backend], done.stderr


GATHERED = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
text, found, everywhere, mine = "x" * 5000, [None] * 4, [None] * 4, [None]
sent = [text]
for what in (
    lambda: dist.all_gather_object(found, text),
    lambda: dist.gather_object(text, everywhere if rank == 0 else None),
    lambda: dist.broadcast_object_list(sent),
    lambda: dist.scatter_object_list(mine, found if rank == 0 else None),
):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    what()
    print(torch.cuda.max_memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"] - before)
print(found == [text] * 4, everywhere == found, mine == sent)
"""
#: Of the first and any other rank: peak and allocations of `all_gather_object`, `gather_object` and
#: `broadcast_object_list`, as PyTorch 2.13.0+cu130 said where what it read was put right.
OF_OBJECTS = {0: ["47104 9", "26624 8", "6144 3"], 2: ["47104 9", "6656 7", "6144 5"]}


@pytest.mark.parametrize("rank", OF_OBJECTS)
def test_objects_take_on_the_device_what_they_take(rank: int, tmp_path: Path) -> None:
    folder_of(tmp_path, {"train.py": GATHERED})
    done = record(tmp_path, "-q", "--ranks", str(rank), "--", "torchrun", "--nproc-per-node", "4", "train.py")
    lines = done.stdout.splitlines()
    assert lines[:3] == OF_OBJECTS[rank], done.stderr
    assert lines[4] == f"True {rank == 0} {rank == 0}"


@pytest.mark.parametrize("name", ["collectives", "functional_collectives", "replicas"])
@pytest.mark.parametrize("rank", [0, 1])
def test_collectives_take_what_they_take(rank: int, name: str, tmp_path: Path) -> None:
    """Flat copies of lists, and what works keep: as PyTorch 2.13.0+cu130 said of both ranks (collectives.txt)."""
    program = DATA / "programs" / f"{name}.py"
    words = ("-q", "--steps", "all", "--ranks", str(rank), "--", "torchrun", "--nproc-per-node", "2", str(program))
    done = record(tmp_path, *words, PAUSE="0.11")
    expected = [
        line for line in program.with_suffix(".txt").read_text().splitlines() if line.startswith(f"rank{rank} ")
    ]
    assert done.stdout.splitlines() == expected, done.stderr


@pytest.mark.skipif(installed_release() != DEFAULT_RELEASE, reason="recorded with one release")
@pytest.mark.parametrize(("name", "word"), [("groups", 0), ("refused_collectives", 1), ("pipelines", 0), ("moved", 0)])
def test_groups_say_what_pytorchs_say(name: str, word: int, tmp_path: Path) -> None:
    """Of their backends, by whose devices checkpoints and optimizer states go; of what NCCL refuses: tensors that are
    not contiguous, sizes and splits that do not fit, dtypes and reductions that it has not; what pipelines keep of
    messages that they have sent; what sharded models take on their way to the host and back. A line has its rank as
    this word.
    """
    program = DATA / "programs" / f"{name}.py"
    done = record(tmp_path, "-q", "--", "torchrun", "--nproc-per-node", "2", str(program))
    said = sorted(done.stdout.splitlines(), key=lambda line: line.split()[word])
    assert said == program.with_suffix(".txt").read_text().splitlines(), done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_works_keep_what_they_keep_until_they_are_waited_for_or_seen(rank: int, tmp_path: Path) -> None:
    """As PyTorch 2.13.0+cu130 said of both ranks, in most of eight runs (works.txt).

    One exchange that nobody waits for was gone there before NCCL's watchdog should have looked: why is not known.
    """
    program = DATA / "programs" / "works.py"
    words = ("-q", "--ranks", str(rank), "--", "torchrun", "--nproc-per-node", "2", str(program))
    done = record(tmp_path, *words, PAUSE="0")
    lines = program.with_suffix(".txt").read_text().splitlines()
    expected = [line for line in lines if line.startswith(f"rank{rank} ")]
    found = done.stdout.splitlines()
    assert len(found) == len(expected), done.stderr
    differing = [pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]]
    assert [one for one, _ in differing] == [
        f"rank{rank} another collective 16777728 16777728 102",
        f"rank{rank} another collective, some time later 512 16777728 102",
    ]


PILED = """
import os
import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
weights = [torch.nn.Parameter(torch.empty(1 << 20, device="cuda")) for _ in range(4)]
model, optimizer = torch.nn.Identity(), torch.optim.SGD(weights)
for step in range(4):
    model(weights)
    for one in weights:
        one.grad = torch.ones_like(one)
    made = [dist.all_reduce(one.grad, async_op=True).get_future() for one in weights]
    torch.futures.collect_all(made).wait()
    optimizer.step()
    with torch.no_grad():
        made = [dist.all_gather(weights[i : i + world], weights[i + rank], async_op=True).get_future() for i in (0, 2)]
        torch.futures.collect_all(made).wait()
    made = one = None
    for one in weights:
        one.grad = None
    print(f"{torch.cuda.memory_allocated() >> 20} {torch.cuda.max_memory_allocated() >> 20}", flush=True)
os._exit(0)
"""


def test_works_pile_up_where_the_watchdog_has_not_looked(tmp_path: Path) -> None:
    """As PyTorch 2.13.0+cu130 said, whose four steps took less than 100 ms: gradients and what was gathered of every
    step are kept, where the program waits for futures and not for the works."""
    folder_of(tmp_path, {"train.py": PILED})
    words = ("-q", "--ranks", "0", "--steps", "all", "--", "torchrun", "--nproc-per-node", "2", "train.py")
    late = record(tmp_path, "--deferred", "late", *words).stdout.splitlines()
    assert late == ["48 48", "80 80", "112 112", "144 144"]
    assert record(tmp_path, *words).stdout.splitlines() == ["32 48"] * 4  # it looks within a step


GROUPS = """
import os
import time
import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
other, small = dist.new_group([0, 1]), torch.ones(8, device="cuda")

def said():
    torch.cuda.synchronize()
    time.sleep(0.3)
    print(torch.cuda.memory_allocated() >> 20)

dist.all_reduce(torch.ones(1 << 20, device="cuda"), group=other, async_op=True).get_future().wait()
said()
for group in (None, None, other):
    dist.all_reduce(small, group=group)
    said()
"""


def test_works_of_a_group_go_when_its_next_collective_begins(tmp_path: Path) -> None:
    """As PyTorch 2.13.0+cu130 said: a collective of another group lets go of nothing."""
    folder_of(tmp_path, {"train.py": GROUPS})
    done = record(tmp_path, "-q", "--ranks", "0", "--", "torchrun", "--nproc-per-node", "2", "train.py")
    assert done.stdout.split() == ["4", "4", "4", "0"], done.stderr


BUCKETS = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
layers = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(12)]).cuda()
model = torch.nn.parallel.DistributedDataParallel(layers, device_ids=[0])
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    model(torch.ones(4, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    x = torch.ones(8, device="cuda")
    for _ in range(2500):
        x.add_(1)
    time.sleep(0.3)  # more than the watchdog's 100 ms, where time passes
    print(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
"""


def test_the_first_buckets_of_ddp_go_before_the_next_step_where_it_begins_late(tmp_path: Path) -> None:
    """As PyTorch 2.13.0+cu130 did on one rank, without DDP's check of shapes, which reads what others sent."""
    folder_of(tmp_path, {"train.py": BUCKETS})
    done = record(tmp_path, "-q", "--steps", "all", "--", "torchrun", "--nproc-per-node", "1", "train.py")
    assert done.stdout.splitlines() == ["58950144 84164608", *["58950144 84165120"] * 2], done.stderr


CONSOLIDATED = """
import os
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
layers = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(6)]).cuda()
model = torch.nn.parallel.DistributedDataParallel(layers, device_ids=[rank])
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
model(torch.ones(4, 2048, device="cuda")).sum().backward()
optimizer.step()
torch.cuda.reset_peak_memory_stats()
optimizer.consolidate_state_dict(to=0)
print(rank, torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
if rank == 0:
    print("states", len(optimizer.state_dict()["state"]))
"""


def test_states_of_sharded_optimizers_come_to_one_rank(tmp_path: Path) -> None:
    """`_broadcast_object` of PyTorch's zero_redundancy_optimizer.py: the bytes, then the tensors that they become."""
    folder_of(tmp_path, {"train.py": CONSOLIDATED})
    done = record(tmp_path, "-q", "--steps", "all", "--", "torchrun", "--nproc-per-node", "2", "train.py")
    assert done.returncode == 0, done.stderr
    found = {word: int(number) for word, number in map(str.split, done.stdout.splitlines())}
    states = 2 * 3 * (2048 * 2048 + 2048) * 4  # of three layers, two each
    assert found["states"] == 12
    assert states <= found["1"] < states + (1 << 15)
    assert 2 * states <= found["0"] < 2 * states + (1 << 15)


RESULTS = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
x = torch.ones(1000, device="cuda")
work = dist.all_reduce(x, async_op=True)
work.wait()
print(len(work.result()), work.result()[0].shape[0], work.result()[0] is x)
whole = torch.empty(2000, device="cuda")
work = dist.all_gather_into_tensor(whole, x, async_op=True)
done = work.get_future_result()
work.wait()
print(len(work.result()), work.result()[0].shape[0], done.wait(), type(done.value()).__name__)
eighth = torch.ones(5, dtype=torch.float8_e4m3fn, device="cuda")
dist.all_reduce(eighth)
print(eighth.dtype)
"""


def test_works_give_results_and_floats_of_8_bits_are_reduced(tmp_path: Path) -> None:
    """As PyTorch 2.13.0+cu130 said on two ranks."""
    folder_of(tmp_path, {"train.py": RESULTS})
    done = record(tmp_path, "-q", "--ranks", "0", "--", "torchrun", "--nproc-per-node", "2", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1 1000 True", "1 2000 0 int", "torch.float8_e4m3fn"]


COMPILED = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]).cuda()
model = torch.compile(torch.nn.parallel.DistributedDataParallel(net, device_ids=[0]), backend="eager")
for step in range(3):
    model(torch.ones(4, 64, device="cuda")).sum().backward()
    net.zero_grad()
    print(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
"""


def test_dynamo_sees_no_frame_of_a_collective(tmp_path: Path) -> None:
    """As PyTorch 2.13.0+cu130 said on one rank, without DDP's check of shapes. Where Dynamo compiles what a collective
    does here it keeps the indices of the new buckets."""
    folder_of(tmp_path, {"train.py": COMPILED})
    done = record(tmp_path, "-q", "--steps", "all", "--", "torchrun", "--nproc-per-node", "1", "train.py")
    assert done.stdout.splitlines() == ["8653824 8724480", *["8720384 8791040"] * 2], done.stderr
    assert "Dynamo does not know" not in done.stderr


WARNED = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
model = torch.nn.Linear(8, 8).cuda()
replica = DistributedDataParallel(model, device_ids=[0], check_reduction=True)
for step in range(12):
    replica(torch.ones(2, 8, device="cuda")).sum().backward()
"""


PAUSED = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
layers = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]).cuda()
model = torch.nn.parallel.DistributedDataParallel(layers, device_ids=[0])
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    model(torch.ones(4, 512, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    time.sleep(0.3)
    print(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_first_buckets_of_ddp_go_where_the_host_pauses_before_the_step(tmp_path: Path) -> None:
    """As PyTorch 2.13.0+cu130 did on one rank, without DDP's check of shapes."""
    folder_of(tmp_path, {"train.py": PAUSED})
    done = record(tmp_path, "-q", "--steps", "all", "--", "torchrun", "--nproc-per-node", "1", "train.py")
    assert done.stdout.splitlines() == ["33734656 33752064"] * 3, done.stderr


def test_what_is_said_of_a_replica_has_the_line_that_makes_it(tmp_path: Path) -> None:
    folder_of(tmp_path, {"train.py": WARNED})
    done = record(tmp_path, "-q", "--", "torchrun", "--nproc-per-node", "1", "train.py")
    assert "train.py:8: FutureWarning: The `check_reduction` argument" in done.stderr
    assert done.returncode == 0


BOUND = """
import os
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

rank = int(os.environ["RANK"])
dist.init_process_group(device_id=torch.device("cuda", rank))
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("a", "b"))
part = dist.split_group(split_ranks=[[0, 1], [2, 3]])
made = dist.new_group([0, 1, 2])
said = dist.group.WORLD, mesh.get_group("a"), mesh.get_group("b"), part, made
print(*[f"{one.bound_device_id}{dist.get_process_group_ranks(one)}" for one in said])
torch.ones(2, device="cuda").sum()
dist.barrier(part)
print(torch.cuda.memory_stats()["allocation.all.allocated"], dist.get_backend())
"""


def test_groups_of_a_bound_device_are_bound_and_split(tmp_path: Path) -> None:
    folder_of(tmp_path, {"train.py": BOUND})
    done = record(tmp_path, "-q", "--ranks", "2", "--", "torchrun", "--nproc-per-node", "4", "train.py")
    groups = "cuda:2[0, 1, 2, 3] cuda:2[0, 2] cuda:2[2, 3] cuda:2[2, 3] cuda:2[0, 1, 2]"
    assert done.stdout == f"{groups}\n4 nccl\n", done.stderr
    assert "barrier(): using the device under current context" not in done.stderr


OPTIONS = """
from datetime import timedelta
import torch
import torch.distributed as dist

options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
print(options._timeout, options.config.max_ctas, dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO)
options.config.min_ctas = 1
dist.init_process_group("nccl", timeout=timedelta(minutes=2), pg_options=options)
found = dist.group.WORLD._get_backend(torch.device("cuda")).options
print(found._timeout, found.is_high_priority_stream)
dist.new_group(pg_options=dist.ProcessGroupNCCL.Options())
"""


def test_what_nccl_is_told_is_kept(tmp_path: Path) -> None:
    """Also by a build that has no NCCL; the answers are those of PyTorch 2.13.0+cu130."""
    folder_of(tmp_path, {"train.py": OPTIONS})
    done = record(tmp_path, "-q", "--nproc-per-node", "1", "train.py")
    assert done.stdout == "0:10:00 -2147483648 2\n0:02:00 True\n", done.stderr


SPLIT = """
import torch
first, second = torch.nn.Linear(64, 64).to("cuda:0"), torch.nn.Linear(64, 64).to("cuda:1")
second(first(torch.ones(2, 64, device="cuda:0")).to("cuda:1")).sum().backward()
"""


def test_a_second_gpu_is_refused_where_there_is_one_and_told_where_it_is_another_ranks(tmp_path: Path) -> None:
    """A process that is given one GPU has no other, unless it is another rank's."""
    look = "import torch\nwith torch.cuda.device(1):\n    torch.cuda.get_device_capability()\n"
    files = {"train.py": SPLIT, "set.py": "import torch\ntorch.cuda.set_device(1)\n", "look.py": look}
    program = folder_of(tmp_path, {**files, "make.py": f"{look}    torch.ones(1, device='cuda')\n"})
    for name in ("train.py", "set.py"):
        done = record(program, "--steps", "all", name, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 1
        assert "CUDA error: invalid device ordinal" in done.stderr
        assert "--visible-gpus how many one process works on (DataParallel, device_map)" in done.stderr
    done = record(program, "--steps", "all", "--nproc-per-node", "2", "--ranks", "0", "train.py")
    assert done.returncode == 0, done.stderr
    assert "train.py:4 (<module>) asks for cuda:1, another rank's GPU" in done.stderr
    for name, told in (("look.py", False), ("make.py", True)):  # looked at by a library, or used
        done = record(program, "--steps", "all", "--nproc-per-node", "2", "--ranks", "0", name)
        assert (done.returncode, "another rank's GPU" in done.stderr) == (0, told), done.stderr
    done = record(program, "--steps", "all", "--nproc-per-node", "2", "--ranks", "1", "set.py")
    assert (done.returncode, "another rank's GPU" in done.stderr) == (0, False), done.stderr
