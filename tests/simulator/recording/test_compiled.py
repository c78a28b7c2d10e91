"""Recorded programs that call torch.compile: it compiles, for a GPU that is not there."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch")

import traces
from tests.simulator.recording.test_record import answer, folder_of, record
from traces.model import Op
from traces.release import installed_release

PROGRAM = """
import sys
import torch
from torch._dynamo.utils import counters

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)

    def forward(self, x):
        y = self.down(torch.nn.functional.gelu(self.up(x)))
        if "break" in sys.argv:
            torch._dynamo.graph_break()
        return x + y.softmax(-1)

device = "cpu" if "cpu" in sys.argv else "cuda"
net = Net().to(device)
mode = {"graphs": "reduce-overhead", "tuned": "max-autotune-no-cudagraphs"}.get(sys.argv[-1])
run = torch.compile(net, **({"backend": "eager"} if device == "cpu" else {"mode": mode}))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for rows in (64, 96, 128, 160):
    run(torch.randn(rows, 256, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
"""


ALIGNED = """
import json
import torch
from torch._inductor import config

NAMES = "requested_bytes.all.peak", "requested_bytes.all.allocated", "allocation.all.allocated"

def figures(dtype, tf32=False, **settings):
    # of a second step
    torch._dynamo.reset()
    torch.backends.cuda.matmul.allow_tf32 = tf32
    weight = torch.randn(50_257, 768, device="cuda", dtype=dtype, requires_grad=True)
    given = torch.randn(4096, 768, device="cuda", dtype=dtype)

    @torch.compile
    def logits(given, weight):
        return (given @ weight.t()).float().logsumexp(-1).sum()

    with config.patch(settings):
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()
            logits(given, weight).backward()
            weight.grad = None
    return [torch.cuda.memory_stats()[name] - before[name] for name in NAMES]

half = [figures(torch.bfloat16, **one) for one in ({}, {"shape_padding": False}, {"force_shape_pad": True})]
single = [figures(torch.float32, **one) for one in ({}, {"shape_padding": False}, {"force_shape_pad": True})]
print(json.dumps([half, single, figures(torch.float32, tf32=True)]))
"""


UNKNOWN = """
import sys
import torch

@torch.library.custom_op("mine::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

if "known" in sys.argv:
    twice.register_fake(torch.empty_like)
run = torch.compile(lambda x: twice(x).sum())
print(run(torch.randn(8, 64, device="cuda")).shape)
"""


def test_an_operator_that_dynamo_does_not_know_has_pytorchs_message_and_a_way_out(tmp_path: Path) -> None:
    """The way that is told is one."""
    folder_of(tmp_path, {"train.py": UNKNOWN})
    done = record(tmp_path, "train.py")
    assert done.returncode == 1
    assert "torch._dynamo.exc.TorchRuntimeError: " in done.stderr
    (told,) = (line for line in done.stderr.splitlines() if line.startswith("llmem: "))
    assert "torch.library.register_fake" in told
    done = record(tmp_path, "train.py", "known")
    assert (done.returncode, done.stdout) == (0, "torch.Size([])\n"), done.stderr


ASKING = """
import torch
from torch._dynamo.utils import counters

def blocks(x):
    card = torch.cuda.get_device_properties("cuda")
    torch.cuda.current_stream().synchronize()
    return x.new_empty(card.multi_processor_count + torch.cuda.current_device(), card.major)

def placed(x):
    with torch.cuda.device(0):
        return x * 2

def timed(x):
    event = torch.cuda.Event()
    event.record()
    y = x * 2
    event.synchronize()
    return y

def drawn(x):
    generator = torch.Generator("cuda")
    generator.manual_seed(1)
    return x + torch.rand(8, device="cuda", generator=generator)

for function in (blocks, placed, timed, drawn):
    torch._dynamo.reset()
    counters.clear()
    run = torch.compile(function, backend="eager", fullgraph=function is not drawn)
    print(tuple(run(torch.ones(8, device="cuda")).shape), sum(counters["graph_break"].values()))
print(type(torch.cuda.get_device_properties(0)).__name__)
"""


def test_what_compiled_code_asks_of_the_gpu_breaks_no_graph(tmp_path: Path) -> None:
    """As PyTorch 2.13.0+cu130 says: a GPU's figures are constants to Dynamo, its streams, events and contexts are known
    to it, and a generator's state is not (torch/_dynamo/variables)."""
    folder_of(tmp_path, {"train.py": ASKING})
    done = record(tmp_path, "--gpu", "H100-80GB", "train.py")
    said = ["(132, 9) 0", "(8,) 0", "(8,) 0", "(8,) 3", "_CudaDeviceProperties"]
    assert (done.returncode, done.stdout.splitlines()) == (0, said), done.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    """What the program prints without us, on the CPU, where modes change nothing: with a break, and without."""
    folder = folder_of(tmp_path_factory.mktemp("alone"), {"train.py": PROGRAM})
    start = functools.partial(subprocess.run, cwd=folder, capture_output=True, text=True, check=True)
    return {breaks: start([sys.executable, "train.py", "cpu", *["break"] * breaks]).stdout for breaks in (False, True)}


@pytest.mark.parametrize("words", [(), ("break",), ("graphs",), ("tuned",)])
def test_graphs_breaks_and_recompilations_are_pytorchs(
    words: tuple[str, ...], alone: dict[bool, str], tmp_path: Path
) -> None:
    """As many as without us, on the CPU. The second size makes sizes symbols; a break makes two graphs of one."""
    folder_of(tmp_path, {"train.py": PROGRAM})
    card = "H100-80GB" if "break" in words else "A100-80GB"  # of the first, Dynamo asks Triton for more (TMA)
    done = record(tmp_path, "-o", "trace.npz", "--gpu", card, "--steps", "all", "train.py", *words)
    assert (done.returncode, done.stdout) == (0, alone["break" in words]), done.stderr
    told = [text for text in answer(tmp_path)["assumptions"] if "CUDA graphs" in text]
    assert not told
    events = traces.read(tmp_path / "trace.npz").ranks[0].events
    names = [events.strings("name").get(place) for place in range(len(events)) if events.op[place] == Op.ALLOC]
    assert any(str(name).startswith(("up: extern_kernels.", "up: triton_")) for name in names)
    assert any("triton_" in str(name) and "softmax" in str(name) for name in names)
    assert not any("_orig_mod" in str(name) for name in names)


PARALLEL = """
import torch
import torch._inductor.config
from torch._inductor import async_compile
torch._inductor.config.compile_threads = 4
run = torch.compile(lambda x: x.sin() + 1, options={"compile_threads": 4})
print(run(torch.ones(4, device="cuda")).shape, async_compile.get_compile_threads())
"""


def test_kernels_are_made_in_the_program_itself(tmp_path: Path) -> None:
    """Whatever it asks for: in a process of its own a kernel would be compiled for a GPU."""
    folder_of(tmp_path, {"train.py": PARALLEL})
    done = record(tmp_path, "-q", "train.py")
    assert done.stdout == "torch.Size([4]) 1\n", done.stderr


MASKED = """
import torch
from torch._dynamo.utils import counters

def attend(x, mask):
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)

run = torch.compile(attend, dynamic=True)
for rows in (330, 348, 350, 352):
    run(torch.randn(2, 4, rows, 64, device="cuda"), torch.zeros(2, 1, rows, rows, device="cuda"))
print(counters["stats"]["unique_graphs"])
"""


def test_a_mask_of_any_length_is_compiled_once(tmp_path: Path) -> None:
    """A stride that is a symbol counts as not aligned (`aligned_tensor` of attention.cpp): there is no guard on it."""
    folder_of(tmp_path, {"train.py": MASKED})
    done = record(tmp_path, "--steps", "all", "train.py")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


PADDED = """
import torch

run = torch.compile(lambda a, b: a @ b)
a, b = (torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in ((8, 256), (256, 4125)))
run(a, b)
stats = torch.cuda.memory_stats()
print(stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"], stats["allocation.all.allocated"])
"""


def test_padding_of_a_product_is_measured_where_pytorch_measures_it(tmp_path: Path) -> None:
    """Also where memory bounds it. Recorded: PyTorch 2.13.0 (CUDA 13.0), Triton 3.7, on stub CUDA libraries."""
    folder_of(tmp_path, {"train.py": PADDED})
    done = record(tmp_path, "--steps", "all", "train.py")
    assert (done.returncode, done.stdout) == (0, "56874496 65011712 153\n"), done.stderr


SHARED = """
import torch
from torch._inductor.async_compile import AsyncCompile

torch.compile(lambda x: x.exp().exp())(torch.zeros(1 << 20, device="cuda"))
AsyncCompile.wait_pool_ready()  # of processes, which do not compile what comes before
one = torch.compile(lambda x: (x.sin() * 2).cos(), dynamic=True)
other = torch.compile(lambda x, w: ((x.sin() * 2).cos(), w @ w), dynamic=True)
x, y = (torch.zeros(1 << 20, device="cuda", requires_grad=True) for _ in range(2))
first, second = one(x), other(y, torch.zeros(64, 64, device="cuda"))[0]
first.sum().backward()
large = torch.empty(1 << 26, device="cuda")
second.sum().backward()
print(torch.cuda.max_memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"])
"""


def test_each_graph_tunes_the_kernels_that_it_shares(tmp_path: Path) -> None:
    """Both backwards are compiled before one of them runs. Recorded as the others, where processes compile."""
    folder_of(tmp_path, {"train.py": SHARED})
    done = record(tmp_path, "--steps", "all", "train.py")
    assert (done.returncode, done.stdout) == (0, "348259328 82\n"), done.stderr


FLOAT8 = """
import torch


def scaled(x, w):
    scale = 448.0 / x.abs().max().float().clamp(min=1e-12)
    one, other = ((t.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn) for t in (x, w))
    return torch._scaled_mm(one, other.t(), 1 / scale, 1 / scale, out_dtype=torch.bfloat16).relu()


x, w = (torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16) for rows in (8192, 1024))
y = torch.compile(scaled)(x, w)
y = torch.compile(scaled)(x, w)
print(torch.cuda.max_memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"])
"""


def test_casts_to_float8_are_compiled(tmp_path: Path) -> None:
    """Recorded as the others, on an H100: an A100 has no such type."""
    folder_of(tmp_path, {"train.py": FLOAT8})
    done = record(tmp_path, "--gpu", "H100-80GB", "--steps", "all", "train.py")
    assert (done.returncode, done.stdout) == (0, "138412032 106\n"), done.stderr


@pytest.mark.parametrize("on_gpu", [False, True])
def test_products_are_padded_as_on_a_gpu_where_they_are_measured(on_gpu: bool, tmp_path: Path) -> None:
    """50,257 rows do not begin at multiples of 16 bytes: tensor cores are faster with more, which PyTorch can be told
    to have in any case (`force_shape_pad`), or in none."""
    folder_of(tmp_path, {"program.py": ALIGNED})
    done = record(tmp_path, "--steps", "all", *(["--on-gpu"] if on_gpu else []), "program.py")
    assert answer(tmp_path)["exit_code"] == 0, done.stderr
    (half, never, always), (single, plain, forced), by_tensor_cores = json.loads(done.stdout.splitlines()[0])
    assert never != always
    assert plain != forced
    assert half == (always if on_gpu else never)
    assert single == plain
    assert by_tensor_cores == (forced if on_gpu else plain)


@pytest.mark.skipif(installed_release().startswith("2.6"), reason="from PyTorch 2.7 on")
def test_what_is_compiled_is_for_no_other_run(tmp_path: Path) -> None:
    """Unsloth keeps it below the user's home as a program ends, for the next one with this GPU."""
    program = """
        import atexit, torch
        def kept():
            print(torch.compiler.save_cache_artifacts())
        atexit.register(kept)
        torch.compile(lambda x: x * 2 + 1)(torch.ones(64, device="cuda"))
        kept()
    """
    done = record(folder_of(tmp_path, {"train.py": textwrap.dedent(program)}), "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "None\nNone\n"
