"""Locks in forked processes: a thread that held one at the fork is not there to let go of it."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol


class Locking(Protocol):
    """Whoever has a lock."""

    lock: AbstractContextManager[Any]


_owners: Final[weakref.WeakSet[Locking]] = weakref.WeakSet()


def locking(owner: Locking) -> None:
    """Give `owner` a lock, and another one in every process that is forked from this one."""
    owner.lock = threading.RLock()
    _owners.add(owner)


def _forked() -> None:
    for owner in _owners:
        owner.lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)
