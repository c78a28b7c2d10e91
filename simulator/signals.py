"""What answers to signals while something is done: afterwards all is as it was."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

#: Signals that end a program. The second comes where its terminal is closed.
ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def answered(numbers: Iterable[int], handler: Callable[[int, Any], object] | signal.Handlers) -> Iterator[None]:
    """Inside, `handler` answers to signals of these numbers. Those that are ignored stay so (nohup), and so do all in
    a thread that is not the main one, which alone meets them."""
    meets = threading.current_thread() is threading.main_thread()
    heard = [number for number in numbers if meets and signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)
