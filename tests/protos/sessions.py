"""A session server with a scripted worker behind it, and routers that call it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence

import grpc

from engine.types import (
    AttemptId,
    Load,
    ModelLimits,
    Role,
    SamplingParams,
    SequenceId,
    SequenceRequest,
)
from protos import worker_pb2 as wire
from protos.codec import (
    MESSAGE_LIMITS,
    PROTOCOL_VERSION,
    StartOrder,
    StepUpdate,
    WorkerInfo,
    encode_start,
)
from protos.session_client import WorkerSession
from protos.session_server import SERVICE, SessionServer
from protos.transfer_codec import Transfers

INFO = WorkerInfo(7, Role.DECODE, ModelLimits("m", 97, 64, 4, 50, 4), ("grpc://h:1",))


def order(name: str, attempt: int = 0, roles: Role = Role.DECODE) -> StartOrder:
    identity = AttemptId(name, attempt)
    sequence = SequenceRequest(
        SequenceId(identity, 0), roles, (1, 2, 3), SamplingParams(), (), b"t" * 16
    )
    return StartOrder(identity, (sequence,), ("grpc://h:1",))


async def eventually(predicate: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """For what nothing announces: poll until `predicate()` holds."""
    async with asyncio.timeout(timeout_s):
        while not predicate():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class ScriptedWorker:
    """The WorkerService behind the server: notes what it is told."""

    def __init__(self) -> None:
        self.started: list[StartOrder] = []
        self.aborted: list[AttemptId] = []
        self.drains_asked = self.loads_told = 0
        self.told = Load(waiting=3, free_blocks=11)
        self.counted: Transfers = {}

    def start(self, order: StartOrder) -> None:
        self.started.append(order)

    def abort(self, attempt: AttemptId) -> None:
        self.aborted.append(attempt)

    def drain_asked(self) -> None:
        self.drains_asked += 1

    def load(self) -> Load:
        self.loads_told += 1
        return self.told

    def transfers(self) -> Transfers:
        return self.counted


class Listener:
    """Notes what a session says."""

    def __init__(self) -> None:
        self.openings: list[WorkerInfo | None] = []
        self.losses: list[str] = []
        self.snapshots: list[list[int]] = []
        self.updates: list[StepUpdate] = []

    def opened(self, session: WorkerSession) -> None:
        self.openings.append(session.info)

    def stepped(self, session: WorkerSession, update: StepUpdate) -> None:
        self.updates.append(update)

    def cached(self, session: WorkerSession, hashes: Sequence[int]) -> None:
        self.snapshots.append(list(hashes))

    def lost(self, session: WorkerSession, reason: str) -> None:
        self.losses.append(reason)

    def items(self, kind: str) -> list:
        """All `deltas`, `failures` or `rejected` so far."""
        return [item for update in self.updates for item in getattr(update, kind)]


class Router:
    """A session of a router, with its listener."""

    def __init__(self, address: str, name: str) -> None:
        self.heard = Listener()
        self.session = WorkerSession(address, name, self.heard)
        self.task = asyncio.create_task(self.session.run())

    async def opened(self, times: int = 1) -> None:
        await eventually(lambda: len(self.heard.openings) >= times)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@contextlib.asynccontextmanager
async def router(address: str, name: str = "router") -> AsyncIterator[Router]:
    """An open session."""
    one = Router(address, name)
    try:
        await one.opened()
        yield one
    finally:
        await one.close()


@contextlib.asynccontextmanager
async def socket_address() -> AsyncIterator[str]:
    folder = tempfile.mkdtemp(prefix="hs-")  # short: pytest's own may not fit a socket's path
    try:
        yield f"unix:{folder}/w.sock"
    finally:
        shutil.rmtree(folder)


@contextlib.asynccontextmanager
async def listening(address: str, *handlers: grpc.GenericRpcHandler) -> AsyncIterator[None]:
    server = grpc.aio.server(options=MESSAGE_LIMITS)
    server.add_generic_rpc_handlers(handlers)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(grace=0)


@contextlib.asynccontextmanager
async def serving(
    info: WorkerInfo = INFO,
) -> AsyncIterator[tuple[str, ScriptedWorker, SessionServer]]:
    """A worker's address, what is behind it, and its server."""
    worker = ScriptedWorker()
    sessions = SessionServer(info, worker)
    async with socket_address() as address, listening(address, sessions.handler()):
        yield address, worker, sessions
    # No attempt may outlive its session. The server does not wait for the last one's end.
    await eventually(lambda: sessions.attempts == 0)


@contextlib.asynccontextmanager
async def raw_stream(address: str) -> AsyncIterator[grpc.aio.StreamStreamCall]:
    """A stream that carries whatever bytes one writes."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Session")()
        try:
            yield call
        finally:
            call.cancel()


def hello(version: int = PROTOCOL_VERSION) -> bytes:
    message = wire.Hello(protocol_version=version, router_id="raw")
    return wire.Down(hello=message).SerializeToString()


def start(name: str) -> bytes:
    return wire.Down(start=encode_start(order(name))).SerializeToString()


async def drained(call: grpc.aio.StreamStreamCall) -> None:
    """Reads on until the stream ends; raises what it ends with, if that is an error."""
    async with asyncio.timeout(5):
        while await call.read() is not grpc.aio.EOF:
            pass


async def read_up(call: grpc.aio.StreamStreamCall) -> wire.Up:
    return wire.Up.FromString(await asyncio.wait_for(call.read(), 5))
