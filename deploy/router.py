"""Hosts a router: HTTP on one side, sessions with workers on the other."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import uvicorn

from checkpoint.chat_template import ChatTemplate
from checkpoint.config import read_config
from checkpoint.errors import CheckpointError
from checkpoint.source import resolve
from checkpoint.tokenizer import Tokenizer
from deploy.connections import PromptHTTPProtocol
from deploy.signals import (
    Stop,
    Stopped,
    in_daemon_thread,
    leave,
    run_until_signalled,
    unless_stopped,
    within,
)
from router.app import create_app
from router.context import GatewayContext
from router.dispatch import Dispatcher
from router.metrics import RouterMetrics
from router.sampling import usable_defaults
from router.workers import WorkerPool
from settings.config import HttpConfig, LifeConfig, ModelConfig, RouterConfig
from settings.errors import ConfigError
from telemetry.logs import set_up_logging

log = logging.getLogger("hexserve.router")

LAST_BYTES_S = 0.5
"""How long answers that are complete may take on their way to clients."""
UNREAD_S = 60
"""A connection whose client takes none of what was sent for so long is cut."""
GARBAGE_THRESHOLD = 50_000
"""New objects before the collector looks for cycles: a step of many streams makes thousands that
go by themselves, and each look stalls every stream."""
CUT_OFF_S = 2
"""When connections are cut whose clients do not even read the error that ends their stream."""


class RouterFailed(RuntimeError):
    """The HTTP server has ended on its own."""


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """A router that listens. `url` has no path and no slash at its end.

    `serving` ends only when the router does; earlier it is a fault.
    """

    url: str
    pool: WorkerPool
    dispatcher: Dispatcher
    serving: asyncio.Task[None]

    async def until_it_fails(self) -> NoReturn:
        """Wait for the HTTP server's end, which nobody has asked for.

        Raises:
            RouterFailed: it has come.
        """
        await asyncio.wait((self.serving,))
        cause = None if self.serving.cancelled() else self.serving.exception()
        raise RouterFailed("the HTTP server has ended") from cause


def listen(http: HttpConfig) -> socket.socket:
    """Bind the HTTP port, before anything costly is started.

    Raises:
        ConfigError: the address is in use or not this machine's, or the certificate is broken.
    """
    _check_certificate(http)
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    try:
        listener = socket.create_server((http.host, http.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"--host={http.host} --port={http.port}: {error.strerror}") from error
    # Accepted connections inherit it. asyncio would wait for ever for a client to read on.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREAD_S)
    return listener


def _check_certificate(http: HttpConfig) -> None:
    if http.ssl_certfile is None:
        return
    flags = f"--ssl_certfile={http.ssl_certfile}"
    if http.ssl_keyfile is not None:
        flags += f" --ssl_keyfile={http.ssl_keyfile}"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A key with a password is refused: nobody is there to type it.
        context.load_cert_chain(http.ssl_certfile, http.ssl_keyfile, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{flags}: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class ModelFolders:
    """Where a model and its tokenizer lie; mostly the same folder."""

    model: Path
    tokenizer: Path


async def fetch_model(
    model: ModelConfig, cache: Path, stop: Stop, *, weights: bool
) -> ModelFolders:
    """Fetch the model and its tokenizer where they are not on this machine.

    `weights`: those as well, for workers on this machine; a router has no use for them.

    Raises:
        CheckpointError: one of them cannot be had.
        Stopped: `stop` was set first; the fetch may go on for as long as the process lives.
    """

    def fetch() -> ModelFolders:
        folder = resolve(model.model, cache, model.revision, weights=weights).absolute()
        if not model.tokenizer:
            return ModelFolders(folder, folder)
        return ModelFolders(folder, resolve(model.tokenizer, cache, weights=False))

    folders = await unless_stopped(in_daemon_thread(fetch), stop)
    if folders is None:
        raise Stopped
    return folders


@contextlib.asynccontextmanager
async def running_router(
    listener: socket.socket,
    folders: ModelFolders,
    model: ModelConfig,
    http: HttpConfig,
    workers: Sequence[str],
    life: LifeConfig,
    stop: Stop,
) -> AsyncIterator[RunningRouter]:
    """Serve HTTP at `listener` for the model in `folders`, by way of `workers`.

    Answers 503 until workers of each role are ready. When the block is left because of `stop`,
    streams that run have the drain timeout to end, and all else is answered by 503 meanwhile.

    Raises:
        CheckpointError: configuration, tokenizer or chat template cannot be read, or tokenizer
            and model do not belong together.
    """
    config = read_config(folders.model, model.generation_config)
    tokenizer = Tokenizer.load(folders.tokenizer, model.tokenizer_mode)
    tokenizer.check_vocabulary(config.vocab_size)
    name = model.served_model_name or model.model
    metrics = RouterMetrics(name)
    pool = WorkerPool(workers)
    metrics.export_transfers(pool.transfers)
    metrics.export_prefixes(pool.prefix_totals)
    metrics.export_prefix_index(pool.prefixes)
    metrics.export_workers(pool)
    dispatcher = Dispatcher(pool, model.seed, life.worker_wait_s, life.max_lost_attempts)
    metrics.export_load(pool.total_load, lambda: dispatcher.waiting)
    context = GatewayContext(
        generator=dispatcher,
        tokenizer=tokenizer,
        chat_template=ChatTemplate.load(folders.tokenizer),
        served_model_names=(name,),
        metrics=metrics,
        generation_defaults=usable_defaults(config.generation_defaults),
        seeds=random.Random(model.seed),
        predict_route=http.predict_route,
        health_route=http.health_route,
        api_keys=http.api_keys,
        admin_keys=http.admin_keys,
        allowed_origins=http.allowed_origins,
        max_requests=http.max_concurrent_requests,
        max_body_bytes=http.max_body_bytes,
        drain_worker=pool.drain if http.admin else None,
    )
    server = _Server(
        uvicorn.Config(
            create_app(context),
            http=PromptHTTPProtocol,
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=CUT_OFF_S,
            server_header=False,
            ssl_certfile=http.ssl_certfile,
            ssl_keyfile=http.ssl_keyfile,
        )
    )
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    _spare_streams_the_collector()
    pool.open()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield RunningRouter(f"{http.scheme}://{shown}:{port}", pool, dispatcher, serving)
    finally:
        dispatcher.drain()
        if stop.is_set() and not serving.done():
            log.info("draining: at most %.0f s", life.drain_timeout_s)
            await within(life.drain_timeout_s, context.running.wait_until_idle(), stop.now)
        server.should_exit = True
        await asyncio.wait((serving,), timeout=LAST_BYTES_S)
        await pool.close()
        await serving


def _spare_streams_the_collector() -> None:
    """Look for garbage seldom, and never among what lives as long as the process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the host's: it ends the workers as well."""
        yield


def router_main(config: RouterConfig) -> int:
    """A router process from its configuration to its exit code."""
    set_up_logging(config.log_level)
    try:
        run_until_signalled(lambda stop: _serve(config, stop))
    except (ConfigError, CheckpointError) as error:
        log.error("%s", error)
        return 2
    except RouterFailed as error:
        log.error("%s", error)
        return 1
    except Stopped:
        leave(0)
    return 0


async def _serve(config: RouterConfig, stop: Stop) -> None:
    listener = listen(config.http)
    folders = await fetch_model(config.model, config.cache, stop, weights=False)
    async with running_router(
        listener, folders, config.model, config.http, config.workers, config.life, stop
    ) as router:
        log.info("listening at %s, %d workers are listed", router.url, len(config.workers))
        await unless_stopped(router.until_it_fails(), stop)
