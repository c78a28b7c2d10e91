"""torch.distributed on a device that is not there: one rank of a job whose collectives do nothing but take part.

`process_group(runtime, recorder, rank, world)` starts torch's own `fake` process group (which knows rank and world, and
never waits) and puts kernels of ours under its collectives on CUDA tensors. They tell the recorder of each collective
and keep what ProcessGroupNCCL keeps (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp): the tensors of an asynchronous
collective stay referenced by its work until somebody waits for the work (of a functional collective: for its result),
or its watchdog has seen it complete and the next collective begins. Waiting for a work's future, as DDP's reducer does,
lets go of nothing. Other code of torch's own waits at once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Final
from unittest import mock
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as parallel
from torch.distributed import c10d_logger
from torch.distributed import distributed_c10d as c10d

from graph.fake_cuda.device import Runtime
from graph.fake_cuda.ranks.checks import checked
from graph.fake_cuda.ranks.futures import callbacks_on_streams
from graph.fake_cuda.ranks.messages import Messages
from graph.fake_cuda.torch_private import OPERATOR_CALLS, fake_store, finished_work, schemas, typed_future, wait_tensor
from graph.recorder.list_sharding import equal_entries_once
from graph.recorder.program import OPERATORS_A_SECOND
from graph.workspaces import metadata
from traces.release import version_of

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
#: Operators that a host issues between two looks of NCCL's watchdog (kWatchdogThreadSleepMillis).
OPERATORS_A_LOOK: Final = OPERATORS_A_SECOND // 10
#: Settlings after which a collective finds finished what a program issued: the step has ended in which it was.
SETTLINGS: Final = 2
#: Collectives over a list of tensors, which NCCL gathers into or takes from one flat tensor of the same stream.
_LISTS: Final = frozenset({"allgather_", "reduce_scatter_"})
#: Messages between two ranks, and the number of the first of their streams.
_PAIRS: Final = frozenset({"send", "recv_"})
_FIRST_STREAM: Final = 1000
#: Frames between whoever asks for a collective and its kernel: ours, and those of torch's operators.
_OURS: Final = os.path.dirname(os.path.dirname(__file__))
#: Files of torch.distributed's functions, of what logs their calls, and of pipelines.
_DISTRIBUTED: Final = (
    c10d.__file__,
    c10d_logger.__file__,
    os.path.join(os.path.dirname(dist.__file__), "pipelining", "schedules.py"),
)
#: Who calls an operator that is no functional collective, and waits itself: DTensor's all-to-all.
_WAITING: Final = os.path.join(os.path.dirname(dist.__file__), "tensor", "_collective_utils.py")
#: Functions whose messages go as one, and the release from which one of pipelines sends what goes one way alone
#: (schedules.py of 2.12; recorded with 2.11 and 2.13).
_BATCH: Final = dist.batch_isend_irecv.__name__
_OF_PIPELINES: Final = "_batch_p2p"
_ALONE: Final = (2, 12)
#: Whether works keep tensors for the allocator's sake: before 2.8 it knew the streams that use them (record_stream).
_STASHED: Final = version_of(torch.__version__) >= (2, 8)
#: `WorkResult.SUCCESS` of torch/csrc/distributed/c10d/Work.hpp.
_SUCCESS: Final = 0
#: The stream of asynchronous collectives that nobody waits for until the backward has ended.
NCCL_STREAM: Final = 900


@dataclass(eq=False)
class _Kept:
    """An asynchronous work and its tensors; `asked`: the program asked for it, and may wait for it."""

    work: object
    tensors: object
    asked: bool
    group: str
    since: int
    """Operators that had run when it was issued; of what the program did not ask for, at the first settling."""
    results: frozenset[int] = frozenset()
    """The storages of a functional collective's tensors, its results among them."""
    settlings: int = 0
    """Since it was issued."""
    finished: bool = False
    """Whether the host has waited for the device since (`late`)."""


