"""A user's modules that are named as our packages are: in the user's code the name means the user's module.

`graph.py` or `traces/` are likely names in a folder of research code. While code of the user runs (`Folder.first`),
they stand in `sys.modules` in place of ours; an import statement in our own files finds ours nevertheless.
"""

from __future__ import annotations

import builtins
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

OURS: Final = ("traces", "graph", "strategies", "simulator")
_ROOT: Final = Path(__file__).resolve().parents[2]
_OUR_FILES: Final = tuple(f"{_ROOT / name}/" for name in OURS)


@functools.cache
def of(folder: str) -> Folder:
    """The one record of a folder, so that its modules are imported once."""
    return Folder(folder)


class Folder:
    """A user's folder, and the modules in it whose names are also ours."""

    def __init__(self, folder: str) -> None:
        path = Path(folder).resolve()
        self.path = str(path)
        found = (name for name in OURS if (path / f"{name}.py").is_file() or (path / name).is_dir())
        self.names = frozenset(found) if path != _ROOT else frozenset()
        self._others: dict[str, ModuleType] = {}
        self._active = False

    @contextmanager
    def first(self) -> Iterator[None]:
        """Inside, imports look into the folder first, for names of ours as well."""
        sys.path.insert(0, self.path)
        plain = builtins.__import__
        if self.names:
            builtins.__import__ = self._hook(plain)
        try:
            with self._swapped(bool(self.names)):
                yield
        finally:
            builtins.__import__ = plain
            if self.path in sys.path:
                sys.path.remove(self.path)

    def _hook(self, plain: Any) -> Any:
        def imported(
            name: str,
            globals: Mapping[str, object] | None = None,
            locals: Mapping[str, object] | None = None,
            fromlist: Sequence[str] | None = (),
            level: int = 0,
        ) -> ModuleType:
            with self._swapped(self._wanted((globals or {}).get("__file__"))):
                found: ModuleType = plain(name, globals, locals, fromlist, level)
                return found

        return imported

    def _wanted(self, file: object) -> bool:
        """Whether the code of a file means the user's modules; what is neither's stays as it is."""
        if isinstance(file, str) and file.startswith(_OUR_FILES):
            return False
        return True if isinstance(file, str) and file.startswith(f"{self.path}/") else self._active

    @contextmanager
    def _swapped(self, wanted: bool) -> Iterator[None]:
        if wanted == self._active:
            yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        """Exchange our modules and the user's in `sys.modules`."""
        out = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in self.names}
        for name in out:
            del sys.modules[name]
        sys.modules.update(self._others)
        self._others, self._active = out, not self._active
