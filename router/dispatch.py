"""From a prompt to tokens by way of workers: chooses them, and tries again when one is lost.

An attempt that is lost goes on elsewhere: the next one is given prompt and tokens so far, and
the same seed, so its first token is the one that the lost attempt would have produced next.
Where no worker of a role is left, a request waits for one to come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from engine.types import (
    COLOCATED,
    AttemptId,
    FailureCode,
    ModelLimits,
    SamplingParams,
    SequenceId,
    SequenceRequest,
    TokenDelta,
)
from protos.codec import TRANSFER_ID_BYTES, StartOrder, StepUpdate
from router.errors import (
    BadRequest,
    DeadlinePassed,
    GenerationFailed,
    ReaderTooSlow,
    Unavailable,
)
from router.flight import (
    AttemptHandedOver,
    AttemptInvalid,
    AttemptLost,
    AttemptPreempted,
    AttemptRejected,
    Flight,
)
from router.generation import NOT_URGENT, Tap
from router.placement import Placement
from router.prompt_scores import PromptScores
from router.room import Room
from router.siblings import Siblings
from router.urgency import Urgency
from router.worker import Worker
from router.worker_search import WorkerSearch
from router.workers import WorkerPool

log = logging.getLogger("hexserve.router")

MAX_LOST_ATTEMPTS = 5
"""How many attempts in a row may be lost by default; one that has made progress begins a new row.

Some, as workers may die one after the other; few, as a request may be what kills them: whoever
loses a worker cannot tell by which of its requests, or by none.
"""
MAX_UNREAD_TOKENS = 8192
"""How many tokens a client may be behind with reading."""
TRANSFER_GRACE_S = 0.25
"""How long a broken KV handoff waits for better news.

