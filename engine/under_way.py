"""Steps that have been dispatched and not been committed yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from engine.layer_groups import LayerGroup
from engine.plan import BatchRow, ExportKV, ImportKV, RunBatch, StepPlan
from engine.sequence import Sequence


class Step(NamedTuple):
    """`sequences` are those of the batch's rows, in order; some may have ended since."""

    number: int
    plan: StepPlan
    sequences: tuple[Sequence, ...]

    @property
    def rows(self) -> Iterator[tuple[BatchRow, Sequence]]:
        batches = (entry for entry in self.plan.entries if isinstance(entry, RunBatch))
        rows = (row for batch in batches for row in batch.rows)
        return zip(rows, self.sequences, strict=True)


class StepsUnderWay:
    """In the order of their dispatch, numbered from 1."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        self.next_number = 1

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, plan: StepPlan, sequences: Iterable[Sequence]) -> None:
        self._steps.append(Step(self.next_number, plan, tuple(sequences)))
        self.next_number += 1

    def pop(self) -> Step:
        """The one dispatched first.

        Raises:
            IndexError: none is under way.
        """
        return self._steps.popleft()

    def blocks(self, group: LayerGroup) -> set[int]:
        """All blocks of a group that they see."""
        named: set[int] = set()
        for step in self._steps:
            for entry in step.plan.entries:
                if isinstance(entry, (ExportKV, ImportKV)):
                    slots = entry.windowed_slots if group.index else entry.slots
                    if slots is not None:
                        named.update((slots // group.pool.block_size).tolist())
            for row, _ in step.rows:
                seen = row.tables[group.index][group.first_seen(row.start) :]
                named.update(seen.tolist())
        return named

    def check_sequences(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError when what `sequences` await is not what the steps hold."""
        for sequence in sequences:
            rows = [r for step in self._steps for r, s in step.rows if s is sequence]
            tokens = sum(len(row.tokens) for row in rows)
            assert sequence.scheduled == sequence.computed + tokens, f"{sequence.id} scheduled"
            assert sequence.unread == sum(row.sampling is not None for row in rows), "unread"
            assert sequence.last_step < self.next_number, f"{sequence.id} is ahead"
