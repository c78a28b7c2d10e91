"""torch.distributed on a device that is not there: one rank of a job whose collectives do nothing but take part.

`process_group(runtime, recorder, rank, world)` starts torch's own `fake` process group (which knows rank and world, and
never waits) and puts kernels of ours under its collectives on CUDA tensors. They tell the recorder of each collective
and keep what ProcessGroupNCCL keeps (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp): the tensors of an asynchronous
collective stay referenced by its work until somebody waits for the work or its watchdog sees it complete. Who waits
does so at once; DDP's reducer waits for futures instead, so its all-reduces are kept until the next settling.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as parallel

from graph.fake_cuda.device import Runtime
from graph.fake_cuda.torch_private import fake_store, finished_work
from graph.fake_cuda.torch_private import schemas as torch_schemas
from graph.recorder.list_sharding import equal_entries_once

if TYPE_CHECKING:
    from graph.recorder.recorder import Recorder

#: c10d's operators and the kind of collective each is.
KINDS: Final[Mapping[str, str]] = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "recv",
    "barrier": "barrier",
}
#: Operators that a host issues between two looks of NCCL's watchdog.
OPERATORS_A_LOOK: Final = 2000
#: Collectives over a list of tensors, which NCCL gathers into or takes from one flat tensor of the same stream.
_LISTS: Final = frozenset({"allgather_", "reduce_scatter_"})
#: Messages between two ranks, and the number of the first of their streams.
_PAIRS: Final = frozenset({"send", "recv_"})
_FIRST_STREAM: Final = 1000
#: The stream of asynchronous collectives that nobody waits for until the backward has ended.
NCCL_STREAM: Final = 900


class Collectives:
    """The collectives of one rank."""

    def __init__(self, runtime: Runtime, recorder: Recorder, kept: frozenset[str]) -> None:
        self.runtime = runtime
        self.recorder = recorder
        self.kept = kept
        self.keeps: Callable[[], bool] = lambda: True  # whether nobody waits for one of these
        self.named: Callable[[Any], str] = _group_name
        self.issued = 0  # works that were kept for some time
        self._held: list[Any] = []
        self._since: list[int] = []  # operators that had run when each of the first of these was noticed
        self._waits = 0  # of the host, until the last settling
        self._issued = 0  # works held at the last settling, and how many of them are finished
        self._finished = 0
        self._waited = 0  # operators when the host had waited for these
        self._told = True
        self._streams: dict[str, int] = {}

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Collectives take part but are not told meanwhile."""
        before, self._told = self._told, False
        try:
            yield
        finally:
            self._told = before

    def settle(self, operators: int, waits: int, *, late: bool) -> None:
        """Finished work is dropped, as ProcessGroupNCCL's watchdog does.

        So many operators have run, and waits been made. It looks every 100 ms (kWatchdogThreadSleepMillis); a host
        takes about 50 us for an operator. `late`: work is finished only once the host has waited for the device after
        it was issued.
        """
        if late:
            self._settle_late(operators, waits)
        else:
            self._settle_seen(operators)

    def release(self) -> None:
        """All works are dropped."""
        self._held.clear()
        self._since.clear()

    @property
    def dropped(self) -> int:
        """Works that are not kept any more."""
        return self.issued - len(self._held)

    def _settle_seen(self, operators: int) -> None:
        seen = sum(operators - issued >= OPERATORS_A_LOOK for issued in self._since)
        del self._held[:seen], self._since[:seen]
        self._since += [operators] * (len(self._held) - len(self._since))

    def _settle_late(self, operators: int, waits: int) -> None:
        waited, self._waits = waits > self._waits, waits
        if self._issued > self._finished and waited:
            self._finished, self._waited = self._issued, operators
        elif self._finished and operators - self._waited >= OPERATORS_A_LOOK:
            del self._held[: self._finished]
            self._finished = 0
        self._issued = len(self._held)

    def install(self) -> None:
        """Put our kernels under torch.distributed's operators on CUDA tensors."""
        schemas = {schema.name: schema for schema in torch_schemas() if schema.name.startswith("c10d::")}
        for name in KINDS:
            schema = schemas.get(f"c10d::{name}")
            if schema is not None:
                self.runtime.override(schema.name, self._kernel(name, schema), ("CUDA",))

    def _kernel(self, name: str, schema: torch.FunctionSchema) -> Callable[..., Any]:
        names = [argument.name for argument in schema.arguments]
        results = len(schema.returns)

        def kernel(*args: object) -> Any:
            given = dict(zip(names, args, strict=False))
            tensors = list(_flat(args[0]))
            self._tell(name, given, args)
            if name == "barrier":
                tensors = self._barrier(bool(given.get("async_op", True)))
            elif name in _LISTS and self._told:
                lists: Any = args[0 if name == "allgather_" else 1]
                tensors += _flattened(lists)
            work = _finished([] if name in _PAIRS else tensors)  # messages are not kept by their works
            if KINDS[name] in self.kept and given.get("async_op", True) and self.keeps():
                self.issued += 1
                self._held.append((work, args[:2]))
            return work.boxed() if results == 1 else (args[0], work.boxed())

        return kernel

    def _barrier(self, goes_on: bool) -> list[torch.Tensor]:
        """NCCL's barrier is an all-reduce of one number, for which the host waits (ProcessGroupNCCL::barrier).

        Where the host `goes_on`, the answer has it: the work keeps it.
        """
        number = torch.zeros(1, dtype=torch.float32, device="cuda")
        if not goes_on:
            self.runtime.synchronized()
        return [number] if goes_on else []

    def _tell(self, name: str, given: Mapping[str, Any], args: Sequence[Any]) -> None:
        if not self._told:
            return
        if name in _PAIRS:
            self._tell_pair(name, given, sum(tensor.nbytes for tensor in _flat(args[0])))
            return
        tensors = [*_flat(args[0]), *(_flat(args[1]) if isinstance(args[1], torch.Tensor | list | tuple) else ())]
        largest = max((tensor.nbytes for tensor in tensors), default=0)
        if name in _LISTS:
            largest = sum(tensor.nbytes for tensor in _flat(args[0 if name == "allgather_" else 1]))
        group = given.get("process_group")
        apart = KINDS[name] in self.kept and given.get("async_op", True)
        self.recorder.collective(KINDS[name], self.named(group), largest, runs=NCCL_STREAM if apart else None)

    def _tell_pair(self, name: str, given: Mapping[str, Any], size: int) -> None:
        """A message to or from one rank: both meet in a group of their own, on a stream for each direction.

        So neighbours that send to each other at once do not wait for each other, as in one NCCL group call.
        """
        group = given["process_group"]
        own = dist.ProcessGroup.unbox(group).rank()
        pair = f"{own}>{given['dst']}" if name == "send" else f"{given['src']}>{own}"
        way = f"{self.named(group)}:{pair}"
        stream = self._streams.setdefault(way, _FIRST_STREAM + len(self._streams))
        self.recorder.wait_stream(stream, 0)
        self.recorder.collective("send_recv", way, size, stream)
        if name != "send":
            self.recorder.wait_stream(0, stream)


