"""Out-of-memory messages found in a text: a log of any length, of one program or of many ranks mixed.

The forms of PyTorch's own message are those of `DeviceCachingAllocator::malloc` (c10/cuda/CUDACachingAllocator.cpp) of
each release, and of CUDAMallocAsyncAllocator.cpp. A message that a mail or a terminal broke into lines is put together
again from the lines of its rank.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from simulator.explain.message import OutOfMemory, Process, Source
from traces.text import one_line

#: Where a message of the allocator may end at the latest: the longest has about 1,100 characters.
_REACH: Final = 2000
#: Sizes from here on are not sizes: NVML's "not available" is printed as 17179869184.00 GiB.
_ABSURD: Final = 1 << 60

_UNITS: Final[Mapping[str, int]] = {
    "bytes": 1, "kb": 1 << 10, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_SIZE: Final = r"\d[\d,]{0,30}(?:\.\d{0,10})? ?(?:bytes|[kKMGT]i?B)"
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
#: What launchers put before a line: torchrun, accelerate, PyTorch itself, MPI, vLLM.
_RANK: Final = re.compile(
    r"\[(?:rank|default)(\d{1,6})\]:|\[1,(\d{1,6})\]<std\w+>:|\(\w+ rank=(\d{1,6})\b[^)]*\)|\brank ?(\d{1,6})[\]:]"
)
#: How far a rank stands from the beginning of its line, at most.
_MARGIN: Final = 80
#: What ends the figures of a message of the allocator: until then a line without a rank goes on with the one before.
_CLOSED: Final = re.compile(r"but unallocated|reserved in total|cached\)|1EB")
#: Marks of quotations, comments and tables around a line.
_QUOTED: Final = re.compile(r"^[\s>#|│]+|[\s|│]+$")

_REQUEST: Final = re.compile(rf"Tried to allocate (?:({_SIZE})|more than 1EB memory)(?! on private pool)")
_CLAUSES: Final[Mapping[str, re.Pattern[str]]] = {
    "total": re.compile(rf"({_SIZE}) total capacity|has a total capaci?ty of ({_SIZE})"),
    "free": re.compile(rf"of which ({_SIZE}) is free|({_SIZE}) free;"),
    "allowed": re.compile(rf"({_SIZE}) allowed;"),
    "allocated": re.compile(rf"({_SIZE}) already allocated|({_SIZE}) is allocated by PyTorch"),
    "reserved": re.compile(rf"({_SIZE}) reserved in total"),
    "unallocated": re.compile(rf"({_SIZE}) cached\b|({_SIZE}) is reserved by PyTorch"),
    "private": re.compile(rf"with ({_SIZE}) allocated in private pools"),
    "own": re.compile(rf"this process has ({_SIZE}) memory in use"),
}
_GPU: Final = re.compile(r"\(GPU (\d{1,4});|GPU (\d{1,4}) has a total capaci?ty")
_PROCESS: Final = re.compile(rf"\bProcess (\d{{1,10}}) has ({_SIZE}) memory in use")
#: By what a message says, the releases that print it so; the first that is found.
_RELEASES: Final = (
    (" cached)", "1.3 or older"),
    ("total capacty", "2.1"),
    ("PYTORCH_ALLOC_CONF", "2.10 or newer"),
    ("in private pools", "2.4 or newer"),
    ("has a total capacity", "2.2 or newer"),
    ("reserved memory is >>", "1.10 to 2.0"),
    ("reserved in total", "1.4 to 1.9"),
)
_ASYNC: Final = re.compile(
    rf"Allocation on device (?P<gpu>\d{{1,4}})? ?would exceed allowed memory\. \(out of memory\) "
    rf"Currently allocated ?: (?P<allocated>{_SIZE}) Requested ?: (?P<asked>{_SIZE}) "
    rf"Device limit ?: (?P<total>{_SIZE}) Free \(according to CUDA\) ?: (?P<free>{_SIZE})"
    rf"(?: PyTorch limit \(set by user-supplied memory fraction\) ?: (?P<allowed>{_SIZE}))?"
)


@dataclass(frozen=True)
class _Kind:
    """Another message: who says it, and its words, with groups named as figures. A `weak` one may mean other things."""

    source: Source
    party: str
    words: re.Pattern[str]
    weak: bool = False


def _kind(source: Source, party: str, words: str, weak: bool = False) -> _Kind:
    return _Kind(source, party, re.compile(words.replace("SIZE", _SIZE)), weak)


#: The first that matches at a place wins.
_KINDS: Final = (
    _kind("library", "ggml", r"(?P<asked>SIZE) on device (?P<gpu>\d{1,4}): cudaMalloc failed: out of memory"),
    _kind("library", "ggml", r"CUDA error: out of memory current device: (?P<gpu>\d{1,4}), in function ggml"),
    _kind("library", "JAX", r"(?i:resource.exhausted): Out of memory (?:while trying to allocate|allocating) "
                            r"(?P<asked>SIZE)"),
    _kind("library", "TensorFlow", r"failed to allocate [\d.]+[KMGT]? \((?P<asked>SIZE)\) from device"
                                   r"(?:: CUDA_ERROR_OUT_OF_MEMORY)?"),
    _kind("library", "TensorFlow", r"OOM when allocating tensor (?:with|of) shape"),
    _kind("library", "CuPy", r"Out of memory allocating (?P<asked>SIZE) \(allocated so far: (?P<allocated>SIZE)"),
    _kind("library", "CuPy", r"out of memory to allocate (?P<asked>SIZE) \(total (?P<allocated>SIZE)\)"),
    _kind("library", "ONNX Runtime", r"Failed to allocate memory for requested buffer of size (?P<asked>\d{1,30})"),
    _kind("library", "a CUDA program", r"GPUassert: out of memory|cudaMalloc failed: out of memory"),
    _kind("library", "RMM", r"std::bad_alloc: out_of_memory"),
    _kind("driver", "cuBLAS", r"CUBLAS_STATUS_ALLOC_FAILED"),
    _kind("driver", "cuDNN", r"CUDNN_STATUS_ALLOC_FAILED"),
    _kind("driver", "NCCL", r"Cuda failure (?:\d+ )?'out of memory'"
                            r"(?:.{0,120}?Failed to CUDA calloc (?P<asked>SIZE))?"),
    _kind("driver", "the CUDA runtime", r"CUDA (?:driver )?error: out of memory"
                                        r"(?: Search for .cudaErrorMemoryAllocation)?"),
    _kind("driver", "the CUDA runtime", r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"),
    _kind("host", "PyTorch's CPU allocator", r"DefaultCPUAllocator: (?:not enough memory|can't allocate memory): "
                                             r"you tried to allocate (?P<asked>SIZE)"),
    _kind("host", "NumPy", r"Unable to allocate (?P<asked>SIZE) for an array"),
    _kind("host", "the kernel", r"Killed process \d+ \([^)]*\),? .{0,160}?anon-rss: ?(?P<allocated>SIZE)"),
    _kind("host", "SLURM", r"[Dd]etected \d+ oom[-_]kill event"),
    _kind("host", "the system", r"DataLoader worker .{0,60}Bus error|insufficient shared memory \(shm\)"),
    _kind("allocator", "PyTorch", r"Error: (?:CUDA|HIP) out of memory", weak=True),
    _kind("host", "the system", r"(?:\[Errno 12\] |Error code 12 \()Cannot allocate memory", weak=True),
    _kind("host", "the system", r"^Killed$|: \d+ Killed\b|[Ss]ignal 9\b|SIGKILL|exit ?code ?:? (?:137|-9)\b",
          weak=True),
)  # fmt: skip


def parse(text: str) -> tuple[OutOfMemory, ...]:
    """Every out-of-memory message of a text, in its order, each once: `times` counts what is said again.

    Weak signs (a bare `Killed`, signal 9, an error without figures) count only where nothing else is found. Empty where
    there is no message.
    """
    found = [one for stream in _streams(text) for one in stream.messages()]
    strong = [one for one, weak in found if not weak]
    return tuple(_once(strong or [one for one, _ in found]))


@dataclass
class _Stream:
    """The lines of one rank as one text with single blanks, and where each begins in it."""

    rank: int | None
    text: str
    starts: list[int]
    lines: list[int]
    bodies: list[str]

    def line(self, place: int) -> int:
        return self.lines[bisect_right(self.starts, place) - 1]

    def messages(self) -> Iterator[tuple[OutOfMemory, bool]]:
        """Messages with whether each is weak; not by place."""
        taken = bytearray(len(self.text))  # 1 where a message was found
        for message, (start, end) in (*self._allocator(), *self._async()):
            taken[start:end] = b"\1" * (end - start)
            yield message, False
        for kind in _KINDS:
            for match, place in self._of(kind):
                if not taken[place]:
                    taken[place : place + len(match[0])] = b"\1" * len(match[0])
                    figures = _figures(match.groupdict())
                    yield self._message(kind.source, kind.party, match[0], place, figures), kind.weak

    def _of(self, kind: _Kind) -> Iterator[tuple[re.Match[str], int]]:
        """Matches and where they stand; of weak kinds line by line."""
        if kind.weak:
            for body, start in zip(self.bodies, self.starts, strict=True):
                yield from ((match, start + match.start()) for match in kind.words.finditer(body))
        else:
            yield from ((match, match.start()) for match in kind.words.finditer(self.text))

    def _allocator(self) -> Iterator[tuple[OutOfMemory, tuple[int, int]]]:
        requests = list(_REQUEST.finditer(self.text))
        ends = (*(match.start() for match in requests[1:]), len(self.text))
        for match, end in zip(requests, ends, strict=False):
            words = self.text[match.start() : min(end, match.start() + _REACH)]
            releases = next((since for mark, since in _RELEASES if mark in words), "")
            figures = _clauses(words) | {"asked": _bytes(match[1]) if match[1] else None, "releases": releases}
            yield self._message("allocator", "PyTorch", words, match.start(), figures), (match.start(), match.end())

    def _async(self) -> Iterator[tuple[OutOfMemory, tuple[int, int]]]:
        for match in _ASYNC.finditer(self.text):
            figures = _figures(match.groupdict()) | {"releases": "backend:cudaMallocAsync"}
            yield self._message("allocator", "PyTorch", match[0], match.start(), figures), match.span()

    def _message(self, source: Source, party: str, words: str, place: int, figures: Mapping[str, Any]) -> OutOfMemory:
        said, line = one_line(words), self.line(place)
        return OutOfMemory(source=source, party=party, said=said, line=line, rank=self.rank, **figures)


def _streams(text: str) -> list[_Stream]:
    """The text apart by rank; lines that name none are one more stream."""
    streams: dict[int | None, _Stream] = {}
    broken: int | None = None  # the rank whose message the last line left open
    for number, raw in enumerate(text.splitlines(), 1):
        rank, body = _split(_COLOURS.sub("", raw))
        rank = broken if rank is None else rank
        opened = rank is not None and (rank == broken or "Tried to allocate" in body)
        broken = rank if opened and not _CLOSED.search(body) else None
        stream = streams.setdefault(rank, _Stream(rank, "", [], [], []))
        stream.lines.append(number)
        stream.bodies.append(" ".join(body.split()))
    for stream in streams.values():
        place = 0
        for body in stream.bodies:
            stream.starts.append(place)
            place += len(body) + 1
        stream.text = " ".join(stream.bodies)
    return list(streams.values())


def _split(line: str) -> tuple[int | None, str]:
    """The rank that a line names at its beginning, and the line without that and without marks of quotation."""
    match = _RANK.search(line, 0, _MARGIN)
    if match is None:
        return None, _QUOTED.sub("", line)
    return int(next(filter(None, match.groups()))), _QUOTED.sub("", line[match.end() :])


def _clauses(words: str) -> dict[str, Any]:
    """The figures of a message of the caching allocator."""
    found: dict[str, Any] = {}
    for name, clause in _CLAUSES.items():
        if match := clause.search(words):
            found[name] = _bytes(next(filter(None, match.groups())))
    if match := _GPU.search(words):
        found["gpu"] = int(next(filter(None, match.groups())))
    found["processes"] = tuple(Process(int(pid), _bytes(size) or None) for pid, size in _PROCESS.findall(words))
    found["own"] = found.get("own") or None
    return found


def _figures(groups: Mapping[str, str | None]) -> dict[str, Any]:
    """Figures by their names from the groups of a match."""
    said = {name: text for name, text in groups.items() if text is not None}
    return {name: int(text) if name == "gpu" else _bytes(text) for name, text in said.items()}


def _bytes(text: str) -> int | None:
    """The bytes of a size as messages print it; None where no size can be meant."""
    number = text.rstrip("abcdefghijklmnopqrstuvwxyzBKMGT ")
    unit = _UNITS[text[len(number) :].strip().lower() or "bytes"]
    size = round(float(number.replace(",", "")) * unit)
    return size if size < _ABSURD else None


def _once(found: Iterable[OutOfMemory]) -> Iterator[OutOfMemory]:
    """Messages in the order of the text, the same ones together; one without a rank is that of a rank that says it."""
    kept: dict[OutOfMemory, list[OutOfMemory]] = {}
    ordered = sorted(found, key=lambda one: one.line)
    ranked = {replace(one, rank=None, line=0): one.rank for one in ordered}
    for one in ordered:
        bare = replace(one, rank=None, line=0)
        rank = one.rank if one.rank is not None else ranked[bare]
        kept.setdefault(replace(bare, rank=rank), []).append(one)
    for key, same in kept.items():
        yield replace(key, line=same[0].line, times=len(same))
