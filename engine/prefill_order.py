"""Which prompts a step computes, and how many tokens of each. Plain Python, no jax.

In order: the first to be admitted is computed to its end before the next one begins, but for
what a step has left over.

Interleaved: of those with the best priority, the one that has the fewest tokens left goes first,
so a short prompt never waits for a long one's end. Each step counts to those that it passes by as
if it had computed a part of them, so a prompt of r tokens is passed by at most r / that part times
before whatever comes later goes after it: the long one ends too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from engine.limits import Limits
from engine.sequence import Sequence

AGEING = 4
"""Four steps of waiting are worth one of computing. With fewer, short prompts soon wait behind a
long one again; with more, a stream of them holds it up for longer."""


class Share(NamedTuple):
    """The next `tokens` tokens of a prompt are to be computed."""

    sequence: Sequence
    tokens: int


class PrefillQueue:
    """The sequences that are PREFILLING, in the order of their admission."""

    def __init__(self, limits: Limits) -> None:
        self._most_rows = limits.max_prefill_seqs
        self._interleave = limits.interleave_prefills
        self._ageing = max(1, limits.max_batch_tokens // AGEING)
        self._passed_by: dict[Sequence, int] = {}  # by how many steps, so far

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._passed_by)

    def __len__(self) -> int:
        return len(self._passed_by)

    def append(self, sequence: Sequence) -> None:
        self._passed_by[sequence] = 0

    def remove(self, sequence: Sequence) -> None:
        del self._passed_by[sequence]

    def shares(self, budget: int) -> list[Share]:
        """What the next step computes: at most `budget` tokens, all of them if there are so many.

        To be asked once a step, as it is what prompts grow older by.
        """
        # One without tokens left waits for its first output token to be read back.
        waiting = [s for s in self if _left(s)]
        if self._interleave:
            waiting.sort(key=self._urgency)
        shares: list[Share] = []
        for sequence in waiting:
            tokens = min(_left(sequence), budget) if len(shares) < self._most_rows else 0
            if tokens:
                shares.append(Share(sequence, tokens))
                budget -= tokens
            if tokens < self._ageing:
                self._passed_by[sequence] += 1
        return shares

    def _urgency(self, sequence: Sequence) -> tuple[int, int]:
        """Less is earlier. Of equals the one that was admitted first is."""
        priority, left = sequence.request.priority, _left(sequence)
        wanted = sequence.prefix.wanted - sequence.scheduled
        if wanted > 0:  # others wait for so many of its tokens
            priority, left = min(priority, sequence.prefix.urgency), min(left, wanted)
        return priority, left - self._ageing * self._passed_by[sequence]


def _left(sequence: Sequence) -> int:
    return len(sequence.tokens) - sequence.scheduled
