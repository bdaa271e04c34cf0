"""What a worker has still to tell one router. Never waits; merges what is unsent."""

from __future__ import annotations

import asyncio
from collections import deque

from engine.types import AttemptId, Failure, PromptLogprobs, SequenceId, TokenDelta
from protos import worker_pb2 as wire
from protos.codec import encode_delta, encode_failure, encode_rejected
from protos.logprob_codec import encode_prompt_logprobs

MAX_UNSENT_TOKENS = 1_000_000
PROMPT_TOKENS_PER_PIECE = 2048
PIECES_PER_STEP = 16
"""So that prompts' log-probabilities take a few MiB of a message at most."""


class OutboxFull(Exception):
    """The router has stopped reading: its session must end."""


class Outbox:
    """Collects items until the stream takes them as one Step. For one asyncio loop."""

    def __init__(self) -> None:
        self._tokens: dict[SequenceId, wire.Tokens] = {}
        self._scores: deque[PromptLogprobs] = deque()
        self._failed: list[wire.Failed] = []
        self._rejected: list[wire.Rejected] = []
        self._unsent = 0
        self._filled = asyncio.Event()

    def add_delta(self, delta: TokenDelta) -> None:
        """Raises OutboxFull when MAX_UNSENT_TOKENS would be exceeded."""
        self._count(len(delta.tokens))
        message = encode_delta(delta)
        unsent = self._tokens.get(delta.id)
        if unsent is None:
            self._tokens[delta.id] = message
        else:
            # Deltas of a sequence come in order and without gaps.
            unsent.tokens.extend(message.tokens)
            unsent.logprobs.extend(message.logprobs)
            unsent.finish = message.finish
        self._filled.set()

    def add_prompt_logprobs(self, scores: PromptLogprobs) -> None:
        """Raises OutboxFull as `add_delta` does; each token counts."""
        self._count(len(scores.logprobs))
        self._scores.extend(scores.pieces(PROMPT_TOKENS_PER_PIECE))
        self._filled.set()

    def add_failure(self, failure: Failure) -> None:
        self._failed.append(encode_failure(failure))
        self._filled.set()

    def add_rejected(self, attempt: AttemptId, reason: str) -> None:
        self._rejected.append(encode_rejected(attempt, reason))
        self._filled.set()

    def nudge(self) -> None:
        """Have `take` return now, be there something to send or not."""
        self._filled.set()

    @property
    def empty(self) -> bool:
        """Whether nothing is unsent."""
        return not (self._tokens or self._scores or self._failed or self._rejected)

    async def take(self, wait_s: float) -> wire.Step:
        """What is unsent, as soon as there is something, or an empty Step after `wait_s`.

        Everything but prompts' log-probabilities, of which a Step carries a few pieces.
        """
        if not self._filled.is_set():
            try:
                async with asyncio.timeout(wait_s):
                    await self._filled.wait()
            except TimeoutError:
                return wire.Step()
        pieces = [self._scores.popleft() for _ in range(min(PIECES_PER_STEP, len(self._scores)))]
        step = wire.Step(
            tokens=self._tokens.values(),
            failed=self._failed,
            rejected=self._rejected,
            prompt_logprobs=map(encode_prompt_logprobs, pieces),
        )
        self._tokens.clear()
        self._failed.clear()
        self._rejected.clear()
        self._unsent = sum(len(scores.logprobs) for scores in self._scores)
        if not self._scores:
            self._filled.clear()
        return step

    def _count(self, tokens: int) -> None:
        self._unsent += tokens
        if self._unsent > MAX_UNSENT_TOKENS:
            raise OutboxFull(f"{self._unsent} tokens are unsent")
