"""One attempt in flight: puts the tokens of two streams in order."""

from __future__ import annotations

import asyncio
import dataclasses

from engine.types import TokenDelta
from router.worker import Worker


class AttemptLost(Exception):
    """The attempt will not end; another may serve the rest."""


class AttemptHandedOver(AttemptLost):
    """Its worker has drained and leaves the rest to another."""


class AttemptRejected(AttemptLost):
    """A worker did not take it."""

    def __init__(self, worker: Worker, reason: str) -> None:
        super().__init__(reason)
        self.worker = worker


class AttemptInvalid(Exception):
    """A worker says that the request can never be served."""


class Flight:
    """The deltas of one attempt, in order and without gaps.

    The first token comes from the prefill worker and the others from the decode worker, by
    two streams: whatever is ahead is held, whatever has been seen is dropped.

    Attributes:
        unread: tokens that are there and have not been taken by `next`.
    """

    def __init__(self, workers: tuple[Worker, ...], next_index: int, prefill_tokens: int) -> None:
        """Counts the attempt on its workers; the first of them prefills."""
        self.workers = workers
        self._first = next_index
        self._next = next_index
        self._ahead: dict[int, TokenDelta] = {}
        self._ready: asyncio.Queue[TokenDelta | Exception] = asyncio.Queue()
        self.unread = 0
        self._prefill_tokens = prefill_tokens
        workers[0].prefill_began(prefill_tokens)
        for worker in workers:
            worker.began()

    def needs(self, worker: Worker) -> bool:
        """Whether the attempt is lost with `worker`.

        The prefill worker is of no more use once a token after the first has come: the
        decode worker has all the KV then.
        """
        decoding = len(self.workers) > 1 and self._next > self._first + 1
        return worker in (self.workers[1:] if decoding else self.workers)

    def deliver(self, delta: TokenDelta) -> None:
        """Take in a delta in whatever order."""
        self._count_prefilled(computed=True)
        held = self._ahead.get(delta.index)
        if held is None or len(held.tokens) <= len(delta.tokens):
            self._ahead[delta.index] = delta
        while (found := self._take_next()) is not None:
            self.unread += len(found.tokens)
            self._ready.put_nowait(found)

    def fail(self, error: Exception) -> None:
        """Nothing more will come."""
        self._ready.put_nowait(error)

    def cut(self, error: Exception) -> None:
        """What has not been taken by `next` is not wanted any more, only the error."""
        self._ready = asyncio.Queue()
        self.unread = 0
        self.fail(error)

    async def next(self) -> TokenDelta:
        """The next delta.

        Raises:
            AttemptLost, AttemptInvalid: as told by `fail` or `cut`.
        """
        item = await self._ready.get()
        if isinstance(item, Exception):
            raise item
        self.unread -= len(item.tokens)
        return item

    def land(self) -> None:
        """The attempt has ended: it is counted no more. Once."""
        self._count_prefilled(computed=False)
        for worker in self.workers:
            worker.ended()

    def _count_prefilled(self, *, computed: bool) -> None:
        if self._prefill_tokens:
            self.workers[0].prefill_ended(self._prefill_tokens, computed=computed)
        self._prefill_tokens = 0

    def _take_next(self) -> TokenDelta | None:
        for index in list(self._ahead):
            delta = self._ahead[index]
            if index + len(delta.tokens) <= self._next and delta.tokens:
                del self._ahead[index]  # seen already
            elif index <= self._next:
                del self._ahead[index]
                delta = _from(delta, self._next)
                self._next += len(delta.tokens)
                return delta
        return None


def _from(delta: TokenDelta, index: int) -> TokenDelta:
    """`delta` without the tokens before `index`."""
    skipped = index - delta.index
    if skipped == 0:
        return delta
    logprobs = None if delta.logprobs is None else delta.logprobs[skipped:]
    return dataclasses.replace(delta, index=index, tokens=delta.tokens[skipped:], logprobs=logprobs)
