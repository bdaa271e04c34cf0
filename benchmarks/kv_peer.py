"""The other process of benchmarks.kvtransfer: it holds KV, and sends bare bytes to compare with.

    python -m benchmarks.kv_peer FOLDER MIB ROUNDS

Offers transfers of MIB mebibytes, by shm and gRPC at Unix sockets in FOLDER; beside them two
gRPC streams, one of bare bytes and one of chunks packed and checksummed, and a raw socket. Prints
"serving" once it does, and ends with its standard input.

Most transfers are computed when they are offered. Those of PUBLISHED are as their number comes
as a line to publish.sock; an empty line after that is answered by the time at which they were.
"""

from __future__ import annotations

import asyncio
import struct
import sys
import time
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
from kvtransfer.chunk_frame import unfilled_bytes
from kvtransfer.payload import array_headers, copy_into, places_of

LAYERS, HEADS, WIDTH = 30, 3, 64  # the demo model's, float32
TOKEN_BYTES = 2 * LAYERS * HEADS * WIDTH * 4
CHUNK_TOKENS = 3 * 2**20 // TOKEN_BYTES
PIECE = 3 * 2**20
LEASE_S = 600.0
"""Most transfers are finished when the first one begins."""
FETCHES = (PUBLISHED, PULLED, GRPC) = (b"published", b"pulled", b"grpc")
"""What is offered in each round; see `transfer_id`."""
SETTLE_S = 0.005
"""How long before KV is published: its reader waits in its sleep by then."""
BARE_METHOD, PACKED_METHOD = "/benchmarks.Bare/Send", "/benchmarks.Bare/SendPacked"
DIGEST = struct.Struct("<Q")
"""Of a packed chunk, before its bytes."""
LAYOUT = KVLayout(
    "benchmark", tuple(ArraySpec(name, "float32", LAYERS, HEADS, WIDTH) for name in "kv")
)


def tokens_of(mib: int) -> int:
    """Tokens whose KV is about `mib` mebibytes."""
    return max(1, mib * 2**20 // TOKEN_BYTES)


def chunks_of(tokens: int) -> list[tuple[int, int]]:
    """First token and end of each chunk of `tokens` tokens."""
    return [(at, min(at + CHUNK_TOKENS, tokens)) for at in range(0, tokens, CHUNK_TOKENS)]


def transfer_id(fetch: bytes, round_: int) -> bytes:
    """The id of one of FETCHES in a round."""
    return b"%s %d" % (fetch, round_)


def pieces_of(size: int) -> list[memoryview]:
    """`size` bytes in messages of PIECE; the last one may be shorter."""
    zeros = memoryview(bytes(min(PIECE, size)))
    return [zeros[: min(PIECE, size - begin)] for begin in range(0, size, PIECE)]


def kv_of(tokens: int) -> np.ndarray:
    """Keys and values of `tokens` tokens, [2, layers, tokens, heads, width]."""
    shape = (2, LAYERS, tokens, HEADS, WIDTH)
    return np.random.default_rng(0).standard_normal(shape, np.float32)


class Holder:
    """Offers the same KV again for every transfer that is claimed."""

    def __init__(self, tokens: int, rounds: int) -> None:
        self._tokens = tokens
        self._kv = kv_of(tokens)
        self.source = KVSource(
            LAYOUT, self._read, self._released, chunk_tokens=CHUNK_TOKENS, lease_s=LEASE_S
        )

        for round_ in range(rounds):
            for fetch in FETCHES:
                self._offer(transfer_id(fetch, round_), computed=fetch is not PUBLISHED)

    def _offer(self, transfer_id: bytes, computed: bool) -> None:
        self.source.offer(transfer_id)
        self.source.admit(transfer_id, self._tokens)
        if computed:
            self.source.finish(transfer_id, b"")

    async def publish(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one connection; see the module."""
        began = 0.0
        while line := await reader.readline():
            if number := line.strip():
                await asyncio.sleep(SETTLE_S)
                began = time.perf_counter()
                self.source.finish(transfer_id(PUBLISHED, int(number)), b"")
            else:
                writer.write(f"{began}\n".encode())
        writer.close()

    async def send_packed(self, request: bytes, context: grpc.aio.ServicerContext) -> None:
        """Streams the KV, each chunk packed and behind its checksum, while the last one leaves."""
        leaving = None
        for start, stop in chunks_of(self._tokens):
            chunk = array_headers(LAYOUT, stop - start)
            message, memory = unfilled_bytes(DIGEST.size + LAYOUT.bytes_per_token * (stop - start))
            arrays = [array[:, start:stop] for array in self._kv]
            places = places_of(memory[DIGEST.size :], chunk, alignment=1)
            memory[: DIGEST.size] = DIGEST.pack(copy_into(places, arrays))
            if leaving is not None:
                await leaving
            leaving = asyncio.create_task(context.write(message))
            await asyncio.sleep(0)  # it has begun
        if leaving is not None:
            await leaving

    async def _read(
        self, transfer_id: bytes, start: int, stop: int, on_device: bool
    ) -> Sequence[np.ndarray]:
        return [array[:, start:stop] for array in self._kv]

    def _released(self, transfer_id: bytes, cause: ReleaseCause) -> None:
        """The next is offered when its number is asked for."""


def _bare_handler(size: int, holder: Holder) -> grpc.GenericRpcHandler:
    """Streams `size` bytes in messages of PIECE and nothing else, or the holder's KV."""
    messages = [bytes(piece) for piece in pieces_of(size)]

    async def send(request: bytes, context: object) -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    ways = {BARE_METHOD: send, PACKED_METHOD: holder.send_packed}
    return grpc.method_handlers_generic_handler(
        "benchmarks.Bare",
        {
            method.rpartition("/")[2]: grpc.unary_stream_rpc_method_handler(way)
            for method, way in ways.items()
        },
    )


async def _send_raw(size: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    pieces = pieces_of(size)
    while await reader.read(1):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
    writer.close()


async def _main(folder: Path, mib: int, rounds: int) -> None:
    keep_freed_buffers()  # as a worker
    holder = Holder(tokens_of(mib), rounds)
    shm = await serve_shm(holder.source, str(folder / "shm.sock"))
    size = tokens_of(mib) * TOKEN_BYTES
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers(
        (kv_service_handler(holder.source), _bare_handler(size, holder))
    )
    server.add_insecure_port(f"unix:{folder / 'grpc.sock'}")
    await server.start()
    publish = await asyncio.start_unix_server(holder.publish, folder / "publish.sock")
    raw = await asyncio.start_unix_server(
        lambda r, w: _send_raw(size, r, w), folder / "raw.sock", limit=2**20
    )
    print("serving", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for plain in (publish, raw):
        plain.close()
    await server.stop(0)
    await shm.close()
    await holder.source.close()


if __name__ == "__main__":
    uvloop.run(_main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
