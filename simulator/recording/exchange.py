"""What the processes of a job's ranks say to each other (`graph.fake_cuda.ranks.messages`), and when each may begin.

As many run as there are cores. One more begins where one waits, by itself or by others, for a rank that has not begun,
or where all wait: so ranks that only listen to the first come after it, and those that exchange numbers live together.
Where nobody can go on (a rank that is waited for is not recorded, has ended, waits itself, or finds no memory to
begin), the one with the least patience goes on without an answer, of those that have none the lowest.

Here is the recorder's side, `Exchange`, and the ranks', `Connection`: a pair of sockets for each rank, and one more for
each other thread of it that asks. Whether a rank computes in one thread while another waits is not known: it waits once
nobody has said anything for a minute.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import socket
import struct
import threading
import time
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
#: Seconds without a word until a rank waits of which one thread waits and another may compute.
_SILENCE: Final = 60.0


class _Question(msgspec.Struct, frozen=True, array_like=True):
    """What a rank gives to those who know it as `key`, and whose parts it waits for. If it waits at most for some
    seconds, `within`, it is for one of them, and gives nothing: others may wait for the same."""

    key: str
    members: Sequence[int]
    part: bytes
    wanted: Sequence[int]
    within: float = math.inf


class Connection:
    """A rank's side, of an open socket's number; it belongs to the thread that makes it, and to autograd's.

    `file` is where ranks may keep what all can read.
    """

    def __init__(self, number: int, file: str = "") -> None:
        self.file: Final = file
        os.set_inheritable(number, False)
        self._home = threading.get_ident()
        self._socket = socket.socket(fileno=number)
        self._alone = threading.Lock()  # who asks over this socket
        self._sending = threading.Lock()
        self._others = threading.local()

    def exchanged(
        self, key: str, members: Sequence[int], part: bytes, wanted: Sequence[int], *, within: float = math.inf
    ) -> Mapping[int, bytes]:
        """Give `part`, and wait for those of the `wanted` ranks: `graph.fake_cuda.ranks.messages.Peers`."""
        question = _Question(key, members, part, wanted, within)
        if self._is_home():
            with self._alone:
                return self._answer(self._socket, question)
        if not hasattr(self._others, "line"):
            with self._sending:
                self._others.line = _Line(self._socket)
        return self._answer(self._others.line.socket, question)

    def _is_home(self) -> bool:
        """Whether this thread is the first, or one of C++'s: autograd's, while the first waits for it."""
        return threading.get_ident() == self._home or threading.current_thread().name.startswith("Dummy-")

    def _answer(self, line: socket.socket, question: _Question) -> Mapping[int, bytes]:
        with self._sending:
            _send(line, msgspec.msgpack.encode(question))
        if not question.wanted:
            return {}
        return msgspec.msgpack.decode(_received(line)[0] or b"\x80", type=dict[int, bytes])

    def close(self) -> None:
        """Nothing more is said."""
        self._socket.close()


class _Line:
    """A socket of one more thread, whose other side goes over a socket that there is; it ends with the thread."""

    def __init__(self, over: socket.socket) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(over, [_LENGTH.pack(0)], [theirs.fileno()])

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.sendall(_LENGTH.pack(0))  # processes that were forked may have it open
        self.socket.close()


@dataclass
class _Said:
    """What was said under one key, by rank, and who has heard all that he wanted of it."""

    parts: dict[int, bytes] = field(default_factory=dict)
    heard: set[int] = field(default_factory=set)


class Exchange:
    """The recorder's side, for processes of `ranks` in this order, of which `together` run at once."""

    def __init__(self, ranks: Sequence[int], together: int) -> None:
        self._ranks = frozenset(ranks)
        self._together = together
        self._said: dict[str, _Said] = collections.defaultdict(_Said)
        self._living: dict[int, list[tuple[socket.socket, threading.Thread]]] = {}
        self._ending: set[int] = set()  # what they said may still come
        self._ended: set[int] = set()
        self._lines: collections.Counter[int] = collections.Counter()  # of each rank, that are open
        self._waiting: dict[tuple[int, int], _Question] = {}  # of ranks and their lines
        self._heard = time.monotonic()
        self._full = False  # no memory for one more
        self._changed = threading.Condition()

    def begin(self, rank: int) -> socket.socket:
        """Wait until the next rank may begin; the socket that its process takes over, and that is closed here."""
        ours, theirs = socket.socketpair()
        with self._changed:
            while not self._room():
                self._changed.wait(_LOOK)
            self._living[rank] = []
        self._listen(rank, ours)
        return theirs

    def _listen(self, rank: int, ours: socket.socket) -> None:
        """A thread that hears what comes over one line of a rank."""
        listener = threading.Thread(target=self._serve, args=(rank, ours), daemon=True)
        with self._changed:
            self._living[rank].append((ours, listener))
            self._lines[rank] += 1
        listener.start()

    def end(self, rank: int) -> None:
        """A rank has ended: nothing comes from it any more than it has said."""
        with self._changed:
            self._ending.add(rank)
            self._changed.notify_all()
            lines = self._living[rank]
        for ours, listener in lines:  # more may come while the first is heard
            with ours:
                with contextlib.suppress(OSError):
                    ours.shutdown(socket.SHUT_RD)  # what it started may have the other side, and live on
                listener.join()
        with self._changed:
            self._ended.add(rank)
            del self._living[rank], self._lines[rank]
            self._changed.notify_all()

    def _room(self) -> bool:
        if len(self._living) < self._together:
            return True
        needed = self._blocked() or len(self._living) - len(self._stalled()) < self._together
        full = needed and free_bytes() < _MEMORY
        if full != self._full:
            self._full = full
            self._changed.notify_all()
        return needed and not full

    def _stalled(self) -> set[int]:
        """Ranks that wait for one that has not begun, or for such a one."""
        idle, before = set(self._to_begin()), 0
        while before < len(idle):
            before = len(idle)
            idle |= {line[0] for line, asked in self._waiting.items() if idle & self._missing(asked)}
        return idle - self._to_begin()

    def _to_begin(self) -> frozenset[int]:
        """Ranks that have not begun."""
        return self._ranks - self._living.keys() - self._ended

    def _missing(self, question: _Question) -> frozenset[int]:
        """Ranks of whom something more is to come of what a question wants."""
        wanted, said = self._ranks.intersection(question.wanted), self._said[question.key].parts.keys()
        return frozenset() if wanted & said and question.within < math.inf else wanted - said - self._ended

    def _blocked(self) -> bool:
        """Whether all that live wait, and none for what is there."""
        waiting = collections.Counter(rank for rank, _ in self._waiting)
        if len(waiting) < len(self._living) or any(map(self._answered, self._waiting.values())):
            return False
        whole = all(waiting[rank] == self._lines[rank] for rank in waiting)
        return whole or time.monotonic() - self._heard > _SILENCE

    def _answered(self, question: _Question) -> bool:
        """Whether nothing more is to come of what a question wants."""
        return not self._missing(question)

    def _goes_on(self, line: tuple[int, int]) -> bool:
        if line[0] in self._ending or self._answered(self._waiting[line]):
            return True
        stuck = self._blocked() and (self._full or not self._to_begin())
        return stuck and line == min(self._waiting, key=lambda one: (self._waiting[one].within, one))

    def _serve(self, rank: int, ours: socket.socket) -> None:
        try:
            while True:
                packed, opened = _received(ours)
                if opened:
                    self._listen(rank, socket.socket(fileno=opened[0]))
                elif not packed:
                    return
                else:
                    question = msgspec.msgpack.decode(packed, type=_Question)
                    answer = self._asked((rank, ours.fileno()), question)
                    if question.wanted:
                        _send(ours, msgspec.msgpack.encode(answer))
        except OSError:  # the rank is gone
            return
        finally:
            with self._changed:
                self._lines[rank] -= 1
                self._changed.notify_all()

    def _asked(self, line: tuple[int, int], question: _Question) -> dict[int, bytes]:
        """The answer to a question, when there is one."""
        rank = line[0]
        with self._changed:
            said = self._said[question.key]
            if question.within == math.inf:
                said.parts[rank] = question.part
            self._heard = time.monotonic()
            self._changed.notify_all()
            if question.wanted:
                self._waiting[line] = question
                while not self._goes_on(line):
                    self._changed.wait(_LOOK)
                self._waiting.pop(line, None)
            said.heard.add(rank)
            if said.heard >= self._ranks.intersection(question.members):
                self._said.pop(question.key, None)
            return {other: said.parts[other] for other in question.wanted if other in said.parts}


def _send(to: socket.socket, data: bytes) -> None:
    to.sendall(_LENGTH.pack(len(data)) + data)


def _received(source: socket.socket) -> tuple[bytes, list[int]]:
    """The next message, empty where the other side is gone; and files that came with it, by number."""
    head, files = _read(source, _LENGTH.size)
    return (_read(source, _LENGTH.unpack(head)[0])[0] if head else b""), files


def _read(source: socket.socket, size: int) -> tuple[bytes, list[int]]:
    data, files = bytearray(), list[int]()
    while len(data) < size:
        part, new, *_ = socket.recv_fds(source, size - len(data), 1)
        files += new
        if not part:
            return b"", files
        data += part
    return bytes(data), files
