"""Allocator settings of the naive model: a small second reading of `PYTORCH_CUDA_ALLOC_CONF`.

Only legal strings are given to it, so it checks nothing but the names; `simulator.allocator.conf` is the real
parser.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MIB = 1 << 20
UNLIMITED = 2**64 - 1


def release_number(release: str) -> tuple[int, int]:
    """`"2.11.0+cu130"` -> `(2, 11)`."""
    major, minor = release.split("+")[0].split(".")[:2]
    return int(major), int(minor)


@dataclass
class NaiveSettings:
    """The options in force; `parse` changes them as one more call of `_set_allocator_settings` does."""

    release: tuple[int, int]
    conf: str = ""
    max_split_size: int = UNLIMITED
    max_non_split_rounding: int = 20 * MIB
    large_segment_size: int = 20 * MIB
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: list[int] = field(default_factory=lambda: [0] * 16)
    expandable_segments: bool = False
    per_process_memory_fraction: float = 1.0
    throw_on_cudamalloc_oom: bool = False

    def parse(self, conf: str) -> None:
        """Read a settings string: section 1.2 of the allocator's specification, with its resets and sticky options."""
        self.conf = conf
        self.max_split_size = UNLIMITED
        self.garbage_collection_threshold = 0.0
        self.roundup_power2_divisions = [0] * 16
        options = split_options(conf)
        if "large_segment_size_mb" in options:
            self.large_segment_size = int(options["large_segment_size_mb"]) * MIB
        if self.release >= (2, 11):
            self.max_non_split_rounding = self.large_segment_size
        for name, value in options.items():
            self.set(name, value)

    def set(self, name: str, value: str) -> None:
        """Apply one option."""
        if name == "max_split_size_mb":
            self.max_split_size = int(value) * MIB
        elif name == "max_non_split_rounding_mb":
            self.max_non_split_rounding = int(value) * MIB
        elif name == "garbage_collection_threshold":
            self.garbage_collection_threshold = float(value)
        elif name == "roundup_power2_divisions":
            self.roundup_power2_divisions = divisions_table(value, self.release)
        elif name == "expandable_segments":
            self.expandable_segments = value == "True"
        elif name == "per_process_memory_fraction":
            self.per_process_memory_fraction = float(value)
        elif name == "throw_on_cudamalloc_oom":
            self.throw_on_cudamalloc_oom = value == "True"
        elif name != "large_segment_size_mb":
            raise KeyError(name)


def split_options(conf: str) -> dict[str, str]:
    """`"a:1,b:[1:2,>:3]"` -> `{"a": "1", "b": "[1:2,>:3]"}`."""
    text = conf.replace(" ", "")
    return dict(re.findall(r"(\w+):(\[[^]]*\]|[^,]*)", text))


def divisions_table(value: str, release: tuple[int, int]) -> list[int]:
    """The sixteen numbers of divisions, for requests from 1 MiB, 2 MiB, ... 32 GiB."""
    if not value.startswith("["):
        return [int(value)] * 16
    table = [0] * 16
    last = 0
    for position, item in enumerate(value[1:-1].split(",")):
        size, divisions = item.split(":")
        if size == ">":
            for index in range(last if release <= (2, 9) else last + 1, 16):
                table[index] = int(divisions)
            continue
        last = min(int(size).bit_length() - 1, 15)
        if position == 0:
            table[:last] = [int(divisions)] * last
        table[last] = int(divisions)
    return table
