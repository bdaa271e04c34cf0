"""Attempts of several choices: they come and go together, and the oldest attempt ends."""

from __future__ import annotations

import pytest

from engine.engine import Engine
from engine.events import Add, Event
from engine.pace import Pace
from engine.types import Failure, FailureCode
from tests.engine.helpers import Ahead, OneByOne, deltas_of, expected, make_engine, request, run

BLOCK_SIZE = 4
GROUP = b"g" * 16


def add(engine: Engine, name: str, prompt: tuple[int, ...], choices: int, **more: object) -> None:
    for choice in range(choices):
        engine.submit(Add(request(name, prompt, choice=choice, **more)))  # type: ignore[arg-type]


def tokens_of(events: list[Event], name: str, choice: int) -> tuple[int, ...]:
    return tuple(t for delta in deltas_of(events, name, choice) for t in delta.tokens)


def failures(events: list[Event]) -> list[tuple[str, FailureCode]]:
    return [(e.attempt.request_id, e.code) for e in events if isinstance(e, Failure)]


@pytest.mark.parametrize("pace", [Ahead, OneByOne])
def test_a_preempted_attempt_leaves_no_choice_in_the_step(pace: type[Pace]) -> None:
    """The first of its choices has had its block for the step when the second finds none."""
    engine = make_engine(7, BLOCK_SIZE, pace=pace())
    add(engine, "old", (1,), 1, max_tokens=24)
    events = [*engine.step().events]
    add(engine, "young", (5, 6, 7, 8), 2, max_tokens=8)
    events += run(engine)
    assert failures(events) == [("young", FailureCode.PREEMPTED)]
    assert tokens_of(events, "old", 0) == expected((1,), 24)
    for choice in range(2):
        so_far = tokens_of(events, "young", choice)
        assert so_far == expected((5, 6, 7, 8), len(so_far))
    assert engine.load().free_blocks == 7


@pytest.mark.parametrize("pace", [Ahead, OneByOne])
def test_the_oldest_attempt_comes_to_its_end_with_all_its_choices(pace: type[Pace]) -> None:
    """Others were admitted between its first choice and its last."""
    engine = make_engine(10, BLOCK_SIZE, pace=pace())
    prompt = (1, 2, 3, 4)
    add(engine, "old", prompt, 1, max_tokens=16)
    events = [*engine.step().events]
    add(engine, "young", (5, 6, 7, 8), 1, max_tokens=30)
    events += engine.step().events
    engine.submit(Add(request("old", prompt, choice=1, max_tokens=16)))
    events += run(engine)
    assert failures(events) == [("young", FailureCode.PREEMPTED)]
    assert [tokens_of(events, "old", choice) for choice in (0, 1)] == [expected(prompt, 16)] * 2


@pytest.mark.parametrize("group", [b"", GROUP])
def test_the_choices_of_an_attempt_must_fit_together(group: bytes) -> None:
    """Of 4 blocks each, the prompt's two are shared by those of a group."""
    blocks = 8 if group else 12
    prompt = tuple(range(8))
    for more in (0, 1):
        engine = make_engine(blocks, BLOCK_SIZE)
        add(engine, "a", prompt, 3, group=group, max_tokens=9 + more)
        events = run(engine)
        if more:
            assert failures(events) == [("a", FailureCode.INVALID)]
            assert engine.load().running == engine.load().waiting == 0
        else:
            assert not failures(events)
            for choice in range(3):
                assert tokens_of(events, "a", choice) == expected(prompt, 9)
