"""The life of every id of a rank, in one pass: allocated once, freed once, used only in between.

Plain Python that numba compiles as it stands. `traces.check` runs it as Python on small traces, where loading numba
would cost more than the check itself, and compiled on large ones.
"""

from __future__ import annotations

from typing import Any, Final

from traces.model import Op

ALLOC: Final = int(Op.ALLOC)
FREE: Final = int(Op.FREE)
RECORD_STREAM: Final = int(Op.RECORD_STREAM)
COMPLETE_FREE: Final = int(Op.COMPLETE_FREE)

#: States of an id.
UNKNOWN: Final = 0
LIVE: Final = 1
FREED: Final = 2
COMPLETED: Final = 3

#: What can be wrong with an event; 0 is nothing.
ALLOCATED_TWICE: Final = 1
FREE_OF_UNKNOWN: Final = 2
FREED_TWICE: Final = 3
USE_OF_UNKNOWN: Final = 4
USE_OF_FREED: Final = 5
COMPLETES_UNKNOWN: Final = 6
COMPLETES_LIVE: Final = 7
COMPLETES_TWICE: Final = 8


def life_cycle(ops: Any, slots: Any, states: Any) -> tuple[int, int]:
    """The first event that breaks the life of its id, as (index, fault), or (-1, 0).

    `ops` and `slots` have one value an event, `slots` the place of its id in `states` (negative: no id, skipped);
    `states` holds the state of every id before the first event, and is changed on the way.
    """
    for i in range(len(ops)):
        op = ops[i]
        slot = slots[i]
        if slot < 0:
            continue
        if op == ALLOC:
            if states[slot] != UNKNOWN:
                return i, ALLOCATED_TWICE
            states[slot] = LIVE
        elif op == FREE:
            if states[slot] != LIVE:
                return i, FREE_OF_UNKNOWN if states[slot] == UNKNOWN else FREED_TWICE
            states[slot] = FREED
        elif op == RECORD_STREAM:
            if states[slot] != LIVE:
                return i, USE_OF_UNKNOWN if states[slot] == UNKNOWN else USE_OF_FREED
        elif op == COMPLETE_FREE:
            if states[slot] == UNKNOWN:
                return i, COMPLETES_UNKNOWN
            if states[slot] != FREED:
                return i, COMPLETES_LIVE if states[slot] == LIVE else COMPLETES_TWICE
            states[slot] = COMPLETED
    return -1, 0
