"""Moves KV between workers: a prefill worker's `KVSource`, a decode worker's `KVSink`.

    source = KVSource(layout, read, on_release, chunk_tokens=128)
    server = serve_device(source, name)                         # device://process/name,
    server = await serve_shm(source, path)                      # shm:///path, and / or
    handler = kv_service_handler(source, array_method(source, arrays))
    grpc_server.add_generic_rpc_handlers((handler,))            # jax:// and grpc://host:port

    fetch = sink.fetch([server.uri, "grpc://10.0.0.7:9000"], transfer_id)
    tokens = await fetch.admitted()
    async for chunk in fetch.chunks():
        ...
        chunk.release()
    await fetch.close(done=True)

`KVSource.counts` and `KVSink.counts` tell what has moved, by transport.

The protocol and its states are in `kvtransfer.protocol`, the errors in `kvtransfer.errors`.
"""

from kvtransfer.books import TransferCounts
from kvtransfer.chunk import Chunk
from kvtransfer.device_transport import DeviceServer, device_uri, serve_device
from kvtransfer.endpoints import TRANSPORTS
from kvtransfer.errors import (
    IntegrityError,
    KVTransferError,
    LayoutMismatch,
    ProtocolError,
    SharedMemoryFull,
    SourceUnreachable,
    TransferAborted,
    TransferNotNeeded,
    TransferTimeout,
    UnknownTransfer,
)
from kvtransfer.fetch import Fetch
from kvtransfer.grpc_transport import CHANNEL_OPTIONS, SERVER_OPTIONS, kv_service_handler
from kvtransfer.heap import keep_freed_buffers
from kvtransfer.jax_transport import Arrays, array_method
from kvtransfer.layout import ArraySpec, KVLayout
from kvtransfer.shm_transport import ShmServer, serve_shm
from kvtransfer.sink import KVSink
from kvtransfer.source import KVSource
from kvtransfer.transfer import ReleaseCause

__all__ = [
    "CHANNEL_OPTIONS",
    "SERVER_OPTIONS",
    "TRANSPORTS",
    "ArraySpec",
    "Arrays",
    "Chunk",
    "DeviceServer",
    "Fetch",
    "IntegrityError",
    "KVLayout",
    "KVSink",
    "KVSource",
    "KVTransferError",
    "LayoutMismatch",
    "ProtocolError",
    "ReleaseCause",
    "SharedMemoryFull",
    "ShmServer",
    "SourceUnreachable",
    "TransferAborted",
    "TransferCounts",
    "TransferNotNeeded",
    "TransferTimeout",
    "UnknownTransfer",
    "array_method",
    "device_uri",
    "keep_freed_buffers",
    "kv_service_handler",
    "serve_device",
    "serve_shm",
]
