"""Reads, checks and replays a trace file, and prints as JSON what each took.

python -m tests.benchmarks.read_and_replay FILE
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from simulator.engine.replay import replay
from simulator.snapshots.reader import read


def peak_bytes() -> int:
    """The most memory that this process has held."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def main(path: Path) -> None:
    """Read, replay, print."""
    before = peak_bytes()
    start = time.perf_counter()
    trace = read(path)
    middle = time.perf_counter()
    after_reading = peak_bytes()
    result = replay(trace)
    end = time.perf_counter()
    found = {
        "read": middle - start,
        "replay": end - middle,
        "before": before,
        "after_reading": after_reading,
        "after_replay": peak_bytes(),
        "events": sum(rank.events for rank in result.ranks),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
