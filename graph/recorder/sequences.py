"""The allocator's sequence of a call, flat: what a workspace plan says, with the outputs that it does not name.

Outputs that no step names are born before the first step, or at the plan's ("rest",). Scratch that the plan does not
free dies at its end.
"""

from __future__ import annotations

from typing import Any

from graph.workspaces.rules import Plan, gpu_bytes

#: What a step does with its slot: output `slot` is born; scratch `slot` is born, dies; the workspace that the rules
#: know by the key `slot` is born for good. The last has none: the cache is emptied.
BIRTH, SCRATCH, RELEASE, KEEP, EMPTY = range(5)
#: Action, slot, bytes, name, and bytes on a GPU (-1: the same).
Sequence = tuple[tuple[int, Any, int, str, int], ...]


def sequence(plan: Plan | None, outputs: int) -> Sequence:
    """The steps of a call with so many new output storages."""
    if plan is None:
        return tuple((BIRTH, slot, 0, "", -1) for slot in range(outputs))
    named = {step[1] for step in plan if step[0] == "out"}
    rest = [(BIRTH, slot, 0, "", -1) for slot in range(outputs) if slot not in named]
    found: list[tuple[int, Any, int, str, int]] = [] if ("rest",) in plan else [*rest]
    slots: dict[Any, int] = {}
    alive: list[int] = []
    for step in plan:
        kind = step[0]
        if kind == "out" and step[1] < outputs:
            found.append((BIRTH, step[1], 0, "", -1))
        elif kind == "rest":
            found += rest
        elif kind == "keep":
            found.append((KEEP, step[1], step[2], "workspace", gpu_bytes(step)))
        elif kind == "empty":
            found.append((EMPTY, 0, 0, "", -1))
        elif kind == "alloc" and max(step[2:]):
            slots[step[1]] = len(slots) if step[1] not in slots else slots[step[1]]
            alive.append(slots[step[1]])
            found.append((SCRATCH, slots[step[1]], step[2], str(step[1]), gpu_bytes(step)))
        elif kind == "free" and slots.get(step[1], -1) in alive:
            alive.remove(slots[step[1]])
            found.append((RELEASE, slots[step[1]], 0, "", -1))
    return (*found, *((RELEASE, slot, 0, "", -1) for slot in alive))
