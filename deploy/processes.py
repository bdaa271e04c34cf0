"""Worker processes on this machine: which there are, how one is started and read."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deploy.roster import plan_workers
from deploy.signals import in_daemon_thread
from engine.types import Role
from settings.config import Topology
from settings.environment import child_environment

log = logging.getLogger("hexserve.launcher")

LAST_LINES = 15
LONGEST_LINE = 2**16

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
    process: subprocess.Popen[bytes] | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    lines: int = 0
    """How many it has logged since it was started."""

    def start(self, flags: Sequence[str], environment: dict[str, str]) -> None:
        """Start it, with more flags and environment variables; see `read`.

        Not by the loop, whose fork runs handlers of gRPC and of Python in the child: with threads
        and channels here, that now and then ends in SIGSEGV. Popen's vfork runs none.

        Raises:
            OSError: the machine has no process left, or no memory.
        """
        arguments = [*self.flags, "--exit_with_stdin", *flags]
        if self.cpus:
            arguments.append(f"--cpus={','.join(map(str, self.cpus))}")
        self.last_lines.clear()
        self.lines = 0
        self.process = subprocess.Popen(
            # -P: a folder here that is called like a room of ours must not be imported
            [sys.executable, "-P", "-m", self.module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=child_environment(environment),
            start_new_session=True,  # a terminal's Ctrl-C is for this process to hand on
        )
        cores = "all cores" if self.cpus is None else f"cores {self.cpus}"
        log.info("%s: process %d on %s", self.name, self.process.pid, cores)

    async def read(self) -> int:
        """Show its lines until it ends; its exit code, below 0 for a signal."""
        assert self.process is not None
        return await in_daemon_thread(self._show, self.process)

    def _show(self, process: subprocess.Popen[bytes]) -> int:
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin, process.stdout:
            while line := process.stdout.readline(LONGEST_LINE):
                if text := line.decode(errors="replace").rstrip():
                    self.last_lines.append(text)
                    self.lines += 1
                    print(f"[{self.name}] {text}", file=sys.stderr, flush=True)
            return process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)


def plan_processes(
    topology: Topology | None, folder: Path, replicas: int = 1
) -> list[WorkerProcess]:
    """A process for each worker, see `deploy.roster.plan_workers`.

    Cores are divided among the workers where there are enough; else all share all.
    """
    workers = plan_workers(topology, folder, replicas)
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


def plan_threads(topology: Topology | None, folder: Path, replicas: int = 1) -> WorkerProcess:
    """One process for all workers, with every device of this host."""
    flags = [f"--address=unix:{folder}"]
    if topology is not None:
        flags.append(f"--disagg_topo={topology.prefill},{topology.decode}")
    if replicas > 1:
        flags.append(f"--data_parallel_size={replicas}")
    workers = plan_workers(topology, folder, replicas)
    addresses = {worker.address: worker.roles for worker in workers}
    return WorkerProcess("workers", "deploy.threads", tuple(flags), None, addresses)
