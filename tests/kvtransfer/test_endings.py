"""How a transfer may end early, by either end and in every state, over each transport."""

from __future__ import annotations

import asyncio

import pytest

from kvtransfer import (
    Fetch,
    ReleaseCause,
    SourceUnreachable,
    TransferAborted,
    TransferTimeout,
)
from kvtransfer.fetch import CONFIRM_S
from kvtransfer.protocol import State
from tests.kvtransfer.harness import (
    CHUNK,
    TRANSPORTS,
    Link,
    claimed,
    eventually,
    linked,
)

A = b"transfer-a"
B = b"transfer-b"

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


async def reach(link: Link, state: State):
    """A fetch of A, with the source's session, in `state`."""
    link.source.offer(A)
    fetch = link.fetch(A)
    await claimed(link)
    if state is State.CLAIMED:
        return fetch, None
    link.source.admit(A, 20)
    await fetch.admitted()
    if state is State.ADMITTED:
        return fetch, None
    chunks = fetch.chunks()
    link.source.advance(A, CHUNK)
    held = await anext(chunks)
    if state is State.ENDED:
        held.release()
        link.source.finish(A, b"t")
        async for chunk in chunks:
            chunk.release()
    assert fetch.state is state
    return fetch, chunks


async def settled(fetch: Fetch) -> None:
    """Asks until the fetch's failure shows."""
    async with asyncio.timeout(5):
        while True:
            await fetch.admitted()
            await asyncio.sleep(0)


LIVE = [State.CLAIMED, State.ADMITTED, State.STREAMING, State.ENDED]


@pytest.mark.parametrize("state", LIVE)
async def test_withdraw_in_each_state(transport, state):
    async with linked(transport) as link:
        fetch, chunks = await reach(link, state)
        link.source.withdraw(A, "the client left")
        link.source.withdraw(A, "again")
        assert link.source.active() == 0
        if state is State.ENDED:
            await fetch.close(done=True)  # it had everything already
        else:
            with pytest.raises(TransferAborted, match="the client left"):
                await anext(chunks) if chunks else await settled(fetch)
            await fetch.close(done=False)
        late = link.fetch(A)
        with pytest.raises(TransferAborted, match="the client left"):
            await late.admitted()
        await late.close(done=False)
        assert link.owner.released == []


@pytest.mark.parametrize("state", LIVE)
async def test_cancel_in_each_state(transport, state):
    async with linked(transport) as link:
        fetch, _ = await reach(link, state)
        await fetch.close(done=False)
        await fetch.close(done=False)
        await link.owner.until(lambda: link.owner.released)
        assert link.owner.released == [(A, ReleaseCause.READER_LOST)]
        with pytest.raises((TransferAborted, RuntimeError)):
            await anext(fetch.chunks())


@pytest.mark.parametrize("state", LIVE)
async def test_lost_connection_in_each_state(transport, state):
    async with linked(transport) as link:
        fetch, _ = await reach(link, state)
        await fetch._channel.close()  # as a process that dies would
        await link.owner.until(lambda: link.owner.released)
        assert link.owner.released == [(A, ReleaseCause.READER_LOST)]
        await fetch.close(done=False)


@pytest.mark.parametrize("state", LIVE[:3])
async def test_lost_source_in_each_state(transport, state):
    async with linked(transport) as link:
        fetch, chunks = await reach(link, state)
        (session,) = link.source._sessions
        session.hang_up()
        with pytest.raises(SourceUnreachable, match="broke"):
            await anext(chunks) if chunks else await settled(fetch)
        await fetch.close(done=False)


async def test_done_before_the_end_cancels(transport):
    async with linked(transport) as link:
        fetch, _ = await reach(link, State.STREAMING)
        with pytest.raises(RuntimeError, match="before the last chunk"):
            await fetch.close(done=True)
        await link.owner.until(lambda: link.owner.released)
        assert link.owner.released == [(A, ReleaseCause.READER_LOST)]


async def test_fetch_closed_at_once(transport):
    async with linked(transport) as link:
        link.source.offer(A)
        await link.fetch(A).close(done=False)
        link.source.withdraw(A, "")


