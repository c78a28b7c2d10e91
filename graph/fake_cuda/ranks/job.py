"""One rank of a job that a program starts itself, by `torch.distributed.init_process_group` of any backend.

Rank and world are what the program says, or those of the environment (RANK, WORLD_SIZE), as launchers set them. Where
it starts ranks itself (`torch.multiprocessing.spawn`, `elastic_launch`, `Process`), this process is one of them: that
of the environment, else the first. Collectives do nothing but take part (`collectives`), and bring from other ranks
what values they have (`messages`, `objects`).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch
import torch.cuda.nccl
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

from graph.fake_cuda.device import Runtime
from graph.fake_cuda.ranks import symmetric
from graph.fake_cuda.ranks.collectives import Collectives, caller, lone_replicas
from graph.fake_cuda.ranks.messages import Alone, Messages, Peers, ranks_of
from graph.fake_cuda.ranks.objects import Group, Objects
from graph.fake_cuda.ranks.options import Options
from graph.fake_cuda.ranks.stores import store, stores
from graph.fake_cuda.torch_private import (
    DEVICE_TYPES,
    OBJECT_OF_BYTES,
    STATES_BROADCAST,
    fsdp_states,
    functional_collectives,
    graph_task,
)
from graph.recorder.list_sharding import equal_entries_once
from graph.user_code import is_own, reader

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

#: The module by which programs begin ranks as torchrun does, `elastic_launch`; few import it.
LAUNCHER: Final = "torch.distributed.launcher.api"
#: The version of NCCL that comes with PyTorch 2.13.
_NCCL: Final = (2, 29, 7)
_FUNCTIONAL: Final = functional_collectives().__file__
#: The backend that has nothing for the host.
_OF_DEVICE: Final = "nccl"
#: Backends without a device, and what torch.distributed calls the one that nobody has named.
_OF_HOST: Final = ("gloo", "mpi")
_UNDEFINED: Final = "undefined"
_NO_LAUNCHER: Final = (
    "{} starts a process group, for which PyTorch wants RANK and WORLD_SIZE of a launcher: one rank of one is assumed; "
    "`record -- torchrun --nproc-per-node N ...` runs it as one of more"
)


@contextlib.contextmanager
def joined(
    runtime: Runtime, recorder: Any, peers: Peers | None = None, *, begins: bool = False, late: bool = False
) -> Iterator[Collectives]:
    """Inside, a program that starts a process group is one rank of the job of the environment; `peers` are the others,
    as far as they have processes. `begins`: no launcher has, so that processes which it starts are the ranks. `late`:
    work ends only once the host has waited for the device. What works keep, they keep afterwards, until `release`, as
    ProcessGroupNCCL's do when the program has ended."""
    collectives = Collectives(runtime, recorder, frozenset({"all_reduce"}), late=late)
    collectives.messages = messages = Messages(runtime, peers or Alone())
    collectives.keeps = lambda: graph_task() >= 0 and not _functional()  # in backward, DDP's reducer: others wait
    collectives.named = _members
    plain: Callable[..., None] = dist.init_process_group
    backends = _Backends()
    options = Options()
    collectives.on_host = lambda group: backends.of(group) != _OF_DEVICE
    collectives.by_nccl = lambda group: backends.of(group) not in _OF_HOST

    def start(
        backend: object = None,
        init_method: object = None,
        timeout: object = None,
        world_size: int = -1,
        rank: int = -1,
        *args: object,
        **kwargs: object,
    ) -> None:
        if not {"RANK", "WORLD_SIZE"} <= os.environ.keys() and (rank < 0 or world_size < 0):
            runtime.note(_NO_LAUNCHER.format(reader()))
        rank = rank if rank >= 0 else int(os.environ.get("RANK", "0"))
        world = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
        given = kwargs.get("store", args[0] if args else None)
        plain("fake", rank=rank, world_size=world, store=given or store())
        options.begin(kwargs.get("pg_options", args[2] if len(args) > 2 else None), timeout)
        _bind(kwargs.get("device_id"))
        backends.world = backends.asked(
            _OF_DEVICE if backend is None and kwargs.get("device_id") is not None else backend
        )
        collectives.install()
        from torch.distributed.checkpoint import default_planner  # only jobs need it

        # plans of the other ranks are taken to be this one's, and leave gaps
        stack.enter_context(mock.patch.object(default_planner, "_validate_global_plan", return_value=[]))
        stack.enter_context(mock.patch.object(fsdp_states(), *_with_keys_of_others(fsdp_states())))

    def monitored(group: Group = None, *args: object, **kwargs: object) -> None:
        """gloo's barrier, at which ranks that do not come are named."""
        met = dist.group.WORLD if group is None else group
        if isinstance(met, dist.ProcessGroup):
            messages.met(met)
            messages.waited()

    objects = Objects(messages)
    changes: dict[str, Callable[..., Any]] = {
        "init_process_group": start,
        "new_group": backends.making(dist.new_group),
        "split_group": _split(dist.split_group),
        **objects.functions(),
        "get_backend_config": lambda group=None: str(backends.config(group)),
        "monitored_barrier": monitored,
        "_store_based_barrier": _passed,  # with TORCH_DIST_INIT_BARRIER=1
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(dist, "get_backend", backends.of))  # torch's own code asks another
        stack.enter_context(mock.patch.object(dist.ProcessGroup, DEVICE_TYPES, property(backends.devices)))
        module, name = OBJECT_OF_BYTES
        stack.enter_context(mock.patch.object(module, name, objects.restoring(getattr(module, name))))
        stack.enter_context(mock.patch.object(dist.ProcessGroup, "monitored_barrier", monitored))
        for name, method in _methods(collectives, backends, dist.ProcessGroup.barrier).items():
            if hasattr(dist.ProcessGroup, name):  # 2.15 has no numbers that are set
                stack.enter_context(mock.patch.object(dist.ProcessGroup, name, method))
        for name, function in changes.items():
            for module in (dist, c10d, device_mesh):  # the last has some of them by name
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, function))
        for name in ("spawn", "start_processes"):
            stack.enter_context(mock.patch.object(torch.multiprocessing, name, _own_rank))
        stack.enter_context(mock.patch.object(BaseProcess, "start", _started(runtime, BaseProcess.start, begins)))
        stack.enter_context(mock.patch.object(dist, "is_nccl_available", return_value=True))
        stack.enter_context(mock.patch.object(torch.cuda.nccl, "version", return_value=_NCCL))
        stack.enter_context(symmetric.shared(runtime))
        stack.enter_context(stores(messages))
        stack.enter_context(options.known())
        stack.enter_context(lone_replicas())
        stack.enter_context(equal_entries_once())
        stack.enter_context(collectives.followed())
        stack.enter_context(messages.asking())
        try:
            yield collectives
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _methods(
    collectives: Collectives, backends: _Backends, plain: Callable[..., dist.Work]
) -> dict[str, Callable[..., Any]]:
    """What groups answer by methods of their own, as those of NCCL do."""

    def barrier(group: dist.ProcessGroup, *args: object, **given: object) -> dist.Work:
        """On the device, if none is named (`ProcessGroup::barrier`, torch/csrc/distributed/c10d/ProcessGroup.hpp)."""
        first = given.get("opts", args[0] if args else None)
        options: Any = first if isinstance(first, dist.BarrierOptions) else dist.BarrierOptions()
        if options.device is not None or not collectives.by_nccl(group):
            return plain(group, *args, **given)
        options.device = torch.device("cuda")
        return plain(group, options)

    def name(group: dist.ProcessGroup) -> str:
        return _OF_DEVICE if collectives.by_nccl(group) else backends.of(group)

    return {
        "barrier": barrier,
        "name": name,
        "_get_sequence_number_for_group": lambda group: collectives.begun[group.group_name],
        "_set_sequence_number_for_group": _passed,
    }


