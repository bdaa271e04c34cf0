"""KV blocks for sequences that decode, as they come to need them. Plain Python, no jax.

A sequence begins with blocks for the tokens that it has and SPARE_BLOCKS more, not with all that
its longest answer may take. When one needs another block and there is none, the least important
attempt, and of equals the youngest, is preempted: its sequences lose all that they have here, and
its router has them computed again, from prompt and tokens so far, on a prefill worker.

The oldest of the most important is never preempted, and each can have all the blocks of a pool but
those exported. So it always comes to its end, whatever else there is, and then the next one. An
attempt is as old as the first of its sequences.

Windowed layers need no more blocks for a long sequence than for their window. While its prompt is
computed a sequence gives none of them back, but uses them again, so that it needs none either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.blocks import BlockPool
from engine.layer_groups import LayerGroup, all_kept
from engine.limits import Limits
from engine.sequence import Sequence, SequenceState
from engine.types import AttemptId, Role

SPARE_BLOCKS = 1
"""What a sequence begins with beside the blocks of its tokens, to be decoding for a while."""


class Growth:
    """The sequences that decode here or will, from their admission to their end."""

    def __init__(self, limits: Limits, groups: tuple[LayerGroup, ...]) -> None:
        self._max_model_len = limits.max_model_len
        self._max_batch_tokens = limits.max_batch_tokens
        self._groups = groups
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

    def most_blocks(self, sequence: Sequence, group: LayerGroup) -> int:
        """Blocks for all the KV that this worker may have to hold for it at once."""
        computes = Role.PREFILL in sequence.request.roles
        at_once = self._max_batch_tokens if computes else 1
        return group.most_seen(at_once, self._longest(sequence))

    def first_entries(self, sequence: Sequence, group: LayerGroup) -> range:
        """The entries of its table that it begins with."""
        tokens = len(sequence.tokens)
        computes = Role.PREFILL in sequence.request.roles
        begin = 0 if computes else group.first_seen(tokens)
        most = begin + self.most_blocks(sequence, group)
        return range(begin, min(most, group.pool.blocks_for(tokens) + SPARE_BLOCKS))

    def most_blocks_together(self, sequences: Iterable[Sequence], group: LayerGroup) -> int:
        """The same for all choices of an attempt; what those of a prompt share counts once."""
        needed, prompts = 0, set[bytes]()
        for sequence in sequences:
            request = sequence.request
            needed += self.most_blocks(sequence, group)
            if request.group in prompts:
                needed -= len(request.prompt) // group.pool.block_size
            elif request.group and all_kept(self._groups):
                prompts.add(request.group)
        return needed

    def headroom(self, group: LayerGroup) -> int:
        """Blocks that are not for others to begin with, as those that decode need them soon."""
        return sum(
            max(
                self._lacks(s, group),
                len(group.held(s)) < group.most_seen(1, self._longest(s)),
            )
            for s in self._running
            if self._decodes(s)
        )

    def grow(self, preempt: Callable[[Sequence], None]) -> list[Sequence]:
        """Those that decode in the next step, each with the blocks for it.

        Not among them is one that has to wait, for blocks that steps under way still name or that
        are exported. `preempt` is called with a sequence of each attempt that loses its blocks,
        and ends that attempt.
        """
        ready = [sequence for sequence in self._running if self._decodes(sequence)]
        for group in self._groups:
            ready = self._grow(group, ready, preempt)
        return ready

    def _grow(
        self, group: LayerGroup, decoding: list[Sequence], preempt: Callable[[Sequence], None]
    ) -> list[Sequence]:
        """See `grow`; those of `decoding` that have their blocks of one group."""
        ready, wanted, pool = list[Sequence](), 0, group.pool
        for sequence in decoding:
            if sequence not in self._running:
                continue
            lacks = group.reuse(sequence, sequence.scheduled, sequence.length)
            group.give_back(sequence, sequence.scheduled)
            wanted += lacks
            while lacks and _short_of(pool, wanted) and sequence in self._running:
                youngest = self._youngest()
                if youngest is None:
                    break  # what it lacks is exported, and comes back by itself
                preempt(youngest)
            if sequence not in self._running:
                wanted -= lacks
            elif not lacks:
                ready.append(sequence)
            elif wanted <= pool.available:
                wanted -= lacks
                group.extend(sequence, pool.reserve(lacks))
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

    def _decodes(self, sequence: Sequence) -> bool:
        """In the next step, that is: none under way samples the last token it may have."""
        most = sequence.most_tokens(self._max_model_len)
        return sequence.state is SequenceState.DECODING and sequence.length < most

    def _lacks(self, sequence: Sequence, group: LayerGroup) -> int:
        """Blocks that its next row names, and that it does not have."""
        table = sequence.tables[group.index]
        return max(0, group.pool.blocks_for(sequence.length) - len(table))

    def _longest(self, sequence: Sequence) -> int:
        """Tokens whose KV this worker may have to hold for it."""
        tokens = len(sequence.tokens)
        if sequence.decodes_here:
            # The KV of the very last token is never needed.
            tokens = max(sequence.most_tokens(self._max_model_len) - 1, tokens)
        return tokens


def _short_of(pool: BlockPool, blocks: int) -> bool:
    """So many will not be there even when the steps under way have ended."""
    return blocks > pool.available + pool.retired
