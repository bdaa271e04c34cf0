"""What a worker has still to tell one router. Never waits; merges what is unsent."""

from __future__ import annotations

import asyncio
from collections import deque

from engine.types import AttemptId, Failure, PromptLogprobs, SequenceId, TokenDelta
from protos import worker_pb2 as wire
from protos.codec import encode_delta, encode_failure, encode_rejected
from protos.logprob_codec import encode_prompt_logprobs
from protos.singles_codec import SequenceNumbers, encode_singles, is_single

MAX_UNSENT_TOKENS = 1_000_000
PROMPT_TOKENS_PER_PIECE = 2048
PIECES_PER_STEP = 16
"""So that prompts' log-probabilities take a few MiB of a message at most."""


class OutboxFull(Exception):
    """The router has stopped reading: its session must end."""


class Outbox:
    """Collects items until the stream takes them as one Step. For one asyncio loop."""

    def __init__(self) -> None:
        self._tokens: dict[SequenceId, TokenDelta | wire.Tokens] = {}  # several as a message
        self._numbers = SequenceNumbers()
        self._scores: deque[PromptLogprobs] = deque()
        self._failed: list[wire.Failed] = []
        self._rejected: list[wire.Rejected] = []
        self._unsent = 0
        self._filled = asyncio.Event()

    def add_delta(self, delta: TokenDelta) -> None:
        """Raises OutboxFull when MAX_UNSENT_TOKENS would be exceeded."""
        self._count(len(delta.tokens))
        self._numbers.add(delta.id)
        unsent = self._tokens.get(delta.id)
        if unsent is None:
            self._tokens[delta.id] = delta
        else:
            # Deltas of a sequence come in order and without gaps.
            if isinstance(unsent, TokenDelta):
                unsent = self._tokens[delta.id] = encode_delta(unsent)
            message = encode_delta(delta)
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

    def forget(self, attempt: AttemptId) -> None:
        """No more deltas of it will be added; what is unsent is still sent."""
        self._numbers.forget(attempt)

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
        tokens, singles = self._take_tokens()
        step = wire.Step(
            tokens=tokens,
            singles=singles,
            failed=self._failed,
            rejected=self._rejected,
            prompt_logprobs=map(encode_prompt_logprobs, pieces),
        )
        self._failed.clear()
        self._rejected.clear()
        self._unsent = sum(len(scores.logprobs) for scores in self._scores)
        if not self._scores:
            self._filled.clear()
        return step

    def _take_tokens(self) -> tuple[list[wire.Tokens], wire.Singles | None]:
        messages: list[wire.Tokens] = []
        numbers: list[int] = []
        singles: list[TokenDelta] = []
        for sequence, unsent in self._tokens.items():
            if not isinstance(unsent, TokenDelta):
                unsent.number = self._numbers.tell(sequence)
                messages.append(unsent)
            elif (number := self._numbers.told(sequence)) and is_single(unsent):
                numbers.append(number)
                singles.append(unsent)
            else:
                messages.append(encode_delta(unsent, self._numbers.tell(sequence)))
        self._tokens.clear()
        return messages, encode_singles(numbers, singles) if singles else None

    def _count(self, tokens: int) -> None:
        self._unsent += tokens
        if self._unsent > MAX_UNSENT_TOKENS:
            raise OutboxFull(f"{self._unsent} tokens are unsent")
