"""What ranks say to each other: the same as over gloo; and when their processes begin, wait, and go on alone."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from simulator.recording import exchange
from simulator.recording.exchange import Connection, Exchange
from tests.places import DATA
from tests.simulator.recording.test_record import answer, folder_of, record

PROGRAM = DATA / "programs" / "between_ranks.py"
STORES = DATA / "programs" / "kept_by_name.py"
Rank = Callable[[Connection], object]


def job(ranks: Mapping[int, Rank], together: int, recorded: Sequence[int] | None = None) -> dict[int, object]:
    """What each rank says in the end, of ranks that are threads here."""
    exchange, said = Exchange(recorded or tuple(ranks), together), dict[int, object]()

    def work(rank: int, theirs: socket.socket) -> None:
        try:
            with contextlib.closing(Connection(theirs.detach())) as peers:
                said[rank] = ranks[rank](peers)
        finally:
            exchange.end(rank)

    threads = []
    for rank in ranks:
        threads.append(threading.Thread(target=work, args=(rank, exchange.begin(rank)), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return said


def everybody(key: str, rank: int, world: int) -> Rank:
    """A rank that gives its number, and takes everybody's."""
    others = [other for other in range(world) if other != rank]
    return lambda peers: peers.exchanged(key, list(range(world)), bytes([rank]), others)


def numbers(*ranks: int) -> dict[int, bytes]:
    return {rank: bytes([rank]) for rank in ranks}


@pytest.mark.parametrize("together", [1, 2, 3])
def test_ranks_that_wait_for_each_other_live_together(together: int) -> None:
    said = job({rank: everybody("k", rank, 3) for rank in range(3)}, together)
    assert said == {0: numbers(1, 2), 1: numbers(0, 2), 2: numbers(0, 1)}


def test_who_only_listens_begins_when_the_others_have_ended() -> None:
    living: list[int] = []
    most: list[int] = []

    def speaks(peers: Connection) -> None:
        living.append(0)
        peers.exchanged("k", [0, 1, 2], b"word", [])
        time.sleep(0.05)
        most.append(len(living))
        living.remove(0)

    def listens(rank: int) -> Rank:
        def run(peers: Connection) -> Mapping[int, bytes]:
            living.append(rank)
            heard = peers.exchanged("k", [0, 1, 2], b"", [0])
            most.append(len(living))
            living.remove(rank)
            return heard

        return run

    said = job({0: speaks, 1: listens(1), 2: listens(2)}, 1)
    assert said == {0: None, 1: {0: b"word"}, 2: {0: b"word"}}
    assert max(most) == 1


def test_ranks_that_are_not_recorded_are_missing() -> None:
    assert job({0: everybody("k", 0, 3), 2: everybody("k", 2, 3)}, 2) == {0: numbers(2), 2: numbers(0)}


def test_who_has_ended_is_missing_and_what_it_said_is_not() -> None:
    def later(peers: Connection) -> object:
        time.sleep(0.1)
        heard = peers.exchanged("first", [0, 1], b"", [0])
        return heard, peers.exchanged("second", [0, 1], b"", [0])

    said = job({0: lambda peers: peers.exchanged("first", [0, 1], b"word", []), 1: later}, 2)
    assert said[1] == ({0: b"word"}, {})


def test_ranks_that_can_wait_for_ever_do_not() -> None:
    said = job(
        {
            0: lambda peers: peers.exchanged("of 1", [0, 1], b"", [1]),
            1: lambda peers: peers.exchanged("of 0", [0, 1], b"", [0]),
        },
        1,
    )
    assert said == {0: {}, 1: {}}


