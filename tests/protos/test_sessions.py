"""Sessions over a real gRPC stream: greeting, ownership, loss, load, drain."""

from __future__ import annotations

import asyncio
import dataclasses

import grpc
import pytest

from engine.types import (
    COLOCATED,
    AttemptId,
    Failure,
    FailureCode,
    Load,
    Role,
    SequenceId,
    TokenDelta,
)
from kvtransfer import TransferCounts
from protos import outbox, session_client, session_server
from protos import worker_pb2 as wire
from protos.codec import PROTOCOL_VERSION, RejectedAttempt
from protos.transfer_codec import Transfers
from tests.protos.sessions import (
    INFO,
    drained,
    eventually,
    hello,
    order,
    raw_stream,
    read_up,
    router,
    serving,
    start,
)


def delta(name: str, index: int, *tokens: int) -> TokenDelta:
    return TokenDelta(SequenceId(AttemptId(name, 0), 0), index, tokens)


async def test_a_session_opens_with_what_the_worker_is() -> None:
    async with serving() as (address, _, _), router(address) as mine:
        assert mine.heard.openings == [INFO]
        assert mine.session.info == INFO


async def test_the_first_messages_are_welcome_snapshot_and_load() -> None:
    async with serving() as (address, worker, _), raw_stream(address) as call:
        await call.write(hello())
        kinds = []
        for _ in range(3):
            up = await read_up(call)
            kinds.append(up.WhichOneof("message"))
        assert kinds == ["welcome", "cache_snapshot", "step"]
        assert up.step.load.waiting == worker.told.waiting


@pytest.mark.parametrize(
    "first",
    [hello(PROTOCOL_VERSION + 1), start("a"), wire.Down().SerializeToString()],
    ids=["version", "not hello", "nothing"],
)
async def test_a_wrong_greeting_is_refused(first: bytes) -> None:
    async with serving() as (address, worker, _), raw_stream(address) as call:
        await call.write(first)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await asyncio.wait_for(call.read(), 5)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not worker.started


