"""The prefill worker's end: which transfers are on offer, and until when.

The owner says what becomes of each transfer (`offer`, `admit`, `advance`, `finish`,
`withdraw`); a `Session` per connection serves them. Everything ends in `_release`, once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvtransfer.books import NO_TRANSPORT, WITHDRAWN, TransferBooks, TransferCounts
from kvtransfer.channel import SourceChannel
from kvtransfer.errors import (
    KVTransferError,
    ProtocolError,
    TransferAborted,
    TransferNotNeeded,
    UnknownTransfer,
)
from kvtransfer.frames import MAX_PAYLOAD_BYTES
from kvtransfer.layout import KVLayout
from kvtransfer.messages import (
    MAX_TOKENS,
    MAX_TRAILER_BYTES,
    MAX_TRANSFER_ID_BYTES,
    MAX_WINDOW,
)
from kvtransfer.protocol import State
from kvtransfer.session import Session
from kvtransfer.transfer import ReleaseCause, Transfer

log = logging.getLogger(__name__)

REMEMBERED = 4096
"""Ended transfers whose late claims are answered at once instead of awaiting an offer."""

Read = Callable[[bytes, int, int, bool], Awaitable[Sequence[Any]]]


class KVSource:
    """Offers KV to readers. Lives on one asyncio loop; no method may be called off it.

    `read(transfer_id, start, stop, on_device)` gives the KV of tokens [start, stop): one numpy
    array [layers, stop-start, heads, width] per `ArraySpec`, strided views allowed; for
    `on_device` arrays that may stay where they are and be padded to `chunk_tokens`. They must
    stay as they are until the chunk has been sent. Up to `window` reads of one transfer run at
    once, so that one engine step can serve several. A read is never cancelled, and none
    runs or begins when `on_release` fires. If it raises, the reader gets the error and the
    transfer is released as FAILED. `read_whole_context` is the same for the layers that see the
    whole context alone, which readers of a layout with a `reach` ask for.

    `on_release(transfer_id, cause)` is called exactly once for each offered transfer that
    the owner does not withdraw. It must not raise.

    Chunks end at multiples of `chunk_tokens`. The lease of `lease_s` seconds runs from
    `finish`; every sign of life from the reader starts it anew. A claim of a transfer not
    offered yet waits `claim_wait_s` seconds. Raises ValueError if a chunk is too large.
    """

    def __init__(
        self,
        layout: KVLayout,
        read: Read,
        on_release: Callable[[bytes, ReleaseCause], None],
        *,
        chunk_tokens: int,
        read_whole_context: Read | None = None,
        lease_s: float = 30.0,
        claim_wait_s: float = 10.0,
        window: int = 8,
    ) -> None:
        if not layout.arrays:
            raise ValueError("the layout has no arrays")
        if chunk_tokens < 1 or not 1 <= window <= MAX_WINDOW:
            raise ValueError(f"chunk_tokens must be at least 1, window from 1 to {MAX_WINDOW}")
        if layout.bytes_per_token * chunk_tokens > MAX_PAYLOAD_BYTES:
            raise ValueError(
                f"a chunk of {chunk_tokens} tokens has {layout.bytes_per_token * chunk_tokens} "
                f"bytes; at most {MAX_PAYLOAD_BYTES} fit a frame"
            )
        self.layout = layout
        self.read = read
        self.read_whole_context = read_whole_context or read
        self.chunk_tokens = chunk_tokens
        self.claim_wait_s = claim_wait_s
        self.window = window
        self.books = TransferBooks()
        self._lease_s = lease_s
        self._on_release = on_release
        self._transfers: dict[bytes, Transfer] = {}
        self._ended: OrderedDict[bytes, KVTransferError] = OrderedDict()
        self._sessions: set[Session] = set()

    # The owner's side.

    def offer(self, transfer_id: bytes) -> None:
        """A request is queued; its blocks are not reserved yet. Raises ValueError if known."""
        if not 1 <= len(transfer_id) <= MAX_TRANSFER_ID_BYTES:
            raise ValueError(f"a transfer id has 1 to {MAX_TRANSFER_ID_BYTES} bytes")
        if transfer_id in self._transfers:
            raise ValueError(f"transfer {transfer_id.hex()} is on offer already")
        self._ended.pop(transfer_id, None)
        self._transfers[transfer_id] = Transfer(transfer_id)
        for session in self._sessions:
            session.wake()  # its reader may have come before this offer

    def admit(self, transfer_id: bytes, total_tokens: int) -> None:
        """The transfer's blocks are reserved; it will have `total_tokens` tokens.

        Like `advance` and `finish`, ignored for a transfer that is over.
        """
        if not 0 <= total_tokens <= MAX_TOKENS:
            raise ValueError(f"total_tokens must be from 0 to {MAX_TOKENS}, got {total_tokens}")
        if transfer := self._transfers.get(transfer_id):
            if transfer.total not in (None, total_tokens):
                raise ValueError(f"admitted with {transfer.total} tokens, now {total_tokens}")
            transfer.total = total_tokens
            self._changed(transfer)

    def advance(self, transfer_id: bytes, computed_tokens: int) -> None:
        """KV of tokens [0, computed_tokens) may be read from now on. Never goes back."""
        if transfer := self._transfers.get(transfer_id):
            if transfer.total is None or computed_tokens > transfer.total:
                raise ValueError(f"{computed_tokens} tokens computed, {transfer.total} admitted")
            transfer.computed = max(transfer.computed, computed_tokens)
            self._changed(transfer)

    def finish(self, transfer_id: bytes, trailer: bytes) -> None:
        """All tokens are computed. The reader gets `trailer` after the last chunk."""
        if len(trailer) > MAX_TRAILER_BYTES:
            raise ValueError(f"trailer of {len(trailer)} bytes; at most {MAX_TRAILER_BYTES}")
        if transfer := self._transfers.get(transfer_id):
            if transfer.total is None:
                raise ValueError(f"transfer {transfer_id.hex()} is finished but not admitted")
            if transfer.trailer is None:
                transfer.computed = transfer.total
                transfer.trailer = trailer
                transfer.finished_at = time.monotonic()
                self._start_lease(transfer)
                self._changed(transfer)

    def withdraw(self, transfer_id: bytes, message: str, *, needed: bool = True) -> None:
        """The owner gives the transfer up; its reader gets TransferAborted(message).

        Not `needed` any more, it is no failure: the reader gets TransferNotNeeded. No read
        begins after this. One that the owner was asked for before may still run; its result is
        dropped. Idempotent, and unknown ids are ignored.
        """
        if transfer := self._transfers.get(transfer_id):
            error = TransferAborted(message) if needed else TransferNotNeeded(message)
            self._forget(transfer, error)
            if transfer.session is not None:
                transfer.session.end(None, error)
            elif needed:
                self.books.of(NO_TRANSPORT).failed(WITHDRAWN)

    def active(self) -> int:
        """Transfers offered and not yet released or withdrawn."""
        return len(self._transfers)

    def counts(self) -> dict[str, TransferCounts]:
        """What has been served so far and what is under way, by transport."""
        counts = self.books.snapshot()
        for session in self._sessions:
            counts[session.transport].waiting += session.state is State.ADMITTED
            counts[session.transport].reads += session.reads
        return counts

    async def close(self) -> None:
        """Withdraws every transfer and waits until every session has ended.

        Close the transports first: they go on to accept connections.
        """
        for transfer_id in list(self._transfers):
            self.withdraw(transfer_id, "the source is shutting down")
        for session in list(self._sessions):
            session.end(ReleaseCause.READER_LOST, TransferAborted("the source is shutting down"))
        await asyncio.gather(*(session.task for session in self._sessions))

    # The transports' and the sessions' side.

    def serve(self, channel: SourceChannel, *, kept: bool = False) -> Session:
        """Serves one transfer in a task of its own and closes the channel after it.

        `kept`: the channel has served another and was kept. It is closed without a word when
        nothing is claimed within `claim_wait_s`.
        """
        session = Session(self, channel, kept)
        self._sessions.add(session)
        session.task.add_done_callback(lambda _: self._sessions.discard(session))
        return session

    def knows(self, transfer_id: bytes) -> bool:
        return transfer_id in self._transfers or self.has_ended(transfer_id)

    def has_ended(self, transfer_id: bytes) -> bool:
        return transfer_id in self._ended

    def bind(self, transfer_id: bytes, session: Session) -> Transfer:
        """Gives the transfer to `session`. Raises if it is over or has a reader."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            raise self._ended.get(transfer_id) or UnknownTransfer(
                f"no transfer {transfer_id.hex()} was offered"
            )
        if transfer.session is not None:
            raise ProtocolError(f"transfer {transfer_id.hex()} has been claimed already")
        transfer.session = session
        self.renew(transfer)
        return transfer

    def renew(self, transfer: Transfer) -> None:
        """The reader gave a sign of life: a running lease starts anew."""
        transfer.deadline = asyncio.get_running_loop().time() + self._lease_s

    def release(self, transfer: Transfer, cause: ReleaseCause) -> None:
        """The one way back to the owner. Idempotent; no read may run or begin any more."""
        if self._transfers.get(transfer.transfer_id) is not transfer:
            return
        self._forget(
            transfer,
            UnknownTransfer(f"transfer {transfer.transfer_id.hex()} is over ({cause.value})"),
        )
        try:
            self._on_release(transfer.transfer_id, cause)
        except Exception:  # the owner's bug; the session still has to close its channel
            log.exception("on_release raised for transfer %s", transfer.transfer_id.hex())

    def _forget(self, transfer: Transfer, late_claim: KVTransferError) -> None:
        del self._transfers[transfer.transfer_id]
        if transfer.lease is not None:
            transfer.lease.cancel()
        self._ended[transfer.transfer_id] = late_claim
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def _changed(self, transfer: Transfer) -> None:
        if transfer.session is not None:
            transfer.session.wake()

    def _start_lease(self, transfer: Transfer) -> None:
        self.renew(transfer)
        self._watch_lease(transfer)

    def _watch_lease(self, transfer: Transfer) -> None:
        # One timer per transfer, moved only when it fires: renewing costs nothing.
        loop = asyncio.get_running_loop()
        transfer.lease = loop.call_at(transfer.deadline, self._lease_fired, transfer)

    def _lease_fired(self, transfer: Transfer) -> None:
        session = transfer.session
        if session is not None and session.working:
            self.renew(transfer)  # the reader waits for us, not we for the reader
        if transfer.deadline > asyncio.get_running_loop().time():
            self._watch_lease(transfer)
        elif session is None:
            self.books.of(NO_TRANSPORT).failed(ReleaseCause.LEASE_EXPIRED.value)
            self.release(transfer, ReleaseCause.LEASE_EXPIRED)
        else:
            session.lease_expired(self._lease_s)
