"""From a sequence's tokens to the pieces of text that a client sees.

Both streamed and whole answers are made of these pieces, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from engine.types import FinishReason, TokenDelta, TokenLogprobs
from router.errors import GenerationFailed
from router.stops import StopScanner


class IncrementalDecoder(Protocol):
    """What is needed of a detokenizer: text that no later token can change."""

    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that is now certain."""

    def flush(self) -> str:
        """The rest, when no more tokens will come."""


class ScoredToken(NamedTuple):
    """An output token with its log-probabilities and where its text begins in the output."""

    token: int
    logprobs: TokenLogprobs
    text_offset: int


@dataclass(slots=True)
class Piece:
    """A stretch of output: text and the tokens that have come since the piece before.

    `finish` is OpenAI's finish_reason, on the last piece only. Only that one may lack text.
    `echoed` is on the first piece only: the prompt's part of `logprobs`, where it is wanted.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    finish: str | None = None
    echoed: dict[str, list[Any]] | None = None


class OutputAssembler:
    """Detokenizes one sequence and ends it at a stop string.

    Args:
        decoder: a fresh detokenizer.
        stops: stop strings; never part of the output.
        stop_token_ids: a token that ends the sequence is counted but has no text.
        min_tokens: stop strings are only looked for in the text of later tokens.
        logprobs: whether the deltas carry log-probabilities.

    Attributes:
        completion_tokens: output tokens so far, the one that ended the sequence included.
    """

    def __init__(
        self,
        decoder: IncrementalDecoder,
        *,
        stops: Sequence[str],
        stop_token_ids: Collection[int],
        min_tokens: int = 0,
        logprobs: bool,
    ) -> None:
        self._decoder = decoder
        self._scanner = StopScanner(stops)
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self._logprobs = logprobs
        self._decoded_length = 0
        self._piece = Piece()
        # Nothing but text is wanted of a token; only scored ones tell how long it is so far.
        self._plain = not logprobs and not stops
        self.completion_tokens = 0

    def push(self, delta: TokenDelta) -> Piece | None:
        """Take the next delta; return a piece once there is text, or the last piece.

        Tokens after the one that completes a stop string are dropped.

        Raises:
            GenerationFailed: log-probabilities were asked for and are missing.
        """
        piece = self._piece
        if self._plain and delta.finish is None and not piece.tokens:  # nearly always
            self.completion_tokens += len(delta.tokens)
            piece.tokens += delta.tokens
            piece.text = self._decoder.push(delta.tokens)
            return self._release(None) if piece.text else None
        for position, token in enumerate(delta.tokens):
            if self._logprobs:
                if delta.logprobs is None or len(delta.logprobs) <= position:
                    raise GenerationFailed(
                        f"no log-probabilities came with output token {delta.index + position}"
                    )
                scored = ScoredToken(token, delta.logprobs[position], self._decoded_length)
                piece.scored.append(scored)
            piece.tokens.append(token)
            self.completion_tokens += 1
            ends_here = (
                delta.finish is FinishReason.STOP
                and position == len(delta.tokens) - 1
                and token in self._stop_token_ids
            )
            if not ends_here:
                self._scan(self._decoder.push((token,)))
            if self._scanner.matched is not None:
                return self._release(FinishReason.STOP.value)
        if delta.finish is not None:
            self._scan(self._decoder.flush())
            if self._scanner.matched is not None:
                return self._release(FinishReason.STOP.value)
            piece.text += self._scanner.flush()
            return self._release(delta.finish.value)
        return self._release(None) if piece.text else None

    def _scan(self, text: str) -> None:
        self._decoded_length += len(text)
        free = self.completion_tokens <= self._min_tokens
        self._piece.text += self._scanner.pass_on(text) if free else self._scanner.push(text)

    def _release(self, finish: str | None) -> Piece:
        piece, self._piece = self._piece, Piece()
        piece.finish = finish
        return piece


def join(pieces: Sequence[Piece]) -> Piece:
    """The whole output as one piece."""
    return Piece(
        text="".join(piece.text for piece in pieces),
        tokens=[token for piece in pieces for token in piece.tokens],
        scored=[scored for piece in pieces for scored in piece.scored],
        finish=pieces[-1].finish if pieces else None,
        echoed=pieces[0].echoed if pieces else None,
    )
