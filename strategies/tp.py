"""Tensor parallel by torch's `parallelize_module`: `tp`, `tp-sp` (sequence-parallel norms) and `fsdp2-tp`.

The plan is that of PyTorch's own tutorial: linear layers that make heads or the inner dimension of the MLP are split
by columns, those that take them by rows; embedding by rows, head by columns, the loss on whole logits. `fsdp2-tp`
shards over the other ranks what tensor parallelism has split over pairs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from graph.case import Case
from graph.errors import CaptureError
from graph.method import Method
from strategies.fsdp import FullyShard, materialize
from strategies.native import Native, by_shards, layers, place_all, tied

if TYPE_CHECKING:
    import torch

#: Last names of linear layers that are split by columns (their output), and by rows (their input).
COLUMNS: Final = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
ROWS: Final = frozenset({"o_proj", "down_proj"})
#: Norms in front of attention and MLP, and the blocks that they feed.
NORMS: Final = frozenset({"input_layernorm", "post_attention_layernorm"})


class TensorParallel(Native):
    """One rank of tensor parallelism over all ranks."""

    def wrap(self, recorder: Any, built: Any) -> torch.nn.Module:
        """Split on meta, then materialized."""
        import torch
        from torch.distributed.device_mesh import init_device_mesh

        from graph.inputs import Input

        module: torch.nn.Module = built.module
        whole = tied(module)
        if self.case.strategy == "tp-sp":  # the model would count its own part of the sequence
            positions = Input(("position_ids",), (1, self.case.seq), torch.long, "values")
            built.batch = (*built.batch, positions)
        if whole:
            module = place_all(recorder, built)
        parallelize(module, init_device_mesh("cuda", (self.case.world,)), self.case.strategy == "tp-sp")
        if not whole:
            materialize(recorder, module)
        return module

    def optimizer(self, case: Case, parameters: list[torch.nn.Parameter]) -> Any:
        """Split and whole parameters apart: one foreach call cannot mix them."""
        return apart(case, parameters)


class ShardedTensorParallel(FullyShard):
    """One rank of `fully_shard` over pairs of tensor-parallel ranks."""

    def mesh(self, module: torch.nn.Module) -> Any:
        """Tensor parallelism over the inner dimension first, then the mesh of the outer one."""
        from torch.distributed.device_mesh import init_device_mesh

        both = init_device_mesh("cuda", (self.case.world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize(module, both["tp"], False)
        return both["dp"]

    def optimizer(self, case: Case, parameters: list[torch.nn.Parameter]) -> Any:
        """Split and whole parameters apart."""
        return apart(case, parameters)


def apart(case: Case, parameters: list[torch.nn.Parameter]) -> Any:
    """The case's optimizer over two groups of parameters: distributed tensors, and plain ones."""
    from graph.training import make_optimizer

    split = [
        [one for one in parameters if hasattr(one, "to_local")],
        [one for one in parameters if not hasattr(one, "to_local")],
    ]
    groups: list[Any] = [{"params": group} for group in split if group]
    return make_optimizer(case, groups)


def parallelize(module: torch.nn.Module, mesh: Any, sequence: bool) -> None:
    """Split `module` over `mesh`; `sequence`: between the blocks, activations are split along the sequence.

    Raises CaptureError for a model without linear layers of these names, or whose sizes the ranks do not divide.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    size = mesh.size()
    found = False
    for layer in layers(module):
        plan = _plan(layer, sequence, size)
        found = found or bool(plan)
        parallelize_module(layer, mesh, plan)
    if not found:
        names = ", ".join(sorted(COLUMNS | ROWS))
        raise CaptureError(f"tensor parallelism knows linear layers called {names}; this model has none of them")
    parallelize_module(module, mesh, _top(module, sequence))


def _plan(layer: torch.nn.Module, sequence: bool, size: int) -> dict[str, Any]:
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
        last = path.rpartition(".")[2]
        if last in COLUMNS:
            _divides(path, "out_features", part, size)
            plan[path] = ColwiseParallel()
        elif last in ROWS:
            _divides(path, "in_features", part, size)
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


def _divides(path: str, what: str, part: Any, size: int) -> None:
    features = getattr(part, what, 0)
    if features % size:
        raise CaptureError(f"'{path}' has {what} {features}, which {size} tensor-parallel ranks do not divide")


def _top(module: torch.nn.Module, sequence: bool) -> dict[str, Any]:
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
        plan[paths[id(head)]] = ColwiseParallel(output_layouts=Replicate(), **inputs)
    if sequence:
        plan[f"{embedding.rpartition('.')[0]}.norm".lstrip(".")] = SequenceParallel()
    return plan


def method(case: Case, rank: int) -> Method:
    """How rank `rank` runs."""
    if case.strategy == "fsdp2-tp":
        if case.world % 2:
            raise CaptureError(f"key 'world': fsdp2-tp splits over pairs, so an even number of ranks, not {case.world}")
        return ShardedTensorParallel(case, rank)
    return TensorParallel(case, rank)


def distinct(case: Case) -> tuple[tuple[int, ...], ...]:
    """Ranks that do the same. Tensor-parallel ranks are alike, since the sizes divide."""
    if case.strategy != "fsdp2-tp":
        return (tuple(range(case.world)),)
    pairs = by_shards(replace(case, world=case.world // 2), case.world // 2, (1, 2))
    return tuple(tuple(2 * place + side for place in group for side in (0, 1)) for group in pairs)


def groups(case: Case) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The groups of ranks that meet in collectives, by the names that torch gives them."""
    everyone = tuple(range(case.world))
    if case.strategy != "fsdp2-tp":
        return {"default_pg": (everyone,)}
    return {
        "default_pg": (everyone,),
        "mesh_dp": (everyone[::2], everyone[1::2]),
        "mesh_tp": tuple(everyone[rank : rank + 2] for rank in everyone[::2]),
    }
