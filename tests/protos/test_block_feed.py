"""What a router is told of a worker's cached blocks adds up to what is cached."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from protos import block_feed
from protos import worker_pb2 as wire
from protos.block_codec import SnapshotReader, decode_changes, encode_piece
from protos.block_feed import BlockFeed
from protos.errors import WireError

hash_sets = st.frozensets(st.integers(0, 20), max_size=12)


class Told(RuleBasedStateMachine):
    """A feed with room for little, and a router that checks each message by those before."""

    @initialize(cached=hash_sets)
    def begin(self, cached: frozenset[int]) -> None:
        self.cached = set(cached)
        self.feed = BlockFeed(self.cached)
        self.reader = SnapshotReader(most=21)
        self.known: set[int] | None = None

    @rule(hashes=hash_sets)
    def change(self, hashes: frozenset[int]) -> None:
        added, evicted = hashes - self.cached, hashes & self.cached
        self.cached ^= hashes
        self.feed.change(added, evicted)

    @rule()
    def restart(self) -> None:
        self.feed.restart()

    @rule()
    def take_piece(self) -> None:
        piece = self.feed.take_piece()
        if piece is None:
            assert not self.feed.in_pieces
            return
        assert len(piece.hashes) <= block_feed.PIECE_HASHES
        hashes = self.reader.take(over_the_wire(piece))
        if hashes is not None:
            self.known = set(hashes)
            assert len(self.known) == len(hashes)

    @rule()
    def take_changes(self) -> None:
        events = self.feed.take_changes()
        if events is None:
            return
        changes = decode_changes(over_the_wire(events))
        assert changes
        assert len(changes.added) + len(changes.evicted) <= block_feed.MAX_UNSENT_HASHES
        assert self.known is not None, "changes before a snapshot"
        assert self.known.isdisjoint(changes.added)
        assert self.known.issuperset(changes.evicted)
        self.known = (self.known | set(changes.added)) - set(changes.evicted)

    @rule()
    def take_all(self) -> None:
        while self.feed.in_pieces:
            self.take_piece()
        self.take_changes()
        assert self.known == self.cached
        assert self.feed.take_changes() is None


def over_the_wire(message):
    return type(message).FromString(message.SerializeToString())


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_feed, "PIECE_HASHES", 4)
    monkeypatch.setattr(block_feed, "MAX_UNSENT_HASHES", 6)


Told.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestTold = Told.TestCase


def test_nothing_cached_is_one_empty_piece() -> None:
    feed = BlockFeed(set())
    assert feed.take_piece() == wire.CacheSnapshot(last=True)
    assert feed.take_piece() is None


def test_what_came_and_went_is_not_told() -> None:
    cached = {1, 2}
    feed = BlockFeed(cached)
    assert list(feed.take_piece().hashes) == [1, 2]
    feed.change({3}, {1})
    feed.change({1}, {3})
    assert feed.take_changes() is None


def test_too_many_changes_become_a_snapshot() -> None:
    cached: set[int] = set()
    feed = BlockFeed(cached)
    assert feed.take_piece().last
    for each in range(6):
        cached.add(each)
        feed.change({each}, ())
    assert not feed.in_pieces
    cached.add(6)
    feed.change({6}, ())
    assert feed.take_changes() is None
    pieces = [list(feed.take_piece().hashes), list(feed.take_piece().hashes)]
    assert pieces == [[0, 1, 2, 3], [4, 5, 6]]
    assert not feed.in_pieces


def test_a_snapshot_of_more_hashes_than_blocks_is_refused() -> None:
    reader = SnapshotReader(most=3)
    assert reader.take(encode_piece([1, 2], last=False)) is None
    with pytest.raises(WireError, match="4 hashes, 3 are the most"):
        reader.take(encode_piece([3, 4], last=True))