def _bind(device: object) -> None:
    """The job's group, and those made later, are of this device: what `init_process_group(device_id=)` says of them
    (`_new_process_group_helper`, torch/distributed/distributed_c10d.py)."""
    if device is not None:
        group: Any = dist.group.WORLD
        group.bound_device_id = torch.device("cuda", device) if isinstance(device, int) else device


def _split(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`split_group`, which needs NCCL's communicators: a new group for each part of the parent's ranks."""

    def split_group(
        parent_pg: Group = None, split_ranks: Sequence[Sequence[int]] | None = None, *rest: object, **named: object
    ) -> object:
        world: Any = dist.group.WORLD
        if not split_ranks or world.bound_device_id is None:
            return plain(parent_pg, split_ranks, *rest, **named)
        ranks = dist.get_process_group_ranks(parent_pg or world)
        parts = [sorted(ranks[place] for place in part) for part in split_ranks]
        said = None if named.get("group_desc") is None else str(named["group_desc"])
        groups = [dist.new_group(part, group_desc=said) for part in parts]
        return next((group for part, group in zip(parts, groups, strict=True) if dist.get_rank() in part), None)

    return split_group


def _with_keys_of_others(fsdp: ModuleType) -> tuple[str, Callable[..., tuple[list[Any], dict[Any, Any]]]]:
    """The function of FSDP that asks all ranks which optimizer states they have, by its name, and what answers instead.

    With `use_orig_params` a rank has none of parameters of which no part is its own: another rank has those, wherever a
    flat parameter has a state at all.
    """
    name = "_map_param_key_to_optim_keys"
    plain = getattr(fsdp, name)

    def keys(
        state: object,
        group: Group,
        parameters: Mapping[object, torch.nn.Parameter],
        names: Mapping[torch.nn.Parameter, list[str]],
        flat: Mapping[str, object],
        merge_keys: bool = False,
    ) -> tuple[list[Any], dict[Any, Any]]:
        found, own = plain(state, group, parameters, names, flat, merge_keys=merge_keys)
        if not merge_keys:
            return found, own
        held = {id(flat[key.unflat_param_names[0]]) for key in found if key.is_fsdp_managed}
        trained = (tuple(names[one]) for one in parameters.values() if one.requires_grad)
        of_others = {fsdp._OptimStateKey(which, True) for which in trained if id(flat.get(which[0])) in held}
        return sorted(of_others.union(found)), own

    return name, keys


def _passed(*args: object, **kwargs: object) -> None:
    """The barrier of a store, when a group is made: nobody waits at it here."""


class _Ended:
    """What `spawn` gives to those who wait themselves."""

    processes: tuple[object, ...] = ()

    def join(self, *args: object, **kwargs: object) -> bool:
        """All has ended."""
        return True


def _own_rank(
    fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, *how: object, **also: object
) -> _Ended | None:
    """`torch.multiprocessing.spawn` and `start_processes`: one process's work, that of this rank, done in this one.

    Those who wait themselves may wait for what only the first process gives: another one ends here.
    """
    own = int(os.environ.get("RANK", "0")) % nprocs
    fn(own, *args)
    if own and not join:
        raise SystemExit(0)
    return None if join else _Ended()


def upon_import(job: Collectives) -> dict[str, Callable[[Any], None]]:
    """What becomes of modules of torch.distributed's where a program imports them."""
    messages = job.messages
    assert messages is not None  # `joined` has made them

    def broadcasting(optimizer: ModuleType) -> None:
        vars(optimizer)[STATES_BROADCAST[1]] = Objects(messages).broadcasting(vars(optimizer)[STATES_BROADCAST[1]])

    return {LAUNCHER: launching, STATES_BROADCAST[0]: broadcasting}


def launching(api: ModuleType) -> None:
    """What becomes of the module `LAUNCHER` where a program imports it: `elastic_launch` of a function, as
    `accelerate.notebook_launcher` begins its ranks, calls it here, as the rank that this process is.

    What this one returns, all do. Commands are started as they are.
    """
    plain = api.launch_agent

    def launch_agent(
        config: LaunchConfig, entrypoint: object, args: Sequence[object], *rest: object, **named: object
    ) -> dict[int, object]:
        if not callable(entrypoint):
            given: dict[int, object] = plain(config, entrypoint, args, *rest, **named)
            return given
        ranks = config.nproc_per_node
        first = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks * config.max_nodes, "LOCAL_WORLD_SIZE": ranks}
        with mock.patch.dict(os.environ, {name: str(value) for name, value in first.items()} | dict(os.environ)):
            return dict.fromkeys(range(ranks), entrypoint(*args))

    vars(api)["launch_agent"] = launch_agent


