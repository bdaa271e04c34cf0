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
from settings.config import Topology
from settings.environment import child_environment

log = logging.getLogger("hexserve.launcher")

LAST_LINES = 15
STOP_GRACE_S = 2.5


class WorkerDied(RuntimeError):
    """A worker has ended on its own; the message has its last log lines."""


@dataclass(slots=True)
class WorkerProcess:
    """A worker to be started. `module` is run with `python -m`."""

    name: str
    module: str
    address: str
    cpus: tuple[int, ...] | None
    process: asyncio.subprocess.Process | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))


def plan_workers(topology: Topology | None, folder: Path) -> list[WorkerProcess]:
    """The workers of a topology, with sockets in `folder`.

    Cores are divided among the workers where there are enough; else all share all.
    """
    if topology is None:
        modules = [("worker-0", "deploy.colocated")]
    else:
        modules = [(f"prefill-{i}", "prefill_worker") for i in range(topology.prefill)]
        modules += [(f"decode-{i}", "decode_worker") for i in range(topology.decode)]
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // len(modules)
    return [
        WorkerProcess(
            name,
            module,
            f"unix:{folder / name}.sock",
            tuple(cores[i * share : (i + 1) * share]) if share and len(modules) > 1 else None,
        )
        for i, (name, module) in enumerate(modules)
    ]


class LocalWorkers:
    """The workers of one deployment. Use as `async with`; leaving it ends every process."""

    def __init__(
        self,
        topology: Topology | None,
        flags: Sequence[str],
        accelerators: Accelerators,
        devices: int = 1,
    ) -> None:
        """`flags` are handed on to every worker; each has `devices` accelerators.

        Raises:
            ConfigError: there are fewer accelerators than workers.
        """
        workers = 1 if topology is None else topology.prefill + topology.decode
        accelerators.check_enough(workers, devices)
        self._accelerators = accelerators
        self._devices = devices
        # Short: a socket's path has 107 bytes at most. mkdtemp makes it mode 0700.
        self._folder = Path(tempfile.mkdtemp(prefix="hexserve-"))
        self.workers = plan_workers(topology, self._folder)
        self._flags = list(flags)
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = False
        self.died: asyncio.Queue[WorkerDied] = asyncio.Queue()

    @property
    def addresses(self) -> list[str]:
        return [worker.address for worker in self.workers]

    async def __aenter__(self) -> LocalWorkers:
        try:
            for index, worker in enumerate(self.workers):
                await self._start(worker, index)
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _start(self, worker: WorkerProcess, index: int) -> None:
        arguments = [f"--address={worker.address}", "--exit_with_stdin", *self._flags]
        if worker.cpus:
            arguments.append(f"--cpus={','.join(map(str, worker.cpus))}")
        worker.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # a folder here that is called like a room of ours must not be imported
            "-m",
            worker.module,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=child_environment(self._accelerators.environment_of(index, self._devices)),
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

    async def stop(self) -> None:
        """SIGTERM to every worker, SIGKILL to those that are still there after a grace time."""
        self._stopping = True
        processes = [w.process for w in self.workers if w.process is not None]
        for process in processes:
            _send(process, signal.SIGTERM)
        waits = [asyncio.ensure_future(process.wait()) for process in processes]
        if waits:
            _, late = await asyncio.wait(waits, timeout=STOP_GRACE_S)
            if late:
                log.warning("%d workers did not end in time: killed", len(late))
            for process in processes:
                _send(process, signal.SIGKILL)
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
