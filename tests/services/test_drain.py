"""Workers that are told to end: what runs goes on, here or elsewhere, and nothing new begins."""

from __future__ import annotations

import asyncio
import logging

import pytest

from router.errors import BadRequest, Unavailable
from tests.services.client import PROMPT, Client
from tests.services.deployment import deployment, eventually, expected, prompt_of
from tests.services.test_failures import begin_decode, begin_prefill


@pytest.mark.parametrize("topology", ["1,2", "colocated"])
async def test_a_drain_waits_for_what_runs(topology: str) -> None:
    async with deployment(topology) as served:
        client, victim = await begin_decode(served)
        draining = asyncio.create_task(victim.host.drain())
        await eventually(lambda: any(w.draining for w in served.pool._workers.values()))
        assert not draining.done()
        victim.runner.open()
        await client.ends_right()
        await asyncio.wait_for(draining, 2)
        await victim.host.close()
        victim.closed = True
        await served.until_idle()


async def test_prefill_drains_until_its_kv_has_been_fetched() -> None:
    async with deployment("2,1", only={"decode-0": {"max_seqs": 1}}) as served:
        decode = served["decode-0"]
        decode.runner.shut()
        running = Client(served)
        await eventually(lambda: decode.runner.held)
        waiting = Client(served, prompt_of(30))
        await waiting.has(1)
        await eventually(
            lambda: sum(m.engine.load().exported_blocks > 0 for m in served.members.values()) == 1
        )
        (exporting,) = [m for m in served.members.values() if m.engine.load().exported_blocks]
        draining = asyncio.create_task(exporting.host.drain())
        await eventually(lambda: any(w.draining for w in served.pool._workers.values()))
        assert not draining.done()
        decode.runner.open()
        await waiting.ends_right()
        await running.ends_right()
        await asyncio.wait_for(draining, 2)


async def test_new_requests_go_elsewhere() -> None:
    async with deployment("2,2") as served:
        for name in ("prefill-0", "decode-1"):
            await asyncio.wait_for(served[name].host.drain(), 2)
        await eventually(lambda: sum(w.draining for w in served.pool._workers.values()) == 2)
        states = [worker["state"] for worker in served.dispatcher.health()["workers"]]
        assert states == ["draining", "ready", "ready", "draining"]
        for number in range(6):
            prompt = prompt_of(9, salt=number)
            assert await served.ask(prompt) == expected(prompt, 8)
        for name in ("prefill-0", "decode-1"):
            load = served[name].engine.load()
            assert load.free_blocks == served[name].built.limits.num_blocks


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_what_has_not_ended_in_time_is_handed_over(
    phase: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with deployment("2,2") as served:
        begin = begin_prefill if phase == "prefill" else begin_decode
        client, victim = await begin(served)
        draining = asyncio.create_task(victim.host.drain())
        await eventually(lambda: any(w.draining for w in served.pool._workers.values()))
        with caplog.at_level(logging.INFO, "hexserve.router"):
            draining.cancel()  # the grace is over
            closing = asyncio.create_task(victim.host.close())
            await client.ends_right()
        victim.runner.open()
        await closing
        victim.closed = True
        assert "has drained" in caplog.text
        assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
        await served.until_idle()


async def test_a_router_drains_a_worker_by_its_address() -> None:
    async with deployment("1,2") as served:
        client, victim = await begin_decode(served)
        (address,) = [w.address for f in served.dispatcher._flights.values() for w in f.workers[1:]]
        stop = asyncio.Event()
        serving = asyncio.create_task(victim.host.serve(stop))
        served.pool.drain(address)
        await asyncio.wait_for(serving, 2)
        assert stop.is_set(), "so its process ends"
        await eventually(lambda: any(w.draining for w in served.pool._workers.values()))
        draining = asyncio.create_task(victim.host.drain())
        victim.runner.open()
        await client.ends_right()
        await asyncio.wait_for(draining, 2)
        await victim.host.close()
        victim.closed = True
        await eventually(lambda: not served.pool.all_open)
        with pytest.raises(Unavailable):
            served.pool.drain(address)
        with pytest.raises(BadRequest, match="there are unix:"):
            served.pool.drain("h:1")
        await served.until_idle()


async def test_an_idle_worker_has_left_and_is_not_lost_however_soon_it_closes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with deployment("2,1") as served:
        for name in ("prefill-0", "decode-0"):
            victim = served[name]
            with caplog.at_level(logging.INFO, "hexserve.router"):
                await victim.host.drain()
                await victim.kill()
                await eventually(lambda: not served.pool.all_open)
            assert "has left" in caplog.text
            assert "is lost" not in caplog.text
            caplog.clear()
            await served.revive(name)


async def test_an_engine_that_fails_ends_the_drain() -> None:
    async with deployment("1,2") as served:
        client, victim = await begin_decode(served)
        draining = asyncio.create_task(victim.host.drain())
        victim.runner.fault = RuntimeError("no such device")
        victim.runner.open()
        await asyncio.wait_for(draining, 2)
        await asyncio.wait_for(victim.kill(), 2)
        await client.ends_right()
        assert client.tokens == expected(PROMPT, 30)
        await served.until_idle()
