"""Callbacks of a collective's future run on a stream of the pool, the next one for each, as on a GPU.

What they allocate lies on that stream, and cuBLAS has a workspace there: communication hooks of DistributedDataParallel
that multiply (PowerSGD) take more with each step, until all streams of the pool had their turn. Source:
ATen/core/ivalue_inl.h, `Future::invokeCallback` and `synchronizeWithCurrentStreams`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

import torch

from graph.workspaces import metadata

#: What futures of collectives are, and torch.futures.Future derives from.
_FUTURE: Final[Any] = torch.futures.Future.__base__
Future = torch.futures.Future[object]


@contextlib.contextmanager
def callbacks_on_streams() -> Iterator[None]:
    """Inside, `then` runs what it is given on the next stream, if the future is of tensors on the GPU."""
    plain = _FUTURE.then

    def then(future: Future, callback: Callable[[Future], object]) -> Any:
        return plain(future, lambda done: _called(callback, done))

    with mock.patch.object(_FUTURE, "then", then):
        yield


def _called(callback: Callable[[Future], object], done: Future) -> object:
    given = _on_device(done.value())
    if not given:
        return callback(done)
    outside, stream = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    _hand_over(given, outside, stream)
    with torch.cuda.stream(stream):
        made = callback(done)
    _hand_over(_on_device(made), stream, outside)
    return made


def _hand_over(tensors: list[torch.Tensor], before: torch.cuda.Stream, after: torch.cuda.Stream) -> None:
    """The stream `after` goes on with what `before` has made."""
    after.wait_stream(before)
    for tensor in tensors:
        tensor.record_stream(after)


def _on_device(value: object) -> list[torch.Tensor]:
    return [tensor for tensor in metadata.tensors(value) if tensor.is_cuda]
