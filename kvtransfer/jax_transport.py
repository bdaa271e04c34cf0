"""jax: control frames over gRPC, chunks from devices to devices by jax.experimental.transfer.

The gRPC stream is that of the `grpc` transport under another method. The frames of a chunk are
two: `parked`, which says where its arrays wait, and the chunk's header. The source parks a chunk
only once its reader has pulled and has credit for it, and the reader pulls only what was parked,
so neither waits for arrays that never come. The bytes are the transfer server's: no checksum of
them is taken here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import grpc

from kvtransfer.channel import Packed
from kvtransfer.endpoints import Endpoint
from kvtransfer.errors import ProtocolError
from kvtransfer.frames import MAX_PAYLOAD_BYTES, Frame, decode_bare, encode_header
from kvtransfer.grpc_transport import CallChannel, GrpcConnector, session_handler
from kvtransfer.layout import KVLayout
from kvtransfer.messages import ArrayHeader, ChunkHeader, Message, Parked
from kvtransfer.payload import check_arrays
from kvtransfer.source import KVSource

METHOD = "FetchArrays"


class Arrays(Protocol):
    """What moves the arrays; `kvtransfer.array_transfer.ArrayTransfer` does."""

    def park(self, arrays: Sequence[Any]) -> Parked:
        """Holds a chunk's arrays for one reader; returns what to tell it."""

    async def pull(self, parked: Parked, headers: Sequence[ArrayHeader]) -> list[Any]:
        """The arrays of a chunk, `parked.tokens` tokens each. Raises KVTransferError."""


class _ArrayChannel(CallChannel):
    on_device = True

    def __init__(self, call: Any, arrays: Arrays) -> None:
        super().__init__(call)
        self._arrays = arrays

    def post(self, *sent: Message | Packed) -> bool:
        for item in sent:
            if isinstance(item, Packed):
                self.post_frames(encode_header(self._arrays.park(item.content)))
                item = item.header
            self.post_frames(encode_header(item))
        return False


class _SourceChannel(_ArrayChannel):
    transport = "jax"

    async def recv(self) -> Frame:
        return Frame(decode_bare(await self.read()))

    def pack(self, chunk: ChunkHeader, arrays: Sequence[Any]) -> Packed:
        return Packed(chunk, tuple(arrays))

    async def close(self, *, idle: bool = False) -> None:
        """Nothing to do: the call ends when its handler, which awaits the session, returns."""


class _ReaderChannel(_ArrayChannel):
    def __init__(self, call: Any, arrays: Arrays, layout: KVLayout) -> None:
        super().__init__(call, arrays)
        self._layout = layout

    async def recv(self) -> Frame:
        message = decode_bare(await self.read())
        if not isinstance(message, Parked):
            if isinstance(message, ChunkHeader):
                raise ProtocolError("a chunk came whose arrays are parked nowhere")
            return Frame(message)
        chunk = decode_bare(await self.read())
        if not isinstance(chunk, ChunkHeader):
            raise ProtocolError(f"arrays were parked for {type(chunk).__name__}, not for a chunk")
        _check(message, chunk, self._layout)
        return Frame(chunk, tuple(await self._arrays.pull(message, chunk.arrays)))

    async def close(self, *, idle: bool = False) -> None:
        self.cancel()


def _check(parked: Parked, chunk: ChunkHeader, layout: KVLayout) -> None:
    """Before any memory is taken. Raises IntegrityError and ProtocolError."""
    check_arrays(layout, chunk)
    tokens = chunk.stop - chunk.start
    if parked.tokens < tokens:
        raise ProtocolError(f"a chunk of {tokens} tokens in arrays of {parked.tokens}")
    size = layout.bytes_per_token * parked.tokens
    if size > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"a chunk padded to {size} bytes; at most {MAX_PAYLOAD_BYTES}")
    for array in chunk.arrays:
        if array.shape[2] % parked.pieces:
            raise ProtocolError(f"{array.shape[2]} heads in {parked.pieces} pieces")


def array_method(source: KVSource, arrays: Arrays) -> dict[str, grpc.RpcMethodHandler]:
    """The method that serves `source` by this transport, for `kv_service_handler`."""
    return {METHOD: session_handler(source, lambda call: _SourceChannel(call, arrays))}


async def connect_arrays(
    connector: GrpcConnector, endpoint: Endpoint, arrays: Arrays, layout: KVLayout
) -> _ReaderChannel:
    """Raises ChannelClosed if the source cannot be reached; the caller bounds the time."""
    return _ReaderChannel(await connector.call(endpoint, METHOD), arrays, layout)
