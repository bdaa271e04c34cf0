"""A worker by itself: what its server carries, routers that vanish, orders it refuses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest

from deploy import worker_host
from deploy.addresses import WorkerAddress
from deploy.worker_host import WorkerHost
from engine.types import (
    COLOCATED,
    AttemptId,
    FailureCode,
    Role,
    SamplingParams,
    SequenceId,
    SequenceRequest,
)
from kvtransfer import SERVER_OPTIONS
from protos.codec import MESSAGE_LIMITS, StartOrder, StepUpdate
from protos.session_client import WorkerSession
from tests.services.deployment import build, deployment, eventually, prompt_of


def test_the_server_carries_the_largest_message_of_either_service() -> None:
    options = worker_host._server_options()
    for name, value in (*MESSAGE_LIMITS, *SERVER_OPTIONS):
        assert options[name] >= value


class Relay:
    """A network between a router and a worker that can be cut without a word to either end."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._cut = False
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()

    def cut(self) -> None:
        self._cut = True

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, back]
        self._tasks += [
            asyncio.create_task(self._pump(reader, back)),
            asyncio.create_task(self._pump(there, writer)),
        ]

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not self._cut:
                writer.write(data)


class Silent:
    """A router that hears of nothing."""

    def opened(self, session: WorkerSession) -> None: ...

    def stepped(self, session: WorkerSession, update: StepUpdate) -> None: ...

    def cached(self, session: WorkerSession, hashes: Sequence[int]) -> None: ...

    def lost(self, session: WorkerSession, reason: str) -> None: ...


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


async def test_attempts_of_a_router_whose_host_vanished_are_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_host, "KEEPALIVE_S", 1)
    monkeypatch.setattr(worker_host, "KEEPALIVE_TIMEOUT_S", 1)
    monkeypatch.setattr("protos.session_client.SILENCE_LIMIT_S", 60.0)  # the router is gone
    built, port = build(64, 0.0), free_port()
    host = WorkerHost(built, COLOCATED, WorkerAddress(f"127.0.0.1:{port}", None, ()))
    await host.open()
    built.runner.shut(1)
    try:
        async with Relay(port) as relay:
            session = WorkerSession(f"127.0.0.1:{relay.port}", "router", Silent())
            running = asyncio.create_task(session.run())
            await eventually(lambda: session.info is not None)
            attempt = AttemptId("a", 0)
            sequence = SequenceRequest(
                SequenceId(attempt, 0),
                COLOCATED,
                prompt_of(5),
                SamplingParams(max_tokens=8),
                (),
                b"",
            )
            session.start(StartOrder(attempt, (sequence,), ()))
            await eventually(lambda: host._sessions.attempts == 1)
            relay.cut()
            await eventually(lambda: host._sessions.attempts == 0, 10)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    finally:
        built.runner.open()
        await host.close()


async def test_a_transfer_id_that_another_attempt_has_is_refused() -> None:
    async with deployment("1,1") as served:
        member = served["prefill-0"]
        member.runner.shut()
        sent: list[object] = []
        service = member.host._prefill
        told = member.host._sessions.failed
        member.host._sessions.failed = sent.append  # type: ignore[method-assign]

        def order(name: str) -> StartOrder:
            attempt = AttemptId(name, 0)
            sequence = SequenceRequest(
                SequenceId(attempt, 0), Role.PREFILL, prompt_of(5), SamplingParams(), (), b"t" * 16
            )
            return StartOrder(attempt, (sequence,), ())

        service.start(order("first"))
        service.start(order("first"))
        assert sent == []
        service.start(order("second"))
        (failure,) = sent
        assert failure.attempt == AttemptId("second", 0)  # type: ignore[attr-defined]
        assert failure.code is FailureCode.INVALID  # type: ignore[attr-defined]
        assert service._attempts == {b"t" * 16: AttemptId("first", 0)}
        member.host._sessions.failed = told  # type: ignore[method-assign]
        service.abort(AttemptId("first", 0))
        member.runner.open()
        await served.until_idle()
