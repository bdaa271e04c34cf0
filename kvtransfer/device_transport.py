"""device: both ends in one process; chunks are handed over as the owner's device arrays.

Nothing is serialised: control frames are the message objects, in a queue per direction, and a
chunk is a reference to arrays that the reading engine copies to its own devices (ICI on TPU), or
reads where they lie (CPU).
So there are no bytes to take a checksum of, and a chunk is only as whole as the devices' own
copies are. Arrays are freed when nobody refers to them any more, which a copy that runs does:
no buffer is used again before it has been read.

An address names its process by a random token; in any other process it leads nowhere, and a
reader takes the source's next endpoint. Whoever knows it must run in this process already.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

from kvtransfer.channel import ChannelClosed, Packed
from kvtransfer.frames import Frame
from kvtransfer.messages import ChunkHeader, Message
from kvtransfer.session import Session
from kvtransfer.source import KVSource

_PROCESS = secrets.token_hex(16)
_SERVERS: dict[str, DeviceServer] = {}
"""Who serves in this process, by target."""


class _End:
    """One end of a connection; what it sends goes into its peer's queue."""

    transport = "device"
    on_device = True

    def __init__(self) -> None:
        self._peer = self
        self._inbox: asyncio.Queue[Frame | None] = asyncio.Queue()  # None: it has ended
        self._closed = False

    @classmethod
    def pair(cls) -> tuple[_End, _End]:
        one, other = cls(), cls()
        one._peer, other._peer = other, one
        return one, other

    def post(self, *sent: Message | Packed) -> bool:
        if self._closed or self._peer._closed:
            raise ChannelClosed("the connection has been closed")
        for item in sent:
            # Never full: chunks are bounded by the window, and other messages by the states.
            self._peer._inbox.put_nowait(
                Frame(item.header, item.content) if isinstance(item, Packed) else Frame(item)
            )
        return True

    async def flush(self) -> None:
        """Nothing to do: what is posted is out."""

    def pack(self, chunk: ChunkHeader, arrays: Sequence[Any]) -> Packed:
        return Packed(chunk, tuple(arrays))

    async def recv(self) -> Frame:
        frame = None if self._closed else await self._inbox.get()
        if frame is None:
            self._inbox.put_nowait(None)
            raise ChannelClosed("the peer has closed the connection")
        return frame

    async def close(self, *, idle: bool = False) -> None:
        if not self._closed:
            self._closed = True
            for end in (self, self._peer):
                end._inbox.put_nowait(None)


class DeviceServer:
    """A source that readers in this process can reach; made by `serve_device`."""

    def __init__(self, source: KVSource, target: str) -> None:
        self.uri = f"device://{target}"
        self.loop = asyncio.get_running_loop()
        self._source = source
        self._target = target
        self._sessions: set[Session] = set()

    def connect(self) -> _End:
        """A new connection; gives the reader's end."""
        ours, theirs = _End.pair()
        session = self._source.serve(ours)
        self._sessions = {s for s in self._sessions if not s.task.done()} | {session}
        return theirs

    async def close(self) -> None:
        """Takes the address away and ends the connections. Idempotent."""
        if _SERVERS.get(self._target) is self:
            del _SERVERS[self._target]
        for session in self._sessions:
            session.hang_up()
        await asyncio.gather(*(session.task for session in self._sessions))


def device_uri(name: str) -> str:
    """The address at which this process will serve a source called `name`."""
    return f"device://{_PROCESS}/{name}"


def serve_device(source: KVSource, name: str) -> DeviceServer:
    """Offers `source` to readers in this process and on this event loop, at `device_uri(name)`.

    Raises ValueError if the name is taken.
    """
    target = device_uri(name).removeprefix("device://")
    if target in _SERVERS:
        raise ValueError(f"{name!r} is served in this process already")
    server = _SERVERS[target] = DeviceServer(source, target)
    return server


async def connect_device(target: str) -> _End:
    """Connects to a source in this process. Raises ChannelClosed if there is none."""
    if target.partition("/")[0] != _PROCESS:
        raise ChannelClosed("it is in another process")
    server = _SERVERS.get(target)
    if server is None or server.loop is not asyncio.get_running_loop():
        raise ChannelClosed("nobody serves it on this event loop")
    return server.connect()
