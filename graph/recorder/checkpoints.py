"""What a program saves of tensors is counted, not written: files have their size, and a hole where the numbers were.

A file that was there before the program is left as it is: it may be a checkpoint of a real run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch.serialization import skip_data


class Saving:
    """`torch.save` in place of PyTorch's, which is `plain`."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        self.plain = plain
        self._made: set[str] = set()

    def __call__(self, obj: object, f: object, *args: object, **kwargs: object) -> None:
        """Save, but for the bytes of storages, and not over a file that the program has not made itself."""
        with skip_data():
            self.plain(obj, self._target(f), *args, **kwargs)

    def _target(self, f: object) -> object:
        if not isinstance(f, str | os.PathLike):
            return f
        path = os.path.realpath(f)
        if os.path.lexists(path) and path not in self._made:
            return os.devnull
        self._made.add(path)
        return f
