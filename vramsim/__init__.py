"""GPU memory of PyTorch training without a GPU: the public functions of the project under one name.

    import vramsim

    vramsim.estimate("gpt2", batch=8, gpu="T4")        # a name, a config.json, module:function, or an nn.Module
    vramsim.replay(vramsim.read("snapshot.pickle"))    # a recording, or any trace

Each is imported when it is first used. The packages behind it: `traces` <- `graph` <- `strategies` <- `simulator`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import simulator as _simulator  # noqa: F401 - finds the packages beside it, whatever the current folder holds

if TYPE_CHECKING:
    from simulator.comparison.compare import compare as compare
    from simulator.comparison.compare import load as load
    from simulator.engine.replay import replay as replay
    from simulator.estimator.estimate import estimate as estimate
    from simulator.estimator.sweep import sweep as sweep
    from simulator.integrations.notebook import Shell
    from simulator.selector.select import select as select
    from simulator.what_if.stress import stress as stress
    from traces import read as read
    from traces import write as write

_HOMES = {
    "compare": "simulator.comparison.compare",
    "estimate": "simulator.estimator.estimate",
    "load": "simulator.comparison.compare",
    "read": "traces",
    "replay": "simulator.engine.replay",
    "select": "simulator.selector.select",
    "stress": "simulator.what_if.stress",
    "sweep": "simulator.estimator.sweep",
    "write": "traces",
}
__all__ = ["compare", "estimate", "load", "read", "replay", "select", "stress", "sweep", "write"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vramsim' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def load_ipython_extension(shell: Shell) -> None:
    """`%load_ext vramsim`: the magic `%%llmem` (`simulator.integrations.notebook`)."""
    importlib.import_module("simulator.integrations.notebook").load(shell)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
