"""Hosts a worker: one engine, its services, and the sockets they are reached at."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import time
from pathlib import Path
from typing import NoReturn

import grpc

from checkpoint.errors import CheckpointError
from checkpoint.source import resolve
from decode_worker.service import DecodeService
from deploy.addresses import WorkerAddress, parse_address
from deploy.engine_thread import EngineThread
from deploy.signals import in_daemon_thread, leave, run_until_signalled, unless_stopped
from engine.build import BuiltEngine, build_engine
from engine.events import Rejected, StepResult
from engine.models.traits import UnsupportedModel
from engine.types import AttemptId, Failure, Load, Role, TokenDelta
from kvtransfer import (
    SERVER_OPTIONS,
    ArraySpec,
    KVLayout,
    ShmServer,
    kv_service_handler,
    serve_shm,
)
from prefill_worker.service import PrefillService
from protos.codec import MESSAGE_LIMITS, StartOrder, WorkerInfo
from protos.session_server import SessionServer
from settings.config import WorkerConfig
from settings.errors import ConfigError
from telemetry.logs import set_up_logging

log = logging.getLogger("hexserve.worker")

READY = "ready"
"""The word in the log line that says a worker serves."""
SESSION_GRACE_S = 0.2
"""Sessions end by themselves within this time; gRPC then breaks what is left."""
KEEPALIVE_S = 10
KEEPALIVE_TIMEOUT_S = 5
"""A peer that answers no ping for so long is gone, as when its host has lost its power."""
CLOSE_S = 1.5
"""How long the end waits for a step that is still running, such as a long prompt's."""


class WorkerHost:
    """One engine with a prefill service, a decode service or both on it.

    It is the WorkerService of its session server: orders go to the service of their role,
    and the engine's events to the services and the router they concern.
    """

    def __init__(self, built: BuiltEngine, roles: Role, address: WorkerAddress) -> None:
        layout = KVLayout(
            built.limits.fingerprint,
            tuple(ArraySpec(a.name, a.dtype, a.layers, a.heads, a.width) for a in built.arrays),
        )
        self._engine = built.engine
        submit = self._engine.submit
        self._prefill = PrefillService(submit, layout, built.chunk_tokens)
        self._decode = DecodeService(submit, layout, built.chunk_tokens)
        self._roles = roles
        self._address = address
        sources = address.sources if Role.PREFILL in roles else ()
        info = WorkerInfo(secrets.randbits(63), roles, built.limits, sources)
        self._sessions = SessionServer(info, self)
        self._prefill.attach(self._sessions)
        self._decode.attach(self._sessions)
        self._server: grpc.aio.Server | None = None
        self._shm: ShmServer | None = None
        self._died: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._thread = EngineThread(self._engine, self._handle, self._engine_died)

    # ---- WorkerService ----

    def start(self, order: StartOrder) -> None:
        """Prefill, with or without decode after it, or decode alone."""
        service = self._prefill if Role.PREFILL in order.roles else self._decode
        service.start(order)

    def abort(self, attempt: AttemptId) -> None:
        self._prefill.abort(attempt)
        self._decode.abort(attempt)

    def load(self) -> Load:
        return self._engine.load()

    # ---- engine events ----

    def _handle(self, result: StepResult) -> None:
        for event in result.events:
            match event:
                case TokenDelta():
                    self._sessions.tokens(event)
                    if event.finish is not None:
                        self._sessions.forget(event.id.attempt)
                case Failure(attempt, _, message):
                    self._forget(attempt, message)
                    self._sessions.failed(event)
                case Rejected(attempt, reason):
                    self._forget(attempt, reason)
                    self._sessions.rejected(attempt, reason)
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

    # ---- life ----

    async def open(self) -> None:
        """Start the engine and listen.

        Raises:
            ConfigError: the address cannot be listened at.
        """
        self._thread.start()
        server = grpc.aio.server(options=tuple(_server_options().items()))
        server.add_generic_rpc_handlers(
            (self._sessions.handler(), kv_service_handler(self._prefill.source))
        )
        try:
            if not server.add_insecure_port(self._address.grpc):
                raise RuntimeError("no port was bound")
        except RuntimeError as error:
            raise ConfigError(f"--address={self._address.grpc}: {error}") from error
        if self._address.shm_path is not None and Role.PREFILL in self._roles:
            self._shm = await serve_shm(self._prefill.source, str(self._address.shm_path))
        await server.start()
        self._server = server

    async def serve(self, stop: asyncio.Event) -> None:
        """Until `stop` is set.

        Raises:
            RuntimeError: the engine has failed; the process is of no more use.
        """
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((stopped, self._died), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if self._died.done():
            raise RuntimeError("the engine has failed") from self._died.result()

    async def close(self) -> None:
        """Break the sessions, end the transfers, and stop the engine."""
        self._sessions.close()
        if self._server is not None:
            await self._server.stop(SESSION_GRACE_S)
        await self._decode.close()
        if self._shm is not None:
            await self._shm.close()
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


async def run_worker(config: WorkerConfig, roles: Role, stop: asyncio.Event) -> None:
    """Load, warm up, serve until `stop`, and leave nothing behind."""
    began = time.monotonic()
    address = parse_address(config.address, config.advertise)
    built = await unless_stopped(in_daemon_thread(_load, config, roles), stop)
    if built is None:
        return
    host = WorkerHost(built, roles, address)
    try:
        await host.open()
        limits = built.limits
        log.info(
            "%s worker %s at %s: %d tokens of context, %d sequences at once, %.1f s",
            roles, READY, config.address, limits.max_model_len, limits.max_seqs,
            time.monotonic() - began,
        )  # fmt: skip
        await host.serve(stop)
    finally:
        try:
            async with asyncio.timeout(CLOSE_S):
                await host.close()
        except TimeoutError:
            log.warning("a step is still running: ending without it")


def _load(config: WorkerConfig, roles: Role) -> BuiltEngine:
    folder = resolve(config.model.model, config.cache, config.model.revision)
    _set_up_jax(config.cache / "xla" / str(roles), config.engine.tensor_parallel_size)
    built = build_engine(folder, config.model, config.engine, roles)
    if config.engine.warmup:
        built.runner.warm_up()
    return built


def _set_up_jax(compile_cache: Path, devices: int) -> None:
    """Keep every compiled program for the next start; one folder per role.

    Where the devices are cores, they are shared by `devices` virtual ones.
    """
    import jax

    if devices > 1:
        jax.config.update("jax_num_cpu_devices", devices)
    compile_cache.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(compile_cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def worker_main(config: WorkerConfig, roles: Role) -> NoReturn:
    """A worker process from its configuration to its end."""
    set_up_logging(config.log_level)
    code = 0
    try:
        _pin(config.cpus)
        run_until_signalled(lambda stop: _main(config, roles, stop))
    except (ConfigError, CheckpointError, UnsupportedModel) as error:
        log.error("%s", error)
        code = 2
    except Exception:
        log.exception("the worker has failed")
        code = 1
    # A compile or a load that is still running on a thread must not delay the end.
    leave(code)


def _pin(cpus: tuple[int, ...] | None) -> None:
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        there = sorted(os.sched_getaffinity(0))
        raise ConfigError(f"--cpus={cpus}: not among the cores {there}") from error


async def _main(config: WorkerConfig, roles: Role, stop: asyncio.Event) -> None:
    if config.exit_with_stdin:
        _stop_with_stdin(asyncio.get_running_loop(), stop)
    await run_worker(config, roles, stop)


def _stop_with_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    def watch() -> None:
        while os.read(0, 4096):
            pass
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=watch, name="stdin", daemon=True).start()
