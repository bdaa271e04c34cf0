"""Hosts a router: HTTP on one side, sessions with workers on the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from checkpoint.chat_template import ChatTemplate
from checkpoint.config import read_config
from checkpoint.source import resolve
from checkpoint.tokenizer import Tokenizer
from router.app import create_app
from router.context import GatewayContext
from router.dispatch import Dispatcher
from router.metrics import RouterMetrics
from router.workers import WorkerPool
from settings.config import HttpConfig, ModelConfig
from settings.errors import ConfigError

log = logging.getLogger("hexserve.router")

GRACE_S = 2
"""How long streams may go on after the router was told to stop."""


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """A router that listens. `url` has no path and no slash at its end."""

    url: str
    pool: WorkerPool
    dispatcher: Dispatcher


def listen(http: HttpConfig) -> socket.socket:
    """Bind the HTTP port, before anything costly is started.

    Raises:
        ConfigError: the address is in use or not this machine's.
    """
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    try:
        return socket.create_server((http.host, http.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"--host={http.host} --port={http.port}: {error.strerror}") from error


@contextlib.asynccontextmanager
async def running_router(
    listener: socket.socket,
    folder: Path,
    model: ModelConfig,
    http: HttpConfig,
    workers: Sequence[str],
    cache: Path,
) -> AsyncIterator[RunningRouter]:
    """Serve HTTP at `listener` for the model in `folder`, by way of `workers`.

    Answers 503 until workers of each role are ready. Streams that run when the block is left
    have GRACE_S to end.
    """
    name = model.served_model_name or model.model
    metrics = RouterMetrics(name)
    pool = WorkerPool(workers, lambda pool: _tell_load(pool, metrics))
    dispatcher = Dispatcher(pool, model.seed)
    tokenizer_folder = resolve(model.tokenizer, cache) if model.tokenizer else folder
    context = GatewayContext(
        generator=dispatcher,
        tokenizer=Tokenizer.load(tokenizer_folder),
        chat_template=ChatTemplate.load(tokenizer_folder),
        served_model_names=(name,),
        metrics=metrics,
        generation_defaults=read_config(folder).generation_defaults,
        seeds=random.Random(model.seed),
        predict_route=http.predict_route,
        health_route=http.health_route,
    )
    server = _Server(
        uvicorn.Config(
            create_app(context),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=GRACE_S,
            server_header=False,
        )
    )
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    pool.open()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield RunningRouter(f"http://{shown}:{port}", pool, dispatcher)
    finally:
        dispatcher.drain()
        server.should_exit = True
        await serving
        await pool.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the host's: it ends the workers as well."""
        yield


def _tell_load(pool: WorkerPool, metrics: RouterMetrics) -> None:
    running, waiting, usage = pool.total_load()
    metrics.set_load(running=running, waiting=waiting, kv_cache_usage=usage)
