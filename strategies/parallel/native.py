"""What PyTorch's own distributed methods share: one rank of a job, run with torch.distributed's real code.

DDP, FSDP and tensor parallelism are captured, not imitated: `graph.capture` runs a rank of the job with PyTorch's
modules around the model, on a process group whose collectives end at once (`graph.fake_cuda.ranks.collectives`).
Streams, gathered parameters, buckets and the order of all events are then PyTorch's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graph.case import Case
from graph.loop.method import Method

if TYPE_CHECKING:
    import torch

    from graph.fake_cuda.device import Runtime
    from graph.fake_cuda.ranks.collectives import Collectives
    from graph.models.sources import Built
    from graph.recorder.recorder import Recorder


class Native(Method):
    """Rank `rank` of a job of `case.world` ranks under one of PyTorch's methods; subclasses say how it wraps."""

    #: Kinds of collective whose works nobody waits for.
    kept: frozenset[str] = frozenset()

    def __init__(self, case: Case, rank: int) -> None:
        self.case = case
        self.rank = rank
        self._collectives: Collectives | None = None
        self._recorder: Recorder | None = None
        self._first = 0  # works of the first step

    def captured_case(self) -> Case:
        """The case as the loop sees it, where the method does a part of it itself."""
        return self.case

    def wrap(self, recorder: Recorder, built: Built) -> torch.nn.Module:
        """The model of `built` on the device, wrapped."""
        raise NotImplementedError

    @contextlib.contextmanager
    def running(self, runtime: Runtime, recorder: Recorder) -> Iterator[None]:
        """The process group of the job."""
        from graph.fake_cuda.ranks.collectives import process_group

        runtime.host_copies_keep = True  # what rank 0 broadcast to itself comes back as it went
        runtime.late = self.case.deferred == "late"
        with process_group(runtime, recorder, self.rank, self.case.world, self.kept) as collectives:
            self._collectives, self._recorder = collectives, recorder
            try:
                yield
            finally:
                self._collectives = self._recorder = None

    def load(self, recorder: Recorder, built: Built) -> Mapping[str, int]:
        """Wrap and place the model; answers the storages of this rank's parameters and buffers by name."""
        built.module = self.wrap(recorder, built)
        built.module.train()
        return storages(recorder, built.module)

    def settle(self) -> None:
        """The watchdog drops what is finished; while the host waits for the device, it has the time to look."""
        job, recorder = self._collectives, self._recorder
        if job is None or recorder is None:
            return
        if self.case.sync and not job.late:
            job.release()
        else:
            job.settle(recorder.operators, recorder.waits)
        if recorder.step <= 0:
            self._first = job.issued
        self.settled = job.dropped >= self._first


def storages(recorder: Recorder, module: torch.nn.Module) -> dict[str, int]:
    """Name -> storage of all parameters and buffers of a wrapped module; of a sharded one, what this rank holds."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    numbers = {name: recorder.number(local(tensor)) for name, tensor in named}
    return {name: number for name, number in numbers.items() if number >= 0}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def place_all(recorder: Recorder, built: Built) -> torch.nn.Module:
    """The whole model on the device, as a plain job has it."""
    Method().load(recorder, built)
    module: torch.nn.Module = built.module
    return module


def tied(module: torch.nn.Module) -> bool:
    """Whether two names of the model are one parameter."""
    names = sum(1 for _ in module.named_parameters(remove_duplicate=False))
    return names != sum(1 for _ in module.named_parameters())


def synchronized(case: Case, module: Any, last: bool) -> contextlib.AbstractContextManager[None]:
    """A micro-batch of DDP or FSDP1: without synchronization before the last, where the case says so."""
    if case.grad_sync != "last" or last:
        return contextlib.nullcontext()
    quiet: contextlib.AbstractContextManager[None] = module.no_sync()
    return quiet


def without_autocast(case: Case) -> Case:
    """The case for methods that cast by themselves."""
    return replace(case, autocast="")
