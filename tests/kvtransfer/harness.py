"""A prefill worker of made-up KV, joined to a sink by any transport."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc.aio
import jax
import numpy as np

from kvtransfer import (
    SERVER_OPTIONS,
    ArraySpec,
    Chunk,
    Fetch,
    KVLayout,
    KVSink,
    KVSource,
    ReleaseCause,
    array_method,
    kv_service_handler,
    serve_device,
    serve_shm,
)
from kvtransfer.array_transfer import ArrayTransfer
from kvtransfer.channel import ChannelClosed, Packed
from kvtransfer.frames import Frame
from kvtransfer.messages import ChunkHeader, Message
from kvtransfer.payload import Payload, checksum
from kvtransfer.protocol import State

TRANSPORTS = ("device", "shm", "jax+unix", "jax", "grpc+unix", "grpc")
CHUNK = 8

LAYOUT = KVLayout("tiny", (ArraySpec("k", "float32", 3, 2, 5), ArraySpec("v", "float32", 3, 2, 5)))
MIXED = KVLayout(
    "mixed",
    (
        ArraySpec("k", "bfloat16", 2, 3, 7),
        ArraySpec("v", "int8", 2, 3, 5),
        ArraySpec("scale", "int32", 2, 3, 1),
        ArraySpec("extra", "float32", 1, 1, 3),
    ),
)


@functools.cache
def prefill_arrays() -> ArrayTransfer:
    """The source's end of jax.experimental.transfer; a process keeps it for good."""
    return ArrayTransfer("127.0.0.1", jax.devices()[:1])


@functools.cache
def decode_arrays() -> ArrayTransfer:
    return ArrayTransfer("127.0.0.1", jax.devices()[:1])


async def eventually(predicate: Callable[[], bool]) -> None:
    """For what nothing announces: lets the loop run until `predicate()` holds."""
    async with asyncio.timeout(5):
        while not predicate():  # noqa: ASYNC110
            await asyncio.sleep(0)


def as_bytes(array: np.ndarray) -> memoryview:
    """The array's bytes in C order; a view if it is contiguous, otherwise of a copy."""
    # Through uint8: memoryview does not know the dtypes of ml_dtypes.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def on_a_device(array: np.ndarray) -> jax.Array:
    """[layers, n, ...] padded to a whole chunk, as an engine exports it."""
    return jax.device_put(np.pad(array, ((0, 0), (0, CHUNK - array.shape[1]), (0, 0), (0, 0))))


