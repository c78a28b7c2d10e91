"""Loads the recordings of the real allocator (`data/golden/README.md`)."""

from __future__ import annotations

import gzip
import lzma
import tarfile
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path

import msgspec

from tests.places import DATA
from tests.support.observed import OUT_OF_MEMORY, Observed, Row, Setup

FOLDER = DATA / "golden"


@dataclass(frozen=True)
class Recording:
    """Events, where they were served, and what the compiled allocator made of them."""

    name: str
    setup: Setup
    rows: tuple[Row, ...]
    observed: Observed


def names(folder: str = "") -> list[str]:
    """Names of the recordings, `RELEASE/WORKLOAD.SETTING`; with `folder`, those of one release or `same_events`."""
    lines = (FOLDER / "index.txt").read_text().split()
    return [line for line in lines if line.startswith(folder)]


def load(name: str) -> Recording:
    """One recording: a name of `names()`, or the path of a `.jsonl` or `.jsonl.gz` file."""
    path = Path(name)
    if name.endswith(".gz"):
        return parse(name, gzip.decompress(path.read_bytes()))
    if name.endswith(".jsonl"):
        return parse(name, path.read_bytes())
    return parse(name, archive(path.name.split(".")[0])[f"{name}.jsonl"])


@cache
def archive(workload: str) -> dict[str, bytes]:
    """The files of one archive."""
    data = lzma.decompress((FOLDER / f"{workload}.tar.xz").read_bytes())
    with tarfile.open(fileobj=BytesIO(data)) as tar:
        files = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        return {name: file.read() for name, file in files.items() if file is not None}


def parse(name: str, data: bytes) -> Recording:
    """Read the lines of a recording."""
    header, *lines = msgspec.json.Decoder().decode_lines(data)
    assert header["format"] == "alloc-oracle/1"
    assert header["events"] == len(lines)
    setup = Setup(
        release=header["torch"],
        conf=header["alloc_conf"],
        total_bytes=header["device_bytes"],
        va_base=header["va_base"],
        placement=header["va_policy"],
    )
    observed = Observed(memory_stats=header.get("memory_stats", {}))
    for index, (_, result, *calls) in enumerate(lines):
        if isinstance(result, dict):
            observed.reports[index] = result
            observed.states.append(None)
        elif result is None:
            observed.states.append(None)
        else:
            address = OUT_OF_MEMORY if result[0] is None else result[0]
            observed.states.append((address, *result[1:]))
        observed.calls.append([(kind, address, size) for kind, address, size in (calls[0] if calls else ())])
    return Recording(name, setup, tuple(line[0] for line in lines), observed)