@pytest.mark.parametrize("ending", ["withdraw", "cancel", "lease"])
async def test_release_waits_for_a_running_read(transport, ending):
    async with linked(transport, lease_s=0.02) as link:
        link.owner.may_read.clear()
        link.source.offer(A)
        link.source.admit(A, 100)
        link.source.advance(A, 50)
        fetch = link.fetch(A)
        await fetch.admitted()
        chunks = fetch.chunks()
        pending = asyncio.ensure_future(anext(chunks))
        await link.owner.until(lambda: link.owner.reading == 2)
        (session,) = link.source._sessions
        if ending == "withdraw":
            link.source.withdraw(A, "gone")
        elif ending == "cancel":
            await fetch.close(done=False)
        else:
            link.source.finish(A, b"")
            session.lease_expired(0)
        await eventually(lambda: session._ending is not None)
        assert link.owner.released == []
        assert link.owner.reading == 2
        link.owner.may_read.set()
        with pytest.raises((TransferAborted, TransferTimeout)):
            await pending
        await fetch.close(done=False)
        await session.task
        assert link.owner.reads == 2
        assert len(link.owner.released) == (ending != "withdraw")


@pytest.mark.parametrize("claims", [False, True])
async def test_lease_expires_without_progress(transport, claims):
    async with linked(transport, lease_s=0.3) as link:
        link.publish(A, 100)
        fetch = link.fetch(A) if claims else None
        if fetch:
            await fetch.admitted()
            held = await anext(fetch.chunks())
        await link.owner.until(lambda: link.owner.released)
        assert link.owner.released == [(A, ReleaseCause.LEASE_EXPIRED)]
        if fetch:
            link.check(A, held.start, held.stop, held.arrays)  # exact still
            with pytest.raises(TransferTimeout, match="lease"):
                await settled(fetch)
            link.check(A, held.start, held.stop, held.arrays)
            await fetch.close(done=False)


async def test_lease_does_not_run_before_the_owner_has_finished(transport):
    async with linked(transport, lease_s=0.0) as link:
        link.source.offer(A)
        link.source.admit(A, 4)
        link.publish(B, 4)
        await link.owner.until(lambda: link.owner.released)
        assert link.owner.released == [(B, ReleaseCause.LEASE_EXPIRED)]
        link.source.withdraw(A, "")


async def test_read_that_raises_fails_its_transfer_only(transport, caplog):
    async with linked(transport) as link:
        link.owner.failure = RuntimeError("device lost")
        link.publish(A, 20)
        fetch = link.fetch(A)
        await fetch.admitted()
        with pytest.raises(TransferAborted, match="device lost"):
            await anext(fetch.chunks())
        await fetch.close(done=False)
        assert link.owner.released == [(A, ReleaseCause.FAILED)]
        link.owner.failure = None
        link.publish(B, 20)
        await link.receive(link.fetch(B), B)


async def test_read_of_a_wrong_shape_fails(transport):
    async with linked(transport) as link:

        async def read_less(*asked: object) -> list[object]:
            return [array[:, :-1] for array in await link.owner.read(*asked)]

        link.source.read = read_less
        link.publish(A, 20)
        fetch = link.fetch(A)
        await fetch.admitted()
        with pytest.raises(Exception, match="layout says"):
            await anext(fetch.chunks())
        await fetch.close(done=False)
        assert link.owner.released == [(A, ReleaseCause.FAILED)]


async def test_source_that_shuts_down(transport):
    async with linked(transport) as link:
        fetch, chunks = await reach(link, State.STREAMING)
        await link.source.close()
        with pytest.raises(TransferAborted, match="shutting down"):
            await anext(chunks)
        await fetch.close(done=False)


async def test_a_lease_that_ends_beside_done_holds_nobody_up(transport):
    async with linked(transport) as link:
        fetch, _ = await reach(link, State.ENDED)
        (session,) = link.source._sessions
        session.lease_expired(30)
        async with asyncio.timeout(CONFIRM_S / 2):  # the longest wait for what does not come
            await fetch.close(done=True)
        assert fetch.state is State.DONE
