"""A worker: one engine, its services, and the addresses they are reached at."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence

import grpc

from decode_worker.service import DecodeService
from deploy.addresses import WorkerAddress
from deploy.engine_thread import EngineThread
from engine.build import BuiltEngine
from engine.events import CacheChanged, Rejected, StepResult
from engine.types import AttemptId, Failure, Load, PromptLogprobs, Role, TokenDelta
from kvtransfer import (
    SERVER_OPTIONS,
    TRANSPORTS,
    Arrays,
    ArraySpec,
    DeviceServer,
    KVLayout,
    ShmServer,
    array_method,
    kv_service_handler,
    serve_device,
    serve_shm,
)
from prefill_worker.service import PrefillService
from protos.codec import MESSAGE_LIMITS, NO_ROLES, StartOrder, WorkerInfo
from protos.session_server import SessionServer
from protos.transfer_codec import Transfers
from settings.errors import ConfigError

log = logging.getLogger("hexserve.worker")

SESSION_GRACE_S = 0.2
"""Sessions end by themselves within this time; gRPC then breaks what is left."""
DRAIN_CHECK_S = 0.05
KEEPALIVE_S = 10
KEEPALIVE_TIMEOUT_S = 5
"""A peer that answers no ping for so long is gone, as when its host has lost its power."""


class WorkerHost:
    """One engine with a prefill service, a decode service or both on it.

    It is the WorkerService of its session server: orders go to the service of their role,
    and the engine's events to the services and the router they concern.
    """

    def __init__(
        self,
        built: BuiltEngine,
        roles: Role,
        address: WorkerAddress,
        transports: Sequence[str] = TRANSPORTS,
        arrays: Arrays | None = None,
        spare_roles: Role = NO_ROLES,
    ) -> None:
        """A worker of `roles`; those that `built` can do as well are `spare_roles`.

        `transports` and `arrays`: by which its decode service fetches KV, see KVSink. `arrays`
        is also what its prefill service offers KV by, if it is there.
        """
        layout = KVLayout(
            built.limits.fingerprint,
            tuple(ArraySpec(a.name, a.dtype, a.layers, a.heads, a.width) for a in built.arrays),
            built.windowed_layers,
            built.reach,
        )
        self._engine = built.engine
        submit = self._engine.submit
        self._prefill = PrefillService(submit, layout, built.chunk_tokens)
        self._decode = DecodeService(submit, layout, built.chunk_tokens, transports, arrays)
        self._arrays = arrays
        self._roles = roles
        self._address = address
        sources = address.sources if Role.PREFILL in roles else ()
        epoch, shares = secrets.randbits(63), built.reach is None
        info = WorkerInfo(epoch, roles, built.limits, sources, spare_roles, shares)
        self._sessions = SessionServer(info, self)
        self._prefill.attach(self._sessions)
        self._decode.attach(self._sessions)
        self._server: grpc.aio.Server | None = None
        self._kv_servers: list[DeviceServer | ShmServer] = []
        self._died: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._drain_asked = asyncio.Event()
        self._thread = EngineThread(self._engine, self._handle, self._engine_died)

    # ---- WorkerService ----

    def start(self, order: StartOrder) -> None:
        """Prefill, with or without decode after it, or decode alone."""
        service = self._prefill if Role.PREFILL in order.roles else self._decode
        service.start(order)

    def abort(self, attempt: AttemptId) -> None:
        self._prefill.abort(attempt)
        self._decode.abort(attempt)

    def drain_asked(self) -> None:
        self._drain_asked.set()

    def load(self) -> Load:
        return self._engine.load()

    def transfers(self) -> Transfers:
        ends = {Role.PREFILL: self._prefill.source.counts(), Role.DECODE: self._decode.counts()}
        return {
            (role, transport): counts
            for role, end in ends.items()
            for transport, counts in end.items()
        }

    # ---- engine events ----

    def _handle(self, result: StepResult) -> None:
        for event in result.events:
            match event:
                case TokenDelta():
                    self._sessions.tokens(event)
                    if event.finish is not None:
                        self._sessions.forget(event.id.attempt)
                case PromptLogprobs():
                    self._sessions.prompt_logprobs(event)
                case Failure(attempt, _, message):
                    self._forget(attempt, message)
                    self._sessions.failed(event)
                case Rejected(attempt, reason):
                    self._forget(attempt, reason)
                    self._sessions.rejected(attempt, reason)
                case CacheChanged(added, evicted):
                    self._sessions.cache_changed(frozenset(added), frozenset(evicted))
                case _:
                    self._prefill.handle(event)
                    self._decode.handle(event)

    def _forget(self, attempt: AttemptId, message: str) -> None:
        self._prefill.failed(attempt, message)
        self._decode.failed(attempt, message)

    def _engine_died(self, error: BaseException) -> None:
        self._prefill.engine_died()
        self._decode.engine_died()
        if not self._died.done():
            self._died.set_result(error)

    @property
    def step_age_s(self) -> float:
        """How long the running step has been running, 0 without one."""
        return self._engine.load().step_age_s

    # ---- life ----

    async def open(self) -> None:
        """Start the engine and listen.

        Raises:
            ConfigError: the address cannot be listened at.
        """
        self._thread.start()
        server = grpc.aio.server(options=tuple(_server_options().items()))
        source, address = self._prefill.source, self._address
        methods = {} if self._arrays is None else array_method(source, self._arrays)
        server.add_generic_rpc_handlers(
            (self._sessions.handler(), kv_service_handler(source, methods))
        )
        try:
            if not server.add_insecure_port(address.grpc):
                raise RuntimeError("no port was bound")
        except RuntimeError as error:
            raise ConfigError(f"--address={address.grpc}: {error}") from error
        if Role.PREFILL in self._roles:
            if address.device_name is not None:
                self._kv_servers.append(serve_device(source, address.device_name))
            if address.shm_path is not None:
                self._kv_servers.append(await serve_shm(source, str(address.shm_path)))
        await server.start()
        self._server = server

    async def serve(self, stop: asyncio.Event) -> None:
        """Until `stop` is set; a router that asks for a drain sets it.

        Raises:
            RuntimeError: the engine has failed; the process is of no more use.
        """
        stopped = asyncio.create_task(stop.wait())
        asked = asyncio.create_task(self._drain_asked.wait())
        await asyncio.wait((stopped, asked, self._died), return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            log.info("a router asks for a drain")
            stop.set()  # workers that share this process end with it
        stopped.cancel()
        asked.cancel()
        if self._died.done():
            raise RuntimeError("the engine has failed") from self._died.result()

    async def drain(self) -> None:
        """Take no new work, and wait until all that runs has ended and routers know of it."""
        self._sessions.drain()
        while self._busy and not self._died.done():  # noqa: ASYNC110 - three rooms would tell
            await asyncio.sleep(DRAIN_CHECK_S)

    @property
    def _busy(self) -> bool:
        sessions = self._sessions
        return bool(sessions.attempts or sessions.unsent or self._prefill.source.active())

    async def close(self) -> None:
        """Break the sessions, end the transfers, and stop the engine."""
        self._sessions.close()
        if self._server is not None:
            await self._server.stop(SESSION_GRACE_S)
        await self._decode.close()
        for server in self._kv_servers:
            await server.close()
        await self._prefill.close()
        await self._thread.stop()


def _server_options() -> dict[str, int]:
    """Those of a server that carries the control wire and KV: of each limit the larger one."""
    limits = dict(MESSAGE_LIMITS)
    for name, value in SERVER_OPTIONS:
        limits[name] = max(value, limits.get(name, 0))
    return {
        **limits,
        "grpc.so_reuseport": 0,
        "grpc.keepalive_time_ms": 1000 * KEEPALIVE_S,
        "grpc.keepalive_timeout_ms": 1000 * KEEPALIVE_TIMEOUT_S,
        # gRPC's own pings, which measure bandwidth, take the place of one that is due.
        "grpc.http2.ping_timeout_ms": 1000 * KEEPALIVE_TIMEOUT_S,
    }