class _Over:
    """What a process has that is not there, or is over: the popen of `multiprocessing`."""

    pid = sentinel = 0

    def wait(self, timeout: object = None) -> int:
        """Its exit code."""
        return 0

    poll = wait
    terminate = kill = close = interrupt = lambda self: None


def _started(runtime: Runtime, plain: Callable[..., None], begins: bool) -> Callable[..., None]:
    """`Process.start`. Where the program begins its ranks by it, one after the other, this rank's is run here, and the
    others are not there; else a process is what it is, and is not recorded. Those of libraries are no ranks: workers of
    data loaders, servers of managers."""
    begun: list[Any] = []

    def start(process: Any) -> None:
        code = _code(process._target)
        if process.daemon or code is None or not is_own(code.co_filename):
            plain(process)
        elif not begins or (dist.is_initialized() and not begun):
            runtime.note(
                f"a process that the program starts ({code.co_qualname}) is not recorded; where such processes are "
                "ranks, --nproc-per-node N records them"
            )
            plain(process)
        else:
            own, process._popen = int(os.environ["LOCAL_RANK"]), _Over()
            begun.append(process)
            if len(begun) == own + 1:
                process.run()
                if own:  # who waits for all may wait for what only the first one gives
                    raise SystemExit(0)

    return start


def _code(target: object) -> CodeType | None:
    """What a function or a method runs, with some of its arguments given or without."""
    while isinstance(target, functools.partial):
        target = target.func
    return getattr(target, "__code__", None)


