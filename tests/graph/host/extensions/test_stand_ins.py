"""Programs with compiled extensions of others."""

from __future__ import annotations

import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from graph.host.extensions import xformers
from graph.host.extensions.stand_ins import way_out
from tests.places import ROOT
from tests.simulator.recording.test_record import answer, folder_of, record

#: What installs flash-attn's Python side alone.
PYTHON_SIDE = "FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE"
EIGHT_BIT = """
import torch
import bitsandbytes

net = torch.nn.Linear(1024, 1024, bias=False).cuda()
quantized = bitsandbytes.nn.Linear4bit(1024, 1024, bias=False, compute_dtype=torch.bfloat16).cuda()
optimizer = bitsandbytes.optim.AdamW8bit(net.parameters())
for _ in range(2):
    quantized(net(torch.ones(4, 1024, device="cuda"))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
states = [one for one in optimizer.state[net.weight].values() if isinstance(one, torch.Tensor) and one.ndim == 2]
print(quantized.weight.dtype, *(state.dtype for state in states))
print(bitsandbytes.functional.lib.cdequantize_blockwise_bf16_nf4.restype.__name__)
"""


def test_bitsandbytes_runs_and_says_nothing(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    done = record(folder_of(tmp_path, {"train.py": EIGHT_BIT}), "--steps", "all", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch.uint8 torch.uint8 torch.uint8\nc_int\n"  # functions as ctypes has them
    assert "libcu" not in done.stderr
    known = 2 * (4 << 20) + (512 << 10) + 2 * (1 << 20) + 8_519_680  # weight, gradient, 4 bits, states; cuBLAS's
    assert (
        known <= answer(tmp_path)["ranks"][0]["peak_allocated"] <= known + (3 << 20)
    )  # with weights of 4 bits as bf16


#: As bitsandbytes before 0.46 quantizes: what it packs into are zeros, so that they have values at first.
MANY_BYTES = """
import ctypes
import torch
from bitsandbytes import functional

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

packed, before = [], resident()
for _ in range(12):
    packed.append(torch.zeros(16 << 20, dtype=torch.uint8, device="cuda"))
    functional.lib.cquantize_blockwise_bf16_nf4(ctypes.c_void_p(packed[-1].data_ptr()), ctypes.c_int(64))
print((resident() - before) >> 20)
"""


def test_what_a_library_wrote_takes_no_memory_of_the_host(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    done = record(folder_of(tmp_path, {"train.py": MANY_BYTES}), "--steps", "all", "train.py")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100  # of 192 MiB that the 12 are


#: As bitsandbytes up to 0.42 looks for CUDA when it is imported (cuda_setup/main.py, cextension.py).
OLD_BITSANDBYTES = {
    "bitsandbytes/cuda_setup/__init__.py": "",
    "bitsandbytes/cuda_setup/main.py": """
class CUDASetup:
    initialized, lib = False, None

    def run_cuda_setup(self):
        raise OSError("libcudart.so: cannot open shared object file")
""",
    "bitsandbytes/cextension.py": """
import ctypes
from bitsandbytes.cuda_setup.main import CUDASetup
setup = CUDASetup()
if not setup.initialized:
    setup.run_cuda_setup()
lib = setup.lib
lib.get_context.restype = ctypes.c_void_p
""",
    "bitsandbytes/functional.py": "from bitsandbytes.cextension import lib\n\ndef get_paged(): ...\n",
    "bitsandbytes/__init__.py": "from bitsandbytes import functional\n",
    "train.py": "import bitsandbytes\nprint(bitsandbytes.functional.lib.cquantize_blockwise_fp16(0))\n",
}


def test_bitsandbytes_that_looks_for_cuda_when_it_is_imported(tmp_path: Path) -> None:
    for name, text in OLD_BITSANDBYTES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    done = record(tmp_path, "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0\n"


class MisconfigurationException(Exception):  # noqa: N818
    """Lightning's."""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn"),
            PYTHON_SIDE,
        ),
        (ModuleNotFoundError("No module named 'flash_attn_interface'", name="flash_attn_interface"), "./hopper"),
        (ModuleNotFoundError("No module named 'apex.optimizers'", name="apex.optimizers"), "the folder `apex`"),
        (ModuleNotFoundError("No module named 'mamba_ssm'", name="mamba_ssm"), "MAMBA_SKIP_CUDA_BUILD=TRUE"),
        (ImportError("The fast path needs selective_scan and causal-conv1d"), "CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE"),
        (
            ImportError("FlashAttention2 has been toggled on, but it cannot be used"),
            PYTHON_SIDE,
        ),
        (ModuleNotFoundError("No module named 'xformers'", name="xformers"), "pip install --no-deps xformers"),
        (MisconfigurationException("You requested gpu: [0, 1]\n But your machine only has: [0]"), "--nproc-per-node"),
        (RuntimeError("CUDA error: invalid device ordinal"), "--nproc-per-node"),
        (
            RuntimeError('INTERNAL ASSERT FAILED at "DispatchStub.cpp":281. DispatchStub: missing kernel for cuda'),
            "an operator asks for a kernel of CUDA builds that is not recorded",
        ),
        (
            NotImplementedError("Could not run 'aten::x' with arguments from the 'SparseCUDA' backend."),
            "most that is done with sparse and nested tensors is recorded",
        ),
        (OSError("libcudart.so.12: cannot open shared object file"), "an extension in C++ needs CUDA"),
        (ModuleNotFoundError("No module named 'numpyy'", name="numpyy"), ""),
        (ZeroDivisionError("float division by zero"), "--floats 1"),
        (ValueError("math domain error"), "--floats 1"),
        (ValueError("a division by zero of the program's own"), ""),
        (FileNotFoundError(2, "No such file or directory", "/usr/bin/nvidia-smi"), "in the PATH"),
        (FileNotFoundError(2, "No such file or directory", "nvidia-smi.txt"), ""),
        (KeyError("flash_attn"), ""),
    ],
)
def test_the_way_out_of_extensions(error: BaseException, told: str) -> None:
    assert told in way_out(error)
    assert bool(way_out(error)) == bool(told)


def test_a_missing_extension_is_told_below_the_traceback(tmp_path: Path) -> None:
    done = record(folder_of(tmp_path, {"train.py": "import torch\nimport flash_attn\n"}), "train.py")
    assert done.returncode == 1
    assert "llmem: flash-attn's Python code is enough here" in done.stderr


def test_xformers_attends_without_its_library(tmp_path: Path) -> None:
    """As PyTorch 2.13.0+cu130 said of xformers 0.0.35 after each call."""
    pytest.importorskip("xformers")
    program = ROOT / "tests/data/programs/memory_efficient.py"
    done = record(tmp_path, "-q", "--gpu", "A100", str(program))
    assert done.stdout == program.with_suffix(".txt").read_text(), done.stderr
    assert "xFormers" not in done.stderr


def test_what_xformers_would_have_compiled_is_noted(tmp_path: Path) -> None:
    """Where a wheel brings FlashAttention-3, which cannot be loaded, or nothing was compiled at all."""
    library = """
        import logging
        class _BuildInfo:
            def __init__(self, metadata):
                self.metadata = metadata
        logging.getLogger("xformers").warning("xFormers can't load C++/CUDA extensions")
        _build_metadata, _built_with_cuda, _cpp_library_load_exception = None, False, OSError("libcudart.so.12")
    """
    folder = folder_of(
        tmp_path,
        {
            "xformers/__init__.py": "",
            "xformers/_cpp_lib.py": textwrap.dedent(library),
            "xformers/_C_flashattention3.so": "",
            "train.py": "from xformers import _cpp_lib as it\n"
            "print(it._built_with_cuda, it._cpp_library_load_exception, it._build_metadata.metadata)\n",
        },
    )
    done = record(folder, "train.py")
    assert done.stdout.splitlines()[0] == "True None {'version': {'cuda': 0}, 'env': {}}", done.stderr
    assert "xFormers" not in done.stderr
    assert "PyTorch's attention stands for its FlashAttention-3" in done.stderr


@pytest.mark.parametrize(("ours", "loaded"), [(None, True), ("12.6", True), ("13.0", False)])
def test_xformers_for_another_cuda_is_not_loaded(
    ours: str | None, loaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel of 0.0.35 needs libcudart.so.12, which PyTorch 2.13.0+cu130 does not bring: it says that its attention
    is not there."""
    (tmp_path / "cpp_lib.json").write_text('{"version": {"cuda": 1208}, "env": {}}')
    error, noted = OSError("libcudart.so.12"), list[str]()
    found: Any = SimpleNamespace(
        __file__=str(tmp_path / "_cpp_lib.py"), _cpp_library_load_exception=error, _BuildInfo=dict
    )
    monkeypatch.setattr(xformers, "_CUDA", ours)
    runtime: Any = SimpleNamespace(note=noted.append)
    xformers.loaded(runtime, found)
    assert found._cpp_library_load_exception is (None if loaded else error)
    assert [text[:30] for text in noted] == ([] if loaded else ["xformers was built for CUDA 12"])


#: As mamba_ssm/ops/selective_scan_interface.py (2.3) and causal_conv1d's functions (1.6 and 1.4) call their extensions.
MAMBA = """
import torch
import causal_conv1d_cuda as convolution
import selective_scan_cuda as scan

def said(call):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = call()
    print(torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before)
    return made

def on_gpu(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype, device="cuda")

u, delta, z = (on_gpu(2, 64, 4096) for _ in range(3))
A, D, bias = on_gpu(64, 16, dtype=torch.float32), on_gpu(64, dtype=torch.float32), on_gpu(64, dtype=torch.float32)
B, C = on_gpu(2, 1, 16, 4096), on_gpu(2, 1, 16, 4096)
out, states, gated = said(lambda: scan.fwd(u, delta, A, B, C, D, z, bias, True))
grads = said(lambda: scan.bwd(u, delta, A, B, C, D, z, bias, u, states, out, None, True, False))
print(*(tuple(one.shape) for one in grads), grads[3].dtype)

weight, bias = on_gpu(64, 4), on_gpu(64)
strided = on_gpu(2, 4096, 64).mT
made, firsts = said(lambda: (on_gpu(2, 64, 4096), None))
said(lambda: convolution.causal_conv1d_fwd(u, weight, bias, None, None, made, None, True))
back = (u, weight, bias, strided, None, None, None)
said(lambda: convolution.causal_conv1d_bwd(*back, made, weight.float(), bias.float(), None, True))
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = False
sums = weight.float(), bias.float()
said(lambda: convolution.causal_conv1d_bwd(u, weight, bias, made, None, None, None, made, *sums, None, True))
torch.use_deterministic_algorithms(False)
said(lambda: convolution.causal_conv1d_fwd(u, weight, bias, None, None, None, True))
said(lambda: convolution.causal_conv1d_bwd(*back, None, False, True))
"""


def test_mambas_extensions_allocate_what_they_would(tmp_path: Path) -> None:
    """Bytes by csrc/selective_scan/selective_scan.cpp and csrc/causal_conv1d.cpp: states of chunks of 2,048 steps, fp32
    sums where B and C vary along the sequence, a copy of a gradient that lies otherwise, sums of parts in fp32."""
    for package in ("mamba_ssm", "causal_conv1d"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    program = folder_of(tmp_path, {"train.py": MAMBA})
    done = record(program, "-q", "--gpu", "A100-80GB", "train.py", PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.returncode == 0, done.stderr
    mib, kib = 1 << 20, 1 << 10
    grads = 3 * mib + 64 * 16 * 4 + 2 * 512  # of u, delta and z, of A, of D and the bias
    expected = [
        (2 * mib + 32 * kib,) * 2,
        (grads + 2 * 256 * kib, grads + 2 * 512 * kib + 2 * 256 * kib),
        "(2, 64, 4096) (2, 64, 4096) (64, 16) (2, 1, 16, 4096) (2, 1, 16, 4096) (64,) (64,) (2, 64, 4096) "
        "torch.bfloat16",
        (mib, mib),
        (0, 0),
        (0, mib + 1024 + 512),  # with weight and bias in fp32, the caller's
        (0, 2 * 64 * 4 * 4 + 512 + 64 * 4 * 4),  # both sums of parts, then the first sum
        (mib, mib),
        (mib + 2 * 512, 2 * mib + 1024 + 512 + 512 + 512),  # made in fp32, then as the weight, before the copy goes
    ]
    assert done.stdout.splitlines() == [one if isinstance(one, str) else f"{one[0]} {one[1]}" for one in expected]


#: As flash_attn/flash_attn_interface.py (2.7.3) calls its extension.
FLASH_ATTENTION = """
import torch
import flash_attn_2_cuda

def step(shape, fewer, varying):
    q, k, v = (torch.empty(one, dtype=torch.bfloat16, device="cuda") for one in (shape, fewer, fewer))
    lengths = torch.tensor([0, shape[0]], dtype=torch.int32, device="cuda")
    ends = (lengths, lengths)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if varying:
        made = flash_attn_2_cuda.varlen_fwd(q, k, v, None, *ends, None, None, None, None, shape[0], shape[0],
                                            0.0, 1.0, False, True, -1, -1, 0.0, False, None)
    else:
        made = flash_attn_2_cuda.fwd(q, k, v, None, None, 0.0, 1.0, True, -1, -1, 0.0, False, None)
    kept = torch.cuda.memory_allocated() - before
    highest = torch.cuda.max_memory_allocated() - before
    out, lse, p, state = made
    dq, dk, dv = (torch.empty_like(one) for one in (q, k, v))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if varying:
        grads = flash_attn_2_cuda.varlen_bwd(q, q, k, v, out, lse, dq, dk, dv, *ends, None, shape[0], shape[0],
                                             0.0, 1.0, False, True, -1, -1, 0.0, False, None, state)
    else:
        grads = flash_attn_2_cuda.bwd(q, q, k, v, out, lse, dq, dk, dv, None,
                                      0.0, 1.0, True, -1, -1, 0.0, False, None, state)
    print(kept, highest, torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before)

step((8, 1024, 16, 96), (8, 1024, 4, 96), False)
step((1, 128, 4, 64), (1, 4096, 4, 64), False)
step((1000, 16, 96), (1000, 16, 96), True)
"""


def test_flash_attn_allocates_what_its_extension_would(tmp_path: Path) -> None:
    """Bytes by csrc/flash_attn/flash_api.cpp: output, fp32 logarithms, random state; row sums and dQ in fp32, dK and dV
    by head where heads are grouped. Few rows and many keys are split."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    program = folder_of(tmp_path, {"train.py": FLASH_ATTENTION})
    done = record(program, "--gpu", "A100-80GB", "--steps", "all", "train.py", PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.returncode == 0, done.stderr
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    tokens, kib = 8 * 1024, 1024
    lse = tokens * 16 * 4
    kept = tokens * 16 * 96 * 2 + lse + 512
    assert found[0] == (kept, kept, lse, lse + tokens * 16 * 96 * 4 + 2 * tokens * 16 * 96 * 2)
    kept = 128 * 4 * 64 * 2 + 128 * 4 * 4 + 512
    splits = 16  # key blocks of 256 in 4096 keys; 8 row blocks of 64 x 4 heads leave most of 216 idle
    sums = splits * (4 * 128 * 4 + 4 * 128 * 64 * 4)
    assert found[1] == (kept, kept + sums, 2 * kib, 2 * kib + 128 * 4 * 64 * 4)
    lse, rows = -(-1000 * 16 * 4 // 512) * 512, 1000 + 128
    kept = 1000 * 16 * 96 * 2 + lse + 512
    row_sums = -(-rows * 16 * 4 // 512) * 512
    assert found[2] == (kept, kept, row_sums, row_sums + rows * 16 * 96 * 4)


def test_what_was_compiled_for_a_gpu_is_not_loaded(tmp_path: Path) -> None:
    """An environment that was made for a GPU has the extensions themselves, which fail without one."""
    files = {"flash_attn/__init__.py": "", "flash_attn_2_cuda.py": "raise ImportError('libcudart.so.12')"}
    files["train.py"] = "import torch\nimport flash_attn_2_cuda\nprint(callable(flash_attn_2_cuda.fwd))\n"
    done = record(folder_of(tmp_path, files), "train.py", PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


#: What a call asks for, and at most while it runs.
TAKEN = """
import torch

def taken(work):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    made = work()
    print(*(torch.cuda.memory_stats()[f"requested_bytes.all.{name}"] - before for name in ("current", "peak")))
    return made
"""
#: As `_ops.py` of a build of the Hub names its operators, and flash_attn2/flash_attn_interface.py calls them.
HUB = """
from flash_attn2 import _flash_attn2_cuda_1a2b3c
from flash_attn3 import _flash_attn3_cuda_4d5e6f

second, third = torch.ops._flash_attn2_cuda_1a2b3c, torch.ops._flash_attn3_cuda_4d5e6f
q, k, v = (torch.empty(8, 1024, 16, 96, dtype=torch.bfloat16, device="cuda") for _ in range(3))
out, lse, p, state = taken(
    lambda: second.fwd(q, k, v, None, None, 0.0, 1.0, True, -1, -1, 0.0, False, None))
grads = [torch.empty_like(one) for one in (q, k, v)]
taken(lambda: second.bwd(out, q, k, v, out, lse, *grads, None, 0.0, 1.0, True, -1, -1, 0.0, False, None, state))
taken(lambda: third.fwd(q, k, v, num_splits=1))
"""


def test_the_hubs_builds_of_flash_attention_allocate_what_they_would(tmp_path: Path) -> None:
    """Bytes as of flash-attn 2 and 3. The extension that a build brings is not loaded."""
    builds = ("flash_attn2/_flash_attn2_cuda_1a2b3c.abi3.so", "flash_attn3/_flash_attn3_cuda_4d5e6f.abi3.so")
    files = dict.fromkeys(("flash_attn2/__init__.py", "flash_attn3/__init__.py", *builds), "")
    done = record(
        folder_of(tmp_path, {"train.py": TAKEN + HUB, **files}), "--gpu", "A100-80GB", "--steps", "all", "train.py"
    )
    assert done.returncode == 0, done.stderr
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    tokens = 8 * 1024
    lse, out = tokens * 16 * 4, tokens * 16 * 96 * 2
    assert found == [(out + lse + 16,) * 2, (lse, lse + tokens * 16 * 96 * 4), (out + lse,) * 2]


#: As hopper/flash_attn_interface.py calls its operators (August 2026).
HOPPER = """
import flash_attn_3._C
from torch.ops import flash_attn_3 as it

def forward(q, k, v, ends=None, longest=None, window=(-1, -1), splits=1, pages=None):
    nothing, used = [None] * 3, None if pages is None else torch.ones(len(pages), dtype=torch.int32, device="cuda")
    return taken(lambda: it.fwd(
        q, k, v, *nothing, None, ends, ends, None, None, used, longest, longest, pages, *[None] * 8, None, True,
        *window, 0, 0.0, True, None, splits, None, 0))

def backward(q, k, v, made, ends=None, longest=None, window=(-1, -1)):
    given = [torch.empty_like(one) for one in (q, k, v)]
    return taken(lambda: it.bwd(
        q, q, k, v, *made[:2], *given, ends, ends, None, None, longest, longest, None, True, *window, 0.0, False, 0))

def operands(*shape, fewer=None):
    shapes = (shape, *[fewer or shape] * 2)
    return [torch.empty(one, dtype=torch.bfloat16, device="cuda") for one in shapes]

batch = operands(8, 1000, 16, 96, fewer=(8, 1000, 4, 96))
backward(*batch, forward(*batch))
packed = operands(5000, 6, 128)
ends = torch.arange(0, 5001, 100, dtype=torch.int32, device="cuda")
backward(*packed, forward(*packed, ends, 896, (128, 0)), ends, 896, (128, 0))
decoded = operands(2, 1, 8, 128, fewer=(64, 256, 8, 128))
forward(*decoded, splits=0, pages=torch.zeros(2, 32, dtype=torch.int32, device="cuda"))
"""


def test_flash_attention_3_allocates_what_its_operators_would(tmp_path: Path) -> None:
    """Bytes by hopper/flash_api.cpp on an H100: output, fp32 logarithms, what tells blocks their work; twice the sums
    by row and an accumulator of dQ in fp32, where heads are grouped of dK and dV too; keys in parts."""
    folder_of(tmp_path, {"train.py": TAKEN + HOPPER, "flash_attn_interface.py": ""})
    done = record(tmp_path, "--gpu", "H100-80GB", "--steps", "all", "train.py", PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.returncode == 0, done.stderr
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    lse = 8 * 16 * 1000 * 4
    kept = 8 * 1000 * 16 * 96 * 2 + lse
    assert found[0] == (kept, kept + (1 + 2 * 8) * 4)  # and two for each sequence
    sums, keys = 8 * 16 * 1024 * 4, 8 * 4 * 1024 * 4  # blocks of 64 rows and 128 columns
    kept = 2 * sums + sums * 96 + 2 * keys * 96
    assert found[1] == (kept, kept + 16 * 8 * 16 * 4)
    kept = 5000 * 6 * 128 * 2 + 5000 * 6 * 4
    assert found[2] == (kept, kept + (1 + 3 * 52) * 4)  # 50 sequences, to 4; a window needs 3 numbers of each
    rows = -(-(5000 + 50 * 64) // 64) * 64
    kept = 2 * rows * 6 * 4 + rows * 6 * 128 * 4
    assert found[3] == (kept, kept + 14 * 50 * 6 * 4)
    # One row of each of 8 heads leaves 124 of 132 processors idle; 8192 keys are 64 blocks of 128. 33 parts fill all
    # processors twice, 15 are the fewest that fill 85 % of them (120 of 132).
    kept = 2 * 8 * 128 * 2 + 2 * 8 * 4 + 15 * 2 * 8 * 128 * 4 + 15 * 2 * 8 * 4
    assert found[4] == (kept, kept + (1 + 4 * 4) * 4)


#: As flash_attn/flash_attn_interface.py of 2.3.4 calls its extension.
OLD_FLASH_ATTENTION = """
import torch
import flash_attn_2_cuda

def taken(work):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = work()
    print(torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before)
    return made

q, k, v = (torch.empty(2, 1024, 4, 60, dtype=torch.bfloat16, device="cuda") for _ in range(3))
made = taken(lambda: flash_attn_2_cuda.fwd(q, k, v, None, 0.0, 1.0, True, -1, -1, False, None))
out, q, k, v, padded, lse, p, state = made
assert out.shape[-1] == 60 and padded.shape[-1] == q.shape[-1] == 64
q, k, v = (torch.empty(1000, 4, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
ends = (torch.tensor([0, 10, 1000], dtype=torch.int32, device="cuda"),) * 2
out, q, k, v, padded, lse, p, state = taken(
    lambda: flash_attn_2_cuda.varlen_fwd(q, k, v, None, *ends, 990, 990, 0.0, 1.0, False, True, -1, -1, False, None))
dq, dk, dv = (torch.empty_like(one) for one in (q, k, v))
taken(lambda: flash_attn_2_cuda.varlen_bwd(
    q, q, k, v, out, lse, dq, dk, dv, *ends, 990, 990, 0.0, 1.0, False, True, -1, -1, None, state))
"""


def test_flash_attn_of_an_older_release_gives_back_what_it_did(tmp_path: Path) -> None:
    """Bytes by csrc/flash_attn/flash_api.cpp of v2.3.4: heads padded there, sums of rows of the longest sequence."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    about = tmp_path / "flash_attn-2.3.4.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.3.4\n")
    program = folder_of(tmp_path, {"train.py": OLD_FLASH_ATTENTION})
    done = record(program, "--gpu", "A100-80GB", "--steps", "all", "train.py", PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.returncode == 0, done.stderr
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    tokens = 2 * 1024
    kept = 4 * tokens * 4 * 64 * 2 + tokens * 4 * 4 + 512
    assert found[0] == (kept, kept)
    lse = -(-2 * 4 * 990 * 4 // 512) * 512
    kept = 1000 * 4 * 64 * 2 + lse + 512
    assert found[1] == (kept, kept)
    row_sums = 2 * 4 * 1024 * 4
    assert found[2] == (row_sums, row_sums + (1000 + 2 * 128) * 4 * 64 * 4)


def test_the_older_fuser_of_torchscript_is_not_turned_on(tmp_path: Path) -> None:
    """ChatGLM's modeling code asks for it: its kernels would be compiled for the driver that is not there."""
    lines = (
        "import torch\ntorch._C._jit_set_profiling_mode(False)\ntorch._C._jit_set_profiling_executor(False)\n"
        "torch._C._jit_override_can_fuse_on_gpu(True)\nprint(torch._C._jit_can_fuse_on_gpu())\n"
        "f = torch.jit.trace(lambda x: (x * 2 + 1) * x, torch.ones(4, device='cuda'))\n"
        "print(f(torch.ones(4, device='cuda')).shape[0])\n"
    )
    done = record(folder_of(tmp_path, {"train.py": lines}), "--steps", "all", "train.py")
    assert (done.returncode, done.stdout.split()) == (0, ["False", "4"]), done.stderr


#: As Apex (commit 6424da3) and flash_attn/ops/layer_norm.py (2.7.4) call their extensions.
NORMS = """
import torch
import amp_C, dropout_layer_norm, fused_layer_norm_cuda, fused_rotary_positional_embedding

def told(call, *words, **named):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = call(*words, **named)
    print(torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before)
    return made

def on(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="cuda")

skip, large, small = on(1, dtype=torch.int32), on(100_000), on(10)
told(amp_C.multi_tensor_adam, 65536, skip, [[large, small]] * 4, 1e-3, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
told(amp_C.multi_tensor_l2norm, 65536, skip, [[large, small]], True)
told(amp_C.multi_tensor_l2norm, 65536, skip, [[large, small]])
x, weight = on(1024, 768, dtype=torch.bfloat16), on(768)
_, mean, inverse = told(fused_layer_norm_cuda.forward_affine, x, (768,), weight, weight, 1e-5)
told(fused_layer_norm_cuda.backward_affine, x, mean, inverse, x, (768,), weight, weight, 1e-5, False)
out = told(fused_rotary_positional_embedding.forward, on(64, 2, 4, 32), on(64, 1, 1, 32), True)
assert out.shape == (64, 2, 4, 32) and out.transpose(0, 1).is_contiguous()
none = [None] * 5
z, kept, mask, mean, inverse = told(
    dropout_layer_norm.dropout_add_ln_fwd, x, None, weight, *none, 0.0, 1e-6, 1.0, 0, None, False, True)
assert kept is None and mask is None
told(dropout_layer_norm.dropout_add_ln_fwd, x, on(1024, 768), weight, *none, 0.5, 1e-6, 1.0, 0, None, True, True)
told(dropout_layer_norm.dropout_add_ln_bwd,
     z, None, x, None, None, mean, inverse, weight, *none[:4], 0.0, 1.0, 0, False, True)
"""


def test_flash_attns_norm_is_there_where_the_environment_has_it(tmp_path: Path) -> None:
    """`pip install flash-attn` does not bring it: Qwen's code does without then."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    program = folder_of(tmp_path, {"train.py": "import flash_attn_2_cuda\nimport dropout_layer_norm\n"})
    done = record(program, "train.py", PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.returncode == 1
    assert "No module named 'dropout_layer_norm'" in done.stderr
    assert "an empty file dropout_layer_norm.py on the PYTHONPATH is enough" in " ".join(done.stderr.split())


def test_apex_and_flash_attns_norm_allocate_what_their_extensions_would(tmp_path: Path) -> None:
    """Bytes by csrc/multi_tensor_l2norm_kernel.cu, layer_norm_cuda.cpp and its kernels of Apex, and by
    csrc/layer_norm/ln_api.cpp of flash-attn, each rounded to 512: what is given back, and at most."""
    for package in ("apex", "flash_attn"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "dropout_layer_norm.py").touch()  # is no part of flash_attn: an environment has it, or not
    program = folder_of(tmp_path, {"train.py": NORMS})
    done = record(program, "--gpu", "A100-80GB", "--steps", "all", "train.py", PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.returncode == 0, done.stderr
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    rows, wide = 1024 * 4, 1024 * 768
    weight, parts, blocks = 768 * 4, 16 * 768 * 4, 2 * 108 * 768 * 4
    assert found == [
        (0, 0),
        (2 * 512, 1536 + 3 * 512),  # 320 sums, 2 chunks of 2 tensors, 2 norms, 1 norm
        (512, 1536 + 512),
        (2 * wide + 2 * rows, 2 * wide + 2 * rows),
        (2 * wide + 2 * weight, 2 * wide + 2 * weight + 2 * parts),
        (64 * 2 * 4 * 32 * 4,) * 2,
        (2 * wide + 2 * rows,) * 2,
        (4 * wide + wide + 2 * wide + 2 * rows,) * 2,  # the sum in fp32, the mask, the norm
        (2 * wide + 2 * weight + 2 * blocks,) * 2,
    ]


#: DeepSpeed's own classes make the states; LAMB's extension gives a coefficient, which it keeps until the next step.
DEEPSPEED = """
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import FusedLion

for made, device in (FusedAdam, "cuda"), (FusedLion, "cuda"), (FusedLamb, "cuda"), (DeepSpeedCPUAdam, "cpu"):
    weight = torch.nn.Parameter(torch.empty(1024, 1024, device=device))
    weight.grad = torch.empty_like(weight)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer = made([weight])
    optimizer.step()
    print(torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before)
    del optimizer
"""


def test_deepspeeds_optimizers_allocate_what_their_extensions_would(tmp_path: Path) -> None:
    """Bytes by csrc/lamb/fused_lamb_cuda.cpp of DeepSpeed; its kernels of Adam and Lion make nothing. Where CUDA is
    not, none can be built, not even that of the host."""
    pytest.importorskip("deepspeed")
    done = record(folder_of(tmp_path, {"train.py": DEEPSPEED}), "--steps", "all", "train.py")
    assert done.returncode == 0, done.stderr
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines() if line[0].isdigit()]
    state, flag, coefficient, sums = 4 << 20, 512, 512, 2 * 2048
    lamb = 2 * state + coefficient
    assert found == [(2 * state + flag,) * 2, (state + flag,) * 2, (lamb, lamb + sums), (0, 0)]


#: What ZeRO++ asks of DeepSpeed's quantizer, and what it gives.
QUANTIZER = """
import torch
from deepspeed.ops.op_builder import QuantizerBuilder

q = QuantizerBuilder().load()
values = torch.empty(64, 3000, dtype=torch.bfloat16, device="cuda")

def told(made):
    made = made if isinstance(made, list) else [made]
    sizes = [torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before]
    print(*sizes, *(f"{tuple(one.shape)}{one.dtype}".replace(" ", "") for one in made))
    return made

for call, *given in (
    (q.quantize, values, 24, 8, q.Symmetric),
    (q.quantize, values, 24, 4, q.QuantizationType.Asymmetric),
    (q.swizzle_quant, values, 512, 4, q.Symmetric, 1, 1, 2),
    (q.quantized_reduction, values.to(torch.int8), values, 512, 256, 4, q.Symmetric, 2),
    (q.dequantize, values.to(torch.int8), values, 24, 4, q.Symmetric),
    (q.dequantize_fp32, values.to(torch.int8), values, 24, 8, q.Symmetric),
):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    told(call(*given))
"""


def test_the_quantizer_of_zero_allocates_what_its_extension_would(tmp_path: Path) -> None:
    """Printed by csrc/quantization/pt_binding.cpp of DeepSpeed 0.19.8, compiled without its kernels, under the CUDA
    build of PyTorch 2.13."""
    pytest.importorskip("deepspeed")
    done = record(folder_of(tmp_path, {"train.py": QUANTIZER}), "--steps", "all", "train.py")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line[0].isdigit()] == [
        "192512 192512 (64,3000)torch.int8 (24,1)torch.float32",
        "96768 96768 (64,1500)torch.int8 (24,2)torch.float32",
        "98304 98304 (96000,)torch.int8 (512,1)torch.float32",
        "97280 97280 (64,1500)torch.int8 (256,1)torch.float32",
        "768000 768000 (64,6000)torch.float16",
        "768000 768000 (64,3000)torch.float32",
    ]
