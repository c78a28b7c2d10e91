"""A pytest plugin: `@pytest.mark.gpu_memory("24GiB")` runs a test on a GPU of so much memory that is not there.

The test, fixtures and all, runs in a process of its own, as `llmem record --memory 24GiB --context auto -m pytest TEST`
runs it. It fails where it fails there: with torch.OutOfMemoryError where memory runs out. `gpu="RTX4090"` names the
card, whose memory counts where no size is given. The peaks stand in the report's section "GPU memory" (`pytest -rA`).
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Final

import pytest

from simulator.integrations.process import llmem
from traces.units import format_bytes

#: Set for the process in which a marked test runs.
_INSIDE: Final = "LLMEM_GPU_MEMORY"


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers", "gpu_memory(size=None, gpu=None): run the test on a GPU of so much memory that is not there"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Run a marked test elsewhere, and report what came of it."""
    marker = item.get_closest_marker("gpu_memory")
    if marker is None or _INSIDE in os.environ:
        return None
    hook = item.ihook
    sections: list[tuple[str, str]] = []
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)

    def run() -> None:
        sections.append(("GPU memory", _on_gpu(item, _wanted(*marker.args, **marker.kwargs))))

    for when, action in (("setup", _nothing), ("call", run), ("teardown", _nothing)):
        call = pytest.CallInfo.from_call(action, when)  # type: ignore[arg-type]
        report = pytest.TestReport.from_item_and_call(item, call)
        report.sections += sections if when == "call" else []
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _nothing() -> None:
    """A test that runs elsewhere is set up there."""


def _wanted(size: str | None = None, *, gpu: str | None = None) -> list[str]:
    """The options of `record` that a marker says."""
    return [*(["--memory", size] if size else []), *(["--gpu", gpu] if gpu else [])]


def _on_gpu(item: pytest.Item, options: list[str]) -> str:
    """Run a test by itself; its peaks in words. Fails and skips as it does."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        test = f"{item.config.rootpath / item.nodeid}"
        words = ["record", "--steps", "all", "--context", "auto", "--json", str(answer), *options]
        words += ["-m", "pytest", "-q", "-rs", "-p", __name__, test]
        done = llmem(words, folder=item.config.invocation_params.dir, environment={_INSIDE: "1"})
        found = json.loads(answer.read_text()) if answer.exists() else None
    said = done.stdout.strip()
    if done.returncode:
        pytest.fail(said or done.stderr.strip(), pytrace=False)
    if " skipped" in said.splitlines()[-1]:
        pytest.skip(said)
    assert found is not None
    allocated, reserved = (max(rank[name] for rank in found["ranks"]) for name in ("peak_allocated", "peak_reserved"))
    return f"at most {format_bytes(allocated)} allocated, {format_bytes(reserved)} reserved"
