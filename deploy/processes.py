"""Worker processes on this machine: which there are, how one is started and read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deploy.roster import plan_workers
from engine.types import Role
from settings.config import Topology
from settings.environment import child_environment

log = logging.getLogger("hexserve.launcher")

LAST_LINES = 15

_MODULES = {Role.PREFILL: "prefill_worker", Role.DECODE: "decode_worker"}


@dataclass(slots=True)
class WorkerProcess:
    """A worker, or all of them, to be started: `python -m module flags`.

    `addresses` are where it serves, each with the role it has there.
    """

    name: str
    module: str
    flags: tuple[str, ...]
    cpus: tuple[int, ...] | None
    addresses: dict[str, Role]
    process: asyncio.subprocess.Process | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    async def start(self, flags: Sequence[str], environment: dict[str, str]) -> None:
        """Start it, with more flags and environment variables; see `read`."""
        arguments = [*self.flags, "--exit_with_stdin", *flags]
        if self.cpus:
            arguments.append(f"--cpus={','.join(map(str, self.cpus))}")
        self.last_lines.clear()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # a folder here that is called like a room of ours must not be imported
            "-m",
            self.module,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=child_environment(environment),
            start_new_session=True,  # a terminal's Ctrl-C is for this process to hand on
        )
        cores = "all cores" if self.cpus is None else f"cores {self.cpus}"
        log.info("%s: process %d on %s", self.name, self.process.pid, cores)

    async def read(self) -> int:
        """Show its lines until it ends; its exit code, below 0 for a signal."""
        assert self.process is not None
        assert self.process.stdout is not None
        while line := await _read_line(self.process.stdout):
            self.last_lines.append(line)
            print(f"[{self.name}] {line}", file=sys.stderr, flush=True)
        return await self.process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)


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
            {worker.address: worker.roles},
        )
        for i, worker in enumerate(workers)
    ]


def plan_threads(topology: Topology | None, folder: Path) -> WorkerProcess:
    """One process for all workers of a topology, with every device of this host."""
    flags = [f"--address=unix:{folder}"]
    if topology is not None:
        flags.append(f"--disagg_topo={topology.prefill},{topology.decode}")
    addresses = {worker.address: worker.roles for worker in plan_workers(topology, folder)}
    return WorkerProcess("workers", "deploy.threads", tuple(flags), None, addresses)


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
