"""One request on its way: prompt tokens in, pieces of text out, figures recorded."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, aclosing
from typing import Any

from engine.types import FinishReason, SamplingParams
from router.context import GatewayContext
from router.errors import DeadlinePassed, GenerationFailed
from router.output import OutputAssembler, Piece
from router.prompt_scores import echoed_logprobs
from router.record import RequestRecord
from router.sampling import RequestOptions
from router.siblings import Siblings


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

    async def pieces(self, number: int = 0) -> AsyncGenerator[tuple[int, Piece], None]:
        """Generate pieces, each with `number` beside it, for whoever merges several sequences.

        Closing this early, or cancelling it, aborts the sequence on the workers.

        Raises:
            ServingError: as the generator does.
        """
        metrics, record = self._context.metrics, self._record
        reason = "error"
        first_at: float | None = None
        before = record.arrived
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
                begun=lambda: record.output_tokens > 0,
                urgency=self._options.urgency.of_age(time.perf_counter() - record.arrived),
                siblings=self._siblings,
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
                    if delta.tokens:
                        now = time.perf_counter()
                        metrics.tokens(len(delta.tokens), now - before, first=first_at is None)
                        if first_at is None:
                            metrics.prefilled(delta.prefill_s, now - record.arrived)
                        record.tokens(len(delta.tokens), now)
                        before, first_at = now, first_at or now
                    piece = self._assembler.push(delta)
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
            decode_s = None if first_at is None else before - first_at
            metrics.finished(reason, time.perf_counter() - record.arrived, decode_s)
