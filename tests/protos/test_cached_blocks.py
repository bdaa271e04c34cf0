"""Cached blocks over a session: a snapshot first, then changes, to every router."""

from __future__ import annotations

import asyncio

import pytest

from engine.types import AttemptId, SequenceId, TokenDelta
from protos import block_feed, session_server
from protos import worker_pb2 as wire
from protos.block_codec import BlockChanges
from tests.protos.sessions import (
    Router,
    eventually,
    hello,
    order,
    raw_stream,
    read_up,
    router,
    serving,
)


def changes(one: Router) -> list[BlockChanges]:
    return [update.blocks for update in one.heard.updates if update.blocks]


async def test_a_session_begins_with_all_that_is_cached() -> None:
    async with serving() as (address, _, sessions):
        sessions.cache_changed({1, 2**64 - 1}, set())
        async with router(address) as mine:
            await eventually(lambda: len(mine.heard.snapshots) == 1)
            assert sorted(mine.heard.snapshots[0]) == [1, 2**64 - 1]
            assert not changes(mine)


async def test_changes_come_to_every_router_without_waiting_for_a_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_server, "LOAD_INTERVAL_S", 60)
    async with (
        serving() as (address, _, sessions),
        router(address, "a") as mine,
        router(address, "b") as other,
    ):
        await eventually(lambda: len(mine.heard.snapshots) == len(other.heard.snapshots) == 1)
        sessions.cache_changed({1, 2}, set())
        sessions.cache_changed({3}, {1})
        for each in (mine, other):
            await eventually(lambda each=each: bool(changes(each)))
            assert [(set(c.added), c.evicted) for c in changes(each)] == [({2, 3}, ())]
        sessions.cache_changed(set(), {2})
        await eventually(lambda: changes(mine)[1:] == [BlockChanges((), (2,))])


async def test_changes_ride_with_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_server, "BLOCK_NEWS_WITHIN_S", 60)
    async with serving() as (address, worker, sessions), router(address) as mine:
        mine.session.start(order("a"))
        await eventually(lambda: len(worker.started) == 1 and bool(mine.heard.snapshots))
        sessions.tokens(TokenDelta(SequenceId(AttemptId("a", 0), 0), 0, (5,)))
        sessions.cache_changed({7}, set())
        await eventually(lambda: bool(changes(mine)))
        (update,) = (u for u in mine.heard.updates if u.blocks)
        assert (len(update.deltas), update.blocks) == (1, BlockChanges((7,), ()))


async def test_what_is_no_change_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_server, "BLOCK_NEWS_WITHIN_S", 0.0)
    async with serving() as (address, _, sessions), router(address) as mine:
        sessions.cache_changed({1}, {9})
        await eventually(lambda: bool(changes(mine)))
        sessions.cache_changed({1}, {1, 9})
        sessions.cache_changed({2}, set())
        await eventually(lambda: len(changes(mine)) == 2)
        assert changes(mine) == [BlockChanges((1,), ()), BlockChanges((2,), ())]


async def test_a_router_may_ask_for_a_snapshot_again() -> None:
    async with serving() as (address, _, sessions), router(address) as mine:
        await eventually(lambda: mine.heard.snapshots == [[]])
        sessions.cache_changed({1, 2}, set())
        mine.session.resync()
        await eventually(lambda: len(mine.heard.snapshots) == 2)
        assert sorted(mine.heard.snapshots[1]) == [1, 2]


async def test_steps_go_between_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_feed, "PIECE_HASHES", 2)
    async with serving() as (address, _, sessions):
        sessions.cache_changed(set(range(5)), set())
        async with raw_stream(address) as call:
            await call.write(hello())
            ups = [await read_up(call) for _ in range(7)]
    kinds = [up.WhichOneof("message") for up in ups]
    assert kinds == ["welcome", *("cache_snapshot", "step") * 3]
    assert [len(up.cache_snapshot.hashes) for up in ups[1::2]] == [2, 2, 1]
    assert [up.cache_snapshot.last for up in ups[1::2]] == [False, False, True]


async def test_more_hashes_than_blocks_end_the_session() -> None:
    async with serving() as (address, _, sessions):
        sessions.cache_changed(set(range(51)), set())  # the worker has 50 blocks
        mine = Router(address, "router")
        try:
            await eventually(lambda: bool(sessions._sessions))
            await eventually(lambda: not sessions._sessions)
            assert not mine.heard.snapshots
        finally:
            await mine.close()


async def test_a_resync_before_hello_is_refused() -> None:
    async with serving() as (address, _, sessions), raw_stream(address) as call:
        await call.write(wire.Down(resync=wire.Resync()).SerializeToString())
        await asyncio.wait_for(call.wait_for_connection(), 5)
        with pytest.raises(Exception, match="not Hello"):
            await asyncio.wait_for(call.read(), 5)
        assert not sessions._sessions
