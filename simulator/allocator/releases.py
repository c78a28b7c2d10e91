"""PyTorch's releases: `Release` has a field for every rule in which they differ, each with the release that brought it.

A new release is its number in `RELEASES`, and a changed rule for whatever it does otherwise than the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

from traces.errors import ConfigError
from traces.release import Version, version_of
from traces.text import quoted


def _by(values: Mapping[int, Any]) -> Any:
    """A rule: its value from each of these minor releases on."""
    return field(default=values[0], metadata={"since": values})


def _since(minor: int) -> Any:
    """A rule that holds from 2.`minor` on."""
    return _by({0: False, minor: True})


def _until(minor: int) -> Any:
    """A rule that holds up to 2.`minor`."""
    return _by({0: True, minor + 1: False})


@dataclass(frozen=True, slots=True)
class Release:
    """The behaviour of one PyTorch release; the defaults of the rules are those of 2.0."""

    version: Version
    profile: Literal["A", "B", "C"] = _by({0: "A", 12: "B", 13: "C"})
    """Family of tie-breaks: A up to 2.11, B 2.12, C from 2.13."""

    # the memory limit (set_per_process_memory_fraction)
    limit_even_at_one: bool = _until(9)
    """A fraction of 1.0 sets a limit as well (up to 2.9); later it removes the limit."""
    limit_rounded: bool = _since(13)
    """fraction x total is rounded to nearest, half away from zero, not truncated."""
    fraction_applied_at_construction: bool = _since(10)
    """`per_process_memory_fraction` sets the limit when the allocator is constructed."""

    # sizes
    divisions_one_unrounded: bool = _until(3)
    """With one division, sizes above 512 bytes are not rounded at all."""
    gt_overwrites_last: bool = _until(9)
    """`>` in a divisions list starts at the last named interval, not behind it."""
    large_segment_size_option: bool = _since(11)
    """`large_segment_size_mb` exists."""
    split_minimum_exclusive: bool = _until(9)
    """max_split_size_mb must be above 20, not just reach large_segment_size."""

    # expandable segments
    expandable_in_private_pools: bool = _since(5)
    """Private pools use them too."""
    gc_skips_expandable: bool = _since(5)
    """Garbage collection and the release for max_split pass over expandable blocks."""
    fresh_va_checked: bool = _since(15)
    """A fresh address range that is too small is given back and the attempt fails."""
    odd_page_error: bool = _since(15)
    """A page size that the driver refuses is an error, not an out-of-memory."""

    # private pools
    use_on_oom: Literal["absent", "last", "before_release"] = _by({0: "absent", 8: "last", 11: "before_release"})
    """When pools opted in with use_on_oom serve the default pool."""
    no_split_pools: bool = _since(10)
    """Pools may forbid splitting."""
    newest_scope_first: bool = _since(11)
    """Of several open pool scopes the newest serves, else the oldest."""
    scope_means_capturing: bool = _until(12)
    """Any open pool scope counts as a capture."""
    empty_cache_in_capture: bool = _since(8)
    """empty_cache during a capture is allowed."""

    # options and statistics
    throw_on_cudamalloc_oom_option: bool = _since(12)
    """`throw_on_cudamalloc_oom` and the counter num_oom_rejections exist."""
    has_device_counters: bool = _since(2)
    """num_sync_all_streams, num_device_alloc and num_device_free exist."""
    has_private_pool_stats: bool = _since(13)
    """reserved_bytes_by_private_pools exists."""

    # the option string
    strict_separators: bool = _until(9)
    """`:` and `,` are checked; later any token stands for them."""
    reads_alloc_conf: bool = _since(10)
    """The environment variable PYTORCH_ALLOC_CONF is read too."""

    # open proposals, in no release so far
    searches_again_after_retry: bool = False
    """The pool is searched again after the retry flushed the cache (pytorch PR 191302, open)."""
    expandable_exempt_from_max_split: bool = False
    """Expandable blocks are exempt from max_split_size (pytorch PR 193400, open)."""

    @property
    def text(self) -> str:
        """`2.13`."""
        return str(self.version)

    @property
    def minor(self) -> int:
        """The minor number."""
        return self.version.minor

    @property
    def alloc_conf_variable(self) -> str:
        """The environment variable that is written for the allocator's settings."""
        return "PYTORCH_ALLOC_CONF" if self.reads_alloc_conf else "PYTORCH_CUDA_ALLOC_CONF"


def _release(minor: int) -> Release:
    rules: dict[str, Any] = {}
    for rule in fields(Release):
        for since, value in rule.metadata.get("since", {}).items():
            if minor >= since:
                rules[rule.name] = value
    return Release(Version(2, minor), **rules)


#: Every release that can be simulated, oldest first.
RELEASES: Final[dict[Version, Release]] = {Version(2, minor): _release(minor) for minor in range(16)}


def register(release: Release) -> None:
    """Add a release that is not there. Raises ConfigError where it is."""
    if release.version in RELEASES:
        raise ConfigError(f"release {release.text} is registered already")
    RELEASES[release.version] = release


def parse_release(text: str) -> Release:
    """The release named by `text`: `2.11`, `2.11.0`, `2.11.0+cu130`. ConfigError for one that is not in `RELEASES`."""
    try:
        return RELEASES[version_of(text)]
    except (ConfigError, KeyError):
        oldest, *_, newest = RELEASES
        raise ConfigError(
            f"release {quoted(text)} is not known: give a PyTorch release from {oldest} to {newest}, "
            "such as 2.13 or 2.11.0+cu130"
        ) from None
