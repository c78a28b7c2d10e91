"""What `select` tries: every method and split of the GPUs, the plain and current ones first; or those that were named.

The order is that of preference: of methods that are equally fast, as far as a model of time can say, the first is the
one to take. It is the order of search as well, so that an interrupted search has the likely answers.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from graph import methods
from graph.case import meaningful
from simulator.estimator.devices import device
from strategies import registry
from strategies.gemini.record import STRATEGIES
from strategies.parallel.mesh import Mesh
from strategies.parallel.meshes import AXES
from strategies.strategy import MACHINE, Axis, Kind, Share
from traces.errors import ConfigError

if TYPE_CHECKING:
    from simulator.selector.select import Asked

#: Methods in the order of preference: those that change least of a plain loop, and are maintained, first; FSDP1 is
#: deprecated in favour of FSDP2. Methods that are not named here follow, then meshes, then pipelines.
PREFERRED: Final = (
    *("single", "ddp", "fsdp2", "zero1", "hsdp", "tp", "tp-sp", "deepspeed-1", "deepspeed-2", "deepspeed-3"),
    *("fsdp1", "fsdp2-offload"),
)
#: Methods that are always tried: those that people expect to see side by side.
LIKELY: Final = frozenset({"single", "ddp", "fsdp2", "zero1", "hsdp", "tp"})
#: Words for several methods at once, beside the names of methods: how the names begin; meshes and pipelines by axes.
FAMILIES: Final[Mapping[str, tuple[str, ...]]] = {
    "zero": ("zero", "deepspeed"),
    "deepspeed": ("deepspeed",),
    "megatron": ("tp-megatron",),
    "meshes": (),
    "pipelines": (),
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method on a split of the GPUs: what it is called, and the keys of the case that say it.

    `shares` are the ranks that work on different samples.
    """

    name: str
    keys: Mapping[str, Any]
    shares: int

    def size(self, axis: str) -> int:
        """How many ranks an axis has: `pp` stages, `tp` ranks that split layers; 1 where there are none."""
        mesh = self.keys.get("mesh") or {}
        strategy = str(self.keys.get("strategy", ""))
        alone = strategy == axis or (axis == Axis.TENSOR and strategy.startswith(f"{axis}-"))
        return int(mesh.get(axis, self.keys.get("world", 1) if alone and not mesh else 1))


def candidates(asked: Asked) -> tuple[Candidate, ...]:
    """What is to be tried, in the order of preference; the methods of LLMem for its policy.

    Keys of the case that mean nothing for a method are left out of its own. Raises ConfigError where `asked` names
    methods that there are not on so many GPUs, or leaves none.
    """
    keys = _shared_keys(asked)
    found = _llmem_candidates(keys, asked.world) if asked.policy == "llmem" else _all(keys, asked.world)
    if asked.methods:
        found = _chosen(asked.methods, found, keys, asked.world)
    left_out = {one.name for word in asked.exclude for one in _without(word, found, asked.world)}
    kept = [one for one in found if one.name not in left_out]
    if not kept:
        raise ConfigError("no method is left to be tried: exclude fewer")
    return tuple(replace(one, keys=meaningful(one.keys)) for one in kept)


def _shared_keys(asked: Asked) -> dict[str, Any]:
    """The keys of the case that all methods have, with the memory of each rank where the GPUs differ."""
    keys = {key: value for key, value in asked.keys.items() if key not in ("batch", "strategy", "world", "mesh")}
    keys["gpu"] = asked.gpus[0]
    if len(set(asked.gpus)) > 1:
        keys["memory"] = [device(name).total_bytes for name in asked.gpus]
    return keys


def _all(keys: Mapping[str, Any], world: int) -> list[Candidate]:
    if world == 1:
        return [Candidate("single", keys, 1)]
    names = [one.name for one in registry.known().values() if one.share is not Share.NO and one.sensible(world)]
    found = [_plain(name, keys, world) for name in (*names, Axis.STAGES.value)]
    found += [_mesh(axes, keys, world) for axes in meshes(world)]
    return sorted(found, key=lambda one: preference(one.name, one.keys))


def preference(name: str, keys: Mapping[str, Any]) -> tuple[bool, int, int]:
    """How willingly a method is taken, of those that are equally fast: least first, equal where nothing tells them
    apart. Pipelines come last, meshes before them, by their axes.
    """
    mesh = keys.get("mesh") or {}
    known = PREFERRED.index(name) if name in PREFERRED else len(PREFERRED)
    return (keys.get("strategy") == Axis.STAGES or Axis.STAGES in mesh, known + bool(mesh), len(mesh))


def _plain(name: str, keys: Mapping[str, Any], world: int) -> Candidate:
    """A method by itself; a pipeline has as many micro-batches as stages at least."""
    one = registry.named(name)
    own = {**keys, "strategy": name, "world": world}
    if one.half_weights and keys.get("autocast"):
        own |= {"dtype": keys["autocast"], "autocast": ""}
    if name == Axis.STAGES:
        own |= _piped(keys, world)
    together = one.share is Share.ALL or Kind.TENSOR in one.kind or name == Axis.STAGES
    return Candidate(name, own, 1 if together else world)


def _piped(keys: Mapping[str, Any], stages: int) -> dict[str, Any]:
    """Keys of a pipeline: nobody looks at the logits of all micro-batches."""
    return {"return_outputs": False, "microbatches": max(int(keys.get("microbatches", 0)), stages)}


