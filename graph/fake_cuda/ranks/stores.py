"""What ranks keep for each other by name: the stores of torch.distributed (`TCPStore`, that of the job's group).

Ranks of which several have processes share a file, whichever store the program asks for, so that nobody listens at a
port; a rank alone keeps what it has set. Who waits for a key tells the others so (`Peers`): where nobody is going to
set it, it gets what this rank set under a like key (`address/0` for `address/1`), or PyTorch's error.
"""

from __future__ import annotations

import contextlib
import math
import re
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Final
from unittest import mock

import torch.distributed as dist
import torch.distributed.rendezvous as rendezvous
from torch.distributed import distributed_c10d as c10d

from graph.fake_cuda.ranks.messages import Messages
from graph.user_code import reader

#: Seconds between two looks at a store, and until nobody else is taken to set a key (threads of this rank may).
_LOOK: Final = 0.01
_PATIENCE: Final = 1.0
_DIGITS: Final = re.compile(r"\d+")
_ASSUMED: Final = (
    "{} takes what a rank keeps in a store that is not recorded, or has ended: what this rank has set is assumed"
)


#: PyTorch's own.
_Store: Final[Any] = vars(dist)["Store"]
_FileStore: Final[Any] = vars(dist)["FileStore"]
_HashStore: Final[Any] = vars(dist)["HashStore"]


class SharedStore(_Store):  # type: ignore[misc]
    """A store of the job's ranks, by the name that it has for them; in a file, if others have processes."""

    messages: ClassVar[Messages]
    #: What keeps the stores of a recording that was asked for by C++ alone.
    alive: ClassVar[list[SharedStore]]

    def __init__(self, name: str, file: str) -> None:
        super().__init__()
        self._name = name
        self._kept: Any = _FileStore(file, -1) if file else _HashStore()
        self._own: dict[str, bytes] = {}  # what this rank has set, by key without its numbers
        self._missed: dict[tuple[str, ...], int] = {}  # keys that were looked for, and how many tensors there had been
        self.alive.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        """A key has a value."""
        self._kept.set(key, value)
        self._said(key, value)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """A key has another value, if it has the expected one; what it has then."""
        found: bytes = self._kept.compare_set(key, expected_value, desired_value)
        self._said(key, found)
        return found

    def add(self, key: str, value: int) -> int:
        """A counter is so much higher; what it is then."""
        found: int = self._kept.add(key, value)
        self._said(key, str(found))
        return found

    def append(self, key: str, value: str | bytes) -> None:
        """A key's value goes on."""
        before = self._kept.get(key) if self._kept.check([key]) else b""
        self.set(key, before + _bytes(value))

    def get(self, key: str) -> bytes:
        """A key's value, once it has one."""
        self._await([key], self.timeout)
        found: bytes = self._kept.get(key)
        return found

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Several keys' values."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        """Several keys have values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: list[str]) -> bool:
        """Whether all of these have values. Who looks again, and has made nothing since, waits for them so."""
        found: bool = self._kept.check(keys)
        born = self.messages.runtime.memory.born
        if not found and self._missed.get(tuple(keys)) == born:
            self._await(keys, None)
            found = self._kept.check(keys)
        self._missed[tuple(keys)] = born
        return found

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all of these have values."""
        self._await(keys, timeout or self.timeout)

    def delete_key(self, key: str) -> bool:
        """A key has no value; whether it had one."""
        found: bool = self._kept.delete_key(key)
        return found

    def num_keys(self) -> int:
        """How many keys have values."""
        found: int = self._kept.num_keys()
        return found

    def has_extended_api(self) -> bool:
        """Whether several keys can be set at once."""
        return True

    def _said(self, key: str, value: str | bytes) -> None:
        self._own[_DIGITS.sub("", key)] = _bytes(value)
        self.messages.keeps(f"{self._name} {key}")

    def _await(self, keys: Iterable[str], timeout: timedelta | None) -> None:
        """Wait for keys for so long; None: until nobody is going to set one, which is no error."""
        patience = _LOOK if timeout is None else timeout.total_seconds()
        for key in keys:
            heard = True
            until = math.inf if timeout is None else time.monotonic() + patience
            while heard and not self._kept.check([key]) and time.monotonic() < until:
                heard = self.messages.kept(f"{self._name} {key}", patience)
                time.sleep(_LOOK)
            until = min(until, time.monotonic() + _PATIENCE)
            while not self._kept.check([key]) and time.monotonic() < until:
                time.sleep(_LOOK)
            if not self._kept.check([key]):
                self._assume(key, timeout)

    def _assume(self, key: str, timeout: timedelta | None) -> None:
        like = self._own.get(_DIGITS.sub("", key))
        if like is None:
            if timeout is None:
                return
            after = round(timeout.total_seconds() * 1000)
            raise dist.DistStoreError(f"wait timeout after {after}ms, keys: /{key}")
        self.messages.runtime.note(_ASSUMED.format(reader() or "the program"))
        self._kept.set(key, like)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


for _name, _method in {"deleteKey": SharedStore.delete_key, "getNumKeys": SharedStore.num_keys}.items():
    setattr(SharedStore, _name, _method)  # as C++ calls them


def store() -> SharedStore:
    """That of the job's group."""
    return SharedStore("job", SharedStore.messages.peers.file)


@contextlib.contextmanager
def stores(messages: Messages) -> Iterator[None]:
    """Inside, those that a program makes are shared by the ranks."""
    SharedStore.messages, SharedStore.alive = messages, []
    file = messages.peers.file

    class TCPStore(SharedStore):
        """A store at a port: of all hosts, there is one job."""

        def __init__(
            self,
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,
            timeout: timedelta | None = None,
            *rest: object,
            **named: object,
        ) -> None:
            self.host, self.port = host_name, port or _free_port()
            super().__init__(f"port {self.port}", file and f"{file}.{self.port}")
            if timeout is not None:
                self.set_timeout(timeout)

    class FileStore(SharedStore):
        """A store in a file, which a rank alone may write to as well."""

        def __init__(self, file_name: str, world_size: int = -1) -> None:
            self.path = file_name
            super().__init__(file_name, file_name)

    with contextlib.ExitStack() as stack:
        for made in (TCPStore, FileStore):
            for module in (dist, c10d, rendezvous):
                if hasattr(module, made.__name__):
                    stack.enter_context(mock.patch.object(module, made.__name__, made))
        try:
            yield
        finally:
            SharedStore.alive = []


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        found: int = listening.getsockname()[1]
    return found
