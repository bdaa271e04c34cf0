"""What a dispatched step gives back, fetched from the devices when it is wanted."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.plan import ExportKV, RunBatch, StepOutcome
from engine.sampling import Sampled, Scores
from engine.types import KVArrays, PromptLogprobs, TokenLogprobs


@dataclass(slots=True)
class Readback:
    """The results of one step's entries, as arrays that may still be being computed."""

    batches: list[tuple[RunBatch, Sampled, Scores | None]] = field(default_factory=list)
    exports: list[tuple[ExportKV, KVArrays]] = field(default_factory=list)

    def outcome(self) -> StepOutcome:
        """Wait for all of them."""
        outcome = StepOutcome()
        for batch, sampled, scores in self.batches:
            _read_batch(batch, sampled, outcome)
            if scores is not None and any(row.targets for row in batch.rows):
                _read_scores(batch, scores, outcome)
        for entry, arrays in self.exports:
            if not entry.on_device:
                count = entry.stop - entry.start
                arrays = tuple(np.asarray(array)[:, :count] for array in arrays)
            outcome.exported[entry.read_id] = arrays
        return outcome


def _read_batch(batch: RunBatch, sampled: Sampled, outcome: StepOutcome) -> None:
    # Fetched even where no row samples: it is what tells that the step has been computed.
    tokens = np.asarray(sampled.tokens).tolist()
    scores: list[np.ndarray] | None = None
    for index, row in enumerate(batch.rows):
        if row.sampling is None:
            continue
        outcome.tokens[row.id] = tokens[index]
        best = row.sampling.params.top_logprobs
        if best is None:
            continue
        if scores is None:  # an array each costs as much as the tokens: few ask for them
            scores = [np.asarray(array) for array in sampled[1:]]
        logprobs, top_ids, top_logprobs = scores
        outcome.logprobs[row.id] = TokenLogprobs(
            float(logprobs[index]),
            tuple(top_ids[index, :best].tolist()),
            tuple(top_logprobs[index, :best].tolist()),
        )


def _read_scores(batch: RunBatch, scores: Scores, outcome: StepOutcome) -> None:
    logprobs, top_ids, top_logprobs = map(np.asarray, scores)
    stop = 0
    for row in batch.rows:
        if not row.targets:
            continue
        start, stop = stop, stop + len(row.targets)
        own = slice(start, stop)
        top = (own, slice(row.top_targets))
        # Copies: the whole arrays would live as long as the longest lived part.
        outcome.prompt_logprobs[row.id] = PromptLogprobs(
            row.id, row.start + 1, logprobs[own].copy(), top_ids[top].copy(),
            top_logprobs[top].copy(),
        )  # fmt: skip
