"""When to dispatch the next step: halfway through the last, or earlier if that is short.

The devices then always have a step to run, while whatever is asked of the engine until then still
joins the next one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from engine.plan import RunBatch, StepPlan

LEAD_S = 0.004
"""How long before the expected end the next step is dispatched at the latest: what the host needs
for it, and what the durations of equal steps vary by."""
_REMEMBERED = 8


class _Size(NamedTuple):
    rows: int
    tokens: int


class Pace:
    """Expects a step to take as long as those before it, if they were as large."""

    def __init__(self, now: Callable[[], float] = time.monotonic, *, ahead: bool = True) -> None:
        """`ahead` False: every step only once the last has ended."""
        self._now = now
        self._ahead = ahead
        self._under_way: deque[tuple[_Size | None, float]] = deque()
        self._size: _Size | None = None
        self._durations: deque[float] = deque(maxlen=_REMEMBERED)
        self._ended = 0.0

    def dispatched(self, plan: StepPlan) -> None:
        """A step has been dispatched behind those under way."""
        self._under_way.append((_size_of(plan), self._now()))

    def ended(self) -> None:
        """The first of those under way has ended just now."""
        size, dispatched = self._under_way.popleft()
        now = self._now()
        if size != self._size:
            self._size = size
            self._durations.clear()
        self._durations.append(now - max(dispatched, self._ended))
        self._ended = now

    @property
    def began(self) -> float | None:
        """When the step that now runs began to; None when none does."""
        return max(self._under_way[0][1], self._ended) if self._under_way else None

    def wait_s(self) -> float | None:
        """How long to wait before the next step is dispatched; 0 or less: it is due.

        None: until the one that runs has ended, which nobody can foresee.
        """
        began = self.began
        if began is None:
            return 0.0
        size = self._under_way[0][0]
        if not self._ahead or size is None or size != self._size:
            return None
        expected = min(self._durations)
        # An end is seen only after the dispatch before it: one that is late would be taken for
        # a longer step, and the next be later still. From half of a step on that dies out.
        return began + min(expected - LEAD_S, expected / 2) - self._now()


def _size_of(plan: StepPlan) -> _Size | None:
    for entry in plan.entries:
        if isinstance(entry, RunBatch):
            return _Size(len(entry.rows), sum(len(row.tokens) for row in entry.rows))
    return None
