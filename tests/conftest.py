"""Options, markers and hypothesis profiles of the whole suite."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.support import warm
from traces.collecting import hurried

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores Ctrl-C: tests send it
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # where there is no network, it would be tried for long
os.environ.pop("PYTHONUNBUFFERED", None)  # a line of a program is one write: ranks write to the same place at once

settings.register_profile("quick", max_examples=10, deadline=None)
settings.register_profile("ci", max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "thorough",
    max_examples=2000,
    stateful_step_count=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


#: What `scripts/test --quick` leaves out: tests that take more than a second of CPU, as `--measure` finds them, and
#: some whole files.
SLOW = Path(__file__).with_name("slow.txt")
#: It leaves out whole files that import torch, too, by itself or under transformers: how they begin.
TORCH = re.compile(r"""^(\w+ = )?pytest\.importorskip\("(torch|transformers)"\)""", re.MULTILINE)
#: Why a test may be skipped where every package is installed. CONTRIBUTING names each.
NAMED = ("no Chromium", "root may", "no /dev/", "POSIX permissions", "--recordings names no folder")

compilation = pytest.StashKey["subprocess.Popen[bytes]"]()
seconds: defaultdict[str, float] = defaultdict(float)
skipped: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--recordings",
        metavar="FOLDER",
        help="also replay every recording (*.jsonl, *.jsonl.gz) below FOLDER",
    )
    parser.addoption(
        "--complete",
        action="store_true",
        help="fail where a test is skipped for want of a package (scripts/test, whose environment has all)",
    )
    parser.addoption(
        "--measure",
        action="store_true",
        help="measure the CPU time of each test, and put those of more than a second into tests/slow.txt",
    )
    parser.addoption(
        "--thin",
        action="store_true",
        help="run slow tests with every eighth of their parameters (scripts/test --light: the rest runs elsewhere)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: named in tests/slow.txt; scripts/test --quick leaves it out")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the replay's kernels once, beside the collection: commands announce a compilation, tests expect none."""
    hurried()
    if not hasattr(session.config, "workerinput"):
        command = [sys.executable, "-m", "simulator.allocator.prepared"]
        session.config.stash[compilation] = subprocess.Popen(command, cwd=session.config.rootpath)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: WorkerController) -> None:
    """No worker is given a test before the kernels are there."""
    _wait_for_kernels(node.config)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # what is imported lasts
    _wait_for_kernels(session.config)


def _wait_for_kernels(config: pytest.Config) -> None:
    if compilation in config.stash:
        config.stash[compilation].wait()


def function(nodeid: str) -> str:
    """The name of a test without its parameters."""
    return nodeid.partition("[")[0]


def file(nodeid: str) -> str:
    """The file of a test, from the root."""
    return nodeid.partition("::")[0]


def slow() -> set[str]:
    """Functions (`tests/test_x.py::test_y`) and whole files that the quick subset leaves out."""
    return set(SLOW.read_text("utf-8").split())


@cache
def slow_whole(name: str) -> bool:
    """Whether the quick subset leaves out a whole file."""
    path = Path(__file__).parents[1] / name
    return name in slow() or (path.suffix == ".py" and TORCH.search(path.read_text("utf-8")) is not None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A whole file that is left out is not imported either: it would bring torch."""
    name = collection_path.relative_to(config.rootpath).as_posix()
    return (config.option.markexpr == "not slow" and slow_whole(name)) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow tests, and begin with the files that have them: a worker that ends with one keeps all waiting."""
    named = slow()
    for item in items:
        if function(item.nodeid) in named or slow_whole(file(item.nodeid)):
            item.add_marker("slow")
    partly = set(map(file, named))
    items.sort(key=lambda item: 0 if slow_whole(file(item.nodeid)) else 1 if file(item.nodeid) in partly else 2)
    if config.getoption("--thin"):
        _thin(config, items)


def _thin(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep every eighth set of parameters of slow tests. What a test needs depends on its function."""
    seen: Counter[str] = Counter()
    left_out = []
    for item in items:
        name = function(item.nodeid)
        if item.get_closest_marker("slow") and seen[name] % 8:
            left_out.append(item)
        seen[name] += 1
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """CPU, its own and of the processes that it waited for: the wall clock says how busy the machine is."""
    before = sum(os.times()[:4]) + warm.spent
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu", sum(os.times()[:4]) + warm.spent - before))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        cpu = dict(report.user_properties)["cpu"]
        assert isinstance(cpu, float)
        seconds[function(report.nodeid)] += cpu
    _keep_reason(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _keep_reason(report)


def _keep_reason(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        skipped.append(report.longrepr[2])


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return
    if session.config.getoption("--measure"):
        found = (slow() - set(seconds)) | {name for name in seconds if seconds[name] > 1 and not slow_whole(file(name))}
        SLOW.write_text("".join(f"{name}\n" for name in sorted(found)), "utf-8")
    if session.config.getoption("--complete") and not all(any(one in reason for one in NAMED) for reason in skipped):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--complete"):
        for reason in sorted({reason for reason in skipped if not any(one in reason for one in NAMED)}):
            terminalreporter.write_line(f"--complete: skipped for what should be there: {reason}", red=True)
