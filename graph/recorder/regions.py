"""Named parts of a program, as it marks them for profilers: `record_function`, and ranges and marks of NVTX.

PyTorch marks some itself: the step of an optimizer, the next batch of a DataLoader. Those of other threads are left
out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch.autograd.profiler import record_function

from graph.fake_cuda.torch_private import NVTX


class Regions:
    """Calls `tell` with the name of a region that begins (True) or ends (False)."""

    def __init__(self, tell: Callable[[str, bool], None]) -> None:
        self._tell = tell
        self._pushed: list[str] = []  # NVTX ranges of a stack
        self._started: dict[int, str] = {}  # NVTX ranges of any order, by the number that the program has
        self._count = 0
        self._main = threading.get_ident()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, regions are told."""
        enter: Callable[..., Any] = record_function.__enter__
        leave: Callable[..., Any] = record_function.__exit__

        def begin(region: record_function) -> Any:
            self._say(region.name, True)
            return enter(region)

        def end(region: record_function, *error: object) -> None:
            leave(region, *error)
            self._say(region.name, False)

        nvtx = SimpleNamespace(
            rangePushA=self._push,
            rangePop=self._pop,
            rangeStartA=self._start,
            rangeEnd=self._end,
            markA=self._mark,
        )
        with (
            mock.patch.object(record_function, "__enter__", begin),
            mock.patch.object(record_function, "__exit__", end),
            mock.patch.object(*NVTX, nvtx),
        ):
            yield

    def _say(self, name: str, begins: bool) -> None:
        if threading.get_ident() == self._main:
            self._tell(name, begins)

    def _mark(self, name: str) -> None:
        self._say(name, True)
        self._say(name, False)

    def _push(self, name: str) -> int:
        self._pushed.append(name)
        self._say(name, True)
        return len(self._pushed) - 1

    def _pop(self) -> int:
        if self._pushed:
            self._say(self._pushed.pop(), False)
        return len(self._pushed)

    def _start(self, name: str) -> int:
        self._count += 1
        self._started[self._count] = name
        self._say(name, True)
        return self._count

    def _end(self, number: int) -> None:
        if number in self._started:
            self._say(self._started.pop(number), False)
