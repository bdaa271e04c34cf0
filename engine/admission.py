"""Who may begin: the queue, the device slots, and the blocks to begin with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from engine.blocks import BlockPool
from engine.exports import Exports
from engine.growth import Growth
from engine.limits import Limits
from engine.reuse import Reuse
from engine.sequence import Sequence
from engine.types import SequenceRequest
from engine.waiting import WaitingQueue


class Admission:
    """In the order of the queue; but one that waits for a prefix that is being computed lets
    others pass. What is admitted has its slot and the blocks to begin with; see engine.growth.
    """

    def __init__(
        self, limits: Limits, pool: BlockPool, exports: Exports, reuse: Reuse, growth: Growth
    ) -> None:
        self.waiting = WaitingQueue()
        self._limits = limits
        self._pool = pool
        self._exports = exports
        self._reuse = reuse
        self._growth = growth
        self._slots = list(range(limits.max_seqs - 1, -1, -1))

    @property
    def possible(self) -> bool:
        """The next in the queue has room."""
        return self._next() is not None

    @property
    def taken_slots(self) -> int:
        return self._limits.max_seqs - len(self._slots)

    def admitted(self) -> Iterator[Sequence]:
        """Take those that have room off the queue, each with its slot and blocks."""
        while (admissible := self._next()) is not None:
            sequence, found = admissible
            self.waiting.remove(sequence)
            self._reuse.begin(sequence, found)
            taken = self._pool.reserve(self._growth.first_blocks(sequence) - len(found))
            sequence.blocks = np.array([*found, *taken], np.int32)
            sequence.slot = self._slots.pop()
            yield sequence

    def free_slot(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            self._slots.append(sequence.slot)
            sequence.slot = -1

    def refusal(self, request: SequenceRequest, beside: Iterable[Sequence] = ()) -> str | None:
        """Why `request` can never be computed here, with those `beside` it in its attempt."""
        refusal = self._limits.refusal(request)
        if refusal is not None:
            return refusal
        needed = self._growth.most_blocks_together((*beside, Sequence.of(request)))
        if needed > self._pool.num_blocks:
            return (
                f"{needed} KV blocks of {self._pool.block_size} tokens are needed, "
                f"this worker has {self._pool.num_blocks}"
            )
        return None

    def check_slots(self, taken: list[int]) -> None:
        """Raise AssertionError when the slots that are not free are others than `taken`."""
        assert sorted([*taken, *self._slots]) == list(range(self._limits.max_seqs)), "slots"

    def _next(self) -> tuple[Sequence, list[int]] | None:
        """The first that waits for nothing but room, with the cached blocks that it begins with.

        None when there is no room for it, or no such sequence.
        """
        if not self._slots:
            return None
        for sequence in self.waiting:
            found = self._reuse.find(sequence)
            if found is not None:
                return (sequence, found) if self._has_room(sequence, found) else None
        return None

    def _has_room(self, sequence: Sequence, found: list[int]) -> bool:
        if not sequence.decodes_here and self._exports.full:
            return False
        evictable = self._pool.available - sum(map(self._pool.is_cached, found))
        needed = self._growth.first_blocks(sequence) - len(found)
        return needed + self._growth.headroom <= evictable
