"""What a transport is to the state machines: a channel of frames.

The source's session and the sink's fetch are written once, against this interface; a
transport adds only how chunks travel: as bytes, or as the owner's device arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvtransfer.frames import Frame
from kvtransfer.messages import ChunkHeader, Message


class ChannelClosed(Exception):
    """The connection has ended or broken; nothing more will come. Does not leave the library."""


class Channel(Protocol):
    """One connection. One coroutine may flush while another receives, no two the same."""

    @property
    def on_device(self) -> bool:
        """Chunks are device arrays, padded to a whole chunk, and not bytes."""

    def post(self, *messages: Message) -> bool:
        """Takes messages to be sent, in this order; none is a chunk's.

        Returns True if all of them are out, which costs no task and no turn of the loop; else
        `flush` sends the rest. Raises ChannelClosed.
        """

    async def flush(self) -> None:
        """Sends all that was posted, and waits while the transport is full; one call at a time.

        Raises ChannelClosed. If it is cancelled halfway, nothing more can be sent.
        """

    async def recv(self) -> Frame:
        """The next frame. Raises ChannelClosed at the end and ProtocolError for garbage.

        After either, the channel is only good for `close`.
        """

    async def close(self, *, idle: bool = False) -> None:
        """Ends the connection at once. Idempotent.

        `idle` says that a transfer has ended in `released`: neither end looks at any slot nor
        waits for a message, so the connection may be kept for another one.
        """


@dataclass(frozen=True, slots=True)
class Packed:
    """A chunk that is ready to be sent; `content` is what its channel sends for it."""

    header: ChunkHeader
    content: Any


class SourceChannel(Channel, Protocol):
    """The end of a connection that sends chunks; `transport` is the name it is counted by."""

    @property
    def transport(self) -> str: ...

    def pack(self, chunk: ChunkHeader, arrays: Sequence[Any]) -> Packed:
        """Copies the arrays to where they leave from, and takes their checksum.

        The chunk's slot, below the window, must not be in use by an unacknowledged chunk.
        Raises SharedMemoryFull.
        """

    def post(self, *sent: Message | Packed) -> bool:
        """As above, but for chunks as well; several at once wake the reader once."""
