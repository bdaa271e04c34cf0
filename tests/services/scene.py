"""A dispatcher among workers that only note what they are told: a test says what they answer."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from engine.types import (
    AttemptId,
    Failure,
    FailureCode,
    FinishReason,
    Load,
    ModelLimits,
    Role,
    SamplingParams,
    SequenceId,
    TokenDelta,
)
from protos.codec import NO_ROLES, RejectedAttempt, StartOrder, StepUpdate, WorkerInfo
from router.cached_prefixes import CachedPrefixes
from router.dispatch import MAX_LOST_ATTEMPTS, Dispatcher
from router.drops import Drops
from router.fleet import Fleet
from router.in_flight import InFlight
from router.waiting_line import WaitingLine

LIMITS = ModelLimits("m", 97, 64, 4, 100, 8)


@dataclass(eq=False)
class FakeWorker(InFlight):
    name: str
    roles: Role
    orders: list[StartOrder] = field(default_factory=list)
    aborted: list[AttemptId] = field(default_factory=list)
    load: Load = field(default_factory=lambda: Load(free_blocks=100))
    draining: bool = False
    model: str = "m"
    spare: bool = False
    siblings: bool = True
    row: int | None = None

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def address(self) -> str:
        return self.name

    @property
    def info(self) -> WorkerInfo:
        limits = dataclasses.replace(LIMITS, fingerprint=self.model)
        spare = Role.PREFILL if self.spare else NO_ROLES
        return WorkerInfo(1, self.roles, limits, (f"grpc://{self.name}:1",), spare, self.siblings)

    def start(self, order: StartOrder) -> None:
        self.orders.append(order)

    def abort(self, attempt: AttemptId) -> None:
        self.aborted.append(attempt)


class FakePool:
    def __init__(self, *workers: FakeWorker) -> None:
        self.workers = list(workers)
        self.limits = LIMITS
        self.complete = True
        self.was_complete = True
        self.closing = False
        self.waiting = WaitingLine()
        self.drops = Drops()

    def change(self, *workers: FakeWorker) -> None:
        """These are there now."""
        self.workers = list(workers)
        self.waiting.wake()

    async def wait_for_change(self, priority: int = 0) -> None:
        await self.waiting.wait(priority)

    def listen(self, listener: Dispatcher) -> None:
        self.listener = listener

    @property
    def fleet(self) -> Fleet:
        """Of the workers as they are now; one that drains comes back at once, so it is taken."""
        fleet = Fleet()
        for worker in self.workers:
            worker.row = fleet.join(worker, worker.info)  # type: ignore[arg-type]
            fleet.loaded(worker.row, worker.load, draining=False)
            fleet.counted(worker.row, worker.prefill_tokens, worker.sequences, worker.rate.value)
        return fleet

    @property
    def prefixes(self) -> CachedPrefixes:
        return CachedPrefixes(self.fleet)

    def describe(self) -> list[dict[str, Any]]:
        return []


class Scene:
    """A dispatcher, one prefill and one decode worker, and one request."""

    def __init__(
        self,
        *more: FakeWorker,
        max_tokens: int = 3,
        worker_wait_s: float = 0.0,
        max_lost_attempts: int = MAX_LOST_ATTEMPTS,
    ) -> None:
        self.prefill = FakeWorker("p", Role.PREFILL)
        self.decode = FakeWorker("d", Role.DECODE)
        self.pool = FakePool(self.prefill, self.decode, *more)
        self.dispatcher = Dispatcher(  # type: ignore[arg-type]
            self.pool, 1, worker_wait_s, max_lost_attempts
        )
        sampling = SamplingParams(max_tokens=max_tokens, seed=99)
        self.stream: AsyncGenerator[TokenDelta, None]
        self.stream = self.dispatcher.generate((1, 2), sampling, request_id="r")

    async def ask(self) -> asyncio.Task[TokenDelta]:
        """The next delta, asked for and not there yet."""

        async def bounded() -> TokenDelta:
            async with asyncio.timeout(2):
                return await anext(self.stream)

        task = asyncio.create_task(bounded())
        await asyncio.sleep(0)
        return task

    def tell(self, worker: FakeWorker, *items: TokenDelta | Failure | RejectedAttempt) -> None:
        def kind(which: type) -> tuple:
            return tuple(item for item in items if isinstance(item, which))

        update = StepUpdate(kind(TokenDelta), kind(Failure), kind(RejectedAttempt), None, False, {})
        self.dispatcher.stepped(worker, update)  # type: ignore[arg-type]

    def whole(self) -> bool:
        """Nothing is in flight and nothing counted."""
        counts = [(w.sequences, w.prefill_tokens) for w in self.pool.workers]
        return not self.dispatcher._flights and set(counts) == {(0, 0)}


def attempt(number: int = 0) -> AttemptId:
    return AttemptId("r", number)


def delta(number: int, index: int, *tokens: int, finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(SequenceId(attempt(number), 0), index, tokens, None, finish)


def broken(number: int = 0) -> Failure:
    return Failure(attempt(number), FailureCode.TRANSFER, "the transfer broke")
