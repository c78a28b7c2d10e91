"""Runs one command and prints its wall seconds, CPU seconds, peak memory and exit code as JSON.

    python -m tests.benchmarks.launch COMMAND...

It stays small itself: a process starts with the peak memory of the one that it was forked from. The command's output
goes nowhere, but for standard error, and its standard output with `--show` as the first word.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

SHOW = "--show"


def main(words: list[str]) -> None:
    """Run the command and print what it took."""
    show = words[:1] == [SHOW]
    start = time.perf_counter()
    process = subprocess.Popen(words[show:], stdout=None if show else subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    found = {
        "wall": wall,
        "cpu": usage.ru_utime + usage.ru_stime,
        "peak": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "code": process.returncode,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
