"""Python's cyclic garbage collector, kept still where it costs much and finds nothing.

A pass looks at all objects: after torch is imported a third of a second, and importing it alone takes several.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import sys
from collections.abc import Iterator
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

#: Objects made since the last pass that call for one (`gc.set_threshold`), where Python has 700.
_MANY: Final = 20_000
#: Of what importing torch makes, how many hundredths the last pass over all has seen, and how often those of the first
#: two generations have been looked at since (`gc.get_count` after `import torch` of 2.13.0 in Python 3.11).
_SEEN: Final = 67
_PASSES: Final = (4, 10)
#: What all kinds of files are made of.
_FILE: Final[Any] = io.IOBase.__base__
_COMPRESSED: Final = frozenset({"bz2", "gzip", "lzma"})


class _Object:
    """Counts in the place of what a program would have imported. Python keeps no freed ones to be used uncounted, as it
    does lists."""

    __slots__ = ("itself",)
    itself: _Object


_counted: Final[list[_Object]] = []


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without the collector: its passes take most of the time where millions of small objects are made, and free
    tensors at places of their own where the order of frees is recorded."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def hurried() -> None:
    """From now on the collector runs rarely in this process, and not at its end: for one that works on one thing."""
    gc.set_threshold(_MANY, *gc.get_threshold()[1:])
    left_at_exit()


def as_if_on(objects: int) -> None:
    """Switch the collector on, as if it had run while all was imported that was imported without it, and so many
    `objects` of that were the program's: where importing torch leaves it.

    It looks at all there are once it has looked at the young ones `_PASSES` times, if there are a quarter more than
    when it last did, which is so after that import. Those that are there now it leaves alone. In their place others
    count that hold nothing.
    """
    gc.freeze()
    seen = objects * _SEEN // 100
    _counted.extend(_Object() for _ in range(seen))
    gc.collect()
    _counted.extend(_Object() for _ in range(objects - seen))
    for generation, passes in ((1, _PASSES[1]), (0, _PASSES[0])):
        for _ in range(passes):
            gc.collect(generation)
    gc.enable()


class _Imported:
    """Finds and loads, as importlib's protocols have it, a module that is there already."""

    def __init__(self, name: str, module: ModuleType, objects: int, lasting: int) -> None:
        self.name, self.module, self.spec = name, module, module.__spec__
        self.objects, self.lasting = objects, lasting

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        loader: Any = self
        return ModuleSpec(name, loader) if name == self.name else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec
        sys.meta_path.remove(self)
        for number in range(self.objects):
            made = _Object()
            if number * self.lasting % self.objects < self.lasting:
                _counted.append(made)
            else:
                made.itself = made


def not_yet_imported(name: str, objects: int, lasting: int) -> None:
    """A module that is imported already counts as one that is not: where the program imports it, itself or by what it
    calls, the collector sees so many `objects` made, as many as importing the module made without it. Of these some are
    `lasting`; the others are in cycles that nobody uses."""
    sys.meta_path.insert(0, _Imported(name, sys.modules.pop(name), objects, lasting))


def left_at_exit() -> None:
    """At the end of this process objects that are alive in cycles are left to the system.

    What the program has written to files that it did not close is in these, as it is where Python ends.
    """
    atexit.register(_leave)


def _leave() -> None:
    files = [one for one in gc.get_objects() if issubclass(type(one), _FILE)]
    for file in files:
        with contextlib.suppress(Exception):  # closed, or of a class of the program's
            if file.writable():
                file.flush()
    for file in files:
        if type(file).__module__ in _COMPRESSED:  # they have an end to write
            with contextlib.suppress(Exception):
                file.close()
    gc.freeze()
