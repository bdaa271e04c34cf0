"""The other process of benchmarks.kvtransfer: it holds KV, and sends bare bytes to compare with.

    python -m benchmarks.kv_peer FOLDER MIB TRANSFERS

Offers TRANSFERS transfers of MIB mebibytes, by shm and gRPC at Unix sockets in
FOLDER; a bare gRPC byte stream and a raw socket beside them. Prints "serving" once it does, and
ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc.aio
import numpy as np
import uvloop

from kvtransfer import (
    SERVER_OPTIONS,
    ArraySpec,
    KVLayout,
    KVSource,
    ReleaseCause,
    keep_freed_buffers,
    kv_service_handler,
    serve_shm,
)

LAYERS, HEADS, WIDTH = 30, 3, 64  # the demo model's, float32
TOKEN_BYTES = 2 * LAYERS * HEADS * WIDTH * 4
CHUNK_TOKENS = 3 * 2**20 // TOKEN_BYTES
PIECE = 3 * 2**20
LEASE_S = 600.0
"""All transfers are finished when the first one begins."""
BARE_METHOD = "/benchmarks.Bare/Send"
LAYOUT = KVLayout(
    "benchmark", tuple(ArraySpec(name, "float32", LAYERS, HEADS, WIDTH) for name in "kv")
)


def tokens_of(mib: int) -> int:
    """Tokens whose KV is about `mib` mebibytes."""
    return max(1, mib * 2**20 // TOKEN_BYTES)


def pieces_of(size: int) -> list[memoryview]:
    """`size` bytes in messages of PIECE; the last one may be shorter."""
    zeros = memoryview(bytes(min(PIECE, size)))
    return [zeros[: min(PIECE, size - begin)] for begin in range(0, size, PIECE)]


class Holder:
    """Offers the same KV again for every transfer that is claimed."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        shape = (2, LAYERS, tokens, HEADS, WIDTH)
        self._kv = np.random.default_rng(0).standard_normal(shape, np.float32)
        self.source = KVSource(
            LAYOUT, self._read, self._released, chunk_tokens=CHUNK_TOKENS, lease_s=LEASE_S
        )

    def offer(self, transfer_id: bytes) -> None:
        self.source.offer(transfer_id)
        self.source.admit(transfer_id, self._tokens)
        self.source.finish(transfer_id, b"")

    async def _read(
        self, transfer_id: bytes, start: int, stop: int, on_device: bool
    ) -> Sequence[np.ndarray]:
        return [array[:, start:stop] for array in self._kv]

    def _released(self, transfer_id: bytes, cause: ReleaseCause) -> None:
        """The next is offered when its number is asked for."""


def _bare_handler(size: int) -> grpc.GenericRpcHandler:
    """Streams `size` bytes in messages of PIECE, and nothing else."""
    messages = [bytes(piece) for piece in pieces_of(size)]

    async def send(request: bytes, context: object) -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    return grpc.method_handlers_generic_handler(
        "benchmarks.Bare", {"Send": grpc.unary_stream_rpc_method_handler(send)}
    )


async def _send_raw(size: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    pieces = pieces_of(size)
    while await reader.read(1):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
    writer.close()


async def _main(folder: Path, mib: int, transfers: int) -> None:
    keep_freed_buffers()  # as a worker
    holder = Holder(tokens_of(mib))
    for number in range(transfers):
        holder.offer(number.to_bytes(8, "big"))
    shm = await serve_shm(holder.source, str(folder / "shm.sock"))
    size = tokens_of(mib) * TOKEN_BYTES
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((kv_service_handler(holder.source), _bare_handler(size)))
    server.add_insecure_port(f"unix:{folder / 'grpc.sock'}")
    await server.start()
    raw = await asyncio.start_unix_server(
        lambda r, w: _send_raw(size, r, w), folder / "raw.sock", limit=2**20
    )
    print("serving", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    raw.close()
    await server.stop(0)
    await shm.close()
    await holder.source.close()


if __name__ == "__main__":
    uvloop.run(_main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
