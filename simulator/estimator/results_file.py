"""The files of a sweep: cases in (JSON lines), answers out (JSON lines that are appended one by one).

An answer is complete when its line is: a line that an interruption cut short is taken away when the file is opened
again. Answers find their case by content: the keys of the case, whatever their order and the spelling of defaults.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

from graph.case import Case as Checked
from simulator.engine.result import VERDICTS
from simulator.estimator.estimate import ANSWER_KEYS, capture_key
from simulator.reports.outputs import check_output
from traces.errors import ConfigError, LLMemError, OutputError
from traces.files import open_maybe_gzip, write_atomically
from traces.text import one_line, path_text

#: The key under which an answer repeats a line of the cases that is no JSON object.
LINE: Final = "line"
#: Longest line of a file of cases.
MAX_LINE: Final = 1 << 20


@dataclass(frozen=True)
class Case:
    """A case as it was given: the object, or the text of a line that holds none. `place` names it in errors.

    `key` is its content, for finding its answer; `group` is equal for cases that share a captured graph; `error` says
    what is wrong with it, where something is.
    """

    given: Mapping[str, Any] | str
    place: str = "case"
    key: str = field(init=False)
    group: str = field(init=False, default="")
    error: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", content(self.repeated()))
        try:
            object.__setattr__(self, "group", _group(self.given, self.place))
        except LLMemError as error:
            object.__setattr__(self, "error", str(error))

    @property
    def document(self) -> Mapping[str, Any]:
        """The case's object; only of a case without `error`."""
        assert isinstance(self.given, Mapping)
        return self.given

    def repeated(self) -> dict[str, Any]:
        """The part of the case's answer that repeats it."""
        return dict(self.given) if isinstance(self.given, Mapping) else {LINE: self.given}


def _group(given: Mapping[str, Any] | str, place: str) -> str:
    if isinstance(given, str):
        try:
            value = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"{place}: not JSON: {one_line(error)}") from None
        raise ConfigError(f"{place}: a case is a JSON object, not {type(value).__name__}")
    return capture_key(Checked.of(given, place))


def content(answer: Mapping[str, Any]) -> str:
    """Text that is the same for a case and its answer, and for two spellings of the same case."""
    case = case_of(answer)
    with contextlib.suppress(LLMemError, TypeError):
        case = Checked.of(case).document()
    return json.dumps(case, sort_keys=True, default=str)


def case_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The case that an answer repeats."""
    return {key: value for key, value in answer.items() if key not in ANSWER_KEYS}


def read_cases(path: str | os.PathLike[str]) -> list[Case]:
    """The cases of a file with one JSON object a line; empty lines are passed by, `-` is standard input.

    A line that is no case becomes a `Case` with an `error`. Raises TraceError where the file cannot be read,
    ConfigError where it has no cases.
    """
    name = path_text(path)
    if os.fspath(path) == "-":
        import sys

        text = sys.stdin.buffer.read()
    else:
        with open_maybe_gzip(path, limit=1 << 30) as file:
            text = file.read()
    found = []
    for number, line in enumerate(text.split(b"\n"), 1):
        if line.strip():
            found.append(Case(_parsed(line), f"{name}, line {number}"))
    if not found:
        raise ConfigError(f"{name}: has no cases: write one JSON object a line")
    return found


def _parsed(line: bytes) -> Mapping[str, Any] | str:
    text = line.strip().decode("utf-8-sig", "replace")
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text) if len(text) <= MAX_LINE else None
        if isinstance(value, dict):
            return value
    return text[:1000]


class Results:
    """A results file, open for appending by this process alone.

    `answers` are those that it had. On opening, a last line without its end is completed if it is whole, else taken
    away. Without `sync` a line may be lost where the machine fails, not where the process does.

    Raises OutputError where it cannot be written, another sweep has it open, or it is no results file.
    """

    def __init__(self, path: str | os.PathLike[str], *, force: bool = False, sync: bool = True) -> None:
        self.path = Path(path)
        self._sync = sync
        self.name = path_text(path)
        self.answers: list[dict[str, Any]] = []
        self.notes: list[str] = []
        check_output(os.fspath(path), force=True)
        if self.path.exists() and not self.path.is_file():
            raise OutputError(f"{self.name}: answers are appended to a file that can be read again, which this is not")
        self._file = self._open()
        try:
            if force:
                self._file.truncate(0)
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, answer: Mapping[str, Any]) -> None:
        """Write one answer as a line, on the disk when this returns (`sync`). Whole, or not at all, on OutputError."""
        line = json.dumps(answer, default=str).encode() + b"\n"
        start = self._file.seek(0, os.SEEK_END)
        try:
            self._put(line)
            if self._sync:
                os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(start)
            raise OutputError(f"{self.name}: cannot be written: {(error.strerror or str(error)).lower()}") from None

    def _put(self, data: bytes) -> None:
        view = memoryview(data)
        while len(view):
            view = view[self._file.write(view) :]

    def drop(self, unwanted: Callable[[Mapping[str, Any]], bool]) -> None:
        """Take answers out of the file, which is replaced as a whole."""
        kept = [answer for answer in self.answers if not unwanted(answer)]
        if len(kept) == len(self.answers):
            return
        with write_atomically(self.path, force=True) as file:
            file.writelines(json.dumps(answer).encode() + b"\n" for answer in kept)
        self._file.close()
        self._file = self._open()
        self.answers = kept

    def _open(self) -> BinaryIO:
        try:
            file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 (closed by __exit__)
        except OSError as error:
            raise OutputError(f"{self.name}: cannot be written: {(error.strerror or str(error)).lower()}") from None
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # not on this system: two sweeps of one file are the user's to avoid
            pass
        except BlockingIOError:
            file.close()
            raise OutputError(f"{self.name}: another sweep is writing to it") from None
        except OSError:  # a file system without locks
            pass
        return file

    def _read(self) -> None:
        self._file.seek(0)
        data = self._file.read()
        *lines, rest = data.split(b"\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            answer = _answer(line)
            if answer is None:
                raise OutputError(
                    f"{self.name}: line {number} is no answer of a sweep; choose another file, or --force to replace it"
                )
            self.answers.append(answer)
        if rest:
            self._mend(rest, len(data) - len(rest))

    def _mend(self, rest: bytes, start: int) -> None:
        """The last line has no end: a whole answer gets one, a part of one goes."""
        answer = _answer(rest)
        if answer is not None:
            self._file.write(b"\n")
            self.answers.append(answer)
            return
        if start == 0 and not rest.lstrip().startswith(b"{"):
            raise OutputError(f"{self.name}: is no file of results; choose another name, or --force to replace it")
        self._file.truncate(start)
        self.notes.append(f"{self.name}: the last line was cut short; its case is estimated again")


def _answer(line: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(line)
        if isinstance(value, dict) and ("error" in value or value.get("verdict") in VERDICTS):
            return value
    return None
