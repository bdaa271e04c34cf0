"""The worker's end of the control wire.

States of a session: connected → (Hello) → greeted → open until the stream breaks, the
router closes it, sends nonsense, or stops reading. However it ends, every attempt that its
router started here is aborted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Set
from typing import Any, Protocol

import grpc

from engine.types import AttemptId, Failure, FailureCode, Load, PromptLogprobs, TokenDelta
from protos import worker_pb2 as wire
from protos.attempt_codec import decode_attempt
from protos.block_feed import BlockFeed
from protos.codec import (
    PROTOCOL_VERSION,
    StartOrder,
    WireError,
    WorkerInfo,
    decode_start,
    encode_load,
    encode_welcome,
    parse_down,
)
from protos.outbox import Outbox, OutboxFull
from protos.transfer_codec import Transfers

log = logging.getLogger("hexserve.session")

LOAD_INTERVAL_S = 0.5
ACKNOWLEDGED_WITHIN_S = 2.0
"""How long a drain waits for routers to say that they know of it; one may hang, or be older."""
BLOCK_NEWS_WITHIN_S = 0.05
"""When a router hears of cached blocks for which it gets no tokens."""
MAX_ENDED = 1024
"""Attempts that ended here by themselves whose abort a session still knows to be no surprise."""
SERVICE = "hexserve.v1.Worker"


class WorkerService(Protocol):
    """What a worker does with a router's orders. Called on the loop; must not block."""

    def start(self, order: StartOrder) -> None:
        """Take an attempt in. What comes of it is told through the SessionServer."""

    def abort(self, attempt: AttemptId) -> None:
        """Forget an attempt; unknown and repeated ones are ignored."""

    def drain_asked(self) -> None:
        """A router asks for the worker's end, once what runs has ended. Nothing new is started."""

    def load(self) -> Load:
        """The load now."""

    def transfers(self) -> Transfers:
        """What has been counted of KV transfers since the start; a copy."""


class _Session:
    def __init__(self, cached: Set[int]) -> None:
        self.greeted = False
        self.knows_of_drain = False
        self.outbox = Outbox()
        self.blocks = BlockFeed(cached)
        self.block_news: asyncio.TimerHandle | None = None
        self.attempts: set[AttemptId] = set()
        self.ended: dict[AttemptId, None] = {}  # the latest last
        self.broken = asyncio.Event()
        self.writing = False

    def end(self, attempt: AttemptId) -> None:
        """It has ended here, and its router may abort it before it knows."""
        self.attempts.discard(attempt)
        self.outbox.forget(attempt)
        self.ended[attempt] = None
        if len(self.ended) > MAX_ENDED:
            del self.ended[next(iter(self.ended))]


