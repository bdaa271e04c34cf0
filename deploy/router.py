"""Hosts a router: HTTP on one side, sessions with workers on the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from checkpoint.chat_template import ChatTemplate
from checkpoint.config import read_config
from checkpoint.errors import CheckpointError
from checkpoint.source import resolve
from checkpoint.tokenizer import Tokenizer
from deploy.signals import (
    Stopped,
    in_daemon_thread,
    leave,
    run_until_signalled,
    unless_stopped,
)
from router.app import create_app
from router.context import GatewayContext
from router.dispatch import Dispatcher
from router.metrics import RouterMetrics
from router.sampling import usable_defaults
from router.workers import WorkerPool
from settings.config import HttpConfig, ModelConfig, RouterConfig
from settings.errors import ConfigError
from telemetry.logs import set_up_logging

log = logging.getLogger("hexserve.router")

GRACE_S = 1.5
"""How long streams may go on after the router was told to stop; then they end with an error."""
CUT_OFF_S = 2
"""When connections are cut whose clients do not even read that error."""


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """A router that listens. `url` has no path and no slash at its end."""

    url: str
    pool: WorkerPool
    dispatcher: Dispatcher


def listen(http: HttpConfig) -> socket.socket:
    """Bind the HTTP port, before anything costly is started.

    Raises:
        ConfigError: the address is in use or not this machine's, or the certificate is broken.
    """
    _check_certificate(http)
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    try:
        return socket.create_server((http.host, http.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"--host={http.host} --port={http.port}: {error.strerror}") from error


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
    model: ModelConfig, cache: Path, stop: asyncio.Event, *, weights: bool
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
) -> AsyncIterator[RunningRouter]:
    """Serve HTTP at `listener` for the model in `folders`, by way of `workers`.

    Answers 503 until workers of each role are ready. Streams that run when the block is left
    have GRACE_S to end.

    Raises:
        CheckpointError: configuration, tokenizer or chat template cannot be read, or tokenizer
            and model do not belong together.
    """
    config = read_config(folders.model, model.generation_config)
    tokenizer = Tokenizer.load(folders.tokenizer, model.tokenizer_mode)
    tokenizer.check_vocabulary(config.vocab_size)
    name = model.served_model_name or model.model
    metrics = RouterMetrics(name)
    pool = WorkerPool(workers, lambda pool: metrics.set_load(pool.total_load()))
    metrics.export_transfers(pool.transfers)
    dispatcher = Dispatcher(pool, model.seed)
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
        allowed_origins=http.allowed_origins,
        max_requests=http.max_concurrent_requests,
        max_body_bytes=http.max_body_bytes,
    )
    server = _Server(
        uvicorn.Config(
            create_app(context),
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
    pool.open()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield RunningRouter(f"{http.scheme}://{shown}:{port}", pool, dispatcher)
    finally:
        dispatcher.drain()
        server.should_exit = True
        await asyncio.wait((serving,), timeout=GRACE_S)
        await pool.close()
        await serving


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
    except Stopped:
        leave(0)
    return 0


async def _serve(config: RouterConfig, stop: asyncio.Event) -> None:
    listener = listen(config.http)
    folders = await fetch_model(config.model, config.cache, stop, weights=False)
    async with running_router(
        listener, folders, config.model, config.http, config.workers
    ) as router:
        log.info("listening at %s, %d workers are listed", router.url, len(config.workers))
        await stop.wait()
