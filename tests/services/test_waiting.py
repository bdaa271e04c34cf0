"""Requests whose workers are away or full: who waits, for how long, and who is refused."""

from __future__ import annotations

import asyncio

import pytest

from engine.types import (
    COLOCATED,
    AttemptId,
    FinishReason,
    Load,
    Role,
    SamplingParams,
)
from protos.codec import RejectedAttempt, StartOrder, StepUpdate
from router import worker_search
from router.errors import Overloaded, Unavailable
from router.policy import LOCAL_MOST_TOKENS
from tests.services.deployment import eventually
from tests.services.scene import Scene, attempt, delta


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

    prompt = (1,) * (LOCAL_MOST_TOKENS + 1)
    scene.stream = scene.dispatcher.generate(prompt, SamplingParams(), request_id="s")
    asking = await scene.ask()
    assert scene.decode.orders[2].roles == Role.DECODE, "a long prompt, only while there is none"
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
    assert (health["sequences"], health["waiting_for_workers"]) == (0, 0)


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


async def test_a_choice_waits_for_room_once_another_of_its_request_has_begun() -> None:
    scene = Scene(worker_wait_s=5)
    others: list[int] = []
    scene.stream = scene.dispatcher.generate(
        (1, 2), SamplingParams(max_tokens=3), request_id="r", begun=lambda: bool(others)
    )
    asking = await scene.ask()
    others.append(5)
    scene.tell(scene.decode, RejectedAttempt(attempt(), "full"))
    await eventually(lambda: len(scene.decode.orders) == 2)
    scene.tell(scene.prefill, delta(1, 0, 6))
    assert (await asking).tokens == (6,)
    await scene.stream.aclose()
    assert scene.whole()


async def test_waiting_for_room_has_an_end_however_often_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_search, "FULL_RETRY_S", 0.001)
    scene = Scene(worker_wait_s=0.05)
    asking = await scene.ask()
    scene.tell(scene.prefill, delta(0, 0, 5))
    await asking
    refuse = scene.dispatcher.stepped

    def refused(order: StartOrder) -> None:
        news = StepUpdate((), (), (RejectedAttempt(order.attempt, "full"),), None, False, {})
        asyncio.get_running_loop().call_soon(refuse, scene.decode, news)

    scene.decode.start = refused  # type: ignore[method-assign]
    asking = await scene.ask()
    scene.dispatcher.lost(scene.decode, "it died")  # type: ignore[arg-type]
    with pytest.raises(Overloaded):
        await asking
    assert scene.whole()


async def wait_for_room(scene: Scene, *, begun: bool = True, name: str = "r") -> asyncio.Task:
    """A request of which the decode worker does not take the next attempt."""
    refused = len(scene.decode.orders) + 1
    stream = scene.dispatcher.generate(
        (1, 2), SamplingParams(max_tokens=3), request_id=name, begun=lambda: begun
    )
    asking = asyncio.create_task(anext(stream))
    await eventually(lambda: len(scene.decode.orders) == refused)
    scene.tell(scene.decode, RejectedAttempt(AttemptId(name, 0), "full"))
    return asking


def tell_queue(scene: Scene, waiting: int) -> None:
    """The decode worker tells how long its queue is."""
    load = scene.decode.load = Load(waiting=waiting, free_blocks=100)
    news = StepUpdate((), (), (), load, False, {})
    scene.dispatcher.stepped(scene.decode, news)  # type: ignore[arg-type]


async def ended(*tasks: asyncio.Task) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_new_request_does_not_pass_one_that_has_begun_and_waits_for_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_search, "FULL_RETRY_S", 60.0)
    scene = Scene(worker_wait_s=60)
    waiting = await wait_for_room(scene)
    await eventually(lambda: scene.dispatcher.waiting == 1)
    with pytest.raises(Overloaded, match="that have begun wait"):
        await anext(scene.dispatcher.generate((1, 2), SamplingParams(), request_id="new"))
    begun = await wait_for_room(scene, name="another")
    await eventually(lambda: scene.dispatcher.waiting == 2)
    assert len(scene.decode.orders) == 2, "of those that have begun"
    await ended(waiting, begun)
    with pytest.raises(Overloaded, match=r"every worker's queue is full$"):
        await asyncio.wait_for(await wait_for_room(scene, begun=False, name="newer"), 2)
    assert scene.whole()


async def test_as_many_as_have_left_a_queue_are_asked_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_search, "FULL_RETRY_S", 60.0)
    scene = Scene(worker_wait_s=60)
    tell_queue(scene, 9)
    tasks = [await wait_for_room(scene, name=name) for name in "abc"]
    await eventually(lambda: scene.dispatcher.waiting == 3)
    tell_queue(scene, 9)
    tell_queue(scene, 10)
    await asyncio.sleep(0)
    assert len(scene.decode.orders) == 3
    tell_queue(scene, 8)
    await eventually(lambda: scene.dispatcher.waiting == 1)
    retried = [order.attempt for order in scene.decode.orders[3:]]
    assert retried == [AttemptId("a", 1), AttemptId("b", 1)]
    scene.tell(scene.decode, RejectedAttempt(retried[0], "full after all"))
    await eventually(lambda: scene.dispatcher.waiting == 2)
    scene.pool.change(scene.prefill, scene.decode)
    await eventually(lambda: scene.dispatcher.waiting == 0)
    await ended(*tasks)
    assert scene.whole()