def _flattened(lists: Iterable[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """What NCCL gathers into, or scatters from, where tensors of a list are of one size: they are copied.

    The work keeps it (ProcessGroupNCCL::allgather and reduce_scatter, newLikeFlat).
    """
    return [
        torch.empty((len(tensors), *tensors[0].shape), dtype=tensors[0].dtype, device="cuda")
        for tensors in lists
        if tensors and tensors[0].is_cuda and len({tensor.shape for tensor in tensors}) == 1
    ]


def _group_name(group: Any) -> str:
    try:
        unboxed = dist.ProcessGroup.unbox(group)
    except (AttributeError, RuntimeError, TypeError):
        return "world"
    return str(unboxed.group_desc or unboxed.group_name)


def _flat(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _flat(one)


def _finished(tensors: list[torch.Tensor]) -> Any:
    """A work that is done, with `tensors` as its result."""
    future: Any = torch.futures.Future()
    future.set_result(tensors)
    return finished_work(future)


class _Silent:
    """DDP's logger, which would ask a CUDA build for a timer."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


@contextlib.contextmanager
def lone_replicas() -> Iterator[None]:
    """Inside, DistributedDataParallel keeps no time and does not ask the others whether shapes agree."""
    plain: Callable[..., None] = parallel.DistributedDataParallel.__init__

    def made(self: parallel.DistributedDataParallel, *args: object, **kwargs: object) -> None:
        plain(self, *args, **kwargs)
        self.logger = _Silent()

    with (
        mock.patch.object(parallel, "_verify_param_shape_across_processes", return_value=None),
        mock.patch.object(parallel.DistributedDataParallel, "__init__", made),
    ):
        yield


def replicated(module: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """`module` in DistributedDataParallel."""
    with lone_replicas():
        return parallel.DistributedDataParallel(module, device_ids=[0], **options)


@contextlib.contextmanager
def process_group(
    runtime: Runtime, recorder: Recorder, rank: int, world: int, kept: frozenset[str] = frozenset()
) -> Iterator[Collectives]:
    """`torch.distributed` as rank `rank` of `world`, while inside; nobody waits for collectives of kinds `kept`."""
    collectives = Collectives(runtime, recorder, kept)
    with mock.patch.object(sys, "excepthook"):  # torch puts one with the rank there
        dist.init_process_group("fake", rank=rank, world_size=world, store=fake_store())
        try:
            collectives.install()
            with equal_entries_once():
                yield collectives
        finally:
            collectives.release()
            dist.destroy_process_group()
