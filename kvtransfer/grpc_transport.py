"""grpc: one bidirectional stream per transfer, `hexserve.v1.KVTransfer/Fetch`.

A gRPC message is one frame, header and payload together, passed as bytes (no protobuf). The
service is added to a server that others may share.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import grpc
import grpc.aio
import numpy as np

from kvtransfer.channel import ChannelClosed, Packed, SourceChannel
from kvtransfer.chunk_frame import pack_frame
from kvtransfer.endpoints import Endpoint
from kvtransfer.frames import (
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    PREFIX,
    Frame,
    decode_frame,
    encode_header,
)
from kvtransfer.messages import ChunkHeader, Message
from kvtransfer.source import KVSource

SERVICE = "hexserve.v1.KVTransfer"
METHOD = "Fetch"

MAX_MESSAGE_BYTES = PREFIX.size + MAX_HEADER_BYTES + MAX_PAYLOAD_BYTES

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
"""What a grpc.aio server needs to carry KV; its default limit is 4 MiB."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *SERVER_OPTIONS,
    # A source that was down must be found again at once when it is back.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A chunk in few frames instead of 16 KiB each: measured, half as fast again.
    ("grpc.http2.max_frame_size", 4 << 20),
    # An HTTP proxy that is set for the outside world does not lead to workers.
    ("grpc.enable_http_proxy", 0),
)

_BROKEN = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
"""What grpc.aio raises when a call has ended while it was being used."""


class CallChannel:
    """Either end of one call; `call` is what grpc.aio gives that end to read and to write."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._posted: deque[bytes] = deque()

    def post_frames(self, *frames: bytes) -> bool:
        """Takes frames to be sent by `flush`; False, as `Channel.post`: none is out yet."""
        self._posted.extend(frames)
        return False

    async def flush(self) -> None:
        try:
            while self._posted:
                await self._call.write(self._posted.popleft())
        except _BROKEN as error:
            raise ChannelClosed(_reason(error)) from error

    async def read(self) -> bytes:
        """The peer's next frame. Raises ChannelClosed."""
        try:
            data = await self._call.read()
        except _BROKEN as error:
            raise ChannelClosed(_reason(error)) from error
        if not isinstance(data, bytes):  # grpc.aio.EOF
            raise ChannelClosed("the peer ended the stream")
        return data

    def cancel(self) -> None:
        """Ends the call; at the reader's end only."""
        self._call.cancel()


class _ByteChannel(CallChannel):
    on_device = False

    def post(self, *sent: Message | Packed) -> bool:
        return self.post_frames(
            *(item.content if isinstance(item, Packed) else encode_header(item) for item in sent)
        )

    async def recv(self) -> Frame:
        return decode_frame(await self.read())


class _SourceChannel(_ByteChannel):
    transport = "grpc"

    def pack(self, chunk: ChunkHeader, arrays: Sequence[np.ndarray]) -> Packed:
        return pack_frame(chunk, arrays)

    async def close(self, *, idle: bool = False) -> None:
        """Nothing to do: the call ends when its handler, which awaits the session, returns."""


class _ReaderChannel(_ByteChannel):
    async def close(self, *, idle: bool = False) -> None:
        self.cancel()


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__


def session_handler(
    source: KVSource, channel_of: Callable[[Any], SourceChannel]
) -> grpc.RpcMethodHandler:
    """A method of the service; each call is one connection, `channel_of(call)` its channel."""

    async def fetch(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        # At once, so that the reader knows that this endpoint can be reached.
        await context.send_initial_metadata(())
        session = source.serve(channel_of(context))
        try:
            await asyncio.shield(session.task)
        except asyncio.CancelledError:
            # The call is gone; the session may still have to wait for a read.
            session.hang_up()
            raise

    return grpc.stream_stream_rpc_method_handler(fetch)


def kv_service_handler(
    source: KVSource, more: Mapping[str, grpc.RpcMethodHandler] = MappingProxyType({})
) -> grpc.GenericRpcHandler:
    """The service to add to a grpc.aio server made with `SERVER_OPTIONS`.

    `more` are methods beside this transport's own.
    """
    methods = {METHOD: session_handler(source, _SourceChannel), **more}
    return grpc.method_handlers_generic_handler(SERVICE, methods)


class GrpcConnector:
    """Opens calls; fetches from one source share a connection."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def connect(self, endpoint: Endpoint) -> _ReaderChannel:
        """Raises ChannelClosed if the source cannot be reached; the caller bounds the time."""
        return _ReaderChannel(await self.call(endpoint, METHOD))

    async def call(self, endpoint: Endpoint, method: str) -> Any:
        """A call of the source's `method`; see `connect`."""
        target = endpoint.target
        if target.startswith("/"):
            target = f"unix:{target}"
        channel = self._channels.get(target)
        if channel is None:
            channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
            self._channels[target] = channel
        call = channel.stream_stream(f"/{SERVICE}/{method}", None, None)(None)
        try:
            await call.initial_metadata()
            if call.done():
                raise ChannelClosed(f"{(await call.code()).name}: {await call.details()}")
        except _BROKEN as error:
            raise ChannelClosed(_reason(error)) from error
        except BaseException:
            call.cancel()
            raise
        return call

    async def close(self) -> None:
        """Closes the shared connections. Idempotent."""
        while self._channels:
            await self._channels.popitem()[1].close(None)
