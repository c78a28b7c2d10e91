"""The one table of changes that may make a case fit: what each does to the case, when it applies, what it costs.

`CHANGES` is the table. The values of a part come the cheapest first, of those that cost alike in other ways than time.
`simulator.fit.search` combines them, at most one of a part.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from graph.case import KEYS, Case
from graph.hardware.gpus import GPUS, gpu
from graph.keys import nearest
from strategies import registry
from strategies.strategy import Axis, Kind
from traces.errors import ConfigError

#: Larger cards that are tried.
MOST_CARDS: Final = 3

#: What a change costs, from nothing to another machine: words for reports.
COSTS: Final = ("nothing", "time", "rounding", "method", "inputs", "hardware")
#: How much else a run is after changes of such costs; 0: the same results.
LEVELS: Final = {"nothing": 0, "time": 0, "rounding": 1, "method": 2, "inputs": 3, "hardware": 4}
#: Parts of which each saves in proportion to what a micro-batch has of activations.
PROPORTIONAL: Final = frozenset({"loss", "activations", "attention"})
#: Parts that may change what loading takes, which is weights.
LOADING: Final = frozenset({"precision", "quantisation", "method", "gpus", "host"})


@dataclass(frozen=True)
class Change:
    """A change of a case: `keys` gives what may be set, mildest first (None: back to the default); none if it does
    not apply. Of the changes of one `part` a combination has one. `cost` is one of `COSTS`."""

    part: str
    words: str
    cost: str
    keys: Callable[[Any], Iterator[Mapping[str, Any]]]
    alone: bool = False
    """Whether it is in no combination."""

    @property
    def loads(self) -> bool:
        """Whether less may be loaded with it."""
        return self.part in LOADING

    @property
    def level(self) -> int:
        """How much else a run is with it."""
        return LEVELS[self.cost]

    def applies(self, case: object, keys: Mapping[str, Any]) -> bool:
        """Whether it may set these keys in a case; one that is `alone` may always."""
        return self.alone or any(dict(one) == dict(keys) for one in self.keys(case))


# --- the table -------------------------------------------------------------------------------------------------------


def _when(holds: Callable[[Case], bool], *keys: Mapping[str, Any]) -> Callable[[Case], Iterator[Mapping[str, Any]]]:
    """The same keys for every case for which it holds."""

    def found(case: Case) -> Iterator[Mapping[str, Any]]:
        return iter(keys if holds(case) else ())

    return found


def _smaller_batch(case: Case) -> Iterator[Mapping[str, Any]]:
    """Halves down to one sample; in training with as many more micro-batches."""
    batch = case.batch
    while batch > 1 and batch % 2 == 0:
        batch //= 2
        more = {"accum": case.accum * (case.batch // batch)} if case.task == "train" else {}
        yield {"batch": batch, **more}


def _half_weights(case: Case) -> Iterator[Mapping[str, Any]]:
    if case.dtype == "fp32" and not case.quant:
        yield {"dtype": _half(case), **({"autocast": ""} if case.autocast else {})}


def _mixed(case: Case) -> Iterator[Mapping[str, Any]]:
    if case.dtype == "fp32" and not case.autocast and case.task == "train":
        yield {"autocast": _half(case)}


def _half(case: Case) -> str:
    return "bf16" if gpu(case.gpu).has_bf16 else "fp16"


def _adapters(case: Case) -> Iterator[Mapping[str, Any]]:
    if case.task == "train" and not case.lora:
        yield from ({"lora": 16}, {"lora": 16, "quant": "nf4"})


def _shorter(case: Case) -> Iterator[Mapping[str, Any]]:
    name = "seq" if case.task == "train" else "prompt"
    yield from ({name: getattr(case, name) // part} for part in (2, 4) if getattr(case, name) >= 32 * part)


def _sharded(case: Case) -> Iterator[Mapping[str, Any]]:
    """Parameters in parts on as many GPUs, or on more of them where they are in parts already."""
    if case.task != "train" or case.quant or case.mesh:
        return
    if Kind.WHOLE in registry.find(case).kind:
        worlds = sorted({2, 4, 8} | ({case.world} - {1}))
        yield from ({"strategy": Axis.SHARDS.value, "world": world} for world in worlds if world >= case.world)
    else:
        yield from ({"world": case.world * more} for more in (2, 4))


def _quantises(case: Case) -> bool:
    return not case.quant and bool(case.lora or case.task == "inference")


def _trains_all(case: Case) -> bool:
    """Whether gradients and optimizer states are those of all weights."""
    return case.task == "train" and not case.lora


def _whole_activations(case: Case) -> bool:
    return case.task == "train" and not case.checkpointing


def _some_layers(every: int) -> Change:
    """Checkpointing of each `every`-th layer."""
    return Change("activations", f"activations of every {_ORDINALS[every]} layer are computed again", "time", _when(
        _whole_activations, {"checkpointing": "nonreentrant", "every": every}))  # fmt: skip


def _selective(words: str, *kept: str) -> Change:
    return Change("activations", f"activations but {words} are computed again", "time", _when(
        _whole_activations, {"checkpointing": "selective", "save": list(kept)}))  # fmt: skip


def _setting(text: str) -> Callable[[Case], Iterator[Mapping[str, Any]]]:
    """An allocator setting beside the case's, where it says nothing of it, nor of expandable segments."""

    def found(case: Case) -> Iterator[Mapping[str, Any]]:
        if "expandable_segments" not in case.alloc_conf and text.partition(":")[0] not in case.alloc_conf:
            yield {"alloc_conf": ",".join(filter(None, (case.alloc_conf, text)))}

    return found