async def test_garbage_ends_its_session_and_no_other() -> None:
    async with serving() as (address, worker, _), router(address) as mine:
        async with raw_stream(address) as call:
            await call.write(b"\xff\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError):
                await drained(call)
        mine.session.start(order("a"))
        await eventually(lambda: len(worker.started) == 1)
        assert not mine.heard.losses


@pytest.mark.parametrize("second", [hello(), wire.Down(start=wire.Start()).SerializeToString()])
async def test_nonsense_in_an_open_session_aborts_what_it_started(second: bytes) -> None:
    async with serving() as (address, worker, _), raw_stream(address) as call:
        for message in (hello(), start("a"), second):
            await call.write(message)
        with pytest.raises(grpc.aio.AioRpcError):
            await drained(call)
        await eventually(lambda: worker.aborted == [AttemptId("a", 0)])


async def test_one_bad_order_costs_itself_alone() -> None:
    async with serving() as (address, worker, _), router(address) as mine:
        mine.session.start(order("good"))
        bad = order("bad")
        (sequence,) = bad.sequences
        sampling = dataclasses.replace(sequence.sampling, top_p=1e-50)  # 0 on the wire
        sequence = dataclasses.replace(sequence, sampling=sampling)
        mine.session.start(dataclasses.replace(bad, sequences=(sequence,)))
        await eventually(lambda: mine.heard.items("failures"))
        (failure,) = mine.heard.items("failures")
        assert (failure.attempt, failure.code) == (bad.attempt, FailureCode.INVALID)
        assert "top_p" in failure.message
        assert [o.attempt.request_id for o in worker.started] == ["good"]
        assert not worker.aborted


async def test_a_repeated_start_is_taken_once() -> None:
    async with serving() as (address, worker, sessions), router(address) as mine:
        for _ in range(3):
            mine.session.start(order("a"))
        mine.session.start(order("b"))
        await eventually(lambda: sessions.attempts == 2)
        assert worker.started == [order("a"), order("b")]
        assert not mine.heard.items("failures")


async def test_tokens_go_to_the_owner_alone() -> None:
    async with (
        serving() as (address, worker, sessions),
        router(address, "1") as mine,
        router(address, "2") as other,
    ):
        mine.session.start(order("a"))
        other.session.start(order("b"))
        await eventually(lambda: len(worker.started) == 2)
        for tokens in (delta("a", 0, 5), delta("b", 0, 6), delta("nobody", 0, 7)):
            sessions.tokens(tokens)
        await eventually(lambda: mine.heard.items("deltas") and other.heard.items("deltas"))
        assert mine.heard.items("deltas") == [delta("a", 0, 5)]
        assert other.heard.items("deltas") == [delta("b", 0, 6)]


async def test_nobody_aborts_or_takes_over_an_attempt_of_another() -> None:
    async with (
        serving() as (address, worker, sessions),
        router(address, "1") as mine,
        router(address, "2") as other,
    ):
        mine.session.start(order("a"))
        await eventually(lambda: sessions.attempts == 1)
        other.session.abort(AttemptId("a", 0))
        other.session.start(order("a"))
        await eventually(lambda: other.heard.items("failures"))
        (failure,) = other.heard.items("failures")
        assert failure.code is FailureCode.INVALID
        assert not worker.aborted
        sessions.tokens(delta("a", 0, 5))
        await eventually(lambda: mine.heard.items("deltas") == [delta("a", 0, 5)])
        mine.session.abort(AttemptId("a", 0))
        await eventually(lambda: worker.aborted == [AttemptId("a", 0)])


async def test_an_abort_is_obeyed_once_and_unknown_ones_are_ignored() -> None:
    async with serving() as (address, worker, sessions), router(address) as mine:
        mine.session.abort(AttemptId("early", 0))
        mine.session.start(order("a"))
        mine.session.abort(AttemptId("a", 1))
        for _ in range(2):
            mine.session.abort(AttemptId("a", 0))
        mine.session.start(order("last"))
        await eventually(lambda: len(worker.started) == 2)
        assert worker.aborted == [AttemptId("a", 0)]
        sessions.tokens(delta("a", 0, 5))  # late
        sessions.failed(Failure(AttemptId("a", 0), FailureCode.INTERNAL, "late"))
        sessions.tokens(delta("last", 0, 6))
        await eventually(lambda: mine.heard.items("deltas") == [delta("last", 0, 6)])
        assert not mine.heard.items("failures")


async def test_ends_are_told_once() -> None:
    async with serving() as (address, _, sessions), router(address) as mine:
        for name in ("a", "b"):
            mine.session.start(order(name))
        await eventually(lambda: sessions.attempts == 2)
        failure = Failure(AttemptId("a", 0), FailureCode.TRANSFER, "why")
        for _ in range(2):
            sessions.failed(failure)
            sessions.rejected(AttemptId("b", 0), "full")
        await eventually(lambda: mine.heard.items("rejected"))
        assert mine.heard.items("failures") == [failure]
        assert mine.heard.items("rejected") == [RejectedAttempt(AttemptId("b", 0), "full")]
        assert sessions.attempts == 0


async def test_a_router_that_goes_aborts_its_own_attempts() -> None:
    async with serving() as (address, worker, sessions), router(address, "1") as other:
        other.session.start(order("other"))
        async with router(address, "2") as mine:
            for name in ("a", "b", "done"):
                mine.session.start(order(name))
            await eventually(lambda: sessions.attempts == 4)
            sessions.forget(AttemptId("done", 0))
        await eventually(lambda: sessions.attempts == 1)
        assert sorted(worker.aborted) == [AttemptId("a", 0), AttemptId("b", 0)]
        assert mine.heard.losses == ["the router closes the session"]


async def test_load_comes_though_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert session_server.LOAD_INTERVAL_S <= 1
    monkeypatch.setattr(session_server, "LOAD_INTERVAL_S", 0.01)
    async with serving() as (address, worker, _), router(address) as mine:
        await eventually(lambda: len(mine.heard.updates) >= 3)
        assert mine.session.load == worker.told
        worker.told = Load(waiting=9)
        await eventually(lambda: mine.session.load == worker.told)


async def test_transfers_are_told_when_they_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_server, "LOAD_INTERVAL_S", 0.01)
    one = {(Role.PREFILL, "shm"): TransferCounts(bytes=5)}
    async with serving() as (address, worker, _), router(address) as mine:

        def told() -> list[Transfers]:
            return [update.transfers for update in mine.heard.updates if update.transfers]

        await eventually(lambda: len(mine.heard.updates) >= 2)
        assert told() == []
        worker.counted = one
        seen = len(mine.heard.updates)
        await eventually(lambda: len(mine.heard.updates) >= seen + 4)
        assert told() == [one]
        async with router(address, "another") as late:
            await eventually(lambda: bool(late.heard.updates))
            assert late.heard.updates[0].transfers == one


