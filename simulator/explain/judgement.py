"""The cause of an out-of-memory by its figures: the inequality that decides, and what to try first.

What the driver refused could have come from whatever holds memory without live tensors in it. Each such holder is a
suspect where its memory would have covered what was lacking, and is not small change; the largest is the cause. Where
there is none, the tensors are: the card is too small for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from simulator.explain.message import CONTEXT, ROUNDING, OutOfMemory
from traces.units import GiB, MiB, format_bytes

Cause = Literal[
    "capacity",
    "fragmentation",
    "private_pool",
    "other_process",
    "outside_pytorch",
    "fraction",
    "refused",
    "other_library",
    "host",
    "unknown",
]
#: The causes as reports print them.
WORDS: Final[dict[Cause, str]] = {
    "capacity": "the card is too small for the tensors",
    "fragmentation": "fragmentation",
    "private_pool": "private pools (CUDA graphs) keep memory",
    "other_process": "memory of other processes",
    "outside_pytorch": "memory outside PyTorch's allocator",
    "fraction": "a memory fraction that was set",
    "refused": "the driver refused memory that was free",
    "other_library": "another library's memory",
    "host": "the machine's memory, not the GPU's",
    "unknown": "not told by the text",
}

#: PyTorch's own memory without tensors is no small change from this part of the card on, or from these bytes on.
_IDLE: Final = (0.03, 2 * GiB)
#: What is not the allocator's is none from this part of the card on, but at least the second, and surely the third.
_FOREIGN: Final = (0.1, 768 * MiB, 4 * GiB)
#: A card with less than this part free is full: what is free then is the driver's own reserve.
_FULL: Final = 0.05


@dataclass(frozen=True)
class Judgement:
    """A cause, the arithmetic that decided in a sentence, what to try in order, and what else is worth a look."""

    cause: Cause
    because: str
    first: tuple[str, ...]
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Holder:
    """Memory without live tensors of this process in it; none to speak of below `least` bytes.

    `inferred`: no figure of the message, but what is left of the card; among suspects it counts half.
    """

    cause: Cause
    bytes: int
    least: float
    what: str
    inferred: bool = False

    @property
    def weight(self) -> float:
        """By which suspects are ranked, in bytes."""
        return self.bytes / 2 if self.inferred else self.bytes


def judge(found: OutOfMemory) -> Judgement:
    """The cause of an out-of-memory, by what its message says."""
    if found.source == "host":
        return Judgement("host", _who(found, "the machine's main memory"), _HOST)
    if found.source == "library":
        return Judgement("other_library", _who(found, "its own GPU memory, beside PyTorch's"), _LIBRARY)
    if found.source == "driver":
        return Judgement("outside_pytorch", _who(found, "GPU memory beside PyTorch's allocator"), _OUTSIDE)
    cause, because = _of_figures(found)
    holders = [one for one in _holders(found) if one.cause != cause and _covers(one, found)]
    return Judgement(cause, because, tuple(_FIRST[cause](found)), tuple(map(_would, holders)))


def _would(one: _Holder) -> str:
    """What another holder of memory would have done for the request."""
    past = ": expandable_segments:True may get past this one request" if one.cause == "fragmentation" else ""
    return f"{_size(one.bytes)} {one.what} would have covered it as well{past}"


def _who(found: OutOfMemory, what: str) -> str:
    """Who was refused what, where a message has no more to say."""
    if found.party in ("the kernel", "the system", "SLURM"):
        had = f", which had {_size(found.allocated)} of it" if found.allocated is not None else ""
        return f"{found.party} ended a process for want of {what}{had}"
    asked = f"{_size(found.asked)} of " if found.asked is not None else ""
    return f"{found.party} was refused {asked}{what}"


def _of_figures(found: OutOfMemory) -> tuple[Cause, str]:
    """The cause and the inequality that decides."""
    if found.asked is None:
        huge = "more than 1EB" in found.said
        return ("capacity", "more than 1 EB asked for") if huge else ("unknown", "the text says no figures")
    for rule in (_too_large, _limited, _beyond, _refused):
        if decided := rule(found, found.asked):
            return decided
    if found.free is None:
        return "unknown", f"{_size(found.asked)} asked for, and the text ends before what was free"
    suspects = [one for one in _holders(found) if _covers(one, found) and one.bytes >= one.least]
    if suspects:
        worst = max(suspects, key=lambda one: one.weight)
        return worst.cause, f"{_size(worst.bytes)} {worst.what} + {_free(found)} >= {_size(found.asked)} asked for"
    return "capacity", _full(found, found.asked)


def _too_large(found: OutOfMemory, asked: int) -> tuple[Cause, str] | None:
    if found.total is None or asked <= found.total:
        return None
    return "capacity", f"one request of {_size(asked)} > {_size(found.total)} that the card has"


def _limited(found: OutOfMemory, asked: int) -> tuple[Cause, str] | None:
    """A limit in force where the driver had enough."""
    if found.allowed is None or found.free is None or found.free < asked:
        return None
    held = found.held if found.held is not None else found.allocated or 0
    if held + asked + 2 * ROUNDING <= found.allowed:
        return None
    sides = f"{_size(held)} held + {_size(asked)} asked for > {_size(found.allowed)} allowed"
    return "fraction", f"{sides}, with {_free(found)}"


def _beyond(found: OutOfMemory, asked: int) -> tuple[Cause, str] | None:
    """More tensors than the card holds: drivers of Windows swap to the machine's memory."""
    if found.total is None or found.allocated is None or found.allocated <= found.total:
        return None
    return "capacity", f"{_size(found.allocated)} of tensors > {_size(found.total)} that the card has"


