"""A connected Unix socket on the asyncio loop that can pass file descriptors.

asyncio's own streams drop descriptors that arrive with the bytes, hence recvmsg and sendmsg
here, on a non-blocking socket.
"""

from __future__ import annotations

import asyncio
import os
import socket
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
    """Takes over `sock`. One coroutine may read while another writes."""

    def __init__(self, sock: socket.socket, *, accept_fd: bool) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._accept_fd = accept_fd
        self._buffer = bytearray()
        self._fd: int | None = None
        self._torn = False  # a write was given up halfway: the peer cannot read on

    async def read_exactly(self, size: int) -> bytes:
        """The next `size` bytes. Raises ChannelClosed. Cancelling loses nothing."""
        while len(self._buffer) < size:
            try:
                self._receive()
            except (BlockingIOError, InterruptedError):
                loop = asyncio.get_running_loop()
                await self._ready(loop.add_reader, loop.remove_reader)
            except OSError as error:
                raise ChannelClosed(str(error)) from error
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

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

    async def write(self, data: bytes, fd: int | None = None) -> None:
        """Writes all of `data`, `fd` beside its first byte. Raises ChannelClosed."""
        if self._torn:
            raise ChannelClosed("an earlier write was given up halfway")
        self._torn = True
        rest = memoryview(data)
        while rest:
            try:
                if fd is not None:
                    sent = socket.send_fds(self._socket, [rest], [fd])
                    fd = None
                else:
                    sent = self._socket.send(rest)
                rest = rest[sent:]
            except (BlockingIOError, InterruptedError):
                loop = asyncio.get_running_loop()
                await self._ready(loop.add_writer, loop.remove_writer)
            except OSError as error:
                raise ChannelClosed(str(error)) from error
        self._torn = False

    async def _ready(self, add: Callable, remove: Callable[[int], bool]) -> None:
        ready = asyncio.get_running_loop().create_future()
        fileno = self._socket.fileno()
        if fileno < 0:
            raise ChannelClosed("the connection is closed")
        add(fileno, _resolve, ready)
        try:
            await ready
        finally:
            remove(fileno)

    def on_readable(self, callback: Callable[[], None] | None) -> None:
        """Calls back whenever the peer has written or closed, until told None. Nobody may be
        reading meanwhile."""
        loop = asyncio.get_running_loop()
        if callback is None:
            loop.remove_reader(self._socket.fileno())
        else:
            loop.add_reader(self._socket.fileno(), callback)

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
        self._socket.close()
        if (fd := self.take_fd()) is not None:
            os.close(fd)
