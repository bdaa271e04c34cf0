"""Blocks and queues recounted from the sequences alone, beside what is kept in the books."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from engine.layer_groups import LayerGroup
from engine.sequence import Sequence, SequenceState
from engine.under_way import StepsUnderWay


def check_blocks(
    sequences: Collection[Sequence], groups: tuple[LayerGroup, ...], under_way: StepsUnderWay
) -> None:
    """Raise AssertionError when a block is lost, or owned by another than its pool says."""
    for group in groups:
        running: list[int] = []
        exported: list[int] = []
        for sequence in sequences:
            target = exported if sequence.state is SequenceState.EXPORTED else running
            target.extend(group.held(sequence).tolist())
            table = sequence.tables[group.index]
            if sequence.state is SequenceState.WAITING:
                assert not len(table), f"{sequence.id} waits and owns blocks"
            else:
                there = len(table) * group.pool.block_size
                assert sequence.scheduled <= there, f"{sequence.id} has KV outside its blocks"
        group.pool.check_invariants(running, exported, under_way.blocks(group))
    under_way.check_sequences(sequences)


def check_queue(
    sequences: Collection[Sequence], state: SequenceState, queue: Iterable[Sequence]
) -> None:
    """Raise AssertionError when others are in `queue` than those in `state`, or one is twice."""
    queued = [sequence.id for sequence in queue]
    owners = {s.id for s in sequences if s.state is state}
    assert owners == set(queued), f"the {state.value} queue differs"
    assert len(owners) == len(queued), f"a sequence is {state.value} twice"
