"""When a worker process that has ended is started again, and when it is given up."""

from __future__ import annotations

MOST_WAIT_S = 30.0
HEALTHY_S = 60.0
"""A worker that was ready for so long begins anew with the shortest wait."""
MOST_FAILED_STARTS = 5


class Restarts:
    """The restarts of one process. Waits double, so that a fault that lasts costs little.

    Only ends before the process was ready make a crash loop: one that serves at times is of
    use, and what ends it may be a request.

    Attributes:
        count: how often it has been started again.
    """

    def __init__(self, first_wait_s: float) -> None:
        self.count = 0
        self._first_wait_s = self._wait_s = first_wait_s
        self._failed_starts = 0

    def after_end(self, *, ready_s: float | None, asked: bool) -> float | None:
        """How many seconds to wait before the next start; None gives the process up.

        `ready_s`: how long it was ready, None if it never was; `asked`: it ended well, as when
        somebody has told it to: there is nothing to wait for.
        """
        self._failed_starts = self._failed_starts + 1 if ready_s is None else 0
        if self._failed_starts >= MOST_FAILED_STARTS:
            return None
        self.count += 1
        if ready_s is not None and (asked or ready_s >= HEALTHY_S):
            self._wait_s = self._first_wait_s
        if ready_s is not None and asked:
            return 0.0
        wait_s, self._wait_s = self._wait_s, min(2 * self._wait_s, MOST_WAIT_S)
        return wait_s
