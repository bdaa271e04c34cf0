"""KV blocks for sequences that decode, as they come to need them. Plain Python, no jax.

A sequence begins with blocks for the tokens that it has and SPARE_BLOCKS more, not with all that
its longest answer may take. When one needs another block and there is none, the least important
attempt, and of equals the youngest, is preempted: its sequences lose all that they have here, and
its router has them computed again, from prompt and tokens so far, on a prefill worker.

The oldest of the most important is never preempted, and each can have all the blocks of the pool
but those exported. So it always comes to its end, whatever else there is, and then the next one.
An attempt is as old as the first of its sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from engine.blocks import BlockPool
from engine.limits import Limits
from engine.sequence import Sequence, SequenceState
from engine.types import AttemptId

SPARE_BLOCKS = 1
"""What a sequence begins with beside the blocks of its tokens, to be decoding for a while."""


class Growth:
    """The sequences that decode here or will, from their admission to their end."""

    def __init__(self, limits: Limits, pool: BlockPool) -> None:
        self._max_model_len = limits.max_model_len
        self._pool = pool
        # As the queue has them: by priority, lower first, and of equals the oldest first.
        self._running: dict[Sequence, None] = {}

    def begin(self, sequence: Sequence) -> None:
        """It is admitted, as the youngest of its priority."""
        if not sequence.decodes_here:
            return
        last = next(reversed(self._running), sequence)
        self._running[sequence] = None
        if last.request.priority > sequence.request.priority:
            ordered = sorted(self._running, key=lambda each: each.request.priority)
            self._running = dict.fromkeys(ordered)

    def end(self, sequence: Sequence) -> None:
        """Idempotent."""
        self._running.pop(sequence, None)

    def most_blocks(self, sequence: Sequence) -> int:
        """Blocks for all the tokens whose KV this worker may have to hold for it."""
        tokens = len(sequence.tokens)
        if sequence.decodes_here:
            # The KV of the very last token is never needed.
            tokens = max(sequence.most_tokens(self._max_model_len) - 1, tokens)
        return self._pool.blocks_for(tokens)

    def most_blocks_together(self, sequences: Iterable[Sequence]) -> int:
        """The same for all choices of an attempt; what the choices of a group share counts once."""
        needed, groups = 0, set[bytes]()
        for sequence in sequences:
            request = sequence.request
            needed += self.most_blocks(sequence)
            if request.group in groups:
                needed -= len(request.prompt) // self._pool.block_size
            elif request.group:
                groups.add(request.group)
        return needed

    def first_blocks(self, sequence: Sequence) -> int:
        """Blocks that it begins with."""
        first = self._pool.blocks_for(len(sequence.tokens)) + SPARE_BLOCKS
        return min(self.most_blocks(sequence), first)

    @property
    def headroom(self) -> int:
        """Blocks that are not for others to begin with, as those that decode need them soon."""
        return sum(
            max(self._lacks(s), len(s.blocks) < self.most_blocks(s))
            for s in self._running
            if self._decodes(s)
        )

    def grow(self, preempt: Callable[[Sequence], None]) -> list[Sequence]:
        """Those that decode in the next step, each with the blocks for it.

        Not among them is one that has to wait, for blocks that steps under way still name or that
        are exported. `preempt` is called with a sequence of each attempt that loses its blocks,
        and ends that attempt.
        """
        ready, wanted = list[Sequence](), 0
        for sequence in tuple(self._running):
            if sequence not in self._running or not self._decodes(sequence):
                continue
            lacks = self._lacks(sequence)
            wanted += lacks
            while lacks and self._short_of(wanted) and sequence in self._running:
                youngest = self._youngest()
                if youngest is None:
                    break  # what it lacks is exported, and comes back by itself
                preempt(youngest)
            if sequence not in self._running:
                wanted -= lacks
            elif not lacks:
                ready.append(sequence)
            elif wanted <= self._pool.available:
                wanted -= lacks
                taken = np.array(self._pool.reserve(lacks), np.int32)
                sequence.blocks = np.concatenate([sequence.blocks, taken])
                ready.append(sequence)
        # One that had got its blocks may have gone since, with another of its attempt.
        return [sequence for sequence in ready if sequence in self._running]

    def check_owners(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError when they are not those of `sequences` that decode here."""
        states = (SequenceState.PREFILLING, SequenceState.IMPORTING, SequenceState.DECODING)
        wanted = {s.id for s in sequences if s.decodes_here and s.state in states}
        assert wanted == {s.id for s in self._running}, "those that grow differ"

    def _youngest(self) -> Sequence | None:
        """One of the youngest attempt; None where that is the oldest too."""
        firsts: dict[AttemptId, Sequence] = {}
        for sequence in self._running:
            firsts.setdefault(sequence.id.attempt, sequence)
        return next(reversed(firsts.values())) if len(firsts) > 1 else None

    def _short_of(self, blocks: int) -> bool:
        """So many will not be there even when the steps under way have ended."""
        return blocks > self._pool.available + self._pool.retired

    def _decodes(self, sequence: Sequence) -> bool:
        """In the next step, that is: none under way samples the last token it may have."""
        most = sequence.most_tokens(self._max_model_len)
        return sequence.state is SequenceState.DECODING and sequence.length < most

    def _lacks(self, sequence: Sequence) -> int:
        """Blocks that its next row names, and that it does not have."""
        return max(0, self._pool.blocks_for(sequence.length) - len(sequence.blocks))
