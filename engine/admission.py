"""Who may begin: the queue, the device slots, and the blocks to begin with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from engine.exports import Exports
from engine.growth import Growth
from engine.layer_groups import LayerGroup
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
        self,
        limits: Limits,
        groups: tuple[LayerGroup, ...],
        exports: Exports,
        reuse: Reuse,
        growth: Growth,
    ) -> None:
        self.waiting = WaitingQueue()
        self._limits = limits
        self._groups = groups
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
            for group in self._groups:
                self._reserve(sequence, group, found)
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
        choices = [*beside, Sequence.of(request)]
        for group in self._groups:
            needed, pool = self._growth.most_blocks_together(choices, group), group.pool
            if needed > pool.num_blocks:
                return (
                    f"{needed} KV blocks of {pool.block_size} tokens are needed, "
                    f"this worker has {pool.num_blocks}"
                    + (" for windowed layers" if group.index else "")
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
        for group in self._groups:
            pool = group.pool
            evictable = pool.available - sum(map(pool.is_cached, found))
            needed = len(self._growth.first_entries(sequence, group)) - len(found)
            if needed + self._growth.headroom(group) > evictable:
                return False
        return True

    def _reserve(self, sequence: Sequence, group: LayerGroup, found: list[int]) -> None:
        """`found` is cached only where there is one group, all of whose blocks are kept."""
        entries = self._growth.first_entries(sequence, group)
        taken = group.pool.reserve(len(entries) - len(found))
        if group.reach is not None:
            sequence.given_back = entries.start
        unseen = [0] * entries.start
        sequence.tables[group.index] = np.array([*unseen, *found, *taken], np.int32)
