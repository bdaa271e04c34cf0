"""One attempt in flight: puts the tokens of two streams in order."""

from __future__ import annotations

import asyncio
from collections import deque

from engine.types import PromptLogprobs, TokenDelta
from router.generation import Tap
from router.prompt_scores import PromptScores
from router.worker import Worker

_NEVER_TAPPED = 2
"""Tokens of an attempt that always come out of `next`."""


class AttemptLost(Exception):
    """The attempt will not end; another may serve the rest."""


class AttemptHandedOver(AttemptLost):
    """Its worker has drained and leaves the rest to another."""


class AttemptPreempted(AttemptLost):
    """Its decode worker gave its KV blocks to older ones; that costs an attempt and no more."""


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
    two streams: whatever is ahead is held, whatever has been seen is dropped. Log-probabilities
    of the prompt come with the first delta: all of them are waited for.

    Attributes:
        unread: tokens that are there and have not been taken by `next`.
        ended_at: workers that have told of the attempt's end by themselves, and forgotten it.
        expiry: what ends the attempt when its request's deadline has passed; None without one.
        tap: is offered deltas while nobody is behind; None without one.
        tapped: the tokens that it has taken, appended; by whoever has set it to be shared.
    """

    def __init__(
        self,
        workers: tuple[Worker, ...],
        next_index: int,
        tokens: int,
        uncached: int,
        scores: PromptScores | None = None,
    ) -> None:
        """Counts the attempt on its workers; the first of them prefills, and tells `scores`.

        Args:
            tokens: of the prompt and the output before `next_index`.
            uncached: of those, what the first worker is expected to compute.
        """
        self.workers = workers
        self._first = next_index
        self._next = next_index
        self._scores = scores
        self._ahead: dict[int, TokenDelta] = {}
        self._ready: deque[TokenDelta | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None  # who waits in `next`
        self.unread = 0
        self.ended_at: set[Worker] = set()
        self.expiry: asyncio.TimerHandle | None = None
        self._tokens = tokens
        self._uncached = uncached  # 0 once the first token has come
        self.tap: Tap | None = None
        self.tapped: list[int] = []
        workers[0].prefill_began(uncached)
        for worker in workers:
            worker.began()

    def needs(self, worker: Worker) -> bool:
        """Whether the attempt is lost with `worker`.

        The prefill worker is of no more use once a token after the first has come: the
        decode worker has all the KV then.
        """
        return worker in (self.workers[1:] if self._decoding else self.workers)

    @property
    def _decoding(self) -> bool:
        return len(self.workers) > 1 and self._next > self._first + 1

    def holders(self, *, finished: bool) -> list[Worker]:
        """Those that may still know of the attempt.

        The prefill worker of a finished one has been told by the transfer's end. The decode
        worker still waits for KV when the first token was the last; any later one is its own.
        """
        workers = self.workers
        if finished:
            workers = () if self._decoding else workers[1:]
        return [worker for worker in workers if worker not in self.ended_at]

    def deliver(self, delta: TokenDelta) -> None:
        """Take in a delta in whatever order."""
        if self._uncached:
            # The delta with the first token tells what was found; others know nothing of it.
            found = delta.cached_tokens if delta.index == self._first else self._tokens
            self._count_prefilled(computed=self._tokens - found)
        if delta.index == self._next and not self._ahead and self._scores is None:  # nearly always
            self._hand_on(delta)
            return
        held = self._ahead.get(delta.index)
        if held is None or len(held.tokens) <= len(delta.tokens):
            self._ahead[delta.index] = delta
        self._release()

    def taps(self, delta: TokenDelta) -> bool:
        """Whether the tap has taken a delta; otherwise it is to be delivered.

        The first two come out of `next`, so that whoever asks there sees how the attempt begins.
        """
        tap, waiter = self.tap, self._waiter
        if (
            tap is None
            or waiter is None
            or waiter.done()
            or delta.index != self._next
            or self._next < self._first + _NEVER_TAPPED
            or self._ahead
        ):
            return False
        try:
            taken = tap.take(delta)
        except Exception as error:  # is its request's, not that of all that share the session
            self.fail(error)
            return True
        if taken:
            self._next += len(delta.tokens)
            self.tapped += delta.tokens
        return taken

    def write_tapped(self) -> None:
        """See Tap.write."""
        assert self.tap is not None
        try:
            self.tap.write()
        except Exception as error:
            self.fail(error)

    def deliver_prompt(self, piece: PromptLogprobs) -> None:
        """Take in log-probabilities of the prompt; dropped where they were not asked for."""
        if self._scores is not None:
            self._scores.add(piece)
            self._release()

    def _release(self) -> None:
        if self._scores is not None and not self._scores.complete:
            return
        while (found := self._take_next()) is not None:
            if self._scores is not None:
                whole, self._scores = self._scores.whole(found.id), None
                found = found._replace(prompt_logprobs=whole)
            self._hand_on(found)

    def fail(self, error: Exception) -> None:
        """Nothing more will come."""
        self._ready.append(error)
        self._wake()

    def cut(self, error: Exception) -> None:
        """What has not been taken by `next` is not wanted any more, only the error."""
        self._ready.clear()
        self.unread = 0
        self.fail(error)

    async def next(self) -> TokenDelta:
        """The next delta.

        Raises:
            AttemptLost, AttemptInvalid: as told by `fail` or `cut`.
        """
        while not self._ready:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item = self._ready.popleft()
        if isinstance(item, Exception):
            raise item
        self.unread -= len(item.tokens)
        return item

    def land(self) -> None:
        """The attempt has ended: it is counted no more. Once."""
        self._count_prefilled(computed=None)
        if self.expiry is not None:
            self.expiry.cancel()
        for worker in self.workers:
            worker.ended()

    def _hand_on(self, delta: TokenDelta) -> None:
        """It is the next in order."""
        count = len(delta.tokens)
        self._next += count
        self.unread += count
        self._ready.append(delta)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _count_prefilled(self, *, computed: int | None) -> None:
        if self._uncached:
            self.workers[0].prefill_ended(self._uncached, computed=computed)
        self._uncached = 0

    def _take_next(self) -> TokenDelta | None:
        for index in list(self._ahead):
            delta = self._ahead[index]
            if index + len(delta.tokens) <= self._next and delta.tokens:
                del self._ahead[index]  # seen already
            elif index <= self._next:
                del self._ahead[index]
                return _from(delta, self._next)
        return None


def _from(delta: TokenDelta, index: int) -> TokenDelta:
    """`delta` without the tokens before `index`."""
    skipped = index - delta.index
    if skipped == 0:
        return delta
    logprobs = None if delta.logprobs is None else delta.logprobs[skipped:]
    return delta._replace(index=index, tokens=delta.tokens[skipped:], logprobs=logprobs)
