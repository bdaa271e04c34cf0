"""What every transport must do: one suite, run over each of them."""

from __future__ import annotations

import asyncio
import gc
import os
import threading

import pytest

from kvtransfer import (
    LayoutMismatch,
    ProtocolError,
    ReleaseCause,
    UnknownTransfer,
)
from kvtransfer.layout import ArraySpec, KVLayout
from tests.kvtransfer.harness import (
    CHUNK,
    LAYOUT,
    MIXED,
    TRANSPORTS,
    claimed,
    linked,
    rest,
)

A = b"transfer-a"
B = b"transfer-b"

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


@pytest.mark.parametrize("layout", [LAYOUT, MIXED], ids=lambda layout: layout.fingerprint)
@pytest.mark.parametrize(
    ("tokens", "from_token", "chunks"),
    [(0, 0, 0), (9, 9, 0), (1, 0, 1), (8, 0, 1), (9, 0, 2), (100, 0, 13), (100, 41, 8)],
)
async def test_kv_arrives_bit_for_bit(transport, layout, tokens, from_token, chunks):
    async with linked(transport, layout) as link:
        link.publish(A, tokens, b"the first token")
        fetch = link.fetch(A, from_token)
        assert await link.receive(fetch, A, from_token) == chunks
        assert fetch.trailer == b"the first token"
        assert link.owner.released == [(A, ReleaseCause.DONE)]


async def test_pull_may_name_another_first_token(transport):
    async with linked(transport) as link:
        link.publish(A, 20)
        fetch = link.fetch(A, 16)
        await fetch.admitted()
        spans = []
        async for chunk in fetch.chunks(from_token=3):
            spans.append((chunk.start, chunk.stop))
            chunk.release()
        assert spans == [(3, 8), (8, 16), (16, 20)]
        await fetch.close(done=True)


async def test_chunks_arrive_before_prefill_has_ended(transport):
    async with linked(transport) as link:
        link.source.offer(A)
        fetch = link.fetch(A)
        link.source.admit(A, 20)
        assert await fetch.admitted() == 20
        chunks = fetch.chunks()
        link.source.advance(A, CHUNK + 3)
        first = await anext(chunks)
        assert (first.start, first.stop) == (0, CHUNK)
        link.check(A, 0, CHUNK, first.arrays)
        first.release()
        assert link.owner.reads == 1  # the second chunk is not computed yet
        link.source.advance(A, 16)
        second = await anext(chunks)
        assert (second.start, second.stop) == (8, 16)
        second.release()
        link.source.finish(A, b"t")
        third = await anext(chunks)
        assert (third.start, third.stop) == (16, 20)
        with pytest.raises(StopAsyncIteration):
            await anext(chunks)
        await fetch.close(done=True)
        assert link.owner.released == [(A, ReleaseCause.DONE)]


async def test_claim_may_come_before_the_offer(transport):
    async with linked(transport) as link:
        fetch = link.fetch(A)
        await claimed(link)
        link.publish(A, 10)
        assert await link.receive(fetch, A) == 2


async def test_nothing_is_read_before_the_pull(transport):
    async with linked(transport) as link:
        link.publish(A, 10)
        fetch = link.fetch(A)
        await fetch.admitted()
        fetch.renew()
        assert link.owner.reads == 0
        await link.receive(fetch, A)


async def test_unknown_transfer(transport):
    async with linked(transport, claim_wait_s=0.02) as link:
        fetch = link.fetch(A)
        with pytest.raises(UnknownTransfer, match=A.hex()):
            await fetch.admitted()
        await fetch.close(done=False)
        assert link.owner.released == []


async def test_over_is_over(transport):
    async with linked(transport) as link:
        link.publish(A, 3)
        await link.receive(link.fetch(A), A)
        # Late words of the owner are ignored, a late claim is answered at once.
        link.source.admit(A, 3)
        link.source.advance(A, 3)
        link.source.finish(A, b"")
        link.source.withdraw(A, "late")
        fetch = link.fetch(A)
        with pytest.raises(UnknownTransfer, match="over"):
            await fetch.admitted()
        await fetch.close(done=False)


