"""What is counted of transfers, at both ends and over each transport."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import pytest

from kvtransfer import (
    KVTransferError,
    LayoutMismatch,
    TransferAborted,
    TransferCounts,
    TransferNotNeeded,
)
from kvtransfer.books import CAUSES, COUNTED
from kvtransfer.endpoints import parse_endpoint
from kvtransfer.layout import ArraySpec, KVLayout
from kvtransfer.protocol import State
from tests.kvtransfer.harness import (
    CHUNK,
    LAYOUT,
    TRANSPORTS,
    Link,
    claimed,
    eventually,
    linked,
    rest,
)

A = b"transfer-a"
B = b"transfer-b"
TOKEN = LAYOUT.bytes_per_token

everywhere = pytest.mark.parametrize("transport", TRANSPORTS)


def counts(link: Link) -> tuple[TransferCounts, TransferCounts]:
    """Those of source and sink; nothing may be counted by another transport."""
    name = parse_endpoint(link.uris[0]).transport
    source, sink = link.source.counts(), link.sink.counts()
    assert source.keys() | sink.keys() <= {name}
    return source.get(name, TransferCounts()), sink.get(name, TransferCounts())


async def settled(link: Link) -> tuple[TransferCounts, TransferCounts]:
    """The counts once the source serves no transfer; shm keeps its connection for the next."""
    await eventually(lambda: all(s.state is State.CONNECTED for s in link.source._sessions))
    return counts(link)


@everywhere
async def test_a_transfer_is_counted_once_at_each_end(transport: str) -> None:
    async with linked(transport) as link:
        for transfer_id, from_token in ((A, 0), (B, 11)):
            link.publish(transfer_id, 20)
            await link.receive(link.fetch(transfer_id, from_token), transfer_id, from_token)
        for end in await settled(link):
            assert (end.transfers, end.failures) == (2, {})
            assert (end.chunks, end.bytes) == (3 + 2, (20 + 9) * TOKEN)
            assert end.skipped_tokens == 11
            assert end.seconds > 0
            assert (end.overlap_bytes, end.overlap_seconds) == (0, 0)
            assert (end.waiting, end.reads, end.fallbacks) == (0, 0, 0)


@everywhere
async def test_what_travels_while_the_prefill_computes_is_overlap(transport: str) -> None:
    async with linked(transport) as link:
        link.source.offer(A)
        link.source.admit(A, 20)
        fetch = link.fetch(A)
        await fetch.admitted()
        chunks = fetch.chunks()
        link.source.advance(A, CHUNK)
        (await anext(chunks)).release()
        await eventually(lambda: counts(link)[0].chunks == 1)
        link.source.finish(A, b"t")
        await rest(chunks)
        await fetch.close(done=True)
        source, sink = await settled(link)
        assert (source.overlap_bytes, source.bytes) == (CHUNK * TOKEN, 20 * TOKEN)
        assert 0 < source.overlap_seconds < source.seconds
        assert (sink.overlap_bytes, sink.overlap_seconds) == (0, 0)


@everywhere
async def test_a_transfer_without_room_at_its_reader_waits(transport: str) -> None:
    async with linked(transport) as link:
        link.publish(A, 20)
        fetch = link.fetch(A)
        await fetch.admitted()
        await eventually(lambda: [end.waiting for end in counts(link)] == [1, 1])
        link.owner.may_read.clear()
        first = asyncio.ensure_future(anext(fetch.chunks()))
        await link.owner.until(lambda: link.owner.reading == 2)
        assert [end.waiting for end in counts(link)] == [0, 0]
        assert counts(link)[0].reads == 2
        link.owner.may_read.set()
        await first
        await fetch.close(done=False)
        assert (await settled(link))[0].reads == 0


@everywhere
@pytest.mark.parametrize(
    ("ending", "at_source", "at_sink"),
    [("withdraw", "withdrawn", "aborted"), ("cancel", "reader_lost", "cancelled"),
     ("lease", "lease_expired", "timeout"), ("read", "aborted", "aborted")],
)  # fmt: skip
async def test_a_transfer_that_breaks_off_is_counted_by_its_cause(
    transport: str, ending: str, at_source: str, at_sink: str
) -> None:
    async with linked(transport) as link:
        link.publish(A, 100)
        fetch = link.fetch(A)
        await fetch.admitted()
        chunks = fetch.chunks()
        held = await anext(chunks)
        if ending == "withdraw":
            link.source.withdraw(A, "the client left")
        elif ending == "lease":
            (session,) = link.source._sessions
            session.lease_expired(0)
        elif ending == "read":
            link.owner.failure = RuntimeError("device lost")
        if ending != "cancel":
            held.release()
            with pytest.raises(KVTransferError):
                await rest(chunks)
        await fetch.close(done=False)
        await fetch.close(done=False)
        source, sink = await settled(link)
        assert (source.transfers, sink.transfers) == (0, 0)
        assert (source.failures, sink.failures) == ({at_source: 1}, {at_sink: 1})
        assert source.failures.keys() | sink.failures.keys() <= CAUSES
        assert source.seconds > 0
        assert sink.seconds > 0
        assert source.chunks >= sink.chunks >= 1


@everywhere
@pytest.mark.parametrize("claims", ["before", "after"])
async def test_what_is_not_needed_is_no_failure(transport: str, claims: str) -> None:
    async with linked(transport) as link:
        link.source.offer(A)
        fetch = None
        if claims == "before":
            fetch = link.fetch(A)
            await claimed(link)
        link.source.withdraw(A, "the first token was the last", needed=False)
        fetch = fetch or link.fetch(A)
        with pytest.raises(TransferNotNeeded, match="was the last"):
            await fetch.admitted()
        await fetch.close(done=False)
        source, sink = await settled(link)
        assert (source.failures, sink.failures) == ({}, {})


@everywhere
async def test_a_claim_that_comes_too_late_is_not_counted_again(transport: str) -> None:
    async with linked(transport) as link:
        link.source.offer(A)
        link.source.withdraw(A, "the client left")
        fetch = link.fetch(A)
        with pytest.raises(TransferAborted):
            await fetch.admitted()
        await fetch.close(done=False)
        await eventually(lambda: all(s.state is State.CONNECTED for s in link.source._sessions))
        failed = [counts.failures for counts in link.source.counts().values()]
        assert [each for each in failed if each] == [{"withdrawn": 1}]


@everywhere
async def test_a_claim_that_is_refused_is_counted(transport: str) -> None:
    other = KVLayout("other", (ArraySpec("k", "bfloat16", 3, 2, 5),))
    async with linked(transport, sink_layout=other) as link:
        fetch = link.fetch(A)
        with pytest.raises(LayoutMismatch):
            await fetch.admitted()
        await fetch.close(done=False)
        for end in await settled(link):
            assert end.failures == {LayoutMismatch.code: 1}


async def test_what_no_transport_had_a_part_in_is_counted_apart() -> None:
    async with linked("shm", lease_s=0.0) as link:
        link.publish(A, 4)
        await link.owner.until(lambda: link.owner.released)
        link.source.offer(B)
        link.source.withdraw(B, "the client left")
        assert link.source.counts()["none"].failures == {"lease_expired": 1, "withdrawn": 1}
        fetch = link.sink.fetch(["ici://3"], A)
        with pytest.raises(KVTransferError):
            await fetch.admitted()
        await fetch.close(done=False)
        assert link.sink.counts()["none"].failures == {"unreachable": 1}
        assert link.source.counts().keys() | link.sink.counts().keys() <= set(COUNTED)


async def test_a_snapshot_stays_as_it_was() -> None:
    async with linked("shm") as link:
        link.publish(A, 20)
        await link.receive(link.fetch(A), A)
        before = link.sink.counts()["shm"]
        kept = asdict(before)
        link.publish(B, 20)
        fetch = link.fetch(B)
        await fetch.admitted()
        link.source.withdraw(B, "the client left")
        with pytest.raises(TransferAborted):
            await anext(fetch.chunks())
        await fetch.close(done=False)
        assert asdict(before) == kept
        assert link.sink.counts()["shm"].failures == {"aborted": 1}
        assert not [f for f in link.sink._fetches if f.state is State.ADMITTED]
        assert not link.sink._fetches
