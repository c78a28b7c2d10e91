"""The cache of compiled kernels: what machine code is made of is known without a list."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from simulator.allocator import checkpoints
from simulator.engine import kernels
from traces import jit

#: What Python calls: the event loop, and the restoring of a checkpoint.
MODULES = sorted(jit.sources(vars(kernels)) | jit.sources(vars(checkpoints)))


def test_every_module_that_holds_kernels_is_called_by_python() -> None:
    root = Path(jit.__file__).parent.parent
    holders = {
        ".".join(path.relative_to(root).with_suffix("").parts)
        for room in ("allocator", "engine")
        for path in (root / "simulator" / room).glob("*.py")
        if "from traces.jit import kernel" in path.read_text("utf-8")
    }
    assert len(holders) >= 10
    assert holders <= set(MODULES)
    assert {"simulator.allocator.layout", "simulator.allocator.sizes"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_kernel_modules_take_constants_of_others_through_the_module(name: str) -> None:
    """A constant imported by its name would be in the machine code, and not in what the cache is keyed by."""
    tree = ast.parse(Path(str(sys.modules[name].__file__)).read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("simulator", "traces"):
            for alias in node.names:
                value = getattr(sys.modules[name], alias.asname or alias.name)
                assert not isinstance(value, (int, float, str, tuple)), f"{name}: {alias.name}"


def test_a_changed_source_changes_the_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = jit.digest.__wrapped__("simulator.engine.kernels")
    assert jit.digest.__wrapped__("simulator.engine.kernels") == before
    changed = tmp_path / "free_lists.py"
    changed.write_text("# another")
    sources = jit.sources(vars(kernels)) | {"simulator.allocator.free_lists": changed}
    monkeypatch.setattr(jit, "sources", lambda scope: sources)
    assert jit.digest.__wrapped__("simulator.engine.kernels") != before
