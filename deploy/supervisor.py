"""The workers of a deployment on this machine: started, watched, started again, and ended.

A worker that dies is started again after a wait; one whose session has been silent for long, or
that gets on with its start no more, is killed first. One that dies again and again while it starts
is given up, and when that was the last that could do a role's work the deployment ends: whoever
runs it knows then that a restart is of no use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deploy.devices import Accelerators
from deploy.processes import WorkerProcess, plan_processes, plan_threads
from deploy.restarts import Restarts
from deploy.roster import plan_workers
from deploy.start_watch import StartWatch
from engine.types import Role
from router.workers import Supervision, WorkerPool
from settings.config import Topology

log = logging.getLogger("hexserve.launcher")

STOP_GRACE_S = 2.5
HUNG_S = 10.0
"""How long a worker may be without its session before it counts as hung and is killed."""
START_CHECKS = 8
"""How often a start is looked at within its limit."""


class WorkerDied(RuntimeError):
    """A worker has ended on its own; the message has its last log lines."""


class RoleGivenUp(WorkerDied):
    """Every worker of a role has been given up: nothing can be served any more."""


@dataclass(slots=True, eq=False)
class _Supervised:
    """A process and what is known of it since its last start."""

    worker: WorkerProcess
    index: int
    restarts: Restarts
    open: set[str] = field(default_factory=set)
    ready_since: float | None = None
    hung: asyncio.TimerHandle | None = None
    starting: asyncio.Task[None] | None = None
    given_up: bool = False

    def forget(self) -> None:
        """It has ended, or is about to start."""
        self.open.clear()
        self.ready_since = None
        if self.hung is not None:
            self.hung.cancel()
            self.hung = None
        if self.starting is not None:
            self.starting.cancel()
            self.starting = None


class LocalWorkers:
    """The workers of one deployment. Use as `async with`; leaving it ends every process."""

    def __init__(
        self,
        topology: Topology | None,
        flags: Sequence[str],
        accelerators: Accelerators,
        devices: int = 1,
        *,
        replicas: int = 1,
        in_threads: bool = False,
        restart_wait_s: float = 1.0,
        start_limit_s: float = 0.0,
        decode_may_prefill: bool = False,
    ) -> None:
        """`flags` are handed on to every worker; each has `devices` accelerators.

        `replicas`: how many there are of each worker of `topology`.

        `restart_wait_s` is the first wait of a worker that has died; see `Restarts`.
        `start_limit_s`: one that is not ready is killed after so long without a sign of life,
        see `StartWatch`; 0 is never.
        `in_threads`: all workers in one process, which divides the devices among them.
        `decode_may_prefill`: a deployment without prefill workers goes on.

        Raises:
            ConfigError: there are fewer accelerators than workers.
        """
        workers = 1 if topology is None else topology.prefill + topology.decode
        accelerators.check_enough(replicas * workers, devices)
        if not in_threads:
            accelerators.check_divisible(devices)
        # What each process is to see; in threads the workers divide all there is.
        self._accelerators = None if in_threads else accelerators
        self._devices = devices
        self._decode_may_prefill = decode_may_prefill
        # Short: a socket's path has 107 bytes at most. mkdtemp makes it mode 0700.
        self._folder = Path(tempfile.mkdtemp(prefix="hexserve-"))
        planned = (topology, self._folder, replicas)
        self.addresses = [worker.address for worker in plan_workers(*planned)]
        processes = [plan_threads(*planned)] if in_threads else plan_processes(*planned)
        self._supervised = [
            _Supervised(process, i, Restarts(restart_wait_s)) for i, process in enumerate(processes)
        ]
        self._flags = list(flags)
        self._start_limit_s = start_limit_s
        self._tasks: list[asyncio.Task[None]] = []
        self._pool: WorkerPool | None = None
        self._stopping = asyncio.Event()
        self.died: asyncio.Queue[WorkerDied] = asyncio.Queue()

    async def __aenter__(self) -> LocalWorkers:
        try:
            for each in self._supervised:
                self._start(each)
                self._tasks.append(asyncio.create_task(self._supervise(each)))
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def watch(self, pool: WorkerPool) -> None:
        """Learn from the router's sessions which worker is ready and which hangs; once."""
        self._pool = pool
        pool.observe(self._hear)

    # ---- one process ----

    def _start(self, each: _Supervised) -> None:
        each.forget()
        accelerators = self._accelerators
        seen = (
            {} if accelerators is None else accelerators.environment_of(each.index, self._devices)
        )
        each.worker.start(self._flags, seen)
        if self._start_limit_s > 0:
            each.starting = asyncio.create_task(self._watch_start(each))

    async def _watch_start(self, each: _Supervised) -> None:
        """Until it is ready, as far as anybody here is told of that, or killed."""
        assert each.worker.process is not None
        watch = StartWatch(each.worker.process.pid, self._start_limit_s)
        while each.ready_since is None:
            await asyncio.sleep(self._start_limit_s / START_CHECKS)
            told = self._pool is not None and each.ready_since is None
            if told and watch.hangs(each.worker.lines):
                self._kill(each.worker, f"hangs in its start for {self._start_limit_s:.0f} s")
                return

    async def _supervise(self, each: _Supervised) -> None:
        """Until the process is given up; `stop` ends it and this."""
        name = each.worker.name
        while True:
            code = await each.worker.read()
            if self._stopping.is_set():
                return
            ready_s = None if each.ready_since is None else time.monotonic() - each.ready_since
            each.forget()
            lines = "\n".join(f"    {line}" for line in each.worker.last_lines)
            death = WorkerDied(f"{name} has ended with code {code}; its last lines:\n{lines}")
            while not await self._start_again(each, death, ready_s=ready_s, asked=code == 0):
                if each.given_up or self._stopping.is_set():
                    return
                ready_s = None

    async def _start_again(
        self, each: _Supervised, death: WorkerDied, *, ready_s: float | None, asked: bool
    ) -> bool:
        """Tell of the end and start the process once more; False when it does not."""
        self.died.put_nowait(death)
        wait_s = each.restarts.after_end(ready_s=ready_s, asked=asked)
        if wait_s is None:
            self._give_up(each, death)
            return False
        self._tell(each)
        log.info("%s is started again in %.0f s", each.worker.name, wait_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._stopping.wait()
            return False
        try:
            self._start(each)
        except OSError as error:  # of a machine without memory, or without processes
            log.error("%s cannot be started: %s", each.worker.name, error)
            return False
        if self._stopping.is_set():
            each.worker.send(signal.SIGKILL)
        return True

    def _give_up(self, each: _Supervised, death: WorkerDied) -> None:
        each.given_up = True
        self._tell(each)
        log.error("%s is given up: it ended again and again before it was ready", each.worker.name)
        for role in (Role.PREFILL, Role.DECODE):
            if all(s.given_up for s in self._supervised if self._can(s.worker, role)):
                self.died.put_nowait(RoleGivenUp(f"no {role} worker is left; the last: {death}"))
                return

    def _can(self, worker: WorkerProcess, role: Role) -> bool:
        stands_in = role is Role.PREFILL and self._decode_may_prefill
        able = role | Role.DECODE if stands_in else role
        return any(roles & able for roles in worker.addresses.values())

    def _tell(self, each: _Supervised) -> None:
        if self._pool is not None:
            for address in each.worker.addresses:
                self._pool.supervised(address, Supervision(each.restarts.count, each.given_up))

    def _hear(self, address: str, is_open: bool) -> None:
        """A session has opened or ended. In a process that hangs it does not open again."""
        (each,) = [s for s in self._supervised if address in s.worker.addresses]
        if is_open:
            each.open.add(address)
            if len(each.open) == len(each.worker.addresses):
                each.ready_since = each.ready_since or time.monotonic()
                if each.hung is not None:
                    each.hung.cancel()
                    each.hung = None
        elif address in each.open:  # else it is news of a process that is gone
            each.open.discard(address)
            if each.hung is None:
                loop = asyncio.get_running_loop()
                why = f"has been silent for {HUNG_S:.0f} s"
                each.hung = loop.call_later(HUNG_S, self._kill, each.worker, why)

    def _kill(self, worker: WorkerProcess, why: str) -> None:
        log.error("%s %s: killed", worker.name, why)
        worker.send(signal.SIGKILL)

    def profile(self) -> None:
        """Have every process that is ready record a profile; see deploy.profiling.

        One that is not may still be importing: the signal would end it.
        """
        for each in self._supervised:
            if each.ready_since is not None:
                each.worker.send(signal.SIGUSR2)

    # ---- the end ----

    async def stop(self) -> None:
        """SIGTERM to every process, SIGKILL to those that are still there after a grace time."""
        self._stopping.set()
        for each in self._supervised:
            each.worker.send(signal.SIGTERM)
            each.worker.send(signal.SIGCONT)  # a stopped one could not end
            each.forget()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=STOP_GRACE_S)
            if late:
                log.warning("%d worker processes did not end in time: killed", len(late))
            for each in self._supervised:
                each.worker.send(signal.SIGKILL)
            await asyncio.gather(*self._tasks, return_exceptions=True)
        shutil.rmtree(self._folder, ignore_errors=True)
