"""Meshes: pipeline stages, replicas, shards and tensor parallelism at once, as `{"pp": 2, "fsdp2": 4, "tp": 2}` says.

Each axis of a case's `mesh` is a dimension of torch's DeviceMesh, outermost first: `tp` splits linear layers by
`parallelize_module`, `fsdp2` shards what is left by `fully_shard`, `dp` (or `ddp`) replicates by
DistributedDataParallel, or with `fsdp2` by a two-dimensional `fully_shard`; `hsdp` is that with two replicas; `pp` cuts
the model into stages. Order as in torchtitan: stages are cut, then split, then sharded or replicated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from graph.case import Case
from graph.loop.method import Method
from strategies.parallel.fsdp import REPLICAS, materialize, without_step
from strategies.parallel.mesh import Mesh
from strategies.parallel.native import Native, place_all, shard_groups, tied, without_autocast
from strategies.parallel.pp import Pipeline, check_schedule, refused
from strategies.parallel.tp import apart, parallelize
from strategies.strategy import Groups, Kind, Ranks, Strategy
from traces.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from graph.loop.training import Clock
    from graph.models.sources import Built
    from graph.recorder.attribution import Roles
    from graph.recorder.recorder import Recorder

AXES: Final = ("pp", "dp", "ddp", "hsdp", "fsdp2", "tp")
#: Strategies that may be named beside a mesh: the mesh says what they say.
NAMED: Final = frozenset({"single", "pp", "ddp", "fsdp2", "hsdp", "tp"})


def mesh_of(case: Case) -> Mesh:
    """The mesh of a case. Raises ConfigError for unknown or contradictory axes and for another number of ranks."""
    mesh = Mesh.of(case.mesh, AXES)
    mesh.check_world(case.world)
    names = {name for name, _ in mesh.axes}
    if case.strategy not in NAMED or (case.strategy != "single" and not _names(case.strategy, names)):
        raise ConfigError(f"mesh: strategy {case.strategy!r} contradicts {mesh}; leave 'strategy' out, the axes say it")
    if {"dp", "ddp"} <= names:
        raise ConfigError(f"mesh: {mesh}: dp and ddp are one axis; name it once")
    other = names & {"dp", "ddp", "fsdp2"}
    if "hsdp" in names and other:
        raise ConfigError(
            f"mesh: {mesh}: hsdp shards and replicates by itself; write dp=N,fsdp2=M for sizes of your own"
        )
    if mesh.size("hsdp") % REPLICAS and "hsdp" in names:
        raise ConfigError(f"mesh: hsdp={mesh.size('hsdp')}: hsdp makes {REPLICAS} replicas; give it an even size")
    if case.task != "train":
        raise ConfigError("key 'mesh': only for 'task': 'train'")
    return mesh


def _names(strategy: str, axes: set[str]) -> bool:
    return strategy in axes or (strategy == "ddp" and "dp" in axes)


class MeshRank(Pipeline):
    """One rank of a mesh."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, rank)
        self.layout = mesh_of(case)
        self.place = self.layout.coordinates(rank)
        self.data = max(self.layout.size("dp"), self.layout.size("ddp"))
        self.sharded = max(self.layout.size("fsdp2"), self.layout.size("hsdp"))
        self.tensor = self.layout.size("tp")
        self.replicated = self.data > 1 and self.sharded == 1
        self.kept = frozenset({"all_reduce"}) if self.replicated else frozenset()
        self.real_steps = 3 if self.replicated else 2
        if self.stages == 1:
            self.phases = Native.phases
        self.mesh: Any = None

    @property
    def stage(self) -> int:
        """Which stage this rank has."""
        return self.place.get("pp", 0)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.layout.size("pp")

    def captured_case(self) -> Case:
        """Without autocast where the sharding policy casts."""
        return without_autocast(self.case) if self.sharded > 1 else self.case

    def train(self, clock: Clock, built: Built, case: Case, roles: Roles, steps: int) -> None:
        """The schedule's loop with stages, else the usual one."""
        if self.stages > 1:
            super().train(clock, built, case, roles, steps)
        else:
            Method.train(self, clock, built, case, roles, steps)

    def wrap(self, recorder: Recorder, built: Built) -> torch.nn.Module:
        """Cut, split, sharded or replicated, in this order."""
        from strategies.parallel.stages import cut, decoder

        self.mesh = self._device_mesh()
        module: torch.nn.Module = built.module
        base, name = decoder(module)
        if self.stages > 1:
            module = built.module = cut(module, self.stage, self.stages)
            self.group = self.mesh["pp"].get_group()
        blocks: list[torch.nn.Module] = list(base.get_submodule(name).children())
        whole = self.sharded == 1 or tied(module) or built.loader is not None  # splitting makes two of a tied pair
        if self.tensor > 1:
            parallelize(module, self.mesh["tp"], False, blocks)
        if whole:
            module = place_all(recorder, built)
        if self.sharded > 1:
            self._shard(module, blocks)
        if not whole:
            materialize(recorder, module, offload=self.case.offload == "parameters")
        return self._replicate(module) if self.replicated else module

    def _device_mesh(self) -> Any:
        """Axes of more than one rank as torch has them; `hsdp` is two."""
        from torch.distributed.device_mesh import init_device_mesh

        sizes: dict[str, int] = {}
        for axis, size in self.layout.axes:
            if axis == "hsdp":
                sizes |= {"replicate": REPLICAS, "shard": size // REPLICAS}
            elif size > 1:
                sizes[axis] = size
        if not sizes:
            sizes = {"dp": 1}
        return init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def _shard(self, module: torch.nn.Module, blocks: list[torch.nn.Module]) -> None:
        import torch
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        from graph.loop.inputs import DTYPES

        names = set(self.mesh.mesh_dim_names)
        if "replicate" in names:
            over = self.mesh["replicate", "shard"]
        elif self.data > 1:
            over = self.mesh["dp" if "dp" in names else "ddp", "fsdp2"]
        else:
            over = self.mesh["fsdp2"]
        options: dict[str, Any] = {"mesh": over, "reshard_after_forward": self.stages == 1}
        if self.case.offload == "parameters":
            options["offload_policy"] = CPUOffloadPolicy()
        if self.case.autocast:
            dtype = DTYPES[self.case.autocast]
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for block in blocks:
            fully_shard(block, **options)
        fully_shard(module, **options)

    def _replicate(self, module: torch.nn.Module) -> torch.nn.Module:
        from graph.fake_cuda.collectives import replicated
        from graph.fake_cuda.torch_private import with_plain_parameters

        if self.tensor > 1:
            with_plain_parameters(module)
        over = self.mesh["dp" if "dp" in self.mesh.mesh_dim_names else "ddp"].get_group()
        return replicated(module, process_group=over)

    def optimizer(self, case: Case, parameters: list[torch.nn.Parameter]) -> Any:
        """Split and whole parameters apart, where there are both."""
        from graph.loop.training import make_optimizer

        made = apart(case, parameters) if self.tensor > 1 else make_optimizer(case, parameters)
        return without_step(made) if case.offload == "parameters" else made

    def micro_step(self, module: Any, micro: int, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients are not synchronized before the last micro-batch, where the case says so."""
        if self.case.grad_sync == "last":
            if self.sharded > 1:
                module.set_requires_gradient_sync(last)
                if not self.case.reshard_backward:
                    module.set_reshard_after_backward(last)
            elif self.replicated and not last:
                quiet: contextlib.AbstractContextManager[Any] = module.no_sync()
                return quiet
        return contextlib.nullcontext()


def _class_of_shard(rows: set[int], shards: int) -> list[int]:
    """Which group of equal shards each shard is in."""
    groups = shard_groups(rows, shards)
    return [next(number for number, members in enumerate(groups) if shard in members) for shard in range(shards)]


def _rows(case: Case, stages: int, tensor: int) -> list[set[int]]:
    """Rows of the parameters that each stage may have, whole and split over `tensor` ranks."""
    from graph.models.sources import build
    from strategies.parallel.stages import decoder, shares

    built = build(case)
    if stages > 1 and built.head != "causal-lm":
        raise ConfigError(f"mesh: pp is for decoders (head causal-lm), and this model is {built.head or 'unknown'}")
    _check_heads(built.config, tensor)
    base, name = decoder(built.module)
    layers = list(base.get_submodule(name).children())
    inside = {id(one) for layer in layers for one in layer.parameters()}
    ends = [one for one in built.module.parameters() if id(one) not in inside]
    found = []
    for stage, share in enumerate(shares(len(layers), stages, "mesh: pp")):
        held = [one for number in share for one in layers[number].parameters()]
        held += ends if stage in (0, stages - 1) else []
        sizes = {one.shape[0] for one in held if one.dim()}
        found.append({max(1, -(-size // by)) for size in sizes for by in {1, tensor}})
    return found


def _check_heads(config: PreTrainedConfig, tensor: int) -> None:
    """ConfigError if tensor-parallel ranks do not divide the heads or the hidden size."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in ("num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size"):
        size = getattr(text, key, None)
        if isinstance(size, int) and size % tensor:
            raise ConfigError(f"mesh: tp={tensor} does not divide the model's {key}, {size}")


@dataclass(frozen=True)
class Meshes(Strategy):
    """Whatever a case's `mesh` says."""

    def method(self, case: Case, rank: int) -> Native:
        """How rank `rank` runs."""
        return MeshRank(case, rank)

    def distinct(self, case: Case) -> Ranks:
        """Ranks that do the same: of one stage, with shards of the same sizes. Replicas and tensor ranks are alike.

        Raises ConfigError for a mesh that the model cannot be spread over.
        """
        mesh = mesh_of(case)
        stages, tensor = mesh.size("pp"), mesh.size("tp")
        shards = mesh.size("fsdp2") * (mesh.size("hsdp") // REPLICAS or 1)
        found: dict[tuple[int, int], list[int]] = {}
        classes = [_class_of_shard(rows, shards) for rows in _rows(case, stages, tensor)]
        if stages > 1:
            check_schedule(case, stages)
        for rank in range(mesh.world):
            place = mesh.coordinates(rank)
            shard = place.get("fsdp2", place.get("hsdp", 0) % shards)
            stage = place.get("pp", 0)
            found.setdefault((stage, classes[stage][shard]), []).append(rank)
        return tuple(tuple(ranks) for ranks in found.values())

    def groups(self, case: Case) -> Groups:
        """The groups of ranks that meet in collectives, by the names that torch gives them."""
        mesh = mesh_of(case)
        found: dict[str, Ranks] = {"default_pg": (tuple(range(case.world)),)}
        for axis, size in mesh.axes:
            parts = mesh.groups(axis)
            if axis == "hsdp":
                half = size // REPLICAS
                found["mesh_replicate"] = tuple((part[i], part[i + half]) for part in parts for i in range(half))
                found["mesh_shard"] = tuple(part[start : start + half] for part in parts for start in (0, half))
            elif size > 1:
                found[f"mesh_{axis}"] = parts
            if axis == "pp":
                for name in ("mesh_pp", "default_pg") if size == mesh.world else ("mesh_pp",):
                    for i in range(size - 1):
                        pairs = tuple((part[i], part[i + 1]) for part in parts)
                        found |= {f"{name}:{i}>{i + 1}": pairs, f"{name}:{i + 1}>{i}": pairs}
        return found

    def axes(self, case: Case) -> dict[str, int]:
        """As the case says, with hsdp as the two that it is."""
        sizes: dict[str, int] = {}
        for axis, size in case.mesh.items():
            hybrid = {"dp": REPLICAS, "fsdp2": size // REPLICAS}
            sizes |= hybrid if axis == "hsdp" else {"dp" if axis == "ddp" else axis: size}
        return sizes

    def kinds(self, case: Case) -> Kind:
        """Those of its axes."""
        names = set(case.mesh)
        found = Kind.NONE
        if names & {"fsdp2", "hsdp"}:
            found |= Kind.SHARDED | Kind.HOST_PARAMETERS
        if "tp" in names:
            found |= Kind.SPLIT
        if names <= {"dp", "ddp"}:
            found |= Kind.WHOLE
        return found

    def heaviest(self, case: Case) -> int | None:
        """Without stages, the first: its shards are the largest."""
        return None if "pp" in case.mesh else 0

    def micro_batches(self, case: Case) -> int:
        """One for each data-parallel group, or a schedule of them."""
        shared = case.mesh.get("tp", 1) * case.mesh.get("pp", 1)
        return max(1, case.world // shared) * (case.microbatches if "pp" in case.mesh else 1)

    def title(self, case: Case) -> str:
        """The axes."""
        return ",".join(case.mesh)

    def refused(self, case: Case) -> Iterator[tuple[str, str]]:
        """What pipelines cannot run."""
        return refused(case) if case.mesh.get("pp", 1) > 1 else iter(())


MESH = Meshes("mesh", "pp, dp, hsdp, fsdp2 and tp at once")
