"""One GPU: the one rank's events are those of the captured graph."""

from __future__ import annotations

from graph.case import Case
from strategies.rank_events import events_of
from strategies.strategy import Capture, Kind, Launch, Lowered, Share, Strategy
from strategies.timing.roofline import Speed
from traces.model import RankEvents


class OneGpu(Strategy):
    """No method at all."""

    def lower(self, case: Case, capture: Capture, speed: Speed | None, rank: int | None = None) -> Lowered:
        """The one rank."""
        graph = capture(case, None)
        return Lowered((RankEvents((0,), events_of(graph, speed, late=case.deferred == "late")),), {}, graph)


STRATEGIES = (OneGpu("single", "one GPU", Kind.WHOLE, Share.NO, Launch(distributed_type="NO")),)
