"""What the dispatcher makes of each piece of news, in whatever order two workers tell it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import pytest

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
from protos.codec import RejectedAttempt, StartOrder, StepUpdate, WorkerInfo
from router import dispatch
from router.dispatch import Dispatcher
from router.errors import BadRequest, GenerationFailed, Overloaded, Unavailable
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

    @property
    def address(self) -> str:
        return self.name

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(1, self.roles, LIMITS, (f"grpc://{self.name}:1",))

    def start(self, order: StartOrder) -> None:
        self.orders.append(order)

    def abort(self, attempt: AttemptId) -> None:
        self.aborted.append(attempt)


class FakePool:
    def __init__(self, *workers: FakeWorker) -> None:
        self.workers = list(workers)
        self.limits = LIMITS

    def listen(self, listener: Dispatcher) -> None:
        self.listener = listener

    def with_roles(self, roles: Role) -> list[FakeWorker]:
        return [worker for worker in self.workers if worker.roles == roles]


class Scene:
    """A dispatcher, one prefill and one decode worker, and one request."""

    def __init__(self, *more: FakeWorker, max_tokens: int = 3) -> None:
        self.prefill = FakeWorker("p", Role.PREFILL)
        self.decode = FakeWorker("d", Role.DECODE)
        self.pool = FakePool(self.prefill, self.decode, *more)
        self.dispatcher = Dispatcher(self.pool, 1)  # type: ignore[arg-type]
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
async def test_three_lost_attempts_are_an_error(
    code: FailureCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "TRANSFER_GRACE_S", 0.001)
    scene = Scene()
    asking = await scene.ask()
    for number in range(3):
        await eventually(lambda n=number: len(scene.decode.orders) == n + 1)
        scene.tell(scene.decode, Failure(attempt(number), code, f"no {number}"))
    with pytest.raises(GenerationFailed, match="no 2"):
        await asyncio.wait_for(asking, 1)
    assert scene.whole()
    assert scene.prefill.aborted == [attempt(n) for n in range(3)]


async def test_an_attempt_that_made_progress_begins_a_new_row_of_lost_ones() -> None:
    scene = Scene(max_tokens=9)
    asking = await scene.ask()
    for number in range(3):  # two tokens each, then the loss
        await eventually(lambda n=number: len(scene.decode.orders) == n + 1)
        scene.tell(scene.prefill, delta(number, 2 * number, 5))
        scene.tell(scene.decode, delta(number, 2 * number + 1, 6))
        assert (await asking).tokens == (5,)
        assert (await anext(scene.stream)).tokens == (6,)
        asking = await scene.ask()
        scene.tell(scene.decode, Failure(attempt(number), FailureCode.INTERNAL, "why"))
    await eventually(lambda: len(scene.decode.orders) == 4)
    scene.tell(scene.prefill, delta(3, 6, 7, finish=FinishReason.STOP))
    assert (await asking).tokens == (7,)
    assert scene.whole()


async def test_a_first_token_alone_is_no_progress() -> None:
    """A decode worker that always fails must not cost a prefill for every token."""
    scene = Scene(max_tokens=9)
    asking = await scene.ask()
    for number in range(3):
        await eventually(lambda n=number: len(scene.decode.orders) == n + 1)
        scene.tell(scene.prefill, delta(number, number, 5))
        assert (await asking).tokens == (5,)
        asking = await scene.ask()
        scene.tell(scene.decode, Failure(attempt(number), FailureCode.INTERNAL, f"no {number}"))
    with pytest.raises(GenerationFailed, match="no 2"):
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
