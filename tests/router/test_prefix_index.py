"""The prefix index against sets of hashes by hand: exact with room, never too long without."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.prefix_index import PrefixIndex

HASHES = [0, 1, 2**63, 2**64 - 1, *range(100, 112)]
WORKERS = [0, 1, 7, 8, 63, 64, 700]
hash_lists = st.lists(st.sampled_from(HASHES), unique=True, max_size=8)
chains = st.lists(st.sampled_from([*HASHES, 5]), max_size=10)
anything = st.lists(st.sampled_from(HASHES), max_size=4)
workers = st.sampled_from(WORKERS)


def prefix_by_hand(held: set[int], chain: list[int]) -> int:
    return next((i for i, each in enumerate(chain) if each not in held), len(chain))


class AgainstSets(RuleBasedStateMachine):
    """What workers tell, taken in by an index with room for `max_blocks` and by sets."""

    max_blocks = len(HASHES)

    @initialize()
    def begin(self) -> None:
        self.index = PrefixIndex(self.max_blocks)
        self.truth: dict[int, set[int]] = {}

    @rule(worker=workers, hashes=hash_lists)
    def replace(self, worker: int, hashes: list[int]) -> None:
        self.index.replace(worker, hashes)
        self.truth[worker] = set(hashes)

    @rule(worker=workers)
    def forget(self, worker: int) -> None:
        self.index.forget(worker)
        self.truth.pop(worker, None)

    @rule(worker=workers, hashes=hash_lists, data=st.data())
    def change(self, worker: int, hashes: list[int], data: st.DataObject) -> None:
        held = self.truth.get(worker, set())
        added = [each for each in hashes if each not in held]
        evicted = data.draw(st.lists(st.sampled_from(sorted(held)), unique=True)) if held else []
        assert self.index.change(worker, added, evicted)
        if worker in self.truth:
            self.truth[worker] = (held | set(added)) - set(evicted)

    @invariant()
    def size(self) -> None:
        known = set().union(*self.truth.values())
        assert len(self.index) == len(known)

    @rule(chain=chains)
    def hits(self, chain: list[int]) -> None:
        hits = self.index.hits(chain, 701)
        by_hand = {w: prefix_by_hand(self.truth.get(w, set()), chain) for w in WORKERS}
        found = {w: int(hits[w]) for w in WORKERS}
        assert found == by_hand
        assert int(hits.sum()) == sum(by_hand.values())


class WithContradictions(AgainstSets):
    """Workers may tell what cannot be: they are forgotten until their next snapshot."""

    @rule(worker=workers, added=anything, evicted=anything)
    def tell(self, worker: int, added: list[int], evicted: list[int]) -> None:
        held, before = self.truth.get(worker), self.index.contradictions
        told = [*added, *evicted]
        sound = held is None or (
            len(set(told)) == len(told) and held.isdisjoint(added) and held.issuperset(evicted)
        )
        if not sound:
            del self.truth[worker]
        elif held is not None:
            self.truth[worker] = (held | set(added)) - set(evicted)
        assert self.index.change(worker, added, evicted) == sound
        assert self.index.contradictions == before + (not sound)
        assert self.index.follows(worker) == (worker in self.truth)


class WithoutRoom(AgainstSets):
    """Fewer hashes are kept than are told."""

    max_blocks = 3

    @invariant()
    def size(self) -> None:
        assert len(self.index) <= self.max_blocks

    @rule(chain=chains)
    def hits(self, chain: list[int]) -> None:
        for worker, found in enumerate(self.index.hits(chain, 701).tolist()):
            assert found <= prefix_by_hand(self.truth.get(worker, set()), chain)


for machine in (AgainstSets, WithContradictions, WithoutRoom):
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAgainstSets = AgainstSets.TestCase
TestWithContradictions = WithContradictions.TestCase
TestWithoutRoom = WithoutRoom.TestCase


@pytest.mark.parametrize(
    ("added", "evicted"),
    [([1], []), ([], [9]), ([5, 5], []), ([], [1, 1]), ([5], [5]), ([9], [1, 8])],
    ids=["added twice", "evicted unknown", "repeats", "evicted twice", "both", "one of two"],
)
def test_a_worker_that_contradicts_itself_is_forgotten(
    added: list[int], evicted: list[int]
) -> None:
    index = PrefixIndex()
    index.replace(0, [1, 2])
    index.replace(1, [1])
    assert not index.change(0, added, evicted)
    assert (index.contradictions, index.follows(0)) == (1, False)
    assert index.change(0, [7], [8]), "nothing more is taken from it"
    assert index.hits([1, 2], 2).tolist() == [0, 1]
    assert len(index) == 1
    index.replace(0, [1, 2])
    assert index.hits([1, 2], 2).tolist() == [2, 1]


def test_what_found_no_room_may_be_evicted() -> None:
    index = PrefixIndex(max_blocks=2)
    index.replace(0, [1, 2, 3])
    assert (len(index), index.left_out) == (2, 1)
    assert index.hits([1, 2, 3], 1) == 2
    assert index.change(0, [], [3])
    assert index.change(0, [4], [1]), "the room of 1 is 4's"
    assert index.hits([4, 2], 1) == 2
    assert not index.change(0, [], [3]), "3 was told once"


def test_rows_are_used_again() -> None:
    index = PrefixIndex()
    for first in range(0, 50_000, 1000):
        index.replace(3, range(first, first + 1000))
    assert len(index) == 1000
    assert len(index._words) <= 2048


def test_a_thousand_workers() -> None:
    rng = random.Random(5)
    chain = [rng.getrandbits(64) for _ in range(200)]
    lengths = [rng.randrange(201) for _ in range(1000)]
    index = PrefixIndex()
    for worker, length in enumerate(lengths):
        index.replace(worker, chain[:length])
    np.testing.assert_array_equal(index.hits(chain, 1000), lengths)
