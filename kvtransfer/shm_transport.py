"""shm: control frames on a Unix socket, chunks in shared memory that both ends map.

One copy in (the source packs a chunk into a slot), none out (the reader's arrays are views of
the slot). The segment's descriptor crosses the socket once per connection, before the first
chunk. Arrays begin at multiples of 64 bytes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from kvtransfer.errors import ProtocolError
from kvtransfer.frames import PREFIX, Frame, decode_header, encode_header, header_length
from kvtransfer.layout import align_up
from kvtransfer.messages import ChunkHeader, Message, SegmentOpened
from kvtransfer.payload import Payload, copy_into
from kvtransfer.session import Session
from kvtransfer.shm_segment import Segment, SegmentPool, SegmentView
from kvtransfer.source import KVSource
from kvtransfer.unix_stream import UnixStream, readable

log = logging.getLogger(__name__)

MAX_PATH_BYTES = 107
"""What fits a Unix socket's address on Linux, its closing zero byte aside."""

IDLE_SEGMENTS = 4


async def _read_message(stream: UnixStream) -> Message:
    length = header_length(await stream.read_exactly(PREFIX.size))
    return decode_header(await stream.read_exactly(length))


class _SourceChannel:
    """The source's end of one connection."""

    transport = "shm"
    on_device = False

    def __init__(self, stream: UnixStream, pool: SegmentPool) -> None:
        self._stream = stream
        self._pool = pool
        self._segment: Segment | None = None
        self._announced = False

    async def send(self, message: Message, payload: Payload = ()) -> None:
        if payload and not self._announced:
            assert self._segment is not None
            opened = SegmentOpened(self._segment.slots, self._segment.slot_bytes)
            await self._stream.write(encode_header(opened), self._segment.fd)
            self._announced = True
        await self._stream.write(encode_header(message))

    async def recv(self) -> Frame:
        return Frame(await _read_message(self._stream))

    def stage(self, slot: int, arrays: Sequence[np.ndarray]) -> Payload:
        if self._segment is None:
            self._segment = self._pool.take()
        memory = self._segment.slot(slot)
        staged, offset = [], 0
        for array in arrays:
            target = memory[offset : offset + array.nbytes]
            copy_into(target, array)
            staged.append(target)
            offset += align_up(array.nbytes)
        return tuple(staged)

    async def close(self, *, idle: bool = False) -> None:
        self._stream.close()
        if self._segment is not None:
            segment, self._segment = self._segment, None
            if idle:
                self._pool.put(segment)
            else:
                segment.close()


class _ReaderChannel:
    """The reader's end of one connection."""

    on_device = False

    def __init__(self, stream: UnixStream) -> None:
        self._stream = stream
        self._segment: SegmentView | None = None

    async def send(self, message: Message, payload: Payload = ()) -> None:
        await self._stream.write(encode_header(message))

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
        memory = self._segment.slot(chunk.slot)
        views, offset = [], 0
        for array in chunk.arrays:
            if offset + array.nbytes > len(memory):
                raise ProtocolError(f"a chunk larger than its slot of {len(memory)} bytes")
            views.append(memory[offset : offset + array.nbytes])
            offset += align_up(array.nbytes)
        return tuple(views)

    async def close(self, *, idle: bool = False) -> None:
        self._stream.close()
        if self._segment is not None:
            self._segment.close()


async def connect_shm(path: str) -> _ReaderChannel:
    """Connects to a source on this machine. Raises OSError if none listens at `path`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, path)
    except BaseException:
        sock.close()
        raise
    return _ReaderChannel(UnixStream(sock, accept_fd=True))


class ShmServer:
    """A source's listening socket; made by `serve_shm`."""

    def __init__(self, source: KVSource, listener: socket.socket, path: str) -> None:
        self.uri = f"shm://{path}"
        self._source = source
        self._listener = listener
        self._path = path
        self._pool = SegmentPool(
            source.window, source.layout.slot_bytes(source.chunk_tokens), IDLE_SEGMENTS
        )
        self._sessions: set[Session] = set()
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
            channel = _SourceChannel(UnixStream(sock, accept_fd=False), self._pool)
            session = self._source.serve(channel)
            self._sessions = {s for s in self._sessions if not s.task.done()} | {session}

    async def close(self) -> None:
        """Stops listening, removes the socket file, ends the connections. Idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._listener.fileno() >= 0:
            self._listener.close()
            with suppress(FileNotFoundError):
                os.unlink(self._path)
        for session in self._sessions:
            session.hang_up()
        await asyncio.gather(*(session.task for session in self._sessions))
        self._pool.close()


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
