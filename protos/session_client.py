"""The router's end of the control wire: one session per worker, opened again when it breaks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import grpc

from engine.types import AttemptId, Load
from protos import worker_pb2 as wire
from protos.block_codec import SnapshotReader
from protos.codec import (
    MESSAGE_LIMITS,
    PROTOCOL_VERSION,
    StartOrder,
    StepUpdate,
    WireError,
    WorkerInfo,
    decode_step,
    decode_welcome,
    encode_start,
    parse_up,
)
from protos.session_server import SERVICE
from protos.singles_codec import Names

log = logging.getLogger("hexserve.session")

SILENCE_LIMIT_S = 3.0
"""A session silent for longer is dead: a worker tells its load every half second."""
STEP_AGE_LIMIT_S = 300.0
"""A step that runs for longer is hung."""
_RETRY_FIRST_S = 0.1
_RETRY_MOST_S = 0.5


class SessionLost(Exception):
    """The session has broken; `str()` says how."""


class SessionListener(Protocol):
    """Hears of a worker. Called on the loop; must not block."""

    def opened(self, session: WorkerSession) -> None:
        """The worker is ready; `session` tells what it is and its load."""

    def stepped(self, session: WorkerSession, update: StepUpdate) -> None:
        """News of a step."""

    def cached(self, session: WorkerSession, hashes: Sequence[int]) -> None:
        """Exactly these blocks are cached there; `stepped` tells what changes."""

    def lost(self, session: WorkerSession, reason: str) -> None:
        """Whatever was started here will not be answered any more."""


class WorkerSession:
    """A session with the worker at `address` ("unix:/path" or "host:port").

    `info` is None unless the session is open; `load` is the last one told; `garbled` counts
    sessions that have ended by a message of the worker's that is none of this protocol.
    """

    def __init__(self, address: str, router_id: str, listener: SessionListener) -> None:
        self.address = address
        self.info: WorkerInfo | None = None
        self.load = Load()
        self.draining = False
        self.garbled = 0
        self._router_id = router_id
        self._listener = listener
        self._outgoing: asyncio.Queue[wire.Down | None] = asyncio.Queue()

    def start(self, order: StartOrder) -> None:
        """Send an order; it is lost, and `lost` called, if the session breaks."""
        self._outgoing.put_nowait(wire.Down(start=encode_start(order)))

    def abort(self, attempt: AttemptId) -> None:
        self._outgoing.put_nowait(
            wire.Down(abort=wire.Abort(request_id=attempt.request_id, attempt=attempt.attempt))
        )

    def drain(self) -> None:
        """Ask the worker to take no new work, and to end after what runs."""
        self._outgoing.put_nowait(wire.Down(drain=wire.Drain()))

    def resync(self) -> None:
        """Have `cached` called again: what was told of blocks does not fit together."""
        self._outgoing.put_nowait(wire.Down(resync=wire.Resync()))

    async def run(self) -> None:
        """Keep a session open until cancelled."""
        wait_s = _RETRY_FIRST_S
        while True:
            try:
                await self._one_session()
            except (grpc.aio.AioRpcError, WireError, SessionLost) as error:
                self.garbled += isinstance(error, WireError)
                if self.info is not None:
                    wait_s = _RETRY_FIRST_S
                    self._end(_reason(error))
                elif isinstance(error, WireError):
                    log.warning("worker %s: %s", self.address, error)
            except Exception:  # a fault here must not cost the worker for good
                log.exception("the session with worker %s has failed", self.address)
            finally:
                if self.info is not None:
                    self._end("the router closes the session")
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 1.5, _RETRY_MOST_S)

    def _end(self, reason: str) -> None:
        self.info = None
        self._listener.lost(self, reason)

    async def _one_session(self) -> None:
        # A channel of its own per session: gRPC's reconnect backoff must not delay ours.
        # No HTTP proxy: one set for the outside world does not lead to workers.
        options = (
            *MESSAGE_LIMITS,
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
        )
        async with grpc.aio.insecure_channel(self.address, options=options) as channel:
            open_stream = channel.stream_stream(
                f"/{SERVICE}/Session",
                request_serializer=wire.Down.SerializeToString,
            )
            self._outgoing = asyncio.Queue()
            hello = wire.Hello(protocol_version=PROTOCOL_VERSION, router_id=self._router_id)
            self._outgoing.put_nowait(wire.Down(hello=hello))
            stream = open_stream(self._requests(self._outgoing))
            try:
                await self._listen(stream)
            finally:
                self._outgoing.put_nowait(None)
                stream.cancel()

    @staticmethod
    async def _requests(queue: asyncio.Queue[wire.Down | None]) -> AsyncIterator[wire.Down]:
        while (message := await queue.get()) is not None:
            yield message

    async def _listen(self, stream: grpc.aio.StreamStreamCall) -> None:
        welcomed: WorkerInfo | None = None
        names: Names = {}
        early: list[int] | None = None  # a snapshot that came before the session was open
        while True:
            data = await _read(stream)
            if data is grpc.aio.EOF:
                raise SessionLost("it has drained" if self.draining else "closed by the worker")
            up = parse_up(data)  # here: gRPC would log a traceback and hand on None
            match up.WhichOneof("message"):
                case "welcome" if welcomed is None:
                    welcomed = decode_welcome(up.welcome)
                    snapshots = SnapshotReader(welcomed.limits.num_blocks)
                    self.load = Load(free_blocks=welcomed.limits.num_blocks)
                    self.draining = False
                case "step" if welcomed is not None:
                    self._take_step(decode_step(up.step, names), welcomed, early)
                    early = None
                case "cache_snapshot" if welcomed is not None:
                    hashes = snapshots.take(up.cache_snapshot)
                    if self.info is None:
                        early = hashes
                    elif hashes is not None:
                        self._listener.cached(self, hashes)
                case other:
                    raise WireError(f"a message {other!r} at this point")

    def _take_step(
        self, update: StepUpdate, info: WorkerInfo, early_snapshot: Sequence[int] | None
    ) -> None:
        if update.load is not None:
            if update.draining and not self.draining:
                self.drain()  # also says that it is known here: the worker waits for that
            self.load, self.draining = update.load, update.draining
            if update.load.step_age_s > STEP_AGE_LIMIT_S:
                raise SessionLost(f"a step has been running for {update.load.step_age_s:.0f} s")
        if self.info is None:  # not before: one whose step hangs must not come and go
            self.info = info
            self._listener.opened(self)
            if early_snapshot is not None:
                self._listener.cached(self, early_snapshot)
        self._listener.stepped(self, update)


async def _read(stream: grpc.aio.StreamStreamCall) -> Any:
    """The next message, or grpc.aio.EOF. Raises SessionLost after SILENCE_LIMIT_S without one."""
    reading = asyncio.ensure_future(stream.read())
    done: set[asyncio.Future[Any]] = set()
    try:
        # In two waits: where this loop itself was held up for longer than the first, what
        # came meanwhile is delivered in the second. A busy router must not lose its workers.
        for part in (0.8, 0.2):
            done, _ = await asyncio.wait((reading,), timeout=part * SILENCE_LIMIT_S)
            if done:
                return reading.result()
        raise SessionLost(f"silent for {SILENCE_LIMIT_S:.0f} s")
    finally:
        reading.cancel()
        # An error's traceback names this frame, and the frame what holds the error: until the
        # collector finds that circle, its channel lives on, and connects whenever it can.
        del reading, done


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower()}: {error.details()}"
    return str(error)
