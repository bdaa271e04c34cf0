"""The prefill role: computes prompts, offers their KV, tells the first token.

A colocated attempt (both roles at once) is also started here: its sequence goes on to decode
in the same engine, and nothing is offered.

    order        engine event     KV source      router
    start    →                    offer
                 Admitted     →   admit
                 Computed     →   advance
                 TokenDelta   →                  first token
                 Prefilled    →   finish         (or withdraw: the first token was the last)
                                  on_release →   ReleaseExport to the engine
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from functools import partial

from engine.events import (
    Abort,
    Add,
    Admitted,
    Command,
    Computed,
    KVRead,
    Prefilled,
    ReadKV,
    ReleaseExport,
)
from engine.types import COLOCATED, AttemptId, Failure, FailureCode, KVArrays
from kvtransfer import KVLayout, KVSource, ReleaseCause
from protos.codec import StartOrder, encode_delta
from protos.session_server import SessionServer

log = logging.getLogger("hexserve.prefill")


class TransferGone(RuntimeError):
    """The engine has forgotten the transfer that was to be read."""


class PrefillService:
    """Lives on the worker's asyncio loop."""

    def __init__(
        self, submit: Callable[[Command], None], layout: KVLayout, chunk_tokens: int
    ) -> None:
        self._submit = submit
        self._sessions: SessionServer | None = None
        self._transfers: dict[AttemptId, bytes] = {}
        self._attempts: dict[bytes, AttemptId] = {}
        self._read_ids = itertools.count()
        self._reads: dict[int, asyncio.Future[KVArrays]] = {}
        self._engine_gone = False
        self.source = KVSource(
            layout,
            partial(self._read, True),
            self._released,
            chunk_tokens=chunk_tokens,
            read_whole_context=partial(self._read, False),
        )

    def attach(self, sessions: SessionServer) -> None:
        """Say whom to tell of tokens and failures; once, before the first order."""
        self._sessions = sessions

    # ---- orders ----

    def start(self, order: StartOrder) -> None:
        """Queue a prefill, or a colocated sequence."""
        if order.roles != COLOCATED:
            known = self._attempts.get(order.transfer_id)
            if known == order.attempt:
                return  # a repeated order
            if known is not None:
                self._refuse(order.attempt, "its transfer id is another attempt's")
                return
            self.source.offer(order.transfer_id)
            self._transfers[order.attempt] = order.transfer_id
            self._attempts[order.transfer_id] = order.attempt
        for sequence in order.sequences:
            self._submit(Add(sequence))

    def _refuse(self, attempt: AttemptId, why: str) -> None:
        if self._sessions is not None:
            self._sessions.failed(Failure(attempt, FailureCode.INVALID, why))

    def abort(self, attempt: AttemptId) -> None:
        """Forget an attempt in whatever state; idempotent."""
        self._withdraw(attempt, "the request was aborted")
        self._submit(Abort(attempt))

    def _withdraw(self, attempt: AttemptId, message: str, *, needed: bool = True) -> None:
        transfer_id = self._transfers.pop(attempt, None)
        if transfer_id is not None:
            del self._attempts[transfer_id]
            self.source.withdraw(transfer_id, message, needed=needed)

    # ---- events ----

    def handle(self, event: object) -> None:
        """Take in an engine event; those of other roles are ignored."""
        match event:
            case Admitted(_, transfer_id, tokens) if transfer_id in self._attempts:
                self.source.admit(transfer_id, tokens)
            case Computed(transfer_id, tokens) if transfer_id in self._attempts:
                self.source.advance(transfer_id, tokens)
            case Prefilled(transfer_id, first) if transfer_id in self._attempts:
                if first.finish is None:
                    self.source.finish(transfer_id, encode_delta(first).SerializeToString())
                else:
                    self._withdraw(first.id.attempt, "the first token was the last", needed=False)
            case KVRead(read_id, arrays):
                self._answer_read(read_id, arrays)

    def failed(self, attempt: AttemptId, message: str) -> None:
        """The engine does not compute this attempt: its reader must not wait for it."""
        self._withdraw(attempt, message)

    def engine_died(self) -> None:
        """No read will be answered any more."""
        self._engine_gone = True
        for read_id in list(self._reads):
            self._answer_read(read_id, None)

    # ---- the KV source's side ----

    async def _read(
        self, windowed: bool, transfer_id: bytes, start: int, stop: int, on_device: bool
    ) -> KVArrays:
        if self._engine_gone:
            raise TransferGone("the engine has failed")
        read_id = next(self._read_ids)
        future: asyncio.Future[KVArrays] = asyncio.get_running_loop().create_future()
        self._reads[read_id] = future
        self._submit(ReadKV(read_id, transfer_id, start, stop, on_device, windowed))
        return await future

    def _answer_read(self, read_id: int, arrays: KVArrays | None) -> None:
        future = self._reads.pop(read_id, None)
        if future is None or future.done():
            return
        if arrays is None:
            future.set_exception(TransferGone("the prefill was aborted"))
        else:
            future.set_result(arrays)

    def _released(self, transfer_id: bytes, cause: ReleaseCause) -> None:
        attempt = self._attempts.pop(transfer_id, None)
        if attempt is not None:
            del self._transfers[attempt]
        self._submit(ReleaseExport(transfer_id))
        if attempt is None or self._sessions is None:
            return
        if cause is ReleaseCause.DONE:
            self._sessions.forget(attempt)
        else:
            self._submit(Abort(attempt))  # it may still wait in the queue, exporting nothing
            log.info("transfer of %s ended: %s", attempt.request_id, cause.value)
            message = f"the KV transfer ended: {cause.value}"
            self._sessions.failed(Failure(attempt, FailureCode.TRANSFER, message))

    async def close(self) -> None:
        """Withdraw every offer. A living engine must answer reads until this returns."""
        await self.source.close()
