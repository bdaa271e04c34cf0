"""One connection of a reader at the source: the source's half of the state machine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtransfer.books import WITHDRAWN
from kvtransfer.channel import ChannelClosed, Packed, SourceChannel
from kvtransfer.errors import (
    KVTransferError,
    LayoutMismatch,
    ProtocolError,
    TransferAborted,
    TransferNotNeeded,
    TransferTimeout,
    UnknownTransfer,
)
from kvtransfer.layout import ALL_LAYERS, KVLayout
from kvtransfer.messages import (
    MAX_TEXT_CHARS,
    Ack,
    Admitted,
    Cancel,
    ChunkHeader,
    Claim,
    Done,
    End,
    Failed,
    Message,
    Pull,
    Released,
)
from kvtransfer.payload import check_read, chunk_header
from kvtransfer.protocol import FROM_READER, State, next_state
from kvtransfer.transfer import ReleaseCause, Transfer
from kvtransfer.watch import Watch

if TYPE_CHECKING:
    from kvtransfer.source import KVSource

log = logging.getLogger(__name__)

GOODBYE_S = 1.0
"""How long a failing session tries to tell its reader why."""


class _Ended(Exception):
    """Wakes the session's waits; the reason is in `Session._ending`."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A chunk being read."""

    start: int
    stop: int
    group: int
    task: asyncio.Task[Sequence[Any]]


