"""What is to be done to a module when the program imports it, and not before."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _AfterImport(MetaPathFinder):
    """Finds the modules that are waited for as others do, and has them changed once they have run."""

    def __init__(self, changes: Mapping[str, Callable[[Any], None]]) -> None:
        self.changes = dict(changes)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = self.changes.pop(fullname, None)
        spec = None if change is None else importlib.util.find_spec(fullname)
        if change is not None and spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def ran(module: ModuleType) -> None:
                run(module)
                change(module)

            spec.loader.exec_module = ran  # type: ignore[method-assign]
        return spec


@contextlib.contextmanager
def changed(changes: Mapping[str, Callable[[Any], None]]) -> Iterator[None]:
    """Inside, each module of these names is given to its function after its first import; now, if it is there."""
    for name in changes.keys() & sys.modules.keys():
        changes[name](sys.modules[name])
    finder = _AfterImport({name: change for name, change in changes.items() if name not in sys.modules})
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
