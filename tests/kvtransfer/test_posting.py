"""What a source sends together, and what it does while a transport is full."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from kvtransfer import KVSource
from kvtransfer.channel import Packed
from kvtransfer.messages import (
    PROTOCOL_VERSION,
    Ack,
    ChunkHeader,
    Claim,
    Done,
    End,
    Message,
    Pull,
    Released,
)
from tests.kvtransfer.harness import CHUNK, LAYOUT, Owner, Pipe, eventually

A = b"transfer-a"


class SlowPipe(Pipe):
    """Says of each post that it is not out, and holds every flush until `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.go.set()
        self.packed: list[int] = []  # first tokens
        self.posts: list[list[type]] = []

    def pack(self, chunk: ChunkHeader, arrays: Sequence[np.ndarray]) -> Packed:
        self.packed.append(chunk.start)
        return super().pack(chunk, arrays)

    def post(self, *sent: Message | Packed) -> bool:
        self.posts.append([type(item) for item in sent])
        super().post(*sent)
        return False

    async def flush(self) -> None:
        await self.go.wait()


async def test_a_chunk_is_packed_while_another_leaves_and_the_end_goes_with_the_last_one():
    owner = Owner(LAYOUT)
    source = KVSource(LAYOUT, owner.read, owner.on_release, chunk_tokens=CHUNK, window=3)
    ours, theirs = SlowPipe.pair()
    session = source.serve(ours)
    source.offer(A)
    source.admit(A, 20)
    source.finish(A, b"t")
    await theirs.send(Claim(PROTOCOL_VERSION, A, 0, LAYOUT))
    await theirs.recv()
    await eventually(lambda: session._flushing is not None and session._flushing.done())
    ours.posts.clear()
    ours.go.clear()
    await theirs.send(Pull(0))
    await eventually(lambda: ours.packed == [0, 8])
    for _ in range(20):
        await asyncio.sleep(0)
    assert ours.packed == [0, 8]
    assert ours.posts == [[Packed]]
    ours.go.set()
    assert [(await theirs.recv()).message.start for _ in range(3)] == [0, 8, 16]
    assert isinstance((await theirs.recv()).message, End)
    assert ours.posts == [[Packed], [Packed], [Packed, End]]
    await theirs.send(Ack((0, 8, 16)))
    await theirs.send(Done())
    assert isinstance((await theirs.recv()).message, Released)
    await source.close()