When one worker ends an attempt (rejects it, finds it invalid, or its first token is the
last), the other only sees the transfer break, and its stream may be the faster one.
"""


class Dispatcher:
    """The Generator that the gateway uses (see router.generation), over a pool of workers."""

    def __init__(
        self,
        pool: WorkerPool,
        seed: int,
        worker_wait_s: float = 0.0,
        max_lost_attempts: int = MAX_LOST_ATTEMPTS,
    ) -> None:
        """`worker_wait_s`: how long a request waits when no worker of a role is left.

        A request ends with GenerationFailed when `max_lost_attempts` in a row were lost.
        """
        self._pool = pool
        self._worker_wait_s = worker_wait_s
        self._max_lost_attempts = max_lost_attempts
        self._flights: dict[AttemptId, Flight] = {}
        self._room = Room(pool.waiting)
        self._search = WorkerSearch(pool, self._room, random.Random(seed))
        self._sequences = 0
        self._draining = False
        pool.listen(self)

    # ---- Generator ----

    @property
    def limits(self) -> ModelLimits | None:
        return self._pool.limits

    @property
    def ready(self) -> bool:
        return self._pool.complete and not self._draining

    @property
    def accepting(self) -> bool:
        """Not before a first worker of each role was there: a start may take minutes."""
        waits = self._pool.was_complete and self._worker_wait_s > 0
        return self.ready or (waits and not self._draining)

    def drain(self) -> None:
        """Report not ready from now on, and take no new request; what runs goes on."""
        self._draining = True

    @property
    def waiting(self) -> int:
        """Sequences that wait here for a worker."""
        return self._search.waiting

    def health(self) -> dict[str, Any]:
        state = "draining" if self._draining else "ready" if self.ready else "waiting for workers"
        return {
            "state": state,
            "sequences": self._sequences,
            "waiting_for_workers": self._search.waiting,
            "workers": self._pool.describe(),
        }

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        choice: int = 0,
        begun: Callable[[], bool] = lambda: False,
        urgency: Urgency = NOT_URGENT,
        siblings: Siblings | None = None,
        tap: Tap | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        """See router.generation.Generator."""
        with self._counted():
            attempts = self._attempts(
                tuple(prompt), sampling, request_id, choice, begun, urgency, siblings, tap
            )
            async with aclosing(attempts) as deltas:
                async for delta in deltas:
                    yield delta

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """A sequence runs inside."""
        self._sequences += 1
        try:
            yield
        finally:
            self._sequences -= 1

    async def _attempts(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        request_id: str,
        choice: int,
        begun: Callable[[], bool],
        urgency: Urgency,
        siblings: Siblings | None,
        tap: Tap | None,
    ) -> AsyncGenerator[TokenDelta, None]:
        loop = asyncio.get_running_loop()
        if not begun():
            self._room.check_newcomer()
        output = list[int]()
        refusing: set[Worker] = set()
        refused_at: float | None = None  # the first of the refusals in a row
        number = lost = 0
        model: str | None = None
        while True:
            sequence = SequenceId(AttemptId(request_id, number), choice)
            attempt = sequence.attempt
            number += 1
            before = len(output)
            placed = await self._search.workers_for(
                prompt + tuple(output),
                refusing,
                deadline=(refused_at or loop.time()) + self._worker_wait_s,
                only_first=sampling.max_tokens - before == 1,
                reuses=not sampling.needs_all_logits,
                begun=lambda: bool(output) or begun(),
                urgency=urgency,
                siblings=siblings,
            )
            fingerprint = placed.workers[0][0].info.limits.fingerprint
            model = model or fingerprint
            if fingerprint != model:
                raise Unavailable("the workers that are left serve another model")
            flight = self._take_off(
                placed, sequence, prompt, tuple(output), sampling, urgency, siblings
            )
            flight.tap, flight.tapped = tap, output
            finished = False
            try:
                while not finished:
                    delta = await flight.next()
                    refused_at = None
                    output.extend(delta.tokens)
                    if delta.prompt_logprobs is not None:  # they are not computed again
                        sampling = dataclasses.replace(sampling, prompt_logprobs=None)
                    # The first token is the prefill worker's: by it alone, a decode worker
                    # that always fails would cost a prefill for every token.
                    if len(output) > before + 1:
                        lost = 0
                    finished = delta.finish is not None
                    if finished:
                        self._land(attempt, flight, finished=True)
                    yield delta
                return
            except AttemptRejected as error:
                refusing.add(error.worker)
                refused_at = refused_at or loop.time()
            except AttemptInvalid as error:
                raise BadRequest(str(error)) from None
            except (AttemptHandedOver, AttemptPreempted) as error:
                refused_at = None
                log.info("request %s, attempt %d: %s", request_id, attempt.attempt, error)
            except AttemptLost as error:
                refused_at = None
                lost += 1
                log.warning("request %s, attempt %d: %s", request_id, attempt.attempt, error)
                if lost == self._max_lost_attempts:
                    raise GenerationFailed(
                        f"{lost} attempts were lost, the last: {error}"
                    ) from None
            finally:
                self._land(attempt, flight, finished=finished)

    # ---- attempts ----

    def _take_off(
        self,
        placed: Placement,
        sequence: SequenceId,
        prompt: tuple[int, ...],
        output: tuple[int, ...],
        sampling: SamplingParams,
        urgency: Urgency,
        siblings: Siblings | None = None,
    ) -> Flight:
        attempt = sequence.attempt
        workers = tuple(worker for worker, _ in placed.workers)
        colocated = placed.workers[0][1] == COLOCATED
        transfer_id = b"" if colocated else secrets.token_bytes(TRANSFER_ID_BYTES)
        scores = None if sampling.prompt_logprobs is None else PromptScores(len(prompt) - 1)
        tokens = len(prompt) + len(output)
        flight = Flight(workers, len(output), tokens, placed.uncached, scores)
        self._flights[attempt] = flight
        sources = workers[0].info.sources
        group = b"" if siblings is None else siblings.group
        try:
            for worker, roles in placed.workers:
                request = SequenceRequest(
                    sequence, roles, prompt, sampling, output, transfer_id, urgency.priority, group
                )
                worker.start(StartOrder(attempt, (request,), sources))
        except BaseException:  # values that the wire cannot carry
            self._land(attempt, flight, finished=False)
            raise
        if urgency.deadline is not None:
            loop = asyncio.get_running_loop()
            flight.expiry = loop.call_at(urgency.deadline, self._expire, attempt, flight)
        return flight

    def _expire(self, attempt: AttemptId, flight: Flight) -> None:
        """Its deadline has passed. The workers are told at once: its client may not read."""
        self._land(attempt, flight, finished=False)
        flight.cut(DeadlinePassed())

    def _land(self, attempt: AttemptId, flight: Flight, *, finished: bool) -> None:
        """Forget an attempt, and have its workers forget it too; idempotent."""
        if self._flights.pop(attempt, None) is None:
            return
        flight.land()
        for worker in flight.holders(finished=finished):
            worker.abort(attempt)

    # ---- WorkerListener ----

    def stepped(self, worker: Worker, update: StepUpdate) -> None:
        """Hand a step's news to the flights they belong to; those of ended ones are dropped."""
        for piece in update.prompt_logprobs:
            flight = self._flights.get(piece.id.attempt)
            if flight is not None:
                flight.deliver_prompt(piece)
        tapped: list[Flight] = []
        for delta in update.deltas:
            flight = self._flights.get(delta.id.attempt)
            if flight is None:
                self._pool.drops.late += 1
            elif flight.taps(delta):
                tapped.append(flight)
            else:
                flight.deliver(delta)
                if flight.unread > MAX_UNREAD_TOKENS:
                    # The workers are told at once: the client may not read for long.
                    self._land(delta.id.attempt, flight, finished=False)
                    flight.cut(ReaderTooSlow(f"{flight.unread} tokens were not read in time"))
        # In one go: a client that had to be woken for one of its events is awake for the others.
        for flight in tapped:
            flight.write_tapped()
        for failure in update.failures:
            flight = self._flights.get(failure.attempt)
            if flight is not None:
                flight.ended_at.add(worker)
            if flight is None or not flight.needs(worker):
                continue
            if failure.code is FailureCode.INVALID:
                flight.fail(AttemptInvalid(failure.message))
            elif failure.code is FailureCode.PREEMPTED:
                flight.fail(AttemptPreempted(failure.message))
            elif failure.code is FailureCode.TRANSFER:
                error = AttemptLost(failure.message)
                asyncio.get_running_loop().call_later(TRANSFER_GRACE_S, flight.fail, error)
            else:
                flight.fail(AttemptLost(failure.message))
        for rejected in update.rejected:
            self._room.refused(worker)
            flight = self._flights.get(rejected.attempt)
            if flight is not None:
                flight.ended_at.add(worker)
                flight.fail(AttemptRejected(worker, rejected.reason))
        if update.load is not None:
            self._room.told(worker)

    def lost(self, worker: Worker, reason: str) -> None:
        """Every attempt that needs the worker is lost."""
        self._room.left(worker)
        kind, how = (AttemptHandedOver, "left") if worker.draining else (AttemptLost, "lost")
        for flight in self._flights.values():
            if flight.needs(worker):
                flight.fail(kind(f"worker {worker.address} is {how}: {reason}"))
