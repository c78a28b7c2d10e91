"""Programs with compiled extensions of others."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from graph.host.extensions import way_out
from tests.simulator.recording.test_record import answer, folder_of, record

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
"""


def test_bitsandbytes_runs_and_says_nothing(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    done = record(folder_of(tmp_path, {"train.py": EIGHT_BIT}), "--steps", "all", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch.uint8 torch.uint8 torch.uint8\n"
    assert "libcu" not in done.stderr
    known = 2 * (4 << 20) + (512 << 10) + 2 * (1 << 20) + 8_519_680  # weight, gradient, 4 bits, states; cuBLAS's
    assert (
        known <= answer(tmp_path)["ranks"][0]["peak_allocated"] <= known + (3 << 20)
    )  # with weights of 4 bits as bf16


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn"), "attn_implementation='sdpa'"),
        (ImportError("FlashAttention2 has been toggled on, but it cannot be used"), "attn_implementation='sdpa'"),
        (ModuleNotFoundError("No module named 'xformers'", name="xformers"), "scaled_dot_product_attention"),
        (OSError("libcudart.so.12: cannot open shared object file"), "an extension in C++ needs CUDA"),
        (ModuleNotFoundError("No module named 'numpyy'", name="numpyy"), ""),
        (KeyError("flash_attn"), ""),
    ],
)
def test_the_way_out_of_extensions(error: BaseException, told: str) -> None:
    assert told in way_out(error)
    assert bool(way_out(error)) == bool(told)


def test_a_missing_extension_is_told_below_the_traceback(tmp_path: Path) -> None:
    done = record(folder_of(tmp_path, {"train.py": "import torch\nimport flash_attn\n"}), "train.py")
    assert done.returncode == 1
    assert "llmem: flash-attn is compiled for CUDA" in done.stderr
