"""What would make a case fit that runs out of memory: changes of its keys, each tried by a capture and a replay.

`CHANGES` is the table: what a change does to a case, when it applies, and what is different for whoever makes it.
`search` tries them one by one; where none that keeps the training as it is serves, it combines them: first all
together, then pairs, then one more at a time. Savings of single changes only say what is tried first.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final

from graph.case import Case
from graph.hardware.gpus import GPUS, gpu
from simulator.engine.result import Verdict
from strategies import registry
from strategies.strategy import Axis, Kind
from traces.errors import ConfigError, Interrupted

#: Seconds after which no further change is tried.
SECONDS: Final = 60.0
#: Pairs that are tried before a third change is added, and cards.
MOST_PAIRS: Final = 3
MOST_CARDS: Final = 3

#: What a change costs, from nothing to another machine: words for reports.
COSTS: Final = ("nothing", "time", "rounding", "method", "inputs", "hardware")
#: Costs of changes after which the same model learns the same from the same data, but for rounding.
KEPT: Final = frozenset({"nothing", "time", "rounding"})


@dataclass(frozen=True)
class Change:
    """A change of a case: `keys` gives what may be set, mildest first (None: back to the default); none if it does
    not apply. Of the changes of one `part` a combination has one. `cost` is one of `COSTS`."""

    part: str
    words: str
    cost: str
    keys: Callable[[Case], Iterator[Mapping[str, Any]]]


@dataclass(frozen=True)
class Judged:
    """The answer for a case: `needs` bytes of a GPU of `total` (None: not known)."""

    needs: int | None
    total: int
    verdict: Verdict


@dataclass(frozen=True)
class Remedy:
    """One or several changes, tried: `keys` of the case that differ, and what came out."""

    changes: tuple[Change, ...]
    keys: Mapping[str, Any]
    judged: Judged

    @property
    def fits(self) -> bool:
        """Whether it runs."""
        return self.judged.verdict != "oom"

    @property
    def options(self) -> str:
        """The options of the command line that say it."""
        return options_of(self.keys)

    @property
    def words(self) -> str:
        """What it changes."""
        return "; ".join(change.words for change in self.changes)

    @property
    def cost(self) -> str:
        """The dearest of what its changes cost."""
        return max((change.cost for change in self.changes), key=COSTS.index)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "change": dict(self.keys),
            "options": self.options,
            "needs": self.judged.needs,
            "gpu_bytes": self.judged.total,
            "verdict": self.judged.verdict,
            "costs": self.cost,
            "what": self.words,
        }


@dataclass(frozen=True)
class Remedies:
    """What was tried for a case that needs so many bytes, in that order; options of what was not for want of time."""

    needs: int
    tried: tuple[Remedy, ...] = ()
    untried: tuple[str, ...] = ()

    @property
    def fitting(self) -> tuple[Remedy, ...]:
        """Those that fit, without what one with fewer changes has: the mildest first, then by what they need."""
        fits = [one for one in self.tried if one.fits]
        found = (one for one in fits if not any(other.keys.items() < one.keys.items() for other in fits))
        return tuple(sorted(found, key=lambda one: (COSTS.index(one.cost), len(one.changes), one.judged.needs or 0)))

    @property
    def short(self) -> tuple[Remedy, ...]:
        """Those that do not fit, the smallest need first."""
        found = (one for one in self.tried if not one.fits)
        return tuple(sorted(found, key=lambda one: one.judged.needs or 1 << 62))

    def document(self) -> list[dict[str, Any]]:
        """As JSON: those that fit, then those that do not."""
        return [one.document() for one in (*self.fitting, *self.short)]


# --- the table -------------------------------------------------------------------------------------------------------


def _when(holds: Callable[[Case], bool], *keys: Mapping[str, Any]) -> Callable[[Case], Iterator[Mapping[str, Any]]]:
    """The same keys for every case for which it holds."""

    def found(case: Case) -> Iterator[Mapping[str, Any]]:
        return iter(keys if holds(case) else ())

    return found


def _expandable(case: Case) -> Iterator[Mapping[str, Any]]:
    if "expandable_segments" not in case.alloc_conf:
        yield {"alloc_conf": ",".join(filter(None, (case.alloc_conf, "expandable_segments:True")))}


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


CHANGES: Final = (
    Change("precision", "weights in 16 bits", "rounding", _half_weights),
    Change("quantisation", "frozen weights in 4 bits", "rounding", _when(_quantises, {"quant": "nf4"})),
    Change("quantisation", "frozen weights in 8 bits", "rounding", _when(_quantises, {"quant": "int8"})),
    Change("activations", "activations are computed again", "time", _when(
        lambda case: case.task == "train" and not case.checkpointing, {"checkpointing": "nonreentrant"})),
    Change("gpus", "a larger card", "hardware", lambda case: iter(())),
    Change("allocator", "another allocator setting", "nothing", _expandable),
    Change("optimizer", "the optimizer in one kernel", "nothing", _when(
        lambda case: _trains_all(case) and case.optimizer in ("adamw", "adamw-foreach"),
        {"optimizer": "adamw-fused"})),
    Change("optimizer", "8-bit optimizer states", "rounding", _when(
        lambda case: _trains_all(case) and case.optimizer.startswith("adamw") and case.optimizer != "adamw-8bit",
        {"optimizer": "adamw-8bit"}, {"optimizer": "paged-adamw-8bit"})),
    Change("batch", "smaller micro-batches", "time", _smaller_batch),
    Change("loss", "head and loss over parts of the sequence", "time", _when(
        lambda case: case.task == "train" and not case.loss, {"loss": "chunk8"})),
    Change("gradients", "the optimizer steps within backward", "nothing", _when(
        lambda case: _trains_all(case) and not case.step_in_backward, {"step_in_backward": True})),
    Change("activations", "activations on the host", "time", _when(
        lambda case: case.task == "train" and not case.offload, {"offload": "activations"})),
    Change("method", "only adapters are trained", "method", _adapters),
    Change("inputs", "shorter sequences", "inputs", _shorter),
    Change("precision", "mixed precision over 32-bit weights", "rounding", _mixed),
    Change("gpus", "more GPUs, each with a part", "hardware", _sharded),
)  # fmt: skip
LARGER: Final = next(change for change in CHANGES if change.words == "a larger card")


def cards(case: Case, needs: int) -> Iterator[Mapping[str, Any]]:
    """Cards on which a case may fit that needs so many bytes, the smallest first."""
    now = gpu(case.gpu)
    fitting = (card for card in GPUS.values() if card.total_bytes >= needs and card.has_bf16 >= now.has_bf16)
    own = {} if case.memory is None else {"memory": None}
    for card in sorted(fitting, key=lambda card: card.total_bytes)[:MOST_CARDS]:
        if card.name != now.name or own:
            yield {"gpu": card.name, **own}


# --- the search ------------------------------------------------------------------------------------------------------


def search(
    case: Case,
    needs: int,
    judge: Callable[[Case], Judged | None],
    *,
    seconds: float = SECONDS,
    trying: Callable[[str], object] | None = None,
) -> Remedies:
    """Try what may help a case that needs so many bytes of a GPU, for at most about `seconds`.

    `judge` captures and replays a case (None: it cannot run so); `trying(options)` is called before each. Raises
    Interrupted, with what was tried, on Ctrl-C.
    """
    found = _Search(case, needs, judge, time.monotonic() + seconds, trying or (lambda _: None))
    try:
        found.run()
    except KeyboardInterrupt:
        raise Interrupted(found.result()) from None
    return found.result()


@dataclass
class _Search:
    case: Case
    needs: int
    judge: Callable[[Case], Judged | None]
    deadline: float
    trying: Callable[[str], object]
    tried: list[Remedy] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)

    def result(self) -> Remedies:
        return Remedies(self.needs, tuple(self.tried), tuple(self.untried))

    def run(self) -> None:
        """Single changes, then combinations of those that keep the training as it is, then of all but hardware."""
        for change in CHANGES:
            self._single(change, cards(self.case, self.needs) if change is LARGER else change.keys(self.case))
        for words, keys in registry.find(self.case).remedies:
            self._single(Change("host", words, "time", _when(lambda _: True)), iter((keys,)))
        for costs in (KEPT, frozenset(COSTS) - {"hardware"}):
            if not any(one.fits and one.cost in costs for one in self.tried):
                self._combined([one for one in self.tried if one.cost in costs and len(one.changes) == 1])

    def _single(self, change: Change, values: Iterator[Mapping[str, Any]]) -> None:
        """Values of one change, up to the first that fits."""
        for keys in values:
            found = self._try((change,), keys)
            if found is not None and found.fits:
                return

    def _combined(self, singles: Sequence[Remedy]) -> None:
        """All together, and if that fits, as few as do."""
        best = self._best_of_parts(singles)
        if len(best) < 2:
            return
        together = self._together(best)
        if together is None or not together.fits or len(best) == 2:
            return
        for pair in list(combinations(best, 2))[:MOST_PAIRS]:
            found = self._together(pair)
            if found is not None and found.fits:
                return
        for count in range(3, len(best)):
            found = self._together(best[:count])
            if found is not None and found.fits:
                return

    def _best_of_parts(self, singles: Sequence[Remedy]) -> list[Remedy]:
        """Of each part what saves most, if it saves anything; the largest savings first."""
        best: dict[str, Remedy] = {}
        for one in sorted(singles, key=lambda one: one.judged.needs or self.needs):
            if (one.judged.needs or self.needs) < self.needs:
                best.setdefault(one.changes[0].part, one)
        return list(best.values())

    def _together(self, parts: Sequence[Remedy]) -> Remedy | None:
        """Several changes at once, without those that the others exclude."""
        keys: dict[str, Any] = {}
        changes: tuple[Change, ...] = ()
        for part in parts:
            more = {**keys, **part.keys}
            if self._changed(more) is not None:
                keys, changes = more, (*changes, *part.changes)
        known = next((one for one in self.tried if one.keys == keys), None)
        return known or (self._try(changes, keys) if len(changes) > 1 else None)

    def _try(self, changes: tuple[Change, ...], keys: Mapping[str, Any]) -> Remedy | None:
        case = self._changed(keys)
        if case is None:
            return None
        if time.monotonic() > self.deadline:
            self.untried.append(options_of(keys))
            return None
        self.trying(options_of(keys))
        judged = self.judge(case)
        if judged is None:
            return None
        self.tried.append(Remedy(changes, keys, judged))
        return self.tried[-1]

    def _changed(self, keys: Mapping[str, Any]) -> Case | None:
        """The case with other keys; None where they contradict it."""
        document = {**self.case.document(), **keys}
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
    return f"{option} {shlex.quote(str(value)) if value != '' else 'none'}"
