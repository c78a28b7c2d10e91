"""Two runs side by side: figures, phases, and which categories, modules and tensors grew between them.

Either side is a trace or a torch snapshot (replayed), a result document (`run --json`, `estimate --json`), or the
answer of an estimate (a line of a sweep): so a prediction is compared with a measurement like any two runs.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from simulator.engine.ranks import format_ranks
from simulator.engine.result import VERDICTS, Result, Verdict, worst_verdict
from simulator.reports.verdict import summary
from simulator.snapshots.reader import read
from traces.errors import ConfigError, TraceError
from traces.files import open_maybe_gzip, read_stream
from traces.model import Op, RankEvents, Trace
from traces.text import one_line, path_text, quoted
from traces.units import format_bytes, parse_size

if TYPE_CHECKING:
    from simulator.fit.plans import Plans

#: Figures of a rank that are compared, in order.
FIGURES: Final = (
    "peak_allocated",
    "peak_reserved",
    "peak_requested",
    "device_total",
    "num_alloc_retries",
    "num_ooms",
)
#: Figures whose growth is a regression.
WATCHED: Final = ("peak_allocated", "peak_reserved")
#: Figures that are counts, not bytes.
COUNTS: Final = frozenset({"num_alloc_retries", "num_ooms"})
#: Parts of module paths that are wrappers around a module.
WRAPPERS: Final = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
#: Bytes at the head of a file in which a trace says that it is one.
_HEAD: Final = 1 << 16

Kind = Literal["trace", "result", "answer"]
Bytes = Mapping[str, int]


@dataclass(frozen=True)
class Figures:
    """What is known of one rank (or of equal ones): `values` by the names of `FIGURES`, None where unknown.

    `phases` are peak and remainder of allocated bytes by phase, `phase_names` their names where steps are known;
    `categories`, `modules` and `tensors` are bytes alive
    at the peak. `whole` is False where only the largest tensors are known, and no modules.
    """

    ranks: tuple[int, ...]
    verdict: Verdict
    values: Mapping[str, int | None]
    phases: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    phase_names: Mapping[str, str] = field(default_factory=dict)
    categories: Bytes = field(default_factory=dict)
    modules: Bytes = field(default_factory=dict)
    tensors: Bytes = field(default_factory=dict)
    whole: bool = True

    @property
    def outside(self) -> int | None:
        """Bytes outside the allocator that the device's total counts; None where it is not known."""
        total, reserved = self.values.get("device_total"), self.values.get("peak_reserved")
        return None if total is None or reserved is None else total - reserved


@dataclass(frozen=True)
class Side:
    """One of two runs: its name, what it was read from, and the figures of its ranks, worst first.

    `summary` is what the verdict rests on, `needs` what it takes or would take of a GPU, where that is known;
    `remedies` what was tried where it does not fit, `hint` what else may be; `result` the replay, where it was made
    with its picture.
    """

    name: str
    kind: Kind
    ranks: tuple[Figures, ...]
    notes: tuple[str, ...] = ()
    result: Result | None = field(default=None, repr=False)
    summary: str = ""
    needs: int | None = None
    remedies: Plans | None = None
    hint: str = ""

    @property
    def verdict(self) -> Verdict:
        """That of the rank that is worst off."""
        return worst_verdict(rank.verdict for rank in self.ranks)

    def most(self, name: str) -> int | None:
        """The largest value of a figure over all ranks; None where none of them has it."""
        return max((value for rank in self.ranks if (value := rank.values.get(name)) is not None), default=None)


