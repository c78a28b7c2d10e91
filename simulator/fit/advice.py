"""Where the memory of a recorded program goes at its peak, by the lines that ask for it, and what one changes there.

This is advice: nothing of it was tried.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from graph.recorder.phase_names import OPTIMIZER, PHASES
from graph.user_code import is_own, place
from simulator.engine.replay import replay
from simulator.fit.measure import endless
from traces.model import Events, Op, Trace
from traces.snapshot.names import FOREIGN, FRAME

#: Lines of a kind that are named, and the share of the peak that is worth a word.
_LINES: Final = 3
_LEAST: Final = 0.02
#: What logits and the loss are known by: operators, the module, or the function that calls them.
_LOSS: Final = re.compile(r"log_softmax|nll_loss|cross_entropy|(^|\.)\w*head: |\n.*loss", re.IGNORECASE)
#: What is told together; of other categories nothing is said.
_KINDS: Final[Mapping[str, str]] = {
    "activation": "activations",
    "temporary": "activations",
    "input": "activations",
    "gradient": "gradients",
    "optimizer_state": "optimizer states",
    "parameter": "parameters",
}
#: What temporaries are at a peak in the optimizer's step.
_STEP: Final = "the optimizer's temporaries"
_LOGITS: Final = "logits and loss"
_WORDS: Final[Mapping[str, str]] = {
    _LOGITS: "a fused or chunked loss keeps no logits (Liger's fused linear cross entropy, parts of the sequence)",
    "activations": "compute them again (torch.utils.checkpoint, gradient_checkpointing_enable()), or take smaller "
    "batches and accumulate; torch.autocast halves most",
    "gradients": "let the optimizer step within backward (register_post_accumulate_grad_hook), train adapters, or give "
    "each rank a part (FSDP)",
    "optimizer states": "8-bit states (bitsandbytes' AdamW8bit), Adafactor, or a part for each rank (ZeRO, FSDP)",
    _STEP: "a fused optimizer (fused=True) has none; foreach=False has those of one parameter at a time",
    "parameters": "load them in 16 bits, frozen ones in 4, or give each rank a part (FSDP)",
}
#: The same by arguments of transformers' Trainer, where the program has them in its own lines.
_ARGUMENTS: Final = {
    _LOGITS: "use_liger_kernel=True",
    "activations": "gradient_checkpointing=True, bf16=True, or a smaller per_device_train_batch_size with more "
    "gradient_accumulation_steps",
    "optimizer states": 'optim="adamw_bnb_8bit" or "adafactor"',
    _STEP: 'optim="adamw_torch_fused"',
}


@dataclass(frozen=True)
class Line:
    """Bytes that are alive at the peak, and the line of the program that has asked for them."""

    where: str
    bytes: int


@dataclass(frozen=True)
class Advice:
    """Bytes of a kind that are alive at the peak, the lines that have most of them, and what one would change there."""

    kind: str
    bytes: int
    lines: tuple[Line, ...]
    words: str

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def advise(trace: Trace, written: str = "") -> tuple[Advice, ...]:
    """The kinds of memory at the peak of the largest rank of a recorded program, the largest first; with words for the
    line where the Trainer's arguments are `written`, if the program has them."""
    result = replay(endless(trace), analyse=False)
    rank = max(result.ranks, key=lambda one: one.peak_allocated)
    events = next(entry.events for entry in trace.ranks if rank.ranks[0] in entry.ranks)
    kinds: dict[str, Counter[str]] = {}
    names, categories, stacks = map(events.strings, ("name", "category", "frames"))
    size = events.ints("bytes")
    stepping = (rank.peak.phase or "").startswith(PHASES[OPTIMIZER])
    for number in _alive(events, rank.peak.event):
        kind, where = _told(*(column.get(number) or "" for column in (names, categories, stacks)))
        if stepping and categories.get(number) == "temporary":
            kind = _STEP
        if kind in _WORDS:
            kinds.setdefault(kind, Counter())[where] += int(size[number])
    found = [_advice(kind, lines, int(_LEAST * rank.peak_allocated), written) for kind, lines in kinds.items()]
    return tuple(sorted((one for one in found if one.lines), key=lambda one: -one.bytes))


def _advice(kind: str, lines: Counter[str], least: int, written: str) -> Advice:
    """Of a kind, with the lines that have so many bytes."""
    named = (Line(where, size) for where, size in lines.most_common(_LINES) if size > least)
    words = _WORDS[kind]
    if written and kind in _ARGUMENTS:
        words = f"{written} makes the Trainer's arguments: {_ARGUMENTS[kind]}; or else: {words}"
    return Advice(kind, lines.total(), tuple(named), words)


def _alive(events: Events, last: int) -> list[int]:
    """The allocations up to an event that are not freed by then."""
    ids, op = events.ints("id")[: last + 1], events.op[: last + 1]
    born = np.flatnonzero(op == Op.ALLOC)
    places: list[int] = born[~np.isin(ids[born], ids[op == Op.FREE])].tolist()
    return places


def _told(name: str, category: str, stack: str) -> tuple[str, str]:
    """The kind of an allocation, and where in the program it was asked for."""
    frames = [match.groups() for line in stack.splitlines() if (match := FRAME.fullmatch(line))]
    leaf = next((one for one in frames if not FOREIGN.search(one[0])), None)
    own = next((one for one in frames if is_own(one[0])), None)
    where = [place(file, int(line), function) for file, line, function in dict.fromkeys(filter(None, (leaf, own)))]
    kind = _KINDS.get(category, "")
    if kind == "activations" and _LOSS.search(f"{name}\n{leaf[2] if leaf else ''}"):
        kind = _LOGITS
    return kind, ", from ".join(where) or "an unknown place"
