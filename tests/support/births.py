"""What the device that is not there brings into the world, for tests."""

from __future__ import annotations

from graph.fake_cuda.device import Runtime


class Births:
    """Bytes of each storage, in order of birth."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.bytes: list[int] = []

    def operator(self, func: object, args: object, kwargs: object, out: object, born: list[int], memo: object) -> None:
        self.bytes += [self.runtime.bytes(storage) for storage in born]

    def freed(self, storage: int) -> None:
        """Not of interest."""


class Untold:
    """A recorder of nothing."""

    operators = 0

    def collective(self, *told: object, **also: object) -> None:
        """A collective starts."""

    def wait_stream(self, stream: int, on: int) -> None:
        """A stream waits for another."""
