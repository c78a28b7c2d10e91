"""Collectives of Python objects, whose bytes and sizes lie on a device meanwhile (torch.distributed.distributed_c10d).

PyTorch's own functions run, so that they take there what they take. What they would read from the device, how long the
objects are and the objects themselves, comes from the other ranks' processes beside it. Who has none, or has ended, is
taken to have this rank's.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import torch
import torch.distributed as dist

from graph.errors import CaptureError
from graph.fake_cuda.ranks.messages import Messages
from graph.user_code import reader

Group: TypeAlias = dist.ProcessGroup | None
Function: TypeAlias = Callable[..., Any]
#: How many bytes the objects have, as the function's first collective brings it, and the objects that it gives.
_Come: TypeAlias = tuple[Sequence[int], Sequence[object]]
_Given: TypeAlias = Mapping[str, Any]
_HOST: Final = torch.device("cpu")
_UNSENT: Final = "{} takes an object from a rank that is not recorded, or has ended: have `--ranks` name that one too"


class _Restored(threading.local):
    """The objects that come next, of each thread; None outside of such a collective."""

    objects: Iterator[object] | None = None


class Objects:
    """The collectives of one rank."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._restored = _Restored()

    def functions(self) -> dict[str, Function]:
        """What to put in the place of torch.distributed's functions."""
        exchanged: dict[str, Callable[[_Given], _Come]] = {
            "all_gather_object": self._gathered,
            "gather_object": self._gathered,
            "scatter_object_list": self._scattered,
            "broadcast_object_list": self._broadcast,
        }
        return {name: self._running(getattr(dist, name), come) for name, come in exchanged.items()}

    def restoring(self, plain: Function) -> Function:
        """PyTorch's function that makes an object of its bytes on the device: it gives the one that has come."""

        def to_object(tensor: torch.Tensor, *rest: object) -> Any:
            objects = self._restored.objects
            if objects is None:
                try:
                    return plain(tensor, *rest)
                except EOFError as error:  # of no bytes: a message that nobody has sent
                    raise CaptureError(_UNSENT.format(reader() or "the program")) from error
            if tensor.is_cuda:
                self._messages.runtime.synchronized()  # it is copied to the host, which waits
            return next(objects)

        return to_object

    def broadcasting(self, plain: Function) -> Function:
        """PyTorch's function that broadcasts what `torch.save` makes of an object: its bytes are too many to have
        values, so that the object comes beside them, with tensors of its sizes."""

        @functools.wraps(plain)
        def function(obj: object, src_rank: int, group: Group = None, device: torch.device = _HOST) -> Any:
            source = _place(src_rank, None, group)
            mine = source == dist.get_rank(group)
            come = self._messages.objects(group, _outline(obj) if mine else b"", [source])
            if mine:
                return plain(obj, src_rank, group, device)
            if source not in come:
                raise CaptureError(_UNSENT.format(reader() or "the program"))
            length = torch.zeros(1, dtype=torch.int64).to(device)
            dist.broadcast(length, src=src_rank, group=group)
            data = torch.empty([int(length.item())], dtype=torch.uint8, device=device)
            dist.broadcast(data, src=src_rank, group=group)
            self._messages.runtime.synchronized()  # it is copied to the host, which waits
            with torch.device(device):
                return pickle.loads(come[source])

        return function

    def _running(self, plain: Function, exchanged: Callable[[_Given], _Come]) -> Function:
        signature: Final = inspect.signature(plain)

        @functools.wraps(plain)
        def function(*args: object, **kwargs: object) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            if not _takes_part(given.get("group")):
                return plain(*args, **kwargs)
            sizes, objects = exchanged(given)
            with self._messages.known(sizes):
                self._restored.objects = iter(objects)
                try:
                    return plain(*args, **kwargs)
                finally:
                    self._restored.objects = None

        return function

    def _gathered(self, given: _Given) -> _Come:
        """Every rank's object."""
        group, own, mine = given.get("group"), _pickled(given["obj"]), dist.get_rank(given.get("group"))
        ranks = range(dist.get_world_size(group))
        come = self._messages.objects(group, own, ranks)
        found = [come.get(rank) or own for rank in ranks]
        others = [given["obj"] if rank == mine or not come.get(rank) else pickle.loads(come[rank]) for rank in ranks]
        return [len(one) for one in found], others

    def _scattered(self, given: _Given) -> _Come:
        """This rank's of the source's objects; the largest is how long all are on the device."""
        found = self._from(given, given.get("scatter_object_input_list"))
        own = dist.get_rank(given.get("group"))
        mine = pickle.loads(found[own]) if own < len(found) and found[own] else None
        return [max(map(len, found), default=0)], [mine]

    def _broadcast(self, given: _Given) -> _Come:
        """The source's objects; where it has no process, this rank's."""
        own = given["object_list"]
        found = self._from(given, own) or [_pickled(one) for one in own]
        come = [pickle.loads(one) if one else mine for one, mine in zip(found, own, strict=False)]
        return [len(one) for one in found], come

    def _from(self, given: _Given, objects: Sequence[object] | None) -> list[bytes]:
        """What the source gives; nothing where it has no process."""
        group = given.get("group")
        source = _place(given.get("src"), given.get("group_src"), group)
        gives = [_pickled(one) for one in objects or ()] if source == dist.get_rank(group) else []
        come = self._messages.objects(group, msgspec.msgpack.encode(gives), [source])
        return msgspec.msgpack.decode(come[source], type=list[bytes]) if source in come else []


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


class _Outlines(pickle.Pickler):
    """Of tensors the sizes alone."""

    def reducer_override(self, obj: object) -> Any:
        return (_made, (tuple(obj.shape), obj.dtype)) if isinstance(obj, torch.Tensor) else NotImplemented


def _made(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _outline(obj: object) -> bytes:
    file = io.BytesIO()
    _Outlines(file).dump(obj)
    return file.getvalue()


def _pickled(obj: object) -> bytes:
    """An object's bytes; of what cannot be pickled, none: PyTorch says so."""
    try:
        return pickle.dumps(obj)
    except Exception:
        return b""
