"""The workers a router knows: their sessions, their load, and what is in flight on them."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from engine.types import COLOCATED, AttemptId, Load, ModelLimits, Role
from protos.codec import StartOrder, StepUpdate, WorkerInfo
from protos.session_client import WorkerSession

log = logging.getLogger("hexserve.router")


class Worker:
    """An open session with a worker, and what this router has in flight there.

    Attributes:
        prefill_tokens: tokens sent to be prefilled here, whose first token has not come.
        sequences: attempts that this router has started here and that have not ended.
    """

    def __init__(self, session: WorkerSession, info: WorkerInfo) -> None:
        self.info = info
        self.prefill_tokens = 0
        self.sequences = 0
        self._session = session

    @property
    def address(self) -> str:
        return self._session.address

    @property
    def load(self) -> Load:
        return self._session.load

    @property
    def draining(self) -> bool:
        return self._session.draining

    def start(self, order: StartOrder) -> None:
        self._session.start(order)

    def abort(self, attempt: AttemptId) -> None:
        self._session.abort(attempt)


class WorkerListener(Protocol):
    """Hears what workers say of attempts. Called on the loop."""

    def stepped(self, worker: Worker, update: StepUpdate) -> None: ...

    def lost(self, worker: Worker, reason: str) -> None: ...


class WorkerPool:
    """Keeps a session with each of a fixed list of workers."""

    def __init__(self, addresses: Sequence[str], on_load: Callable[[WorkerPool], None]) -> None:
        """`on_load(pool)` is called after news of any worker's load."""
        router_id = secrets.token_hex(8)
        self._sessions = [WorkerSession(address, router_id, self) for address in addresses]
        self._workers: dict[WorkerSession, Worker] = {}
        self._listener: WorkerListener | None = None
        self._on_load = on_load
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._closing = False

    def listen(self, listener: WorkerListener) -> None:
        """Say who hears of attempts; once, before `open`."""
        self._listener = listener

    def open(self) -> None:
        """Begin to connect."""
        self._tasks = [asyncio.create_task(session.run()) for session in self._sessions]

    async def close(self) -> None:
        """End every session; whatever is in flight is lost."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- who is there ----

    def with_roles(self, roles: Role) -> list[Worker]:
        """Open workers that do exactly `roles` and take new work."""
        return [w for w in self._workers.values() if w.info.roles == roles and not w.draining]

    @property
    def complete(self) -> bool:
        """True when a request can be served from prompt to last token."""
        return bool(
            self.with_roles(COLOCATED)
            or (self.with_roles(Role.PREFILL) and self.with_roles(Role.DECODE))
        )

    @property
    def all_open(self) -> bool:
        return len(self._workers) == len(self._sessions)

    async def wait_until_all_open(self) -> None:
        """Until every listed worker is ready."""
        while not self.all_open:
            self._changed.clear()
            await self._changed.wait()

    @property
    def limits(self) -> ModelLimits | None:
        """What every open worker can serve: the tightest of their limits."""
        all_limits = [w.info.limits for w in self._workers.values()]
        return min(all_limits, key=lambda each: each.max_model_len, default=None)

    def total_load(self) -> tuple[int, int, float, int]:
        """(running, waiting, share of the KV blocks in use, compiles) over all open workers."""
        workers = self._workers.values()
        blocks = sum(w.info.limits.num_blocks for w in workers)
        free = sum(w.load.free_blocks + w.load.cached_blocks for w in workers)
        return (
            sum(w.load.running for w in workers),
            sum(w.load.waiting for w in workers),
            1.0 - free / blocks if blocks else 0.0,
            sum(w.load.compiles for w in workers),
        )

    def describe(self) -> list[dict[str, Any]]:
        """One JSON-able object per listed worker."""
        return [self._describe(session) for session in self._sessions]

    def _describe(self, session: WorkerSession) -> dict[str, Any]:
        worker = self._workers.get(session)
        if worker is None:
            return {"address": session.address, "state": "unreachable"}
        load = worker.load
        return {
            "address": session.address,
            "state": "draining" if worker.draining else "ready",
            "roles": [role.name.lower() for role in worker.info.roles if role.name],
            "running": load.running,
            "waiting": load.waiting,
            "compiles_after_ready": load.compiles,
            "blocks": {
                "total": worker.info.limits.num_blocks,
                "free": load.free_blocks,
                "cached": load.cached_blocks,
                "running": load.running_blocks,
                "exported": load.exported_blocks,
            },
        }

    # ---- SessionListener ----

    def opened(self, session: WorkerSession) -> None:
        assert session.info is not None
        fingerprints = {w.info.limits.fingerprint for w in self._workers.values()}
        if fingerprints and session.info.limits.fingerprint not in fingerprints:
            log.error("worker %s serves another model than the others: left out", session.address)
            return
        self._workers[session] = Worker(session, session.info)
        log.info("worker %s is there: %s", session.address, session.info.roles)
        self._changed.set()
        self._on_load(self)

    def stepped(self, session: WorkerSession, update: StepUpdate) -> None:
        worker = self._workers.get(session)
        if worker is not None and self._listener is not None:
            self._listener.stepped(worker, update)
        if update.load is not None:
            self._on_load(self)

    def lost(self, session: WorkerSession, reason: str) -> None:
        worker = self._workers.pop(session, None)
        if worker is None:
            return
        if not self._closing:
            log.warning("worker %s is lost: %s", session.address, reason)
        self._changed.set()
        if self._listener is not None:
            self._listener.lost(worker, reason)
        self._on_load(self)
