"""Programs with processes, threads and signals of their own: what was recorded is kept, and nothing is left running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.places import ROOT
from tests.simulator.recording.test_record import answer, folder_of, record
from tests.support import warm

MIB = 1 << 20
PROGRAM = """
import multiprocessing, os, signal, subprocess, sys, threading, time
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, place):
        return torch.full((4,), place)

def squared(x):
    return x * x

def leave(queue):
    queue.put("here")
    sys.exit(5)

def workers(how):
    many = 4 if how == "fork" else 2  # which import torch each
    loader = DataLoader(Numbers(), batch_size=4, num_workers=many, multiprocessing_context=how, pin_memory=True)
    print(sum(int(batch.cuda().sum()) for batch in loader))

def threads():
    sys.setswitchinterval(1e-6)
    kept = []

    def work():
        for _ in range(50):
            torch.ones(1 << 18, device="cuda")
        kept.append(torch.ones(1 << 18, device="cuda"))

    running = [threading.Thread(target=work) for _ in range(8)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    print(torch.cuda.memory_allocated() >> 20)

def processes(how):
    context = multiprocessing.get_context(how)
    queue = context.Queue()
    process = context.Process(target=leave, args=(queue,))
    process.start()
    said = queue.get()
    process.join()
    with context.Pool(2) as pool:
        print(said, process.exitcode, pool.map(squared, range(4)))

def children():  # forked while other threads allocate, they let go of tensors
    sys.setswitchinterval(1e-6)
    held = [torch.ones(100, device="cuda") for _ in range(50)]
    ended = threading.Event()

    def work():
        while not ended.is_set():
            torch.ones(100, device="cuda")

    def clear():
        held.clear()
        sys.exit(5)

    running = [threading.Thread(target=work) for _ in range(4)]
    for thread in running:
        thread.start()
    processes = [multiprocessing.get_context("fork").Process(target=clear) for _ in range(8)]
    for process in processes:
        process.start()
        process.join(20)
        process.kill()
    ended.set()
    print([process.exitcode for process in processes])

def forked():
    child = os.fork()
    if child == 0:
        os._exit(3)
    others = []
    for _ in range(40):
        other = os.fork()
        if other == 0:
            time.sleep(60)
            os._exit(4)
        os.kill(other, signal.SIGTERM)
        others.append(other)
    print(*{os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in others}, os.waitpid(child, 0)[1] >> 8)

def itself():
    print(subprocess.run([sys.executable, __file__, "nothing"], check=False).returncode)

def told_often():
    def tell():
        while True:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.001)

    threading.Thread(target=tell, daemon=True).start()
    time.sleep(60)

def sleeps():
    torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.3  # how often workers ask for their parent: 5 s
    batches = iter(DataLoader(Numbers(), batch_size=4, num_workers=2))
    for _ in range(2):  # of each worker one: a worker that starts after its parent's end waits for ever
        next(batches)
    print("ready", flush=True)
    time.sleep(60)

if __name__ == "__main__" and sys.argv[1:] != ["nothing"]:
    x = torch.ones(1 << 20, device="cuda")
    globals()[sys.argv[1]](*sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("words", "said", "peak"),
    [
        (("workers", "fork"), ["1984"], 4 * MIB),
        (("workers", "spawn"), ["1984"], 4 * MIB),
        (("threads",), ["12"], 12 * MIB),
        (("processes", "spawn"), ["here 5 [0, 1, 4, 9]"], 4 * MIB),
        (("processes", "fork"), ["here 5 [0, 1, 4, 9]"], 4 * MIB),
        (("children",), ["[5, 5, 5, 5, 5, 5, 5, 5]"], 4 * MIB),
        (("forked",), ["-15 3"], 4 * MIB),
        (("itself",), ["0"], 4 * MIB),
    ],
)
def test_processes_and_threads_of_a_program(words: tuple[str, ...], said: list[str], peak: int, tmp_path: Path) -> None:
    alone = "spawn" in words or words == ("itself",)  # what it starts begins as its process did
    how = warm.cold if alone else warm.run
    done = record(folder_of(tmp_path, {"train.py": PROGRAM}), "train.py", *words, run=how)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == said, done.stderr
    (rank,) = answer(tmp_path)["ranks"]
    assert peak <= rank["peak_allocated"] <= peak + 8 * MIB  # threads have one more each at most
    assert words[0] == "threads" or rank["peak_allocated"] <= peak + MIB


