"""The allocator's option string, `PYTORCH_ALLOC_CONF`, and the settings that it gives.

Strings are read as the release reads them, its laxness included: up to 2.9 the parser of
`c10/cuda/CUDAAllocatorConfig.cpp` (2.0 and 2.1: of `CUDACachingAllocator.cpp`), from 2.10 the two passes of
`c10/core/AllocatorConfig.cpp` and of `CUDAAllocatorConfig.cpp`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from simulator.allocator import layout as at
from simulator.allocator.releases import Release
from traces.errors import ConfigError, EventError
from traces.model import Op, Trace
from traces.text import quoted
from traces.units import GiB, MiB

#: Sizes from the option string are cut here (4 EiB), so that sums of two still fit into 64 bits.
LARGEST_OPTION: Final = 2**62
#: Default of `large_segment_size_mb`: kLargeBuffer.
DEFAULT_LARGE_SEGMENT: Final = 20 * MiB
#: kRoundUpPowerOfTwoIntervals: 1 MiB, 2 MiB, ... 32 GiB.
DIVISIONS: Final = 16


@dataclass(frozen=True, slots=True)
class ReserveSpec:
    """`expandable_segments_reserve`: a fraction of the device's total memory, or a number of GiB."""

    is_fraction: bool
    value: float

    def resolve(self, total_bytes: int) -> int:
        """The reserve in bytes on a device of `total_bytes` (ExpandableSegmentReserveSpec::resolveBytes)."""
        size = self.value * float(total_bytes if self.is_fraction else GiB)
        return LARGEST_OPTION if size >= LARGEST_OPTION else int(size)


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """What the allocator's options say. Sizes in bytes; defaults are PyTorch's."""

    max_split_size: int = at.UNLIMITED
    max_non_split_rounding_size: int = DEFAULT_LARGE_SEGMENT
    large_segment_size: int = DEFAULT_LARGE_SEGMENT
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * DIVISIONS
    expandable_segments: bool = False
    per_process_memory_fraction: float = 1.0
    throw_on_cudamalloc_oom: bool = False
    graph_capture_record_stream_reuse: bool = False
    release_lock_on_cudamalloc: bool = False
    expandable_segments_reserve: ReserveSpec | None = None
    expandable_segments_reserve_by_class: tuple[tuple[str, ReserveSpec], ...] = ()
    pinned_use_cuda_host_register: bool = False
    pinned_num_register_threads: int = 1
    conf: str = ""
    """The string that was parsed last."""

    @property
    def bounded_divisions(self) -> tuple[int, ...]:
        """`roundup_power2_divisions` with numbers above 2^53 replaced by smaller ones of the same effect.

        512 x 2^54 is above every size, so that plain rounding applies; from 512 x 2^55 on PyTorch's product of 64 bits
        is 0, and sizes are rounded to the next power of two (`NEXT_POWER`).
        """
        least = at.NEXT_POWER // 4
        return tuple(
            min(n, at.NEXT_POWER) if n >= at.NEXT_POWER else min(n, least) for n in self.roundup_power2_divisions
        )


@dataclass(frozen=True, slots=True)
class _Option:
    """An option: the minor release that brought it, its legal values in words, and which pass of 2.10+ reads it."""

    since: int
    legal: str
    accelerator: bool = False


_MB: Final = "an integer number of MB"
_BOOL: Final = "True or False"
_POWERS: Final = "a power of two, or a list such as [256:1,512:2,>:8] of powers of two"

