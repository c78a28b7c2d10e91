"""One rank of a job that a program starts itself, by `torch.distributed.init_process_group` of any backend.

Rank and world are what the program says, or those of the environment (RANK, WORLD_SIZE), as launchers set them. Where
it starts ranks itself (`torch.multiprocessing.spawn`), this process is one of them: that of the environment, else the
first. Collectives do nothing but take part (`graph.fake_cuda.collectives`); those of Python objects give every rank's
object as this rank's.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final
from unittest import mock

import torch
import torch.cuda.nccl
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

from graph.fake_cuda.collectives import Collectives, lone_replicas
from graph.fake_cuda.device import Runtime
from graph.fake_cuda.torch_private import OPERATOR_CALLS, fake_store, functional_collectives, graph_task
from graph.recorder.list_sharding import equal_entries_once

#: The version of NCCL that comes with PyTorch 2.13.
_NCCL: Final = (2, 29, 7)
#: Frames between whoever asks for a collective and its kernel: ours, and those of torch's operators.
_OURS: Final = os.path.dirname(__file__)
_FUNCTIONAL: Final = functional_collectives().__file__


@contextlib.contextmanager
def joined(runtime: Runtime, recorder: Any) -> Iterator[Collectives]:
    """Inside, a program that starts a process group is one rank of the job of the environment."""
    collectives = Collectives(runtime, recorder, frozenset({"all_reduce"}))
    collectives.keeps = lambda: graph_task() >= 0 and not _functional()  # in backward, DDP's reducer: others wait
    collectives.named = _members
    plain: Callable[..., None] = dist.init_process_group

    def start(
        backend: object = None,
        init_method: object = None,
        timeout: object = None,
        world_size: int = -1,
        rank: int = -1,
        *args: object,
        **kwargs: object,
    ) -> None:
        rank = rank if rank >= 0 else int(os.environ.get("RANK", "0"))
        world = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
        plain("fake", rank=rank, world_size=world, store=fake_store())
        collectives.install()
        from torch.distributed.checkpoint import default_planner  # only jobs need it

        # plans of the other ranks are taken to be this one's, and leave gaps
        stack.enter_context(mock.patch.object(default_planner, "_validate_global_plan", return_value=[]))

    new_group = _without_backend(dist.new_group)
    changes: dict[str, Callable[..., Any]] = {"init_process_group": start, "new_group": new_group, **_OBJECTS}
    with contextlib.ExitStack() as stack:
        for name, function in changes.items():
            for module in (dist, c10d, device_mesh):  # the last has some of them by name
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, function))
        for name in ("spawn", "start_processes"):
            stack.enter_context(mock.patch.object(torch.multiprocessing, name, _own_rank))
        stack.enter_context(mock.patch.object(dist, "is_nccl_available", return_value=True))
        stack.enter_context(mock.patch.object(torch.cuda.nccl, "version", return_value=_NCCL))
        stack.enter_context(lone_replicas())
        stack.enter_context(equal_entries_once())
        try:
            yield collectives
        finally:
            collectives.settle()
            if dist.is_initialized():
                dist.destroy_process_group()


class _Ended:
    """What `spawn` gives to those who wait themselves."""

    def join(self, *args: object, **kwargs: object) -> bool:
        """All has ended."""
        return True


def _own_rank(
    fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, *how: object, **also: object
) -> _Ended | None:
    """`torch.multiprocessing.spawn` and `start_processes`: one process's work, that of this rank, done in this one."""
    fn(int(os.environ.get("RANK", "0")) % nprocs, *args)
    return None if join else _Ended()


def _members(group: Any) -> str:
    """The ranks of a group, as `0,1,2`."""
    unboxed = dist.ProcessGroup.unbox(group)
    try:
        ranks = dist.get_process_group_ranks(unboxed)
    except KeyError:  # made below torch.distributed
        ranks = list(range(unboxed.size()))
    return ",".join(map(str, ranks))


def _functional() -> bool:
    """Whether a functional collective (torch/distributed/_functional_collectives.py) asks: DTensor waits for these."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_OURS, *OPERATOR_CALLS)):
        frame = frame.f_back
    return frame.f_code.co_filename == _FUNCTIONAL


def _without_backend(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`new_group` with the backend that the world has, whichever is asked for."""

    def new_group(ranks: Sequence[int] | None = None, timeout: object = None, *backend: object, **named: object) -> Any:
        return plain(ranks, timeout, **{**named, "backend": None, "pg_options": None})

    return new_group


def _all_gather_object(object_list: list[Any], obj: object, group: object = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(obj: object, object_gather_list: list[Any] | None = None, *where: object, **named: object) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    *where: object,
    **named: object,
) -> None:
    scatter_object_output_list[0] = (scatter_object_input_list or [None])[0]


def _broadcast_object_list(object_list: list[Any], *where: object, **named: object) -> None:
    """What every rank has is what the source had."""


_OBJECTS: Final[dict[str, Callable[..., Any]]] = {
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "scatter_object_list": _scatter_object_list,
    "broadcast_object_list": _broadcast_object_list,
}