class Collectives:
    """The collectives of one rank."""

    def __init__(self, runtime: Runtime, recorder: Recorder, kept: frozenset[str], *, late: bool = False) -> None:
        self.runtime = runtime
        self.recorder = recorder
        self.kept = kept
        self.late = late  # whether work is finished only once the host has waited for the device
        self.batches = frozenset({_BATCH} if runtime.profile.release >= _ALONE else {_BATCH, _OF_PIPELINES})
        self.keeps: Callable[[], bool] = lambda: True  # whether nobody waits for one of these
        self.named: Callable[[Any], str] = _group_name
        self.issued = 0  # works that were kept for some time
        self._held: list[_Kept] = []
        self._waits = 0  # of the host, until the last settling
        self._waited = 0  # operators when the host had waited for what is finished
        self._told = True
        self._streams: dict[str, int] = {}
        self.begun: Counter[str] = Counter()  # of each group, but messages
        self.messages: Messages | None = None  # where other ranks have processes, or may have
        self.on_host: Callable[[dist.ProcessGroup], bool] = lambda group: True  # whether a group has a backend there
        self.by_nccl: Callable[[dist.ProcessGroup], bool] = lambda group: False  # whether NCCL checks what it is given

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Collectives take part but are not told meanwhile."""
        before, self._told = self._told, False
        try:
            yield
        finally:
            self._told = before

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, a work that somebody waits for keeps no tensors but its result, and that has come."""
        plain: Callable[..., bool] = dist.Work.wait

        def wait(work: dist.Work, timeout: object = None) -> bool:
            done = plain(work)
            self._held = [one for one in self._held if one.work is not work]
            if self.messages is not None:
                self.messages.waited()
            return done

        changes: dict[str, Any] = {"wait": wait, **_RESULTS}
        with mock.patch.multiple(dist.Work, **changes), callbacks_on_streams():
            yield

    def settle(self, operators: int, waits: int) -> None:
        """A part of a step has ended: so many operators have run, and waits been made.

        By that ProcessGroupNCCL's watchdog is taken to have seen what is complete. It looks every 100 ms
        (kWatchdogThreadSleepMillis); a host takes about 50 us for an operator. `late`: work is finished only once the
        host has waited for the device after it was issued. What was seen is dropped when its group's next collective
        begins.
        """
        if self.late:
            self._settle_late(operators, waits)
        for one in self._held:
            one.since = one.since if one.asked or one.settlings else operators
            one.settlings += 1

    def release(self) -> None:
        """All works are dropped."""
        self._held.clear()

    @property
    def dropped(self) -> int:
        """Works that are not kept any more."""
        return self.issued - len(self._held)

    def _settle_late(self, operators: int, waits: int) -> None:
        waited, self._waits = waits > self._waits, waits
        if waited and any(one.settlings and not one.finished for one in self._held):
            for one in self._held:
                one.finished = bool(one.settlings)
            self._waited = operators

    def _begin(self, group: str) -> None:
        """A collective of a group begins: what the watchdog has seen complete is dropped (`shelvesToUnstash_` of
        ProcessGroupNCCL)."""
        operators = self.recorder.operators
        self._held = [one for one in self._held if one.group != group or not self._seen(one, operators)]

    def _seen(self, one: _Kept, operators: int) -> bool:
        """Whether the watchdog has seen that it is complete."""
        if self.late:
            return one.finished and operators - self._waited >= OPERATORS_A_LOOK
        looked = operators - one.since >= OPERATORS_A_LOOK
        if one.asked:
            return looked or one.settlings >= SETTLINGS
        return looked and one.settlings > 0

    def _keep(self, name: str, given: Mapping[str, Any], work: object, tensors: object) -> None:
        """What an asynchronous work keeps until it is waited for."""
        if not given.get("async_op", True):
            return
        functional = self._told and _by_operator()
        asked = self._told and (functional or _asked())
        # of messages the work alone knows
        stashes = name not in _PAIRS if asked else KINDS[name] in self.kept and self.keeps()
        if _STASHED and stashes:
            self.issued += 1
            made = metadata.tensors(tensors) if functional else ()
            results = frozenset(self.runtime.values.key(one) for one in made if one.is_cuda)
            self._held.append(_Kept(work, tensors, asked, _group_of(given), self.recorder.operators, results))

    def install(self) -> None:
        """Put our kernels under torch.distributed's operators on CUDA tensors."""
        for name in KINDS:
            for schema in schemas(f"c10d::{name}"):
                self.runtime.override(schema.name, self._kernel(name, schema), ("CUDA", "SparseCUDA"))
                if self.messages is not None:
                    self.runtime.override(schema.name, self._host_kernel(name, schema), ("CPU",))
        self.runtime.override("_c10d_functional::wait_tensor", self._waited_for)

    def _waited_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """The result of a functional collective is waited for: its work keeps nothing any more."""
        storage = self.runtime.values.key(tensor)  # asked of itself, it would count as in use
        self._held = [one for one in self._held if storage not in one.results]
        return wait_tensor(tensor)

    def _host_kernel(self, name: str, schema: torch.FunctionSchema) -> Callable[..., Any]:
        """Of tensors on the host nothing is kept, and nothing told. RuntimeError, as PyTorch's
        (torch/csrc/distributed/c10d/ProcessGroup.cpp), where the group has a backend for the device alone."""
        names = [argument.name for argument in schema.arguments]
        results = len(schema.returns)

        def kernel(*args: object) -> Any:
            given: dict[str, Any] = dict(zip(names, args, strict=False))
            if name != "barrier" and not self.on_host(dist.ProcessGroup.unbox(given["process_group"])):
                raise RuntimeError("No backend type associated with device type cpu")
            self._move(name, given, args)
            work = _finished(list(metadata.tensors(args[0]))).boxed()
            return work if results == 1 else (args[0], work)

        return kernel

    def _check(self, name: str, given: Mapping[str, Any]) -> None:
        group = dist.ProcessGroup.unbox(given["process_group"])
        if self.messages is not None and self.by_nccl(group):
            bound = group.bound_device_id if self.runtime.several else None
            checked(name, given, group.size(), group.rank(), functools.partial(self.messages.asked, given), bound)

    def _move(self, name: str, given: Mapping[str, Any], args: Sequence[Any]) -> None:
        if self.messages is not None:
            self.messages.moved(name, KINDS[name], given, args)

    def _kernel(self, name: str, schema: torch.FunctionSchema) -> Callable[..., Any]:
        names = [argument.name for argument in schema.arguments]
        results = len(schema.returns)

        def kernel(*args: object) -> Any:
            given = dict(zip(names, args, strict=False))
            self._check(name, given)
            self._begin(_group_of(given))
            self.begun[_group_of(given)] += name not in _PAIRS
            result = list(metadata.tensors(args[0]))
            whole: list[torch.Tensor] = []
            self._tell(name, given, args)
            self._move(name, given, args)
            if name == "barrier":
                result = self._barrier(bool(given.get("async_op", True)))
            elif name in _LISTS and self._told:
                lists: Any = args[0 if name == "allgather_" else 1]
                whole = _flattened(lists)
                result = whole if whole and name == "allgather_" else result
            elif name == "scatter_":
                result = list(metadata.tensors(args[1]))
            work = _finished([] if name in _PAIRS and _together(self.batches) else result)
            self._keep(name, given, work, (result if name == "barrier" else args[:2], whole))
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
            self._tell_pair(name, given, sum(tensor.nbytes for tensor in metadata.tensors(args[0])))
            return
        largest = max((tensor.nbytes for tensor in metadata.tensors(args[:2])), default=0)
        if name in _LISTS:
            largest = sum(tensor.nbytes for tensor in metadata.tensors(args[0 if name == "allgather_" else 1]))
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


