"""What a dispatched step gives back, fetched from the devices when it is wanted."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.plan import ExportKV, RunBatch, StepOutcome
from engine.sampling import Sampled
from engine.types import KVArrays, TokenLogprobs


@dataclass(slots=True)
class Readback:
    """The results of one step's entries, as arrays that may still be being computed."""

    batches: list[tuple[RunBatch, Sampled]] = field(default_factory=list)
    exports: list[tuple[ExportKV, KVArrays]] = field(default_factory=list)

    def outcome(self) -> StepOutcome:
        """Wait for all of them."""
        outcome = StepOutcome()
        for batch, sampled in self.batches:
            _read_batch(batch, sampled, outcome)
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
