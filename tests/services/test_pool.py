"""Which workers a router uses when not all of them serve the same model, and their load."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

from engine.types import COLOCATED, Load, ModelLimits
from protos.codec import WorkerInfo
from protos.session_server import SessionServer
from router.metrics import RouterMetrics
from router.workers import Supervision, WorkerPool
from tests.protos.sessions import ScriptedWorker, eventually, listening, socket_address

INFO = WorkerInfo(7, COLOCATED, ModelLimits("m", 97, 64, 4, 50, 4), ())
OTHER = dataclasses.replace(INFO, limits=dataclasses.replace(INFO.limits, fingerprint="other"))


@contextlib.asynccontextmanager
async def pool_of(*addresses: str) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(addresses)
    pool.open()
    try:
        yield pool
    finally:
        await pool.close()


@contextlib.asynccontextmanager
async def worker(address: str, info: WorkerInfo, load: Load) -> AsyncIterator[None]:
    behind = ScriptedWorker()
    behind.told = load
    async with listening(address, SessionServer(info, behind).handler()):
        yield


def states(pool: WorkerPool) -> list[str]:
    return [described["state"] for described in pool.describe()]


async def test_a_worker_with_another_model_waits_until_no_other_is_left() -> None:
    async with (
        socket_address() as first,
        socket_address() as second,
        pool_of(first, second) as pool,
        worker(first, INFO, Load()),
    ):
        await eventually(lambda: states(pool) == ["ready", "unreachable"])
        assert not pool.all_open
        async with worker(second, OTHER, Load()):
            async with asyncio.timeout(5):
                await pool.wait_until_all_open()
            assert states(pool) == ["ready", "serves another model"]
            assert [pool.fleet.worker(row).address for row in pool.fleet.taking(COLOCATED)] == [
                first
            ]
        await eventually(lambda: states(pool) == ["ready", "unreachable"])
        assert not pool.all_open


async def test_it_is_let_in_when_the_last_of_the_first_model_is_lost() -> None:
    async with (
        socket_address() as first,
        socket_address() as second,
        pool_of(first, second) as pool,
        contextlib.AsyncExitStack() as dying,
    ):
        await dying.enter_async_context(worker(first, INFO, Load()))
        await eventually(lambda: states(pool) == ["ready", "unreachable"])
        async with worker(second, OTHER, Load()):
            await eventually(lambda: states(pool) == ["ready", "serves another model"])
            await dying.aclose()
            await eventually(lambda: states(pool) == ["unreachable", "ready"])
            assert pool.limits == OTHER.limits
            assert pool.complete
        await eventually(lambda: states(pool) == ["unreachable", "unreachable"])
        assert pool.limits == OTHER.limits, "the last that were known"
        assert (pool.complete, pool.was_complete) == (False, True)


async def test_what_a_supervisor_tells_of_workers_is_shown() -> None:
    async with socket_address() as first, socket_address() as second:
        heard: list[tuple[str, bool]] = []
        pool = WorkerPool([first, second])
        pool.observe(lambda address, is_open: heard.append((address, is_open)))
        pool.supervised(first, Supervision(restarts=3))
        pool.supervised(second, Supervision(restarts=4, given_up=True))
        metrics = RouterMetrics("m")
        metrics.export_workers(pool)
        pool.open()
        try:
            async with worker(first, INFO, Load()):
                await eventually(lambda: states(pool) == ["ready", "given up"])
                assert [each["restarts"] for each in pool.describe()] == [3, 4]
                lines = metrics.render().decode().splitlines()
                labels = 'engine="0",model_name="m"'
                assert f'hexserve:workers{{{labels},state="given up"}} 1.0' in lines
                assert f'hexserve:workers{{{labels},state="ready"}} 1.0' in lines
                assert f"hexserve:worker_restarts_total{{{labels}}} 7.0" in lines
            await eventually(lambda: heard == [(first, True), (first, False)])
            assert states(pool) == ["unreachable", "given up"]
        finally:
            await pool.close()


async def test_the_load_of_all_workers_is_their_sum() -> None:
    one = Load(1, 2, 3, free_blocks=20, cached_blocks=10, running_blocks=15, exported_blocks=5)
    two = Load(10, 20, free_blocks=50, compiles=4)
    async with (
        socket_address() as first,
        socket_address() as second,
        worker(first, INFO, one),
        worker(second, INFO, two),
        pool_of(first, second) as pool,
    ):
        assert pool.total_load().kv_cache_usage == 0
        await eventually(lambda: pool.total_load().running == 22)
        load = pool.total_load()
        assert (load.waiting, load.compiles) == (11, 4)
        assert (load.free_blocks, load.cached_blocks) == (70, 10)
        assert (load.running_blocks, load.exported_blocks) == (15, 5)
        assert load.kv_cache_usage == 0.2
        assert (load.total_blocks, load.unaccounted_blocks) == (100, 0)
