"""PromptLogprobs ↔ wire. What comes from the wire is checked here, once."""

from __future__ import annotations

import numpy as np

from engine.types import MAX_TOP_LOGPROBS, PromptLogprobs, SequenceId
from protos import worker_pb2 as wire
from protos.attempt_codec import decode_attempt
from protos.errors import WireError

_FLOAT, _TOKEN = np.dtype("<f4"), np.dtype("<u4")


def encode_prompt_logprobs(scores: PromptLogprobs) -> wire.PromptLogprobs:
    attempt, choice = scores.id
    return wire.PromptLogprobs(
        request_id=attempt.request_id,
        attempt=attempt.attempt,
        choice=choice,
        start=scores.start,
        logprobs=scores.logprobs.astype(_FLOAT).tobytes(),
        top_ids=scores.top_ids.astype(_TOKEN).tobytes(),
        top_logprobs=scores.top_logprobs.astype(_FLOAT).tobytes(),
    )


def decode_prompt_logprobs(message: wire.PromptLogprobs) -> PromptLogprobs:
    """The inverse of `encode_prompt_logprobs`.

    Raises:
        WireError: the sizes do not fit together, or it begins at the first token.
    """
    own, ids, values = len(message.logprobs), len(message.top_ids), len(message.top_logprobs)
    count, rest = divmod(own, _FLOAT.itemsize)
    if rest or not count or ids != values or ids % own or ids // own > MAX_TOP_LOGPROBS:
        raise WireError(f"prompt log-probabilities of {own}, {ids} and {values} bytes")
    if not message.start:
        raise WireError("a log-probability of the first token")
    return PromptLogprobs(
        SequenceId(decode_attempt(message.request_id, message.attempt), message.choice),
        message.start,
        np.frombuffer(message.logprobs, _FLOAT),
        np.frombuffer(message.top_ids, _TOKEN).astype(np.int32).reshape(count, ids // own),
        np.frombuffer(message.top_logprobs, _FLOAT).reshape(count, ids // own),
    )
