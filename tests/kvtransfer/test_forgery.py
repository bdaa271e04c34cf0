"""A peer that lies, repeats itself or sends anything at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtransfer import (
    Chunk,
    Fetch,
    IntegrityError,
    KVSource,
    KVTransferError,
    ProtocolError,
    ReleaseCause,
    SharedMemoryFull,
    TransferAborted,
    TransferTimeout,
)
from kvtransfer.books import TransferBooks
from kvtransfer.channel import ChannelClosed
from kvtransfer.endpoints import Endpoint
from kvtransfer.messages import (
    PROTOCOL_VERSION,
    Ack,
    Admitted,
    Cancel,
    ChunkHeader,
    Claim,
    Done,
    End,
    Failed,
    Pull,
    Renew,
)
from kvtransfer.payload import checksum, chunk_header
from kvtransfer.protocol import TRANSITIONS, State
from kvtransfer.route import AvoidedEndpoints, Route
from tests.kvtransfer.harness import CHUNK, LAYOUT, Owner, Pipe, as_bytes

A = b"transfer-a"
CLAIM = Claim(PROTOCOL_VERSION, A, 0, LAYOUT)


def open_fetch(pipe: Pipe, *, stall_timeout_s: float = 5.0) -> Fetch:
    async def connect(_: Endpoint) -> Pipe:
        return pipe

    route = Route([Endpoint("shm", "/pipe")], "", connect, AvoidedEndpoints(1.0), TransferBooks())
    return Fetch(route, LAYOUT, A, 0, admit_timeout_s=5.0, stall_timeout_s=stall_timeout_s)


def forge_chunk(start: int, stop: int, slot: int = 0) -> tuple[ChunkHeader, list[memoryview]]:
    payload = [as_bytes(array) for array in Owner(LAYOUT).kv(A, start, stop)]
    return chunk_header(LAYOUT, slot, start, stop, checksum(payload)), payload


async def taken(fetch: Fetch) -> list[tuple[int, int]]:
    await fetch.admitted()
    spans = []
    async for chunk in fetch.chunks():
        spans.append((chunk.start, chunk.stop))
        chunk.release()
    return spans


async def drain(first: asyncio.Future[Chunk], chunks: AsyncIterator[Chunk]) -> None:
    """Takes chunks without releasing any."""
    await first
    async for _ in chunks:
        pass


GOOD, PAYLOAD = forge_chunk(0, 8)


@pytest.mark.parametrize(
    ("frames", "error", "says"),
    [
        ([(replace(GOOD, checksum=1), PAYLOAD)], IntegrityError, "checksum"),
        ([(GOOD, [PAYLOAD[1], PAYLOAD[0]])], IntegrityError, "checksum"),
        ([forge_chunk(1, 8)], IntegrityError, "expected tokens from 0"),
        ([forge_chunk(0, 8), forge_chunk(0, 8)], IntegrityError, "expected tokens from 8"),
        ([forge_chunk(0, 8), forge_chunk(16, 20)], IntegrityError, "expected tokens from 8"),
        ([forge_chunk(0, 21)], IntegrityError, "up to 20"),
        ([(replace(GOOD, group=1), PAYLOAD)], IntegrityError, "group 1"),
        ([(replace(GOOD, layers=(0, 2)), PAYLOAD)], IntegrityError, "layers"),
        ([(replace(GOOD, heads=(1, 2)), PAYLOAD)], IntegrityError, "heads"),
        ([(replace(GOOD, arrays=GOOD.arrays[::-1]), PAYLOAD)], IntegrityError, "layout"),
        ([forge_chunk(0, 8), (End(b""), [])], IntegrityError, "ended at token 8 of 20"),
        ([forge_chunk(i, i + 1) for i in range(3)], ProtocolError, "more than 2 chunks"),
        ([(Admitted(20, 2), [])], ProtocolError, "not allowed"),
        ([(Done(), [])], ProtocolError, "not a source's"),
        ([(Failed("memory_full", "no room"), [])], SharedMemoryFull, "no room"),
        ([(Failed("news", "to me"), [])], TransferAborted, "news: to me"),
    ],
)
async def test_a_source_that_lies(frames, error, says):
    ours, theirs = Pipe.pair()
    fetch = open_fetch(ours)
    assert (await theirs.recv()).message == CLAIM
    await theirs.send(Admitted(20, 2))
    await fetch.admitted()
    chunks = fetch.chunks()
    first = asyncio.ensure_future(anext(chunks))
    assert (await theirs.recv()).message == Pull(0)
    for frame in frames:
        await theirs.send(*frame)
    with pytest.raises(error, match=says):
        await drain(first, chunks)
    with pytest.raises(error, match=says):
        await fetch.admitted()
    assert fetch.state is State.FAILED
    await fetch.close(done=False)
    await answer(theirs)  # until this end has hung up


async def test_a_source_that_says_nothing():
    ours, theirs = Pipe.pair()
    fetch = open_fetch(ours, stall_timeout_s=0.02)
    await theirs.send(Admitted(20, 2))
    with pytest.raises(TransferTimeout, match="no chunk"):
        await taken(fetch)
    with pytest.raises(RuntimeError, match="after the last chunk"):
        _ = fetch.trailer
    await fetch.close(done=False)
    await fetch.close(done=False)


async def test_a_chunk_before_the_pull():
    ours, theirs = Pipe.pair()
    fetch = open_fetch(ours)
    await theirs.send(Admitted(20, 2))
    await theirs.send(*forge_chunk(0, 8))
    with pytest.raises(ProtocolError, match="not allowed"):
        await taken(fetch)
    await fetch.close(done=False)


async def test_from_token_beyond_the_end():
    ours, theirs = Pipe.pair()
    fetch = open_fetch(ours)
    await theirs.send(Admitted(20, 2))
    await fetch.admitted()
    with pytest.raises(ValueError, match="21 of 20"):
        await anext(fetch.chunks(from_token=21))
    await fetch.close(done=False)


def serve(owner: Owner, **options: float) -> tuple[KVSource, Pipe]:
    source = KVSource(LAYOUT, owner.read, owner.on_release, chunk_tokens=CHUNK, window=2, **options)
    ours, theirs = Pipe.pair()
    source.serve(ours)
    return source, theirs


async def answer(pipe: Pipe) -> list[object]:
    """All that the source sends until it hangs up, as a reader hangs up on an error."""
    messages: list[object] = []
    try:
        while True:
            messages.append((await pipe.recv()).message)
            if isinstance(messages[-1], Failed):
                await pipe.close()
    except ChannelClosed:
        return messages


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([Pull(0)], "Pull is not allowed in state 'connected'"),
        ([Done()], "Done is not allowed"),
        ([End(b"")], "not a reader's"),
        ([CLAIM, CLAIM], "Claim is not allowed"),
        ([CLAIM, Ack((0,))], "Ack is not allowed"),
        ([CLAIM, "admitted", Pull(101)], "101 of 100"),
        ([CLAIM, "admitted", Pull(0), Done()], "Done is not allowed in state 'streaming'"),
    ],
)
async def test_a_reader_out_of_turn_is_told_and_dropped(messages, says):
    owner = Owner(LAYOUT)
    source, pipe = serve(owner)
    source.offer(A)
    source.admit(A, 100)
    for message in messages:
        if message == "admitted":
            assert isinstance((await pipe.recv()).message, Admitted)
        else:
            await pipe.send(message)
    last = (await answer(pipe))[-1]
    assert isinstance(last, Failed)
    assert last.code == "protocol"
    assert says in last.message
    await source.close()


async def test_repeated_and_forged_messages_are_ignored():
    owner = Owner(LAYOUT)
    source, pipe = serve(owner)
    source.offer(A)
    source.admit(A, 40)
    source.finish(A, b"t")
    await pipe.send(CLAIM)
    await pipe.recv()
    await pipe.send(Pull(0))
    # Credit for chunks that were not sent, or twice for one, must not be given.
    for message in (Ack((0,)), Ack((8,)), Ack((999,)), Pull(16), Renew()):
        await pipe.send(message)
    for start in (0, 8):
        assert (await pipe.recv()).message.start == start
    await pipe.send(Ack((0,)))
    await pipe.send(Ack((0,)))
    assert (await pipe.recv()).message.start == 16
    assert owner.reads == 3
    await pipe.send(Cancel())
    await answer(pipe)
    assert owner.released == [(A, ReleaseCause.READER_LOST)]


async def test_a_reader_that_claims_nothing():
    source, pipe = serve(Owner(LAYOUT), claim_wait_s=0.01)
    (failed,) = await answer(pipe)
    assert isinstance(failed, Failed)
    assert failed.code == "timeout"
    await source.close()


WORDS = st.sampled_from(
    [CLAIM, Pull(0), Pull(5), Ack((0,)), Ack((8,)), Renew(), Done(), Cancel(), End(b"")]
)
DEEDS = st.sampled_from(["offer", "admit", "advance", "finish", "withdraw", "tick", "hang up"])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(WORDS | DEEDS, max_size=25))
def test_any_sequence_ends_in_one_release(script):
    async def play() -> None:
        owner = Owner(LAYOUT)
        source, pipe = serve(owner)
        offered = withdrawn = False
        for item in script:
            if not isinstance(item, str):
                await pipe.send(item)
            elif item == "tick":
                for _ in range(5):
                    await asyncio.sleep(0)
            elif item == "hang up":
                await pipe.close()
            elif item == "offer":
                if not offered:
                    source.offer(A)
                offered = True
            elif item == "withdraw":
                withdrawn |= source.active() == 1
                source.withdraw(A, "why")
            else:
                deed = {
                    "admit": lambda: source.admit(A, 30),
                    "advance": lambda: source.advance(A, 20),
                    "finish": lambda: source.finish(A, b"t"),
                }[item]
                try:
                    deed()
                except ValueError:
                    assert item != "admit"  # out of the owner's order
        await pipe.close()
        async with asyncio.timeout(5):
            await answer(pipe)
        unclaimed = source.active() == 1
        assert all(transfer.session is None for transfer in source._transfers.values())
        await source.close()
        assert source.active() == 0
        assert not owner.overlapped
        assert len(owner.released) == (offered and not withdrawn and not unclaimed)

    asyncio.run(play())


def test_every_state_but_the_last_ones_can_be_left():
    for state in State:
        leaves = [after for (before, _), after in TRANSITIONS.items() if before is state]
        assert (not leaves) == (state.over and state is not State.DONE)
    assert set(TRANSITIONS.values()) | {State.CONNECTED} == set(State)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("offer", (b"",)),
        ("offer", (A,)),
        ("admit", (A, -1)),
        ("advance", (A, 1)),
        ("finish", (A, b"")),
        ("finish", (A, b"x" * (2 << 20))),
    ],
)
async def test_an_owner_out_of_order_is_told(method, arguments):
    owner = Owner(LAYOUT)
    source = KVSource(LAYOUT, owner.read, owner.on_release, chunk_tokens=CHUNK)
    source.offer(A)
    with pytest.raises(ValueError, match=r"."):
        getattr(source, method)(*arguments)
    source.withdraw(A, "")
    with pytest.raises(ValueError, match="fit a frame"):
        KVSource(LAYOUT, owner.read, owner.on_release, chunk_tokens=1 << 20)


def test_errors_are_one_tree():
    assert all(issubclass(e, KVTransferError) for e in (IntegrityError, SharedMemoryFull))
