"""What the dispatcher makes of each piece of news, in whatever order two workers tell it."""

from __future__ import annotations

import pytest

from engine.types import (
    Failure,
    FailureCode,
    FinishReason,
    Role,
    SamplingParams,
    SequenceId,
    TokenDelta,
)
from protos.codec import RejectedAttempt, StartOrder
from router.dispatch import MAX_UNREAD_TOKENS
from router.errors import Overloaded, ReaderTooSlow
from tests.services.deployment import eventually
from tests.services.scene import Scene, attempt, broken, delta


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


async def test_no_worker_is_told_of_an_end_that_it_has_told() -> None:
    scene = Scene()
    asking = await scene.ask()
    scene.tell(scene.prefill, delta(0, 0, 5))
    await asking
    asking = await scene.ask()
    scene.tell(scene.decode, Failure(attempt(0), FailureCode.INTERNAL, "why"))
    await eventually(lambda: len(scene.decode.orders) == 2)
    assert (scene.prefill.aborted, scene.decode.aborted) == ([attempt(0)], [])
    scene.tell(scene.decode, RejectedAttempt(attempt(1), "draining"))
    with pytest.raises(Overloaded):
        await asking
    assert (scene.prefill.aborted, scene.decode.aborted) == ([attempt(0), attempt(1)], [])

    scene = Scene(max_tokens=2)
    asking = await scene.ask()
    scene.tell(scene.prefill, delta(0, 0, 5))
    await asking
    scene.tell(scene.decode, delta(0, 1, 6, finish=FinishReason.LENGTH))
    assert (await anext(scene.stream)).finish is FinishReason.LENGTH
    assert (scene.prefill.aborted, scene.decode.aborted) == ([], [])
    assert scene.whole()


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
    assert scene.dispatcher.health()["sequences"] == 0


async def test_an_order_that_cannot_be_sent_leaves_nothing() -> None:
    scene = Scene()

    def unsendable(order: StartOrder) -> None:
        raise ValueError("value out of range")

    scene.decode.start = unsendable  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="out of range"):
        await anext(scene.stream)
    assert scene.prefill.aborted == [attempt()]
    assert scene.whole()
