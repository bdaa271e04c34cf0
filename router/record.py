"""What is noted of an HTTP request while it is served: for its log line and its answer's id."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request, whatever it holds: several prompts and choices are summed.

    Attributes:
        id: the client's own, or random; it may repeat. Answers are named by it.
        arrived: time.perf_counter() at its arrival.
        prompt_tokens, output_tokens: so far; a prompt counts once for all its choices.
        first_token_s: seconds from arrival to the first output token; None before it.
        reasons: how its choices ended, see router.metrics.FINISHED_REASONS.
    """

    id: str
    arrived: float = field(default_factory=time.perf_counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token_s: float | None = None
    reasons: set[str] = field(default_factory=set)

    def tokens(self, count: int, now: float) -> None:
        """Output tokens came at `now` (time.perf_counter())."""
        self.output_tokens += count
        if self.first_token_s is None:
            self.first_token_s = now - self.arrived
