"""What is to be done to a module is done when it is imported, however often a program asks for it before."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from graph.host.imports import changed


def test_a_module_that_was_asked_for_first_is_changed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As libraries ask whether bitsandbytes is there, and import it later."""
    (tmp_path / "asked_for.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with changed({"asked_for": lambda module: setattr(module, "value", 2), "not_there": lambda module: None}):
        for _ in range(2):
            assert importlib.util.find_spec("asked_for") is not None
            assert importlib.util.find_spec("not_there") is None
        found = importlib.import_module("asked_for")
        assert found.value == 2
    assert found.value == 1
    del sys.modules["asked_for"]
    assert importlib.import_module("asked_for").value == 1
    del sys.modules["asked_for"]
