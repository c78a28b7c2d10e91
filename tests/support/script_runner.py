"""Runs written training scripts as rank 0 of their job on the CPU, in a process group whose collectives do nothing.

`python -m tests.support.script_runner WORLD SCRIPT...` prints a line of JSON for each script: its name and what it
raised.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock


def run(path: Path, world: int) -> str:
    """What a script printed, or raised. A world of 1 is a real group of this process alone."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    begin = dist.init_process_group

    def once(backend: str = "", **options: Any) -> None:
        if not dist.is_initialized():
            begin(*(("gloo",) if world == 1 else ("fake", None, None, world, 0, FakeStore())))

    os.chdir(path.parent)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "RANDOM_WEIGHTS": "1", "STEPS": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    shown = io.StringIO()
    if "import deepspeed" in path.read_text("utf-8"):
        _without_compiler()
    try:
        with (
            mock.patch.object(sys, "argv", [str(path)]),
            mock.patch.object(dist, "init_process_group", once),
            mock.patch.object(dist, "destroy_process_group"),  # some libraries remember the group
            contextlib.redirect_stdout(shown),
        ):
            runpy.run_path(str(path), run_name="__main__")
        return shown.getvalue()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _without_compiler() -> None:
    """DeepSpeed compiles no kernels for communication over shared memory, which takes minutes."""
    ops: Any = importlib.import_module("deepspeed.ops")
    ops.__compatible_ops__.clear()


def main() -> None:
    """Run the scripts that are named."""
    warnings.simplefilter("ignore")
    for name in sys.argv[2:]:
        print(json.dumps([name, run(Path(name), int(sys.argv[1]))]), flush=True)


if __name__ == "__main__":
    main()
