"""Few KV blocks: who is admitted, who is preempted, and that all come to their end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from engine.engine import Engine
from engine.events import Add, Admitted, BeginDecode, Event, KVWritten, WriteKV
from engine.pace import Pace
from engine.types import (
    COLOCATED,
    AttemptId,
    Failure,
    FailureCode,
    Role,
    SequenceId,
    SequenceRequest,
    TokenDelta,
)
from tests.engine.helpers import (
    LIMITS,
    Ahead,
    OneByOne,
    answer,
    kv_of,
    make_engine,
    output_of,
    request,
    run,
    run_until,
)

BLOCK_SIZE = 4


def preempted(events: Iterable[Event]) -> list[str]:
    """The names of those that lost their blocks, in order."""
    failures = [e for e in events if isinstance(e, Failure)]
    assert all(failure.code is FailureCode.PREEMPTED for failure in failures)
    return [failure.attempt.request_id for failure in failures]


def test_what_is_admitted_needs_no_blocks_for_its_longest_answer() -> None:
    """Ten blocks each at the end, of 12; but both end soon, by a token."""
    engine = make_engine(num_blocks=12, block_size=BLOCK_SIZE)
    for name in ("a", "b"):
        asked = request(name, (1, 2, 3, 4), max_tokens=36)
        stop = answer(asked)[0][4]
        engine.submit(Add(dataclasses.replace(asked, sampling=dataclasses.replace(
            asked.sampling, stop_token_ids=frozenset({stop}))
        )))  # fmt: skip
    engine.step()
    assert engine.load().running == 2
    events = run(engine)
    assert not preempted(events)
    assert engine.load().free_blocks == 12


@pytest.mark.parametrize("pace", [Ahead, OneByOne])
def test_the_youngest_makes_room_and_goes_on_where_it_was(pace: type[Pace]) -> None:
    engine = make_engine(num_blocks=12, block_size=BLOCK_SIZE, pace=pace())
    old, young = (request(name, (1, 2, 3, 4), max_tokens=36) for name in ("old", "young"))
    engine.submit(Add(old))
    engine.step()
    engine.submit(Add(young))
    events = run(engine)
    assert preempted(events) == ["young"]
    assert output_of(events, "old") == answer(old)[0]
    so_far = tuple(
        token
        for event in events
        if isinstance(event, TokenDelta) and event.id == young.id
        for token in event.tokens
    )
    assert so_far == answer(young)[0][: len(so_far)]
    again = dataclasses.replace(young, id=SequenceId(AttemptId("young", 1), 0), output=so_far)
    engine.submit(Add(again))
    deltas = [e for e in run(engine) if isinstance(e, TokenDelta)]
    assert so_far + tuple(t for d in deltas for t in d.tokens) == answer(young)[0]
    assert engine.load().free_blocks == 12


def test_the_least_important_makes_room_whoever_came_first() -> None:
    engine = make_engine(num_blocks=12, block_size=BLOCK_SIZE)
    for name, priority in (("backfill", 5), ("chat", 0)):
        asked = request(name, (1, 2, 3, 4), max_tokens=36)
        engine.submit(Add(dataclasses.replace(asked, priority=priority)))
        engine.step()
    events = run(engine)
    assert preempted(events) == ["backfill"]
    assert output_of(events, "chat") == answer(request("chat", (1, 2, 3, 4), max_tokens=36))[0]


def test_one_that_imports_makes_room_too_and_its_writes_are_answered() -> None:
    engine = make_engine(num_blocks=10, block_size=BLOCK_SIZE, pace=OneByOne())
    old = request("old", (1, 2, 3, 4), max_tokens=36)
    late = request("late", tuple(range(16)), Role.DECODE, b"t", max_tokens=4)
    engine.submit(Add(old))
    run_until(engine, Admitted)
    engine.submit(Add(late))
    events = run_until(engine, Admitted)
    while not preempted(events):
        events += engine.step().events
    engine.submit(WriteKV(7, late.id, 0, 4, kv_of((0, 1, 2, 3))))
    engine.submit(BeginDecode(late.id, 5))
    events += run(engine)
    assert preempted(events) == ["late"]
    assert KVWritten(7, ok=False) in events
    assert output_of(events, "old") == answer(old)[0]


def test_one_alone_may_have_all_blocks_and_no_more_is_refused_at_once() -> None:
    engine = make_engine(num_blocks=6, block_size=BLOCK_SIZE)
    engine.submit(Add(request("fits", (1,), max_tokens=24)))
    engine.submit(Add(request("never", (1,), max_tokens=25)))
    events = run(engine)
    (failure,) = [e for e in events if isinstance(e, Failure)]
    assert (failure.attempt.request_id, failure.code) == ("never", FailureCode.INVALID)
    assert len(output_of(events, "fits")) == 24


class Retrying:
    """Requests on one engine; one that is preempted is asked again, with its tokens so far."""

    def __init__(self, engine: Engine, requests: Sequence[SequenceRequest]) -> None:
        self.engine = engine
        self.asked = {request.id.attempt.request_id: request for request in requests}
        self.output = dict.fromkeys(self.asked, ())
        self.attempts = dict.fromkeys(self.asked, 0)
        self.running: list[str] = []  # the oldest first
        self.done: set[str] = set()
        self.preemptions = 0
        for each in requests:
            engine.submit(Add(each))

    def run(self, steps: int) -> None:
        """Until all have ended.

        Raises:
            AssertionError: not within so many steps; or the oldest was preempted.
        """
        for _ in range(steps):
            for event in self.engine.step().events:
                self.take(event)
            self.engine.check_invariants()
            if len(self.done) == len(self.asked):
                return
        raise AssertionError(f"{len(self.asked) - len(self.done)} have not ended")

    def take(self, event: Event) -> None:
        match event:
            case Admitted(id):
                self.running.append(id.attempt.request_id)
            case TokenDelta(id):
                name = id.attempt.request_id
                assert event.index == len(self.output[name])
                self.output[name] += event.tokens
                if event.finish is not None:
                    self.running.remove(name)
                    self.done.add(name)
            case Failure((name, _), code):
                assert code is FailureCode.PREEMPTED
                by_importance = sorted(self.running, key=lambda each: self.asked[each].priority)
                assert name != by_importance[0], "the oldest of the most important is preempted"
                assert name == by_importance[-1], "not the youngest of the least important"
                self.running.remove(name)
                self.preemptions += 1
                self.attempts[name] += 1
                again = SequenceId(AttemptId(name, self.attempts[name]), 0)
                asked = self.asked[name]
                self.engine.submit(Add(dataclasses.replace(
                    asked, id=again, output=self.output[name]
                )))  # fmt: skip


jobs = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 20), st.integers(0, 2)), min_size=1, max_size=8
)
"""Tokens of the prompt, most tokens of the answer, priority."""


@settings(max_examples=150, deadline=None)
@given(
    jobs=jobs,
    blocks=st.integers(8, 14),
    pace=st.sampled_from([Ahead, OneByOne]),
    hit_tokens=st.sampled_from([None, BLOCK_SIZE]),
    interleave=st.booleans(),
)
def test_all_come_to_their_end_and_the_first_of_them_is_never_preempted(
    jobs: list[tuple[int, int, int]],
    blocks: int,
    pace: type[Pace],
    hit_tokens: int | None,
    interleave: bool,
) -> None:
    engine = make_engine(
        blocks, BLOCK_SIZE, pace=pace(), hit_tokens=hit_tokens, interleave_prefills=interleave,
        max_batch_tokens=12, max_model_len=32,
    )  # fmt: skip
    requests = [
        dataclasses.replace(
            request(str(n), tuple((n + 3 * i) % 90 for i in range(length)), max_tokens=most),
            priority=priority,
        )
        for n, (length, most, priority) in enumerate(jobs)
    ]
    retrying = Retrying(engine, requests)
    retrying.run(steps=120 * len(jobs))
    for each in requests:
        wanted, _ = answer(each, max_model_len=32)
        assert retrying.output[each.id.attempt.request_id] == wanted


def test_the_property_meets_preemptions() -> None:
    """Or it would prove nothing."""
    engine = make_engine(8, BLOCK_SIZE, max_model_len=32)
    requests = [request(str(n), (n, 1, 2), COLOCATED, max_tokens=20) for n in range(4)]
    retrying = Retrying(engine, requests)
    retrying.run(steps=400)
    assert retrying.preemptions >= 3
    assert LIMITS["max_seqs"] == 4