def _refused(found: OutOfMemory, asked: int) -> tuple[Cause, str] | None:
    """Enough was free, and not as little as the driver keeps of a full card."""
    if found.free is None or found.free <= asked + ROUNDING or found.free < _FULL * _card(found):
        return None
    because = f"{_free(found)} > {_size(asked)} asked for"
    if found.source == "snapshot" or (found.releases == "2.1" and found.own is not None):
        silent = "a snapshot does not keep" if found.source == "snapshot" else "PyTorch 2.1 does not print"
        return "fraction", f"{because}: a limit was in force, which {silent}"
    return "refused", because


def _card(found: OutOfMemory) -> int:
    """The card's size, or what is known of it."""
    return found.total if found.total is not None else (found.held or 0) + (found.free or 0)


def _holders(found: OutOfMemory) -> Iterator[_Holder]:
    card = _card(found)
    idle = min(_IDLE[0] * card, _IDLE[1])
    foreign = min(max(_FOREIGN[0] * card, _FOREIGN[1]), _FOREIGN[2])
    if found.pieces is not None:
        yield _Holder("fragmentation", found.pieces, idle, "in pieces of what PyTorch holds")
    if found.private is not None:
        yield _Holder("private_pool", found.private, idle, "unused in private pools")
    if found.others is not None:
        apart = "" if found.outside is not None else f", after {_size(CONTEXT)} for this one's context,"
        yield _Holder("other_process", found.others, foreign, f"of other processes{apart}", found.outside is None)
    if found.outside is not None:
        beyond = max(found.outside - CONTEXT, 0)
        what = f"of this process outside the allocator, beyond {_size(CONTEXT)} for a context,"
        yield _Holder("outside_pytorch", beyond, foreign, what)


def _covers(one: _Holder, found: OutOfMemory) -> bool:
    return found.shortage is not None and one.bytes > 0 and one.bytes >= found.shortage


def _full(found: OutOfMemory, asked: int) -> str:
    tensors = f"{_size(found.allocated)} of tensors + " if found.allocated is not None else ""
    card = f" of {_size(found.total)}" if found.total is not None else ""
    return (
        f"{tensors}{_size(asked)} asked for do not fit: {_free(found)}{card}, and what else is held would not have "
        "been enough, or not for long"
    )


def _free(found: OutOfMemory) -> str:
    return f"{_size(found.free)} free"


def _size(size: int | None) -> str:
    return "?" if size is None else format_bytes(size)


# --- what to try first -----------------------------------------------------------------------------------------------

_HOST: Final = (
    "see what the machine has (free -g), and what the job may have of it (--mem of SLURM, the container's limit)",
    "fewer or smaller loader workers, no offload of optimizer or parameters to the CPU, weights loaded by memory map",
    "where shared memory is named: a larger /dev/shm (docker run --shm-size)",
)
_LIBRARY: Final = (
    "see who is on the card (nvidia-smi): a library with an allocator of its own shares it with PyTorch",
    "let that library take less: XLA_PYTHON_CLIENT_PREALLOCATE=false (JAX), set_memory_growth (TensorFlow), "
    "gpu_mem_limit (ONNX Runtime), fewer layers on the GPU (ggml)",
)
_OUTSIDE: Final = (
    "see who is on the card (nvidia-smi): what was refused is not a tensor, so nothing is said of what was free",
    "leave room outside the allocator: a smaller batch, or set_per_process_memory_fraction a little below 1; "
    "`llmem estimate ... --gpu G` counts context, NCCL and handles, `--context` as you measured them",
    "where the card was empty: a device number that is not this process's (CUDA_VISIBLE_DEVICES), or a broken driver",
)