def _mesh(axes: Mapping[str, int], keys: Mapping[str, Any], world: int) -> Candidate:
    more = _piped(keys, axes["pp"]) if axes.get("pp", 1) > 1 else {}
    shares = math.prod(size for axis, size in axes.items() if axis not in ("pp", "tp"))
    return Candidate(_title(axes), {**keys, "mesh": dict(axes), "world": world, **more}, shares)


def _title(axes: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in axes.items())


def meshes(world: int) -> list[dict[str, int]]:
    """Every split of GPUs over pipeline stages, replicas or shards, and tensor parallelism, two or three of them."""
    found: list[dict[str, int]] = []
    for stages in _divisors(world):
        for tensor in _divisors(world // stages):
            data = world // stages // tensor
            inner = {"tp": tensor} if tensor > 1 else {}
            outer = {"pp": stages} if stages > 1 else {}
            if tensor > MACHINE or len(outer) + len(inner) + (data > 1) < 2:
                continue
            kinds = (Axis.REPLICAS.value, Axis.SHARDS.value) if data > 1 else ("",)
            found += [{**outer, **({kind: data} if kind else {}), **inner} for kind in kinds]
    return found


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _llmem_candidates(keys: Mapping[str, Any], world: int) -> list[Candidate]:
    """Conventional data parallelism, ADP, TP and DP+TP on Gemini, in LLMem's own setting."""
    (gemini,) = STRATEGIES
    own = {**keys, **gemini.usual, "strategy": gemini.name, "world": world}
    meshes = [(f"CDP-{world}", {"cdp": world}, world), (f"{world}DP", {"dp": world}, world)]
    if world > 1:
        meshes.append((f"{world}TP", {"tp": world}, 1))
    for tensor in range(2, world):
        if world % tensor == 0:
            data = world // tensor
            meshes.append((f"{data}DP+{tensor}TP", {"dp": data, "tp": tensor}, data))
    return [Candidate(name, {**own, "mesh": mesh}, shares) for name, mesh, shares in meshes]


# --- methods by name ----------------------------------------------------------------------------------------------


def split_words(text: str, world: int) -> tuple[str, ...]:
    """The names in a list with commas, such as `ddp,fsdp2=4,tp=2,pp`: sizes of axes that follow each other are a mesh,
    which ends where it has all GPUs.
    """
    found: list[str] = []
    axes: list[str] = []
    for part in (*(one.strip() for one in text.split(",")), ""):
        whole = math.prod(int(size) for _, _, size in (one.partition("=") for one in axes) if size.isdecimal())
        if axes and ("=" not in part or whole == world):
            found.append(",".join(axes))
            axes = []
        if "=" in part:
            axes.append(part)
        elif part:
            found.append(part)
    return tuple(found)


def _chosen(words: Sequence[str], known: Sequence[Candidate], keys: Mapping[str, Any], world: int) -> list[Candidate]:
    """The candidates that words name, in the order of preference; then those that are not tried by themselves."""
    found = {one.name: one for word in words for one in _named(word, known, keys, world)}
    others = found.keys() - {one.name for one in known}
    return [*(one for one in known if one.name in found), *(one for name, one in found.items() if name in others)]


def _named(word: str, known: Sequence[Candidate], keys: Mapping[str, Any], world: int) -> Sequence[Candidate]:
    """The candidates that a word names: a mesh, a method, or a family. Raises ConfigError where there is none."""
    if "=" in word:
        mesh = Mesh.parse(word, AXES)
        mesh.check_world(world)
        return (_mesh(dict(mesh.axes), keys, world),)
    name = methods.spellings().get(word, word)
    listed = [one for one in known if one.name == name] or _family(word, known)
    if listed:
        return listed
    other = registry.known().get(name)
    if other is None or other.own_mesh or (name == methods.ONE_GPU) != (world == 1):
        raise ConfigError(_unknown(word, known))
    return (_plain(name, keys, world),)


def _family(word: str, known: Sequence[Candidate]) -> list[Candidate]:
    if word == "meshes":
        return [one for one in known if one.keys.get("mesh")]
    if word == "pipelines":
        return [one for one in known if one.size(Axis.STAGES) > 1]
    return [one for one in known if one.name.startswith(FAMILIES.get(word) or ("=",))]


def _without(word: str, known: Sequence[Candidate], world: int) -> list[Candidate]:
    """The candidates that a word leaves out: an axis leaves out the meshes that have it, too.

    One that is not tried anyway leaves out nothing. Raises ConfigError for a word that means nothing.
    """
    if word in [axis.value for axis in Axis]:
        return [one for one in known if one.name == word or word in (one.keys.get("mesh") or {})]
    names = {one.name for one in _named(word, known, {}, world)}
    return [one for one in known if one.name in names]


def _unknown(word: str, known: Sequence[Candidate]) -> str:
    """What to say of a name that is none, with the nearest one."""
    names = [*dict.fromkeys([*(one.name for one in known), *FAMILIES])]
    near = difflib.get_close_matches(word[:60], names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    plain = [name for name in names if "=" not in name]
    return f"method {word[:60]!r} is not one of these GPUs'; {hint}there are {', '.join(plain)}, and meshes"