class Owner:
    """What a prefill worker is to a `KVSource`: it holds KV, reads it and sees releases."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self.released: list[tuple[bytes, ReleaseCause]] = []
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.reading = 0  # reads running
        self.reads = 0  # reads begun
        self.overlapped = False  # a release came while a read ran
        self.failure: Exception | None = None
        self.changed = asyncio.Event()

    def kv(self, transfer_id: bytes, start: int, stop: int) -> list[np.ndarray]:
        """Tokens [start, stop) of a transfer: random bits, but the same at every call."""
        arrays = []
        for index, spec in enumerate(self.layout.arrays):
            seed = int.from_bytes(transfer_id, "little") + index
            size = spec.bytes_per_token * 256
            bits = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
            arrays.append(bits.view(spec.numpy_dtype).reshape(spec.shape(256))[:, start:stop])
        return arrays

    async def read(
        self, transfer_id: bytes, start: int, stop: int, on_device: bool
    ) -> Sequence[Any]:
        self.reading += 1
        self.reads += 1
        self.changed.set()
        try:
            await self.may_read.wait()
            if self.failure is not None:
                raise self.failure
            arrays = self.kv(transfer_id, start, stop)
            return [on_a_device(array) for array in arrays] if on_device else arrays
        finally:
            self.reading -= 1

    def on_release(self, transfer_id: bytes, cause: ReleaseCause) -> None:
        self.overlapped |= self.reading > 0
        self.released.append((transfer_id, cause))
        self.changed.set()

    async def until(self, predicate: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not predicate():
                self.changed.clear()
                await self.changed.wait()


def new_source(**options: float) -> KVSource:
    """One whose owner nobody looks at."""
    owner = Owner(LAYOUT)
    return KVSource(LAYOUT, owner.read, owner.on_release, **{"chunk_tokens": CHUNK, **options})


class Link:
    """Both ends, and where the source can be reached."""

    def __init__(self, owner: Owner, source: KVSource, sink: KVSink, uris: list[str]) -> None:
        self.owner, self.source, self.sink, self.uris = owner, source, sink, uris

    def fetch(self, transfer_id: bytes, from_token: int = 0) -> Fetch:
        return self.sink.fetch(self.uris, transfer_id, from_token)

    def publish(self, transfer_id: bytes, tokens: int, trailer: bytes = b"first") -> None:
        """Offers a transfer that has been computed already."""
        self.source.offer(transfer_id)
        self.source.admit(transfer_id, tokens)
        self.source.finish(transfer_id, trailer)

    def check(self, transfer_id: bytes, start: int, stop: int, arrays: list[Any]) -> None:
        expected = self.owner.kv(transfer_id, start, stop)
        assert len(arrays) == len(expected)
        for array, want in zip(arrays, expected, strict=True):
            got = array
            if isinstance(array, jax.Array):
                got = np.asarray(array)[:, : stop - start]  # without its padding
            assert got.dtype == want.dtype
            assert got.shape == want.shape
            assert got.tobytes() == want.tobytes()

    async def receive(self, fetch: Fetch, transfer_id: bytes, from_token: int = 0) -> int:
        """Takes and checks every chunk, confirms, and returns how many there were."""
        total = await fetch.admitted()
        token, count = from_token, 0
        async for chunk in fetch.chunks():
            assert chunk.start == token
            self.check(transfer_id, chunk.start, chunk.stop, chunk.arrays)
            token = chunk.stop
            count += 1
            chunk.release()
        assert token == total
        await fetch.close(done=True)
        return count


async def rest(chunks: AsyncIterator[Chunk]) -> None:
    """Takes what is left, unseen."""
    async for chunk in chunks:
        chunk.release()


async def claimed(link: Link) -> None:
    """Waits until the source has the claim of the one connection there is."""
    await eventually(lambda: any(s.state is State.CLAIMED for s in link.source._sessions))


@asynccontextmanager
async def socket_folder() -> AsyncIterator[str]:
    """A short one: pytest's own may exceed what a socket's path allows."""
    folder = tempfile.mkdtemp(prefix="kv")
    try:
        yield folder
        assert os.listdir(folder) == []
    finally:
        shutil.rmtree(folder)


@asynccontextmanager
async def serving(source: KVSource, transport: str) -> AsyncIterator[str]:
    """Serves `source` by one transport; gives the URI."""
    async with AsyncExitStack() as stack:
        if transport == "device":
            local = serve_device(source, "prefill-0")
            stack.push_async_callback(local.close)
            yield local.uri
            return
        if transport == "shm":
            folder = await stack.enter_async_context(socket_folder())
            server = await serve_shm(source, f"{folder}/kv.sock")
            stack.push_async_callback(server.close)
            yield server.uri
            return
        grpc_server = grpc.aio.server(options=SERVER_OPTIONS)
        more = array_method(source, prefill_arrays()) if transport.startswith("jax") else {}
        grpc_server.add_generic_rpc_handlers((kv_service_handler(source, more),))
        if transport.endswith("+unix"):
            folder = await stack.enter_async_context(socket_folder())
            uri = f"{transport}://{folder}/grpc.sock"
            grpc_server.add_insecure_port(f"unix:{folder}/grpc.sock")
        else:
            uri = f"{transport}://127.0.0.1:{grpc_server.add_insecure_port('127.0.0.1:0')}"
        await grpc_server.start()
        stack.push_async_callback(grpc_server.stop, None)
        yield uri


@asynccontextmanager
async def linked(
    transport: str, layout: KVLayout = LAYOUT, sink_layout: KVLayout | None = None, **options
) -> AsyncIterator[Link]:
    owner = Owner(layout)
    source = KVSource(
        layout, owner.read, owner.on_release, **{"chunk_tokens": CHUNK, "window": 2, **options}
    )
    arrays = decode_arrays() if transport.startswith("jax") else None
    sink = KVSink(sink_layout or layout, arrays=arrays, stall_timeout_s=10)
    try:
        async with serving(source, transport) as uri:
            yield Link(owner, source, sink, [uri])
            await sink.close()
    finally:
        owner.may_read.set()
        await sink.close()
        await source.close()
    assert not owner.overlapped
    assert source.active() == 0
    ids = [transfer_id for transfer_id, _ in owner.released]
    assert len(ids) == len(set(ids)), "a transfer was released twice"


class Pipe:
    """One end of an in-memory channel, for tests that play the other end by hand."""

    transport = "shm"
    on_device = False

    def __init__(self) -> None:
        self.peer = self
        self._frames: asyncio.Queue[Frame | Exception] = asyncio.Queue()

    @classmethod
    def pair(cls) -> tuple[Pipe, Pipe]:
        a, b = cls(), cls()
        a.peer, b.peer = b, a
        return a, b

    async def send(self, message: Message, payload: Payload = ()) -> None:
        self.peer._frames.put_nowait(Frame(message, tuple(payload)))

    def post(self, *sent: Message | Packed) -> bool:
        for item in sent:
            packed = isinstance(item, Packed)
            frame = Frame(item.header, tuple(item.content)) if packed else Frame(item)
            self.peer._frames.put_nowait(frame)
        return True

    async def flush(self) -> None:
        """What is posted is out."""

    async def recv(self) -> Frame:
        item = await self._frames.get()
        if isinstance(item, Exception):
            self._frames.put_nowait(item)
            raise item
        return item

    def pack(self, chunk: ChunkHeader, arrays: Sequence[np.ndarray]) -> Packed:
        payload = [as_bytes(array) for array in arrays]
        return Packed(replace(chunk, checksum=checksum(payload)), payload)

    async def close(self, *, idle: bool = False) -> None:
        self.peer._frames.put_nowait(ChannelClosed("closed"))