async def test_layout_mismatch_names_both(transport):
    other = KVLayout("other", (ArraySpec("k", "bfloat16", 3, 2, 5),))
    async with linked(transport, sink_layout=other) as link:
        link.publish(A, 3)
        fetch = link.fetch(A)
        with pytest.raises(LayoutMismatch, match=r"tiny.*other"):
            await fetch.admitted()
        await fetch.close(done=False)
        assert link.owner.released == []
        link.source.withdraw(A, "")


async def test_second_claim_is_refused_and_harms_nobody(transport):
    async with linked(transport) as link:
        link.publish(A, 20)
        first = link.fetch(A)
        await first.admitted()
        second = link.fetch(A)
        with pytest.raises(ProtocolError, match="claimed already"):
            await second.admitted()
        await second.close(done=False)
        await link.receive(first, A)


async def test_a_reader_may_hold_all_but_one_chunk_of_the_window(transport):
    async with linked(transport, window=8) as link:
        link.publish(A, 200)
        fetch = link.fetch(A)
        await fetch.admitted()
        chunks = fetch.chunks()
        (await anext(chunks)).release()
        async with asyncio.timeout(5):
            held = [await anext(chunks) for _ in range(8)]
        for chunk in held:
            chunk.release()
        await rest(chunks)
        await fetch.close(done=True)


async def test_slow_reader_stalls_the_source(transport):
    async with linked(transport, window=3) as link:
        link.publish(A, 200)
        fetch = link.fetch(A)
        await fetch.admitted()
        chunks = fetch.chunks()
        held = [await anext(chunks) for _ in range(3)]
        more = asyncio.ensure_future(anext(chunks))
        # A whole other transfer passes while this one, out of credit, stands still.
        link.publish(B, 100)
        await link.receive(link.fetch(B), B)
        assert not more.done()
        assert link.owner.reads == 3 + 13
        held.pop(1).release()  # in any order
        held.append(await more)
        assert held[-1].start == 3 * CHUNK
        for chunk in held:
            link.check(A, chunk.start, chunk.stop, chunk.arrays)
            chunk.release()
            chunk.release()
        async for chunk in chunks:
            link.check(A, chunk.start, chunk.stop, chunk.arrays)
            chunk.release()
        await fetch.close(done=True)


async def test_waiting_may_be_cancelled_and_resumed(transport):
    async with linked(transport) as link:
        link.source.offer(A)
        fetch = link.fetch(A)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await fetch.admitted()
        link.source.admit(A, 3)
        link.source.finish(A, b"")
        await link.receive(fetch, A)


async def test_fifty_at_once(transport):
    async with linked(transport, MIXED) as link:
        ids = [bytes([i + 1]) * 16 for i in range(50)]

        async def one(index: int, transfer_id: bytes) -> None:
            fetch = link.fetch(transfer_id)
            if index % 3 == 0:
                link.publish(transfer_id, 60 + index)
                await link.receive(fetch, transfer_id)
            elif index % 3 == 1:
                link.source.offer(transfer_id)
                link.source.admit(transfer_id, 60)
                await fetch.admitted()
                await fetch.close(done=False)
            else:
                link.source.offer(transfer_id)
                link.source.admit(transfer_id, 60)
                for computed in range(0, 60, 7):
                    link.source.advance(transfer_id, computed)
                    await asyncio.sleep(0)
                link.source.finish(transfer_id, b"")
                await link.receive(fetch, transfer_id)

        await asyncio.gather(*(one(i, transfer_id) for i, transfer_id in enumerate(ids)))
        await link.owner.until(lambda: len(link.owner.released) == 50)
        assert dict(link.owner.released) == {
            transfer_id: ReleaseCause.READER_LOST if i % 3 == 1 else ReleaseCause.DONE
            for i, transfer_id in enumerate(ids)
        }


async def test_no_descriptor_thread_or_task_is_left(transport):
    async def round_trip() -> None:
        async with linked(transport) as link:
            for i in range(8):
                link.publish(bytes([i + 1]), 30)
                await link.receive(link.fetch(bytes([i + 1])), bytes([i + 1]))
            link.source.offer(A)
            fetch = link.fetch(A)
            await claimed(link)
            await fetch.close(done=False)

    def counts() -> tuple[int, int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(asyncio.all_tasks())

    await round_trip()
    before = counts()
    rounds = 6
    for _ in range(rounds):
        await round_trip()
    # gRPC ends its own a moment later, hence not equal; one lost in each round would show.
    for was, now in zip(before, counts(), strict=True):
        assert now < was + rounds
