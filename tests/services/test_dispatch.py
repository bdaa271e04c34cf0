"""What the dispatcher makes of each piece of news, in whatever order two workers tell it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.types import (
    COLOCATED,
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
from protos.codec import RejectedAttempt, StartOrder, StepUpdate, WorkerInfo
from router import dispatch
from router.dispatch import MAX_LOST_ATTEMPTS, MAX_UNREAD_TOKENS, Dispatcher
from router.errors import BadRequest, GenerationFailed, Overloaded, ReaderTooSlow, Unavailable
from tests.services.deployment import eventually

LIMITS = ModelLimits("m", 97, 64, 4, 100, 8)


@dataclass(eq=False)
class FakeWorker:
    name: str
    roles: Role
    orders: list[StartOrder] = field(default_factory=list)
    aborted: list[AttemptId] = field(default_factory=list)
    load: Load = field(default_factory=lambda: Load(free_blocks=100))
    prefill_tokens: int = 0
    sequences: int = 0
    draining: bool = False
    model: str = "m"
    spare: bool = False

    @property
    def address(self) -> str:
        return self.name

    @property
    def info(self) -> WorkerInfo:
        limits = dataclasses.replace(LIMITS, fingerprint=self.model)
        return WorkerInfo(1, self.roles, limits, (f"grpc://{self.name}:1",))

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
        self._changed = asyncio.Event()

    def change(self, *workers: FakeWorker) -> None:
        """These are there now."""
        self.workers = list(workers)
        self._changed.set()

    async def wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def listen(self, listener: Dispatcher) -> None:
        self.listener = listener

    def standing_in(self) -> list[FakeWorker]:
        return [worker for worker in self.workers if worker.spare]

    def describe(self) -> list[dict[str, Any]]:
        return []

    def with_roles(self, roles: Role) -> list[FakeWorker]:
        return [worker for worker in self.workers if worker.roles == roles]


class Scene:
    """A dispatcher, one prefill and one decode worker, and one request."""

    def __init__(self, *more: FakeWorker, max_tokens: int = 3, worker_wait_s: float = 0.0) -> None:
        self.prefill = FakeWorker("p", Role.PREFILL)
        self.decode = FakeWorker("d", Role.DECODE)
        self.pool = FakePool(self.prefill, self.decode, *more)
        self.dispatcher = Dispatcher(self.pool, 1, worker_wait_s)  # type: ignore[arg-type]
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


async def test_both_workers_are_told_at_once() -> None:
    scene = Scene()
    asking = await scene.ask()
    (at_prefill,), (at_decode,) = scene.prefill.orders, scene.decode.orders
    assert (at_prefill.roles, at_decode.roles) == (Role.PREFILL, Role.DECODE)
    assert at_prefill.transfer_id == at_decode.transfer_id
    assert at_prefill.sources == at_decode.sources == ("grpc://p:1",)
    scene.tell(scene.prefill, delta(0, 0, 5))
    assert (await asking).tokens == (5,)
    await scene.stream.aclose()


async def test_the_number_of_a_choice_is_told_to_both() -> None:
    scene = Scene()
    scene.stream = scene.dispatcher.generate((1, 2), SamplingParams(), request_id="r", choice=5)
    asking = await scene.ask()
    for worker in (scene.prefill, scene.decode):
        ((sequence,),) = (order.sequences for order in worker.orders)
        assert sequence.id == SequenceId(attempt(), 5)
    scene.tell(scene.prefill, TokenDelta(sequence.id, 0, (7,)))
    assert (await asking).tokens == (7,)
    await scene.stream.aclose()


async def test_a_client_that_leaves_is_an_abort_on_both() -> None:
    scene = Scene()
    asking = await scene.ask()
    scene.tell(scene.prefill, delta(0, 0, 5))
    await asking
    await scene.stream.aclose()
    assert scene.prefill.aborted == scene.decode.aborted == [attempt()]
    assert scene.whole()


async def test_the_end_is_told_to_decode_which_may_still_wait_for_kv() -> None:
    scene = Scene()
    asking = await scene.ask()
    scene.tell(scene.prefill, delta(0, 0, 5, finish=FinishReason.STOP))
    assert (await asking).finish is FinishReason.STOP
    assert scene.whole()
    assert (scene.prefill.aborted, scene.decode.aborted) == ([], [attempt()])
    with pytest.raises(StopAsyncIteration):
        await anext(scene.stream)


async def test_news_of_what_is_over_is_ignored() -> None:
    scene = Scene()
    asking = await scene.ask()
    scene.tell(scene.prefill, delta(0, 0, 5))
    await asking
    asking = await scene.ask()
    scene.tell(scene.decode, Failure(attempt(), FailureCode.INTERNAL, "why"))
    await eventually(lambda: len(scene.decode.orders) == 2)
    scene.tell(scene.decode, delta(0, 1, 77), broken(0))
    scene.tell(scene.prefill, RejectedAttempt(attempt(), "late"))
    scene.tell(scene.prefill, delta(1, 1, 6))
    assert (await asking).tokens == (6,)
    await scene.stream.aclose()
    scene.tell(scene.decode, delta(1, 2, 7))
    assert scene.whole()


async def test_the_next_attempt_goes_on_from_what_was_told() -> None:
    scene = Scene()
    asking = await scene.ask()
    scene.tell(scene.prefill, delta(0, 0, 5))
    await asking
    asking = await scene.ask()
    scene.dispatcher.lost(scene.decode, "it died")  # type: ignore[arg-type]
    await eventually(lambda: len(scene.prefill.orders) == 2)
    first, second = scene.prefill.orders
    (sequence,) = second.sequences
    assert second.attempt == attempt(1)
    assert (sequence.prompt, sequence.output) == ((1, 2), (5,))
    assert sequence.sampling == first.sequences[0].sampling
    assert second.transfer_id != first.transfer_id
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await scene.stream.aclose()
    assert scene.whole()


@pytest.mark.parametrize("first", ["p", "d"])
async def test_the_reason_counts_and_not_the_transfer_that_breaks_of_it(first: str) -> None:
    """One worker finds the request invalid; the other, here the faster, sees its end vanish."""
    scene = Scene()
    asking = await scene.ask()
    teller, other = (scene.prefill, scene.decode) if first == "d" else (scene.decode, scene.prefill)
    scene.tell(other, broken())
    scene.tell(teller, Failure(attempt(), FailureCode.INVALID, "too many KV blocks"))
    with pytest.raises(BadRequest, match="too many KV blocks"):
        await asking
    assert scene.whole()


async def test_a_rejection_behind_a_broken_transfer_is_a_rejection() -> None:
    scene = Scene()
    asking = await scene.ask()
    scene.tell(scene.decode, broken())
    scene.tell(scene.prefill, RejectedAttempt(attempt(), "full"))
    with pytest.raises(Overloaded):
        await asking
    assert scene.whole()


async def test_a_last_token_behind_a_broken_transfer_ends_the_stream() -> None:
    scene = Scene()
    asking = await scene.ask()
    scene.tell(scene.decode, broken())
    scene.tell(scene.prefill, delta(0, 0, 5, finish=FinishReason.STOP))
    assert (await asking).tokens == (5,)
    assert len(scene.prefill.orders) == 1
    assert scene.whole()


async def test_a_rejected_attempt_goes_to_another_and_is_not_a_lost_one() -> None:
    others = [FakeWorker(f"p{i}", Role.PREFILL) for i in range(4)]
    scene = Scene(*others)
    asking = await scene.ask()
    prefills = [scene.prefill, *others]
    for number in range(4):  # more than attempts may be lost
        (worker,) = [w for w in prefills if w.orders and w.orders[-1].attempt == attempt(number)]
        scene.tell(worker, RejectedAttempt(attempt(number), "full"))
        await eventually(lambda n=number + 2: sum(len(w.orders) for w in prefills) == n)
    assert all(len(worker.orders) == 1 for worker in prefills)
    (worker,) = [w for w in prefills if w.orders[-1].attempt == attempt(4)]
    scene.tell(worker, delta(4, 0, 5))
    assert (await asking).tokens == (5,)
    await scene.stream.aclose()
    assert scene.whole()


@pytest.mark.parametrize("code", [FailureCode.INTERNAL, FailureCode.TRANSFER])
async def test_so_many_lost_attempts_in_a_row_are_an_error(
    code: FailureCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "TRANSFER_GRACE_S", 0.001)
    scene = Scene()
    asking = await scene.ask()
    for number in range(MAX_LOST_ATTEMPTS):
        await eventually(lambda n=number: len(scene.decode.orders) == n + 1)
        scene.tell(scene.decode, Failure(attempt(number), code, f"no {number}"))
    with pytest.raises(GenerationFailed, match=f"no {MAX_LOST_ATTEMPTS - 1}"):
        await asyncio.wait_for(asking, 1)
    assert scene.whole()
    assert scene.prefill.aborted == [attempt(n) for n in range(MAX_LOST_ATTEMPTS)]


async def test_an_attempt_that_made_progress_begins_a_new_row_of_lost_ones() -> None:
    scene = Scene(max_tokens=19)
    asking = await scene.ask()
    for number in range(MAX_LOST_ATTEMPTS):  # two tokens each, then the loss
        await eventually(lambda n=number: len(scene.decode.orders) == n + 1)
        scene.tell(scene.prefill, delta(number, 2 * number, 5))
        scene.tell(scene.decode, delta(number, 2 * number + 1, 6))
        assert (await asking).tokens == (5,)
        assert (await anext(scene.stream)).tokens == (6,)
        asking = await scene.ask()
        scene.tell(scene.decode, Failure(attempt(number), FailureCode.INTERNAL, "why"))
    await eventually(lambda: len(scene.decode.orders) == MAX_LOST_ATTEMPTS + 1)
    scene.tell(
        scene.prefill, delta(MAX_LOST_ATTEMPTS, 2 * MAX_LOST_ATTEMPTS, 7, finish=FinishReason.STOP)
    )
    assert (await asking).tokens == (7,)
    assert scene.whole()


async def test_a_first_token_alone_is_no_progress() -> None:
    """A decode worker that always fails must not cost a prefill for every token."""
    scene = Scene(max_tokens=9)
    asking = await scene.ask()
    for number in range(MAX_LOST_ATTEMPTS):
        await eventually(lambda n=number: len(scene.decode.orders) == n + 1)
        scene.tell(scene.prefill, delta(number, number, 5))
        assert (await asking).tokens == (5,)
        asking = await scene.ask()
        scene.tell(scene.decode, Failure(attempt(number), FailureCode.INTERNAL, f"no {number}"))
    with pytest.raises(GenerationFailed, match=f"no {MAX_LOST_ATTEMPTS - 1}"):
        await asking
    assert scene.whole()


@pytest.mark.parametrize(
    ("there", "message"),
    [
        ("", "no worker is ready"),
        ("p", "no decode worker is ready"),
        ("d", "no prefill worker is ready"),
    ],
)
async def test_the_role_that_is_missing_is_named(there: str, message: str) -> None:
    scene = Scene()
    scene.pool.workers = [w for w in (scene.prefill, scene.decode) if w.name == there]
    with pytest.raises(Unavailable, match=message):
        await anext(scene.stream)


async def test_a_request_waits_for_a_worker_to_come_back() -> None:
    scene = Scene(worker_wait_s=5)
    scene.pool.change(scene.prefill)
    asking = await scene.ask()
    await eventually(lambda: scene.dispatcher.health()["waiting_for_workers"] == 1)
    scene.pool.change()  # news, but no good one
    scene.pool.change(scene.prefill, scene.decode)
    await eventually(lambda: len(scene.decode.orders) == 1)
    assert scene.dispatcher.health()["waiting_for_workers"] == 0
    scene.tell(scene.prefill, delta(0, 0, 5, finish=FinishReason.STOP))
    assert (await asking).tokens == (5,)
    assert scene.whole()


async def test_a_stream_waits_for_a_worker_to_come_back() -> None:
    scene = Scene(worker_wait_s=5)
    asking = await scene.ask()
    scene.tell(scene.prefill, delta(0, 0, 5))
    await asking
    asking = await scene.ask()
    scene.pool.change(scene.prefill)
    scene.dispatcher.lost(scene.decode, "it died")  # type: ignore[arg-type]
    await eventually(lambda: scene.dispatcher.health()["waiting_for_workers"] == 1)
    scene.pool.change(scene.prefill, scene.decode)
    await eventually(lambda: len(scene.decode.orders) == 2)
    scene.tell(scene.prefill, delta(1, 1, 6))
    assert (await asking).tokens == (6,)
    await scene.stream.aclose()
    assert scene.whole()


async def test_a_decode_worker_stands_in_while_no_prefill_worker_is_left() -> None:
    scene = Scene(max_tokens=9)
    asking = await scene.ask()
    scene.tell(scene.prefill, delta(0, 0, 5))
    await asking
    asking = await scene.ask()
    scene.decode.spare = True
    scene.pool.change(scene.decode)
    scene.dispatcher.lost(scene.prefill, "it died")  # type: ignore[arg-type]
    await eventually(lambda: len(scene.decode.orders) == 2)
    order = scene.decode.orders[1]
    assert (order.roles, order.transfer_id, order.sequences[0].output) == (COLOCATED, b"", (5,))
    scene.tell(scene.decode, delta(1, 1, 6), delta(1, 2, 7, finish=FinishReason.STOP))
    assert (await asking).tokens == (6,)
    assert (await anext(scene.stream)).tokens == (7,)
    scene.pool.change(scene.prefill, scene.decode)
    assert scene.whole()

    scene.stream = scene.dispatcher.generate((1, 2), SamplingParams(), request_id="s")
    asking = await scene.ask()
    assert scene.decode.orders[2].roles == Role.DECODE, "it does so only while there is none"
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert scene.whole()


async def test_waiting_for_a_worker_has_an_end() -> None:
    scene = Scene(worker_wait_s=0.02)
    scene.pool.change(scene.prefill)
    with pytest.raises(Unavailable, match="no decode worker is ready"):
        await asyncio.wait_for(anext(scene.stream), 2)
    assert scene.dispatcher.health()["waiting_for_workers"] == 0


async def test_a_client_that_leaves_while_it_waits_is_forgotten() -> None:
    scene = Scene(worker_wait_s=5)
    scene.pool.change()
    asking = await scene.ask()
    await eventually(lambda: scene.dispatcher.health()["waiting_for_workers"] == 1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    health = scene.dispatcher.health()
    assert (health["requests"], health["waiting_for_workers"]) == (0, 0)
    await asyncio.wait_for(scene.dispatcher.wait_until_idle(), 1)


async def test_nobody_waits_for_workers_of_a_router_that_ends() -> None:
    scene = Scene(worker_wait_s=5)
    scene.pool.change()
    asking = await scene.ask()
    await eventually(lambda: scene.dispatcher.health()["waiting_for_workers"] == 1)
    scene.pool.closing = True
    scene.pool.change()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(asking, 1)


async def test_a_worker_with_another_model_does_not_go_on_with_a_stream() -> None:
    scene = Scene()
    asking = await scene.ask()
    scene.tell(scene.prefill, delta(0, 0, 5))
    await asking
    asking = await scene.ask()
    scene.prefill.model = scene.decode.model = "another"
    scene.dispatcher.lost(scene.decode, "it died")  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="another model"):
        await asking
    assert scene.whole()


async def test_a_stream_waits_for_room_where_a_new_request_is_refused() -> None:
    scene = Scene(worker_wait_s=5)
    asking = await scene.ask()
    scene.tell(scene.prefill, delta(0, 0, 5))
    await asking
    asking = await scene.ask()
    scene.dispatcher.lost(scene.decode, "it died")  # type: ignore[arg-type]
    await eventually(lambda: len(scene.decode.orders) == 2)
    scene.tell(scene.decode, RejectedAttempt(attempt(1), "full"))
    await eventually(lambda: len(scene.decode.orders) == 3)
    scene.tell(scene.prefill, delta(2, 1, 6))
    assert (await asking).tokens == (6,)
    await scene.stream.aclose()

    fresh = Scene(worker_wait_s=5)
    asking = await fresh.ask()
    fresh.tell(fresh.decode, RejectedAttempt(attempt(), "full"))
    with pytest.raises(Overloaded):
        await asyncio.wait_for(asking, 1)


async def test_what_a_draining_worker_leaves_is_no_lost_attempt() -> None:
    scene = Scene(max_tokens=9)
    asking = await scene.ask()
    for number in range(MAX_LOST_ATTEMPTS + 1):
        await eventually(lambda n=number: len(scene.decode.orders) == n + 1)
        scene.decode.draining = True
        scene.dispatcher.lost(scene.decode, "it has drained")  # type: ignore[arg-type]
    await eventually(lambda: len(scene.decode.orders) == MAX_LOST_ATTEMPTS + 2)
    scene.tell(scene.prefill, delta(MAX_LOST_ATTEMPTS + 1, 0, 5, finish=FinishReason.STOP))
    assert (await asking).tokens == (5,)
    assert scene.whole()


async def test_requests_are_taken_while_a_worker_is_waited_for_and_not_before_all_were_there() -> (
    None
):
    scene = Scene(worker_wait_s=5)
    dispatcher = scene.dispatcher
    scene.pool.complete = scene.pool.was_complete = False
    assert not dispatcher.accepting
    scene.pool.was_complete = True
    assert (dispatcher.ready, dispatcher.accepting) == (False, True)
    dispatcher.drain()
    assert not dispatcher.accepting


async def test_a_client_that_does_not_read_is_given_up_and_its_workers_are_told() -> None:
    scene = Scene(max_tokens=10 * MAX_UNREAD_TOKENS)
    asking = await scene.ask()
    scene.tell(scene.prefill, delta(0, 0, 5))
    await asking  # and then no more
    for index in range(1, MAX_UNREAD_TOKENS + 1):
        scene.tell(scene.decode, delta(0, index, 6))
    assert not scene.decode.aborted
    scene.tell(scene.decode, delta(0, MAX_UNREAD_TOKENS + 1, 6))
    assert scene.prefill.aborted == scene.decode.aborted == [attempt()]
    with pytest.raises(ReaderTooSlow, match="8193 tokens"):
        await anext(scene.stream)
    assert scene.whole()
    assert scene.dispatcher.health()["requests"] == 0


async def test_prefill_counts_no_more_once_decode_has_gone_on() -> None:
    scene = Scene()
    asking = await scene.ask()
    scene.tell(scene.prefill, delta(0, 0, 5))
    scene.tell(scene.decode, delta(0, 1, 6))
    await asking
    scene.dispatcher.lost(scene.prefill, "it died")  # type: ignore[arg-type]
    scene.tell(scene.prefill, broken(), Failure(attempt(), FailureCode.INTERNAL, "why"))
    assert (await anext(scene.stream)).tokens == (6,)
    asking = await scene.ask()
    scene.tell(scene.decode, delta(0, 2, 7, finish=FinishReason.LENGTH))
    assert (await asking).tokens == (7,)
    assert scene.whole()


async def test_an_order_that_cannot_be_sent_leaves_nothing() -> None:
    scene = Scene()

    def unsendable(order: StartOrder) -> None:
        raise ValueError("value out of range")

    scene.decode.start = unsendable  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="out of range"):
        await anext(scene.stream)
    assert scene.prefill.aborted == [attempt()]
    assert scene.whole()
