"""An engine on the fake model whose steps take as long as a real model's might.

A step takes a time of its own and one for each token, as the steps of a real prefill do; the
thread sleeps meanwhile, so the figures tell of the scheduler and not of this machine.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from types import TracebackType

from engine.batching import derive_limits
from engine.blocks import BlockPool
from engine.engine import Engine
from engine.events import Add, Event, Prefilled, ReleaseExport
from engine.fake import FakeRunner
from engine.plan import RunBatch, StepOutcome, StepPlan
from engine.scheduler import Scheduler
from engine.types import AttemptId, Role, SamplingParams, SequenceId, SequenceRequest
from settings.config import EngineConfig, with_platform_defaults

VOCAB = 512
BLOCKS = 2048
MAX_MODEL_LEN = 16384


class PacedRunner(FakeRunner):
    """The fake model, `step_s` a step and `token_s` a token slower."""

    def __init__(self, block_size: int, step_s: float, token_s: float) -> None:
        super().__init__(BLOCKS, block_size, VOCAB)
        self._own_s, self._token_s = step_s, token_s

    def run(self, plan: StepPlan) -> StepOutcome:
        """See engine.fake.FakeRunner."""
        began = time.monotonic()
        outcome = super().run(plan)
        for entry in plan.entries:
            if isinstance(entry, RunBatch):
                tokens = sum(len(row.tokens) for row in entry.rows)
                end = began + self._own_s + self._token_s * tokens
                time.sleep(max(0.0, end - time.monotonic()))
        return outcome


class PacedPrefill:
    """A prefill worker's engine on a thread of its own; what it exports is fetched at once.

    Use as `with`, on a running loop.
    """

    def __init__(self, config: EngineConfig, step_s: float, token_s: float) -> None:
        sizes = with_platform_defaults(config, "cpu")
        limits = derive_limits(Role.PREFILL, sizes, MAX_MODEL_LEN, VOCAB, config)
        runner = PacedRunner(config.block_size, step_s, token_s)
        self._engine = Engine(Scheduler(limits, BlockPool(BLOCKS, config.block_size)), runner)
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._first: dict[bytes, asyncio.Future[float]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> PacedPrefill:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._engine.wake()
        self._thread.join()

    async def ttft(self, tokens: int) -> float:
        """Seconds from the order of a new prompt of so many tokens to its first output token."""
        number = next(self._numbers)
        transfer = number.to_bytes(16, "little")
        prompt = tuple((number + i) % VOCAB for i in range(tokens))
        attempt = AttemptId(str(number), 0)
        request = SequenceRequest(
            SequenceId(attempt, 0), Role.PREFILL, prompt, SamplingParams(), (), transfer
        )
        self._first[transfer] = self._loop.create_future()
        sent = time.perf_counter()
        self._engine.submit(Add(request))
        return await self._first[transfer] - sent

    def _run(self) -> None:
        while not self._ended.is_set():
            self._engine.wait_for_work()
            events = self._engine.step().events
            now = time.perf_counter()
            for event in events:
                self._take(event, now)

    def _take(self, event: Event, now: float) -> None:
        if isinstance(event, Prefilled):
            self._engine.submit(ReleaseExport(event.transfer_id))
            first = self._first.pop(event.transfer_id)
            self._loop.call_soon_threadsafe(first.set_result, now)
