"""Messages of sessions that are dropped are counted, at both ends."""

from __future__ import annotations

import asyncio

import pytest

from engine.types import Failure, FailureCode
from protos import session_server
from router.drops import Drops
from router.metrics import RouterMetrics
from router.workers import WorkerPool
from tests.protos.sessions import eventually, hello, order, raw_stream, router, serving, start
from tests.services.deployment import TOPOLOGIES, deployment, expected, prompt_of
from tests.services.scene import Scene, delta


def test_sums_go_on_over_restarts() -> None:
    drops = Drops()
    for epoch, count, total in [(1, 2, 2), (1, 2, 2), (1, 5, 5), (2, 1, 6), (2, 4, 9)]:
        drops.take("a", epoch, count)
        assert drops.by_workers == total
    drops.take("b", 1, 1)
    assert drops.by_workers == 10


async def test_tokens_of_an_ended_attempt_are_late() -> None:
    scene = Scene()
    asking = await scene.ask()
    scene.tell(scene.prefill, delta(7, 0, 5), delta(0, 0, 5))
    assert (await asking).tokens == (5,)
    await scene.stream.aclose()
    scene.tell(scene.decode, delta(0, 1, 6))
    assert scene.pool.drops.late == 2


@pytest.mark.parametrize("told", ["failure", "rejection", "last token"])
async def test_the_abort_of_an_attempt_that_has_ended_meanwhile_is_no_drop(told: str) -> None:
    async with serving() as (address, worker, sessions), router(address) as mine:
        attempt = order("a").attempt
        mine.session.start(order("a"))
        await eventually(lambda: sessions.attempts == 1)
        match told:
            case "failure":
                sessions.failed(Failure(attempt, FailureCode.INTERNAL, "why"))
            case "rejection":
                sessions.rejected(attempt, "full")
            case "last token":
                sessions.forget(attempt)
        mine.session.abort(attempt)
        mine.session.start(order("b"))
        await eventually(lambda: len(worker.started) == 2)
        assert sessions.dropped == 0
        assert not worker.aborted
        mine.session.abort(attempt)
        await eventually(lambda: sessions.dropped == 1)


async def test_the_ends_that_a_session_remembers_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_server, "MAX_ENDED", 2)
    async with serving() as (address, worker, sessions), router(address) as mine:
        names = ("a", "b", "c")
        for name in names:
            mine.session.start(order(name))
        await eventually(lambda: sessions.attempts == 3)
        for name in names:
            sessions.rejected(order(name).attempt, "full")
        for name in names:
            mine.session.abort(order(name).attempt)
        mine.session.start(order("last"))
        await eventually(lambda: len(worker.started) == 4)
        assert sessions.dropped == 1, "the first of three is forgotten"


async def test_what_a_worker_has_no_use_for_is_told_to_routers() -> None:
    async with serving() as (address, worker, sessions):
        pool = WorkerPool([address])
        metrics = RouterMetrics("m")
        metrics.export_workers(pool)
        pool.open()
        try:
            await pool.wait_until_all_open()
            (session,) = pool._sessions
            for _ in range(3):
                session.start(order("a"))
            session.abort(order("unknown").attempt)
            async with raw_stream(address) as call:
                for message in (hello(), start("b"), b"\xff"):
                    await call.write(message)
                await eventually(lambda: sessions.dropped == 4)
            await eventually(lambda: pool.dropped()["by_worker"] == 4)
            assert len(worker.started) == 2
            line = 'hexserve:dropped_messages_total{engine="0",kind="by_worker",model_name="m"} 4.0'
            assert line in metrics.render().decode().splitlines()
        finally:
            await pool.close()


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_workers_have_a_use_for_all_messages_of_what_goes_well(topology: str) -> None:
    prompts = [prompt_of(1 + 3 * number, salt=number) for number in range(8)]
    async with deployment(topology) as served:
        answers = await asyncio.gather(*(served.ask(prompt) for prompt in prompts))
        assert answers == [expected(prompt, 8) for prompt in prompts]
        await served.ask(prompts[0])  # behind whatever was told of the others
        await served.until_idle()
        assert {m.host._sessions.dropped for m in served.members.values()} == {0}
