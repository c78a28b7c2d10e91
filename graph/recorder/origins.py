"""The forward operator behind what backward runs: autograd numbers its nodes, and tells which one is running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from graph.fake_cuda.torch_private import current_node, next_sequence_number

Made = TypeVar("Made")

_ACCUMULATE: Final = 1 << 62  # AccumulateGrad has the largest sequence number of all, so that it runs first
#: How many views may stand between two operators for the second to say which module they are of.
_NEAR: Final = 32


class Origins(Generic[Made]):
    """What is known of the operators that made autograd's nodes, by the numbers of these.

    `unknown` stands for what is not known. A view has no operator of its own: it belongs to the module of what ran
    before it, and `nearby` leaves of that what holds for the view too.
    """

    def __init__(self, unknown: Made, nearby: Callable[[Made], Made]) -> None:
        self.depth = 0  # of backward runs inside one another: reentrant checkpointing runs one inside another
        self.variables: dict[int, Made] = {}  # of those that gradients are accumulated for, by id
        self._unknown = unknown
        self._nearby = nearby
        self._of: tuple[dict[int, Made], dict[int, Made]] = ({}, {})  # each thread counts for itself
        self._mark = 0

    def made(self, thread: int, what: Made) -> None:
        """An operator has run on a thread (0: the main one, 1: autograd's): `what` is known of the node it made."""
        self._of[thread].setdefault(next_sequence_number() - 1, what)

    def behind(self) -> Made:
        """What is known of the node that backward runs now."""
        node: Any = current_node()
        if node is None:
            return self._unknown
        number = node._sequence_nr()
        if number >= _ACCUMULATE:
            return self.variables.get(id(getattr(node, "variable", None)), self._unknown)
        known = self._of[self.depth > 1]  # an inner backward differentiates what was recomputed on this thread
        found = known.get(number)
        if found is None:
            before = next((known[n] for n in range(number - 1, number - _NEAR, -1) if n in known), self._unknown)
            found = known[number] = self._nearby(before)
        return found

    def forget(self) -> None:
        """Drop what was made before this was last called, and what backward made itself: none runs now."""
        known, inner = self._of
        for number in [number for number in known if number < self._mark]:
            del known[number]
        inner.clear()
        self._mark = next_sequence_number()