async def test_routers_are_told_at_once_that_a_worker_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_server, "LOAD_INTERVAL_S", 60.0)
    async with serving() as (address, _, sessions), router(address) as mine:
        await eventually(lambda: bool(mine.heard.updates))
        sessions.drain()
        await eventually(lambda: mine.session.draining)
        await eventually(lambda: not sessions.unsent)
        sessions.close()
        await eventually(lambda: mine.heard.losses == ["it has drained"])


async def test_what_a_router_has_not_been_told_yet_is_unsent() -> None:
    async with serving() as (address, worker, sessions), router(address) as mine:
        mine.session.start(order("a"))
        await eventually(lambda: worker.started == [order("a")])
        await eventually(lambda: not sessions.unsent)
        sessions.tokens(delta("a", 0, 5))
        assert sessions.unsent
        await eventually(lambda: mine.heard.items("deltas") == [delta("a", 0, 5)])
        assert not sessions.unsent


async def test_a_draining_worker_rejects_and_ends_what_it_has() -> None:
    async with serving() as (address, worker, sessions), router(address) as mine:
        mine.session.start(order("old"))
        mine.session.drain()
        mine.session.start(order("new"))
        await eventually(lambda: mine.heard.items("rejected"))
        (rejected,) = mine.heard.items("rejected")
        assert rejected.attempt == AttemptId("new", 0)
        assert "draining" in rejected.reason
        assert mine.session.draining
        sessions.tokens(delta("old", 0, 5))
        await eventually(lambda: mine.heard.items("deltas") == [delta("old", 0, 5)])
        assert worker.started == [order("old")]
        await eventually(lambda: not sessions.unsent)
        assert worker.drains_asked == 1, "the answer to a drain asks for none"


async def test_a_drain_lasts_until_a_router_that_writes_has_read_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its writes into a session that has ended would hide from it whatever came before the end."""
    monkeypatch.setattr(session_server, "LOAD_INTERVAL_S", 0.01)
    held, reads, read = asyncio.Event(), asyncio.Event(), session_client._read

    async def late(stream: grpc.aio.StreamStreamCall) -> object:
        held.set()
        await reads.wait()
        return await read(stream)

    async with serving() as (address, worker, sessions), router(address) as mine:
        await eventually(lambda: bool(mine.heard.updates))
        monkeypatch.setattr(session_client, "_read", late)
        await held.wait()
        sessions.drain()
        before = worker.loads_told
        await eventually(lambda: worker.loads_told >= before + 2)
        monkeypatch.setattr(session_server, "LOAD_INTERVAL_S", 60.0)
        (session,) = sessions._sessions
        await eventually(lambda: not session.writing)
        assert sessions.unsent, "it has been sent, and not been read"
        assert not mine.session.draining
        reads.set()
        await eventually(lambda: not sessions.unsent)
        sessions.close()
        mine.session.start(order("into the end"))
        await eventually(lambda: bool(mine.heard.losses))
        assert mine.session.draining


async def test_a_router_that_never_answers_holds_no_drain_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_server, "ACKNOWLEDGED_WITHIN_S", 0.05)
    async with serving() as (address, _, sessions), raw_stream(address) as call:
        await call.write(hello())
        await read_up(call)
        await eventually(lambda: not sessions.unsent)
        sessions.drain()
        assert sessions.unsent
        await eventually(lambda: not sessions.unsent, 1)


@pytest.mark.parametrize("roles", [Role.PREFILL, COLOCATED])
async def test_an_order_for_another_role_fails(roles: Role) -> None:
    async with serving() as (address, worker, _), router(address) as mine:
        wrong = order("a", roles=roles)
        if roles == COLOCATED:
            (sequence,) = wrong.sequences
            sequence = dataclasses.replace(sequence, transfer_id=b"")
            wrong = dataclasses.replace(wrong, sequences=(sequence,))
        mine.session.start(wrong)
        await eventually(lambda: mine.heard.items("failures"))
        (failure,) = mine.heard.items("failures")
        assert failure.code is FailureCode.INVALID
        assert not worker.started


async def test_a_router_that_does_not_read_loses_its_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox, "MAX_UNSENT_TOKENS", 10)
    async with serving() as (address, worker, sessions), router(address) as mine:
        mine.session.start(order("a"))
        await eventually(lambda: sessions.attempts == 1)
        for index in range(11):  # the loop gives the stream no chance to send
            sessions.tokens(delta("a", index, index))
        await eventually(lambda: worker.aborted == [AttemptId("a", 0)])
        await eventually(lambda: mine.heard.losses == ["closed by the worker"])
