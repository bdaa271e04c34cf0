"""One fetch of one transfer: the reader's half of the state machine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from kvtransfer.books import CANCELLED, TransferCounts
from kvtransfer.channel import Channel, ChannelClosed
from kvtransfer.chunk import Chunk
from kvtransfer.errors import (
    IntegrityError,
    KVTransferError,
    ProtocolError,
    SharedMemoryFull,
    SourceUnreachable,
    TransferAborted,
    TransferNotNeeded,
    TransferTimeout,
    error_from_wire,
)
from kvtransfer.frames import Frame
from kvtransfer.layout import KVLayout
from kvtransfer.messages import (
    PROTOCOL_VERSION,
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
    Renew,
)
from kvtransfer.payload import as_array, check_header, check_payload
from kvtransfer.protocol import FROM_SOURCE, State, next_state
from kvtransfer.route import Route
from kvtransfer.watch import Watch

log = logging.getLogger(__name__)

CONFIRM_S = 1.0
"""How long a close waits for the source to take note of `done`."""
ACK_SHARE = 0.25
"""Of the window: as much credit is given back at once."""
LAST_WORDS_S = 0.25
"""How long the end of a connection waits for messages not yet sent."""


class Fetch:
    """One transfer on its way; made by `KVSink.fetch`. Always `close` it.

    Any method may raise any KVTransferError. After one, the transfer is lost; unreleased
    chunks stay as they are until `close`. At most the source's window of chunks is held here.
    """

    def __init__(
        self,
        route: Route,
        layout: KVLayout,
        transfer_id: bytes,
        from_token: int,
        *,
        admit_timeout_s: float | None,
        stall_timeout_s: float,
        on_closed: Callable[[Fetch], None] = lambda _: None,
    ) -> None:
        self.state = State.CONNECTED
        self._route = route
        self._layout = layout
        self._admit_timeout_s = admit_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._on_closed = on_closed
        self._transfer_id = transfer_id
        self._from_token = from_token
        self._channel: Channel | None = None
        self._watch = Watch()
        self._admitted: Admitted | None = None
        self._expected = 0  # first token of the next chunk to arrive
        self._arrived: deque[Frame] = deque()
        self._moved = False  # a chunk has arrived
        self._open: set[Chunk] = set()  # handed out and not released
        self._unsaid: list[int] = []  # released and not yet acknowledged
        self._trailer: bytes | None = None
        self._pulled_at: float | None = None  # by time.monotonic, while it runs
        self._flushing: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._run())

    async def admitted(self) -> int:
        """Waits until the source has reserved its blocks; returns the transfer's tokens.

        Reserve nothing before this. Safe to cancel and to call again.
        """
        try:
            await self._watch.until(lambda: self._admitted is not None, self._admit_timeout_s)
        except TimeoutError:
            raise self._give_up(
                TransferTimeout(f"not admitted within {self._admit_timeout_s:g} s")
            ) from None
        assert self._admitted is not None
        return self._admitted.tokens

    def renew(self) -> None:
        """Tells the source that this end still waits for room, so that its lease holds.

        For use between `admitted` and `chunks`; does nothing at other times.
        """
        if self.state is State.ADMITTED and self._watch.failure is None:
            self._say(Renew())

    async def chunks(self, from_token: int | None = None) -> AsyncIterator[Chunk]:
        """The transfer's chunks in order; the first iteration tells the source to send.

        They cover exactly [from_token, total), but for windowed layers' tokens that no later one
        sees (`KVLayout.group_at`); `from_token` replaces what `fetch` was given
        (a cached prefix may have changed meanwhile). They may arrive before prefill has
        ended. Each must be released; with `window` of them unreleased no more come. Can be
        iterated once, after `admitted`.
        """
        if self._watch.failure is None and self.state is not State.ADMITTED:
            raise RuntimeError(f"chunks() in state {self.state.value!r}; it may be pulled once")
        self._expected = self._from_token if from_token is None else from_token
        if self._admitted is not None and not 0 <= self._expected <= self._admitted.tokens:
            raise ValueError(f"from_token {self._expected} of {self._admitted.tokens} tokens")
        self._say(Pull(self._expected))
        if self._watch.failure is None:
            self._counts.skipped_tokens += self._expected
        if self._admitted is not None:
            handed = self._layout.handed_from(self._admitted.tokens)
            self._expected = max(self._expected, handed)
        self._pulled_at = time.monotonic()
        while True:
            try:
                await self._watch.until(
                    lambda: bool(self._arrived) or self.state is not State.STREAMING,
                    self._stall_timeout_s,
                )
            except TimeoutError:
                raise self._give_up(
                    TransferTimeout(f"no chunk came for {self._stall_timeout_s:g} s")
                ) from None
            if not self._arrived:
                return
            yield self._open_chunk(self._arrived.popleft())

    @property
    def trailer(self) -> bytes:
        """What the source's owner gave to `finish`. RuntimeError before the chunks have ended."""
        if self._trailer is None:
            raise RuntimeError("the trailer comes after the last chunk")
        return self._trailer

    async def close(self, *, done: bool) -> None:
        """Ends the fetch and frees what it holds. Idempotent; the first call counts.

        `done` confirms: the source has released its blocks when this returns, unless it is
        gone or slow. Otherwise cancels. Raises RuntimeError for `done` before all chunks
        and the trailer were there (and cancels).
        """
        premature = done and self._closing is None and not self._complete
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(done and not premature))
        await asyncio.shield(self._closing)
        if premature:
            raise RuntimeError("close(done=True) before the last chunk was taken")

    @property
    def _complete(self) -> bool:
        return self.state is State.ENDED and not self._arrived and self._watch.failure is None

    @property
    def transport(self) -> str:
        """The one it uses, or has tried last."""
        return self._route.transport

    @property
    def _counts(self) -> TransferCounts:
        return self._route.books.of(self._route.transport)

    def _count_end(self, done: bool) -> None:
        failure = self._watch.failure
        if isinstance(failure, TransferNotNeeded):
            return
        if isinstance(failure, KVTransferError):
            self._counts.failed(failure.code)
        elif done:
            self._counts.transfers += 1
        else:
            self._counts.failed(CANCELLED)

    def _count_time(self) -> None:
        """The transfer has ended, or breaks off; once."""
        if self._pulled_at is not None:
            self._counts.seconds += time.monotonic() - self._pulled_at
            self._pulled_at = None

    async def _close(self, done: bool) -> None:
        self._count_time()
        self._count_end(done)
        if self._watch.failure is None:
            self._say(Done() if done else Cancel())
            if not done:
                self._task.cancel()
        try:
            # After `done` the task goes on until the source has released.
            async with asyncio.timeout(CONFIRM_S):
                await asyncio.gather(self._task, return_exceptions=True)
        except TimeoutError:
            log.warning("the KV source did not confirm the end of a transfer")
        self._watch.fail(TransferAborted("the fetch is closed"))
        self._arrived.clear()
        for chunk in list(self._open):
            chunk.release()
        if self._channel is not None:
            # Now that no chunk keeps its memory mapped.
            await self._channel.close(idle=self.state is State.RELEASED)
        self._on_closed(self)

    async def _run(self) -> None:
        try:
            again = True
            while again:
                self._channel = await self._route.connect()
                again = await self._talk(self._channel)
        except Exception as error:
            self._fail_by(error)

    async def _talk(self, channel: Channel) -> bool:
        """Claims by `channel` and takes in what comes, to its end; True: try the next endpoint."""
        self.state, self._flushing = State.CONNECTED, None
        try:
            self._say(Claim(PROTOCOL_VERSION, self._transfer_id, self._from_token, self._layout))
            while self.state is not State.RELEASED:
                try:
                    frame = await channel.recv()
                except (ChannelClosed, KVTransferError):
                    # Before it has moved anything, it would most likely fail so again.
                    if self.state is State.STREAMING and not self._moved:
                        self._route.avoid()
                    raise
                self._on_frame(frame)
        except ChannelClosed as error:
            # Not answered yet: the source may never have had the claim, and tells the next one
            # that the transfer is over if it had.
            if self.state is State.CLAIMED and self._route.has_more:
                self._route.broke(error)
                return True
            # Once all has arrived the source may go (its lease ran out): nothing is lost.
            if self.state not in (State.ENDED, State.DONE):
                self._fail(SourceUnreachable(f"the connection to the source broke: {error}"))
        except Exception as error:
            self._fail_by(error)
        finally:
            try:
                if self._flushing is not None:
                    await asyncio.wait([self._flushing], timeout=LAST_WORDS_S)
                    self._flushing.cancel()
                    await asyncio.gather(self._flushing, return_exceptions=True)
            finally:  # a close that has lost patience cancels the wait above as well
                if self.state is not State.RELEASED:
                    await channel.close()
        return False

    def _say(self, message: Message) -> None:
        if self._watch.failure is None:
            self.state = next_state(self.state, message)
            if self._channel is not None:
                self._send(self._channel, message)

    def _send(self, channel: Channel, message: Message) -> None:
        with suppress(ChannelClosed):  # the receiving side reports it
            if not channel.post(message) and (self._flushing is None or self._flushing.done()):
                self._flushing = asyncio.create_task(self._flush(channel))

    async def _flush(self, channel: Channel) -> None:
        with suppress(ChannelClosed):
            await channel.flush()

    def _fail_by(self, error: Exception) -> None:
        if not isinstance(error, KVTransferError):
            log.error("fetching KV failed", exc_info=error)
            error = TransferAborted(f"the fetch failed: {error!r}")
        self._fail(error)

    def _fail(self, error: KVTransferError) -> KVTransferError:
        if not self.state.over:
            self.state = State.FAILED
        self._watch.fail(error)
        return error

    def _give_up(self, error: KVTransferError) -> KVTransferError:
        """A failure found by the consumer: ends the background task, and so the connection."""
        if self._watch.failure is None:
            self._task.cancel()
        return self._fail(error)

    def _on_frame(self, frame: Frame) -> None:
        self._route.answered()
        message = frame.message
        if not isinstance(message, FROM_SOURCE):
            raise ProtocolError(f"{type(message).__name__} is not a source's message")
        if isinstance(message, Failed) and self.state in (State.ENDED, State.DONE):
            return  # a lease that ran out after all had arrived
        self.state = next_state(self.state, message)
        if isinstance(message, Failed):
            error = error_from_wire(message.code, message.message)
            if isinstance(error, SharedMemoryFull):
                self._route.avoid()
            raise error
        if isinstance(message, Admitted):
            self._admitted = message
        elif isinstance(message, ChunkHeader):
            self._on_chunk(message, frame)
        elif isinstance(message, End):
            self._on_end(message)
        self._watch.notify()

    def _on_chunk(self, chunk: ChunkHeader, frame: Frame) -> None:
        assert self._admitted is not None
        check_header(self._layout, chunk, self._expected, self._admitted.tokens)
        held = len(self._arrived) + len(self._open) + len(self._unsaid)
        if held >= self._admitted.window:
            raise ProtocolError(f"more than {self._admitted.window} chunks without an ack")
        self._expected = chunk.stop
        self._moved = True
        self._counts.chunks += 1
        self._counts.bytes += sum(array.nbytes for array in chunk.arrays)
        self._arrived.append(frame)
        self._give_credit()

    def _on_end(self, end: End) -> None:
        assert self._admitted is not None
        if self._expected != self._admitted.tokens:
            raise IntegrityError(
                f"the source ended at token {self._expected} of {self._admitted.tokens}"
            )
        self._trailer = end.trailer
        self._count_time()

    def _open_chunk(self, frame: Frame) -> Chunk:
        header = frame.message
        assert isinstance(header, ChunkHeader)
        assert self._channel is not None
        arrays = list(frame.payload)
        if not self._channel.on_device:
            try:
                check_payload(header, arrays)
            except IntegrityError as error:
                self._route.avoid()
                raise self._give_up(error) from None
            arrays = list(map(as_array, arrays, header.arrays))
        chunk = Chunk(header.start, header.stop, arrays, self._on_release, header.group)
        self._open.add(chunk)
        return chunk

    def _on_release(self, chunk: Chunk) -> None:
        self._open.discard(chunk)
        if self.state is not State.STREAMING:
            return  # nothing more is to come that would need the credit
        assert self._admitted is not None
        self._unsaid.append(chunk.start)
        # Several at once, as each message wakes the source.
        if len(self._unsaid) >= self._admitted.window * ACK_SHARE:
            self._acknowledge()
        else:
            self._give_credit()

    def _give_credit(self) -> None:
        """The source is never left without any while chunks have been released."""
        assert self._admitted is not None
        held = len(self._open) + len(self._arrived) + len(self._unsaid)
        if self._unsaid and held == self._admitted.window:
            self._acknowledge()

    def _acknowledge(self) -> None:
        self._say(Ack(tuple(self._unsaid)))
        self._unsaid.clear()