@dataclass(frozen=True)
class Change:
    """A figure on both sides; None where a side does not have it."""

    name: str
    before: int | None
    after: int | None

    @property
    def difference(self) -> int | None:
        """How much it grew; None where one side does not have it."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def share(self) -> float | None:
        """The growth as a part of what was before; None where that is not known, or 0."""
        return None if self.difference is None or not self.before else self.difference / self.before

    def exceeds(self, limit: Limit) -> bool:
        """Whether it grew by more than `limit`."""
        if self.difference is None or self.difference <= 0:
            return False
        return self.difference > limit.of(self.before or 0)


@dataclass(frozen=True, slots=True)
class Limit:
    """How much growth is allowed: a part of what was before, or bytes."""

    share: float | None = None
    bytes: int = 0

    def of(self, before: int) -> float:
        """The bytes that are allowed on top of `before`."""
        return self.bytes if self.share is None else self.share * before

    @classmethod
    def parse(cls, text: str) -> Limit:
        """`2%` or a size such as `100MiB`; ConfigError for anything else."""
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
        if found:
            return cls(share=float(found[1]) / 100)
        try:
            if not text.strip().isdigit():  # a bare number could be meant as either
                return cls(bytes=parse_size(text))
        except ConfigError:
            pass
        raise ConfigError(f"--fail-over {quoted(text)}: write a share or a size, such as 2% or 100MiB")

    def __str__(self) -> str:
        return format_bytes(self.bytes) if self.share is None else f"{100 * self.share:g}%"


@dataclass(frozen=True)
class Pair:
    """The same rank on both sides, and everything that both know of it."""

    before: Figures
    after: Figures

    @property
    def one_sided(self) -> bool:
        """Whether one side alone counts what lies outside the allocator: its totals are none of the other's then."""
        return (
            self.before.outside is not None
            and self.after.outside is not None
            and ((self.before.outside > 0) != (self.after.outside > 0))
        )

    def figures(self) -> list[Change]:
        """The figures that a side has; the device's total where both sides count the same in it."""
        names = [name for name in FIGURES if name != "device_total" or not self.one_sided]
        found = (Change(name, self.before.values.get(name), self.after.values.get(name)) for name in names)
        return [one for one in found if one.before is not None or one.after is not None]

    def phases(self) -> list[tuple[str, Change, Change]]:
        """Peak and remainder of each phase that both have, in the order of the first side."""
        both = [name for name in self.before.phases if name in self.after.phases]
        found = []
        for name in both:
            one, two = self.before.phases[name], self.after.phases[name]
            found.append((name, Change("peak", one[0], two[0]), Change("left", one[1], two[1])))
        return found

    def phase_name(self, key: str) -> str:
        """A phase in words: with the step where both sides agree on it."""
        names = {side.phase_names[key] for side in (self.before, self.after) if key in side.phase_names}
        return names.pop() if len(names) == 1 else phase_words(key)

    def changes(self, what: Literal["categories", "modules", "tensors"]) -> list[Change]:
        """What is alive at the peak, by category, module or tensor; the largest changes first, none of 0.

        Nothing where a side does not say it. Where a side knows its largest tensors alone, those are compared that both
        sides name.
        """
        one, two = getattr(self.before, what), getattr(self.after, what)
        whole = self.before.whole and self.after.whole
        if (
            not one
            or not two
            or set(one) == {"unknown"}
            or set(two) == {"unknown"}
            or (what == "modules" and not whole)
        ):
            return []
        names = [*one, *two] if whole or what == "categories" else [name for name in one if name in two]
        found = [Change(name, one.get(name, 0), two.get(name, 0)) for name in dict.fromkeys(names)]
        return sorted((c for c in found if c.difference), key=lambda c: (-abs(c.difference or 0), c.name))


@dataclass(frozen=True)
class Comparison:
    """Two runs, rank by rank; `limit` is the growth above which the second one is a regression (None: none is)."""

    before: Side
    after: Side
    pairs: tuple[Pair, ...]
    limit: Limit | None = None

    def regressions(self) -> list[str]:
        """What grew more than allowed, one sentence each, the largest growth first."""
        if self.limit is None:
            return []
        found = []
        for pair in self.pairs:
            rank = f"rank {format_ranks(pair.after.ranks)}: " if len(self.pairs) > 1 else ""
            for change in pair.figures():
                if change.name in WATCHED and change.exceeds(self.limit):
                    sizes = f"{format_bytes(change.before or 0)} to {format_bytes(change.after or 0)}"
                    words = f"{rank}{change.name.replace('_', ' ')} grew by {growth(change)} ({sizes})"
                    found.append((change.share or 0.0, words))
        told = [words for _, words in sorted(found, key=lambda one: -one[0])]
        if self.before.verdict != "oom" and self.after.verdict == "oom":
            told.insert(0, "it runs out of memory, which it did not")
        return told


def phase_words(key: str) -> str:
    """A phase's key in words: `fwd_first` is the first forward, `bwd.1` backward 1."""
    found = re.fullmatch(r"(fwd|bwd|step|pipe)(?:_(first|last)|\.(\d+))", key)
    if found is None:
        return key
    name = {"fwd": "forward", "bwd": "backward", "step": "optimizer", "pipe": "pipe"}[found[1]]
    return f"{found[2]} {name}" if found[2] else f"{name} {found[3]}"


def growth(change: Change) -> str:
    """The change in percent with its sign, or in bytes (or as a count) where there was nothing before."""
    if change.difference is None:
        return "-"
    if change.share is not None and change.name not in COUNTS:
        return f"{100 * change.share:+.2f}%"
    return f"{change.difference:+,}"


