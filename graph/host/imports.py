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

#: What is done to a module; it gives what undoes more than the module's own names.
Change = Callable[[Any], Callable[[], None] | None]


class _AfterImport(MetaPathFinder):
    """Finds the modules that are waited for as others do, and has them changed once they have run.

    A program may ask first whether a module is there, as often as it likes (`importlib.util.find_spec`).
    """

    def __init__(self, changes: Mapping[str, Change], restored: contextlib.ExitStack) -> None:
        self.changes = dict(changes)
        self.restored = restored
        self.asked = set[str]()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.changes or fullname in self.asked:
            return None
        self.asked.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.asked.remove(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def ran(module: ModuleType) -> None:
                run(module)
                if (change := self.changes.pop(fullname, None)) is not None:
                    _change(module, change, self.restored)

            spec.loader.exec_module = ran  # type: ignore[method-assign]
        return spec


def _change(module: ModuleType, change: Change, restored: contextlib.ExitStack) -> None:
    """Change a module; what it had under the names that are changed, it has again in the end."""
    before = dict(vars(module))
    if (undo := change(module)) is not None:
        restored.callback(undo)
    for name, value in vars(module).items():
        if name in before and before[name] is not value:
            restored.callback(setattr, module, name, before[name])


@contextlib.contextmanager
def changed(changes: Mapping[str, Change]) -> Iterator[None]:
    """Inside, each module of these names is given to its function after its first import; now, if it is there."""
    with contextlib.ExitStack() as restored:
        for name in changes.keys() & sys.modules.keys():
            _change(sys.modules[name], changes[name], restored)
        later = {name: change for name, change in changes.items() if name not in sys.modules}
        finder = _AfterImport(later, restored)
        sys.meta_path.insert(0, finder)
        restored.callback(sys.meta_path.remove, finder)
        yield
