"""A distributed method: one record of all that the rest of the project asks of it.

A method is a subclass of `Strategy`, and the records of its variants. `strategies.registry` has all of them. The help
of the command line asks for them, so modules of records import no numpy.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from graph.case import Case
from graph.loop.method import Method
from strategies.parallel.native import Native
from traces.errors import ConfigError

if TYPE_CHECKING:
    from graph.model import StepGraph
    from strategies.timing.roofline import Speed
    from traces.model import RankEvents

Ranks = tuple[tuple[int, ...], ...]
Groups = Mapping[str, Ranks]
#: Captures a case under a method (None: one GPU).
Capture = Callable[[Case, Method | None], "StepGraph"]


#: GPUs of one machine.
MACHINE: Final = 8


class Kind(enum.Flag):
    """What a method does with parameters, where that decides what it goes with."""

    NONE = 0
    WHOLE = enum.auto()
    """Every rank holds all of them."""
    SHARDED = enum.auto()
    """They are distributed tensors, by `fully_shard`."""
    SPLIT = enum.auto()
    """Some are distributed tensors, by `parallelize_module`."""
    ALL_SPLIT = enum.auto()
    """All of them are, norms too."""
    FLAT = enum.auto()
    """They are flattened into one tensor of one type."""
    TENSOR = enum.auto()
    """Ranks of tensor parallelism share their samples."""
    OWN_LOSS = enum.auto()
    """Loss and recomputation are the method's own."""
    HOST_STATES = enum.auto()
    """The optimizer's states alone may be kept on the host."""
    HOST_PARAMETERS = enum.auto()
    """Shards of parameters may be kept on the host."""


class Axis(enum.StrEnum):
    """Dimensions of a mesh of ranks, outermost first, by their names in a case."""

    STAGES = "pp"
    REPLICAS = "dp"
    SHARDS = "fsdp2"
    TENSOR = "tp"


class Share(enum.Enum):
    """How `select` tries a method: not at all, with samples for each rank, or with samples that all ranks share."""

    NO = enum.auto()
    EACH = enum.auto()
    ALL = enum.auto()


@dataclass(frozen=True)
class Launch:
    """How others' launchers start a method. Empty texts: they can."""

    distributed_type: str = "MULTI_GPU"
    """accelerate's DistributedType."""
    no_accelerate: str = ""
    """Why accelerate cannot start it as simulated."""
    no_script: str = ""
    """Why no training script is written."""


FSDP = Launch(distributed_type="FSDP")


@dataclass(frozen=True)
class Lowered:
    """What a strategy makes of a case: the events of every rank, the groups that meet, and the graph they come from."""

    ranks: tuple[RankEvents, ...]
    groups: Groups
    graph: StepGraph


@dataclass(frozen=True)
class Strategy:
    """A method by its name in a case. The defaults are those of ranks that all do the same."""

    name: str
    help: str
    kind: Kind = Kind.NONE
    share: Share = Share.EACH
    launch: Launch = Launch()
    takes: tuple[str, ...] = ()
    """Scopes of `graph.case` whose keys mean something for it, such as "pipeline"."""
    aliases: tuple[str, ...] = ()
    """Other names that a case may have for it."""
    usual: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a case that have other defaults under it."""
    mesh_axes: tuple[str, ...] = ()
    """Axes of a mesh that bring what it takes."""
    own_mesh: bool = False
    """Whether the case's `mesh` has axes of the method's own."""
    clones_dropout: bool = False
    """Whether a dropout of probability 0 gives a copy of its input, as under Colossal-AI."""
    half_weights: bool = False
    """Whether its mixed precision has weights in 16 bits beside fp32 copies of its own, where others have autocast."""
    remedies: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """What may make it fit: words, and the keys of the case."""
    steps_alike: bool = False
    """Whether kinds of rank differ in what they hold for good alone, so that any micro-batch shows which needs most."""

    def method(self, case: Case, rank: int) -> Native:
        """How rank `rank` runs. Raises ConfigError or CaptureError for a case that it cannot run."""
        raise NotImplementedError

    def distinct(self, case: Case) -> Ranks:
        """Ranks that do the same, group by group."""
        return (tuple(range(case.world)),)

    def groups(self, case: Case) -> Groups:
        """The groups of ranks that meet in collectives, by the names that torch gives them."""
        return {"default_pg": (tuple(range(case.world)),)}

    def sensible(self, world: int) -> bool:
        """Whether `select` should try it on so many GPUs: tensor parallelism stays inside a machine."""
        return world <= MACHINE or Kind.TENSOR not in self.kind

    def axes(self, case: Case) -> dict[str, int]:
        """The ranks as a mesh: sizes of pp, dp (replicas), fsdp2 (shards) and tp, outermost first; empty: no mesh."""
        return {}

    def heaviest(self, case: Case) -> int | None:
        """The rank that needs most, where that is known beforehand and the others differ from it in sizes alone."""
        return None

    def micro_batches(self, case: Case) -> int:
        """How many micro-batches all ranks together take at a time."""
        return 1 if Kind.TENSOR in self.kinds(case) else case.world

    def kinds(self, case: Case) -> Kind:
        """What it does with parameters in this case."""
        return self.kind

    def title(self, case: Case) -> str:
        """What an error calls it."""
        return self.name

    def refused(self, case: Case) -> Iterator[tuple[str, str]]:
        """(key, reason) of what it cannot have, beyond what follows from its kinds."""
        return iter(())

    def on_host(self, case: Case) -> bool:
        """Whether shards of parameters, with their gradients and states, are kept on the host."""
        return case.offload == "parameters"

    def keeps_works(self, case: Case) -> bool:
        """Whether works of its collectives keep tensors until NCCL's watchdog looks, which a clock decides."""
        return False

    def lower(self, case: Case, capture: Capture, speed: Speed | None, rank: int | None = None) -> Lowered:
        """The events of every rank, those that differ captured one by one; `rank`: that one, which stands for all.

        Raises ConfigError for a case that it cannot run.
        """
        from strategies.rank_events import events_of
        from traces.model import RankEvents

        everyone = tuple(range(case.world))
        members = self.distinct(case) if rank is None else (everyone,)
        entries = []
        graph: StepGraph | None = None
        for ranks in members:
            method = self.method(case, ranks[0] if rank is None else rank)
            graph = capture(method.captured_case(), method)
            events = events_of(graph, speed, late=case.deferred == "late", on_host=self.on_host(case))
            entries.append(RankEvents(tuple(ranks), events))
        if graph is None:
            raise ConfigError(f"key 'world': strategy {self.name!r} has no rank")
        return Lowered(tuple(entries), self.groups(case), graph)
