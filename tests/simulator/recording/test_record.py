"""`llmem record`: programs run as Python runs them, and end with what real PyTorch ended with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.accuracy import programs
from tests.places import ROOT
from tests.support import warm
from tests.support.several_lengths import ALLOCATED
from traces.release import DEFAULT_RELEASE, installed_release

TABLE = programs.table()
ROWS = {row["name"]: row for row in TABLE if row["rank"] == "0"}
#: Of PyTorch 2.13, other programs than those of `python -m tests.accuracy programs`, which takes longer.
PROGRAMS = (
    *("oom_retry", "oom_dies", "gpt_plain_fused_keepgrads", "varlen_gcthreshold", "compile_gpt_ac", "flex_train"),
    *("graph_whole_step", "graph_whole_step_gpt", "graph_callables", "graph_pools", "compile_graphs"),
    *("cudnn_benchmark", "graph_benchmark", "data_parallel", "streams"),
)


def record(folder: Path, *words: str, run: warm.Run = warm.run, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `llmem record` in a folder; `run` says how processes are started."""
    command = [sys.executable, "-m", "simulator", "record", "--json", "answer.json", "--force", *words]
    return run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), **environment})


def answer(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "answer.json").read_text())


@pytest.mark.parametrize("name", PROGRAMS if installed_release() == DEFAULT_RELEASE else ROWS)
def test_programs_end_with_the_recorded_figures(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    where = programs.copied(programs.FOLDER, None, tmp_path / "programs")
    alone = name == "flex_train"  # what its cycles keep alive goes by when Python collects: as in a real process
    ranks = ("--ranks", "0") if row["ranks"] != "1" else ()
    found, done = programs.run(row, where, *ranks, start=warm.cold if alone else warm.run)
    run = programs.Run(row, found)
    kept = {  # what its cycles keep alive; 512 bytes more than recorded where an error ends it, of no known tensor
        **dict.fromkeys(("varlen", "varlen_gcthreshold"), ("end_allocated", "end_reserved")),
        "oom_dies": ("end_allocated",),
    }.get(name, ())
    if installed_release() != DEFAULT_RELEASE:  # where a program makes fake tensors, FakeTensor's init_gpu_context
        kept += ("allocations",)  # takes 4 bytes for a moment, twice: captures leave that out
    assert {figure: pair for figure, pair in run.figures().items() if pair[0] != pair[1] and figure not in kept} == {}
    assert (found["exit_code"] == 0) == (row["ended"] == "ok")
    if name == "oom_dies":
        assert abs(run.figures()["end_allocated"][0] - run.figures()["end_allocated"][1]) <= 512
    if row["ended"] != "ok":
        assert row["ended"].partition(": ")[2] in done.stderr


def test_rare_parts_of_programs_take_what_they_take(tmp_path: Path) -> None:
    """Lazy modules, cells, transforms of torch.func, packed attention: as PyTorch 2.13.0+cu130 said."""
    program = ROOT / "tests/data/programs/parts.py"
    done = record(tmp_path, "-q", "--gpu", "A100-80GB", str(program))
    assert done.stdout == program.with_suffix(".txt").read_text(), done.stderr


def test_the_first_optimizer_imports_dynamo_which_the_collector_sees(tmp_path: Path) -> None:
    """PyTorch 2.13.0+cu130 had 302 passes of the young objects there, and 128,705 objects more when they were done."""
    program = tmp_path / "train.py"
    program.write_text("""
import gc, sys, torch
weight = torch.zeros(1, device="cuda", requires_grad=True)
for _ in range(2):
    before, objects = gc.get_stats()[0]["collections"], len(gc.get_objects())
    torch.optim.AdamW([weight])
    print(200 < gc.get_stats()[0]["collections"] - before < 400, "torch._dynamo" in sys.modules)
    print(110_000 < len(gc.get_objects()) - objects < 150_000)
""")
    done = record(tmp_path, "-q", str(program), run=warm.cold)
    assert done.stdout.split() == ["True", "True", "True", "False", "True", "False"], done.stderr


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("torch.cuda.init()", "83886080 96468992 False"),
        ("torch.cuda.get_device_capability()", "83886080 96468992 False"),
        ("torch.cuda.is_available(); torch.cuda.memory_stats(); torch.manual_seed(0)", "81788928 83886080 True"),
    ],
)
def test_settings_of_the_allocator_count_until_cuda_is_initialized(tmp_path: Path, first: str, expected: str) -> None:
    """As torchtune sets them, when other libraries have asked for the GPU; as PyTorch 2.13.0+cu130 said."""
    program = tmp_path / "train.py"
    program.write_text(f"""
import os, torch
{first}
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
for _ in range(3):
    some = [torch.empty(7 << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]
    large = torch.empty(25 << 20, dtype=torch.uint8, device="cuda")
    del some
segments = torch.cuda.memory_snapshot()
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), segments[0]["is_expandable"])
""")
    done = record(tmp_path, "-q", str(program))
    assert done.stdout.strip() == expected, done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "attention_by_token",  # its operators, with biases, windows, dropout, and gradients that share a tensor
        "fast_path",  # nn.TransformerEncoderLayer and nn.MultiheadAttention in evaluation without gradients
        "fourier",  # torch.fft and torch.stft
        "learnt_scales",  # quantization that training pretends, with scales that are learnt
    ],
)
def test_calls_take_what_they_took(name: str, tmp_path: Path) -> None:
    """As PyTorch 2.13.0+cu130 said after each call."""
    program = ROOT / f"tests/data/programs/{name}.py"
    done = record(tmp_path, "-q", "--gpu", "A100", str(program))
    assert done.stdout == program.with_suffix(".txt").read_text(), done.stderr


