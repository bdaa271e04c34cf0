"""The fake model with windowed layers, whose KV of a token is the token as well.

It answers as engine.fake does where other layers see the whole context, else by the tokens of its
window alone. What a window shows must be there: a block that is free is overwritten (`spoil`), so
a token that was let go too early is noticed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.blocks import BlockPool, BlockState
from engine.fake import FakeRunner, next_token
from engine.plan import BatchRow, ExportKV, ImportKV, RunBatch, StepOutcome, StepPlan
from engine.scheduler import Scheduler
from tests.engine.helpers import VOCAB

SPOILT = -(10**6)


def next_in_window(tokens: list[int], reach: int) -> int:
    """The answer of windowed layers alone, by hand."""
    hidden = max(0, len(tokens) - reach)
    return next_token([0] * hidden + tokens[hidden:], VOCAB)


class WindowedFakeRunner(FakeRunner):
    """All layers see `reach` tokens; or some do, in a pool of `windowed_blocks` blocks."""

    def __init__(
        self, num_blocks: int, block_size: int, reach: int, windowed_blocks: int | None = None
    ) -> None:
        super().__init__(num_blocks, block_size, VOCAB)
        self._reach = reach
        self._windowed = None
        if windowed_blocks is not None:
            self._windowed = np.full(windowed_blocks * block_size, SPOILT, np.int32)

    def run(self, plan: StepPlan) -> StepOutcome:
        outcome = super().run(plan)
        if self._windowed is None:
            return outcome
        for entry in plan.entries:
            if isinstance(entry, ImportKV) and entry.windowed:
                self._windowed[entry.windowed_slots] = self._pool[entry.slots]
            elif isinstance(entry, ExportKV) and entry.windowed:
                seen = self._windowed[entry.windowed_slots]
                assert (seen == outcome.exported[entry.read_id][0].ravel()).all()
            elif isinstance(entry, RunBatch):
                for row in entry.rows:
                    self._check(row)
        return outcome

    def _check(self, row: BatchRow) -> None:
        assert self._windowed is not None
        positions = np.arange(max(0, row.start - self._reach + 1), row.stop)
        whole, windowed = (self._slots(table, positions) for table in row.tables)
        new = len(row.tokens)
        self._windowed[windowed[-new:]] = self._pool[whole[-new:]]
        assert (self._windowed[windowed] == self._pool[whole]).all(), "a window shows what is gone"

    def _run_batch(self, batch: RunBatch, outcome: StepOutcome) -> None:
        if self._windowed is not None:
            super()._run_batch(batch, outcome)
            return
        for row in batch.rows:
            positions = np.arange(max(0, row.start - self._reach + 1), row.stop)
            slots = self._slots(row.blocks, positions)
            self._pool[slots[-len(row.tokens) :]] = [
                self._last[row.slot] if token < 0 else token for token in row.tokens
            ]
            seen = self._pool[slots]
            assert (seen >= 0).all(), "a window shows what is gone"
            if row.sampling is not None:
                token = next_in_window([0] * int(positions[0]) + seen.tolist(), self._reach)
                outcome.tokens[row.id] = self._last[row.slot] = token

    def _slots(self, table: np.ndarray, positions: np.ndarray) -> Any:
        return table[positions // self._block_size] * self._block_size + (
            positions % self._block_size
        )

    def spoil(self, scheduler: Scheduler) -> None:
        """Overwrite what is free, as others would."""
        for group in scheduler._groups:
            pool = self._windowed if group.index else self._pool
            assert pool is not None
            pool.reshape(-1, self._block_size)[_free(group.pool)] = SPOILT


def _free(pool: BlockPool) -> list[int]:
    return [b for b in range(pool.num_blocks) if pool._state[b] is BlockState.FREE]
