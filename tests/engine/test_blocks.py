"""The block pool's counts and refusals, and a sequence's lifecycle."""

from __future__ import annotations

import itertools

import pytest

from engine.blocks import BlockPool, OutOfBlocks
from engine.sequence import TRANSITIONS, Sequence, SequenceState
from engine.types import FinishReason
from tests.engine.helpers import request


def test_blocks_go_round() -> None:
    pool = BlockPool(4, 8)
    first, second = pool.reserve(1), pool.reserve(2)
    assert sorted(first + second) == [0, 1, 2]
    assert (pool.free, pool.running, pool.exported) == (1, 3, 0)
    pool.export(second)
    assert (pool.free, pool.running, pool.exported) == (1, 1, 2)
    pool.check_invariants(running=first, exported=second)
    pool.release(first)
    pool.release(second, exported=True)
    assert (pool.free, pool.running, pool.exported) == (4, 0, 0)
    pool.check_invariants((), ())


def test_the_block_released_last_is_reserved_first() -> None:
    pool = BlockPool(4, 8)
    blocks = pool.reserve(3)
    pool.release([blocks[1]])
    assert pool.reserve(1) == [blocks[1]]


def test_a_reservation_is_whole_or_nothing() -> None:
    pool = BlockPool(4, 8)
    pool.reserve(2)
    with pytest.raises(OutOfBlocks, match="3 blocks wanted, 2 free"):
        pool.reserve(3)
    assert pool.free == 2
    assert pool.reserve(0) == []
    assert len(pool.reserve(2)) == 2


def test_blocks_for_rounds_up() -> None:
    pool = BlockPool(4, 8)
    assert [pool.blocks_for(n) for n in (0, 1, 7, 8, 9, 16)] == [0, 1, 1, 1, 2, 2]


def test_blocks_that_a_step_names_are_free_when_it_has_finished() -> None:
    pool = BlockPool(4, 8)
    first, second, third = pool.reserve(1), pool.reserve(2), pool.reserve(1)
    pool.export(second)
    pool.finished(5)
    pool.release(first, last_step=6)
    pool.release(second, last_step=7, exported=True)
    pool.release(third, last_step=5)
    assert (pool.free, pool.running, pool.exported, pool.retired) == (1, 0, 0, 3)
    pool.check_invariants((), (), named=[*first, *second])
    pool.finished(6)
    assert (pool.free, pool.retired) == (2, 2)
    pool.check_invariants((), (), named=second)
    with pytest.raises(AssertionError, match=r"blocks \[0\] are free, and a dispatched step"):
        pool.check_invariants((), (), named=first)
    pool.finished(7)
    assert (pool.free, pool.retired) == (4, 0)


@pytest.mark.parametrize(("exported", "last_step"), [(False, 0), (True, 0), (False, 1)])
def test_releasing_twice_is_a_fault(exported: bool, last_step: int) -> None:
    pool = BlockPool(4, 8)
    blocks = pool.reserve(1)
    if exported:
        pool.export(blocks)
    pool.release(blocks, last_step, exported=exported)
    with pytest.raises(ValueError, match=f"block {blocks[0]} released twice"):
        pool.release(blocks, exported=exported)
    pool.check_invariants((), ())


def test_only_running_blocks_are_exported() -> None:
    pool = BlockPool(4, 8)
    blocks = pool.reserve(1)
    pool.export(blocks)
    with pytest.raises(ValueError, match="is exported, not running"):
        pool.export(blocks)
    pool.release(blocks, exported=True)
    with pytest.raises(ValueError, match="is free, not running"):
        pool.export(blocks)


def test_shared_blocks_count_once_and_are_free_after_the_last_release() -> None:
    pool = BlockPool(4, 8)
    blocks = pool.reserve(2)
    with pytest.raises(ValueError, match="block 0 is not kept"):
        pool.share(blocks)
    for block in blocks:
        pool.keep(block)
    pool.share(blocks[:1])
    assert (pool.free, pool.running, pool.shares) == (2, 2, 1)
    pool.check_invariants([*blocks, 0], ())
    pool.export(blocks)
    assert (pool.running, pool.exported) == (1, 1)  # block 0 still runs for the other
    pool.check_invariants([0], blocks)
    pool.release([0])
    assert (pool.running, pool.exported, pool.shares) == (0, 2, 0)
    pool.release(blocks, exported=True)
    assert (pool.free, pool.cached, pool.available) == (2, 2, 4)
    pool.check_invariants((), ())


