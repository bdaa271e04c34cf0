"""The workers a router knows: their sessions, their load, and what is in flight on them."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.types import COLOCATED, FailureCode, ModelLimits, Role
from protos.codec import StepUpdate, WorkerInfo
from protos.session_client import WorkerSession
from router.cached_prefixes import CachedPrefixes
from router.drops import Drops
from router.errors import BadRequest, Unavailable
from router.fields import show
from router.fleet import Fleet
from router.in_flight import PrefillRate
from router.load import PoolLoad
from router.prefix_metrics import PrefixTotals
from router.transfers import TransferTotals
from router.waiting_line import WaitingLine
from router.worker import Worker

log = logging.getLogger("hexserve.router")

STATES = ("ready", "draining", "unreachable", "given up", "serves another model")


class WorkerListener(Protocol):
    """Hears what workers say of attempts. Called on the loop."""

    def stepped(self, worker: Worker, update: StepUpdate) -> None: ...

    def lost(self, worker: Worker, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Supervision:
    """What whoever starts a worker's process tells of it.

    `given_up`: it ended so often without getting ready that it is not started any more.
    """

    restarts: int = 0
    given_up: bool = False


class WorkerPool:
    """Keeps a session with each of a fixed list of workers.

    All that are used serve the same model, that of the first to be there. The session of one
    that serves another is kept, for when no worker of the first model is left.

    `was_complete` tells whether it has been `complete` at some time, `closing` that it will not
    be again. `waiting` are the requests that wait for a worker. `transfers` sums what the workers
    have counted of KV transfers, `prefix_totals` what they have found of prompts, lost workers
    included; `preemptions` counts this router's attempts that were put off for want of KV blocks.
    `fleet` are the open workers that are used, `prefixes` what they have cached.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        router_id = secrets.token_hex(8)
        self._sessions = [WorkerSession(address, router_id, self) for address in addresses]
        self._workers: dict[WorkerSession, Worker] = {}
        self._left_out: dict[WorkerSession, WorkerInfo] = {}
        self._rates: dict[tuple[str, str], PrefillRate] = {}  # address, fingerprint → its prefills
        self._listener: WorkerListener | None = None
        self._observers: list[Callable[[str, bool], None]] = []
        self._supervised: dict[str, Supervision] = {}
        self.transfers = TransferTotals()
        self.preemptions = 0
        self.prefix_totals = PrefixTotals()
        self.drops = Drops()
        self.fleet = Fleet()
        self.prefixes = CachedPrefixes(self.fleet)
        self.closing = False
        self.was_complete = False
        self._limits: ModelLimits | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.waiting = WaitingLine()

    def observe(self, hear: Callable[[str, bool], None]) -> None:
        """Have `hear(address, open)` called on the loop when a session opens or ends."""
        self._observers.append(hear)

    def supervised(self, address: str, supervision: Supervision) -> None:
        """Take in what is known of the process at a listed address, for `describe`."""
        self._supervised[address] = supervision

    def listen(self, listener: WorkerListener) -> None:
        """Say who hears of attempts; once, before `open`."""
        self._listener = listener

    def open(self) -> None:
        """Begin to connect."""
        self._tasks = [asyncio.create_task(session.run()) for session in self._sessions]

    async def close(self) -> None:
        """End every session; whatever is in flight is lost."""
        self.closing = True
        self.waiting.wake()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def drain(self, address: str) -> None:
        """Ask the worker at a listed address to end when what runs has ended.

        Raises:
            BadRequest: no such worker is listed.
            Unavailable: it is not there.
        """
        listed = [session.address for session in self._sessions]
        if address not in listed:
            known = ", ".join(listed)
            raise BadRequest(f"no worker {show(address)} here; there are {known}", param="worker")
        session = self._sessions[listed.index(address)]
        if session.info is None:
            raise Unavailable(f"worker {address} is not there")
        log.info("worker %s is asked to drain", address)
        session.drain()

    # ---- who is there ----

    @property
    def complete(self) -> bool:
        """True when a request can be served from prompt to last token."""
        fleet = self.fleet
        return bool(
            len(fleet.taking(COLOCATED))
            or (len(fleet.taking(Role.PREFILL)) and len(fleet.taking(Role.DECODE)))
            or len(fleet.standing_in)
        )

    @property
    def all_open(self) -> bool:
        """Whether every listed worker is ready, be it to be left out."""
        return len(self._workers) + len(self._left_out) == len(self._sessions)

    async def wait_until_all_open(self) -> None:
        """Until every listed worker is ready; see `all_open`."""
        while not self.all_open:
            await self.wait_for_change()

    async def wait_for_change(self, priority: int = 0) -> None:
        """Until a worker comes or goes, or the pool is closed; see `WaitingLine.wait`."""
        await self.waiting.wait(priority)

    @property
    def limits(self) -> ModelLimits | None:
        """What every open worker can serve, the tightest of their limits; without one, the last."""
        return self._limits

    def _take_limits(self) -> None:
        all_limits = [w.info.limits for w in self._workers.values()]
        self._limits = min(all_limits, key=lambda each: each.max_model_len, default=self._limits)

    def total_load(self) -> PoolLoad:
        """The load of all workers that are used."""
        loads = [worker.load for worker in self._workers.values()]
        return PoolLoad(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            compiles=sum(load.compiles for load in loads),
            free_blocks=sum(load.free_blocks for load in loads),
            cached_blocks=sum(load.cached_blocks for load in loads),
            running_blocks=sum(load.running_blocks for load in loads),
            exported_blocks=sum(load.exported_blocks for load in loads),
            total_blocks=sum(w.info.limits.num_blocks for w in self._workers.values()),
        )

    def describe(self) -> list[dict[str, Any]]:
        """One JSON-able object per listed worker."""
        return [self._describe(session) for session in self._sessions]

    def _describe(self, session: WorkerSession) -> dict[str, Any]:
        worker = self._workers.get(session)
        supervision = self._supervised.get(session.address)
        described: dict[str, Any] = {"address": session.address, "state": self._state(session)}
        if supervision is not None:
            described["restarts"] = supervision.restarts
        if worker is None:
            return described
        load = worker.load
        return described | {
            "roles": [role.name.lower() for role in worker.info.roles if role.name],
            "running": load.running,
            "waiting": load.waiting,
            "compiles_after_ready": load.compiles,
            "export_limited": load.export_limited,
            "blocks": {
                "total": worker.info.limits.num_blocks,
                "free": load.free_blocks,
                "cached": load.cached_blocks,
                "running": load.running_blocks,
                "exported": load.exported_blocks,
            },
        }

    def _state(self, session: WorkerSession) -> str:
        worker = self._workers.get(session)
        if worker is not None:
            return "draining" if worker.draining else "ready"
        if session in self._left_out:
            return "serves another model"
        supervision = self._supervised.get(session.address)
        return "given up" if supervision is not None and supervision.given_up else "unreachable"

    def states(self) -> Mapping[str, int]:
        """How many of the listed workers are in each of STATES."""
        return Counter(self._state(session) for session in self._sessions)

    def restarts(self) -> int:
        """How often workers have been started again, as far as it is known."""
        return sum(supervision.restarts for supervision in self._supervised.values())

    def dropped(self) -> Mapping[str, int]:
        """How many messages have been dropped, by kind."""
        garbled = sum(session.garbled for session in self._sessions)
        return {"late": self.drops.late, "garbled": garbled, "by_worker": self.drops.by_workers}

    # ---- SessionListener ----

    def opened(self, session: WorkerSession) -> None:
        assert session.info is not None
        fingerprints = {w.info.limits.fingerprint for w in self._workers.values()}
        if fingerprints and session.info.limits.fingerprint not in fingerprints:
            log.error("worker %s serves another model than the others: left out", session.address)
            self._left_out[session] = session.info
        else:
            self._let_in(session, session.info)
        self.waiting.wake()
        self._tell(session, True)

    def _tell(self, session: WorkerSession, is_open: bool) -> None:
        for hear in self._observers:
            hear(session.address, is_open)

    def _let_in(self, session: WorkerSession, info: WorkerInfo) -> None:
        rate = self._rates.setdefault((session.address, info.limits.fingerprint), PrefillRate())
        self._workers[session] = Worker(session, info, self.fleet, rate)
        self._take_limits()
        self.was_complete = self.was_complete or self.complete
        log.info("worker %s is there: %s", session.address, info.roles)

    def _let_in_left_out(self) -> None:
        """Go on with another model: that of the first worker that was left out for it."""
        fingerprint = next(iter(self._left_out.values())).limits.fingerprint
        for session, info in list(self._left_out.items()):
            if info.limits.fingerprint == fingerprint:
                del self._left_out[session]
                self._let_in(session, info)
                session.resync()  # what it told of cached blocks was not kept

    def stepped(self, session: WorkerSession, update: StepUpdate) -> None:
        worker = self._workers.get(session)
        if session.info is not None and update.transfers:
            self.transfers.take(session.address, session.info.epoch, update.transfers)
        if session.info is not None and update.load is not None:
            self.prefix_totals.take(session.address, session.info.epoch, update.load)
            self.drops.take(session.address, session.info.epoch, update.dropped)
        self.preemptions += sum(f.code is FailureCode.PREEMPTED for f in update.failures)
        if worker is not None:
            worker.told()
            self.prefixes.changed(worker, update.blocks)
            if self._listener is not None:
                self._listener.stepped(worker, update)

    def cached(self, session: WorkerSession, hashes: Sequence[int]) -> None:
        worker = self._workers.get(session)
        if worker is not None:
            self.prefixes.snapshot(worker, hashes)

    def lost(self, session: WorkerSession, reason: str) -> None:
        self._left_out.pop(session, None)
        self.waiting.wake()
        self._tell(session, False)
        worker = self._workers.pop(session, None)
        if worker is None:
            return
        self._take_limits()
        self.prefixes.left(worker)
        worker.leave()
        self.transfers.gone(worker.address)
        if not self.closing:
            if worker.draining:
                log.info("worker %s has left: %s", session.address, reason)
            else:
                log.warning("worker %s is lost: %s", session.address, reason)
            if self._left_out and not self._workers:
                self._let_in_left_out()
        if self._listener is not None:
            self._listener.lost(worker, reason)
