"""What this router has in flight on one worker, and how fast prompts are computed there."""

from __future__ import annotations

import time
from collections.abc import Callable

_RATED_TOKENS = 256
"""Shorter prefills tell the round trip rather than the rate."""
FORGOTTEN_S = 60.0
"""A rate that is as old tells nothing: who was slow once is tried again."""
_KEPT = 0.9
"""How much each prefill leaves of the weight of those before it."""


class PrefillRate:
    """Tokens/s over the last prefills, each weighted by its tokens."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokens = self._seconds = self._last = 0.0
        self._clock = clock

    def add(self, tokens: int, seconds: float) -> None:
        """`tokens` were computed, and nothing else, in `seconds`."""
        if tokens >= _RATED_TOKENS:
            self._last = self._clock()
            self._tokens = _KEPT * self._tokens + tokens
            self._seconds = _KEPT * self._seconds + seconds

    @property
    def value(self) -> float | None:
        """None before the first, and once it is forgotten."""
        fresh = self._seconds > 0 and self._clock() < self._last + FORGOTTEN_S
        return self._tokens / self._seconds if fresh else None


class InFlight:
    """Counts of one worker.

    Attributes:
        prefill_tokens: tokens to be computed here, whose first token has not come.
        sequences: attempts that this router has started here and that have not ended.
        rate: of the prefills that this router has seen.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, rate: PrefillRate | None = None
    ) -> None:
        """`rate`: as it is known from before."""
        self.prefill_tokens = 0
        self.sequences = 0
        self.rate = PrefillRate(clock) if rate is None else rate
        self._clock = clock
        self._busy_since = 0.0

    def began(self) -> None:
        """An attempt is started here."""
        self.sequences += 1
        self._changed()

    def ended(self) -> None:
        """It has ended, or is not waited for any more."""
        self.sequences -= 1
        self._changed()

    def prefill_began(self, tokens: int) -> None:
        if not self.prefill_tokens:
            self._busy_since = self._clock()
        self.prefill_tokens += tokens
        self._changed()

    def prefill_ended(self, tokens: int, *, computed: int | None) -> None:
        """It had been expected to compute `tokens`.

        Args:
            computed: so many it has computed, and this is the moment; None: it has not ended.
        """
        self.prefill_tokens -= tokens
        if computed is not None:
            # Prompts are computed one after another, or together: the time since the last one
            # ended is this one's, and what was computed beside it ends at once after it.
            now = self._clock()
            # More than that, and it has shared with siblings, or lost to others, what it counts.
            if computed < tokens + _RATED_TOKENS:
                self.rate.add(computed, now - self._busy_since)
            self._busy_since = now
        self._changed()

    def _changed(self) -> None:
        """For whoever keeps the counts elsewhere as well."""
