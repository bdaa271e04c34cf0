"""A model whose answers can be worked out by hand, for tests of everything around it.

Its KV of a token is the token, kept in real blocks, so KV that is misplaced, lost or
mixed up gives a wrong answer. The next token after tokens t[0..n) is

    (sum of (i + 1) * t[i]) mod vocab_size

at every temperature; the log-probability of that token is reported as 0, and that of a prompt
token at position p as -p.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from engine.plan import (
    LAST_SAMPLED,
    BatchRow,
    CopyBlocks,
    ExportKV,
    ImportKV,
    LoadBiases,
    RunBatch,
    StepOutcome,
    StepPlan,
)
from engine.types import PromptLogprobs, TokenLogprobs

MODEL_TYPE = "hexserve_fake"


def next_token(tokens: Sequence[int], vocab_size: int) -> int:
    """The answer, by hand."""
    return sum((i + 1) * t for i, t in enumerate(tokens)) % vocab_size


class FakeRunner:
    """Runs plans on a numpy pool of `num_blocks * block_size` tokens.

    A plan runs when it is waited for: as late as any device may run it. A step takes `step_s`
    seconds, as a stand-in for the devices' work.
    """

    def __init__(
        self, num_blocks: int, block_size: int, vocab_size: int, step_s: float = 0.0
    ) -> None:
        self._pool = np.full(num_blocks * block_size, -1, dtype=np.int32)
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._step_s = step_s
        self._last: dict[int, int] = {}  # slot → the token last sampled
        self._biases: dict[int, np.ndarray] = {}  # slot → ids; they change no answer

    def warm_up(self) -> None:
        """Nothing to compile."""

    @property
    def compiles_after_warm_up(self) -> int:
        return 0

    def dispatch(self, plan: StepPlan) -> Callable[[], StepOutcome]:
        """See engine.runner.Runner."""
        return partial(self.run, plan)

    def run(self, plan: StepPlan) -> StepOutcome:
        """Run one plan now."""
        outcome = StepOutcome()
        for entry in plan.entries:
            if isinstance(entry, ImportKV):
                tokens = np.asarray(entry.arrays[0])  # it may have come by way of a device
                self._pool[entry.slots] = tokens[0, : len(entry.slots), 0, 0]
            elif isinstance(entry, ExportKV):
                tokens = self._pool[entry.slots]
                outcome.exported[entry.read_id] = (tokens.reshape(1, -1, 1, 1).copy(),)
            elif isinstance(entry, CopyBlocks):
                blocks = self._pool.reshape(-1, self._block_size)
                blocks[list(entry.targets)] = blocks[list(entry.sources)]
            elif isinstance(entry, LoadBiases):
                self._biases[entry.slot] = np.array(entry.ids, np.int32)
            elif isinstance(entry, RunBatch):
                self._run_batch(entry, outcome)
        return outcome

    def _run_batch(self, batch: RunBatch, outcome: StepOutcome) -> None:
        if self._step_s:
            time.sleep(self._step_s)
        for row in batch.rows:
            positions = np.arange(row.stop)
            slots = row.blocks[positions // self._block_size] * self._block_size
            slots += positions % self._block_size
            self._pool[slots[row.start :]] = [
                self._last[row.slot] if token == LAST_SAMPLED else token for token in row.tokens
            ]
            if row.targets:
                outcome.prompt_logprobs[row.id] = self._scored(row, self._pool[slots])
            if row.sampling is not None:
                biases = self._biases[row.slot] if row.sampling.biases else ()
                if row.sampling.biases > len(biases):
                    raise ValueError(f"slot {row.slot} has {len(biases)} biases")
                weighted = self._pool[slots].astype(np.int64) * (positions + 1)
                token = int(weighted.sum() % self._vocab_size)
                outcome.tokens[row.id] = self._last[row.slot] = token
                wanted = row.sampling.params.top_logprobs
                if wanted is not None:
                    best = min(wanted, 1)
                    outcome.logprobs[row.id] = TokenLogprobs(0.0, (token,) * best, (0.0,) * best)

    def _scored(self, row: BatchRow, tokens: np.ndarray) -> PromptLogprobs:
        positions = np.arange(row.start + 1, row.start + 1 + len(row.targets))
        likeliest = [next_token(tokens[:end].tolist(), self._vocab_size) for end in positions]
        best = min(row.top_targets, 1)
        return PromptLogprobs(
            row.id,
            row.start + 1,
            -positions.astype(np.float32),
            np.array(likeliest, np.int32).reshape(-1, 1)[:, :best],
            np.zeros((len(positions), best), np.float32),
        )