_ORDINALS: Final = {2: "second", 4: "fourth"}
CHANGES: Final = (
    Change("allocator", "another allocator setting", "nothing", _setting("max_split_size_mb:128"), alone=True),
    Change("allocator", "another allocator setting", "nothing", _setting("garbage_collection_threshold:0.8"),
           alone=True),
    Change("allocator", "another allocator setting", "nothing", _setting("expandable_segments:True")),
    Change("optimizer", "the optimizer in one kernel", "nothing", _when(
        lambda case: _trains_all(case) and case.optimizer in ("adamw", "adamw-foreach"),
        {"optimizer": "adamw-fused"})),
    Change("gradients", "the optimizer steps within backward", "nothing", _when(
        lambda case: _trains_all(case) and not case.step_in_backward, {"step_in_backward": True})),
    Change("loss", "head and loss over parts of the sequence", "time", _when(
        lambda case: case.task == "train" and not case.loss, {"loss": "chunk8"}, {"loss": "chunk8-ckpt"})),
    _some_layers(4),
    _selective("outputs of matrix products and of attention", "matmul", "attn"),
    _some_layers(2),
    _selective("outputs of attention", "attn"),
    Change("activations", "activations are computed again", "time", _when(
        _whole_activations, {"checkpointing": "nonreentrant"})),
    Change("activations", "activations are computed again, from inputs of layers on the host", "time", _when(
        lambda case: _whole_activations(case) and not case.offload,
        {"checkpointing": "nonreentrant", "offload": "checkpoints"})),
    Change("activations", "activations on the host", "time", _when(
        lambda case: case.task == "train" and not case.offload,
        {"offload": "activations-pin"}, {"offload": "activations"})),
    Change("batch", "smaller micro-batches", "time", _smaller_batch),
    Change("attention", "fused attention", "rounding", _when(lambda case: case.attn == "eager", {"attn": "sdpa"})),
    Change("precision", "mixed precision over 32-bit weights", "rounding", _mixed),
    Change("precision", "weights in 16 bits", "rounding", _half_weights),
    Change("quantisation", "frozen weights in 8 bits", "rounding", _when(_quantises, {"quant": "int8"})),
    Change("quantisation", "frozen weights in 4 bits", "rounding", _when(_quantises, {"quant": "nf4"})),
    Change("optimizer", "8-bit optimizer states", "rounding", _when(
        lambda case: _trains_all(case) and case.optimizer.startswith("adamw") and case.optimizer != "adamw-8bit",
        {"optimizer": "adamw-8bit"}, {"optimizer": "paged-adamw-8bit"})),
    Change("optimizer", "factored optimizer states", "method", _when(
        lambda case: _trains_all(case) and "adamw" in case.optimizer, {"optimizer": "adafactor"})),
    Change("method", "only adapters are trained", "method", _adapters),
    Change("inputs", "shorter sequences", "inputs", _shorter),
    Change("gpus", "a larger card", "hardware", lambda case: iter(()), alone=True),
    Change("gpus", "more GPUs, each with a part", "hardware", _sharded, alone=True),
)  # fmt: skip
_LARGER: Final = next(change for change in CHANGES if change.words == "a larger card")
_MORE: Final = CHANGES[-1]
#: Methods that are tried where so many GPUs are there.
_METHODS: Final = ("zero1", "fsdp2", "fsdp2-offload")


