"""The allocator's rules as a recording met them: those of its release, under the settings when it was taken.

A snapshot has the last string that the allocator parsed, and some of the values in force. Values that an earlier string
set and the last one did not name (they are sticky, `c10/core/AllocatorConfig.cpp`) appear only as values, so the string
is completed from them.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.allocator import layout as at
from simulator.allocator import sizes
from simulator.allocator.conf import AllocatorSettings, parse_conf, with_option
from simulator.allocator.releases import RELEASES, Release, parse_release
from traces.errors import ConfigError, TraceError
from traces.release import Version
from traces.snapshot.layout import Layout, RecordedSettings
from traces.units import MiB


class Rules:
    """What decides the sizes of blocks and segments, and the order among them; `settings.conf` is the whole string."""

    def __init__(self, settings: AllocatorSettings, release: Release) -> None:
        self.settings, self.release = settings, release
        self.limits_split = settings.max_split_size < at.UNLIMITED
        self._words = sizes.words(settings, release)

    def round_size(self, n: int) -> int:
        """The size of a block for a request of `n` bytes, before anything that is not split off."""
        return sizes.round_size(self._words, n)

    def segment_size(self, size: int) -> int:
        """Bytes asked of the driver when no free block serves a block of `size` bytes."""
        return sizes.segment_size(self._words, size)

    def page_size(self, large: bool) -> int:
        """Bytes that an expandable segment maps at a time."""
        return self.settings.large_segment_size if large else sizes.SMALL_BUFFER

    def with_expandable(self, on: bool) -> str:
        """The string, with expandable segments switched on or off."""
        return with_option(self.settings.conf, "expandable_segments", str(on), self.release)


def possible_rules(layout: Layout, release: str | None, where: str) -> tuple[Rules, ...]:
    """The rules of the releases that write such a snapshot and read its string, oldest first; those of `release` alone.

    Raises TraceError where there are none; ConfigError where `release` is not known.
    """
    recorded = layout.settings
    if recorded is None:
        expandable = any(segment.expandable for record in layout.devices for segment in record.segments)
        recorded = RecordedSettings("expandable_segments:True" if expandable else "", None, None, None, None)
    minors = range(layout.since, layout.until + 1)
    candidates = [RELEASES[Version(2, minor)] for minor in minors] if release is None else [parse_release(release)]
    found, errors = [], []
    for candidate in candidates:
        try:
            found.append(Rules(_in_force(recorded, candidate), candidate))
        except ConfigError as error:
            errors.append(str(error))
    if not found:
        raise TraceError(f"{where}: allocator_settings: {errors[-1]}")
    return tuple(found)


def _in_force(recorded: RecordedSettings, release: Release) -> AllocatorSettings:
    """The settings when the snapshot was taken, with the string that amounts to them."""
    parsed = parse_conf(recorded.conf, release)
    found = parsed
    if recorded.max_split_size is not None:
        found = replace(found, max_split_size=recorded.max_split_size or at.UNLIMITED)
    if recorded.garbage_collection_threshold is not None:
        found = replace(found, garbage_collection_threshold=recorded.garbage_collection_threshold)
    if recorded.expandable_segments is not None:
        found = replace(found, expandable_segments=recorded.expandable_segments)
    if recorded.divisions is not None:
        found = replace(found, roundup_power2_divisions=recorded.divisions)
    return replace(found, conf=_completed(parsed, found, release))


def _completed(parsed: AllocatorSettings, found: AllocatorSettings, release: Release) -> str:
    """The string that `parsed` was read from, completed by what only the values in force show."""
    conf = parsed.conf
    if found.expandable_segments != parsed.expandable_segments:
        conf = with_option(conf, "expandable_segments", str(found.expandable_segments), release)
    parts = [conf] if conf else []
    if found.max_split_size not in (parsed.max_split_size, at.UNLIMITED):
        parts.append(f"max_split_size_mb:{found.max_split_size // MiB}")
    if found.garbage_collection_threshold not in (parsed.garbage_collection_threshold, 0.0):
        parts.append(f"garbage_collection_threshold:{found.garbage_collection_threshold!r}")
    divisions = found.roundup_power2_divisions
    if any(divisions) and divisions != parsed.roundup_power2_divisions:
        table = ",".join(f"{1 << i}:{value}" for i, value in enumerate(divisions))
        parts.append(f"roundup_power2_divisions:[{table}]")
    return ",".join(parts)
