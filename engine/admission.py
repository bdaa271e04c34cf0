"""Who may begin: the queue, the device slots, and how many blocks a sequence may come to need."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.blocks import BlockPool
from engine.exports import Exports
from engine.limits import Limits
from engine.sequence import Sequence
from engine.types import SequenceRequest
from engine.waiting import WaitingQueue


class Admission:
    """In the order of the queue. What is admitted has its slot and every block that it can ever
    need here, so nothing that runs can run out of blocks.
    """

    def __init__(self, limits: Limits, pool: BlockPool, exports: Exports) -> None:
        self.waiting = WaitingQueue()
        self._limits = limits
        self._pool = pool
        self._exports = exports
        self._slots = list(range(limits.max_seqs - 1, -1, -1))

    @property
    def possible(self) -> bool:
        """The first in the queue has room."""
        return bool(self.waiting) and self._has_room(self.waiting.first)

    @property
    def taken_slots(self) -> int:
        return self._limits.max_seqs - len(self._slots)

    def admitted(self) -> Iterator[Sequence]:
        """Take those that have room off the queue, each with its slot and blocks."""
        while self.possible:
            sequence = self.waiting.popleft()
            taken = self._pool.reserve(self._blocks_of(sequence))
            sequence.blocks = np.array(taken, np.int32)
            sequence.slot = self._slots.pop()
            yield sequence

    def free_slot(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            self._slots.append(sequence.slot)
            sequence.slot = -1

    def refusal(self, request: SequenceRequest) -> str | None:
        """Why `request` can never be computed here; None when it can."""
        refusal = self._limits.refusal(request)
        if refusal is not None:
            return refusal
        needed = self._blocks_of(Sequence.of(request))
        if needed > self._pool.num_blocks:
            return (
                f"{needed} KV blocks of {self._pool.block_size} tokens are needed, "
                f"this worker has {self._pool.num_blocks}"
            )
        return None

    def check_slots(self, taken: list[int]) -> None:
        """Raise AssertionError when the slots that are not free are others than `taken`."""
        assert sorted([*taken, *self._slots]) == list(range(self._limits.max_seqs)), "slots"

    def _has_room(self, sequence: Sequence) -> bool:
        limited = not sequence.decodes_here and self._exports.full
        return bool(self._slots) and self._blocks_of(sequence) <= self._pool.free and not limited

    def _blocks_of(self, sequence: Sequence) -> int:
        """Blocks for all the tokens whose KV this worker may have to hold for `sequence`."""
        tokens = len(sequence.tokens)
        if sequence.decodes_here:
            # The KV of the very last token is never needed.
            tokens = max(sequence.most_tokens(self._limits.max_model_len) - 1, tokens)
        return self._pool.blocks_for(tokens)