class Session:
    """Serves one connection from claim to done; made by `KVSource.serve`.

    Ends by `end`, whoever calls it: reader, owner, lease, or the transport. Then it waits
    for the reads it began, releases the transfer, says goodbye and closes the channel, which
    may keep the connection for the reader's next transfer.
    """

    def __init__(self, source: KVSource, channel: SourceChannel, kept: bool) -> None:
        """`kept`: the connection has served a transfer, and perhaps no other will come."""
        self.state = State.CONNECTED
        self._source = source
        self._channel = channel
        self._kept = kept
        self._watch = Watch()
        self._ending: tuple[ReleaseCause | None, KVTransferError | None] | None = None
        self._claim: Claim | None = None
        self._transfer: Transfer | None = None
        self._cursor = 0  # next token to read
        self._reads: deque[_Read] = deque()  # begun and not yet sent, in token order
        # Every slot is free, of which each read will take one, or the reader's until its ack.
        self._free = list(range(source.window))
        self._unacknowledged: dict[int, int] = {}  # chunk's first token -> slot
        self._counts = source.books.of(channel.transport)
        self._pulled_at: float | None = None  # by time.monotonic, while it runs
        self._flushing: asyncio.Task[None] | None = None
        self.task = asyncio.create_task(self._run())

    @property
    def working(self) -> bool:
        """True while the reader waits for a read of the owner's, not the other way round."""
        return any(not read.task.done() for read in self._reads)

    @property
    def transport(self) -> str:
        return self._channel.transport

    @property
    def reads(self) -> int:
        """Chunks being read, or read and not yet sent."""
        return len(self._reads)

    def wake(self) -> None:
        """Something about the transfer has changed."""
        self._begin_reads()
        self._watch.notify()

    def end(self, cause: ReleaseCause | None, error: KVTransferError | None = None) -> None:
        """Ends the session; the first call counts.

        `cause` is for the owner (None: it withdrew), `error` for the reader.
        """
        if self._ending is None and self.state not in (State.DONE, State.RELEASED):
            self._ending = (cause, error)
            self._watch.fail(_Ended())

    def hang_up(self) -> None:
        """The connection is gone or has to go."""
        self.end(ReleaseCause.READER_LOST)

    def lease_expired(self, lease_s: float) -> None:
        self.end(
            ReleaseCause.LEASE_EXPIRED,
            TransferTimeout(f"the lease ended: no progress by the reader for {lease_s:g} s"),
        )

    async def _run(self) -> None:
        receiver = asyncio.create_task(self._receive())
        cause: ReleaseCause | None = ReleaseCause.FAILED
        error: KVTransferError | None = None
        try:
            await self._serve()
            cause = ReleaseCause.DONE
        except _Ended:
            assert self._ending is not None
            cause, error = self._ending
        except ChannelClosed:
            cause = ReleaseCause.READER_LOST
        except KVTransferError as failure:
            cause, error = ReleaseCause.FAILED, failure
        except Exception as failure:  # the owner's `read`, or a bug: this transfer only
            log.exception("serving a KV transfer failed")
            cause, error = ReleaseCause.FAILED, TransferAborted(f"the source failed: {failure!r}")
        finally:
            self.end(cause, error)  # no read begins after this
            if self._reads:
                await asyncio.gather(*(read.task for read in self._reads), return_exceptions=True)
            # A transfer without a cause was withdrawn: the owner has let it go already.
            if self._transfer is not None and cause is not None:
                self._source.release(self._transfer, cause)
            self._count_end(cause, error)
            await self._say_goodbye(error, receiver)

    def _count_end(self, cause: ReleaseCause | None, error: KVTransferError | None) -> None:
        if self._claim is None and error is None:
            return  # no transfer
        self._count_time()
        if isinstance(error, TransferNotNeeded):
            return
        claim, bound = self._claim, self._transfer is not None
        if claim is not None and not bound and self._source.has_ended(claim.transfer_id):
            return  # too late for a transfer that has been counted
        if cause is ReleaseCause.DONE:
            self._counts.transfers += 1
        elif cause is None:
            self._counts.failed(WITHDRAWN)
        elif cause is ReleaseCause.FAILED and error is not None:
            self._counts.failed(error.code)
        else:
            self._counts.failed(cause.value)

    def _count_chunk(self, chunk: ChunkHeader) -> None:
        size = sum(array.nbytes for array in chunk.arrays)
        self._counts.chunks += 1
        self._counts.bytes += size
        if self._transfer is not None and self._transfer.trailer is None:
            self._counts.overlap_bytes += size

    def _count_time(self) -> None:
        """The transfer has ended, or breaks off; once."""
        if self._pulled_at is None or self._transfer is None:
            return
        now = time.monotonic()
        computed_at = now if self._transfer.trailer is None else self._transfer.finished_at
        self._counts.seconds += now - self._pulled_at
        self._counts.overlap_seconds += max(0.0, computed_at - self._pulled_at)
        self._pulled_at = None

    async def _say_goodbye(
        self, error: KVTransferError | None, receiver: asyncio.Task[None]
    ) -> None:
        released = False
        try:
            if self.state is State.DONE:
                async with asyncio.timeout(GOODBYE_S):
                    await self._say(Released())
                    await self._flushed()
                released = True
            elif error is not None:
                async with asyncio.timeout(GOODBYE_S):
                    self._channel.post(Failed(error.code, str(error)[:MAX_TEXT_CHARS]))
                    if self._flushing is not None:
                        await self._flushing
                    await self._channel.flush()
                    # The reader answers by hanging up, or by what it was about to say last. If
                    # this end hung up first, grpc.aio's reader could see that before the message.
                    await receiver
        except (ChannelClosed, TimeoutError):
            log.debug("the reader was gone before it could be told: %s", error)
        finally:
            rest = [receiver] if self._flushing is None else [receiver, self._flushing]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
            if not self.state.over:
                self.state = State.CANCELLED if error is None else State.FAILED
            await self._channel.close(idle=released)

    async def _serve(self) -> None:
        transfer = self._transfer = await self._find()
        self.wake()
        await self._watch.until(lambda: transfer.total is not None)
        total = transfer.total
        assert total is not None
        await self._say(Admitted(total, self._source.window))
        await self._watch.until(lambda: self.state is State.STREAMING)
        while self._reads or self._cursor < total:
            await self._watch.until(lambda: bool(self._reads) and self._reads[0].task.done())
            packed = self._pack(self._reads[0])
            if packed.header.stop == total and transfer.trailer is not None:
                # In one write: a reader that was woken by the chunk may take this core.
                await self._say(packed, End(transfer.trailer))
            else:
                await self._say(packed)
        if self.state is State.STREAMING:
            await self._watch.until(lambda: transfer.trailer is not None)
            assert transfer.trailer is not None
            await self._say(End(transfer.trailer))
        await self._flushed()
        self._count_time()
        await self._watch.until(lambda: self.state is State.DONE)

    async def _find(self) -> Transfer:
        source = self._source
        try:
            await self._watch.until(lambda: self._claim is not None, source.claim_wait_s)
        except TimeoutError:
            if self._claim is None:  # else it came in the same moment
                if self._kept:
                    raise ChannelClosed("the connection was kept for nothing") from None
                raise TransferTimeout(f"no claim within {source.claim_wait_s:g} s") from None
        claim = self._claim
        assert claim is not None
        if not source.layout.serves(claim.layout):
            raise LayoutMismatch(
                f"the source holds {source.layout.describe()}, "
                f"the reader expects {claim.layout.describe()}"
            )
        try:
            await self._watch.until(lambda: source.knows(claim.transfer_id), source.claim_wait_s)
        except TimeoutError:
            raise UnknownTransfer(
                f"no transfer {claim.transfer_id.hex()} was offered within "
                f"{source.claim_wait_s:g} s"
            ) from None
        return source.bind(claim.transfer_id, self)

    def _begin_reads(self) -> None:
        transfer = self._transfer
        if transfer is None or self.state is not State.STREAMING or self._ending is not None:
            return
        assert transfer.total is not None
        assert self._claim is not None
        size = self._source.chunk_tokens
        while len(self._reads) < len(self._free) and self._cursor < transfer.total:
            start = self._cursor
            group, end = self._claim.layout.group_at(start, transfer.total)
            stop = min((start // size + 1) * size, end)
            if stop > transfer.computed:
                return
            task = asyncio.create_task(self._read(start, stop, group))
            task.add_done_callback(lambda _: self._watch.notify())
            self._reads.append(_Read(start, stop, group, task))
            self._cursor = stop

    async def _read(self, start: int, stop: int, group: int) -> Sequence[Any]:
        assert self._transfer is not None
        source, on_device = self._source, self._channel.on_device
        read = source.read if group == ALL_LAYERS else source.read_whole_context
        arrays = await read(self._transfer.transfer_id, start, stop, on_device)
        padded = source.chunk_tokens if on_device else None
        check_read(self._part(group), arrays, start, stop, padded)
        return arrays

    def _part(self, group: int) -> KVLayout:
        assert self._claim is not None
        return self._claim.layout.part(group)

    def _pack(self, read: _Read) -> Packed:
        # Packed only now, so that the first chunk leaves before the next one is copied. On the
        # loop: of the usual 3 MiB it takes half a millisecond, and another thread would have to
        # wait for the interpreter twice.
        arrays = read.task.result()
        slot = self._free[-1]  # given back last: both ends may still have it in their caches
        part = self._part(read.group)
        header = chunk_header(part, slot, read.start, read.stop, group=read.group)
        packed = self._channel.pack(header, arrays)
        self._reads.popleft()
        self._unacknowledged[read.start] = self._free.pop()
        self._count_chunk(packed.header)
        return packed

    async def _say(self, *sent: Message | Packed) -> None:
        """Sends, once what was said before is out: a chunk is packed while another leaves."""
        await self._flushed()
        # The state first: the answer may come before all is out.
        for item in sent:
            message = item.header if isinstance(item, Packed) else item
            self.state = next_state(self.state, message)
        if not self._channel.post(*sent):
            self._flushing = asyncio.create_task(self._channel.flush())
            self._flushing.add_done_callback(lambda _: self._watch.notify())
        # A write begins now, and not after the next chunk's packing, and acks are taken in: a
        # slot that has just come back is used again before one that has left the caches.
        await asyncio.sleep(0)

    async def _flushed(self) -> None:
        """All is out. If the session ends before, the goodbye waits for the rest, or cuts it."""
        if self._flushing is not None:
            await self._watch.until(self._flushing.done)
            flushing, self._flushing = self._flushing, None
            flushing.result()

    async def _receive(self) -> None:
        try:
            while not self.state.over:
                message = (await self._channel.recv()).message
                if self._ending is not None:  # only waiting for the reader's last word
                    if isinstance(message, Done | Cancel):
                        return
                    continue
                try:
                    self._on_message(message)
                except ProtocolError as error:
                    self.end(ReleaseCause.READER_LOST, error)
        except ChannelClosed:
            self.end(ReleaseCause.READER_LOST)
        except ProtocolError as error:
            self.end(ReleaseCause.READER_LOST, error)
        except Exception as error:  # a bug in a transport must not leave the transfer hanging
            log.exception("receiving from a KV reader failed")
            self.end(ReleaseCause.READER_LOST, TransferAborted(f"the source failed: {error!r}"))

    def _on_message(self, message: Message) -> None:
        if not isinstance(message, FROM_READER):
            raise ProtocolError(f"{type(message).__name__} is not a reader's message")
        before, self.state = self.state, next_state(self.state, message)
        if isinstance(message, Claim):
            self._claim = message
        elif isinstance(message, Pull) and before is State.ADMITTED:
            assert self._transfer is not None
            assert self._transfer.total is not None
            if message.from_token > self._transfer.total:
                raise ProtocolError(
                    f"pull from token {message.from_token} of {self._transfer.total}"
                )
            assert self._claim is not None
            handed = self._claim.layout.handed_from(self._transfer.total)
            self._cursor = max(message.from_token, handed)
            self._counts.skipped_tokens += message.from_token
            self._pulled_at = time.monotonic()
        elif isinstance(message, Ack):
            # Only of chunks that were sent, and once each; anything else is late or forged.
            slots = (self._unacknowledged.pop(chunk, None) for chunk in message.chunks)
            self._free += [slot for slot in slots if slot is not None]
        elif isinstance(message, Cancel):
            self.end(ReleaseCause.READER_LOST)
        if self._transfer is not None:
            self._source.renew(self._transfer)
        self.wake()