class SessionServer:
    """Serves Worker.Session to any number of routers. Lives on one asyncio loop.

    `dropped` counts messages that were of no use: repeated, of attempts that are not the router's,
    or none of this protocol, which cost their session. The abort of an attempt that has ended here
    meanwhile is none of them.
    """

    def __init__(self, info: WorkerInfo, service: WorkerService) -> None:
        self._info = info
        self._service = service
        self._owners: dict[AttemptId, _Session] = {}
        self.dropped = 0
        self._draining = False
        self._patience_ends = 0.0  # on the loop's clock, while draining
        self._sessions: set[_Session] = set()
        self._cached: set[int] = set()

    # ---- the worker's side ----

    def tokens(self, delta: TokenDelta) -> None:
        """Send new tokens to the router that owns the sequence; dropped if there is none."""
        session = self._owners.get(delta.id.attempt)
        if session is not None:
            self._put(session, lambda: session.outbox.add_delta(delta))

    def prompt_logprobs(self, scores: PromptLogprobs) -> None:
        """Send them to the router that owns the sequence; dropped if there is none."""
        session = self._owners.get(scores.id.attempt)
        if session is not None:
            self._put(session, lambda: session.outbox.add_prompt_logprobs(scores))

    def failed(self, failure: Failure) -> None:
        """The attempt has ended without its tokens."""
        session = self.forget(failure.attempt)
        if session is not None:
            session.outbox.add_failure(failure)

    def rejected(self, attempt: AttemptId, reason: str) -> None:
        """The attempt was not taken."""
        session = self.forget(attempt)
        if session is not None:
            session.outbox.add_rejected(attempt, reason)

    def cache_changed(self, added: Set[int], evicted: Set[int]) -> None:
        """Tell every router, soon, which blocks (hashes) are cached now and which no more.

        One that is in both was evicted first. What is no change is left out.
        """
        gone = evicted & self._cached - added
        new = added - self._cached
        self._cached -= gone
        self._cached |= new
        if not (gone or new):
            return
        loop = asyncio.get_running_loop()
        for session in self._sessions:
            session.blocks.change(new, gone)
            if session.block_news is None:
                session.block_news = loop.call_later(BLOCK_NEWS_WITHIN_S, session.outbox.nudge)

    def forget(self, attempt: AttemptId) -> _Session | None:
        """Nothing more will be told of `attempt`; idempotent."""
        session = self._owners.pop(attempt, None)
        if session is not None:
            session.end(attempt)
        return session

    def drain(self) -> None:
        """Take no new work from now on, and tell every router so at once. Idempotent."""
        if self._draining:
            return
        self._draining = True
        self._patience_ends = asyncio.get_running_loop().time() + ACKNOWLEDGED_WITHIN_S
        for session in self._sessions:
            session.outbox.nudge()

    def close(self) -> None:
        """End every session."""
        for session in self._sessions:
            session.broken.set()

    @property
    def attempts(self) -> int:
        """Attempts that routers wait for."""
        return len(self._owners)

    @property
    def unsent(self) -> bool:
        """Whether a router has still to be told something, or does not know of the drain.

        That it was sent is not enough: a router that writes into a session which has ended never
        reads what had come before the end, and would take the worker for a dead one.
        """
        return any(s.writing or not s.outbox.empty or self._is_missed(s) for s in self._sessions)

    def _is_missed(self, session: _Session) -> bool:
        if not (self._draining and session.greeted) or session.knows_of_drain:
            return False
        return asyncio.get_running_loop().time() < self._patience_ends

    def _put(self, session: _Session, add: Callable[[], None]) -> None:
        try:
            add()
        except OutboxFull as error:
            log.warning("closing the session of a router that does not read: %s", error)
            session.broken.set()

    # ---- the stream ----

    async def _serve(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        session = _Session(self._cached)
        self._sessions.add(session)
        try:
            await self._greet(requests, context)
            session.greeted = True
            reader = asyncio.create_task(self._read(requests, session))
            writer = asyncio.create_task(self._write(context, session))
            broken = asyncio.create_task(session.broken.wait())
            tasks = (reader, writer, broken)
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        except WireError as error:
            self.dropped += 1
            log.warning("closing a session: %s", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._sessions.discard(session)
            if session.block_news is not None:
                session.block_news.cancel()
            for attempt in list(session.attempts):
                self.forget(attempt)
                self._service.abort(attempt)

    async def _greet(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        data = await anext(requests, None)
        first = None if data is None else parse_down(data)
        if first is None or first.WhichOneof("message") != "hello":
            raise WireError("the first message is not Hello")
        if first.hello.protocol_version != PROTOCOL_VERSION:
            raise WireError(
                f"the router speaks protocol {first.hello.protocol_version}, this worker "
                f"{PROTOCOL_VERSION}"
            )
        await context.write(wire.Up(welcome=encode_welcome(self._info)))

    async def _read(self, requests: AsyncIterator[bytes], session: _Session) -> None:
        async for data in requests:
            down = parse_down(data)
            match down.WhichOneof("message"):
                case "start":
                    self._start(down.start, session)
                case "abort":
                    attempt = decode_attempt(down.abort.request_id, down.abort.attempt)
                    if self._owners.get(attempt) is session:
                        self.forget(attempt)
                        self._service.abort(attempt)
                    elif attempt not in session.ended:
                        self.dropped += 1
                    session.ended.pop(attempt, None)  # a second abort is one too many
                case "drain":
                    session.knows_of_drain = True
                    if not self._draining:
                        self.drain()
                        self._service.drain_asked()
                case "resync":
                    session.blocks.restart()
                    session.outbox.nudge()
                case other:
                    raise WireError(f"a message {other!r} at this point")

    def _start(self, message: wire.Start, session: _Session) -> None:
        attempt = decode_attempt(message.request_id, message.attempt)
        owner = self._owners.get(attempt)
        if owner is session:
            self.dropped += 1  # repeated
            return
        try:
            if owner is not None:
                raise WireError("another router has an attempt of that name here")
            order = decode_start(message)
        except WireError as error:  # costs this attempt, not the others of the session
            self.dropped += 1
            session.end(attempt)
            session.outbox.add_failure(Failure(attempt, FailureCode.INVALID, str(error)))
            return
        self._owners[order.attempt] = session
        session.attempts.add(order.attempt)
        if self._draining:
            self.rejected(order.attempt, "the worker is draining")
        elif order.roles & ~(self._info.roles | self._info.spare_roles):
            message_ = f"this worker is {self._info.roles}, not {order.roles}"
            self.failed(Failure(order.attempt, FailureCode.INVALID, message_))
        elif len(order.sequences) > 1:
            self.failed(
                Failure(order.attempt, FailureCode.INVALID, "more than one choice is not supported")
            )
        else:
            self._service.start(order)

    async def _write(self, context: grpc.aio.ServicerContext, session: _Session) -> None:
        wait_s = 0.0  # a router must not weigh a worker by no load at all
        told: Transfers = {}
        while True:
            step = await session.outbox.take(wait_s)
            session.writing = True
            # Between its pieces a snapshot lets steps through.
            if (piece := session.blocks.take_piece()) is not None:
                await context.write(wire.Up(cache_snapshot=piece))
            wait_s = 0.0 if session.blocks.in_pieces else LOAD_INTERVAL_S
            if (changes := session.blocks.take_changes()) is not None:
                step.block_events.CopyFrom(changes)
            if session.block_news is not None:
                session.block_news.cancel()
                session.block_news = None
            transfers = self._service.transfers()
            news = {} if transfers == told else transfers
            load = self._service.load()
            step.load.CopyFrom(
                encode_load(load, draining=self._draining, transfers=news, dropped=self.dropped)
            )
            told = transfers
            await context.write(wire.Up(step=step))
            session.writing = False

    def handler(self) -> grpc.GenericRpcHandler:
        """To be added to a grpc.aio server."""
        serve: Any = self._serve
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Session": grpc.stream_stream_rpc_method_handler(
                    serve,
                    response_serializer=wire.Up.SerializeToString,
                )
            },
        )