@pytest.mark.parametrize(
    ("number", "whole_group", "code"),
    [
        (signal.SIGINT, True, 130),
        (signal.SIGTERM, False, 143),
        (signal.SIGHUP, False, 129),
        (signal.SIGKILL, False, -9),
    ],
)
def test_signals_end_all_and_keep_what_was_recorded(number: int, whole_group: bool, code: int, tmp_path: Path) -> None:
    process = begun(tmp_path, "sleeps")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    (os.killpg if whole_group else os.kill)(process.pid, number)
    assert process.wait(60) == code
    for _ in range(100):
        if not running(process.pid):
            break
        time.sleep(0.1)
    assert running(process.pid) == []
    _, told = process.communicate()
    if number != signal.SIGKILL:
        assert answer(tmp_path)["exit_code"] == code
        assert answer(tmp_path)["ranks"][0]["peak_allocated"] == 4 * MIB
        assert f"the program ended with exit code {code}, and until then: fits" in told


def test_a_signal_that_comes_again_lets_it_be_written(tmp_path: Path) -> None:
    done = record(folder_of(tmp_path, {"train.py": PROGRAM}), "train.py", "told_often")
    assert done.returncode == 143, done.stderr
    assert answer(tmp_path)["ranks"][0]["peak_allocated"] == 4 * MIB


def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    """As nohup has it: the program goes on where its terminal is closed."""
    text = "import os, signal\nos.kill(os.getpid(), signal.SIGHUP)\nos.kill(os.getppid(), signal.SIGHUP)\nprint('on')\n"
    folder_of(tmp_path, {"train.py": text})
    words = ["nohup", sys.executable, "-m", "simulator", "record", "-q", "--", "train.py"]
    given = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=given, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "on\n"), done.stderr


def test_a_fault_of_compiled_code_is_told_with_its_place(tmp_path: Path) -> None:
    program = "import ctypes, torch\nctypes.string_at(torch.ones(4, device='cuda').data_ptr())\n"
    done = record(folder_of(tmp_path, {"train.py": program}), "train.py", run=warm.cold)
    assert done.returncode == 1
    assert f"was ended by signal {int(signal.SIGSEGV)} in <module> (" in done.stderr
    assert "train.py, line 2), where compiled code may have read a GPU's memory" in done.stderr


@pytest.mark.parametrize("alone", [False, True])
def test_ctrl_c_before_the_program_begins_ends_without_a_word_of_ours(alone: bool, tmp_path: Path) -> None:
    """`alone`: the program's process has it, and ours not yet."""
    process = begun(tmp_path, "sleeps")
    for _ in range(600):
        if len(running(process.pid)) > 1:  # it is there, and imports
            break
        time.sleep(0.02)
    if alone:
        time.sleep(0.5)  # until it is there, Ctrl-C is held back
        subprocess.run(["pkill", "-INT", "-P", str(process.pid)], check=True)
    else:
        os.killpg(process.pid, signal.SIGINT)
    said, told = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "")
    assert told.strip().endswith("interrupted")
    assert "Traceback" not in told
    assert not (tmp_path / "answer.json").exists()


def begun(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A recording of the program, in a session of its own, which SIGHUP ends also where the tests run under nohup."""
    folder_of(folder, {"train.py": PROGRAM})
    return subprocess.Popen(
        [sys.executable, "-m", "simulator", "record", "--json", "answer.json", "--", "train.py", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )


def running(session: int) -> list[str]:
    """The processes of a session, but for those that have ended."""
    found = subprocess.run(["ps", "-eo", "sid,stat,args"], capture_output=True, text=True, check=True).stdout
    lines = [line.split(None, 2) for line in found.splitlines()[1:]]
    return [" ".join(words) for words in lines if words[0] == str(session) and not words[1].startswith("Z")]


RANK = """
import os, time, torch
began = time.time()
x = torch.ones(1 << 20, device="cuda")
time.sleep(1)
print("ran", os.environ["RANK"], began, time.time())
"""


def test_as_many_ranks_run_at_once_as_there_are_cores_and_equal_ones_are_one(tmp_path: Path) -> None:
    count = 2 * (os.cpu_count() or 1)
    done = record(folder_of(tmp_path, {"train.py": RANK}), "--nproc-per-node", str(count), "train.py")
    assert done.returncode == 0, done.stderr
    (found,) = answer(tmp_path)["ranks"]
    assert found["ranks"] == list(range(count))
    spans = [tuple(map(float, line.split()[2:])) for line in done.stdout.splitlines()]
    at_once = max(sum(begin <= other[0] < end for begin, end in spans) for other in spans)
    assert (len(spans), at_once <= (os.cpu_count() or 1)) == (count, True)
    ended = re.findall(r"rank (\d+) has ended, (\d+) of (\d+)", done.stderr)
    assert sorted(int(rank) for rank, _, _ in ended) == list(range(count))
