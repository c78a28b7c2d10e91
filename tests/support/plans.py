"""Plans of workspace rules as recordings have them, whose libraries do nothing."""

from __future__ import annotations

from graph.workspaces.rules import Plan


def as_recorded(plan: Plan | None) -> Plan:
    """Without what is there on a GPU alone, and without that in what is there anyway."""
    steps = plan or ()
    elsewhere = {step[1] for step in steps if step[0] in ("alloc", "keep") and not step[2]}
    return tuple(step[:3] for step in steps if step[0] not in ("alloc", "free", "keep") or step[1] not in elsewhere)
