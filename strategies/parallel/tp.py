"""Tensor parallel by torch's `parallelize_module`: how a model is split, with sequence-parallel norms or without.

The plan is that of PyTorch's own tutorial: linear layers that make heads or the inner dimension of the MLP are split
by columns, those that take them by rows; embedding by rows, head by columns, the loss on whole logits.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

from graph.case import Case
from graph.errors import CaptureError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from graph.models.sources import Built

#: Last names of linear layers that are split by columns (their output), and by rows (their input).
COLUMNS: Final = frozenset(
    {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate_up_proj", "fc1", "fc_in", "c_fc", "c_attn"}
    | {"query_key_value", "dense_h_to_4h"}
)
ROWS: Final = frozenset({"o_proj", "out_proj", "down_proj", "fc2", "fc_out", "c_proj", "dense", "dense_4h_to_h"})
#: Attributes of an attention module that count heads, or columns of a fused projection.
COUNTS: Final = ("num_heads", "num_attention_heads", "num_key_value_heads", "split_size")
#: Norms in front of attention and MLP, and the blocks that they feed.
NORMS: Final = frozenset({"input_layernorm", "post_attention_layernorm"})


def apart(case: Case, parameters: list[torch.nn.Parameter]) -> Any:
    """The case's optimizer over two groups of parameters: distributed tensors, and plain ones."""
    from graph.loop.training import make_optimizer

    split = [
        [one for one in parameters if hasattr(one, "to_local")],
        [one for one in parameters if not hasattr(one, "to_local")],
    ]
    groups: list[Any] = [{"params": group} for group in split if group]
    return make_optimizer(case, groups)


def parallelize(
    module: torch.nn.Module,
    mesh: DeviceMesh,
    sequence: bool,
    blocks: list[torch.nn.Module],
    *,
    local: bool,
) -> None:
    """Split `module` over `mesh`; `sequence`: between the blocks, activations are split along the sequence.

    `blocks` are its layers; embedding and head are split where the module has them. `local`:
    the head gathers whole logits; else they stay split by vocabulary, for `loss_parallel`.

    Raises CaptureError for a model without linear layers of these names, or whose sizes the ranks do not divide.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    size = mesh.size()
    check_heads(module, size)
    found = False
    for layer in blocks:
        plan = layer_plan(layer, sequence, size)
        found = found or bool(plan)
        if sequence and plan and not any(path.rpartition(".")[2] in NORMS for path in plan):
            raise CaptureError(f"tp-sp knows norms called {', '.join(sorted(NORMS))}; this model has none of them")
        parallelize_module(layer, mesh, plan)
        fewer_heads(layer, size)
    if not found:
        names = ", ".join(sorted(COLUMNS | ROWS))
        raise CaptureError(f"tensor parallelism knows linear layers called {names}; this model has none of them")
    parts = dict(module.named_modules())
    top = model_plan(module, sequence, local)
    absent = [path for path in top if path in parts and not any(True for _ in parts[path].parameters())]
    parallelize_module(module, mesh, {path: style for path, style in top.items() if path not in absent})


def give_positions(built: Built, tokens: int) -> None:
    """Give positions to a model whose activations are split along the sequence: it would count its own part of it."""
    import torch

    from graph.loop.inputs import Input

    if "position_ids" in inspect.signature(built.module.forward).parameters:
        numbers = torch.arange(tokens, device="cpu")[None]
        built.batch = (*built.batch, Input(("position_ids",), (1, tokens), torch.long, "values", numbers))


def layer_plan(layer: torch.nn.Module, sequence: bool, size: int) -> dict[str, Any]:
    """The plan of one block: path of a module in it -> how it is split."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    out: dict[str, Any] = {"output_layouts": Shard(1)} if sequence else {}
    plan: dict[str, Any] = {}
    for path, part in layer.named_modules():
        last, role = path.rpartition(".")[2], role_of(layer, path)
        if role == "column":
            divides(path, "out_features", _features(path, part, "out_features"), size)
            plan[path] = ColwiseParallel()
        elif role == "row":
            divides(path, "in_features", _features(path, part, "in_features"), size)
            plan[path] = RowwiseParallel(**out)
        elif sequence and last in NORMS:
            plan[path] = SequenceParallel()
        elif sequence and path == "self_attn":
            plan[path] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
        elif sequence and path == "mlp":
            plan[path] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    return plan


def role_of(block: torch.nn.Module, path: str) -> str:
    """How the layer at `path` in `block` is split: "column", "row" or "" (not at all), by its name.

    Raises CaptureError for one that takes split activations where nothing beside it makes them.
    """
    parent, _, name = path.rpartition(".")
    if name in COLUMNS:
        return "column"
    beside = {child for child, _ in block.get_submodule(parent).named_children()} & COLUMNS
    if name not in ROWS or (name == "dense" and not beside):
        return ""
    if not beside:
        raise CaptureError(f"'{path}' would be split by rows, but no layer beside it is one of {sorted(COLUMNS)}")
    return "row"


def divides(path: str, what: str, features: int, size: int) -> None:
    """CaptureError unless `size` ranks divide the `features` of the linear layer at `path`."""
    if features % size:
        raise CaptureError(f"'{path}' has {what} {features}, which {size} tensor-parallel ranks do not divide")


def _features(path: str, part: torch.nn.Module, what: str) -> int:
    import torch

    if not isinstance(part, torch.nn.Linear):
        raise CaptureError(f"'{path}' is a {type(part).__name__}; torch's tensor parallelism splits torch.nn.Linear")
    features: int = getattr(part, what)
    return features


def check_heads(module: torch.nn.Module, size: int) -> None:
    """CaptureError unless `size` ranks divide the attention heads, and the heads of keys and values, of a model."""
    config: Any = getattr(module, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % size:
            raise CaptureError(f"the model's {key} is {heads}, which {size} tensor-parallel ranks do not divide")


def fewer_heads(block: torch.nn.Module, size: int) -> list[torch.nn.Module]:
    """Let attention modules, those with a split projection, count the heads of one rank; answers these modules."""
    found = []
    for part in block.modules():
        names = {name for name, _ in part.named_children()}
        if names & {"q_proj", "c_attn", "query_key_value"}:
            found.append(part)
            for name in COUNTS:
                count = getattr(part, name, None)
                if isinstance(count, int):
                    setattr(part, name, count // size)
    return found


def model_plan(module: torch.nn.Module, sequence: bool, local: bool = True) -> dict[str, Any]:
    """The plan of embedding, final norm and head."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    paths = {id(part): path for path, part in module.named_modules()}
    model: Any = module
    embedding = paths[id(model.get_input_embeddings())]
    out: dict[str, Any] = {"output_layouts": Shard(1)} if sequence else {}
    plan: dict[str, Any] = {embedding: RowwiseParallel(input_layouts=Replicate(), **out)}
    head = model.get_output_embeddings()
    if head is not None:
        inputs: dict[str, Any] = {"input_layouts": Shard(1)} if sequence else {}
        plan[paths[id(head)]] = (
            ColwiseParallel(output_layouts=Replicate(), **inputs)
            if local
            else ColwiseParallel(output_layouts=Shard(-1), use_local_output=False, **inputs)
        )
    if sequence:
        plan[f"{embedding.rpartition('.')[0]}.norm".lstrip(".")] = SequenceParallel()
    return plan
