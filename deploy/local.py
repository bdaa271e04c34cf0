"""A whole deployment on this machine: a router in this process, workers in theirs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Sequence

from deploy.devices import find_accelerators, installed_backends
from deploy.router import RunningRouter, fetch_model, listen, running_router
from deploy.signals import Stop, unless_stopped
from deploy.supervisor import LocalWorkers, RoleGivenUp
from settings.config import HttpConfig, ServeConfig, Topology
from settings.errors import ConfigError

log = logging.getLogger("hexserve.launcher")


@contextlib.asynccontextmanager
async def running_deployment(
    config: ServeConfig, worker_flags: Sequence[str], stop: Stop
) -> AsyncIterator[tuple[RunningRouter, LocalWorkers]]:
    """Fetch the model, listen, and start the workers; see `wait_until_ready`.

    Raises:
        ConfigError, CheckpointError: the port or the model cannot be had, or the workers would
            not reach each other.
        Stopped: `stop` was set before the model was there.
    """
    topology = config.topology
    accelerators = find_accelerators(
        config.jax_platforms, installed_backends(), config.visible_devices
    )
    in_threads = works_in_threads(config.worker_distributed_method, topology, accelerators.kind)
    check_transports(config.kv_transports, topology, in_threads=in_threads)
    check_admin(config.http, in_threads=in_threads)
    listener = listen(config.http)
    try:
        folders = await fetch_model(
            config.model, config.cache, stop, weights=config.model.needs_weights
        )
    except BaseException:
        listener.close()
        raise
    log.info("%s: %s", config.model.model, _shape(topology, config.data_parallel_size))
    devices = config.engine.tensor_parallel_size
    flags = [flag for flag in worker_flags if not flag.startswith("--model=")]
    flags += [f"--model={folders.model}", f"--log_level={config.log_level}"]
    async with (
        LocalWorkers(
            topology,
            flags,
            accelerators,
            devices,
            replicas=config.data_parallel_size,
            in_threads=in_threads,
            restart_wait_s=config.life.restart_wait_s,
            start_limit_s=config.life.start_limit_s,
            decode_may_prefill=config.life.decode_may_prefill,
        ) as workers,
        running_router(
            listener, folders, config.model, config.http, workers.addresses, config.life, stop
        ) as router,
    ):
        workers.watch(router.pool)
        log.info("listening at %s, not ready yet", router.url)
        yield router, workers


def _shape(topology: Topology | None, replicas: int) -> str:
    if topology is None:
        return "one colocated worker" if replicas == 1 else f"{replicas} colocated workers"
    prefill, decode = replicas * topology.prefill, replicas * topology.decode
    return f"{prefill} prefill and {decode} decode workers"


def works_in_threads(method: str | None, topology: Topology | None, kind: str) -> bool:
    """Whether one process holds all workers, by `--worker_distributed_method`.

    Where it is unset: on TPU, whose devices then copy KV among themselves.
    """
    if method is None:
        return kind == "tpu" and topology is not None
    return method == "thread"


def check_transports(
    transports: tuple[str, ...] | None, topology: Topology | None, *, in_threads: bool
) -> None:
    """Raise ConfigError for `--kv_transports=device` alone where no two workers share a process."""
    if transports == ("device",) and (topology is None or not in_threads):
        raise ConfigError(
            "--kv_transports=device reaches no other process, and here each worker has one of its "
            "own: name another transport as well, or give --disagg_topo and "
            "--worker_distributed_method=thread"
        )


def check_admin(http: HttpConfig, *, in_threads: bool) -> None:
    """Raise ConfigError for `--admin` where a worker cannot end without the others."""
    if http.admin and in_threads:
        raise ConfigError(
            "--admin: /admin/drain ends one worker, and here all of them are threads of one "
            "process, which would end: give --worker_distributed_method=mp, or leave it out"
        )


async def wait_until_ready(router: RunningRouter, workers: LocalWorkers) -> None:
    """Until every worker is ready.

    Raises:
        WorkerDied: one has ended while starting.
    """
    ready = asyncio.create_task(router.pool.wait_until_all_open())
    died = asyncio.create_task(workers.died.get())
    try:
        await asyncio.wait((ready, died), return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            raise died.result()
    finally:
        ready.cancel()
        died.cancel()


async def serve(config: ServeConfig, worker_flags: Sequence[str], stop: Stop) -> None:
    """Serve until `stop`.

    Raises:
        ConfigError, CheckpointError, WorkerDied: the deployment could not be started.
        RoleGivenUp, RouterFailed: it cannot go on.
        Stopped: `stop` was set before the model was there.
    """
    began = time.monotonic()
    async with running_deployment(config, worker_flags, stop) as (router, workers):
        if config.jax_profile_dir is not None:
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGUSR2, workers.profile)
        await unless_stopped(wait_until_ready(router, workers), stop)
        if not stop.is_set():
            log.info("ready at %s after %.1f s", router.url, time.monotonic() - began)
            await unless_stopped(go_on(router, workers), stop)


async def go_on(router: RunningRouter, workers: LocalWorkers) -> None:
    """Log every worker that ends on its own, for as long as requests can be served.

    The router ends with its clients' connections, so nothing is gained by starting it again
    from here: all ends, with a code that whoever runs the deployment takes as a failure.

    Raises:
        RoleGivenUp, RouterFailed: requests cannot be served any more.
    """
    failing = asyncio.create_task(router.until_it_fails())
    try:
        while True:
            died = asyncio.create_task(workers.died.get())
            await asyncio.wait((died, failing), return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                died.cancel()
                await failing
            if isinstance(died.result(), RoleGivenUp):
                raise died.result()
            log.error("%s", died.result())
    finally:
        failing.cancel()
