"""Prefills whose KV other workers fetch, and how much of the pool they may hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from engine.layer_groups import LayerGroup
from engine.sequence import Sequence, SequenceState


class Exports:
    """By transfer id, from the prefill's admission until its KV has been fetched.

    Another is admitted while they hold less than `fraction` of each pool, which they exceed by one
    prompt at most. What they hold comes back as readers fetch it, which no admission here can hold
    up: so whatever waits for that is admitted in the end.
    """

    def __init__(self, groups: tuple[LayerGroup, ...], fraction: float) -> None:
        self._most_blocks = [(each, int(fraction * each.pool.num_blocks)) for each in groups]
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
        return bool(self._sequences) and any(
            self._hold(group, most) for group, most in self._most_blocks
        )

    def _hold(self, group: LayerGroup, blocks: int) -> bool:
        """Whether they have so many blocks of a group."""
        held = [group.held(sequence) for sequence in self]
        if sum(map(len, held)) < blocks:
            return False
        # Blocks that several of them share count once.
        return len(np.unique(np.concatenate(held))) >= blocks

    def check_owners(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError when they are not those of `sequences` that export KV."""
        states = (SequenceState.PREFILLING, SequenceState.EXPORTED)
        wanted = {s.id for s in sequences if s.state in states and not s.decodes_here}
        assert wanted == {s.id for s in self}, "the exports differ"
