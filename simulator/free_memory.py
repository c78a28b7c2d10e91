"""What the machine that runs this still has for processes: its own memory, not a GPU's."""

from __future__ import annotations

import contextlib


def free_bytes() -> int:
    """Memory that processes can still take, as Linux says it; very much where it cannot be told."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62
