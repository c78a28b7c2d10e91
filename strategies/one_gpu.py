"""One GPU: the one rank's events are those of the captured graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graph.case import Case
from strategies.strategy import Capture, Kind, Launch, Lowered, Share, Strategy

if TYPE_CHECKING:
    from strategies.timing.roofline import Speed


class OneGpu(Strategy):
    """No method at all."""

    def lower(self, case: Case, capture: Capture, speed: Speed | None, rank: int | None = None) -> Lowered:
        """The one rank."""
        from strategies.rank_events import events_of
        from traces.model import RankEvents

        graph = capture(case, None)
        return Lowered((RankEvents((0,), events_of(graph, speed, late=case.deferred == "late")),), {}, graph)


STRATEGIES = (OneGpu("single", "one GPU", Kind.WHOLE, Share.NO, Launch(distributed_type="NO")),)