def test_kept_blocks_are_evicted_last_and_from_the_end_of_a_sequence() -> None:
    pool, evicted = BlockPool(4, 8), []
    pool.on_evict = evicted.append
    first, second = pool.reserve(2), pool.reserve(1)
    for block in (*first, *second):
        pool.keep(block)
    pool.release(first)
    pool.release(second)
    pool.reserve(1)
    assert not evicted  # one was free
    pool.reserve(2)
    assert evicted == [first[1], first[0]]
    with pytest.raises(OutOfBlocks, match="2 blocks wanted, 0 free and 1 cached"):
        pool.reserve(2)


def test_a_kept_block_that_a_step_names_can_be_shared_but_not_evicted() -> None:
    pool = BlockPool(1, 8)
    blocks = pool.reserve(1)
    pool.keep(blocks[0])
    pool.release(blocks, last_step=3)
    assert (pool.retired, pool.available) == (1, 0)
    pool.share(blocks)
    assert pool.running == 1
    pool.release(blocks)  # by one that was in no step
    assert (pool.retired, pool.available) == (1, 0)
    pool.check_invariants((), (), named=blocks)
    pool.finished(3)
    assert (pool.cached, pool.available) == (1, 1)


@pytest.mark.parametrize(
    ("running", "exported", "complaint"),
    [
        ([0, 1], [2], "block 2 is running, owners say exported"),
        ([0, 1], [], "block 2 is running, owners say free"),
        ([0, 1, 1, 2], [], "block 1 has two owners"),
        ([0, 1, 2], [2], "block 2 has two owners"),
        ([0, 1, 2, 3], [], "block 3 is free, owners say running"),
    ],
)
def test_the_recount_finds_what_is_wrong(
    running: list[int], exported: list[int], complaint: str
) -> None:
    pool = BlockPool(4, 8)
    assert pool.reserve(3) == [0, 1, 2]
    with pytest.raises(AssertionError, match=complaint):
        pool.check_invariants(running, exported)


@pytest.mark.parametrize(
    ("before", "after"), list(itertools.product(SequenceState, repeat=2)), ids=lambda s: s.value
)
def test_transitions(before: SequenceState, after: SequenceState) -> None:
    s = SequenceState
    legal = {
        (s.WAITING, s.PREFILLING), (s.WAITING, s.IMPORTING), (s.WAITING, s.ENDED),
        (s.PREFILLING, s.DECODING), (s.PREFILLING, s.EXPORTED), (s.PREFILLING, s.ENDED),
        (s.IMPORTING, s.DECODING), (s.IMPORTING, s.ENDED),
        (s.DECODING, s.ENDED), (s.EXPORTED, s.ENDED),
    }  # fmt: skip
    sequence = Sequence.of(request("r", (1,)))
    sequence.state = before
    if (before, after) in legal:
        sequence.enter(after)
        assert sequence.state is after
    else:
        with pytest.raises(ValueError, match=f"{before.value} → {after.value}"):
            sequence.enter(after)
        assert sequence.state is before
    assert TRANSITIONS.keys() == set(SequenceState)


def test_where_a_sequence_ends() -> None:
    sequence = Sequence.of(
        request("r", (1, 2), output=(3,), max_tokens=3, stop_token_ids=frozenset({9}))
    )
    assert sequence.output_count == 1
    assert sequence.most_tokens(max_model_len=100) == 5
    assert sequence.most_tokens(max_model_len=4) == 4
    sequence.tokens.append(9)
    assert sequence.finish_after(9, 100) is FinishReason.STOP
    assert sequence.finish_after(9, 4) is FinishReason.STOP  # a stop token beats the length
    assert sequence.finish_after(8, 100) is None
    assert sequence.finish_after(8, 4) is FinishReason.LENGTH
    sequence.tokens.append(8)
    assert sequence.finish_after(8, 100) is FinishReason.LENGTH