PADDED = """
import torch
layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True, device="cuda")
encoder = torch.nn.TransformerEncoder(layer, 1).eval()
with torch.no_grad():
    encoder(torch.ones(2, 4, 16, device="cuda"), src_key_padding_mask=torch.zeros(2, 4, device="cuda") > 0)
"""


def test_that_padding_is_kept_is_said(tmp_path: Path) -> None:
    """On a GPU nested tensors leave it out where it comes last, which is not known here."""
    done = record(folder_of(tmp_path, {"train.py": PADDED}), "train.py")
    assert "(TransformerEncoder.forward) asks for whether padding comes last" in done.stderr


def test_numbers_are_read_as_is_said(tmp_path: Path) -> None:
    program = "import torch; x = torch.rand(4).expand(4).cuda() @ torch.rand(4, device='cuda')\n"
    program += "print(x.item(), float(x > 0.5), x.cpu().tolist(), 1 / x.item())"
    folder_of(tmp_path, {"train.py": program})
    failed = record(tmp_path, "train.py")
    assert (failed.returncode, "record --floats 1 has them be 1" in failed.stderr) == (1, True)
    done = record(tmp_path, "--force", "--floats", "2", "train.py")
    assert done.stdout == "2.0 1.0 2.0 0.5\n", done.stderr


NUMBERED = """
import torch
weight = torch.ones(4, 4, device="cuda", requires_grad=True)
result = (weight * weight).sin()
(gradient,) = torch.autograd.grad(result.sum(), weight, create_graph=True)
product = gradient.grad_fn.next_functions[0][0]
print(product.name(), result.grad_fn._sequence_nr() - product._sequence_nr())
"""


def test_nodes_that_a_backward_makes_have_the_numbers_that_they_have_on_a_gpu(tmp_path: Path) -> None:
    """A thread's begin at 0: by them nodes of a gradient are ordered among those of the forward (here 1 and 3)."""
    done = record(folder_of(tmp_path, {"train.py": NUMBERED}), "train.py")
    assert done.stdout == "MulBackward0 -2\n", done.stderr


def test_snapshots_that_a_program_makes_have_the_history_that_it_asked_for(tmp_path: Path) -> None:
    """Entries, lines, blocks, and what an observer of memory that runs out is told: as PyTorch 2.13.0+cu130 said."""
    program = ROOT / "tests/data/programs/snapshots.py"
    done = record(tmp_path, "-q", "--gpu", "A100-80GB", "--steps", "all", str(program))
    assert done.stdout == program.with_suffix(".txt").read_text(), done.stderr


