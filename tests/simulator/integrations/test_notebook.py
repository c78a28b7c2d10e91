"""`%load_ext vramsim` in a kernel of Jupyter, asked as a notebook asks it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
from jupyter_client.manager import start_new_kernel

from tests.places import ROOT


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    manager, client = start_new_kernel(env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=str(ROOT))
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def ran(client: Any, cell: str) -> tuple[str, str]:
    """What a cell prints, and what it shows: Markdown, HTML or text."""
    printed, shown = [], []

    def hear(message: dict[str, Any]) -> None:
        content = message["content"]
        if message["msg_type"] == "stream":
            printed.append(content["text"])
        elif message["msg_type"] in ("display_data", "execute_result"):
            data = content["data"]
            shown.append(data.get("text/html") or data.get("text/markdown") or data["text/plain"])
        elif message["msg_type"] == "error":
            raise AssertionError("\n".join(content["traceback"]))

    client.execute_interactive(cell, output_hook=hear, timeout=120)
    return "".join(printed), "".join(shown)


def test_cells_and_commands(client: Any) -> None:
    ran(client, "%load_ext vramsim")
    ran(client, "import torch\nsize = 1 << 20")
    printed, shown = ran(client, "%%llmem --gpu T4 --cells 2\nx = torch.ones(size, device='cuda')\nprint(x.device)")
    assert "cuda:0" in printed
    assert "T4" in printed
    assert "4.00 MiB" in shown
    assert ran(client, "_.ranks[0].peak_allocated")[1] == str(4 << 20)
    assert "tiny_gpt2" in ran(client, "%llmem estimate tests/data/tiny_gpt2.json --batch 2 --seq 16 --gpu T4")[1]
    assert "T4-16GB" in ran(client, "%llmem gpus T4")[0]  # has no Markdown
    assert "no unit" in ran(client, "%llmem estimate gpt2 --memory 24")[0]
