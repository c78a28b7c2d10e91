"""Torch's own methods as one composition: pipeline stages, replicas, shards and tensor parallelism, alone or at once.

Each axis is a dimension of torch's DeviceMesh, outermost first: `tp` splits linear layers by `parallelize_module`,
`fsdp2` shards what is left by `fully_shard` (each layer and the root are units, whose gathered parameters torch frees
by resizing their storages to 0), `dp` replicates by DistributedDataParallel, or with `fsdp2` by a two-dimensional
`fully_shard`; `pp` cuts the model into stages. Order as in torchtitan: stages are cut, then split, then sharded or
replicated. A method by name, such as `ddp` or `hsdp`, is a mesh that follows from the number of ranks, with options; a
case's `mesh` may have any axes, and `ddp` for `dp`, `hsdp` for `dp` of two and `fsdp2`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

from graph.case import Case
from graph.loop.method import Method, layers
from strategies.parallel.fsdp import FSDP1
from strategies.parallel.mesh import Mesh
from strategies.parallel.native import Native, place_all, synchronized, tied, without_autocast
from strategies.parallel.pp import Pipeline, check_schedule, refused
from strategies.parallel.tp import apart, give_positions, parallelize
from strategies.strategy import FSDP, Axis, Groups, Kind, Launch, Ranks, Share, Strategy
from traces.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from graph.loop.training import Clock
    from graph.models.sources import Built
    from graph.recorder.attribution import Roles
    from graph.recorder.recorder import Recorder

AXES: Final = ("pp", "dp", "ddp", "hsdp", "fsdp2", "tp")
#: Strategies that may be named beside a mesh: the mesh says what they say.
NAMED: Final = frozenset({"single", "pp", "ddp", "fsdp2", "hsdp", "tp"})
#: How many replicas `hsdp` makes, and how many ranks of `fsdp2-tp` split a tensor.
REPLICAS: Final = 2
PAIR: Final = 2


def mesh_of(case: Case) -> Mesh:
    """The mesh that a case gives, with the axes of more than one rank.

    Raises ConfigError for unknown or contradictory axes and for another number of ranks.
    """
    mesh = Mesh.of(case.mesh, AXES)
    mesh.check_world(case.world)
    names = {name for name, _ in mesh.axes}
    if case.strategy not in NAMED or (case.strategy != "single" and not _names(case.strategy, names)):
        raise ConfigError(f"mesh: strategy {case.strategy!r} contradicts {mesh}; leave 'strategy' out, the axes say it")
    if {"dp", "ddp"} <= names:
        raise ConfigError(f"mesh: {mesh}: dp and ddp are one axis; name it once")
    if "hsdp" in names and names & {"dp", "ddp", "fsdp2"}:
        raise ConfigError(
            f"mesh: {mesh}: hsdp shards and replicates by itself; write dp=N,fsdp2=M for sizes of your own"
        )
    if mesh.size("hsdp") % REPLICAS and "hsdp" in names:
        raise ConfigError(f"mesh: hsdp={mesh.size('hsdp')}: hsdp makes {REPLICAS} replicas; give it an even size")
    if case.task != "train":
        raise ConfigError("key 'mesh': only for 'task': 'train'")
    return Mesh.of({axis: size for axis, size in _plain(case.mesh).items() if size > 1})


def _names(strategy: str, axes: set[str]) -> bool:
    return strategy in axes or (strategy == "ddp" and "dp" in axes)


def _plain(sizes: Mapping[str, int]) -> dict[str, int]:
    """The axes as they are wrapped: hsdp as the two that it is."""
    found: dict[str, int] = {}
    for axis, size in sizes.items():
        hybrid = {"dp": REPLICAS, "fsdp2": size // REPLICAS}
        found |= hybrid if axis == "hsdp" else {"dp" if axis == "ddp" else axis: size}
    return found


class MeshRank(Pipeline):
    """One rank of a mesh."""

    def __init__(self, case: Case, rank: int, strategy: Meshes) -> None:
        super().__init__(case, rank)
        self.layout = strategy.layout(case)
        self.strategy = strategy
        self.on_host = strategy.on_host(case)
        axes = {name for name, _ in self.layout.axes}
        self.staged, self.sharded, self.split = "pp" in axes, "fsdp2" in axes, "tp" in axes
        self.replicated = _replicated(axes)
        self.kept = frozenset({"all_reduce"}) if self.replicated else frozenset()
        # DDP rebuilds its buckets in the second iteration, so that the third is the first usual one
        self.real_steps = 3 if self.replicated else 2
        self.stage, self.stages = self.layout.coordinates(rank).get("pp", 0), self.layout.size("pp")
        if not self.staged:
            self.phases = Native.phases
        self.mesh: Any = None

    def captured_case(self) -> Case:
        """Without autocast where the sharding policy casts."""
        return without_autocast(self.case) if self.sharded else self.case

    def compiles_blocks(self, case: Case) -> bool:
        """What is sharded is compiled by block, as torchtitan and accelerate do; what gathers a block is not."""
        return case.compile_blocks or self.sharded

    def train(self, clock: Clock, built: Built, case: Case, roles: Roles, steps: int) -> None:
        """The schedule's loop with stages, else the usual one."""
        (Pipeline if self.staged else Method).train(self, clock, built, case, roles, steps)

    def wrap(self, recorder: Recorder, built: Built) -> torch.nn.Module:
        """Cut, split, sharded or replicated, in this order: on meta, and placed as early as the method needs it.

        What is sharded is materialized after, but tied parameters, which splitting would make two of.
        """
        from torch.distributed.device_mesh import init_device_mesh

        from strategies.parallel.stages import cut, decoder

        names = tuple(name for name, _ in self.layout.axes)
        if names:
            self.mesh = init_device_mesh("cuda", tuple(size for _, size in self.layout.axes), mesh_dim_names=names)
        module: torch.nn.Module = built.module
        blocks: Callable[[], Iterable[torch.nn.Module]] = functools.partial(layers, module)
        if self.staged:
            base, name = decoder(module)
            module = built.module = cut(module, self.stage, self.stages)
            self.group = self.mesh["pp"].get_group()
            blocks = base.get_submodule(name).children
        whole = not self.sharded or tied(module) or built.loader is not None
        if self.split:
            self._split(built, module, list(blocks()))
        if whole:
            module = place_all(recorder, built)
        if self.sharded:
            self._shard([*blocks(), module])
        if not whole:
            materialize(recorder, module, offload=self.on_host)
        return self._replicate(module) if self.replicated else module

    def _split(self, built: Built, module: torch.nn.Module, blocks: list[torch.nn.Module]) -> None:
        """Tensor parallelism; tied embedding and head are split each for itself."""
        built.loss = functools.partial(self._forward, built.loss)
        if self.strategy.sequence:
            give_positions(built, self.case.seq)
        parallelize(module, self.mesh["tp"], self.strategy.sequence, blocks, local=not self.case.tp_loss)

    def _shard(self, units: list[torch.nn.Module]) -> None:
        import torch
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        from graph.loop.inputs import DTYPES

        over = self.mesh["dp", "fsdp2"] if "dp" in self.mesh.mesh_dim_names else self.mesh["fsdp2"]
        again = self.strategy.reshard_after_forward and not self.staged
        options: dict[str, Any] = {"mesh": over, "reshard_after_forward": again}
        if self.on_host:
            options["offload_policy"] = CPUOffloadPolicy()
        if self.case.autocast:
            dtype = DTYPES[self.case.autocast]
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for unit in units:
            fully_shard(unit, **options)

    def _replicate(self, module: torch.nn.Module) -> torch.nn.Module:
        from graph.fake_cuda.ranks.collectives import replicated
        from graph.fake_cuda.torch_private import with_plain_parameters

        if self.split:
            with_plain_parameters(module)
        views = self.strategy.bucket_view
        return replicated(module, process_group=self.mesh["dp"].get_group(), gradient_as_bucket_view=views)

    def _forward(self, forward: Callable[..., Any], module: torch.nn.Module, inputs: dict[str, Any]) -> Any:
        with self._loss():
            return forward(module, inputs)

    def backward(self, loss: torch.Tensor, share: torch.Tensor | None) -> None:
        """With the loss over the split vocabulary, its backward knows the split as well."""
        with self._loss():
            super().backward(loss, share)

    def _loss(self) -> contextlib.AbstractContextManager[None]:
        if not self.case.tp_loss:
            return contextlib.nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()

    def optimizer(self, case: Case, parameters: list[torch.nn.Parameter]) -> Any:
        """Split and whole parameters apart. A step on the host touches nothing on the device, so it is left out."""
        made = apart(case, parameters) if self.split else super().optimizer(case, parameters)
        if self.on_host:
            made.step = lambda *_, **__: None
        return made

    def micro_step(self, module: Any, micro: int, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients are not synchronized before the last micro-batch, where the case says so."""
        if self.replicated:
            return synchronized(self.case, module, last)
        if self.sharded and self.case.grad_sync == "last":
            module.set_requires_gradient_sync(last)
            if not self.case.reshard_backward:
                module.set_reshard_after_backward(last)
        return contextlib.nullcontext()


def materialize(recorder: Recorder, module: torch.nn.Module, *, offload: bool) -> None:
    """Give a sharded meta model its memory, as `to_empty` does; `offload`: parameters on the host, buffers not."""
    module.to_empty(device="cpu" if offload else recorder.device)
    if offload:
        for buffer in module.buffers():
            buffer.data = buffer.data.to(recorder.device)


class ShardedOptimizer(MeshRank):
    """With ZeroRedundancyOptimizer (torch/distributed/optim/zero_redundancy_optimizer.py)."""

    def optimizer(self, case: Case, parameters: list[torch.nn.Parameter]) -> Any:
        """The case's optimizer over this rank's share of the parameters."""
        from torch.distributed.optim import ZeroRedundancyOptimizer

        from graph.loop.training import optimizer_class

        kind, options = optimizer_class(case)
        return ZeroRedundancyOptimizer(parameters, optimizer_class=kind, **options)


def pieces(rows: int, shards: int, shard: int) -> int:
    """Rows of shard `shard` where `rows` are split as torch.chunk splits: pieces of one size, the last ones smaller."""
    each = -(-rows // shards)
    return min(max(rows - shard * each, 0), each)


def _rows(case: Case, mesh: Mesh) -> list[set[int]]:
    """Rows of the parameters that each stage may have, whole and split over tensor-parallel ranks.

    Raises ConfigError for a model that cannot be cut into stages.
    """
    from graph.models.sources import build
    from strategies.parallel.stages import decoder, shares

    built = build(case)
    held = [list(built.module.parameters())]
    if "pp" in dict(mesh.axes):
        if built.head != "causal-lm":
            raise ConfigError(f"pp is for decoders (head causal-lm), and this model is {built.head or 'unknown'}")
        stages = mesh.size("pp")
        base, name = decoder(built.module)
        layers = list(base.get_submodule(name).children())
        inside = {id(one) for layer in layers for one in layer.parameters()}
        ends = [one for one in built.module.parameters() if id(one) not in inside]
        cuts = shares(len(layers), stages, "mesh: pp" if case.mesh else "key 'world'")
        check_schedule(case, stages)
        held = [[one for number in cut for one in layers[number].parameters()] for cut in cuts]
        held[0] += ends
        held[-1] += ends
    by = {1, mesh.size("tp")}
    return [{max(1, -(-one.shape[0] // some)) for one in stage if one.dim() for some in by} for stage in held]


@dataclass(frozen=True)
class Meshes(Strategy):
    """A composition of torch's methods: what it makes of so many ranks, or else what a case's `mesh` says."""

    shape: Callable[[int], dict[str, int]] | None = None
    bucket_view: bool = False
    """Replicas: gradients are views of their buckets."""
    reshard_after_forward: bool = True
    """Shards: what forward gathered is freed after it."""
    offload: bool = False
    """Shards are always kept on the host."""
    sequence: bool = False
    """Tensor parallelism: activations between the blocks are split along the sequence."""

    def layout(self, case: Case) -> Mesh:
        """The axes pp, dp, fsdp2 and tp that it has. Raises ConfigError for ranks that do not make them."""
        if self.shape is None:
            return mesh_of(case)
        mesh = Mesh.of(self.shape(case.world))
        if mesh.world != case.world:
            raise ConfigError(f"key 'world': {self.name} takes an even number of ranks, not {case.world}")
        return mesh

    def method(self, case: Case, rank: int) -> Native:
        """How rank `rank` runs."""
        return MeshRank(case, rank, self)

    def sensible(self, world: int) -> bool:
        """Whether each axis has something to do."""
        if self.shape is None:
            return True
        sizes = self.shape(world).values()
        return super().sensible(world) and prod(sizes) == world and (len(sizes) == 1 or min(sizes) > 1)

    def distinct(self, case: Case) -> Ranks:
        """Ranks that do the same: of one stage, with shards of the same sizes. Replicas and tensor ranks are alike.

        Raises ConfigError for a mesh that the model cannot be spread over.
        """
        mesh = self.layout(case)
        if not {"pp", "fsdp2"} & dict(mesh.axes).keys():
            return super().distinct(case)
        rows = _rows(case, mesh)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(mesh.world):
            place = mesh.coordinates(rank)
            stage, shard = place.get("pp", 0), place.get("fsdp2", 0)
            kind = (stage, *(pieces(count, mesh.size("fsdp2"), shard) for count in sorted(rows[stage])))
            found.setdefault(kind, []).append(rank)
        return tuple(map(tuple, found.values()))

    def groups(self, case: Case) -> Groups:
        """All ranks, those along each axis, and the pairs of neighbours with one name for each direction."""
        mesh = self.layout(case)
        found: dict[str, Ranks] = {"default_pg": (tuple(range(case.world)),)}
        for axis, size in mesh.axes:
            name = "default_pg" if size == mesh.world else f"mesh_{axis}"
            parts = found[name] = mesh.groups(axis)
            for i in range(size - 1 if axis == "pp" else 0):
                pairs = tuple((part[i], part[i + 1]) for part in parts)
                found |= {f"{name}:{i}>{i + 1}": pairs, f"{name}:{i + 1}>{i}": pairs}
        return found

    def axes(self, case: Case) -> dict[str, int]:
        """As they are wrapped."""
        return _plain(case.mesh if self.shape is None else self.shape(case.world))

    def keeps_works(self, case: Case) -> bool:
        """Those of DistributedDataParallel, whose first buckets live so long."""
        return _replicated(dict(self.layout(case).axes))

    def on_host(self, case: Case) -> bool:
        """As the case or the record says."""
        return self.offload or super().on_host(case)

    def kinds(self, case: Case) -> Kind:
        """The record's own, or those of the axes."""
        if self.shape is not None:
            return self.kind
        axes = self.axes(case).keys()
        found = Kind.SHARDED | Kind.HOST_PARAMETERS if "fsdp2" in axes else Kind.NONE
        if "tp" in axes:
            found |= Kind.SPLIT
        return found if axes - {"dp"} else Kind.WHOLE

    def heaviest(self, case: Case) -> int | None:
        """Without stages, the first: the first pieces of torch.chunk are the largest."""
        return None if "pp" in self.axes(case) else 0

    def micro_batches(self, case: Case) -> int:
        """One for each data-parallel group, or a schedule of them."""
        axes = self.axes(case)
        shared = axes.get("tp", 1) * axes.get("pp", 1)
        return max(1, case.world // shared) * (case.microbatches if "pp" in axes else 1)

    def title(self, case: Case) -> str:
        """The axes of a mesh, or the name."""
        return ",".join(case.mesh) if self.shape is None else self.name

    def refused(self, case: Case) -> Iterator[tuple[str, str]]:
        """What pipelines cannot run."""
        stages = self.axes(case).get("pp", 1)
        return refused(case) if stages > 1 or (self.shape and "pp" in self.mesh_axes) else iter(())


@dataclass(frozen=True)
class ReplicasWithShards(Meshes):
    """Replicas with a sharded optimizer: each rank's share of the states is another."""

    def method(self, case: Case, rank: int) -> Native:
        """How rank `rank` runs."""
        return ShardedOptimizer(case, rank, self)

    def distinct(self, case: Case) -> Ranks:
        """Each rank for itself."""
        return tuple((rank,) for rank in range(case.world))

    def heaviest(self, case: Case) -> int:
        """The rank whose share of the optimizer's states is the largest.

        ZeroRedundancyOptimizer hands out the parameters, largest first, to the rank that has least
        (torch/distributed/optim/zero_redundancy_optimizer.py, _partition_parameters).
        """
        from graph.models.sources import build

        held = [0] * case.world
        parameters = (one for one in build(case).module.parameters() if one.requires_grad)
        for size in sorted((one.numel() for one in parameters), reverse=True):
            held[held.index(min(held))] += size
        return held.index(max(held))


def _hybrid(world: int) -> dict[str, int]:
    return {"dp": REPLICAS, "fsdp2": world // REPLICAS}


def _pairs(world: int) -> dict[str, int]:
    return {"fsdp2": world // PAIR, "tp": PAIR}


def _replicated(axes: Collection[str]) -> bool:
    """Whether DistributedDataParallel averages the gradients of a mesh with these axes."""
    return "dp" in axes and "fsdp2" not in axes


def _along(axis: Axis) -> Callable[[int], dict[str, int]]:
    return lambda world: {axis.value: world}


def _replicas(name: str, about: str, **more: Any) -> Meshes:
    return Meshes(name, about, Kind.WHOLE, takes=("grad_sync", "lengths"), shape=_along(Axis.REPLICAS), **more)


def _sharded(name: str, about: str, **more: Any) -> Meshes:
    given = {"kind": Kind.SHARDED | Kind.HOST_PARAMETERS, "shape": _along(Axis.SHARDS), **more}
    return Meshes(name, about, launch=FSDP, takes=("grad_sync", "reshard_backward", "lengths"), **given)


def _split(name: str, about: str, kind: Kind = Kind.NONE, **more: Any) -> Meshes:
    kind |= Kind.SPLIT | Kind.TENSOR
    takes = ("tp_loss",) if more.get("sequence") else ("tp_loss", "lengths")  # its positions are those of one length
    return Meshes(name, about, kind, Share.ALL, takes=takes, shape=_along(Axis.TENSOR), **more)


_VIEW = Launch(no_accelerate="accelerate takes gradient_as_bucket_view only in code")
_ZERO = Launch(no_accelerate="accelerate has no ZeroRedundancyOptimizer")
_SEQUENCE = Launch(no_accelerate="accelerate keeps activations whole between tensor-parallel layers")
_HOST = (("parameters and states on the host", {"strategy": "fsdp2-offload"}),)
STRATEGIES = (
    _replicas("ddp", "DistributedDataParallel", mesh_axes=("dp", "ddp")),
    _replicas("ddp-view", "... with gradient_as_bucket_view", share=Share.NO, launch=_VIEW, bucket_view=True),
    ReplicasWithShards(
        "zero1",
        "... with ZeroRedundancyOptimizer",
        launch=_ZERO,
        takes=("grad_sync", "lengths"),
        shape=_along(Axis.REPLICAS),
    ),
    FSDP1,
    _sharded("fsdp2", "fully_shard by layer", remedies=_HOST, aliases=("fsdp",), mesh_axes=("fsdp2",)),
    _sharded("fsdp2-nr", "... without resharding after forward", share=Share.NO, reshard_after_forward=False),
    _sharded("fsdp2-offload", "... with parameters and states on the host", offload=True),
    _sharded(
        "hsdp",
        "... over half of the ranks, in two replicas",
        aliases=("hybrid_shard",),
        mesh_axes=("hsdp",),
        shape=_hybrid,
    ),
    _sharded(
        "fsdp2-tp",
        "fully_shard over pairs of tensor-parallel ranks",
        kind=Kind.SHARDED | Kind.SPLIT,
        share=Share.NO,
        shape=_pairs,
    ),
    _split("tp", "parallelize_module"),
    _split("tp-sp", "... with sequence parallelism", Kind.ALL_SPLIT, launch=_SEQUENCE, sequence=True),
    Meshes(
        "pp",
        "torch.distributed.pipelining, 1F1B or GPipe",
        share=Share.NO,
        takes=("pipeline",),
        mesh_axes=("pp",),
        shape=_along(Axis.STAGES),
    ),
)
#: The method that a case's `mesh` describes.
MESH: Final = Meshes("mesh", "pp, dp, hsdp, fsdp2 and tp at once")
