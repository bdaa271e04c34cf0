"""Prefills whose KV other workers fetch, and how much of the pool they may hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from engine.sequence import Sequence, SequenceState


class Exports:
    """By transfer id, from the prefill's admission until its KV has been fetched.

    Another is admitted while they hold less than `most_blocks`, which they exceed by one prompt
    at most. What they hold comes back as readers fetch it, which no admission here can hold up:
    so whatever waits for that is admitted in the end.
    """

    def __init__(self, most_blocks: int) -> None:
        self._most_blocks = most_blocks
        self._sequences: dict[bytes, Sequence] = {}

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def get(self, transfer_id: bytes) -> Sequence | None:
        return self._sequences.get(transfer_id)

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.request.transfer_id] = sequence

    def discard(self, sequence: Sequence) -> None:
        if self._sequences.get(sequence.request.transfer_id) is sequence:
            del self._sequences[sequence.request.transfer_id]

    @property
    def full(self) -> bool:
        """No prefill may be admitted beside these."""
        if not self._sequences or sum(len(s.blocks) for s in self) < self._most_blocks:
            return False
        # Blocks that several of them share count once.
        held = np.unique(np.concatenate([s.blocks for s in self]))
        return len(held) >= self._most_blocks

    def check_owners(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError when they are not those of `sequences` that export KV."""
        states = (SequenceState.PREFILLING, SequenceState.EXPORTED)
        wanted = {s.id for s in sequences if s.state in states and not s.decodes_here}
        assert wanted == {s.id for s in self}, "the exports differ"
