"""What the commands share: notes on stderr, JSON on stdout, sizes of options."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from simulator.settings import parse_size
from traces.errors import ConfigError, LLMemError
from traces.text import one_line


def announce(notes: Iterable[str], quiet: bool) -> None:
    """Print each note once, as a line on stderr."""
    if not quiet:
        for note in dict.fromkeys(notes):
            print(f"note: {one_line(note)}", file=sys.stderr)


def print_json(document: Any) -> None:
    """Print one JSON document, and nothing else, on stdout."""
    json.dump(document, sys.stdout, indent=1, default=str)
    sys.stdout.write("\n")


def sizes(memory: str | None, context: str | None) -> tuple[int | None, int | None]:
    """The bytes of --memory and --context; ConfigError if one is malformed, or `auto`: traces have none."""
    if context is not None and context.strip().lower() == "auto":
        raise ConfigError(
            "--context auto is not available for traces: what a GPU holds besides PyTorch's memory depends on the "
            "libraries used, so give it as a size, such as --context 500MiB"
        )
    return _size("--memory", memory), _size("--context", context)


def _size(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        size = parse_size(text)
    except LLMemError as error:
        raise ConfigError(f"{option}: {error}") from None
    if option == "--memory" and size == 0:
        raise ConfigError("--memory: a GPU without memory cannot be simulated")
    return size
