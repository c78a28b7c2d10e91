"""Sizes in texts: bytes as users write them (`80GB`, `80GiB`) and as they are shown (`79.25 GiB`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Final

from traces.errors import ConfigError
from traces.text import quoted

MiB: Final = 1 << 20
GiB: Final = 1 << 30

_UNITS: Final[Mapping[str, int]] = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", start=1)},
}
_SIZE: Final = re.compile(r"([0-9]{1,30})(\.[0-9]{1,30})?\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Bytes named by `text`: `80GB` is 80 x 10^9, `80GiB` 80 x 2^30, `4000000` bytes; fractions are cut to whole bytes.

    ConfigError for anything else: a bare `80g` could mean either, a number below 2^20 lacks its unit (`0` does not, and
    `512B` has one), a size must lie below 2^63.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"size {quoted(text)} is not understood: write bytes, or a number with a unit, as in 80GiB")
    unit = match[3].lower()
    if unit not in _UNITS:
        if unit and unit in "kmgtp":
            letter = unit.upper()
            raise ConfigError(f"size {quoted(text)} is ambiguous: write {letter}B (1000s) or {letter}iB (1024s)")
        raise ConfigError(f"size {quoted(text)} has an unknown unit: use B, KB, MB, GB, TB, or KiB, MiB, GiB, TiB")
    if match[2] and unit in ("", "b"):
        raise ConfigError(f"size {quoted(text)} is a fraction of a byte: write whole bytes, or add a unit such as GiB")
    size = int(Fraction(match[1] + (match[2] or "")) * _UNITS[unit])
    if not unit and 0 < size < 1 << 20:
        raise ConfigError(f"size {quoted(text)} has no unit: write {size}GB or {size}GiB (or {size}B, which are bytes)")
    if size >= 2**63:
        raise ConfigError(f"size {quoted(text)} is too large: sizes must be below 2^63 bytes")
    return size


def format_bytes(size: int) -> str:
    """`size` bytes for people: `512 B`, `1.50 MiB`, `79.25 GiB`, in units of 1024."""
    if abs(size) < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if round(abs(value), 2) < 1024:
            return f"{value:.2f} {unit}"
    return f"{value / 1024:.2f} PiB"