def compare(before: Side, after: Side, limit: Limit | None = None) -> Comparison:
    """Two runs, rank by rank: ranks of the same number, else the ones that need most."""
    pairs: dict[tuple[int, int], Pair] = {}
    first = {rank: (place, one) for place, one in enumerate(before.ranks) for rank in one.ranks}
    for place, one in enumerate(after.ranks):
        for rank in one.ranks:
            if rank in first:
                other, figures = first[rank]
                pairs.setdefault((other, place), Pair(figures, one))
    if not pairs or (len(before.ranks) == len(after.ranks) == 1):
        pairs = {(0, 0): Pair(before.ranks[0], after.ranks[0])}
    return Comparison(before, after, tuple(pairs.values()), limit)


# --- reading ------------------------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str], *, release: str | None = None, picture: bool = False) -> Side:
    """One side from a file: a trace or snapshot is replayed (`picture`: with what a page draws of it), a result or an
    answer is taken as it is.

    Raises TraceError where the file is none of these, and what `simulator.replay` raises.
    """
    from simulator.engine.replay import replay

    name = path_text(os.path.basename(os.fspath(path)))
    document = read_document(path)
    if document is not None:
        return side_of_document(document, name)
    trace = read(path, release=release)
    return side_of_replay(replay(trace, release=release, events=True, picture=picture, analyse=False), trace, name)


def read_document(path: str | os.PathLike[str]) -> Mapping[str, Any] | None:
    """The JSON object in a file, unless it is a trace or no JSON at all; TraceError where it cannot be read."""
    if Path(path).is_dir():
        return None
    with open_maybe_gzip(path) as file:
        head = file.read(_HEAD)
        if not head.lstrip().startswith(b"{") or b'"memory-trace"' in head:
            return None
        text = head + read_stream(file, path) if len(head) == _HEAD else head
    try:
        found = json.loads(text)
    except ValueError as error:
        lines = text.strip().count(b"\n")
        more = "; of a file of results, give one line" if lines and b"}\n{" in text else ""
        raise TraceError(f"{path_text(path)}: not JSON: {one_line(error)}{more}") from None
    return None if found.get("format") == "memory-trace" else dict(found)


def side_of_document(document: Mapping[str, Any], name: str) -> Side:
    """A result document, or the answer of an estimate; TraceError for anything else, or one of a failed case."""
    ranks = document.get("ranks")
    told = one_line(str(document.get("summary", "")))
    try:
        if isinstance(ranks, list) and ranks and "memory_stats" in ranks[0]:
            groups: dict[int, list[Mapping[str, Any]]] = {}
            for rank in ranks:
                groups.setdefault(rank.get("same_as", rank["rank"]), []).append(rank)
            return Side(name, "result", _worst_first(map(_from_result, groups.values())), summary=told)
        if document.get("verdict") in VERDICTS and "peak_allocated" in document:
            parts = ranks if isinstance(ranks, list) and ranks else [{**document, "ranks": [0]}]
            return Side(
                name, "answer", _worst_first(map(_from_answer, parts)), summary=told, needs=document.get("needs")
            )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise TraceError(f"{name}: a result that lacks something: {type(error).__name__} {one_line(error)}") from None
    if "error" in document:
        raise TraceError(f"{name}: the answer of a case that failed: {one_line(document['error'])}")
    raise TraceError(
        f"{name}: neither a trace, a snapshot, a result (of run or estimate --json) nor the answer of an estimate"
    )


def side_of_replay(result: Result, trace: Trace, name: str) -> Side:
    """A replay (with `events`) and its trace, which says what was alive at the peak."""
    entries = {rank: entry for entry in trace.ranks for rank in entry.ranks}
    found = []
    for rank in result.ranks:
        failed = None if rank.columns is None else rank.columns.address == -1
        tensors, modules = _alive(entries[rank.ranks[0]], rank.peak.event, failed)
        stats = rank.memory_stats
        found.append(
            Figures(
                ranks=rank.ranks,
                verdict=rank.verdict,
                values={
                    "peak_allocated": rank.peak_allocated,
                    "peak_reserved": rank.peak_reserved,
                    "peak_requested": stats.get("requested_bytes.all.peak"),
                    "device_total": rank.device_total,
                    "num_alloc_retries": stats.get("num_alloc_retries"),
                    "num_ooms": stats.get("num_ooms"),
                },
                phases={phase.key: (phase.peak, phase.left) for phase in rank.phases if phase.key},
                phase_names={
                    phase.key: phase.name if phase.step is None else f"{phase.name} {phase.step}"
                    for phase in rank.phases
                    if phase.key
                },
                categories=dict(rank.peak.by_category),
                modules=modules,
                tensors=tensors,
            )
        )
    pictured = any(rank.picture is not None for rank in result.ranks)
    seen = result if pictured else None
    return Side(name, "trace", _worst_first(found), result.notes, seen, summary(result), result.needed)


