"""The choices of one request: every prompt as many times as was asked for, side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, aclosing

from router.output import Piece, join
from router.sequence import PieceStream, TextSequence

MAX_AT_ONCE = 128
"""Sequences of one request that are with the workers at once; the others wait here, so that a
long list of prompts cannot fill the workers' queues by itself."""
MAX_PIECES_AHEAD = 1024
"""Pieces of all sequences of one request that wait for its client. Beyond them each sequence's
tokens stay with its generator, which gives up a client that is too far behind."""


class Choices:
    """One or more sequences, prompt by prompt: choice i of prompt p is number p * n + i.

    Every choice is an order of its own to the workers, which compute the prompt once for all of
    them (router.siblings). Choice i is keyed by the prompt's seed and i: it does not depend on n.

    Args:
        sequences: `candidates` for each prompt.
        n: choices that are kept of a prompt's candidates, those with the highest mean
            log-probability; equal to `candidates` where all are.
    """

    def __init__(self, sequences: Sequence[TextSequence], *, n: int, candidates: int) -> None:
        self._sequences = sequences
        self._n = n
        self._candidates = candidates

    def usage(self) -> dict[str, object]:
        """OpenAI's usage object, for the tokens so far; a prompt counts once."""
        prompt = sum(len(each.prompt) for each in self._sequences[:: self._candidates])
        completion = sum(each.completion_tokens for each in self._sequences)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens()},
        }

    def prompt_and_output_tokens(self) -> int:
        """Tokens of all choices so far, the prompt's with each."""
        return sum(len(each.prompt) + each.completion_tokens for each in self._sequences)

    def _cached_tokens(self) -> int:
        """Prompt tokens that none of a prompt's choices had to compute."""
        cached = 0
        for start in range(0, len(self._sequences), self._candidates):
            choices = self._sequences[start : start + self._candidates]
            begun = [each.cached_tokens for each in choices if each.cached_tokens is not None]
            cached += min(begun, default=0)
        return cached

    async def whole(self, room: asyncio.Semaphore | None = None) -> list[Piece]:
        """Every choice's whole output, in order; see `pieces`.

        Raises:
            ServingError: as the generator does.
        """
        parts: list[list[Piece]] = [[] for _ in self._sequences]
        async with aclosing(self.pieces(room)) as pieces:
            async for number, piece in pieces:
                parts[number].append(piece)
        outputs = [join(part) for part in parts]
        if self._n == self._candidates:
            return outputs
        kept: list[Piece] = []
        for start in range(0, len(outputs), self._candidates):
            ranked = sorted(outputs[start : start + self._candidates], key=_mean_logprob)
            kept += reversed(ranked[-self._n :])
        return kept

    def pieces(
        self, room: asyncio.Semaphore | None = None
    ) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces as they come, each with its choice's number. Closing this aborts all choices.

        `room` is of MAX_AT_ONCE, for whoever has several of these in one request.

        Raises:
            ServingError: one of them failed; the others are aborted.
        """
        if len(self._sequences) == 1 and room is None:  # the usual case needs no task
            return self._sequences[0].pieces()
        return self._merged(room or asyncio.Semaphore(MAX_AT_ONCE))

    def send_to(self, stream: PieceStream) -> None:
        """Let the pieces of a lone sequence go to `stream`; see TextSequence.send_to."""
        if len(self._sequences) == 1:
            self._sequences[0].send_to(stream)

    def counted(self) -> AbstractContextManager[None]:
        """The request counts as running inside."""
        return self._sequences[0].counted()

    async def _merged(self, room: asyncio.Semaphore) -> AsyncGenerator[tuple[int, Piece], None]:
        merged: asyncio.Queue[tuple[int, Piece] | Exception] = asyncio.Queue(MAX_PIECES_AHEAD)
        with self.counted():  # also while all that is left waits for room
            tasks: list[asyncio.Task[None]] = []
            try:
                for number, sequence in enumerate(self._sequences):
                    tasks.append(asyncio.create_task(_run(number, sequence, room, merged)))
                    await asyncio.sleep(0)  # all at once would hold up every stream for long
                unfinished = len(tasks)
                while unfinished:
                    item = await merged.get()
                    if isinstance(item, Exception):
                        raise item
                    unfinished -= item[1].finish is not None
                    yield item
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


async def _run(
    number: int,
    sequence: TextSequence,
    room: asyncio.Semaphore,
    merged: asyncio.Queue[tuple[int, Piece] | Exception],
) -> None:
    try:
        async with room, aclosing(sequence.pieces(number)) as pieces:
            async for numbered in pieces:
                await merged.put(numbered)
    except Exception as error:
        await merged.put(error)


def _mean_logprob(output: Piece) -> float:
    return sum(item.logprobs.logprob for item in output.scored) / max(len(output.scored), 1)
