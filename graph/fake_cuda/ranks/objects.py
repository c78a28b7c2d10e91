"""Collectives of Python objects, whose bytes and sizes lie on a device meanwhile (torch.distributed.distributed_c10d).

Objects of other ranks come from their processes. Who has none, or has ended, is taken to have this rank's.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import torch
import torch.distributed as dist

from graph.fake_cuda.ranks.messages import Messages

Group: TypeAlias = dist.ProcessGroup | None


class Objects:
    """The collectives of one rank; `device` says where those of a group lie."""

    def __init__(self, device: Callable[[Group], str], messages: Messages) -> None:
        self._device = device
        self._messages = messages

    def all_gather(self, object_list: list[Any], obj: object, group: Group = None) -> None:
        """torch.distributed.all_gather_object."""
        if _takes_part(group):
            object_list[:] = self._gathered(obj, group, everywhere=True)

    def gather(
        self,
        obj: object,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: Group = None,
        group_dst: int | None = None,
    ) -> None:
        """torch.distributed.gather_object."""
        if not _takes_part(group):
            return
        there = _place(dst, group_dst, group) == dist.get_rank(group)
        found = self._gathered(obj, group, everywhere=there)
        if there and object_gather_list is not None:
            object_gather_list[:] = found

    def scatter(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group: Group = None,
        group_src: int | None = None,
    ) -> None:
        """torch.distributed.scatter_object_list."""
        if not _takes_part(group):
            return
        source, own = _place(src, group_src, group), dist.get_rank(group)
        given = [_pickled(one) for one in scatter_object_input_list or ()] if source == own else []
        found = self._from(source, given, group)
        sent = [self._sent(one, group) for one in given]
        told = None if sent else self._bytes(8, group)
        received = self._bytes(max(map(len, found), default=0), group), self._bytes(8, group)
        del received, told, sent
        scatter_object_output_list[0] = pickle.loads(found[own]) if own < len(found) and found[own] else None

    def broadcast(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: Group = None,
        device: object = None,
        group_src: int | None = None,
    ) -> None:
        """torch.distributed.broadcast_object_list."""
        if not _takes_part(group):
            return
        source = _place(src, group_src, group)
        given = [_pickled(one) for one in object_list]
        gives = given if source == dist.get_rank(group) else []
        found = self._from(source, gives, group) or given
        sent = [self._sent(one, group, device) for one in gives]
        sizes = self._bytes(8 * len(found), group, device)
        whole = self._bytes(sum(map(len, found)), group, device) if len(sent) != 1 else None
        del whole, sizes, sent
        if found is not given:
            object_list[:] = [pickle.loads(one) if one else own for one, own in zip(found, object_list, strict=False)]

    def _from(self, source: int, given: Sequence[bytes], group: Group) -> list[bytes]:
        """What the source gives; nothing where it has no process."""
        found = self._messages.objects(group, msgspec.msgpack.encode(given), [source])
        return msgspec.msgpack.decode(found[source], type=list[bytes]) if source in found else []

    def _gathered(self, obj: object, group: Group, *, everywhere: bool) -> list[Any]:
        """Every rank's object, whose bytes are gathered on this rank, or `everywhere` else."""
        world, own = dist.get_world_size(group), _pickled(obj)
        found: Mapping[int, bytes] = self._messages.objects(group, own, range(world))
        largest = max(map(len, found.values()))
        sent = self._sent(own, group)
        sizes = self._bytes(8 * world, group)
        resized = self._bytes(largest, group) if largest > len(own) else None
        objects = self._bytes(largest * world, group) if everywhere else None
        del objects, resized, sizes, sent
        mine = dist.get_rank(group)
        return [obj if rank == mine or not found.get(rank) else pickle.loads(found[rank]) for rank in range(world)]

    def _sent(self, data: bytes, group: Group, device: object = None) -> tuple[torch.Tensor, torch.Tensor]:
        """An object's bytes, and their number."""
        return self._bytes(len(data), group, device), self._bytes(8, group, device)

    def _bytes(self, size: int, group: Group, device: object = None) -> torch.Tensor:
        place: Any = device or self._device(group)
        return torch.empty(size, dtype=torch.uint8, device=place)


def _takes_part(group: object) -> bool:
    """Whether this rank is in a group: torch.distributed gives others a number in its place."""
    return group is None or isinstance(group, dist.ProcessGroup)


def _place(rank: int | None, place: int | None, group: Group) -> int:
    """A rank's place in a group, given by its number in the job or by that; the first one's without either."""
    if place is not None:
        return place
    found = group or dist.group.WORLD
    assert found is not None  # torch.distributed has looked
    return dist.get_group_rank(found, rank) if rank is not None else 0


def _pickled(obj: object) -> bytes:
    """An object's bytes; of what cannot be pickled here, none."""
    try:
        return pickle.dumps(obj)
    except Exception:
        return b""
