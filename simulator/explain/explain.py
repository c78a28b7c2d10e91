"""What `llmem explain` answers: every out-of-memory of a log or a snapshot, each with its cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from simulator.explain.judgement import Judgement, judge
from simulator.explain.message import OutOfMemory
from traces.errors import TraceError

if TYPE_CHECKING:
    from simulator.engine.result import RankResult
    from simulator.fit.plans import Fitting

SCHEMA_VERSION: Final = 1


@dataclass(frozen=True)
class Beside:
    """The case or program beside a text: what would make it fit, and its rank that needs most."""

    fitted: Fitting
    rank: RankResult


@dataclass(frozen=True)
class Explanation:
    """Messages with their causes, in the order of the text; `where` names it, and `beside` is the case or program that
    it is of, where that was given."""

    where: str
    messages: tuple[tuple[OutOfMemory, Judgement], ...]
    beside: Beside | None = None


def explain(data: bytes, where: str) -> Explanation:
    """Explain the bytes of a log, of a pasted text, or of a torch memory snapshot (told by its first byte).

    `where` names them in errors. Raises TraceError where no out-of-memory is in them.
    """
    if data.startswith(b"\x80"):
        from simulator.explain.snapshot import read

        found = read(data, where)
    else:
        from simulator.explain.texts import parse

        found = parse(data.decode("utf-8", errors="replace"))
    if not found:
        raise TraceError(
            f"{where}: no out-of-memory message is in it: give the lines of the error itself (`CUDA out of memory. "
            "Tried to allocate ...`), or a memory snapshot"
        )
    return Explanation(where, tuple((one, judge(one)) for one in found))
