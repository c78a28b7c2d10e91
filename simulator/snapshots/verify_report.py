"""What `verify` finds: for every device of a snapshot how much was compared, and the first difference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place at which the replay and the recording differ.

    `entry` is the index of the recording's trace entry (its length: the difference is in the final segments);
    `text` says in one line what was recorded and what the replay did.
    """

    entry: int
    text: str


@dataclass(frozen=True, slots=True)
class VerifiedRank:
    """One device of the snapshot: trace entries it has, consequences compared, peaks of the replay in bytes."""

    rank: int
    entries: int
    compared: int
    peak_allocated: int
    peak_reserved: int
    divergence: Divergence | None = None


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of `verify`: one record a device, in order; `release` and `conf` are those replayed."""

    ranks: tuple[VerifiedRank, ...]
    release: str
    conf: str
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no device differs."""
        return not any(rank.divergence for rank in self.ranks)