OPTIONS: Final[Mapping[str, _Option]] = {
    "max_split_size_mb": _Option(0, f"{_MB}, at least {{minimum}}", True),
    "garbage_collection_threshold": _Option(0, "a number above 0 and below 1", True),
    "roundup_power2_divisions": _Option(0, _POWERS, True),
    "backend": _Option(0, "native"),
    "expandable_segments": _Option(1, _BOOL, True),
    "release_lock_on_cudamalloc": _Option(2, _BOOL),
    "release_lock_on_hipmalloc": _Option(2, _BOOL),
    "pinned_use_cuda_host_register": _Option(2, _BOOL),
    "pinned_use_hip_host_register": _Option(2, _BOOL),
    "pinned_num_register_threads": _Option(2, "a power of two up to 128"),
    "max_non_split_rounding_mb": _Option(6, f"{_MB}, at least {{minimum}}", True),
    "pinned_use_background_threads": _Option(6, _BOOL, True),
    "graph_capture_record_stream_reuse": _Option(9, _BOOL),
    "pinned_reserve_segment_size_mb": _Option(10, f"{_MB} above 0"),
    "per_process_memory_fraction": _Option(10, "a number from 0 to 1"),
    "large_segment_size_mb": _Option(11, f"{_MB} above 10", True),
    "pinned_free_catch_all": _Option(12, _BOOL),
    "throw_on_cudamalloc_oom": _Option(12, _BOOL),
    "pinned_max_round_threshold_mb": _Option(14, _MB, True),
    "pinned_max_cached_size_mb": _Option(14, _MB, True),
    "expandable_segments_reserve": _Option(15, "a fraction such as 0.5, or GiB such as 40G"),
    "expandable_segments_reserve_by_class": _Option(15, "a list such as [name:0.5,other:40G]"),
}


def parse_conf(conf: str, release: Release, previous: AllocatorSettings | None = None) -> AllocatorSettings:
    """The settings that the option string `conf` gives in `release`, after `previous` (none: at process start).

    Every parse resets max_split_size, the divisions and the garbage collection threshold, and from 2.11
    max_non_split_rounding; all else keeps its previous value unless named. ConfigError where PyTorch of that release
    refuses the string, and for `backend:cudaMallocAsync`, which is not simulated.
    """
    parser = _Parser(conf, release, previous or AllocatorSettings())
    if release.strict_separators:
        parser.run(lambda option: True)
    else:
        parser.first_pass()
        parser.run(lambda option: option.accelerator)
        parser.run(lambda option: not option.accelerator)
    return AllocatorSettings(**parser.values)


def settings_of(trace: Trace, conf: str, release: Release) -> AllocatorSettings:
    """The settings that a trace begins with under the string `conf`.

    Raises what `parse_conf` does; EventError where a string that the trace sets later on is refused.
    """
    first = parse_conf(conf, release)
    for rank in trace.ranks:
        settings = first
        for index in np.flatnonzero(rank.events.op == Op.SET_ALLOCATOR).tolist():
            try:
                settings = parse_conf(rank.events.strings("conf").get(index) or "", release, settings)
            except ConfigError as error:
                raise EventError(str(error), rank=rank.ranks[0], index=index, field="conf") from None
    return first


def with_option(conf: str, name: str, value: str, release: Release) -> str:
    """The string `conf` with a single value for an option: in the place of the one it gives, else at its end."""
    tokens = _tokenize(conf, release)
    if name in tokens[:-2]:
        tokens[tokens.index(name) + 2] = value
        return "".join(tokens)
    return ",".join(part for part in (conf, f"{name}:{value}") if part)


#: Environment variables in the order in which the first one present wins.
_VARIABLES_OLD: Final = ("PYTORCH_CUDA_ALLOC_CONF",)
_VARIABLES_NEW: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def conf_from_environment(environ: Mapping[str, str], release: Release) -> str | None:
    """The option string that `release` would take from the environment; None if no variable is set.

    Up to 2.9 only PYTORCH_CUDA_ALLOC_CONF counts; from 2.10 PYTORCH_ALLOC_CONF does too, with the lowest priority
    (the code's order; 2.15's header comment claims the opposite).
    """
    variables = _VARIABLES_NEW if release.reads_alloc_conf else _VARIABLES_OLD
    return next((environ[name] for name in variables if name in environ), None)


