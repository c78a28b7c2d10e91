"""Cases of every method that `select` can choose, for a small model, and their configuration files in folders."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from simulator.launch.configuration import files
from simulator.selector.candidates import candidates
from simulator.selector.select import Asked

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}


@cache
def methods(world: int, policy: str = "throughput") -> dict[str, dict[str, Any]]:
    """The name of each method that `select` looks at, with what it adds to a case."""
    asked = Asked({"model": "tinyllama-1.1b"}, ("A100-80GB",) * world, policy)
    return {one.name: {k: v for k, v in one.keys.items() if k != "model"} for one in candidates(asked)}


#: Every method on four GPUs, by its name.
METHODS = tuple(methods(4))


def model(folder: Path, layers: int = 2) -> str:
    """The folder of a small model's configuration, which one layer makes smaller still."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    return str(folder)


def written(folder: Path, method: str, world: int = 4, **keys: Any) -> dict[str, str]:
    """The files of a method, written to `folder` as well."""
    policy = "llmem" if method in methods(world, "llmem") else "throughput"
    case = {"model": model(folder / "model"), "batch": 2, "seq": 16, **methods(world, policy)[method], **keys}
    found = files(case)
    for name, text in found.items():
        (folder / name).write_text(text, "utf-8")
    return found
