"""`llmem mcp`, asked by the protocol's own client."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from mcp import Client, ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.types import CallToolResult

from simulator.integrations import assistants, process
from tests.places import ROOT
from tests.support import warm

SAMPLE = str(ROOT / "traces" / "samples" / "tiny.json")
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB "
    "of which 1.50 GiB is free. Process 1 has 22.13 GiB memory in use. Of the allocated memory 20.00 GiB is allocated "
    "by PyTorch, and 1.60 GiB is reserved by PyTorch but unallocated."
)


async def _asked(calls: list[tuple[str, dict[str, str]]]) -> tuple[set[str], list[tuple[bool, str]]]:
    """The names of the tools, and for each call whether it is an error, and its text."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = StdioServerParameters(command=sys.executable, args=["-m", "simulator", "mcp"], env=environment)
    async with stdio_client(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        names = {tool.name for tool in (await session.list_tools()).tools}
        return names, [_answer(await session.call_tool(name, arguments)) for name, arguments in calls]


async def _asked_here(calls: list[tuple[str, dict[str, str]]]) -> list[tuple[bool, str]]:
    """The answers of a server in this process."""
    async with Client(assistants.server()) as client:
        return [_answer(await client.call_tool(name, arguments)) for name, arguments in calls]


def _answer(found: CallToolResult) -> tuple[bool, str]:
    """Whether it is an error, and its text."""
    return bool(found.is_error), "".join(getattr(part, "text", "") for part in found.content)


def _llmem(words: list[str], *, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command; programs run where torch is imported."""
    return (warm.llmem if any(word.endswith("train.py") for word in words) else process.llmem)(words, given=given)


def test_a_client_sees_the_tools_and_their_answers() -> None:
    names, found = anyio.run(
        _asked,
        [
            ("compare", {"before": SAMPLE, "after": SAMPLE}),
            ("explain", {"text": OOM}),
            ("options", {"command": "fit"}),
            ("options", {"command": "nothing"}),
            ("compare", {"before": SAMPLE, "after": "nowhere.json"}),
        ],
    )
    assert names == {"estimate", "record", "fit", "explain", "compare", "options"}
    assert [error for error, _ in found] == [False, False, False, True, True]
    texts = [text for _, text in found]
    assert "tiny.json" in texts[0]
    assert "2.00 GiB" in texts[1]
    assert "--keep KEY,..." in texts[2]
    assert "no command 'nothing'" in texts[3]
    assert "nowhere.json" in texts[4]


def test_models_and_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "train.py").write_text("import torch\ntorch.ones(1 << 20, device='cuda')\nprint('done')\n")
    model = str(ROOT / "tests" / "data" / "tiny_gpt2.json")
    monkeypatch.setattr(assistants, "llmem", _llmem)
    found = anyio.run(
        _asked_here,
        [
            ("estimate", {"model": model, "options": "--batch 2 --seq 16 --gpu T4"}),
            ("estimate", {"model": model, "options": "--batch 2 --seq 16 --memory 20MiB --no-remedies"}),
            ("estimate", {"model": "gpt2", "options": "--batch 2 --gpu T5"}),
            ("record", {"program": str(tmp_path / "train.py"), "options": "--gpu T4"}),
            ("fit", {"run": model, "options": "--batch 2 --seq 16 --gpu T4"}),
            ("fit", {"run": str(tmp_path / "train.py"), "options": "--memory 3MiB --context 0"}),
            ("explain", {"text": OOM, "program": str(tmp_path / "train.py")}),
        ],
    )
    assert [error for error, _ in found] == [False, False, True, False, False, False, False]
    fits, lacks, error, recorded, fitted, lacking, beside = (text for _, text in found)
    assert "fits" in fits
    assert "out of memory" in lacks
    assert "T5" in error
    assert "done" in recorded
    assert "at most 4.00 MiB allocated" in recorded
    assert "fits" in fitted
    assert "train.py:2" in lacking
    assert "train.py" in beside
