"""Tensor parallel by torch's `parallelize_module`: `tp`, `tp-sp` (sequence-parallel norms) and `fsdp2-tp`.

The plan is that of PyTorch's own tutorial: linear layers that make heads or the inner dimension of the MLP are split
by columns, those that take them by rows; embedding by rows, head by columns, the loss on whole logits. `fsdp2-tp`
shards over the other ranks what tensor parallelism has split over pairs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from graph.case import Case
from graph.errors import CaptureError
from strategies.parallel.fsdp import FullyShard, Sharded
from strategies.parallel.native import Native, by_shards, layers, place_all
from strategies.strategy import Groups, Kind, Launch, Ranks, Share, Strategy

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from graph.models.sources import Built
    from graph.recorder.recorder import Recorder

#: Last names of linear layers that are split by columns (their output), and by rows (their input).
COLUMNS: Final = frozenset(
    {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate_up_proj", "fc1", "fc_in", "c_fc", "c_attn"}
    | {"query_key_value", "dense_h_to_4h"}
)
ROWS: Final = frozenset({"o_proj", "out_proj", "down_proj", "fc2", "fc_out", "c_proj", "dense", "dense_4h_to_h"})
#: Attributes of an attention module that count heads, or columns of a fused projection.
COUNTS: Final = ("num_heads", "num_attention_heads", "num_key_value_heads", "split_size")
#: How many ranks of `fsdp2-tp` split a tensor.
PAIR: Final = 2
#: Norms in front of attention and MLP, and the blocks that they feed.
NORMS: Final = frozenset({"input_layernorm", "post_attention_layernorm"})


class TensorParallel(Native):
    """One rank of tensor parallelism over all ranks; `sequence`: activations between the blocks are split too."""

    def __init__(self, case: Case, rank: int, *, sequence: bool = False) -> None:
        super().__init__(case, rank)
        self.sequence = sequence

    def wrap(self, recorder: Recorder, built: Built) -> torch.nn.Module:
        """Split on meta, tied embedding and head each for itself, then placed."""
        import torch
        from torch.distributed.device_mesh import init_device_mesh

        from graph.loop.inputs import Input

        module: torch.nn.Module = built.module
        built.loss = functools.partial(self._forward, built.loss)
        if self.sequence:  # the model would count its own part of the sequence
            numbers = torch.arange(self.case.seq, device="cpu")[None]
            positions = Input(("position_ids",), (1, self.case.seq), torch.long, "values", numbers)
            built.batch = (*built.batch, positions)
        parallelize(
            module,
            init_device_mesh("cuda", (self.case.world,)),
            self.sequence,
            local=not self.case.tp_loss,
        )
        return place_all(recorder, built)

    def backward(self, loss: torch.Tensor) -> None:
        """With the loss over the split vocabulary, its backward knows the split as well."""
        with self._loss():
            super().backward(loss)

    def _loss(self) -> contextlib.AbstractContextManager[None]:
        if not self.case.tp_loss:
            return contextlib.nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()

    def _forward(self, forward: Callable[..., Any], module: torch.nn.Module, inputs: dict[str, Any]) -> Any:
        with self._loss():
            return forward(module, inputs)

    def optimizer(self, case: Case, parameters: list[torch.nn.Parameter]) -> Any:
        """Split and whole parameters apart: one foreach call cannot mix them."""
        return apart(case, parameters)


class ShardedTensorParallel(FullyShard):
    """One rank of `fully_shard` over pairs of tensor-parallel ranks."""

    def mesh(self, module: torch.nn.Module) -> Any:
        """Tensor parallelism over the inner dimension first, then the mesh of the outer one."""
        from torch.distributed.device_mesh import init_device_mesh

        both = init_device_mesh("cuda", (self.case.world // PAIR, PAIR), mesh_dim_names=("dp", "tp"))
        parallelize(module, both["tp"], False)
        return both["dp"]

    def optimizer(self, case: Case, parameters: list[torch.nn.Parameter]) -> Any:
        """Split and whole parameters apart."""
        return apart(case, parameters)


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
    blocks: list[torch.nn.Module] | None = None,
    *,
    local: bool = True,
) -> None:
    """Split `module` over `mesh`; `sequence`: between the blocks, activations are split along the sequence.

    `blocks` are its layers, where they are known; embedding and head are split where the module has them. `local`:
    the head gathers whole logits; else they stay split by vocabulary, for `loss_parallel`.

    Raises CaptureError for a model without linear layers of these names, or whose sizes the ranks do not divide.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    size = mesh.size()
    check_heads(module, size)
    found = False
    for layer in layers(module) if blocks is None else blocks:
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


@dataclass(frozen=True)
class Split(Strategy):
    """Tensor-parallel ranks are alike, since the sizes divide."""

    kind: Kind = Kind.SPLIT | Kind.TENSOR
    takes: tuple[str, ...] = ("tp_loss",)
    share: Share = Share.ALL
    sequence: bool = False
    """Activations between the blocks are split along the sequence."""

    def method(self, case: Case, rank: int) -> Native:
        """How rank `rank` runs."""
        return TensorParallel(case, rank, sequence=self.sequence)

    def axes(self, case: Case) -> dict[str, int]:
        """Tensor-parallel ranks."""
        return {"tp": case.world}


@dataclass(frozen=True)
class SplitThenSharded(Sharded):
    """`fully_shard` over pairs."""

    kind: Kind = Kind.SHARDED | Kind.SPLIT
    share: Share = Share.NO

    def method(self, case: Case, rank: int) -> Native:
        """How rank `rank` runs. Raises CaptureError for an odd number of ranks."""
        if case.world % PAIR:
            raise CaptureError(f"key 'world': fsdp2-tp splits over pairs, so an even number of ranks, not {case.world}")
        return ShardedTensorParallel(case, rank, self)

    def distinct(self, case: Case) -> Ranks:
        """Ranks whose shards have the same sizes."""
        half = case.world // PAIR
        pairs = by_shards(replace(case, world=half), half, (1, PAIR))
        return tuple(tuple(PAIR * place + side for place in group for side in range(PAIR)) for group in pairs)

    def groups(self, case: Case) -> Groups:
        """All, those that share shards, and pairs."""
        everyone = tuple(range(case.world))
        return {
            "default_pg": (everyone,),
            "mesh_dp": (everyone[::2], everyone[1::2]),
            "mesh_tp": tuple(everyone[rank : rank + 2] for rank in everyone[::2]),
        }

    def axes(self, case: Case) -> dict[str, int]:
        """Shards of pairs."""
        return {"fsdp2": case.world // PAIR, "tp": PAIR}

    def micro_batches(self, case: Case) -> int:
        """One for each pair."""
        return max(1, case.world // PAIR)


_SEQUENCE = Launch(no_accelerate="accelerate keeps activations whole between tensor-parallel layers")
STRATEGIES = (
    SplitThenSharded("fsdp2-tp", "fully_shard over pairs of tensor-parallel ranks"),
    Split("tp", "parallelize_module"),
    Split(
        "tp-sp",
        "... with sequence parallelism",
        Kind.SPLIT | Kind.TENSOR | Kind.ALL_SPLIT,
        launch=_SEQUENCE,
        sequence=True,
    ),
)
