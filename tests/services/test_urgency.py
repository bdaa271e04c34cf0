"""Priorities and deadlines: who goes first, and what is given up where."""

from __future__ import annotations

import asyncio

import pytest

from engine.types import FinishReason, SamplingParams
from protos.codec import RejectedAttempt
from router.errors import DeadlinePassed
from router.urgency import Urgency
from router.waiting_line import PROBES, WaitingLine
from tests.services.deployment import (
    TOPOLOGIES,
    collect,
    deployment,
    eventually,
    expected,
    prompt_of,
)
from tests.services.scene import Scene, attempt, delta


def soon(seconds: float = 0.02) -> Urgency:
    return Urgency(deadline=asyncio.get_running_loop().time() + seconds)


def urgent(scene: Scene, urgency: Urgency) -> None:
    sampling = SamplingParams(max_tokens=3)
    scene.stream = scene.dispatcher.generate((1, 2), sampling, request_id="r", urgency=urgency)


async def test_the_priority_is_told_to_both_workers() -> None:
    scene = Scene()
    urgent(scene, Urgency(priority=-3))
    asking = await scene.ask()
    for worker in (scene.prefill, scene.decode):
        ((sequence,),) = (order.sequences for order in worker.orders)
        assert sequence.priority == -3
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_a_deadline_that_passes_while_it_runs_is_an_abort_on_both() -> None:
    scene = Scene()
    urgent(scene, soon())
    asking = await scene.ask()
    scene.tell(scene.prefill, delta(0, 0, 5))
    assert (await asking).tokens == (5,)
    asking = await scene.ask()
    with pytest.raises(DeadlinePassed):
        await asking
    assert scene.prefill.aborted == scene.decode.aborted == [attempt()]
    assert scene.whole()


async def test_workers_are_told_even_if_the_client_does_not_read() -> None:
    scene = Scene()
    urgent(scene, soon())
    asking = await scene.ask()
    scene.tell(scene.prefill, delta(0, 0, 5))
    await asking
    scene.tell(scene.decode, delta(0, 1, 6))
    await eventually(lambda: scene.decode.aborted == [attempt()])
    assert scene.whole()
    with pytest.raises(DeadlinePassed):
        await anext(scene.stream)


async def test_a_deadline_that_passes_while_it_waits_for_a_worker() -> None:
    scene = Scene(worker_wait_s=30)
    scene.pool.change()
    urgent(scene, soon())
    with pytest.raises(DeadlinePassed):
        await asyncio.wait_for(anext(scene.stream), 2)
    assert scene.dispatcher.health()["waiting_for_workers"] == 0


async def test_what_comes_too_late_is_not_started() -> None:
    scene = Scene()
    urgent(scene, soon(-1))
    with pytest.raises(DeadlinePassed):
        await anext(scene.stream)
    assert not scene.prefill.orders


async def test_a_deadline_that_is_kept_ends_nothing() -> None:
    scene = Scene()
    urgent(scene, soon(60))
    asking = await scene.ask()
    (flight,) = scene.dispatcher._flights.values()
    scene.tell(scene.prefill, delta(0, 0, 5, finish=FinishReason.STOP))
    await asking
    assert flight.expiry is not None
    assert flight.expiry.cancelled()
    assert scene.whole()


async def test_those_that_wait_for_a_worker_go_by_priority_then_in_order() -> None:
    scene = Scene(worker_wait_s=30)
    scene.pool.change(scene.prefill)
    names = {"late": 5, "first": 0, "second": 0, "urgent": -1}
    streams = {
        name: scene.dispatcher.generate(
            (1,), SamplingParams(), request_id=name, urgency=Urgency(priority)
        )
        for name, priority in names.items()
    }
    tasks = [asyncio.create_task(collect(stream)) for stream in streams.values()]
    await eventually(lambda: scene.dispatcher.health()["waiting_for_workers"] == 4)
    scene.pool.change(scene.prefill, scene.decode)
    await eventually(lambda: len(scene.decode.orders) == 4)
    order = [order.attempt.request_id for order in scene.decode.orders]
    assert order == ["urgent", "first", "second", "late"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_those_that_wait_for_room_go_by_priority_too() -> None:
    scene = Scene(worker_wait_s=30)
    streams = {
        name: scene.dispatcher.generate(
            (1,), SamplingParams(), request_id=name, begun=lambda: True, urgency=Urgency(priority)
        )
        for name, priority in {"patient": 1, "urgent": 0}.items()
    }
    tasks = [asyncio.create_task(collect(stream)) for stream in streams.values()]
    await eventually(lambda: len(scene.decode.orders) == 2)
    for order in list(scene.decode.orders):
        scene.tell(scene.decode, RejectedAttempt(order.attempt, "full"))
    await eventually(lambda: len(scene.decode.orders) == 4)
    again = [order.attempt for order in scene.decode.orders[2:]]
    assert again == [("urgent", 1), ("patient", 1)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_line_wakes_those_who_wait_and_forgets_those_who_left() -> None:
    line, woken = WaitingLine(), list[str]()

    async def wait(name: str, priority: int) -> None:
        await line.wait(priority)
        woken.append(name)

    names = {"b": 1, "a": 0, "c": 1, "gone": -1}
    tasks = {name: asyncio.create_task(wait(name, p)) for name, p in names.items()}
    await asyncio.sleep(0)
    tasks.pop("gone").cancel()
    line.wake_within(60)
    line.wake_within(0.001)  # one alarm is enough
    line.wake()
    await asyncio.gather(*tasks.values())
    assert woken == ["a", "b", "c"]
    line.wake()
    again = asyncio.create_task(line.wait())
    await asyncio.sleep(0)
    assert not again.done()
    line.wake_within(0.001)
    await asyncio.wait_for(again, 2)


async def test_without_news_a_few_ask_at_a_time_until_nobody_waits() -> None:
    line, at_once = WaitingLine(), list[int]()
    woken = 0

    async def wait() -> None:
        nonlocal woken
        await line.wait()
        woken += 1

    tasks = [asyncio.create_task(wait()) for _ in range(2 * PROBES + 1)]
    await asyncio.sleep(0)
    line.wake_within(0.001)
    while not all(task.done() for task in tasks):
        before = woken
        await asyncio.wait(tasks, timeout=2, return_when=asyncio.FIRST_COMPLETED)
        tasks = [task for task in tasks if not task.done()]
        at_once.append(woken - before)
    assert at_once == [PROBES, PROBES, 1]


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_a_passed_deadline_frees_everything(topology: str) -> None:
    """One request runs and one waits behind it, both to their deadline; a third has none."""
    limits = {"max_seqs": 1, "max_prefill_seqs": 1}
    async with deployment(topology, **limits) as served:
        for member in served.members.values():
            member.runner.shut(passes=0)
        sampling = SamplingParams(max_tokens=8)
        late = [
            served.dispatcher.generate(
                prompt_of(9, n), sampling, request_id=f"late{n}", urgency=soon(0.1)
            )
            for n in range(2)
        ]
        tasks = [asyncio.create_task(collect(stream)) for stream in late]
        patient = asyncio.create_task(served.ask(prompt_of(9)))
        for task in tasks:
            with pytest.raises(DeadlinePassed):
                await asyncio.wait_for(task, 5)
        for member in served.members.values():
            member.runner.open()
        assert await asyncio.wait_for(patient, 5) == expected(prompt_of(9), 8)
        await served.until_idle()