def _capacity(found: OutOfMemory) -> Iterator[str]:
    if found.asked is None or (found.total is not None and found.asked > found.total):
        yield (
            "find the tensor in the line of the traceback: attention scores of a long sequence (sdpa or flash "
            "attention make none), logits of all tokens (a fused or chunked loss), or a size that is wrong"
        )
    yield "less at once: a smaller micro-batch with gradient accumulation, a shorter sequence, checkpointing"
    yield (
        f"`llmem estimate MODEL {_gpu(found.total)}` tries such changes and names those that fit; "
        f"`llmem record {_gpu(found.total)} train.py` shows what each line of a program holds"
    )


def _fragmentation(found: OutOfMemory) -> Iterator[str]:
    if found.releases in ("1.3 or older", "1.4 to 1.9"):
        yield "a newer PyTorch: this one has no setting (1.10 has max_split_size_mb, 2.1 expandable_segments)"
    elif found.releases == "1.10 to 2.0":
        yield "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128 (from 2.1 on expandable_segments:True)"
    elif "expandable_segments:True" in found.conf:
        yield "expandable segments are on: what is left lies in the segments of other streams and of small tensors"
    else:
        newest = found.releases == "2.10 or newer"
        yield f"export {'PYTORCH_ALLOC_CONF' if newest else 'PYTORCH_CUDA_ALLOC_CONF'}=expandable_segments:True"
    yield (
        "`llmem stress snapshot.pickle` says which setting serves a recorded run, "
        f"`llmem record {_gpu(found.total)} --alloc-conf SETTING train.py` whether one serves a program"
    )
    yield "lengths that vary less from step to step (buckets, padding to multiples) leave fewer pieces"


def _private(found: OutOfMemory) -> Iterator[str]:
    yield "capture fewer sizes, let graphs share one pool, or run without graphs (mode other than reduce-overhead)"
    yield "a pool made with torch.cuda.MemPool keeps what it had until it is deleted"
    yield "`llmem run snapshot.pickle` shows free pieces by pool"


def _others(found: OutOfMemory) -> Iterator[str]:
    mine = found.process
    listed = [f"{one.pid}" for one in found.processes if one.bytes != mine or found.own is not None]
    who = f" (processes {', '.join(listed)})" if listed else ""
    yield f"see who is on the card (nvidia-smi), and end or move them{who}: an earlier run may still be there"
    yield "one process for each card: torch.cuda.set_device(LOCAL_RANK) before the first tensor, CUDA_VISIBLE_DEVICES"
    left = None if found.total is None or found.others is None else found.total - found.others
    yield f"where they must share it: `llmem estimate MODEL {_gpu(left)}` says what fits beside them"


def _gpu(size: int | None) -> str:
    """The option of our commands that stands for a card of a size."""
    return "--gpu G" if size is None else f"--memory {format_bytes(size).replace(' ', '')}"


def _fraction(found: OutOfMemory) -> Iterator[str]:
    part = f", now {found.allowed / found.total:.3f}" if found.allowed is not None and found.total else ""
    yield f"raise or leave out set_per_process_memory_fraction (or per_process_memory_fraction in the settings){part}"
    yield "servers set it for you: gpu_memory_utilization (vLLM), mem-fraction-static (SGLang)"
    if found.pieces is not None and found.asked is not None and found.pieces >= found.asked:
        yield "within the limit: expandable_segments:True, since the pieces would hold the request"


def _not_given(found: OutOfMemory) -> Iterator[str]:
    yield "a limit that the message does not show: set_per_process_memory_fraction (2.1 and 2.2 do not print it)"
    yield "on Windows: a larger page file, since the driver commits the machine's memory too; WSL: its memory limit"
    yield "a card shared with a process that came and went: run again, and watch nvidia-smi"


_FIRST: Final[dict[Cause, Callable[[OutOfMemory], Iterator[str]]]] = {
    "capacity": _capacity,
    "fragmentation": _fragmentation,
    "private_pool": _private,
    "other_process": _others,
    "outside_pytorch": lambda _: iter(_OUTSIDE),
    "fraction": _fraction,
    "refused": _not_given,
    "unknown": lambda _: iter(("give the whole message, up to `reserved by PyTorch but unallocated`",)),
}
