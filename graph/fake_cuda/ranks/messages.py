"""What ranks say to each other: the values that collectives and messages bring, where there are values.

Integers, booleans and small floating-point numbers that came from the host (`graph.fake_cuda.values`) go from rank to
rank as collectives take them, on the GPU and on the host. Those of weights, activations and gradients have no values,
and nobody waits for them. `Peers` carries bytes; what a collective gives and takes of them is said here.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeAlias
from unittest import mock

import msgspec
import torch
import torch.distributed as dist

from graph.fake_cuda.device import Runtime
from graph.fake_cuda.values import COUNTED, MOST_FLOAT_BYTES
from graph.user_code import reader
from graph.workspaces.metadata import dtype, tensors

#: Values of tensors on the host, in one row each; None where one has none.
Part: TypeAlias = Sequence[torch.Tensor | None]

#: What reductions make of two numbers (torch.distributed.ReduceOp); of the mean, before it is divided.
_REDUCTIONS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "SUM": operator.add,
    "AVG": operator.add,
    "PRODUCT": operator.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}
#: Collectives in which all ranks give the like: where this one has no values nobody has, and who is missing is as it.
_ALIKE: Final = frozenset({"all_reduce", "reduce", "all_gather", "gather", "all_to_all"})
#: Whether operators of c10d say which reduction they make; those of 2.8 do not.
_SAID: Final = hasattr(torch.classes.c10d.ReduceOp(), "op")
#: Methods of process groups that make reductions.
_REDUCING: Final = ("allreduce", "allreduce_coalesced", "reduce")
#: Those whose ranks give tensors of one size, whatever they take.
_GATHERING: Final = frozenset({"all_gather", "gather"})


class Peers(Protocol):
    """The other ranks of a job, each with a process of its own."""

    @property
    def file(self) -> str:
        """Where they may keep what all can read; empty where there is nobody."""

    def exchanged(
        self, key: str, members: Sequence[int], part: bytes, wanted: Sequence[int], *, within: float = math.inf
    ) -> Mapping[int, bytes]:
        """Give `part` to the `members` of the job, who know it as `key`, and wait for those of the `wanted` ranks. Who
        waits `within` some seconds gives nothing, and waits for one of them.

        A rank that takes no part, or has ended, is missing in the answer.
        """


class Alone:
    """No other rank has a process."""

    file: Final = ""

    def exchanged(
        self, key: str, members: Sequence[int], part: bytes, wanted: Sequence[int], *, within: float = math.inf
    ) -> Mapping[int, bytes]:
        """Nobody answers."""
        return {}


@dataclass(frozen=True)
class _Call:
    """An operator of c10d as it is called by rank `own` of `size`; `values` tells those of tensors."""

    args: Sequence[Any]
    given: Mapping[str, Any]
    own: int
    size: int
    values: Callable[[Iterable[torch.Tensor]], list[torch.Tensor | None]]
    asked: object
    """The reduction that the program asked for."""

    @property
    def root(self) -> int:
        """The rank that gives to all, or takes from all."""
        return int(self.given["root_rank"])


@dataclass(frozen=True)
class _Taken:
    """A tensor that is written: from what ranks give, by (rank, place), and how one is made of several."""

    target: torch.Tensor
    sources: Sequence[tuple[int, int]]
    made: Callable[[Sequence[torch.Tensor]], torch.Tensor | None] = lambda given: given[0]


@dataclass(frozen=True)
class _Plan:
    """What this rank gives, whose parts it waits for, and what it takes of them; ranks are those of the group."""

    gives: Part
    wanted: Iterable[int]
    takes: Sequence[_Taken]


class _Topic(NamedTuple):
    """What ranks of the job, its members, know as `key`."""

    key: str
    members: Sequence[int]


class _Pending(threading.local):
    """What each thread has still to receive; `known`: what its next collective brings, where that is known already."""

    def __init__(self) -> None:
        self.takes: list[Callable[[], object]] = []
        self.known: torch.Tensor | None = None


class Messages:
    """The messages of one rank."""

    def __init__(self, runtime: Runtime, peers: Peers) -> None:
        self.runtime = runtime
        self.peers = peers
        self._counts: collections.Counter[str] = collections.Counter()
        self._pending = _Pending()
        self._asked: object = None

    def objects(self, group: dist.ProcessGroup | None, own: bytes, wanted: Iterable[int]) -> dict[int, bytes]:
        """What ranks of a group give, by their places in it, where this one gives `own` and waits for the `wanted`."""
        found = group or dist.group.WORLD
        assert found is not None  # torch.distributed has looked
        topic = self._topic(found, range(found.size()), "objects")
        return {**self._exchanged(found, topic, own, wanted), found.rank(): own}

    def keeps(self, key: str) -> None:
        """This rank has set a key of a store."""
        self.peers.exchanged(f"store {key}", _job(), b"", ())

    def kept(self, key: str, seconds: float) -> bool:
        """Wait until another rank has set a key of a store; False where none is going to in so many seconds."""
        others = [rank for rank in _job() if rank != int(os.environ.get("RANK", "0"))]
        return bool(self.peers.exchanged(f"store {key}", _job(), b"", others, within=seconds))

    def moved(self, name: str, kind: str, given: Mapping[str, Any], args: Sequence[Any]) -> None:
        """Operator `name` of c10d, a collective of this kind, has moved what values there are."""
        if kind == "barrier":
            self.met(dist.ProcessGroup.unbox(given["process_group"]))
            return
        if self._pending.known is not None:
            self._bring(self._pending.known, list(tensors(args[0])))
            return
        if not _travels(kind, args):
            if kind not in ("send", "broadcast"):
                self._write([(target, None) for target in tensors(args[0])])
            return
        group = dist.ProcessGroup.unbox(given["process_group"])
        plan = _PLANS[name](_Call(args, given, group.rank(), group.size(), self._values, self.asked(given)))
        pair = {"send": (group.rank(), given.get("dst", 0)), "recv": (given.get("src", 0), group.rank())}.get(kind)
        topic = self._topic(group, pair or range(group.size()), "" if pair is None else f"{pair[0]}>{pair[1]}")
        if kind == "recv":
            self._write([(taken.target, None) for taken in plan.takes])
            self._pending.takes.append(functools.partial(self._take, kind, group, topic, plan))
        else:
            self._take(kind, group, topic, plan)

    @contextlib.contextmanager
    def known(self, numbers: Sequence[int]) -> Iterator[None]:
        """Inside, this thread's first collective brings these numbers, and nothing is asked of what others bring."""
        self._pending.known = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        try:
            yield
        finally:
            self._pending.known = None

    def _bring(self, known: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        self._pending.known = known.new_empty(0)
        parts = [target.numel() for target in targets]
        whole = known.numel() == sum(parts)
        hosts = torch.split(known, parts) if whole else [None] * len(parts)
        shaped = [
            (one, None if host is None else host.view(one.shape)) for one, host in zip(targets, hosts, strict=True)
        ]
        self._write(shaped)

    def met(self, group: dist.ProcessGroup) -> None:
        """This rank has come to a barrier: when it waits there, it goes on once the group's first has come too, which
        may have made files for all; and the first once all have come, whose files it may rename or remove."""
        first, others = (self._topic(group, range(group.size()), what) for what in ("barrier", "barrier's others"))
        given, awaited = (first, others) if group.rank() == 0 else (others, first)
        ranks = range(1, group.size()) if group.rank() == 0 else (0,)
        self._exchanged(group, given, b"", ())
        self._pending.takes.append(functools.partial(self._exchanged, group, awaited, b"", ranks))

    def asked(self, given: Mapping[str, Any]) -> object:
        """Which reduction a collective of these arguments asks for, if it is one."""
        return given["reduce_op"].op() if _SAID and "reduce_op" in given else self._asked

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Inside, it is known which reduction the program asks for."""
        with contextlib.ExitStack() as stack:
            for name in () if _SAID else _REDUCING:
                plain = getattr(dist.ProcessGroup, name)
                stack.enter_context(mock.patch.object(dist.ProcessGroup, name, self._reducing(plain)))
            yield

    def _reducing(self, plain: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
        def call(
            group: dist.ProcessGroup, tensors: object, how: object = dist.ReduceOp.SUM, *rest: object
        ) -> dist.Work:
            self._asked = getattr(how, "reduceOp", how)
            try:
                return plain(group, tensors, how, *rest)
            finally:
                self._asked = None

        return call

    def waited(self) -> None:
        """The program has waited for a work: what it asked to receive is there. Until then the sender need not be."""
        takes, self._pending.takes = self._pending.takes, []
        for take in takes:
            take()

    def _take(self, kind: str, group: dist.ProcessGroup, topic: _Topic, plan: _Plan) -> None:
        """Give what the others wait for, and take what they give."""
        nothing = kind in _ALIKE and all(one is None for one in plan.gives)
        wanted = () if nothing else tuple(plan.wanted)
        answers = self._exchanged(group, topic, _packed(plan.gives), wanted)
        parts = {**{rank: _unpacked(part) for rank, part in answers.items()}, group.rank(): plan.gives}
        missing = [rank for rank in wanted if rank not in parts]
        if missing and kind in ("broadcast", *_ALIKE):
            self._missed(plan)
        if not (missing and kind == "broadcast"):
            self._write([(one.target, _made(one, parts, plan.gives)) for one in plan.takes])

    def _topic(self, group: dist.ProcessGroup, members: Iterable[int], what: str) -> _Topic:
        """What its members, places in a group, say next: they count alike."""
        ranks = ranks_of(group)
        key = f"{group.group_name} {','.join(map(str, ranks))} {what}"
        self._counts[key] += 1
        return _Topic(f"{key} {self._counts[key]}", [ranks[place] for place in members])

    def _exchanged(
        self, group: dist.ProcessGroup, topic: _Topic, own: bytes, wanted: Iterable[int]
    ) -> dict[int, bytes]:
        """The answers of the `wanted` places in a group."""
        ranks = ranks_of(group)
        others = {ranks[place]: place for place in wanted if place != group.rank()}
        if len(topic.members) == 1:
            return {}
        answers = self.peers.exchanged(topic.key, topic.members, own, list(others))
        return {others[rank]: part for rank, part in answers.items()}

    def _missed(self, plan: _Plan) -> None:
        """Ranks did not answer: an assumption, where this one has values in the place of what they would give."""
        if any(one is not None for one in (*plan.gives, *self._values(taken.target for taken in plan.takes))):
            place = reader()
            if place:
                self.runtime.note(
                    f"{place} takes integers from ranks that are not recorded, or have ended: what this rank has is "
                    "assumed in their place"
                )

    def _values(self, read: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
        """The values of tensors, in one row each."""
        found = [self.runtime.values.of(tensor) for tensor in read]
        return [None if one is None else one.detach().reshape(-1) for one in found]

    def _write(self, written: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        with torch.no_grad():
            self.runtime.values.received(written)


def _job() -> list[int]:
    """The ranks of the job, which may have no group yet."""
    return list(range(int(os.environ.get("WORLD_SIZE", "1"))))


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """The ranks of the job that a group has; a program may have named them by integers of numpy."""
    try:
        return [int(rank) for rank in dist.get_process_group_ranks(group)]
    except KeyError:  # made below torch.distributed
        return list(range(group.size()))


def _travels(kind: str, args: Sequence[Any]) -> bool:
    """Whether what a collective moves can have values; all ranks say the same."""
    moved = list(tensors(args[1 if kind in _GATHERING else 0]))
    size = sum(tensor.nbytes for tensor in moved)
    small = size <= MOST_FLOAT_BYTES and kind != "all_to_all"  # whose ranks give more and less
    return kind not in _APART and all(tensor.dtype in COUNTED or small for tensor in moved)


def _made(taken: _Taken, parts: Mapping[int, Part], own: Part) -> torch.Tensor | None:
    """What a tensor is written with; None where somebody has no values."""
    pieces = []
    for rank, place in taken.sources:
        part = parts.get(rank, own)
        piece = part[place] if place < len(part) else None
        if piece is None:
            return None
        pieces.append(piece)
    made = taken.made(pieces)
    fits = made is not None and made.numel() == taken.target.numel()
    return made.reshape(taken.target.shape) if made is not None and fits else None


def _packed(part: Part) -> bytes:
    """Values as bytes."""
    return msgspec.msgpack.encode([None if one is None else (dtype(one), _bytes(one)) for one in part])


def _bytes(row: torch.Tensor) -> bytes:
    return row.contiguous().view(torch.uint8).numpy().tobytes()


def _unpacked(packed: bytes) -> Part:
    """Values of bytes."""
    rows: list[tuple[str, bytes] | None] = msgspec.msgpack.decode(packed)
    return [None if row is None else _row(getattr(torch, row[0]), row[1]) for row in rows]


def _row(kind: torch.dtype, data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)


def _reduction(call: _Call) -> Callable[[Sequence[torch.Tensor]], torch.Tensor | None]:
    """What a reduction makes of everybody's numbers, where it is known which. NCCL's mean of integers is rounded
    down."""
    name = next((name for name in _REDUCTIONS if call.asked == getattr(dist.ReduceOp, name)), "")

    def made(given: Sequence[torch.Tensor]) -> torch.Tensor | None:
        if not name:
            return None
        try:
            total: torch.Tensor = functools.reduce(_REDUCTIONS[name], given)
        except NotImplementedError:  # floating-point numbers of 8 bits, which the host cannot add
            return None
        if name != "AVG":
            return total
        return total / len(given) if total.is_floating_point() else total // len(given)

    return made


def _joined(given: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(given))


def _broadcast(call: _Call) -> _Plan:
    if call.own == call.root:
        return _Plan(call.values(call.args[0]), (), ())
    return _Plan((), (call.root,), [_Taken(one, [(call.root, place)]) for place, one in enumerate(call.args[0])])


def _all_reduce(call: _Call) -> _Plan:
    every, made = range(call.size), _reduction(call)
    takes = [_Taken(one, [(rank, place) for rank in every], made) for place, one in enumerate(call.args[0])]
    return _Plan(call.values(call.args[0]), every, takes)


def _reduce(call: _Call) -> _Plan:
    plan = _all_reduce(call)
    return plan if call.own == call.root else _Plan(plan.gives, (), ())


def _all_gather(call: _Call) -> _Plan:
    """A list of outputs for each input: one of each rank."""
    every = range(call.size)
    takes = [_Taken(call.args[0][place][rank], [(rank, place)]) for place in range(len(call.args[1])) for rank in every]
    return _Plan(call.values(call.args[1]), every, takes)


def _all_gather_coalesced(call: _Call) -> _Plan:
    """A list of outputs for each rank: one of each input."""
    every = range(call.size)
    takes = [_Taken(call.args[0][rank][place], [(rank, place)]) for place in range(len(call.args[1])) for rank in every]
    return _Plan(call.values(call.args[1]), every, takes)


def _all_gather_single(call: _Call) -> _Plan:
    """An output for each input: those of all ranks one after another."""
    every, outputs, inputs = range(call.size), list(tensors(call.args[0])), list(tensors(call.args[1]))
    takes = [_Taken(one, [(rank, place) for rank in every], _joined) for place, one in enumerate(outputs)]
    return _Plan(call.values(inputs), every, takes)


def _gather(call: _Call) -> _Plan:
    if call.own != call.root:
        return _Plan(call.values(call.args[1]), (), ())
    return _all_gather(call)


def _scatter(call: _Call) -> _Plan:
    gives = call.values(tensors(call.args[1])) if call.own == call.root else ()
    return _Plan(gives, (call.root,), [_Taken(one, [(call.root, call.own)]) for one in call.args[0]])


def _all_to_all(call: _Call) -> _Plan:
    every = range(call.size)
    return _Plan(call.values(call.args[1]), every, [_Taken(call.args[0][rank], [(rank, call.own)]) for rank in every])


def _all_to_all_single(call: _Call) -> _Plan:
    """An input and an output, cut along the first dimension."""
    (output, given), every = call.args[:2], range(call.size)
    (row,) = call.values([given])
    rows, width = given.shape[0], given[0].numel() if given.shape[0] else 0
    sizes = call.given["input_split_sizes"] or [rows // call.size] * call.size
    pieces: Part = [None] * call.size if row is None else list(torch.split(row, [width * size for size in sizes]))
    return _Plan(pieces, every, [_Taken(output, [(rank, call.own) for rank in every], _joined)])


def _send(call: _Call) -> _Plan:
    return _Plan(call.values(call.args[0]), (), ())


def _receive(call: _Call) -> _Plan:
    source = int(call.given["src"])
    return _Plan((), (source,), [_Taken(one, [(source, place)]) for place, one in enumerate(call.args[0])])


_PLANS: Final[Mapping[str, Callable[[_Call], _Plan]]] = {
    "broadcast_": _broadcast,
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce,
    "reduce_": _reduce,
    "allgather_": _all_gather,
    "allgather_coalesced_": _all_gather_coalesced,
    "_allgather_base_": _all_gather_single,
    "allgather_into_tensor_coalesced_": _all_gather_single,
    "gather_": _gather,
    "scatter_": _scatter,
    "alltoall_": _all_to_all,
    "alltoall_base_": _all_to_all_single,
    "send": _send,
    "recv_": _receive,
}
#: Kinds whose results have no values: of gradients.
_APART: Final = frozenset({"reduce_scatter"})