def options_for(
    case: Case, needs: int, keep: Collection[str] = (), gpus: int | None = None
) -> Iterator[tuple[Change, Iterator[Mapping[str, Any]]]]:
    """The changes that apply to a case that needs so many bytes, each with what it may set.

    None sets a key of `keep`. With `gpus` that many GPUs are there: to use them changes no hardware.
    """
    own = [Change("host", words, "time", _when(lambda _: True, keys)) for words, keys in registry.find(case).remedies]
    for change in (*CHANGES, *own):
        values = change.keys(case)
        if change is _LARGER:
            values = cards(case, needs)
        elif change is _MORE and gpus is not None:
            change = replace(change, cost="time", alone=False, keys=partial(_on, gpus=gpus))
            values = change.keys(case)
        yield change, (keys for keys in values if keep_all(keep, keys))


def check_keys(keep: Collection[str]) -> None:
    """ConfigError for a name that is no key of a case."""
    for name in keep:
        if name not in KEYS:
            raise ConfigError(f"keep: there is no key {name!r}; the nearest is '{nearest(name, KEYS)}'")


def keep_all(keep: Collection[str], keys: Mapping[str, Any]) -> bool:
    """Whether none of the keys that are set is to be kept."""
    return keys.keys().isdisjoint(keep)


def _on(case: Case, gpus: int) -> Iterator[Mapping[str, Any]]:
    """Methods that share a case among so many GPUs; more of them for one that is shared already."""
    if case.task != "train" or case.quant or case.mesh or gpus <= case.world:
        return
    if Kind.WHOLE in registry.find(case).kind:
        yield from ({"strategy": name, "world": gpus} for name in _METHODS)
    else:
        yield {"world": gpus}


def cards(case: Case, needs: int) -> Iterator[Mapping[str, Any]]:
    """Cards on which a case may fit that needs so many bytes, the smallest first."""
    now = gpu(case.gpu)
    fitting = (card for card in GPUS.values() if card.total_bytes >= needs and card.has_bf16 >= now.has_bf16)
    own = {} if case.memory is None else {"memory": None}
    for card in sorted(fitting, key=lambda card: card.total_bytes)[:MOST_CARDS]:
        if card.name != now.name or own:
            yield {"gpu": card.name, **own}


def left_of(case: Case, change: Change, keys: Mapping[str, Any]) -> float:
    """The share that stays of what a change saves, beside another one that sets these keys."""
    share = 0.5 if "dtype" in keys else 1.0
    for name in {"batch", "seq", "prompt"} & keys.keys() if change.part in PROPORTIONAL else ():
        share *= keys[name] / getattr(case, name)
    return share


def changed(case: Case, keys: Mapping[str, Any]) -> Case | None:
    """The case with other keys; None where they contradict it."""
    document = {**case.document(), **keys}
    try:
        return Case.of({name: value for name, value in document.items() if value is not None})
    except ConfigError:
        return None


def options_of(keys: Mapping[str, Any]) -> str:
    """Keys of a case as options of the command line; a key that goes back to its default is said in words."""
    said = [_option(name, value) for name, value in keys.items() if value is not None]
    return " ".join(said) + "".join(f", without --{name}" for name, value in keys.items() if value is None)


def _option(name: str, value: object) -> str:
    option = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return option if value else option.replace("--", "--no-", 1)
    text = ",".join(value) if isinstance(value, list) else str(value)
    return f"{option} {shlex.quote(text) if text else 'none'}"
