"""What this router has in flight on one worker, and how fast prompts are computed there."""

from __future__ import annotations

import time
from collections.abc import Callable

DEFAULT_PREFILL_RATE = 4000.0
"""Tokens/s of a worker that has not computed a prompt yet."""
_RATED_TOKENS = 256
"""Shorter prefills tell the round trip rather than the rate."""
_KEPT = 0.9
"""How much each prefill leaves of the weight of those before it."""


class PrefillRate:
    """Tokens/s over the last prefills, each weighted by its tokens."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """`tokens` were computed, and nothing else, in `seconds`."""
        if tokens >= _RATED_TOKENS:
            self._tokens = _KEPT * self._tokens + tokens
            self._seconds = _KEPT * self._seconds + seconds

    @property
    def value(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else DEFAULT_PREFILL_RATE


class InFlight:
    """Counts of one worker.

    Attributes:
        prefill_tokens: tokens to be computed here, whose first token has not come.
        sequences: attempts that this router has started here and that have not ended.
        rate: of the prefills that this router has seen.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.prefill_tokens = 0
        self.sequences = 0
        self.rate = PrefillRate()
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

    def prefill_ended(self, tokens: int, *, computed: bool) -> None:
        """`computed`: all of them, and this is the moment."""
        self.prefill_tokens -= tokens
        if computed:
            # Prompts are computed one after another, or together: the time since the last one
            # ended is this one's, and what was computed beside it ends at once after it.
            now = self._clock()
            self.rate.add(tokens, now - self._busy_since)
            self._busy_since = now
        self._changed()

    def _changed(self) -> None:
        """For whoever keeps the counts elsewhere as well."""
