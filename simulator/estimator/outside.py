"""What a training process holds of a GPU besides PyTorch's allocator: terms, each with a range and its source.

No public interface says these sizes beforehand: they are measurements that people published, and a rule for cards
without one. Every PyTorch that is imitated here loads kernels lazily (CUDA_MODULE_LOADING=LAZY since 1.13), so that the
context is small at first and grows by the kernels that run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from graph.hardware.gpus import Gpu, Measured, gpu
from graph.hardware.profile import Profile, profile
from simulator.engine.result import OutsideTerm
from traces.errors import ConfigError
from traces.model import Trace

if TYPE_CHECKING:
    from graph.case import Case

#: Bytes of a device that are not PyTorch's, or those of the table.
Context = int | Literal["auto"]

_MIB: Final = 1 << 20

#: Bytes of local memory that a context holds for every thread that a GPU can run at once (cudaLimitStackSize).
STACK_BYTES: Final = 1024
#: What a context holds beyond that, in MiB: likely, lowest, highest. The measured contexts of the table of GPUs less
#: their stacks are 133 (RTX 3090) and 355 (H100 and H200, CUDA 13), and 213 on an RTX 6000 Ada.
REST_MIB: Final = (200, 60, 360)


#: Kernels of PyTorch, cuBLAS and the attention libraries that a model's first iteration loads.
KERNELS: Final = Measured(
    130,
    30,
    360,
    "132 to 148 MiB after a first step on an H100 (tests/data/gpu); vllm-project/vllm#12126 and #14447: 0.16 and "
    "0.20 GiB while a model first runs; at most all kernels of PyTorch, 362 MiB (pytorch/pytorch#86509)",
)


#: Buffers of one NCCL communicator in a ring: 12 MiB for each channel to a neighbour (LL 0.5, LL128 4.7, Simple 4 MiB,
#: in pages of 2 MiB, and control; allocations of 10 and 2 MiB: NVIDIA/nccl#1685), 2 channels over PCIe, 24 over NVLink.
COMMUNICATOR: Final = Measured(
    300,
    24,
    700,
    "12 MiB a channel, 2 to 24 channels and more with trees; NVIDIA/nccl#964 measured 544 to 688 MB on 4 A100 with "
    "NVLink",
)


def outside_of(case: Case, context: Context, groups: int, cards: Iterable[str] = ()) -> tuple[OutsideTerm, ...]:
    """What lies outside the allocator for a rank of a case's job that is in so many process groups with others.

    That is what `context` says, or the table's terms for the case's card (of `cards`, the one with most of them).
    Raises ConfigError for a negative context.
    """
    made = (profile(card, case.release, case.cudnn_sdp) for card in dict.fromkeys(cards or (case.gpu,)))
    return process_terms(made, context, groups)


def process_terms(cards: Iterable[Profile], context: Context, groups: int) -> tuple[OutsideTerm, ...]:
    """The same for a process on one of `cards`."""
    if context == "auto":
        return max((outside_terms(gpu(card.name)) for card in cards), key=bytes_of) + communicator_terms(groups)
    if context < 0:
        raise ConfigError(f"a context of {context} bytes is out of range: give 0 or more")
    return (OutsideTerm("context", context, "as given"),) if context else ()


def bytes_of(terms: Iterable[OutsideTerm]) -> int:
    """Their likely sizes together."""
    return sum(term.bytes for term in terms)


def most_of(terms: Iterable[OutsideTerm]) -> int:
    """The most that they may be together."""
    return sum(term.bytes if term.high is None else term.high for term in terms)


def least_of(terms: Iterable[OutsideTerm]) -> tuple[OutsideTerm, ...]:
    """The terms at the least that they may be."""
    return tuple(term if term.low is None else replace(term, bytes=term.low) for term in terms)


def communicators(trace: Trace) -> int:
    """The most NCCL communicators that a rank has: process groups that it shares with others and whose collectives it
    takes part in. Messages inside a group (`NAME:FROM>TO`) are the group's.
    """
    found = 0
    for entry in trace.ranks:
        column = entry.events.strings("group")
        used = {column.table[code].partition(":")[0] for code in {*column.codes.tolist()} - {-1}}
        groups = {name: parts for name, parts in trace.groups.items() if name.partition(":")[0] in used}
        for rank in entry.ranks:
            met = {name.partition(":")[0] for name, parts in groups.items() if _meets(rank, parts)}
            found = max(found, len(met))
    return found


def _meets(rank: int, parts: Iterable[tuple[int, ...]]) -> bool:
    return any(rank in part and len(part) > 1 for part in parts)


def outside_terms(card: Gpu) -> tuple[OutsideTerm, ...]:
    """The terms outside the allocator for one process on a card; what several GPUs add is in `communicator_terms`."""
    return (_term("CUDA context", card.context or _by_rule(card.threads)), _term("loaded kernels", KERNELS))


def communicator_terms(count: int) -> tuple[OutsideTerm, ...]:
    """The buffers of a rank's NCCL communicators: one for each process group whose collectives it meets others in."""
    if not count:
        return ()
    one = COMMUNICATOR
    name = "NCCL buffers" if count == 1 else f"NCCL buffers, {count}"
    return (_term(name, Measured(one.likely * count, one.low * count, one.high * count, one.source)),)


def _by_rule(threads: int) -> Measured:
    stacks = threads * STACK_BYTES // _MIB
    likely, low, high = (stacks + rest for rest in REST_MIB)
    source = (
        f"no measurement known for this card: {STACK_BYTES} B of stack for each of its {threads:,} threads, and "
        f"{REST_MIB[0]} MiB, as contexts of other cards have ({REST_MIB[1]} to {REST_MIB[2]})"
    )
    return Measured(likely, low, high, source)


def _term(name: str, found: Measured) -> OutsideTerm:
    return OutsideTerm(name, found.likely * _MIB, found.source, found.low * _MIB, found.high * _MIB)