def over_gloo(tmp_path: Path, program: Path, device: str) -> list[str]:
    """The lines of the program as two processes of PyTorch on the host run it."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    place = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    command = [sys.executable, "-W", "ignore", str(program), device]
    started = [
        subprocess.Popen(command, env={**place, "RANK": str(rank)}, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    return sorted(line for one in started for line in one.communicate(timeout=120)[0].splitlines())


@pytest.mark.slow
def test_values_come_as_over_gloo(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    expected = over_gloo(tmp_path, PROGRAM, "cpu")
    done = record(tmp_path, "--nproc-per-node", "2", "--steps", "all", str(PROGRAM), "cuda")
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank ")) == expected
    assert len(expected) == 44
    assert answer(tmp_path)["assumptions"] == []


@pytest.mark.slow
def test_stores_are_as_over_gloo(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    expected = over_gloo(tmp_path, STORES, "gloo")
    done = record(tmp_path, "--nproc-per-node", "2", "--steps", "all", str(STORES), "nccl")
    # 2 ranks of PyTorch 2.13's CUDA build
    of_group = {"barrier of the group": 2, "collectives of the group": 1, "its name": "nccl"}
    told = [f"rank {rank}: {what}: {found}" for rank in range(2) for what, found in of_group.items()]
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank ")) == sorted(expected + told)
    assert len(expected) == 42
    assert answer(tmp_path)["assumptions"] == []


def test_who_waits_for_a_store_begins_the_one_that_sets_it(tmp_path: Path) -> None:
    def waits(peers: Connection) -> object:
        return peers.exchanged("k", [0, 1, 2], b"", [1, 2], within=9.0)

    def sets(peers: Connection) -> object:
        return peers.exchanged("k", [0, 1, 2], b"set", [])

    never = everybody("never", 2, 3)
    said = job({0: waits, 1: sets, 2: never}, 1)
    assert said[0] == {1: b"set"}


def test_who_has_the_least_patience_goes_on_first() -> None:
    def short(peers: Connection) -> object:
        nobody = peers.exchanged("never", [0, 1], b"", [0], within=1.0)
        peers.exchanged("late", [0, 1], b"set", [])
        return nobody

    def long(peers: Connection) -> object:
        return peers.exchanged("late", [0, 1], b"", [1], within=300.0)

    assert job({0: long, 1: short}, 2) == {0: {1: b"set"}, 1: {}}


def test_several_wait_for_what_one_gives_that_has_not_begun() -> None:
    """Who waits for one of the others does not give himself what another one waits for."""

    def waits(peers: Connection) -> object:
        return peers.exchanged("k", [0, 1, 2, 3], b"", [0, 1, 2, 3], within=60.0)

    def sets(peers: Connection) -> object:
        return peers.exchanged("k", [0, 1, 2, 3], b"set", [])

    said = job({0: waits, 1: waits, 2: waits, 3: sets}, 2)
    assert [said[rank] for rank in range(3)] == [{3: b"set"}] * 3


def test_a_store_of_ranks_that_are_not_recorded(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = """
import torch.distributed as dist
dist.init_process_group("nccl")
store = dist.PrefixStore("mine", dist.TCPStore("localhost", 0, 2, False))
store.set("size/1", "7")
print(store.get("size/0"))
try:
    store.get("nothing")
except dist.DistStoreError as error:
    print(error)
"""
    folder_of(tmp_path, {"train.py": text})
    done = record(tmp_path, "--nproc-per-node", "2", "--ranks", "1", "train.py")
    assert "b'7'" in done.stdout
    assert "wait timeout after 300000ms, keys: /mine/nothing" in done.stdout
    (assumed,) = answer(tmp_path)["assumptions"]
    assert assumed.startswith("train.py:6 (<module>) takes what a rank keeps in a store that is not recorded")


@pytest.mark.parametrize(("asked", "assumed"), [((), 0), (("--ranks", "0"), 1)])
def test_ranks_that_look_into_a_store_until_a_key_is_there(
    asked: tuple[str, ...], assumed: int, tmp_path: Path
) -> None:
    """One waits for a rank that begins only where another has ended, or for one that is not recorded."""
    pytest.importorskip("torch")
    text = """
import time
import torch.distributed as dist
dist.init_process_group("nccl")
store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
store.set(f"done/{rank}", "")
while rank == 0 and not all(store.check([f"done/{other}"]) for other in range(5)):
    time.sleep(0.01)
if rank == 0:
    store.set("all", "")
while rank and not store.check(["all"]):
    time.sleep(0.01)
print(rank)
"""
    folder_of(tmp_path, {"train.py": text})
    done = record(tmp_path, "--nproc-per-node", "5", *asked, "train.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == (["0"] if asked else ["0", "1", "2", "3", "4"])
    assert len(answer(tmp_path)["assumptions"]) == assumed


def test_a_rank_alone_says_what_it_assumes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
sizes = torch.tensor([dist.get_rank() + 4], device="cuda")
dist.all_reduce(sizes, dist.ReduceOp.MAX)
torch.empty(int(sizes), device="cuda")
print(int(sizes))
"""
    folder_of(tmp_path, {"train.py": text})
    done = record(tmp_path, "--nproc-per-node", "2", "--ranks", "1", "train.py")
    (assumed,) = answer(tmp_path)["assumptions"]
    assert done.stdout == "5\n"
    assert assumed.startswith("train.py:5 (<module>) takes integers from ranks that are not recorded, or have ended")