def _members(group: Any) -> str:
    """The ranks of a group, as `0,1,2`."""
    return ",".join(map(str, ranks_of(dist.ProcessGroup.unbox(group))))


def _functional() -> bool:
    """Whether a functional collective (torch/distributed/_functional_collectives.py) asks: DTensor waits for these."""
    return caller().f_code.co_filename == _FUNCTIONAL


class _Backends:
    """The backends that a program asked for, group by group: all have the one that moves nothing."""

    def __init__(self) -> None:
        self.world = _UNDEFINED
        self._of: dict[str, str] = {}  # by the group's name

    @staticmethod
    def asked(backend: object) -> str:
        """A backend as torch.distributed tells it; without any it is chosen when it is needed."""
        return _UNDEFINED if backend is None else str(backend).lower()

    def making(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """`new_group` with the backend that the world has, whichever is asked for."""

        def new_group(
            ranks: Sequence[int] | None = None,
            timeout: object = None,
            backend: object = None,
            *rest: object,
            **named: object,
        ) -> Any:
            group = plain(ranks, timeout, **{**named, "backend": None, "pg_options": None})
            if backend is not None and isinstance(group, dist.ProcessGroup):
                self._of[group.group_name] = self.asked(backend)
            return group

        return new_group

    def of(self, group: Group = None) -> str:
        """torch.distributed.get_backend."""
        group = group or dist.group.WORLD
        return self.world if group is None else self._of.get(group.group_name, self.world)

    def config(self, group: Group = None) -> c10d.BackendConfig:
        """Which of PyTorch's backends a group has, by device."""
        return c10d.BackendConfig(c10d.Backend(self.of(group)))

    def devices(self, group: Group) -> list[torch.device]:
        """The devices that a group's backends serve, as it tells them: messages and barriers are on the host where that
        is one of them."""
        return [torch.device(name) for name in sorted(self.config(group).get_device_backend_map(), reverse=True)]
