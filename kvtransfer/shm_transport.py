"""shm: control frames on a Unix socket, chunks in shared memory that both ends map.

One copy in (the source packs a chunk into a slot), none out (the reader's arrays are views of
the slot). The segment's descriptor crosses the socket once per connection, before the first
chunk. Arrays begin at multiples of 64 bytes.

A connection whose transfer has ended well serves the reader's next one: to reserve memory, map
it and touch it for the first time costs more than to move a short prompt's KV.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from kvtransfer.channel import Packed
from kvtransfer.errors import ProtocolError
from kvtransfer.frames import PREFIX, Frame, decode_header, encode_header, header_length
from kvtransfer.layout import align_up
from kvtransfer.messages import ChunkHeader, Message, SegmentOpened
from kvtransfer.payload import copy_into, places_of
from kvtransfer.session import Session
from kvtransfer.shm_segment import Segment, SegmentView
from kvtransfer.source import KVSource
from kvtransfer.unix_stream import UnixStream, readable

log = logging.getLogger(__name__)

MAX_PATH_BYTES = 107
"""What fits a Unix socket's address on Linux, its closing zero byte aside."""

IDLE_CONNECTIONS = 4
"""As many are kept to each source, each with its segment."""
IDLE_S = 5.0
"""As long is a connection kept for. A source gives it up later, after its `claim_wait_s`, so
that no claim meets its end."""


async def _read_message(stream: UnixStream) -> Message:
    length = header_length(await stream.read_exactly(PREFIX.size))
    return decode_header(await stream.read_exactly(length))


class _SourceChannel:
    """The source's end of one connection."""

    transport = "shm"
    on_device = False

    def __init__(self, stream: UnixStream, slots: int, slot_bytes: int) -> None:
        self._stream = stream
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._segment: Segment | None = None
        self._announced = False
        self.closed = False

    def post(self, *sent: Message | Packed) -> bool:
        fd = None
        messages = [item.header if isinstance(item, Packed) else item for item in sent]
        if self._segment is not None and not self._announced:
            messages.insert(0, SegmentOpened(self._segment.slots, self._segment.slot_bytes))
            fd, self._announced = self._segment.fd, True
        return self._stream.post(b"".join(map(encode_header, messages)), fd)

    async def flush(self) -> None:
        await self._stream.flush()

    async def recv(self) -> Frame:
        return Frame(await _read_message(self._stream))

    def pack(self, chunk: ChunkHeader, arrays: Sequence[np.ndarray]) -> Packed:
        if self._segment is None:
            self._segment = Segment(self._slots, self._slot_bytes)
        size = sum(align_up(array.nbytes) for array in chunk.arrays)
        slot = self._segment.slot(chunk.slot, size)
        digest = copy_into(places_of(slot, chunk.arrays), arrays)
        return Packed(replace(chunk, checksum=digest), None)

    async def close(self, *, idle: bool = False) -> None:
        if idle:
            return
        self.closed = True
        self._stream.close()
        if self._segment is not None:
            segment, self._segment = self._segment, None
            segment.close()


class _ReaderChannel:
    """The reader's end of one connection."""

    on_device = False

    def __init__(self, stream: UnixStream, keep: Callable[[_ReaderChannel], None]) -> None:
        """`keep` is given this channel when it could serve another transfer."""
        self._stream = stream
        self._keep = keep
        self._segment: SegmentView | None = None

    def post(self, *messages: Message) -> bool:
        return self._stream.post(b"".join(map(encode_header, messages)))

    async def flush(self) -> None:
        await self._stream.flush()

    async def recv(self) -> Frame:
        while True:
            message = await _read_message(self._stream)
            if isinstance(message, SegmentOpened):
                self._map(message)
            elif isinstance(message, ChunkHeader):
                return Frame(message, self._views(message))
            else:
                return Frame(message)

    def _map(self, opened: SegmentOpened) -> None:
        fd = self._stream.take_fd()
        if fd is None:
            raise ProtocolError("a segment was announced, but no file descriptor came with it")
        if self._segment is not None:
            os.close(fd)
            raise ProtocolError("a second segment on one connection")
        self._segment = SegmentView(fd, opened.slots, opened.slot_bytes)

    def _views(self, chunk: ChunkHeader) -> tuple[memoryview, ...]:
        if self._segment is None:
            raise ProtocolError("a chunk came before its segment")
        return places_of(self._segment.slot(chunk.slot), chunk.arrays)

    def on_readable(self, callback: Callable[[], None] | None) -> None:
        """See UnixStream."""
        self._stream.on_readable(callback)

    def is_quiet(self) -> bool:
        """The source has neither said anything more nor hung up."""
        return self._stream.is_quiet()

    async def close(self, *, idle: bool = False) -> None:
        if idle:
            self._keep(self)
        else:
            self.hang_up()

    def hang_up(self) -> None:
        """Ends the connection at once. Idempotent."""
        self._stream.close()
        if self._segment is not None:
            self._segment.close()