#: Others read what the first has made: with NCCL, gloo, its monitored barrier, and one that is not waited for at once.
AT_BARRIERS = """
import os, time
import torch, torch.distributed as dist

dist.init_process_group("cpu:gloo,cuda:nccl")
hosts = dist.new_group(backend="gloo")
barriers = {
    "nccl": dist.barrier,
    "gloo": lambda: dist.barrier(hosts),
    "monitored": lambda: dist.monitored_barrier(hosts),
    "later": lambda: dist.barrier(async_op=True).wait(),
}
for name, barrier in barriers.items():
    if dist.get_rank() == 0:
        time.sleep(0.5)
        open(name, "w").close()
    barrier()
    print(name, os.path.exists(name), flush=True)
"""


#: All write into a folder that the first has made, and renames when all have.
RENAMED = """
import os, time
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
if rank == 0:
    os.mkdir("temporary")
dist.barrier()
time.sleep(0.5 * rank)
open(f"temporary/{rank}", "w").close()
dist.barrier()
if rank == 0:
    os.rename("temporary", "whole")
dist.barrier()
print(sorted(os.listdir("whole")), flush=True)
"""


def test_the_first_passes_a_barrier_after_all_others(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder_of(tmp_path, {"train.py": RENAMED})
    done = record(tmp_path, "--nproc-per-node", "3", "--ranks", "all", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['0', '1', '2']"] * 3


def test_threads_of_a_rank_ask_beside_each_other() -> None:
    """One keeps books while the first goes on: each waits for the other rank's thread of its kind."""

    def crossing(rank: int) -> Rank:
        def work(peers: Connection) -> object:
            booked: list[object] = []
            ask = everybody("books", rank, 2)
            thread = threading.Thread(target=lambda: booked.append(ask(peers)))
            if rank == 0:
                thread.start()
                time.sleep(0.3)  # the other rank's first thread waits for this one's, which computes
            found = everybody("main", rank, 2)(peers)
            if rank == 1:
                thread.start()
            thread.join()
            return found, *booked

        return work

    assert job({rank: crossing(rank) for rank in range(2)}, 2) == {
        rank: (numbers(1 - rank), numbers(1 - rank)) for rank in range(2)
    }


def test_a_thread_that_nobody_will_answer_goes_on_after_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank whose first thread may still have something to say."""
    monkeypatch.setattr(exchange, "_SILENCE", 1.0)

    def alone(peers: Connection) -> object:
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.append(everybody("k", 0, 2)(peers)))
        thread.start()
        thread.join()
        return found

    begun = time.monotonic()
    said = job({0: alone, 1: lambda peers: peers.exchanged("other", [0, 1], b"", [0])}, 2)
    assert said == {0: [{}], 1: {}}
    assert time.monotonic() - begun >= 1.0


def test_nobody_passes_a_barrier_before_the_first(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder_of(tmp_path, {"train.py": AT_BARRIERS})
    done = record(tmp_path, "--nproc-per-node", "2", "train.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(["nccl True", "gloo True", "monitored True", "later True"] * 2)


def test_one_more_begins_beside_those_that_run_where_one_is_waited_for() -> None:
    """Of four ranks, of which two run at once: the first waits for all, the second for the first, and the others need
    some time; each of those begins while another runs."""
    runs: list[tuple[float, float]] = []

    def first(peers: Connection) -> object:
        return peers.exchanged("come", [0, 1, 2, 3], b"", [1, 2, 3])

    def other(peers: Connection) -> object:
        begun = time.monotonic()
        time.sleep(0.5)
        runs.append((begun, time.monotonic()))
        peers.exchanged("come", [0, 1, 2, 3], b"", ())
        return peers.exchanged("first", [0, 1, 2, 3], b"", [0])

    def last(peers: Connection) -> object:
        found = first(peers)
        peers.exchanged("first", [0, 1, 2, 3], b"here", ())
        return found

    said = job({0: last, 1: other, 2: other, 3: other}, 2)
    assert said[3] == {0: b"here"}
    begins, ends = sorted(begin for begin, _ in runs), sorted(end for _, end in runs)
    assert begins[1] < ends[0]
