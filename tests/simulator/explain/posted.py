"""The texts of tests/data/out_of_memory, and sizes as messages print them."""

from __future__ import annotations

import json
from typing import Any, Final

from tests.places import DATA

FOLDER: Final = DATA / "out_of_memory"
ROWS: Final[list[dict[str, Any]]] = [
    json.loads(line) for line in (FOLDER / "texts.jsonl").read_text("utf-8").splitlines()
]
_POWERS: Final = {"bytes": 0, "kB": 1, "KiB": 1, "MiB": 2, "GiB": 3}


def size(text: str) -> int | None:
    """The bytes of a size as a message prints it; None for those that stand for nothing (2^64 bytes)."""
    number, unit = text.split(" ")
    bytes_ = round(float(number.replace(",", "")) * 1024 ** _POWERS[unit])
    return bytes_ if bytes_ < 1 << 60 else None


def printed(bytes_: int) -> str:
    """A size as c10's format_size prints it."""
    for power, unit in enumerate(("bytes", "KiB", "MiB")):
        if bytes_ <= 1024 ** (power + 1):
            return f"{bytes_} bytes" if not power else f"{bytes_ / 1024**power:.2f} {unit}"
    return f"{bytes_ / 1024**3:.2f} GiB"
