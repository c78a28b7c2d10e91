"""The error tree of the whole project, with the exit code that the command line gives for each.

    LLMemError (1)
    ├── TraceError (1)      a trace, snapshot or other input file cannot be used
    │   └── EventError (1)  ... because of one event: names rank, event index and field
    ├── ConfigError (1)     an option or allocator setting is illegal
    ├── OutputError (1)     a result cannot be written
    └── ReplayError (1)     the replay met something that is undefined in PyTorch

A predicted out-of-memory is a result (exit code 3), not an error. `Interrupted` is Ctrl-C, with what was finished.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Found = TypeVar("Found")


class LLMemError(Exception):
    """Root of every error that a user can cause; its text is one line that says what to mend."""

    exit_code: int = 1


class TraceError(LLMemError):
    """A trace or snapshot file cannot be read, or does not hold what the format asks for."""


class EventError(TraceError):
    """One event of a trace is wrong. `rank`, `index` and `field` say where."""

    def __init__(self, reason: str, *, rank: int, index: int, field: str | None = None) -> None:
        place = f"rank {rank}, event {index}"
        if field is not None:
            place += f", field '{field}'"
        super().__init__(f"{place}: {reason}")
        self.reason = reason
        self.rank = rank
        self.index = index
        self.field = field


class ConfigError(LLMemError):
    """An option, a case key or an allocator setting is unknown or has an illegal value."""


class OutputError(LLMemError):
    """A result file cannot be written (exists already, no permission, no room)."""


class ReplayError(LLMemError):
    """The replay cannot go on: the events ask for something that PyTorch leaves undefined."""


class Interrupted(KeyboardInterrupt, Generic[Found]):
    """Ctrl-C during long work; `found` is what was finished of its answer."""

    def __init__(self, found: Found) -> None:
        super().__init__("interrupted")
        self.found = found
