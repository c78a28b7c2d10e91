"""What the processes of a job's ranks say to each other (`graph.fake_cuda.ranks.messages`), and when each may begin.

As many run as there are cores. One more begins where all that run wait for others: so ranks that only listen to the
first come after it, and those that exchange numbers live together. Where nobody can go on (a rank that is waited for is
not recorded, has ended, waits itself, or finds no memory to begin), the lowest that waits goes on without an answer.

Here is the recorder's side, `Exchange`, and the ranks', `Connection`: a pair of sockets for each rank.
"""

from __future__ import annotations

import collections
import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from simulator.free_memory import free_bytes

#: A message begins with how many bytes follow.
_LENGTH: Final = struct.Struct("<Q")
#: Bytes of memory without which no process begins beside others that wait.
_MEMORY: Final = 2 << 30
#: Seconds between two looks at how much there is.
_LOOK: Final = 0.5


class _Question(msgspec.Struct, frozen=True, array_like=True):
    """What a rank gives to those who know it as `key`, and whose parts it waits for."""

    key: str
    members: Sequence[int]
    part: bytes
    wanted: Sequence[int]


class Connection:
    """A rank's side, of an open socket's number."""

    def __init__(self, number: int) -> None:
        os.set_inheritable(number, False)
        self._socket = socket.socket(fileno=number)
        self._lock = threading.Lock()

    def exchanged(self, key: str, members: Sequence[int], part: bytes, wanted: Sequence[int]) -> Mapping[int, bytes]:
        """Give `part`, and wait for those of the `wanted` ranks: `graph.fake_cuda.ranks.messages.Peers`."""
        with self._lock:
            _send(self._socket, msgspec.msgpack.encode(_Question(key, members, part, wanted)))
            if not wanted:
                return {}
            return msgspec.msgpack.decode(_received(self._socket) or b"\x80", type=dict[int, bytes])

    def close(self) -> None:
        """Nothing more is said."""
        self._socket.close()


@dataclass
class _Said:
    """What was said under one key, by rank, and who has heard all that he wanted of it."""

    parts: dict[int, bytes] = field(default_factory=dict)
    heard: set[int] = field(default_factory=set)


class Exchange:
    """The recorder's side, for processes of `ranks` in this order, of which `together` run at once."""

    def __init__(self, ranks: Sequence[int], together: int) -> None:
        self._ranks = frozenset(ranks)
        self._to_begin = len(ranks)
        self._together = together
        self._said: dict[str, _Said] = collections.defaultdict(_Said)
        self._living: dict[int, tuple[socket.socket, threading.Thread]] = {}
        self._ending: set[int] = set()  # what they said may still come
        self._ended: set[int] = set()
        self._waiting: dict[int, _Question] = {}
        self._full = False  # no memory for one more
        self._changed = threading.Condition()

    def begin(self, rank: int) -> socket.socket:
        """Wait until the next rank may begin; the socket that its process takes over, and that is closed here."""
        ours, theirs = socket.socketpair()
        with self._changed:
            while not self._room():
                self._changed.wait(_LOOK)
            listener = threading.Thread(target=self._serve, args=(rank, ours), daemon=True)
            self._living[rank] = ours, listener
            self._to_begin -= 1
        listener.start()
        return theirs

    def end(self, rank: int) -> None:
        """A rank has ended: nothing comes from it any more than it has said."""
        with self._changed:
            self._ending.add(rank)
            self._changed.notify_all()
            ours, listener = self._living[rank]
        with ours:
            ours.shutdown(socket.SHUT_RD)  # what it started may have the other side, and live on
            listener.join()
        with self._changed:
            self._ended.add(rank)
            del self._living[rank]
            self._changed.notify_all()

    def _room(self) -> bool:
        if len(self._living) < self._together:
            return True
        full = self._blocked() and free_bytes() < _MEMORY
        if full != self._full:
            self._full = full
            self._changed.notify_all()
        return self._blocked() and not full

    def _blocked(self) -> bool:
        """Whether all that live wait, and none for what is there."""
        return len(self._waiting) == len(self._living) and not any(map(self._answered, self._waiting.values()))

    def _answered(self, question: _Question) -> bool:
        """Whether nothing more is to come of what a question wants."""
        parts = self._said[question.key].parts
        return all(rank in parts or rank not in self._ranks or rank in self._ended for rank in question.wanted)

    def _goes_on(self, rank: int) -> bool:
        if rank in self._ending or self._answered(self._waiting[rank]):
            return True
        stuck = self._blocked() and (self._full or not self._to_begin)
        return stuck and rank == min(self._waiting)

    def _serve(self, rank: int, ours: socket.socket) -> None:
        try:
            while packed := _received(ours):
                question = msgspec.msgpack.decode(packed, type=_Question)
                answer = self._asked(rank, question)
                if question.wanted:
                    _send(ours, msgspec.msgpack.encode(answer))
        except OSError:  # the rank is gone
            return

    def _asked(self, rank: int, question: _Question) -> dict[int, bytes]:
        """The answer to a question, when there is one."""
        with self._changed:
            said = self._said[question.key]
            said.parts[rank] = question.part
            self._changed.notify_all()
            if question.wanted:
                self._waiting[rank] = question
                self._changed.wait_for(lambda: self._goes_on(rank))
                self._waiting.pop(rank, None)
            said.heard.add(rank)
            if said.heard >= self._ranks.intersection(question.members):
                self._said.pop(question.key, None)
            return {other: said.parts[other] for other in question.wanted if other in said.parts}


def _send(to: socket.socket, data: bytes) -> None:
    to.sendall(_LENGTH.pack(len(data)) + data)


def _received(source: socket.socket) -> bytes:
    """The next message; empty where the other side is gone."""
    head = _read(source, _LENGTH.size)
    return _read(source, _LENGTH.unpack(head)[0]) if head else b""


def _read(source: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = source.recv(size - len(data))
        if not part:
            return b""
        data += part
    return bytes(data)
