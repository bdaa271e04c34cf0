"""What bounds a step, the queue, and a single request."""

from __future__ import annotations

from dataclasses import dataclass

from engine.types import SequenceRequest


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a step and the queue.

    Attributes:
        max_seqs: sequences that compute or import at once; the number of device slots.
        max_prefill_seqs: prompts that join one step.
        max_batch_tokens: tokens of one step; a prompt that is longer is computed in chunks.
        max_waiting: sequences in the queue; one more is rejected.
        max_model_len: prompt and output tokens of one sequence.
        max_exported_fraction: share of the blocks that prefills for other workers hold, from
            their admission until they have been fetched, at which no further one begins.
        interleave_prefills: prompts take turns by what they have left; see engine.prefill_order.
    """

    max_seqs: int
    max_prefill_seqs: int
    max_batch_tokens: int
    max_waiting: int
    max_model_len: int
    vocab_size: int
    max_exported_fraction: float = 1.0
    interleave_prefills: bool = False

    def refusal(self, request: SequenceRequest) -> str | None:
        """Why `request` can never be computed, whatever else there is to do; None if it can."""
        known = request.known_tokens
        if not request.prompt:
            return "the prompt is empty"
        if len(known) >= self.max_model_len:
            return (
                f"{len(known)} tokens leave no room for output: "
                f"max_model_len is {self.max_model_len}"
            )
        if min(known) < 0 or max(known) >= self.vocab_size:
            return f"a token id is outside the vocabulary of {self.vocab_size}"
        if any(token >= self.vocab_size for token, _ in request.sampling.logit_bias):
            return f"logit_bias names a token outside the vocabulary of {self.vocab_size}"
        if max(request.sampling.stop_token_ids, default=0) >= self.vocab_size:
            return f"a stop token is outside the vocabulary of {self.vocab_size}"
        if len(request.output) >= request.sampling.max_tokens:
            return f"max_tokens={request.sampling.max_tokens} tokens have been produced already"
        return None
