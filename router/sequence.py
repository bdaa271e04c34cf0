"""One request on its way: prompt tokens in, pieces of text out, figures recorded."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, aclosing
from typing import Any, Protocol

from engine.types import FinishReason, SamplingParams, TokenDelta
from router.context import GatewayContext
from router.errors import DeadlinePassed, GenerationFailed
from router.output import OutputAssembler, Piece
from router.prompt_scores import echoed_logprobs
from router.record import RequestRecord
from router.sampling import RequestOptions
from router.siblings import Siblings


class PieceStream(Protocol):
    """Where pieces can be sent on the spot; see router.generation.Tap."""

    @property
    def has_room(self) -> bool:
        """Whether a piece may be added now."""

    def add(self, piece: Piece) -> None:
        """One that is not the last."""

    def write(self) -> None:
        """Send those added."""


class TextSequence:
    """The output of one prompt.

    Args:
        sampling: complete, as `options.fit` gives it.
        record: the request's, in which tokens and the end are noted.
        choice: which of the prompt's outputs, from 0.
        siblings: the same for all of them; None for one alone.
    """

    def __init__(
        self,
        context: GatewayContext,
        prompt: Sequence[int],
        sampling: SamplingParams,
        options: RequestOptions,
        *,
        record: RequestRecord,
        choice: int = 0,
        siblings: Siblings | None = None,
    ) -> None:
        self.prompt = prompt
        self.cached_tokens: int | None = None
        """Tokens of the prompt that were found and not computed; None before the first token."""
        self._context = context
        self._sampling = sampling
        self._record = record
        self._choice = choice
        self._siblings = siblings
        self._echo_of = None if choice == 0 or sampling.prompt_logprobs is None else siblings
        if self._echo_of is not None:  # the first choice has the prompt scored for all
            self._sampling = dataclasses.replace(sampling, prompt_logprobs=None)
        self._options = options
        self._stream: PieceStream | None = None
        self._tapped: Piece | None = None  # of a delta that was offered, and is yet to come
        self._last_at = record.arrived
        self._first_at: float | None = None
        self._assembler = OutputAssembler(
            context.tokenizer.detokenizer(skip_special_tokens=options.skip_special_tokens),
            stops=options.stops,
            stop_token_ids=sampling.stop_token_ids,
            min_tokens=sampling.min_tokens,
            logprobs=sampling.top_logprobs is not None,
        )

    def counted(self) -> AbstractContextManager[None]:
        """Its request counts as running inside, before it has begun as well."""
        return self._context.running.kept(self._record)

    @property
    def completion_tokens(self) -> int:
        """Output tokens so far."""
        return self._assembler.completion_tokens

    def send_to(self, stream: PieceStream) -> None:
        """Whatever `pieces` has not given yet may go to `stream` instead, but for the last piece.

        For whoever takes them one after the other: asks for the next when one is dealt with.
        """
        self._stream = stream

    # ---- router.generation.Tap ----

    def take(self, delta: TokenDelta) -> bool:
        stream = self._stream
        if stream is None or delta.finish is not None or not stream.has_room:
            return False
        piece = self._push(delta)
        if piece is not None:
            if piece.finish is not None:  # a stop string: what runs has to be ended
                self._tapped = piece
                return False
            stream.add(piece)
        return True

    def write(self) -> None:
        if self._stream is not None:
            self._stream.write()

    def _push(self, delta: TokenDelta) -> Piece | None:
        if delta.tokens:
            count, now, record = len(delta.tokens), time.perf_counter(), self._record
            first = self._first_at is None
            self._context.metrics.tokens(count, now - self._last_at, first=first)
            if first:
                self._context.metrics.prefilled(delta.prefill_s, now - record.arrived)
                self._first_at = now
            record.tokens(count, now)
            self._last_at = now
        return self._assembler.push(delta)

    # ---- pieces ----

    async def pieces(self, number: int = 0) -> AsyncGenerator[tuple[int, Piece], None]:
        """Generate pieces, each with `number` beside it, for whoever merges several sequences.

        Closing this early, or cancelling it, aborts the sequence on the workers.

        Raises:
            ServingError: as the generator does.
        """
        metrics, record = self._context.metrics, self._record
        reason = "error"
        self._context.running.begin(record)
        try:
            if self._choice == 0:  # the others share it
                metrics.prompt(len(self.prompt))
            last_piece: Piece | None = None
            echoed: dict[str, list[Any]] | None = None
            deltas = self._context.generator.generate(
                self.prompt,
                self._sampling,
                request_id=secrets.token_hex(16),  # random: clients may choose equal public ids
                choice=self._choice,
                begun=lambda: record.output_tokens > 0 or bool(record.reasons),
                urgency=self._options.urgency.of_age(time.perf_counter() - record.arrived),
                siblings=self._siblings,
                tap=self,
            )
            async with aclosing(deltas):
                async for delta in deltas:
                    if self.cached_tokens is None:
                        self.cached_tokens = delta.cached_tokens
                        if self._echo_of is not None:
                            echoed = await self._echo_of.echo()
                    if delta.prompt_logprobs is not None:
                        echoed = await echoed_logprobs(
                            self._context.tokenizer,
                            self.prompt,
                            delta.prompt_logprobs,
                            skip_special_tokens=self._options.skip_special_tokens,
                        )
                        if self._siblings is not None:
                            self._siblings.tell_echo(echoed)
                    if self._options.max_tokens == 0:  # the prompt alone is wanted
                        last_piece = Piece(finish=FinishReason.LENGTH.value, echoed=echoed)
                        break
                    piece, self._tapped = self._tapped, None
                    if piece is None:
                        piece = self._push(delta)
                    if piece is None:
                        continue
                    piece.echoed, echoed = echoed, None
                    if piece.finish is not None:
                        last_piece = piece
                        break
                    yield number, piece
            # A stop string has ended the generation above, before a slow client takes this.
            if last_piece is None or last_piece.finish is None:
                raise GenerationFailed("the output ended without a reason")
            reason = last_piece.finish
            yield number, last_piece
        except DeadlinePassed:
            reason = "deadline"
            raise
        except (GeneratorExit, asyncio.CancelledError):
            if reason == "error":
                reason = "abort"
            raise
        finally:
            self._context.running.end(record)
            record.reasons.add(reason)
            decode_s = None if self._first_at is None else self._last_at - self._first_at
            metrics.finished(reason, time.perf_counter() - record.arrived, decode_s)
