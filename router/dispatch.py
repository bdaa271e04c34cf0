"""From a prompt to tokens by way of workers: chooses them, and tries again when one is lost.

An attempt that is lost goes on elsewhere: the next one is given prompt and tokens so far, and
the same seed, so its first token is the one that the lost attempt would have produced next.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from engine.types import (
    COLOCATED,
    AttemptId,
    FailureCode,
    ModelLimits,
    Role,
    SamplingParams,
    SequenceId,
    SequenceRequest,
    TokenDelta,
)
from protos.codec import TRANSFER_ID_BYTES, StartOrder, StepUpdate
from router.errors import BadRequest, GenerationFailed, Overloaded, Unavailable
from router.flight import AttemptInvalid, AttemptLost, AttemptRejected, Flight
from router.policy import choose_colocated, choose_decode, choose_prefill
from router.workers import Worker, WorkerPool

log = logging.getLogger("hexserve.router")

MAX_LOST_ATTEMPTS = 3
"""How many attempts in a row may be lost; one that has made progress begins a new row."""
TRANSFER_GRACE_S = 0.25
"""How long a broken KV handoff waits for better news.

When one worker ends an attempt (rejects it, finds it invalid, or its first token is the
last), the other only sees the transfer break, and its stream may be the faster one.
"""


class Dispatcher:
    """The Generator that the gateway uses (see router.generation), over a pool of workers."""

    def __init__(self, pool: WorkerPool, seed: int) -> None:
        self._pool = pool
        self._rng = random.Random(seed)
        self._flights: dict[AttemptId, Flight] = {}
        self._draining = False
        pool.listen(self)

    # ---- Generator ----

    @property
    def limits(self) -> ModelLimits | None:
        return self._pool.limits

    @property
    def ready(self) -> bool:
        return self._pool.complete and not self._draining

    def drain(self) -> None:
        """Report not ready from now on; what runs goes on."""
        self._draining = True

    def health(self) -> dict[str, Any]:
        state = "draining" if self._draining else "ready" if self.ready else "waiting for workers"
        return {"state": state, "requests": len(self._flights), "workers": self._pool.describe()}

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, *, request_id: str, choice: int = 0
    ) -> AsyncGenerator[TokenDelta, None]:
        """See router.generation.Generator."""
        prompt, output = tuple(prompt), list[int]()
        refusing: set[Worker] = set()
        number = lost = 0
        while True:
            sequence = SequenceId(AttemptId(request_id, number), choice)
            attempt = sequence.attempt
            number += 1
            before = len(output)
            flight = self._take_off(sequence, prompt, tuple(output), sampling, refusing)
            finished = False
            try:
                while not finished:
                    delta = await flight.next()
                    output.extend(delta.tokens)
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
            except AttemptInvalid as error:
                raise BadRequest(str(error)) from None
            except AttemptLost as error:
                lost += 1
                log.warning("request %s, attempt %d: %s", request_id, attempt.attempt, error)
                if lost == MAX_LOST_ATTEMPTS:
                    raise GenerationFailed(
                        f"{lost} attempts were lost, the last: {error}"
                    ) from None
            finally:
                self._land(attempt, flight, finished=finished)

    # ---- attempts ----

    def _take_off(
        self,
        sequence: SequenceId,
        prompt: tuple[int, ...],
        output: tuple[int, ...],
        sampling: SamplingParams,
        refusing: set[Worker],
    ) -> Flight:
        attempt = sequence.attempt
        workers = self._choose(refusing, only_first=sampling.max_tokens - len(output) == 1)
        transfer_id = b"" if len(workers) == 1 and workers[0].info.roles == COLOCATED else (
            secrets.token_bytes(TRANSFER_ID_BYTES)
        )  # fmt: skip
        flight = Flight(workers, len(output), len(prompt) + len(output))
        self._flights[attempt] = flight
        sources = workers[0].info.sources
        try:
            for worker in workers:
                request = SequenceRequest(
                    sequence, worker.info.roles, prompt, sampling, output, transfer_id
                )
                worker.start(StartOrder(attempt, (request,), sources))
        except BaseException:  # values that the wire cannot carry
            self._land(attempt, flight, finished=False)
            raise
        return flight

    def _choose(self, refusing: set[Worker], *, only_first: bool) -> tuple[Worker, ...]:
        """The workers of an attempt, the one that prefills first.

        `only_first`: the first token is the last, so no decode worker is needed.

        Raises:
            Unavailable: a role has no worker, or there is none at all.
            Overloaded: it has, and all of them refuse.
        """
        pool, rng = self._pool, self._rng
        colocated = pool.with_roles(COLOCATED)
        if colocated:
            chosen = choose_colocated((w for w in colocated if w not in refusing), rng)
            if chosen is None:
                raise Overloaded("every worker's queue is full")
            return (chosen,)
        roles = [(Role.PREFILL, choose_prefill), (Role.DECODE, choose_decode)]
        result = []
        for role, choose in roles[:1] if only_first else roles:
            candidates = pool.with_roles(role)
            if not candidates:
                missing = "prefill worker" if role is Role.PREFILL else "decode worker"
                if not any(pool.with_roles(each) for each, _ in roles):
                    missing = "worker"
                raise Unavailable(f"no {missing} is ready")
            worker = choose((w for w in candidates if w not in refusing), rng)
            if worker is None:
                raise Overloaded("every worker's queue is full")
            result.append(worker)
        return tuple(result)

    def _land(self, attempt: AttemptId, flight: Flight, *, finished: bool) -> None:
        """Forget an attempt, and have its workers forget it too; idempotent.

        A decode worker may still wait for KV when the first token was the last: it is told.
        The prefill worker of a finished attempt has been told by the transfer's end.
        """
        if self._flights.pop(attempt, None) is None:
            return
        flight.land()
        for worker in flight.workers[1:] if finished else flight.workers:
            worker.abort(attempt)

    # ---- WorkerListener ----

    def stepped(self, worker: Worker, update: StepUpdate) -> None:
        """Hand a step's news to the flights they belong to; those of ended ones are dropped."""
        for delta in update.deltas:
            flight = self._flights.get(delta.id.attempt)
            if flight is not None:
                flight.deliver(delta)
        for failure in update.failures:
            flight = self._flights.get(failure.attempt)
            if flight is None or not flight.needs(worker):
                continue
            if failure.code is FailureCode.INVALID:
                flight.fail(AttemptInvalid(failure.message))
            elif failure.code is FailureCode.TRANSFER:
                error = AttemptLost(failure.message)
                asyncio.get_running_loop().call_later(TRANSFER_GRACE_S, flight.fail, error)
            else:
                flight.fail(AttemptLost(failure.message))
        for rejected in update.rejected:
            flight = self._flights.get(rejected.attempt)
            if flight is not None:
                flight.fail(AttemptRejected(worker, rejected.reason))

    def lost(self, worker: Worker, reason: str) -> None:
        """Every attempt that needs the worker is lost."""
        for flight in self._flights.values():
            if flight.needs(worker):
                flight.fail(AttemptLost(f"worker {worker.address} is lost: {reason}"))