class _Parser:
    """One reading of an option string; `values` are the fields of the settings so far.

    Positions are handled as PyTorch does: a handler gets the index of the key and returns that of the last token it
    took. A position behind the end is always an error.
    """

    def __init__(self, conf: str, release: Release, previous: AllocatorSettings) -> None:
        self.release = release
        self.tokens = _tokenize(conf, release)
        self.values: dict[str, Any] = {name: getattr(previous, name) for name in AllocatorSettings.__slots__}
        self.values |= {
            "max_split_size": at.UNLIMITED,
            "garbage_collection_threshold": 0.0,
            "roundup_power2_divisions": (0,) * DIVISIONS,
            "conf": conf,
        }
        self.handlers: Mapping[str, Callable[[str, int], int]] = {
            "backend": self.backend,
            "max_split_size_mb": self.split_size,
            "max_non_split_rounding_mb": self.split_size,
            "large_segment_size_mb": self.skip,
            "garbage_collection_threshold": self.threshold,
            "roundup_power2_divisions": self.divisions,
            "per_process_memory_fraction": self.fraction,
            "expandable_segments_reserve": self.reserve,
            "expandable_segments_reserve_by_class": self.reserve_by_class,
            "pinned_num_register_threads": self.threads,
            "pinned_reserve_segment_size_mb": self.size,
            "pinned_max_round_threshold_mb": self.size,
            "pinned_max_cached_size_mb": self.size,
        }

    # ---- the walk over the string

    def first_pass(self) -> None:
        """From 2.11: `large_segment_size_mb` is read before all else, and sets max_non_split_rounding too."""
        if not self.release.large_segment_size_option:
            return
        i = 0
        while i < len(self.tokens):
            if self.tokens[i] == "large_segment_size_mb":
                i = self.large_segment(self.tokens[i], i)
            i += 1
        self.values["max_non_split_rounding_size"] = self.values["large_segment_size"]

    def run(self, reads: Callable[[_Option], bool]) -> None:
        """One pass over the string; options that `reads` refuses are stepped over."""
        i = 0
        while i < len(self.tokens):
            key = self.tokens[i]
            option = self.option(key, i)
            handler = self.handlers.get(key, self.boolean) if reads(option) else self.skip
            i = handler(key, i)
            if i + 1 < len(self.tokens):
                i = self.separator(key, i + 1, ",")
            i += 1

    def option(self, key: str, i: int) -> _Option:
        """The option called `key`, if the release knows it."""
        option = OPTIONS.get(key)
        if option is None:
            raise ConfigError(_unknown_option(key, self.release))
        if option.since > self.release.minor:
            raise ConfigError(
                f"allocator option '{key}' came with PyTorch 2.{option.since}, and the release is {self.release.text}: "
                f"leave it out, or choose release 2.{option.since} or newer"
            )
        return option

    def separator(self, key: str, i: int, mark: str) -> int:
        """Step over `mark` at position `i`; from 2.10 any token is taken for it."""
        if i >= len(self.tokens):
            raise self.illegal(key, None)
        if self.release.strict_separators and self.tokens[i] != mark:
            raise ConfigError(
                f"allocator option '{key}': expected '{mark}' before {quoted(self.tokens[i])}; "
                "the form is option:value,option:value"
            )
        return i

    def value(self, key: str, i: int) -> str:
        """The token at `i`, which must exist."""
        if i >= len(self.tokens):
            raise self.illegal(key, None)
        return self.tokens[i]

    def illegal(self, key: str, token: str | None) -> ConfigError:
        """What to raise for a missing (None) or illegal value of option `key`."""
        minimum = str(self.values["large_segment_size"] // MiB + self.release.split_minimum_exclusive)
        legal = OPTIONS[key].legal.format(minimum=minimum)
        found = "has no value" if token is None else f"cannot be {quoted(token)}"
        return ConfigError(f"allocator option '{key}' {found}: legal is {legal} (PyTorch {self.release.text})")

    def number(self, token: str) -> int | None:
        """A size_t out of `token`, by std::stoi (up to 2.9) or std::stoull, both of which ignore what follows."""
        return _stoi(token) if self.release.strict_separators else _stoull(token)

    # ---- one handler for each kind of value

    def skip(self, key: str, i: int) -> int:
        """ConfigTokenizer::skipKey: over a single value or a list."""
        i = self.separator(key, i + 1, ":") + 1
        if self.value(key, i) != "[":
            return i
        while i < len(self.tokens) and self.tokens[i] != "]":
            i += 1
        if i == len(self.tokens):
            raise ConfigError(f"allocator option '{key}': the list has no closing ']'")
        return i

    def boolean(self, key: str, i: int) -> int:
        i = self.separator(key, i + 1, ":") + 1
        token = self.value(key, i)
        if token not in ("True", "False"):
            raise self.illegal(key, token)
        name = key.replace("_on_hip", "_on_cuda").replace("_use_hip_", "_use_cuda_")
        if name in self.values:
            self.values[name] = token == "True"
        return i

    def one(self, key: str, i: int, read: Callable[[str], Any], legal: Callable[[Any], bool]) -> tuple[int, Any]:
        """The position of a single value, and the value."""
        i = self.separator(key, i + 1, ":") + 1
        token = self.value(key, i)
        number = read(token)
        if number is None or not legal(number):
            raise self.illegal(key, token)
        return i, number

    def size(self, key: str, i: int) -> int:
        """A number of MB that the device allocator does not use."""
        least = 1 if key == "pinned_reserve_segment_size_mb" else 0
        return self.one(key, i, self.number, lambda number: number >= least)[0]

    def threads(self, key: str, i: int) -> int:
        i, self.values[key] = self.one(key, i, self.number, lambda number: _is_power_of_two(number) and number <= 128)
        return i

    def large_segment(self, key: str, i: int) -> int:
        i, megabytes = self.one(key, i, self.number, lambda number: number > 10)
        self.values["large_segment_size"] = min(megabytes * MiB, LARGEST_OPTION)
        return i

    def split_size(self, key: str, i: int) -> int:
        least = int(self.values["large_segment_size"]) // MiB + self.release.split_minimum_exclusive
        i, megabytes = self.one(key, i, self.number, lambda number: number >= least)
        if key == "max_split_size_mb":
            self.values["max_split_size"] = min(megabytes * MiB, at.UNLIMITED)
        else:
            self.values["max_non_split_rounding_size"] = min(megabytes * MiB, LARGEST_OPTION)
        return i

    def threshold(self, key: str, i: int) -> int:
        i, self.values[key] = self.one(key, i, _stod, lambda number: 0 < number < 1)
        return i

    def fraction(self, key: str, i: int) -> int:
        i, self.values[key] = self.one(key, i, _stod, lambda number: 0 <= number <= 1)
        return i

    def backend(self, key: str, i: int) -> int:
        i = self.separator(key, i + 1, ":") + 1
        token = self.value(key, i)
        if token == "cudaMallocAsync":
            raise ConfigError("allocator option 'backend': cudaMallocAsync is not simulated, only native is")
        if token != "native":
            raise self.illegal(key, token)
        return i

    def divisions(self, key: str, i: int) -> int:
        i = self.separator(key, i + 1, ":") + 1
        token = self.value(key, i)
        if token == "[":
            return self.division_list(key, i)
        number = self.number(token)
        if number is None or not _is_power_of_two(number):
            raise self.illegal(key, token)
        self.values["roundup_power2_divisions"] = (number,) * DIVISIONS
        return i

    def division_list(self, key: str, i: int) -> int:
        """`[MB:divisions,...,>:divisions]`, from its `[` on; returns the position of its `]`."""
        table = list(self.values["roundup_power2_divisions"])
        last, first = 0, True
        i += 1
        while i < len(self.tokens) and self.tokens[i] != "]":
            interval = self.tokens[i]
            i = self.separator(key, i + 1, ":") + 1
            division = self.division(key, self.value(key, i))
            if interval == ">":
                start = last if self.release.gt_overwrites_last else last + 1
                table[start:] = [division] * (DIVISIONS - start)
            else:
                last = self.interval(key, interval)
                if first:
                    table[:last] = [division] * last
                    first = False
                table[last] = division
            if self.value(key, i + 1) != "]":
                i = self.separator(key, i + 1, ",")
            i += 1
        if i >= len(self.tokens) and not self.release.strict_separators:
            raise ConfigError(f"allocator option '{key}': the list has no closing ']'")
        self.values["roundup_power2_divisions"] = tuple(table)
        return i

    def division(self, key: str, token: str) -> int:
        """A number of divisions: a power of two or, from 2.4, 0."""
        number = self.number(token)
        if number == 0 and not self.release.divisions_one_unrounded:
            return 0
        if number is None or not _is_power_of_two(number):
            raise self.illegal(key, token)
        return number

    def interval(self, key: str, token: str) -> int:
        """The table index of the interval that begins at `token` MB, a power of two."""
        number = _stoull(token)
        if number is None or not _is_power_of_two(number):
            raise self.illegal(key, token)
        return min(number.bit_length() - 1, DIVISIONS - 1)

    def reserve(self, key: str, i: int) -> int:
        i = self.separator(key, i + 1, ":") + 1
        spec = _reserve_spec(self.value(key, i))
        if spec is not None:  # PyTorch warns of a bad value and goes on
            self.values["expandable_segments_reserve"] = spec
        return i

    def reserve_by_class(self, key: str, i: int) -> int:
        i = self.separator(key, i + 2, "[")
        specs: dict[str, ReserveSpec] = {}
        while self.value(key, i + 1) != "]":
            name = self.value(key, i + 1)
            i = self.separator(key, i + 2, ":") + 1
            spec = _reserve_spec(self.value(key, i))
            if spec is not None:
                specs[name] = spec
            if self.value(key, i + 1) == ",":
                i += 1
        self.values["expandable_segments_reserve_by_class"] = tuple(specs.items())
        return i + 1


def _unknown_option(key: str, release: Release) -> str:
    """The message for a key that no release knows, naming the option most like it."""
    known = [name for name, option in OPTIONS.items() if option.since <= release.minor]
    name = re.split(r"[=\s]", key, maxsplit=1)[0]
    near = difflib.get_close_matches(name[:60], known, n=1, cutoff=0.0)[0]
    legal = OPTIONS[near].legal.format(minimum=20 + release.split_minimum_exclusive)
    return f"unknown allocator option {quoted(key)}; the nearest is '{near}:VALUE', where VALUE is {legal}"


# ----------------------------------------------------------------------------- reading tokens as the C++ library does

_C_SPACES: Final = " \t\n\v\f\r"
_SPLIT_OLD: Final = re.compile(r"[,:\[\]]|[^,:\[\]]+")


def _tokenize(conf: str, release: Release) -> list[str]:
    """Split at `,` `:` `[` `]`, which are tokens themselves; up to 2.9 only the space is dropped, later any blank."""
    blanks = " " if release.strict_separators else _C_SPACES
    # an environment variable ends at its first NUL, and the string is C's up to 2.9
    text = conf.partition("\0")[0] if release.strict_separators else conf
    return _SPLIT_OLD.findall(text.translate({ord(blank): None for blank in blanks}))


_INTEGER: Final = re.compile(rf"[{_C_SPACES}]*([+-]?)([0-9]+)")


def _stoi(token: str) -> int | None:
    """std::stoi, then a conversion to size_t; None where it throws."""
    match = _INTEGER.match(token)
    if match is None or len(match[2]) > 1000:
        return None
    number = int(match[1] + match[2])
    return number % 2**64 if -(2**31) <= number < 2**31 else None


def _stoull(token: str) -> int | None:
    """std::stoull; None where it throws. A minus sign wraps around, as in C."""
    match = _INTEGER.match(token)
    if match is None or len(match[2]) > 1000:
        return None
    number = int(match[2])
    if number >= 2**64:
        return None
    return -number % 2**64 if match[1] == "-" else number


_DECIMAL: Final = re.compile(rf"[{_C_SPACES}]*([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)")
_HEXADECIMAL: Final = re.compile(
    rf"[{_C_SPACES}]*([+-]?0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)(?:[pP][+-]?[0-9]+)?)"
)
_SMALLEST_NORMAL: Final = 2.0**-1022


def _stod(token: str) -> float | None:
    """std::stod; None where it throws, for infinities and for NaN (no option allows these)."""
    match, exponent, read = _HEXADECIMAL.match(token), "p", float.fromhex
    if match is None:
        match, exponent, read = _DECIMAL.match(token), "e", float
    if match is None:
        return None
    try:
        number = read(match[1])
    except OverflowError:
        return None
    mantissa = match[1].lower().split(exponent)[0]
    underflow = abs(number) < _SMALLEST_NORMAL and re.search("[1-9a-f]", mantissa) is not None
    return None if underflow or not math.isfinite(number) else number


_STREAM_DOUBLE: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def _reserve_spec(token: str) -> ReserveSpec | None:
    """CUDAAllocatorConfig::parseReserveSpec: None for what it warns of and ignores."""
    gib = token.endswith(("G", "g"))
    number = token[:-1] if gib else token
    if not _STREAM_DOUBLE.fullmatch(number):
        return None
    value = float(number)
    return ReserveSpec(not gib, value) if math.isfinite(value) and value > 0 else None


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
