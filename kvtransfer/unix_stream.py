"""A connected Unix socket on the asyncio loop that can pass file descriptors.

asyncio's own streams drop descriptors that arrive with the bytes, hence recvmsg and sendmsg
here, on a non-blocking socket. What the socket takes at once is written without a task or a turn
of the loop: a message of a transfer is short, and somebody waits for it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable

from kvtransfer.channel import ChannelClosed

_READ_BYTES = 64 << 10


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():  # the loop may call again before the waiter has run
        ready.set_result(None)


async def readable(sock: socket.socket) -> None:
    """Waits until `sock` has something to read, or to accept."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock.fileno(), _resolve, ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock.fileno())


class UnixStream:
    """Takes over `sock`. One coroutine may read while another flushes."""

    def __init__(self, sock: socket.socket, *, accept_fd: bool) -> None:
        sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._socket = sock
        self._accept_fd = accept_fd
        self._buffer = bytearray()
        self._fd: int | None = None
        self._unsent: deque[tuple[memoryview, int | None]] = deque()
        self._watched = False  # the loop calls `_on_readable`
        self._ready: asyncio.Future[None] | None = None  # of who reads

    async def read_exactly(self, size: int) -> bytes:
        """The next `size` bytes. Raises ChannelClosed. Cancelling loses nothing."""
        while len(self._buffer) < size:
            await self._readable()
            try:
                self._receive()
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as error:
                raise ChannelClosed(str(error)) from error
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    async def _readable(self) -> None:
        if self._socket.fileno() < 0:
            raise ChannelClosed("the connection is closed")
        if not self._watched:
            self._loop.add_reader(self._socket.fileno(), self._on_readable)
            self._watched = True
        self._ready = self._loop.create_future()
        try:
            await self._ready
        finally:
            self._ready = None

    def _on_readable(self) -> None:
        # Watched from one read to the next, which saves two system calls for each.
        if self._ready is None:
            self._unwatch()
        else:
            _resolve(self._ready)

    def _unwatch(self) -> None:
        if self._watched:
            self._loop.remove_reader(self._socket.fileno())
            self._watched = False

    def _receive(self) -> None:
        if self._accept_fd:
            data, fds, _, _ = socket.recv_fds(self._socket, _READ_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            for fd in fds:
                self._keep(fd)
        else:
            data = self._socket.recv(_READ_BYTES)
        if not data:
            raise ChannelClosed("the peer closed the connection")
        self._buffer += data

    def _keep(self, fd: int) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = fd

    def take_fd(self) -> int | None:
        """The descriptor that came last, now the caller's to close."""
        fd, self._fd = self._fd, None
        return fd

    def post(self, data: bytes, fd: int | None = None) -> bool:
        """Writes what the socket takes, `fd` beside the first byte; True if that is all.

        The rest is kept for `flush`. Raises ChannelClosed.
        """
        self._unsent.append((memoryview(data), fd))
        return self._send()

    async def flush(self) -> None:
        """Writes all that was posted. Raises ChannelClosed. Cancelling loses nothing."""
        while not self._send():
            ready: asyncio.Future[None] = self._loop.create_future()
            fileno = self._socket.fileno()
            self._loop.add_writer(fileno, _resolve, ready)
            try:
                await ready
            finally:
                self._loop.remove_writer(fileno)

    def _send(self) -> bool:
        while self._unsent:
            data, fd = self._unsent[0]
            try:
                if fd is None:
                    sent = self._socket.send(data)
                else:
                    sent = socket.send_fds(self._socket, [data], [fd])
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if sent == len(data):
                self._unsent.popleft()
            else:
                self._unsent[0] = data[sent:], None
        return True

    def on_readable(self, callback: Callable[[], None] | None) -> None:
        """Calls back whenever the peer has written or closed, until told None. Nobody may be
        reading meanwhile."""
        self._watched = False
        if callback is None:
            self._loop.remove_reader(self._socket.fileno())
        else:
            self._loop.add_reader(self._socket.fileno(), callback)

    def is_quiet(self) -> bool:
        """Nothing waits to be read, and the peer has not closed."""
        if self._buffer:
            return False
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """Closes at once. Nobody may be reading or writing. Idempotent."""
        self._unwatch()
        self._unsent.clear()
        self._socket.close()
        if (fd := self.take_fd()) is not None:
            os.close(fd)
