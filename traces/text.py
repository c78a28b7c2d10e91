"""Short pieces of text: values and paths as error messages show them, and numbers as users write them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

_LIMIT: Final = 60
_PATH_LIMIT: Final = 120
_REASON_LIMIT: Final = 600
_HALF: Final = 295


def quoted(value: object) -> str:
    """`value` as one short printable line of at most 80 characters, in JSON's words (`null`, `true`, `a list`)."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return repr(value) if len(value) <= _LIMIT else f"{value[:_LIMIT]!r}..."[:80]
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 200 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    return f"a {type(value).__name__}"[:80]


def one_line(text: object, most: int = 160) -> str:
    """The text of an error of another library, on one line of at most so many printable characters."""
    line = " ".join(str(text).split())
    line = "".join(c if c.isprintable() else "?" for c in line)
    return line if len(line) <= most else line[: most - 3] + "..."


def first_of(said: Sequence[str], most: int, elsewhere: str = "") -> str:
    """The first `most` of several things to say, and how many more there are, with a word on where."""
    more = f"; and {len(said) - most} more{elsewhere}" if len(said) > most else ""
    return "; ".join(said[:most]) + more


def reason(error: BaseException) -> str:
    """What an error says, with its cause where it does not say it itself, on one line of at most 600 characters.

    The middle is left out of a longer text: libraries tell the cause at its end.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    if error.__cause__ is not None and (cause := " ".join(str(error.__cause__).split())) and cause not in text:
        text += f" (from {type(error.__cause__).__name__}: {cause})"
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= _REASON_LIMIT else f"{text[:_HALF]} ... {text[-_HALF:]}"


def number(text: str) -> int | float | str:
    """The number that a text is; the text itself where it is none."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def path_text(path: str | os.PathLike[str]) -> str:
    """A path for a message: printable, and cut at the front where it is very long."""
    text = os.fspath(path)
    if len(text) > _PATH_LIMIT:
        text = "..." + text[-_PATH_LIMIT:]
    return text if text.isprintable() else repr(text)
