"""The router's end of a session: which workers it gives up, and how they are found again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from engine.types import (
    Load,
)
from protos import session_client, session_server
from protos import worker_pb2 as wire
from protos.codec import PROTOCOL_VERSION, encode_welcome
from protos.session_client import WorkerSession
from protos.session_server import SERVICE, SessionServer
from tests.protos.sessions import (
    INFO,
    Listener,
    Router,
    ScriptedWorker,
    eventually,
    listening,
    router,
    serving,
    socket_address,
)


async def test_a_worker_that_goes_is_lost_and_found_again() -> None:
    worker = ScriptedWorker()
    async with socket_address() as address:
        mine = Router(address, "router")
        try:
            for times in (1, 2):
                async with listening(address, SessionServer(INFO, worker).handler()):
                    await mine.opened(times)
                    assert mine.session.info is not None
                await eventually(lambda times=times: len(mine.heard.losses) == times)
                assert mine.session.info is None
        finally:
            await mine.close()
        assert len(mine.heard.losses) == 2, "what is not open cannot be lost"


async def test_nothing_of_an_older_session_counts_in_a_new_one() -> None:
    worker = ScriptedWorker()
    async with socket_address() as address:
        mine = Router(address, "router")
        try:
            old = SessionServer(INFO, worker)
            old.drain()
            async with listening(address, old.handler()):
                await eventually(lambda: mine.session.draining)
                assert mine.session.load == worker.told
            seen: list[tuple[bool, Load]] = []
            mine.heard.opened = lambda session: seen.append((session.draining, session.load))
            async with listening(address, SessionServer(INFO, worker).handler()):
                await eventually(lambda: bool(seen))
            assert seen == [(False, worker.told)]
        finally:
            await mine.close()


async def greet(context: grpc.aio.ServicerContext) -> None:
    """What opens a session: the welcome and a first load."""
    await context.write(wire.Up(welcome=encode_welcome(INFO)).SerializeToString())
    await context.write(wire.Up(step=wire.Step(load=wire.Load())).SerializeToString())


async def silent(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
    await greet(context)
    await asyncio.Event().wait()


def handler(behaviour) -> grpc.GenericRpcHandler:
    return grpc.method_handlers_generic_handler(
        SERVICE, {"Session": grpc.stream_stream_rpc_method_handler(behaviour)}
    )


async def test_a_silent_worker_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert session_client.SILENCE_LIMIT_S > 2 * session_server.LOAD_INTERVAL_S
    monkeypatch.setattr(session_client, "SILENCE_LIMIT_S", 0.05)
    async with (
        socket_address() as address,
        listening(address, handler(silent)),
        router(address) as mine,
    ):
        await eventually(lambda: bool(mine.heard.losses))
        assert "silent" in mine.heard.losses[0]


NAMELESS = wire.Singles(numbers=[1], indexes=[0], tokens=[1])


@pytest.mark.parametrize(
    "nonsense",
    [
        wire.Up(welcome=encode_welcome(INFO)).SerializeToString(),
        wire.Up().SerializeToString(),
        wire.Up(step=wire.Step(tokens=[wire.Tokens()])).SerializeToString(),
        wire.Up(step=wire.Step(singles=NAMELESS)).SerializeToString(),
        b"\xff",
    ],
    ids=["second welcome", "nothing", "item without id", "number without name", "garbage"],
)
async def test_a_worker_that_talks_nonsense_is_lost(nonsense: bytes) -> None:
    async def talk(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await greet(context)
        await context.write(nonsense)
        await asyncio.Event().wait()

    async with (
        socket_address() as address,
        listening(address, handler(talk)),
        router(address) as mine,
    ):
        await eventually(lambda: bool(mine.heard.losses))
        assert mine.session.garbled == 1
        await mine.opened(2)  # and it is tried again


async def test_a_worker_of_another_version_never_opens(caplog: pytest.LogCaptureFixture) -> None:
    async def talk(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        welcome = encode_welcome(INFO)
        welcome.protocol_version += 1
        await context.write(wire.Up(welcome=welcome).SerializeToString())
        await asyncio.Event().wait()

    async with socket_address() as address, listening(address, handler(talk)):
        mine = Router(address, "router")
        await eventually(lambda: f"protocol {PROTOCOL_VERSION + 1}" in caplog.text)
        await mine.close()
        assert not mine.heard.openings
        assert not mine.heard.losses


async def test_a_hung_step_is_a_lost_worker() -> None:
    async with serving() as (address, worker, _), router(address) as mine:
        worker.told = Load(step_age_s=session_client.STEP_AGE_LIMIT_S + 1)
        await eventually(lambda: bool(mine.heard.losses))
        assert "a step has been running for 301 s" in mine.heard.losses[0]
        worker.told = Load(step_age_s=1.0)  # it does not open before
        await mine.opened(2)
        assert mine.session.load == worker.told
        assert len(mine.heard.losses) == 1


async def test_a_session_that_fails_leaves_no_channel_to_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a channel would connect, and stay connected, once the worker is there."""
    channels = []
    make = grpc.aio.insecure_channel

    def noted(*args: Any, **options: Any) -> grpc.aio.Channel:
        channel = make(*args, **options)
        channels.append(weakref.ref(channel))
        return channel

    monkeypatch.setattr(grpc.aio, "insecure_channel", noted)
    session = WorkerSession("unix:/nowhere", "router", Listener())
    gc.disable()
    try:
        for _ in range(2):
            with contextlib.suppress(grpc.aio.AioRpcError):
                await session._one_session()
        await eventually(lambda: all(channel() is None for channel in channels))
    finally:
        gc.enable()
    assert len(channels) == 2
