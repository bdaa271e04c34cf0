"""A worker process: one worker, or all of a topology in threads. Load, serve, end."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from checkpoint.errors import CheckpointError
from checkpoint.source import resolve
from deploy.addresses import WorkerAddress, parse_address
from deploy.parent import Parent
from deploy.profiling import profile_on_signal
from deploy.roster import PlannedWorker
from deploy.signals import (
    Stop,
    in_daemon_thread,
    leave,
    run_until_signalled,
    unless_stopped,
    within,
)
from deploy.watchdog import watchdog
from deploy.worker_host import WorkerHost
from engine.build import BuiltEngine, build_engine
from engine.models.traits import UnsupportedModel
from engine.types import COLOCATED, Role
from kvtransfer import Arrays, keep_freed_buffers
from settings.config import KV_TRANSPORTS, WorkerConfig, default_kv_transports
from settings.errors import ConfigError
from telemetry.logs import set_up_logging

log = logging.getLogger("hexserve.worker")

READY = "ready"
"""The word in the log line that says a worker serves."""
CLOSE_S = 1.5
"""How long the end waits for a step that is still running, such as a long prompt's."""


async def run_workers(config: WorkerConfig, workers: Sequence[PlannedWorker], stop: Stop) -> None:
    """Load, warm up, serve until `stop`, drain, and leave nothing behind.

    Each worker has its own slice of this process's devices and an engine thread of its own.
    """
    began = time.monotonic()
    if config.jax_profile_dir is not None:
        profile_on_signal(config.jax_profile_dir)
    # What is wrong with an address shows before the weights are read.
    _addresses(config, workers, config.kv_transports or KV_TRANSPORTS)
    engines = await unless_stopped(in_daemon_thread(_load, config, workers), stop)
    if engines is None:
        return
    transports = config.kv_transports or default_kv_transports(engines[0].platform)
    addresses = _addresses(config, workers, transports)
    hosts: list[WorkerHost] = []
    try:
        for worker, address, built in zip(workers, addresses, engines, strict=True):
            arrays = None
            if "jax" in transports:
                arrays = await in_daemon_thread(_array_transfer, address, built)
            spare = _able(worker.roles, config) & ~worker.roles
            host = WorkerHost(built, worker.roles, address, transports, arrays, spare)
            hosts.append(host)
            await host.open()
            log.info(
                "%s worker %s at %s: %d tokens of context, %d sequences at once, %.1f s",
                worker.roles, READY, worker.address, built.limits.max_model_len,
                built.limits.max_seqs, time.monotonic() - began,
            )  # fmt: skip
        async with watchdog(
            lambda: max(host.step_age_s for host in hosts), config.life.step_limit_s
        ):
            await asyncio.gather(*(host.serve(stop) for host in hosts))
            await _drain(hosts, config.life.drain_timeout_s, stop)
    finally:
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*(host.close() for host in hosts))
        except TimeoutError:
            log.warning("a step is still running: ending without it")


async def _drain(hosts: Sequence[WorkerHost], timeout_s: float, stop: Stop) -> None:
    """Let what runs end; what is left after the grace time, routers take elsewhere."""

    async def all_of_them() -> None:
        await asyncio.gather(*(host.drain() for host in hosts))

    if not await within(timeout_s, all_of_them(), stop.now):
        log.warning("not all that ran has ended in time: it is left to other workers")


def _addresses(
    config: WorkerConfig, workers: Sequence[PlannedWorker], transports: Sequence[str]
) -> list[WorkerAddress]:
    """Workers that share a process have names there, so that they reach each other in it."""
    shared = len(workers) > 1
    return [
        parse_address(worker.address, config.advertise, transports, worker.name if shared else None)
        for worker in workers
    ]


def _array_transfer(address: WorkerAddress, built: BuiltEngine) -> Arrays:
    import jax

    from kvtransfer.array_transfer import ArrayTransfer

    try:
        return ArrayTransfer(address.host, built.devices or jax.local_devices()[:1])
    except OSError as error:
        raise ConfigError(f"{address.host}, for --kv_transports=jax: {error}") from error


def _load(config: WorkerConfig, workers: Sequence[PlannedWorker]) -> list[BuiltEngine]:
    model = config.model
    folder = resolve(model.model, config.cache, model.revision, weights=model.needs_weights)
    devices = config.engine.tensor_parallel_size
    programs = str(workers[0].roles) if len(workers) == 1 else "threads"
    _set_up_jax(config.cache / "xla" / programs, devices * len(workers))
    engines = []
    for index, worker in enumerate(workers):
        built = build_engine(
            folder, model, config.engine, _able(worker.roles, config), first_device=index * devices
        )
        if config.engine.warmup:
            built.runner.warm_up()
        engines.append(built)
    return engines


def _able(roles: Role, config: WorkerConfig) -> Role:
    """What a worker's programs are for: more than its roles, if it is to stand in for others."""
    return COLOCATED if config.life.decode_may_prefill and Role.DECODE in roles else roles


def _set_up_jax(compile_cache: Path, devices: int) -> None:
    """Keep every compiled program for the next start; one folder per kind of process.

    Where the devices are cores, they are shared by `devices` virtual ones.
    """
    import jax

    if devices > 1:
        jax.config.update("jax_num_cpu_devices", devices)
    compile_cache.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(compile_cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def worker_main(config: WorkerConfig, workers: Sequence[PlannedWorker]) -> NoReturn:
    """A process of `workers` from its configuration to its end."""
    set_up_logging(config.log_level)
    keep_freed_buffers()
    code = 0
    try:
        _pin(config.cpus)
        run_until_signalled(lambda stop: _main(config, workers, stop))
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


async def _main(config: WorkerConfig, workers: Sequence[PlannedWorker], stop: Stop) -> None:
    parent = Parent(stop) if config.exit_with_stdin else None
    try:
        await run_workers(config, workers, stop)
    finally:
        if parent is not None:
            parent.clean_up_after(config.address)