def _worst_first(ranks: Iterable[Figures]) -> tuple[Figures, ...]:
    return tuple(sorted(ranks, key=lambda one: (one.verdict != "oom", -(one.values["peak_reserved"] or 0), one.ranks)))


def _from_result(group: Sequence[Mapping[str, Any]]) -> Figures:
    """Equal ranks of a result document."""
    rank = group[0]
    stats = rank["memory_stats"]
    tensors: dict[str, int] = {}
    for tensor in rank["peak"]["largest"]:
        if tensor["name"]:
            _add(tensors, {}, tensor["name"], tensor["category"], int(tensor["bytes"]))
    return Figures(
        ranks=tuple(int(one["rank"]) for one in group),
        verdict=_verdict(rank),
        values={
            "peak_allocated": stats["allocated_bytes.all.peak"],
            "peak_reserved": stats["reserved_bytes.all.peak"],
            "peak_requested": stats.get("requested_bytes.all.peak"),
            "device_total": rank["device_total"],
            "num_alloc_retries": stats.get("num_alloc_retries"),
            "num_ooms": stats.get("num_ooms"),
        },
        phases=_phases(rank["phases"]),
        categories={str(name): int(size) for name, size in rank["peak"]["by_category"].items()},
        tensors=tensors,
        whole=False,
    )


def _from_answer(answer: Mapping[str, Any]) -> Figures:
    """One kind of rank of an answer."""
    return Figures(
        ranks=tuple(answer["ranks"]),
        verdict=_verdict(answer),
        values={name: _known(answer[name], answer["verdict"]) for name in WATCHED}
        | {"device_total": answer.get("device_total")},
        phases=_phases(answer.get("phases") or {}),
        whole=False,
    )


def _verdict(document: Mapping[str, Any]) -> Verdict:
    """The verdict that a document gives; ValueError where it is none."""
    return VERDICTS[VERDICTS.index(document["verdict"])]


def _known(figure: Any, verdict: str) -> int | None:
    """Bytes of an answer, which only a run out of memory need not have; TypeError for anything else."""
    return None if figure is None and verdict == "oom" else int(figure)


def _phases(found: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    return {str(name): (int(phase["peak"]), int(phase["left"])) for name, phase in found.items()}


def _alive(entry: RankEvents, event: int, failed: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Requested bytes alive after an event, by tensor and by module, of the tensors that have a name."""
    events = entry.events
    ids, sizes = events.ints("id"), events.ints("bytes")
    before = np.arange(len(events)) <= event
    born = before & (events.op == Op.ALLOC)
    if failed is not None:
        born[: len(failed)] &= ~failed  # the replay may have ended early
    dead = ids[before & (events.op == Op.FREE)]
    names, categories = events.strings("name"), events.strings("category")
    born &= (names.codes >= 0) & ~np.isin(ids, dead)
    keys = names.codes[born].astype(np.int64) * (len(categories.table) + 1) + categories.codes[born] + 1
    known, place = np.unique(keys, return_inverse=True)
    sums = np.zeros(len(known), dtype=np.int64)
    np.add.at(sums, place, sizes[born])
    tensors: dict[str, int] = {}
    modules: dict[str, int] = {}
    for key, size in zip(known.tolist(), sums.tolist(), strict=True):
        name, category = divmod(key, len(categories.table) + 1)
        _add(tensors, modules, names.table[name], categories.table[category - 1] if category else "unknown", size)
    return tensors, modules


def _add(tensors: dict[str, int], modules: dict[str, int], name: str, category: str, size: int) -> None:
    name = unwrapped(name)
    tensor = f"{name} ({category})"
    tensors[tensor] = tensors.get(tensor, 0) + size
    module = module_of(name, category)
    modules[module] = modules.get(module, 0) + size


def unwrapped(name: str) -> str:
    """A tensor's name without what wrappers add to it, so that methods can be compared: DDP, FSDP1, checkpoints."""
    module, colon, what = name.partition(": ")
    parts = [part for part in module.split(".") if part not in WRAPPERS]
    module = ".".join(parts[1:] if parts[0:1] == ["module"] else parts)
    return f"{module}{colon}{what}" if module else what or name


def module_of(name: str, category: str) -> str:
    """The module that a tensor's name tells, with `*` for the number of a layer: `model.layers.*.mlp`."""
    module, colon, _ = name.partition(": ")
    if not colon:
        cut = {"parameter": 1, "buffer": 1, "gradient": 1, "optimizer_state": 2}.get(category, 0)
        parts = module.split(".")
        module = ".".join(parts[: len(parts) - cut]) if len(parts) > cut else module
        if module.startswith("aten."):
            return "outside of modules"
    return ".".join("*" if part.isdigit() else part for part in module.split("."))