@pytest.mark.skipif(installed_release() != DEFAULT_RELEASE, reason="recorded with one release")
def test_what_is_refused_has_pytorchs_words(tmp_path: Path) -> None:
    """Shapes that do not fit, dimensions that are not there, dtypes without a kernel: what a program's mistake says."""
    program = ROOT / "tests/data/programs/refused.py"
    done = record(tmp_path, str(program))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == program.with_suffix(".txt").read_text().splitlines()


def test_the_largest_step_is_told(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = record(tmp_path, "--steps", "all", "--markdown", "report.md", str(programs.FOLDER / "lengths.py"))
    peaks = sorted(ALLOCATED)
    assert answer(tmp_path)["ranks"][0]["step_peaks"] == {
        "max": peaks[-1],
        "step": ALLOCATED.index(peaks[-1]),
        "p99": peaks[-1],
        "median": peaks[len(peaks) // 2],
    }
    told = "63.22 MiB in the median, 93.18 MiB at the 99th percentile, 93.18 MiB in step 2"
    assert told in done.stderr
    assert f"rank 0, of steps: {told}" in (tmp_path / "report.md").read_text()


def test_ranks_end_with_the_recorded_figures(tmp_path: Path) -> None:
    rows = [row for row in TABLE if row["name"] == "fsdp2_4"]
    where = programs.copied(programs.FOLDER, None, tmp_path / "programs")
    found, _ = programs.run(rows[0], where, "--ranks", "0,3", start=warm.run)
    assert sorted(rank for one in found["ranks"] for rank in one["ranks"]) == [0, 3]
    for row in (rows[0], rows[3]):
        assert {figure: pair for figure, pair in programs.Run(row, found).figures().items() if pair[0] != pair[1]} == {}


def test_events_that_complete_when_the_host_waits(tmp_path: Path) -> None:
    (row, _) = (row for row in TABLE if row["name"] == "fsdp1_2_gradop_orig")
    where = programs.copied(programs.FOLDER, None, tmp_path / "programs")
    found, _ = programs.run(row, where, "--ranks", "0", "--deferred", "late", start=warm.run)
    assert programs.Run(row, found, programs.LATE).figures() == {
        "peak_allocated": (1_126_979_072, 1_126_979_072),
        "peak_reserved": (1_608_515_584, 1_608_515_584),
    }


PROGRAM = """
import sys, os
import torch
import graph
from traces.deep import WIDTH

print("argv", sys.argv[1:], __name__, os.path.basename(sys.path[0]) or ".")
print(sys.stdin.read(), file=sys.stderr)
net = graph.Net(WIDTH).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
torch.cuda.reset_peak_memory_stats()
for step in range(3):
    net(torch.ones(8, WIDTH, device="cuda")).backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save(net.state_dict(), os.devnull)
print(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved())
raise SystemExit(7)
"""
OWN = {
    "train.py": PROGRAM,
    "graph.py": "import torch\n\nclass Net(torch.nn.Module):\n    def __init__(self, width):\n"
    "        super().__init__()\n        self.part = torch.nn.Linear(width, width, bias=False)\n\n"
    "    def forward(self, x):\n        return self.part(x).sum()\n",
    "traces/__init__.py": "",
    "traces/deep.py": "WIDTH = 640\n",
}


def folder_of(path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


#: How many lists a program makes after importing torch until a cycle is found that was looked at twice.
CYCLE = """
import gc
import weakref
import torch

class One:
    pass

one, gone = One(), []
one.me = one
weakref.finalize(one, gone.append, 1)
gc.collect(1)
del one
made = []
while not gone:
    made.append([])
print(len(made))
"""


def test_cycles_are_found_about_as_soon_as_where_torch_is_imported(tmp_path: Path) -> None:
    """In Python itself after some thousands; after 85,000 where the collector had looked at all that torch makes."""
    folder = folder_of(tmp_path, {"train.py": CYCLE})
    done = record(folder, "train.py", run=warm.cold)
    itself = subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, check=True)
    assert max(int(done.stdout), int(itself.stdout)) < 20_000


@pytest.mark.parametrize("words", [("train.py",), ("-m", "train"), ("--", sys.executable, "train.py")])
def test_modules_with_our_names_arguments_exit_code_and_streams(words: tuple[str, ...], tmp_path: Path) -> None:
    folder = folder_of(tmp_path, OWN)
    done = record(folder, "--steps", "all", *words, "--lr", "1", "-m", "x", run=warm.cold)
    lines = done.stdout.splitlines()
    assert done.returncode == 7, done.stderr
    assert lines[0] == f"argv ['--lr', '1', '-m', 'x'] __main__ {tmp_path.name}"
    allocated, peak, _ = map(int, lines[1].split())
    weight = 640 * 640 * 4
    assert allocated >= weight
    found = answer(folder)
    (rank,) = found["ranks"]
    assert (found["exit_code"], found["steps"], rank["peak_allocated"]) == (7, 3, peak)
    names = [(phase["name"], phase["step"]) for phase in rank["phases"]]
    assert names[:5] == [("load", None), ("forward", 0), ("backward", 0), ("optimizer", 0), ("forward", 1)]
    assert ("saving", 1) in names
    assert found["assumptions"] == []


def test_it_ends_after_the_steps_asked_for(tmp_path: Path) -> None:
    done = record(folder_of(tmp_path, OWN), "--steps", "2", "train.py")
    assert done.returncode == 0, done.stderr
    assert answer(tmp_path)["steps"] == 2


RAISES = """
import torch

def inner():
    x = torch.ones(1 << 20, device="cuda")
    {ending}

inner()
"""


@pytest.mark.parametrize(
    ("ending", "code", "told"),
    [
        ("raise ValueError('no good')", 1, "ValueError: no good"),
        ("import os; os._exit(9)", 9, ""),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("print(x[0].item())", 0, "train.py:6 (inner) asks for the value of a float32: 0.0 is assumed"),
    ],
)
def test_what_was_recorded_is_kept_however_it_ends(ending: str, code: int, told: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"train.py": RAISES.format(ending=ending)})
    done = record(folder, "train.py")
    assert done.returncode == code, done.stderr
    assert told in done.stderr
    if code == 1:
        frames = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
        assert [frame.split('"')[1] for frame in frames] == ["train.py", "train.py"]
    assert answer(folder)["ranks"][0]["peak_allocated"] == 4 << 20


def test_the_report_says_how_the_program_ended(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"train.py": RAISES.format(ending="print(x[0].item()); raise SystemExit(3)")})
    done = record(folder, "--markdown", "report.md", "--html", "page.html", "train.py", "a `b|")
    assert done.returncode == 3, done.stderr
    report = (folder / "report.md").read_text()
    assert report.startswith("### the program ended with exit code 3, and until then: fits: needs ")
    assert "`train.py 'a 'b|'`" in report
    assert "| 0 | 4.00 MiB | 20.00 MiB | " in report
    assert r"train.py:6 (inner) asks for the value of a float32: 0.0 is assumed" in report
    page = (folder / "page.html").read_text()
    assert "The program ended with exit code 3, and until then: fits" in page
    again = record(folder, "train.py", "--markdown", "report.md")  # the program's own: ours come first
    assert (again.returncode, (folder / "report.md").read_text()) == (3, report)


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ((), 1, "error: no program is given: options come first, then train.py ARGS..."),
        (("absent.py",), 1, "error: absent.py: is not a file: options come first, then train.py ARGS..."),
        (("--", "no_launcher", "x.py"), 1, "error: no_launcher: is not a Python program, nor a launcher that is known"),
        (("--steps", "0", "x.py"), 1, "error: "),
        (("--gpu", "none", "x.py"), 1, "error: "),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], code: int, line: str, tmp_path: Path) -> None:
    done = record(tmp_path, *words)
    assert done.returncode == code
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
