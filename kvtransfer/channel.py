"""What a transport is to the state machines: a channel of frames.

The source's session and the sink's fetch are written once, against this interface; a
transport adds only how chunks travel: as bytes, or as the owner's device arrays.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from kvtransfer.frames import Frame
from kvtransfer.messages import Message
from kvtransfer.payload import Payload


class ChannelClosed(Exception):
    """The connection has ended or broken; nothing more will come. Does not leave the library."""


class Channel(Protocol):
    """One connection. One coroutine may send while another receives, no two the same."""

    @property
    def on_device(self) -> bool:
        """Chunks are device arrays, padded to a whole chunk, and not bytes."""

    def send(self, message: Message, payload: Payload = ()) -> Coroutine[Any, Any, None]:
        """A coroutine that sends one frame and waits while the transport is full.

        A chunk's payload is what `SourceChannel.stage` gave for it, needed no longer than until
        this call (not its coroutine) returns. The coroutine raises ChannelClosed. If it is
        cancelled halfway, nothing more can be sent.
        """

    async def recv(self) -> Frame:
        """The next frame. Raises ChannelClosed at the end and ProtocolError for garbage.

        After either, the channel is only good for `close`.
        """

    async def close(self, *, idle: bool = False) -> None:
        """Ends the connection at once. Idempotent.

        `idle` promises that the peer no longer looks at any slot, so that its memory may be
        written again.
        """


class SourceChannel(Channel, Protocol):
    """The end of a connection that sends chunks; `transport` is the name it is counted by."""

    @property
    def transport(self) -> str: ...

    def stage(self, slot: int, arrays: Sequence[Any]) -> Payload:
        """Packs a chunk for sending; returns one contiguous buffer, or device array, per array.

        `slot`, below the window, must not be in use by an unacknowledged chunk. Buffers are
        valid until the slot is staged again. Raises SharedMemoryFull.
        """
