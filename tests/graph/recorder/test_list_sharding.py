"""Shardings of operators over lists: worked out for one entry of each kind, they are what DTensor finds for all."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simulator.estimator.estimate import estimate, forget_graphs

torch = pytest.importorskip("torch")

from graph.recorder import list_sharding  # noqa: E402

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("width", "keys"),
    [
        (112, {"optimizer": "adamw"}),
        (144, {"optimizer": "adamw-fused"}),
        (176, {"optimizer": "sgd", "clip": 1.0}),
        (208, {"mesh": {"fsdp2": 2, "tp": 2}, "optimizer": "adamw"}),
    ],
)
def test_equal_entries_say_it_all(
    width: int, keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"  # of a width of its own: DTensor keeps what it has found for one
    path.write_text(
        json.dumps({**MODEL, "hidden_size": width, "intermediate_size": 2 * width, "vocab_size": 8 * width})
    )
    shortened = 0
    quick = list_sharding.propagated

    def both(schema: Any, plain: Any) -> Any:
        nonlocal shortened
        asked: list[Any] = []

        def told(one: Any) -> Any:
            asked.append(one)
            return plain(one)

        found = quick(schema, told)
        if asked == [schema]:
            return found
        whole = plain(schema)
        shortened += 1
        assert found.output_spec == whole.output_spec
        assert found.needs_redistribute == whole.needs_redistribute
        assert found.redistribute_schema == whole.redistribute_schema
        return found

    monkeypatch.setattr(list_sharding, "propagated", both)
    place = {} if "mesh" in keys else {"strategy": "fsdp2", "world": 4}
    forget_graphs()
    estimate({"model": str(path), "seq": 16, "batch": 1, **place, **keys}, analyse=False)
    assert shortened > 0


def test_entries_of_open_sizes_are_asked_for_as_they_are() -> None:
    """A compiled step of an optimizer over sharded parameters (PyTorch 2.13): "unhashable type: non-nested SymInt"."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    size = ShapeEnv().create_unbacked_symint()
    with pytest.raises(TypeError):
        hash(size)
    schema: Any = SimpleNamespace(op=torch.ops.aten._foreach_sub.List, args_schema=([size, size], [size, size]))
    assert list_sharding.propagated(schema, lambda asked: asked) is schema
