"""One request on its way: prompt tokens in, pieces of text out, figures recorded."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from engine.types import SamplingParams
from router.context import GatewayContext
from router.errors import GenerationFailed
from router.output import OutputAssembler, Piece
from router.sampling import RequestOptions


class TextSequence:
    """The output of one prompt.

    Args:
        sampling: complete, as `options.fit` gives it.
        arrived: time.perf_counter() at the request's arrival.
    """

    def __init__(
        self,
        context: GatewayContext,
        prompt: Sequence[int],
        sampling: SamplingParams,
        options: RequestOptions,
        *,
        arrived: float,
    ) -> None:
        self.prompt = prompt
        self._context = context
        self._sampling = sampling
        self._arrived = arrived
        self._assembler = OutputAssembler(
            context.tokenizer.detokenizer(skip_special_tokens=options.skip_special_tokens),
            stops=options.stops,
            stop_token_ids=sampling.stop_token_ids,
            logprobs=sampling.top_logprobs is not None,
        )

    def usage(self) -> dict[str, object]:
        """OpenAI's usage object, for the tokens so far."""
        completion = self._assembler.completion_tokens
        return {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": completion,
            "total_tokens": len(self.prompt) + completion,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Generate. Closing this early, or cancelling it, aborts the request on the workers.

        Raises:
            ServingError: as the generator does.
        """
        metrics = self._context.metrics
        reason = "error"
        try:
            metrics.prompt(len(self.prompt))
            last_piece: Piece | None = None
            deltas = self._context.generator.generate(
                self.prompt,
                self._sampling,
                request_id=secrets.token_hex(16),  # random: clients may choose equal public ids
            )
            async with aclosing(deltas):
                before, first = self._arrived, True
                async for delta in deltas:
                    if delta.tokens:
                        now = time.perf_counter()
                        metrics.tokens(len(delta.tokens), now - before, first=first)
                        before, first = now, False
                    piece = self._assembler.push(delta)
                    if piece is None:
                        continue
                    if piece.finish is not None:
                        last_piece = piece
                        break
                    yield piece
            # A stop string has ended the generation above, before a slow client takes this.
            if last_piece is None or last_piece.finish is None:
                raise GenerationFailed("the output ended without a reason")
            reason = last_piece.finish
            yield last_piece
        except (GeneratorExit, asyncio.CancelledError):
            if reason == "error":
                reason = "abort"
            raise
        finally:
            metrics.finished(reason, time.perf_counter() - self._arrived)
