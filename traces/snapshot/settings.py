"""The `allocator_settings` of a memory snapshot, and the configuration string that they amount to.

A snapshot has the last string that the allocator parsed, and some of the values in force when it was taken. Values
that an earlier string set and the last one did not name (they are sticky, `c10/core/AllocatorConfig.cpp`) appear only
as values, so the string is completed from them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any, Final

from traces.errors import TraceError
from traces.text import quoted

MIB: Final = 1 << 20
INTERVALS: Final = 16  # of the divisions table, for 1 MiB, 2 MiB, ... 32 GiB

_LARGE_SEGMENT: Final = re.compile(r"\blarge_segment_size_mb\s*:\s*(\d{1,7})\b")


@dataclass(frozen=True, slots=True)
class Settings:
    """The allocator's settings when the snapshot was taken; `max_split_size` is None where unlimited.

    `known` is False where the file has none, and these are the defaults.
    """

    conf: str = ""
    max_split_size: int | None = None
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    divisions: tuple[int, ...] = (0,) * INTERVALS
    large_segment_size: int = 20 * MIB
    known: bool = False

    def with_expandable(self, on: bool) -> str:
        """The string, with expandable segments switched on or off."""
        if _mentions(self.conf, "expandable_segments"):
            return re.sub(r"\bexpandable_segments\s*:\s*\w+", f"expandable_segments:{on}", self.conf)
        return ",".join(part for part in (self.conf, f"expandable_segments:{on}") if part)


def read_settings(settings: Any, where: str) -> Settings:
    """The settings of a snapshot, None for a file that has none (torch 2.0, or a bare list of segments).

    Raises TraceError where a value is not of its kind.
    """
    if settings is None:
        return Settings()
    place = f"{where}: allocator_settings"
    if not isinstance(settings, dict):
        raise TraceError(f"{place}: must be a dict, is {quoted(settings)}")
    conf = settings.get("PYTORCH_CUDA_ALLOC_CONF", settings.get("PYTORCH_ALLOC_CONF", ""))
    if not isinstance(conf, str) or len(conf) > 10_000 or not conf.isprintable():
        raise TraceError(f"{place}: key 'PYTORCH_CUDA_ALLOC_CONF': must be one line of text, is {quoted(conf)}")
    max_split = settings.get("max_split_size", -1)
    if type(max_split) is not int:
        raise TraceError(f"{place}: key 'max_split_size': must be an integer, is {quoted(max_split)}")
    threshold = settings.get("garbage_collection_threshold", 0.0)
    if not isinstance(threshold, (int, float)) or not math.isfinite(threshold) or not 0 <= threshold < 1:
        raise TraceError(f"{place}: key 'garbage_collection_threshold': must be from 0 to 1, is {quoted(threshold)}")
    large = _LARGE_SEGMENT.search(conf)
    found = Settings(
        conf=conf,
        max_split_size=max_split if 0 < max_split < (1 << 62) else None,
        garbage_collection_threshold=float(threshold),
        expandable_segments=settings.get("expandable_segments", _says_expandable(conf)) is True,
        divisions=_divisions(settings.get("roundup_power2_divisions"), place),
        large_segment_size=int(large[1]) * MIB if large and int(large[1]) else 20 * MIB,
        known=True,
    )
    return _completed(found)


def _divisions(table: Any, place: str) -> tuple[int, ...]:
    """The 16 values of `roundup_power2_divisions`, keyed "1", "2", "4" ... "32768" (MiB)."""
    if table is None:
        return (0,) * INTERVALS
    if not isinstance(table, dict):
        raise TraceError(f"{place}: key 'roundup_power2_divisions': must be a dict, is {quoted(table)}")
    values = tuple(table.get(str(1 << i), 0) for i in range(INTERVALS))
    for value in values:
        if type(value) is not int or not 0 <= value < (1 << 31) or value & (value - 1):
            raise TraceError(f"{place}: key 'roundup_power2_divisions': must hold powers of two, not {quoted(value)}")
    return values


def _mentions(conf: str, option: str) -> bool:
    return re.search(rf"(^|,)\s*{option}\s*:", conf) is not None


def _completed(found: Settings) -> Settings:
    """The same settings, their string completed by what only the values show."""
    parts = [found.conf] if found.conf else []
    if found.expandable_segments != _says_expandable(found.conf):
        conf = found.with_expandable(found.expandable_segments)
        parts = [conf]
    if found.max_split_size is not None and not _mentions(found.conf, "max_split_size_mb"):
        parts.append(f"max_split_size_mb:{found.max_split_size // MIB}")
    if found.garbage_collection_threshold and not _mentions(found.conf, "garbage_collection_threshold"):
        parts.append(f"garbage_collection_threshold:{found.garbage_collection_threshold!r}")
    if any(found.divisions) and not _mentions(found.conf, "roundup_power2_divisions"):
        table = ",".join(f"{1 << i}:{value}" for i, value in enumerate(found.divisions))
        parts.append(f"roundup_power2_divisions:[{table}]")
    return replace(found, conf=",".join(parts))


def _says_expandable(conf: str) -> bool:
    return re.search(r"\bexpandable_segments\s*:\s*True\b", conf) is not None
