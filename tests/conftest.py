"""Options, markers and hypothesis profiles of the whole suite."""

from __future__ import annotations

import importlib
import os
import signal
import threading

import pytest
from hypothesis import HealthCheck, settings

if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores Ctrl-C: tests send it

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--recordings",
        metavar="FOLDER",
        help="also replay every recording (*.jsonl, *.jsonl.gz) below FOLDER",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the replay's kernels once, before workers start: commands announce a compilation, tests expect none."""
    if not hasattr(session.config, "workerinput"):
        importlib.import_module("simulator.allocator.prepared")