def _group_of(given: Mapping[str, Any]) -> str:
    """The name of a collective's group, which is its own."""
    return str(dist.ProcessGroup.unbox(given["process_group"]).group_name)


def _flattened(lists: Iterable[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """What NCCL gathers into, or scatters from, where tensors of a list are of one size: they are copied.

    The work keeps it (ProcessGroupNCCL::allgather and reduce_scatter, newLikeFlat).
    """
    return [
        torch.empty((len(tensors), *tensors[0].shape), dtype=tensors[0].dtype, device="cuda")
        for tensors in lists
        if tensors and tensors[0].is_cuda and len({tensor.shape for tensor in tensors}) == 1
    ]


def _asked() -> bool:
    """Whether torch.distributed's functions, which give the work to the program, ask for a collective."""
    return caller().f_code.co_filename == c10d.__file__


def _by_operator() -> bool:
    """Whether an operator of functional collectives asks for a collective."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    called = frame is not None and frame.f_code.co_filename.startswith(OPERATOR_CALLS)
    return called and caller().f_code.co_filename != _WAITING


def _together(batches: frozenset[str]) -> bool:
    """Whether a message is one of several that go as one by these functions, whose work knows none of them."""
    frame: FrameType | None = caller()
    while frame is not None and frame.f_code.co_filename in _DISTRIBUTED:
        if frame.f_code.co_name in batches:
            return True
        frame = frame.f_back
    return False


def caller() -> FrameType:
    """The frame that asks for a collective, above our kernel and torch's operators."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_OURS, *OPERATOR_CALLS)):
        frame = frame.f_back
    return frame


def _group_name(group: Any) -> str:
    try:
        unboxed = dist.ProcessGroup.unbox(group)
    except (AttributeError, RuntimeError, TypeError):
        return "world"
    return str(unboxed.group_desc or unboxed.group_name)


def _result(work: dist.Work) -> Any:
    """The tensors of a work: one that is made from a future has none."""
    return work.get_future().value()


def _succeeded(work: dist.Work) -> Any:
    """A future of how a work has ended."""
    future: Any = torch.futures.Future()
    future.set_result(_SUCCESS)
    return future


#: What a work answers that one made from a future cannot.
_RESULTS: Final[Mapping[str, Callable[[dist.Work], Any]]] = {
    name: answer
    for name, answer in {"result": _result, "get_future_result": _succeeded}.items()
    if hasattr(dist.Work, name)  # the second came with 2.7
}


def _finished(tensors: list[torch.Tensor]) -> Any:
    """A work that is done, with `tensors` as its result: as a list of C++'s, which DDP's own hooks read, if there are
    any."""
    if tensors:
        return finished_work(typed_future(lambda: tensors))
    future: Any = torch.futures.Future()
    future.set_result(tensors)
    return finished_work(future)


def _untimed(logger: object) -> None:
    """`set_runtime_stats_and_log` of DDP's logger: no times, for which it would ask CUDA for a timer."""


def _agreed(*args: object, **kwargs: object) -> None:
    """The others have parameters of the same shapes. A Mock would keep all that it was called with."""


@contextlib.contextmanager
def lone_replicas() -> Iterator[None]:
    """Inside, DistributedDataParallel keeps no time and does not ask the others whether shapes agree."""
    with (
        mock.patch.object(parallel, "_verify_param_shape_across_processes", _agreed),
        mock.patch("torch.distributed.Logger.set_runtime_stats_and_log", _untimed),
        _uncounted(),
    ):
        yield


def _uncounted() -> AbstractContextManager[object]:
    """Inside, DistributedDataParallel counts no iterations, to time some: in a CUDA build CUDA's events do that, which
    ask the driver (`prepare_for_forward`, torch/csrc/distributed/c10d/reducer.cpp). A static graph needs the count."""
    if torch.version.cuda is None:
        return contextlib.nullcontext()
    reducer: Any = vars(dist)["Reducer"]
    static = WeakSet[Any]()
    plain, fixed = reducer.prepare_for_forward, reducer._set_static_graph

    def prepare(this: object) -> None:
        if this in static:
            plain(this)

    def fix(this: object) -> None:
        static.add(this)
        fixed(this)

    return mock.patch.multiple(reducer, prepare_for_forward=prepare, _set_static_graph=fix)


def replicated(module: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """`module` in DistributedDataParallel, within a `process_group`."""
    return parallel.DistributedDataParallel(module, device_ids=[0], **options)


@contextlib.contextmanager
def process_group(
    runtime: Runtime, recorder: Recorder, rank: int, world: int, kept: frozenset[str] = frozenset()
) -> Iterator[Collectives]:
    """`torch.distributed` as rank `rank` of `world`, while inside; nobody waits for collectives of kinds `kept`."""
    collectives = Collectives(runtime, recorder, kept, late=runtime.late)
    with mock.patch.object(sys, "excepthook"):  # torch puts one with the rank there
        dist.init_process_group("fake", rank=rank, world_size=world, store=fake_store())
        try:
            collectives.install()
            with equal_entries_once(), lone_replicas(), collectives.followed():
                yield collectives
        finally:
            collectives.release()
            dist.destroy_process_group()
