"""Worker processes on this machine: started, watched, and ended by their process ids."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deploy.devices import Accelerators
from deploy.roster import plan_workers
from engine.types import Role
from settings.config import Topology
from settings.environment import child_environment

log = logging.getLogger("hexserve.launcher")

LAST_LINES = 15
STOP_GRACE_S = 2.5

_MODULES = {Role.PREFILL: "prefill_worker", Role.DECODE: "decode_worker"}


class WorkerDied(RuntimeError):
    """A worker has ended on its own; the message has its last log lines."""


@dataclass(slots=True)
class WorkerProcess:
    """A worker, or all of them, to be started: `python -m module flags`."""

    name: str
    module: str
    flags: tuple[str, ...]
    cpus: tuple[int, ...] | None
    process: asyncio.subprocess.Process | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))


def plan_processes(topology: Topology | None, folder: Path) -> list[WorkerProcess]:
    """A process for each worker of a topology.

    Cores are divided among the workers where there are enough; else all share all.
    """
    workers = plan_workers(topology, folder)
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // len(workers)
    return [
        WorkerProcess(
            worker.name,
            _MODULES.get(worker.roles, "deploy.colocated"),
            (f"--address={worker.address}",),
            tuple(cores[i * share : (i + 1) * share]) if share and len(workers) > 1 else None,
        )
        for i, worker in enumerate(workers)
    ]


def plan_threads(topology: Topology | None, folder: Path) -> WorkerProcess:
    """One process for all workers of a topology, with every device of this host."""
    flags = [f"--address=unix:{folder}"]
    if topology is not None:
        flags.append(f"--disagg_topo={topology.prefill},{topology.decode}")
    return WorkerProcess("workers", "deploy.threads", tuple(flags), None)


class LocalWorkers:
    """The workers of one deployment. Use as `async with`; leaving it ends every process."""

    def __init__(
        self,
        topology: Topology | None,
        flags: Sequence[str],
        accelerators: Accelerators,
        devices: int = 1,
        *,
        in_threads: bool = False,
    ) -> None:
        """`flags` are handed on to every worker; each has `devices` accelerators.

        `in_threads`: all workers in one process, which divides the devices among them.

        Raises:
            ConfigError: there are fewer accelerators than workers.
        """
        workers = 1 if topology is None else topology.prefill + topology.decode
        accelerators.check_enough(workers, devices)
        if not in_threads:
            accelerators.check_divisible(devices)
        # What each process is to see; in threads the workers divide all there is.
        self._accelerators = None if in_threads else accelerators
        self._devices = devices
        # Short: a socket's path has 107 bytes at most. mkdtemp makes it mode 0700.
        self._folder = Path(tempfile.mkdtemp(prefix="hexserve-"))
        self.addresses = [worker.address for worker in plan_workers(topology, self._folder)]
        self.processes = (
            [plan_threads(topology, self._folder)]
            if in_threads
            else plan_processes(topology, self._folder)
        )
        self._flags = list(flags)
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = False
        self.died: asyncio.Queue[WorkerDied] = asyncio.Queue()

    async def __aenter__(self) -> LocalWorkers:
        try:
            for index, worker in enumerate(self.processes):
                await self._start(worker, index)
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _start(self, worker: WorkerProcess, index: int) -> None:
        arguments = [*worker.flags, "--exit_with_stdin", *self._flags]
        if worker.cpus:
            arguments.append(f"--cpus={','.join(map(str, worker.cpus))}")
        accelerators = self._accelerators
        seen = {} if accelerators is None else accelerators.environment_of(index, self._devices)
        worker.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # a folder here that is called like a room of ours must not be imported
            "-m",
            worker.module,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=child_environment(seen),
            start_new_session=True,  # a terminal's Ctrl-C is for this process to hand on
        )
        cores = "all cores" if worker.cpus is None else f"cores {worker.cpus}"
        log.info("%s: process %d on %s", worker.name, worker.process.pid, cores)
        self._watchers.append(asyncio.create_task(self._watch(worker)))

    async def _watch(self, worker: WorkerProcess) -> None:
        """Show a worker's lines, and tell when it has ended."""
        process = worker.process
        assert process is not None
        assert process.stdout is not None
        while line := await _read_line(process.stdout):
            worker.last_lines.append(line)
            print(f"[{worker.name}] {line}", file=sys.stderr, flush=True)
        code = await process.wait()
        if not self._stopping:
            lines = "\n".join(f"    {line}" for line in worker.last_lines)
            self.died.put_nowait(
                WorkerDied(f"{worker.name} has ended with code {code}; its last lines:\n{lines}")
            )

    def hand_on(self, number: signal.Signals) -> None:
        """Hand a signal on to every process."""
        for worker in self.processes:
            if worker.process is not None:
                _send(worker.process, number)

    async def stop(self) -> None:
        """SIGTERM to every process, SIGKILL to those that are still there after a grace time."""
        self._stopping = True
        processes = [w.process for w in self.processes if w.process is not None]
        self.hand_on(signal.SIGTERM)
        waits = [asyncio.ensure_future(process.wait()) for process in processes]
        if waits:
            _, late = await asyncio.wait(waits, timeout=STOP_GRACE_S)
            if late:
                log.warning("%d worker processes did not end in time: killed", len(late))
            self.hand_on(signal.SIGKILL)
            await asyncio.gather(*waits)
        await asyncio.gather(*self._watchers, return_exceptions=True)
        shutil.rmtree(self._folder, ignore_errors=True)


async def _read_line(stream: asyncio.StreamReader) -> str:
    """The next line without its end, or "" at the end of the stream; long lines are cut."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # longer than the stream's limit: skipped
            continue
        if not line:
            return ""
        if text := line.decode(errors="replace").rstrip():
            return text


def _send(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
