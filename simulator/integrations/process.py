"""What other programs run the command line with: `python -m simulator` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

_ROOT: Final = str(Path(__file__).resolve().parents[2])


def llmem(
    words: Sequence[str],
    *,
    folder: str | Path | None = None,
    given: str | None = None,
    environment: Mapping[str, str] | None = None,
    run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run,
) -> subprocess.CompletedProcess[str]:
    """What `llmem WORDS` says, in a folder, with a text as its standard input; nothing is raised for its exit code.

    `run` starts it, as `subprocess.run` does."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), _ROOT)))
    return run(
        [sys.executable, "-m", "simulator", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        input=given or "",
        capture_output=True,
        text=True,
        check=False,
    )
