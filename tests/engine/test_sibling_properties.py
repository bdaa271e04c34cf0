"""Any order of commands and steps, where prompts have choices: nobody computes what one has."""

from __future__ import annotations

import dataclasses
import itertools

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import rule

from engine.events import Add, Admitted, Event
from engine.types import AttemptId, Load, Role, SequenceId
from tests.engine.helpers import LIMITS, OneByOne, answer
from tests.engine.test_scheduler_properties import (
    BLOCK_SIZE,
    Cached,
    EngineMachine,
    Served,
    pick,
)


class SiblingsMachine(EngineMachine):
    """Every prompt is a group's, which may get more choices at any time, without a prefix cache."""

    def group_of(self, number: int) -> bytes:
        return b"%016d" % number

    @rule(index=pick, choices=st.integers(1, 3), produced=st.integers(0, 3))
    def add_siblings(self, index: int, choices: int, produced: int) -> None:
        """Some of them are resumed, and so have more tokens than the prompt."""
        first = self.choose(index)
        if first is None or first.impostor:
            return
        roles = first.request.roles
        whole, _ = answer(first.request)
        for number in range(choices):
            each = next(self.numbers)
            resumed = whole[: min(produced * number, len(whole) - 1)]
            asked = dataclasses.replace(
                first.request,
                id=SequenceId(AttemptId(f"r{each}", 0), number),
                output=resumed,
                transfer_id=first.request.transfer_id and b"t%d" % each,
            )
            assert asked.roles is roles
            self.served[f"r{each}"] = Served(asked, list(resumed))
            self.engine.submit(Add(asked))

    def take(self, event: Event) -> None:
        if isinstance(event, Admitted):
            served = self.served[event.id.attempt.request_id]
            assert event.reused >= self.had_by_siblings(served)
        super().take(event)

    def had_by_siblings(self, served: Served) -> int:
        """Tokens, in whole blocks, whose KV a sibling has that is here still."""
        known = served.request.known_tokens
        most = len(known) - (served.request.roles is not Role.DECODE)
        best = 0
        for other in self.served.values():
            asked = other.request
            complete = len(other.output) > len(asked.output)
            if asked.group == served.request.group and complete and not other.ended:
                pairs = zip(known, asked.known_tokens, strict=False)
                same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
                best = max(best, sum(1 for _ in same))
        return min(best, most) // BLOCK_SIZE * BLOCK_SIZE

    def check_cache(self, load: Load) -> None:
        """Nobody is told of what siblings share."""
        assert not self.cached


class ChunkingSiblingsMachine(SiblingsMachine):
    max_batch_tokens = LIMITS["max_seqs"] + 3


class OneByOneSiblingsMachine(SiblingsMachine):
    pace = OneByOne

    def one_step(self) -> None:
        super().one_step()
        if self.engine._running is not None:
            super().one_step()


class CachedSiblingsMachine(Cached, SiblingsMachine):
    hit_tokens = 2 * BLOCK_SIZE


TestSiblingsMachine = SiblingsMachine.TestCase
TestChunkingSiblingsMachine = ChunkingSiblingsMachine.TestCase
TestOneByOneSiblingsMachine = OneByOneSiblingsMachine.TestCase
TestCachedSiblingsMachine = CachedSiblingsMachine.TestCase
for case in (
    TestSiblingsMachine,
    TestChunkingSiblingsMachine,
    TestOneByOneSiblingsMachine,
    TestCachedSiblingsMachine,
):
    case.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
