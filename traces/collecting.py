"""Python's cyclic garbage collector, kept still where it costs much and finds nothing.

A pass looks at all objects: after torch is imported a third of a second, and importing it alone takes several.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
from collections.abc import Iterator
from functools import cache
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
#: What counts in the place of what a program would have imported.
_counted: Final[list[list[None]]] = []


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
    _counted.extend([] for _ in range(seen))
    gc.collect()
    _counted.extend([] for _ in range(objects - seen))
    for generation, passes in ((1, _PASSES[1]), (0, _PASSES[0])):
        for _ in range(passes):
            gc.collect(generation)
    gc.enable()


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