class ShmConnector:
    """Connects to sources on this machine; keeps connections for the next transfers."""

    def __init__(self) -> None:
        self._idle: dict[str, list[_ReaderChannel]] = {}
        self._timers: dict[_ReaderChannel, asyncio.TimerHandle] = {}
        self._closed = False

    async def connect(self, path: str) -> _ReaderChannel:
        """A connection to the source at `path`. Raises OSError if none listens there."""
        while path in self._idle:
            channel = self._idle[path][-1]
            if channel.is_quiet():
                self._take(path, channel)
                return channel
            self._drop(path, channel)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, path)
        except BaseException:
            sock.close()
            raise
        return _ReaderChannel(UnixStream(sock, accept_fd=True), partial(self._keep, path))

    def _keep(self, path: str, channel: _ReaderChannel) -> None:
        if self._closed or len(self._idle.get(path, ())) == IDLE_CONNECTIONS:
            channel.hang_up()
            return
        self._idle.setdefault(path, []).append(channel)
        # Between two transfers a source can only end the connection, or go.
        drop = partial(self._drop, path, channel)
        channel.on_readable(drop)
        self._timers[channel] = asyncio.get_running_loop().call_later(IDLE_S, drop)

    def _take(self, path: str, channel: _ReaderChannel) -> None:
        idle = self._idle[path]
        idle.remove(channel)
        if not idle:
            del self._idle[path]
        channel.on_readable(None)
        self._timers.pop(channel).cancel()

    def _drop(self, path: str, channel: _ReaderChannel) -> None:
        self._take(path, channel)
        channel.hang_up()

    def close(self) -> None:
        """Ends the idle connections and keeps no more. Idempotent."""
        self._closed = True
        for path, idle in list(self._idle.items()):
            for channel in list(idle):
                self._drop(path, channel)


class ShmServer:
    """A source's listening socket; made by `serve_shm`."""

    def __init__(self, source: KVSource, listener: socket.socket, path: str) -> None:
        self.uri = f"shm://{path}"
        self._source = source
        self._listener = listener
        self._path = path
        self._connections: set[asyncio.Task[None]] = set()
        self._sessions: set[Session] = set()
        self._closing = False
        self._task = asyncio.create_task(self._accept())

    async def _accept(self) -> None:
        # Not loop.sock_accept: cancelled in the moment of an accept, it would lose a socket.
        while True:
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                await readable(self._listener)
                continue
            except OSError as error:
                log.warning("accepting a KV reader failed: %s", error)
                await asyncio.sleep(0.1)  # out of descriptors, most likely: do not spin
                continue
            stream = UnixStream(sock, accept_fd=False)
            slot_bytes = self._source.layout.slot_bytes(self._source.chunk_tokens)
            channel = _SourceChannel(stream, self._source.window, slot_bytes)
            connection = asyncio.create_task(self._serve(channel))
            self._connections.add(connection)
            connection.add_done_callback(self._connections.discard)

    async def _serve(self, channel: _SourceChannel) -> None:
        """One connection's transfers, one after the other."""
        kept = False
        while not (channel.closed or self._closing):
            session = self._source.serve(channel, kept=kept)
            kept = True
            self._sessions.add(session)
            await session.task
            self._sessions.discard(session)
        await channel.close()

    async def close(self) -> None:
        """Stops listening, removes the socket file, ends the connections. Idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._listener.fileno() >= 0:
            self._listener.close()
            with suppress(FileNotFoundError):
                os.unlink(self._path)
        self._closing = True
        for session in self._sessions:
            session.hang_up()
        await asyncio.gather(*self._connections)


async def serve_shm(source: KVSource, path: str) -> ShmServer:
    """Offers `source` to readers on this machine at the Unix socket `path`.

    The folder must exist, be this user's and have mode 0700: whoever can connect can read
    KV. Raises ValueError if `path` is too long or its folder is open to others, OSError if
    it cannot be bound (in use by a living process, say) or this is not Linux.
    """
    if sys.platform != "linux":
        raise OSError("the shm transport needs Linux (memfd)")
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise ValueError(f"socket path of {length} bytes, at most {MAX_PATH_BYTES}: {path!r}")
    _check_folder(os.path.dirname(path) or ".")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _bind(listener, path)
        listener.listen(128)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return ShmServer(source, listener, path)


def _check_folder(folder: str) -> None:
    status = os.stat(folder)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ValueError(f"{folder!r} must belong to this user and have mode 0700")


def _bind(listener: socket.socket, path: str) -> None:
    try:
        listener.bind(path)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or _answers(path):
            raise OSError(error.errno, f"cannot listen at {path!r}: {error.strerror}") from None
        os.unlink(path)  # left by a worker that was killed
        listener.bind(path)


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        return True
